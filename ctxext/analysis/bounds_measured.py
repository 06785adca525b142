"""The attention logits of real checkpoints by distance, against the score bounds of their own queries and keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ctxext.evaluation.loading import Loaded, RunSettings

if TYPE_CHECKING:
    from ctxext.analysis.logits import Counts, LogitCounter

FORMAT = "ctxext-attention-logits"


@dataclass(frozen=True, kw_only=True)
class MeasureOptions:
    """What is read, and how many of its queries are counted.

    Attributes:
        length: tokens of a sequence.
        data: a corpus by name, or a path.
        split: another split of the corpus.
        documents: sequences read.
        queries: of a sequence, spread evenly over it, that are multiplied with all keys before them; 0 for all.
        window: tokens that the first checkpoint was trained to read; None for what its config says.
    """

    length: int
    data: str = "sympy-source"
    split: str | None = None
    documents: int = 1
    queries: int = 256
    window: int | None = None

    def __post_init__(self) -> None:
        problems = [
            message
            for wrong, message in (
                (self.length < 2, f"--length {self.length} must be at least 2 tokens"),
                (self.documents < 1, f"--documents {self.documents} must be at least 1"),
                (self.queries < 0, f"--queries {self.queries} must be at least 1, or 0 for all"),
                (self.window is not None and self.window < 1, f"--window {self.window} must be at least 1 token"),
            )
            if wrong
        ]
        if problems:
            raise ValueError("; ".join(problems))


def check_rotary(folder: Path) -> list[str]:
    """Refuse a checkpoint whose queries and keys do not turn with their distance; return what to know of its logits.

    Raises:
        ValueError: If its family is unknown, or an attention bias stands in place of its rotary embedding.
    """
    from ctxext.checkpoint.bias_config import read_bias
    from ctxext.checkpoint.families import find_family
    from ctxext.checkpoint.files import read_json

    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} is not a checkpoint: it has no config.json")
    config = read_json(folder / "config.json")
    find_family(config)
    bias = read_bias(config)
    if bias is not None and not bias.keep_rotary:
        raise ValueError(
            f"{folder.name} has the attention bias {bias.name!r} in place of a rotary embedding: its scores do not "
            "turn with the distance, so these bounds say nothing of it; give a RoPE checkpoint, or one patched "
            "with --keep-rotary"
        )
    return [] if bias is None else [f"{folder.name}: its logits are counted without the {bias.name} bias"]


def measure_checkpoints(sources: Sequence[str], options: MeasureOptions, settings: RunSettings) -> dict[str, Any]:
    """Measure the logits of checkpoints on the same tokens, as a JSON-serialisable dict.

    Args:
        sources: folders, GGUF files or Hub ids; of one tokenizer.
        options: what is read.
        settings: how the checkpoints are loaded.

    Raises:
        ValueError: If a checkpoint has no rotary embedding, the tokenizers differ, or the data are too short.
    """
    from ctxext.checkpoint.source import resolve_checkpoint
    from ctxext.data.corpora import open_corpus
    from ctxext.data.documents import documents_hash
    from ctxext.evaluation.loading import load
    from ctxext.evaluation.progress import progress_bar
    from ctxext.evaluation.result import versions
    from ctxext.evaluation.sweep import long_sequences

    folders = [Path(resolve_checkpoint(source)) for source in sources]
    told = [note for folder in folders for note in check_rotary(folder)]
    corpus = open_corpus(options.data, split=options.split)
    read: list[list[int]] = []
    measured: list[dict[str, Any]] = []
    with progress_bar("attention logits", len(sources) * options.documents) as advance:
        for source, folder in zip(sources, folders, strict=True):
            loaded = load(folder, settings, options.length)
            ids, used, notes = long_sequences(corpus, loaded.tokenizer, options.length, options.documents)
            if read and ids != read:
                raise ValueError(f"{source} has another tokenizer than {sources[0]}: measure them apart")
            read = ids
            window = options.window or (measured[0]["window"] if measured else None)
            measured.append(_measure(source, loaded, ids, options, window, advance))
    return {
        "format": FORMAT,
        "length": options.length,
        "documents": options.documents,
        "queries": options.queries or options.length,
        "corpus": {"name": corpus.name, "source": corpus.source, "hash": documents_hash(used)},
        "notes": [*notes, *told],
        "checkpoints": measured,
        "versions": versions(),
    }


def _measure(
    source: str,
    loaded: Loaded,
    sequences: Sequence[Sequence[int]],
    options: MeasureOptions,
    window: int | None,
    advance: Callable[[float], None],
) -> dict[str, Any]:
    """Return one checkpoint's part of the report."""
    import time

    from ctxext.analysis.bounds_report import describe
    from ctxext.analysis.logits import LogitCounter, count_logits, distance_edges
    from ctxext.evaluation.fingerprint import checkpoint_hash
    from ctxext.evaluation.windows import evenly_spaced
    from ctxext.positions.live import live_frequencies, rotary_modules

    began = time.perf_counter()
    frequencies, factor = live_frequencies(next(iter(rotary_modules(loaded.model).values())))
    window = window or _trained_window(source, loaded)
    counter = LogitCounter(
        window=window,
        edges=distance_edges(window, options.length),
        positions=evenly_spaced(options.length, options.queries),
        rotary_dim=2 * len(frequencies),
    )
    count_logits(loaded.model, [ids[: options.length] for ids in sequences], counter, advance)
    row = describe(
        source, frequencies, logit_factor=1.0, closed=None, length=options.length, reach=options.length
    )  # the factor is in the queries and keys already
    return {
        "name": Path(source).resolve().name if Path(source).exists() else source,
        "hash": checkpoint_hash(*loaded.folders),
        "model_type": loaded.model.config.model_type,
        "rope": loaded.rope,
        "fitted_length": loaded.fitted_length,
        "window": window,
        "attention_factor": factor,
        "frequencies": frequencies.tolist(),
        "dtype": str(loaded.model.dtype).removeprefix("torch."),
        "attention": str(loaded.model.config._attn_implementation),
        "device": str(loaded.model.device),
        "bounds": row,
        "edges": counter.edges,
        **summarize(counter, bounds_by_cell(frequencies, counter.edges)),
        "left_out_layers": sorted(counter.left_out),
        "seconds": round(time.perf_counter() - began, 2),
    }


