"""The commands around training: `ctxext data prepare`, `ctxext recipe list|copy` and `ctxext merge`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

data_app = typer.Typer(help="Prepare training data.", no_args_is_help=True, rich_markup_mode=None)
recipe_app = typer.Typer(
    help="The training recipes that come with ctxext.", no_args_is_help=True, rich_markup_mode=None
)
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]


@data_app.callback()
def _data() -> None:
    """Prepare training data."""


@data_app.command("prepare", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def prepare(
    context: typer.Context,
    config: Annotated[Path, typer.Option(help="A recipe's config; what follows overrides its keys, as in training.")],
    as_json: Json = False,
) -> None:
    """Read and tokenize a recipe's sources into the cache, so that training starts at once."""
    from ctxext.cli import emit
    from ctxext.training.prepare import prepare_data

    emit(prepare_data(config, context.args), as_json, _render_sources)


def _render_sources(answer: dict[str, Any]) -> str:
    lines = []
    for source in answer["sources"]:
        left_out = "".join(f", {count} {reason.replace('_', ' ')}" for reason, count in source["skipped"].items())
        lines.append(
            f"{source['data']}: {source['documents']} documents, {source['tokens']} tokens, the longest "
            f"{source['longest']}{left_out}; in {source['folder']}"
        )
    return "\n".join(lines)


@recipe_app.command("list")
def list_recipes(as_json: Json = False) -> None:
    """Name the configs and the launcher's, with what each is."""
    from ctxext.cli import emit
    from ctxext.training.recipe_files import recipe_files

    emit(recipe_files(), as_json, lambda rows: "\n".join(f"{row['name']:45} {row['what']}" for row in rows))


@recipe_app.command("copy")
def copy_recipe(
    name: Annotated[str, typer.Argument(help="A name of `ctxext recipe list`.")],
    output: Annotated[Path, typer.Argument(help="The file or folder to copy it to.")] = Path("."),
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
    as_json: Json = False,
) -> None:
    """Copy a recipe or a config, to be changed and run."""
    from ctxext.cli import emit
    from ctxext.training.recipe_files import copy_file

    emit({"copied": str(copy_file(name, output, force))}, as_json, lambda answer: str(answer["copied"]))


def merge(
    adapter: Annotated[str, typer.Argument(help="The adapter's folder or Hub id.")],
    output: Annotated[Path, typer.Argument(help="The folder to make.")],
    base: Annotated[str | None, typer.Option(help="The base, if not the one that the adapter names.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an OUTPUT that is not empty.")] = False,
    as_json: Json = False,
) -> None:
    """Merge an adapter into its base, patched as the adapter was trained: an ordinary checkpoint."""
    from ctxext.cli import emit
    from ctxext.training.adapters import merge_adapter

    answer = {"adapter": adapter, "output": str(merge_adapter(adapter, output, base=base, force=force))}
    emit(answer, as_json, lambda made: f"merged {made['adapter']} into {made['output']}")
