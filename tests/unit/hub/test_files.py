"""Which files are published, and which never."""

from __future__ import annotations

from pathlib import Path

import pytest
from expected import ALWAYS, TOKEN

from ctxext.hub.files import plan_files

NEVER = {
    ".env": "secret",
    "prod.env": "secret",
    ".netrc": "secret",
    "hf_token.txt": "secret",
    "token": "secret",
    "mytokens.json": "secret",
    "id_ed25519": "secret",
    "server.pem": "secret",
    "client_secret.json": "secret",
    "optimizer.pt": "training run",
    "rng_state_0.pth": "training run",
    "scheduler.pt": "training run",
    "training_args.bin": "training run",
    "trainer_state.json": "training run",
    "ctxext_state.json": "training run",
    "pytorch_model.bin": "pickle",
    "model.safetensors.partial": "half-written",
    "config.json.before-doctor": "half-written",
    "adapter_old.safetensors": "no index names",
    ".DS_Store": "hidden",
    "notes.docx": "no part",
    ".git/": "cache",
    "__pycache__/": "cache",
    "checkpoint-100/": "training run",
}
MORE = {
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "chat_template.jinja",
    "LICENSE",
    "README.md",
}


def test_only_a_checkpoint_is_published(checkpoint: Path) -> None:
    for name in [*NEVER, *MORE]:
        if name.endswith("/"):
            (checkpoint / name).mkdir()
            (checkpoint / name / "weights.safetensors").write_bytes(b"12345")
        else:
            (checkpoint / name).write_bytes(b"123")
    uploads, left = plan_files(checkpoint)
    assert {upload.path for upload in uploads} == ALWAYS | MORE
    assert {upload.path: upload.size for upload in uploads}["LICENSE"] == 3
    assert {one.path for one in left} == set(NEVER)
    for one in left:
        assert NEVER[one.path] in one.reason, one
        assert one.size == (5 if one.path.endswith("/") else 3)


def test_a_link_is_judged_by_what_it_leads_to(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "id_rsa").write_text("x")
    (tmp_path / "blob").write_text("{}")
    (tmp_path / "elsewhere").mkdir()
    (checkpoint / "vocab.txt").symlink_to(tmp_path / "id_rsa")
    (checkpoint / "merges.txt").symlink_to(tmp_path / "blob")
    (checkpoint / "gone.json").symlink_to(tmp_path / "nothing")
    (checkpoint / "additional_chat_templates").symlink_to(tmp_path / "elsewhere")
    uploads, left = plan_files(checkpoint)
    assert {upload.path for upload in uploads} == ALWAYS | {"merges.txt"}
    assert {one.path.rstrip("/") for one in left} == {"vocab.txt", "gone.json", "additional_chat_templates"}


@pytest.mark.parametrize("secret", [f'{{"auth": "{TOKEN}"}}', "-----BEGIN OPENSSH PRIVATE KEY-----\nb3Bl"])
def test_a_secret_within_a_file_is_refused(checkpoint: Path, secret: str) -> None:
    filler = " " * (2**20 - 20)  # across the border of two blocks
    (checkpoint / "vocab.json").write_text(filler + secret)
    with pytest.raises(ValueError, match=r"vocab\.json holds what looks like a token") as refused:
        plan_files(checkpoint)
    assert TOKEN not in str(refused.value)


def test_a_sharded_checkpoint_is_published_whole(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").rename(checkpoint / "model-00001-of-00001.safetensors")
    index = '{"metadata": {}, "weight_map": {"a": "model-00001-of-00001.safetensors"}}'
    (checkpoint / "model.safetensors.index.json").write_text(index)
    (checkpoint / "model-00001-of-00002.safetensors").write_text("of an earlier save")
    uploads, left = plan_files(checkpoint)
    weights = {"model-00001-of-00001.safetensors", "model.safetensors.index.json"}
    assert {upload.path for upload in uploads} == ALWAYS - {"model.safetensors"} | weights
    assert [one.path for one in left] == ["model-00001-of-00002.safetensors"]


def test_pickles_alone_are_refused(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    (checkpoint / "pytorch_model.bin").write_bytes(b"1")
    with pytest.raises(ValueError, match="only pickled weights"):
        plan_files(checkpoint)
