"""Reports on checkpoints as text for a terminal."""

from __future__ import annotations

import shlex
import textwrap
from typing import Any

_WIDTH = 118
_LABEL = 19


def render_patch(report: dict[str, Any]) -> str:
    """Return what `ctxext patch` prints."""
    done = "wrote" if report["written"] else "would write"
    lines = [
        f"{done} {report['output']}: {report['method']}, {report['window']} -> {report['length']} tokens "
        f"(factor {report['factor']:g}, {report['total_factor']:g} in all)",
        _positions(report),
        *(f"note: {note}" for note in report["notes"]),
    ]
    if not report["written"]:
        return "\n".join([*lines, *report["config_diff"]])
    checked = "transformers builds it and its bias is" if report["bias"] else "stock transformers builds it and its"
    checked += " the formula's" if report["bias"] else " frequencies are the formula's"
    return "\n".join([*lines, checked if report["verified"] else "not verified"])


def _positions(report: dict[str, Any]) -> str:
    """Return what a patched model knows positions by."""
    rope = f"rope_theta {report['rope_theta']:g}, attention factor {report['attention_factor']:g}"
    if report["bias"] is None:
        return rope
    return (
        f"{_bias(report['bias'])}; rotary embedding {'kept: ' + rope if report['bias']['keep_rotary'] else 'replaced'}"
    )


def _bias(parameters: dict[str, Any]) -> str:
    """Return a bias with the options that are set."""
    hidden = ("bias_type", "keep_rotary")
    options = [f"{name} {value}" for name, value in parameters.items() if name not in hidden and value is not None]
    return ", ".join([f"bias {parameters['bias_type']}", *options])


