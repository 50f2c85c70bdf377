"""Unwrap ``SplitTensor``s before FSDP2's forward pre-hook, and wrap them again after it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from tutti.parallel.tensor.split_tensor import SplitTensor
from tutti.parallel.tensor.tensor_slice import LayerSlice
from tutti.torch_compat import tree_flatten, tree_unflatten


@contextmanager
def seen_as_shares(module: nn.Module) -> Iterator[None]:
    """Return a context in which registered forward pre-hooks will get this rank's slices, not ``SplitTensor`` inputs.

    For FSDP2's hooks, registered with ``prepend=True``: they pass their inputs through autograd functions, which see a
    tensor's memory and not its class. After the hooks the inputs are wrapped again. The two hooks that do this stay on
    the module after the context.

    Args:
        module: module on which the hooks are registered.
    """
    places: list[tuple[int, int, LayerSlice]] = []

    def enter(module: nn.Module, args: Any, kwargs: Any) -> Any:
        flat, tree = tree_flatten((args, kwargs))
        places[:] = [(i, value.cut, value.slice_) for i, value in enumerate(flat) if isinstance(value, SplitTensor)]
        return tree_unflatten([v.part if isinstance(v, SplitTensor) else v for v in flat], tree) if places else None

    def leave(module: nn.Module, args: Any, kwargs: Any) -> Any:
        if not places:
            return None
        flat, tree = tree_flatten((args, kwargs))
        for index, cut, slice_ in places:
            flat[index] = SplitTensor.of(flat[index], cut, slice_)
        return tree_unflatten(flat, tree)

    module.register_forward_pre_hook(leave, prepend=True, with_kwargs=True)
    yield
    module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True)
