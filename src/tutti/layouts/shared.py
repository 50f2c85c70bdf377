"""Gradients of parameters that several sections use, such as weights tied over stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from tutti.comm.communicator import Communicator


class SharedGradients:
    """Sums the gradients of parameters of which several sections have a part each, at the end of a worker's turn.

    ``exact``: micro-batch by micro-batch, so that they are added in the order in which one device adds them. Takes the
    memory of a gradient a micro-batch.

    Args:
        groups: the parameters by the ranks that hold them; None for the ranks of those that live here alone.
    """

    def __init__(self, groups: Sequence[tuple[Communicator | None, Sequence[nn.Parameter]]], exact: bool) -> None:
        self._groups = [(comm, p) for comm, parameters in groups for p in parameters if p.requires_grad]
        self._exact = exact
        self.parameters = {p for _, p in self._groups}
        self._before: Mapping[nn.Parameter, Tensor | None] = {}
        self._parts: dict[nn.Parameter, dict[int, Tensor]] = {}

    def replace(self, by: Mapping[nn.Parameter, nn.Parameter]) -> None:
        """Sum the gradients of other objects in place of some parameters."""
        self._groups = [(comm, by.get(p, p)) for comm, p in self._groups]
        self.parameters = {p for _, p in self._groups}

    def begin(self) -> None:
        """A worker's turn begins: what earlier ones have left is put aside."""
        self._before = {p: p.grad for p in self.parameters}
        self._parts = {p: {} for p in self.parameters}
        for p in self.parameters:
            p.grad = None

    def take(self, micro: int) -> None:
        """A section's backward of a micro-batch is over."""
        for p, parts in self._parts.items():
            if p.grad is not None:
                key = micro if self._exact else 0
                parts[key] = parts[key] + p.grad if key in parts else p.grad
                p.grad = None

    def finish(self, micro_batches: int) -> None:
        """Make the sums the parameters' gradients. One message a parameter among the ranks that hold it."""
        for comm, p in self._groups:
            rows = range(micro_batches if self._exact else 1)
            parts = [self._parts[p].get(row) for row in rows]
            if comm is not None:
                empty = torch.zeros_like(p, memory_format=torch.contiguous_format)
                parts = list(_summed(comm, torch.stack([empty if g is None else g for g in parts])))
            total = self._before[p]
            for part in parts:
                if part is not None:
                    total = part if total is None else total + part
            p.grad = None if total is None else torch.empty_like(p).copy_(total)


def _summed(comm: Communicator, mine: Tensor) -> Tensor:
    """The sum over ranks, which for more than two is added as backward adds: from the last one on."""
    text = "all_reduce of the gradient of shared weights"
    if comm.size == 2:
        comm.start_all_reduce(mine, text).wait()
        return mine
    rows = comm.gather_slices(mine.reshape(-1), text).view(comm.size, *mine.shape)
    total = rows[-1]
    for row in reversed(rows[:-1]):
        total = total + row
    return total
