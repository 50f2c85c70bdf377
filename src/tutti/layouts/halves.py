"""Backward in two halves: first the gradient of a section's input, later that of its weights.

Qi et al. 2023, arXiv 2401.10241, §3. A layer's two gradients come from the gradient of its output; so the first half
goes back to the outputs of all layers that have weights, and the second takes one step from each of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge


class Roots(NamedTuple):
    """What backward starts from, and the gradients there."""

    tensors: Sequence[Tensor]
    gradients: Sequence[Tensor]


class Called(NamedTuple):
    """A layer's output, as it was computed."""

    layer: nn.Module
    edge: GradientEdge


class Halves:
    """Splits the backward of one section, exactly.

    What is not reached through the layers' outputs (a weight that is read from outside of its layer, a layer of
    several outputs) takes a whole backward in the second half. Which parameters these are is found by comparing all
    gradients, bit by bit, in the first micro-batch.
    """

    def __init__(self, section: nn.Module) -> None:
        self._trained = [p for p in section.parameters() if p.requires_grad]
        self._late: set[nn.Parameter] | None = None
        self._calls: list[Called] | None = None
        for module in section.modules():
            own = [p for p in module.parameters(recurse=False) if p.requires_grad]
            if own and next(module.children(), None) is None:
                module.register_forward_hook(self._note)

    def replace(self, by: Mapping[nn.Parameter, nn.Parameter]) -> None:
        """Take the gradients of other objects in place of some parameters."""
        self._trained = [by.get(p, p) for p in self._trained]

    def record(self) -> list[Called]:
        """Note the layers that are called from now on, until the next call; backward of their forward needs it."""
        self._calls = []
        return self._calls

    def stop(self) -> None:
        """Note no more."""
        self._calls = None

    def inputs(self, roots: Roots, entered: Sequence[Tensor], calls: list[Called]) -> tuple[Any, ...]:
        """First half: gradients of ``entered``, then of the outputs of ``calls``; None where there is none."""
        wanted = [*entered, *(call.edge for call in calls)]
        return _gradients(roots, wanted) if wanted else ()

    def weights(self, roots: Roots, calls: Sequence[Called], gradients: Sequence[Tensor | None]) -> list[nn.Parameter]:
        """Second half: add to ``.grad`` of the section's parameters; those that have had one."""
        found: dict[nn.Parameter, Tensor] = {}
        for (layer, edge), gradient in reversed(list(zip(calls, gradients, strict=True))):
            own = [p for p in layer.parameters(recurse=False) if p.requires_grad and p not in (self._late or ())]
            if own and gradient is not None:
                for p, g in zip(own, _gradients(Roots([edge], [gradient]), own), strict=True):  # type: ignore[list-item]
                    if g is not None:
                        found[p] = found[p] + g if p in found else g
        if self._late is None:
            whole = _gradients(roots, self._trained) if self._trained else ()
            self._late = {p for p, g in zip(self._trained, whole, strict=True) if not _same(found.get(p), g)}
            found = {p: g for p, g in zip(self._trained, whole, strict=True) if g is not None}
        elif self._late:
            late = [p for p in self._trained if p in self._late]
            found |= {p: g for p, g in zip(late, _gradients(roots, late), strict=True) if g is not None}
        for p, g in found.items():
            p.grad = torch.empty_like(p).copy_(g) if p.grad is None else p.grad.add_(g)
        return [p for p in self._trained if p in found]

    def _note(self, layer: nn.Module, args: Any, output: Any) -> None:
        # What is computed again in backward was noted the first time.
        if self._calls is None or torch._C._current_graph_task_id() != -1:
            return
        if isinstance(output, Tensor) and output.requires_grad:
            self._calls.append(Called(layer, get_gradient_edge(output)))


def _gradients(roots: Roots, wanted: Sequence[Any]) -> tuple[Tensor | None, ...]:
    return torch.autograd.grad(roots.tensors, wanted, roots.gradients, retain_graph=True, allow_unused=True)


def _same(mine: Tensor | None, whole: Tensor | None) -> bool:
    return mine is whole is None or (mine is not None and whole is not None and torch.equal(mine, whole))
