"""Throughput of a device: samples, tokens and utilisation, as constant factors of a run's samples a second."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

MFU = "throughput/device/mfu"


@dataclass(frozen=True)
class DeviceThroughput:
    """Tokens and FLOP of one sample of a run, and the peak of its devices, from which throughput figures follow.

    Model FLOPs utilisation (MFU) is the model's FLOP/s ÷ peak; hardware FLOPs utilisation (HFU) counts recomputation,
    too (Chowdhery et al. 2022, arXiv 2204.02311, appendix B). Causal attention counts
    half, unlike in that paper.

    Attributes:
        devices: number of devices of the run.
        tokens: tokens of a sample; None if samples are no sequences.
        model_flop, hardware_flop: FLOP of a sample, forward and backward, without and with recomputation; None if
            unknown.
        peak: peak FLOP/s of a device; None if unknown.
    """

    devices: int
    tokens: int | None = None
    model_flop: float | None = None
    hardware_flop: float | None = None
    peak: float | None = None

    def factors(self) -> dict[str, float]:
        """Return the numbers by which the run's samples a second are multiplied to get figures of one device.

        Keys are the figures' names: ``throughput/device/`` with ``samples_per_sec``, ``tokens_per_sec``, ``mfu`` and
        ``hfu`` (model and hardware FLOPs utilisation, 0 to 1); figures that are unknown are left out.

        >>> palm = DeviceThroughput(1, 2048, 9.007959552e9 * 2048, 9.007959552e9 * 2048 * 4 / 3, 312e12)
        >>> {name: round(factor * 1e4 / 2048, 4) for name, factor in palm.factors().items()}["throughput/device/mfu"]
        0.2887
        """
        found = {"samples_per_sec": 1.0 / self.devices}
        if self.tokens is not None:
            found["tokens_per_sec"] = self.tokens / self.devices
        if self.model_flop is not None and self.peak is not None:
            found["mfu"] = self.model_flop / self.devices / self.peak
        if self.hardware_flop is not None and self.peak is not None:
            found["hfu"] = self.hardware_flop / self.devices / self.peak
        return {f"throughput/device/{name}": factor for name, factor in found.items()}


def device_rates(factors: Mapping[str, float], samples_per_second: float) -> dict[str, float]:
    """Return the figures of one device (samples, tokens a second, MFU, HFU) by name, from the rate of the whole run.

    Args:
        factors: a multiplier of ``samples_per_second`` for each figure, from ``DeviceThroughput.factors``.
        samples_per_second: throughput of all devices together.

    Returns:
        Python floats by the keys of ``factors``, such as ``throughput/device/samples_per_sec``: each factor times
        ``samples_per_second``.
    """
    return {name: factor * samples_per_second for name, factor in factors.items()}
