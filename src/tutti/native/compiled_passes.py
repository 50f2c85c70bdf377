"""The passes of ``passes.py`` as compiled loops that read each element from memory once. CPU, float32 and float64.

``kernels.cpp`` is compiled on the machine where it runs (``tutti.native.native_library``). Results do not depend on the
number of threads, the compiler or the processor. Without a compiler PyTorch's own operations are used, with bitwise the
same results.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tutti.native.native_library import library as compiled
from tutti.native.passes import AdamCoefficients, AdamStep, Decayed, Momentum, Squares, Tensors, dense_format

_SOURCE = Path(__file__).with_name("kernels.cpp")
_NAMES = {torch.float32: "float", torch.float64: "double"}


class Native:
    """Compiled C++ loops that compute norms and optimizer updates of lists of dense CPU tensors of one dtype.

    The methods implement the protocol ``Passes``, as the class ``Foreach`` does by PyTorch's operators. Each tensor is
    read as one vector in the memory format of its parameter: contiguous, ``channels_last`` or ``channels_last_3d``.

    The loops get addresses, and check nothing: all lists of a call must have equal length and order, and tensors at one
    index equal shape, strides and dtype.

    Args:
        library: the shared library of ``kernels.cpp``, as ``load_kernels`` returns it.
        dtype: dtype of all tensors, float32 or float64.
    """

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._chunk = int(library.chunk_size())
        self._passes = {name: _typed(library, f"{name}_{_NAMES[dtype]}") for name in _PASSES}

    def squares(self, grads: Tensors) -> list[float]:
        """Compute the sum of squares, ‖g‖², of each tensor by one compiled loop.

        Args:
            grads: dense CPU tensors of this object's dtype, such as gradients. Nothing is checked: the loop reads as
                many elements from each tensor's address as the tensor has.

        Returns:
            One Python float for each tensor, in the order of ``grads``.
        """
        return [square for _, square in self._run("squares", (None, grads), ())]

    def scaled_squares(self, factors: Tensors, grads: Tensors) -> Squares:
        """Return ‖f·g‖² and ‖g‖² of each tensor, with a factor f for each element, in one compiled loop.

        Measurements of the noise of Adam's preconditioned gradient call this method. No tensor is written. All tensors
        are dense CPU tensors of this object's dtype, and a gradient and its factors have one shape and memory format,
        which is not checked: the loop reads plain memory.

        Args:
            factors: tensors of factors (f).
            grads: gradients (g).

        Returns:
            For each tensor the sums of squares (‖f·g‖², ‖g‖²) as two Python floats, in the order of ``grads``.
        """
        return self._run("scaled_squares", (factors, grads), ())

    def decayed_squares(self, params: Tensors, grads: Tensors, options: Sequence[Decayed]) -> Squares:
        """Return ‖w‖² and ‖d‖² of each tensor, with d = gradient·g + decay·w, in one compiled loop.

        No tensor is written. All tensors are dense CPU tensors of this object's dtype, and a parameter and its gradient
        have one shape and memory format, which is not checked: the loop reads plain memory.

        Args:
            params: parameters (w).
            grads: gradients (g).
            options: the coefficients ``gradient`` and ``decay`` of each tensor.

        Returns:
            For each tensor the sums of squares (‖w‖², ‖d‖²) as two Python floats, in the order of ``params``.
        """
        return self._run("decayed_squares", (params, grads), options)

    def momentum(self, params: Tensors, grads: Tensors, buffers: Tensors | None, options: Sequence[Momentum]) -> None:
        """Update momentum buffers and parameters of SGD-like optimizers in place, in one compiled loop.

        d = gradient·g + decay·w; b ← keep·b + take·d; w ← w − (direct·d + buffered·b + shrink·w). All tensors are dense
        CPU tensors of this object's dtype, and the tensors of one parameter have one shape and memory format, which is
        not checked: the loop reads and writes plain memory, without autograd.

        Args:
            params: parameters (w), updated in place.
            grads: gradients (g).
            buffers: momentum buffers (b), updated in place; None: as if ``buffered`` were 0.
            options: coefficients of each tensor, named as in the formula.
        """
        self._run("momentum", (params, grads, buffers), options)

    def adam_squares(
        self, params: Tensors, grads: Tensors, firsts: Tensors, seconds: Tensors, options: Sequence[AdamCoefficients]
    ) -> Squares:
        """Update Adam's moments in place by a compiled loop and return ‖w‖² and ‖u‖² of each tensor.

        u is the direction of Adam's update; the parameters are not changed.

        h = gradient·g; m ← keep1·m + take1·h; v ← keep2·v + take2·h²; u = scale1·m / (scale2·√v + eps) + decay·w. All
        tensors are dense CPU tensors of this object's dtype, and the tensors of one parameter have one shape and memory
        format, which is not checked: the loop reads and writes plain memory.

        Args:
            params: parameters (w).
            grads: gradients (g).
            firsts: first moments (m), updated in place.
            seconds: second moments (v), updated in place.
            options: coefficients of each tensor, named as in the formula.

        Returns:
            For each tensor the sums of squares (‖w‖², ‖u‖²) as two Python floats, in the order of ``params``.
        """
        return self._run("adam_squares", (params, grads, firsts, seconds), options)

    def adam_step(self, params: Tensors, firsts: Tensors, seconds: Tensors, options: Sequence[AdamStep]) -> None:
        """Update parameters in place by Adam's moments, in one compiled loop.

        u = scale1·m / (scale2·√v + eps) + decay·w; w ← w − (rate·u + shrink·w). All tensors are dense CPU tensors of
        this object's dtype, and the tensors of one parameter have one shape and memory format, which is not checked:
        the loop reads and writes plain memory, without autograd.

        Args:
            params: parameters (w), updated in place.
            firsts: first moments (m).
            seconds: second moments (v).
            options: coefficients of each tensor, named as in the formula.
        """
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


_PASSES = ("squares", "scaled_squares", "decayed_squares", "momentum", "adam_squares", "adam_step")


def passes(parameter: Tensor) -> Native | None:
    """Return the compiled loops for norms and optimizer updates of tensors such as ``parameter``; None without them.

    The first call for such a tensor loads the loops from the user's cache, or compiles them in about a second; later
    calls return the same object. A failed build gives a RuntimeWarning, and is not tried again by this function.

    Args:
        parameter: tensor whose type, device, dtype and memory format decide.

    Returns:
        An object whose methods (``squares``, ``momentum``, ``adam_step`` and so on) work on lists of tensors of this
        dtype. None unless ``parameter`` is a plain tensor or parameter on a CPU, of float32 or float64, in dense
        memory, and the loops can be compiled and are not switched off (``TUTTI_KERNELS=off``).
    """
    plain = type(parameter) in (Tensor, nn.Parameter) and parameter.device.type == "cpu"
    if plain and parameter.dtype in _NAMES and dense_format(parameter) is not None:
        return _all().get(parameter.dtype)
    return None


@cache
def _all() -> dict[torch.dtype, Native]:
    library = load_kernels()
    return {} if library is None else {dtype: Native(library, dtype) for dtype in _NAMES}


def load_kernels() -> ctypes.CDLL | None:
    """Load the compiled loops of optimizer updates, ``kernels.cpp``; build them first if the user's cache has none.

    Returns:
        The shared library; None if there is no C++ compiler, if the build fails, which also gives a RuntimeWarning, or
        if compiled loops are switched off (``TUTTI_KERNELS=off``).
    """
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
