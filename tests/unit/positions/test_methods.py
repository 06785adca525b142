"""The registry, options and their errors, and composition rules of single methods."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from ctxext import positions
from ctxext.checkpoint.options import parse_factors, parse_options
from ctxext.positions import METHODS, get_method
from ctxext.positions.base import Extension, FloatArray, RopeScaling, check_length, check_number, unscaled_inv_freq
from ctxext.positions.rope import Dynamic, Linear, LongRoPE, Theta
from ctxext.positions.rope_by_parts import Llama3, NTKByParts, Yarn

TO = Extension(window=128, length=512, rotary_dim=8)
BASE = Theta(rope_theta=1e4)


@dataclass(frozen=True, kw_only=True)
class Halving(RopeScaling):
    """A plugin's method: every frequency halved."""

    name = "halving"
    title = "half of everything"

    def inv_freq(self, rotary_dim: int, seq_len: int | None = None) -> FloatArray:
        return unscaled_inv_freq(self.rope_theta, rotary_dim) / 2

    @classmethod
    def extend(cls, current: RopeScaling, to: Extension) -> RopeScaling:
        return cls(rope_theta=current.rope_theta)


def register(monkeypatch: pytest.MonkeyPatch, name: str, target: Any) -> None:
    entry = SimpleNamespace(name=name, value=f"package:{name}", load=lambda: target)
    monkeypatch.setattr(positions, "entry_points", lambda group: [entry] if group == "ctxext.positions" else [])


def test_alias_and_names() -> None:
    assert get_method("pi") is get_method("linear") is Linear
    assert all(method.name == name for name, method in METHODS.items())


def test_unknown_method_names_the_nearest_and_all() -> None:
    with pytest.raises(
        ValueError, match=r"unknown method 'yran' \(did you mean 'yarn'\?\); methods are linear, theta"
    ):
        get_method("yran")
    with pytest.raises(ValueError, match="unknown method 'zzzz'; methods are"):
        get_method("zzzz")


def test_plugin_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, "halving", Halving)
    found = positions._with_plugins()
    assert found["halving"] is Halving and found["linear"] is Linear


@pytest.mark.parametrize("target", [object(), dict, Extension])
def test_plugin_that_is_no_method_is_refused(monkeypatch: pytest.MonkeyPatch, target: Any) -> None:
    register(monkeypatch, "other", target)
    with pytest.raises(ValueError, match="plugin 'package:other' is no RopeScaling"):
        positions._with_plugins()


