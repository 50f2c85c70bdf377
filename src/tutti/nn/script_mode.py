"""A function mode over the script's own code, which is off while tutti's code and the model compute."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache
from itertools import chain
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tutti.nn.owned_hooks import OwnedHook
from tutti.python_compat import calling_frame, local_variables
from tutti.torch_compat import TorchFunctionDisabled, calls_forward, top_function_mode

SIZES = frozenset(
    (
        *(Tensor.shape.__get__, Tensor.nbytes.__get__, Tensor.size, Tensor.numel, Tensor.nelement, Tensor.__len__),  # type: ignore[attr-defined]
        torch.numel,
    )
)
"""Functions that return a tensor's sizes."""

DRAWS = frozenset(
    (
        *("uniform_", "normal_", "bernoulli_", "exponential_", "cauchy_", "geometric_", "log_normal_", "random_"),
        *("rand_like", "randn_like", "randint_like", "bernoulli", "multinomial", "normal", "dropout", "trunc_normal_"),
    )
)
"""Names of functions that draw random numbers for each element."""

_ELEMENTWISE = frozenset(
    (
        *("abs", "add", "addcdiv", "addcmul", "bfloat16", "clamp", "clamp_max", "clamp_min", "clip", "clone"),
        *("contiguous", "copy", "cpu", "detach", "div", "divide", "double", "empty_like", "exp", "fill"),
        *("float", "float_power", "full_like", "half", "lerp", "log", "masked_fill", "maximum", "minimum", "mul"),
        *("multiply", "nan_to_num", "neg", "negative", "ones_like", "pow", "reciprocal", "relu", "round", "rsqrt"),
        *("sgn", "sigmoid", "sign", "sqrt", "square", "sub", "subtract", "tanh", "to", "true_divide", "truediv"),
        *("type", "zero", "zeros_like"),
    )
)
"""Names of functions whose result on a part of a tensor is that part of their result, without ``_foreach_`` and
underscores."""

_PASSED_BY = frozenset(("torch", "torch._tensor", "torch.overrides", "torch._dynamo.eval_frame"))
"""Modules of PyTorch between a call of one of ``SIZES`` and the function mode."""

_ENTERED: list[ScriptMode] = []
"""``ScriptMode`` objects whose modes are on PyTorch's stack of this thread, from the outermost."""

_ASIDE: list[list[ScriptMode]] = []
"""For each open context of ``modes_aside`` the modes that it has turned off; [] for one of ``modes_resumed``."""


