"""A patch that is killed or runs out of disk: SOURCE unchanged, OUTPUT whole or absent, and the next one succeeds."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers import LENGTH, WINDOW, read_config, save_tiny, snapshot
from transformers import AutoModelForCausalLM

from ctxext import patch_checkpoint
from ctxext.checkpoint import files

KILLS = 20


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint of 100 MB, so that copying takes a while; tests must not change it."""
    return save_tiny(tmp_path_factory.mktemp("large") / "source", vocab_size=200_000)


def command(source: Path, output: Path, *more: str) -> list[str]:
    method = ["--method", "yarn", "--length", str(LENGTH)]
    return [sys.executable, "-m", "ctxext", "patch", str(source), str(output), *method, *more]


def sizes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in folder.iterdir()}


def kill_at_random(arguments: list[str], partial: Path, moments: random.Random, duration: float, inside: bool) -> None:
    """Start a patch and kill it: anywhere in its life, or `inside` the time in which its folder is being filled."""
    process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    if inside:
        while not partial.exists() and process.poll() is None:
            time.sleep(0.001)
        time.sleep(moments.uniform(0.0, 0.4 * duration))
    else:
        time.sleep(moments.uniform(0.0, 1.1 * duration))
    process.kill()
    process.wait()


def kill_often(source: Path, work: Path, *more: str) -> None:
    before = snapshot(source)
    output, partial = work / "out", work / ".out.ctxext-partial"
    start = time.monotonic()
    subprocess.run(command(source, output, *more), check=True, capture_output=True)
    duration = time.monotonic() - start
    whole, interrupted = sizes(output), 0
    moments = random.Random(0)
    for attempt in range(KILLS):
        replacing = attempt % 4 == 3  # an OUTPUT that is there and must be replaced
        if output.exists() and not replacing:
            shutil.rmtree(output)
        arguments = command(source, output, *more, "--force")
        kill_at_random(arguments, partial, moments, duration, inside=attempt % 2 == 1)
        assert snapshot(source) == before
        interrupted += partial.exists()
        if output.exists():
            assert sizes(output) == whole
            assert read_config(output)["max_position_embeddings"] == LENGTH
    assert interrupted, "no kill fell into the time in which the folder is filled"
    subprocess.run(command(source, output, *more, "--force"), check=True, capture_output=True)
    assert snapshot(source) == before and sizes(output) == whole
    assert [path.name for path in work.iterdir()] == ["out"]
    AutoModelForCausalLM.from_pretrained(output)


def test_kills_while_copying(large: Path, tmp_path: Path) -> None:
    kill_often(large, tmp_path, "--no-verify")


@pytest.mark.slow
def test_kills_with_verification(large: Path, tmp_path: Path) -> None:
    kill_often(large, tmp_path)


def test_leftovers_of_a_killed_replacement(llama: Path, tmp_path: Path) -> None:
    """Killed between the two renames: the old OUTPUT lies aside, the new one was not there yet."""
    (tmp_path / ".out.ctxext-partial").mkdir()
    (tmp_path / ".out.ctxext-partial" / "model.safetensors").write_text("half")
    (tmp_path / ".out.ctxext-partial" / "folder").mkdir()
    (tmp_path / ".out.ctxext-previous").mkdir()
    (tmp_path / ".out.ctxext-previous" / "config.json").write_text("{}")
    patch_checkpoint(llama, tmp_path / "out", method="yarn", length=LENGTH)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")


def test_two_at_once_are_refused(llama: Path, tmp_path: Path) -> None:
    partial = tmp_path / ".out.ctxext-partial"
    partial.mkdir()
    (partial / "theirs").write_text("x")
    descriptor = os.open(partial, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(ValueError, match="another process is filling .* wait for it or choose another OUTPUT"):
        patch_checkpoint(llama, tmp_path / "out", method="yarn", length=LENGTH)
    assert (partial / "theirs").exists()
    os.close(descriptor)


def full_disk_is_told(source: Path, output: Path) -> None:
    before = snapshot(source)
    with pytest.raises(OSError, match=f"disk is full: OUTPUT {output} was not made .*--link hard") as caught:
        patch_checkpoint(source, output, method="yarn", length=LENGTH)
    assert caught.value.errno == errno.ENOSPC
    assert not output.exists() and list(output.parent.iterdir()) == [] and snapshot(source) == before


@pytest.fixture
def small_disk(tmp_path: Path) -> Path:
    """Return a file system of one megabyte."""
    place = tmp_path / "disk"
    place.mkdir()
    if shutil.which("mount") is None:
        pytest.skip("there is no mount command")
    options = ["-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)]
    done = subprocess.run(["mount", *options], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here: {done.stderr.strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_disk_full(large: Path, small_disk: Path) -> None:
    full_disk_is_told(large, small_disk / "out")


@pytest.mark.parametrize("moment", ["weights", "config"])
def test_disk_full_wherever_it_happens(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if moment == "weights":
        monkeypatch.setattr(files.shutil, "copyfileobj", fail)
        monkeypatch.setattr(files.fcntl, "ioctl", fail)
    else:
        monkeypatch.setattr(files.os, "fsync", fail)
    full_disk_is_told(llama, tmp_path / "out")


def test_other_errors_keep_their_words(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise PermissionError(errno.EACCES, "not yours", "x")

    monkeypatch.setattr(files.os, "fsync", fail)
    with pytest.raises(PermissionError, match="not yours"):
        patch_checkpoint(llama, tmp_path / "out", method="yarn", length=LENGTH)
    assert list(tmp_path.iterdir()) == [] and read_config(llama)["max_position_embeddings"] == WINDOW
