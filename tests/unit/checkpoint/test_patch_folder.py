"""What a patch does to folders: refusals, links, what is carried over, and a SOURCE that never changes."""

from __future__ import annotations

import copy
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import (
    LENGTH,
    WINDOW,
    llama_config,
    read_config,
    save_tiny,
    snapshot,
    tiny_model,
    with_config,
    write_config,
)
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from ctxext import patch_checkpoint
from ctxext.checkpoint.families import FAMILIES


def patch(source: Path, output: Path, **changes: Any) -> dict[str, Any]:
    return patch_checkpoint(source, output, **{"method": "yarn", "length": LENGTH, "link": "hard", **changes})


def refused(source: Path, output: Path, told: str, **changes: Any) -> None:
    """The patch is refused with `told`, OUTPUT and every trace of it absent, SOURCE as it was."""
    before = snapshot(source)
    with pytest.raises(ValueError, match=told):
        patch(source, output, **changes)
    assert snapshot(source) == before
    assert not output.exists() and not list(output.parent.glob(f".{output.name}*"))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"length": WINDOW}, "length is 128; the model reads 128 tokens already, so ask for more"),
        ({"length": 64}, "length is 64; the model reads 128 tokens already"),
        ({"length": 512.0}, "length is 512.0; it must be a whole number"),
        ({"length": True}, "length is True; it must be a whole number"),
        ({"original_length": 0}, "original_length is 0; it must be a whole number"),
        ({"method": "yarm"}, r"unknown method 'yarm' \(did you mean 'yarn'\?\)"),
        (
            {"beta_fats": 3.0},
            r"--beta-fats has no effect with method 'yarn' \(did you mean 'beta-fast'\?\); its options",
        ),
        ({"rope_theta": 1e6}, "--rope-theta has no effect with method 'yarn'; its options are --attention-factor"),
        ({"method": "linear", "factor": 2.0}, "--factor has no effect with method 'linear'; it has none"),
        (
            {"method": "ntk_by_parts", "attention_factor": 1.2},
            "--attention-factor has no effect with method 'ntk_by_p",
        ),
        ({"link": "hrad"}, r"link is 'hrad' \(did you mean 'hard'\?\); it must be one of copy, hard, symlink"),
        ({"allow_sliding_window": True}, "--allow-sliding-window has no effect"),
    ],
)
def test_wrong_calls(llama: Path, tmp_path: Path, changes: dict[str, Any], told: str) -> None:
    refused(llama, tmp_path / "out", told, **changes)


def test_none_is_not_given(llama: Path, tmp_path: Path) -> None:
    patch(llama, tmp_path / "out", beta_fast=None, rope_theta=None)


@pytest.mark.parametrize(
    ("model_type", "told"),
    [
        ("gpt2", "model_type 'gpt2' has learned absolute positions and no rotary embedding to rescale; supported are"),
        ("bloom", "model_type 'bloom' has an ALiBi bias"),
        ("mpt", "model_type 'mpt' has an ALiBi bias"),
        ("qwen22", r"model_type 'qwen22' is not supported \(did you mean 'qwen2'\?\): llama, mistral"),
        (None, "config.json has no model_type; supported are llama"),
        (7, "model_type is 7; it must be one of llama"),
    ],
)
def test_other_models(llama: Path, tmp_path: Path, model_type: Any, told: str) -> None:
    source = with_config(llama, tmp_path / "source", llama_config(model_type=model_type))
    refused(source, tmp_path / "out", told)


