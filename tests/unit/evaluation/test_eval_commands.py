"""The command line: options from dataclass fields, JSON on stdout, exit codes, and nothing heavy at import."""

import json
import subprocess
import sys
from dataclasses import dataclass
from typing import ClassVar

import pytest
from typer.testing import CliRunner

from ctxext.cli import app
from ctxext.evaluation import registry
from ctxext.evaluation.base import Evaluation, Plan, Summary, option
from ctxext.evaluation.commands import evaluation_command

runner = CliRunner()


def invoke(*arguments):
    return runner.invoke(app, [str(argument) for argument in arguments])


def test_help_shows_an_evaluations_own_options():
    text = invoke("eval", "passkey", "--help").output
    for word in ("--depths", "--kmax-only", "--dtype", "--protocol", "32"):
        assert word in text
    assert "--stride" not in text and "--stride" in invoke("eval", "perplexity", "--help").output


def test_list():
    names = [item["name"] for item in json.loads(invoke("eval", "list", "--json").stdout)]
    assert {"passkey", "perplexity"} <= set(names)
    assert "perplexity" in invoke("eval", "list").stdout


def test_misspelt_options_and_names_get_the_nearest():
    wrong = invoke("eval", "passkey", "x", "--dephts", "3")
    assert wrong.exit_code == 2 and "--depths" in wrong.output
    unknown = invoke("eval", "passky", "x")
    assert "did you mean 'passkey'" in str(unknown.exception)


def test_json_is_one_document_on_stdout_and_compare_reads_it(byte_checkpoint, texts, tmp_path):
    options = ["--data", texts, "--length", 32, "--stride", 8, "--json"]
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    done = [invoke("eval", "perplexity", byte_checkpoint(), *options, "--output", path) for path in paths]
    for run, path in zip(done, paths, strict=True):
        assert run.exit_code == 0 and json.loads(run.stdout) == json.loads(path.read_text())
    compared = invoke("compare", *paths, "--output", tmp_path / "drawn", "--json")
    assert [row["comparable"] for row in json.loads(compared.stdout)["results"]] == [True, True]
    assert (tmp_path / "drawn" / "loss-by-position.png").exists()


def test_sweep_on_the_command_line(byte_checkpoint, tmp_path):
    (tmp_path / "a.txt").write_text("hello " * 60)
    done = invoke(
        "sweep", byte_checkpoint(), "--length", 256, "--data", tmp_path, "--documents", 1, "--methods", "ntk,pi"
    )
    assert done.exit_code == 0
    assert "long-range loss" in done.stdout and "patch with the best: ctxext patch" in done.stdout


def test_a_wrong_call_exits_with_2(byte_checkpoint):
    command = [sys.executable, "-m", "ctxext", "eval", "perplexity", str(byte_checkpoint()), "--data", "pg91"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == ""
    assert "did you mean 'pg19'" in done.stderr and "Traceback" not in done.stderr


@dataclass(frozen=True, kw_only=True)
class Toy(Evaluation):
    name: ClassVar[str] = "toy"
    description: ClassVar[str] = "counts"
    amount: int = option(3, "how many")

    def plan(self, session):
        return Plan(units=[])

    def score(self, session, unit):
        return {}

    def summarize(self, plan, scored):
        return Summary(metrics={}, tokens_scored=0)


def test_plugins_that_cannot_be_a_command():
    @dataclass(frozen=True, kw_only=True)
    class Taken(Toy):
        dtype: str = option("x", "taken")

    @dataclass(frozen=True, kw_only=True)
    class Strange(Toy):
        numbers: dict = option(None, "not on a command line")

    with pytest.raises(ValueError, match="must not call an option dtype: it is taken"):
        evaluation_command(Taken)
    with pytest.raises(ValueError, match="option 'numbers' .* allowed: int, float, str, bool, or None"):
        evaluation_command(Strange)
    assert Toy(amount=2).protocol_id() == "toy-v1:amount=2"


class Point:
    def __init__(self, name, value, loaded=None):
        self.name, self.value, self.loaded = name, value, loaded

    def load(self):
        if self.loaded is None:
            raise ImportError("no module named gone")
        return self.loaded


def test_entry_points_that_lead_nowhere(monkeypatch):
    points = [Point("gone", "gone:X"), Point("other", "a:B", Toy), Point("text", "a:C", str), Point("toy", "a:D", Toy)]
    monkeypatch.setattr(registry, "entry_points", lambda group: points)
    assert registry.load("toy") is Toy
    for name, message in [
        ("gone", "cannot be imported: no module"),
        ("other", "name = 'other'"),
        ("text", "subclass"),
    ]:
        with pytest.raises(ValueError, match=message):
            registry.load(name)
    points.append(Point("toy", "b:E", Toy))
    with pytest.raises(ValueError, match="two evaluations are called 'toy': a:D and b:E"):
        registry.available()


def test_nothing_heavy_is_imported():
    heavy = "{'torch', 'transformers', 'datasets', 'matplotlib', 'numpy'}"
    modules = "ctxext.cli, ctxext.evaluation.base, ctxext.evals.perplexity, ctxext.evals.passkey, ctxext.data"
    code = f"import sys, {modules}; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
