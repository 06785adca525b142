"""What cannot work is refused before a checkpoint is loaded or anything is scored, and leaves nothing behind."""

import shutil

import pytest

from ctxext.evals.last_token import LastToken
from ctxext.evals.perplexity import Perplexity
from ctxext.evals.retrieval import Retrieval
from ctxext.evals.ruler import Ruler
from ctxext.evals.summarization import Summarization
from ctxext.evaluation.compare import compare_results
from ctxext.evaluation.corpus import open_named
from ctxext.evaluation.loading import RunSettings, load
from ctxext.evaluation.report import write_report
from ctxext.evaluation.runner import run_evaluation

FILES = {
    "empty.jsonl": b"",
    "latin.jsonl": b'{"text": "caf\xe9"}\n',
    "broken.jsonl": b"{oops\n",
    "other.jsonl": b'{"body": "x"}\n',
    "a.txt": b"some text",
}


@pytest.fixture
def files(tmp_path):
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "folder").mkdir()
    return tmp_path


@pytest.fixture
def no_loading(monkeypatch):
    def load(*_):
        raise AssertionError("the checkpoint was loaded")

    monkeypatch.setattr("ctxext.evaluation.runner.load", load)


@pytest.mark.parametrize(
    "kind, options, message",
    [
        (Perplexity, {"data": "nothing"}, "no corpus and no file is called '.*nothing'"),
        (Perplexity, {"data": "empty.jsonl"}, r"--data .*empty\.jsonl is an empty file"),
        (Perplexity, {"data": "folder"}, r"--data .*folder has no \.txt file"),
        (Perplexity, {"data": "latin.jsonl"}, r"--data .*latin\.jsonl cannot be read: .*0xe9"),
        (LastToken, {"data": "other.jsonl"}, "has no column 'text'; it has body: pass --column"),
        (Perplexity, {"data": "a.txt", "column": "body"}, "--column cannot take effect .*text files have no columns"),
        (Retrieval, {"variant": "needle", "data": "broken.jsonl"}, r"broken\.jsonl line 1 is not JSON"),
        (Ruler, {"tasks": "niah_single_2", "data": "empty.jsonl"}, "is an empty file"),
        (Ruler, {"tasks": "qa_1", "qa_1": "nothing"}, "there is no file .*nothing"),
        (Summarization, {"data": "empty.jsonl"}, "is an empty file"),
        (Summarization, {"data": "broken.jsonl"}, r"--data .*broken\.jsonl cannot be read: "),
        (Summarization, {"data": "other.jsonl"}, "has no column 'document'"),
    ],
)
def test_data_are_looked_at_before_the_checkpoint_is_loaded(files, no_loading, kind, options, message):
    placed = {name: str(files / value) if name in ("data", "qa_1") else value for name, value in options.items()}
    with pytest.raises(ValueError, match=message):
        run_evaluation(kind(**placed), "any", output=files / "r.json")
    assert not (files / "r.json").exists()


@pytest.mark.parametrize(
    "place, message",
    [
        ("folder", r"--output .*folder is a folder: name a file in it, such as .*folder/result\.json"),
        ("a.txt/r.json", r"--output .*a\.txt/r\.json cannot be written: .*a\.txt takes no files \(Not a directory\)"),
    ],
)
def test_an_output_that_cannot_be_written_is_refused_before_the_checkpoint_is_loaded(
    files, no_loading, place, message
):
    before = sorted(files.rglob("*"))
    with pytest.raises(ValueError, match=message):
        run_evaluation(Perplexity(data=str(files / "a.txt")), "any", output=files / place)
    assert sorted(files.rglob("*")) == before


def test_an_output_in_folders_to_be_made_is_fine(files, byte_checkpoint):
    (files / "long.txt").write_text("some text " * 20)
    evaluation = Perplexity(data=str(files / "long.txt"), length=32, stride=32)
    _, path = run_evaluation(evaluation, byte_checkpoint(), output=files / "new" / "deep" / "r.json")
    assert [entry.name for entry in path.parent.iterdir()] == ["r.json"]


def test_an_error_that_names_the_data_is_left_as_it_is(files):
    with pytest.raises(ValueError, match=r"^[^ ]*broken\.jsonl line 1 is not JSON"):
        list(open_named(str(files / "broken.jsonl")).documents())


def test_a_corpus_that_cannot_be_reached_says_what_to_do(monkeypatch):
    def load_dataset(*_, **__):
        raise ConnectionError("Couldn't reach 'emozilla/pg19'")

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    monkeypatch.setattr("ctxext.data.corpora._hub_commit", lambda corpus: None)
    with pytest.raises(ValueError, match="--data pg19 cannot be read: Couldn't .*; check the network, or give"):
        Perplexity(data="pg19").check()


def test_checkpoints_and_adapters_that_are_not_whole(byte_checkpoint, tmp_path):
    bare, cut = tmp_path / "bare", tmp_path / "cut"
    shutil.copytree(byte_checkpoint(), bare, ignore=shutil.ignore_patterns("token*", "special*"))
    with pytest.raises(ValueError, match="bare has no tokenizer: copy tokenizer.json"):
        load(bare, RunSettings())
    shutil.copytree(byte_checkpoint(), cut)
    (cut / "tokenizer.json").write_text("{oops")
    with pytest.raises(ValueError, match="the tokenizer of .*cut cannot be loaded: "):
        load(cut, RunSettings())
    shutil.copy(byte_checkpoint() / "tokenizer.json", cut)
    weights = cut / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"the weights of .*cut are damaged .*run `ctxext doctor .*cut`"):
        load(cut, RunSettings())
    (tmp_path / "none").mkdir()
    with pytest.raises(ValueError, match=r"--adapter .*none is no peft adapter: it has no adapter_config\.json"):
        load(byte_checkpoint(), RunSettings(adapter=str(tmp_path / "none")))


def test_every_result_that_cannot_be_read_is_named_at_once(files):
    paths = [files / "gone.json", files / "folder", files / "a.txt"]
    wanted = r"gone\.json cannot be read: No such file.*\n.*folder cannot be read: Is a directory.*\n.*a\.txt is not a"
    with pytest.raises(ValueError, match=wanted):
        compare_results(paths)
    with pytest.raises(ValueError, match=wanted):
        write_report(paths, files / "r.html", "title")
    assert not (files / "r.html").exists()


def test_pictures_and_pages_that_cannot_be_written_are_refused_before_results_are_read(files):
    with pytest.raises(ValueError, match=r"--output .*cannot be written: .*a\.txt takes no files"):
        compare_results([files / "gone.json"], files / "a.txt")
    with pytest.raises(ValueError, match=r"--output .*folder is a folder"):
        write_report([files / "gone.json"], files / "folder", "title")
