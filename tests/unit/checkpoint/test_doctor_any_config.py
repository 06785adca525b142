"""Any config at all is diagnosed, or refused with a message."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from doctor_cases import ORIGINAL, Config
from helpers import (
    LENGTH,
    write_config,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ctxext import diagnose, patch_checkpoint

JSON_VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(min_value=-(10**400), max_value=10**400),
    st.floats(allow_nan=True, allow_infinity=True),
    st.sampled_from(["yarn", "linear", "x", 0, -1, 1e300, 2**63, 128.0, [], {}, [1.0], {"factor": None}]),
)


KEYS = [
    "max_position_embeddings",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "head_dim",
    "hidden_size",
    "num_attention_heads",
    "num_hidden_layers",
    "sliding_window",
    "ctxext",
    ORIGINAL,
    "partial_rotary_factor",
]


INNER = ["rope_type", "type", "factor", "rope_theta", ORIGINAL, "attention_factor", "beta_fast", "truncate", "x"]


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    top=st.dictionaries(st.sampled_from(KEYS), JSON_VALUES, max_size=3),
    inner=st.dictionaries(st.sampled_from(INNER), JSON_VALUES, max_size=3),
    dialect=st.sampled_from(["rope_scaling", "rope_parameters"]),
    record=st.dictionaries(
        st.sampled_from(["method", "length", "original_length", "total_factor", "options", "history"]),
        JSON_VALUES,
        max_size=2,
    ),
)
def test_any_config_is_diagnosed_or_refused_with_a_message(
    top: Config, inner: Config, dialect: str, record: Config, llama: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.getbasetemp() / "any"
    if not folder.exists():
        patch_checkpoint(llama, folder, method="yarn", length=LENGTH, verify=False)
        (folder / "config.json").rename(folder / "config.patched")
    config = json.loads((folder / "config.patched").read_text())
    config[dialect].update(inner)
    config["ctxext"].update(record)
    config.update(top)
    write_config(folder, config)
    try:
        faults = diagnose(folder, verify=False)
    except ValueError as error:
        assert str(error)
        return
    assert all(fault.code and fault.message and fault.remedy for fault in faults)
    json.dumps([fault.to_dict() for fault in faults])
