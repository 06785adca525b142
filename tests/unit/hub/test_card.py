"""The model card: what it says, what it must not say, and which card stays."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from expected import TOKEN
from helpers import read_config, write_config
from huggingface_hub import ModelCard
from server import Hub
from typer.testing import CliRunner

from ctxext.checkpoint.patch import patch_checkpoint
from ctxext.cli import app
from ctxext.evaluation.fingerprint import checkpoint_hash
from ctxext.evaluation.result import Result
from ctxext.hub.card import card_uploads, write_card
from ctxext.hub.push import push


def made_card(folder: Path, results: tuple[Path, ...] = (), **options: Any) -> ModelCard:
    """The card that a push of `folder` to user/model would send, as the Hub reads it."""
    uploads, _ = card_uploads(folder, "user/model", results, options.pop("recipe", None), True, **options)
    assert isinstance(uploads[0].source, bytes)
    return ModelCard(uploads[0].source.decode())


def write_result(folder: Path, path: Path, **changes: Any) -> Path:
    """A result of the checkpoint in `folder`."""
    values: dict[str, Any] = {
        "evaluation": "perplexity",
        "protocol_id": "perplexity-v3:length=512,stride=256",
        "metrics": {"perplexity": 12.5, "loss": 2.525, "best": None},
        "options": {"length": 256},
        "settings": {},
        "checkpoint": {"name": "yarn", "hash": checkpoint_hash(folder), "original_window": 128},
        "corpus": {"name": "some-corpus", "hash": "c", "documents": 7, "tokens": 900, "source": "x"},
        "dtype": "float32",
        "attention": "sdpa",
        "device": "cpu",
        "tokens_scored": 890,
        "skipped": {"too_short": 3},
        "notes": ["a note | with a bar"],
        "seed": 4,
        "versions": {"torch": "2.13.0"},
        "wall_time": 1.0,
        "plots": [
            {"id": "loss", "title": "Loss", "kind": "line", "x": [1, 200], "y": [3.0, 2.0]}
            | {"x_label": "tokens", "y_label": "nats", "mark_window": True}
        ],
    }
    Result(**{**values, **changes}).save(path)
    return path


def as_run(checkpoint: Path, length: int = 512, **changes: Any) -> Path:
    """The folder of a recipe's run around a checkpoint, as training leaves it; returns its `final`."""
    run = checkpoint.parent / "run"
    shutil.copytree(checkpoint, run / "final")
    (run / "checkpoint-40").mkdir()
    training = {"learning_rate": "2e-05", "optim": "adamw_torch", "seed": "5", "bf16": "True"}
    state = {"model": "meta-llama/Llama-2-7b-hf", "length": length, "tuning": "lora", "batch_size": 8, "epochs": None}
    state |= {"lora": {"r": 16, "alpha": 32.0, "targets": ["q_proj", "v_proj"]}, "training": training, **changes}
    (run / "checkpoint-40" / "ctxext_state.json").write_text(json.dumps({"packs_read": 320, "run": state}))
    log = [{"step": 1, "loss": 3.5}, {"step": 40, "loss": 2.25}, {"step": 40, "eval_perplexity": 9.0}]
    (run / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in log))
    return run / "final"


def test_an_untrained_patch_says_no_more_than_is_known(checkpoint: Path) -> None:
    card = made_card(checkpoint)
    assert set(card.data.to_dict()) == {"library_name", "pipeline_tag", "tags"}
    assert "extended from 128 to 512 tokens (4 times) with YaRN (`yarn`)" in card.text
    assert "| `rope_theta` | 10000 |" in card.text and "| attention factor | 1.13863 |" in card.text  # 0.1 ln 4 + 1
    assert 'AutoModelForCausalLM.from_pretrained("user/model")' in card.text
    assert "vllm serve user/model --max-model-len 512" in card.text
    assert "llama-server -m model.gguf -c 512" in card.text
    assert "this is an untrained patch" in card.text and "Nothing was measured" in card.text
    assert not any(title in card.text for title in ("## Training", "## Evaluation", "## Licence", "None"))
    assert str(checkpoint.parent) not in card.content


