"""Find, in a script's source, conditions on numbers of all samples of a micro-batch that decide on the loss."""

from __future__ import annotations

import ast
from functools import cache
from typing import TypeAlias

from tutti.errors import is_script_file
from tutti.nn.script_mode import is_function_mode
from tutti.train.script_checks.loss_flow import LossFlow
from tutti.train.script_checks.script_source import calling_frames, has_line, parsed_source, source_nodes

_READS = frozenset(("item", "float", "int", "tolist", "numpy"))
"""Names of functions and methods that return the values of a tensor."""
_ARITHMETIC = frozenset(("float", "int", "abs", "min", "max", "round"))
"""Functions whose result counts as a number of the samples if an argument does."""
_FINITE = frozenset(("inf", "nan", "isnan", "isinf", "isfinite"))
"""Words of conditions that guard against values that are not finite."""
_TINY = 1e-6
"""Largest number that counts as 0 in a comparison, as in ``count > 1e-8`` before a division (a guess)."""
Stack: TypeAlias = tuple[tuple[str, int], ...]
"""Lines of a script, each as (file, line), that call one another: the innermost first."""


def script_stack() -> Stack:
    """Return the lines of the script on the call stack, from the line that calls PyTorch outwards.

    The last one is in the function that tutti has called, such as the loss function; in a custom loop, the outermost
    line of the script. Lines of the model's forward are included.
    """
    found: list[tuple[str, int]] = []
    for frame in calling_frames():
        file = frame.f_code.co_filename
        if is_script_file(file):
            # Code without a table of lines has none.
            found.append((file, frame.f_lineno or 0))
        elif found and str(frame.f_globals.get("__name__")).startswith("tutti.") and not is_function_mode(frame):
            break
    return tuple(found)


def deciding_condition(stack: Stack, is_bool: bool) -> str:
    """Return the line that reads a number of the samples on which a condition decides the loss; "" if there is none.

    A condition is a comparison with another number than 0, such as ``if loss.item() > 2``. Conditions that ask whether
    there are any samples of a kind (``> 0``), or whether values are finite, decide on no loss that is right otherwise.
    The search follows variables through the statements of a function up to its ``return``, then those of its caller,
    up to the ``backward`` of a loop or the function that tutti has called.

    Args:
        stack: what ``script_stack`` has returned where the script has read the number.
        is_bool: whether it was read as a condition, as by ``if loss > 2``.

    Returns:
        The line of the read as ``FILE:LINE``.
    """
    if any("site-packages" in file for file, _ in stack[:1]):
        return ""
    for level, (file, line) in enumerate(stack):
        numbers = _ReadNumbers(line, is_bool) if level == 0 else _Called(line)
        found = _sink(file, line, numbers)
        if found is None:
            return ""
        if found:
            break
    return "{}:{}".format(*stack[0]) if stack else ""


def _sink(file: str, line: int, numbers: _ReadNumbers | _Called) -> bool | None:
    """Return whether the numbers of a line decide on a ``backward`` (True) or on what its function returns (False)."""
    function = _function(file, line)
    if isinstance(function, ast.Lambda):
        return False if numbers.decide(function.body) else None
    flow = LossFlow(numbers)
    flow.follow(parsed_source(file).body if function is None else function.body)
    if flow.line or function is None:
        return True if flow.line else None
    flow = LossFlow(numbers, returns=True)
    flow.follow(function.body)
    return False if flow.line else None


@cache
def _function(file: str, line: int) -> ast.FunctionDef | ast.Lambda | None:
    """Return the innermost function of a source file that has a line; None for a line of the module itself."""
    nodes = (each for each in source_nodes(file) if isinstance(each, ast.FunctionDef | ast.Lambda))
    # Of nested functions ast.walk yields the innermost last.
    around = [each for each in nodes if has_line(each, line)]
    return around[-1] if around else None


