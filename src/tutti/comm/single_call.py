"""Functions whose call is a single one for torch function modes, as are the calls of PyTorch's own functions."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch.overrides import handle_torch_function

from tutti.torch_compat import function_modes_active

P = ParamSpec("P")
Result = TypeVar("Result")


def single_call(function: Callable[P, Result]) -> Callable[P, Result]:
    """Wrap a function so that an active ``TorchFunctionMode`` sees its call, and no call of PyTorch within it.

    For collectives, and for models that compute on several ranks. Their messages pass through buffers that all
    micro-batches use: a mode that traces values from call to call would see values of different micro-batches mixed
    there. With the wrapper the mode gets the arguments and the result of the whole call. Without an active mode, and
    while ``torch.compile`` traces, the wrapper only calls the function.

    Args:
        function: the function, or a method of a class.

    Returns:
        The wrapper, which is the ``func`` of the modes' ``__torch_function__``.
    """

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> Result:
        if torch.compiler.is_compiling() or not function_modes_active():
            return function(*args, **kwargs)
        result: Result = handle_torch_function(call, (), *args, **kwargs)
        return result

    return call
