"""`ctxext analyze` end to end on tiny checkpoints: results, pictures, hand-computed numbers, wrong calls."""

import json
import math
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from ctxext.analysis.receptive_field import ReceptiveField, curve_places
from ctxext.analysis.run import result_names
from ctxext.cli import app
from ctxext.evaluation.base import Plan
from ctxext.evaluation.result import Result

runner = CliRunner()


def invoke_root(*arguments):
    return runner.invoke(app, [str(argument) for argument in arguments])


def invoke(*arguments):
    return invoke_root("analyze", *arguments)


def whole_nll(folder, ids):
    """Loss of every token but the first, with whole logits."""
    with torch.no_grad():
        log = AutoModelForCausalLM.from_pretrained(folder)(torch.tensor([ids[:-1]])).logits[0].double().log_softmax(-1)
    return [-float(log[place, token]) for place, token in enumerate(ids[1:])]


def first_ids(folder, texts, row=0):
    text = json.loads(texts.read_text().splitlines()[row])["text"]
    return AutoTokenizer.from_pretrained(folder)(text, add_special_tokens=False)["input_ids"]


FIELD = ("--length", 24, "--segments", 5, "--train-length", 8, "--threshold", 0.6, "--threshold", 0.3)


@pytest.fixture
def fields(byte_checkpoint, texts, tmp_path):
    folders = [byte_checkpoint(), byte_checkpoint("qwen2")]
    made = invoke(
        "receptive-field",
        *folders,
        *FIELD,
        "--data",
        texts,
        "--attention-mass",
        "--output",
        tmp_path / "out",
        "--json",
    )
    assert made.exit_code == 0, made.output
    return folders, json.loads(made.stdout)


def test_receptive_field_of_two_models(fields, tmp_path):
    folders, answer = fields
    assert [row["checkpoint"] for row in answer["models"]] == [folder.name for folder in folders]
    for row in answer["models"]:
        result = Result.load(tmp_path / "out" / f"{row['checkpoint']}.json")
        assert list(row["fields"]) == ["0.3", "0.6", "0.99"], "the paper's threshold is always there"
        sizes = [field["erf"] for field in row["fields"].values()]
        assert sizes == sorted(sizes) and 1 <= sizes[0] and sizes[-1] <= 24 == row["reach"]
        assert all(low <= high for low, high in (field["interval"] for field in row["fields"].values()))
        assert row["metrics"] == result.metrics and result.metrics["erf"] == sizes[-1]
        assert result.protocol_id.startswith("receptive-field-v1:length=24,segments=5,train_length=8")
        assert result.dtype == "float32" and result.attention == "sdpa" and result.versions["torch"]
        assert result.details["curve"]["share"][-1] == 1.0
        assert torch.tensor(result.details["attention"]["mean_distance"]).shape == (2, 4)
    for picture in answer["pictures"]:
        with open(picture, "rb") as file:
            assert file.read(4) == b"\x89PNG"
    assert len(answer["pictures"]) == 2


def test_perplexities_are_of_the_same_last_tokens(byte_checkpoint, tmp_path):
    folder, text = byte_checkpoint(), "a tale of bytes, told."
    (tmp_path / "one.txt").write_text(text)
    made = invoke(
        *("receptive-field", folder, "--length", 21, "--segments", 1, "--train-length", 8),
        *("--data", tmp_path / "one.txt", "--output", tmp_path / "out", "--json"),
    )
    ids = AutoTokenizer.from_pretrained(folder)(text, add_special_tokens=False)["input_ids"]
    assert len(ids) == 22
    long, short = whole_nll(folder, ids)[-4:], whole_nll(folder, ids[-9:])[-4:]
    found = json.loads(made.stdout)["models"][0]["perplexity"]
    assert found["at_length"] == pytest.approx(math.exp(sum(long) / 4), rel=1e-5)
    assert found["at_train_length"] == pytest.approx(math.exp(sum(short) / 4), rel=1e-5)
    assert found["tokens"] == 4


def test_segments_are_evenly_spaced_over_places(tmp_path):
    """Documents of numbers, which a tokenizer that splits words reads as these numbers."""
    for name, numbers in (("a", range(0, 12)), ("b", range(100, 108)), ("c", range(7)), ("d", range(200, 211))):
        (tmp_path / f"{name}.txt").write_text(" ".join(map(str, numbers)))

    def tokenizer(text, **_):
        return {"input_ids": [int(word) for word in text.split()]}

    evaluation, plan = ReceptiveField(data=str(tmp_path)), Plan(units=[])
    made = evaluation.spaced_segments(tokenizer, plan, 7, 10)
    assert made == [list(range(start, start + 8)) for start in (0, 1, 2, 3, 4, 100, 200, 201, 202, 203)]
    assert plan.skipped == {"documents_too_short": 1}
    assert (plan.corpus["documents"], plan.corpus["tokens"]) == (3, 12 + 8 + 11)
    assert [row[0] for row in evaluation.spaced_segments(tokenizer, Plan(units=[]), 7, 3)] == [0, 4, 203]


def test_a_patched_checkpoint_reaches_as_far_as_its_window(byte_checkpoint, texts, tmp_path):
    invoke_root(
        "patch", byte_checkpoint(), tmp_path / "narrow", "--method", "windowed", "--window", 4, "--length", 256
    )
    options = ("--length", 60, "--segments", 2, "--data", texts, "--output", tmp_path / "out", "--json")
    made = invoke("receptive-field", tmp_path / "narrow", *options)
    assert made.exit_code == 0, made.output
    (model,) = json.loads(made.stdout)["models"]
    assert model["fields"]["0.99"]["erf"] <= model["reach"] == 2 * (4 - 1) + 1, "two layers"


