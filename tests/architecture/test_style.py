"""Nothing ties the project to one machine."""

from __future__ import annotations

import re

from tests.architecture.sources import ROOT

FOLDERS = ("src", "tests", "examples", "benchmarks", "docs")
CODE = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
TEXT = sorted(path for folder in FOLDERS for end in ("*.md", "*.toml") for path in (ROOT / folder).rglob(end))
TOP = [path for path in ROOT.iterdir() if path.suffix in {".md", ".toml", ".txt"} or path.name == "Makefile"]

# Written in two halves each, because this file is searched too.
MACHINE_PATH = re.compile(r"(?<![\w.])/(?:" + "|".join(("root", "tmp", "home", "work", "Users")) + r")/")


def test_no_absolute_machine_paths() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line}"
        for path in CODE + TEXT + TOP
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if MACHINE_PATH.search(line)
    ]
    assert not found
