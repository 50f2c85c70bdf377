"""Refuse code of the script that reads a split parameter as if it were whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import chain
from types import FrameType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from tutti.errors import UsageError
from tutti.nn.absent_tensor import METADATA
from tutti.nn.sync import peers_of
from tutti.nn.untouched import untouched
from tutti.parallel.tensor.tp_layers import TensorParallelLayer
from tutti.python_compat import calling_frame
from tutti.torch_compat import function_mode_depth, module_parameters

_ELEMENTWISE = frozenset(
    (
        *("abs", "add", "addcdiv", "addcmul", "bfloat16", "clamp", "clamp_max", "clamp_min", "clip", "clone"),
        *("contiguous", "copy", "detach", "div", "divide", "double", "empty_like", "exp", "fill", "float"),
        *("full_like", "half", "lerp", "log", "maximum", "minimum", "mul", "multiply", "nan_to_num", "neg"),
        *("negative", "ones_like", "pow", "reciprocal", "relu", "rsqrt", "sgn", "sign", "sqrt", "square"),
        *("sub", "subtract", "to", "true_divide", "truediv", "type", "zero", "zeros_like"),
    )
)
"""Names of functions whose result on slices is the slice of their result, without ``_foreach_`` and underscores."""

_SAMPLES = 2
"""Samples of the trial of the forward."""

_DATA = {Tensor.data.__get__, Tensor.data.__set__}  # type: ignore[attr-defined]


class SplitReads:
    """Refuses what the script computes from split parameters, unless slices give the slice of the result.

    Elementwise functions are allowed (an average of weights, weights clamped in place), and so are metadata; a norm, a
    sum or a product with a matrix is not. Results of elementwise functions count as split, too.

    Args:
        split: parameters of which this rank has a slice, by name.
    """

    def __init__(self, split: Mapping[str, nn.Parameter]) -> None:
        self._mode = _ReadMode(split)
        self._depth = 0  # of the mode on PyTorch's stack; 0 while it is not there
        self._watching = False
        self._paused = 0

    @contextmanager
    def script_code(self) -> Iterator[None]:
        """Return a context around the user's code in which reads of split parameters that would be wrong raise.

        Elementwise functions are allowed. Within a context that is already open it does nothing. It may stay open over
        the body of a custom training loop, between two calls of a generator.

        Raises:
            UsageError: the script computes something from a split parameter that needs the whole parameter.
        """
        if self._watching:
            yield
            return
        self._watching = True
        self._push()
        try:
            yield
        finally:
            self._watching = False
            self._pop()

    @contextmanager
    def model_code(self) -> Iterator[None]:
        """Return a context, to be entered within ``script_code``, in which every read of a split parameter is allowed.

        For code that handles slices correctly: the model's forward, a backward, an optimizer's update.
        """
        self._paused += 1
        self._pop()
        try:
            yield
        finally:
            self._paused -= 1
            self._push()

    def _push(self) -> None:
        if not self._watching or self._paused:
            return
        self._mode.quiet = False
        if not self._depth:
            self._mode.__enter__()  # type: ignore[no-untyped-call]
            self._depth = function_mode_depth()

    def _pop(self) -> None:
        if self._depth and function_mode_depth() == self._depth:
            self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._depth = 0
        else:
            # A mode of the script lies above this mode, which therefore stays on the stack.
            self._mode.quiet = True


class _ReadMode(TorchFunctionMode):
    """Sees every call of PyTorch by the script."""

    def __init__(self, split: Mapping[str, nn.Parameter]) -> None:
        super().__init__()
        self.quiet = False
        self._names: Any = WeakIdKeyDictionary({parameter: name for name, parameter in split.items()})

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = None if self.quiet or func in METADATA else self._name_in(args, kwargs)
        if name is None or _in_tutti():
            return func(*args, **kwargs)
        if not _is_elementwise(func) and func is not torch.autograd.grad:
            if _in_layer_or_optimizer():
                return func(*args, **kwargs)
            _refuse(name)
        result = func(*args, **kwargs)
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor):
                self._names.setdefault(tensor, name)
        return result

    def _name_in(self, args: Any, kwargs: Any) -> str | None:
        """Return the name of the first split parameter among the arguments, or None."""
        return next((name for tensor in _tensors(args, kwargs) if (name := self._names.get(tensor)) is not None), None)


class _ForwardReads(TorchFunctionMode):
    """Finds modules of a model whose parameters another module's forward reads.

    Args:
        plain: the whole model.

    Attributes:
        names: of the modules found.
    """

    def __init__(self, plain: nn.Module) -> None:
        super().__init__()
        self.names: set[str] = set()
        self._modules = {id(module) for module in plain.modules()}
        self._owners: dict[int, dict[int, str]] = {}
        for name, module in plain.named_modules():
            for parameter in module_parameters(module).values():
                if parameter is not None:
                    self._owners.setdefault(id(parameter), {})[id(module)] = name

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in METADATA:
            for tensor in _tensors(args, kwargs):
                if (owners := self._owners.get(id(tensor))) is not None and self._is_outside(owners):
                    self.names |= set(owners.values())
        return func(*args, **kwargs)

    def _is_outside(self, owners: Mapping[int, str]) -> bool:
        """Return whether a forward of the model calls that is neither an owner's nor one of ``torch.nn``."""
        callers = [frame.f_locals.get("self") for frame in _frames()]
        modules = [caller for caller in callers if id(caller) in self._modules]
        if not modules or any(id(reader) in owners for reader in modules):
            return False
        return not type(modules[0]).__module__.startswith("torch.nn.")


