"""The `ctxext` command: every command is a thin call into the library, and heavy imports stay inside it.

Exit codes: 0 fine, 1 the answer is no (doctor found faults), 2 the call is wrong. With `--json` the answer is one
JSON document on stdout; logs, progress bars and errors go to stderr.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer

from ctxext.analysis.commands import analyze_app
from ctxext.analysis.search_command import search_app
from ctxext.checkpoint.method_flags import (
    AttentionFactor,
    BetaFast,
    BetaSlow,
    Factors,
    HighFreqFactor,
    LowFreqFactor,
    PluginOptions,
    RopeTheta,
    Truncate,
)
from ctxext.evaluation.commands import compare, eval_app, report, sweep
from ctxext.hub.commands import card, push
from ctxext.reading.commands import read
from ctxext.reproduce.commands import demo, reproduce_app
from ctxext.training.commands import data_app, merge, recipe_app

app = typer.Typer(
    name="ctxext",
    help="Extend the context window of pretrained RoPE language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _show_version(asked: bool) -> None:
    if asked:
        from ctxext import __version__

        print(f"ctxext {__version__}")
        raise typer.Exit()


@app.callback()
def root(
    version: Annotated[bool, typer.Option("--version", callback=_show_version, help="Print the version.")] = False,
) -> None:
    """Extend the context window of pretrained RoPE language models."""


_answers: TextIO | None = None  # where answers go when stdout is closed to everything else; None is stdout


def emit(answer: Any, as_json: bool, render: Callable[[Any], str]) -> None:
    """Print `answer` on stdout: one JSON document with `as_json`, else the text that `render` makes of it."""
    print(json.dumps(answer, indent=2) if as_json else render(answer), file=_answers)


Source = Annotated[str, typer.Argument(help="A checkpoint folder, a .gguf file, or a Hub id (org/name[@revision]).")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]


@app.command("patch")
def patch_command(
    source: Source,
    output: Annotated[Path, typer.Argument(help="The folder to make.")],
    method: Annotated[
        str,
        typer.Option(
            help="linear (pi), theta, ntk, dynamic, ntk_by_parts, yarn, longrope, llama3 or a plugin's; or a bias: "
            "alibi, sandwich, smoothed_sandwich, windowed, kerple_log, kerple_power, t5."
        ),
    ],
    length: Annotated[int, typer.Option(help="Tokens that the model shall read.")],
    original_length: Annotated[int | None, typer.Option(help="The pretrained window, if ambiguous.")] = None,
    link: Annotated[str, typer.Option(help="How weights get there: copy (or reflink), hard, symlink.")] = "copy",
    force: Annotated[bool, typer.Option("--force", help="Replace an OUTPUT that is not empty.")] = False,
    verify: Annotated[bool, typer.Option(help="Build the result in stock transformers, without weights.")] = True,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the config diff and write nothing.")] = False,
    allow_sliding_window: Annotated[
        bool, typer.Option("--allow-sliding-window", help="Go on although every layer slides over less than LENGTH.")
    ] = False,
    rope_theta: RopeTheta = None,
    attention_factor: AttentionFactor = None,
    beta_fast: BetaFast = None,
    beta_slow: BetaSlow = None,
    truncate: Truncate = None,
    long_factor: Factors = None,
    short_factor: Factors = None,
    low_freq_factor: LowFreqFactor = None,
    high_freq_factor: HighFreqFactor = None,
    keep_rotary: Annotated[
        bool | None, typer.Option("--keep-rotary", help="Biases: add the bias to the rotary embedding (replaces it).")
    ] = None,
    slope_shift: Annotated[float | None, typer.Option(help="alibi: Delta of slopes 2^-(h + Delta) (0).")] = None,
    shared_exponent: Annotated[float | None, typer.Option(help="alibi: one h for all heads.")] = None,
    dimension: Annotated[int | None, typer.Option(help="sandwich: of the sinusoids (128).")] = None,
    base: Annotated[float | None, typer.Option(help="sandwich: of the sinusoids (10000).")] = None,
    log_slope: Annotated[float | None, typer.Option(help="smoothed_sandwich: at h = 8 (0.825).")] = None,
    offset: Annotated[float | None, typer.Option(help="smoothed_sandwich: at h = 8 (0.8).")] = None,
    fit_points: Annotated[
        int | None, typer.Option(help="smoothed_sandwich: fit to this many distances; the paper's footnote has 50.")
    ] = None,
    window: Annotated[int | None, typer.Option(help="windowed: tokens that a query sees.")] = None,
    with_alibi: Annotated[bool | None, typer.Option("--with-alibi", help="windowed: ALiBi within the window.")] = None,
    num_buckets: Annotated[int | None, typer.Option(help="t5: buckets of a head (32).")] = None,
    max_distance: Annotated[int | None, typer.Option(help="t5: where the last bucket starts (128).")] = None,
    option: PluginOptions = None,
    as_json: Json = False,
) -> None:
    """Write a checkpoint that reads LENGTH tokens: a new config beside the same weights, and a bias's code."""
    from ctxext.checkpoint.options import parse_factors, parse_options
    from ctxext.checkpoint.patch import patch_checkpoint
    from ctxext.checkpoint.render import render_patch

    report = patch_checkpoint(
        source,
        output,
        method=method,
        length=length,
        original_length=original_length,
        link=link,
        force=force,
        verify=verify,
        dry_run=dry_run,
        allow_sliding_window=allow_sliding_window,
        rope_theta=rope_theta,
        attention_factor=attention_factor,
        beta_fast=beta_fast,
        beta_slow=beta_slow,
        truncate=truncate,
        long_factor=parse_factors("long_factor", long_factor),
        short_factor=parse_factors("short_factor", short_factor),
        low_freq_factor=low_freq_factor,
        high_freq_factor=high_freq_factor,
        keep_rotary=keep_rotary,
        slope_shift=slope_shift,
        shared_exponent=shared_exponent,
        dimension=dimension,
        base=base,
        log_slope=log_slope,
        offset=offset,
        fit_points=fit_points,
        window=window,
        with_alibi=with_alibi,
        num_buckets=num_buckets,
        max_distance=max_distance,
        **parse_options(option or []),
    )
    emit(report, as_json, render_patch)


