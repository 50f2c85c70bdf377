"""Prices of the passes of a workload's module groups on a machine, each computed once for many plans."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import numpy as np

from tutti.errors import UsageError
from tutti.planning.monte_carlo import DRAWS
from tutti.planning.scaling_laws import Array
from tutti.planning.step_costs import StepCosts
from tutti.workload.workload_file import GroupWork, PassWork, Workload

Pass = Literal["forward", "backward"]
Priced = TypeVar("Priced")
PASSES: tuple[Pass, Pass] = ("forward", "backward")


@dataclass
class PassPrices:
    """Predicts and caches the seconds of forwards and backwards of a model's module groups on a typical device.

    A module group is a module that FSDP wraps or a pipeline stage calls, the rest of the model, or the loss. The
    seconds hold for one number of devices of a run, which is set by ``StepCosts.share_node`` before.

    Attributes:
        workload: FLOP, bytes and calls of the model and its loss, by module group.
        costs: predicts the seconds of computing and communication on the machine.
    """

    workload: Workload
    costs: StepCosts
    _known: dict[tuple[object, ...], Any] = field(default_factory=dict)

    def group(self, group: GroupWork, passed: Pass, samples: int, checkpointing: str) -> Array:
        """Predict the seconds of one module group's forward or backward over a micro-batch, on a typical device.

        A module group is a module that FSDP wraps or a pipeline stage calls, the rest of the model, or the loss.

        Args:
            group: work and sizes of the module group.
            passed: ``forward`` or ``backward``; backward includes recomputation.
            samples: number of samples in the micro-batch.
            checkpointing: value of ``--activation-checkpointing``, such as ``none``, ``blocks`` or ``selective``.

        Returns:
            Seconds, array of shape (256,): one value for each of the Monte Carlo draws of the machine's uncertain
            constants. The array is the cached one, which later calls return too: do not change it.

        Raises:
            UsageError: the machine's data lack a class of operators; or, for ``backward`` only, ``checkpointing`` finds
                nothing to recompute in this model.
        """

        def price() -> Array:
            works = [group.forward] if passed == "forward" else backward_work(group, checkpointing)
            resident = self.resident(samples, checkpointing)
            return self.costs.compute(works, samples, backward=passed == "backward", resident=resident)

        return self.once((group.name, passed, samples, checkpointing if passed == "backward" else ""), price)

    def total(self, passed: Pass, samples: int, checkpointing: str) -> Array:
        """Predict the seconds of a forward or backward of the whole model and its loss over a micro-batch.

        Args:
            passed: ``forward`` or ``backward``; backward includes recomputation.
            samples: number of samples in the micro-batch.
            checkpointing: value of ``--activation-checkpointing``, such as ``none``, ``blocks`` or ``selective``.

        Returns:
            Seconds on a device of typical speed, array of shape (256,): one value for each of the Monte Carlo draws
            of the machine's uncertain constants. The array is the cached one, which later calls return too: do not
            change it.

        Raises:
            UsageError: the machine's data lack a class of operators; or, for ``backward`` only, ``checkpointing`` finds
                nothing to recompute in this model.
        """

        def add() -> Array:
            each = (self.group(group, passed, samples, checkpointing) for group in self.workload.groups)
            return np.asarray(sum(each, np.zeros(DRAWS)))

        return self.once(("total", passed, samples, checkpointing), add)

    def resident(self, samples: int, checkpointing: str) -> float:
        """Return the bytes that a micro-batch touches between two uses of a tensor.

        They are the activations that its forward keeps, the parameters, and their gradients.

        Args:
            samples: number of samples in the micro-batch.
            checkpointing: value of ``--activation-checkpointing``, such as ``none``, ``blocks`` or ``selective``.
        """

        def add() -> float:
            groups = self.workload.groups
            kept = sum(g.activation_bytes.get(checkpointing, g.activation_bytes["none"]).at(samples) for g in groups)
            return max(kept, 0.0) + sum(2 * group.parameter_bytes for group in groups)

        return self.once(("resident", samples, checkpointing), add)

    def once(self, key: tuple[object, ...], price: Callable[[], Priced]) -> Priced:
        """Return the seconds cached under a key; where there are none, call ``price`` and cache its result.

        The cache belongs to this object, and so to one model, one machine and one number of devices.

        Args:
            key: tuple of all arguments on which the seconds depend, besides the model and the machine.
            price: computes the predicted seconds, such as an array whose last dimension holds Monte Carlo draws;
                called without arguments, and only if the key is new.

        Returns:
            What ``price`` returned for this key. All callers share one object.
        """
        if key not in self._known:
            self._known[key] = price()
        found: Priced = self._known[key]
        return found


def backward_work(group: GroupWork, checkpointing: str) -> list[PassWork]:
    """Return the work of a module group's backward: of the pass, and of the recomputation by activation checkpointing.

    A module group is a module that FSDP wraps or a pipeline stage calls, the rest of the model, or the loss.

    Args:
        group: work and sizes of the module group.
        checkpointing: value of ``--activation-checkpointing``, such as ``none``, ``blocks`` or ``selective``.

    Returns:
        A list of two, backward and recomputation (with ``none``: what fused kernels repeat), each with FLOP, bytes read
        and written in memory, and calls by class of operator.

    Raises:
        UsageError: the model has no module that ``checkpointing`` would recompute; equal for all groups of a model. For
            a group whose modules are not recomputed the recomputation is empty.
    """
    if checkpointing not in group.recompute:
        raise UsageError(
            f"activation checkpointing '{checkpointing}' finds nothing to recompute in this model",
            remedy=f"take one of {', '.join(group.recompute)}",
        )
    return [group.backward, group.recompute[checkpointing]]