class _ReadNumbers:
    """Numbers that a line reads of the samples, and those that are computed from them (``DecidingNumbers``).

    Args:
        line: the line.
        is_bool: whether the line reads a condition, such as ``if loss > 2``.
    """

    def __init__(self, line: int, is_bool: bool) -> None:
        self._line, self._is_bool, self._names = line, is_bool, set[str]()

    def decide(self, node: ast.AST) -> bool:
        """Return whether an expression compares one of the numbers with another number than 0."""
        # A comparison within a call, such as ``(labels == 1).any()``, is by element.
        calls = (each for each in ast.walk(node) if isinstance(each, ast.Call | ast.BinOp | ast.Subscript))
        within = {id(inner) for each in calls for inner in ast.walk(each)}
        # In ``epoch > 3 and mask.any()`` the value that was read need not be the comparison's.
        parts = [part for each in ast.walk(node) if isinstance(each, ast.BoolOp) for part in each.values]
        sure = all(isinstance(each, ast.Compare | ast.BoolOp) for each in parts)
        sure = sure and not any(isinstance(each, ast.Compare) and _asks_for_any(each) for each in parts)
        compares = (each for each in ast.walk(node) if isinstance(each, ast.Compare))
        return any(self._compares(each, whole=sure and id(each) not in within) for each in compares)

    def _compares(self, node: ast.Compare, whole: bool) -> bool:
        if _asks_for_any(node):
            return False
        sides = [node.left, *node.comparators]
        return any(map(self._is_number, sides)) or (self._is_bool and whole and has_line(node, self._line))

    def _is_number(self, node: ast.expr) -> bool:
        """Return whether an expression is one of the numbers, or computed from one."""
        match node:
            case ast.Name(id=name):
                return name in self._names
            case ast.BinOp(left=left, right=right):
                return self._is_number(left) or self._is_number(right)
            case ast.UnaryOp(operand=operand):
                return self._is_number(operand)
            case ast.Subscript(value=value):
                return self._is_number(value)
            case ast.Call(func=ast.Attribute(attr=name)) if name in _READS:
                return has_line(node, self._line) and not self._is_bool
            case ast.Call(func=ast.Name(id=name), args=args) if name in _ARITHMETIC:
                return (name in _READS and has_line(node, self._line)) or any(map(self._is_number, args))
        return False

    def assign(self, target: ast.expr, value: ast.expr) -> None:
        """Follow an assignment: a variable counts as a number of the samples while its value is computed from one."""
        pairs = [(target, value)]
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
            pairs = list(zip(target.elts, value.elts, strict=True))
        for each, own in pairs:
            if isinstance(each, ast.Name):
                (self._names.add if self._is_number(own) else self._names.discard)(each.id)


class _Called:
    """The result of a function in a line, on which conditions within the function decide (``DecidingNumbers``).

    Args:
        line: the line.
    """

    def __init__(self, line: int) -> None:
        self._line = line

    def decide(self, node: ast.AST) -> bool:
        """Return whether an expression has a call in the line."""
        return any(isinstance(each, ast.Call) and has_line(each, self._line) for each in ast.walk(node))

    def assign(self, target: ast.expr, value: ast.expr) -> None:
        """Do nothing: ``LossFlow`` follows the variables on which the function's result decides."""


def _asks_for_any(node: ast.Compare) -> bool:
    """Return whether a comparison asks whether there are samples of a kind, or whether values are finite."""
    words = {getattr(each, "attr", getattr(each, "id", "")) for each in ast.walk(node)}
    sides = [node.left, *node.comparators]
    constants = [each.value for each in sides if isinstance(each, ast.Constant)]
    zero = any(each is None or (isinstance(each, int | float) and abs(each) <= _TINY) for each in constants)
    one = any(isinstance(each, ast.Constant) and each.value == 1 for each in node.comparators)
    is_any = zero or (one and isinstance(node.ops[0], ast.GtE | ast.Lt))
    same = len({ast.unparse(each) for each in sides}) < len(sides)
    identity = any(isinstance(each, ast.Is | ast.IsNot | ast.In | ast.NotIn) for each in node.ops)
    texts = any(isinstance(each, ast.Constant) and each.value in ("inf", "nan") for each in ast.walk(node))
    return is_any or same or identity or texts or not words.isdisjoint(_FINITE)
