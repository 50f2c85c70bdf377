"""Rules of thumb, with their sources, for numbers of a run that look like one of the classic mistakes.

``train.script_checks.mistake_checks`` applies them. The rules warn and never refuse. Their bounds are wide on purpose:
a run that is merely unusual must get no warning.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

# SGD with momentum 0.9, linear in the batch: Goyal et al. 2017, arXiv 1706.02677. Adam, with the square-root rule:
# Kingma and Ba 2015, arXiv 1412.6980. The bounds of "far" are a guess.
_BASE = 256
_ABOVE = 30.0
_BELOW = 10.0
_LARGE = 1024
_FEW = 200
_ENOUGH = 100
_LARGE_PART = 0.05
_SMALL_SET = 1000


def far_from_usual(optimizer: str, rate: float, batch: int, momentum: float = 0.0) -> float | None:
    """Return the usual peak learning rate at ``batch`` if ``rate`` is far from it.

    None if the rate is not far from the usual one, or the optimizer has no rule for it.

    The usual rate is (1 - momentum) · batch / 256 for ``sgd`` and 0.001 · √(batch / 256) for Adam, where a batch below
    256 counts as 256. A rate is far from it if it is more than 30 times the usual rate. For ``sgd`` with a batch of
    1024 or more, a rate is also far if it is under a tenth of the usual rate and under a tenth of 0.1 · batch / 256,
    the usual rate for momentum 0.9: such a rate was meant for a small batch. A low rate of Adam is no sign of a
    mistake: fine-tuning uses it.

    Args:
        optimizer: ``sgd``, ``adam`` or ``adamw``; other optimizers have no rule.
        rate: peak learning rate; 0 or a negative rate is never far from the usual one.
        batch: samples in a global batch.
        momentum: momentum coefficient of ``sgd``; ignored for other optimizers.

    >>> far_from_usual("sgd", 0.1, 4096, 0.75), far_from_usual("sgd", 1.6, 4096, 0.9), far_from_usual("adam", 0.1, 64)
    (4.0, None, 0.001)
    """
    growth = max(batch, _BASE) / _BASE
    if optimizer in ("adam", "adamw"):
        usual = 1e-3 * math.sqrt(growth)
        return usual if rate > _ABOVE * usual else None
    if optimizer != "sgd" or rate <= 0:
        return None
    # Momentum m multiplies a gradient's total effect by 1 / (1 - m); the rule is for m = 0.9.
    usual = (1 - momentum) * growth
    low = min(usual, 0.1 * growth) / _BELOW if batch >= _LARGE else 0.0
    return usual if not low <= rate <= _ABOVE * usual else None


def too_few_updates(updates: int, dataset: int, batch: int, workers: int) -> bool:
    """Return whether the global batch leaves too few updates, while the batch of one logical worker would leave enough.

    A logical worker is a fixed share of the global batch. True if all of these hold: there are several workers; the run
    has under 200 updates, but would have 100 or more (``updates · workers``) with batches of one worker's share; the
    global batch is at least a twentieth of the data set; and the data set has at least 1,000 samples, so that it is no
    toy. Smith et al. 2018, arXiv 1711.00489, stop growing the batch at a tenth; Hoffer et al. 2017, arXiv 1705.08741,
    find that as many updates bring the accuracy back.

    Args:
        updates: optimizer updates in the whole run.
        dataset: samples in an epoch.
        batch: samples in a global batch.
        workers: number of logical workers, among which the global batch is divided.

    >>> too_few_updates(156, 50_000, 4096, 8), too_few_updates(1176, 50_000, 512, 8), too_few_updates(9, 50_000, 64, 1)
    (True, False, False)
    """
    few = workers > 1 and updates < _FEW and updates * workers >= _ENOUGH
    return few and dataset >= _SMALL_SET and batch >= _LARGE_PART * dataset


def equal_pairs(digests: Sequence[int | None]) -> list[tuple[int, int]]:
    """Find logical workers that train on the same samples: pairs of workers whose data have equal digests.

    A logical worker is a fixed share of the global batch.

    Args:
        digests: a hash of each worker's first samples, in the order of workers; None, for a worker whose samples are
            too few or too alike (``rules_out_coincidence``), is in no pair.

    Returns:
        A list of pairs (first, later), indices in ``digests``; a worker is paired with the first worker of its digest
        only.

    >>> equal_pairs([7, 8, 7, None, None])
    [(0, 2)]
    """
    first: dict[int, int] = {}
    found = []
    for worker, digest in enumerate(digests):
        if digest is None:
            continue
        if digest in first:
            found.append((first[digest], worker))
        else:
            first[digest] = worker
    return found


def rules_out_coincidence(samples: Sequence[str], least: int) -> bool:
    """Return whether samples are so many and so varied that an equal sequence on another worker is no coincidence.

    True if there are at least ``least`` samples, and more than half of them are different. Called before a diagnosis
    that two logical workers (fixed shares of the global batch) train on the same data.

    Args:
        samples: a hash of each sample, in the order in which a worker has seen them.
        least: smallest number of samples that is enough.

    >>> [rules_out_coincidence(samples, 8) for samples in ("abcdefgh", "abcd", "abababab")]
    [True, False, False]
    """
    return len(samples) >= least and len(set(samples)) > len(samples) / 2


def is_sum(once: float, twice: float) -> bool:
    """Return whether a loss doubles when every sample of its batch is repeated, as a sum over samples does.

    Equality is within a relative 0.001; False for a loss that is not finite, or is 0.

    Args:
        once: loss of a batch.
        twice: loss of the batch with every sample repeated.

    >>> is_sum(3.0, 6.0), is_sum(3.0, 3.0), is_sum(0.0, 0.0)
    (True, False, False)
    """
    return math.isfinite(once) and abs(once) > 1e-12 and math.isclose(twice, 2 * once, rel_tol=1e-3)


def mixes_samples(whole: float, parts: float) -> bool:
    """Return whether a loss mixes the samples of its batch: the loss of the whole is no mean of its parts' losses.

    True if both are finite and differ by more than a relative 0.001, and by more than 10⁻⁶.

    Args:
        whole: loss of a batch, computed by one forward.
        parts: mean of the losses of the batch's parts, each computed alone.

    >>> mixes_samples(1.39, 0.69), mixes_samples(3.0, 3.0001), mixes_samples(0.0, 0.0), mixes_samples(1.0, math.nan)
    (True, False, False, False)
    """
    return math.isfinite(whole + parts) and not math.isclose(whole, parts, rel_tol=1e-3, abs_tol=1e-6)
