"""Whether a text starts with a begin-of-sequence token: one rule for every evaluation."""

from __future__ import annotations

from typing import Any

BOS_RULES = ("auto", "always", "never")
BOS_HELP = "begin-of-sequence token at each {where}: auto (if the tokenizer has one), always, never"


def check_bos_rule(rule: str) -> list[str]:
    """Return what is wrong with a rule, as a list of messages: empty when nothing is."""
    return [] if rule in BOS_RULES else [f"--bos {rule!r} is not known; allowed: {', '.join(BOS_RULES)}"]


def bos_token(tokenizer: Any, rule: str) -> int | None:
    """Return the id of the begin-of-sequence token that a rule asks for, None for no token.

    Raises:
        ValueError: If the rule is `always` and the tokenizer has none.
    """
    bos: int | None = tokenizer.bos_token_id
    if rule == "always" and bos is None:
        raise ValueError("--bos always: this tokenizer has no begin-of-sequence token; use --bos auto or never")
    return None if rule == "never" else bos
