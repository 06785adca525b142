"""ctxext: extend the context window of pretrained RoPE language models.

The public API is small and lazy: importing this package imports neither torch nor transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ctxext.checkpoint.doctor import diagnose
    from ctxext.checkpoint.inspect import inspect_checkpoint
    from ctxext.checkpoint.patch import patch_checkpoint
    from ctxext.positions import PositionMethod, RopeScaling, get_method
    from ctxext.positions.live import fit_length, patch
    from ctxext.training.adapters import load_adapter

_EXPORTS = {
    "PositionMethod": "ctxext.positions",
    "RopeScaling": "ctxext.positions",
    "diagnose": "ctxext.checkpoint.doctor",
    "fit_length": "ctxext.positions.live",
    "get_method": "ctxext.positions",
    "inspect_checkpoint": "ctxext.checkpoint.inspect",
    "load_adapter": "ctxext.training.adapters",
    "patch": "ctxext.positions.live",
    "patch_checkpoint": "ctxext.checkpoint.patch",
}

__all__ = [
    "PositionMethod",
    "RopeScaling",
    "diagnose",
    "fit_length",
    "get_method",
    "inspect_checkpoint",
    "load_adapter",
    "patch",
    "patch_checkpoint",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'ctxext' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
