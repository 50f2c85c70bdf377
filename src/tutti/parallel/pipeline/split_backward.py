"""Split backward into an input backward and a later weight backward.

Qi et al. 2023, arXiv 2401.10241, §3. Both gradients of a layer follow from the gradient of its output. The input
backward therefore goes back to the outputs of all layers that have weights, and the weight backward takes one step from
each of these outputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from tutti.torch_compat import in_backward


class BackwardRoots(NamedTuple):
    """The tensors from which ``torch.autograd.backward`` starts, and for each of them its gradient.

    Attributes:
        tensors: the tensors, such as the loss.
        gradients: gradients of ``tensors``, in the same order.
    """

    tensors: Sequence[Tensor]
    gradients: Sequence[Tensor]


class LayerOutput(NamedTuple):
    """A layer that a forward has called, and where its output stands in the autograd graph.

    Attributes:
        layer: module without submodules that has trained parameters of its own.
        edge: edge of its output in the autograd graph, for ``torch.autograd.grad``.
    """

    layer: nn.Module
    edge: GradientEdge


class SplitBackward:
    """Splits the backward of one virtual pipeline stage into an input half and a weight half, with the same gradients.

    Some parameters' gradients cannot be computed from the gradients of layers' outputs: a weight that is read outside
    of its layer, for example, or a weight of a layer with several outputs. The weight half computes these gradients by
    a backward through the whole stage. The first micro-batch, and each later one that calls other layers, finds these
    parameters: from the autograd graph, since a gradient may be 0 in this micro-batch alone, and by comparing all
    gradients bit by bit.

    Args:
        stage: module of the virtual stage; forward hooks are registered on its layers.
    """

    def __init__(self, stage: nn.Module) -> None:
        self._all = list(stage.parameters())
        self._trained: list[nn.Parameter] = []
        self._late: dict[tuple[nn.Module, ...], set[nn.Parameter]] = {}
        self._calls: list[LayerOutput] | None = None
        for module in stage.modules():
            own = next(module.parameters(recurse=False), None)
            if own is not None and next(module.children(), None) is None:
                module.register_forward_hook(self._note)
        self.look()

    def look(self) -> None:
        """Update the list of this pipeline stage's trained parameters, by their present ``requires_grad``.

        ``weights``, the weight half of the backward, computes gradients for the parameters in this list. After a change
        the next call of ``weights`` finds anew which of their gradients need a backward through the whole stage.
        """
        trained = [p for p in self._all if p.requires_grad]
        if len(trained) != len(self._trained) or any(a is not b for a, b in zip(trained, self._trained, strict=True)):
            self._trained, self._late = trained, {}

    def replace(self, by: Mapping[nn.Parameter, nn.Parameter]) -> None:
        """Take over new parameter objects that have replaced former ones in this pipeline stage.

        The weight half of the stage's backward, ``weights``, then adds gradients to the new parameters.

        Args:
            by: mapping from each former parameter to the new one in its place; parameters that are not keys stay.
        """
        self._all = [by.get(p, p) for p in self._all]
        self._trained, self._late = [by.get(p, p) for p in self._trained], {}

    def record(self) -> list[LayerOutput]:
        """Start to record the outputs of this pipeline stage's layers with trained weights, before a forward.

        Returns:
            A list, empty at first. The micro-batch's forward appends a ``LayerOutput``, the layer and the edge of its
            output in the autograd graph, for each call of a layer until ``stop`` is called. ``inputs`` and ``weights``
            take this list.
        """
        self._calls = []
        return self._calls

    def stop(self) -> None:
        """Stop recording the outputs of this pipeline stage's layers; to be called after the forward.

        The list that ``record`` has returned stays as it is; later forwards add nothing to it.
        """
        self._calls = None

    def inputs(self, roots: BackwardRoots, entered: Sequence[Tensor], calls: list[LayerOutput]) -> tuple[Any, ...]:
        """Run the input half of a backward: compute gradients of the pipeline stage's inputs and its layers' outputs.

        No gradients of weights are computed and no ``.grad`` is written. The autograd graph is kept for ``weights``.
        Not collective.

        Args:
            roots: ``tensors`` where backward starts, such as the loss, and their ``gradients`` in the same order.
            entered: the stage's inputs that require a gradient.
            calls: for each call of a layer in the forward, the layer and the edge of its output in the autograd graph,
                the list from ``record``.

        Returns:
            One tuple of tensors: the gradients of ``entered``, then of the outputs in ``calls``; None in place of a
            tensor on which ``roots`` do not depend. Empty if both are empty.
        """
        wanted = [*entered, *(call.edge for call in calls)]
        return _gradients(roots, wanted) if wanted else ()

    def weights(
        self, roots: BackwardRoots, calls: Sequence[LayerOutput], gradients: Sequence[Tensor | None]
    ) -> list[nn.Parameter]:
        """Run the weight half of a backward: add the gradients of the stage's trained parameters to their ``.grad``.

        Called after ``inputs`` for the same micro-batch. The gradients of a layer's weights are computed from the
        gradients of its outputs. For some parameters this is not possible, such as a weight that is also read outside
        of its layer: the first backward finds them, and their gradients are computed by a backward from ``roots``. Not
        collective.

        Args:
            roots: ``tensors`` where the pipeline stage's backward starts, and their ``gradients``, as for ``inputs``.
            calls: for each call of a layer in the forward, the layer and the edge of its output in the autograd graph,
                the list from ``record``.
            gradients: gradients of the outputs in ``calls``, the second part of the result of ``inputs``.

        Returns:
            The parameters that have received a gradient, in the order of the stage's parameters.
        """
        found: dict[nn.Parameter, Tensor] = {}
        layers = tuple(layer for layer, _ in calls)
        late = self._late.get(layers)
        for (layer, edge), gradient in reversed(list(zip(calls, gradients, strict=True))):
            own = [p for p in layer.parameters(recurse=False) if p.requires_grad and p not in (late or ())]
            if own and gradient is not None:
                for p, g in zip(own, _gradients(BackwardRoots([edge], [gradient]), own), strict=True):  # type: ignore[list-item]
                    if g is not None:
                        found[p] = found[p] + g if p in found else g
        if late is None:
            whole = _gradients(roots, self._trained) if self._trained else ()
            late = _used_elsewhere(roots, calls, self._trained)
            late |= {p for p, g in zip(self._trained, whole, strict=True) if not _same(found.get(p), g)}
            self._late[layers] = late
            found = {p: g for p, g in zip(self._trained, whole, strict=True) if g is not None}
        elif late:
            wanted = [p for p in self._trained if p in late]
            found |= {p: g for p, g in zip(wanted, _gradients(roots, wanted), strict=True) if g is not None}
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


def _used_elsewhere(
    roots: BackwardRoots, calls: Sequence[LayerOutput], trained: Iterable[nn.Parameter]
) -> set[nn.Parameter]:
    """Return parameters of which a path in the autograd graph does not lead through the one call of their layer."""
    bits: dict[tuple[Any, int], int] = {}
    own: dict[nn.Parameter, int] = {}
    for number, (layer, edge) in enumerate(calls):
        place = edge.node, edge.output_nr
        bits[place] = bits.get(place, 0) | 1 << number
        for p in layer.parameters(recurse=False):
            own[p] = own.get(p, 0) | 1 << number
    starts = [get_gradient_edge(tensor) for tensor in roots.tensors if tensor.requires_grad]
    # For each node the calls that some path from the roots to it avoids, one bit each.
    avoided: dict[Any, int] = {}
    for edge in starts:
        avoided[edge.node] = avoided.get(edge.node, 0) | ~bits.get((edge.node, edge.output_nr), 0)
    for node in _in_order(edge.node for edge in starts):
        for following, output in node.next_functions:
            if following is not None:
                passed = avoided[node] & ~bits.get((following, output), 0)
                avoided[following] = avoided.get(following, 0) | passed
    late = set()
    for p in trained:
        through = own.get(p, 0)
        if through.bit_count() != 1 or avoided.get(get_gradient_edge(p).node, 0) & through:
            late.add(p)
    return late


def _in_order(starts: Iterable[Any]) -> list[Any]:
    """Return the nodes of an autograd graph, each before the nodes to which it passes gradients."""
    order, seen, ahead = list[Any](), set[Any](), [(node, False) for node in starts]
    while ahead:
        node, behind = ahead.pop()
        if behind:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            ahead.append((node, True))
            ahead += [(following, False) for following, _ in node.next_functions if following is not None]
    return order[::-1]


def _gradients(roots: BackwardRoots, wanted: Sequence[Any]) -> tuple[Tensor | None, ...]:
    return torch.autograd.grad(roots.tensors, wanted, roots.gradients, retain_graph=True, allow_unused=True)


def _same(mine: Tensor | None, whole: Tensor | None) -> bool:
    return mine is whole is None or (mine is not None and whole is not None and torch.equal(mine, whole))
