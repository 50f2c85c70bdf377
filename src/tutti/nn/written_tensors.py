"""Function modes that see writes to a tensor in place."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from tutti.nn.absent_tensor import METADATA
from tutti.nn.swap import parameters

DATA: Any = Tensor.data.__get__  # type: ignore[attr-defined]
"""The function that a read of ``tensor.data`` calls; its result shares the tensor's memory and not its version."""

_NAMES = frozenset(("__set__", "__setitem__", *(f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "pow"))))


def may_write(func: Any) -> bool:
    """Return whether a function of PyTorch may write its first argument in place, judged by the function's name.

    True for names that end in ``_``, for in-place operators such as ``__iadd__``, for ``__setitem__``, for functions
    that set an attribute of a tensor, such as ``requires_grad``, and for the read of ``tensor.data``, whose result may
    be written unseen.

    Args:
        func: the function, as ``__torch_function__`` is given it.
    """
    name = getattr(func, "__name__", "")
    return func == DATA or name in _NAMES or (name.endswith("_") and not name.startswith("__"))


def parameters_unwritten(parts: Iterable[nn.Module]) -> AbstractContextManager[Any]:
    """Return a context in which code that would write a parameter in place raises RuntimeError before the write.

    For forwards that must leave the model as it is. Compiled code is not seen.

    Args:
        parts: modules with the parameters.
    """
    return _NoWrites(parameter for _, parameter in parameters(list(parts)))


class _NoWrites(TorchFunctionMode):
    """Function mode that raises RuntimeError where code would write one of these parameters in place.

    Args:
        parameters: the parameters.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__()
        self._watched: Any = WeakIdKeyDictionary(dict.fromkeys(parameters, True))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # Dynamo traces this mode with the code that it compiles.
        if torch.compiler.is_compiling() or func in METADATA or not (args and may_write(func)):
            return func(*args, **kwargs)
        written = args[0] if isinstance(args[0], tuple | list) else args[:1]
        if not any(isinstance(each, Tensor) and each in self._watched for each in written):
            return func(*args, **kwargs)
        if func != DATA:
            raise RuntimeError("the forward writes a parameter")
        data = func(*args)
        self._watched[data] = True
        return data
