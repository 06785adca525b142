"""What `ctxext read` does: check the call, read a document, answer the questions about it, and report."""

from __future__ import annotations

import dataclasses
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ctxext.evaluation.bos import check_bos_rule
from ctxext.reading.extract import Extracted, extract
from ctxext.reading.skip import SkipPolicy

if TYPE_CHECKING:
    from ctxext.evaluation.loading import Loaded, RunSettings
    from ctxext.reading.reader import DocumentReader, WindowRead

PROMPT = "\n\nQuestion: {question}\nAnswer:"
WINDOW = 512  # L(M) of the paper
NEW_TOKENS = 64
CONFIDENCES = ("document", "model")
EVICTIONS = ("fifo", "lra", "lfa")  # as ctxext.reading.memory_state has them
INDEXES = ("exact", "approximate")  # as ctxext.reading.memory has them
_DOCUMENT = "<<document>>"  # stands for it while a chat template is rendered


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """How to read; None is the default, so that an option given without effect is told from one not given.

    Attributes:
        questions: Asked when the document is read.
        prompt: What stands behind the document, with `{question}`.
        chat: Put document and question into the tokenizer's chat template in place of `prompt`.
        skip_rate: K, tokens; 0 reads everything.
        alpha: Skipping threshold, nats.
        pooling: Of the losses of a window.
        decay: Of the pooling `exponential-decay`.
        window: L, tokens; by default the smaller of 512 and the model's window.
        memory_size: Tokens remembered; 0 for no memory.
        top_k: Keys that a query reads.
        sinks: First tokens that are never forgotten.
        offload: Keep the memory in the CPU's.
        eviction: What is forgotten when the memory is full: `fifo`, `lra` or `lfa`.
        index: How the best keys are found: `exact` or `approximate`.
        probed: Share of an approximate index that a query looks into.
        wait: Tokens that queries wait for in a second reading of each window, which is what is remembered.
        gates: Read the memory through the checkpoint's gates.
        confidence: `document` or `model`, as `DocumentReader` has it.
        sections: No skip passes a section's start.
        bos: Rule for the token before a document and a question: `auto`, `always`, `never`.
        max_new_tokens: Of an answer.
    """

    questions: tuple[str, ...] = ()
    prompt: str | None = None
    chat: bool = False
    skip_rate: int = 0
    alpha: float | None = None
    pooling: str | None = None
    decay: float | None = None
    window: int | None = None
    memory_size: int = 0
    top_k: int | None = None
    sinks: int | None = None
    offload: bool = False
    eviction: str | None = None
    index: str | None = None
    probed: float | None = None
    wait: int | None = None
    gates: bool = False
    confidence: str = CONFIDENCES[0]
    sections: bool = False
    bos: str = "auto"
    max_new_tokens: int | None = None

    def policy(self) -> SkipPolicy:
        """Return the skip policy.

        Raises:
            ValueError: If a value is out of range.
        """
        given: dict[str, Any] = {"threshold": self.alpha, "pooling": self.pooling, "decay": self.decay}
        return SkipPolicy(rate=self.skip_rate, **{name: value for name, value in given.items() if value is not None})

    def problems(self) -> list[str]:
        """Return what is wrong with the options, whatever the document and the model."""
        wrong = [*self._without_effect(), *check_bos_rule(self.bos)]
        try:
            self.policy()
        except ValueError as error:
            wrong.append(f"skip policy: {error}")
        if self.confidence not in CONFIDENCES:
            wrong.append(f"--confidence {self.confidence!r} is none of {', '.join(CONFIDENCES)}")
        if self.window is not None and self.window < 1:
            wrong.append(f"--window {self.window} must be at least 1 token")
        if self.memory_size < 0:
            wrong.append(f"--memory-size {self.memory_size} must be 0 (no memory) or a number of tokens")
        if self.memory_size > 0 and not 0 <= (self.sinks or 0) < self.memory_size:
            wrong.append(f"--sinks {self.sinks} must be 0 or more, and fewer than --memory-size {self.memory_size}")
        if self.top_k is not None and self.top_k < 1:
            wrong.append(f"--top-k {self.top_k} must be at least 1 key; leave it out to read all")
        if self.eviction is not None and self.eviction not in EVICTIONS:
            wrong.append(f"--eviction {self.eviction!r} is none of {', '.join(EVICTIONS)}")
        if self.index is not None and self.index not in INDEXES:
            wrong.append(f"--index {self.index!r} is none of {', '.join(INDEXES)}")
        if self.probed is not None and not 0 < self.probed <= 1:
            wrong.append(f"--probed {self.probed} must be above 0, and 1 at most")
        if self.wait is not None and self.wait < 0:
            wrong.append(f"--wait {self.wait} must be 0 or a number of tokens")
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            wrong.append(f"--max-new-tokens {self.max_new_tokens} must be at least 1")
        if self.prompt is not None and "{question}" not in self.prompt:
            wrong.append(f"--prompt {self.prompt!r} must hold {{question}} where the question goes")
        return wrong

    def _without_effect(self) -> list[str]:
        """Return what is given and would change nothing."""
        needs = {
            "--skip-rate above 0": (
                self.skip_rate == 0,
                {"--alpha": self.alpha is not None, "--sections": self.sections},
            ),
            "--pooling exponential-decay": (
                self.pooling != "exponential-decay",
                {"--decay": self.decay is not None},
            ),
            "--memory-size above 0": (
                self.memory_size == 0,
                {
                    "--top-k": self.top_k is not None,
                    "--sinks": self.sinks is not None,
                    "--offload": self.offload,
                    "--eviction": self.eviction is not None,
                    "--index": self.index is not None,
                    "--wait": self.wait is not None,
                    "--gates": self.gates,
                },
            ),
            "--top-k": (self.top_k is None, {"--index approximate": self.index == "approximate"}),
            "--index approximate": (self.index != "approximate", {"--probed": self.probed is not None}),
            "--question": (
                not self.questions,
                {
                    "--prompt": self.prompt is not None,
                    "--chat": self.chat,
                    "--max-new-tokens": self.max_new_tokens is not None,
                },
            ),
        }
        wrong = []
        for needed, (missing, options) in needs.items():
            given = [name for name, is_given in options.items() if is_given]
            if missing and given:
                wrong.append(f"{', '.join(given)} {'needs' if len(given) == 1 else 'need'} {needed}")
        if self.chat and self.prompt is not None:
            wrong.append("--chat and --prompt exclude each other: leave one out")
        return wrong


