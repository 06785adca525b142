"""The order in which the documents of several sources come: shuffled, mixed by weight, the same on every machine.

Nothing here draws from a random number generator whose stream could change with a library's version: a document's
place in a pass follows from a hash of (seed, source, pass, document, copy).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1


def _mixed(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return the finalizer of splitmix64 of each value, elementwise."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def pass_order(documents: npt.NDArray[np.int64], seed: int, source: int, number: int) -> npt.NDArray[np.int64]:
    """Return `documents` shuffled for one pass.

    Args:
        documents: `(n,)` document numbers; one that shall come several times stands there several times.
        seed: Of the whole run.
        source: The source's number.
        number: The pass, from 0.

    Returns:
        `(n,)` the same numbers in another order.
    """
    key = (seed * 3 + source * 5 + number * 7 + 11) & _MASK
    for part in (seed, source, number):
        key = int(_mixed(np.array([(key + part * _GOLDEN + _GOLDEN) & _MASK], dtype=np.uint64))[0])
    with np.errstate(over="ignore"):
        places = np.arange(1, len(documents) + 1, dtype=np.uint64) * np.uint64(_GOLDEN) + np.uint64(key)
    return documents[np.argsort(_mixed(places), kind="stable")]


def upsampled(lengths: npt.NDArray[np.int64], above: int | None, times: int) -> npt.NDArray[np.int64]:
    """Return the document numbers of one pass, those of at least `above` tokens `times` times (arXiv 2402.10171).

    Args:
        lengths: `(documents,)` tokens of each document.
        above: Tokens, or None for no up-sampling.
        times: How often such a document comes.
    """
    documents = np.arange(len(lengths), dtype=np.int64)
    if above is None:
        return documents
    return np.repeat(documents, np.where(lengths >= above, times, 1))


def mixed_documents(
    lengths: Sequence[npt.NDArray[np.int64]],
    weights: Sequence[float],
    passes: Sequence[npt.NDArray[np.int64]],
    seed: int,
) -> Iterator[tuple[int, int]]:
    """Yield source and document for ever: always from the source that is furthest behind its share of tokens.

    Args:
        lengths: For each source, `(documents,)` tokens of each document.
        weights: For each source, its share of the tokens, relative to the others.
        passes: For each source, the document numbers of one pass, as `upsampled` returns them.
        seed: Of the shuffling.
    """
    drawn = [0.0] * len(weights)
    queues = [_source_documents(documents, seed, number) for number, documents in enumerate(passes)]
    while True:
        source = min(range(len(weights)), key=lambda number: (drawn[number] / weights[number], number))
        document = next(queues[source])
        drawn[source] += float(lengths[source][document])
        yield source, document


def _source_documents(documents: npt.NDArray[np.int64], seed: int, source: int) -> Iterator[int]:
    number = 0
    while True:
        yield from pass_order(documents, seed, source, number).tolist()
        number += 1
