"""Options of the average of the weights over the updates of a run.

Averaging of iterates: Polyak & Juditsky 1992, SIAM J. Control Optim. 30(4). Szegedy et al. 2015, arXiv
1512.00567, §8, evaluate its exponential form instead of the last weights.
"""

from __future__ import annotations

from dataclasses import dataclass

from tutti.errors import UsageError


@dataclass(frozen=True)
class Averaging:
    """Exponential moving average: average ← d · average + (1 - d) · weights, after every update.

    Attributes:
        decay: d, between 0 and 1. The average looks back over about 1 / (1 - d) updates.
        warmup: whether d is at most (1 + t) / (10 + t) after t updates of the average, so that a short run's average is
            not dominated by its initial weights (TensorFlow's ``num_updates``).

    Raises:
        UsageError: ``decay`` is not between 0 and 1, both exclusive.
    """

    decay: float
    warmup: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.decay < 1:
            raise UsageError(
                f"the decay of the weights' average is {self.decay:g}",
                remedy="give a number between 0 and 1, such as 0.999",
            )

    @classmethod
    def parse(cls, text: str, option: str = "--ema") -> Averaging:
        """Parse ``--ema``, the moving average of the weights: ``DECAY`` or ``DECAY:warmup``, such as ``0.999:warmup``.

        Args:
            text: the decay, between 0 and 1; with ``:warmup`` the decay rises from a smaller value in the first
                updates.
            option: name of the option, which a UsageError states.

        Returns:
            An ``Averaging``: ``decay``, a float, and ``warmup``, whether the text ends in ``:warmup``.

        Raises:
            UsageError: the text has another form, or the decay is not between 0 and 1.

        >>> Averaging.parse("0.999:warmup")
        Averaging(decay=0.999, warmup=True)
        """
        number, colon, rest = text.strip().partition(":")
        try:
            decay = float(number)
        except ValueError:
            decay = None
        if decay is None or (colon and rest != "warmup"):
            raise UsageError(f"cannot read '{text}'", where=option, remedy="write 0.999 or 0.999:warmup")
        return cls(decay, bool(colon))

    def share(self, updates: int) -> float:
        """Return 1 - d, the share of the present weights in the next update of their moving average of decay d.

        Args:
            updates: updates of the average so far, n; with ``warmup`` d is min(decay, (1 + n) ÷ (10 + n)), else n has
                no effect.

        >>> Averaging(0.75).share(0), Averaging(0.75, warmup=True).share(0), Averaging(0.75, warmup=True).share(26)
        (0.25, 0.9, 0.25)
        """
        decay = min(self.decay, (1 + updates) / (10 + updates)) if self.warmup else self.decay
        return 1 - decay

    def __str__(self) -> str:
        return f"{self.decay:g}{':warmup' * self.warmup}"