def test_a_missing_checkpoint_is_told_first(byte_checkpoint, texts, tmp_path):
    made = invoke("position-loss", byte_checkpoint(), "nowhere", "--data", texts, "--output", tmp_path / "out")
    assert "there is no folder nowhere" in str(made.exception) and not (tmp_path / "out").exists()


def test_the_original_window_is_the_training_length(byte_checkpoint, texts, tmp_path):
    options = ("--length", 40, "--segments", 1, "--data", texts, "--output", tmp_path / "out")
    made = invoke("receptive-field", byte_checkpoint(), *options)
    assert made.exit_code == 0 and "read within its training length of 128" in made.stdout, made.output


@pytest.fixture
def losses(byte_checkpoint, texts, tmp_path):
    folders = [byte_checkpoint(), byte_checkpoint("qwen2")]
    made = invoke(
        *("position-loss", *folders, "--length", 80, "--documents", 2, "--window", 30, "--buckets", "20,50"),
        *("--data", texts, "--output", tmp_path / "out", "--json"),
    )
    assert made.exit_code == 0, made.output
    return folders, json.loads(made.stdout)


def test_position_loss_equals_hand_computed_means(losses, texts, tmp_path):
    folders, answer = losses
    assert answer["documents"] == 2 and [row["window"] for row in answer["models"]] == [30, 30]
    for folder in folders:
        details = Result.load(tmp_path / "out" / f"{folder.name}.json").details
        edges = details["bucket_edges"]
        assert edges == [0, 15, 20, 30, 50, 80], "the window and its half are edges"
        bos = AutoTokenizer.from_pretrained(folder).bos_token_id
        rows = [whole_nll(folder, [bos, *first_ids(folder, texts, row)][:81]) for row in (0, 1)]
        spans = list(zip(edges[:-1], edges[1:], strict=True))
        wanted = [[sum(row[low:high]) / (high - low) for low, high in spans] for row in rows]
        assert list(details["documents_loss"].values()) == [pytest.approx(row, rel=1e-5) for row in wanted]
        means = [sum(column) / 2 for column in zip(*wanted, strict=True)]
        assert details["loss"]["mean"] == pytest.approx(means, rel=1e-5)
        references = [sum(row[15:30]) / 15 for row in rows]
        excess = [sum(row[i] - ref for row, ref in zip(wanted, references, strict=True)) / 2 for i in range(5)]
        assert details["excess"]["mean"] == pytest.approx(excess, abs=1e-4)


def test_position_loss_of_other_tokens_is_refused(byte_checkpoint, texts, tmp_path):
    folders = [byte_checkpoint(), byte_checkpoint(bos=False)]
    options = ("--length", 80, "--documents", 1, "--window", 30, "--buckets", 4, "--data", texts)
    made = invoke("position-loss", *folders, *options, "--output", tmp_path / "out")
    assert "reads other tokens" in str(made.exception) and "another tokenizer" in str(made.exception)


def test_nothing_beyond_the_window(byte_checkpoint, texts, tmp_path):
    options = ("--length", 60, "--documents", 1, "--buckets", 4, "--data", texts, "--output", tmp_path / "out")
    made = invoke("position-loss", byte_checkpoint(), *options)
    assert made.exit_code == 0 and "nothing beyond the window to break at" in made.stdout, made.output


WRONG = {
    "receptive-field": [
        (("--length", 1, "--segments", 0, "--threshold", 1), "--length 1 .*; --segments 0 .*; --threshold 1 must lie"),
        (("--threshold", "nan"), "--threshold nan must lie between 0 and 1"),
        (("--length", 149, "--segments", 2), r"has 1 tokens with 149 before them; 2 segments .*\(its longest"),
        (("--length", 4000, "--segments", 1), "has 0 tokens with 4000 before them"),
    ],
    "position-loss": [
        (("--length", 1, "--documents", -1, "--threshold", 0), "--length 1 .*; --documents -1 .*; --threshold 0"),
        (("--length", 100, "--buckets", "many"), "buckets 'many' must be a number"),
        (("--length", 4000), "no document with more than 4000 tokens, the longest has 150"),
    ],
}


@pytest.mark.parametrize(("command", "options", "message"), [(name, *row) for name in WRONG for row in WRONG[name]])
def test_wrong_calls(command, options, message, byte_checkpoint, texts, tmp_path):
    made = invoke(command, byte_checkpoint(), *options, "--data", texts, "--output", tmp_path / "out")
    assert isinstance(made.exception, ValueError)
    with pytest.raises(ValueError, match=message):
        raise made.exception
    assert not list(tmp_path.glob("out/*.json"))


def test_wrong_calls_exit_with_2_and_help_is_light():
    command = [sys.executable, "-m", "ctxext", "analyze", "receptive-field", "nowhere", "--segments", "0"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and "--segments 0 must be at least 1" in done.stderr
    light = "import sys, ctxext.analysis.commands; print({'torch', 'transformers', 'matplotlib'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", light], capture_output=True, text=True).stdout == "set()\n"


def test_names_and_curve_places():
    assert result_names(["a/b", "org/c@1", "x/b"]) == ["1-b.json", "2-c-1.json", "3-b.json"]
    assert result_names(["a/b", "org/c@1"]) == ["b.json", "c-1.json"]
    assert curve_places(50) == list(range(50))
    places = curve_places(8192)
    assert {0, 1, 2, 8189, 8190, 8191} <= set(places) and len(places) < 400
    assert max(b - a for a, b in zip(places[:-1], places[1:], strict=True)) <= 69
