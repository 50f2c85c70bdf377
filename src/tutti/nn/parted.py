"""A tensor that is split over ranks and looks whole to the code that has it.

It has the whole tensor's shape, and computes on this rank's share where that is the same: what treats places one by one
(sums, activations, dropout, norms and linear layers over other dimensions), other views of it, and the cross-entropy of
split classes. Whatever else is asked of it is computed on the whole, which is gathered then; so it is never wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tutti.errors import UsageError
from tutti.nn import scores
from tutti.nn.slices import Slice, dropped


class Parted(Tensor):
    """One rank's share along ``cut`` of a tensor; ``slice_.length`` is that dimension of the whole."""

    part: Tensor
    cut: int
    slice_: Slice
    _known: tuple[int, bool, Tensor] | None

    @classmethod
    def of(cls, part: Tensor, cut: int, slice_: Slice) -> Parted:
        """``part`` as a share of something; ``cut`` may count from the end."""
        new = part.as_subclass(cls)
        new.part, new.cut, new.slice_, new._known = part, cut % part.dim(), slice_, None
        return new

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            handler = _HANDLERS.get(func)
            if handler is not None and args:
                result = handler(func, *args, **kwargs)
                if result is not NotImplemented:
                    return result
            if args and isinstance(args[0], Parted) and _changes(func, kwargs):
                _refuse(args[0], func)
            return func(*whole(args), **whole(kwargs))


def whole(value: Any) -> Any:
    """The same with whole tensors in place of split ones; one all-gather for each that was not gathered before."""
    if isinstance(value, Parted):
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
    return isinstance(value, Parted) or (isinstance(value, Mapping) and any(map(_holds, value.values())))


def copied(value: Tensor, slice_: Slice) -> Tensor:
    """A layer's whole input, whose gradient is summed over the ranks, for each uses it in its own way."""
    if not isinstance(value, Parted):
        return slice_.ranks.copy(value, slice_.name)
    place = value.slice_
    return place.ranks.widen(value.part, value.cut, place.length, slice_.name)


def summed(part: Tensor, slice_: Slice, dim: int = -2) -> Tensor:
    """The sum of all ranks' tensors: whole on all of them, or split by ``dim`` where that is a sequence."""
    dim %= max(part.dim(), 1)
    # Of a share of one place it cannot be seen how it lies in memory, and so in which order dropout draws.
    if not slice_.sequence or part.dim() < 3 or part.shape[dim] < 2 * slice_.ranks.size:
        return slice_.ranks.reduce(part, slice_.name)
    place = Slice(slice_.name, slice_.ranks, part.shape[dim])
    return Parted.of(slice_.ranks.scatter(part, dim, place.length, place.name), dim, place)


def _gathered(value: Parted) -> Tensor:
    part, place, key = value.part, value.slice_, (value.part._version, torch.is_grad_enabled())
    if value._known is None or value._known[:2] != key:
        # In the order of memory of the whole, for dropout draws in it.
        order = sorted(range(part.dim()), key=lambda d: -part.stride()[d])
        found = place.ranks.gather(part.permute(order), order.index(value.cut), place.length, place.name)
        value._known = *key, found.permute([order.index(d) for d in range(part.dim())])
    return value._known[2]


def _shape(value: Parted) -> list[int]:
    shape = list(value.part.shape)
    shape[value.cut] = value.slice_.length
    return shape


