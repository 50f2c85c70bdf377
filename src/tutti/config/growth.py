"""Grow the global batch instead of lowering the learning rate.

Smith, Kindermans, Ying, Le 2018, "Don't decay the learning rate, increase the batch size", arXiv 1711.00489.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from tutti.config.spec import Duration, build_options, read_options
from tutti.errors import UsageError

SHARE = 10
"""The default largest batch is the size of the data set divided by this: B ≈ N/10 (ibid.)."""

FORM = "milestones=30ep+60ep,factor=5"


@dataclass(frozen=True, kw_only=True)
class BatchGrowth:
    """Multiply the global batch by ``factor`` at each milestone and keep the learning rate.

    The noise scale ε(N/B - 1)/(1 - m) of learning rate ε, N samples, batch B and momentum m falls as if the rate had
    been divided by ``factor``, exactly for N/B in place of N/B - 1. A batch that would exceed the largest one is
    clamped to it, and the rate is divided by the rest of ``factor``.

    Attributes:
        milestones: whole epochs in rising order, such as ``30ep``; at least one.
        factor: number above 1 by which the global batch is multiplied at each milestone; must be given.
        largest: largest number of samples in a global batch; default: a tenth of the data set.

    Raises:
        UsageError: there are no milestones, they are not whole epochs in rising order, or ``factor`` is not a finite
            number above 1.
    """

    milestones: tuple[str, ...] = ()
    factor: float = 0.0
    largest: int | None = None

    def __post_init__(self) -> None:
        if not self.milestones or not 1 < self.factor < math.inf:
            reason = f"its factor is {self.factor:g}" if self.milestones else "it has no milestones"
            raise UsageError(f"the batch cannot grow: {reason}", remedy=f"write {FORM}")
        if any(later <= earlier for earlier, later in pairwise((0, *self.epochs))):
            raise UsageError(
                f"the batch cannot grow at {' and then at '.join(self.milestones)}",
                remedy="give milestones in rising order, the first at 1ep or later",
            )

    @classmethod
    def parse(cls, text: str, option: str = "--batch-growth") -> BatchGrowth:
        """Parse ``--batch-growth``, the growth schedule of the batch: ``milestones=30ep+60ep,factor=5,largest=N``.

        Args:
            text: ``milestones``: whole epochs, joined by ``+``; ``factor``: number by which the global batch is
                multiplied at each; ``largest``: most samples in a global batch (default: a tenth of the data set).
            option: name of the option, which a UsageError states.

        Returns:
            A ``BatchGrowth`` with the fields ``milestones`` (texts), ``factor`` and ``largest`` (None if it is not
            given).

        Raises:
            UsageError: the text is malformed, a key is unknown (naming the nearest) or repeated, milestones are
                missing, not whole epochs or not in rising order, or the factor is not above 1.

        >>> print(BatchGrowth.parse("milestones=30ep+60ep,factor=5"))
        milestones=30ep+60ep,factor=5
        """
        return build_options(cls, read_options(text, option, FORM), option)

    @cached_property
    def epochs(self) -> tuple[int, ...]:
        """Numbers of the epochs, from 0, at whose start the global batch grows: milestones of ``--batch-growth``.

        At a milestone where the batch has reached its largest size already, the batch stays, and the learning rate
        falls instead. Raises UsageError unless the milestones are whole epochs.
        """
        durations = [Duration.parse(text, "milestones of the batch's growth") for text in self.milestones]
        for duration in durations:
            if duration.unit != "ep" or duration.value != int(duration.value):
                raise UsageError(
                    f"the batch cannot grow at {duration}",
                    why="all batches of an epoch have one size, in which data position and order are counted",
                    remedy="give whole epochs, such as 30ep",
                )
        return tuple(int(duration.value) for duration in durations)

    def most(self, batch: int, dataset: int | None) -> int | None:
        """Return the largest size of the growing global batch: the option ``largest``, else a tenth of the data set.

        Args:
            batch: size of the global batch at the start of the run, in samples.
            dataset: samples in an epoch; None if unknown.

        Returns:
            Samples in the largest global batch, a tenth rounded down; None if the option is not given and ``dataset``
            is None.

        Raises:
            UsageError: ``batch`` is not below the largest batch, or the largest batch exceeds the data set.
        """
        largest = self.largest if self.largest is not None or dataset is None else dataset // SHARE
        if largest is not None and largest <= batch:
            tenth = f", a tenth of the {dataset} samples" if self.largest is None else ""
            raise UsageError(
                f"a batch of {batch} cannot grow: the largest is {largest}{tenth}",
                remedy="begin with a smaller batch, give a larger largest=N, or lower the rate: --schedule step:…",
            )
        if largest is not None and dataset is not None and largest > dataset:
            raise UsageError(
                f"the largest batch of {largest} is more than the {dataset} samples of an epoch",
                remedy="leave largest= out; its default is a tenth of them",
            )
        return largest

    def at(self, passed: int, batch: int, largest: int) -> tuple[int, float]:
        """Return the size of a growing global batch, and the learning rate as a multiple of the schedule's.

        Args:
            passed: number of milestones of ``--batch-growth`` that the run has passed; each multiplies the batch by the
                option ``factor``.
            batch: size of the global batch at the start of the run, in samples.
            largest: samples to which a larger global batch is clamped.

        Returns:
            Samples in the global batch, rounded to the nearest whole number, and the multiple: 1 until the batch is
            clamped, then ``largest`` divided by the size that the batch would have.

        >>> growth = BatchGrowth.parse("milestones=60ep+120ep+160ep,factor=5")
        >>> [growth.at(passed, 128, 5000) for passed in range(4)]
        [(128, 1.0), (640, 1.0), (3200, 1.0), (5000, 0.3125)]
        """
        wanted = math.prod([self.factor] * passed, start=float(batch))
        return (round(wanted), 1.0) if wanted <= largest else (largest, largest / wanted)

    def __str__(self) -> str:
        largest = "" if self.largest is None else f",largest={self.largest}"
        return f"milestones={'+'.join(self.milestones)},factor={self.factor:.15g}{largest}"
