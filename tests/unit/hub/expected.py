"""What the tests of pushing share: the token that nobody may see, and the files of the checkpoint that is pushed."""

from __future__ import annotations

TOKEN = "hf_" + "ThisIsTheTokenThatNobodyMaySee12345"
ALWAYS = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
