"""Critical batch size from branches: a checkpoint that is trained further at multiples of its batch size.

Merrill et al. 2025, arXiv 2505.23971. All branches take the same number of samples; the held-out loss at their ends
says what a multiple of the batch costs. Loads no torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tutti.errors import NonFiniteError, UsageError
from tutti.optim.noise_scale import student_t

_GRID = 801
_REACH = 256.0
"""The grid of critical batches ends this many times below and above the measured batches."""

_BOUNDED = 0.15
"""Posterior density at an end of the grid, over its maximum, from which on the branches do not bound that end."""


@dataclass(frozen=True)
class Branch:
    """One continuation of training from a checkpoint, at a multiple of the checkpoint's global batch.

    Attributes:
        multiple: k; the branch's global batch is k times the checkpoint's.
        seed: seed of the branch's order of samples.
        loss: held-out loss at the end of the branch.
    """

    multiple: int
    seed: int
    loss: float


@dataclass(frozen=True)
class BranchFit:
    """Critical batch size, estimated from branches: trainings continued from one checkpoint at multiples of its batch.

    The critical batch size B_crit is the batch at which training needs twice the least data to a target.

    Attributes:
        batch: global batch of the checkpoint's run, in samples.
        start: held-out loss at the checkpoint.
        branches: all branches.
        tolerance: loss by which a branch may exceed the mean loss of the branches at one times the batch.
        within: largest multiple up to which no mean loss of branches exceeds the mean loss at one times the batch by
            more than the tolerance, after allowance for the spread over seeds.
        critical_batch: B_crit of E(B) = E_min(1 + B/B_crit), in samples: the median of its posterior.
        low, high: 5 % and 95 % quantiles of B_crit; 0 and ∞ where the branches do not bound it.
        centre, spread: mean and standard deviation of ln B_crit.
        progress: fitted fall of the held-out loss from the checkpoint to the end of a branch at one times the batch.
    """

    batch: int
    start: float
    branches: tuple[Branch, ...]
    tolerance: float
    within: int
    critical_batch: float
    low: float
    high: float
    centre: float
    spread: float
    progress: float

    def means(self) -> dict[int, float]:
        """Return the mean held-out loss of branches (trainings continued from one checkpoint) at their ends.

        Returns:
            Multiple k → mean loss over seeds, in ascending order of k; the global batch of the branches is k times the
            checkpoint's.
        """
        return {multiple: sum(losses) / len(losses) for multiple, losses in _by_multiple(self.branches).items()}

    def loss_at(self, multiple: float) -> float:
        """Return the fitted held-out loss at the end of a branch: a training continued from a checkpoint.

        With the checkpoint's global batch B, its loss L and the critical batch B_crit, the loss at k times the batch is
        L − P(1 + B/B_crit)/(1 + kB/B_crit). P (``progress``) is the fitted fall of the loss at k = 1.

        Args:
            multiple: k, the global batch of the branch over that of the checkpoint; need not be a whole number.
        """
        small = self.batch / self.critical_batch
        return self.start - self.progress * (1 + small) / (1 + multiple * small)


def fit_branches(batch: int, start: float, branches: Sequence[Branch], tolerance: float = 0.01) -> BranchFit:
    """Estimate the critical batch size from losses of branches: trainings that continue a checkpoint at larger batches.

    There are two estimates. ``within``, by Merrill et al. (arXiv 2505.23971), is the largest multiple of the batch
    whose loss stays within a tolerance. It depends on the tolerance and on the length of the branches.
    ``critical_batch`` is B_crit of E(B) = E_min(1 + B/B_crit), the samples that training needs to a target at batch B,
    with E_min at small batches. A sample at batch B is worth 1/(1 + B/B_crit), so a branch at k times the batch B
    lowers the loss by P(1 + B/B_crit)/(1 + kB/B_crit), to first order, where P is the fall at k = 1. P is marginalised,
    the prior of log B_crit is flat, and the spread over seeds is unknown (Student's t).

    Args:
        batch: global batch at the checkpoint, in samples.
        start: held-out loss at the checkpoint.
        branches: branches at one times the batch and at one or more other multiples, at least three in all; all trained
            on the same number of samples.
        tolerance: largest excess of a branch's loss over the mean loss at one times the batch, for ``within``; Merrill
            et al. take 0.01.

    Returns:
        A ``BranchFit`` with the attributes ``within`` (a multiple) and ``critical_batch`` (samples), both estimates;
        the 90 % band of the second (``low``, ``high``; 0 and ∞ at an end that the branches do not bound), mean and
        standard deviation of ln B_crit (``centre``, ``spread``) and P (``progress``).

    Raises:
        NonFiniteError: a loss is not finite.
        UsageError: there are fewer branches or multiples than ``branches`` must have, or training
            at one times the batch made no progress.
    """
    import numpy as np

    losses = _by_multiple(branches)
    _check(start, losses)
    multiples = np.array([branch.multiple for branch in branches], dtype=float)
    falls = start - np.array([branch.loss for branch in branches])
    first, last = math.log(batch * multiples.min() / _REACH), math.log(batch * multiples.max() * _REACH)
    grid = np.linspace(first, last, _GRID)
    small = batch / np.exp(grid)[:, None]
    worth = (1 + small) / (1 + multiples[None] * small)
    norm = (worth**2).sum(1)
    progress = (worth * falls).sum(1) / norm
    square = ((falls - progress[:, None] * worth) ** 2).sum(1)
    freedom = len(branches) - 1
    # The floor stands for what the loss itself resolves.
    floor = len(branches) * (1e-6 * max(abs(start), 1e-6)) ** 2
    log_density = -0.5 * freedom * np.log(square + floor) - 0.5 * np.log(norm)
    density = np.exp(log_density - log_density.max())
    weights = density / density.sum()
    cumulative = np.cumsum(weights)
    low, middle, high = (float(np.exp(grid[np.searchsorted(cumulative, q)])) for q in (0.05, 0.5, 0.95))
    centre = float(weights @ grid)
    return BranchFit(
        batch=batch,
        start=start,
        branches=tuple(branches),
        tolerance=tolerance,
        within=_within(losses, tolerance),
        critical_batch=middle,
        low=0.0 if density[0] > _BOUNDED else low,
        high=math.inf if density[-1] > _BOUNDED else high,
        centre=centre,
        spread=float(np.sqrt(weights @ (grid - centre) ** 2)),
        progress=float(np.interp(math.log(middle), grid, progress)),
    )


def _by_multiple(branches: Sequence[Branch]) -> dict[int, list[float]]:
    found: dict[int, list[float]] = {}
    for branch in sorted(branches, key=lambda each: (each.multiple, each.seed)):
        found.setdefault(branch.multiple, []).append(branch.loss)
    return found


def _check(start: float, losses: dict[int, list[float]]) -> None:
    for multiple, found in losses.items():
        if not all(map(math.isfinite, (start, *found))):
            raise NonFiniteError(
                f"the branch at {multiple} × the batch diverged",
                why="its held-out loss is not finite",
                remedy="leave this multiple out, or take a rule that raises the learning rate less (--rule sqrt, none)",
            )
    if 1 not in losses or len(losses) < 2 or sum(map(len, losses.values())) < 3:
        raise UsageError(
            "too few branches: at least three are needed, at one times the batch and at one other multiple",
            remedy="give --branch 2 4 8, or --seeds 2",
        )
    if sum(losses[1]) / len(losses[1]) >= start:
        raise UsageError(
            "training on from the checkpoint did not lower the held-out loss, so no multiple can be worse",
            why=f"it was {start:.6g} at the checkpoint, and {sum(losses[1]) / len(losses[1]):.6g} after the window",
            remedy="branch an earlier checkpoint (--step), or train longer branches (--window)",
        )


def _within(losses: dict[int, list[float]], tolerance: float) -> int:
    """Return the largest multiple before the first whose mean loss exceeds the band of one times the batch."""
    counts = {multiple: len(found) for multiple, found in losses.items()}
    means = {multiple: sum(found) / counts[multiple] for multiple, found in losses.items()}
    freedom = sum(counts.values()) - len(counts)
    scatter = sum((loss - means[multiple]) ** 2 for multiple, found in losses.items() for loss in found)
    kept = 1
    for multiple in sorted(losses):
        chance = 0.0
        if freedom > 0:
            chance = student_t(freedom) * math.sqrt(scatter / freedom * (1 / counts[1] + 1 / counts[multiple]))
        if means[multiple] > means[1] + tolerance + chance:
            break
        kept = multiple
    return kept
