"""Differentiate the backward of a call of a staged model: a gradient penalty, whose loss contains a gradient.

Let stage s compute y_s from x_s, and its backward g_s = (∂y_s/∂x_s)ᵀ h_s, where h_s is the gradient of y_s. A loss of
g_0 has a gradient v_0 with respect to it. The derivative of this first backward runs through the stages twice:

1. from the first stage to the last, v_{s+1} = (∂y_s/∂x_s) v_s, the gradient of the loss with respect to h_s;
2. from the last stage to the first, the gradients of v_s · g_s with respect to the parameters and to x_s, to which the
   gradient that the next stage sends for y_s is added.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from tutti.parallel.pipeline.stage_passes import MicroBatchState, StagePasses

Maybe = Tensor | None


class _StageBackward(NamedTuple):
    """The first backward of one virtual stage, with its graph.

    Attributes:
        flight: state of the call on the stage.
        outputs: y_s, tensors with a gradient.
        given: h_s, the gradients of ``outputs``.
        leaves: x_s, the activations that the stage has received, and then the model's inputs.
        found: g_s, the gradients of ``leaves``; None where ``outputs`` do not depend on a leaf.
    """

    flight: MicroBatchState
    outputs: list[Tensor]
    given: list[Tensor]
    leaves: list[Tensor]
    found: list[Maybe]


class SecondBackward:
    """Backward of one call of a staged model that keeps its graph, so that it can be differentiated once.

    Args:
        passes: passes calls of the model through its stages.
        flights: state of the call on each virtual stage of this rank.
        inputs: the tensors among the call's arguments.
        key: equal for calls in whose backward the same tensors have gradients.
    """

    def __init__(
        self,
        passes: StagePasses,
        flights: Sequence[MicroBatchState],
        inputs: Sequence[Tensor],
        key: tuple[Any, ...],
    ) -> None:
        self._passes, self._flights, self._inputs, self._key = passes, flights, inputs, (*key, "with its graph")
        self._stages: list[_StageBackward] = []

    def first(self, roots: Sequence[tuple[Tensor, Tensor]]) -> list[Maybe]:
        """Run the backward, from the last stage to the first, and keep its graph.

        Collective over the ranks of the replica's stages: point-to-point messages between neighbouring stages.

        Args:
            roots: on the last stage's rank the tensors of the model's output that have a gradient, with these
                gradients; empty on others.

        Returns:
            For each input of the call this rank's part of its gradient, with a graph; None where the stages of this
            rank do not use the input. The sum of the parts over the ranks is the gradient.

        Raises:
            UsageError: the loss depends on an activation that it did not depend on in an earlier call of the same
                ``key``, or no longer depends on one.
            PeerError: a rank of the stages is lost or late.
        """
        passes = self._passes
        own: list[Maybe] = [None] * len(self._inputs)
        for chunk, stage in self._stages_here(backwards=True):
            flight = self._flights[chunk]
            pairs = roots if stage == passes.last else passes.receive_gradients(flight, stage, self._key)
            outputs = [tensor for tensor, _ in pairs]
            given = [gradient.detach().requires_grad_() for _, gradient in pairs]
            leaves = [leaf for leaf in (*flight.entered, *self._inputs) if leaf.requires_grad]
            found: list[Maybe] = [None] * len(leaves)
            if outputs and leaves:
                with torch.enable_grad():
                    found = [*torch.autograd.grad(outputs, leaves, given, create_graph=True, allow_unused=True)]
            self._stages.insert(0, _StageBackward(flight, outputs, given, leaves, found))
            self._send_back(stage, found, self._key)
            flight.gradients.clear()
            own = [_sum(a, b) for a, b in zip(own, self._of_inputs(leaves, found), strict=True)]
        passes.messages.finish()
        return own

    def second(self, gradients: Sequence[Maybe], accumulate: bool) -> tuple[list[Maybe], list[Maybe]]:
        """Differentiate the backward that ``first`` has run: compute gradients of a loss L of the inputs' gradients.

        Collective over the ranks of the replica's stages: point-to-point messages between neighbouring stages, twice,
        and, with ``accumulate``, a sum over stages of the gradients of shared parameters.

        Args:
            gradients: for each input of the call ∂L/∂g, where g is the input's gradient (the results of ``first``,
                summed over the ranks); equal on all ranks; None where L does not depend on g.
            accumulate: whether to add the parameters' gradients to ``.grad``.

        Returns:
            A tuple of two lists. First, on the last stage's rank, the gradient of L with respect to each gradient in
            the ``roots`` of ``first``; empty on other ranks. Second, this rank's part of the gradient of L with respect
            to each input of the call. None where there is no gradient.

        Raises:
            UsageError: with ``accumulate``, the loss depends on several calls of the model, and a parameter has a
                gradient hook of the script.
            PeerError: a rank of the stages is lost or late.
        """
        passes = self._passes
        key = (*self._key, "second", *(gradient is not None for gradient in gradients))
        with passes.accumulating(accumulate):
            starts, of_roots = list[list[tuple[Tensor, Tensor]]](), list[Maybe]()
            for chunk, stage in self._stages_here():
                at = self._stages[chunk]
                passes.replica.draws.moment = at.flight.moment
                arrived = passes.messages.receive("activations", (stage, *key))[0] if stage else []
                ahead = [*arrived, *(gradients[n] for n, leaf in enumerate(self._inputs) if leaf.requires_grad)]
                ends = zip(at.found, ahead, strict=True)
                starts.append([(g, v) for g, v in ends if g is not None and g.requires_grad and v is not None])
                of_given: list[Maybe] = [None] * len(at.given)
                if starts[-1] and at.given:
                    of_given = [*_grad(starts[-1], at.given)]
                if stage == passes.last:
                    of_roots = of_given
                else:
                    # In the place of each activation that the next stage has received with a gradient.
                    reached = {id(tensor): v for tensor, v in zip(at.outputs, of_given, strict=True)}
                    values = [reached.get(id(tensor)) for tensor in at.flight.leaving]
                    passes.messages.send("activations", values, (stage + 1, *key))
            own: list[Maybe] = [None] * len(self._inputs)
            for chunk, stage in self._stages_here(backwards=True):
                at = self._stages[chunk]
                passes.replica.draws.moment = at.flight.moment
                pairs = [] if stage == passes.last else passes.receive_gradients(at.flight, stage, key)
                roots = [*starts[chunk], *pairs]
                found: list[Maybe] = [None] * len(at.leaves)
                if roots:
                    found = self._backward(roots, at.leaves, accumulate)
                self._send_back(stage, found, key)
                own = [_sum(a, b) for a, b in zip(own, self._of_inputs(at.leaves, found), strict=True)]
            passes.messages.finish()
        return of_roots, own

    def _backward(
        self, roots: Sequence[tuple[Tensor, Tensor]], leaves: Sequence[Tensor], accumulate: bool
    ) -> list[Maybe]:
        """Return the gradients of the leaves; with ``accumulate`` add those of the parameters to ``.grad``."""
        if not accumulate:
            return [*_grad(roots, leaves)] if leaves else []
        found: dict[int, Tensor] = {}
        handles = [leaf.register_hook(lambda g, n=n: found.__setitem__(n, g)) for n, leaf in enumerate(leaves)]
        tensors, gradients = [tensor for tensor, _ in roots], [gradient for _, gradient in roots]
        torch.autograd.backward(tensors, gradients, retain_graph=True)
        for handle in handles:
            handle.remove()
        for at in self._stages:
            for leaf in (*at.leaves, *at.given):
                leaf.grad = None
        return [found.get(n) for n in range(len(leaves))]

    def _stages_here(self, backwards: bool = False) -> list[tuple[int, int]]:
        """Return pairs of the index of this rank's virtual stages on the rank and in the model, in order."""
        passes = self._passes
        rows = [(chunk, chunk * passes.ranks + passes.here) for chunk in range(len(self._flights))]
        return rows[::-1] if backwards else rows

    def _send_back(self, stage: int, found: Sequence[Maybe], key: tuple[Any, ...]) -> None:
        """Send the gradients of the activations that a stage has received; ``found`` begins with them."""
        entered = self._flights[stage // self._passes.ranks].entered
        if entered:
            self._passes.messages.send_gradients(found[: len(entered)], entered, (stage, *key))

    def _of_inputs(self, leaves: Sequence[Tensor], found: Sequence[Maybe]) -> list[Maybe]:
        """Return for each input of the model its gradient among those of the leaves, or None."""
        known = {id(leaf): gradient for leaf, gradient in zip(leaves, found, strict=True)}
        return [known.get(id(leaf)) for leaf in self._inputs]


def _grad(roots: Sequence[tuple[Tensor, Tensor]], leaves: Sequence[Tensor]) -> Sequence[Maybe]:
    tensors, gradients = [tensor for tensor, _ in roots], [gradient for _, gradient in roots]
    return torch.autograd.grad(tensors, leaves, gradients, retain_graph=True, allow_unused=True)


def _sum(one: Maybe, other: Maybe) -> Maybe:
    return other if one is None else one if other is None else one + other
