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
    """Return a context within which newly registered forward pre-hooks receive this rank's slices of split inputs.

    Inputs that tensor parallelism splits are ``SplitTensor``s, which behave as the whole tensor. FSDP2's hooks pass
    inputs through autograd functions, which see a tensor's memory and not its class. The hooks must be registered with
    ``prepend=True``. Two more hooks, registered around them, unwrap the ``SplitTensor`` inputs before and wrap them
    again after; they stay on the module when the context has ended.

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
