"""A model that answers what it was shown, for tests of question answering, and the documents they are asked about."""

import re
from types import SimpleNamespace

import torch
from answering_model import AnsweringModel

from ctxext.evals.qa_planted import open_text, planted_questions


def solve(prompt):
    """Answer a question about what stands before it, and say so if the answer does not."""
    if city := re.search(r"Which animal is on the flag of (\w+)\?", prompt):
        found = re.search(rf"The animal on the flag of {city.group(1)} is a ([\w ]+)\.", prompt)
    else:
        found = re.search(r"The pass key is (\d+)\. Remember it\. \1 is the pass key\.", prompt)
    return f" {found.group(1)}." if found else " unknown"


class ReadingModel(AnsweringModel):
    """Gives each of its 300 tokens the same probability when it reads, and keeps the windows."""

    def __init__(self, solve=solve):
        super().__init__(solve)
        self.windows = []
        self.generation_config = None

    def get_output_embeddings(self):
        return None

    def forward(self, input_ids, past_key_values=None, use_cache=True, logits_to_keep=1):
        if past_key_values is not None:
            return super().forward(input_ids, past_key_values, use_cache, logits_to_keep)
        self.windows.append(input_ids[0].tolist())
        return SimpleNamespace(logits=torch.zeros(1, len(logits_to_keep), 300))

    def generate(self, ids, *, max_new_tokens, **options):
        for _ in range(max_new_tokens):
            token = self.next_token(self.tokenizer.decode(ids[0].tolist()))
            ids = torch.cat([ids, torch.tensor([[token]])], dim=1)
            if token in self.generation_config.eos_token_id:
                break
        return ids


def planted(tokenizer, text, **changes):
    options = {"form": "passkey", "repeats": 1, "length": 1500, "depths": 3, "trials": 2, "distractors": 3, "seed": 0}
    options |= changes
    return planted_questions(tokenizer, open_text(text, options["length"]), **options)
