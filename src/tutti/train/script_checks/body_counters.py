"""Find, in the source of a custom loop, conditions on a number that counts runs of the loop's body.

A rank with several micro-batches runs the body once for each. ``if number % 8 == 0`` then holds in every 8th run of the
body, and not in every 8th global batch as in plain PyTorch.
"""

from __future__ import annotations

import ast
import inspect
import linecache
import re
from collections.abc import Iterator
from functools import cache
from itertools import dropwhile
from types import FrameType, FunctionType, MethodType
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from tutti.train.script_checks.loss_flow import LossFlow
from tutti.train.script_checks.script_source import calling_frames, has_line, source_nodes, words_in
from tutti.train.script_checks.shared_settings import SETTINGS

_METHOD = "microbatches"
_EDITS = re.compile("grad|clip|noise", re.IGNORECASE)
"""Parts of names in code that edits gradients (a guess)."""
_GENERATORS = frozenset(("Random", "RandomState", "default_rng"))
"""Names of functions that make generators of Python and NumPy."""
_SETS_STATE = frozenset(("seed", "setstate", "set_state", "bit_generator"))
"""Names of attributes of these by which a script seeds them or sets their states."""
_SEEDS = frozenset(("seed", "manual_seed", "set_seed", "seed_everything"))
"""Names of functions that seed generators."""
_NUMBERS = frozenset(("len", "next", "int", "float", "min", "max", "abs", "round"))
"""Functions whose result counts as a counter if an argument is one."""


def counting_condition() -> str:
    """Find the ``if`` around the script's present line that is true in every n-th run of a loop's body only.

    Such an ``if`` is in a loop over ``run.microbatches`` and tests the remainder of a number that each run of the
    loop's body increases. A number that is increased under an ``if``, such as ``if run.stepped``, does not count.

    Returns:
        The ``if`` as ``FILE:LINE``; an empty text for none.
    """
    for file, line, loop in _running_loops():
        for each in _conditions(loop):
            if any(has_line(child, line) for child in each.body) and _counters(loop, file).takes_remainder(each.test):
                return f"{file}:{each.lineno}"
    return ""


def edit_condition() -> str:
    """Find an ``if`` by which a running loop edits gradients in every n-th run of its body only.

    The ``if`` tests the remainder of a number that counts runs, as in ``counting_condition``, and code under it has a
    name that suggests an edit of gradients: ``.grad``, ``clip_grad_norm_``, ``add_noise``.

    Returns:
        The ``if`` as ``FILE:LINE``; an empty text for none.
    """
    for file, _, loop in _running_loops():
        for each in _conditions(loop):
            names = {word for child in each.body for word in words_in(child)}
            if _counters(loop, file).takes_remainder(each.test) and any(_EDITS.search(name) for name in names):
                return f"{file}:{each.lineno}"
    return ""


def counted_seed() -> str:
    """Find a call in a running loop that seeds a generator by a number which each run of the loop's body increases.

    Returns:
        The call as ``FILE:LINE``; an empty text for none.
    """
    for file, _, loop in _running_loops():
        calls = (each for each in ast.walk(loop) if isinstance(each, ast.Call) and _SEEDS & {*words_in(each.func)})
        for call in calls:
            if any(map(_counters(loop, file).are_in, (*call.args, *call.keywords))):
                return f"{file}:{call.lineno}"
    return ""


def setting_condition(updates: int) -> str:
    """Find code of a running loop that sets learning rates or freezes parameters by a number that counts runs.

    The code steps a PyTorch scheduler, assigns an optimizer's setting (``SETTINGS``) or ``requires_grad``, or calls a
    function of the script that does. It is found if it is under an ``if`` on a number that each run of the loop's body
    increases, such as ``if number in milestones``, or if it is a call with the number as argument. Conditions that only
    the first run can meet, such as ``if number == 0``, do not count.

    Args:
        updates: number of updates of the run. A scheduler that has made as many steps counts updates, and is not
            found.

    Returns:
        The ``if`` or the call as ``FILE:LINE``; an empty text for none.
    """
    for frame, loop in _looping_frames():
        file = frame.f_code.co_filename
        counters, names = _counters(loop, file), {**frame.f_globals, **frame.f_locals}
        for each in _conditions(loop):
            found = (_sets(child, names, updates) for child in (*each.body, *each.orelse))
            if counters.decide_later(each.test) and any(found):
                return f"{file}:{each.lineno}"
        for call in (each for each in ast.walk(loop) if isinstance(each, ast.Call)):
            if any(map(counters.are_passed, call.args)) and _sets(call, names, updates):
                return f"{file}:{call.lineno}"
    return ""


