"""Protocol of the back-test for whole trainings: time to a target on many devices from trainings on a quarter of them.

The time is data to the target, E(B) = E_min(1 + B/B_crit), times the time of a sample, and a serial part τ that no
number of devices shortens, such as evaluations and the starts of epochs. A device's time for a sample grows where its
share b of the batch shrinks, s·(1 + ρ·b₀/b), because a step has costs that no sample has: b₀ is the share on the fewest
devices, and ρ the fixed costs of a step there over those of its samples.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from tutti.planning.conformal_band import CheckedPrediction
from tutti.planning.law_fit import fit_law, fit_target
from tutti.planning.measurement_table import TableRow
from tutti.planning.protocol import NOT_STATED, GroupPredictions, grouped
from tutti.planning.scaling_laws import Array, Inputs, ScalingLaw

QUARTER = "time, from at most 1/4 of the devices"
FEWER_DEVICES = "time to the target on fewer devices"
_SHARE = 4.0
_UNIT_CHANGES = 20.0
_OVERHEAD = 0.05
_SERIAL_SECONDS, _SERIAL_SHARE = 10.0, 0.1


def _sample_seconds(constants: Array, inputs: Inputs) -> Array:
    sample, overhead, serial = constants
    return np.asarray(sample * (1 + overhead * inputs["first"] / inputs["local"]) + serial * inputs["share"])


def _sample_centre(inputs: Inputs, seconds: Array) -> Array:
    """Return the prior's constants: guesses of their order.

    The fixed costs of a step on the fewest devices are a twentieth of its samples' time; the serial part of a training
    is 10 s, and at most a tenth of the shortest training.
    """
    shortest = float((seconds / inputs["share"]).min())
    serial = min(_SERIAL_SECONDS, _SERIAL_SHARE * shortest)
    return np.array([float(np.median(seconds)) / (1 + _OVERHEAD), _OVERHEAD, serial])


SAMPLE_LAW = ScalingLaw(
    "device-seconds of a sample by a device's share of the batch and of the data",
    ("sample_s", "step_over_samples", "serial_s"),
    (2.0, 0.8, 0.5),
    _sample_centre,
    _sample_seconds,
)
"""Inputs: ``local``, a device's share of the batch, ``first``, that on the fewest devices, and ``share``, devices over
the data to the target: device-seconds of a sample for each second of the whole training."""


@dataclass(frozen=True)
class _Training:
    """One published training: devices, global batch, data to the target, and minutes."""

    devices: float
    batch: float
    data: float
    minutes: float

    @property
    def local(self) -> float:
        return self.batch / self.devices


def time_to_target(rows: Sequence[TableRow]) -> Iterator[GroupPredictions]:
    """Predict the time of training to a target on N devices from trainings on at most N/4 devices.

    The time is the number of samples to the target times the device-seconds of a sample, a serial part included,
    divided by the number of devices. The samples and the device-seconds are predicted by one law each; both laws are
    fitted to trainings of the same benchmark round on the same accelerator. Trainings without a number of devices or
    minutes, or with a column ``ok`` that is not above 0, are left out, and so are trainings whose data to the target
    differ from the round's median by a factor of 20 or more, because such data are in another unit.

    Args:
        rows: one row for each training run, with benchmark, round, accelerator, nodes and devices a node, global batch,
            data until the target was reached and minutes, as tables of the kind ``data to target`` have them.

    Yields:
        For each benchmark one record with ``group`` (the benchmark), ``protocol`` (``time, from at most 1/4 of the
        devices``), ``predictions`` (in minutes, a list of ``CheckedPrediction``, with ``predicted`` and ``measured``)
        and ``reason``: why that list is empty, else an empty text.
    """
    for group, same in grouped(rows, lambda row: row.label("bench", "seq") or NOT_STATED.format("benchmark")).items():
        asked = GroupPredictions(group, QUARTER)
        for series, members in grouped(same, lambda row: row.label("bench", "seq", "version")).items():
            for hardware, trainings in _trainings(members).items():
                name = f"time to target {same[0].label('bench')}"
                asked.predictions += _on_more_devices(trainings, name, f"{series} {hardware}")
        if not asked.predictions:
            asked.reason = "no trainings with minutes on N and on at most N/4 devices"
            if not any(row.label("acc") for row in same):
                asked.reason = "the table does not say the accelerator of a training (acc)"
        yield asked


def _trainings(rows: Sequence[TableRow]) -> dict[str, list[_Training]]:
    """Return the trainings of a round that reached the target, by accelerator."""
    needed = ("devices", "batch", "last_eval", "minutes")
    known = [row for row in rows if all(row.number(role) > 0 for role in needed) and row.number("ok", 1.0) > 0]
    if not known:
        return {}
    middle = statistics.median(math.log(row.number("last_eval")) for row in known)
    found: dict[str, list[_Training]] = {}
    for row in known:
        if abs(math.log(row.number("last_eval")) - middle) < math.log(_UNIT_CHANGES) and row.label("acc"):
            found.setdefault(row.label("acc"), []).append(_Training(*(row.number(role) for role in needed)))
    return found


def _on_more_devices(trainings: Sequence[_Training], name: str, series: str) -> list[CheckedPrediction]:
    """Predict the minutes of each number of devices and batch from trainings on at most a quarter of the devices.

    Args:
        trainings: of one round, on one accelerator.
        name: set of the predictions.
        series: their series.
    """
    found = []
    for (devices, batch), there in grouped(trainings, lambda each: (each.devices, each.batch)).items():
        below = [each for each in trainings if each.devices <= devices / _SHARE]
        if not below:
            continue
        by_batch = grouped(below, lambda each: each.batch)
        data = np.array([statistics.median(each.data for each in same) for same in by_batch.values()])
        runs = np.array([float(len(same)) for same in by_batch.values()])
        needed, spread = fit_target(np.array(list(by_batch)), data, runs).predict(batch)
        fewest = min(each.devices for each in below)
        first = statistics.median(each.local for each in below if each.devices == fewest)
        inputs = {
            "local": np.array([each.local for each in below]),
            "first": np.full(len(below), first),
            "share": np.array([each.devices / each.data for each in below]),
        }
        seconds = np.array([60 * each.minutes * each.devices / each.data for each in below])
        fitted = fit_law(SAMPLE_LAW, inputs, seconds)
        asked = {"local": batch / devices, "first": first, "share": devices / needed}
        sample, wide = fitted.predict({name: np.array([value]) for name, value in asked.items()})
        minutes = float(sample[0]) * needed / devices / 60
        truth = statistics.median(each.minutes for each in there)
        distance = devices / max(each.devices for each in below)
        sigma = math.hypot(spread, float(wide[0]))
        found.append(CheckedPrediction(name, FEWER_DEVICES, distance, series, minutes, sigma, truth))
    return found
