"""From a file to its text and the places where its sections start.

Plain text and markdown are read as the text that they are; markdown-it says which lines of markdown are headings, so
that a `#` in a code fence is none. HTML goes through inscriptis, which lays the text out as a browser would (lists,
tables, preformatted code), leaves scripts and styles away, and says where in the text a heading came to stand. An
extractor of main content would be the wrong tool: it guesses what of a page is worth reading, and that is the reader's
job here. PDF goes through pypdf.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from typing import Any

from ctxext.positions.base import nearest

INSTALL = "pip install 'ctxext[read]'"


@dataclass(frozen=True)
class Extracted:
    """The text of a document.

    Attributes:
        text: Its lines end with a line feed alone.
        sections: Characters where a section starts, ascending; empty where nothing is known of sections.
        section_kind: What they are: `headings`, `outline` or `pages`; empty without sections.
    """

    text: str
    sections: tuple[int, ...] = ()
    section_kind: str = ""


def extract(path: Path) -> Extracted:
    """Read a document.

    Args:
        path: A file whose suffix says what it is: one of `EXTRACTORS`.

    Raises:
        ValueError: If the file is missing, is of an unknown kind, cannot be read as that kind or holds no text, or a
            library for it is not installed; says what to do.
    """
    suffix = path.suffix.lower()
    if suffix not in EXTRACTORS:
        known = [*EXTRACTORS]
        hint = nearest(suffix, known)
        raise ValueError(f"{path}: a document's name ends in one of {', '.join(known)}, not {suffix!r}{hint}")
    if not path.is_file():
        raise ValueError(f"there is no file {path}" + (": it is a folder" if path.is_dir() else ""))
    document = EXTRACTORS[suffix](path)
    if not document.text.strip():
        raise ValueError(f"{path} is empty: it has no text to read")
    return document


def _need(library: str, path: Path) -> None:
    """Refuse a document whose library is missing, before it is imported."""
    if find_spec(library) is None:
        raise ValueError(f"reading {path.suffix} needs {library}: run `{INSTALL}`")


def _read_text(path: Path) -> str:
    """Return a file's text, a byte order mark left away."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            return file.read()
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise ValueError(
            f"{path} is no UTF-8, the one encoding that is tried (byte 0x{byte:02x}: {error.reason}); convert it, for "
            f"instance by `iconv -f latin1 -t utf-8 {path.name} > new{path.suffix}`"
        ) from None


def _extract_text(path: Path) -> Extracted:
    return Extracted(_read_text(path))


def _extract_markdown(path: Path) -> Extracted:
    _need("markdown_it", path)
    from markdown_it import MarkdownIt

    text = _read_text(path)
    starts = [0, *accumulate(len(line) + 1 for line in text.split("\n"))]  # of lines, in characters
    headings = (token for token in MarkdownIt().parse(text) if token.type == "heading_open")
    sections = tuple(sorted(starts[heading.map[0]] for heading in headings if heading.map))
    return Extracted(text, sections, "headings" if sections else "")


def _extract_html(path: Path) -> Extracted:
    _need("inscriptis", path)
    from inscriptis import get_annotated_text
    from inscriptis.model.config import ParserConfig

    rules = {f"h{level}": ["heading"] for level in range(1, 7)}
    found: dict[str, Any] = get_annotated_text(_read_text(path), ParserConfig(annotation_rules=rules))
    text = found.get("text", "")
    blocks = ((start, text[start:end]) for start, end, _ in found.get("label", ()))
    # A heading comes with the blank lines around it.
    starts = {start + len(block) - len(block.lstrip()) for start, block in blocks if block.strip()}
    return Extracted(text, tuple(sorted(starts)), "headings" if starts else "")


def _extract_pdf(path: Path) -> Extracted:
    _need("pypdf", path)
    from pypdf import PasswordType, PdfReader
    from pypdf.errors import DependencyError, PyPdfError

    try:
        with path.open("rb") as file:
            reader = PdfReader(file)
            if reader.is_encrypted and reader.decrypt("") == PasswordType.NOT_DECRYPTED:
                raise ValueError(f"{path} has a password: decrypt it first, for instance by `qpdf --decrypt`")
            pages = [page.extract_text() for page in reader.pages]
            outline = sorted(set(_outline_pages(reader, reader.outline)))
    except DependencyError as error:
        raise ValueError(f"{path} is encrypted, and {error}; or decrypt it by `qpdf --decrypt`") from None
    except (PyPdfError, RecursionError) as error:
        raise ValueError(f"{path} is no PDF that can be read: {error}") from None
    if not any(page.strip() for page in pages):
        raise ValueError(f"{path} has {len(pages)} pages without text, as scanned ones are: run OCR over it first")
    starts = [0, *accumulate(len(page) + 1 for page in pages)]
    numbers = outline or range(len(pages))
    return Extracted("\n".join(pages), tuple(starts[n] for n in numbers), "outline" if outline else "pages")


def _outline_pages(reader: Any, entries: list[Any]) -> Iterator[int]:
    """Yield the pages to which the entries of an outline lead, those of nested entries too."""
    for entry in entries:
        if isinstance(entry, list):
            yield from _outline_pages(reader, entry)
        elif (number := reader.get_destination_page_number(entry)) is not None and number >= 0:
            yield number


EXTRACTORS: dict[str, Callable[[Path], Extracted]] = {
    ".txt": _extract_text,
    ".md": _extract_markdown,
    ".markdown": _extract_markdown,
    ".html": _extract_html,
    ".htm": _extract_html,
    ".pdf": _extract_pdf,
}
