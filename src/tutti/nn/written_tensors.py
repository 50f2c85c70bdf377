"""Functions that write a tensor in place, or none of its values, and function modes that see writes."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tutti.device import DEVICE_FLAGS
from tutti.nn.swap import parameters
from tutti.torch_compat import (
    GRADIENT_HOOK_ATTRIBUTES,
    VERSION_ATTRIBUTE,
    TorchFunctionDisabled,
    storage_key,
    tree_leaves,
)

_READ = (
    *("shape", "dtype", "device", "layout", "grad", "requires_grad", "is_leaf", "ndim", "grad_fn", "retains_grad"),
    *("is_sparse", "is_sparse_csr", "is_quantized", "is_nested", "itemsize", "nbytes", "output_nr"),
    *DEVICE_FLAGS,
    *("names", VERSION_ATTRIBUTE, *GRADIENT_HOOK_ATTRIBUTES),
)
_WRITTEN = ("grad", "requires_grad", *GRADIENT_HOOK_ATTRIBUTES)
_CALLED = (
    *("size", "dim", "ndimension", "numel", "nelement", "stride", "element_size", "storage_offset", "get_device"),
    *("is_floating_point", "is_complex", "is_signed", "is_contiguous", "is_inference", "__len__", "__hash__"),
    *("is_conj", "is_neg", "is_shared", "is_pinned", "is_set_to", "is_same_size", "has_names", "dim_order"),
    *("requires_grad_", "retain_grad", "register_hook", "register_post_accumulate_grad_hook"),
)


def _metadata() -> set[Any]:
    """Return the functions that need no values: metadata, hooks, and attributes that an optimizer sets."""
    found = {getattr(Tensor, name).__get__ for name in _READ if hasattr(Tensor, name)}
    found |= {getattr(Tensor, name).__set__ for name in _WRITTEN}
    found |= {getattr(Tensor, "grad").__delete__}  # noqa: B009
    found |= {getattr(Tensor, name) for name in _CALLED if hasattr(Tensor, name)}
    return found | {torch.is_floating_point, torch.is_complex, torch.numel, torch.is_signed}


METADATA = _metadata()
"""Functions that read or write no values of a tensor."""

DATA: Any = Tensor.data.__get__  # type: ignore[attr-defined]
"""The function that a read of ``tensor.data`` calls; its result shares the tensor's memory and not its version."""

ASSIGN_DATA: Any = Tensor.data.__set__  # type: ignore[attr-defined]
"""The function that an assignment ``tensor.data = other`` calls."""

VIEWS = frozenset(
    (
        *("getitem", "chunk", "data", "detach", "diagonal", "flatten", "narrow", "permute", "ravel", "reshape"),
        *("select", "split", "squeeze", "t", "tensor_split", "transpose", "unbind", "unflatten", "unsqueeze", "view"),
        "view_as",
    )
)
"""Names of functions, without the underscores around them, whose result shares the memory of a plain tensor."""

_OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")
_NAMES = frozenset(("__set__", "__setitem__", *(f"__i{name}__" for name in _OPERATORS)))


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


def read_only(func: Any, result: Any) -> Any:
    """Return the result of a call on a gathered copy of a tensor, after making it read-only if it is a NumPy array.

    The array has the copy's memory, so that a write into it would not reach the tensor itself.

    Args:
        func: the function, as ``__torch_function__`` is given it.
        result: its result, changed in place if ``func`` is ``Tensor.numpy`` or ``Tensor.__array__``.
    """
    if func in (Tensor.numpy, Tensor.__array__):
        result.setflags(write=False)
    return result


def share_memory(some: Iterable[Tensor], others: Iterable[Tensor]) -> bool:
    """Return whether a tensor of ``some`` may share memory with a tensor of ``others``.

    True for two tensors in one storage whose ranges, from the first element to the last, overlap, also if no element is
    shared, as by two columns of a matrix. Tensors without a storage, such as sparse ones, share none.

    Args:
        some: a few tensors.
        others: any number of tensors.
    """
    ranges: dict[int, list[tuple[int, int]]] = {}
    for tensor in some:
        if (key := storage_of(tensor)) is not None:
            ranges.setdefault(key, []).append(_range(tensor))
    for tensor in others if ranges else ():
        if (key := storage_of(tensor)) in ranges:
            begin, end = _range(tensor)
            if any(low < end and begin < high for low, high in ranges[key]):
                return True
    return False


def storage_of(tensor: Tensor) -> int | None:
    """Return a number that identifies a tensor's storage; None for one without a storage, such as a sparse one.

    Args:
        tensor: any tensor.
    """
    try:
        return storage_key(tensor)
    except (NotImplementedError, RuntimeError):
        return None


def _range(tensor: Tensor) -> tuple[int, int]:
    """Return the bytes of the storage where a tensor's first element begins and its last one ends."""
    size = tensor.element_size()
    begin = int(tensor.storage_offset()) * size
    last = sum((int(n) - 1) * int(step) for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (last + 1) * size if tensor.numel() else begin


class ParameterWriteError(RuntimeError):
    """Raised within ``parameters_unwritten`` in place of a call of PyTorch that would write a parameter in place."""


def parameters_unwritten(parts: Iterable[nn.Module]) -> AbstractContextManager[Any]:
    """Return a context manager in which a write of a parameter in place raises ParameterWriteError before the write.

    For trial forwards, which must leave the model as it is. A call is a write if its name says so (``may_write``) and
    its first argument, or ``out``, shares memory with a parameter. Calls in code of ``torch.compile`` are not seen.

    Args:
        parts: the modules whose parameters must not be written, submodules included.
    """
    return _NoWrites(parameter for _, parameter in parameters(list(parts)))


class _NoWrites(TorchFunctionMode):
    """Function mode that raises ParameterWriteError where code would write one of these parameters in place.

    Args:
        parameters: the parameters.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__()
        self._watched = [*parameters]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # Dynamo traces this mode with the code that it compiles.
        if (
            torch.compiler.is_compiling()
            or func in METADATA
            or func == DATA
            or not (may_write(func) or "out" in kwargs)
        ):
            return func(*args, **kwargs)
        written = [*args[:1], kwargs.get("out")] if may_write(func) else [kwargs["out"]]
        tensors = [leaf for leaf in tree_leaves(written) if isinstance(leaf, Tensor)]
        with TorchFunctionDisabled():
            if share_memory(tensors, self._watched):
                raise ParameterWriteError("the forward writes a parameter")
        return func(*args, **kwargs)