class QuietMode(TorchFunctionMode, ABC):
    """A torch function mode that passes every call on unchanged while its attribute ``quiet`` is True.

    ``torch.compile`` does not compile the mode's own code: functions that it would trace under an active mode run
    eagerly, and the mode sees them.

    Attributes:
        quiet: whether the mode passes every call on, as if it were not active. Set by ``ScriptMode``; subclasses'
            ``see`` must obey it.
    """

    quiet = False

    def __init__(self) -> None:
        super().__init__()
        self._untraced = _untraced()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.compiler.is_compiling():
            return self._untraced(self, func, args, kwargs or {})
        return self.see(func, args, kwargs or {})

    @abstractmethod
    def see(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Handle a call of a function of PyTorch under this torch function mode, and return its result.

        Abstract; called for each call of PyTorch while the mode is active. Subclasses call ``func(*args, **kwargs)``,
        check the call or change its result. While the attribute ``quiet`` is True they pass the call on unchanged.

        Args:
            func: the function, as ``__torch_function__`` is given it.
            args, kwargs: its arguments.
        """


@cache
def _untraced() -> Any:
    return torch.compiler.disable(_see)


def _see(mode: QuietMode, func: Any, args: Any, kwargs: Any) -> Any:
    return mode.see(func, args, kwargs)


class ScriptMode:
    """Makes a torch function mode active within ``script_code``, and inactive within ``model_code`` inside of it.

    The mode then handles the calls of PyTorch by the script alone, and not those by tutti and the model.

    Args:
        mode: the mode, which must pass calls on unchanged while it is ``quiet``.
    """

    def __init__(self, mode: QuietMode) -> None:
        self._mode = mode
        self._watching = False
        self._paused = 0
        self._in_forward = ExitStack()

    @contextmanager
    def script_code(self) -> Iterator[None]:
        """Return a context manager around the script's code, in which this object's torch function mode is active.

        The mode sees each call of PyTorch there, for example to check reads and writes of parameters.

        If such a context is already open, and ``model_code`` has not been entered since, the new one does nothing. The
        context may stay open over the body of a custom training loop, between two calls of a generator, or as long as
        the run exists.
        """
        if self._watching and not self._paused:
            yield
            return
        before = self._watching, self._paused
        self._watching, self._paused = True, 0
        self.turn_on()
        try:
            yield
        finally:
            self._watching, self._paused = before
            self.turn_off()

    @contextmanager
    def model_code(self) -> Iterator[None]:
        """Return a context manager within which this object's torch function mode is off, inside of ``script_code``.

        After the context the mode sees calls of PyTorch again. Used around code that handles slices and shards of
        tensors correctly: the model's forward, a backward, an optimizer's update.
        """
        self._paused += 1
        self.turn_off()
        try:
            yield
        finally:
            self._paused -= 1
            self.turn_on()

    def leave_forwards(self, roots: Iterable[nn.Module]) -> None:
        """Turn the function mode off during each forward of these modules from now on, as ``model_code`` does.

        Registers a forward pre-hook and a forward hook on each module, which act as long as this object exists.

        Args:
            roots: the modules that the script calls.
        """
        for root in roots:
            root.register_forward_pre_hook(OwnedHook(self._begin_forward), prepend=True)
            root.register_forward_hook(OwnedHook(self._end_forward), always_call=True)

    def _begin_forward(self, *_: Any) -> None:
        self._in_forward.close()
        self._in_forward.enter_context(self.model_code())

    def _end_forward(self, *_: Any) -> None:
        self._in_forward.close()

    @property
    def is_quiet(self) -> bool:
        """Whether this object's function mode is turned off: it passes every call of PyTorch on unchanged."""
        return self._mode.quiet

    def turn_on(self) -> None:
        """Turn this object's function mode on again after ``turn_off``: put it on PyTorch's stack of function modes.

        Does nothing outside of ``script_code``, and where a ``model_code`` has been entered since the innermost
        ``script_code``.
        """
        if not self._watching or self._paused:
            return
        self._mode.quiet = False
        if self not in _ENTERED:
            self._mode.__enter__()  # type: ignore[no-untyped-call]
            _ENTERED.append(self)

    def turn_off(self) -> None:
        """Turn this object's function mode off: from now on it passes all calls of PyTorch on unchanged.

        The mode also leaves PyTorch's stack of function modes. If another mode lies above it on the stack, it stays
        there, turned off, until ``turn_on`` turns it on again in its place, or ``turn_off`` of any ``ScriptMode`` finds
        it on top and removes it.
        """
        # A mode of the script, or of a later run, may lie above this mode, which then stays on the stack.
        self._mode.quiet = True
        while _ENTERED and _ENTERED[-1]._mode.quiet and top_function_mode() is _ENTERED[-1]._mode:
            _ENTERED.pop()._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]


def modes_aside() -> AbstractContextManager[None]:
    """Return a context in which the function mode of every ``ScriptMode`` of this thread is off.

    Used around tutti's code in a step of a run that has no function mode itself: modes that other runs have left on
    would handle each call of PyTorch, though they do not watch this run's model. After the context the modes that were
    on before are on again.
    """
    return _turned_off(active) if (active := [each for each in _ENTERED if not each.is_quiet]) else nullcontext()


