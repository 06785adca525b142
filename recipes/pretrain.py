"""Pretrain the tiny model from nothing: a LLaMA of 3M parameters that retrieves a passkey, on which methods are tried.

    python recipes/pretrain.py --output_dir tiny-run

It trains a byte-level BPE tokenizer on sympy-source's training split, then the model on rows of `window` tokens of the
same text, a share of which begin with a passkey prompt no longer than the window. `tiny-run/final` is the model in
bfloat16. Every TrainingArgument of transformers can be given too, such as `--max_steps 200 --torch_compile false`.
Nothing of the held-out split is read; the keys and filler offsets by which the model is tested are left out. With
`--max_steps 0` the model stays as it was drawn: what `finetune.py` trains by random-access reading from the start.
"""

from __future__ import annotations

import json
import math
import random
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch.utils.data import Dataset
from transformers import (
    AutoModelForCausalLM,
    HfArgumentParser,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint

from ctxext.checkpoint.bias_config import write_bias
from ctxext.checkpoint.normalize import normalize_config
from ctxext.checkpoint.plan import check_options
from ctxext.checkpoint.plan_bias import choose_bias
from ctxext.data.offline import in_split, sympy_source
from ctxext.evals.passkey import FILLER, HEADER, KEY_SENTENCE, LARGEST_KEY, QUESTION, SMALLEST_KEY, PromptMaker
from ctxext.modeling import classes_of
from ctxext.positions import BIASES, AttentionBias
from ctxext.positions.base import nearest
from ctxext.reproduce.sinusoidal import SinusoidalLlamaConfig

END = "<|endoftext|>"
PROSE = [HEADER + FILLER + KEY_SENTENCE.format(key=0) + QUESTION] * 2000  # so that the prompts' words are tokens
DEFAULTS: dict[str, Any] = {
    "max_steps": 10000,
    "per_device_train_batch_size": 16,
    "learning_rate": 1.5e-3,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 200,
    "adam_beta2": 0.95,
    "weight_decay": 0.1,
    "bf16": True,
    "use_cpu": not torch.cuda.is_available(),
    "torch_compile": True,
    "save_steps": 2500,
    "logging_steps": 50,
    "report_to": "none",
    "seed": 0,
}


@dataclass
class Organism:
    """The model's shape and its diet."""

    window: int = field(default=256, metadata={"help": "tokens in a training row: the pretrained window L"})
    vocabulary: int = field(default=2048, metadata={"help": "tokens, 256 bytes and the end mark included"})
    layers: int = field(default=4, metadata={"help": "decoder layers"})
    width: int = field(default=256, metadata={"help": "hidden size"})
    heads: int = field(default=4, metadata={"help": "query heads"})
    kv_heads: int = field(default=2, metadata={"help": "key/value heads"})
    mlp_width: int = field(default=512, metadata={"help": "the MLP's inner size"})
    theta: float = field(default=10000.0, metadata={"help": "rope_theta"})
    positions: str = field(default="rotary", metadata={"help": "rotary, sinusoidal, or an attention bias by name"})
    position_options: str = field(default="{}", metadata={"help": "the bias's options, as JSON"})
    passkeys: float = field(default=0.2, metadata={"help": "share of the rows that begin with a passkey prompt"})

    def __post_init__(self) -> None:
        problems = []
        if self.width % self.heads:
            problems.append(f"width {self.width} must be a multiple of heads {self.heads}")
        if self.heads % self.kv_heads:
            problems.append(f"heads {self.heads} must be a multiple of kv_heads {self.kv_heads}")
        if not 0 <= self.passkeys <= 1:
            problems.append(f"passkeys {self.passkeys} is a share: 0 to 1")
        if self.vocabulary < 257:
            problems.append(f"vocabulary {self.vocabulary} must be at least 257: 256 bytes and {END}")
        if self.positions not in ("rotary", "sinusoidal", *BIASES):
            known = ["rotary", "sinusoidal", *BIASES]
            problems.append(f"positions {self.positions!r}{nearest(self.positions, known)} is none of {known}")
        try:
            self.bias()
        except ValueError as error:
            problems.append(f"position_options {self.position_options!r}: {error}")
        if problems:
            raise ValueError("; ".join(problems))

    def bias(self) -> AttentionBias | None:
        """Return the attention bias of the model, or None.

        Raises:
            ValueError: If its options are wrong.
        """
        if self.positions not in BIASES:
            return None
        kind, options = BIASES[self.positions], json.loads(self.position_options)
        check_options(kind, options)
        return choose_bias(kind, options)


def train_tokenizer(texts: list[str], organism: Organism) -> PreTrainedTokenizerFast:
    """Train byte-level BPE in which every digit is a token, so that a key has five; texts begin with the end mark."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{END} $A", special_tokens=[(END, 0)])
    trainer = trainers.BpeTrainer(
        vocab_size=organism.vocabulary,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END,
        eos_token=END,
        pad_token=END,
        model_max_length=organism.window,
    )


class PasskeyPrompts:
    """Passkey prompts with their answers, of any length up to the window: `rows[i]` is a function of i and the seed.

    The evaluation starts its filler at the first sentence's first token and may ask for held-out keys; here the filler
    starts anywhere else, and held-out keys (`is_held_out`) never occur.
    """

    def __init__(self, tokenizer: Any, window: int, seed: int) -> None:
        self.maker = PromptMaker(tokenizer, window, tokenizer.bos_token_id)
        self.window, self.seed = window, seed
        self.cycle = len(self.maker.encode(2 * FILLER)) - len(
            self.maker.encode(FILLER)
        )  # tokens of the five sentences

    def row(self, index: int) -> list[int]:
        """Return the tokens of a prompt, the key and the end mark: at most `window` of them."""
        draw = random.Random(f"passkey/{self.seed}/{index}")
        key = draw.randint(SMALLEST_KEY, LARGEST_KEY)
        while is_held_out(key):
            key = draw.randint(SMALLEST_KEY, LARGEST_KEY)
        maker = self.maker
        sentence, answer = maker.encode(KEY_SENTENCE.format(key=key)), maker.answer(key)
        fixed = len(maker.header) + len(sentence) + len(maker.question) + len(answer) + 1
        room = draw.randint(0, self.window - fixed)
        before = draw.randint(0, room)
        offsets = [draw.randrange(1, self.cycle) for _ in range(2)]
        filler = [
            maker.filler[start : start + size] for start, size in zip(offsets, (before, room - before), strict=True)
        ]
        return (
            maker.header + filler[0] + sentence + filler[1] + maker.question + answer + [maker.tokenizer.eos_token_id]
        )


def is_held_out(key: int) -> bool:
    """Say whether a key is kept out of the training: one in ten, by its hash."""
    return in_split(str(key), "held-out")


class Rows(Dataset[dict[str, torch.Tensor]]):
    """Rows of `window` tokens: text, or a passkey prompt and then text; row i is a function of i and the seed."""

    def __init__(self, tokens: np.ndarray[Any, Any], prompts: PasskeyPrompts, share: float, count: int) -> None:
        self.tokens, self.prompts, self.share, self.count = tokens, prompts, share, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        draw = random.Random(f"row/{self.prompts.seed}/{index}")
        prompt = self.prompts.row(index) if draw.random() < self.share else []
        size = self.prompts.window - len(prompt)
        start = draw.randrange(len(self.tokens) - size)
        ids = torch.tensor([*prompt, *self.tokens[start : start + size]], dtype=torch.long)
        return {"input_ids": ids, "labels": ids}


def make_model(tokenizer: Any, organism: Organism) -> Any:
    """Return a new model of the organism's shape; initial weights as in GPT-2, residual outputs scaled by depth."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=organism.width,
        intermediate_size=organism.mlp_width,
        num_hidden_layers=organism.layers,
        num_attention_heads=organism.heads,
        num_key_value_heads=organism.kv_heads,
        max_position_embeddings=organism.window,
        rope_parameters={"rope_type": "default", "rope_theta": organism.theta},
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=None,
    )
    # eager: with torch.compile, twice as fast as SDPA in windows this short on a CPU
    model = AutoModelForCausalLM.from_config(with_positions(config, organism), attn_implementation="eager")
    for name, parameter in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            parameter.data.div_(math.sqrt(2 * organism.layers))
    return model


