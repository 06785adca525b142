"""Shared fixtures: tiny random checkpoints that are saved once a session."""

from __future__ import annotations

import os

# Two processes with two threads each cost each other several times; the models here are too small to gain.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from collections.abc import Callable
from pathlib import Path

import pytest
from helpers import save_tiny


@pytest.fixture(scope="session")
def tiny_source(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function from a family to a tiny saved checkpoint; tests must not change it."""
    folder = tmp_path_factory.mktemp("sources")

    def source(family: str) -> Path:
        made = folder / family
        return made if made.exists() else save_tiny(made, family)

    return source


@pytest.fixture(scope="session")
def llama(tiny_source: Callable[[str], Path]) -> Path:
    """Return a tiny saved llama, two layers, window 128; tests must not change it."""
    return tiny_source("llama")
