"""Runs that are whole, killed, resumed, damaged or impossible."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from ctxext.evals.passkey import PasskeyRetrieval
from ctxext.evals.perplexity import Perplexity
from ctxext.evaluation.fingerprint import checkpoint_hash, file_sha256
from ctxext.evaluation.loading import RunSettings, choose_device, load
from ctxext.evaluation.partial import Partial, partial_path, run_key
from ctxext.evaluation.result import Result
from ctxext.evaluation.runner import run_evaluation

SETTINGS = RunSettings(batch_size=2, dtype="float32")


@pytest.fixture
def evaluation(texts):
    return Perplexity(data=str(texts), length=32, stride=8)


def without_time(result):
    return {name: value for name, value in result.to_json().items() if name != "wall_time"}


def test_a_result_carries_what_its_number_depends_on(evaluation, byte_checkpoint, tmp_path):
    result, path = run_evaluation(evaluation, byte_checkpoint(), SETTINGS, tmp_path / "r.json")
    assert Result.load(path) == result
    assert (result.dtype, result.attention, result.device) == ("float32", "sdpa", "cpu")
    assert result.checkpoint["hash"] == checkpoint_hash(byte_checkpoint())
    assert result.checkpoint["max_position_embeddings"] == result.checkpoint["original_window"] == 128
    assert result.corpus["documents"] == 2 and len(result.corpus["hash"]) == 64
    assert set(result.versions) == {"ctxext", "torch", "transformers", "python"}
    assert result.versions["torch"] == torch.__version__
    assert result.skipped["documents_too_short"] == 1
    assert result.options["stride"] == 8 and result.settings["batch_size"] == 2
    assert [entry.name for entry in tmp_path.iterdir() if "r.json" in entry.name] == ["r.json"]


def test_a_length_beyond_the_window_is_noted(byte_checkpoint, tmp_path):
    evaluation = PasskeyRetrieval(length=420, depths=2, trials=1)
    result, _ = run_evaluation(evaluation, byte_checkpoint(), SETTINGS, tmp_path / "r.json")
    assert "read at 420 tokens, beyond the checkpoint's max_position_embeddings of 128" in result.notes
    assert result.seed == 0


class Stopped(Exception):
    pass


def test_an_interrupted_run_scores_only_what_is_left(evaluation, byte_checkpoint, tmp_path, monkeypatch):
    whole, _ = run_evaluation(evaluation, byte_checkpoint(), SETTINGS, tmp_path / "whole.json")
    score, calls = Perplexity.score, []

    def counted(self, session, unit):
        if len(calls) == 5:
            raise Stopped
        calls.append(unit.id)
        return score(self, session, unit)

    monkeypatch.setattr(Perplexity, "score", counted)
    with pytest.raises(Stopped):
        run_evaluation(evaluation, byte_checkpoint(), SETTINGS, tmp_path / "r.json")
    (partial,) = tmp_path.glob("r.json.*.partial.jsonl")
    assert len(partial.read_text().splitlines()) == 6
    # a line that the kill cut off, after one that it damaged
    partial.write_bytes(partial.read_bytes()[:-9])
    first, calls = calls, []
    monkeypatch.setattr(Perplexity, "score", lambda *args: (calls.append(args[2].id), score(*args))[1])
    resumed, _ = run_evaluation(evaluation, byte_checkpoint(), SETTINGS, tmp_path / "r.json")
    assert without_time(resumed) == without_time(whole)
    assert calls[0] == first[4] and not set(calls) & set(first[:4])
    assert not partial.exists()


@pytest.mark.parametrize("change", ["dtype", "attn", "protocol", "checkpoint", "corpus"])
def test_the_work_of_another_configuration_is_not_reused(
    change, evaluation, byte_checkpoint, texts, tmp_path, monkeypatch
):
    def stopped(*arguments):
        raise Stopped

    folder, settings = byte_checkpoint(), SETTINGS
    summarize = Perplexity.summarize
    monkeypatch.setattr(Perplexity, "summarize", stopped)
    with pytest.raises(Stopped):
        run_evaluation(evaluation, folder, settings, tmp_path / "r.json")
    monkeypatch.setattr(Perplexity, "summarize", summarize)
    (kept,) = tmp_path.glob("*.partial.jsonl")
    before = kept.read_bytes()
    if change == "dtype":
        settings = RunSettings(batch_size=2, dtype="bfloat16")
    elif change == "attn":
        settings = RunSettings(batch_size=2, dtype="float32", attn="eager")
    elif change == "protocol":
        evaluation = Perplexity(data=str(texts), length=32, stride=16)
    elif change == "checkpoint":
        folder = byte_checkpoint(initializer_range=0.05)
    else:
        texts.write_text(texts.read_text().replace("a", "b"))
    calls = []
    score = Perplexity.score
    monkeypatch.setattr(Perplexity, "score", lambda *args: (calls.append(args[2].id), score(*args))[1])
    run_evaluation(evaluation, folder, settings, tmp_path / "r.json")
    assert calls == [unit.id for unit in evaluation.plan(_session(folder)).units], "every unit was scored anew"
    assert kept.read_bytes() == before


def _session(folder):
    from ctxext.evaluation.base import Session

    loaded = load(folder, RunSettings())
    return Session(loaded.model, loaded.tokenizer, 2)


def test_a_killed_run_restarted_equals_an_unbroken_one(byte_checkpoint, tmp_path):
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 60)

    def command(name):
        options = "--length 64 --stride 3 --batch-size 1 --dtype float32".split()
        return [sys.executable, "-m", "ctxext", "eval", "perplexity", str(byte_checkpoint()), *options] + [
            "--data",
            str(tmp_path / "text.txt"),
            "--output",
            str(tmp_path / name),
        ]

    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command("killed.json"), env=environment, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    )
    partials = []
    while process.poll() is None and not (partials and partials[0].read_bytes().count(b"\n") > 40):
        partials = list(tmp_path.glob("killed.json.*.partial.jsonl"))
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, "the run ended before it could be killed"
    assert not (tmp_path / "killed.json").exists()
    for name in ("killed.json", "whole.json"):
        subprocess.run(command(name), env=environment, check=True, capture_output=True)
    killed, whole = (Result.load(tmp_path / name) for name in ("killed.json", "whole.json"))
    assert without_time(killed) == without_time(whole)
    assert not list(tmp_path.glob("*.partial.jsonl"))


@pytest.mark.parametrize("damage", [b"", b"{", b"[]\n", b'{"key": "other"}\n{"unit": "a", "score": {}}\n', b"\xff\n"])
def test_damaged_partials_start_anew(tmp_path, damage):
    path = partial_path(tmp_path / "r.json", "k" * 64)
    path.write_bytes(damage)
    with Partial(path, "k" * 64) as partial:
        assert partial.scored == {}
        partial.add("a", {"x": 1.5}, 2.0)
    again = Partial(path, "k" * 64)
    assert again.scored == {"a": {"x": 1.5}} and again.seconds == 2.0
    assert run_key({"a": 1, "b": 2}) == run_key({"b": 2, "a": 1}) != run_key({"a": 1, "b": 3})


def test_foreign_result_files(tmp_path):
    path = tmp_path / "r.json"
    for content, message in [
        ("no json", "it is not JSON"),
        ("[1]", 'it has no "format": "ctxext-result"'),
        ('{"format": "ctxext-result", "format_version": 99}', "result format 99, this ctxext reads 1"),
        ('{"format": "ctxext-result", "format_version": 1}', "damaged ctxext result: it lacks attention"),
    ]:
        path.write_text(content)
        with pytest.raises(ValueError, match=message):
            Result.load(path)


def test_the_checkpoint_hash_follows_config_and_weights(byte_checkpoint, tmp_path):
    import hashlib
    import shutil

    folder = tmp_path / "copy"
    shutil.copytree(byte_checkpoint(), folder)
    lines = "".join(f"{file_sha256(folder / name)}  {name}\n" for name in ("config.json", "model.safetensors"))
    before = checkpoint_hash(folder)
    assert before == hashlib.sha256(lines.encode()).hexdigest() == checkpoint_hash(byte_checkpoint())
    weights = bytearray((folder / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (folder / "model.safetensors").write_bytes(weights)
    assert checkpoint_hash(folder) != before
    with pytest.raises(ValueError, match="is not a checkpoint: it holds none of config.json"):
        checkpoint_hash(tmp_path / "copy" / "..", tmp_path)


def test_settings_that_cannot_be(byte_checkpoint):
    with pytest.raises(ValueError, match="--dtype 'int8' is not known; allowed: auto, float32"):
        RunSettings(dtype="int8")
    with pytest.raises(ValueError, match="exclude each other"):
        RunSettings(device="cpu", device_map="auto")
    with pytest.raises(ValueError, match="--device 'gpu9' is not a torch device"):
        choose_device("gpu9")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="--device 'cuda': this machine .* has cpu only"):
            load(byte_checkpoint(), RunSettings(device="cuda"))
        with pytest.raises(ValueError, match="--attn flash_attention_2"):
            load(byte_checkpoint(), RunSettings(attn="flash_attention_2"))
    with pytest.raises(ValueError, match="has no config.json"):
        load(byte_checkpoint().parent, RunSettings())


def test_emulated_bfloat16_is_warned_of(byte_checkpoint, monkeypatch, caplog):
    monkeypatch.setattr("ctxext.evaluation.loading.fast_bfloat16", lambda: False)
    load(byte_checkpoint(), RunSettings(dtype="float32", device="cpu"))
    assert not caplog.messages
    load(byte_checkpoint(), RunSettings(dtype="bfloat16", device="cpu"))
    assert caplog.messages == ["this CPU only emulates bfloat16: --dtype float32 is many times as fast"]
    monkeypatch.setattr("ctxext.evaluation.loading.fast_bfloat16", lambda: True)
    load(byte_checkpoint(), RunSettings(dtype="bfloat16", device="cpu"))
    assert len(caplog.messages) == 1


def test_broken_weights_are_an_error_and_not_a_score(byte_checkpoint, texts, tmp_path):
    loaded = load(byte_checkpoint(), RunSettings())
    with torch.no_grad():
        loaded.model.lm_head.weight.fill_(float("inf"))
    loaded.model.save_pretrained(tmp_path / "broken")
    loaded.tokenizer.save_pretrained(tmp_path / "broken")
    for evaluation in (
        Perplexity(data=str(texts), length=32, stride=8),
        PasskeyRetrieval(length=420, depths=2, trials=1),
    ):
        with pytest.raises(ValueError, match="NaN or infinite"):
            run_evaluation(evaluation, tmp_path / "broken", SETTINGS, tmp_path / "r.json")
    assert not (tmp_path / "r.json").exists()


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft reads the old name
def test_an_adapter_changes_the_score_and_the_hash(byte_checkpoint, evaluation, tmp_path):
    from peft import LoraConfig, get_peft_model

    base, _ = run_evaluation(evaluation, byte_checkpoint(), SETTINGS, tmp_path / "base.json")
    loaded = load(byte_checkpoint(), RunSettings())
    adapted = get_peft_model(loaded.model, LoraConfig(target_modules=["q_proj"], init_lora_weights=False, r=4))
    adapted.save_pretrained(tmp_path / "adapter")
    settings = RunSettings(batch_size=2, dtype="float32", adapter=str(tmp_path / "adapter"))
    result, _ = run_evaluation(evaluation, byte_checkpoint(), settings, tmp_path / "adapted.json")
    assert result.metrics["loss"] != pytest.approx(base.metrics["loss"], rel=1e-6)
    assert result.checkpoint["hash"] != base.checkpoint["hash"]


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft reads the old name
def test_an_adapter_trained_on_a_patched_model_is_refused_on_the_unpatched_one(byte_checkpoint, tmp_path):
    from peft import LoraConfig, get_peft_model

    from ctxext.checkpoint.patch import patch_checkpoint

    base = byte_checkpoint("llama", True)
    patched = tmp_path / "patched"
    patch_checkpoint(base, patched, method="yarn", length=4096, verify=False)
    model = load(base, RunSettings()).model
    get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(tmp_path / "adapter")
    (tmp_path / "adapter" / "config.json").write_bytes((patched / "config.json").read_bytes())
    settings = RunSettings(adapter=str(tmp_path / "adapter"))
    load(patched, settings)
    with pytest.raises(ValueError, match="ctxext patch BASE OUTPUT --method yarn --length 4096"):
        load(base, settings)


def test_length_dependent_frequencies_are_fixed_and_recorded(byte_checkpoint, texts, tmp_path):
    parameters = json.dumps({"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0})
    folder = byte_checkpoint("llama", rope_parameters=_Frozen(parameters))
    evaluation = Perplexity(data=str(texts), length=140, stride=20)
    result, _ = run_evaluation(evaluation, folder, SETTINGS, tmp_path / "r.json")
    assert result.checkpoint["fitted_length"] == 140
    assert "length-dependent frequencies fixed for 140 tokens" in result.notes


class _Frozen(dict):
    """A dict that can be part of a cache key."""

    def __init__(self, text):
        super().__init__(json.loads(text))

    def __hash__(self):
        return hash(json.dumps(self))

    def __lt__(self, other):
        return True