def _line(label: str, value: str) -> str:
    """Return a labelled line, wrapped with its continuation under the value."""
    indent = " " * _LABEL
    return textwrap.fill(
        value,
        _WIDTH,
        initial_indent=label.ljust(_LABEL),
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def render_inspect(answer: dict[str, Any]) -> str:
    """Return what `ctxext inspect` prints."""
    waves, weights = answer["wavelengths"], answer["weights"]
    scaled = "" if answer["total_factor"] == 1 else f", extended from {answer['original_length']}"
    lines = [
        _line("checkpoint", answer["checkpoint"]),
        _line("model", f"{answer['model_type']}, reads {answer['length']} tokens{scaled}"),
        _line("method", _method(answer)),
        *([_line("bias", _bias(answer["bias"]))] if answer["bias"] else []),
        *(_rotary(answer, waves) if waves is not None else [_line("rotary embedding", "replaced by the bias")]),
    ]
    limits = [
        f"{name} {answer[key] if answer[key] is not None else 'none'}"
        for name, key in (
            ("tokenizer", "tokenizer_limit"),
            ("generation", "generation_limit"),
            ("sliding window", "sliding_window"),
        )
    ]
    lines.append(_line("limits", ", ".join(limits)))
    lines.append(_line("weights", _weights(weights)))
    lines += _provenance(answer["provenance"])
    if answer["ambiguity"]:
        lines.append(_line("ambiguous", answer["ambiguity"]))
    return "\n".join([*lines, "", *_loaders(answer["loaders"])])


def _rotary(answer: dict[str, Any], waves: dict[str, Any]) -> list[str]:
    """Return the lines on the rotary embedding."""
    lines = [
        _line("rope_theta", f"{answer['rope_theta']:g}"),
        _line("attention factor", f"{answer['attention_factor']:g}"),
        _line("head", f"{answer['head_dim']} dimensions, {answer['rotary_dim']} rotated ({waves['count']} pairs)"),
        _line("wavelengths", _spread(waves["after"], waves["count"], answer["original_length"])),
    ]
    if waves["before"] is None:
        lines.append(_line("  before scaling", "not recorded: the base was replaced"))
    elif waves["before"] != waves["after"]:
        lines.append(_line("  before scaling", _spread(waves["before"], waves["count"], answer["original_length"])))
    return lines


def _weights(weights: dict[str, Any]) -> str:
    if weights["problem"]:
        return str(weights["problem"])
    size = f"{weights['bytes'] / 1e9:.2f} GB" if weights["bytes"] >= 1e8 else f"{weights['bytes'] / 1e6:.2f} MB"
    files = "1 file" if len(weights["files"]) == 1 else f"{len(weights['files'])} files"
    return f"{files}, {size}, {weights['tensors']} tensors, {', '.join(weights['dtypes'])}"


def _method(answer: dict[str, Any]) -> str:
    if answer["total_factor"] == 1 and answer["provenance"] is None and answer["rope_type"] == "default":
        return "none: unscaled (rope_type default)"
    if answer["bias"] is not None:
        return f"{answer['method']} (attention bias), {answer['total_factor']:g} times the window"
    factor = "" if answer["factor"] is None else f", factor {answer['factor']:g}"
    return f"{answer['method']} (rope_type {answer['rope_type']}{factor}), {answer['total_factor']:g} times the window"


def _spread(waves: dict[str, Any], count: int, window: int) -> str:
    beyond = waves["beyond_window"]
    pairs = "" if not beyond else f" (pair {_ranges(beyond)})"
    return (
        f"{waves['shortest']:.4g} to {waves['longest']:.4g} tokens; {len(beyond)} of {count} never turn once within "
        f"{window}{pairs}"
    )


def _ranges(numbers: list[int]) -> str:
    """Return ascending numbers as `3, 5-9`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _provenance(record: dict[str, Any] | None) -> list[str]:
    if record is None:
        return [_line("provenance", "none recorded")]
    steps = [*record.get("history", []), record]
    return [
        _line(
            "provenance" if number == 0 else "",
            "ctxext {version}: {method} to {length} tokens, from {source}".format(
                **{key: step.get(key) for key in ("version", "method", "length", "source")}
            ),
        )
        for number, step in enumerate(steps)
    ]


def _loaders(readings: list[dict[str, Any]]) -> list[str]:
    """Return a table of what each loader reads, with what it does not and what to tell it under its row."""
    rows = [("loader", "rope_type", "rope_theta", "factor", "attention", "tokens")]
    keys = ("rope_theta", "factor", "attention_factor", "length")
    for reading in readings:
        numbers = ("-" if reading[key] is None else f"{reading[key]:.7g}" for key in keys)
        rows.append((reading["loader"], reading["rope_type"] or "-", *numbers))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    aligned = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines = aligned[:1]
    for reading, row in zip(readings, aligned[1:], strict=True):
        lines.append(row if reading["supported"] else f"{row}  NOT SUPPORTED")
        lines += [textwrap.fill(f"  {told}", _WIDTH, subsequent_indent="    ") for told in reading["problems"]]
        if reading["flags"]:
            lines.append(f"  serve with {shlex.join(reading['flags'])}")
    return lines


def render_doctor(answer: dict[str, Any]) -> str:
    """Return what `ctxext doctor` prints: one line for each fault, its code first."""
    lines = [f"fixed    {fault['code']}  {fault['message']}" for fault in answer["fixed"]]
    lines += [f"kept     {name}" for name in answer["backups"]]
    faults = sorted(answer["faults"], key=lambda fault: ("error", "warning", "notice").index(fault["level"]))
    for fault in faults:
        fixable = " (--fix does it)" if fault["fixable"] else ""
        lines.append(f"{fault['level']:<8} {fault['code']}  {fault['message']}: {fault['remedy']}{fixable}")
    counted = sum(fault["level"] != "notice" for fault in faults)
    notices = len(faults) - counted
    verdict = "no faults" if answer["healthy"] else f"{counted} fault{'s' if counted != 1 else ''}"
    told = f", {notices} notice{'s' if notices != 1 else ''}" if notices else ""
    return "\n".join([*lines, f"{answer['checkpoint']}: {verdict}{told}"])
