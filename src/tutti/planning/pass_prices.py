"""Prices of the passes of a workload's module groups on a machine, each computed once for many plans."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from tutti.errors import UsageError
from tutti.planning.machine_costs import SAMPLES, StepCosts
from tutti.planning.scaling_laws import Array
from tutti.workload.workload_file import GroupWork, PassWork, Workload

Pass = Literal["forward", "backward"]
PASSES: tuple[Pass, Pass] = ("forward", "backward")


@dataclass
class PassPrices:
    """Seconds of forwards and backwards, for each draw, on a device that is as fast as the typical one.

    They hold for one number of devices a node, which `StepCosts.share_node` sets.

    Attributes:
        workload: of the model and its loss.
        costs: prices of the machine.
    """

    workload: Workload
    costs: StepCosts
    _known: dict[tuple[object, ...], Array] = field(default_factory=dict)

    def group(self, group: GroupWork, passed: Pass, samples: int, checkpointing: str) -> Array:
        """Return the seconds of one module group's forward or backward over a micro-batch: (draws,).

        Args:
            group: module group of the workload.
            passed: ``forward`` or ``backward``; backward includes recomputation.
            samples: of the micro-batch.
            checkpointing: choice of activation checkpointing, such as ``none``.
        """

        def price() -> Array:
            works = [group.forward] if passed == "forward" else backward_work(group, checkpointing)
            return self.costs.compute(works, samples)

        return self.once((group.name, passed, samples, checkpointing if passed == "backward" else ""), price)

    def total(self, passed: Pass, samples: int, checkpointing: str) -> Array:
        """Return the seconds of a forward or backward of the whole model and its loss over a micro-batch.

        Args:
            passed: ``forward`` or ``backward``; backward includes recomputation.
            samples: of the micro-batch.
            checkpointing: choice of activation checkpointing, such as ``none``.

        Returns:
            (draws,) seconds.
        """

        def add() -> Array:
            each = (self.group(group, passed, samples, checkpointing) for group in self.workload.groups)
            return np.asarray(sum(each, np.zeros(SAMPLES)))

        return self.once(("total", passed, samples, checkpointing), add)

    def once(self, key: tuple[object, ...], price: Callable[[], Array]) -> Array:
        """Return the price cached under a key; the first time compute it.

        Args:
            key: whatever the price depends on, besides workload and costs.
            price: computes it, (draws,) seconds.
        """
        if key not in self._known:
            self._known[key] = price()
        return self._known[key]


def backward_work(group: GroupWork, checkpointing: str) -> list[PassWork]:
    """Return the work of a module group's backward: the pass itself, and what activation checkpointing computes again.

    Args:
        group: module group of the workload.
        checkpointing: choice of activation checkpointing, such as ``none``.

    Raises:
        UsageError: the choice recomputes nothing in this model.
    """
    if checkpointing not in group.recompute:
        raise UsageError(
            f"activation checkpointing '{checkpointing}' finds nothing to recompute in this model",
            remedy=f"take one of {', '.join(group.recompute)}",
        )
    return [group.backward, group.recompute[checkpointing]]
