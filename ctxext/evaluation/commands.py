"""The command line of evaluations: `ctxext eval`, `ctxext compare`, `ctxext report` and `ctxext sweep`.

Every evaluation becomes a command whose options are the fields of its dataclass. The plugins are looked for only when
`ctxext eval` is used, so that nothing else waits for them.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from typer.core import TyperGroup

from ctxext.evaluation import registry
from ctxext.evaluation.base import Evaluation, build, option_types

ALLOWED_TYPES = (int, float, str, bool)

# The options that every evaluation shares: type, default, help.
RUN_OPTIONS: Mapping[str, tuple[Any, Any, str]] = {
    "dtype": (str, "auto", "of the weights: auto (the checkpoint's), float32, bfloat16, float16"),
    "device": (str, "auto", "auto, cpu, cuda, cuda:1, mps, ..."),
    "device_map": (str | None, None, "accelerate's placement over several devices, for instance auto"),
    "attn": (str, "sdpa", "attention backend: sdpa, eager, flash_attention_2, flex_attention, ..."),
    "load_in_4bit": (bool, False, "quantize the weights to NF4 with bitsandbytes"),
    "adapter": (str | None, None, "a peft adapter's folder or Hub id, applied on top"),
    "trust_remote_code": (bool, False, "allow the checkpoint to bring its own Python code"),
    "batch_size": (int, 4, "sequences read at once"),
}


class EvaluationGroup(TyperGroup):
    """`ctxext eval`: `list`, and one command for each installed evaluation, built when it is asked for."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names to show in the help."""
        return [*self.commands, *registry.available()]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the command `cmd_name`; a `ValueError` names the nearest if there is none."""
        if cmd_name in self.commands:
            return super().get_command(ctx, cmd_name)
        return evaluation_command(registry.load(cmd_name))


eval_app = typer.Typer(
    cls=EvaluationGroup,
    help="Evaluate a checkpoint by an installed evaluation, or by your own as path/to/file.py:ClassName.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


def _plain_type(name: str, kind: type[Evaluation], hint: Any) -> Any:
    """Return the type of an option without its None; the command line can read only plain types."""
    parts = [part for part in get_args(hint) if part is not type(None)] or [hint]
    if len(parts) != 1 or parts[0] not in ALLOWED_TYPES:
        names = ", ".join(allowed.__name__ for allowed in ALLOWED_TYPES)
        raise ValueError(f"option {name!r} of the evaluation {kind.name!r} has type {hint}; allowed: {names}, or None")
    return parts[0]


def _flag(name: str, plain: Any) -> str:
    dashed = name.replace("_", "-")
    return f"--{dashed}/--no-{dashed}" if plain is bool else f"--{dashed}"


def _own_parameters(kind: type[Evaluation]) -> list[inspect.Parameter]:
    """Return a command-line parameter for every option of an evaluation; None means that it was not given."""
    parameters = []
    types = option_types(kind)
    for item in dataclasses.fields(kind):
        plain = _plain_type(item.name, kind, types[item.name])
        # The parser's own default is None, so that an option that was given can be told from one that was not.
        default = "" if item.default in (None, "") or plain is bool else f"  [default: {item.default}]"
        text = f"{item.metadata.get('help', '')}{default}"
        declared = typer.Option(_flag(item.name, plain), help=text, show_default=False)
        parameters.append(_parameter(item.name, plain | None, declared, None))
    return parameters


def _run_parameters() -> list[inspect.Parameter]:
    parameters = []
    for name, (hint, default, text) in RUN_OPTIONS.items():
        declared = typer.Option(f"--{name.replace('_', '-')}", help=text)
        parameters.append(_parameter(name, hint, declared, default))
    return parameters


def _parameter(name: str, hint: Any, declared: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[hint, declared]
    )


def evaluation_command(kind: type[Evaluation]) -> Any:
    """Return the command of an evaluation, its options taken from its fields.

    Raises:
        ValueError: if an option's type cannot be given on a command line, or its name is taken by the runner.
    """
    own = {item.name for item in dataclasses.fields(kind)}
    taken = {"checkpoint", "protocol", "output", "as_json", "json", *RUN_OPTIONS} & own
    if taken:
        raise ValueError(
            f"the evaluation {kind.name!r} must not call an option {', '.join(sorted(taken))}: it is taken"
        )

    def command(**given: Any) -> None:
        from ctxext.evaluation.loading import RunSettings

        options = {name: value for name, value in given.items() if name in own and value is not None}
        evaluation = build(kind, options, given["protocol"])
        settings = RunSettings(**{name: given[name] for name in RUN_OPTIONS})
        _run(evaluation, given["checkpoint"], settings, given["output"], given["as_json"])

    presets = ", ".join(kind.presets) or "none"
    parameters = [
        _parameter(
            "checkpoint", str, typer.Argument(help="a folder, a GGUF file or a Hub id"), inspect.Parameter.empty
        ),
        *_own_parameters(kind),
        _parameter("protocol", str | None, typer.Option("--protocol", help=f"a named protocol: {presets}"), None),
        *_run_parameters(),
        _parameter("output", Path | None, typer.Option("--output", help="result file [default: in runs/]"), None),
        _parameter("as_json", bool, typer.Option("--json", help="print the result as JSON"), False),
    ]
    return _build_command(kind.name, kind.description, command, parameters)


def _build_command(name: str, text: str, run: Callable[..., None], parameters: list[inspect.Parameter]) -> Any:
    """Return a typer command for `run` with `parameters` as its signature."""
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command(name, help=text)(run)
    return typer.main.get_command(app)


def _run(evaluation: Evaluation, checkpoint: str, settings: Any, output: Path | None, as_json: bool) -> None:
    from ctxext.cli import emit
    from ctxext.evaluation.processes import join_processes
    from ctxext.evaluation.render import result_text
    from ctxext.evaluation.runner import run_evaluation

    result, path = run_evaluation(evaluation, checkpoint, settings, output)
    if join_processes().main:
        emit(result.to_json(), as_json, lambda _: result_text(result, path))


@eval_app.command("list", help="List the installed evaluations.")
def list_evaluations(
    as_json: Annotated[bool, typer.Option("--json", help="print the list as JSON")] = False,
) -> None:
    """Print every installed evaluation with its description and protocols."""
    from ctxext.cli import emit

    kinds = [registry.load(name) for name in registry.available()]
    answer = [
        {
            "name": kind.name,
            "description": kind.description,
            "protocols": sorted(kind.presets),
            "version": kind.version,
        }
        for kind in kinds
    ]
    lines = [f"{item['name']:<16} {item['description']}" for item in answer]
    emit(answer, as_json, lambda _: "\n".join(lines))


def compare(
    results: Annotated[list[Path], typer.Argument(help="result files of `ctxext eval`; the first is the reference")],
    no_worse_than: Annotated[
        str | None,
        typer.Option("--no-worse-than", help="such as 2%: judge each against the first; exit 1 unless all hold"),
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", help="folder for the pictures (PNG)")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the comparison as JSON")] = False,
) -> None:
    """Print results side by side, with paired differences to the first; what cannot be compared is marked."""
    from ctxext.cli import emit
    from ctxext.evaluation.compare import compare_results
    from ctxext.evaluation.render import comparison_text
    from ctxext.evaluation.verdict import parse_percentage

    limit = None if no_worse_than is None else parse_percentage(no_worse_than)
    comparison = compare_results(results, output, limit)
    emit(comparison, as_json, comparison_text)
    if limit is not None and not comparison["check"]["holds"]:
        raise typer.Exit(1)


def report(
    results: Annotated[
        list[Path], typer.Argument(help="result files of `ctxext eval`; the first's checkpoint is the reference")
    ],
    output: Annotated[Path, typer.Option("--output", help="the HTML file")] = Path("report.html"),
    title: Annotated[str, typer.Option("--title", help="of the report")] = "Context window evaluation",
    as_json: Annotated[bool, typer.Option("--json", help="print the groups' comparisons as JSON")] = False,
) -> None:
    """Write one HTML file that needs nothing else: tables, curves and intervals, grouped by comparable protocol."""
    from ctxext.cli import emit
    from ctxext.evaluation.render import report_text
    from ctxext.evaluation.report import write_report

    emit(write_report(results, output, title), as_json, report_text)


def sweep(
    source: Annotated[str, typer.Argument(help="a folder, a GGUF file or a Hub id")],
    length: Annotated[int, typer.Option("--length", help="the wanted context length in tokens")],
    data: Annotated[str, typer.Option("--data", help="a corpus by name, or a path")] = "sympy-source",
    documents: Annotated[int, typer.Option("--documents", help="sequences of that length to read")] = 2,
    methods: Annotated[
        str | None, typer.Option("--methods", help="only these, comma-separated [default: every native method]")
    ] = None,
    dtype: Annotated[str, typer.Option("--dtype", help=RUN_OPTIONS["dtype"][2])] = "auto",
    device: Annotated[str, typer.Option("--device", help=RUN_OPTIONS["device"][2])] = "auto",
    attn: Annotated[str, typer.Option("--attn", help=RUN_OPTIONS["attn"][2])] = "sdpa",
    output: Annotated[Path | None, typer.Option("--output", help="also write the ranking to this JSON file")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the ranking as JSON")] = False,
) -> None:
    """Try every native method at the wanted length, before any training, and rank them."""
    from ctxext.cli import emit
    from ctxext.evaluation.loading import RunSettings
    from ctxext.evaluation.render import sweep_text
    from ctxext.evaluation.sweep import run_sweep

    names = [name.strip() for name in methods.split(",")] if methods else None
    settings = RunSettings(dtype=dtype, device=device, attn=attn)
    ranking = run_sweep(
        source, length, data=data, documents=documents, methods=names, settings=settings, output=output
    )
    emit(ranking, as_json, sweep_text)