def read_elsewhere(plain: nn.Module, trial: Callable[..., Any] | None, device: torch.device) -> list[str]:
    """Return the names of modules whose parameters another module's forward reads, and which therefore stay whole.

    Found by running the loss function on two samples; empty without ``trial``, and with ``SyncBatchNorm``.

    Args:
        plain: the whole model; it stays as it was.
        trial: ``trial(model, most)`` calls the loss function on a model with at most ``most`` samples of the data; None
            where no data is at hand.
        device: device of the trial.
    """
    if trial is None or peers_of(plain) is not None:
        return []
    mode = _ForwardReads(plain)
    # The first step reports any error.
    with suppress(Exception), untouched(plain, device), mode:
        trial(plain, _SAMPLES)
    return sorted(mode.names)


def _tensors(args: Any, kwargs: Any) -> Iterator[Tensor]:
    """Yield the tensors among the arguments, and in lists of them."""
    for value in chain(args, kwargs.values()):
        for tensor in value if isinstance(value, tuple | list) else (value,):
            if isinstance(tensor, Tensor):
                yield tensor


def _is_elementwise(func: Callable[..., Any]) -> bool:
    if func in _DATA:
        return True
    name: str = getattr(func, "__name__", "")
    base = name.removeprefix("_foreach_").strip("_")
    # Operators: __add__, __radd__ and __iadd__.
    return base in _ELEMENTWISE or (name.startswith("__") and base[1:] in _ELEMENTWISE)


def _frames() -> Iterator[FrameType]:
    """Yield the frames of the call, without those of this module, from the innermost."""
    frame: FrameType | None = calling_frame(1)
    while frame is not None:
        if frame.f_globals.get("__name__") != __name__:
            yield frame
        frame = frame.f_back


def _in_tutti() -> bool:
    """Return whether tutti, not the script, calls PyTorch."""
    for frame in _frames():
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package not in ("torch", "contextlib"):
            return package == "tutti"
    return False


def _in_layer_or_optimizer() -> bool:
    """Return whether a split layer computes, or an optimizer, whose update tutti has tried on slices."""
    return any(
        isinstance(frame.f_locals.get("self"), TensorParallelLayer | torch.optim.Optimizer) for frame in _frames()
    )


def _refuse(name: str) -> NoReturn:
    raise UsageError(
        f"the script reads {name}, of which each tensor rank has a slice",
        why="outside of its layer a penalty, norm or product of a slice is not that of the whole parameter",
        remedy="take weight_decay of the optimizer for a penalty on weights and run.state() for figures of whole"
        f" weights, leave the layer whole by tensor:whole={name.rpartition('.')[0]}, or take --strategy mirrored or"
        " sharded:stage=2",
    )
