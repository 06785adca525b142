"""Documents and summaries: docstrings cut out of modules, columns of files, and their prompts as training data."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import BOS, EOS, byte_tokenizer

from ctxext.data.offline import sympy_source
from ctxext.data.pairs import open_pairs, split_docstring
from ctxext.data.sources import Source
from ctxext.data.supervised import first_tokens, summary_prompt
from ctxext.data.tokens import TokenRules, check_source, open_store


def pairs_of(**options: Any) -> Any:
    return open_pairs(Source(kind="summary", **options))


def write_pairs(path: Path, rows: list[tuple[str, str]], columns: tuple[str, str] = ("document", "summary")) -> Path:
    path.write_text("".join(json.dumps(dict(zip(columns, row, strict=True))) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(
    ("source", "rest", "docstring"),
    [
        ('"""One."""\nx = 1\n', "x = 1\n", "One."),
        ('# top\n\n"""One\n\n    two\n"""\n\nx = 1\n', "# top\n\n\nx = 1\n", "One\n\ntwo"),
        ('"""é – ü""" ; x = 1\n', "x = 1\n", "é – ü"),
        ('"""One.""";\r\nx = "é"\r\n', 'x = "é"\r\n', "One."),
        ('"""One."""  # why\nx = 1', "# why\nx = 1", "One."),
        ('(r"""O\\ne.""")\nx = 1\n', "x = 1\n", "O\\ne."),
        ("'O' 'ne'\n", "", "One"),
        ('\x0c"""One."""\nx = 1\n', "\x0cx = 1\n", "One."),
        ('x = 1\n"""No docstring."""\n', 'x = 1\n"""No docstring."""\n', ""),
        ("", "", ""),
    ],
)
def test_a_docstring_is_cut_out_and_nothing_else(source: str, rest: str, docstring: str) -> None:
    assert split_docstring(source) == (rest, docstring)


def test_the_offline_corpus_keeps_every_other_statement_and_marks_short_docstrings() -> None:
    corpus = pairs_of(data="docstrings", split="held-out")
    assert corpus.source == {"kind": "offline", "name": "docstrings", "split": "held-out", "comparable": True}
    found = with_docstring = long_enough = 0
    for document, pair in zip(sympy_source("held-out"), corpus.read(), strict=True):
        module = ast.parse(document.text)
        docstring = ast.get_docstring(module) or ""
        assert (pair.id, pair.summary) == (document.id, docstring)
        if docstring:
            assert ast.unparse(ast.Module(module.body[1:], [])) == ast.unparse(ast.parse(pair.document))
        else:
            assert pair.document == document.text
        assert corpus.is_long_enough(pair) == (len(docstring.split()) >= 20)
        found += 1
        with_docstring += bool(docstring)
        long_enough += corpus.is_long_enough(pair)
    assert (found, with_docstring, long_enough) == (146, 49, 24)


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.zst", ".json", ".parquet"])
def test_local_files(tmp_path: Path, suffix: str) -> None:
    plain = write_pairs(tmp_path / "a.jsonl", [("long é", "short"), ("x", "")], ("body", "gist"))
    path = tmp_path / f"b{suffix}"
    if suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        rows = [json.loads(line) for line in plain.read_text().splitlines()]
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif suffix == ".jsonl.zst":
        import zstandard

        path.write_bytes(zstandard.ZstdCompressor().compress(plain.read_bytes()))
    else:
        path.write_bytes(plain.read_bytes())
    pairs = pairs_of(data=str(path), document_column="body", summary_column="gist")
    read = list(pairs.read())
    assert [(pair.id, pair.document, pair.summary) for pair in read] == [
        (f"{path.name}:1", "long é", "short"),
        (f"{path.name}:2", "x", ""),
    ]
    assert [pairs.is_long_enough(pair) for pair in read] == [True, False]
    assert pairs.source == {"kind": "local", "name": path.name, "document_column": "body", "summary_column": "gist"}


def test_govreport_is_where_the_registry_says_and_every_field_can_be_overridden() -> None:
    columns = {"document_column": "report", "summary_column": "summary"}
    assert pairs_of(data="govreport", split="test").source == {
        **{"kind": "hub", "name": "govreport", "id": "ccdv/govreport-summarization", "config": "document"},
        **{"revision": None, "split": "test", **columns},
    }
    other = pairs_of(data="mine", data_id="me/mine", data_config="c", data_revision="r", summary_column="s").source
    assert (other["id"], other["config"], other["revision"], other["split"]) == ("me/mine", "c", "r", "train")
    assert (other["document_column"], other["summary_column"]) == ("document", "s")


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    path = write_pairs(tmp_path / "a.jsonl", [("d", "s")])
    with pytest.raises(ValueError, match=r"a.jsonl:1 has no column 'text'; it has document, summary: state document_"):
        list(pairs_of(data=str(path), document_column="text").read())
    path.write_text(json.dumps({"document": "d", "summary": ["s"]}) + "\n")
    with pytest.raises(ValueError, match=r"holds list, not text, in column 'summary'.* \(--summary-column\)"):
        list(pairs_of(data=str(path)).read())
    with pytest.raises(
        ValueError, match="summary_column, data_revision cannot take effect with the data 'docstrings'"
    ):
        pairs_of(data="docstrings", summary_column="s", data_revision="r")
    with pytest.raises(ValueError, match="docstrings has no split 'test'; allowed: held-out, train, all"):
        pairs_of(data="docstrings", split="test")
    with pytest.raises(ValueError, match="split cannot take effect with the local file"):
        pairs_of(data=str(path), split="test")
    with pytest.raises(ValueError, match="did you mean 'govreport'"):
        pairs_of(data="govreprt")
    with pytest.raises(ValueError, match="document_tokens has no effect with kind 'text'"):
        Source(data="x", document_tokens=3)
    with pytest.raises(ValueError, match="column has no effect with kind 'summary'"):
        Source(data="x", kind="summary", column="text")
    with pytest.raises(ValueError, match="is a corpus on the Hub; state max_tokens"):
        check_source(Source(data="govreport", kind="summary"))


def test_a_text_is_cut_at_the_end_of_a_character() -> None:
    tokenizer = byte_tokenizer()
    assert first_tokens("abcdef", tokenizer, 4) == ("abcd", 2)
    assert first_tokens("abcdef", tokenizer, 6) == first_tokens("abcdef", tokenizer, None) == ("abcdef", 0)
    assert first_tokens("aéb", tokenizer, 2) == ("aé", 2)  # é has two bytes, and two tokens
    with pytest.raises(ValueError, match="is a slow tokenizer"):
        first_tokens("abc", object(), 2)


def test_the_prompt_is_the_papers() -> None:
    assert summary_prompt("{D}") == (
        "Read the following article and then summarize it.\n{D}\nNow summarize the above article.\nSummary:"
    )


def test_training_counts_the_summary_alone(tmp_path: Path) -> None:
    rows = [("A" * 30, "gist of it"), ("B", ""), ("C" * 500, "too long")]
    path = write_pairs(tmp_path / "a.jsonl", rows)
    source = Source(data=str(path), kind="summary", summary_tokens=4)
    store = open_store(source, byte_tokenizer(), TokenRules(longest_whole=400), tmp_path / "cache")
    assert (store.meta["documents"], store.meta["longest"]) == (1, 1 + 92 + 500 + 5 + 1)
    assert store.meta["skipped"] == {"examples_without_an_answer": 1, "examples_longer_than_a_pack": 1}
    assert store.counted is not None
    tokens, counted = np.asarray(store.tokens), np.asarray(store.counted, dtype=bool)
    decode = byte_tokenizer().decode
    assert tokens[0] == BOS and tokens[-1] == EOS
    assert decode(tokens[~counted][1:]) == summary_prompt("A" * 30) and decode(tokens[counted][:-1]) == " gist"


def test_docstrings_can_be_trained_on(tmp_path: Path) -> None:
    source = Source(data="docstrings", kind="summary", document_tokens=100, max_tokens=3000)
    store = open_store(source, byte_tokenizer(), TokenRules(), tmp_path / "cache")
    pairs = open_pairs(source)
    first = next(pair for pair in pairs.read() if pairs.is_long_enough(pair))
    assert store.document_id(0) == first.id and store.counted is not None
    answer = int(np.argmax(store.counted))
    assert byte_tokenizer().decode(np.asarray(store.tokens[1:answer])) == summary_prompt(first.document[:100])
    assert store.meta["skipped"]["examples_without_an_answer"] > 0  # modules with less than twenty words on them
