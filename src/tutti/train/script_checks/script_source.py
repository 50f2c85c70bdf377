"""Read the source files of a script as syntax trees, for checks that search them for a statement."""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterator
from functools import cache


@cache
def parsed_source(file: str) -> ast.Module:
    """Return the syntax tree of a source file; an empty one if it cannot be read.

    Args:
        file: its path, or the name of a notebook's cell.
    """
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError, RecursionError):
        return ast.Module([], [])


@cache
def source_nodes(file: str) -> tuple[ast.AST, ...]:
    """Return all nodes of the syntax tree of a source file, in the order of ``ast.walk``, which takes 20 ms and more.

    Args:
        file: its path, or the name of a notebook's cell.
    """
    return tuple(ast.walk(parsed_source(file)))


def has_line(node: ast.AST, line: int) -> bool:
    """Return whether a statement or an expression of a syntax tree spans a line; False for nodes without lines.

    Args:
        node: the node.
        line: number of the line in the source file, from 1.
    """
    return isinstance(node, ast.stmt | ast.expr) and node.lineno <= line <= (node.end_lineno or node.lineno)


def words_in(node: ast.AST) -> Iterator[str]:
    """Yield the names of variables and attributes in a part of a syntax tree.

    Args:
        node: the part.
    """
    for each in ast.walk(node):
        if isinstance(each, ast.Name):
            yield each.id
        elif isinstance(each, ast.Attribute):
            yield each.attr
