"""Which method serves a model best at a wanted length, before any training?

Every native method is put on the live model, which then reads the same long sequences once. Methods are ranked by
their long-range loss, the mean over the last tokens, which is what an extension is for; beside it stands what the
method costs inside the original window, where the unpatched model needed no help.
"""

from __future__ import annotations

import json
import math
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ctxext.data.corpora import Corpus, open_corpus
from ctxext.data.documents import Document, documents_hash
from ctxext.evaluation.advice import UNPATCHED, advise, memory_needs, serving_support
from ctxext.evaluation.fingerprint import checkpoint_hash
from ctxext.evaluation.loading import Loaded, RunSettings, load
from ctxext.evaluation.progress import progress_bar
from ctxext.evaluation.result import versions, write_whole
from ctxext.evaluation.scoring import TokenScorer, bucket_edges

if TYPE_CHECKING:
    import torch

FORMAT = "ctxext-sweep"
LONG_RANGE_TOKENS = 1024
BUCKETS = "16"


def long_sequences(
    corpus: Corpus, tokenizer: Any, length: int, count: int
) -> tuple[list[list[int]], list[Document], list[str]]:
    """Return `count` token sequences of `length + 1` tokens, the documents they came from, and notes.

    Documents that are long enough come first, cut; where they do not suffice, shorter ones are joined in order. A
    begin-of-sequence token, if the tokenizer has one, starts every document.

    Raises:
        ValueError: if the corpus is too short.
    """
    head = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    whole: list[list[int]] = []
    joined: list[list[int]] = [[]]
    used: list[tuple[bool, Document]] = []
    for document in corpus.documents():
        ids = head + tokenizer(document.text, add_special_tokens=False, verbose=False)["input_ids"]
        if len(ids) > length:
            whole.append(ids[: length + 1])
            used.append((True, document))
        elif len(joined) <= count:
            joined[-1] += ids
            used.append((False, document))
            if len(joined[-1]) > length:
                joined[-1] = joined[-1][: length + 1]
                joined.append([])
        if len(whole) == count:
            return whole, [document for is_long, document in used if is_long], []
    sequences = (whole + joined[:-1])[:count]
    if len(sequences) < count:
        raise ValueError(
            f"{corpus.name} gives {len(sequences)} sequences of {length} tokens, fewer than --documents {count}: "
            "use fewer, a smaller --length, or more data"
        )
    note = f"{len(whole)} sequences are whole documents, {count - len(whole)} are short documents joined"
    return sequences, [document for _, document in used], [note]


def chosen_methods(names: Sequence[str] | None) -> list[str]:
    """Return the methods to try: all that scale the rotary embedding, or those asked for, biases among them.

    Raises:
        ValueError: if a name is unknown.
    """
    from ctxext.positions import METHODS, get_method

    return list(METHODS) if names is None else [get_method(name).name for name in names]


