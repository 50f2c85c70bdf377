"""Seconds of copies and updates in host memory, for strategies that sum gradients or update parameters there.

Where the simulated machine computes on CPUs, host memory is the devices' own and is measured. Beside accelerators
nothing measures it, so that its rates are guesses, each of which the prediction names.
"""

from __future__ import annotations

import numpy as np

from tutti.planning.communication_seconds import copy_seconds
from tutti.planning.monte_carlo import DRAWS
from tutti.planning.scaling_laws import Array
from tutti.planning.step_costs import StepCosts

_MEMORY_RATE = 1e10
_DEVICE_LINK, _DEVICE_HOP = 1.2e10, 1e-5
_UPDATE_BYTES = 28
"""Bytes an element that an optimizer with two moments in float32 reads and writes: four reads and three writes."""


class HostPrices:
    """Predicts the seconds of the host's part of a training step: copies, sums and optimizer updates in host memory.

    On accelerators the rates of host memory and of the link to it are guesses; on CPUs they were measured.

    Args:
        costs: durations of operations on the machine; its list of guesses receives a line on each guessed rate.
    """

    def __init__(self, costs: StepCosts) -> None:
        self._costs = costs
        self._apart = costs.overlaps
        if self._apart:
            costs.note(
                f"copies between device and host: {_DEVICE_HOP * 1e6:g} µs and {_DEVICE_LINK / 1e9:g} GB/s; "
                f"host memory: {_MEMORY_RATE / 1e9:g} GB/s a process"
            )

    @property
    def apart(self) -> bool:
        """Whether the machine's devices have memory of their own, as accelerators have, but not CPUs.

        If true, gradients are copied to host memory and parameters back, and the seconds of these copies and of sums
        and updates in host memory are guesses. If false, such copies take no time, and the other seconds are measured.
        """
        return self._apart

    def moved(self, size: float) -> Array:
        """Predict the seconds of a copy between device and host memory; zeros on CPUs, whose memory is the host's.

        Args:
            size: bytes to copy.

        Returns:
            Seconds, array of shape (256,): one value for each of the Monte Carlo draws, all equal.
        """
        return np.full(DRAWS, _DEVICE_HOP + size / _DEVICE_LINK if self._apart and size else 0.0)

    def copied(self, size: float, calls: float = 1, kind: str = "copy") -> Array:
        """Predict the seconds in which a process copies or adds up bytes in host memory.

        Args:
            size: bytes that all operators together read and write: of a copy twice the bytes of the tensor.
            calls: number of operators; without effect on machines with accelerators (``apart``).
            kind: ``copy``, or ``other`` for elementwise operators; without effect on machines with accelerators.

        Returns:
            Seconds, array of shape (256,): one value for each of the Monte Carlo draws of the machine's uncertain
            constants.

        Raises:
            UsageError: the machine's data lack the seconds of such an operator.
        """
        if self._apart:
            return np.full(DRAWS, size / _MEMORY_RATE)
        return copy_seconds(self._costs, size, calls, kind)

    def updated(self, optimizer: str, elements: float) -> Array:
        """Predict the seconds of an optimizer step on parameters in host memory.

        Args:
            optimizer: name of the optimizer, such as ``adam``. Without effect on machines with accelerators, where
                every optimizer is guessed to move as many bytes of host memory as Adam in float32.
            elements: number of parameters that the step updates.

        Returns:
            Seconds, array of shape (256,): one value for each of the Monte Carlo draws of the machine's uncertain
            constants.

        Raises:
            UsageError: the machine's data lack the optimizer; on CPUs only.
        """
        if not self._apart:
            return np.asarray(self._costs.update(optimizer, elements))
        self._costs.note(f"updates in host memory move {_UPDATE_BYTES} bytes an element, as Adam in float32 does")
        return np.full(DRAWS, _UPDATE_BYTES * elements / _MEMORY_RATE)
