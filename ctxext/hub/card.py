"""The model card: what is known of a checkpoint, in the words of the files that it comes from; nothing is made up."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ctxext
from ctxext.checkpoint.inspect import inspect_checkpoint
from ctxext.evaluation.result import Result, write_whole
from ctxext.hub.files import README, Upload, is_adapter
from ctxext.hub.records import Origin, Training, find_origin, find_training
from ctxext.hub.scores import cell, draw_figures, model_index, own_results, score_lines
from ctxext.positions import METHODS

_MARK = "<!-- made by ctxext"
_UNTRAINED = "No training at the new length is on record"


def is_ours(text: str) -> bool:
    """Return whether a README.md was made by ctxext."""
    return _MARK in text


def card_uploads(
    folder: Path,
    repo_id: str,
    results: Sequence[Path],
    recipe: Path | None,
    card: bool | None,
    faults: Sequence[dict[str, Any]] = (),
    ask_hub: bool = False,
) -> tuple[list[Upload], list[str]]:
    """Return the files of the card to publish, made now, and notes; no files where the folder's own card stays.

    Args:
        folder: The checkpoint or adapter.
        repo_id: Where it will be.
        results: Files of evaluations.
        recipe: The config that it was trained with, where it does not lie beside it.
        card: As `push` takes it.
        faults: What `doctor` finds and the card must say.
        ask_hub: Whether the base's card may be fetched for its licence.

    Raises:
        ValueError: If results or a recipe are given and no card is made, or they are not of this checkpoint.
    """
    there = folder / README
    if card is False or (card is None and there.exists() and (not results or not is_ours(there.read_text("utf-8")))):
        if results or recipe is not None:
            why = "--no-card" if card is False else f"{there}, which ctxext did not make, is kept"
            raise ValueError(f"--results and --recipe go into a card, and none is made ({why}); --card makes one")
        return [], [] if card is False else [f"{README} is pushed as it is; --card makes a new one"]
    mine, notes = own_results(folder, results)
    figures = draw_figures(mine)
    text = render_card(folder, repo_id, mine, figures, recipe, faults, ask_hub)
    if _UNTRAINED in text:
        notes.append("the card says that no training is on record; if there was one, --recipe CONFIG.yaml tells of it")
    content = text.encode()
    return [Upload(path=README, source=content, size=len(content)), *figures], notes


def write_card(
    output: str | Path, *, repo_id: str | None, results: Sequence[Path], recipe: Path | None, force: bool
) -> dict[str, Any]:
    """Write README.md and its pictures into a checkpoint folder.

    Args:
        output: The folder.
        repo_id: Where it will be published; the folder's name stands for it if not given.
        results: Files of evaluations.
        recipe: The config that it was trained with, where it does not lie beside it.
        force: Replace a README.md that ctxext did not make.

    Returns:
        `written`: the paths; `notes`.

    Raises:
        ValueError: If there is no such folder, a README.md is in the way, or the results are another checkpoint's.
    """
    folder = Path(output).expanduser()
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}")
    there = folder / README
    if there.exists() and not force and not is_ours(there.read_text(encoding="utf-8", errors="replace")):
        raise ValueError(f"{there} was not made by ctxext and is kept; --force replaces it")
    uploads, notes = card_uploads(folder, repo_id or folder.resolve().name, results, recipe, True, ask_hub=True)
    for upload in reversed(uploads):  # pictures first, and then the card that shows them
        assert isinstance(upload.source, bytes)
        if upload.path == README:
            write_whole(there, upload.source.decode())
        else:
            _write_picture(folder / upload.path, upload.source)
    return {"written": [str(folder / upload.path) for upload in uploads], "notes": notes}


def _write_picture(path: Path, content: bytes) -> None:
    path.parent.mkdir(exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(content)
    partial.replace(path)


def render_card(
    folder: Path,
    repo_id: str,
    results: Sequence[Result],
    figures: Sequence[Upload],
    recipe: Path | None,
    faults: Sequence[dict[str, Any]],
    ask_hub: bool,
) -> str:
    """Return the card as the Hub reads it: metadata, then Markdown."""
    known = _inspected(folder, faulty=bool(faults))
    origin = find_origin(folder, ask_hub)
    training = find_training(folder, recipe, None if known is None else known["length"])
    sections = [
        ("", [f"# {repo_id.rpartition('/')[2]}", "", _summary(folder, known, origin)]),
        ("Positions", _positions(known)),
        ("Training", _training(training, known)),
        ("Evaluation", score_lines(results, figures) if results else []),
        ("Use", _use(folder, repo_id, known)),
        ("Limits", _limits(known, training, results, faults)),
        ("Licence", _licence(folder, origin)),
    ]
    body = [f"{_MARK} {ctxext.__version__} from what the checkpoint's files say -->"]
    for title, lines in sections:
        if lines:
            body += ["", *([f"## {title}", ""] if title else []), *lines]
    return f"---\n{_metadata(folder, repo_id, origin, results)}\n---\n\n" + "\n".join(body) + "\n"


def _inspected(folder: Path, faulty: bool) -> dict[str, Any] | None:
    """Return what a checkpoint is, or None where no config says it: an adapter without one, or faults pushed by force.

    Raises:
        ValueError: If the config does not say one thing and that is not known to be pushed.
    """
    if not (folder / "config.json").exists():
        return None
    try:
        return inspect_checkpoint(folder)
    except ValueError:
        if not faulty:
            raise
        return None


def _metadata(folder: Path, repo_id: str, origin: Origin, results: Sequence[Result]) -> str:
    from huggingface_hub import ModelCardData

    adapter = is_adapter(folder)
    values: dict[str, Any] = {**origin.licence}
    if results:
        values |= {"eval_results": model_index(results), "model_name": repo_id.rpartition("/")[2]}
    if origin.base is not None:
        values |= {"base_model": origin.base, **({"base_model_relation": "adapter"} if adapter else {})}
    data = ModelCardData(
        library_name="peft" if adapter else "transformers",
        pipeline_tag="text-generation",
        tags=["ctxext", "long-context"],
        **values,
    )
    return str(data.to_yaml())


def _summary(folder: Path, known: dict[str, Any] | None, origin: Origin) -> str:
    kind = "A LoRA adapter" if is_adapter(folder) else "A checkpoint"
    of = f" of [{origin.base}](https://huggingface.co/{origin.base})" if origin.base else ""
    if known is None:
        return f"{kind}{of}."
    if known["length"] == known["original_length"]:
        return f"{kind}{of} that reads {known['length']} tokens."
    return (
        f"{kind}{of} whose context window was extended from {known['original_length']} to {known['length']} tokens "
        f"({known['total_factor']:g} times) with {_title(known)}."
    )


def _title(known: dict[str, Any]) -> str:
    method = METHODS.get(known["method"])
    return f"{method.title} (`{known['method']}`)" if method is not None else f"`{known['method']}`"


def _positions(known: dict[str, Any] | None) -> list[str]:
    if known is None:
        return []
    rows = {
        "method": known["method"],
        "model type": known["model_type"],
        "length (tokens)": known["length"],
        "pretrained window (tokens)": known["original_length"],
        "factor": None if known["factor"] is None else f"{known['factor']:g}",
        "`rope_type`": known["rope_type"],
        "`rope_theta`": None if known["rope_theta"] is None else f"{known['rope_theta']:g}",
        "attention factor": f"{known['attention_factor']:g}" if known["rope_type"] else None,
        "sliding window (tokens)": known["sliding_window"],
    }
    bias = known["bias"] or {}
    rows |= {f"bias: {key}": value for key, value in bias.items() if value is not None and key != "bias_type"}
    steps = (known["provenance"] or {}).get("history", [])
    rows["patched before"] = "; ".join(f"{step.get('method')} to {step.get('length')} tokens" for step in steps)
    return _table(rows)


def _table(rows: dict[str, Any]) -> list[str]:
    shown = [f"| {name} | {cell(str(value))} |" for name, value in rows.items() if value not in (None, "", [])]
    return ["| | |", "|---|---|", *shown]


def _training(training: Training | None, known: dict[str, Any] | None) -> list[str]:
    if training is None:
        return []
    lines = _table(training.settings)
    return [*lines, "", "Data:", "", *(f"- {line}" for line in training.data)] if training.data else lines


def _use(folder: Path, repo_id: str, known: dict[str, Any] | None) -> list[str]:
    if is_adapter(folder):
        return _use_adapter(repo_id, known)
    flag = ", trust_remote_code=True" if known is not None and known["bias"] else ""
    lines = [
        "```python",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        f'model = AutoModelForCausalLM.from_pretrained("{repo_id}"{flag})',
        *([f'tokenizer = AutoTokenizer.from_pretrained("{repo_id}")'] if _has_tokenizer(folder) else []),
        "```",
    ]
    if known is None:
        return lines
    if known["bias"]:
        lines += [
            "",
            "The code of the attention bias comes with it; with ctxext installed, `import ctxext.modeling` takes the",
            "place of `trust_remote_code=True`.",
        ]
    _, _, vllm, llama_cpp = known["loaders"]
    if vllm["supported"] or vllm["flags"]:
        lines += ["", "vLLM:", "", "```sh", f"vllm serve {repo_id} {shlex.join(vllm['flags'])}", "```"]
    if llama_cpp["supported"]:
        serve = f"llama-server -m model.gguf -c {known['length']}"
        lines += ["", "llama.cpp:", "", "```sh", "python convert_hf_to_gguf.py FOLDER --outfile model.gguf"]
        lines += [serve, "```"]
    return lines


def _use_adapter(repo_id: str, known: dict[str, Any] | None) -> list[str]:
    if known is None:
        call = f'model = AutoPeftModelForCausalLM.from_pretrained("{repo_id}")'
        return ["```python", "from peft import AutoPeftModelForCausalLM", "", call, "```"]
    return [
        "The adapter belongs on its base with the positions above; peft alone loads the base with those of its",
        "pretraining. With ctxext:",
        "",
        "```python",
        "import ctxext",
        "",
        f'model = ctxext.load_adapter("{repo_id}")',
        "```",
        "",
        f"or, as an ordinary checkpoint for every loader: `ctxext merge {repo_id} OUTPUT`.",
    ]


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / name).exists() for name in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json"))


def _limits(
    known: dict[str, Any] | None,
    training: Training | None,
    results: Sequence[Result],
    faults: Sequence[dict[str, Any]],
) -> list[str]:
    told = [f"`ctxext doctor` finds a fault: {cell(fault['message'])}." for fault in faults]
    if known is not None:
        told += _limits_of_method(known)
        if known["length"] > known["original_length"] and training is None:
            told.append(
                f"{_UNTRAINED}: as far as that goes this is an untrained patch, the base's weights with other "
                "positions. Expect less than from a model that was trained at this length."
            )
        for reading in known["loaders"]:
            told += [f"{reading['loader']}: {cell(problem)}." for problem in reading["problems"]]
    told.append(_measured(known, results))
    return [f"- {line}" for line in told]


def _measured(known: dict[str, Any] | None, results: Sequence[Result]) -> str:
    lengths = [length for result in results if isinstance(length := result.options.get("length"), int)]
    if not results:
        return "Nothing was measured for this card."
    if not lengths or known is None:
        return "Nothing but the evaluations above was measured."
    beyond = f"; beyond that, up to {known['length']}, nothing was" if max(lengths) < known["length"] else ""
    return f"The longest text of the evaluations above has {max(lengths)} tokens{beyond}."


def _limits_of_method(known: dict[str, Any]) -> list[str]:
    if known["bias"]:
        return ["Only transformers with this repository's code (or ctxext) applies the attention bias."]
    if known["rope_type"] == "dynamic":
        return [
            "The frequencies change with the length of the sequence, so cached keys go stale as it grows: call "
            "`ctxext.fit_length(model, n)` after loading, with the tokens that you will read."
        ]
    if known["rope_type"] == "longrope":
        return [
            "The factors switch at the pretrained window: a generation that crosses it goes on with keys of the other "
            "factors, unless `ctxext.fit_length(model, n)` fixes them first."
        ]
    if known["length"] > known["original_length"]:
        return ["The positions are the same at every length, so short inputs are read with them too."]
    return []


def _licence(folder: Path, origin: Origin) -> list[str]:
    files = sorted(path.name for path in folder.glob("LICENSE*"))
    if origin.licence:
        name = origin.licence.get("license_name") or origin.licence.get("license")
        return [f"That of the base: {cell(str(name))}."]
    return [f"See {', '.join(files)}."] if files else []