def _sets(node: ast.AST, names: dict[str, Any], updates: int, depth: int = 2) -> bool:
    """Return whether code sets a setting of an optimizer, or freezes parameters, itself or in functions that it calls.

    Args:
        node: the code.
        names: the values of the variables that it reads.
        updates: number of updates of the run.
        depth: how many functions in one another are searched.
    """
    for each in ast.walk(node):
        match each:
            case ast.Assign(targets=targets) if any(map(_is_setting, targets)):
                return True
            case ast.AugAssign(target=target) if _is_setting(target):
                return True
            case ast.Call(func=ast.Attribute(attr="requires_grad_")):
                return True
            case ast.Call(func=function):
                called = _value_of(function, names)
                owner = getattr(called, "__self__", None)
                if isinstance(owner, LRScheduler):
                    # A step after each update is what ``if run.stepped`` says, too.
                    if called.__name__ == "step" and owner.last_epoch != updates:
                        return True
                elif depth and (body := _source_of(called)) is not None:
                    inner = {**called.__globals__} if isinstance(called, FunctionType) else {"self": owner}
                    if _sets(body, inner, updates, depth - 1):
                        return True
    return False


def _is_setting(target: ast.expr) -> bool:
    match target:
        case ast.Subscript(slice=ast.Constant(value=key)):
            return key in SETTINGS
        case ast.Attribute(attr="requires_grad"):
            return True
    return False


def _value_of(node: ast.expr, names: dict[str, Any]) -> Any:
    """Return the value of a variable, or of an attribute of one; None where this would run code, or finds nothing."""
    match node:
        case ast.Name(id=name):
            return names.get(name)
        case ast.Attribute(value=value, attr=attribute):
            owner = _value_of(value, names)
            kept = getattr(owner, "__dict__", {}).get(attribute)
            if kept is None and owner is not None and inspect.isfunction(getattr(type(owner), attribute, None)):
                return getattr(owner, attribute)
            return kept
    return None


def _source_of(function: Any) -> ast.AST | None:
    """Return the definition of a function of a script; None of anything else, as of PyTorch's and tutti's."""
    if not isinstance(function, FunctionType | MethodType):
        return None
    code, package = function.__code__, function.__module__.partition(".")[0]
    if package in ("torch", "tutti"):
        return None
    found = (each for each in source_nodes(code.co_filename) if isinstance(each, ast.FunctionDef))
    return next((each for each in found if each.name == code.co_name and has_line(each, code.co_firstlineno)), None)


def break_out_of_loop() -> tuple[str, bool]:
    """Return the ``break`` or ``return`` by which the script leaves a loop over micro-batches at this moment.

    Returns:
        A pair: the statement as ``FILE:LINE``, an empty text for an exception or another end of the loop; and whether
        it is under an ``if`` that compares a number that each run of the loop's body increases.
    """
    for file, line, loop in _running_loops():
        exits = (each for each in ast.walk(loop) if isinstance(each, ast.Break | ast.Return) and each.lineno == line)
        for leaves in exits:
            around = [each for each in _conditions(loop) if any(has_line(child, leaves.lineno) for child in each.body)]
            tests = [node for each in around for node in ast.walk(each.test) if isinstance(node, ast.Compare)]
            counted = any(map(_counters(loop, file).are_in, tests))
            return f"{file}:{line}", counted
    return "", False


def counting_loop() -> str:
    """Find a loop of the script that takes a number of micro-batches by ``next``, such as ``for _ in range(1000)``.

    To be called while the iterator of ``run.microbatches`` advances. A generator of the script that takes the
    micro-batches for the loop, such as ``cycle(loader)``, is passed over. A loop in which ``run.stepped`` or
    ``run.global_step`` is read counts updates, and is not found.

    Returns:
        The loop as ``FILE:LINE``; an empty text for none.
    """
    for frame in dropwhile(_is_of_tutti, calling_frames()):
        file, line = frame.f_code.co_filename, frame.f_lineno
        is_generator = bool(frame.f_code.co_flags & inspect.CO_GENERATOR)
        if not is_generator or ("site-packages" not in file and not _yields_all(file, line)):
            nodes = (each for each in source_nodes(file) if isinstance(each, ast.For | ast.While))
            around = sorted((each for each in nodes if has_line(each, line)), key=lambda each: each.lineno)
            header = around and isinstance(around[-1], ast.For) and line <= (around[-1].iter.end_lineno or line)
            counts_updates = {"stepped", "global_step"} & {word for each in around for word in words_in(each)}
            if around and not header and not counts_updates:
                return f"{file}:{around[-1].lineno}" if _is_numbered(around[-1]) else ""
        if not is_generator:
            return ""
    return ""


