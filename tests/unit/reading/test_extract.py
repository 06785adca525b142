"""Text and sections of documents whose content is known, and what is said of those that cannot be read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ctxext.reading import extract as module
from ctxext.reading.extract import extract


def pdf(path: Path, pages: list[str], **more: Any) -> Path:
    """Write a PDF with a line of text on every page; `outline` names pages, `password` and `algorithm` encrypt."""
    from pypdf import PdfWriter
    from pypdf.generic import DecodedStreamObject, DictionaryObject, NameObject

    writer = PdfWriter()
    names = {"/Type": "/Font", "/Subtype": "/Type1", "/BaseFont": "/Helvetica"}
    font = DictionaryObject({NameObject(key): NameObject(value) for key, value in names.items()})
    fonts = DictionaryObject({NameObject("/F1"): font})
    for text in pages:
        page = writer.add_blank_page(width=300, height=100)
        page[NameObject("/Resources")] = DictionaryObject({NameObject("/Font"): fonts})
        content = DecodedStreamObject()
        content.set_data(f"BT /F1 12 Tf 10 50 Td ({text}) Tj ET".encode() if text else b"")
        page[NameObject("/Contents")] = content
    for title, number, inside in more.get("outline", ()):
        parent = writer.add_outline_item(title=title, page_number=number)
        if inside is not None:
            writer.add_outline_item(title=f"in {title}", page_number=inside, parent=parent)
    if "password" in more:
        writer.encrypt(more["password"], owner_password="owner", algorithm=more.get("algorithm", "RC4-128"))
    writer.write(path)
    return path


def starts(path: Path, width: int) -> list[str]:
    document = extract(path)
    assert list(document.sections) == sorted(document.sections)
    return [document.text[start : start + width] for start in document.sections]


def test_plain_text_is_read_as_it_is_with_line_feeds_and_no_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "a.TXT"
    path.write_bytes("\ufeff# é\r\n\tb\rc\n".encode())
    document = extract(path)
    assert (document.text, document.sections, document.section_kind) == ("# é\n\tb\nc\n", (), "")


def test_headings_of_markdown_are_those_of_a_parser(tmp_path: Path) -> None:
    path = tmp_path / "a.md"
    path.write_bytes(
        b"intro\r\n\r\n# One\n\n```sh\n# no heading\n```\n\nTwo\nlines\n===\n\n> ## Quoted\n\n    # code\n\n"
        b"#hashtag\n\n###### Six ######\n\n<!--\n# comment\n-->\n"
    )
    assert starts(path, 8) == ["# One\n\n`", "Two\nline", "> ## Quo", "###### S"]
    assert extract(path).section_kind == "headings"
    (tmp_path / "b.markdown").write_text("no heading\n")
    assert extract(tmp_path / "b.markdown").section_kind == ""


def test_html_becomes_text_without_scripts_and_knows_where_headings_stand(tmp_path: Path) -> None:
    path = tmp_path / "a.html"
    path.write_text(
        '<?xml version="1.0" encoding="utf-8"?><html><head><title>T</title><style>h1 {}</style></head><body>'
        "<h1>The\n  <em>First</em> &amp; last</h1><p>One\nline.</p><script>var x = '<h2>none</h2>'</script>"
        "<ul><li>item</li></ul><div><h3>Inner é</h3>text</div><h2></h2><pre>a = 1\n    b</pre><h6>End</h6>."
        "</body></html>"
    )
    assert starts(path, 5) == ["The F", "Inner", "End\n\n"]
    document = extract(path)
    lines = [line.strip() for line in document.text.split("\n") if line.strip()]
    assert lines == ["The First & last", "One line.", "* item", "Inner é", "text", "a = 1", "b", "End", "."]
    assert document.section_kind == "headings" and "\n    b" in document.text


def test_pages_of_a_pdf_are_its_sections_unless_it_has_an_outline(tmp_path: Path) -> None:
    pages = ["first page", "second", "", "fourth page"]
    document = extract(pdf(tmp_path / "a.pdf", pages))
    assert (document.text, document.sections) == ("first page\nsecond\n\nfourth page", (0, 11, 18, 19))
    assert document.section_kind == "pages"
    document = extract(pdf(tmp_path / "b.pdf", pages, outline=[("B", 1, 3), ("again", 1, None)]))
    assert (document.sections, document.section_kind) == ((11, 19), "outline")
    # An owner's password alone keeps nobody from reading.
    assert extract(pdf(tmp_path / "c.pdf", pages, password="")).text == document.text


def broken(folder: Path, name: str) -> Path:
    path = folder / name
    contents = {
        "latin.txt": "caf\xe9 noir".encode("latin1"),
        "latin.html": b"<p>\xff</p>",
        "empty.md": b" \n\n",
        "empty.html": b"",
        "scripts.htm": b"<script>1</script>",
        "no.pdf": b"hello",
        "empty.pdf": b"",
    }
    if name in contents:
        path.write_bytes(contents[name])
    elif name == "scanned.pdf":
        pdf(path, ["", ""])
    elif name == "secret.pdf":
        pdf(path, ["text"], password="pw")
    elif name == "folder.txt":
        path.mkdir()
    return path


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("missing.txt", "there is no file .*missing.txt$"),
        ("folder.txt", "there is no file .*: it is a folder"),
        ("a.docx", "ends in one of .txt, .md, .markdown, .html, .htm, .pdf, not '.docx'"),
        ("a.htlm", r"not '.htlm' \(did you mean '.htm'\?\)"),
        ("book", "not ''"),
        (
            "latin.txt",
            r"is no UTF-8, the one encoding that is tried \(byte 0xe9: .*iconv -f latin1 -t utf-8 latin.txt",
        ),
        ("latin.html", "is no UTF-8"),
        ("empty.md", "is empty: it has no text"),
        ("empty.html", "is empty"),
        ("scripts.htm", "is empty"),
        ("no.pdf", "is no PDF that can be read"),
        ("empty.pdf", "is no PDF that can be read"),
        ("scanned.pdf", "has 2 pages without text, as scanned ones are: run OCR"),
        ("secret.pdf", "has a password: decrypt it first"),
    ],
)
def test_what_cannot_be_read_says_why(tmp_path: Path, name: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        extract(broken(tmp_path, name))


@pytest.mark.parametrize(("name", "library"), [("a.md", "markdown_it"), ("a.html", "inscriptis"), ("a.pdf", "pypdf")])
def test_a_missing_library_is_named_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, library: str
) -> None:
    asked = []

    def find_nothing(wanted: str) -> None:
        asked.append(wanted)

    monkeypatch.setattr(module, "find_spec", find_nothing)
    (tmp_path / name).write_text("text")
    with pytest.raises(ValueError, match=r"pip install 'ctxext\[read\]'"):
        extract(tmp_path / name)
    assert asked == [library]
    (tmp_path / "a.txt").write_text("text needs none")
    assert extract(tmp_path / "a.txt").text == "text needs none"
