"""The global order of samples: a function of (seed, epoch) alone, for any number of devices."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tutti.data.keyed_random import hash64


def permutation(seed: int, epoch: int, samples: int) -> NDArray[np.int64]:
    """Return the order of ``samples`` samples in one epoch: sorted by a hash of (seed, epoch, sample).

    Needs no generator state, so that resuming needs one integer; does not depend on NumPy's version either.

    Args:
        seed: of the run.
        epoch: from 0.
        samples: in an epoch.

    Returns:
        int64 (samples,): the numbers 0 … samples - 1, shuffled.

    >>> sorted(permutation(0, 1, 5).tolist())
    [0, 1, 2, 3, 4]
    """
    return np.argsort(hash64(seed, epoch, np.arange(samples)), kind="stable")
