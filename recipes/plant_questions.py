"""Write documents with planted facts and a question about them, to learn long-document question answering from.

    python recipes/plant_questions.py --output asked.jsonl --model tiny --documents 500 --length 1024 --repeats 4

They are made as `ctxext eval question-answering` makes its own, of a corpus' training split and with keys that no
evaluation of the seeds below draws. A row is `{"document": ..., "asked": ...}`: a source of kind `completion` for
`finetune.py`, which with a `reading` section reads the document in windows and learns from the question alone.
"""

from __future__ import annotations

import json
import random
import sys
from dataclasses import dataclass, field
from pathlib import Path

from transformers import AutoTokenizer, HfArgumentParser

from ctxext.checkpoint.source import resolve_checkpoint
from ctxext.data.corpora import open_corpus
from ctxext.evals.qa_planted import FORMS, plant, read_stretches


@dataclass
class Planting:
    """What is written."""

    output: str = field(metadata={"help": "the .jsonl file"})
    model: str = field(default="tiny", metadata={"help": "whose tokenizer counts: a folder, a Hub id or `tiny`"})
    documents: int = field(default=500, metadata={"help": "how many"})
    length: int = field(default=1024, metadata={"help": "tokens of the longest document; the shortest has half"})
    repeats: int = field(default=4, metadata={"help": "copies of the fact in a document"})
    distractors: int = field(default=0, metadata={"help": "facts of other names in a document"})
    fact: str = field(default="passkey", metadata={"help": f"form of the facts: {', '.join(FORMS)}"})
    data: str = field(default="sympy-source", metadata={"help": "the text, a corpus by name"})
    seed: int = field(default=0, metadata={"help": "of all that is drawn"})

    def __post_init__(self) -> None:
        least = {"documents": 1, "length": 2, "repeats": 1, "distractors": 0}
        wrong = [f"{name} {getattr(self, name)} must be at least {low}" for name, low in least.items()]
        wrong = [text for text, (name, low) in zip(wrong, least.items(), strict=True) if getattr(self, name) < low]
        if self.fact not in FORMS:
            wrong.append(f"fact {self.fact!r} is none of {', '.join(FORMS)}")
        if wrong:
            raise ValueError("; ".join(wrong))


def write(planting: Planting) -> Path:
    """Write the documents; return the file."""
    tokenizer = AutoTokenizer.from_pretrained(resolve_checkpoint(planting.model))
    corpus = open_corpus(planting.data, split="train")
    stretches = read_stretches(tokenizer, corpus, planting.documents, planting.length)
    rows = []
    for number in range(planting.documents):
        draw = random.Random(f"train/{planting.seed}/{number}")
        fact = FORMS[planting.fact].make(draw, planting.distractors)
        statements = [(draw.random(), text) for text in [*[fact.statement] * planting.repeats, *fact.distractors]]
        length = draw.randint(planting.length // 2, planting.length)
        text, _ = plant(tokenizer, stretches[number % len(stretches)], statements, length)
        rows.append(json.dumps({"document": text, "asked": f"{fact.prompt} {fact.answer}"}))
    path = Path(planting.output)
    partial = path.with_suffix(".partial")
    partial.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return partial.replace(path)


def main() -> None:
    """Run the command line."""
    try:
        (planting,) = HfArgumentParser(Planting, description=__doc__).parse_args_into_dataclasses()
        print(write(planting))
    except ValueError as error:
        print(f"plant_questions: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
