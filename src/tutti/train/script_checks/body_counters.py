"""Find code of a custom loop that runs in every n-th body, which is no n-th global batch where bodies are several."""

from __future__ import annotations

import ast
import linecache
import re
from collections.abc import Iterator
from functools import cache
from types import FrameType

from tutti.python_compat import calling_frame
from tutti.train.script_checks.skipped_bodies import parsed_source

_METHOD = "microbatches"
_EDITS = re.compile("grad|clip|noise", re.IGNORECASE)
"""Parts of names in code that edits gradients (a guess)."""


def counting_condition() -> str:
    """Return the ``if`` of the script, as ``FILE:LINE``, by which the running code runs in some bodies of a loop alone.

    Such an ``if`` is in a loop over ``run.microbatches`` and tests the remainder of a number that counts the loop's
    bodies: the number of ``enumerate``, or a variable that every body adds a constant to. A variable that is counted
    under an ``if``, such as ``if run.stepped``, does not count bodies. Returns an empty text for other code.
    """
    for file, line, loop in _running_loops():
        for each in _conditions(loop):
            if any(_has(child, line) for child in each.body) and _takes_remainder(each.test, _counters(loop)):
                return f"{file}:{each.lineno}"
    return ""


def edit_condition() -> str:
    """Return the ``if`` of the script, as ``FILE:LINE``, by which a running loop edits gradients in some bodies alone.

    The ``if`` tests the remainder of a number that counts the loop's bodies, as in ``counting_condition``, and there is
    a name in it that tells of gradients: ``.grad``, ``clip_grad_norm_``, ``add_noise``. An empty text if there is none.
    """
    for file, _, loop in _running_loops():
        for each in _conditions(loop):
            names = {word for child in each.body for word in _words(child)}
            if _takes_remainder(each.test, _counters(loop)) and any(_EDITS.search(name) for name in names):
                return f"{file}:{each.lineno}"
    return ""


def break_out_of_loop() -> tuple[str, bool]:
    """Return the ``break`` or ``return`` by which the script leaves a loop over micro-batches at this moment.

    Returns:
        A pair: the statement as ``FILE:LINE``, an empty text for an exception or another end of the loop; and whether
        it is under an ``if`` that compares a number that counts the loop's bodies.
    """
    for file, line, loop in _running_loops():
        exits = (each for each in ast.walk(loop) if isinstance(each, ast.Break | ast.Return) and each.lineno == line)
        for leaves in exits:
            around = [each for each in _conditions(loop) if any(_has(child, leaves.lineno) for child in each.body)]
            tests = [node for each in around for node in ast.walk(each.test) if isinstance(node, ast.Compare)]
            counted = any(_named(part) in _counters(loop) for test in tests for part in ast.walk(test))
            return f"{file}:{line}", counted
    return "", False


def _running_loops() -> Iterator[tuple[str, int, ast.For]]:
    """Yield the loops over ``microbatches`` that are running, innermost first, with their files and present lines."""
    frame: FrameType | None = calling_frame(1)
    while frame is not None:
        file, line = frame.f_code.co_filename, frame.f_lineno
        for loop in _loops(file):
            if _has(loop, line):
                yield file, line, loop
        frame = frame.f_back


def _conditions(loop: ast.For) -> Iterator[ast.If]:
    return (each for each in ast.walk(loop) if isinstance(each, ast.If))


def _words(node: ast.AST) -> Iterator[str]:
    """Yield the names of variables and attributes in a statement."""
    for each in ast.walk(node):
        if isinstance(each, ast.Name):
            yield each.id
        elif isinstance(each, ast.Attribute):
            yield each.attr


def _named(node: ast.AST) -> str:
    """Return the text of a variable or an attribute, such as ``self.count``; an empty text for another expression."""
    return ast.unparse(node) if isinstance(node, ast.Name | ast.Attribute) else ""


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
            case ast.AugAssign(target=ast.Name() | ast.Attribute() as target, op=ast.Add(), value=ast.Constant()):
                found.add(_named(target))
    return found


def _takes_remainder(test: ast.expr, names: set[str]) -> bool:
    """Return whether a condition tests the remainder of one of these numbers."""
    remainders = (each for each in ast.walk(test) if isinstance(each, ast.BinOp) and isinstance(each.op, ast.Mod))
    return any(_named(each) in names for remainder in remainders for each in ast.walk(remainder.left))


def _has(node: ast.stmt, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or node.lineno)
