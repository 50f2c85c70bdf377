"""The batch contract of every epoch: one for the whole run, or larger batches from some epoch on."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from tutti.data.contract import BatchContract
from tutti.errors import UsageError
from tutti.laws.growth import Growth
from tutti.spec import Duration


@dataclass(frozen=True)
class Phase:
    """Epochs with one global batch.

    Attributes:
        start, end: from epoch ``start`` to before epoch ``end``, counted from 0; the last one never ends.
        contract: of each of these epochs.
        rate: factor on the learning rate, for what the batch could not take.
    """

    start: int
    end: float
    contract: BatchContract
    rate: float


@dataclass(frozen=True)
class Epochs:
    """Who gets which samples in which epoch. Pure arithmetic.

    Attributes:
        first: the contract of the first epoch.
        growth: how the batch grows; None where it does not.

    Raises UsageError where the batch cannot grow, or the length of its epochs is not known.
    """

    first: BatchContract
    growth: Growth | None = None

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
    def phases(self) -> tuple[Phase, ...]:
        """In order; the milestones are where they meet."""
        if self.growth is None:
            return (Phase(0, math.inf, self.first, 1.0),)
        largest = self.growth.most(self.first.batch, self.first.known) or 0
        found = []
        for passed, (start, end) in enumerate(pairwise((0, *self.growth.epochs, math.inf))):
            batch, rate = self.growth.at(passed, self.first.batch, largest)
            found.append(Phase(int(start), end, replace(self.first, batch=batch), rate))
        return tuple(found)

    def phase(self, epoch: int) -> Phase:
        """The phase that an epoch is in."""
        return next(phase for phase in self.phases if epoch < phase.end)

    def at(self, epoch: int) -> BatchContract:
        """The contract of an epoch."""
        return self.phase(epoch).contract

    def steps(self, duration: Duration) -> int:
        """Steps from the beginning of the run that consume ``duration``; as ``Duration.steps`` with one batch."""
        dataset = self.first.dataset
        if duration.unit == "st":
            return duration.steps(dataset, self.first.batch)
        epoch, total = 1 if duration.unit == "ep" else dataset or 1, 0
        for phase in self.phases:
            part = max(min(duration.value, phase.end * epoch) - phase.start * epoch, 0)
            total += Duration(part, duration.unit).steps(dataset, phase.contract.batch)
        return total

    def consumed(self, steps: int) -> int:
        """Samples consumed after ``steps`` steps of the run. Raises UsageError for a stream of unknown length."""
        total = 0
        for phase in self.phases:
            here = int(min(steps, (phase.end - phase.start) * phase.contract.steps_per_epoch))
            total, steps = total + phase.contract.consumed(here), steps - here
        return total

    def place(self, steps: int) -> tuple[int, int]:
        """Whole epochs in ``steps`` steps of the run, and the steps after them. Raises as ``consumed``."""
        for phase in self.phases:
            each, epochs = phase.contract.steps_per_epoch, phase.end - phase.start
            if steps < epochs * each:
                return phase.start + steps // each, steps % each
            steps -= int(epochs * each)
        raise AssertionError("the last phase never ends")

    def describe(self) -> Mapping[str, str]:
        """All derived numbers of the first epoch, and how later ones differ, for people; epochs counted from 1."""
        return dict(self._lines())

    def _lines(self) -> Iterator[tuple[str, str]]:
        yield from self.first.describe().items()
        for phase in self.phases[1:]:
            lines = phase.contract.describe()
            rate = f", learning rate × {phase.rate:.4g}" if phase.rate != 1 else ""
            yield (
                f"from epoch {phase.start + 1}",
                f"{lines['global batch']} a step, {lines['micro-batch']}, {phase.contract.steps_per_epoch} steps{rate}",
            )
