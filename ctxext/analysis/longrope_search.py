"""Search the factors of LongRoPE for a checkpoint (arXiv 2402.13753), which the paper's release left out.

The fitness of a candidate is the mean loss on a few documents at the wanted length, whose exponential is the paper's
perplexity. Every measured candidate is kept in the output folder at once: the search is a function of the seed and
those losses, so one that was killed goes on as if it had not been, and a larger budget continues a finished one.
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ctxext.analysis.longrope_operators import (
    SLACK,
    Candidate,
    Evolution,
    Generation,
    Space,
    best_of,
    evolve,
)
from ctxext.evaluation.partial import Partial, left_behind, partial_path, run_key
from ctxext.evaluation.processes import Processes, join_processes
from ctxext.evaluation.result import versions, write_whole
from ctxext.positions.base import FloatArray

FORMAT = "ctxext-longrope-search"
FORMAT_VERSION = 1  # raise it when the operators change: what they proposed before is then another search
COMPARED = ("linear", "ntk", "yarn")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """What is searched, on what, and how long.

    Attributes:
        length: the wanted context length in tokens.
        data: a corpus by name, or a path.
        documents: sequences of `length` tokens that a candidate is measured on, a forward pass each.
        held_out: further sequences, which the search does not see, for the comparison at its end.
        budget: forward passes of the search for the long factors, at most.
        short_budget: forward passes of one for the short factors at the original window; 0 keeps them at 1.
        unscaled: choices for the number of first tokens that stay unscaled; must have 0, all a checkpoint can say.
        how: the evolution's sizes and seed.
    """

    length: int
    data: str = "sympy-source"
    documents: int = 5
    held_out: int = 16
    budget: int = 2000
    short_budget: int = 0
    unscaled: tuple[int, ...] = (0,)
    how: Evolution = dataclasses.field(default_factory=Evolution)

    def __post_init__(self) -> None:
        least = self.how.population * max(self.documents, 1)
        wrong = []
        if self.documents < 1 or self.held_out < 2:
            wrong.append(f"--documents {self.documents} must be at least 1 and --held-out {self.held_out} at least 2")
        if self.budget < least:
            wrong.append(f"--budget {self.budget} does not measure the population once: give at least {least}")
        if self.short_budget and self.short_budget < least:
            wrong.append(f"--short-budget {self.short_budget} must be 0 or at least {least}")
        if 0 not in self.unscaled or min(self.unscaled) < 0:
            wrong.append(f"--unscaled {self.unscaled} must be counts of tokens, 0 among them")
        if wrong:
            raise ValueError("; ".join(wrong))


@dataclasses.dataclass(frozen=True)
class Frequencies:
    """The checkpoint's own frequencies, `(rotary_dim / 2,)`, its window, and factors of other methods by name."""

    base: FloatArray
    window: int
    factors: dict[str, FloatArray]


def read_frequencies(config: dict[str, Any], length: int) -> Frequencies:
    """Return what a search starts from, of a config.

    Raises:
        ValueError: if the model has an attention bias, is scaled already, or `length` is not beyond its window.
    """
    from ctxext.checkpoint.loaders import has_bias
    from ctxext.checkpoint.plan import plan_patch
    from ctxext.checkpoint.rope_config import read_rope
    from ctxext.positions.rope import Theta

    if has_bias(config):
        raise ValueError("this checkpoint has an attention bias: LongRoPE's factors need a rotary embedding")
    rope = read_rope(config)
    if type(rope.scaling) is not Theta:
        raise ValueError(f"this checkpoint is scaled by {rope.scaling.name!r} already: search from the original one")
    if length <= rope.window:
        raise ValueError(f"--length {length} must be longer than the model's window of {rope.window} tokens")
    base = rope.scaling.inv_freq(rope.rotary_dim)
    plan_patch(config, method="longrope", length=length, long_factor=(1.0,) * len(base))  # refuses what cannot be
    scalings = {name: plan_patch(config, method=name, length=length).scaling for name in COMPARED}
    return Frequencies(
        base, rope.window, {name: base / scaling.inv_freq(rope.rotary_dim) for name, scaling in scalings.items()}
    )