def test_results_of_this_checkpoint_alone(checkpoint: Path, tmp_path: Path) -> None:
    own = write_result(checkpoint, tmp_path / "own.json")
    longer = write_result(
        checkpoint, tmp_path / "longer.json", protocol_id="perplexity-v3:length=99", metrics={"loss": 1}
    )
    foreign = write_result(checkpoint, tmp_path / "foreign.json", checkpoint={"name": "the base", "hash": "other"})
    uploads, notes = card_uploads(checkpoint, "user/model", [own, longer, foreign], None, True)
    assert notes[0] == f"{foreign} is not in the card: it is a result of another checkpoint (the base)"
    assert "no training is on record" in notes[1] and len(notes) == 2
    card = ModelCard(uploads[0].source.decode())  # type: ignore[union-attr]
    found = {(one.dataset_config, one.metric_type): one for one in card.data.eval_results}
    assert {key: one.metric_value for key, one in found.items()} == {
        ("perplexity-v3:length=512,stride=256", "perplexity"): 12.5,
        ("perplexity-v3:length=512,stride=256", "loss"): 2.525,
        ("perplexity-v3:length=99", "loss"): 1,
    }
    one = found["perplexity-v3:length=512,stride=256", "perplexity"]
    assert (one.task_type, one.dataset_name, one.metric_name) == (
        "text-generation",
        "some-corpus",
        "perplexity perplexity",
    )
    assert one.metric_args == {"attention": "sdpa", "dtype": "float32", "tokens_scored": 890}
    assert card.data.model_name == "model"
    assert "| perplexity | perplexity | 12.5000 | [1] |" in card.text
    assert f"checkpoint sha256 {checkpoint_hash(checkpoint)}" in card.text
    assert "not scored: 3 too short" in card.text and "a note \\| with a bar" in card.text
    assert "has 256 tokens; beyond that, up to 512, nothing was" in card.text
    pictures = [upload for upload in uploads[1:]]
    assert [upload.path for upload in pictures] == [f"figures/{n}-perplexity-loss.png" for n in (1, 2)]
    for upload in pictures:
        assert isinstance(upload.source, bytes) and upload.source.startswith(b"\x89PNG")
        assert f"]({upload.path})" in card.text
    with pytest.raises(ValueError, match=r"none of the results is of .*foreign\.json.*\(the base\)"):
        card_uploads(checkpoint, "user/model", [foreign], None, True)


def test_the_training_is_that_of_the_run(checkpoint: Path) -> None:
    final = as_run(checkpoint)
    (final.parent / "recipe.yaml").write_text(
        "model: meta-llama/Llama-2-7b-hf\nlength: 512\noutput_dir: /home/me/r\n"
        "data: {sources: [{data: /home/me/own/books.jsonl, weight: 2}, {data: pile, min_tokens: 100, weight: 1}]}\n"
    )
    text = made_card(final).text
    for row in (
        "tuning | lora",
        "learning rate | 2e-05",
        "LoRA targets | q_proj, v_proj",
        "LoRA alpha | 32",
        "steps | 40",
    ):
        assert f"| {row} |" in text
    assert "| loss of the last step | 2.2500 |" in text and "epochs" not in text
    assert "- `books.jsonl`, weight 2" in text and "- `pile`, min tokens 100, weight 1" in text
    assert "/home/me" not in text and "untrained" not in text


def test_a_run_of_another_length_is_not_this_ones(checkpoint: Path, tmp_path: Path) -> None:
    final = as_run(checkpoint, length=1024)
    assert "untrained" in made_card(final).text and "## Training" not in made_card(final).text
    other = tmp_path / "other.yaml"
    other.write_text("model: a/b\nlength: 64\noutput_dir: x\ndata: {sources: [{data: pile}]}\n")
    with pytest.raises(ValueError, match=r"is of length 64, and .* reads 512 tokens"):
        made_card(checkpoint, recipe=other)


def test_base_and_licence_come_from_the_base(hub: Hub, checkpoint: Path) -> None:
    config = read_config(checkpoint)
    write_config(checkpoint, {**config, "ctxext": {**config["ctxext"], "source": "org/base@main"}})
    assert made_card(checkpoint, ask_hub=True).data.to_dict().get("license") is None  # there is no such base
    hub.make("org/base", **{"README.md": b"---\nlicense: other\nlicense_name: llama2\n---\n# Base\n"})
    card = made_card(checkpoint, ask_hub=True)
    assert card.data.base_model == "org/base"
    assert (card.data.license, card.data.license_name) == ("other", "llama2")
    assert "That of the base: llama2." in card.text


