"""Show a script placeholders in ``.grad`` of gradients of which this rank of a replica has a part, or none."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from tutti.comm.communicator import Communicator
from tutti.nn.incomplete_gradient import IncompleteGradient, after_clearing
from tutti.nn.partial_gradient import GradientParts, GradientSplit
from tutti.nn.swap import parameters
from tutti.parallel.split_optimizer import SliceRegions, SplitMatrixGatherer
from tutti.types import GradientPlace, ReplicaRunner, RunContext


class ConcealedGradients:
    """Puts placeholders in ``.grad`` of parameters that are split over the ranks of a replica, and takes them out.

    A script might write a number computed from a rank's own part into tensors that all ranks hold alike. Placeholders
    have the norm of the whole gradient, and can be scaled; those of slices give the script whole gradients. With
    pipeline stages all parameters of the model have one, also those that other ranks hold; under tensor parallelism
    only parameters of which this rank has a slice.

    Args:
        run_context: communicators of the run.
        place: where complete gradients are.
    """

    _replica: ReplicaRunner

    def __init__(self, run_context: RunContext, place: GradientPlace) -> None:
        self._comms, self._place = run_context.comms, place
        self._aside: dict[nn.Parameter, Tensor] = {}
        self._elsewhere: set[nn.Parameter] = set()

    def attach(self, replica: ReplicaRunner) -> None:
        """Set this rank's part of the model, before the first gradients."""
        self._replica = replica

    def script_parameters(self) -> list[nn.Parameter]:
        """Return the trained parameters of the script's model in its order, also those that other ranks hold."""
        return [p for _, p in parameters([self._replica.plain]) if p.requires_grad]

    def conceal(self, complete: bool = False) -> None:
        """Put the gradients aside, and placeholders into ``.grad``.

        Args:
            complete: whether a reduction has just made the gradients. Ranks of pipeline stages then tell each other
                which parameters have one, which is collective over the stages.
        """
        if self._place == "slices":
            specs, parts = self._replica.specs, GradientParts(self._comms.axis("tensor"))
            for name, p in parameters(self._replica.parts):
                regions = SliceRegions.of(specs[name], p.shape)
                if p.requires_grad and p.grad is not None and regions is not None:
                    gatherer = SplitMatrixGatherer({p: regions}, self._comms.axis("tensor"), None)
                    split = GradientSplit(gatherer, p, regions.shape, partial(self._is_slice_like, p))
                    self._conceal(p, parts, "in slices over the ranks", name not in self._replica.not_owned, split)
        elif self._place == "stages":
            comm, trained = self._comms.axis("stage"), self.script_parameters()
            names = {p: name for name, p in parameters(self._replica.parts)}
            if complete:
                there = _any(comm, [p in names and p.grad is not None for p in trained])
                self._elsewhere = {p for p, has in zip(trained, there, strict=True) if has and p not in names}
            parts = GradientParts(comm)
            for p in trained:
                if p in self._elsewhere or (p in names and p.grad is not None):
                    counted = p in names and names[p] not in self._replica.not_owned
                    self._conceal(p, parts, "on the ranks of the parameter's stage", counted)

    def _conceal(
        self,
        parameter: nn.Parameter,
        parts: GradientParts,
        place: str,
        counted: bool,
        split: GradientSplit | None = None,
    ) -> None:
        elsewhere = parameter in self._elsewhere
        if parameter.grad is not None and not elsewhere:
            self._aside[parameter] = parameter.grad
        own, whole = partial(self._aside.get, parameter), self._place == "stages"
        parts.conceal([parameter], place, own, counted, split=split, elsewhere=elsewhere, whole=whole)

    def _is_slice_like(self, parameter: nn.Parameter, tensor: Tensor) -> bool:
        """Return whether a tensor of the script is this rank's slice of what it has made of a split parameter."""
        name = self._replica.slice_name(tensor)
        return name is not None and name == self._replica.slice_name(parameter) and tensor.shape == parameter.shape

    def reveal(self) -> None:
        """Put the gradients back into ``.grad``, cleared where the script has cleared the placeholders.

        A gradient that the script has assigned in place of one stays, where ranks have whole gradients.
        """
        for parameter, gradient in self._aside.items():
            shown = parameter.grad
            assigned = self._place == "stages" and not isinstance(shown, IncompleteGradient | None)
            parameter.grad = shown if assigned else after_clearing(gradient, shown)
        self._elsewhere = {p for p in self._elsewhere if p.grad is not None}
        for parameter in self._elsewhere:
            parameter.grad = None
        self._aside = {}

    def forget(self) -> None:
        """Forget the gradients that are aside, which have been cleared."""
        for parameter in self._elsewhere:
            parameter.grad = None
        self._aside, self._elsewhere = {}, set()


def _any(comm: Communicator, here: Sequence[bool]) -> list[bool]:
    """Return for each place whether it is True on any rank. Collective."""
    if not here:
        return []
    mine = torch.tensor([float(each) for each in here], device=comm.device)
    rows = comm.gather_slices(mine, "which parameters have a gradient").view(comm.size, -1)
    found: list[bool] = rows.amax(0).bool().tolist()
    return found
