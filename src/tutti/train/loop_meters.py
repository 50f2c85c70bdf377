"""Meters of the training loop: mean loss and metrics of the epoch under way, and the speed of training."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tutti.checkpoint.manifest import REMEDY
from tutti.errors import CheckpointError
from tutti.metrics.listener import Pace
from tutti.metrics.metrics_file import from_json_number, to_json_number
from tutti.metrics.throughput import DeviceThroughput, device_rates
from tutti.types.micro_batch import Batch

_WINDOW = 30
"""Number of last steps over which the present speed is measured."""


@dataclass
class Means:
    """Sums from which the means of loss and metrics over one epoch follow; each step is weighted by its count.

    Attributes:
        loss: sum over steps of mean loss times count.
        count: sum of the counts: samples, or other units that the loss function counts.
        metrics: sum over steps of mean times count, by name.
    """

    loss: float = 0.0
    count: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)

    def add(self, loss: float, count: float, metrics: Mapping[str, float]) -> None:
        """Add the mean loss and metrics of one step, times its count, to the sums from which an epoch's means follow.

        Args:
            loss: mean loss of the step.
            count: weight of the step: its samples, or other units that the loss function counts.
            metrics: means by name.
        """
        self.loss += loss * count
        self.count += count
        for name, value in metrics.items():
            self.metrics[name] = self.metrics.get(name, 0.0) + value * count

    def facts(self) -> dict[str, Any]:
        """Return the sums of the present epoch's means so far as a JSON value for a checkpoint.

        Returns:
            A dict with ``count``, and ``loss`` and ``metrics`` (a dict by name), which are sums weighted by the steps'
            counts. Numbers that are not finite are None.
        """
        metrics = {name: to_json_number(value) for name, value in self.metrics.items()}
        return {"loss": to_json_number(self.loss), "count": to_json_number(self.count), "metrics": metrics}

    @classmethod
    def saved(cls, facts: Mapping[str, Any]) -> Means:
        """Return a ``Means`` (sums for the means of loss and metrics over an epoch), restored from a checkpoint.

        Args:
            facts: the checkpoint's facts; ``facts["means"]`` is the result of ``facts()``, in which null stands for
                NaN.

        Raises:
            CheckpointError: ``facts`` has no entry ``means``, or the entry does not hold numbers.
        """
        try:
            kept = facts["means"]
            metrics = {str(name): from_json_number(value) for name, value in kept["metrics"].items()}
            return cls(from_json_number(kept["loss"]), from_json_number(kept["count"]), metrics)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError("the checkpoint's 'means' are not numbers", why=repr(error), remedy=REMEDY) from error

    def summary(self) -> dict[str, float]:
        """Return the mean loss and metrics of the epoch's steps so far, each step weighted by its count.

        Returns:
            Python floats by name: ``{"loss": …, "accuracy": …}``; ``{"loss": 0.0}`` before the first step.
        """
        count = self.count or 1.0
        return {"loss": self.loss / count, **{name: value / count for name, value in self.metrics.items()}}


class Speed:
    """Measures samples per second of training over the last 30 steps and over the whole run.

    Time of evaluations, saves and callbacks is excluded.

    For a compiled model the first step counts as start-up, as it includes compilation.

    Args:
        total: samples in the whole run.
        done: samples consumed before this start.
        compiled: whether the model is compiled.
        spent: seconds of training before this start, of a resumed run.
    """

    def __init__(self, total: float, done: int, compiled: bool = False, spent: float = 0.0) -> None:
        self._total, self._start, self._spent = total, time.perf_counter(), spent
        self._first, self._startup = (self._start, done), compiled
        self._marks: deque[tuple[float, int]] = deque([(self._start, done)], maxlen=_WINDOW + 1)
        self._paused = self._waited = 0.0
        self._factors: Mapping[str, float] = {}

    def worth(self, throughput: DeviceThroughput) -> None:
        """Set the tokens and FLOP of one sample, so that ``mark`` and ``overall`` report tokens/s, MFU and HFU.

        This object measures the speed of training. Tokens/s and FLOP utilisation (MFU, HFU) are per device; those that
        cannot be computed from the numbers given are left out.

        Args:
            throughput: tokens and FLOP of one sample, and number and peak FLOP/s of the devices.
        """
        self._factors = throughput.factors()

    def mark(self, samples: int) -> Pace:
        """Record the end of a training step in this meter of training speed, and return the present speed.

        Args:
            samples: samples that the run has consumed so far.

        Returns:
            A ``Pace`` of floats: ``samples_per_second`` over the last 30 steps, ``elapsed`` seconds of training,
            ``remaining`` expected seconds to the end of the run, ``device`` (a dict by name, such as
            ``throughput/device/mfu``: samples/s, tokens/s, MFU and HFU of a device, unknown ones left out), and
            ``data``, seconds that the step waited for its batch.
        """
        now = time.perf_counter() - self._paused
        self._marks.append((now, samples))
        (before, then), elapsed = self._marks[0], self._spent + now - self._start
        rate = (samples - then) / max(now - before, 1e-9)
        if self._startup:
            self._startup, self._first = False, (now, samples)
            self._marks.clear()
            self._marks.append(self._first)
        remaining = (self._total - samples) / max(rate, 1e-9)
        return Pace(rate, elapsed, remaining, device_rates(self._factors, rate), self._waited)

    def timed(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Yield the batches unchanged, and measure the seconds that the training loop waits for each.

        The next call of ``mark`` reports the wait for the batch that was yielded most recently.

        Args:
            batches: the batches of an epoch.
        """
        while True:
            begin = time.perf_counter()
            try:
                batch = next(batches)
            except StopIteration:
                return
            self._waited = time.perf_counter() - begin
            yield batch

    def elapsed(self) -> float:
        """Return seconds of training since the first start of the run, without pauses such as evaluations."""
        return self._spent + time.perf_counter() - self._paused - self._start

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Return a context manager whose time, such as that of an evaluation, is left out of the training time."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._paused += time.perf_counter() - begin

    def overall(self) -> dict[str, float]:
        """Return the speed of the run for ``summary.json``, by key.

        Returns:
            ``samples_per_second`` of all devices since this process started, for a compiled model without its first
            step; as far as known the figures of one device, ``throughput/device/`` with ``samples_per_sec``,
            ``tokens_per_sec``, ``mfu`` and ``hfu``; ``seconds`` of training from the run's first start to the last call
            of ``mark``; and ``startup_seconds``, those of a compiled model's first step, otherwise 0.
        """
        (now, samples), (begun, done) = self._marks[-1], self._first
        rate = (samples - done) / max(now - begun, 1e-9)
        return {
            "samples_per_second": rate,
            **device_rates(self._factors, rate),
            "seconds": self._spent + now - self._start,
            "startup_seconds": begun - self._start,
        }