def test_the_base_is_found_through_local_folders(checkpoint: Path, tmp_path: Path) -> None:
    between = tmp_path / "between"
    between.mkdir()
    write_config(between, {"ctxext": {"source": "org/base"}, "license": "apache-2.0"})
    config = read_config(checkpoint)
    write_config(checkpoint, {**config, "ctxext": {**config["ctxext"], "source": str(between)}})
    card = made_card(checkpoint)
    assert (card.data.base_model, card.data.license) == ("org/base", "apache-2.0")
    assert str(tmp_path) not in card.content


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ("linear", ("Position Interpolation", "short inputs are read with them too")),
        ("dynamic", ("cached keys go stale", "ctxext.fit_length(model, n)", "--hf-overrides")),
        (
            "alibi",
            (
                '("user/model", trust_remote_code=True)',
                "Only transformers with this repository's code",
                "no attention biases",
            ),
        ),
        ("t5", ('("user/model", trust_remote_code=True)', "| bias: num_buckets | 32 |")),
    ],
)
def test_each_method_has_its_limits(yarn_folder: Path, tmp_path: Path, method: str, words: tuple[str, ...]) -> None:
    patch_checkpoint(yarn_folder.parent / "source", tmp_path / "made", method=method, length=512, verify=False)
    text = made_card(tmp_path / "made").text
    for word in words:
        assert word in text
    assert ("vllm serve" in text) is (method in ("linear", "dynamic"))
    assert ("llama-server" in text) is (method == "linear")


def test_a_card_by_hand_stays(hub: Hub, checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / "README.md").write_text("# By hand\n")
    result = write_result(checkpoint, tmp_path / "own.json")
    with pytest.raises(ValueError, match="which ctxext did not make, is kept"):
        push(checkpoint, "user/model", results=[result])
    with pytest.raises(ValueError, match="was not made by ctxext and is kept; --force"):
        write_card(checkpoint, repo_id=None, results=[], recipe=None, force=False)
    push(checkpoint, "user/model")
    assert hub.files("user/model")["README.md"] == b"# By hand\n"
    push(checkpoint, "user/model", results=[result], card=True)
    there = hub.files("user/model")
    assert b"perplexity-v3" in there["README.md"] and "figures/1-perplexity-loss.png" in there
    assert (checkpoint / "README.md").read_text() == "# By hand\n"
    push(checkpoint, "user/other", card=False)
    assert "README.md" not in hub.files("user/other")


def test_a_written_card_is_pushed_with_its_pictures(hub: Hub, checkpoint: Path, tmp_path: Path) -> None:
    result = write_result(checkpoint, tmp_path / "own.json")
    made = write_card(checkpoint, repo_id="user/model", results=[result], recipe=None, force=False)
    assert len(made["written"]) == 2
    push(checkpoint, "user/model")
    there = hub.files("user/model")
    for path in ("README.md", "figures/1-perplexity-loss.png"):
        assert there[path] == (checkpoint / path).read_bytes()
    write_card(checkpoint, repo_id="user/model", results=[], recipe=None, force=False)  # its own may be replaced
    assert "perplexity" not in (checkpoint / "README.md").read_text()


def test_the_command_takes_results_as_the_shell_writes_them(hub: Hub, checkpoint: Path, tmp_path: Path) -> None:
    results = [write_result(checkpoint, tmp_path / f"{name}.json", protocol_id=f"p:{name}") for name in "abc"]
    call = ["push", str(checkpoint), "user/model", "--json", "--results", *map(str, results)]
    done = CliRunner().invoke(app, call)
    assert done.exit_code == 0, done.output
    answer = json.loads(done.stdout)
    assert answer["pushed"] and not answer["refused"] and answer["commit"] == hub.repos["user/model"].branches["main"]
    card = ModelCard(hub.files("user/model")["README.md"].decode())
    assert {one.dataset_config for one in card.data.eval_results} == {"p:a", "p:b", "p:c"}


def test_a_token_in_a_result_is_not_published(hub: Hub, checkpoint: Path, tmp_path: Path) -> None:
    result = write_result(checkpoint, tmp_path / "own.json", notes=[f"loaded with {TOKEN}"])
    with pytest.raises(ValueError, match=r"README\.md holds what looks like a token"):
        push(checkpoint, "user/model", results=[result])
    assert hub.repos == {}