class Measure:
    """Measures candidates on sequences, each once ever: the processes share the work, files keep it."""

    def __init__(
        self,
        live: Any,
        sequences: Sequence[Sequence[int]],
        label: str,
        partial: Partial,
        processes: Processes,
        advance: Callable[[float], None],
    ) -> None:
        """Measure with `live` (see `LiveFactors`); `label` tells apart the searches that share `partial`.

        `advance` is told of forward passes as they are done.
        """
        self.live, self.sequences, self.label = live, sequences, label
        self.partial, self.processes = partial, processes
        self.known = processes.gather(partial.scored)
        self.advance = advance

    def __call__(self, candidates: Sequence[Candidate]) -> list[float]:
        """Return the mean losses of candidates over all sequences, nats per token."""
        names = {f"{self.label} {candidate.key}": candidate for candidate in candidates}
        new = [name for name in names if name not in self.known]
        mine = {}
        for name in new[self.processes.rank :: self.processes.count]:
            start = time.perf_counter()
            losses = self.live.losses(names[name], self.sequences)
            mine[name] = self.partial.add(name, {"losses": losses}, time.perf_counter() - start)
            self.advance(len(self.sequences) * self.processes.count)
        self.advance(len(self.sequences) * (len(names) - len(new)))
        self.known |= self.processes.gather(mine)
        return [float(np.mean(self.known[name]["losses"])) for name in names]


def claim_folder(output: Path, identity: dict[str, Any]) -> str:
    """Make the output folder that of this search; return the search's key.

    Raises:
        ValueError: if it is another search's, or holds something else.
    """
    key, mark = run_key(identity), output / "search.json"
    if mark.exists():
        found = json.loads(mark.read_text(encoding="utf-8"))
        if found.get("key") != key:
            old = found.get("identity", {})
            differing = sorted(name for name in identity.keys() | old.keys() if identity.get(name) != old.get(name))
            raise ValueError(
                f"{output} holds another search (it differs in {', '.join(differing)}): give another --output"
            )
    elif output.exists() and any(output.iterdir()):
        raise ValueError(f"{output} is not empty and holds no search: give another --output")
    else:
        write_whole(mark, json.dumps({"format": FORMAT, "key": key, "identity": identity}, indent=1) + "\n")
    return key


def _log(generations: Sequence[Generation], documents: int) -> list[dict[str, Any]]:
    """Return all candidates in order, with the forward passes spent up to each."""
    rows: list[dict[str, Any]] = []
    for number, generation in enumerate(generations):
        for candidate, loss in generation:
            made = {"generation": number, "forward_passes": (len(rows) + 1) * documents}
            rows.append({**made, **dataclasses.asdict(candidate), "loss": loss, "perplexity": math.exp(loss)})
    return rows


def run_search(source: str | Path, output: Path, options: SearchOptions, settings: Any) -> dict[str, Any] | None:
    """Search, compare on held-out documents, and write factors, log and picture into `output`.

    Args:
        source: a local folder, GGUF file or Hub id of a model that no method has extended.
        output: the folder of this search, empty or its own.
        options: what is searched.
        settings: how the checkpoint is loaded, a `RunSettings`.

    Returns:
        The result as `result.json` has it; None in all processes but the first.

    Raises:
        ValueError: as `read_frequencies`, `claim_folder` and `long_sequences` do.
    """
    from ctxext.analysis.longrope_live import LiveFactors
    from ctxext.data.corpora import open_corpus
    from ctxext.data.documents import documents_hash
    from ctxext.evaluation.fingerprint import checkpoint_hash
    from ctxext.evaluation.loading import load
    from ctxext.evaluation.progress import progress_bar
    from ctxext.evaluation.sweep import long_sequences

    processes = join_processes()
    loaded = load(source, settings, None, processes)
    frequencies = read_frequencies(loaded.model.config.to_dict(), options.length)
    sequences, used, notes = long_sequences(
        open_corpus(options.data), loaded.tokenizer, options.length, options.documents + options.held_out
    )
    identity = {
        **_identity(options),
        "checkpoint_hash": checkpoint_hash(*loaded.folders),
        "data": documents_hash(used),
        "dtype": str(loaded.model.dtype).removeprefix("torch."),
        "attention": settings.attn,
    }
    key = claim_folder(output, identity) if processes.main else run_key(identity)
    processes.wait()
    partial = Partial(partial_path(output / "losses", key, processes.rank), key, left_behind(output / "losses", key))
    live = LiveFactors(loaded.model, frequencies.base, options.length)
    processes.wait()  # until all have read what was left
    with partial, progress_bar("search", options.budget + options.short_budget, shown=processes.main) as advance:
        share = (partial, processes, advance)
        found, short = _search(options, frequencies, sequences[: options.documents], live, share)
    if not processes.main:
        return None
    parts = sequences[: options.documents], sequences[options.documents :]
    answer = {
        "format": FORMAT,
        "checkpoint": Path(source).resolve().name if Path(source).exists() else str(source),
        "original_window": frequencies.window,
        **identity,
        "largest_factor": options.length / frequencies.window * SLACK,
        "corpus": options.data,
        "held_out": options.held_out,
        "budget": options.budget,
        "versions": versions(),
        "notes": notes,
        **_compare(source, settings, options, frequencies, parts, (found, short)),
    }
    _write(output, answer, found, short, options.documents, frequencies)
    return answer


