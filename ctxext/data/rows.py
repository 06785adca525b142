"""Rows with several columns, for prompts, completions and conversations; plain text comes from `corpora`."""

from __future__ import annotations

import difflib
import glob
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ctxext.data.corpora import CORPORA, HubCorpus
from ctxext.data.sources import Source

# What `datasets` calls the formats.
_BUILDERS = {".jsonl.zst": "json", ".jsonl": "json", ".json": "json", ".parquet": "parquet"}


def read_rows(source: Source) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the id and the columns of every row of a source, in order, streamed.

    Args:
        source: A local `.jsonl`, `.jsonl.zst`, `.json` or `.parquet` file, a registered Hub corpus, or `data_id` of
            any repository under any name.

    Raises:
        ValueError: If there is no such source, or it has no columns.
    """
    from datasets import load_dataset

    for number, row in enumerate(load_dataset(**rows_location(source), streaming=True), 1):
        yield f"{Path(source.data).name}:{number}", dict(row)


def rows_location(source: Source) -> dict[str, Any]:
    """Return the arguments with which `datasets` opens a source.

    Raises:
        ValueError: If there is no such source, or it has no columns.
    """
    registered = CORPORA.get(source.data)
    if source.data_id is not None or isinstance(registered, HubCorpus):
        known = registered if isinstance(registered, HubCorpus) and source.data_id is None else None
        where = {
            "path": source.data_id or (known.id if known else None),
            "name": source.data_config or (known.config if known else None),
            "revision": source.data_revision or (known.revision if known else None),
            "split": source.split or "train",
        }
        return {key: value for key, value in where.items() if value is not None}
    path = Path(source.data).expanduser()
    if registered is not None or path.is_dir():
        raise ValueError(f"data {source.data!r} is plain text without columns: kind {source.kind!r} cannot read it")
    if not path.exists():
        close = difflib.get_close_matches(source.data, CORPORA, n=1, cutoff=0.5)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise ValueError(f"data is {source.data!r}{hint}, which is no file and no corpus; give a path, or data_id")
    builder = next((name for suffix, name in _BUILDERS.items() if path.name.endswith(suffix)), None)
    if builder is None:
        raise ValueError(f"cannot read rows from {path}: allowed are {', '.join(_BUILDERS)}")
    refused = [name for name in ("split", "data_config", "data_revision") if getattr(source, name) is not None]
    if refused:
        raise ValueError(f"{' and '.join(refused)} cannot take effect with the local file {path}: leave it out")
    return {"path": builder, "data_files": glob.escape(str(path)), "split": "train"}
