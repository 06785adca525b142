"""Shared fixtures: tiny random checkpoints that are saved once a session."""

from __future__ import annotations

import os
import subprocess
import venv

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


TRANSFORMERS_4 = ["torch==2.13.0", "transformers==4.57.6", "safetensors"]


@pytest.fixture(scope="session")
def transformers4(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the python of an environment with transformers 4.57: CTXEXT_TRANSFORMERS4_PYTHON, or one made here."""
    given = os.environ.get("CTXEXT_TRANSFORMERS4_PYTHON")
    if given:
        return given
    folder = tmp_path_factory.mktemp("transformers4")
    venv.create(folder, with_pip=True)
    python = str(folder / "bin" / "python")
    done = subprocess.run([python, "-m", "pip", "install", "-q", *TRANSFORMERS_4], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"pip cannot install {' '.join(TRANSFORMERS_4)}: {done.stderr.strip().splitlines()[-1]}")
    return python
