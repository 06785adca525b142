"""Success by depth in the prompt, whatever an evaluation measures distances from."""

from __future__ import annotations

from ctxext.evaluation.result import Result

DEPTH_LABEL = "depth in the prompt (%)"
PASSKEY = "passkey"


def depth_profile(result: Result) -> tuple[int, list[float], list[float]]:
    """Return a result's success by depth.

    Args:
        result: of `passkey`, whose distances from the end become depths, or of any evaluation with a heat plot over
            `DEPTH_LABEL`, such as `retrieval`.

    Returns:
        The prompt's length in tokens; ascending depths in percent, 0 at the start and 100 at the end; a success rate
        between 0 and 1 for each.

    Raises:
        ValueError: if the result has no such curve, or no length.
    """
    length = result.options.get("length")
    for plot in result.plots:
        if not isinstance(length, int) or plot["kind"] != "heat":
            continue
        if plot["x_label"] == DEPTH_LABEL:
            return length, list(plot["x"]), list(plot["y"])
        if plot["id"] == PASSKEY:
            return length, [100 * (1 - k / length) for k in reversed(plot["x"])], list(reversed(plot["y"]))
    raise ValueError(f"a result of {result.evaluation} has no success by depth; results of passkey and retrieval have")
