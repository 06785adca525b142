"""A Hub on this machine, which huggingface_hub takes for the only one, and folders to push to it."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from expected import TOKEN
from helpers import byte_tokenizer, save_tiny
from huggingface_hub import constants
from server import Hub

from ctxext.checkpoint.patch import patch_checkpoint


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """A running, empty Hub whose token is in HF_TOKEN; Xet, which it does not speak, is switched off."""
    with Hub(TOKEN) as running:
        monkeypatch.setattr(constants, "ENDPOINT", running.endpoint)
        template = running.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        huggingface_hub.utils.close_session()
        yield running
    huggingface_hub.utils.close_session()


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that huggingface_hub would have waited before it tries again; it does not wait here."""
    slept: list[float] = []
    import time

    clock = SimpleNamespace(sleep=slept.append, time=time.time, monotonic=time.monotonic)
    monkeypatch.setattr("huggingface_hub.utils._http.time", clock)
    return slept


@pytest.fixture(scope="session")
def yarn_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny llama with a tokenizer, extended by yarn from 128 to 512 tokens; tests must not change it."""
    folder = tmp_path_factory.mktemp("hub")
    source = save_tiny(folder / "source", "llama", vocab_size=300)
    byte_tokenizer().save_pretrained(source)
    patch_checkpoint(source, folder / "yarn", method="yarn", length=512)
    return folder / "yarn"


@pytest.fixture
def checkpoint(yarn_folder: Path, tmp_path: Path) -> Path:
    """The same folder, a copy that a test may change (but for the content of the weights)."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    for path in yarn_folder.iterdir():
        if path.suffix == ".safetensors":
            os.link(path, folder / path.name)
        else:
            (folder / path.name).write_bytes(path.read_bytes())
    return folder


@pytest.fixture
def everything_said(caplog: Any, capfd: Any) -> Any:
    """Return a function that gives all that was logged, at any level, and printed so far."""
    caplog.set_level(logging.DEBUG)
    logging.getLogger("huggingface_hub").setLevel(logging.DEBUG)
    logging.getLogger("huggingface_hub").propagate = True
    yield lambda: caplog.text + "".join(capfd.readouterr())
    logging.getLogger("huggingface_hub").setLevel(logging.WARNING)
    logging.getLogger("huggingface_hub").propagate = False
