"""Adapters that know which position method they were trained with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ctxext.checkpoint.bias_config import read_bias
from ctxext.checkpoint.files import carried_files, place, read_json, whole_folder
from ctxext.checkpoint.loaders import has_bias
from ctxext.checkpoint.normalize import normalize_config
from ctxext.checkpoint.rope_config import RopeConfig, read_rope
from ctxext.checkpoint.source import resolve_checkpoint
from ctxext.positions.bias import AttentionBias
from ctxext.training.arguments import Lora


def add_adapters(model: Any, lora: Lora) -> Any:
    """Return a peft model around a model of transformers, its adapters fresh.

    peft's `prepare_model_for_kbit_training` is left out: it turns embeddings and output head into float32, which costs
    an 8B model 2 GB, while transformers' norms compute in float32 anyway.

    Args:
        model: Any causal language model, its weights in NF4 or not.
        lora: Rank, targets and whether embeddings and norms are trained too.
    """
    from peft import LoraConfig, get_peft_model

    tied = bool(model.config.get_text_config().tie_word_embeddings)
    trained = embeddings_and_norms(model) if lora.embeddings_and_norms else []
    trained += learned_bias(model)
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=lora.r,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=list(lora.targets),
        modules_to_save=trained or None,
        ensure_weight_tying=lora.embeddings_and_norms and tied,
    )
    return get_peft_model(model, config)


def embeddings_and_norms(model: Any) -> list[str]:
    """Return the names of the token embeddings and of every norm, as peft's `modules_to_save` takes them."""
    embedding = model.get_input_embeddings()
    names = {
        name.split(".")[-1]
        for name, module in model.named_modules()
        if module is embedding or type(module).__name__.lower().endswith("norm")
    }
    return sorted(names)


def learned_bias(model: Any) -> list[str]:
    """Return the name of the model's attention bias as peft's `modules_to_save` takes it, if it learns."""
    bias = getattr(model.model, "score_bias", None)
    return ["score_bias"] if bias is not None and bias.learned else []


def recorded_config(adapter: Path) -> dict[str, Any]:
    """Return the config of the patched model that an adapter was trained on.

    Raises:
        ValueError: If the adapter has none.
    """
    if not (adapter / "config.json").exists():
        raise ValueError(
            f"adapter {adapter} does not say which position method it was trained with (it has no config.json); "
            "give a base that is patched as it was, and apply it with peft itself"
        )
    return read_json(adapter / "config.json")


def check_adapter(config: dict[str, Any], adapter: Path) -> None:
    """Refuse an adapter on a model that reads positions otherwise than the one that it was trained on.

    Args:
        config: The model's config.
        adapter: The adapter's folder; one that records nothing passes, for ctxext did not train it.

    Raises:
        ValueError: If they differ, naming both.
    """
    if not (adapter / "config.json").exists():
        return
    own = read_json(adapter / "config.json")
    recorded, given, bias = read_rope(own), read_rope(config), read_bias(own)
    if (recorded.scaling, recorded.window, bias) != (given.scaling, given.window, read_bias(config)):
        method = recorded.scaling.name if bias is None else bias.name
        raise ValueError(
            f"adapter {adapter} was trained on a model with {_said(recorded, bias)}, and this one has "
            f"{_said(given, read_bias(config))}: patch the base first (`ctxext patch BASE OUTPUT --method {method} "
            f"--length {recorded.window}`) or merge the adapter (`ctxext merge`), which does it by itself"
        )


def _said(rope: RopeConfig, bias: AttentionBias | None) -> str:
    if bias is not None:
        return f"the attention bias {bias.bias_parameters()} and {rope.window} tokens"
    scaling = rope.scaling
    if scaling.name == "theta":
        return f"no scaling, theta {scaling.rope_theta:g} and {rope.window} tokens"
    return f"{scaling.name} scaling from {rope.original_length} to {rope.window} tokens"


def load_adapter(adapter: str | Path, *, base: str | None = None, **options: Any) -> Any:
    """Return a peft model: the base, reading positions as the adapter records, with the adapter on it.

    `AutoPeftModel` loads the base as it is, with the positions of its pretraining, and says nothing.

    Args:
        adapter: The adapter's folder or Hub id.
        base: The base's folder or Hub id; by default the one that the adapter names.
        options: Of `AutoModelForCausalLM.from_pretrained`, such as `dtype`.

    Raises:
        ValueError: If the adapter records no method, or does not fit the base.
    """
    from peft import PeftConfig, PeftModel
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = resolve_checkpoint(adapter)
    if has_bias(recorded_config(folder)):
        import ctxext.modeling  # noqa: F401  # registers the models with an attention bias
    named = base or PeftConfig.from_pretrained(folder).base_model_name_or_path
    if not named:
        raise ValueError(f"adapter {folder} does not name its base: give one")
    config = AutoConfig.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(resolve_checkpoint(named), config=config, **options)
    check_adapter(model.config.to_dict(), folder)
    return PeftModel.from_pretrained(model, folder)


def merge_adapter(adapter: str | Path, output: str | Path, *, base: str | None = None, force: bool = False) -> Path:
    """Write a checkpoint with an adapter merged into its base, patched as the adapter records; return its folder.

    Everything that was trained is kept: adapters, embeddings and norms, and the tie between embeddings and output.
    An adapter that was trained on NF4 weights is merged into the unquantized ones.

    Args:
        adapter: The adapter's folder or Hub id.
        output: The folder to make.
        base: The base's folder or Hub id; by default the one that the adapter names.
        force: Replace an OUTPUT that is not empty.

    Raises:
        ValueError: If the adapter records no method, or does not fit the base.
    """
    folder, target = resolve_checkpoint(adapter), Path(output).expanduser()
    recorded = recorded_config(folder)
    merged = load_adapter(folder, base=base, dtype="auto").merge_and_unload()
    tied = bool(recorded.get("tie_word_embeddings", merged.config.get_text_config().tie_word_embeddings))
    merged.config.tie_word_embeddings = tied
    merged.tie_weights()
    with whole_folder(target, force) as partial:
        merged.save_pretrained(partial)
        for relative in carried_files(folder):
            if not relative.name.startswith(("adapter_", "ctxext_state")) and not (partial / relative).exists():
                place(folder / relative, partial / relative, "copy")
        normalize_config(partial)
    return target
