"""Split backward into an input backward and a later weight backward.

Qi et al. 2023, arXiv 2401.10241, §3. Both gradients of a layer follow from the gradient of its output. The input
backward therefore goes back to the outputs of all layers that have weights, and the weight backward takes one step from
each of these outputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from tutti.torch_compat import in_backward


class BackwardRoots(NamedTuple):
    """The tensors from which backward starts, and their gradients."""

    tensors: Sequence[Tensor]
    gradients: Sequence[Tensor]


class LayerOutput(NamedTuple):
    """A layer, and its output's edge in the autograd graph."""

    layer: nn.Module
    edge: GradientEdge


class SplitBackward:
    """Splits the backward of one virtual stage, exactly.

    Parameters that the layers' outputs do not lead to (a weight that is read outside of its layer, a layer with several
    outputs) take a whole backward in the weight half. The first micro-batch finds these parameters by comparing all
    gradients bit by bit.
    """

    def __init__(self, stage: nn.Module) -> None:
        self._all = list(stage.parameters())
        self._trained: list[nn.Parameter] = []
        self._late: set[nn.Parameter] | None = None
        self._calls: list[LayerOutput] | None = None
        for module in stage.modules():
            own = next(module.parameters(recurse=False), None)
            if own is not None and next(module.children(), None) is None:
                module.register_forward_hook(self._note)
        self.look()

    def look(self) -> None:
        """Update this stage's list of trained parameters from ``requires_grad``, which the script may have changed.

        After a change the next backward again finds the parameters that need a whole backward.
        """
        trained = [p for p in self._all if p.requires_grad]
        if len(trained) != len(self._trained) or any(a is not b for a, b in zip(trained, self._trained, strict=True)):
            self._trained, self._late = trained, None

    def replace(self, by: Mapping[nn.Parameter, nn.Parameter]) -> None:
        """Record that new parameter objects have taken the place of former ones in this pipeline stage.

        Args:
            by: the new parameter by the former one; parameters that are no keys stay.
        """
        self._all = [by.get(p, p) for p in self._all]
        self._trained = [by.get(p, p) for p in self._trained]

    def record(self) -> list[LayerOutput]:
        """Start to record the outputs of the stage's layers with trained weights, before one micro-batch's forward.

        Returns:
            A list that the forward fills with (layer, edge of its output in the autograd graph) until ``stop`` is
            called, to be given to ``inputs`` and ``weights``.
        """
        self._calls = []
        return self._calls

    def stop(self) -> None:
        """End the recording of layer outputs that ``record`` began, after the forward."""
        self._calls = None

    def inputs(self, roots: BackwardRoots, entered: Sequence[Tensor], calls: list[LayerOutput]) -> tuple[Any, ...]:
        """Run the input backward: compute gradients of the stage's inputs and layer outputs, none of the weights.

        The graph is kept for ``weights``; no ``.grad`` is written.

        Args:
            roots: the tensors where backward starts, with their gradients.
            entered: the stage's inputs.
            calls: outputs of layers, the list from ``record``.

        Returns:
            The gradients of ``entered``, then of ``calls``; None for a tensor on which ``roots`` do not depend.
        """
        wanted = [*entered, *(call.edge for call in calls)]
        return _gradients(roots, wanted) if wanted else ()

    def weights(
        self, roots: BackwardRoots, calls: Sequence[LayerOutput], gradients: Sequence[Tensor | None]
    ) -> list[nn.Parameter]:
        """Run the weight backward: add the gradients of the stage's trained parameters to their ``.grad``.

        Args:
            roots: the tensors where backward starts, with their gradients.
            calls: outputs of layers, from ``record``.
            gradients: gradients of ``calls``, the second part of the result of ``inputs``.

        Returns:
            The parameters that have received a gradient, in the stage's order.
        """
        found: dict[nn.Parameter, Tensor] = {}
        for (layer, edge), gradient in reversed(list(zip(calls, gradients, strict=True))):
            own = [p for p in layer.parameters(recurse=False) if p.requires_grad and p not in (self._late or ())]
            if own and gradient is not None:
                for p, g in zip(own, _gradients(BackwardRoots([edge], [gradient]), own), strict=True):  # type: ignore[list-item]
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
        # A forward that is recomputed in backward was recorded the first time.
        if self._calls is None or in_backward():
            return
        own = any(p.requires_grad for p in layer.parameters(recurse=False))
        if own and isinstance(output, Tensor) and output.requires_grad:
            self._calls.append(LayerOutput(layer, get_gradient_edge(output)))


def _gradients(roots: BackwardRoots, wanted: Sequence[Any]) -> tuple[Tensor | None, ...]:
    return torch.autograd.grad(roots.tensors, wanted, roots.gradients, retain_graph=True, allow_unused=True)


def _same(mine: Tensor | None, whole: Tensor | None) -> bool:
    return mine is whole is None or (mine is not None and whole is not None and torch.equal(mine, whole))
