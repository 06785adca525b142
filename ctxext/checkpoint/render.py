"""Reports on checkpoints as text for a terminal."""

from __future__ import annotations

from typing import Any


def render_patch(report: dict[str, Any]) -> str:
    """Return what `ctxext patch` prints."""
    done = "wrote" if report["written"] else "would write"
    lines = [
        f"{done} {report['output']}: {report['method']}, {report['window']} -> {report['length']} tokens "
        f"(factor {report['factor']:g}, {report['total_factor']:g} in all)",
        f"rope_theta {report['rope_theta']:g}, attention factor {report['attention_factor']:g}",
        *(f"note: {note}" for note in report["notes"]),
    ]
    if not report["written"]:
        return "\n".join([*lines, *report["config_diff"]])
    checked = (
        "stock transformers builds it and its frequencies are the formula's" if report["verified"] else "not verified"
    )
    return "\n".join([*lines, checked])
