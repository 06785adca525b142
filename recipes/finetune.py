"""Fine-tune a RoPE model at a longer length: fully, with LoRA or with QLoRA, on transformers' Trainer.

    accelerate launch --config_file recipes/accelerate/zero2.yaml \
        recipes/finetune.py --config recipes/configs/pi-llama2-7b-8k.yaml --max_steps 200

A config states the model, the position method and length, the data, and any of transformers' TrainingArguments by
name; the command line overrides each (`--learning_rate 1e-5`, `--data.sources.0.max_tokens 1000000`). Everything that
is wrong is said at once, before a model is loaded. With a `reading` section rows read documents in windows and skip
what the model can predict (arXiv 2405.13216); `streaming: true` there reads corpora that are too large to tokenize
beforehand. A run that was killed goes on when the same command is given again, and
its log is that of an unbroken run.
"""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, set_seed

import ctxext.modeling  # noqa: F401  # registers the models with an attention bias
from ctxext.data.dataset import PackedDataset
from ctxext.data.packing import Packs
from ctxext.data.tokens import TokenStore
from ctxext.positions.live import fit_length, patch
from ctxext.reading.trainer import ReadingTrainer, Turns, make_documents, make_server
from ctxext.training.adapters import add_adapters
from ctxext.training.arguments import Recipe
from ctxext.training.callbacks import Evaluations, JsonLog, SaveAt
from ctxext.training.checkpoints import identity, resume_from
from ctxext.training.config_file import apply_overrides, parse_config, read_yaml, training_arguments
from ctxext.training.isolation import isolate_documents
from ctxext.training.lean_presets import apply_preset
from ctxext.training.preflight import evaluations_of, patch_options, preflight
from ctxext.training.prepare import load_tokens
from ctxext.training.trainer import ContextTrainer
from ctxext.training.watch import TrainingStopped


def read_recipe(words: list[str]) -> tuple[Recipe, Path]:
    """Return the recipe of a command line, and the folder of its model; nothing is loaded yet."""
    if "--config" not in words[:-1]:
        raise ValueError("give --config FILE.yaml; `ctxext recipe list` names those that come with ctxext")
    at = words.index("--config")
    path = Path(words[at + 1])
    recipe = parse_config(apply_overrides(read_yaml(path), words[:at] + words[at + 2 :]), str(path))
    return recipe, preflight(recipe, str(path))


def plan_packs(recipe: Recipe, args: Any, stores: list[TokenStore]) -> Packs:
    """Return the packs of the whole run; with `epochs`, set the number of steps from them."""
    seed = args.data_seed if args.data_seed is not None else args.seed
    plan = {"length": recipe.length, "boundaries": recipe.data.boundaries, "seed": seed}
    if recipe.epochs is not None:
        args.max_steps = math.ceil(len(Packs(stores, passes=recipe.epochs, **plan)) / recipe.batch_size)
    return Packs(stores, count=args.max_steps * recipe.batch_size, **plan)


def load_model(recipe: Recipe, folder: Path) -> Any:
    """Return the model: patched, its documents isolated, and with fresh adapters if the recipe has some."""
    dtype = getattr(torch, recipe.weights_dtype)
    quantization = None
    if recipe.tuning == "qlora":
        quantization = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
        )
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation=recipe.attention, quantization_config=quantization
    )
    if recipe.method is not None:
        patch(model, **patch_options(recipe))
    fit_length(
        model, recipe.length
    )  # dynamic and longrope: the frequencies of the full length, in short documents too
    if recipe.reading is None:  # whose rows hold one sequence each
        isolate_documents(model)
    if recipe.tuning != "full":
        model = add_adapters(model, recipe.adapters)
    apply_preset(model, recipe.memory, offload=recipe.offload)
    return model


def prepare(words: list[str]) -> tuple[ContextTrainer, Path | None]:
    """Return the trainer of a command line, and the checkpoint that it goes on from, if there is one."""
    recipe, folder = read_recipe(words)
    args = training_arguments(recipe, world_size=int(os.environ.get("WORLD_SIZE", "1")))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.model_max_length = recipe.length
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else (tokenizer.eos_token_id or 0)
    data: Any  # packs, or with `reading` turns at documents of which nothing is known before they are read
    if recipe.reading is None:
        with args.main_process_first(desc="tokenizing"):
            stores = load_tokens(recipe, tokenizer)
        data = PackedDataset(plan_packs(recipe, args, stores), pad)
    else:
        documents = make_documents(recipe, args, tokenizer)
        data = Turns(args.max_steps * recipe.batch_size, documents.digest())
    newest = resume_from(Path(args.output_dir), recipe.resume, identity(recipe, data.packs.digest()))

    set_seed(args.seed)  # fresh adapters
    model = load_model(recipe, folder)
    if recipe.reading is None:
        trainer = ContextTrainer(model, args, recipe, data, tokenizer)
    else:
        server = make_server(recipe, args, documents)
        trainer = ReadingTrainer(model, args, recipe, data, tokenizer, server, pad)
    trainer.add_callback(JsonLog(Path(args.output_dir)))
    trainer.add_callback(SaveAt(recipe.save_at))
    if recipe.evaluate_every is not None:
        evaluations = Evaluations(evaluations_of(recipe), recipe.evaluate_every, tokenizer)
        evaluations.trainer = trainer
        trainer.add_callback(evaluations)
    return trainer, newest


def finetune(words: list[str]) -> Path:
    """Run a recipe; return the folder of the finished model or adapter."""
    trainer, newest = prepare(words)
    trainer.train(resume_from_checkpoint=None if newest is None else str(newest))
    return trainer.save_final()


def main() -> None:
    """Run the command line: exit 2 if it cannot be run as given, 1 if the run had to be stopped."""
    try:
        final = finetune(sys.argv[1:])
        if os.environ.get("RANK", "0") == "0":
            print(f"finished: {final}", file=sys.stderr)
    except TrainingStopped as error:
        print(f"finetune: {error}", file=sys.stderr)
        os._exit(1)  # other processes wait in a collective: leave without waiting for them
    except ValueError as error:
        print(f"finetune: {error}", file=sys.stderr)
        sys.exit(2)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