def _yields_all(file: str, line: int) -> bool:
    """Return whether a line of a generator is in a ``yield from``, which takes as many items as there are."""
    return any(isinstance(each, ast.YieldFrom) and has_line(each, line) for each in source_nodes(file))


def _is_numbered(loop: ast.For | ast.While) -> bool:
    """Return whether a loop ends by a number: over a ``range``, or while a comparison holds."""
    if isinstance(loop, ast.While):
        return isinstance(loop.test, ast.Compare)
    calls = (each for each in ast.walk(loop.iter) if isinstance(each, ast.Call))
    return any(ast.unparse(each.func).rpartition(".")[2] in ("range", "trange") for each in calls)


def _running_loops() -> Iterator[tuple[str, int, ast.For]]:
    """Yield the loops over ``microbatches`` that are running, innermost first, with their files and present lines."""
    for frame, loop in _looping_frames():
        yield frame.f_code.co_filename, frame.f_lineno, loop


def _looping_frames() -> Iterator[tuple[FrameType, ast.For]]:
    """Yield the loops over ``microbatches`` that are running, innermost first, with their frames.

    Yields:
        A frame, and the syntax tree of the loop in its source.
    """
    for frame in calling_frames():
        for loop in _loops(frame.f_code.co_filename):
            if has_line(loop, frame.f_lineno):
                yield frame, loop


def _is_of_tutti(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).partition(".")[0] == "tutti"


def _conditions(loop: ast.For) -> Iterator[ast.If]:
    return (each for each in ast.walk(loop) if isinstance(each, ast.If))


def counted_loss(draws: bool) -> str:
    """Find a ``backward`` in a loop of the script whose loss depends on a number that counts runs of the loop's body.

    To be called while the iterator of the ``for`` loop advances. A loss depends on the number if it is computed from a
    comparison, remainder or floor division of it, as by ``if number % 8 == 0: loss = loss + penalty``, or if its
    ``backward`` is under such a condition. Functions that the body calls are not searched, nor is an ``if`` that a
    setting of the script switches off, such as ``if number < args.skip`` where ``args.skip`` is 0.

    Args:
        draws: whether to find losses that depend on numbers from a random generator of the script's own, too. Each run
            of the body draws another number from it, as with a counter.

    Returns:
        The ``backward`` as ``FILE:LINE``; an empty text for none.
    """
    for frame in calling_frames():
        file = frame.f_code.co_filename
        loop = None if _is_of_tutti(frame) else _loop_to_backward(file, frame.f_lineno)
        if loop and (line := _counted_backward(loop, file, draws, _switched_off(loop, file, frame))):
            return f"{file}:{line}"
    return ""


@cache
def _loop_to_backward(file: str, line: int) -> ast.For | None:
    """Return the ``for`` loop whose header is at a line, in a file that calls ``backward``; or None."""
    if not any("backward(" in each for each in linecache.getlines(file)):
        # To parse a library takes tenths of a second.
        return None
    loops = (each for each in source_nodes(file) if isinstance(each, ast.For))
    return next((each for each in loops if each.lineno <= line <= (each.iter.end_lineno or line)), None)


@cache
def _counted_backward(loop: ast.For, file: str, draws: bool, off: frozenset[int]) -> int:
    """Return the line of the ``backward`` that ``counted_loss`` looks for in a loop, without the ``if`` at ``off``."""
    flow = LossFlow(_Counters(loop, file, draws), off=off)
    flow.follow(loop.body)
    return flow.line


