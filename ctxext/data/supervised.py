"""Prompts with completions and conversations as tokens, each with whether the loss counts it.

A completion counts from its first token to the end-of-sequence token; in a conversation the assistant's turns count,
with whatever ends a turn. The chat template's own `{% generation %}` marks are used where it has them; otherwise the
conversation is rendered turn by turn, and each rendering must continue the one before. A document and its summary
become a prompt and its completion, by the functions with which `ctxext eval summarization` asks for a summary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ctxext.data.sources import Source

Encoded = tuple[list[int], list[bool]]

# Figure 4 of arXiv 2306.15595, where "# .... Document goes here" stands for the document.
SUMMARY_PROMPT = (
    "Read the following article and then summarize it.\n{document}\nNow summarize the above article.\nSummary:"
)


def _column(row: Mapping[str, Any], name: str, where: str) -> Any:
    if name not in row:
        raise ValueError(f"{where} has no column {name!r}; it has {', '.join(row)}")
    return row[name]


def _text(row: Mapping[str, Any], name: str, where: str) -> str:
    value = _column(row, name, where)
    if not isinstance(value, str):
        raise ValueError(f"{where}: column {name!r} holds {type(value).__name__}, not text")
    return value


def _messages(row: Mapping[str, Any], source: Source, where: str) -> list[dict[str, str]]:
    """Return a row's conversation as the chat template takes it."""
    if source.prompt_column and source.completion_column:
        return [
            {"role": "user", "content": _text(row, source.prompt_column, where)},
            {"role": "assistant", "content": _text(row, source.completion_column, where)},
        ]
    name = source.messages_column or "messages"
    value = _column(row, name, where)
    good = isinstance(value, list) and all(
        isinstance(turn, Mapping) and {"role", "content"} <= set(turn) for turn in value
    )
    if not good:
        raise ValueError(f"{where}: column {name!r} must hold a list of objects with role and content")
    return [{"role": str(turn["role"]), "content": str(turn["content"])} for turn in value]


def encode_completion(prompt: str, completion: str, tokenizer: Any, *, bos: int | None, eos: int | None) -> Encoded:
    """Return [BOS] prompt completion [EOS] as tokens, of which completion and EOS count.

    The two are tokenized apart, so that the answer's tokens are those that follow the prompt when it is given alone.
    """
    head = encode_prompt(prompt, tokenizer, bos=bos)
    tail = _encode(tokenizer, completion) + ([] if eos is None else [eos])
    return head + tail, [False] * len(head) + [True] * len(tail)


def encode_prompt(prompt: str, tokenizer: Any, *, bos: int | None) -> list[int]:
    """Return [BOS] prompt as tokens: what a model reads before it answers, in training and in an evaluation."""
    return ([] if bos is None else [bos]) + _encode(tokenizer, prompt)


def summary_prompt(document: str) -> str:
    """Return the prompt that asks for the summary of a document (arXiv 2306.15595, figure 4)."""
    return SUMMARY_PROMPT.format(document=document)


def first_tokens(text: str, tokenizer: Any, count: int | None) -> tuple[str, int]:
    """Cut a text after its first tokens, at the end of a character.

    Args:
        text: The text.
        tokenizer: A tokenizer of transformers that knows where its tokens lie in a text (a fast one).
        count: The tokens to keep, tokenized without its surroundings; None keeps all.

    Returns:
        The start of the text, and how many tokens of it were cut off.

    Raises:
        ValueError: If the tokenizer is a slow one.
    """
    if count is None:
        return text, 0
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(
            f"{type(tokenizer).__name__} is a slow tokenizer, which does not say where its tokens end in a text: use "
            "the fast one (tokenizer.json)"
        )
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    ends = [end for _, end in encoded["offset_mapping"]]
    if len(ends) <= count:
        return text, 0
    return text[: ends[count - 1]], len(ends) - count


def encode_summary(
    document: str, summary: str, source: Source, tokenizer: Any, *, bos: int | None, eos: int | None
) -> Encoded:
    """Return the prompt for a document's summary and the summary as tokens, of which the summary and EOS count.

    Args:
        document: The document, cut to its first `document_tokens`.
        summary: The summary, cut to its first `summary_tokens`; none counts if it is empty.
        source: A source of kind `summary`.
        tokenizer: A fast tokenizer of transformers.
        bos: The token before the prompt, or None.
        eos: The token after the summary, or None.
    """
    prompt = summary_prompt(first_tokens(document, tokenizer, source.document_tokens)[0])
    if not summary:
        ids = encode_prompt(prompt, tokenizer, bos=bos)
        return ids, [False] * len(ids)
    kept, _ = first_tokens(summary, tokenizer, source.summary_tokens)
    return encode_completion(prompt, " " + kept, tokenizer, bos=bos, eos=eos)


def _encode(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return ids


def encode_chat(messages: Sequence[Mapping[str, str]], tokenizer: Any, where: str) -> Encoded:
    """Return a conversation as tokens, of which the assistant's turns count.

    Raises:
        ValueError: If there is no chat template, or it rewrites earlier turns so that answers cannot be found.
    """
    template = getattr(tokenizer, "chat_template", None)
    if not template:
        raise ValueError("this tokenizer has no chat template; use kind 'completion', or a chat model's tokenizer")
    if "{% generation" in str(template) or "{%- generation" in str(template):
        marked = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        return list(marked["input_ids"]), [bool(mask) for mask in marked["assistant_masks"]]
    ids: list[int] = []
    counted: list[bool] = []
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        for stop, start_answer, counts in ((number, True, False), (number + 1, False, True)):
            more = tokenizer.apply_chat_template(
                list(messages[:stop]), tokenize=True, return_dict=True, add_generation_prompt=start_answer
            )["input_ids"]
            if more[: len(ids)] != ids:
                raise ValueError(
                    f"{where}: the chat template rewrites earlier turns, so the answers' tokens cannot be told apart; "
                    "mark them in the template with {% generation %} ... {% endgeneration %}"
                )
            counted += [counts] * (len(more) - len(ids))
            ids = list(more)
    return ids, counted


def encode_row(
    row: Mapping[str, Any], source: Source, tokenizer: Any, where: str, *, bos: int | None, eos: int | None
) -> Encoded:
    """Return the tokens of a row and, for each, whether the loss counts it.

    Args:
        row: The columns by name.
        source: A source of kind `completion` or `chat`.
        tokenizer: A tokenizer of transformers, with a chat template for `chat`.
        where: What to name in an error.
        bos: The token before a prompt, or None; a chat template brings its own.
        eos: The token after a completion, or None; a chat template brings its own.

    Raises:
        ValueError: If a column is missing or holds something else.
    """
    if source.kind == "chat":
        return encode_chat(_messages(row, source, where), tokenizer, where)
    prompt, completion = source.prompt_column, source.completion_column
    assert prompt is not None and completion is not None, "Source checks that both are given"
    return encode_completion(_text(row, prompt, where), _text(row, completion, where), tokenizer, bos=bos, eos=eos)
