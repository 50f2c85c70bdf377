"""Arguments with which a model's forward calls its blocks: masks, rotary tables, caches.

A block with several arguments is tried with those of a real call. The plan then names the forms of the calls that were
proved right, and a call of any other form is refused.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from tutti.nn.untouched import untouched
from tutti.torch_compat import tree_flatten, tree_leaves, tree_unflatten

_SAMPLES = 2
"""Samples of the trial of the forward."""


@dataclass(frozen=True)
class BlockArguments:
    """One call of a block.

    Attributes:
        args, kwargs: its arguments, detached copies.
        learned: whether each leaf of the arguments has a gradient.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    learned: tuple[bool, ...]

    @property
    def form(self) -> str:
        """Text that is equal for calls of the block with arguments of the same kinds: tensor types, dimensions, …"""
        return form_of(self.args, self.kwargs, self.learned)

    def main_input(self, features: Collection[int]) -> int:
        """Return the index of the block's main input among all values in ``(args, kwargs)``, flattened as a pytree.

        It is the first floating tensor of at least two dimensions whose last one is in ``features``.

        Args:
            features: allowed numbers of features, such as the input widths of the block's linear layers.

        Raises:
            StopIteration: no argument is such a tensor.
        """
        leaves = tree_leaves((self.args, self.kwargs))
        return next(
            i
            for i, leaf in enumerate(leaves)
            if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dim() > 1 and leaf.shape[-1] in features
        )

    def arguments(self, index: int, x: Tensor) -> tuple[Any, Any, list[Tensor]]:
        """Return this call's arguments in double precision and with another main input, to try the block with.

        Args:
            index: index of the main input among the values in ``(args, kwargs)``, flattened as a pytree.
            x: the tensor to put there.

        Returns:
            ``args``, ``kwargs``, and the other tensors in them that require a gradient; all tensors but ``x`` are
            copies.
        """
        leaves, spec = tree_flatten((self.args, self.kwargs))
        made: list[Any] = []
        learned = []
        for number, leaf in enumerate(leaves):
            if number == index:
                made.append(x)
            elif isinstance(leaf, Tensor):
                value = leaf.double() if leaf.is_floating_point() else leaf
                made.append(value.clone().requires_grad_(self.learned[number]))
                learned += [made[-1]] if self.learned[number] else []
            else:
                made.append(copy.deepcopy(leaf))
        args, kwargs = tree_unflatten(made, spec)
        return args, kwargs, learned

    def variants(self, block: nn.Module, index: int) -> Iterator[BlockArguments]:
        """Yield the same call with other attention masks: none, a boolean causal mask, and an additive causal mask.

        Masks are (batch, 1, queries, keys). Arguments whose name contains "mask" are replaced; yields nothing if there
        are none or if the main input is not of three dimensions.

        Args:
            block: the block that is called, for the names of its arguments.
            index: index of the main input among the values in ``(args, kwargs)``, flattened as a pytree.
        """
        names = list(inspect.signature(block.forward).parameters)
        given = {**dict(zip(names, self.args, strict=False)), **self.kwargs}
        masks = [name for name, value in given.items() if "mask" in name and isinstance(value, Tensor | None)]
        x = tree_leaves((self.args, self.kwargs))[index]
        if not masks or x.dim() != 3 or any(isinstance(value, Mapping) for value in given.values()):
            return
        allowed = torch.ones(x.shape[0], 1, x.shape[1], x.shape[1], dtype=torch.bool).tril()
        added = torch.zeros(allowed.shape, dtype=x.dtype).masked_fill_(~allowed, torch.finfo(x.dtype).min)
        for mask in (None, allowed, added):
            args = tuple(mask if name in masks else value for name, value in zip(names, self.args, strict=False))
            kwargs = {name: mask if name in masks else value for name, value in self.kwargs.items()}
            leaves = tree_leaves((args, kwargs))
            yield replace(self, args=args, kwargs=kwargs, learned=tuple(self._learned(leaf) for leaf in leaves))

    def _learned(self, leaf: Any) -> bool:
        known = zip(tree_leaves((self.args, self.kwargs)), self.learned, strict=True)
        return any(own is leaf and learned for own, learned in known)


def form_of(args: Any, kwargs: Any, learned: Collection[bool] | None = None) -> str:
    """Return a text that is equal for calls whose arguments are of the same kinds, to compare calls of a block by.

    A tensor is ``float``, ``int`` or ``bool`` and its number of dimensions; ``h`` marks a tensor with a head dimension
    and ``*`` a tensor with a gradient. Booleans, strings and None appear with their values, other arguments as types.

    Args:
        args, kwargs: arguments of the call.
        learned: whether each value in ``(args, kwargs)``, flattened, has a gradient; default: its ``requires_grad``.
    """
    leaves, spec = tree_flatten((args, kwargs))
    flags = learned or [isinstance(x, Tensor) and x.requires_grad and torch.is_grad_enabled() for x in leaves]
    return f"{_text(spec)} " + " ".join(_kind(leaf) + "*" * flag for leaf, flag in zip(leaves, flags, strict=True))


@lru_cache(maxsize=256)
def _text(spec: Any) -> str:
    return " ".join(str(spec).split())


def _kind(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        kind = "float" if leaf.is_floating_point() else "bool" if leaf.dtype == torch.bool else "int"
        by_head = leaf.dim() > 3 and leaf.shape[-3] > 1
        return f"{kind}{leaf.dim()}" + "h" * by_head
    return repr(leaf) if isinstance(leaf, bool | str | None) else type(leaf).__qualname__


def record_calls(
    plain: nn.Module, names: Collection[str], trial: Callable[..., Any] | None, device: torch.device
) -> dict[str, BlockArguments]:
    """Record the arguments of the first call of each block, by running the loss function on two samples.

    A block is a module of several layers, such as attention, that may be split as one.

    Args:
        plain: the whole model; it stays as it was.
        names: names of the blocks to record.
        trial: ``trial(model, most)`` calls the loss function on a model with at most ``most`` samples of the data; None
            where no data is at hand.
        device: device of the trial.

    Returns:
        The calls by the block's name, with tensors copied to the CPU. Blocks that are not called, or whose arguments
        cannot be copied, are left out; without ``trial`` all are.
    """
    learned: dict[str, list[bool]] = {}
    found: dict[str, BlockArguments] = {}

    def note(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            leaves, spec = tree_flatten((args, kwargs))
            if torch.is_grad_enabled():
                learned.setdefault(name, [isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves])
            elif name not in found and len(leaves) == len(learned.get(name, ())):
                with suppress(Exception):
                    copies = [x.detach().cpu().clone() if isinstance(x, Tensor) else copy.deepcopy(x) for x in leaves]
                    own_args, own_kwargs = tree_unflatten(copies, spec)
                    found[name] = BlockArguments(own_args, own_kwargs, tuple(learned[name]))

        return hook

    handles = [plain.get_submodule(n).register_forward_pre_hook(note(n), with_kwargs=True) for n in names]
    try:
        # The first step reports any error. Without gradients caches can be copied.
        for gradients in (True, False) if trial is not None and names else ():
            with suppress(Exception), untouched(plain, device), torch.set_grad_enabled(gradients):
                trial(plain, _SAMPLES)  # type: ignore[misc]
    finally:
        for handle in handles:
            handle.remove()
    return found
