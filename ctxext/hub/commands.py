"""The commands that publish: `ctxext push` and `ctxext card`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

Folder = Annotated[Path, typer.Argument(help="A checkpoint's or adapter's folder.")]
Results = Annotated[list[Path] | None, typer.Option(help="Result files of `ctxext eval`, for the card.")]
More = Annotated[list[Path] | None, typer.Argument(help="More result files.", metavar="[RESULT]...")]
RecipeFile = Annotated[Path | None, typer.Option(help="The config it was trained with, if it is not beside it.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]


def push(
    output: Folder,
    repository: Annotated[str, typer.Argument(help="user/name or organization/name; made if it is not there.")],
    private: Annotated[bool, typer.Option("--private", help="Make it private.")] = False,
    revision: Annotated[str | None, typer.Option(help="The branch, made if it is not there (main).")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List what would be sent, and send nothing.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Push what `ctxext doctor` finds faulty.")] = False,
    results: Results = None,
    more_results: More = None,
    recipe: RecipeFile = None,
    message: Annotated[str | None, typer.Option(help="The commit's title.")] = None,
    card: Annotated[
        bool | None,
        typer.Option("--card/--no-card", help="Write a new README.md, or send none; one not of ctxext is kept."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Publish OUTPUT on the Hub with its model card, in one commit; exit 1 if `doctor` refuses it."""
    from ctxext.cli import emit
    from ctxext.hub.push import push as push_folder

    report = push_folder(
        output,
        repository,
        private=private,
        revision=revision,
        dry_run=dry_run,
        force=force,
        results=[*(results or []), *(more_results or [])],
        recipe=recipe,
        message=message,
        card=card,
    )
    refused = bool(report["faults"]) and not force
    emit({**report, "dry_run": dry_run, "refused": refused}, as_json, render_push)
    if refused:
        raise typer.Exit(1)


def render_push(report: dict[str, Any]) -> str:
    """Return what `ctxext push` prints."""
    sizes = [_size(file["size"]) for file in (*report["files"], *report["left_out"])]
    width = max(map(len, sizes), default=0)
    lines = [f"{_size(file['size']).rjust(width)}  {file['path']}" for file in report["files"]]
    for one in report["left_out"]:
        lines.append(f"{_size(one['size']).rjust(width)}  {one['path']}  LEFT OUT: {one['reason']}")
    lines += [f"deleted there: {path}" for path in report["deleted"]]
    lines += [f"note: {note}" for note in report["notes"]]
    for fault in report["faults"]:
        lines.append(f"{fault['level']} {fault['code']}: {fault['message']} ({fault['remedy']})")
    where = f"{report['repository']} ({report['revision']}{', private' if report['private'] else ''})"
    said = f"{len(report['files'])} files, {_size(report['bytes'])}"
    if report["refused"]:
        last = f"not pushed: mend the faults above (`ctxext doctor --fix`), or --force to push {said} to {where}"
    elif report["dry_run"]:
        last = f"would push {said} to {where}"
    elif not report["pushed"]:
        last = f"{where} has all of it already: {report['url']} is at commit {report['commit']}"
    else:
        last = f"pushed {said} to {report['url']}, commit {report['commit']}"
    return "\n".join([*lines, last])


def _size(size: int) -> str:
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size >= unit:
            return f"{size / unit:.1f} {name}"
    return f"{size} B"


def card(
    output: Folder,
    repository: Annotated[str | None, typer.Option(help="Where it will be: user/name.")] = None,
    results: Results = None,
    more_results: More = None,
    recipe: RecipeFile = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a README.md that ctxext did not make.")] = False,
    as_json: Json = False,
) -> None:
    """Write OUTPUT's model card, README.md, with its curves, from what is known of it."""
    from ctxext.cli import emit
    from ctxext.hub.card import write_card

    files = [*(results or []), *(more_results or [])]
    made = write_card(output, repo_id=repository, results=files, recipe=recipe, force=force)
    emit(made, as_json, lambda done: "\n".join([*(f"wrote {path}" for path in done["written"]), *done["notes"]]))