@pytest.mark.parametrize("name", ["yarn", "pi"])
def test_plugin_must_not_take_a_name(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    register(monkeypatch, name, Halving)
    with pytest.raises(ValueError, match=f"registers '{name}', which is taken"):
        positions._with_plugins()


def test_a_static_method_without_a_stock_type_is_written_as_longrope() -> None:
    written = Halving(rope_theta=1e4).rope_parameters(8, 512)
    assert written["rope_type"] == "longrope"
    assert written["short_factor"] == written["long_factor"] == pytest.approx([2.0] * 4)
    with pytest.raises(ValueError, match="dynamic changes with the sequence length"):
        Dynamic.extend(BASE, TO).longrope_parameters(8, 128)


def test_options_are_the_parameters_that_extend_adds() -> None:
    names = {name: set(method.options()) for name, method in METHODS.items()}
    assert names["linear"] == names["ntk"] == names["dynamic"] == set()
    assert names["theta"] == {"rope_theta"}
    assert names["yarn"] == {"attention_factor", "beta_fast", "beta_slow", "truncate"}
    assert names["ntk_by_parts"] == {"beta_fast", "beta_slow", "truncate"}
    assert names["longrope"] == {"long_factor", "short_factor", "attention_factor"}
    assert names["llama3"] == {"low_freq_factor", "high_freq_factor"}


def test_theta_suggests_the_ntk_value() -> None:
    """d = 8 and s = 4: 10000 * 4^(8/6) = 63496."""
    with pytest.raises(ValueError, match="needs --rope-theta, the new base; .* is 63496"):
        Theta.extend(BASE, TO)
    with pytest.raises(ValueError, match="rope_theta is 9000; to read further it must be above 10000; .* 63496"):
        Theta.extend(BASE, TO, rope_theta=9000.0)


@pytest.mark.parametrize(
    ("method", "options", "told"),
    [
        ("yarn", {"beta_fast": 0.5}, "beta_fast is 0.5 and beta_slow 1.0; beta_fast must be the larger"),
        ("yarn", {"beta_slow": -1.0}, "beta_slow is -1.0; it must be a finite number above 0"),
        ("yarn", {"truncate": "no"}, "truncate is 'no'; it must be true or false"),
        ("yarn", {"attention_factor": float("nan")}, "attention_factor is nan; it must be a finite number"),
        (
            "llama3",
            {"high_freq_factor": 1.0},
            "high_freq_factor is 1.0 and low_freq_factor 1.0; high_freq_factor must be the larger",
        ),
        ("theta", {"rope_theta": "1e6"}, "rope_theta is '1e6'; it must be a finite number above 1"),
        ("longrope", {}, "needs --long-factor: 4 numbers"),
        ("longrope", {"long_factor": (1.0, 2.0)}, "long_factor has 2 numbers; this model needs 4"),
        ("longrope", {"long_factor": (1.0, 2.0, 0.0, 1.0)}, r"long_factor\[2\] is 0.0"),
        ("longrope", {"long_factor": "1,2"}, "long_factor is '1,2'; it must be a list of positive numbers"),
        ("longrope", {"long_factor": (1,) * 4, "short_factor": (1,) * 3}, "short_factor has 3 numbers"),
    ],
)
def test_option_errors_name_the_option_and_what_is_allowed(method: str, options: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        get_method(method).extend(BASE, TO, **options)


def test_two_rotated_dimensions_have_no_ntk_base() -> None:
    with pytest.raises(ValueError, match="NTK scaling needs more than 2 rotated dimensions; this model rotates 2"):
        get_method("ntk").extend(BASE, dataclasses.replace(TO, rotary_dim=2))


def test_what_is_there_is_restated_from_the_original_window() -> None:
    """128 -> 512 -> 2048 is 128 -> 2048 for every method that knows its original window."""
    again = Extension(window=512, length=2048, rotary_dim=8)
    at_once = Extension(window=128, length=2048, rotary_dim=8)
    for method in (Linear, Dynamic, Yarn, NTKByParts, Llama3):
        assert method.extend(method.extend(BASE, TO), again) == method.extend(BASE, at_once), method
    first = LongRoPE.extend(BASE, TO, long_factor=(1, 2, 3, 4))
    last = {"long_factor": (1, 3, 9, 16)}
    assert LongRoPE.extend(first, again, **last) == LongRoPE.extend(BASE, at_once, **last)


def test_yarn_keeps_the_ramp_that_is_there_and_asks_for_an_unknown_attention_factor() -> None:
    again = Extension(window=512, length=2048, rotary_dim=8)
    ramped = Yarn.extend(BASE, TO, beta_fast=16.0, truncate=False)
    kept = Yarn.extend(ramped, again)
    assert (kept.beta_fast, kept.truncate, kept.factor) == (16.0, False, 16.0)
    odd = Yarn.extend(BASE, TO, attention_factor=1.25)
    with pytest.raises(ValueError, match="attention_factor 1.25, not YaRN's own 1.13863 .* --attention-factor"):
        Yarn.extend(odd, again)
    assert Yarn.extend(odd, again, attention_factor=1.4).cos_sin_factor == 1.4


def test_new_base_keeps_the_scaling_that_is_there() -> None:
    scaled = Linear.extend(BASE, TO)
    assert get_method("theta").extend(scaled, TO, rope_theta=1e6) == Linear(rope_theta=1e6, factor=4.0)


@pytest.mark.parametrize("value", [True, "8", None, float("inf"), float("nan"), 10**400, -(10**400), 0, -1, [1]])
def test_check_number_refuses(value: object) -> None:
    with pytest.raises(ValueError, match="^some_key is .*; it must be a finite number above 0$"):
        check_number("some_key", value, above=0.0)


@pytest.mark.parametrize("value", [True, "8", None, 4096.0, 8.5, float("nan"), 0, -1, 2**41, 10**400, [1]])
def test_check_length_refuses(value: object) -> None:
    with pytest.raises(
        ValueError, match=r"^some_key is .*; it must be a whole number \(no float\) from 1 to 2\*\*40$"
    ):
        check_length("some_key", value)


def test_factors_from_a_list_and_a_file(tmp_path: Any) -> None:
    assert parse_factors("long_factor", None) is None
    assert parse_factors("long_factor", "1, 2.5,3e1") == (1.0, 2.5, 30.0)
    path = tmp_path / "factors.json"
    path.write_text('{"long_factor": [1, 2], "short_factor": [3, 4]}')
    assert parse_factors("short_factor", str(path)) == (3.0, 4.0)
    path.write_text("[5, 6]")
    assert parse_factors("long_factor", str(path)) == (5.0, 6.0)
    for given in ("a,b", "1,,2", str(tmp_path / "absent.json")):
        with pytest.raises(ValueError, match="long_factor is .* it must be numbers separated by commas"):
            parse_factors("long_factor", given)
    for given in ("1,-2", "1,true"):
        with pytest.raises(ValueError, match=r"long_factor\[1\] is"):
            parse_factors("long_factor", given)
    with pytest.raises(ValueError, match="holds no list of numbers"):
        parse_factors("long_factor", "")


def test_options_of_a_command_line() -> None:
    assert parse_options(["beta-fast=16", "word=fast", "flag=true"]) == {"beta_fast": 16, "word": "fast", "flag": True}
    for pairs, told in (
        (["x"], "is not NAME=VALUE"),
        (["1x=2"], "is not NAME=VALUE"),
        (["a=1", "a=2"], "given twice"),
    ):
        with pytest.raises(ValueError, match=told):
            parse_options(pairs)
