"""Seconds of a run besides its training steps: start, evaluations and saves, as finished runs have measured them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from statistics import median

from tutti.config.spec import Duration


@dataclass(frozen=True)
class RunOverhead:
    """Seconds that a finished run spent besides training steps.

    Attributes:
        devices: devices of the run.
        ranks: its data ranks, over which the held-out samples of an evaluation are divided.
        start: seconds from the command to the first step, and the excess of this step over the median step.
        evaluation: seconds of one evaluation; None for a run without evaluations.
        save: seconds for which training waited at one save before the end; None for a run without such saves.
        end: seconds after the last step or evaluation, with the save at the end.
    """

    devices: int
    ranks: int
    start: float
    evaluation: float | None
    save: float | None
    end: float


@dataclass(frozen=True)
class OtherTime:
    """Predicts the seconds of a planned run besides its training steps from those of measured runs.

    Start, evaluation and save take the median seconds of the runs with the nearest number of devices (by the ratio of
    the numbers). The seconds of an evaluation are multiplied by measured ÷ planned number of data ranks, over which its
    samples are divided.

    Attributes:
        measured: overheads of the measured runs; predictions are empty without any.
        evaluate, save: planned intervals of evaluations and of saves; None: only at the end of the run.
        epoch: training samples of an epoch; None if unknown.
    """

    measured: tuple[RunOverhead, ...] = ()
    evaluate: Duration | None = None
    save: Duration | None = None
    epoch: float | None = None

    def seconds(self, devices: int, ranks: int, batch: int, samples: float) -> dict[str, float]:
        """Predict the seconds of a planned run besides training: name of the cause → seconds over the whole run.

        Causes are ``start``, ``evaluation`` and ``save``. A cause is absent if no run has measured it, or if its
        interval is in epochs of unknown size.

        Args:
            devices: devices of the planned run.
            ranks: data ranks of the planned run.
            batch: samples of a global batch.
            samples: training samples of the run.
        """
        if not self.measured:
            return {}
        start, evaluation, save, end = _nearest(self.measured, devices)
        found = {"start": start}
        evaluations = interval_count(self.evaluate, samples, batch, self.epoch)
        if evaluation is not None and evaluations is not None:
            found["evaluation"] = evaluations * evaluation / ranks
        saves = interval_count(self.save, samples, batch, self.epoch)
        if saves is not None and (save is not None or saves == 1):
            found["save"] = end + (saves - 1) * (save or 0.0)
        return found


def interval_count(interval: Duration | None, samples: float, batch: int, epoch: float | None) -> int | None:
    """Return the number of evaluations, or of saves, in a run, with the last one at the run's end.

    Args:
        interval: interval between two evaluations or saves; None: only at the end of the run.
        samples: training samples of the run.
        batch: samples of a global batch.
        epoch: samples of an epoch; None if unknown.

    Returns:
        The number, at least 1; None for an interval in epochs of unknown size.

    >>> interval_count(Duration.parse("10st"), 1000, 16, None), interval_count(Duration.parse("1ep"), 1000, 16, 400)
    (7, 3)
    >>> interval_count(None, 1000, 16, None), interval_count(Duration.parse("1ep"), 1000, 16, None)
    (1, None)
    """
    if interval is None:
        return 1
    size = {"st": batch, "sa": 1, "ep": epoch}[interval.unit]
    return None if size is None else max(1, math.ceil(samples / max(interval.value * size, batch) - 1e-9))


@lru_cache(maxsize=256)
def _nearest(measured: tuple[RunOverhead, ...], devices: int) -> tuple[float, float | None, float | None, float]:
    """Return start, evaluation on one data rank, save and end, of the runs with the nearest number of devices."""

    def far(run: RunOverhead) -> float:
        return abs(math.log(run.devices / devices))

    least = min(map(far, measured))
    same = [run for run in measured if far(run) <= least + 1e-9]
    evaluated = [run.evaluation * run.ranks for run in same if run.evaluation is not None]
    saved = [run.save for run in same if run.save is not None]
    return (
        median(run.start for run in same),
        median(evaluated) if evaluated else None,
        median(saved) if saved else None,
        median(run.end for run in same),
    )
