"""The formulas against transformers' own functions, and against numbers worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from helpers import stock
from hypothesis import given, settings
from hypothesis import strategies as st

from ctxext.positions.base import Extension, RopeScaling, unscaled_inv_freq
from ctxext.positions.rope import NTK, Dynamic, Linear, LongRoPE, Theta
from ctxext.positions.rope_by_parts import Llama3, NTKByParts, Yarn

RTOL = 1e-5  # float32 powers of the reference
# (rotated dimensions, share of the head): both the head and what it rotates are even.
HEADS = st.tuples(st.sampled_from([4, 8, 16, 32, 64, 96, 128, 256]), st.sampled_from([0.25, 0.5, 0.75, 1.0])).filter(
    lambda head: (head[0] / head[1]).is_integer()
)
THETAS = st.floats(100.0, 1e7)
FACTORS = st.floats(1.0, 64.0)
WINDOWS = st.sampled_from([128, 1000, 2048, 4096, 8192, 32768])
examples = settings(max_examples=60, deadline=None)


def agree(ours: RopeScaling, dim: int, reference: tuple[np.ndarray, float], seq_len: int | None = None) -> None:
    np.testing.assert_allclose(ours.inv_freq(dim, seq_len), reference[0], rtol=RTOL)
    assert ours.cos_sin_factor == pytest.approx(reference[1], rel=1e-6)


@examples
@given(HEADS, THETAS, FACTORS)
def test_linear(head: tuple[int, float], theta: float, factor: float) -> None:
    dim, partial = head
    agree(
        Linear(rope_theta=theta, factor=factor), dim, stock("linear", dim, theta, 2048, None, partial, factor=factor)
    )


@examples
@given(HEADS, THETAS, FACTORS, WINDOWS, st.floats(0.1, 20.0))
def test_dynamic(head: tuple[int, float], theta: float, factor: float, window: int, length: float) -> None:
    dim, partial = head
    ours = Dynamic(rope_theta=theta, factor=factor, original_max_position_embeddings=window)
    for seq_len in (None, max(1, int(window * length))):
        agree(ours, dim, stock("dynamic", dim, theta, window, seq_len, partial, factor=factor), seq_len)


@examples
@given(
    HEADS,
    THETAS,
    FACTORS,
    WINDOWS,
    st.tuples(st.floats(0.5, 4.0), st.floats(5.0, 64.0)),
    st.booleans(),
    st.one_of(st.none(), st.floats(0.5, 2.0)),
)
def test_yarn(
    head: tuple[int, float],
    theta: float,
    factor: float,
    window: int,
    betas: tuple[float, float],
    truncate: bool,
    attention: float | None,
) -> None:
    dim, partial = head
    own = 0.1 * math.log(factor) + 1
    more = {"factor": factor, "original_max_position_embeddings": window, "truncate": truncate}
    more |= {"beta_slow": betas[0], "beta_fast": betas[1]}
    ours = Yarn(rope_theta=theta, attention_factor=own if attention is None else attention, **more)
    agree(ours, dim, stock("yarn", dim, theta, 2 * window, None, partial, attention_factor=attention, **more))
    if attention == 1.0:
        agree(NTKByParts(rope_theta=theta, attention_factor=1.0, **more), dim, (ours.inv_freq(dim), 1.0))


@examples
@given(HEADS, THETAS, st.floats(1.01, 64.0), WINDOWS, st.randoms(use_true_random=False))
def test_longrope(head: tuple[int, float], theta: float, factor: float, window: int, random: object) -> None:
    dim, partial = head
    short, long = ([random.uniform(0.5, 64.0) for _ in range(dim // 2)] for _ in range(2))  # type: ignore[attr-defined]
    extension = Extension(window=window, length=round(window * factor), rotary_dim=dim)
    ours = LongRoPE.extend(Theta(rope_theta=theta), extension, long_factor=tuple(long), short_factor=tuple(short))
    more = {"short_factor": short, "long_factor": long, "original_max_position_embeddings": window}
    for seq_len in (None, window, window + 1, extension.length):
        reference = stock("longrope", dim, theta, extension.length, seq_len, partial, factor=extension.factor, **more)
        agree(ours, dim, reference, seq_len)


@examples
@given(HEADS, THETAS, FACTORS, WINDOWS, st.floats(0.5, 2.0), st.floats(2.5, 16.0))
def test_llama3(head: tuple[int, float], theta: float, factor: float, window: int, low: float, high: float) -> None:
    dim, partial = head
    more = {"factor": factor, "original_max_position_embeddings": window}
    more |= {"low_freq_factor": low, "high_freq_factor": high}
    agree(Llama3(rope_theta=theta, **more), dim, stock("llama3", dim, theta, 2 * window, None, partial, **more))


@examples
@given(HEADS, THETAS, st.floats(1.01, 64.0), WINDOWS)
def test_ntk_is_the_dynamic_base_at_twice_the_window(
    head: tuple[int, float], theta: float, factor: float, window: int
) -> None:
    """Stock has no static NTK; its dynamic one at l = 2L with factor s has the stretch 2s - (s - 1) = s + 1."""
    dim, partial = head
    extension = Extension(window=window, length=round(window * factor), rotary_dim=dim)
    ours = NTK.extend(Theta(rope_theta=theta), extension)
    reference = stock("dynamic", dim, theta, window, 2 * window, partial, factor=extension.factor - 1)
    agree(ours, dim, reference)
    lowest = unscaled_inv_freq(theta, dim)[-1]
    assert ours.inv_freq(dim)[-1] == pytest.approx(lowest / extension.factor, rel=1e-12)
    assert ours.inv_freq(dim)[0] == 1.0


def test_unscaled_frequencies_by_hand() -> None:
    np.testing.assert_allclose(unscaled_inv_freq(10000.0, 4), [1.0, 0.01], rtol=1e-15)
    np.testing.assert_allclose(unscaled_inv_freq(16.0, 8), [1.0, 0.5, 0.25, 0.125], rtol=1e-15)


@pytest.mark.parametrize(
    "scaling",
    [
        Linear(rope_theta=5e5, factor=1.0),
        Dynamic(rope_theta=5e5, factor=1.0, original_max_position_embeddings=64),
        Yarn(rope_theta=5e5, factor=1.0, original_max_position_embeddings=64, attention_factor=1.0),
        Llama3(rope_theta=5e5, factor=1.0, original_max_position_embeddings=64),
        LongRoPE(
            rope_theta=5e5,
            factor=1.0,
            original_max_position_embeddings=64,
            attention_factor=1.0,
            short_factor=(1.0,) * 8,
            long_factor=(1.0,) * 8,
        ),
    ],
    ids=lambda scaling: scaling.name,
)
def test_factor_one_is_the_identity(scaling: RopeScaling) -> None:
    for seq_len in (None, 64):
        np.testing.assert_allclose(scaling.inv_freq(16, seq_len), unscaled_inv_freq(5e5, 16), rtol=1e-14)
    assert scaling.cos_sin_factor == 1.0


def test_linear_divides_every_frequency() -> None:
    scaling = Linear.extend(Theta(rope_theta=16.0), Extension(window=100, length=400, rotary_dim=8))
    np.testing.assert_allclose(scaling.inv_freq(8), [0.25, 0.125, 0.0625, 0.03125], rtol=1e-15)


def test_ntk_base_by_hand() -> None:
    """d = 4 makes the exponent d / (d - 2) two: base 100 for s = 8 becomes 6400, and the lowest frequency 1/80."""
    scaling = NTK.extend(Theta(rope_theta=100.0), Extension(window=10, length=80, rotary_dim=4))
    assert scaling.rope_theta == pytest.approx(6400.0)
    np.testing.assert_allclose(scaling.inv_freq(4), [1.0, 1 / 80], rtol=1e-12)


def test_dynamic_by_hand() -> None:
    """s = 4, L = 100: at 250 tokens the stretch is 4 * 2.5 - 3 = 7, so with d = 4 base 100 becomes 4900."""
    scaling = Dynamic(rope_theta=100.0, factor=4.0, original_max_position_embeddings=100)
    for seq_len in (None, 1, 100):
        np.testing.assert_allclose(scaling.inv_freq(4, seq_len), [1.0, 0.1], rtol=1e-12)
    np.testing.assert_allclose(scaling.inv_freq(4, 250), [1.0, 1 / 70], rtol=1e-12)


def test_yarn_ramp_by_hand() -> None:
    """theta 16, d 8: pair j turns L / (2 pi) * 2^-j times; with L = 2 pi * 32 that is 32, 16, 8, 4.

    The ramp from beta_fast 32 (index 0) to beta_slow 4 (index 3) keeps 1, 2/3, 1/3, 0; L itself must be whole, so it
    is 201 and the ends are rounded outwards to the same indices when asked to.
    """
    scaling = Yarn(
        rope_theta=16.0,
        factor=4.0,
        original_max_position_embeddings=201,
        attention_factor=1.0,
        beta_fast=32.0,
        beta_slow=4.0,
        truncate=False,
    )
    np.testing.assert_allclose(scaling.ramp(8), [1.0, 2 / 3, 1 / 3, 0.0], atol=1e-3)
    kept = np.array([1.0, 2 / 3, 1 / 3, 0.0])
    wanted = np.array([1.0, 0.5, 0.25, 0.125]) * (kept + (1 - kept) / 4)
    np.testing.assert_allclose(scaling.inv_freq(8), wanted, rtol=2e-3)


@examples
@given(st.sampled_from([16, 64, 128]), THETAS, FACTORS, st.sampled_from([2048, 8192, 131072]))
def test_yarn_leaves_the_highest_frequency_alone(dim: int, theta: float, factor: float, window: int) -> None:
    scaling = Yarn.extend(Theta(rope_theta=theta), Extension(window=window, length=64 * window, rotary_dim=dim))
    assert scaling.inv_freq(dim)[0] == 1.0
    assert np.all(np.diff(scaling.inv_freq(dim)) < 0)


def test_attention_factors_by_hand() -> None:
    """0.1 ln 4 + 1, 0.1 ln 32 + 1; sqrt(1 + ln 32 / ln 4096) = sqrt(1 + 5/12), as Phi-3-mini-128k has it."""
    theta = Theta(rope_theta=1e4)
    by_four, by_32 = (Extension(window=4096, length=4096 * s, rotary_dim=8) for s in (4, 32))
    assert Yarn.extend(theta, by_four).cos_sin_factor == pytest.approx(1.1386294361)
    assert Yarn.extend(theta, by_32).cos_sin_factor == pytest.approx(1.3465735903)
    assert NTKByParts.extend(theta, by_four).cos_sin_factor == 1.0
    longrope = LongRoPE.extend(theta, by_32, long_factor=(2.0,) * 4)
    assert longrope.cos_sin_factor == pytest.approx(1.1902380714)
    assert LongRoPE.extend(theta, by_32, long_factor=(2.0,) * 4, attention_factor=1.5).cos_sin_factor == 1.5
    for scaling in (Linear.extend(theta, by_four), NTK.extend(theta, by_four), Llama3.extend(theta, by_four)):
        assert scaling.cos_sin_factor == 1.0


def test_llama3_regions() -> None:
    """L = 8192: wavelengths below 2048 kept, above 8192 divided by 8, a smooth mean between."""
    scaling = Llama3(rope_theta=5e5, factor=8.0, original_max_position_embeddings=8192)
    base = unscaled_inv_freq(5e5, 128)
    wavelength, ratio = 2 * math.pi / base, scaling.inv_freq(128) / base
    np.testing.assert_allclose(ratio[wavelength < 2048], 1.0)
    np.testing.assert_allclose(ratio[wavelength > 8192], 0.125)
    between = (wavelength > 2048) & (wavelength < 8192)
    assert between.sum() == 6 and np.all((ratio[between] > 0.125) & (ratio[between] < 1.0))
    # At a wavelength of 4096 a pair turns twice: (2 - 1) / (4 - 1) = 1/3 kept, so 1/3 + 2/3 * 1/8 = 5/12.
    theta = (4096 / (2 * math.pi)) ** 2  # d = 4: the second pair has theta^(-1/2)
    exact = Llama3(rope_theta=theta, factor=8.0, original_max_position_embeddings=8192)
    assert exact.inv_freq(4)[1] / unscaled_inv_freq(theta, 4)[1] == pytest.approx(5 / 12)


def test_longrope_switches_after_the_original_window() -> None:
    scaling = LongRoPE.extend(
        Theta(rope_theta=16.0),
        Extension(window=100, length=200, rotary_dim=8),
        long_factor=(1, 2, 3, 4),
        short_factor=(1, 1, 1, 2),
    )
    for seq_len in (None, 1, 100):
        np.testing.assert_allclose(scaling.inv_freq(8, seq_len), [1, 0.5, 0.25, 0.0625])
    np.testing.assert_allclose(scaling.inv_freq(8, 101), [1, 0.25, 0.25 / 3, 0.03125])


@pytest.mark.parametrize("method", ["linear", "ntk_by_parts", "llama3"])
def test_static_methods_as_longrope_factors(method: str) -> None:
    from ctxext.positions import get_method

    extension = Extension(window=512, length=2048, rotary_dim=16)
    scaling = get_method(method).extend(Theta(rope_theta=1e4), extension)
    written = scaling.longrope_parameters(16, 2048)
    reference = stock("longrope", 16, 1e4, 2048, 4096, **{k: written[k] for k in ("short_factor", "long_factor")})
    np.testing.assert_allclose(reference[0], scaling.inv_freq(16), rtol=RTOL)
