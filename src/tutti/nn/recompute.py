"""Activation checkpointing: drop a forward's activations and recompute them when backward needs them.

Chen et al. 2016, arXiv 1604.06174; done by ``torch.utils.checkpoint``. Recomputation must equal the first forward to
the bit and have no side effects: RNG streams are replayed, and buffers (batch-norm statistics, power iterations) start
from their values before the first forward and are restored afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tutti.errors import UsageError
from tutti.nn.rng_streams import RngStreams
from tutti.nn.selective_checkpoint import selective_checkpoint_contexts
from tutti.nn.swap import BufferRef, buffers
from tutti.torch_compat import NormBase, tensor_version

Forward = Callable[..., Any]


def recomputed(
    forward: Forward, members: Callable[[nn.Module], Sequence[nn.Module]], draws: RngStreams, selective: bool = False
) -> Forward:
    """Wrap a module's forward so that only its inputs are saved and backward computes its activations again.

    Recomputation draws the same random numbers, and starts from the buffers' former values.

    Args:
        forward: forward of a module, or of some of its children, called as ``forward(module, …)``.
        members: called with the module; returns the submodules that ``forward`` runs, whose buffers recomputation sets
            back and leaves unchanged.
        draws: the RNG streams of the model, set back for recomputation.
        selective: also save the results of expensive operators, such as matrix products, which are not computed again.

    Returns:
        A function with the arguments and result of ``forward``; while gradients are disabled it only calls ``forward``.
        It raises UsageError if ``forward`` changes a buffer (of a module other than a norm layer) that an earlier call
        in training mode left unchanged: of such buffers no former values are kept.
    """
    constant: WeakKeyDictionary[nn.Module, set[int]] = WeakKeyDictionary()

    def run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(module, *args, **kwargs)
        known = constant.setdefault(module, set())
        slots = buffers(members(module), persistent=False)
        held = [(slot.get(), tensor_version(slot.get())) for slot in slots]
        before = [(slot, held[i][0].clone()) for i, slot in enumerate(slots) if i not in known]
        first, second = selective_checkpoint_contexts() if selective else (nullcontext(), nullcontext())
        again = _Again(before, draws, second)
        once = partial(forward, module, **kwargs)
        # No early stop: selective recomputation compares the number of operator calls at the forward's end.
        result = checkpoint(
            once, *args, use_reentrant=False, context_fn=lambda: (first, again), early_stop=not selective
        )
        for i, (slot, (own, version)) in enumerate(zip(slots, held, strict=True)):
            if slot.get() is not own or tensor_version(slot.get()) != version:
                _refuse(slot, known, i)
            elif module.training and not isinstance(slot.owner, NormBase):
                known.add(i)
        return result

    return run


class _Again:
    """Context of recomputation: buffers and RNG streams as at the start of the forward; restored on exit."""

    def __init__(
        self, before: Sequence[tuple[BufferRef, Tensor]], draws: RngStreams, within: AbstractContextManager[Any]
    ) -> None:
        self._before, self._draws, self._within = before, draws, within
        self._then = draws.moment._replace(replaying=True)
        self._drawn = draws.of_python.record()

    def __enter__(self) -> None:
        self._own = [slot.get() for slot, _ in self._before]
        self._now, self._draws.moment = self._draws.moment, self._then
        # torch.utils.checkpoint restores PyTorch's generators alone.
        self._drawn_now = self._draws.of_python.record()
        self._draws.of_python.restore(self._drawn)
        for slot, tensor in self._before:
            slot.put(tensor.clone())
        self._within.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._within.__exit__(*error)
        self._draws.moment = self._now
        self._draws.of_python.restore(self._drawn_now)
        for (slot, _), tensor in zip(self._before, self._own, strict=True):
            slot.put(tensor)


def _refuse(slot: BufferRef, constant: set[int], index: int) -> None:
    """Raise UsageError if a changed buffer had been taken for constant, so that its old value was not saved."""
    if index in constant:
        raise UsageError(
            f"the buffer {slot.name} changes in some steps only, so that its module cannot be computed again",
            remedy="leave that module out: tutti.prepare(activation_checkpointing=[names or classes])",
        )
