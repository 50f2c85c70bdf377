"""A tensor that is split over ranks and behaves as the whole tensor.

``SplitTensor`` has the global shape. It computes on this rank's slice where that gives the same result: elementwise
functions, dropout, norms and linear layers over other dimensions, views, and the cross-entropy of split classes. Every
other function computes on the whole tensor after an all-gather; so the result is never wrong. Writes into the gathered
tensor, through a view of it such as ``x[:, :2]``, are copied into the slice when the slice is next read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction, Function
from torch.nn import functional
from torch.utils.weak import TensorWeakRef

from tutti.device import DEVICE_FLAGS
from tutti.errors import UsageError, script_line
from tutti.parallel.tensor import loss_parallel
from tutti.parallel.tensor.tensor_slice import LayerSlice, check_input, dropped
from tutti.python_compat import calling_frame
from tutti.torch_compat import (
    IS_VIEW,
    VERSION_ATTRIBUTE,
    TorchFunctionDisabled,
    is_hook_of_fsdp,
    storage_key,
    tensor_version,
    tree_leaves,
)

_APPLY = Function.apply.__func__.__code__  # type: ignore[attr-defined]
"""Code of the call of an autograd function, around its forward."""


@dataclass(eq=False)
class _Gathered:
    """The whole tensor, gathered from the slices.

    Attributes:
        part: this rank's slice.
        cut: the split dimension.
        slice_: ranks and size of the split.
        whole: the tensor.
        version: version of ``whole`` with which the slice agrees.
        key: version of the slice, and whether gradients were enabled, when both agreed.
        views: tensors of the script that share the memory of ``whole``.
    """

    part: Tensor
    cut: int
    slice_: LayerSlice
    whole: Tensor
    version: int
    key: tuple[int, bool]
    views: list[TensorWeakRef] = field(default_factory=list)

    def in_use(self) -> bool:
        self.views = [view for view in self.views if view() is not None]
        return bool(self.views)


class SplitTensor(Tensor):
    """One rank's slice of a tensor that is split over tensor-parallel ranks; it behaves as the whole tensor.

    It has the shape of the whole. Functions compute on the slices where that gives the same result (elementwise
    functions, dropout, views, the cross-entropy of split classes, …); others first all-gather the whole tensor, and so
    are collective over the tensor-parallel ranks. Writing to it in place other than by an elementwise function, hooks
    on its gradient and autograd functions of the script raise ``UsageError``.

    Attributes:
        part: this rank's slice, a plain tensor.
        cut: the split dimension, from 0.
        slice_: ranks and size of the split; its ``length`` is the size of the whole tensor along ``cut``.
    """

    cut: int
    slice_: LayerSlice
    _part: Tensor
    _known: _Gathered | None
    _viewed: list[_Gathered]
    """Gathered tensors of which the script has views; one list of all split tensors that share memory."""

    @property
    def part(self) -> Tensor:
        """This rank's slice of the split tensor, a plain tensor, not a copy.

        If the script has written through a view into the whole tensor gathered from the slices, reading this property
        first copies the written values into the slice.

        Raises:
            UsageError: the script has written into one gathered copy, and holds views of another gathered copy, in
                which the written values would be missing.
        """
        if self._viewed:
            _take_over_writes(self._viewed)
        return self._part

    @classmethod
    def of(cls, part: Tensor, cut: int, slice_: LayerSlice) -> SplitTensor:
        """Wrap this tensor-parallel rank's slice as a tensor that behaves as the whole tensor. No copy, not collective.

        Args:
            part: this rank's slice, a plain tensor; the result shares its memory and its place in the autograd graph.
            cut: the split dimension; may count from the end.
            slice_: ranks and size of the split; its ``length`` is the size of the whole tensor along ``cut``.

        Returns:
            A ``SplitTensor`` with the shape of the whole tensor, whose ``part`` is the slice.
        """
        new = part.as_subclass(cls)
        new._part, new.cut, new.slice_, new._known, new._viewed = part, cut % part.dim(), slice_, None, []
        return new

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with TorchFunctionDisabled():
            for value in args:
                if isinstance(value, SplitTensor):
                    _check_origin(value)
                    if not torch.is_grad_enabled() and value.part.requires_grad:
                        _check_function(value)
            handler = _HANDLERS.get(func)
            if handler is not None and args:
                result = handler(func, *args, **kwargs)
                if result is not NotImplemented:
                    return _sharing(result, args[0])
            if args and isinstance(args[0], SplitTensor) and _changes(func, kwargs):
                _refuse(args[0], func)
            return _noted(func(*whole(args), **whole(kwargs)), args, kwargs)


def whole(value: Any) -> Any:
    """Return ``value`` with each tensor that is split over ranks (``SplitTensor``) gathered; all else unchanged.

    Collective over the tensor-parallel ranks: an all-gather for each split tensor. The gathered tensor is kept with the
    split one, and returned without an all-gather until the slice is written or gradients are switched on or off.
    Backward takes this rank's slice of the gradient and sends nothing.

    Args:
        value: a tensor, or tuples, lists and mappings that may hold split tensors at any depth, or anything else.

    Raises:
        PeerError: a rank is lost, or does not take part within the timeout.
    """
    if isinstance(value, SplitTensor):
        return _gathered(value)
    if isinstance(value, tuple | list):
        found = [whole(v) for v in value]
        if all(a is b for a, b in zip(found, value, strict=True)):
            return value
        return type(value)(*found) if hasattr(value, "_fields") else type(value)(found)
    if isinstance(value, Mapping) and any(_holds(v) for v in value.values()):
        found_ = {key: whole(v) for key, v in value.items()}
        return found_ if type(value) is dict else type(value)(**found_)
    return value


def _holds(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return any(map(_holds, value))
    return isinstance(value, SplitTensor) or (isinstance(value, Mapping) and any(map(_holds, value.values())))


def copied(value: Tensor, slice_: LayerSlice) -> Tensor:
    """Return a layer's input, whole on every rank; its gradient is summed over the tensor-parallel ranks in backward.

    For a layer that is split by outputs: each rank computes with its own slice of the layer, and so gets a part of the
    input's gradient. Collective over the tensor-parallel ranks: an all-reduce in backward; for a ``SplitTensor`` an
    all-gather in forward, and a reduce-scatter in backward.

    Args:
        value: the input, whole on every rank or a ``SplitTensor``.
        slice_: which slice of the layer this tensor-parallel rank has.

    Returns:
        A plain tensor with the values of the whole input: a view of ``value`` or ``value`` itself, for a
        ``SplitTensor`` new.

    Raises:
        UsageError: the input is a parameter of which each rank has a slice.
        PeerError: a rank is lost, or does not take part within the timeout.
    """
    if not isinstance(value, SplitTensor):
        check_input(value, slice_.name)
        return slice_.ranks.all_reduce_gradient(value, slice_.name)
    place = value.slice_
    return place.ranks.all_gather_input(value.part, value.cut, place.length, slice_.name)


def local_part(value: Tensor, width: int, slice_: LayerSlice) -> Tensor:
    """Return this tensor-parallel rank's slice of a layer's input along the last dimension: (…, inputs here).

    The input is usually the slice itself. A whole input, which the script may have computed, is cut without
    communication; its backward all-gathers the gradient over the tensor-parallel ranks. A ``SplitTensor``, which holds
    one rank's slice and stands for the whole tensor, gives its slice; one that is split along another dimension is
    all-gathered over these ranks first.

    Args:
        value: the slice itself, a ``SplitTensor``, or the whole input.
        width: number of inputs on this rank.
        slice_: which slice of the layer's inputs this tensor-parallel rank has.

    Returns:
        The slice, a plain tensor. A plain ``value`` whose last size is not that of the whole input is taken for the
        slice, and returned as it is.

    Raises:
        UsageError: an autograd function of the script has returned a ``SplitTensor``: the numbers in it were computed
            from one rank's slice alone, where the function's formula may need the whole tensor; or the input is a
            parameter of which each rank has a slice.
    """
    if not isinstance(value, SplitTensor):
        check_input(value, slice_.name)
        if value.shape[-1] == width or value.shape[-1] != slice_.length:
            return value
        return slice_.ranks.take_slice(value, value.dim() - 1, slice_.length, slice_.name)
    _check_origin(value)
    if value.cut == value.part.dim() - 1:
        return value.part
    return local_part(_gathered(value), width, slice_)


def summed(part: Tensor, slice_: LayerSlice, dim: int = -2) -> Tensor:
    """Sum a layer's partial results over the tensor-parallel ranks: whole on every rank, or split by positions.

    Collective over the tensor-parallel ranks: an all-reduce, whose backward sends nothing; a reduce-scatter where the
    result is split, as sequence parallelism asks, whose backward all-gathers the gradient.

    Args:
        part: this rank's summand; it stays as it is.
        slice_: which slice of the layer this rank has; its ``sequence`` asks for a split result.
        dim: dimension of the positions. The result is split along it only if it has at least two positions for each
            rank and ``part`` has three dimensions or more.

    Returns:
        The sum, or a ``SplitTensor`` of the sum along ``dim``.

    Raises:
        PeerError: a rank is lost, or does not take part within the timeout.
    """
    dim %= max(part.dim(), 1)
    # A slice of length one does not show its memory format, and so not the order in which dropout draws.
    if not slice_.sequence or part.dim() < 3 or part.shape[dim] < 2 * slice_.ranks.size:
        return slice_.ranks.all_reduce(part, slice_.name)
    place = LayerSlice(slice_.name, slice_.ranks, part.shape[dim])
    return SplitTensor.of(slice_.ranks.reduce_scatter(part, dim, place.length, place.name), dim, place)


def _gathered(value: SplitTensor) -> Tensor:
    part, place, key = value.part, value.slice_, (tensor_version(value.part), torch.is_grad_enabled())
    if value._known is None or value._known.key != key:
        # In the memory order of the whole tensor, because dropout draws in it.
        order = sorted(range(part.dim()), key=lambda d: -part.stride()[d])
        found = place.ranks.all_gather(part.permute(order), order.index(value.cut), place.length, place.name)
        found = found.permute([order.index(d) for d in range(part.dim())])
        value._known = _Gathered(part, value.cut, place, found, tensor_version(found), key)
    return value._known.whole


def _sharing(result: Any, source: Any) -> Any:
    """Return a split tensor, which shares the list of gathered tensors with the one of which it is a view."""
    both = isinstance(result, SplitTensor) and isinstance(source, SplitTensor) and result is not source
    if both and storage_key(result._part) == storage_key(source._part):
        result._viewed = source._viewed
    return result


def _noted(result: Any, args: Any, kwargs: Any) -> Any:
    """Return the result of a function of gathered tensors, after a note of what shares memory with them."""
    tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
    for value in tree_leaves((args, kwargs)):
        if not isinstance(value, SplitTensor) or (known := value._known) is None:
            continue
        views = [tensor for tensor in tensors if storage_key(tensor) == storage_key(known.whole)]
        written = tensor_version(known.whole) != known.version
        if (views or written) and all(known is not each for each in value._viewed):
            value._viewed.append(known)
        if result is known.whole:
            result = known.whole.view_as(known.whole)
            views = [result]
        known.views += [TensorWeakRef(view) for view in views]
        if written:
            _take_over_writes(value._viewed)
    return result


def _take_over_writes(viewed: list[_Gathered]) -> None:
    """Copy what was written into gathered tensors into the slice. Raises UsageError where another view would differ."""
    for known in list(viewed):
        if tensor_version(known.whole) != known.version:
            _check_views([each for each in viewed if each is not known])
            place = known.slice_
            with TorchFunctionDisabled(), torch.set_grad_enabled(known.whole.requires_grad):
                known.part.copy_(place.ranks.take_slice(known.whole, known.cut, place.length, place.name))
            known.version, known.key = tensor_version(known.whole), (tensor_version(known.part), known.key[1])
    viewed[:] = [known for known in viewed if known.in_use()]


def _check_views(gathered: Sequence[_Gathered]) -> None:
    """Raise UsageError where the script has views of gathered tensors, before a write that they would not show."""
    for name in [known.slice_.name for known in gathered if known.in_use()]:
        raise UsageError(
            f"the model or the script changes the output of {name} in place and keeps a view of it",
            where=script_line(),
            why="the output is split over tensor ranks, and the view is of a gathered copy, which the write misses",
            remedy=f"make a new tensor, or leave the layer whole: strategy='tensor:whole={name}'",
        )


def _shape(value: SplitTensor) -> list[int]:
    shape = list(value.part.shape)
    shape[value.cut] = value.slice_.length
    return shape


def _changes(func: Any, kwargs: Mapping[str, Any]) -> bool:
    """Return whether a function writes to its argument in place, or attaches something to it."""
    name = getattr(func, "__name__", "")
    named = name in ("__set__", "__setitem__", "__delitem__", "register_hook", "retain_grad") or name in _IN_PLACE
    return named or (name.endswith("_") and not name.startswith("_")) or bool(kwargs.get("inplace"))


def _check_origin(value: SplitTensor) -> None:
    """Raise UsageError if an autograd function of the script has returned this tensor: it has computed on a slice."""
    # The stubs of PyTorch call this property a method.
    made_by: Any = value.grad_fn
    if isinstance(made_by, BackwardCFunction):
        _refuse_function(value, type(made_by).__name__.removesuffix("Backward"))


def _check_function(value: SplitTensor) -> None:
    """Raise UsageError in the forward of an autograd function of the script that was given this tensor.

    PyTorch has noted the shape of this rank's slice for the gradient, and the forward computes with the whole tensor.
    """
    frame: FrameType | None = calling_frame(1)
    while frame is not None:
        if frame.f_code is _APPLY:
            _refuse_function(value, frame.f_locals["cls"].__name__)
        frame = frame.f_back


def _refuse_function(value: SplitTensor, function: str) -> NoReturn:
    name = value.slice_.name
    raise UsageError(
        f"an autograd function of the script was given the output of {name} ({function}.apply)",
        where=script_line(),
        why="the output is split over tensor ranks, and a norm or mean in its backward would be that of a slice",
        remedy=f"leave the layer whole: strategy='tensor:whole={name}', or call the module around it",
    )


def _refuse(value: SplitTensor, func: Any) -> None:
    name, called = value.slice_.name, func.__name__
    if called in ("register_hook", "retain_grad"):
        raise UsageError(
            f"the model or the script takes the gradient of the output of {name} ({called})",
            where=script_line(),
            why="the output is split over tensor ranks, and its gradient there is that of a slice",
            remedy=f"leave the layer whole: strategy='tensor:whole={name}'",
        )
    raise UsageError(
        f"the model or the loss function changes the output of {name} in place ({called})",
        where=script_line(),
        why="the output is split over tensor ranks, and the position of the write is unknown",
        remedy=f"make a new tensor, or leave the layer whole: strategy='tensor:whole={name}'",
    )


# --- functions that compute on the local slice ---------------------------------------------------------------------


def _same(func: Any, value: Any, *rest: Any) -> Any:
    """Call ``func`` on the slice: the result holds for the whole tensor, too."""
    return func(value.part, *rest) if isinstance(value, SplitTensor) else NotImplemented


def _hooked(func: Any, value: Any, hook: Any) -> Any:
    """Register FSDP2's hook on the slice's gradient, which it leaves as it is. Other hooks would receive a slice."""
    if isinstance(value, SplitTensor) and is_hook_of_fsdp(hook):
        return value.part.register_hook(hook)
    return NotImplemented


def _size(func: Any, value: SplitTensor, dim: int | None = None) -> Any:
    shape = torch.Size(_shape(value))
    return shape if dim is None else shape[dim]


def _count(func: Any, value: SplitTensor) -> int:
    return math.prod(_shape(value))


def _length(func: Any, value: SplitTensor) -> int:
    return _shape(value)[0]


def _detached(func: Any, value: SplitTensor) -> SplitTensor:
    return SplitTensor.of(value.part.detach(), value.cut, value.slice_)


def _converted(func: Any, value: Any, *rest: Any, **options: Any) -> Any:
    """Change dtype, device or memory format of the slice; NotImplemented where another tensor gives them."""
    if not isinstance(value, SplitTensor) or any(isinstance(v, Tensor) for v in (*rest, *options.values())):
        return NotImplemented
    result = func(value.part, *rest, **options)
    return value if result is value.part else SplitTensor.of(result, value.cut, value.slice_)


def _each(func: Any, *args: Any, **options: Any) -> Any:
    """Call an elementwise function on the slices of its operands, which may broadcast."""
    first = next((value for value in args if isinstance(value, SplitTensor)), None)
    if first is None or any(isinstance(v, Tensor) for v in options.values()):
        return NotImplemented
    if first is not args[0] and _changes(func, options):
        return NotImplemented
    if first._viewed and _changes(func, options):
        _check_views(first._viewed)
    place, back = first.slice_, first.part.dim() - first.cut
    given = [_aligned(v, place, back) if isinstance(v, Tensor) else v for v in args]
    result = func(*given, **options)
    if result is first.part:
        return first
    return SplitTensor.of(result, -back, place)


def _aligned(value: Tensor, place: LayerSlice, back: int) -> Tensor:
    """Return this rank's slice of an operand; ``back``: the split dimension, counted from the last."""
    if isinstance(value, SplitTensor):
        if value.part.dim() - value.cut == back and value.slice_.length == place.length:
            return value.part
        value = _gathered(value)
    if value.dim() < back or value.shape[-back] == 1:
        return place.ranks.all_reduce_gradients([value], place.name)[0]
    return place.ranks.take_slice(value, value.dim() - back, place.length, place.name)


