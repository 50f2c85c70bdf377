"""Giving an object another class is the exception, in the modules that ``docs/decisions/023`` argues for."""

from __future__ import annotations

import ast

from tests.architecture.sources import ROOT, modules

ALLOWED = {
    "tutti.nn.absent_tensor",
    "tutti.nn.ac_and_compile",
    "tutti.parallel.pipeline.virtual_stage",
    "tutti.parallel.tensor.tp_layers",
    "tutti.train.schedulers",
}


def assigns_a_class(tree: ast.AST) -> bool:
    """Whether ``tree`` gives an object another class.

    >>> [assigns_a_class(ast.parse(code)) for code in ("a.__class__ = b", "setattr(a, '__class__', b)")]
    [True, True]
    >>> assigns_a_class(ast.parse("kind = a.__class__"))
    False
    """
    return any(
        (isinstance(node, ast.Attribute) and node.attr == "__class__" and isinstance(node.ctx, ast.Store))
        or (isinstance(node, ast.Constant) and node.value == "__class__")
        for node in ast.walk(tree)
    )


def test_classes_are_assigned_where_a_record_says_why() -> None:
    texts = {name: path.read_text(encoding="utf-8") for name, path in modules().items()}
    found = {name for name, text in texts.items() if "__class__" in text and assigns_a_class(ast.parse(text))}
    assert found == ALLOWED
    record = (ROOT / "docs" / "decisions" / "023-where-classes-are-assigned.md").read_text(encoding="utf-8")
    assert all(f"`{name.removeprefix('tutti.').replace('.', '/')}.py`" in record for name in ALLOWED)