def modes_resumed() -> AbstractContextManager[None]:
    """Return a context in which the function modes that the innermost ``modes_aside`` has turned off are on again.

    Used around the script's own code, such as a loss function, inside of a ``modes_aside``. After the context the modes
    are off again. Outside of ``modes_aside``, and inside of another ``modes_resumed``, it does nothing.
    """
    return _turned_on(_ASIDE[-1]) if _ASIDE and _ASIDE[-1] else nullcontext()


def modes_entered() -> bool:
    """Return whether the function mode of any ``ScriptMode`` is on PyTorch's stack, so that calls of PyTorch cost more.

    A mode that is turned off but still on the stack, below another mode, counts.
    """
    return bool(_ENTERED)


@contextmanager
def _turned_off(active: list[ScriptMode]) -> Iterator[None]:
    for each in reversed(active):
        each.turn_off()
    _ASIDE.append(active)
    try:
        yield
    finally:
        _ASIDE.pop()
        for each in active:
            each.turn_on()


@contextmanager
def _turned_on(active: list[ScriptMode]) -> Iterator[None]:
    for each in active:
        each.turn_on()
    _ASIDE.append([])
    try:
        yield
    finally:
        _ASIDE.pop()
        for each in reversed(active):
            each.turn_off()


def asked_by_script(mode: str) -> bool:
    """Return whether the PyTorch function that a function mode handles was called by the script, and not by tutti.

    To be called within ``__torch_function__`` of the mode. Looks at the callers on the stack: True if the first one
    outside of the mode belongs to the script, to one of its libraries or to ``torch.nn.init``; False for other code of
    PyTorch and for tutti.

    Args:
        mode: name of the module that defines the function mode.
    """
    frame: FrameType | None = calling_frame(1)
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module not in _PASSED_BY and module not in (mode, __name__) and not is_function_mode(frame):
            return module == "torch.nn.init" or module.partition(".")[0] not in ("torch", "tutti", "contextlib")
        frame = frame.f_back
    return False


def is_function_mode(frame: FrameType) -> bool:
    """Return whether a stack frame runs code of a torch function mode, and not the code that made the handled call.

    True for every function named ``__torch_function__``, and for methods of a ``QuietMode``. A search for the caller of
    a PyTorch function passes over such frames.

    Args:
        frame: the frame.
    """
    return frame.f_code.co_name == "__torch_function__" or isinstance(self_of(frame), QuietMode)


def self_of(frame: FrameType) -> Any:
    """Return the object whose method a frame runs; None if the frame runs no method.

    A function counts as a method if its first argument is named ``self``, and also, under any name of the argument, if
    it is the method ``step`` of the argument's class, as of an optimizer. The local variables of other functions are
    not read, because Python copies all of them to read one.

    Args:
        frame: the frame.
    """
    code = frame.f_code
    if code.co_varnames[:1] == ("self",):
        return local_variables(frame).get("self")
    if code.co_name != "step" or not code.co_argcount:
        return None
    first = local_variables(frame).get(code.co_varnames[0])

    def runs(method: Any) -> bool:
        return getattr(method, "__code__", None) is code

    methods = (vars(kind)["step"] for kind in type(first).__mro__ if "step" in vars(kind))
    return first if any(runs(inspect.unwrap(method, stop=runs)) for method in methods) else None


def within_call_of(modules: Sequence[nn.Module]) -> bool:
    """Return whether the code that runs now was called, directly or not, by the forward of one of the modules.

    Args:
        modules: the modules.
    """
    frame: FrameType | None = calling_frame(1)
    while frame is not None:
        if calls_forward(frame) and any(self_of(frame) is each for each in modules):
            return True
        frame = frame.f_back
    return False


def tutti_caller(mode: str) -> FrameType | None:
    """Return the frame of tutti's code that has called the PyTorch function which a function mode handles, or None.

    To be called within ``__torch_function__`` of the mode. None if the script, or a library other than PyTorch, called.

    Args:
        mode: name of the module that defines the function mode.
    """
    frame: FrameType | None = calling_frame(1)
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        package = module.partition(".")[0]
        if module not in (mode, __name__) and package not in ("torch", "contextlib") and not is_function_mode(frame):
            return frame if package == "tutti" else None
        frame = frame.f_back
    return None


