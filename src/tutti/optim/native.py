"""The passes of ``passes.py`` as compiled loops: every number is read from memory once a pass. CPU, float and double.

``kernels.cpp`` is compiled on the machine where it runs (``tutti.native``). Results do not depend on the number of
threads, the compiler or the processor; from PyTorch's own operations they differ by rounding. Without a compiler those
are used.
"""

from __future__ import annotations

import ctypes
import hashlib
from array import array
from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tutti.native import library as compiled
from tutti.optim.passes import Adam, AdamStep, Decayed, Momentum, Squares, Tensors, dense_format

_SOURCE = Path(__file__).with_name("kernels.cpp")
_NAMES = {torch.float32: "float", torch.float64: "double"}


class Native:
    """The passes for tensors of one dtype, each dense and in its parameter's layout (``layout``)."""

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._chunk = int(library.chunk_size())
        self._passes = {name: _typed(library, f"{name}_{_NAMES[dtype]}") for name in _PASSES}

    def squares(self, grads: Tensors) -> list[float]:
        return [square for _, square in self._run("squares", (None, grads), ())]

    def decayed_squares(self, params: Tensors, grads: Tensors, options: Sequence[Decayed]) -> Squares:
        return self._run("decayed_squares", (params, grads), options)

    def momentum(self, params: Tensors, grads: Tensors, buffers: Tensors | None, options: Sequence[Momentum]) -> None:
        self._run("momentum", (params, grads, buffers), options)

    def adam_squares(
        self, params: Tensors, grads: Tensors, firsts: Tensors, seconds: Tensors, options: Sequence[Adam]
    ) -> Squares:
        return self._run("adam_squares", (params, grads, firsts, seconds), options)

    def adam_step(self, params: Tensors, firsts: Tensors, seconds: Tensors, options: Sequence[AdamStep]) -> None:
        self._run("adam_step", (params, None, firsts, seconds), options)

    def _run(self, name: str, lists: tuple[Tensors | None, ...], options: Sequence[Sequence[float]]) -> Squares:
        sizes = [t.numel() for t in lists[0] or lists[1] or ()]
        count = len(sizes)
        zeros = (0,) * count
        columns = [zeros if column is None else [t.data_ptr() for t in column] for column in lists]
        columns += [zeros] * (4 - len(columns))
        addresses = array("q", [number for row in zip(*columns, sizes, strict=True) for number in row])
        first = array("q", accumulate((-(-size // self._chunk) for size in sizes), initial=0))
        numbers = array("d", [number for row in options for number in row])
        partial, result = array("d", bytes(16 * first[-1])), array("d", bytes(16 * count))
        self._passes[name](
            count, _at(addresses), _at(first), torch.get_num_threads(), _at(numbers), _at(partial), _at(result)
        )
        return list(zip(result[::2], result[1::2], strict=True))


_PASSES = ("squares", "decayed_squares", "momentum", "adam_squares", "adam_step")


def passes(parameter: Tensor) -> Native | None:
    """The compiled passes for this parameter and what belongs to it, or None where there are none."""
    plain = type(parameter) in (Tensor, nn.Parameter) and parameter.device.type == "cpu"
    if plain and parameter.dtype in _NAMES and dense_format(parameter) is not None:
        return _all().get(parameter.dtype)
    return None


def key() -> int:
    """What two processes must have in common to get the same bits: the source's hash; 0 without kernels."""
    return int.from_bytes(hashlib.sha256(_SOURCE.read_bytes()).digest()[:7]) if _all() else 0


@cache
def _all() -> dict[torch.dtype, Native]:
    library = load()
    return {} if library is None else {dtype: Native(library, dtype) for dtype in _NAMES}


def load() -> ctypes.CDLL | None:
    """The compiled ``kernels.cpp``; None where it cannot be compiled."""
    library = compiled(_SOURCE)
    if library is not None:
        library.chunk_size.restype = ctypes.c_int64
    return library


def _typed(library: ctypes.CDLL, name: str) -> Any:
    function = library[name]
    pointer = ctypes.c_void_p
    function.argtypes = [ctypes.c_int64, pointer, pointer, ctypes.c_int, pointer, pointer, pointer]
    function.restype = None
    return function


def _at(numbers: array[Any]) -> int:
    return numbers.buffer_info()[0]
