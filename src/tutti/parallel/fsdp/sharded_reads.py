"""Explain PyTorch's errors about sharded parameters in the script's own code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from tutti.errors import TuttiError, UsageError, script_line

_WORDS = ("DTensor", "placement", "tensor subclasses")
"""Words of PyTorch's errors about a ``DTensor`` that an operation cannot take."""


class ShardedReads:
    """Turns PyTorch's errors about ``DTensor`` parameters into a ``UsageError``, up to the first update of a run.

    A script that calls layers past the model's forward, or mixes parameters with plain tensors, does so in its first
    step. Later steps pay nothing.
    """

    def __init__(self) -> None:
        self._over = False

    def end(self) -> None:
        """Stop: the first update has been made."""
        self._over = True

    @contextmanager
    def script_code(self) -> Iterator[None]:
        """Return a context around the user's code in which errors about sharded parameters are explained.

        Raises:
            UsageError: an operation cannot take the parameters as they are outside of the model's forward.
        """
        if self._over:
            yield
            return
        with _ErrorMode():
            yield


class _ErrorMode(TorchFunctionMode):
    """Sees the errors of all calls of PyTorch by the script and the model."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return func(*args, **(kwargs or {}))
        except TuttiError:
            raise
        except Exception as error:
            if not _is_about_shards(func, args, kwargs or {}, error):
                raise
            raise UsageError(
                f"the script computes with sharded parameters as they are outside of the model's forward"
                f" ({getattr(func, '__name__', 'a function')})",
                where=script_line(),
                why="each rank has some rows of them there, in a DTensor, which PyTorch cannot combine with plain"
                f" tensors or views: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
                remedy="call the model itself and no layer of it, take gradients by run.backward, shard plain tensors"
                " alike (torch.distributed.tensor.distribute_tensor), or take --strategy sharded:stage=1 or mirrored",
            ) from error


def _is_about_shards(func: Any, args: Any, kwargs: Any, error: Exception) -> bool:
    text = str(error)
    if any(word in text for word in _WORDS):
        return True
    if func is torch.autograd.grad:
        return "not have been used in the graph" in text
    given = (
        v for value in chain(args, kwargs.values()) for v in (value if isinstance(value, tuple | list) else [value])
    )
    return isinstance(error, NotImplementedError) and any(isinstance(value, DTensor) for value in given)
