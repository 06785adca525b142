"""Checks of what makes a checkpoint with an attention bias: its config, its remote code, its learned values."""

from __future__ import annotations

from collections.abc import Iterator

from ctxext.checkpoint.bias_config import read_bias, remote_code_files
from ctxext.checkpoint.bias_files import initial_values
from ctxext.checkpoint.case import ERROR, NOTICE, Case, Fault
from ctxext.checkpoint.files import weight_files
from ctxext.checkpoint.headers import read_headers
from ctxext.positions.bias import AttentionBias


def bias_faults(case: Case) -> Iterator[Fault]:
    """Yield what is wrong with the bias of a checkpoint; nothing for one without."""
    try:
        bias = read_bias(case.config)
    except ValueError as error:
        yield Fault(code="bias-parameters", level=ERROR, message=str(error), remedy="patch the source again")
        return
    if bias is None:
        return
    recorded = case.provenance.get("method")
    if recorded not in (None, bias.name):
        yield Fault(
            code="provenance",
            level=ERROR,
            message=f"ctxext recorded method {recorded!r}, but config.json has the bias {bias.name}",
            remedy="restore config.json, or delete its ctxext entry and patch again",
        )
    yield from _code_faults(case)
    yield from _value_faults(case, bias)


def _code_faults(case: Case) -> Iterator[Fault]:
    """Remote code that is missing, or that is not what this ctxext writes."""
    if not isinstance(case.config.get("auto_map"), dict):
        yield Fault(
            code="bias-code",
            level=ERROR,
            message="config.json has no auto_map, so nothing loads it where ctxext is not installed",
            remedy="patch the source again",
        )
        return
    missing = [path.name for path in remote_code_files() if not (case.folder / path.name).exists()]
    if missing:
        yield Fault(
            code="bias-code",
            level=ERROR,
            message=f"the code of the bias is not there: {', '.join(missing)}",
            remedy="load it after `import ctxext.modeling` and save it, or patch the source again",
        )
        return
    other = [p.name for p in remote_code_files() if (case.folder / p.name).read_bytes() != p.read_bytes()]
    if other:
        yield Fault(
            code="bias-code-differs",
            level=NOTICE,
            message=f"{', '.join(other)} are not those of the installed ctxext",
            remedy="read them before you trust them; saving the model after `import ctxext.modeling` renews them",
        )


def _value_faults(case: Case, bias: AttentionBias) -> Iterator[Fault]:
    """Learned values that the weights do not have: transformers would make them up and only warn."""
    heads = case.section.get("num_attention_heads")
    if not isinstance(heads, int) or not bias.learned:
        return
    try:
        files = [path for path in weight_files(case.folder) if path.suffix == ".safetensors"]
        stored = {name: tensor for path in files for name, tensor in read_headers(path).items()}
    except ValueError:
        return  # another check says so
    wanted = initial_values(bias, heads)
    wrong = [name for name, value in wanted.items() if name not in stored or stored[name].shape != value.shape]
    if wrong:
        yield Fault(
            code="bias-values",
            level=ERROR,
            message=f"the weights have no {', '.join(wrong)} of the shape that {bias.name} learns",
            remedy="restore the weight files, or patch the source again",
        )
