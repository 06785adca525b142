"""From what a user names to a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from ctxext.checkpoint.source import cache_folder, file_sha256, resolve_checkpoint


def test_a_folder_is_itself(llama: Path) -> None:
    assert resolve_checkpoint(llama) == resolve_checkpoint(str(llama)) == llama


def test_home_is_expanded(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(llama.parent))
    assert resolve_checkpoint(f"~/{llama.name}") == llama


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("absent.gguf", "there is no file .*absent.gguf"),
        ("some/where/deep", "there is no folder .*is no Hub id such as org/name"),
        ("plain", "there is no folder .*is no Hub id such as org/name"),
    ],
)
def test_what_is_not_there(name: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=told):
        resolve_checkpoint(name)


def test_a_file_that_is_no_checkpoint(llama: Path) -> None:
    with pytest.raises(ValueError, match="config.json is a file; a checkpoint is a folder"):
        resolve_checkpoint(llama / "config.json")


def test_hub_ids_fetch_no_pickles(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def fetch(name: str, revision: str | None, allow_patterns: list[str]) -> str:
        calls.append((name, revision, allow_patterns))
        return str(llama)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    assert resolve_checkpoint("some-org/some.model") == llama
    assert resolve_checkpoint("some-org/some.model@refs/pr/1") == llama
    assert [call[:2] for call in calls] == [("some-org/some.model", None), ("some-org/some.model", "refs/pr/1")]
    assert "*.safetensors" in calls[0][2] and not any("bin" in pattern for pattern in calls[0][2])


def test_hub_refusals_say_what_to_check(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> str:
        raise LocalEntryNotFoundError("not in the cache, and no connection\nmore lines")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ValueError, match="Hub does not give 'org/name': not in the cache, and no connection; check"):
        resolve_checkpoint("org/name@main")


def test_cache_folder_and_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CTXEXT_CACHE", str(tmp_path / "cache"))
    assert cache_folder() == tmp_path / "cache"
    (tmp_path / "x").write_bytes(b"abc")  # FIPS 180-2, appendix B.1
    assert file_sha256(tmp_path / "x") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
