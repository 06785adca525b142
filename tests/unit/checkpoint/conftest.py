"""A healthy checkpoint to be made ill."""

from __future__ import annotations

from pathlib import Path

import pytest
from doctor_cases import add_companions
from helpers import LENGTH

from ctxext import patch_checkpoint


@pytest.fixture
def healthy(llama: Path, tmp_path: Path) -> Path:
    """Return a llama that yarn extended to four times its window."""
    patch_checkpoint(llama, tmp_path / "healthy", method="yarn", length=LENGTH, verify=False)
    add_companions(tmp_path / "healthy", LENGTH)
    return tmp_path / "healthy"