def _switched_off(loop: ast.For, file: str, frame: FrameType) -> frozenset[int]:
    """Return the lines of a loop's ``if`` statements that are false by settings which the loop does not change."""
    stored = {ast.unparse(each) for each in ast.walk(loop) if isinstance(getattr(each, "ctx", None), ast.Store)}
    names = {name: value for name, value in (frame.f_globals | frame.f_locals).items() if name not in stored}
    counters = _counters(loop, file)

    def is_off(test: ast.expr) -> bool:
        match test:
            case ast.BoolOp(op=ast.And(), values=parts):
                return any(map(is_off, parts))
            case ast.Compare(left=left, ops=[ast.Lt()], comparators=[bound]) if counters.are_in(left):
                # A count of bodies is never below 0.
                return _setting_of(bound, names, stored) == (0,)
            case ast.Compare(left=left, ops=[ast.IsNot()], comparators=[ast.Constant(value=None)]):
                return _setting_of(left, names, stored) == (None,)
        return _setting_of(test, names, stored) in ((None,), (0,), ("",))

    return frozenset(each.lineno for each in _conditions(loop) if is_off(each.test))


def _setting_of(node: ast.expr, names: dict[str, Any], stored: set[str]) -> tuple[Any, ...]:
    """Return, as a tuple of one, the value of a constant, or of a variable or attribute that is not in ``stored``.

    The value is a number, a text or None; an empty tuple for any other expression.
    """
    found: tuple[Any, ...] = ()
    match node:
        case ast.Constant(value=value):
            found = (value,)
        case ast.Name(id=name) if name in names:
            found = (names[name],)
        case ast.Attribute(value=owner, attr=name) if ast.unparse(node) not in stored:
            kept = getattr(_value_of(owner, names), "__dict__", {})
            found = (kept[name],) if name in kept else ()
    return found if all(isinstance(each, int | float | str | None) for each in found) else ()


@cache
def _loops(file: str) -> list[ast.For]:
    """Return the loops over ``microbatches`` in a source file."""
    if not any(_METHOD in line for line in linecache.getlines(file)):
        # To parse a library takes tenths of a second.
        return []
    loops = (node for node in source_nodes(file) if isinstance(node, ast.For))
    return [loop for loop in loops if any(_is_method(each) for each in ast.walk(loop.iter))]


def _replaced(statement: ast.AST) -> list[ast.expr]:
    """Return the variables to which a statement assigns a value that does not depend on their former one.

    Variables that are assigned a count of global batches, such as ``run.global_step``, are included in any case.
    """
    if not isinstance(statement, ast.Assign):
        return []
    read = {*words_in(statement.value)}
    counts_batches = bool({"global_step", "local_step"} & read)
    return [each for each in statement.targets if counts_batches or not {*words_in(each)} & read]


