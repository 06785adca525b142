"""Checks of what a config's record says of it, and of how it can be used: caches, servers, converters."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator
from typing import Any

from ctxext.checkpoint.case import ERROR, NOTICE, Case, Fault
from ctxext.checkpoint.loaders import has_bias
from ctxext.checkpoint.servers import read_as_llama_cpp, read_as_vllm
from ctxext.positions.base import RopeScaling
from ctxext.positions.rope import Dynamic, Linear, LongRoPE
from ctxext.positions.rope_by_parts import Llama3, Yarn

# Which scaling a method leaves in the config; theta and ntk keep the one that was there.
_LEFT_BY: dict[str, type[RopeScaling]] = {
    "linear": Linear,
    "dynamic": Dynamic,
    "ntk_by_parts": Yarn,
    "yarn": Yarn,
    "longrope": LongRoPE,
    "llama3": Llama3,
}


def record_faults(case: Case) -> Iterator[Fault]:
    """Yield where the config is no longer what ctxext recorded that it wrote."""
    if case.rope is None or not case.provenance:
        return
    told = case.rope.ambiguity or _changed(case.rope.scaling, case)
    if told:
        yield Fault(
            code="provenance",
            level=ERROR,
            message=told,
            remedy="restore config.json, or delete its ctxext entry and patch again",
        )


def _changed(scaling: RopeScaling, case: Case) -> str | None:
    """Return how a scaling differs from the recorded one, or None."""
    record = case.provenance
    method, options = record.get("method"), record.get("options")
    left = _LEFT_BY.get(str(method))
    if left is None or case.family.only_longrope:  # phi3 spells every method as longrope
        left = None
    if left is not None and not isinstance(scaling, left):
        return f"ctxext recorded method {method!r}, but config.json has a {scaling.rope_type} scaling"
    factor, total = getattr(scaling, "factor", None), record.get("total_factor")
    if left not in (None, Llama3) and isinstance(total, (int, float)) and factor is not None and abs(total) < 2**63:
        if not math.isclose(factor, total, rel_tol=1e-6):
            return f"ctxext recorded a total factor of {total:g}, but config.json has factor {factor:g}"
    wanted = dict(options) if isinstance(options, dict) else {}
    if method == "ntk_by_parts":
        wanted["attention_factor"] = 1.0
    if method == "yarn" and isinstance(scaling, Yarn) and "attention_factor" not in wanted:
        wanted["has_default_attention_factor"] = True
    if case.family.only_longrope and method != "longrope":
        wanted = {key: value for key, value in wanted.items() if key == "rope_theta"}
    for key, value in wanted.items():
        if hasattr(scaling, key) and not _equal(getattr(scaling, key), value):
            if key == "has_default_attention_factor":
                return f"ctxext recorded yarn with its own attention factor, not {scaling.cos_sin_factor:g}"
            return f"ctxext recorded {key} {value!r}, but config.json has {getattr(scaling, key)!r}"
    return None


def _equal(mine: Any, theirs: Any) -> bool:
    if isinstance(mine, tuple):
        return isinstance(theirs, (list, tuple)) and list(mine) == list(theirs)
    return bool(mine == theirs)


def use_faults(case: Case) -> Iterator[Fault]:
    """Yield what is to be known before generating, serving or converting: notices, all of them."""
    if case.rope is None or not case.new.supported:
        return
    if has_bias(case.config):
        yield Fault(
            code="bias-loaders",
            level=NOTICE,
            message="vLLM, llama.cpp and transformers 4 refuse a model with an attention bias",
            remedy="serve it with transformers 5: trust_remote_code=True, or after `import ctxext.modeling`",
        )
        return
    scaling, length = case.rope.scaling, case.length or case.rope.window
    yield from _cache_notice(scaling)
    if isinstance(scaling, Linear) and case.rope.ambiguity is not None and not case.provenance:
        yield Fault(
            code="length-ambiguous",
            level=NOTICE,
            message=case.rope.ambiguity.split("; state")[0],
            remedy="state the pretrained window with --original-length when patching it",
        )
    server = read_as_vllm(case.config, length)
    told = list(server.problems)
    if server.supported and server.length != length:
        told.insert(0, f"it takes {server.length} tokens unless told")
    if told and case.rope.ambiguity is not None:
        how = "serve it with --max-model-len and the length that it was trained for"
        yield Fault(code="vllm", level=NOTICE, message=f"{server.loader}: {'; '.join(told)}", remedy=how)
    elif told and server.flags:
        told_all = "; ".join(told)
        how = f"serve it with {shlex.join(server.flags)}"
        yield Fault(code="vllm", level=NOTICE, message=f"{server.loader}: {told_all}", remedy=how)
    elif told:
        how = "patch with a static method, such as ntk or yarn"
        yield Fault(code="vllm", level=NOTICE, message=f"{server.loader}: {'; '.join(told)}", remedy=how)
    converted = read_as_llama_cpp(case.config)
    if converted.problems:
        yield Fault(
            code="llama-cpp",
            level=NOTICE,
            message=f"{converted.loader}: {'; '.join(converted.problems)}",
            remedy="for llama.cpp patch with linear, ntk or yarn, and compare what the converted model says",
        )


def _cache_notice(scaling: RopeScaling) -> Iterator[Fault]:
    """Frequencies that change while a sequence grows: keys cached under the old ones meet queries under the new."""
    changes = not scaling.is_static and not (
        isinstance(scaling, LongRoPE) and scaling.short_factor == scaling.long_factor
    )
    if changes:
        yield Fault(
            code="cache",
            level=NOTICE,
            message=f"stock {scaling.rope_type} changes its frequencies as a sequence grows, so cached keys go stale",
            remedy="call ctxext.fit_length(model, n) after loading",
        )
