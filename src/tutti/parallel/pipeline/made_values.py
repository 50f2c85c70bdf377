"""Made numbers in place of the values that a model's forward reads while it is recorded on fake tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tutti.device import forked_generators
from tutti.torch_compat import (
    FAKE_VALUE_ERRORS,
    READ_NUMBER,
    FakeTensorMode,
    TorchDispatchMode,
    is_fake,
    storage_key,
    tree_leaves,
    tree_map_only,
    without_dispatch_modes,
)

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
"""Types of values without tensors in them."""
_UNLIKELY = (torch.ops.aten.any, torch.ops.aten.isnan)
"""Operations whose result is mostly False, as in checks of a loss."""


def made_numbers(like: Any, low: float, device: torch.device, generator: torch.Generator) -> Any:
    """Return a tensor of made-up values in place of a fake one: random floats, integer zeros, or True for booleans.

    An object that is no tensor is copied, with the tensors that it holds replaced in this way.

    Args:
        like: a tensor, whose shape and dtype the result has, or any object.
        low: smallest of the random numbers, which lie between ``low`` and ``low`` + 0.5.
        device: device of the result.
        generator: generator of the random numbers, on the CPU.
    """
    if not isinstance(like, Tensor):
        made = partial(made_numbers, low=low, device=device, generator=generator)
        return deepcopy(like, {id(held): made(held) for held in tensors_within(like)})
    if like.is_floating_point() or like.is_complex():
        return (torch.rand(like.shape, dtype=like.dtype, generator=generator) * 0.5 + low).to(device)
    return torch.full(like.shape, like.dtype == torch.bool, dtype=like.dtype, device=device)


def tensors_within(value: Any) -> list[Tensor]:
    """Return the tensors in an object's attributes, lists and mappings at any depth, each once.

    An example is a cache of keys and values. Modules and classes are not searched.
    """
    found, seen, left = list[Tensor](), set[int](), [value]
    while left:
        each = left.pop()
        if id(each) in seen or isinstance(each, (type, nn.Module, *PLAIN)):
            continue
        seen.add(id(each))
        if isinstance(each, Tensor):
            found.append(each)
        elif isinstance(each, Mapping):
            left += each.values()
        elif isinstance(each, list | tuple | set):
            left += each
        else:
            left += getattr(each, "__dict__", {}).values()
    return found


class ValuesAfterBlocks(TorchDispatchMode):
    """Dispatch mode in which operations that need the values of fake tensors compute with made-up numbers.

    For the code after the last block (module that one pipeline stage calls as a unit) of a recorded forward, such as a
    CTC loss or a check of a distribution's arguments: the last stage alone runs it, with real values. A block must not
    be called after such an operation, because other stages would have to know the values.

    Args:
        fakes: mode of the fake tensors.
        device: device of the made-up numbers.

    Attributes:
        error: error of the first such operation on fake tensors; None if there was none.
    """

    def __init__(self, fakes: FakeTensorMode, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.error: Exception | None = None
        self._fakes, self._device = fakes, device
        self._unlikely: dict[int, Tensor] = {}
        self._within_block = False

    @contextmanager
    def within_block(self) -> Iterator[None]:
        """Return a context in which operations that need values raise their errors, for the call of a block."""
        self._within_block = True
        try:
            yield
        finally:
            self._within_block = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._within_block:
            return func(*args, **(kwargs or {}))
        try:
            result = func(*args, **(kwargs or {}))
        except FAKE_VALUE_ERRORS as error:
            self.error = self.error or error
            return self._on_numbers(func, args, kwargs or {}, error)
        if func.overloadpacket in _UNLIKELY:
            # The tensor is kept, and with it its storage's key.
            self._unlikely[storage_key(result)] = result
        return result

    def _on_numbers(self, func: Any, args: Any, kwargs: Any, error: Exception) -> Any:
        """Return the result of an operation on made numbers; raise ``error`` where its shapes depend on the numbers."""
        with without_dispatch_modes(), forked_generators(self._device), torch.no_grad():
            if func is READ_NUMBER:
                unlikely = storage_key(args[0]) in self._unlikely
                return torch.full((), not unlikely, dtype=args[0].dtype).item()
            made = []
            for low in (0.0, 0.5):
                generator = torch.Generator().manual_seed(0)
                number = partial(self._number, low=low, generator=generator)
                own_args, own_kwargs = tree_map_only(Tensor, number, (args, kwargs))
                try:
                    made.append(func(*own_args, **own_kwargs))
                except Exception:
                    raise error from None
        one, other = ([leaf.shape for leaf in tree_leaves(each) if isinstance(leaf, Tensor)] for each in made)
        if one != other:
            raise error
        with self._fakes:
            return tree_map_only(Tensor, torch.empty_like, made[0])

    def _number(self, tensor: Tensor, low: float, generator: torch.Generator) -> Tensor:
        made: Tensor = made_numbers(tensor, low, self._device, generator) if is_fake(tensor) else tensor
        return made
