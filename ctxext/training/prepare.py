"""Tokenize a recipe's data before it is trained on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ctxext.checkpoint.source import resolve_checkpoint
from ctxext.data.tokens import TokenRules, TokenStore, open_store
from ctxext.training.arguments import Recipe
from ctxext.training.config_file import ConfigError, apply_overrides, parse_config, read_yaml
from ctxext.training.preflight import source_problems


def token_rules(recipe: Recipe) -> TokenRules:
    """Return how a recipe's documents become tokens."""
    limit = {} if recipe.reading else {"longest_whole": recipe.length}  # a reader goes through any length
    return TokenRules(bos=recipe.data.bos, eos=recipe.data.eos, **limit)


def load_tokens(recipe: Recipe, tokenizer: Any) -> list[TokenStore]:
    """Return the tokens of a recipe's sources, read and tokenized on first use."""
    rules = token_rules(recipe)
    cache = Path(recipe.data.cache).expanduser() if recipe.data.cache else None
    return [open_store(source, tokenizer, rules, cache) for source in recipe.data.sources]


def prepare_data(config: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """Tokenize the sources of a recipe's config; return what each gave.

    Args:
        config: The config's YAML file.
        overrides: Words of a command line, as the recipe takes them.

    Raises:
        ConfigError: With everything that is wrong with the config or its sources.
    """
    from transformers import AutoTokenizer

    recipe = parse_config(apply_overrides(read_yaml(config), overrides), str(config))
    problems = source_problems(recipe)
    if recipe.reading is not None and recipe.reading.streaming:
        problems.append("reading.streaming leaves nothing to prepare: documents are tokenized as they are read")
    if problems:
        raise ConfigError(problems, str(config))
    stores = load_tokens(recipe, AutoTokenizer.from_pretrained(resolve_checkpoint(recipe.model)))
    kept = ("documents", "tokens", "longest", "skipped", "sha256")
    return {
        "sources": [
            {"data": store.source.data, "folder": str(store.folder), **{key: store.meta[key] for key in kept}}
            for store in stores
        ]
    }
