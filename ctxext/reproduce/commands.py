"""The commands `ctxext reproduce ...` and `ctxext demo`."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

reproduce_app = typer.Typer(
    help="The papers' experiments, in small: claims as checks.", no_args_is_help=True, rich_markup_mode=None
)
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]
# The demo's part of the experiment, sized for five minutes on 2 cores.
DEMO_STEPS, DEMO_METHODS, DEMO_FACTOR = 100, ("direct", "linear", "yarn"), 4
DEMO_BUDGET = """\
The tiny model that ctxext ships reads {window} tokens. This patches it to {length} by {methods}, fine-tunes each
for {steps} steps, and measures perplexity and passkey retrieval before and after: about 6 minutes on 2 cores."""


@reproduce_app.callback()
def _reproduce() -> None:
    """Reproduce the papers' experiments in small."""


@reproduce_app.command("pi")
def pi_command(
    output: Annotated[Path, typer.Option(help="The folder of results and report; taken up where it stopped.")] = Path(
        "reproduce-pi"
    ),
    model: Annotated[str, typer.Option(help="The model to extend: `tiny`, a folder or a Hub id.")] = "tiny",
    methods: Annotated[str, typer.Option(help="Comma-separated; `direct` changes no frequency.")] = (
        "direct,linear,ntk,yarn"
    ),
    factors: Annotated[
        str, typer.Option(help="L' / L, comma-separated; beyond the first with one seed only.")
    ] = "4,8",
    seeds: Annotated[
        str, typer.Option(help="Of the data's order, comma-separated: a run of each method for each.")
    ] = ("0,1,2"),
    max_steps: Annotated[int, typer.Option(help="Steps of fine-tuning; 0 measures the patched models only.")] = 1000,
    other_corpus: Annotated[str, typer.Option(help="Tune linear on this too; empty for no such run.")] = (
        "python-stdlib"
    ),
    as_json: Json = False,
) -> None:
    """Position Interpolation (arXiv 2306.15595): linear, ntk, yarn and direct fine-tuning; hours on 2 cores."""
    from ctxext.cli import emit
    from ctxext.reproduce.pi import Design

    runs, (first, *others) = _numbers("seeds", seeds), _numbers("factors", factors)
    design = Design(
        methods=tuple(methods.split(",")),
        seeds=((first, runs), *((factor, runs[:1]) for factor in others)),
        steps=(*(step for step in Design.steps if step < max_steps), max_steps),
        other_corpus=other_corpus or None,
    )
    emit(_run(model, output, design, "Position Interpolation, reproduced in small"), as_json, _render)


Output = Annotated[Path, typer.Option(help="The folder of results and report; taken up where it stopped.")]
Seeds = Annotated[str, typer.Option(help="Of weights and data, comma-separated: every model once for each.")]
Steps = Annotated[int, typer.Option(help="Steps of training of each model.")]
Jobs = Annotated[int, typer.Option(help="Models trained at once; 0 is one for each core.")]


@reproduce_app.command("alibi")
def alibi_command(
    output: Output = Path("reproduce-alibi"),
    seeds: Seeds = "0,1,2",
    max_steps: Steps = 1500,
    jobs: Jobs = 0,
    as_json: Json = False,
) -> None:
    """ALiBi (arXiv 2108.12409): five small models from nothing, read to 16 times their length; hours on 2 cores."""
    from ctxext.reproduce.scratch_claims import ALIBI_CHECKS, ALIBI_MODELS

    title, protocols = "ALiBi, reproduced in small", ("nonoverlapping", "sliding")
    answer = _run_scratch(title, ALIBI_MODELS, ALIBI_CHECKS, (output, seeds, max_steps, jobs), protocols, cost=True)
    emit_report(answer, as_json)


@reproduce_app.command("sandwich")
def sandwich_command(
    output: Output = Path("reproduce-sandwich"),
    seeds: Seeds = "0,1,2",
    max_steps: Steps = 1500,
    jobs: Jobs = 0,
    as_json: Json = False,
) -> None:
    """Sandwich (arXiv 2212.10356), tables 1 to 3: 19 small models from nothing; many hours on 2 cores."""
    from ctxext.reproduce.scratch_claims import SANDWICH_CHECKS, SANDWICH_MODELS

    title = "Sandwich and the receptive field, reproduced in small"
    run = (output, seeds, max_steps, jobs)
    emit_report(_run_scratch(title, SANDWICH_MODELS, SANDWICH_CHECKS, run, ("last_token",)), as_json)


