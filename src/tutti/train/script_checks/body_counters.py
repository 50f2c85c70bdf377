"""Find code of a custom loop that runs in every n-th body, which is no n-th global batch where bodies are several."""

from __future__ import annotations

import ast
import linecache
from functools import cache
from types import FrameType

from tutti.python_compat import calling_frame
from tutti.train.script_checks.skipped_bodies import parsed_source

_METHOD = "microbatches"


def counting_condition() -> str:
    """Return the ``if`` of the script, as ``FILE:LINE``, by which the running code runs in some bodies of a loop alone.

    Such an ``if`` is in a loop over ``run.microbatches`` and tests the remainder of a number that counts the loop's
    bodies: the number of ``enumerate``, or a variable that every body adds a constant to. A variable that is counted
    under an ``if``, such as ``if run.stepped``, does not count bodies. Returns an empty text for other code.
    """
    frame: FrameType | None = calling_frame(1)
    while frame is not None:
        file, line = frame.f_code.co_filename, frame.f_lineno
        for loop in _loops(file):
            conditions = (each for each in ast.walk(loop) if isinstance(each, ast.If)) if _has(loop, line) else ()
            for each in conditions:
                if any(_has(child, line) for child in each.body) and _takes_remainder(each.test, _counters(loop)):
                    return f"{file}:{each.lineno}"
        frame = frame.f_back
    return ""


@cache
def _loops(file: str) -> list[ast.For]:
    """Return the loops over ``microbatches`` in a source file."""
    if not any(_METHOD in line for line in linecache.getlines(file)):
        # To parse a library takes tenths of a second.
        return []
    loops = (node for node in ast.walk(parsed_source(file)) if isinstance(node, ast.For))
    return [loop for loop in loops if any(_is_method(each) for each in ast.walk(loop.iter))]


def _is_method(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == _METHOD


def _counters(loop: ast.For) -> set[str]:
    """Return the names of numbers that each body of a loop counts up."""
    found = set[str]()
    match loop:
        case ast.For(target=ast.Tuple(elts=[ast.Name(id=name), *_]), iter=ast.Call(func=ast.Name(id="enumerate"))):
            found.add(name)
    for each in loop.body:
        match each:
            case ast.AugAssign(target=ast.Name(id=name), op=ast.Add(), value=ast.Constant()):
                found.add(name)
    return found


def _takes_remainder(test: ast.expr, names: set[str]) -> bool:
    """Return whether a condition tests the remainder of one of these numbers."""
    remainders = (each for each in ast.walk(test) if isinstance(each, ast.BinOp) and isinstance(each.op, ast.Mod))
    return any(
        isinstance(each, ast.Name) and each.id in names for remainder in remainders for each in ast.walk(remainder.left)
    )


def _has(node: ast.stmt, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or node.lineno)