def _trained_window(source: str, loaded: Loaded) -> int:
    from ctxext.evaluation.loading import original_window

    window = original_window(loaded.model.config, loaded.rope)
    if window is None:
        raise ValueError(f"the config of {source} names no window: say --window, the tokens it was trained to read")
    return window


def bounds_by_cell(frequencies: Any, edges: Sequence[int]) -> list[float]:
    """Return the paper's bound 2 B(s) at its largest in each distance cell: `(cells,)`, in units of max|h|."""
    import numpy as np

    from ctxext.analysis.bounds import partial_sums

    sums = 2 * partial_sums(frequencies, np.arange(float(edges[-1])))
    return [float(sums[low:high].max()) for low, high in zip(edges[:-1], edges[1:], strict=True)]


def summarize(counter: LogitCounter, cell_bounds: Sequence[float]) -> dict[str, Any]:
    """Return the logits of every layer and of all together, by group and by distance cell.

    Args:
        counter: that has read everything.
        cell_bounds: 2 B(s) of each cell.
    """
    from ctxext.analysis.logits import Counts

    every = Counts.empty(len(counter.edges) - 1)
    layers = []
    for layer, counts in sorted(counter.layers.items()):
        every.add(counts)
        layers.append({"layer": layer, **_summary(counter, counts, cell_bounds)})
    return {"all_layers": _summary(counter, every, cell_bounds), "layers": layers}


def _summary(counter: LogitCounter, counts: Counts, cell_bounds: Sequence[float]) -> dict[str, Any]:
    from ctxext.analysis.logits import GROUPS

    groups = {group: counts.summary(counter.rows(group)) for group in GROUPS}
    cells = [counts.summary(counter.cell(cell)) for cell in range(len(counter.edges) - 1)]
    beyond, trained = groups["beyond"], groups["trained"]
    return {
        "max_product": counts.max_product,
        "reachable": counts.reachable,
        "bound": [counts.max_product * bound for bound in cell_bounds],
        "groups": groups,
        "cells": cells,
        "excess": None if beyond is None or trained is None else _excess(trained, beyond),
    }


def _excess(trained: dict[str, Any], beyond: dict[str, Any]) -> dict[str, float]:
    """Return by how much logits beyond the window exceed those in training: quantiles, extremes, in nats."""
    return {name: beyond[name] - trained[name] for name in ("q0.01", "q0.5", "q0.99", "q0.999", "max", "min")}


def render_measured(report: dict[str, Any]) -> str:
    """Return a report of `measure_checkpoints` as text."""
    from ctxext.analysis.bounds_report import render_bounds

    lines = [
        f"{report['documents']} sequence(s) of {report['length']} tokens of {report['corpus']['name']}, "
        f"{report['queries']} queries each; logits before the softmax, all layers"
    ]
    for found in report["checkpoints"]:
        lines += _render_checkpoint(found)
    rows = [{**found["bounds"], "name": found["name"]} for found in report["checkpoints"]]
    lines += [*render_bounds(rows), *(f"note: {note}" for note in report["notes"])]
    return "\n".join(lines)


def _render_checkpoint(found: dict[str, Any]) -> list[str]:
    every = found["all_layers"]
    where = {
        "trained": f"queries before {found['window']}",
        "inside": "later queries, keys inside the window",
        "beyond": "later queries, keys beyond the window",
    }
    quantiles = ("min", "q0.01", "q0.5", "q0.99", "q0.999", "max")
    heads = ("min", "1%", "median", "99%", "99.9%", "max")
    lines = [f"{found['name']} ({found['dtype']}, {found['seconds']:.0f} s)"]
    lines.append(f"  {'':<38}" + "".join(f"{head:>9}" for head in heads))
    for group, words in where.items():
        numbers = every["groups"][group]
        if numbers is not None:
            lines.append(f"  {words:<38}" + "".join(f"{numbers[name]:>9.2f}" for name in quantiles))
    bound = max(every["bound"])
    lines.append(
        f"  max|h| {every['max_product']:.3g}, sum|h| at most {every['reachable']:.3g}, 2 max|h| B(s) from "
        f"{min(every['bound']):.3g} to {bound:.3g}; between neighbouring distances {_step(found):.3g} at most"
    )
    over = [layer for layer in found["layers"] if layer["excess"] is not None and layer["excess"]["q0.999"] > 0]
    if every["excess"] is not None:
        most = max(found["layers"], key=lambda layer: float(layer["excess"]["q0.999"]))
        lines.append(
            f"  the 99.9% quantile beyond the window exceeds that in training in {len(over)} of "
            f"{len(found['layers'])} layers, most in layer {most['layer']}: {most['excess']['q0.999']:+.2f} nats"
        )
    if found["left_out_layers"]:
        lines.append(f"  left out, sliding or without rotation: layers {found['left_out_layers']}")
    return lines


def _step(found: dict[str, Any]) -> float:
    """Return the bound that holds on the deviation of a logit from a straight line between neighbouring distances."""
    return float(found["all_layers"]["max_product"] * found["bounds"]["interpolation"]["bound"])
