"""The command line of analyses: `ctxext analyze`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ctxext.analysis.bounds_command import score_bounds
from ctxext.evaluation.commands import RUN_OPTIONS

analyze_app = typer.Typer(
    name="analyze",
    help="What a model's predictions rest on, and where it breaks.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
analyze_app.command("score-bounds")(score_bounds)

Checkpoints = Annotated[
    list[str], typer.Argument(help="Checkpoint folders, .gguf files or Hub ids, compared in turn.")
]
Data = Annotated[str, typer.Option(help="A corpus by name, or a .txt, .jsonl, .jsonl.zst, .parquet file or a folder.")]
Split = Annotated[str | None, typer.Option(help="Another split of the corpus; held-out by default where it has one.")]
Column = Annotated[str | None, typer.Option(help="The column that holds the text.")]
Dtype = Annotated[str, typer.Option(help=RUN_OPTIONS["dtype"][2])]
Device = Annotated[str, typer.Option(help=RUN_OPTIONS["device"][2])]
Attn = Annotated[str, typer.Option(help=RUN_OPTIONS["attn"][2])]
TrustRemoteCode = Annotated[bool, typer.Option("--trust-remote-code", help=RUN_OPTIONS["trust_remote_code"][2])]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]


@analyze_app.command("receptive-field")
def receptive_field(
    checkpoints: Checkpoints,
    length: Annotated[int, typer.Option(help="Tokens read before the prediction.")] = 2048,
    segments: Annotated[int, typer.Option(help="Segments, evenly spaced over the documents.")] = 64,
    train_length: Annotated[
        int, typer.Option(help="Tokens that the models were trained with; 0: the original window that each states.")
    ] = 0,
    threshold: Annotated[
        list[float] | None, typer.Option(help="Share of the gradient; may be repeated. [default: 0.5, 0.9, 0.99]")
    ] = None,
    attention_mass: Annotated[
        bool, typer.Option("--attention-mass", help="Also how far back each layer and head attends.")
    ] = False,
    data: Data = "sympy-source",
    split: Split = None,
    column: Column = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    attn: Attn = "sdpa",
    trust_remote_code: TrustRemoteCode = False,
    batch_size: Annotated[int, typer.Option(help=RUN_OPTIONS["batch_size"][2])] = 1,
    output: Annotated[Path, typer.Option(help="Folder for results and pictures.")] = Path("runs/receptive-field"),
    as_json: Json = False,
) -> None:
    """Find how many recent tokens a prediction rests on, and whether the training length covers them."""
    from ctxext.analysis.receptive_field import ReceptiveField
    from ctxext.analysis.render import fields_text
    from ctxext.analysis.run import run_receptive_field
    from ctxext.evaluation.loading import RunSettings

    given: dict[str, Any] = {"thresholds": tuple(threshold)} if threshold else {}
    evaluation = ReceptiveField(
        length=length,
        segments=segments,
        train_length=train_length,
        attention_mass=attention_mass,
        data=data,
        split=split,
        column=column,
        **given,
    )
    settings = RunSettings(
        dtype=dtype, device=device, attn=attn, trust_remote_code=trust_remote_code, batch_size=batch_size
    )
    _answer(run_receptive_field(evaluation, checkpoints, settings, output), as_json, fields_text)


@analyze_app.command("position-loss")
def position_loss(
    checkpoints: Checkpoints,
    length: Annotated[int, typer.Option(help="Tokens read of each document.")] = 16384,
    documents: Annotated[
        int, typer.Option(help="Most documents to read, of those that are long enough; 0 reads all.")
    ] = 8,
    buckets: Annotated[str, typer.Option(help="A number of even buckets, or edges such as 256,1024,4096.")] = "64",
    window: Annotated[int, typer.Option(help="Tokens of the original window; 0: what each checkpoint states.")] = 0,
    threshold: Annotated[
        float, typer.Option(help="Nats per token above its own loss in the window at which a model is broken.")
    ] = 0.5,
    data: Data = "sympy-source",
    split: Split = None,
    column: Column = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    attn: Attn = "sdpa",
    trust_remote_code: TrustRemoteCode = False,
    output: Annotated[Path, typer.Option(help="Folder for results and pictures.")] = Path("runs/position-loss"),
    as_json: Json = False,
) -> None:
    """Show the loss by position of several checkpoints on the same documents, and where each breaks."""
    from ctxext.analysis.position_loss import PositionLoss
    from ctxext.analysis.render import position_loss_text
    from ctxext.analysis.run import run_position_loss
    from ctxext.evaluation.loading import RunSettings

    evaluation = PositionLoss(
        length=length,
        documents=documents,
        buckets=buckets,
        window=window,
        threshold=threshold,
        data=data,
        split=split,
        column=column,
    )
    settings = RunSettings(dtype=dtype, device=device, attn=attn, trust_remote_code=trust_remote_code)
    _answer(run_position_loss(evaluation, checkpoints, settings, output), as_json, position_loss_text)


def _answer(answer: dict[str, Any], as_json: bool, render: Any) -> None:
    from ctxext.cli import emit
    from ctxext.evaluation.processes import join_processes

    if join_processes().main:
        emit(answer, as_json, render)