def read_document(
    checkpoint: str, path: Path, options: ReadOptions, settings: RunSettings, output: Path | None, force: bool
) -> dict[str, Any]:
    """Read a document with a checkpoint.

    Args:
        checkpoint: A folder, a GGUF file or a Hub id.
        path: The document.
        options: How to read it.
        settings: How to load the checkpoint.
        output: The folder to make, with every window in `reading.json` and a picture; None for none.
        force: Whether to replace that folder.

    Returns:
        The report, as JSON has it.

    Raises:
        ValueError: If the options, the document and the checkpoint do not fit together.
    """
    document = _check(path, options)
    with ExitStack() as stack:
        from ctxext.checkpoint.files import whole_folder, write_json
        from ctxext.evaluation.loading import load

        folder = None if output is None else stack.enter_context(whole_folder(output, force))
        loaded = load(checkpoint, settings)
        reader = stack.enter_context(_reader(loaded, options))
        prompts = [_prompt(loaded.tokenizer, question, options) for question in options.questions]
        new_tokens = options.max_new_tokens or NEW_TOKENS
        rooms = [reader.room(behind, new_tokens, before) for before, behind in prompts]
        windows, seconds = _read(reader, path, document, options.sections)
        report = {
            "document": {"path": str(path), "characters": len(document.text), **_sections(document, options)},
            "checkpoint": checkpoint,
            "settings": _settings(reader, options, settings),
            "reading": _summary(reader, windows, len(document.text), seconds),
            "answers": [
                {"question": question, **_answer(reader, before, behind, new_tokens)}
                for question, (before, behind) in zip(options.questions, prompts, strict=True)
            ],
            "notes": _notes(reader, options, document, rooms),
            "read": _spans(windows),
        }
        if folder is not None and output is not None:
            from ctxext.reading.picture import draw_path

            every = [dataclasses.asdict(window) for window in windows]
            write_json(folder / "reading.json", {**report, "windows": every})
            draw_path(windows, len(document.text), folder / "path.png", title=path.name)
            report["written"] = [str(output / name) for name in ("reading.json", "path.png")]
    return report


def _check(path: Path, options: ReadOptions) -> Extracted:
    """Return the document, or say all that is wrong with it and the options."""
    wrong = options.problems()
    document = Extracted("")
    try:
        document = extract(path)
    except (ValueError, OSError) as error:
        wrong.append(str(error))
    if wrong:
        raise ValueError("; ".join(wrong))
    return document


def _reader(loaded: Loaded, options: ReadOptions) -> DocumentReader:
    from ctxext.evaluation.bos import bos_token
    from ctxext.evaluation.loading import LENGTH_DEPENDENT, rope_types
    from ctxext.positions.live import fit_length
    from ctxext.reading.memory import MemoryConfig
    from ctxext.reading.reader import DocumentReader

    longest = int(loaded.model.config.max_position_embeddings)
    window = options.window or min(WINDOW, longest)
    memory = None
    if options.memory_size:
        if options.top_k is not None and options.top_k >= options.memory_size + (0 if options.gates else window):
            raise ValueError(
                f"--top-k {options.top_k} is all that a window of {window} and a memory of {options.memory_size} "
                "hold: leave it out"
            )
        given: dict[str, Any] = {
            "sinks": options.sinks,
            "eviction": options.eviction,
            "index": options.index,
            "probed": options.probed,
            "wait": options.wait,
        }
        memory = MemoryConfig(
            size=options.memory_size,
            top_k=options.top_k,
            gate=options.gates,
            offload=options.offload,
            **{name: value for name, value in given.items() if value is not None},
        )
    if rope_types(loaded.rope) & set(LENGTH_DEPENDENT):
        fit_length(loaded.model, longest)
    reader = DocumentReader(
        loaded.model,
        loaded.tokenizer,
        policy=options.policy(),
        window=window,
        memory=memory,
        confidence=options.confidence,
        bos=bos_token(loaded.tokenizer, options.bos),
    )
    if options.gates and reader.memory is not None:
        reader.memory.load_gates(loaded.folders[0])
    return reader


