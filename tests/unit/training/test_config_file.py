"""Configs: every problem at once, nothing silently ignored, overrides by path."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ctxext.training.config_file import ConfigError, apply_overrides, parse_config, read_yaml, training_arguments

GOOD: dict[str, Any] = {
    "model": "m",
    "length": 64,
    "batch_size": 4,
    "data": {"sources": [{"data": "python-docs"}]},
    "output_dir": "out",
    "use_cpu": True,
}


def test_defaults_are_the_papers() -> None:
    args = training_arguments(parse_config(GOOD), world_size=2)
    assert (args.optim, args.adam_beta1, args.adam_beta2, args.weight_decay) == ("adamw_torch", 0.9, 0.95, 0.0)
    assert (args.learning_rate, args.warmup_steps, args.max_steps) == (2e-5, 20, 1000)
    assert args.lr_scheduler_type == "constant_with_warmup"
    assert parse_config(GOOD).warmup_start == 0.1
    assert args.gradient_accumulation_steps == 2 and not args.logging_nan_inf_filter


def test_yaml_reads_2e_5_as_text_and_it_is_a_number_all_the_same() -> None:
    assert parse_config({**GOOD, "learning_rate": "2e-5"}).training["learning_rate"] == 2e-5


def test_every_problem_is_reported_at_once() -> None:
    bad = {
        "model": "m",
        "lenght": 64,
        "batch_size": 0,
        "tuning": "lor",
        "lora": {"rank": 4},
        "data": {"sources": [{"data": "x", "weigth": 1}, {"data": "y", "min_tokens": -1}]},
        "learning_rat": 1,
        "max_steps": "many",
        "num_train_epochs": 3,
    }
    with pytest.raises(ConfigError) as caught:
        parse_config(bad)
    text = str(caught.value)
    for part in (
        "lenght is no key of the recipe and no TrainingArgument of transformers (did you mean 'length'?)",
        "length is missing",
        "batch_size is 0",
        "tuning is 'lor'",
        "lora.rank is no key",
        "data.sources.0.weigth is no key (did you mean 'weight'?)",
        "data.sources.1.min_tokens is -1",
        "learning_rat is no key of the recipe and no TrainingArgument of transformers (did you mean 'learning_rate'?)",
        "max_steps is 'many'",
        "num_train_epochs cannot take effect",
        "output_dir is missing",
    ):
        assert part in text
    assert len(caught.value.problems) == 12


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lora": {}}, "lora has no effect with tuning 'full'"),
        ({"method_options": {"beta_fast": 1}}, "method_options have no effect without method"),
        ({"evaluate_every": 5}, "evaluations and evaluate_every go together"),
        ({"epochs": 1, "max_steps": 5}, "exclude each other"),
        ({"save_steps": 5, "logging_steps": 2}, "multiple of the second"),
        ({"warmup_steps": 0, "warmup_start": 0.5}, "warmup_start has no effect"),
        ({"optim": "sgd", "adam_beta1": 0.5}, "adam_beta1 has no effect with optim 'sgd'"),
        ({"save_strategy": "no", "save_steps": 5}, "save_steps has no effect"),
        ({"save_strategy": "epoch"}, "must be steps or no"),
        ({"tuning": "qlora", "dtype": "float32"}, "no effect with tuning 'qlora'"),
        ({"gradient_accumulation_steps": 2}, "state batch_size"),
        ({"data": {"sources": [{"data": "x", "weight": 2}]}}, "weight has no effect with a single source"),
        ({"data": {"sources": []}}, "data.sources"),
        ({"epochs": 1, "data": {"sources": [{"data": "x"}, {"data": "y"}]}}, "single source"),
    ],
)
def test_options_that_cannot_take_effect_are_errors(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config({**GOOD, **change})


def test_a_batch_that_cannot_be_shared_is_refused() -> None:
    with pytest.raises(ConfigError, match="multiple of 3"):
        training_arguments(parse_config(GOOD), world_size=3)


def test_overrides_reach_every_depth() -> None:
    words = ["--length", "128", "--data.sources.0.data=sympy-source", "--learning-rate", "1e-4", "--bf16"]
    changed = apply_overrides(GOOD, [*words, "--evaluations.passkey.length", "64"])
    assert changed["length"] == 128 and changed["data"]["sources"][0]["data"] == "sympy-source"
    assert parse_config({**changed, "evaluate_every": 5}).training["learning_rate"] == 1e-4
    assert changed["bf16"] is True and changed["evaluations"] == {"passkey": {"length": 64}}
    assert GOOD["length"] == 64 and GOOD["data"]["sources"][0]["data"] == "python-docs"


def test_wrong_overrides_are_all_named() -> None:
    with pytest.raises(ConfigError) as caught:
        apply_overrides(GOOD, ["stray", "--data.sources.7.data", "x", "--model.name", "y"])
    assert [problem.split(":")[0] for problem in caught.value.problems] == [
        "'stray' is no --key; write --key value",
        "--data.sources.7.data",
        "--model.name",
    ]


def test_a_key_that_stands_twice_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("model: a\nlength: 5\nmodel: b\n")
    with pytest.raises(ConfigError, match="model stands twice"):
        read_yaml(path)
    path.write_text("- a\n")
    with pytest.raises(ConfigError, match="it holds list"):
        read_yaml(path)
