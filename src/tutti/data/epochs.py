"""The batch contract of every epoch: one for the whole run, or larger global batches from given epochs on."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from tutti.config.growth import BatchGrowth
from tutti.config.spec import Duration
from tutti.data.contract import BatchContract
from tutti.errors import UsageError, counted


@dataclass(frozen=True)
class EpochPhase:
    """Consecutive epochs of a run with one global batch size.

    Attributes:
        start, end: epochs ``start`` to ``end``, exclusive, counted from 0; the last phase's ``end`` is infinite.
        contract: global batch size of these epochs, and its division over logical workers (fixed shares) and ranks.
        rate: factor on the learning rate: below 1 where growth would exceed the largest batch.
    """

    start: int
    end: float
    contract: BatchContract
    rate: float


class EarlierEpochs(NamedTuple):
    """Epochs of a run before it was resumed with another batch size or data set.

    Attributes:
        end: the epoch of the resume, counted from 0, which is the first one after these epochs.
        batch: samples in a global batch.
        samples: training samples; None if unknown.
    """

    end: int
    batch: int
    samples: int | None


@dataclass(frozen=True)
class Epochs:
    """The batch contracts (global batch size, and its division over workers and ranks) of all epochs. Pure arithmetic.

    Workers are logical workers, a fixed number of shares of the global batch.

    Attributes:
        first: the contract of the first epoch; after a resume with another one, of all epochs from the resume on.
        growth: the batch growth schedule; None for one batch size.
        earlier: epochs before a resume with another batch size or data set, in order.

    Raises:
        UsageError: the batch cannot grow, or grows with an unknown number of samples in an epoch.
    """

    first: BatchContract
    growth: BatchGrowth | None = None
    earlier: tuple[EarlierEpochs, ...] = ()

    def __post_init__(self) -> None:
        if self.growth is not None and self.first.dataset is None:
            raise UsageError(
                "the batch cannot grow with a stream whose length is not known",
                why="the largest batch is measured by the data set, and schedules count the steps of its epochs",
                remedy="give the data set __len__, which one that shards itself cannot have, or leave batch growth out",
            )
        if self.growth is not None:
            self.growth.most(self.first.batch, self.first.dataset)

    @cached_property
    def phases(self) -> tuple[EpochPhase, ...]:
        """The run's epochs in spans with one batch contract: a tuple of ``EpochPhase``, the last without an end.

        A span ends where the batch grows, and at a resume with another batch size or data set; without either there is
        one span. A span has its range of epochs (``start``, ``end``), the batch contract of these epochs (global batch
        size, number of training samples, and the division over logical workers, which are fixed shares, and ranks), and
        the factor ``rate`` on the learning rate. The division of epochs before a resume with another batch size or data
        set is not known: their contract has one worker and one rank, and their ``rate`` is 1.
        """
        if self.growth is None:
            starts = (0, *(each.end for each in self.earlier))
            past = [
                # Only counted: the ranks and workers of the time do not matter.
                EpochPhase(start, each.end, BatchContract(each.samples, each.batch, 1), 1.0)
                for start, each in zip(starts, self.earlier, strict=False)
            ]
            return (*past, EpochPhase(starts[-1], math.inf, self.first, 1.0))
        largest = self.growth.most(self.first.batch, self.first.known) or 0
        found = []
        for passed, (start, end) in enumerate(pairwise((0, *self.growth.epochs, math.inf))):
            batch, rate = self.growth.at(passed, self.first.batch, largest)
            found.append(EpochPhase(int(start), end, replace(self.first, batch=batch), rate))
        return tuple(found)

    def phase(self, epoch: int) -> EpochPhase:
        """Return the span of epochs with one batch size to which an epoch belongs, with its learning-rate factor.

        Args:
            epoch: from 0.

        Returns:
            An ``EpochPhase``: the span's first epoch ``start`` and exclusive ``end`` (∞ for the last span), the size of
            its global batches and their division over logical workers (fixed shares) and ranks (``contract``), and the
            factor on the learning rate (``rate``).
        """
        return next(phase for phase in self.phases if epoch < phase.end)

    def contract_of(self, epoch: int) -> BatchContract:
        """Return the batch contract of an epoch: its global batch size, and how it is divided over workers and ranks.

        Workers are logical workers, a fixed number of shares of the global batch, of which a rank computes one or more.

        Args:
            epoch: from 0.

        Returns:
            A ``BatchContract`` with the attributes ``batch`` (samples in a global batch), ``workers``, ``ranks``,
            ``micro`` (most samples in a micro-batch, or None) and ``dataset`` (samples in an epoch, or None). For an
            epoch before a resume with another batch size ``workers`` and ``ranks`` are 1.
        """
        return self.phase(epoch).contract

    def steps(self, duration: Duration) -> int:
        """Return the number of optimizer steps, from the start of the run, that ``duration`` takes.

        Each epoch counts with its own batch size, where the batch grows or a resume has changed it. Within the epochs
        of one batch size, a part of an epoch is rounded to the nearest step, and samples that do not fill a batch count
        as a step.

        Args:
            duration: a number of epochs, steps or samples.

        Raises:
            UsageError: the duration is in epochs, and the length of an epoch is not known.
        """
        dataset = self.first.dataset
        if duration.unit == "st":
            return duration.steps(dataset, self.first.batch)
        before, total = 0.0, 0
        for phase in self.phases:
            epoch = 1 if duration.unit == "ep" else phase.contract.dataset or 1
            length = (phase.end - phase.start) * epoch
            part = max(min(duration.value - before, length), 0)
            total += Duration(part, duration.unit).steps(phase.contract.dataset, phase.contract.batch)
            before += length
        return total

    def consumed(self, steps: int) -> int:
        """Return the number of samples consumed by the first ``steps`` steps of the run, over all ranks.

        Each epoch counts with its own batch size and number of samples.

        Args:
            steps: number of steps since the start of the run.

        Raises:
            UsageError: the length of an epoch is not known.
        """
        total = 0
        for phase in self.phases:
            here = int(min(steps, (phase.end - phase.start) * phase.contract.steps_per_epoch))
            total, steps = total + phase.contract.consumed(here), steps - here
        return total

    def position_after(self, steps: int) -> tuple[int, int]:
        """Return the position in the training data after the first steps of a run.

        Each epoch counts with its own batch size and number of samples.

        Args:
            steps: number of steps since the start of the run.

        Returns:
            A pair: number of whole epochs, and number of steps taken in the epoch after these.

        Raises:
            UsageError: the length of an epoch is not known.
        """
        for phase in self.phases:
            each, epochs = phase.contract.steps_per_epoch, phase.end - phase.start
            if steps < epochs * each:
                return phase.start + steps // each, steps % each
            steps -= int(epochs * each)
        raise AssertionError("the last phase never ends")

    def describe(self) -> Mapping[str, str]:
        """Return lines that a run prints at its start: the first epoch's batch and its division, and later changes.

        Returns:
            Text of each line by its label, such as ``global batch`` or ``from epoch 31``. Epochs count from 1.
        """
        return dict(self._lines())

    def _lines(self) -> Iterator[tuple[str, str]]:
        yield from self.first.describe().items()
        for each in self.earlier:
            yield (
                f"until epoch {each.end}",
                f"{counted(each.batch, 'sample')} a step, before the run was resumed otherwise",
            )
        for phase in self.phases[1:] if self.growth is not None else ():
            lines = phase.contract.describe()
            rate = f", learning rate × {phase.rate:.4g}" if phase.rate != 1 else ""
            yield (
                f"from epoch {phase.start + 1}",
                f"{lines['global batch']} a step, {lines['micro-batch']}, "
                f"{counted(phase.contract.steps_per_epoch, 'step')}{rate}",
            )
