"""Basenames, public classes and public functions are unique in the package, so that grep finds one thing."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

from tests.architecture.sources import SOURCE
from tutti.cli.app import build_app

SKIPPED = {"__init__.py", "__main__.py"}
MIRRORS = {"horovod"}
"""Rooms that repeat the public functions and classes of another library."""


def files() -> list[Path]:
    """Every module that defines names."""
    return [path for path in sorted(SOURCE.rglob("*.py")) if path.name not in SKIPPED]


def own_names() -> list[Path]:
    """Every module whose public names the project has chosen."""
    return [path for path in files() if path.relative_to(SOURCE).parts[0] not in MIRRORS]


def repeated(names: dict[str, list[str]]) -> dict[str, list[str]]:
    return {name: places for name, places in names.items() if len(places) > 1}


def test_every_basename_is_unique() -> None:
    names = defaultdict(list)
    for path in files():
        names[path.stem].append(str(path.relative_to(SOURCE)))
    assert repeated(names) == {}


def test_every_public_class_and_function_is_unique() -> None:
    names = defaultdict(list)
    for path in own_names():
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            public = isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            if public and not node.name.startswith("_"):
                names[node.name].append(str(path.relative_to(SOURCE)))
    assert repeated(names) == {}


def test_a_command_has_a_file_of_its_name() -> None:
    named = {path.stem.removesuffix("_command") for path in (SOURCE / "cli").glob("*_command.py")}
    commands = {name for name in build_app() if not name.startswith("-")}
    assert named - {"loss_law"} == commands, "loss_law_command.py answers `tutti plan --law`"
