"""A model that looks its answer up: it reads the prompt as text, unaware of how that was made."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from helpers import EOS, byte_tokenizer, tiny_config

from ctxext.evaluation.base import Session

# How the questions end; what follows the last one is the answer so far.
ENDS = re.compile(
    r"The pass key(?: of \S+)? is|The pass keys are|on the flag of \w+ is a|Corresponding value:"
    r"|mentioned in the provided text (?:is|are)|they are:|in the list are:|frequently appeared words are:|Answer:"
)


class AnsweringModel(torch.nn.Module):
    """Writes what `solve(prompt)` returns, byte by byte, then the end-of-sequence token (or where it says `</s>`).

    The tokens read so far are kept where a model keeps its keys, so that caches and branches must work.
    """

    def __init__(self, solve: Callable[[str], str]) -> None:
        super().__init__()
        self.solve = solve
        self.tokenizer = byte_tokenizer()
        self.config = tiny_config("llama", vocab_size=300)
        self.device, self.dtype = torch.device("cpu"), torch.float32
        self.answers: dict[str, str] = {}

    def forward(
        self, input_ids: torch.Tensor, past_key_values: Any, use_cache: bool = True, logits_to_keep: int = 1
    ) -> Any:
        keys = input_ids[:, None, :, None].float()
        read, _ = past_key_values.update(keys, keys, 0)
        logits = torch.zeros(len(input_ids), 1, 300)
        for row, ids in enumerate(read[:, 0, :, 0].long().tolist()):
            logits[row, 0, self.next_token(self.tokenizer.decode(ids))] = 1
        return SimpleNamespace(logits=logits)

    def next_token(self, text: str) -> int:
        ends = list(ENDS.finditer(text))
        if not ends:
            return EOS  # the middle of a prompt, where nobody asks
        prompt, written = text[: ends[-1].end()], text[ends[-1].end() :]
        if "\n" in written:
            return EOS  # what ended there was a solved example
        if prompt not in self.answers:
            self.answers[prompt] = self.solve(prompt)
        left = self.answers[prompt][len(written) :]
        if not left or left.startswith("</s>"):
            return EOS
        return self.tokenizer(left[0], add_special_tokens=False)["input_ids"][0]


def answering_session(solve: Callable[[str], str], batch_size: int = 3) -> Session:
    model = AnsweringModel(solve)
    return Session(model, model.tokenizer, batch_size)
