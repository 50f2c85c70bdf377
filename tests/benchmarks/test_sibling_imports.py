"""A script in benchmarks imports from other scripts only names that these have."""

from __future__ import annotations

import ast
from pathlib import Path

SCRIPTS = {path.stem: path for path in (Path(__file__).parents[2] / "benchmarks").glob("*.py")}


def names(tree: ast.Module) -> set[str]:
    found = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in node.names}
    return found


def test_scripts_import_names_that_other_scripts_have() -> None:
    trees = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in SCRIPTS.items()}
    known = {name: names(tree) for name, tree in trees.items()}
    wrong = [
        f"{name}.py: from {node.module} import {alias.name}"
        for name, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module in known
        for alias in node.names
        if alias.name not in known[node.module]
    ]
    assert not wrong