@reproduce_app.command("random-access")
def random_access_command(
    output: Output = Path("reproduce-random-access"),
    seeds: Seeds = "0,1,2",
    max_steps: Steps = 1000,
    jobs: Jobs = 0,
    as_json: Json = False,
) -> None:
    """Random-access reading (arXiv 2405.13216): 14 small models a seed, read in order; many hours on 2 cores."""
    from ctxext.reproduce.apart import cores
    from ctxext.reproduce.reading import Settings, run_all
    from ctxext.reproduce.reading_claims import check, wanted
    from ctxext.reproduce.reading_report import write_report

    _check_size(max_steps, jobs)
    settings = Settings(steps=max_steps, tuning_steps=max(1, max_steps // 4))
    results = run_all(wanted(_numbers("seeds", seeds), settings), settings, output, jobs or cores())
    emit_report(write_report(results, check(results, settings), settings, output), as_json)


@reproduce_app.command("question-answering")
def question_answering_command(
    output: Output = Path("reproduce-question-answering"),
    seeds: Seeds = "0,1,2",
    max_steps: Steps = 150,
    jobs: Jobs = 0,
    as_json: Json = False,
) -> None:
    """Skipping rates in training and inference (arXiv 2405.13216, figure 5), with a memory; an hour on 2 cores."""
    from ctxext.reproduce.apart import cores
    from ctxext.reproduce.asking import Settings, check, run_grid, write_report

    _check_size(max_steps, jobs)
    settings = Settings(steps=max_steps)
    grid = run_grid(settings, _numbers("seeds", seeds), output, jobs or cores())
    emit_report(write_report(grid, check(grid, settings), settings, output), as_json)


def _check_size(steps: int, jobs: int) -> None:
    if steps < 1 or jobs < 0:
        raise ValueError(f"--max-steps {steps} must be at least 1, and --jobs {jobs} not negative")


def _run_scratch(
    title: str,
    models: Any,
    checks: Any,
    run: tuple[Path, str, int, int],
    protocols: tuple[str, ...],
    cost: bool = False,
) -> dict[str, Any]:
    """Train, measure and report; `run` is output, seeds, steps and jobs."""
    import dataclasses

    from ctxext.reproduce.apart import cores
    from ctxext.reproduce.scratch import Settings, run_models
    from ctxext.reproduce.scratch_claims import check
    from ctxext.reproduce.scratch_cost import measure_cost
    from ctxext.reproduce.scratch_report import write_report

    output, seeds, steps, jobs = run
    _check_size(steps, jobs)
    settings = Settings(steps=steps)
    wanted = [dataclasses.replace(model, seed=seed) for seed in _numbers("seeds", seeds) for model in models]
    results = run_models(wanted, settings, output, jobs or cores())
    found = check(results, settings.window, checks, measure_cost(output) if cost else None)
    return write_report(title, results, found, settings, output, protocols)


def emit_report(answer: dict[str, Any], as_json: bool) -> None:
    """Print a report."""
    from ctxext.cli import emit

    emit(answer, as_json, _render)


def demo(
    output: Annotated[Path, typer.Option(help="The report folder.")] = Path("demo-report"),
    model: Annotated[str, typer.Option(help="tiny (the whole chain) or smollm2 (a real model, only patched).")] = (
        "tiny"
    ),
    as_json: Json = False,
) -> None:
    """Patch, fine-tune, evaluate and report, in minutes on a CPU."""
    from ctxext.cli import emit

    if model == "smollm2":
        from ctxext.reproduce.smollm2 import render_demo, run_demo

        emit(run_demo(output), as_json, render_demo)
        return
    if model != "tiny":
        raise ValueError(f"--model {model!r} is not known; allowed: tiny, smollm2")
    emit(run_tiny_demo(output), as_json, _render)


def _numbers(name: str, text: str) -> tuple[int, ...]:
    """Return the whole numbers of a comma-separated list."""
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError:
        raise ValueError(f"--{name} is {text!r}; give whole numbers with commas between, such as 0,1,2") from None


def run_tiny_demo(output: Path) -> dict[str, Any]:
    """Run the short form of `reproduce pi`; return its report."""
    from ctxext.reproduce.pi import Design

    design = Design(
        methods=DEMO_METHODS,
        seeds=((DEMO_FACTOR, (0,)),),
        steps=(0, DEMO_STEPS),
        other_corpus=None,
        documents=4,
        depths=8,
        trials=5,
    )
    return _run("tiny", output, design, "The tiny model beyond its window", DEMO_BUDGET)


@reproduce_app.command("swap")
def swap_command(
    output: Output = Path("reproduce-swap"),
    model: Annotated[str, typer.Option(help="The pretrained model: `tiny`, a folder or a Hub id.")] = "tiny",
    methods: Annotated[str, typer.Option(help="Comma-separated biases; windowed sees half the window.")] = (
        "alibi,sandwich,smoothed_sandwich,windowed,kerple_log,kerple_power,t5"
    ),
    seeds: Annotated[str, typer.Option(help="Of the data's order, comma-separated.")] = "0",
    max_steps: Annotated[int, typer.Option(help="Steps of fine-tuning.")] = 1000,
    as_json: Json = False,
) -> None:
    """Swap attention biases into a pretrained model and tune it, beside linear at equal cost; hours on 2 cores."""
    from ctxext.checkpoint.files import read_json
    from ctxext.checkpoint.source import resolve_checkpoint
    from ctxext.reproduce.pi import Design
    from ctxext.reproduce.swap_claims import RIVAL, check_swaps

    window = int(read_json(resolve_checkpoint(model) / "config.json").get("max_position_embeddings", 2))
    design = Design(
        methods=(RIVAL, *methods.split(",")),
        seeds=((4, _numbers("seeds", seeds)),),
        steps=(*(step for step in Design.steps if step < max_steps), max_steps),
        other_corpus=None,
        options=(("windowed", (("window", max(1, window // 2)),)),),
    )
    title = "Attention biases swapped into a pretrained model"
    emit_report(_run(model, output, design, title, check=check_swaps), as_json)


def _run(model: str, output: Path, design: Any, title: str, budget: str = "", check: Any = None) -> dict[str, Any]:
    from ctxext.reproduce.pi import Experiment
    from ctxext.reproduce.pi_report import write_report

    start = time.perf_counter()
    experiment = Experiment(model, output, design)
    if budget:
        words = {"window": experiment.window, "length": DEMO_FACTOR * experiment.window, "steps": DEMO_STEPS}
        print(budget.format(methods=", ".join(design.methods), **words), file=sys.stderr, flush=True)
    measured = experiment.measure()
    chosen = {} if check is None else {"check": check}
    return write_report(measured, title, output, time.perf_counter() - start, design.bf16, **chosen)


def _render(answer: dict[str, Any]) -> str:
    text = Path(answer["report"]).read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if not line.startswith("![")]
    return "\n".join([*lines, f"report: {answer['report']}", *(f"picture: {path}" for path in answer["pictures"])])
