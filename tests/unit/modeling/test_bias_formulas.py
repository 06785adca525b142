"""Every bias against numbers worked out by hand, and against formulas written a second time in `reference.py`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from reference import CASES, LEARNED_CASES, alibi_slopes, bias_table, make_bias, raw_values, t5_bucket
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.t5.modeling_t5 import T5Attention

from ctxext.modeling.bias import TAIL, ScoreBias, t5_buckets

HEAD_COUNTS = (1, 2, 4, 6, 8, 12, 20, 32)
# Near distances, both sides of the windows and of the last T5 bucket, and how far a long-context model reads.
DISTANCES = torch.tensor([*range(36), 63, 64, 126, 127, 128, 129, 198, 199, 200, 201, 511, 1024, 4097, 32768, 65536])

# Fixed biases are float64 rounded once: half a unit in the last of 24 bits is 6e-8.
ROUNDED = {"rtol": 1e-7, "atol": 1e-12}
# Learned ones are float32 throughout: r2 rounded to 6e-8 is raised by ln 65536 = 11 times 2 in distance^r2.
COMPUTED = {"rtol": 4e-6, "atol": 1e-12}


def table(parameters: dict[str, Any], heads: int, distances: list[float]) -> np.ndarray:
    """The live bias, `(heads, n)`."""
    return ScoreBias(parameters, heads).table(torch.tensor(distances)).detach().double().numpy()


def with_values(kind: str, heads: int, **raw: list[float]) -> ScoreBias:
    bias = ScoreBias({"bias_type": kind}, heads)
    bias.kernel.load_state_dict({name: torch.tensor(value) for name, value in raw.items()})
    return bias


# --- by hand -------------------------------------------------------------------------------------------------------


def test_alibi_of_eight_heads() -> None:
    # 8n/8 = 1 .. 8: slopes 1/2 .. 1/256; three times them at distance 3
    wanted = [-3 / 2, -3 / 4, -3 / 8, -3 / 16, -3 / 32, -3 / 64, -3 / 128, -3 / 256]
    assert table({"bias_type": "alibi"}, 8, [3])[:, 0].tolist() == wanted


def test_alibi_of_twelve_heads() -> None:
    # eight heads' slopes, then the 1st, 3rd, 5th and 7th of sixteen heads': 2^-0.5, 2^-1.5, 2^-2.5, 2^-3.5
    wanted = [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256]
    wanted += [0.7071067811865476, 0.3535533905932738, 0.1767766952966369, 0.08838834764831845]
    np.testing.assert_allclose(-table({"bias_type": "alibi"}, 12, [1])[:, 0], wanted, rtol=1e-7)


def test_alibi_with_shifted_and_with_shared_slopes() -> None:
    # h = 4, 8 of two heads; shifted by 2 the slopes 2^-4, 2^-8 become 2^-6, 2^-10
    shifted = table({"bias_type": "alibi", "slope_shift": 2.0}, 2, [64])[:, 0]
    assert shifted.tolist() == [-1.0, -0.0625]
    # one h = 3 for all of twelve heads, shifted by 1: 2^-4
    shared = table({"bias_type": "alibi", "shared_exponent": 3.0, "slope_shift": 1.0}, 12, [32])[:, 0]
    assert shared.tolist() == [-2.0] * 12


def test_sandwich_of_dimension_four() -> None:
    # frequencies 1 and 10000^(-2/4) = 0.01. At distance 0: 1 + 1 - 2 = 0 on every head. At distance 1:
    # cos 1 + cos 0.01 - 2 = 0.5403023058681398 + 0.9999500004166653 - 2 = -0.4597476937151949, over h = 4, 8
    live = table({"bias_type": "sandwich", "dimension": 4}, 2, [0, 1])
    assert live[:, 0].tolist() == [0.0, 0.0]
    np.testing.assert_allclose(live[:, 1], [-0.11493692342879873, -0.05746846171439936], rtol=1e-7)


def test_sandwich_with_another_base() -> None:
    # base 16, dimension 4: frequencies 1 and 16^(-2/4) = 0.25; at distance 2, h = 8 of one head:
    # (cos 2 + cos 0.5 - 2) / 8 = (-0.4161468365471424 + 0.8775825618903728 - 2) / 8
    live = table({"bias_type": "sandwich", "dimension": 4, "base": 16.0}, 1, [2])
    np.testing.assert_allclose(live, [[-0.1923205343320962]], rtol=1e-7)


def test_smoothed_sandwich_where_the_logarithm_is_one() -> None:
    # at e - 1: -0.825 - 0.8 = -1.625 for h = 8, twice that for h = 4
    np.testing.assert_allclose(table({"bias_type": "smoothed_sandwich"}, 2, [math.e - 1])[:, 0], [-3.25, -1.625])
    # the fit of 50 points: -1.024 - 0.015 = -1.039 for h = 8
    fit = {"bias_type": "smoothed_sandwich", "log_slope": 1.024, "offset": 0.015}
    np.testing.assert_allclose(table(fit, 1, [math.e - 1]), [[-1.039]])


@pytest.mark.parametrize(("count", "log_slope", "offset"), [(8192, 0.832, 0.794), (50, 1.024, 0.015)])
def test_smoothed_sandwich_is_the_least_squares_curve(count: int, log_slope: float, offset: float) -> None:
    # distances 0 .. 8191 fit -0.832 and -0.794, close to the published -0.825 and -0.8; 50 points their own pair
    distances = np.arange(count)
    features = np.stack([np.log1p(distances), np.ones(count)], axis=1)
    curve = table({"bias_type": "sandwich"}, 1, distances.tolist())[0]  # one head: h = 8
    fit, *_ = np.linalg.lstsq(features, curve, rcond=None)
    np.testing.assert_allclose(-fit, [log_slope, offset], atol=1e-3)
    options = {"log_slope": log_slope, "offset": offset} if count == 50 else {}  # the defaults are the published pair
    smoothed = table({"bias_type": "smoothed_sandwich", **options}, 1, distances.tolist())[0]
    np.testing.assert_allclose(smoothed, features @ fit, atol=0.07)  # 0.007 ln 8192


def test_window_counts_the_own_token() -> None:
    # w = 3: the own token and two before it
    assert table({"bias_type": "windowed", "window": 3}, 2, [0, 1, 2, 3]).tolist() == [[0.0, 0.0, 0.0, -math.inf]] * 2
    inside = table({"bias_type": "windowed", "window": 3, "with_alibi": True}, 2, [0, 1, 2, 3])
    assert inside.tolist() == [[0.0, -1 / 16, -1 / 8, -math.inf], [0.0, -1 / 256, -1 / 128, -math.inf]]


def test_kerple_log_by_hand() -> None:
    # r1 = 2, r2 = 0.5 at distance 2: -2 ln(1 + 1) = -2 ln 2; r1 = 1, r2 = 3 at distance 5: -ln 16 = -4 ln 2
    bias = with_values("kerple_log", 2, log_r1=[math.log(2), 0.0], log_r2=[math.log(0.5), math.log(3)])
    live = bias.table(torch.tensor([0, 2, 5])).tolist()
    assert live[0][0] == live[1][0] == 0.0
    assert live[0][1] == pytest.approx(-1.3862943611198906)
    assert live[1][2] == pytest.approx(-2.772588722239781)


def test_kerple_power_by_hand() -> None:
    # 2 sigmoid(ln 1/3) = 2 * 1/4: r2 = 0.5, so -3 sqrt(16) = -12; 2 sigmoid(0) = 1: -3 * 16 = -48
    bias = with_values("kerple_power", 2, log_r1=[math.log(3)] * 2, logit_r2=[math.log(1 / 3), 0.0])
    live = bias.table(torch.tensor([0, 1, 16]))
    np.testing.assert_allclose(live.detach().numpy(), [[0, -3, -12], [0, -3, -48]], rtol=1e-6)


def test_kerple_starts_spread_over_the_heads() -> None:
    # the middles of four quarters are 1/8, 3/8, 5/8, 7/8; r1 twice those for the logarithm, r2 in the other order
    log, power = ScoreBias({"bias_type": "kerple_log"}, 4).kernel, ScoreBias({"bias_type": "kerple_power"}, 4).kernel
    np.testing.assert_allclose(log.log_r1.exp().tolist(), [0.25, 0.75, 1.25, 1.75], rtol=1e-6)
    np.testing.assert_allclose(log.log_r2.exp().tolist(), [0.875, 0.625, 0.375, 0.125], rtol=1e-6)
    np.testing.assert_allclose(power.log_r1.exp().tolist(), [0.125, 0.375, 0.625, 0.875], rtol=1e-6)
    np.testing.assert_allclose((2 * power.logit_r2.sigmoid()).tolist(), [1.75, 1.25, 0.75, 0.25], rtol=1e-6)


def test_t5_buckets_by_hand() -> None:
    # below 16 the distance itself; 20: 16 + floor(16 ln(20/16) / ln 8) = 16 + floor(1.717); 64: 16 + floor(10.667);
    # 127: 16 + floor(15.94); from 128 on the last one
    distances = [0, 15, 16, 20, 64, 127, 128, 10**6]
    assert t5_buckets(torch.tensor(distances), 32, 128).tolist() == [0, 15, 16, 17, 26, 31, 31, 31]
    # through the module: a weight that is its own bucket number, 32 more on the second head
    bias = with_values("t5", 2, weight=[[float(i) for i in range(32)], [float(32 + i) for i in range(32)]])
    assert bias.table(torch.tensor(distances)).tolist() == [
        [0, 15, 16, 17, 26, 31, 31, 31],
        [32, 47, 48, 49, 58, 63, 63, 63],
    ]


def test_t5_starts_at_zero() -> None:
    assert not table({"bias_type": "t5"}, 3, [0, 1, 50, 500]).any()


# --- against independent code --------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", HEAD_COUNTS)
def test_alibi_slopes_are_blooms(heads: int) -> None:
    bloom = build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)[:, 0, 1]  # at position 1: the slope itself
    np.testing.assert_allclose(-table({"bias_type": "alibi"}, heads, [1])[:, 0], bloom, rtol=1e-6)
    np.testing.assert_allclose(alibi_slopes(heads), bloom, rtol=1e-6)


@pytest.mark.parametrize("heads", HEAD_COUNTS)
@pytest.mark.parametrize("case", CASES)
def test_table_is_the_formula_up_to_rounding(case: str, heads: int) -> None:
    bias = make_bias(CASES[case], heads)
    wanted = bias_table(CASES[case], heads, DISTANCES, raw_values(bias)).detach()
    live = bias.table(DISTANCES)
    assert live.dtype == torch.float32
    within = COMPUTED if case in ("kerple_log", "kerple_power") else ROUNDED
    torch.testing.assert_close(live.detach().double(), wanted, **within)


@pytest.mark.parametrize(
    "parameters",
    [
        {"bias_type": "alibi", "slope_shift": -1.5},
        {"bias_type": "alibi", "shared_exponent": 2.5},
        {"bias_type": "sandwich", "dimension": 32, "base": 500.0},
        {"bias_type": "smoothed_sandwich", "log_slope": 1.024, "offset": 0.015},
        {"bias_type": "windowed", "window": 1},
        {"bias_type": "t5", "num_buckets": 8, "max_distance": 1000},
    ],
    ids=lambda parameters: "-".join(str(value) for value in parameters.values()),
)
def test_options_reach_the_formula(parameters: dict[str, Any]) -> None:
    bias = make_bias({**parameters, "keep_rotary": True}, 6)  # keep_rotary is the model's, and no option of the bias
    wanted = bias_table(parameters, 6, DISTANCES, raw_values(bias)).detach()
    torch.testing.assert_close(bias.table(DISTANCES).detach().double(), wanted, **ROUNDED)


@pytest.mark.parametrize(("buckets", "furthest"), [(32, 128), (8, 64), (16, 128), (64, 2048), (31, 100)])
def test_t5_buckets_are_those_of_whole_numbers_and_of_transformers(buckets: int, furthest: int) -> None:
    distances = torch.arange(3 * furthest)
    live = t5_buckets(distances, buckets, furthest)
    stock = T5Attention._relative_position_bucket(
        -distances, bidirectional=False, num_buckets=buckets, max_distance=furthest
    )
    assert live.tolist() == [t5_bucket(d, buckets, furthest) for d in distances.tolist()]
    assert torch.equal(live, stock)


# --- learned parameters --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", LEARNED_CASES)
def test_gradient_of_the_parameters(case: str) -> None:
    bias = make_bias(CASES[case], 4)
    distances = torch.arange(300)
    pull = torch.randn(4, 300, generator=torch.Generator().manual_seed(1))
    (bias.table(distances) * pull).sum().backward()
    values = raw_values(bias)
    (bias_table(CASES[case], 4, distances, values) * pull).sum().backward()
    for name, parameter in bias.kernel.named_parameters():
        wanted = values[name].grad
        np.testing.assert_allclose(parameter.grad, wanted, rtol=1e-4, atol=1e-5 * float(wanted.abs().max()))


@pytest.mark.parametrize("raw", [-40.0, -5.0, 0.0, 5.0, 40.0])
def test_kerple_stays_in_its_range_whatever_is_learned(raw: float) -> None:
    distances = torch.tensor([0, 1, 2, 100])
    log = with_values("kerple_log", 1, log_r1=[raw], log_r2=[raw]).table(distances)[0].tolist()
    power = with_values("kerple_power", 1, log_r1=[0.0], logit_r2=[raw]).table(distances)[0].tolist()
    assert log[0] == power[0] == 0.0
    assert 0.0 >= log[1] >= log[2] >= log[3] > -math.inf and log[3] < 0.0  # r1 and r2 are positive
    assert power[1] == -1.0  # 1^r2
    assert -1.0 >= power[3] >= -(100.0**2) * 1.0001  # 0 < r2 <= 2
    assert math.isfinite(power[3])


def test_kerple_power_has_a_finite_gradient_at_distance_zero() -> None:
    bias = with_values("kerple_power", 1, log_r1=[0.0], logit_r2=[-3.0])  # d/dr2 of 0^r2 is 0 * ln 0
    bias.table(torch.tensor([0])).sum().backward()
    assert bias.kernel.log_r1.grad.tolist() == bias.kernel.logit_r2.grad.tolist() == [0.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_learned_tables_are_float32_in_any_dtype(dtype: torch.dtype) -> None:
    for case in LEARNED_CASES:
        bias = make_bias(CASES[case], 4)
        before = bias.table(DISTANCES)
        after = bias.to(dtype).table(DISTANCES)
        assert after.dtype == torch.float32
        # the parameters lose bits (8 remain of 24), and distance^r2 raises that error by ln 65536; nothing overflows
        assert bool(after.isfinite().all()) and bool(((after - before).abs() <= 0.5 * before.abs() + 0.01).all())


# --- the row that attention reads ----------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 5, 1024, 1025, 3000])
@pytest.mark.parametrize("case", ["alibi", "windowed", "kerple_log", "t5"])
def test_row_is_the_table_backwards_before_minus_infinity(case: str, length: int) -> None:
    bias = make_bias(CASES[case], 3)
    row = bias(length, torch.device("cpu"))
    count = row.shape[1] - TAIL
    assert count >= length and row.dtype == torch.float32 and TAIL >= 512
    distances = torch.tensor(sorted({0, length // 2, length - 1}))
    wanted = bias_table(CASES[case], 3, distances, raw_values(bias)).detach()
    torch.testing.assert_close(row[:, count - 1 - distances].detach().double(), wanted, **COMPUTED)
    assert bool((row[:, count:] == -math.inf).all())  # keys after the query
    assert row.is_contiguous()  # blocks are strided views of it


def test_fixed_row_grows_and_is_no_state() -> None:
    bias = ScoreBias({"bias_type": "alibi"}, 2)
    assert bias(100, torch.device("cpu")) is bias(90, torch.device("cpu"))  # one copy for all lengths
    longer = bias(5000, torch.device("cpu"))
    assert longer.shape[1] - TAIL >= 5000 and longer[0, longer.shape[1] - TAIL - 1 - 4999] == -4999 / 16
    assert not bias.state_dict()


def test_row_made_in_inference_mode_serves_training() -> None:
    bias = ScoreBias({"bias_type": "alibi"}, 2)
    with torch.inference_mode():
        bias(100, torch.device("cpu"))
    assert not bias(100, torch.device("cpu")).is_inference()


# --- errors --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parameters", [{"bias_type": "alibbi"}, {}, {"bias_type": None}])
def test_unknown_bias_is_refused_with_those_there_are(parameters: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="bias_type is .* must be one of .*alibi.*sandwich.*windowed.*kerple_log.*t5"):
        ScoreBias(parameters, 4)


@pytest.mark.parametrize("case", CASES)
def test_unknown_option_is_refused_by_name(case: str) -> None:
    with pytest.raises(ValueError, match=f"bias_parameters of {CASES[case]['bias_type']} .*slope_shft"):
        ScoreBias({**CASES[case], "slope_shft": 1.0}, 4)


def test_window_is_required() -> None:
    with pytest.raises(ValueError, match="bias_parameters of windowed .*window"):
        ScoreBias({"bias_type": "windowed"}, 4)
