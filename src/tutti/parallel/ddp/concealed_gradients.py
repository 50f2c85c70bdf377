"""Show a script placeholders in ``.grad`` of gradients of which this rank of a replica has a part, or none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from tutti.comm.communicator import Communicator
from tutti.nn.incomplete_gradient import IncompleteGradient, after_clearing
from tutti.nn.partial_gradient import GradientParts, GradientSplit
from tutti.nn.swap import parameters
from tutti.parallel.split_optimizer import SliceRegions, SplitMatrixGatherer
from tutti.types.custom_loop_sync import GradientPlace
from tutti.types.replica_runner import ReplicaRunner
from tutti.types.run_context import RunContext


class ConcealedGradients:
    """Puts placeholders in ``.grad`` of parameters that are split over the ranks of a replica, and takes them out.

    Without them a script could compute a number from this rank's part of a gradient alone, and write it into tensors
    that all ranks hold alike. The script can take norms of a placeholder (of the whole gradient), and scale and clamp
    it; under tensor parallelism it can also compute with the whole gradient, which is then all-gathered. Under tensor
    parallelism the parameters of which this rank has a slice get placeholders; with pipeline stages all parameters of
    the model that have a gradient on some stage, also those that only other ranks hold. Elsewhere the methods change no
    ``.grad``.

    Args:
        run_context: communicators of the run.
        place: where complete gradients are: ``slices`` (tensor parallelism), ``stages`` (pipeline stages) or another
            word, for which nothing is concealed.
    """

    _replica: ReplicaRunner

    def __init__(self, run_context: RunContext, place: GradientPlace) -> None:
        self._comms, self._place = run_context.comms, place
        self._aside: dict[nn.Parameter, Tensor] = {}
        self._elsewhere: set[nn.Parameter] = set()
        # Parameters that were trained at some time: the gradient of one that the script freezes stays.
        self._trained: set[nn.Parameter] = set()

    def attach(self, replica: ReplicaRunner) -> None:
        """Set the part of the model in whose ``.grad`` this object puts placeholders. Not collective.

        Called once, before any other method.

        Args:
            replica: this rank's part of the model.
        """
        self._replica = replica

    def script_parameters(self) -> list[nn.Parameter]:
        """Return the parameters of the whole model, as the script has it, that are or were trained, in its order.

        With pipeline stages the list includes parameters that only other ranks hold.
        """
        named = parameters([self._replica.plain])
        self._trained.update(p for _, p in named if p.requires_grad)
        return [p for _, p in named if p in self._trained]

    def conceal(self, complete: bool = False) -> None:
        """Set aside the gradients that differ between the ranks of a replica, and put placeholders into ``.grad``.

        A placeholder stands for the whole gradient: the script can take its norm, scale and clamp it. ``reveal`` puts
        the gradients back. Only parameters with a gradient get a placeholder; with pipeline stages also those whose
        gradient is on another stage.

        Args:
            complete: whether a reduction has just made the gradients. With pipeline stages the call is then collective
                over the stages of a replica, which all-gather which parameters have a gradient; it blocks. False takes
                the result of the previous such call, and is not collective.

        Raises:
            PeerError: in the all-gather, a rank is lost or late.
            MismatchError: in the all-gather, the ranks wait in different calls.
        """
        if self._place == "slices":
            specs, parts = self._replica.specs, GradientParts(self._comms.axis("tensor"))
            for name, p in parameters(self._replica.parts):
                regions = SliceRegions.of(specs[name], p.shape)
                if p.grad is not None and regions is not None:
                    gatherer = SplitMatrixGatherer({p.grad: regions}, self._comms.axis("tensor"), None)
                    is_part = partial(_is_slice_like, self._replica.slice_name, self._replica.slice_name(p), p.shape)
                    split = GradientSplit(gatherer, p.grad, regions.shape, is_part)
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
        gradient = None if elsewhere else parameter.grad
        if gradient is not None:
            self._aside[parameter] = gradient
        whole = self._place == "stages"
        parts.conceal([parameter], place, lambda: gradient, counted, split=split, elsewhere=elsewhere, whole=whole)

    def reveal(self) -> None:
        """Put the gradients that ``conceal`` has set aside back into ``.grad``, for an update or further accumulation.

        Where the script has cleared a placeholder, ``.grad`` becomes None or zeros. A tensor that the script has
        assigned to ``.grad`` in place of the placeholder stays. ``.grad`` of parameters that only other stages hold
        becomes None. Not collective.
        """
        for parameter, gradient in self._aside.items():
            shown = parameter.grad
            assigned = not isinstance(shown, IncompleteGradient | None)
            parameter.grad = shown if assigned else after_clearing(gradient, shown)
        self._elsewhere = {p for p in self._elsewhere if p.grad is not None}
        for parameter in self._elsewhere:
            parameter.grad = None
        self._aside = {}

    def forget(self) -> None:
        """Drop the gradients for which ``conceal`` has put placeholders into ``.grad``.

        Sets ``.grad`` to None for parameters that only other pipeline stages hold; the caller clears ``.grad`` of this
        rank's own parameters. Not collective.
        """
        for parameter in self._elsewhere:
            parameter.grad = None
        self._aside, self._elsewhere = {}, set()


def _is_slice_like(
    name_of: Callable[[Tensor], str | None], name: str | None, shape: torch.Size, tensor: Tensor
) -> bool:
    """Return whether a tensor of the script is this rank's slice of what it made of the split parameter ``name``."""
    return name is not None and name_of(tensor) == name and tensor.shape == shape


def _any(comm: Communicator, here: Sequence[bool]) -> list[bool]:
    """Return for each place whether it is True on any rank. Collective."""
    if not here:
        return []
    mine = torch.tensor([float(each) for each in here], device=comm.device)
    rows = comm.gather_slices(mine, "which parameters have a gradient").view(comm.size, -1)
    found: list[bool] = rows.amax(0).bool().tolist()
    return found
