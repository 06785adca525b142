"""Small tokenizers of the kinds that RoPE models come with, trained on the spot."""

from __future__ import annotations

import difflib
import inspect
import textwrap
from functools import cache
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

PROSE = """Der Hund läuft über die Straße. Voilà, ça va très bien! 长距离阅读需要跳过容易的部分。然后继续读下去。
It's 12345678 o'clock;   they'll come,\tI'm sure -- won't they?\n\n\n    Indented: 3.14159 != 2,71828 /* comment */
"""
# Every number of three digits, as the vocabularies that split digits in threes have them.
NUMBERS = " ".join(f"{number:03d}" for number in range(1000))
# Digits in threes, and line breaks that go with the punctuation before them.
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
O200K = LLAMA3.replace(r"[\r\n]*|", r"[\r\n/]*|")
KINDS = ("gpt2", "llama3", "o200k", "metaspace", "sentencepiece")


def corpus() -> list[str]:
    code = inspect.getsource(textwrap) + inspect.getsource(difflib)
    return [code, *[PROSE] * 20]


@cache
def tokenizer_of(kind: str) -> Any:
    """`llama3` trims blanks off its offsets, as Llama 3's own; `sentencepiece` has no words, as Llama 2's."""
    made = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    alphabet: list[str] = pre_tokenizers.ByteLevel.alphabet()
    texts = corpus()
    special = ["<unk>"]
    if kind == "gpt2":
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
    elif kind in ("llama3", "o200k"):
        split = pre_tokenizers.Split(Regex(LLAMA3 if kind == "llama3" else O200K), "isolated")
        level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        made.pre_tokenizer = pre_tokenizers.Sequence([split, level])
        made.post_processor = processors.ByteLevel(trim_offsets=kind == "llama3")
        made.decoder = decoders.ByteLevel()
        texts += [NUMBERS] * 300
    else:
        alphabet, special = [], ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
        texts = [line for text in texts for line in text.split("\n")]  # line breaks are bytes, as in SentencePiece
        if kind == "metaspace":
            made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
        else:
            made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    if kind == "sentencepiece":  # trained on words, and used without splitting
        made.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    trainer = trainers.BpeTrainer(
        vocab_size=2500, initial_alphabet=alphabet, special_tokens=special, limit_alphabet=300, show_progress=False
    )
    made.train_from_iterator(texts, trainer)
    if kind == "sentencepiece":
        made.pre_tokenizer = None  # type: ignore[assignment]
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>")


def whole(tokenizer: Any, text: str) -> list[int]:
    """The tokens of a document that is tokenized at once."""
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