def acts_by_element(func: Any) -> bool:
    """Return whether a function of PyTorch computes each element from elements at the same place, judged by its name.

    Its result on a part of a tensor, such as a slice or some rows, is then that part of its result on the whole. Called
    where a script computes with a part of a parameter: other functions, such as norms, are refused. Operators count
    (``__add__``, ``__radd__``, ``__iadd__``), and so do functions of lists such as ``_foreach_mul_``.

    Args:
        func: the function, as ``__torch_function__`` is given it.
    """
    return _is_elementwise(getattr(func, "__name__", ""))


@cache
def _is_elementwise(name: str) -> bool:
    base = name.removeprefix("_foreach_").strip("_")
    return base in _ELEMENTWISE or (name.startswith("__") and base[1:] in _ELEMENTWISE)


def is_of_lists(func: Any) -> bool:
    """Return whether a PyTorch function works on whole lists of tensors: whether its name begins with ``_foreach``.

    Such a function, for example ``torch._foreach_mul_(xs, ys)``, computes with the first tensors of its lists, with the
    second ones, and so on.

    Args:
        func: any callable, such as the function that ``__torch_function__`` is given; False if it has no ``__name__``.
    """
    return str(getattr(func, "__name__", "")).startswith("_foreach")


def by_place(args: Sequence[Any], change: Callable[[tuple[Any, ...]], Sequence[Any]]) -> tuple[Any, ...]:
    """Apply ``change`` to the elements at each index of a function's list arguments, and return the changed arguments.

    Args:
        args: the function's arguments; its lists and tuples must be equally long. Arguments that are no list or tuple
            stay.
        change: called with a tuple of the lists' elements at one index; returns a sequence of as many replacements.

    Returns:
        The arguments in their order, each list or tuple replaced by a list.

    Raises:
        ValueError: the lists differ in length.

    >>> by_place(([1, 2], [10, 20], 0.5), lambda pair: (pair[0], sum(pair)))
    ([1, 2], [11, 22], 0.5)
    """
    lists = [each for each in args if isinstance(each, tuple | list)]
    rows = list(zip(*map(change, zip(*lists, strict=True)), strict=True)) or lists
    found = iter(rows)
    return tuple(list(next(found)) if isinstance(each, tuple | list) else each for each in args)


def tensors_among(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """Yield the tensors among the arguments of a function of PyTorch, and directly in lists and tuples among them.

    Tensors in deeper nesting, or in dictionaries, are left out.

    Args:
        args, kwargs: arguments as ``__torch_function__`` is given them.
    """
    for value in chain(args, kwargs.values()):
        for tensor in value if isinstance(value, tuple | list) else (value,):
            if isinstance(tensor, Tensor):
                yield tensor


def size_of_whole(func: Any, whole: Sequence[int], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call a function that returns a tensor's sizes, as if the given tensor had the shape ``whole``.

    Called where a script asks a slice or some rows of a parameter for their size, so that it computes as with the whole
    one. The function gets a tensor of this shape and of the given tensor's dtype, without memory, and its result is
    returned: an int, or a ``torch.Size``.

    Args:
        func: the function, a member of ``SIZES`` such as ``Tensor.size`` or ``torch.numel``.
        whole: shape of the whole parameter of which the given tensor is a part.
        args, kwargs: arguments of the call; the tensor is the first, or ``input``.
    """
    given = args[0] if args else kwargs["input"]
    with TorchFunctionDisabled():
        on_meta = torch.empty(tuple(whole), dtype=given.dtype, device="meta")
    return func(on_meta, *args[1:], **{key: value for key, value in kwargs.items() if key != "input"})
