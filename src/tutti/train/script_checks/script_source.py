"""Read a running script: its frames, the values of its variables, its constants, and the syntax trees of its files."""

from __future__ import annotations

import ast
import linecache
from collections import deque
from collections.abc import Iterator
from functools import cache
from types import FrameType
from typing import Any

from tutti.errors import is_script_file
from tutti.python_compat import calling_frame, local_variables
from tutti.train.script_checks.python_state import is_of_script

_FEW = 64
"""Most elements of a container that is searched (a guess)."""
_CONTAINERS = (list, tuple, dict, deque)


def calling_frames() -> Iterator[FrameType]:
    """Yield the frames of the call stack outwards, beginning with the caller of the function that iterates over them.

    The function must iterate over this generator itself: within another generator the frames begin one call further in.
    """
    frame: FrameType | None = calling_frame(2)
    while frame is not None:
        yield frame
        frame = frame.f_back


def script_frames() -> Iterator[FrameType]:
    """Yield the frames of the script's functions that are running, the innermost first."""
    return (frame for frame in calling_frames() if is_script_file(frame.f_code.co_filename))


def script_values() -> Iterator[Any]:
    """Yield the values of the variables of the script's functions that are running, and of what these hold.

    The variables are local, enclosing and global ones. Of their values the elements of small containers and the
    attributes of objects of the script's classes are yielded, too, one level deep.
    """
    seen = set[int]()
    of_script = dict[type, bool]()
    for frame in script_frames():
        values = list(local_variables(frame).values())
        if id(frame.f_globals) not in seen:
            seen.add(id(frame.f_globals))
            values += frame.f_globals.values()
        for value in values:
            yield value
            kind = type(value)
            if kind in _CONTAINERS:
                if len(value) <= _FEW:
                    yield from list(value.values() if kind is dict else value)
                continue
            if kind not in of_script:
                of_script[kind] = is_of_script(kind)
            if of_script[kind]:
                yield from list(getattr(value, "__dict__", {}).values())


def script_constants() -> tuple[Any, ...]:
    """Return the constants (``co_consts``) of the script's code that runs now, in the innermost frame of the script.

    They tell numbers that stand in the source from numbers that the script has computed. An empty tuple if no frame of
    the stack is the script's.
    """
    innermost = next(script_frames(), None)
    return () if innermost is None else innermost.f_code.co_consts


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
    """Return all nodes of the syntax tree of a source file, in the order of ``ast.walk``; the file is walked once.

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
