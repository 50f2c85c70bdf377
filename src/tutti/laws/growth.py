"""A larger batch instead of a smaller learning rate.

Smith, Kindermans, Ying, Le 2018, "Don't decay the learning rate, increase the batch size", arXiv 1711.00489.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

from tutti.errors import UsageError
from tutti.spec import Duration, build, read_options

SHARE = 10
"""The default largest batch is one part in so many of the data set: B ≈ N/10 (ibid.)."""

FORM = "milestones=30ep+60ep,factor=5"


@dataclass(frozen=True, kw_only=True)
class Growth:
    """At each milestone the global batch is multiplied by ``factor``, and the learning rate stays.

    The noise scale ε(N/B - 1)/(1 - m) (``laws.noise.scale_of_sgd``) falls as if the rate had been divided by the
    factor, exactly for N/B in place of N/B - 1. Where the batch would pass the largest one it stays there, and the rate
    is divided by what the batch did not take.

    Attributes:
        milestones: whole epochs, rising, such as ``30ep``.
        factor: above 1.
        largest: most samples in a global batch; default: a tenth of the data set.
    """

    milestones: tuple[str, ...] = ()
    factor: float = 0.0
    largest: int | None = None

    def __post_init__(self) -> None:
        if not self.milestones or not 1 < self.factor < math.inf:
            said = f"its factor is {self.factor:g}" if self.milestones else "it has no milestones"
            raise UsageError(f"the batch cannot grow: {said}", remedy=f"write {FORM}")
        if any(later <= earlier for earlier, later in pairwise((0, *self.epochs))):
            raise UsageError(
                f"the batch cannot grow at {' and then at '.join(self.milestones)}",
                remedy="give milestones in rising order, the first at 1ep or later",
            )

    @classmethod
    def parse(cls, text: str, option: str = "--batch-growth") -> Growth:
        """Read ``milestones=30ep+60ep,factor=5``, with ``largest=N`` where wanted. Raises UsageError on anything else.

        >>> print(Growth.parse("milestones=30ep+60ep,factor=5"))
        milestones=30ep+60ep,factor=5
        """
        return build(cls, read_options(text, option, FORM), option)

    @property
    def epochs(self) -> tuple[int, ...]:
        """The milestones: the first epochs with another batch or rate, counted from 0. Raises UsageError."""
        durations = [Duration.parse(text, "milestones of the batch's growth") for text in self.milestones]
        for duration in durations:
            if duration.unit != "ep" or duration.value != int(duration.value):
                raise UsageError(
                    f"the batch cannot grow at {duration}",
                    why="within an epoch all batches are of one size, which its position and its order are counted in",
                    remedy="give whole epochs, such as 30ep",
                )
        return tuple(int(duration.value) for duration in durations)

    def most(self, batch: int, dataset: int | None) -> int | None:
        """The largest batch of a run that begins with ``batch``; None where it follows from an unknown data set.

        Raises UsageError where the first batch is as large already, or the data set is smaller.
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
                remedy="leave largest= out: a tenth of them",
            )
        return largest

    def at(self, passed: int, batch: int, largest: int) -> tuple[int, float]:
        """Global batch, and factor on the learning rate, after ``passed`` milestones.

        Args:
            passed: milestones passed.
            batch: the first global batch.
            largest: the largest one.

        >>> growth = Growth.parse("milestones=60ep+120ep+160ep,factor=5")
        >>> [growth.at(passed, 128, 5000) for passed in range(4)]
        [(128, 1.0), (640, 1.0), (3200, 1.0), (5000, 0.3125)]
        """
        wanted = math.prod([self.factor] * passed, start=float(batch))
        return (round(wanted), 1.0) if wanted <= largest else (largest, largest / wanted)

    def __str__(self) -> str:
        largest = "" if self.largest is None else f",largest={self.largest}"
        return f"milestones={'+'.join(self.milestones)},factor={self.factor:.15g}{largest}"
