"""The command line of searches: `ctxext search longrope`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from ctxext.evaluation.commands import RUN_OPTIONS

search_app = typer.Typer(
    name="search", help="Search the options of a method.", no_args_is_help=True, rich_markup_mode=None
)


@search_app.callback()
def root() -> None:
    """Search the options of a method for a checkpoint."""


@search_app.command("longrope")
def longrope(
    checkpoint: Annotated[str, typer.Argument(help="A checkpoint that no method has extended.")],
    length: Annotated[int, typer.Option(help="Tokens that the model shall read.")],
    output: Annotated[Path, typer.Option(help="Folder of this search; an interrupted one goes on there.")],
    data: Annotated[str, typer.Option(help="A corpus by name, or a path.")] = "sympy-source",
    documents: Annotated[int, typer.Option(help="Sequences that each candidate reads.")] = 5,
    held_out: Annotated[int, typer.Option(help="Further sequences for the comparison at the end.")] = 16,
    budget: Annotated[int, typer.Option(help="Forward passes for the long factors, one for each sequence.")] = 2000,
    short_budget: Annotated[int, typer.Option(help="Those for short factors; 0 keeps them at 1.")] = 0,
    unscaled: Annotated[
        str,
        typer.Option(help="Choices of first tokens left unscaled, such as 0,1,2,4,8; a checkpoint can say 0 only."),
    ] = "0",
    population: Annotated[int, typer.Option(help="Candidates of the first generation.")] = 64,
    iterations: Annotated[int, typer.Option(help="Generations after it.")] = 40,
    mutations: Annotated[int, typer.Option(help="Children by mutation in each.")] = 16,
    crossovers: Annotated[int, typer.Option(help="Children by crossover in each.")] = 16,
    parents: Annotated[int, typer.Option(help="Best candidates that children are made from.")] = 32,
    seed: Annotated[int, typer.Option(help="Of the search.")] = 0,
    dtype: Annotated[str, typer.Option(help=RUN_OPTIONS["dtype"][2])] = "auto",
    device: Annotated[str, typer.Option(help=RUN_OPTIONS["device"][2])] = "auto",
    attn: Annotated[str, typer.Option(help=RUN_OPTIONS["attn"][2])] = "sdpa",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")] = False,
) -> None:
    """Search LongRoPE's factors by evolution; also under `accelerate launch`, with the same result."""
    from ctxext.analysis.longrope_operators import Evolution
    from ctxext.analysis.longrope_search import SearchOptions, run_search
    from ctxext.cli import emit
    from ctxext.evaluation.loading import RunSettings

    try:
        choices = tuple(sorted({int(word) for word in unscaled.split(",")}))
    except ValueError as error:
        raise ValueError(f"--unscaled {unscaled!r} must be whole numbers, such as 0,1,2,4,8") from error
    how = Evolution(
        population=population,
        iterations=iterations,
        mutations=mutations,
        crossovers=crossovers,
        parents=parents,
        seed=seed,
    )
    options = SearchOptions(
        length=length,
        data=data,
        documents=documents,
        held_out=held_out,
        budget=budget,
        short_budget=short_budget,
        unscaled=choices,
        how=how,
    )
    answer = run_search(checkpoint, output, options, RunSettings(dtype=dtype, device=device, attn=attn))
    if answer is not None:
        folder = {"source": checkpoint, "folder": str(output)}
        emit({**answer, **folder}, as_json, search_text)


def search_text(answer: Mapping[str, Any]) -> str:
    """Return the result of a search as text: the losses, what was gained, and the command that patches."""
    from ctxext.evaluation.render import table

    rows = [
        [name, *(losses[kind]["loss"] for kind in ("search", "held_out", "held_out_window"))]
        for name, losses in answer["methods"].items()
    ]
    headers = ["method", "search documents", "held out", f"held out, {answer['original_window']} tokens"]
    lines = [
        f"{answer['checkpoint']} at {answer['length']} tokens: {answer['forward_passes']} forward passes, "
        "loss in nats per token, no training",
        table(headers, rows),
    ]
    for title, key in ((f"at {answer['length']} tokens", "at_length"), ("in the window", "inside_window")):
        lines += [f"{title}, held out: {_difference_text(row)}" for row in answer[key]]
    best = answer["best_with_unscaled"]
    if best["unscaled"]:
        lines.append(
            f"with the first {best['unscaled']} tokens unscaled the search documents' loss is "
            f"{best['lost_without']:.4f} lower; no loader can express that, so the factors are the best without"
        )
    if not answer["short_searched"]:
        lines.append("short factors are 1: the original frequencies up to the window (--short-budget searches them)")
    folder = answer["folder"]
    lines.append(
        f"patch: ctxext patch {answer['source']} OUTPUT --method longrope --length {answer['length']} "
        f"--long-factor {folder}/long_factor.json --short-factor {folder}/short_factor.json"
    )
    return "\n".join(lines)


def _difference_text(row: Mapping[str, Any]) -> str:
    from ctxext.evaluation.paired import FEWEST_ITEMS

    low, high = row["interval"]
    enough = row["documents"] >= FEWEST_ITEMS
    verdict = "better than" if high < 0 and enough else "worse than" if low > 0 and enough else "not told apart from"
    return (
        f"searched longrope is {verdict} {row['against']}: {row['difference']:+.4f} "
        f"(95% of {row['documents']} documents: {low:+.4f} to {high:+.4f})"
    )
