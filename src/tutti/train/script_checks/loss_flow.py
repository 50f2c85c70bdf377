"""Follow, in a script's source, the variables on whose values a condition on a number decides, up to the loss."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from typing import Protocol


class DecidingNumbers(Protocol):
    """Protocol of numbers of a script, such as the counters of a loop, whose comparisons ``LossFlow`` looks for."""

    def decide(self, node: ast.AST) -> bool:
        """Return whether an expression of the script decides by one of the numbers, such as by a comparison with it."""

    def assign(self, target: ast.expr, value: ast.expr) -> None:
        """Follow an assignment of the script: if its value is computed from one of the numbers, its target is one, too.

        Args:
            target: the variable, attribute or element that is assigned.
            value: the expression whose value it gets.
        """


class LossFlow:
    """Follows variables on whose values a condition on a number decides, through a loop's body or a function to a loss.

    Args:
        numbers: the numbers, such as the loop's counters.
        returns: whether a value that a function returns counts as the loss.
        off: lines of ``if`` statements whose branch never runs.

    Attributes:
        line: number of the line of the first ``backward`` (with ``returns`` also the first ``return``) whose value
            depends on such a variable, or which is under a condition on a number; 0 until one is found.
    """

    def __init__(self, numbers: DecidingNumbers, returns: bool = False, off: frozenset[int] = frozenset()) -> None:
        self._numbers, self._decided, self._returns, self._off = numbers, set[str](), returns, off
        self.line = 0

    def follow(self, statements: Iterable[ast.stmt], conditional: bool = False) -> bool:
        """Follow variables that conditions on the numbers decide through statements, and set ``line`` at a loss.

        Args:
            statements: statements of a loop's body or of a function, in their order.
            conditional: whether a condition on a number decides if they run at all; each variable that they assign then
                counts as decided by it.

        Returns:
            Whether a condition on a number decides if the statements after these run, because of a ``continue``.
        """
        for each in statements:
            match each:
                case ast.Assign(targets=targets, value=value):
                    self._note_calls(value, conditional)
                    for target in targets:
                        self._assign(target, value, conditional)
                case (
                    ast.AugAssign(target=target, value=value) | ast.AnnAssign(target=target, value=ast.expr() as value)
                ):
                    is_decided = conditional or self._depends(value)
                    is_decided |= isinstance(each, ast.AugAssign) and self._depends(target)
                    self._assign(target, value, is_decided)
                case ast.If():
                    conditional = self._follow_if(each, conditional)
                case ast.For() | ast.While() | ast.With() | ast.Try():
                    for part in ("body", "handlers", "orelse", "finalbody"):
                        inner = getattr(each, part, [])
                        conditional |= self.follow((s for s in inner if isinstance(s, ast.stmt)), conditional)
                case ast.Continue():
                    return conditional
                case ast.Return(value=ast.expr() as value) if self._returns:
                    if conditional or any(map(self._depends, _losses_of(value))):
                        self.line = self.line or each.lineno
                case ast.Expr():
                    self._note_calls(each, conditional)
        return conditional

    def _follow_if(self, statement: ast.If, conditional: bool) -> bool:
        if statement.lineno in self._off:
            return self.follow(statement.orelse, conditional)
        decides = self._numbers.decide(statement.test) or self._depends(statement.test)
        before, skips = set(self._decided), False
        for branch in (statement.body, statement.orelse):
            after, self._decided = self._decided, set(before)
            self.follow(branch, conditional or decides)
            skips |= decides and any(isinstance(each, ast.Continue) for each in branch)
            self._decided |= after - before
        return conditional or skips

    def _assign(self, target: ast.expr, value: ast.expr, conditional: bool) -> None:
        self._numbers.assign(target, value)
        is_decided = conditional or self._depends(value)
        for name in _targets(target):
            (self._decided.add if is_decided else self._decided.discard)(name)

    def _depends(self, value: ast.expr) -> bool:
        read = {ast.unparse(each) for each in ast.walk(value) if _is_variable(each)}
        return self._numbers.decide(value) or not self._decided.isdisjoint(read)

    def _note_calls(self, node: ast.AST, conditional: bool) -> None:
        for each in ast.walk(node):
            match each:
                case ast.Call(func=ast.Attribute(value=loss, attr="backward"), args=arguments):
                    # A loss is the argument of run.backward, and the object of its own method.
                    if conditional or self._depends(loss) or any(map(self._depends, arguments[:1])):
                        self.line = self.line or each.lineno


def _losses_of(returned: ast.expr) -> list[ast.expr]:
    """Return the losses of a returned tuple: variables named ``…loss…``, or else its first value."""
    if not isinstance(returned, ast.Tuple):
        return [returned]
    named = [each for each in returned.elts if _is_variable(each) and "loss" in ast.unparse(each).lower()]
    return named or returned.elts[:1]


def _targets(target: ast.expr) -> Iterator[str]:
    """Yield the variables that an assignment changes; attributes and ``state["best"]`` are variables of their own."""
    if _is_variable(target):
        yield ast.unparse(target)
    elif isinstance(target, ast.Tuple | ast.List):
        for each in target.elts:
            yield from _targets(each)
    else:
        yield from (each.id for each in ast.walk(target) if isinstance(each, ast.Name))


def _is_variable(node: ast.AST) -> bool:
    """Return whether an expression is a variable, an attribute, or a value by a name, such as ``state["best"]``."""
    match node:
        case ast.Name() | ast.Attribute() | ast.Subscript(slice=ast.Constant(value=str())):
            return True
    return False