def _is_method(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == _METHOD


class _Counters:
    """The numbers that each body of a loop counts up.

    These are the number of ``enumerate``; a variable or attribute that every body adds a constant to; ``next`` of an
    ``itertools.count`` in the file, also as a member of ``zip``; and the length of a list that every body appends to.
    A variable or list that the body sets anew before, such as a denominator or the losses of its parts, does not count;
    nor does a number of ``enumerate`` that the body replaces.

    Args:
        loop: the loop.
        file: its source file.
        draws: whether numbers that every body draws from a generator of the script's own are included.
    """

    def __init__(self, loop: ast.For, file: str, draws: bool = False) -> None:
        self._names, self._lists, self._counts = set[str](), set[str](), set[str]()
        self._generators = set[str]()
        for each in source_nodes(file):
            match each:
                case ast.Assign(targets=[target], value=value) if _is_count(value):
                    self._counts.add(ast.unparse(target))
                case ast.Assign(targets=[target], value=ast.Call(func=made)) if draws and not _GENERATORS.isdisjoint(
                    words_in(made)
                ):
                    self._generators.add(ast.unparse(target))
        for each in ast.walk(loop):
            match each:
                case ast.Assign(targets=[target]):
                    self._generators.discard(ast.unparse(target))
                case ast.Attribute(value=held, attr=name) if name in _SETS_STATE:
                    self._generators.discard(ast.unparse(held))
        # Draws under an ``if``, such as ``if run.stepped``, may be made once a global batch.
        branches = [statement for each in _conditions(loop) for statement in (*each.body, *each.orelse)]
        self._seldom = {id(node) for statement in branches for node in ast.walk(statement)}
        match loop:
            case ast.For(target=ast.Tuple(elts=[ast.Name(id=name), *_]), iter=ast.Call(func=ast.Name(id="enumerate"))):
                self._names.add(name)
            case ast.For(target=ast.Tuple(elts=targets), iter=ast.Call(func=ast.Name(id="zip"), args=members)):
                pairs = zip(targets, members, strict=False)
                self._names |= {ast.unparse(target) for target, member in pairs if self._is_counting(member)}
        self._names -= {ast.unparse(target) for each in ast.walk(loop) for target in _replaced(each)}
        begun = set[str]()  # variables that each body sets anew, but for those that it reads from elsewhere
        for statement in loop.body:
            match statement:
                case (
                    ast.AugAssign(target=target)
                    | ast.Expr(value=ast.Call(func=ast.Attribute(value=target, attr="append")))
                ) if ast.unparse(target) in begun:
                    continue
                case ast.AugAssign(target=target, op=ast.Add(), value=ast.Constant(value=int() | float())):
                    self._names.add(ast.unparse(target))
                case ast.Assign(targets=[target], value=ast.BinOp(left=left, op=ast.Add(), right=ast.Constant())) if (
                    ast.unparse(left) == ast.unparse(target)
                ):
                    self._names |= {ast.unparse(target)} - begun
                case ast.Expr(value=ast.Call(func=ast.Attribute(value=target, attr="append"))):
                    self._lists.add(ast.unparse(target))
                case (
                    ast.Assign(targets=[target], value=value) | ast.AnnAssign(target=target, value=ast.expr() as value)
                ) if not isinstance(value, ast.Name | ast.Attribute | ast.Subscript):
                    begun.add(ast.unparse(target))

    def _is_counting(self, node: ast.expr) -> bool:
        return _is_count(node) or ast.unparse(node) in self._counts

    def are_in(self, node: ast.AST) -> bool:
        """Return whether an expression contains one of the numbers that each body counts up."""
        return any(self._is_counter(each) for each in ast.walk(node))

    def _is_counter(self, node: ast.AST) -> bool:
        match node:
            case ast.Call(func=ast.Name(id="next"), args=[counted]):
                return self._is_counting(counted)
            case ast.Call(func=ast.Name(id="len"), args=[counted]):
                return ast.unparse(counted) in self._lists
            case ast.Call(func=ast.Attribute(value=held)):
                return ast.unparse(held) in self._generators and id(node) not in self._seldom
            case ast.Name() | ast.Attribute():
                return ast.unparse(node) in self._names
        return False

    def takes_remainder(self, test: ast.expr) -> bool:
        """Return whether a condition tests the remainder of a number that each body counts up."""
        remainders = (each for each in ast.walk(test) if isinstance(each, ast.BinOp) and isinstance(each.op, ast.Mod))
        return any(self.are_in(each.left) for each in remainders)

    def decide(self, node: ast.AST) -> bool:
        """Return whether an expression compares a number that each body counts up, or divides it with remainder."""
        for each in ast.walk(node):
            match each:
                case ast.Compare() | ast.BinOp(op=ast.Mod() | ast.FloorDiv()) if self.are_in(each):
                    return True
        return False

    def decide_later(self, test: ast.expr) -> bool:
        """Return whether a test has a number that each body counts up, other than ``== 0`` for the first body."""
        for each in ast.walk(test):
            match each:
                case ast.Compare(left=left, ops=[ast.Eq()], comparators=[ast.Constant(value=0)]) if self._is_counter(
                    left
                ):
                    continue
                case ast.Compare() | ast.BinOp(op=ast.Mod() | ast.FloorDiv()) if self.are_in(each):
                    return True
        return False

    def are_passed(self, argument: ast.expr) -> bool:
        """Return whether an argument of a call contains a number that each body counts up, and no division of it."""
        divided = any(isinstance(each, ast.FloorDiv | ast.Mod) for each in ast.walk(argument))
        return not divided and self.are_in(argument)

    def assign(self, target: ast.expr, value: ast.expr) -> None:
        """Follow an assignment: a number that is computed from a counter is a counter, too."""
        calls = (each for each in ast.walk(value) if isinstance(each, ast.Call))
        name = ast.unparse(target)
        is_number = all(ast.unparse(each.func) in _NUMBERS or self._is_counter(each) for each in calls)
        if is_number and self.are_in(value):
            self._names.add(name)


@cache
def _counters(loop: ast.For, file: str) -> _Counters:
    """Return the numbers that each body of a loop counts up; the object is cached, and must not be changed."""
    return _Counters(loop, file)


def _is_count(node: ast.AST) -> bool:
    """Return whether an expression makes an ``itertools.count``."""
    return isinstance(node, ast.Call) and ast.unparse(node.func) in ("count", "itertools.count")
