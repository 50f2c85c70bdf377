"""Budgets that keep every piece readable at once, and nothing that ties the project to one machine."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.architecture.sources import ROOT

FOLDERS = ("src", "tests", "examples", "benchmarks", "docs")
CODE = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
TEXT = sorted(path for folder in FOLDERS for end in ("*.md", "*.toml") for path in (ROOT / folder).rglob(end))
TOP = [path for path in ROOT.iterdir() if path.suffix in {".md", ".toml", ".txt"} or path.name == "Makefile"]

MOST_LINES_IN_A_FILE = 400
MOST_LINES_IN_A_FUNCTION = 50

# Written in two halves each, because this file is searched too.
MACHINE_PATH = re.compile(r"(?<![\w.])/(?:" + "|".join(("root", "tmp", "home", "work", "Users")) + r")/")


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def function_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of the body without its docstring: a long explanation is no long function."""
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    return (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0


@pytest.mark.parametrize("path", CODE, ids=_name)
def test_files_and_functions_are_short(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MOST_LINES_IN_A_FILE
    functions = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    long = [f"{f.name} ({function_lines(f)} lines)" for f in functions if function_lines(f) > MOST_LINES_IN_A_FUNCTION]
    assert not long


@pytest.mark.parametrize("path", CODE + TEXT + TOP, ids=_name)
def test_no_absolute_machine_paths(path: Path) -> None:
    lines = enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
    assert not [f"{number}: {line}" for number, line in lines if MACHINE_PATH.search(line)]
