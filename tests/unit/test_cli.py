import json
import subprocess
import sys

import pytest

from ctxext import cli


def run(*arguments):
    return subprocess.run([sys.executable, "-m", "ctxext", *map(str, arguments)], capture_output=True, text=True)


def test_help_imports_neither_torch_nor_transformers_nor_numpy():
    code = (
        "import sys; sys.argv = ['ctxext', '--help']\n"
        "from ctxext.cli import main\n"
        "try:\n    main()\n"
        "finally:\n    print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "patch" in done.stdout and "sweep" in done.stdout
    assert done.stderr.strip().endswith("[]")


def test_the_version_is_that_of_the_package():
    from importlib.metadata import version

    assert run("--version").stdout == f"ctxext {version('ctxext')}\n"


def test_a_misspelt_command_or_option_names_the_nearest_one(llama, tmp_path):
    assert "patch" in run("pacth").stderr
    done = run("patch", llama, tmp_path / "x", "--method", "yarn", "--lenght", 512)
    assert done.returncode == 2 and "--length" in done.stderr


def test_errors_are_one_line_on_stderr_and_exit_2(tmp_path):
    done = run("inspect", tmp_path / "nowhere", "--json")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("ctxext: there is no folder") and "Traceback" not in done.stderr


def test_with_json_stdout_holds_the_answer_alone(monkeypatch, capsys, llama):
    import ctxext.checkpoint.inspect as module

    def talkative(checkpoint):
        print("a library says something")
        return {"checkpoint": str(checkpoint)}

    monkeypatch.setattr(module, "inspect_checkpoint", talkative)
    monkeypatch.setattr(sys, "argv", ["ctxext", "inspect", str(llama), "--json"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code in (0, None)
    said = capsys.readouterr()
    assert json.loads(said.out) == {"checkpoint": str(llama)}
    assert "a library says something" in said.err
