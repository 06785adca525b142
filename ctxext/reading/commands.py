"""The command line of random-access reading: `ctxext read`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ctxext.evaluation.bos import BOS_HELP
from ctxext.evaluation.commands import RUN_OPTIONS

STRIP = 64  # characters of the line that shows where the document was read
SHADES = "·░▒▓█"


def _loading(name: str) -> Any:
    return typer.Option(f"--{name.replace('_', '-')}", help=RUN_OPTIONS[name][2])


def read(
    checkpoint: Annotated[str, typer.Argument(help="A folder, a GGUF file or a Hub id.")],
    document: Annotated[Path, typer.Argument(help="A .txt, .md, .html or .pdf file.")],
    question: Annotated[
        list[str] | None, typer.Option(help="Asked when the document is read; may be given several times.")
    ] = None,
    prompt: Annotated[
        str | None,
        typer.Option(
            help="Stands behind the document, with {question}  [default: two line ends, Question: {question}, a line "
            "end, Answer:]",
            show_default=False,
        ),
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Ask by the tokenizer's chat template instead.")] = False,
    skip_rate: Annotated[
        int, typer.Option(help="K, tokens: skips are multiples of it; 0 reads everything in order.")
    ] = 0,
    alpha: Annotated[
        float | None,
        typer.Option(help="A window of pooled loss C is followed by floor(alpha / C) times K.  [default: 6 nats]"),
    ] = None,
    pooling: Annotated[
        str | None, typer.Option(help="Of a window's losses: mean, exponential-decay, last.  [default: mean]")
    ] = None,
    decay: Annotated[
        float | None, typer.Option(help="exponential-decay: weight over that of the next loss.  [default: 0.99]")
    ] = None,
    window: Annotated[
        int | None, typer.Option(help="Tokens read at once.  [default: the smaller of 512 and the model's window]")
    ] = None,
    memory_size: Annotated[int, typer.Option(help="Tokens remembered at every layer; 0 for no memory.")] = 0,
    top_k: Annotated[int | None, typer.Option(help="Keys that a query reads.  [default: all]")] = None,
    sinks: Annotated[int | None, typer.Option(help="First tokens that are never forgotten.  [default: 0]")] = None,
    offload: Annotated[bool, typer.Option("--offload", help="Keep the memory in the CPU's memory.")] = False,
    eviction: Annotated[
        str | None,
        typer.Option(
            help="What a full memory forgets: the oldest (fifo), the least recently (lra) or the least frequently "
            "attended (lfa).  [default: fifo]"
        ),
    ] = None,
    index: Annotated[
        str | None,
        typer.Option(
            help="How the --top-k keys are found: exact, or approximate for memories of many thousands of tokens "
            "(needs faiss).  [default: exact]"
        ),
    ] = None,
    probed: Annotated[
        float | None,
        typer.Option(help="Share of an approximate index that a query looks into, up to 1.  [default: 0.0625]"),
    ] = None,
    wait: Annotated[
        int | None,
        typer.Option(
            help="Remember a second reading of each window, in which a token sees so many of those behind it.  "
            "[default: 0, the first reading]"
        ),
    ] = None,
    gates: Annotated[bool, typer.Option("--gates", help="Read the memory through the checkpoint's gates.")] = False,
    confidence: Annotated[
        str, typer.Option(help="Losses of the document's tokens (document), or of the model's own choices (model).")
    ] = "document",
    sections: Annotated[bool, typer.Option("--sections", help="Skip to the next section's start at most.")] = False,
    bos: Annotated[str, typer.Option(help=BOS_HELP.format(where="document and question"))] = "auto",
    max_new_tokens: Annotated[int | None, typer.Option(help="Of an answer, at most.  [default: 64]")] = None,
    output: Annotated[
        Path | None, typer.Option(help="A folder to make, with every window (reading.json) and a picture (path.png).")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an --output that is not empty.")] = False,
    dtype: Annotated[str, _loading("dtype")] = "auto",
    device: Annotated[str, _loading("device")] = "auto",
    device_map: Annotated[str | None, _loading("device_map")] = None,
    attn: Annotated[str, _loading("attn")] = "sdpa",
    load_in_4bit: Annotated[bool, _loading("load_in_4bit")] = False,
    adapter: Annotated[str | None, _loading("adapter")] = None,
    trust_remote_code: Annotated[bool, _loading("trust_remote_code")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")] = False,
) -> None:
    """Read DOCUMENT a window at a time, skip what the model finds easy, and answer questions about it."""
    from ctxext.cli import emit
    from ctxext.evaluation.loading import RunSettings
    from ctxext.reading.run import ReadOptions, read_document

    options = ReadOptions(
        questions=tuple(question or ()),
        prompt=prompt,
        chat=chat,
        skip_rate=skip_rate,
        alpha=alpha,
        pooling=pooling,
        decay=decay,
        window=window,
        memory_size=memory_size,
        top_k=top_k,
        sinks=sinks,
        offload=offload,
        eviction=eviction,
        index=index,
        probed=probed,
        wait=wait,
        gates=gates,
        confidence=confidence,
        sections=sections,
        bos=bos,
        max_new_tokens=max_new_tokens,
    )
    settings = RunSettings(
        dtype=dtype,
        device=device,
        device_map=device_map,
        attn=attn,
        load_in_4bit=load_in_4bit,
        adapter=adapter,
        trust_remote_code=trust_remote_code,
    )
    emit(read_document(checkpoint, document, options, settings, output, force), as_json, render)


def render(report: dict[str, Any]) -> str:
    """Return the report of `read_document` as text."""
    from ctxext.reading.picture import read_shares

    found, done, how = report["document"], report["reading"], report["settings"]
    shades = [
        SHADES[round(share * (len(SHADES) - 1)) or (share > 0)]
        for share in read_shares(report["read"], found["characters"], STRIP)
    ]
    loss = (
        "none"
        if done["loss"] is None
        else "{:.3f} nats ({:.3f} to {:.3f})".format(done["loss"], *done["loss_min_max"])
    )
    rows = {
        "tokens read": f"{done['tokens_read']:,} in {done['windows']:,} windows of {how['window']}",
        "tokens skipped": f"about {done['tokens_skipped_about']:,}" + _rule(report),
        "share read": f"{done['share_read']:.1%} of {found['characters']:,} characters",
        "pooled loss": f"mean {loss}",
        "seconds": f"{done['seconds']:.1f} reading, {done['tokenizing_seconds']:.1f} tokenizing",
        "where": f"|{''.join(shades)}|",
    }
    lines = [f"{found['path']}, read by {report['checkpoint']}"]
    lines += [f"  {name:<15} {value}" for name, value in rows.items()]
    lines += [f"  note: {note}" for note in report["notes"]]
    for answer in report["answers"]:
        lines += ["", f"Q: {answer['question']}", f"A: {answer['answer']}"]
    if "written" in report:
        lines += ["", f"written to {' and '.join(report['written'])}"]
    return "\n".join(lines)


def _rule(report: dict[str, Any]) -> str:
    """Return by which rule tokens were skipped."""
    how, found = report["settings"], report["document"]
    if how["rate"] == 0:
        return " (K = 0: everything is read)"
    within = f", within {found['sections']} {found['section_kind']}" if found["within_sections"] else ""
    return f" (K = {how['rate']}, alpha = {how['threshold']:g}{within})"
