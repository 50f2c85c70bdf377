"""Measure the gradient noise of a training script that calls ``tutti.prepare``, while it trains in this process."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tutti.errors import NonFiniteError, UsageError, counted
from tutti.launcher.launch import check_script
from tutti.optim.noise_scale import NoiseEstimate
from tutti.planning.critical_batch import NoiseEvidence, last_estimates
from tutti.planning.script_training import EnoughSteps, train_script
from tutti.train.run import Run
from tutti.train.run_options import RunOptions

_EVERY, _WORKERS = 10, 4


@dataclass(frozen=True)
class ScriptMeasurement:
    """Numbers for the measurement of a training script's gradient noise; None leaves a number as the script has it.

    Attributes:
        every: interval of measurements in steps; 10 where the script gives none either.
        workers: number of logical workers, fixed shares of the global batch. 4 where the script gives neither workers
            nor a micro-batch, because the gradient of a single part has no variance.
        micro_batch: most samples in one forward pass.
        steps: number of steps after which the script is ended; None lets it train to its end.
    """

    every: int | None = None
    workers: int | None = None
    micro_batch: int | None = None
    steps: int | None = None

    def applied(self, options: RunOptions, record: Any) -> RunOptions:
        """Return a copy of the options of a script's ``tutti.prepare``, with this measurement and a further callback.

        The numbers of this measurement replace ``noise_every``, ``workers`` and ``micro_batch``. A ``noise_every`` that
        neither the measurement nor the script states is 10, and ``workers`` is 4 if neither states it or a micro-batch.
        ``record`` is appended to ``callbacks``.

        Args:
            options: options that the script passes to ``tutti.prepare``; not changed.
            record: the callback, whose ``on_step_end(run)`` the run calls after each step.
        """
        workers = self.workers or options.workers
        micro_batch = self.micro_batch or options.micro_batch
        return dataclasses.replace(
            options,
            noise_every=self.every or options.noise_every or _EVERY,
            workers=workers if workers or micro_batch else _WORKERS,
            micro_batch=micro_batch,
            callbacks=[*options.callbacks, record],
        )


class _Recorder:
    """Keeps the estimates of each step of a run, and ends the script after a number of steps.

    Args:
        steps: that number; None for never.
    """

    def __init__(self, steps: int | None) -> None:
        self._steps = steps
        self.values: list[dict[str, float]] = []
        self.taken, self.batch, self.loss = 0, 0, math.nan

    def on_step_end(self, run: Run) -> None:
        """Keep the noise of the step.

        Args:
            run: the script's run.
        """
        self.taken, self.batch = run.global_step, run.feed.contract.batch
        self.loss = self.loss if run.stats is None else run.stats.loss
        if run.noise_probe is not None:
            self.values.append(dict(run.noise_probe.values()))
        if self._steps is not None and self.taken >= self._steps:
            raise EnoughSteps


def script_noise(
    script: str, arguments: Sequence[str], measurement: ScriptMeasurement, last: float = 0.5
) -> NoiseEvidence:
    """Train a script in this process, on one device, and return the gradient noise of its last measured steps.

    The script runs as ``__main__`` with a ``sys.argv`` of its own and trains as it does alone, with all its effects,
    such as files that it writes. Its output goes to stderr. The first run that it prepares is measured.

    Args:
        script: path of the script, which calls ``tutti.prepare``.
        arguments: its command-line arguments.
        measurement: interval of measurements, logical workers and micro-batch, and the number of steps to train.
        last: fraction of the measured steps, counted from the end, whose noise is kept.

    Returns:
        A ``NoiseEvidence`` without a target: ``path`` and ``task`` are the script's path and file name, ``batch`` the
        samples of a global batch, ``estimates`` and ``scaled`` the noise of the gradient and of Adam's preconditioned
        gradient (may be empty).

    Raises:
        UsageError: the script does not exist, raises, exits with another code than 0, or makes no measured step; or the
            noise cannot be measured with its options. The message names the script's line.
        NonFiniteError: the loss of the last step is not finite.
    """
    check_script(script)
    recorder = _Recorder(measurement.steps)
    train_script(
        script,
        arguments,
        lambda dataset, options: (dataset, measurement.applied(options, recorder)),
        "tutti noise train.py --steps 500",
    )
    return _evidence(script, recorder, last)


def _evidence(script: str, recorder: _Recorder, last: float) -> NoiseEvidence:
    """Return what was recorded. Raises UsageError without an estimate, NonFiniteError where training diverged."""
    if not recorder.taken:
        raise UsageError(
            "the script has trained no step",
            where=script,
            remedy="call tutti.prepare(model, optimizer, data, loss) in it, and run.step or a loop over"
            " run.microbatches(epoch)",
        )
    if not math.isfinite(recorder.loss):
        raise NonFiniteError(
            "the script's training diverged",
            where=f"{script}, step {recorder.taken}",
            why="the loss of its last step is not finite, and its gradients' noise says nothing",
            remedy="lower the learning rate or clip the gradient",
        )
    found: dict[str, tuple[NoiseEstimate, ...]] = {
        name: last_estimates(recorder.values, name, last) for name in ("noise", "noise/adam")
    }
    if not found["noise"]:
        raise UsageError(
            f"no gradient noise was measured in {counted(recorder.taken, 'step')}",
            where=script,
            remedy="take --noise-every 1, or more steps",
        )
    return NoiseEvidence(
        Path(script), Path(script).name, recorder.batch, found["noise"], found["noise/adam"], None, None
    )
