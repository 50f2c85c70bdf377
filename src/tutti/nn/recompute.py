"""Activation checkpointing: what a forward computed is not kept but computed again when backward needs it.

Chen et al. 2016, arXiv 1604.06174; done by ``torch.utils.checkpoint``. The second time must be the first one to the bit
and leave no trace: random draws are those of the first time, and buffers (batch-norm statistics, power iterations)
start from what they held then and are put back afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint

from tutti.errors import UsageError
from tutti.nn.draws import Draws
from tutti.nn.keeping import keeping
from tutti.nn.swap import Slot, buffers

Forward = Callable[..., Any]


def recomputed(
    forward: Forward, members: Callable[[nn.Module], Sequence[nn.Module]], draws: Draws, selective: bool = False
) -> Forward:
    """``forward(module, …)``, which keeps its inputs alone.

    Args:
        forward: of a module, or of some of its children.
        members: the modules that it runs, of the module it is given.
        draws: the random streams of the model.
        selective: keep what is expensive, too: ``keeping``.
    """
    constant: WeakKeyDictionary[nn.Module, set[int]] = WeakKeyDictionary()

    def run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(module, *args, **kwargs)
        known = constant.setdefault(module, set())
        slots = buffers(members(module), persistent=False)
        held = [(slot.get(), slot.get()._version) for slot in slots]
        before = [(slot, held[i][0].clone()) for i, slot in enumerate(slots) if i not in known]
        first, second = keeping() if selective else (nullcontext(), nullcontext())
        again = _Again(before, draws, second)
        once = partial(forward, module, **kwargs)
        result = checkpoint(once, *args, use_reentrant=False, context_fn=lambda: (first, again))
        for i, (slot, (own, version)) in enumerate(zip(slots, held, strict=True)):
            if slot.get() is not own or slot.get()._version != version:
                _refuse(slot, known, i)
            elif module.training and not isinstance(slot.owner, _NormBase):
                known.add(i)
        return result

    return run


class _Again:
    """Within it buffers and random streams are as when the forward began; afterwards what they were before."""

    def __init__(
        self, before: Sequence[tuple[Slot, Tensor]], draws: Draws, within: AbstractContextManager[Any]
    ) -> None:
        self._before, self._draws, self._within = before, draws, within
        self._then = draws.moment._replace(replaying=True)

    def __enter__(self) -> None:
        self._own = [slot.get() for slot, _ in self._before]
        self._now, self._draws.moment = self._draws.moment, self._then
        for slot, tensor in self._before:
            slot.put(tensor.clone())
        self._within.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._within.__exit__(*error)
        self._draws.moment = self._now
        for (slot, _), tensor in zip(self._before, self._own, strict=True):
            slot.put(tensor)


def _refuse(slot: Slot, constant: set[int], index: int) -> None:
    """A buffer that was taken for constant, because no step had changed it, has not been kept and has changed."""
    if index in constant:
        raise UsageError(
            f"the buffer {slot.name} changes in some steps only, so that its module cannot be computed again",
            remedy="leave that module out: tutti.prepare(activation_checkpointing=[names or classes])",
        )
