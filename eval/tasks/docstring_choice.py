"""The questions of the lm-eval task `docstring_choice`."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ctxext.data.offline import sympy_source

if TYPE_CHECKING:
    from datasets import Dataset

CHOICES = 4
FEWEST_WORDS = 3


def questions(**_: Any) -> dict[str, Dataset]:
    """Return lm-eval's data set of the held-out files: `signature`, `choices` and `answer` of each function.

    The wrong choices are the docstrings of the file's next three functions; the right one takes each place in turn.

    Args:
        **_: The task's metadata, which lm-eval hands on.
    """
    from datasets import Dataset

    rows: list[dict[str, Any]] = []
    for document in sympy_source("held-out"):
        found = {first: signature for signature, first in documented_functions(document.text)}
        firsts = list(found)  # each once: two functions with one docstring would make two right choices
        for number, first in enumerate(firsts if len(firsts) >= CHOICES else []):
            answer = len(rows) % CHOICES
            wrong = [firsts[(number + step) % len(firsts)] for step in range(1, CHOICES)]
            choices = [*wrong[:answer], first, *wrong[answer:]]
            rows.append({"signature": found[first], "choices": choices, "answer": answer})
    return {"test": Dataset.from_list(rows)}


def documented_functions(source: str) -> Iterator[tuple[str, str]]:
    """Yield the signature of each function with a docstring, and the docstring's first line, in the source's order."""
    functions = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef))
    for node in sorted(functions, key=lambda node: node.lineno):
        first = (ast.get_docstring(node) or "").split("\n")[0].strip()
        if len(first.split()) >= FEWEST_WORDS:
            yield f"def {node.name}({ast.unparse(node.args)}):", first
