"""One side of a benchmark in a process of its own: `python -m ctxext.bench.sides NAME OPTIONS-AS-JSON`.

The last line on stdout is JSON: the seconds that the work took after loading, and its answer.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

WARM_UP_TOKENS = 64


def main(name: str, options: dict[str, Any]) -> None:
    """Load the model, warm it up, run the side `name` and print what it took."""
    from ctxext.evaluation.loading import RunSettings, load

    loaded = load(Path(options["checkpoint"]), RunSettings(dtype=options["dtype"]))
    import torch

    with torch.inference_mode():
        loaded.model(input_ids=torch.ones(1, WARM_UP_TOKENS, dtype=torch.long))
    start = time.perf_counter()
    answer = SIDES[name](loaded.model, loaded.tokenizer, options)
    print(json.dumps({"seconds": time.perf_counter() - start, "answer": answer}))


def document(tokenizer: Any, tokens: int) -> tuple[str, list[int]]:
    """Return the start of the first held-out document of sympy-source that is long enough: text, and `tokens` tokens.

    The text of the first tokens must give the same tokens again, for those who start from it.
    """
    from ctxext.data.corpora import open_corpus

    for candidate in open_corpus("sympy-source").documents():
        ids: list[int] = tokenizer(candidate.text, add_special_tokens=False, verbose=False)["input_ids"][:tokens]
        text = tokenizer.decode(ids)
        if len(ids) == tokens and tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] == ids:
            return text, ids
    raise ValueError(f"sympy-source has no document of {tokens} tokens")


def perplexity_plain(model: Any, tokenizer: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Score a document with the logits of every position."""
    from ctxext.bench.baselines import plain_perplexity

    length, stride = options["length"], options["stride"]
    _, ids = document(tokenizer, _document_tokens(options))
    return {"perplexity": plain_perplexity(model, [tokenizer.bos_token_id, *ids], length, stride, options["batch"])}


def perplexity_lm_eval(model: Any, tokenizer: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Score a document by lm-eval's rolling log-likelihood."""
    import math

    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    text, ids = document(tokenizer, _document_tokens(options))
    rival = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=options["batch"], max_length=options["length"])
    request = Instance("loglikelihood_rolling", {}, (text,), 0)
    (total,) = rival.loglikelihood_rolling([request], disable_tqdm=True)
    return {"perplexity": math.exp(-total / len(ids))}


def perplexity_ctxext(model: Any, tokenizer: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Score the same windows through the evaluation's own code."""
    from ctxext.evaluation.base import Session, build
    from ctxext.evaluation.registry import load

    tokens = _document_tokens(options)
    chosen = {"length": options["length"], "stride": options["stride"], "truncate": tokens, "min_tokens": tokens}
    evaluation = build(load("perplexity"), {**chosen, "limit": 1})
    session = Session(model, tokenizer, options["batch"])
    plan = evaluation.plan(session)
    return {"perplexity": evaluation.summarize(plan, _score(evaluation, session, plan)).metrics["perplexity"]}


def _document_tokens(options: dict[str, Any]) -> int:
    """Return the tokens, begin-of-sequence left out, that give `windows` whole windows."""
    return int(options["length"] + (options["windows"] - 1) * options["stride"])


def _score(evaluation: Any, session: Any, plan: Any) -> list[dict[str, Any]]:
    scored: list[dict[str, Any]] = []
    for unit in plan.units:
        scored.append(evaluation.score(session, unit))
        if evaluation.finished(scored):
            break
    return scored


def passkey_plain(model: Any, tokenizer: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Re-read every prompt of the grid and decode with a cache, a batch of trials at a time."""
    from ctxext.bench.baselines import plain_passkey
    from ctxext.evaluation.base import Session

    evaluation = _passkey(options, kmax_only=False)
    session = Session(model, tokenizer, options["batch"])
    plan = evaluation.plan(session)
    maker = session.memo["maker"]
    hits: dict[str, int] = {}
    for unit in plan.units:
        keys = evaluation.keys(maker, unit.work)
        head = maker.prefix()[: options["length"] - unit.work]
        prompts = [head + maker.suffix(unit.work, key) for key in keys]
        new_tokens = max(len(maker.answer(key)) for key in keys) + 1
        answers = plain_passkey(model, prompts, new_tokens, options["batch"])
        texts = [tokenizer.decode(answer, skip_special_tokens=True) for answer in answers]
        hits[str(unit.work)] = sum(_first_number(text) == str(key) for text, key in zip(texts, keys, strict=True))
    return {"hits": hits}


def _first_number(text: str) -> str:
    digits = ""
    for character in text:
        if character.isdigit():
            digits += character
        elif digits:
            break
    return digits


def passkey_ctxext(model: Any, tokenizer: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Score the whole grid through the evaluation's own code."""
    return _run_passkey(model, tokenizer, options, kmax_only=False)


def passkey_kmax(model: Any, tokenizer: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Find k_max only."""
    return _run_passkey(model, tokenizer, options, kmax_only=True)


def _passkey(options: dict[str, Any], kmax_only: bool) -> Any:
    from ctxext.evaluation.base import build
    from ctxext.evaluation.registry import load

    chosen = {name: options[name] for name in ("length", "depths", "trials", "bos")}
    return build(load("passkey"), {**chosen, "kmax_only": kmax_only})


def _run_passkey(model: Any, tokenizer: Any, options: dict[str, Any], kmax_only: bool) -> dict[str, Any]:
    from ctxext.evaluation.base import Session

    evaluation = _passkey(options, kmax_only)
    session = Session(model, tokenizer, options["batch"])
    plan = evaluation.plan(session)
    scored = _score(evaluation, session, plan)
    summary = evaluation.summarize(plan, scored)
    return {"hits": {str(unit["k"]): unit["hits"] for unit in scored}, "k_max": summary.metrics["k_max"]}


SIDES: dict[str, Callable[[Any, Any, dict[str, Any]], dict[str, Any]]] = {
    "perplexity-plain": perplexity_plain,
    "perplexity-lm-eval": perplexity_lm_eval,
    "perplexity-ctxext": perplexity_ctxext,
    "passkey-plain": passkey_plain,
    "passkey-ctxext": passkey_ctxext,
    "passkey-kmax": passkey_kmax,
}

if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