def with_positions(config: LlamaConfig, organism: Organism) -> Any:
    """Return the config of the same model, told positions as the organism says."""
    if organism.positions == "rotary":
        return config
    if organism.positions == "sinusoidal":
        return SinusoidalLlamaConfig.from_dict({**config.to_dict(), "model_type": "sinusoidal_llama"})
    bias = organism.bias()
    assert bias is not None
    written = write_bias(config.to_dict(), bias)
    return classes_of(written["model_type"])[0].from_dict(written)


def save_final(model: Any, tokenizer: Any, folder: Path) -> None:
    """Save model and tokenizer in bfloat16 (a learned bias in float32), with a config in both dialects."""
    model.config.use_cache = True  # which Trainer turned off
    learned = {name: value.clone() for name, value in model.state_dict().items() if ".score_bias." in name}
    model.to(torch.bfloat16)
    if learned:
        model.model.score_bias.float()
        model.load_state_dict(learned, strict=False)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if not isinstance(model.config, SinusoidalLlamaConfig):  # no loader but ours reads that one
        normalize_config(folder)


def pretrain(organism: Organism, args: TrainingArguments) -> Path:
    """Train tokenizer and model; return the folder of the finished model. A run that was killed goes on."""
    set_seed(args.seed)
    texts = [document.text for document in sympy_source("train")]
    tokenizer = train_tokenizer([*texts, *PROSE], organism)
    ids = [tokenizer.bos_token_id]
    for encoded in tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]:
        ids += [*encoded, tokenizer.eos_token_id]
    tokens = np.asarray(ids, dtype=np.int32)
    print(f"{len(tokens)} tokens of text, {sum(map(len, texts)) / len(tokens):.2f} characters each", file=sys.stderr)

    prompts = PasskeyPrompts(tokenizer, organism.window, args.seed)
    rows = Rows(tokens, prompts, organism.passkeys, args.max_steps * args.train_batch_size)
    model = make_model(tokenizer, organism)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters", file=sys.stderr)
    trainer = Trainer(model, args, train_dataset=rows, processing_class=tokenizer)
    if args.max_steps:
        trainer.train(
            resume_from_checkpoint=get_last_checkpoint(args.output_dir) if Path(args.output_dir).is_dir() else None
        )
    final = Path(args.output_dir) / "final"
    if trainer.is_world_process_zero():
        save_final(trainer.accelerator.unwrap_model(trainer.model), tokenizer, final)
    return final


def main() -> None:
    """Run the command line."""
    parser = HfArgumentParser((Organism, TrainingArguments), description=__doc__)
    parser.set_defaults(**DEFAULTS)
    try:
        print(pretrain(*parser.parse_args_into_dataclasses()))
    except ValueError as error:
        print(f"pretrain: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
