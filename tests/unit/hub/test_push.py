"""Pushing to a Hub that answers over HTTP, and what a push leaves behind when it fails."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from expected import ALWAYS, TOKEN
from helpers import read_config, write_config
from server import Fault, Hub

from ctxext.hub.failures import HubError
from ctxext.hub.push import _Remote, push

REPO = "user/model"


def content(folder: Path) -> dict[str, bytes]:
    """What must be in the repository: the files of the checkpoint, byte for byte."""
    return {name: (folder / name).read_bytes() for name in ALWAYS}


def test_all_files_appear_in_one_commit(hub: Hub, checkpoint: Path) -> None:
    report = push(checkpoint, REPO, message="First")
    there = hub.files(REPO)
    assert there.pop("README.md").startswith(b"---\n")
    assert there == content(checkpoint)
    assert hub.repos[REPO].titles == ["initial commit", "First"]
    assert report["pushed"] and report["commit"] == hub.repos[REPO].branches["main"]
    assert report["url"] == f"{hub.endpoint}/{REPO}" and not hub.repos[REPO].private
    assert {file["path"]: file["size"] for file in report["files"]} == {
        path: len(data) for path, data in hub.files(REPO).items()
    }


def test_a_second_push_of_the_same_sends_nothing(hub: Hub, checkpoint: Path) -> None:
    first = push(checkpoint, REPO)
    hub.requests.clear()
    second = push(checkpoint, REPO)
    assert not second["pushed"] and second["commit"] == first["commit"]
    assert not [line for line in hub.requests if line.startswith("PUT") or "/commit/" in line]


def test_private_and_revision(hub: Hub, checkpoint: Path) -> None:
    report = push(checkpoint, REPO, private=True, revision="32k/yarn")
    assert hub.repos[REPO].private
    assert hub.files(REPO) == {} and set(hub.files(REPO, "32k/yarn")) == ALWAYS | {"README.md"}
    assert report["url"].endswith("/tree/32k/yarn")


def test_large_files_go_up_in_parts(hub: Hub, checkpoint: Path) -> None:
    hub.part_size = 100_000
    push(checkpoint, REPO)
    size = (checkpoint / "model.safetensors").stat().st_size
    assert len(hub.parts) == -(-size // 100_000) > 1
    assert hub.files(REPO)["model.safetensors"] == (checkpoint / "model.safetensors").read_bytes()


def test_a_dry_run_asks_the_hub_nothing(hub: Hub, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN")
    (checkpoint / ".env").write_text("A=1")
    report = push(checkpoint, REPO, dry_run=True)
    assert {file["path"] for file in report["files"]} == ALWAYS | {"README.md"}
    assert [one["path"] for one in report["left_out"]] == [".env"]
    assert not report["pushed"] and hub.requests == [] and not (checkpoint / "README.md").exists()


def test_what_doctor_refuses_needs_force(hub: Hub, checkpoint: Path) -> None:
    config = read_config(checkpoint)
    write_config(checkpoint, {**config, "rope_theta": 12345.0})
    report = push(checkpoint, REPO)
    assert report["faults"] and not report["pushed"] and hub.repos == {}
    assert push(checkpoint, REPO, force=True)["pushed"]
    assert (
        "rope_scaling with rope_theta and rope_parameters differ in rope_theta"
        in hub.files(REPO)["README.md"].decode()
    )


def test_an_earlier_checkpoint_does_not_shine_through(hub: Hub, checkpoint: Path) -> None:
    old = {
        "model-00001-of-00002.safetensors": b"1",
        "model.safetensors.index.json": b"{}",
        "adapter_config.json": b"{}",
    }
    hub.make(REPO, **old, **{"pytorch_model.bin": b"2", "notes.md": b"mine", "README.md": b"# By hand\n"})
    report = push(checkpoint, REPO)
    assert report["deleted"] == sorted([*old, "pytorch_model.bin"])
    assert hub.files(REPO) == {**content(checkpoint), "notes.md": b"mine", "README.md": b"# By hand\n"}
    push(checkpoint, REPO, card=True)
    assert b"made by ctxext" in hub.files(REPO)["README.md"]


def test_a_public_repository_is_not_taken_for_private(hub: Hub, checkpoint: Path) -> None:
    hub.make(REPO)
    with pytest.raises(HubError, match="is there already and is public, so nothing was sent"):
        push(checkpoint, REPO, private=True)
    assert hub.files(REPO) == {}


def test_what_the_hub_ignores_is_said(hub: Hub, checkpoint: Path) -> None:
    hub.ignored = {"tokenizer.json"}
    with pytest.raises(HubError, match=r"left out tokenizer\.json, perhaps for a \.gitignore"):
        push(checkpoint, REPO)


def test_somebody_else_pushes_in_between(hub: Hub, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.make(REPO)
    commit = _Remote._commit

    def raced(*arguments: Any) -> str:
        hub.repos[REPO].commit("main", dict(hub.repos[REPO].tree("main") or {}), "theirs")
        return commit(*arguments)

    monkeypatch.setattr(_Remote, "_commit", raced)
    with pytest.raises(HubError, match=r"another push came in between \(412.*which is not this push.*push again"):
        push(checkpoint, REPO)
    assert hub.repos[REPO].titles == ["initial commit", "theirs"]


# What fails, words that the message must have, and how many requests fail before huggingface_hub gives up.
CREATE, PREUPLOAD, BATCH, COMMIT = "/repos/create", "/preupload/", "/objects/batch", "/commit/"
ALL = 20
FAILURES = {
    "401 at the start": (Fault("POST", CREATE, 401), ("does not accept the token (401", "hf auth login")),
    "403 for the name": (Fault("POST", CREATE, 403), ("may not write there (403", "write access")),
    "404 of the branch": (
        Fault("POST", PREUPLOAD, 404),
        ("no such repository, branch", "as before", "check the name"),
    ),
    "403 at the commit": (Fault("POST", COMMIT, 403), ("may not write there (403", "as before")),
    "409 at the commit": (
        Fault("POST", COMMIT, 409),
        ("another push came in between (409", "as before", "push again"),
    ),
    "413 at the commit": (Fault("POST", COMMIT, 413), ("as large as this (413", "as before")),
    "429 at the commit": (Fault("POST", COMMIT, 429, {"Retry-After": "77"}), ("(429", "as before", "wait 77 seconds")),
    "500 at the commit": (
        Fault("POST", COMMIT, 500),
        ("trouble of its own (500", "as before", "not sent a second time"),
    ),
    "503 at the start": (Fault("POST", CREATE, 503, {"Retry-After": "9"}), ("(503", "wait 9 seconds")),
    "503 for ever": (Fault("POST", PREUPLOAD, 503, times=ALL), ("trouble of its own (503", "as before")),
    "429 for ever": (
        Fault("POST", BATCH, 429, {"Retry-After": "5"}, times=ALL),
        ("(429", "wait 5 seconds", "as before"),
    ),
    "400 in the upload": (Fault("PUT", "/lfs/", 400, times=ALL), ("refuses the request (400", "as before")),
    "500 in the upload": (Fault("PUT", "/lfs/", 500, times=ALL), ("trouble of its own (500", "as before")),
    "a cut in the upload": (Fault("PUT", "/lfs/", cut=5000, times=ALL), ("connection to the Hub failed", "as before")),
    "a cut in the commit": (Fault("POST", COMMIT, cut=10), ("connection to the Hub failed", "as before", "once the")),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_failure_leaves_the_repository_as_it_was(
    hub: Hub, checkpoint: Path, waits: list[float], everything_said: Any, name: str
) -> None:
    fault, words = FAILURES[name]
    fault = Fault(**vars(fault))
    fault.body = {"error": f"Bad token {TOKEN} of yours"}  # a server that says too much
    hub.faults = [fault]
    with pytest.raises(HubError) as failed:
        push(checkpoint, REPO)
    for word in words:
        assert word in str(failed.value), failed.value
    assert TOKEN not in str(failed.value) + repr(failed.value) + everything_said()
    assert failed.value.__cause__ is None and failed.value.__suppress_context__
    assert REPO not in hub.repos or (hub.files(REPO) == {} and hub.repos[REPO].titles == ["initial commit"])
    assert "signature" not in str(failed.value)

    hub.faults = []
    hub.requests.clear()
    uploaded = bool(hub.stored)
    assert push(checkpoint, REPO)["pushed"]
    assert any(line.startswith("PUT") for line in hub.requests) is not uploaded  # what was sent is not sent again
    assert set(hub.files(REPO)) == ALWAYS | {"README.md"}


def test_a_passing_trouble_is_waited_out(hub: Hub, checkpoint: Path, waits: list[float]) -> None:
    hub.faults = [Fault("POST", BATCH, 429, {"Retry-After": "30"}), Fault("PUT", "/lfs/", cut=5000, times=2)]
    assert push(checkpoint, REPO)["pushed"]
    assert waits[0] >= 30 and len(waits) == 3


def test_a_lost_answer_is_not_taken_for_a_failed_commit(hub: Hub, checkpoint: Path) -> None:
    hub.faults = [Fault("POST", COMMIT, after=True)]
    with pytest.raises(HubError, match="has all files of these names: the push may have arrived"):
        push(checkpoint, REPO)
    again = push(checkpoint, REPO)
    assert not again["pushed"] and again["commit"] == hub.repos[REPO].branches["main"]
    assert len(hub.repos[REPO].titles) == 2


def test_tokens_come_from_the_usual_places(
    hub: Hub, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(HubError, match="there is no token for the Hub, so nothing was sent: log in"):
        push(checkpoint, REPO)
    assert hub.requests == []
    (tmp_path / "no-token").write_text(TOKEN + "\n")  # as huggingface_hub.login writes it
    assert push(checkpoint, REPO)["pushed"]
    assert TOKEN.encode() not in b"".join(hub.files(REPO).values())


@pytest.mark.parametrize(("repo", "words"), [("model", "user/name"), ("a/b/c", "user/name"), ("user/mo del", "user/")])
def test_a_wrong_name_is_refused(checkpoint: Path, repo: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        push(checkpoint, repo)


def test_the_command(hub: Hub, checkpoint: Path) -> None:
    write_config(checkpoint, {**read_config(checkpoint), "rope_theta": 12345.0})
    call = [sys.executable, "-m", "ctxext", "push", str(checkpoint), REPO, "--dry-run", "--json"]
    done = subprocess.run(call, capture_output=True, text=True)
    answer = json.loads(done.stdout)
    assert done.returncode == 1 and answer["refused"] and answer["dry_run"] and answer["faults"]
    assert {file["path"] for file in answer["files"]} == ALWAYS | {"README.md"}