def test_every_refusal_of_a_model_names_all_families(llama: Path, tmp_path: Path) -> None:
    source = with_config(llama, tmp_path / "source", llama_config(model_type="gpt2"))
    refused(source, tmp_path / "out", ", ".join(FAMILIES))


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "mistral", "sliding_window": 64},
        {"model_type": "phi3", "sliding_window": 64},
        {"model_type": "qwen2", "sliding_window": 64, "use_sliding_window": True, "max_window_layers": 0},
        {"model_type": "qwen3_moe", "sliding_window": 64, "use_sliding_window": True, "max_window_layers": 28},
        {"model_type": "gemma3_text", "sliding_window": 64, "layer_types": ["sliding_attention"] * 2},
    ],
)
def test_a_model_whose_every_layer_slides(llama: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    source = with_config(llama, tmp_path / "source", llama_config(**changes))
    told = r"every layer attends over the last 64 tokens only \(sliding_window\).*--allow-sliding-window"
    refused(source, tmp_path / "out", told, method="linear")
    report = patch(source, tmp_path / "out", method="linear", allow_sliding_window=True, verify=False, dry_run=True)
    assert any("last 64 tokens" in note for note in report["notes"])


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "mistral", "sliding_window": 512},
        {"model_type": "qwen2", "sliding_window": 64, "use_sliding_window": False},
        {"model_type": "qwen2", "sliding_window": 64, "use_sliding_window": True, "max_window_layers": 1},
        {"model_type": "qwen3_moe", "sliding_window": 64, "use_sliding_window": False},
        {"model_type": "gemma3_text", "sliding_window": 64},
        {"model_type": "llama", "sliding_window": 64},
    ],
)
def test_a_model_with_layers_that_see_everything(llama: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    source = with_config(llama, tmp_path / "source", llama_config(**changes))
    patch(source, tmp_path / "out", method="linear", dry_run=True)
    assert not (tmp_path / "out").exists()


def test_output_must_be_new_or_forced(llama: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    output.mkdir()
    patch(llama, output)  # an empty folder is as good as none
    with pytest.raises(ValueError, match="is not empty; choose another folder, or --force"):
        patch(llama, output, length=1024)
    assert read_config(output)["max_position_embeddings"] == LENGTH
    (output / "stray.txt").write_text("of an earlier run")
    patch(llama, output, length=1024, force=True)
    assert read_config(output)["max_position_embeddings"] == 1024
    assert not (output / "stray.txt").exists()
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match="file is a file; name a folder"):
        patch(llama, tmp_path / "file", force=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "out"]


def test_a_refused_forced_patch_leaves_the_old_output(llama: Path, tmp_path: Path) -> None:
    patch(llama, tmp_path / "out")
    before = snapshot(tmp_path / "out")
    source = with_config(llama, tmp_path / "source", llama_config(hidden_act="nope"))
    with pytest.raises(ValueError, match="cannot load this config.json because of hidden_act 'nope'"):
        patch(source, tmp_path / "out", force=True)
    assert snapshot(tmp_path / "out") == before


@pytest.mark.parametrize("place", [".", "inside", "..", "../source/inside"])
def test_output_must_not_overlap_source(llama: Path, tmp_path: Path, place: str) -> None:
    source = with_config(llama, tmp_path / "parent" / "source", llama_config())
    before = snapshot(tmp_path)
    for output in (source / place, tmp_path / "alias" / place):
        (tmp_path / "alias").exists() or (tmp_path / "alias").symlink_to(source)
        before = snapshot(tmp_path)
        with pytest.raises(ValueError, match="overlap; SOURCE is never changed"):
            patch(source, output, force=True)
        assert snapshot(tmp_path) == before


def test_sources_that_are_none(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no folder .*absent"):
        patch(tmp_path / "absent", tmp_path / "out")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", tmp_path / "out", "has no config.json")
    broken = with_config(llama, tmp_path / "broken", llama_config())
    for content, told in (
        ("{", "is no JSON"),
        ("[]", "holds a list; it must hold an object"),
        ("[" * 10**5, "no JSON"),
    ):
        (broken / "config.json").write_text(content)
        refused(broken, tmp_path / "out", told)


def test_pickles_only(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    write_config(source, llama_config())
    torch.save({}, source / "pytorch_model.bin")
    refused(source, tmp_path / "out", r"only pickled weights, .* convert them first: .*save_pretrained\(new_folder\)")


def test_no_weights(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    write_config(source, llama_config())
    refused(source, tmp_path / "out", "has neither model.safetensors nor model.safetensors.index.json")


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tiny llama in several shards with an index; tests must not change it."""
    folder = tmp_path_factory.mktemp("sharded")
    tiny_model().save_pretrained(folder, max_shard_size="60kB")
    assert len(list(folder.glob("model-*.safetensors"))) > 2
    return folder


@pytest.mark.parametrize("link", ["copy", "hard", "symlink"])
def test_links(sharded: Path, tmp_path: Path, link: str) -> None:
    before = snapshot(sharded)
    patch(sharded, tmp_path / "out", link=link)
    for path in sharded.glob("*.safetensors*"):
        placed = tmp_path / "out" / path.name
        assert placed.is_symlink() == (link == "symlink")
        assert placed.samefile(path) == (link != "copy")
        assert placed.read_bytes() == path.read_bytes()
    assert not (tmp_path / "out" / "config.json").is_symlink()
    again, first = (
        AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in (tmp_path / "out", sharded)
    )
    assert all(torch.equal(again[name], first[name]) for name in first)
    assert snapshot(sharded) == before


def test_missing_shard(sharded: Path, tmp_path: Path) -> None:
    source = shutil.copytree(sharded, tmp_path / "source")
    gone = sorted(source.glob("model-*.safetensors"))[1]
    gone.unlink()
    refused(source, tmp_path / "out", f"names {gone.name}, not in the folder; download the checkpoint again")


@pytest.mark.parametrize("index", ["{}", '{"weight_map": {"a": 1}}', '{"weight_map": {}}', '{"weight_map": []}'])
def test_broken_index(sharded: Path, tmp_path: Path, index: str) -> None:
    source = shutil.copytree(sharded, tmp_path / "source")
    (source / "model.safetensors.index.json").write_text(index)
    refused(source, tmp_path / "out", "has no weight_map from tensor to file")


def test_index_that_leads_out_of_the_folder(sharded: Path, tmp_path: Path) -> None:
    source = shutil.copytree(sharded, tmp_path / "source")
    (source / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../../etc/passwd"}}')
    refused(source, tmp_path / "out", "names '../../etc/passwd', which is no plain file name")


@pytest.mark.parametrize("keep", [0, 4, 2000, -100])
def test_truncated_weights(llama: Path, tmp_path: Path, keep: int) -> None:
    source = shutil.copytree(llama, tmp_path / "source")
    weights = source / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:keep])
    refused(source, tmp_path / "out", "model.safetensors is no whole safetensors file .* download or save it again")


def test_config_of_another_model(llama: Path, tmp_path: Path) -> None:
    source = with_config(llama, tmp_path / "a", llama_config(num_hidden_layers=3))
    refused(source, tmp_path / "out", "num_hidden_layers is 3; the weights have 2 layers")
    source = with_config(llama, tmp_path / "b", llama_config(vocab_size=98))
    refused(
        source, tmp_path / "out", r"vocab_size 98.* makes model.embed_tokens.weight \(98, 64\); .* have \(97, 64\)"
    )
    source = with_config(llama, tmp_path / "c", llama_config(num_hidden_layers=None))
    refused(source, tmp_path / "out", "num_hidden_layers is 32; the weights have 2 layers")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"pad_token_id": 97}, "pad_token_id is 97; it must be below vocab_size, 97"),
        ({"num_labels": 2**30}, "num_labels is 1073741824; it must be a whole number from 1 to 1048576"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3; it must divide num_attention_heads, 4"),
        ({"hidden_size": -64}, "hidden_size is -64; it must be a whole number"),
        (
            {"hidden_act": "sliu", "num_labels": 2},
            "cannot load this config.json because of hidden_act 'sliu': KeyError",
        ),
        ({"quantization_config": {"bits": 4}}, "because of quantization_config {'bits': 4}: ValueError"),
        ({"num_labels": None, "id2label": 5}, "because of id2label 5"),
    ],
)
def test_configs_that_no_model_can_have(llama: Path, tmp_path: Path, changes: dict[str, Any], told: str) -> None:
    source = with_config(llama, tmp_path / "source", llama_config(**changes))
    refused(source, tmp_path / "out", told)


def test_hub_cache_snapshot(llama: Path, tmp_path: Path) -> None:
    """A snapshot folder of links into blobs, as huggingface_hub lays it out."""
    cache = tmp_path / "models--org--name"
    files = cache / "snapshots" / "0123abc"
    (cache / "blobs").mkdir(parents=True)
    files.mkdir(parents=True)
    for number, path in enumerate(sorted(llama.iterdir())):
        shutil.copy(path, cache / "blobs" / f"blob{number}")
        (files / path.name).symlink_to(Path("../../blobs") / f"blob{number}")
    before = snapshot(cache)
    for link in ("hard", "symlink", "copy"):
        patch(files, tmp_path / link, link=link)
        weights = tmp_path / link / "model.safetensors"
        assert weights.samefile(files / "model.safetensors") == (link != "copy")
        assert weights.is_symlink() == (link == "symlink")
        if link == "symlink":
            assert Path(os.readlink(weights)).is_absolute() and "blobs" in os.readlink(weights)
        AutoModelForCausalLM.from_pretrained(tmp_path / link)
        config = tmp_path / link / "config.json"
        assert not config.is_symlink() and config.stat().st_nlink == 1
        for carried in (tmp_path / link).glob("generation_config.json"):
            assert not carried.is_symlink() and carried.stat().st_nlink == 1
    assert snapshot(cache) == before


def test_tied_embeddings(tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "source", tie_word_embeddings=True)
    patch(source, tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(model.lm_head.weight, AutoModelForCausalLM.from_pretrained(source).lm_head.weight)


def test_tokenizer_templates_and_limits_are_carried_over(llama: Path, tmp_path: Path) -> None:
    source = shutil.copytree(llama, tmp_path / "source")
    words = Tokenizer(models.WordLevel({"<unk>": 0, "one": 1, "two": 2}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", model_max_length=WINDOW)
    tokenizer.chat_template = {"default": "{{ messages[0].content }}", "tool_use": "tools: {{ messages[0].content }}"}
    tokenizer.save_pretrained(source)
    GenerationConfig(max_length=WINDOW, top_p=0.9, do_sample=True).save_pretrained(source)
    (source / "LICENSE").write_text("terms")
    (source / "README.md").write_text("reads 128 tokens")
    (source / "trainer_state.json").write_text("{}")
    (source / "optimizer.pt").write_bytes(b"pickle")
    (source / ".gitattributes").write_text("")
    assert (source / "additional_chat_templates").is_dir()
    before = snapshot(source)
    patch(source, tmp_path / "out")
    assert snapshot(source) == before
    again = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert again.model_max_length == LENGTH and again("two one").input_ids == [2, 1]
    chat = [{"role": "user", "content": "hello"}]
    assert again.apply_chat_template(chat, tokenize=False) == "hello"
    assert again.apply_chat_template(chat, tokenize=False, chat_template="tool_use") == "tools: hello"
    stored = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())["model_max_length"]
    assert type(stored) is int and stored == LENGTH
    generation = GenerationConfig.from_pretrained(tmp_path / "out")
    assert generation.max_length == LENGTH and generation.top_p == 0.9
    kept = {path.name for path in (tmp_path / "out").iterdir()}
    assert "LICENSE" in kept
    assert not kept & {"README.md", "trainer_state.json", "optimizer.pt", ".gitattributes"}


def test_dynamic_sets_the_other_limits_too(llama: Path, tmp_path: Path) -> None:
    source = shutil.copytree(llama, tmp_path / "source")
    (source / "tokenizer_config.json").write_text('{"model_max_length": 128.0}')
    patch(source, tmp_path / "out", method="dynamic")
    assert read_config(tmp_path / "out")["max_position_embeddings"] == WINDOW
    assert json.loads((tmp_path / "out" / "tokenizer_config.json").read_text()) == {"model_max_length": LENGTH}


def test_lengths_are_integers_everywhere(llama: Path, tmp_path: Path) -> None:
    patch(llama, tmp_path / "out")
    config = read_config(tmp_path / "out")
    for holder in (config, config["rope_scaling"], config["rope_parameters"], config["ctxext"]):
        for key in ("max_position_embeddings", "original_max_position_embeddings", "length", "original_length"):
            assert type(holder.get(key, 0)) is int, key


def test_dry_run_writes_nothing_and_shows_the_difference(llama: Path, tmp_path: Path) -> None:
    before = snapshot(llama)
    report = patch(llama, tmp_path / "deep" / "out", dry_run=True)
    assert not report["written"] and list(tmp_path.iterdir()) == [] and snapshot(llama) == before
    assert '-  "max_position_embeddings": 128,' in report["config_diff"]
    assert '+  "max_position_embeddings": 512,' in report["config_diff"]
    written = patch(llama, tmp_path / "deep" / "out")
    assert written["written"] and written["verified"]
    assert {**written, "written": False} == {**report, "verified": True}


def test_report_and_record(llama: Path, tmp_path: Path) -> None:
    report = patch(llama, tmp_path / "out", beta_fast=16.0)
    assert (report["window"], report["original_length"], report["length"], report["factor"]) == (128, 128, 512, 4.0)
    assert report["attention_factor"] == pytest.approx(1.1386294361)
    record = read_config(tmp_path / "out")["ctxext"]
    assert record["method"] == "yarn" and record["options"] == {"beta_fast": 16.0}
    assert record["source"] == str(llama) and len(record["source_config_sha256"]) == 64
    twice = patch(tmp_path / "out", tmp_path / "twice", length=1024)
    assert twice["factor"] == 2.0 and twice["total_factor"] == 8.0


def test_a_config_that_was_read_is_not_the_one_that_is_written(llama: Path) -> None:
    from ctxext.checkpoint.plan import plan_patch

    config = llama_config(rope_scaling={"type": "dynamic", "factor": 2.0})
    before = copy.deepcopy(config)
    plan_patch(config, method="dynamic", length=1024).config["rope_scaling"]["factor"] = 99
    assert config == before


def test_a_new_theta_may_keep_the_length(llama: Path, tmp_path: Path) -> None:
    patch(llama, tmp_path / "same", method="theta", rope_theta=5e5, length=WINDOW)
    config = read_config(tmp_path / "same")
    assert (config["rope_theta"], config["max_position_embeddings"]) == (5e5, WINDOW)
    refused(llama, tmp_path / "ntk", "the model reads 128 tokens already", method="ntk", length=WINDOW)
