"""Split tensors in front of hooks that know plain ones alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from tutti.nn.parted import Parted
from tutti.nn.slices import Slice


@contextmanager
def seen_as_shares(module: nn.Module) -> Iterator[None]:
    """Forward pre-hooks that are put before all others within the block are given shares in place of split tensors.

    For hooks that pass their inputs through functions of autograd, which know tensors by their memory.
    """
    places: list[tuple[int, int, Slice]] = []

    def enter(module: nn.Module, args: Any, kwargs: Any) -> Any:
        flat, tree = tree_flatten((args, kwargs))
        places[:] = [(i, value.cut, value.slice_) for i, value in enumerate(flat) if isinstance(value, Parted)]
        return tree_unflatten([v.part if isinstance(v, Parted) else v for v in flat], tree) if places else None

    def leave(module: nn.Module, args: Any, kwargs: Any) -> Any:
        if not places:
            return None
        flat, tree = tree_flatten((args, kwargs))
        for index, cut, slice_ in places:
            flat[index] = Parted.of(flat[index], cut, slice_)
        return tree_unflatten(flat, tree)

    module.register_forward_pre_hook(leave, prepend=True, with_kwargs=True)
    yield
    module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True)
