"""A run is complete when its constructor returns (``docs/decisions/018``)."""

from __future__ import annotations

import ast

from tests.architecture.sources import modules


def test_preparation_sets_no_attribute_of_what_it_has_made() -> None:
    tree = ast.parse(modules()["tutti.train.prepare"].read_text(encoding="utf-8"))
    stores = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)]
    assert [ast.unparse(node) for node in stores] == [], "pass it to the constructor"