def _identity(options: SearchOptions) -> dict[str, Any]:
    """Return what a candidate's place in the search depends on, besides the model and the data."""
    how = {name: value for name, value in dataclasses.asdict(options.how).items() if name != "iterations"}
    return {
        "format_version": FORMAT_VERSION,
        "length": options.length,
        "documents": options.documents,
        "unscaled": list(options.unscaled),
        "evolution": how,
    }


def _search(
    options: SearchOptions,
    frequencies: Frequencies,
    sequences: list[list[int]],
    live: Any,
    share: tuple[Partial, Processes, Callable[[float], None]],
) -> tuple[list[Generation], list[Generation]]:
    """Return the searches for the long factors and, if there is a budget for them, for the short ones."""
    largest = options.length / frequencies.window * SLACK
    space = Space(dimensions=len(frequencies.base), largest=largest, unscaled=options.unscaled)
    starts = [space.repaired(factors, 0) for factors in frequencies.factors.values()]
    measure = Measure(live, sequences, "long", *share)
    found = evolve(space, starts, measure, options.budget // options.documents, options.how)
    if not options.short_budget:
        return found, []
    window = [ids[: frequencies.window + 1] for ids in sequences]
    inside = dataclasses.replace(space, unscaled=(0,))
    starts = [inside.repaired(np.ones(space.dimensions), 0)]
    measure = Measure(live, window, "short", *share)
    return found, evolve(inside, starts, measure, options.short_budget // options.documents, options.how)


def _compare(
    source: str | Path,
    settings: Any,
    options: SearchOptions,
    frequencies: Frequencies,
    sequences: tuple[list[list[int]], list[list[int]]],
    searches: tuple[list[Generation], list[Generation]],
) -> dict[str, Any]:
    """Return the best candidates and how they do beside other methods, on the search's and on held-out documents."""
    from ctxext.analysis.longrope_live import method_losses
    from ctxext.evaluation.loading import load
    from ctxext.evaluation.paired import Scores, paired_difference

    (searched, held_out), (found, short) = sequences, searches
    best, loss = best_of(found, unscaled=0)
    anywhere, least = best_of(found)
    short_factors = best_of(short)[0].factors if short else (1.0,) * len(frequencies.base)
    read = (searched, held_out, [ids[: frequencies.window + 1] for ids in held_out])
    rows: dict[str, dict[str, Any]] = {}
    for name in ("", *COMPARED, "longrope"):
        factors = {"long_factor": best.factors, "short_factor": short_factors} if name == "longrope" else {}
        losses = method_losses(load(source, settings).model, name, options.length, read, **factors)
        kinds = zip(("search", "held_out", "held_out_window"), losses, strict=True)
        rows[name or "(unpatched)"] = {kind: {"loss": float(np.mean(each)), "each": each} for kind, each in kinds}

    def against(other: str, kind: str) -> dict[str, Any]:
        first, second = (
            Scores(
                metric="loss",
                items={str(index): (value, 1.0) for index, value in enumerate(rows[name][kind]["each"])},
                unit="documents",
                higher_is_better=False,
            )
            for name in (other, "longrope")
        )
        made = paired_difference(first, second)
        return {"against": other, "difference": made.difference, "interval": made.interval, "documents": made.count}

    return {
        "long_factor": list(best.factors),
        "short_factor": list(short_factors),
        "short_searched": bool(short),
        "loss": loss,
        "forward_passes": sum(len(generation) for generation in found) * options.documents,
        "best_with_unscaled": {"unscaled": anywhere.unscaled, "loss": least, "lost_without": loss - least},
        "methods": rows,
        "at_length": [against(name, "held_out") for name in COMPARED],
        "inside_window": [against(name, "held_out_window") for name in ("(unpatched)", *COMPARED)],
    }


def _write(
    output: Path,
    answer: dict[str, Any],
    found: list[Generation],
    short: list[Generation],
    documents: int,
    frequencies: Frequencies,
) -> None:
    from ctxext.analysis.longrope_picture import draw_search

    log = {"long": _log(found, documents), "short": _log(short, documents)}
    write_whole(output / "log.json", json.dumps(log, indent=1) + "\n")
    for name in ("long_factor", "short_factor"):
        write_whole(output / f"{name}.json", json.dumps(answer[name]) + "\n")
    write_whole(output / "result.json", json.dumps(answer, indent=1) + "\n")
    draw_search(answer, log["long"], frequencies.factors, output / "search.png")