def _prompt(tokenizer: Any, question: str, options: ReadOptions) -> tuple[str, str]:
    """Return what stands in front of the document and behind it.

    Raises:
        ValueError: If a chat is wanted and the tokenizer has no template, or one that leaves out what a user says.
    """
    if not options.chat:
        return "", (options.prompt or PROMPT).replace("{question}", question)
    if not tokenizer.chat_template:
        raise ValueError("--chat: this tokenizer has no chat template; leave it out, and see --prompt")
    turn = [{"role": "user", "content": f"{_DOCUMENT}\n\n{question}"}]
    rendered = str(tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True))
    before, mark, behind = rendered.partition(_DOCUMENT)
    if not mark:
        raise ValueError("--chat: the tokenizer's chat template leaves out what a user says; use --prompt")
    return before, behind


def _read(reader: DocumentReader, path: Path, document: Extracted, sections: bool) -> tuple[list[WindowRead], float]:
    """Return every window, and the seconds that reading them took, tokenizing included."""
    from ctxext.evaluation.progress import progress_bar

    windows: list[WindowRead] = []
    began = time.perf_counter()
    with progress_bar(f"reading {path.name}", len(document.text)) as advance:
        for window in reader.read(document.text, document.sections if sections else ()):
            advance(window.next - (windows[-1].next if windows else 0))
            windows.append(window)
    return windows, time.perf_counter() - began


def _answer(reader: DocumentReader, before: str, behind: str, new_tokens: int) -> dict[str, Any]:
    began = time.perf_counter()
    answer = reader.ask(behind, new_tokens, before)
    return {"answer": answer.strip(), "seconds": round(time.perf_counter() - began, 3)}


def _sections(document: Extracted, options: ReadOptions) -> dict[str, Any]:
    kept = options.sections and document.sections
    return {"sections": len(document.sections), "section_kind": document.section_kind, "within_sections": bool(kept)}


def _settings(reader: DocumentReader, options: ReadOptions, settings: RunSettings) -> dict[str, Any]:
    """Return everything that the outcome depends on, defaults filled in."""
    memory = reader.memory
    return {
        **dataclasses.asdict(reader.policy),
        "window": reader.window,
        "context": reader.context,
        "confidence": reader.confidence,
        "bos_token": reader.bos,
        "memory": None if memory is None else dataclasses.asdict(memory.config),
        "dtype": str(reader.model.dtype).removeprefix("torch."),
        "device": str(reader.model.device),
        "attn": settings.attn,
        "adapter": settings.adapter,
        "load_in_4bit": settings.load_in_4bit,
        "prompt": "chat template" if options.chat else options.prompt or PROMPT,
    }


def _summary(reader: DocumentReader, windows: list[WindowRead], characters: int, seconds: float) -> dict[str, Any]:
    """Return the figures of a reading; seconds of tokenizing are apart from those of reading."""
    losses = [window.loss for window in windows if window.loss is not None]
    return {
        "windows": len(windows),
        "tokens_read": reader.tokens_read,
        "tokens_skipped_about": reader.tokens_skipped,
        "share_read": round(sum(window.end - window.start for window in windows) / characters, 6),
        "loss": sum(losses) / len(losses) if losses else None,
        "loss_min_max": [min(losses), max(losses)] if losses else None,
        "seconds": round(seconds - reader.tokenizing_seconds, 3),
        "tokenizing_seconds": round(reader.tokenizing_seconds, 3),
    }


def _spans(windows: list[WindowRead]) -> list[list[int]]:
    """Return first characters and ends of what was read, windows without a gap between them as one."""
    spans: list[list[int]] = []
    for number, window in enumerate(windows):
        if number and windows[number - 1].skipped == 0:
            spans[-1][1] = window.end
        else:
            spans.append([window.start, window.end])
    return spans


def _notes(reader: DocumentReader, options: ReadOptions, document: Extracted, rooms: list[int]) -> list[str]:
    """Return what a reader of the report must know."""
    notes = []
    if options.sections and not document.sections:
        notes.append("--sections changed nothing: no headings were found in the document")
    if options.skip_rate and not reader.tokens_skipped:
        notes.append(
            f"nothing was skipped: after every window --skip-rate {options.skip_rate} was more than remained, or its "
            f"loss was above --alpha {reader.policy.threshold:g}"
        )
    if options.offload and reader.model.device.type == "cpu":
        notes.append("--offload changed nothing: the model is on the CPU")
    if rooms and reader.memory is None and min(rooms) < reader.tokens_read:
        notes.append(
            f"without --memory-size an answer sees only the last tokens that were read: {min(rooms)} of "
            f"{reader.tokens_read} fit into the model's context of {reader.context} beside the question"
        )
    return notes