@app.command("inspect")
def inspect_command(checkpoint: Source, as_json: Json = False) -> None:
    """Say what CHECKPOINT is: method, lengths, wavelengths, and what each loader will read."""
    from ctxext.checkpoint.inspect import inspect_checkpoint
    from ctxext.checkpoint.render import render_inspect

    emit(inspect_checkpoint(checkpoint), as_json, render_inspect)


@app.command("doctor")
def doctor_command(
    checkpoint: Source,
    fix: Annotated[bool, typer.Option("--fix", help="Repair what has one right answer; old files are kept.")] = False,
    verify: Annotated[bool, typer.Option(help="Build the model in stock transformers, without weights.")] = True,
    as_json: Json = False,
) -> None:
    """Find what is wrong with CHECKPOINT, one line for each fault; exit 1 if there is any but notices."""
    from ctxext.checkpoint.doctor import doctor
    from ctxext.checkpoint.render import render_doctor

    answer = doctor(checkpoint, fix=fix, verify=verify)
    emit(answer, as_json, render_doctor)
    if not answer["healthy"]:
        raise typer.Exit(1)


app.add_typer(eval_app, name="eval")
app.command("compare")(compare)
app.command("report")(report)
app.command("sweep")(sweep)
app.command("read")(read)
app.add_typer(analyze_app, name="analyze")
app.add_typer(search_app, name="search")
app.add_typer(data_app, name="data")
app.add_typer(recipe_app, name="recipe")
app.command("merge")(merge)
app.command("push")(push)
app.command("card")(card)


app.add_typer(reproduce_app, name="reproduce")
app.command("demo")(demo)


@app.command("plan")
def plan_command(
    checkpoint: Annotated[str, typer.Argument(help="A local checkpoint folder; only config and headers are read.")],
    length: Annotated[int, typer.Option(help="Tokens of a sequence.")],
    gpus: Annotated[int, typer.Option(help="Devices, each reading --batch sequences.")] = 1,
    memory: Annotated[str, typer.Option(help="Of one device, such as 80GB or 80GiB.")] = "80GB",
    method: Annotated[str | None, typer.Option(help="full, lora or qlora; all three if left out.")] = None,
    batch: Annotated[int, typer.Option(help="Sequences that a device reads at once.")] = 1,
    device: Annotated[str, typer.Option(help="cuda or cpu.")] = "cuda",
    as_json: Json = False,
) -> None:
    """Predict the peak memory of fine-tuning for every setting, and name the cheapest that fits."""
    from ctxext.training.plan_choose import plan_checkpoint, render_plan

    options: dict[str, Any] = {"gpus": gpus, "memory": memory, "method": method, "batch": batch, "device": device}
    emit(plan_checkpoint(checkpoint, length=length, **options), as_json, render_plan)


@app.command("bench")
def bench_command(
    name: Annotated[str, typer.Argument(help="patch, perplexity, passkey, train, attention, reading or all.")],
    rounds: Annotated[int, typer.Option(help="Runs of each side, in turn.")] = 3,
    as_json: Json = False,
) -> None:
    """Measure a claim about speed or memory against its baseline, both in this run."""
    from ctxext.bench.run import render_bench, run_bench

    emit(run_bench(name, rounds), as_json, render_bench)


def main() -> None:
    """Run the command line; a `ValueError` or `OSError` of the library is the user's: exit 2 with its message.

    With `--json`, what libraries print while the command runs goes to stderr: stdout holds the answer alone.
    """
    global _answers
    _answers = sys.stdout
    try:
        with contextlib.redirect_stdout(sys.stderr) if "--json" in sys.argv else contextlib.nullcontext():
            app()
    except (ValueError, OSError) as error:
        print(f"ctxext: {error}", file=sys.stderr)
        sys.exit(2)
    finally:
        _answers = None


if __name__ == "__main__":
    main()