def _used(place: LayerSlice, *parameters: Tensor | None) -> list[Tensor | None]:
    """Return parameters that each rank uses for its slice only: backward sums their gradients over the ranks."""
    there = iter(place.ranks.all_reduce_gradients([p for p in parameters if p is not None], place.name))
    return [None if p is None else next(there) for p in parameters]


def _linear(func: Any, value: Any, weight: Tensor, bias: Tensor | None = None) -> Any:
    if not _plain_parameters(value, weight, bias) or value.cut == value.part.dim() - 1:
        return NotImplemented
    return SplitTensor.of(func(value.part, *_used(value.slice_, weight, bias)), value.cut, value.slice_)


def _norm(
    func: Any,
    value: Any,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float | None = 1e-5,
) -> Any:
    if not _plain_parameters(value, weight, bias) or value.cut >= value.part.dim() - len(normalized_shape):
        return NotImplemented
    used = _used(value.slice_, weight, bias)
    return SplitTensor.of(func(value.part, normalized_shape, *used, eps), value.cut, value.slice_)


def _root_norm(
    func: Any, value: Any, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Any:
    if not _plain_parameters(value, weight) or value.cut >= value.part.dim() - len(normalized_shape):
        return NotImplemented
    return SplitTensor.of(
        func(value.part, normalized_shape, *_used(value.slice_, weight), eps), value.cut, value.slice_
    )


def _plain_parameters(value: Any, *parameters: Any) -> bool:
    return isinstance(value, SplitTensor) and not any(isinstance(p, SplitTensor) for p in parameters)


def _dropout(
    func: Any, value: SplitTensor, p: float = 0.5, training: bool = True, inplace: bool = False, train: bool = True
) -> Any:
    if not (training and train) or p == 0.0:
        return value
    result = dropped(value.part, p, value.cut, value.slice_)
    if inplace:
        _check_views(value._viewed)
        value.part.copy_(result)
        return value
    return SplitTensor.of(result, value.cut, value.slice_)


# --- views ---------------------------------------------------------------------------------------------------------


def _view(func: Any, value: Any, *rest: Any, **options: Any) -> Any:
    sizes = list(rest[0]) if len(rest) == 1 and isinstance(rest[0], tuple | list) else list(rest)
    if options or not all(type(size) is int for size in sizes):
        return NotImplemented
    return _reshaped(value, sizes)


def _flatten(func: Any, value: Any, start_dim: int = 0, end_dim: int = -1) -> Any:
    shape = _shape(value)
    start, end = (d % len(shape) for d in (start_dim, end_dim))
    return _reshaped(value, [*shape[:start], math.prod(shape[start : end + 1]), *shape[end + 1 :]])


def _reshaped(value: SplitTensor, sizes: list[int]) -> Any:
    """Return the tensor in another shape that keeps the split dimension as one of its own; otherwise NotImplemented."""
    shape = _shape(value)
    known = math.prod(size for size in sizes if size != -1)
    sizes = [math.prod(shape) // max(known, 1) if size == -1 else size for size in sizes]
    before, length = math.prod(shape[: value.cut]), value.slice_.length
    places = [i for i, size in enumerate(sizes) if size == length and math.prod(sizes[:i]) == before]
    if not places or math.prod(sizes) != math.prod(shape):
        return NotImplemented
    sizes[places[0]] = value.part.shape[value.cut]
    return SplitTensor.of(value.part.reshape(sizes), places[0], value.slice_)


def _transposed(func: Any, value: SplitTensor, dim0: int, dim1: int) -> SplitTensor:
    order = list(range(value.part.dim()))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return _ordered(value, order)


def _permuted(func: Any, value: SplitTensor, *dims: Any, **options: Any) -> Any:
    if options:
        return NotImplemented
    order = list(dims[0]) if len(dims) == 1 and isinstance(dims[0], tuple | list) else list(dims)
    return _ordered(value, [d % value.part.dim() for d in order])


def _ordered(value: SplitTensor, order: list[int]) -> SplitTensor:
    return SplitTensor.of(value.part.permute(order), order.index(value.cut), value.slice_)


def _item(func: Any, value: Any, index: Any) -> Any:
    """Index dimensions other than the split one with integers and ranges, as in ``x[:, -1]``."""
    given = list(index) if isinstance(index, tuple) else [index]
    if not isinstance(value, SplitTensor) or not all(i is ... or type(i) in (int, slice) for i in given):
        return NotImplemented
    missing = value.part.dim() + (... in given) - len(given)
    at = given.index(...) if ... in given else len(given)
    full = [*given[:at], *[slice(None)] * missing, *given[at + 1 :]]
    if missing < 0 or full[value.cut] != slice(None):
        return NotImplemented
    gone = sum(type(i) is int for i in full[: value.cut])
    return SplitTensor.of(value.part[tuple(full)], value.cut - gone, value.slice_)


# --- loss parallel -------------------------------------------------------------------------------------------------


def _cross_entropy(
    func: Any,
    value: Any,
    target: Any,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    old = size_average is not None or reduce is not None
    if (
        not isinstance(value, SplitTensor)
        or isinstance(target, SplitTensor)
        or value.cut != min(1, value.part.dim() - 1)
    ):
        return NotImplemented
    if not loss_parallel.plain_loss(target, weight, label_smoothing, old):
        return NotImplemented
    return loss_parallel.cross_entropy(
        value.part, value.cut, value.slice_, target, weight, ignore_index, reduction, label_smoothing
    )


def _argmax(func: Any, value: SplitTensor, dim: int | None = None, keepdim: bool = False, **options: Any) -> Any:
    if dim is None or dim % value.part.dim() != value.cut:
        return NotImplemented
    classes = loss_parallel.best_class(value.part, value.cut, value.slice_)[1]
    return classes if keepdim else classes.squeeze(value.cut)


def _max(func: Any, value: Any, dim: Any = None, keepdim: bool = False, **options: Any) -> Any:
    if type(dim) is not int or not isinstance(value, SplitTensor) or dim % value.part.dim() != value.cut:
        return NotImplemented
    values, classes = loss_parallel.best_class(value.part, value.cut, value.slice_)
    if not keepdim:
        values, classes = values.squeeze(value.cut), classes.squeeze(value.cut)
    return torch.return_types.max((values, classes))


# --- handlers by function ------------------------------------------------------------------------------------------

_OPERATORS = ("add", "sub", "mul", "truediv", "pow", "matmul", "and", "or", "xor", "floordiv", "mod")
_IN_PLACE = {f"__i{name}__" for name in _OPERATORS}
_EACH = (
    *("add", "sub", "subtract", "mul", "multiply", "div", "divide", "true_divide", "pow", "masked_fill", "lerp"),
    *("square", "sqrt", "rsqrt", "exp", "log", "abs", "neg", "negative", "clamp", "tanh", "sigmoid", "logsigmoid"),
    *("relu", "relu6", "leaky_relu", "gelu", "silu", "elu", "celu", "selu", "mish", "softplus"),
    *("hardswish", "hardsigmoid", "__neg__"),
    *(f"__{side}{name}__" for name in ("add", "sub", "mul", "truediv", "div", "pow") for side in ("", "r", "i")),
)
_ATTRIBUTES = (
    *("dtype", "device", "layout", "ndim", *DEVICE_FLAGS),
    *("is_nested", "is_sparse", "is_quantized", "itemsize", "requires_grad", "grad_fn", "is_leaf"),
    *("output_nr", "grad", VERSION_ATTRIBUTE),
)


def _all(names: Sequence[str], spaces: Sequence[Any] = (Tensor, torch, functional)) -> list[Any]:
    return [getattr(space, name) for name in names for space in spaces if hasattr(space, name)]


_HANDLERS: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys(_all([*_EACH, *(f"{name}_" for name in _EACH if not name.endswith("_"))]), _each),
    **dict.fromkeys([getattr(Tensor, name).__get__ for name in _ATTRIBUTES], _same),
    **dict.fromkeys(_all(["dim", "is_floating_point", "is_complex", "element_size", "get_device", IS_VIEW]), _same),
    **dict.fromkeys(_all(["float", "double", "half", "bfloat16", "to", "contiguous", "clone"], [Tensor]), _converted),
    **dict.fromkeys(_all(["numel", "nelement"]), _count),
    **dict.fromkeys(_all(["detach"]), _detached),
    **dict.fromkeys(_all(["dropout"], [torch, functional]), _dropout),
    **dict.fromkeys(_all(["view", "reshape"]), _view),
    **dict.fromkeys(_all(["flatten"]), _flatten),
    **dict.fromkeys(_all(["transpose", "swapaxes", "swapdims"]), _transposed),
    **dict.fromkeys(_all(["permute"]), _permuted),
    **dict.fromkeys(_all(["argmax"]), _argmax),
    **dict.fromkeys(_all(["max"]), _max),
    Tensor.shape.__get__: _size,  # type: ignore[attr-defined]
    Tensor.size: _size,
    Tensor.__len__: _length,
    Tensor.register_hook: _hooked,
    Tensor.data.__get__: _detached,  # type: ignore[attr-defined]
    Tensor.__getitem__: _item,
    functional.linear: _linear,
    functional.layer_norm: _norm,
    functional.rms_norm: _root_norm,
    functional.cross_entropy: _cross_entropy,
}
