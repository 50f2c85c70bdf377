"""Find the layers whose scores can stay split by classes up to the loss (loss parallel), by computing the loss.

The user's loss function runs once on two samples, with the layer's output as a ``SplitTensor`` of a single rank. Where
only the cross-entropy needs other ranks' classes, the layer's outputs are never gathered. Where another function reads
them, they are gathered as before: no result changes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from tutti.nn.sync import peers_of
from tutti.nn.untouched import untouched
from tutti.parallel.tensor.linear_layer import is_linear
from tutti.parallel.tensor.split_tensor import SplitTensor, whole
from tutti.parallel.tensor.tensor_slice import LayerSlice, SilentRanks
from tutti.parallel.tensor.tp_plan import PlanEntry
from tutti.torch_compat import has_backward_hook

_SAMPLES = 2
"""Samples of the trial: few, because its scores are whole."""


def add_loss_parallel(
    plain: nn.Module, plan: Sequence[PlanEntry], trial: Callable[..., Any] | None, device: torch.device
) -> list[PlanEntry]:
    """Return the tensor-parallel plan, with layers marked whose scores can stay split by classes up to the loss.

    The scores (logits) of these layers stay split by classes over the tensor ranks; cross-entropy then exchanges a few
    numbers for each target instead of all-gathering the scores. Marked entries, all linear layers, have the role
    ``scores`` instead of ``gathered``. The loss function runs once on two samples, to find the layers whose outputs
    only cross-entropy reads. No layer is marked if the loss function fails or if the model has a backward hook or
    synchronised batch norms.

    Args:
        plain: the whole model; it stays as it was.
        plan: the plan of the model, one entry for each module that does not stay whole; none has the role ``scores``.
        trial: ``trial(model, most)`` calls the loss function on a model with at most ``most`` samples of the data; None
            where no data is at hand, and the plan is returned as it is.
        device: device on which the loss function runs.

    Returns:
        A new list of entries, in the order of ``plan``.
    """
    names = [e.name for e in plan if e.role == "gathered" and is_linear(plain.get_submodule(e.name))]
    found = _lasting(plain, names, trial, device) if names and trial is not None else ()
    return [replace(entry, role="scores") if entry.name in found else entry for entry in plan]


def hooked(plain: nn.Module) -> bool:
    """Return whether the model or a submodule has a backward hook.

    With outputs split over tensor-parallel ranks the hook would receive the gradient of a slice.

    Args:
        plain: the whole model.
    """
    return any(map(has_backward_hook, plain.modules()))


def _lasting(
    plain: nn.Module, names: Sequence[str], trial: Callable[..., Any], device: torch.device
) -> Collection[str]:
    if peers_of(plain) is not None or hooked(plain):
        return ()
    recording = {name: _RecordingRanks() for name in names}
    try:
        with untouched(plain, device), ExitStack() as stack:
            for name, ranks in recording.items():
                stack.callback(plain.get_submodule(name).register_forward_hook(_hook(name, ranks)).remove)
            trial(plain, _SAMPLES)
    except Exception:
        # The first step reports the error.
        return ()
    return [name for name, ranks in recording.items() if ranks.stacked and not ranks.gathered]


def _hook(name: str, ranks: _RecordingRanks) -> Callable[..., Tensor]:
    return lambda layer, args, out: SplitTensor.of(out, -1, LayerSlice(name, ranks, out.shape[-1]))


class _RecordingRanks(SilentRanks):
    """A single rank that records which collectives the loss would need."""

    def __init__(self) -> None:
        super().__init__(0, 1)
        self.stacked = self.gathered = False

    def all_gather_stacked(self, tensor: Tensor, name: str) -> Tensor:
        self.stacked = True
        return tensor.unsqueeze(0)

    def all_gather(self, part: Tensor, dim: int, length: int, name: str) -> Tensor:
        self.gathered = True
        return part

    def all_reduce_gradients(self, tensors: Sequence[Tensor], name: str) -> Sequence[Tensor]:
        self.gathered = True
        return tensors

    def take_slice(self, whole: Tensor, dim: int, length: int, name: str) -> Tensor:
        self.gathered = True
        return whole


class Outputs:
    """Forward hook that gathers a tensor-parallel model's outputs, except within ``kept``, where they stay split.

    Gathering is an all-gather over the tensor ranks for each ``SplitTensor`` among the outputs.

    Args:
        module: the model; the hook is registered on it.
        keep: leave outputs split from the start.
    """

    def __init__(self, module: nn.Module, keep: bool = False) -> None:
        self._keep = keep
        module.register_forward_hook(lambda module, args, out: out if self._keep else whole(out))

    @contextmanager
    def kept(self) -> Any:
        """Return a context in which a tensor-parallel model's forward returns its outputs split over ranks.

        Within the context the outputs are ``SplitTensor``s. The loss function runs in it, so that cross-entropy works
        on split scores. After the context the model's outputs are all-gathered over the tensor ranks, also where the
        constructor was given ``keep``.
        """
        self._keep = True
        try:
            yield
        finally:
            self._keep = False