def _changes(func: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether a function would write into what it is given, or attach something to it."""
    name = getattr(func, "__name__", "")
    named = name in ("__set__", "__setitem__", "__delitem__", "register_hook", "retain_grad") or name in _IN_PLACE
    return named or (name.endswith("_") and not name.startswith("_")) or bool(kwargs.get("inplace"))


def _refuse(value: Parted, func: Any) -> None:
    name = value.slice_.name
    raise UsageError(
        f"the model or the loss function changes the output of {name} in place ({func.__name__})",
        why="that is split over tensor ranks, and where in it cannot be known",
        remedy=f"make a new tensor, or leave the layer whole: --strategy tensor:whole={name}",
    )


# --- what is computed on a share -----------------------------------------------------------------------------------


def _same(func: Any, value: Any, *rest: Any) -> Any:
    """What is true of the share too."""
    return func(value.part, *rest) if isinstance(value, Parted) else NotImplemented


def _hooked(func: Any, value: Any, hook: Any) -> Any:
    """FSDP2 asks when a gradient comes, and leaves it as it is; another hook would be given a share."""
    if isinstance(value, Parted) and str(getattr(hook, "__module__", "")).startswith("torch.distributed.fsdp"):
        return value.part.register_hook(hook)
    return NotImplemented


def _size(func: Any, value: Parted, dim: int | None = None) -> Any:
    shape = torch.Size(_shape(value))
    return shape if dim is None else shape[dim]


def _count(func: Any, value: Parted) -> int:
    return math.prod(_shape(value))


def _length(func: Any, value: Parted) -> int:
    return _shape(value)[0]


def _detached(func: Any, value: Parted) -> Parted:
    return Parted.of(value.part.detach(), value.cut, value.slice_)


def _converted(func: Any, value: Any, *rest: Any, **options: Any) -> Any:
    """Of another type, layout or memory; not like another tensor."""
    if not isinstance(value, Parted) or any(isinstance(v, Tensor) for v in (*rest, *options.values())):
        return NotImplemented
    result = func(value.part, *rest, **options)
    return value if result is value.part else Parted.of(result, value.cut, value.slice_)


def _each(func: Any, *args: Any, **options: Any) -> Any:
    """Number by number, of tensors that may have to be expanded."""
    first = next((value for value in args if isinstance(value, Parted)), None)
    if first is None or any(isinstance(v, Tensor) for v in options.values()):
        return NotImplemented
    if first is not args[0] and _changes(func, options):
        return NotImplemented
    place, back = first.slice_, first.part.dim() - first.cut
    given = [_aligned(v, place, back) if isinstance(v, Tensor) else v for v in args]
    result = func(*given, **options)
    if result is first.part:
        return first
    return Parted.of(result, -back, place)


def _aligned(value: Tensor, place: Slice, back: int) -> Tensor:
    """This rank's share of an operand; ``back``: which dimension is split, from the last one."""
    if isinstance(value, Parted):
        if value.part.dim() - value.cut == back and value.slice_.length == place.length:
            return value.part
        value = _gathered(value)
    if value.dim() < back or value.shape[-back] == 1:
        return place.ranks.copies([value], place.name)[0]
    return place.ranks.take(value, value.dim() - back, place.length, place.name)


def _used(place: Slice, *parameters: Tensor | None) -> list[Tensor | None]:
    """Parameters that each rank uses for its share alone: their gradients are summed."""
    there = iter(place.ranks.copies([p for p in parameters if p is not None], place.name))
    return [None if p is None else next(there) for p in parameters]


def _linear(func: Any, value: Any, weight: Tensor, bias: Tensor | None = None) -> Any:
    if not _plain_parameters(value, weight, bias) or value.cut == value.part.dim() - 1:
        return NotImplemented
    return Parted.of(func(value.part, *_used(value.slice_, weight, bias)), value.cut, value.slice_)


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
    return Parted.of(func(value.part, normalized_shape, *used, eps), value.cut, value.slice_)


def _root_norm(
    func: Any, value: Any, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Any:
    if not _plain_parameters(value, weight) or value.cut >= value.part.dim() - len(normalized_shape):
        return NotImplemented
    return Parted.of(func(value.part, normalized_shape, *_used(value.slice_, weight), eps), value.cut, value.slice_)


def _plain_parameters(value: Any, *parameters: Any) -> bool:
    return isinstance(value, Parted) and not any(isinstance(p, Parted) for p in parameters)


def _dropout(
    func: Any, value: Parted, p: float = 0.5, training: bool = True, inplace: bool = False, train: bool = True
) -> Any:
    if not (training and train) or p == 0.0:
        return value
    result = dropped(value.part, p, value.cut, value.slice_)
    if inplace:
        value.part.copy_(result)
        return value
    return Parted.of(result, value.cut, value.slice_)


# --- other views ---------------------------------------------------------------------------------------------------


def _view(func: Any, value: Any, *rest: Any, **options: Any) -> Any:
    sizes = list(rest[0]) if len(rest) == 1 and isinstance(rest[0], tuple | list) else list(rest)
    if options or not all(type(size) is int for size in sizes):
        return NotImplemented
    return _reshaped(value, sizes)


def _flatten(func: Any, value: Any, start_dim: int = 0, end_dim: int = -1) -> Any:
    shape = _shape(value)
    start, end = (d % len(shape) for d in (start_dim, end_dim))
    return _reshaped(value, [*shape[:start], math.prod(shape[start : end + 1]), *shape[end + 1 :]])


def _reshaped(value: Parted, sizes: list[int]) -> Any:
    """Another shape in which what is split is still a dimension of its own."""
    shape = _shape(value)
    known = math.prod(size for size in sizes if size != -1)
    sizes = [math.prod(shape) // max(known, 1) if size == -1 else size for size in sizes]
    before, length = math.prod(shape[: value.cut]), value.slice_.length
    places = [i for i, size in enumerate(sizes) if size == length and math.prod(sizes[:i]) == before]
    if not places or math.prod(sizes) != math.prod(shape):
        return NotImplemented
    sizes[places[0]] = value.part.shape[value.cut]
    return Parted.of(value.part.reshape(sizes), places[0], value.slice_)


def _transposed(func: Any, value: Parted, dim0: int, dim1: int) -> Parted:
    order = list(range(value.part.dim()))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return _ordered(value, order)


def _permuted(func: Any, value: Parted, *dims: Any, **options: Any) -> Any:
    if options:
        return NotImplemented
    order = list(dims[0]) if len(dims) == 1 and isinstance(dims[0], tuple | list) else list(dims)
    return _ordered(value, [d % value.part.dim() for d in order])


def _ordered(value: Parted, order: list[int]) -> Parted:
    return Parted.of(value.part.permute(order), order.index(value.cut), value.slice_)


def _item(func: Any, value: Any, index: Any) -> Any:
    """``x[:, -1]`` and the like: numbers and ranges of other dimensions."""
    given = list(index) if isinstance(index, tuple) else [index]
    if not isinstance(value, Parted) or not all(i is ... or type(i) in (int, slice) for i in given):
        return NotImplemented
    missing = value.part.dim() + (... in given) - len(given)
    at = given.index(...) if ... in given else len(given)
    full = [*given[:at], *[slice(None)] * missing, *given[at + 1 :]]
    if missing < 0 or full[value.cut] != slice(None):
        return NotImplemented
    gone = sum(type(i) is int for i in full[: value.cut])
    return Parted.of(value.part[tuple(full)], value.cut - gone, value.slice_)


# --- classes -------------------------------------------------------------------------------------------------------


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
    if not isinstance(value, Parted) or isinstance(target, Parted) or value.cut != min(1, value.part.dim() - 1):
        return NotImplemented
    if not scores.plain_loss(target, weight, label_smoothing, old):
        return NotImplemented
    return scores.cross_entropy(
        value.part, value.cut, value.slice_, target, weight, ignore_index, reduction, label_smoothing
    )


def _argmax(func: Any, value: Parted, dim: int | None = None, keepdim: bool = False, **options: Any) -> Any:
    if dim is None or dim % value.part.dim() != value.cut:
        return NotImplemented
    classes = scores.best(value.part, value.cut, value.slice_)[1]
    return classes if keepdim else classes.squeeze(value.cut)


def _max(func: Any, value: Any, dim: Any = None, keepdim: bool = False, **options: Any) -> Any:
    if type(dim) is not int or not isinstance(value, Parted) or dim % value.part.dim() != value.cut:
        return NotImplemented
    values, classes = scores.best(value.part, value.cut, value.slice_)
    if not keepdim:
        values, classes = values.squeeze(value.cut), classes.squeeze(value.cut)
    return torch.return_types.max((values, classes))


# --- which function is which ---------------------------------------------------------------------------------------

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
    *("dtype", "device", "layout", "is_cuda", "is_cpu", "ndim"),
    *("is_nested", "is_sparse", "is_quantized", "is_meta", "itemsize", "requires_grad", "grad_fn", "is_leaf"),
    *("output_nr", "grad", "_version"),
)


def _all(names: Sequence[str], spaces: Sequence[Any] = (Tensor, torch, functional)) -> list[Any]:
    return [getattr(space, name) for name in names for space in spaces if hasattr(space, name)]


_HANDLERS: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys(_all([*_EACH, *(f"{name}_" for name in _EACH if not name.endswith("_"))]), _each),
    **dict.fromkeys([getattr(Tensor, name).__get__ for name in _ATTRIBUTES], _same),
    **dict.fromkeys(_all(["dim", "is_floating_point", "is_complex", "element_size", "get_device", "_is_view"]), _same),
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
