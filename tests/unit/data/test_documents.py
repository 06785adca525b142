"""Local files: every format gives the same documents, and a file that is not what its name says is refused."""

import hashlib
import json

import pytest
import zstandard

from ctxext.data import Document, documents_hash, open_corpus

TEXTS = ["first text\nwith ümlaut", "second"]


def write(path, suffix):
    import pyarrow
    import pyarrow.parquet

    lines = "".join(json.dumps({"text": text, "id": 7}) + "\n" for text in TEXTS).encode()
    if suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS, "id": [1, 2]}), path)
    elif suffix == ".jsonl.zst":
        # two frames in a row, as parallel compressors write
        half = lines.index(b"\n") + 1
        frame = zstandard.ZstdCompressor().compress
        path.write_bytes(frame(lines[:half]) + frame(lines[half:]))
    else:
        path.write_bytes(lines)
    return path


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.zst", ".parquet"])
def test_files_with_rows(tmp_path, suffix):
    path = write(tmp_path / f"data{suffix}", suffix)
    assert [document.text for document in open_corpus(str(path)).documents()] == TEXTS
    assert [document.id for document in open_corpus(str(path)).documents()] == [f"data{suffix}:1", f"data{suffix}:2"]
    with pytest.raises(ValueError, match=r"no column 'body'; it has text, id: pass --column"):
        list(open_corpus(str(path), column="body").documents())
    with pytest.raises(ValueError, match=r"column 'id' holds int, not text"):
        list(open_corpus(str(path), column="id").documents())


def test_text_files_and_folders(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "2.txt").write_text(TEXTS[1])
    (tmp_path / "a.txt").write_text(TEXTS[0], encoding="utf-8")
    (tmp_path / "ignored.md").write_text("x")
    assert list(open_corpus(str(tmp_path)).documents()) == [Document("a.txt", TEXTS[0]), Document("b/2.txt", TEXTS[1])]
    assert list(open_corpus(str(tmp_path / "a.txt")).documents()) == [Document("a.txt", TEXTS[0])]


def test_nested_and_joined_columns(texts):
    document = next(iter(open_corpus(str(texts), column="other.body,text").documents()))
    one = next(iter(open_corpus(str(texts)).documents())).text
    assert document.text == f"{one}\n\n{one}\n\n{one}"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.jsonl", b"{broken\n", r"x.jsonl line 1 is not JSON"),
        ("x.jsonl", b"[1]\n", r"line 1 holds list, not an object"),
        ("x.jsonl.zst", b"no zstd", r"not a zstandard file"),
        ("x.parquet", b"no parquet", r"not a parquet file"),
        ("x.txt", b"\xff\xfe", r"not UTF-8 text \(byte 0\)"),
        ("x.csv", b"a,b", r"allowed are .jsonl.zst, .jsonl, .parquet, .txt"),
    ],
)
def test_files_that_are_not_what_they_say(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        list(open_corpus(str(tmp_path / name)).documents())


def test_the_hash_covers_ids_texts_and_order():
    one, two = Document("a", "x"), Document("b", "y")
    lines = b"".join(
        hashlib.sha256(d.text.encode()).hexdigest().encode() + b"  " + d.id.encode() + b"\n" for d in (one, two)
    )
    assert documents_hash([one, two]) == hashlib.sha256(lines).hexdigest()
    others = [[two, one], [one], [one, Document("c", "y")], [one, Document("b", "z")]]
    assert len({documents_hash(documents) for documents in [[one, two], *others]}) == 5
