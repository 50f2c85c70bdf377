"""Nothing ties the project to one machine."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.architecture.sources import ROOT

FOLDERS = ("src", "tests", "examples", "benchmarks", "docs")
CODE = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
TEXT = sorted(path for folder in FOLDERS for end in ("*.md", "*.toml") for path in (ROOT / folder).rglob(end))
TOP = [path for path in ROOT.iterdir() if path.suffix in {".md", ".toml", ".txt"} or path.name == "Makefile"]

# Written in two halves each, because this file is searched too.
MACHINE_PATH = re.compile(r"(?<![\w.])/(?:" + "|".join(("root", "tmp", "home", "work", "Users")) + r")/")


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", CODE + TEXT + TOP, ids=_name)
def test_no_absolute_machine_paths(path: Path) -> None:
    lines = enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
    assert not [f"{number}: {line}" for number, line in lines if MACHINE_PATH.search(line)]
