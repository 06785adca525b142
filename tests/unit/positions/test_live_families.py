"""`ctxext.patch` and `ctxext.fit_length` on every family in memory."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import LENGTH, TINY, WINDOW, expected, frequencies_at, options_for, rotary_dim, theta_of, tiny_model

import ctxext


@pytest.mark.parametrize("method", ["linear", "ntk_by_parts", "longrope", "dynamic"])
@pytest.mark.parametrize("family", list(TINY))
def test_live_patch_and_fit_length(family: str, method: str) -> None:
    theta, dim = theta_of(family), rotary_dim(family)
    options = options_for(method, theta, dim)
    if (family, method) == ("phi3", "dynamic"):
        with pytest.raises(ValueError, match="'dynamic' cannot be written for phi3"):
            ctxext.patch(tiny_model(family), method=method, length=LENGTH, **options)
        return
    model = ctxext.patch(tiny_model(family), method=method, length=LENGTH, **options)
    for seq_len in (WINDOW, LENGTH):
        wanted, factor = expected(method, theta, dim, WINDOW, LENGTH, seq_len)
        frequencies, live_factor = frequencies_at(model, seq_len)
        np.testing.assert_allclose(frequencies, wanted, rtol=1e-5)
        assert live_factor == pytest.approx(factor)
    ctxext.fit_length(model, LENGTH)
    wanted, _ = expected(method, theta, dim, WINDOW, LENGTH, LENGTH)
    for seq_len in (1, LENGTH, WINDOW):
        np.testing.assert_allclose(frequencies_at(model, seq_len)[0], wanted, rtol=1e-5)
