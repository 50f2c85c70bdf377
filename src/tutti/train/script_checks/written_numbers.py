"""Tell numbers that a script has written into an expression, such as ``losses[:12]``, from numbers it has computed."""

from __future__ import annotations

import argparse
import ast
import operator
from collections.abc import Callable, Iterator
from functools import cache
from types import FrameType
from typing import TypeAlias

from tutti.python_compat import local_variables
from tutti.train.script_checks.script_source import script_frames, source_nodes

_Place: TypeAlias = tuple[int | None, int | None, int | None, int | None]
_OPERATORS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}
_DEPTH = 4
"""How many names that are assigned by one another are followed (a guess)."""
_EXPRESSIONS = ast.BinOp, ast.AugAssign, ast.Compare, ast.Subscript, ast.Call


def written_numbers() -> frozenset[float]:
    """Return the numbers that the script has written into the expression which calls PyTorch now.

    A written number is the same for each batch, where a computed one may be the number of samples: in ``losses[:12]``
    and ``total / (2 * BATCH)`` the script has written 12 and, if ``BATCH = 24`` is all that the file assigns to the
    name, 48; in ``total / len(x)`` it has written none. Options of the command line, such as ``args.batch_size``, count
    as written.

    Returns:
        The numbers; none for code of installed packages, and where the source cannot be read.
    """
    frame = next(script_frames(), None)
    if frame is None or "site-packages" in frame.f_code.co_filename:
        return frozenset()
    file, place = frame.f_code.co_filename, list(frame.f_code.co_positions())[frame.f_lasti // 2]
    values = (_value(each, file, frame) for node in _nodes(file).get(place, ()) for each in _operands(node))
    return frozenset(value for value in values if value is not None)


@cache
def _nodes(file: str) -> dict[_Place, list[ast.AST]]:
    """Return the expressions of a source file that may call PyTorch with numbers, by their places in the file."""
    found: dict[_Place, list[ast.AST]] = {}
    for node in source_nodes(file):
        if isinstance(node, _EXPRESSIONS):
            found.setdefault((node.lineno, node.end_lineno, node.col_offset, node.end_col_offset), []).append(node)
    return found


def _operands(node: ast.AST) -> Iterator[ast.expr | None]:
    """Yield the expressions whose values a function of PyTorch gets."""
    match node:
        case ast.BinOp(left=left, right=right):
            yield from (left, right)
        case ast.AugAssign(value=value):
            yield value
        case ast.Compare(left=left, comparators=others):
            yield from (left, *others)
        case ast.Call(args=args, keywords=keywords):
            yield from (*args, *(each.value for each in keywords))
        case ast.Subscript(slice=key):
            for each in key.elts if isinstance(key, ast.Tuple) else [key]:
                yield from (each.lower, each.upper, each.step) if isinstance(each, ast.Slice) else (each,)


def _value(node: ast.expr | None, file: str, frame: FrameType, depth: int = _DEPTH) -> float | None:
    """Return the number that an expression has written; None for a computed number, and for other values.

    Args:
        node: the expression.
        file: its source file.
        frame: the frame that computes it.
        depth: how many names that are assigned by one another are followed.
    """
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            number = _value(operand, file, frame, depth)
            return None if number is None else -number
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            one, other = _value(left, file, frame, depth), _value(right, file, frame, depth)
            if one is None or other is None or (not other and isinstance(op, ast.Div | ast.FloorDiv)):
                return None
            return _OPERATORS[type(op)](one, other)
        case ast.Name(id=name) if depth:
            values = _assigned(file).get(name, [None])
            return _value(values[0], file, frame, depth - 1) if len(values) == 1 else None
        case ast.Attribute(value=ast.Name(id=name), attr=attribute):
            options = local_variables(frame).get(name, frame.f_globals.get(name))
            option = vars(options).get(attribute) if isinstance(options, argparse.Namespace) else None
            return option if isinstance(option, int | float) and not isinstance(option, bool) else None
    return None


@cache
def _assigned(file: str) -> dict[str, list[ast.expr | None]]:
    """Return the values that a source file binds to each name; None for one that is no plain assignment's."""
    found: dict[str, list[ast.expr | None]] = {}
    plain = dict[int, ast.expr]()
    for node in source_nodes(file):
        match node:
            case ast.Assign(targets=targets, value=value):
                pairs = [pair for target in targets for pair in _pairs(target, value)]
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                pairs = [(target, value)]
            case ast.arg(arg=name) | ast.alias(asname=str() as name) | ast.alias(name=name):
                found.setdefault(name, []).append(None)
                continue
            case _:
                continue
        plain |= {id(target): value for target, value in pairs}
    for node in source_nodes(file):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.setdefault(node.id, []).append(plain.get(id(node)))
    return found


def _pairs(target: ast.expr, value: ast.expr) -> list[tuple[ast.expr, ast.expr]]:
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
        return list(zip(target.elts, value.elts, strict=True))
    return [(target, value)]
