"""Detect parameters that a script thaws or freezes, and parameters that it adds to its optimizers, during a run."""

from __future__ import annotations

from collections.abc import Sequence

from torch.optim import Optimizer

from tutti.errors import UsageError
from tutti.nn.swap import parameters
from tutti.types import Average, GradientSync, ReplicaRunner


class TrainabilityWatch:
    """Carries changes of ``requires_grad`` and of the optimizers' groups over to gradient synchronisation.

    Args:
        replica: this rank's part of the model.
        sync: gradient synchronisation.
        optimizers: the script's optimizers; none where ``tutti.prepare`` was given options.
        average: average of the weights, which takes thawed parameters in; None for none.
    """

    def __init__(
        self, replica: ReplicaRunner, sync: GradientSync, optimizers: Sequence[Optimizer], average: Average | None
    ) -> None:
        self._replica, self._sync, self._optimizers, self._average = replica, sync, optimizers, average
        self._look()

    def _look(self) -> None:
        self._named = parameters(self._replica.parts)
        self._flags = [p.requires_grad for _, p in self._named]
        self._counts = self._sizes()

    def _sizes(self) -> list[int]:
        return [len(group["params"]) for optimizer in self._optimizers for group in optimizer.param_groups]

    def __call__(self, late: bool) -> bool:
        """Attach thawed parameters and new groups. Collective if parameters were thawed; all ranks must thaw the same.

        Args:
            late: whether a forward of this step has been computed already.

        Returns:
            Whether ``requires_grad`` of any parameter has changed.

        Raises:
            UsageError: the strategy cannot train a thawed parameter, or no optimizer has it.
        """
        self._replica.unify_flags()
        flags = [p.requires_grad for _, p in self._named]
        changed = flags != self._flags
        if changed:
            thawed = [
                name
                for (name, _), now, before in zip(self._named, flags, self._flags, strict=True)
                if now and not before
            ]
            if thawed:
                self._check_trained(thawed[0])
                self._sync.reattach(thawed, late)
                if self._average is not None:
                    self._average.adopt(thawed)
            self._look()
        if self._sizes() != self._counts:
            for optimizer in self._optimizers:
                self._sync.adopt(optimizer)
            self._look()
        return changed

    def _check_trained(self, name: str) -> None:
        if not self._optimizers:
            raise UsageError(
                f"the script trains {name} from here on, which was frozen in tutti.prepare",
                why="the optimizer was given as options, and was made for what was trainable then",
                remedy="give tutti.prepare an optimizer that has this parameter, or freeze it after tutti.prepare",
            )
