"""The half-done work of an interrupted run: one line per finished unit, beside the result, keyed by everything."""

from __future__ import annotations

import glob
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def run_key(identity: Mapping[str, Any]) -> str:
    """Return the sha256 of a run's identity: protocol id, hashes, dtype, attention and whatever else could differ."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def partial_path(output: Path, key: str, rank: int = 0) -> Path:
    """Return where process `rank` of the run `key` that will write `output` keeps its finished units."""
    part = f".{rank}" if rank else ""
    return output.with_name(f"{output.name}.{key[:12]}{part}.partial.jsonl")


def left_behind(output: Path, key: str) -> list[Path]:
    """Return the partial files of a run, of however many processes."""
    return sorted(output.parent.glob(f"{glob.escape(output.name)}.{key[:12]}*.partial.jsonl"))


class Partial:
    """The finished units of a run, appended to a file as they finish.

    The first line names the run's key, and so does the file's name: the work of another configuration is neither
    reused nor overwritten. A line that was cut off by a kill, and everything after it, is scored again.

    Attributes:
        path: the file.
        scored: the finished units' scores by unit id.
        seconds: scoring time of the finished units.
    """

    def __init__(self, path: Path, key: str, others: Sequence[Path] = ()) -> None:
        """Open the partial file of the run `key`, taking over what an interrupted run left in it and in `others`."""
        self.path = path
        self.key = key
        self.scored: dict[str, dict[str, Any]] = {}
        self.seconds = 0.0
        for other in others:
            if other != path:
                self._adopt(other)
        self.seconds = 0.0  # another process's time is in its own file
        self._whole_bytes = self._adopt(path)

    def _adopt(self, path: Path) -> int:
        """Read a partial file of the same run, up to the first damaged line; return how many bytes are good."""
        whole = 0
        if not path.exists():
            return whole
        with path.open("rb") as file:
            for number, line in enumerate(file):
                entry = _parse(line)
                if entry is None or (number == 0 and entry.get("key") != self.key):
                    return whole
                if number > 0:
                    if not isinstance(entry.get("unit"), str) or not isinstance(entry.get("score"), dict):
                        return whole
                    self.scored[entry["unit"]] = entry["score"]
                    self.seconds += float(entry.get("seconds", 0.0))
                whole += len(line)
        return whole

    def __enter__(self) -> Partial:
        """Cut off what is damaged or another run's, and open the file for appending."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("r+b" if self._whole_bytes else "wb")
        self._file.truncate(self._whole_bytes)
        self._file.seek(self._whole_bytes)
        if not self._whole_bytes:
            self._write({"key": self.key})
        return self

    def __exit__(self, *exception: object) -> None:
        """Close the file; it stays for the next attempt until the result is written."""
        self._file.close()

    def _write(self, entry: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(entry).encode() + b"\n")
        # A flush is enough to survive a kill; syncing would cost more than a short unit, and a crash of the whole
        # machine at worst costs the last units.
        self._file.flush()

    def add(self, unit_id: str, score: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """Keep a finished unit; return its score as a resumed run would read it, so that both see the same."""
        self._write({"unit": unit_id, "score": score, "seconds": round(seconds, 3)})
        self.seconds += seconds
        self.scored[unit_id] = json.loads(json.dumps(score))
        return self.scored[unit_id]


def _parse(line: bytes) -> dict[str, Any] | None:
    if not line.endswith(b"\n"):
        return None
    try:
        entry = json.loads(line)
    except (json.JSONDecodeError, UnicodeDecodeError):
        return None
    return entry if isinstance(entry, dict) else None