def losses_by_sequence(model: Any, sequences: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return the loss at each position: `(sequences, length)`, float64, nats per token."""
    import torch

    scorer = TokenScorer(model)
    tokens = [torch.tensor([ids], dtype=torch.long) for ids in sequences]
    return torch.stack([scorer.nll(row[:, :-1], row[:, 1:]).double() for row in tokens])


def _measure(name: str, model: Any, sequences: Sequence[Sequence[int]], window: int) -> dict[str, Any]:
    """Return one row of the ranking."""
    start = time.perf_counter()
    each = losses_by_sequence(model, sequences)
    losses = each.mean(dim=0)
    last = long_range(len(losses), window)
    edges = bucket_edges(len(losses), BUCKETS)
    return {
        "method": name,
        "long_loss": float(losses[-last:].mean()),
        "long_losses": each[:, -last:].mean(dim=1).tolist(),
        "window_loss": float(losses[:window].mean()),
        "window_cost": None,
        "bucket_loss": [float(losses[low:high].mean()) for low, high in zip(edges[:-1], edges[1:], strict=True)],
        "seconds": round(time.perf_counter() - start, 2),
        "remark": "",
    }


def long_range(length: int, window: int) -> int:
    """Return how many of the last tokens count as long range: all beyond the window, at most 1024."""
    return min(LONG_RANGE_TOKENS, length - window)


def _skipped(name: str, reason: str) -> dict[str, Any]:
    empty = dict.fromkeys(("long_loss", "long_losses", "window_loss", "window_cost", "bucket_loss", "seconds"))
    return {"method": name, **empty, "remark": f"skipped: {reason}"}


def _try_method(name: str, loaded: Loaded, sequences: Sequence[Sequence[int]], window: int) -> dict[str, Any]:
    """Patch the model in memory with a method and measure it; a method that cannot be used says why."""
    from ctxext.positions import BIASES, get_rope_method
    from ctxext.positions.live import fit_length, patch

    length = len(sequences[0]) - 1
    try:
        model = patch(loaded.model, method=name, length=length)
        if name in BIASES:
            return {**_measure(name, model, sequences, window), "remark": "a bias must be trained first"}
        row = _measure(name, fit_length(model, length), sequences, window)
    except ValueError as error:
        return _skipped(name, str(error))
    if not get_rope_method(name).is_static:
        row["remark"] = f"frequencies fixed for {length} tokens; shorter inputs are changed less"
    return row


def rank(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Order rows by long-range loss, then by loss inside the window; skipped methods come last."""
    base = next((row["window_loss"] for row in rows if row["method"] == UNPATCHED), None)
    for row in rows:
        if base is not None and row["window_loss"] is not None:
            row["window_cost"] = row["window_loss"] - base
    worst = math.inf
    return sorted(
        rows,
        key=lambda row: (
            worst if row["long_loss"] is None else row["long_loss"],
            worst if row["window_loss"] is None else row["window_loss"],
        ),
    )


def run_sweep(
    source: str | Path,
    length: int,
    *,
    data: str = "sympy-source",
    documents: int = 2,
    methods: Sequence[str] | None = None,
    settings: RunSettings | None = None,
    output: Path | None = None,
) -> dict[str, Any]:
    """Try native methods at `length` on one checkpoint and rank them.

    Args:
        source: a local folder, GGUF file or Hub id.
        length: the wanted context length in tokens.
        data: a corpus by name, or a path.
        documents: how many sequences of `length` tokens to read.
        methods: names of methods; None tries every native one.
        settings: how to load the checkpoint.
        output: also write the ranking to this JSON file, and its curves beside it as PNG.

    Returns:
        A JSON-serialisable dict; `methods` is ranked, `best` is the winner, `command` patches it, `advice` weighs
        losses, their intervals and the loaders.

    Raises:
        ValueError: if the length is not beyond the window, the data too short, or a method unknown.
    """
    settings = settings or RunSettings()
    if documents < 1:
        raise ValueError(f"--documents {documents} must be at least 1")
    names = chosen_methods(methods)
    loaded = load(source, settings, length)
    window = loaded.model.config.get_text_config().max_position_embeddings
    if length <= window:
        raise ValueError(f"--length {length} must be longer than the model's window of {window} tokens")
    corpus = open_corpus(data)
    sequences, used, notes = long_sequences(corpus, loaded.tokenizer, length, documents)
    folder, size = loaded.folders[0], loaded.model.dtype.itemsize
    config = loaded.model.config.to_dict()
    rows = []
    with progress_bar("sweep", len(names) + 1) as advance:
        rows.append(_unpatched(loaded, sequences, window))
        advance(1)
        for name in names:
            loaded = load(source, settings)
            rows.append(_try_method(name, loaded, sequences, window))
            advance(1)
    for row in rows:
        row["serving"] = None if row["method"] == UNPATCHED else serving_support(config, row["method"], length)
    ranked = rank(rows)
    ranking = {
        **_describe(loaded, source, length, window),
        "documents": documents,
        "corpus": {"name": corpus.name, "source": corpus.source, "hash": documents_hash(used)},
        "notes": notes,
        **_verdict(ranked, source, length),
        "memory": memory_needs(folder, length, size),
        "advice": _advice(ranked, names, documents),
    }
    if output is not None:
        write_whole(output, json.dumps(ranking, indent=1) + "\n")
        draw_ranking(ranking, output.with_suffix(".png"))
    return ranking


def _advice(rows: Sequence[dict[str, Any]], names: Sequence[str], documents: int) -> dict[str, Any]:
    """Return the recommendation, and the biases that were not tried because they mean nothing untrained."""
    from ctxext.positions import BIASES, METHODS

    changing = [name for name in names if name in METHODS and not METHODS[name].is_static]
    return {
        **advise(rows, documents, changing),
        "must_be_trained": [name for name in BIASES if name not in names],
    }


def _describe(loaded: Loaded, source: str | Path, length: int, window: int) -> dict[str, Any]:
    """Return what a ranking's numbers depend on, besides the data."""
    return {
        "format": FORMAT,
        "checkpoint": Path(source).resolve().name if Path(source).exists() else str(source),
        "checkpoint_hash": checkpoint_hash(*loaded.folders),
        "length": length,
        "original_window": window,
        "long_range_tokens": long_range(length, window),
        "dtype": str(loaded.model.dtype).removeprefix("torch."),
        "attention": str(loaded.model.config._attn_implementation),
        "device": str(loaded.model.device),
        "versions": versions(),
        "bucket_edges": bucket_edges(length, BUCKETS),
    }


def _unpatched(loaded: Loaded, sequences: Sequence[Sequence[int]], window: int) -> dict[str, Any]:
    try:
        return _measure(UNPATCHED, loaded.model, sequences, window)
    except ValueError as error:
        return _skipped(UNPATCHED, str(error))


def _verdict(rows: list[dict[str, Any]], source: str | Path, length: int) -> dict[str, Any]:
    """Return the ranked rows, the winner and the command that patches it."""
    tried = [row["method"] for row in rows if row["long_loss"] is not None and row["method"] != UNPATCHED]
    if not tried:
        return {"methods": rows, "best": None, "command": None}
    target = f"{Path(source).name}-{tried[0]}-{length}"
    command = ["ctxext", "patch", str(source), target, "--method", tried[0], "--length", str(length)]
    return {"methods": rows, "best": tried[0], "command": shlex.join(command)}


def draw_ranking(ranking: dict[str, Any], path: Path) -> Path:
    """Draw the loss by position of every method that was tried into a PNG file."""
    from ctxext.evaluation.plots import draw_curves

    edges = ranking["bucket_edges"]
    shared = {
        "id": "sweep",
        "title": f"{ranking['checkpoint']} at {ranking['length']} tokens, before any training",
        "x_label": "position (tokens)",
        "y_label": "loss (nats per token)",
        "x": [(low + high) / 2 for low, high in zip(edges[:-1], edges[1:], strict=True)],
        "kind": "line",
        "mark_window": True,
    }
    curves = [(row["method"], {**shared, "y": row["bucket_loss"]}) for row in ranking["methods"] if row["bucket_loss"]]
    return draw_curves(curves, path, ranking["original_window"])
