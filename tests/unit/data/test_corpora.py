"""The registry: names, overrides, the pinned sympy wheel and its manifest."""

import hashlib
import json

import pytest

from ctxext.data import CORPORA, open_corpus
from ctxext.data.corpora import HubCorpus
from ctxext.data.manifest import build_manifest
from ctxext.data.offline import MANIFEST_PATH, in_split, sympy_root, sympy_source


def test_unknown_names_get_the_nearest():
    with pytest.raises(ValueError, match=r"'sympy-sorce'; did you mean 'sympy-source'\?"):
        open_corpus("sympy-sorce")


def test_options_that_cannot_take_effect_are_refused(texts):
    with pytest.raises(ValueError, match=r"--data-id cannot take effect .* local file"):
        open_corpus(str(texts), data_id="a/b")
    with pytest.raises(ValueError, match=r"--column cannot take effect .* no columns"):
        open_corpus("sympy-source", column="text")
    with pytest.raises(ValueError, match="no split 'test'; allowed: held-out, train, all"):
        open_corpus("sympy-source", split="test")


def test_the_manifest_is_that_of_the_pinned_wheel():
    shipped = json.loads(MANIFEST_PATH.read_text())
    assert build_manifest(sympy_root()) == shipped
    assert len(shipped["files"]) == 1532
    lines = "".join(f"{digest}  {path}\n" for path, digest in shipped["files"].items())
    assert shipped["corpus_hash"] == hashlib.sha256(lines.encode()).hexdigest()


def test_one_in_ten_is_held_out():
    held = [document.id for document in open_corpus("sympy-source").documents()]
    every = [document.id for document in open_corpus("sympy-source", split="all").documents()]
    train = [document.id for document in open_corpus("sympy-source", split="train").documents()]
    assert every == sorted(every) and len(every) == 1532
    assert sorted(held + train) == every and not set(held) & set(train)
    assert held == [path for path in every if int.from_bytes(hashlib.sha256(path.encode()).digest()) % 10 == 0]
    assert 100 < len(held) < 200


@pytest.fixture
def wheel(tmp_path):
    """A sympy of three files, the first of which is held out, and its manifest."""
    package = tmp_path / "sympy"
    package.mkdir()
    held = next(f"m{i}.py" for i in range(100) if in_split(f"sympy/m{i}.py", "held-out"))
    for name in (held, "zz.py", "zy.py"):
        (package / name).write_text(f"# {name}\n")
    manifest = tmp_path / "manifest.json"
    manifest.write_text(json.dumps(build_manifest(tmp_path)))
    return tmp_path, package / held, manifest


def test_altered_added_and_missing_files(wheel):
    root, held, manifest = wheel
    assert [document.text for document in sympy_source("held-out", root, manifest)] == [f"# {held.name}\n"]
    held.write_text("# changed\n")
    with pytest.raises(ValueError, match=rf"{held.name} was altered: run `pip install sympy==1.14.0`"):
        list(sympy_source("held-out", root, manifest))
    (root / "sympy" / "new.py").write_text("")
    with pytest.raises(ValueError, match=r"1 files are missing or added, the first is sympy/new.py: .*sympy==1.14.0"):
        list(sympy_source("all", root, manifest))


def test_another_version_is_refused(monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", lambda name: "1.13.1")
    with pytest.raises(ValueError, match=r"1.13.1 is installed: run `pip install sympy==1.14.0`"):
        open_corpus("sympy-source").read().__next__()


def test_python_corpora_are_marked_as_not_comparable():
    for name in ("python-stdlib", "python-docs"):
        corpus = open_corpus(name)
        assert corpus.source["comparable"] is False
        assert len(next(corpus.documents()).text) > 0


def test_the_commit_of_a_hub_corpus_goes_into_its_source(monkeypatch):
    from huggingface_hub import HfApi

    asked = []

    def told(self, repo_id, *, revision, timeout):
        asked.append((repo_id, revision))
        return type("Info", (), {"sha": "c0ffee"})

    monkeypatch.setattr(HfApi, "dataset_info", told)
    assert open_corpus("proof-pile").source["commit"] == "c0ffee"

    def unreachable(self, repo_id, **options):
        raise ConnectionError("no route to host")

    monkeypatch.setattr(HfApi, "dataset_info", unreachable)
    assert open_corpus("pg19", data_revision="main").source["commit"] is None
    assert asked == [("hoskinson-center/proof-pile", "refs/convert/parquet")]


def test_hub_corpora_stream_and_every_field_can_be_overridden(texts, monkeypatch):
    local = HubCorpus(description="", id="json", split="train", data_files=str(texts))
    monkeypatch.setitem(CORPORA, "local", local)
    documents = list(open_corpus("local", column="other.body").documents())
    assert [document.id for document in documents] == ["train:0", "train:1", "train:2"]
    assert documents[0].text == "\n\n".join([json.loads(texts.read_text().splitlines()[0])["text"]] * 2)
    monkeypatch.setattr("ctxext.data.corpora._hub_commit", lambda corpus: None)
    changed = open_corpus("proof-pile", data_id="me/mine", data_config="c", split="validation", column="body").source
    assert (changed["id"], changed["config"], changed["split"], changed["column"]) == (
        "me/mine",
        "c",
        "validation",
        "body",
    )
    assert changed["revision"] is None, "a revision belongs to the repository that was replaced"
