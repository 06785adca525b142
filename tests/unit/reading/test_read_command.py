"""`ctxext read`: what it prints and writes, on the tiny model that comes with ctxext, and what it refuses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ctxext import cli
from ctxext.reading.picture import draw_path, read_shares
from ctxext.reading.reader import WindowRead

SECTIONS = "".join(f"# Part {n}\n\n" + f"x = {n}  # the same line again and again\n" * 60 for n in range(4))


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Return a function that runs the command in this process: exit code, stdout and stderr."""

    def run(*arguments: Any) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["ctxext", "read", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.out, said.err

    return run


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("books") / "book.md"
    path.write_text(SECTIONS)
    return path


@pytest.fixture(scope="module")
def plain(book: Path) -> Path:
    path = book.with_name("plain.txt")
    path.write_text("one line of text\n" * 20)
    return path


def test_it_prints_what_was_read_and_answers(read: Any, book: Path) -> None:
    code, out, err = read(
        "tiny", book, "--skip-rate", 100, "--question", "What is x?", "--question", "And y?", "--max-new-tokens", 5
    )
    assert code == 0, err
    lines = out.splitlines()
    assert lines[0] == f"{book}, read by tiny"
    rows = dict(line.strip().split("  ", 1) for line in lines[1:7])
    assert list(rows) == ["tokens read", "tokens skipped", "share read", "pooled loss", "seconds", "where"]
    assert "windows of 256" in rows["tokens read"] and "(K = 100, alpha = 6)" in rows["tokens skipped"]
    assert set(rows["where"].strip().strip("|")) <= set("·░▒▓█") and "·" in rows["where"]
    assert [line for line in lines if line.startswith(("Q:", "A:"))][0::2] == ["Q: What is x?", "Q: And y?"]
    assert "reading book.md" in err and "100%" in err


def test_json_holds_settings_figures_and_answers(read: Any, book: Path) -> None:
    from transformers import AutoTokenizer

    from ctxext.checkpoint.source import resolve_checkpoint

    code, out, _ = read("tiny", book, "--question", "What?", "--max-new-tokens", 3, "--dtype", "float32", "--json")
    report = json.loads(out)
    tokenizer = AutoTokenizer.from_pretrained(resolve_checkpoint("tiny"))
    tokens = len(tokenizer(SECTIONS, add_special_tokens=False, verbose=False)["input_ids"])
    figures = report["reading"]
    assert code == 0 and figures["tokens_read"] == tokens and figures["tokens_skipped_about"] == 0
    assert figures["windows"] == -(-(tokens + 1) // 256), "a begin-of-sequence token, then 256 tokens a window"
    assert figures["share_read"] == 1.0 and report["read"] == [[0, len(SECTIONS)]]
    assert figures["seconds"] > figures["tokenizing_seconds"] > 0
    settings = report["settings"]
    assert (settings["rate"], settings["threshold"], settings["pooling"]) == (0, 6.0, "mean")
    assert (settings["window"], settings["bos_token"], settings["memory"]) == (256, tokenizer.bos_token_id, None)
    assert (settings["dtype"], settings["device"]) == ("float32", "cpu")
    assert report["document"]["sections"] == 4 and report["document"]["section_kind"] == "headings"
    assert [set(answer) for answer in report["answers"]] == [{"question", "answer", "seconds"}]
    assert "sees only the last tokens" in report["notes"][0]


def test_sections_a_memory_and_the_models_confidence_change_the_reading(read: Any, book: Path) -> None:
    base = ("tiny", book, "--skip-rate", 50, "--alpha", 20, "--window", 64, "--dtype", "float32", "--json")
    reports = {
        name: json.loads(read(*base, *more)[1])
        for name, more in {
            "plain": (),
            "sections": ("--sections",),
            "model": ("--confidence", "model"),
            "memory": ("--memory-size", 100, "--top-k", 90, "--sinks", 4),
            "last": ("--pooling", "last", "--bos", "never"),
        }.items()
    }
    starts = [SECTIONS.index(f"# Part {n}") for n in range(4)]
    met = {
        name: [any(begin <= start < end for begin, end in reports[name]["read"]) for start in starts]
        for name in ("plain", "sections")
    }
    assert met == {"plain": [True, False, False, False], "sections": [True] * 4}
    assert reports["sections"]["document"]["within_sections"]
    losses = {name: report["reading"]["loss"] for name, report in reports.items()}
    assert len(set(losses.values())) == 5 and losses["model"] < losses["plain"]
    memory = reports["memory"]["settings"]["memory"]
    assert (memory["size"], memory["top_k"], memory["sinks"], memory["gate"]) == (100, 90, 4, False)
    assert reports["last"]["settings"]["bos_token"] is None


def test_output_holds_every_window_and_a_picture(read: Any, plain: Path, byte_checkpoint: Any, tmp_path: Path) -> None:
    output = tmp_path / "out"
    call = (byte_checkpoint(), plain, "--skip-rate", 40, "--alpha", 30, "--window", 32, "--output", output)
    code, out, _ = read(*call)
    assert code == 0 and f"written to {output / 'reading.json'} and {output / 'path.png'}" in out
    assert sorted(path.name for path in output.iterdir()) == ["path.png", "reading.json"]
    assert (output / "path.png").read_bytes().startswith(b"\x89PNG")
    report = json.loads((output / "reading.json").read_text())
    windows = report["windows"]
    assert len(windows) == report["reading"]["windows"] > 1
    assert sum(window["tokens"] for window in windows) == report["reading"]["tokens_read"]
    assert set(windows[0]) == {"start", "end", "tokens", "loss", "skipped", "next"}
    spans = ([[window["start"], window["end"]] for window in windows], report["read"])
    covered = [[character for start, end in given for character in range(start, end)] for given in spans]
    assert covered[0] == covered[1] and len(report["read"]) > 1
    code, _, err = read(*call)
    assert code == 2 and "is not empty" in err
    assert read(*call, "--force")[0] == 0


def test_the_prompt_and_the_chat_template_stand_around_the_document(
    read: Any, plain: Path, byte_checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model echoes nothing: what it is asked is seen where the reader asks."""
    from transformers import AutoTokenizer

    from ctxext.reading.reader import DocumentReader

    asked: list[tuple[Any, ...]] = []

    def note(self: DocumentReader, *given: Any) -> str:
        asked.append(given)
        return ""

    monkeypatch.setattr(DocumentReader, "ask", note)
    folder = tmp_path / "chat"
    folder.mkdir()
    for path in byte_checkpoint().iterdir():
        (folder / path.name).symlink_to(path)
    call = (folder, plain, "--question", "who?")
    assert read(*call)[0] == 0
    assert read(*call, "--prompt", "{x} {question}!", "--max-new-tokens", 9)[0] == 0
    code, _, err = read(*call, "--chat")
    assert code == 2 and "no chat template" in err
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}<bot>"
    for path in folder.glob("tokenizer*"):
        path.unlink()
    tokenizer.save_pretrained(folder)
    assert read(*call, "--chat")[0] == 0
    assert asked == [
        ("\n\nQuestion: who?\nAnswer:", 64, ""),
        ("{x} who?!", 9, ""),
        ("\n\nwho?</s><bot>", 64, "<user>"),
    ]


def test_gates_come_from_the_checkpoint(
    read: Any, plain: Path, byte_checkpoint: Any, byte_session: Any, tmp_path: Path
) -> None:
    import torch

    from ctxext.reading.memory import MemoryConfig, add_memory

    call = ("--memory-size", 50, "--gates", "--window", 32, "--json")
    code, _, err = read(byte_checkpoint(), plain, *call)
    assert code == 2 and "has no gates that fit" in err
    losses = []
    for value in (-20.0, 2.0):  # closed and open
        session = byte_session()
        memory = add_memory(session.model, MemoryConfig(size=50, gate=True))
        with torch.no_grad():
            for name, parameter in session.model.named_parameters():
                if name.endswith("memory_gate"):
                    parameter.fill_(value)
        folder = tmp_path / str(value)
        session.model.save_pretrained(folder)
        session.tokenizer.save_pretrained(folder)
        memory.remove()
        losses.append(json.loads(read(folder, plain, *call)[1])["reading"]["loss"])
    without = json.loads(read(byte_checkpoint(), plain, "--window", 32, "--json")[1])["reading"]["loss"]
    assert losses[0] == pytest.approx(without, rel=1e-5) and losses[1] != pytest.approx(without, rel=1e-5)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--alpha", 3, "--sections"], ["--alpha, --sections need --skip-rate above 0"]),
        (["--decay", 0.5], ["--decay needs --pooling exponential-decay"]),
        (
            ["--top-k", 5, "--sinks", 1, "--offload", "--gates"],
            ["--top-k, --sinks, --offload, --gates need --memory-size above 0"],
        ),
        (["--prompt", "{question}", "--chat", "--max-new-tokens", 5], ["--prompt, --chat, --max-new-tokens need --q"]),
        (["--question", "a", "--prompt", "{question}", "--chat"], ["--chat and --prompt exclude each other"]),
        (["--question", "a", "--prompt", "b"], ["'b' must hold {question}"]),
        (["--question", "a", "--max-new-tokens", 0], ["--max-new-tokens 0 must be at least 1"]),
        (["--skip-rate", -1, "--pooling", "man"], ["rate -1 must be 0", "'man' (did you mean 'mean'?)"]),
        (["--confidence", "sure", "--bos", "maybe", "--window", 0], ["'sure' is none", "--bos 'maybe'", "--window 0"]),
        (["--memory-size", -1], ["--memory-size -1 must be 0"]),
        (["--memory-size", 8, "--sinks", 8, "--top-k", 0], ["--sinks 8 must be 0 or more", "--top-k 0 must be at"]),
        (["--window", 129], ["window 129 is longer than the model's, 128"]),
        (["--memory-size", 10, "--top-k", 138], ["--top-k 138 is all that a window of 128 and a memory of 10 hold"]),
        (["--dtype", "float8"], ["--dtype 'float8'"]),
        (["--question", "q" * 100], ["asks for 64 more"]),
    ],
    ids=str,
)
def test_a_wrong_call_says_all_that_is_wrong(
    read: Any, plain: Path, byte_checkpoint: Any, tmp_path: Path, options: list[Any], said: list[str]
) -> None:
    output = tmp_path / "out"
    code, out, err = read(byte_checkpoint(), plain, *options, "--output", output)
    assert (code, out) == (2, "")
    for part in said:
        assert part in err
    assert list(tmp_path.iterdir()) == []


def test_a_missing_document_is_said_together_with_wrong_options(read: Any, byte_checkpoint: Any) -> None:
    code, _, err = read(byte_checkpoint(bos=False), "nowhere.txt", "--alpha", 2)
    assert code == 2 and "--alpha needs --skip-rate above 0; there is no file nowhere.txt" in err


def test_a_bos_token_that_the_tokenizer_does_not_have_is_refused(read: Any, plain: Path, byte_checkpoint: Any) -> None:
    code, _, err = read(byte_checkpoint(bos=False), plain, "--bos", "always")
    assert code == 2 and "--bos always: this tokenizer has no begin-of-sequence token" in err
    assert json.loads(read(byte_checkpoint(bos=False), plain, "--json")[1])["settings"]["bos_token"] is None


def test_what_had_no_effect_is_noted(read: Any, plain: Path, byte_checkpoint: Any) -> None:
    call = ("--skip-rate", 1000, "--sections", "--memory-size", 10, "--offload", "--json")
    notes = json.loads(read(byte_checkpoint(), plain, *call)[1])["notes"]
    for number, said in enumerate(["no headings were found", "nothing was skipped", "the model is on the CPU"]):
        assert said in notes[number]
    assert len(notes) == 3


def test_an_interrupted_reading_leaves_nothing(tmp_path: Path, byte_checkpoint: Any) -> None:
    (tmp_path / "long.txt").write_text("a line of a long text\n" * 100_000)
    command = [sys.executable, "-m", "ctxext", "read", byte_checkpoint(), "long.txt", "--output", "out"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        until = time.monotonic() + 60
        while len(list(tmp_path.iterdir())) == 1 and time.monotonic() < until:
            time.sleep(0.05)
        assert len(list(tmp_path.iterdir())) == 2, "the folder that is to become OUTPUT"
        time.sleep(0.5)
        os.kill(process.pid, signal.SIGINT)
        out, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode != 0 and out == b""
    assert [path.name for path in tmp_path.iterdir()] == ["long.txt"]


def test_shares_of_the_parts_of_a_document_that_were_read() -> None:
    """100 characters in 4 parts: 10 of the first 25 are read, all of the second, 5 of the third, none of the last."""
    assert read_shares([[5, 10], [20, 55]], 100, 4) == pytest.approx([0.4, 1.0, 0.2, 0.0])
    assert read_shares([[0, 3]], 3, 5) == pytest.approx([1.0] * 5)  # more parts than characters
    assert read_shares([], 3, 2) == [0.0, 0.0]


@pytest.mark.parametrize(
    ("count", "labels"), [(0, ["read"]), (1, ["read"]), (5, ["skipped", "read"]), (4000, ["read", "mean"])]
)
def test_the_picture_shows_every_window(tmp_path: Path, count: int, labels: list[str]) -> None:
    from matplotlib.figure import Figure

    windows = [WindowRead(100 * n, 100 * n + 40, 16, 1.0 + n % 3, 10, 100 * n + 100) for n in range(count)]
    figures: list[Any] = []
    saved = Figure.savefig

    def save(self: Any, *given: Any, **more: Any) -> None:
        figures.append(self)
        saved(self, *given, **more)

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        patch.setattr(Figure, "savefig", save)
        warnings.simplefilter("error")
        draw_path(windows, max(1, 100 * count), tmp_path / "path.png", title="a $name$_")
    above, strip = figures[0].axes
    named = [text.get_text() for text in above.get_legend().get_texts()]
    drawn = dict(zip(named, above.collections or above.lines, strict=True))
    assert list(drawn) == labels
    if count == 4000:
        assert len(above.lines[0].get_xdata()) == 4000
        assert above.lines[1].get_ydata() == pytest.approx([2.0] * 80, abs=0.05)  # losses 1, 2, 3 in turn
    else:
        assert len(drawn["read"].get_segments()) == count
    shares = strip.collections[0].get_array()
    assert float(shares.mean()) == pytest.approx(0.4 if count else 0.0, abs=0.01)
    assert above.get_title().startswith(f"a $name$_: {count:,} window")


PEAK = (
    "import resource, sys\n"
    "from ctxext.cli import main\n"
    "try:\n    main()\n"
    "finally:\n    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr)\n"
)


def peak_of(checkpoint: Any, document: Path, *options: Any) -> tuple[float, dict[str, Any]]:
    """MB that a process needs at most, and its report."""
    command = [sys.executable, "-c", PEAK, "read", checkpoint, document, "--json", *options]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=True)
    return int(done.stderr.split()[-1]) / 1000, json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("tiny", ["--skip-rate", 10_000]),
        ("tiny", ["--skip-rate", 10_000, "--memory-size", 512]),
        ("small", ["--window", 128]),
    ],
    ids=str,
)
def test_a_document_of_a_million_tokens_is_read_in_constant_memory(
    tmp_path: Path, byte_checkpoint: Any, model: str, options: list[Any]
) -> None:
    """A byte is a token of the small model; the text of the tiny one has about 2.4 characters a token."""
    from ctxext.data.corpora import open_corpus

    text, characters = "", 1 if model == "small" else 2.4
    for document in open_corpus("sympy-source", split="all").documents():
        text += document.text.encode("ascii", "ignore").decode()
        if len(text) > 1_000_000 * characters:
            break
    checkpoint = model if model == "tiny" else byte_checkpoint(num_hidden_layers=1, hidden_size=32)
    peaks, reports = [], []
    for tokens in (100_000, 1_000_000):
        path = tmp_path / f"{tokens}.txt"
        path.write_text(text[: round(tokens * characters)])
        peak, report = peak_of(checkpoint, path, *options)
        peaks.append(peak)
        reports.append(report["reading"])
    for tokens, figures in zip((100_000, 1_000_000), reports, strict=True):
        assert figures["tokens_read"] + figures["tokens_skipped_about"] == pytest.approx(tokens, rel=0.25)
    assert peaks[1] < 1.05 * peaks[0], peaks
