"""From a rank's own totals to what all ranks agree on, and how far a gradient is clipped."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from tutti.errors import UsageError
from tutti.exchanges.buckets import METRICS, Sums
from tutti.exchanges.reducers import scale_all, squares_of
from tutti.types import Agreed, Spread, Tick, Totals


class Counting:
    """The totals of the workers that this rank plays, in the step under way."""

    def __init__(self) -> None:
        self._totals: Totals | None = None
        self._names: tuple[str, ...] = ()

    def add(self, part: Totals | None) -> None:
        """One worker is through; None: it had no samples."""
        if part is not None:
            self.note(part)
            self._totals = self.together(part)

    def note(self, part: Totals) -> None:
        """Take over the metrics' names. Raises UsageError where there are more than travel along."""
        if len(part.names) > METRICS:
            raise UsageError(f"the loss function reports {len(part.names)} metrics", remedy=f"at most {METRICS}")
        self._names = part.names

    def together(self, part: Totals | None) -> Totals | None:
        """Those so far and ``part``; None where there are none or ``part`` is not known."""
        return part if self._totals is None or part is None else self._totals + part

    def take(self) -> Tensor | None:
        """The lanes of all of them, and begin the next step; None where no worker had samples."""
        totals, self._totals = self._totals, None
        return None if totals is None else totals.lanes

    def means(self, metrics: Sequence[float], count: float) -> dict[str, float]:
        """By name, from sums over ``count``."""
        return {name: value / count for name, value in zip(self._names, metrics, strict=False)}

    def agreed(self, sums: Sums, norm: float, finite: bool, stop: bool, spread: Spread | None = None) -> Agreed:
        """What all ranks know alike, from the sums over all of them."""
        count = sums.samples or math.nan
        return Agreed(sums.loss / count, sums.samples, self.means(sums.metrics, count), norm, finite, stop, spread)


def share_of_batch(sums: Sums, tick: Tick) -> float:
    """What a gradient with the weights of the batch contract is to be multiplied by.

    The loss may count something else than samples (tokens), or the batch be of the caller's own size.
    """
    return tick.samples / sums.samples if sums.samples else 1.0


def own_mean(gradients: Sequence[Tensor], part: Totals, loss_scale: float) -> float:
    """Make a worker's own gradient the mean over what its loss counts (samples, tokens), in place; its norm."""
    count = float(part.lanes[1])
    factor = (part.samples / count if count else 1.0) / loss_scale
    if factor != 1.0:
        scale_all(gradients, factor)
    return math.sqrt(sum(squares_of(gradients)))


def clipped(norm: float, largest: float | None) -> tuple[float, float]:
    """The factor that clips a gradient of ``norm`` as ``torch.nn.utils.clip_grad_norm_``, and the norm afterwards.

    >>> clipped(0.5, 1.0), clipped(2.0, None)
    ((1.0, 0.5), (1.0, 2.0))
    """
    if largest is None or norm <= largest:
        return 1.0, norm
    factor = largest / (norm + 1e-6)
    return factor, norm * factor
