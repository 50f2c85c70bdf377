"""The global order of samples: a function of (seed, epoch) alone, whatever devices there are."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tutti.data.hashing import hash64


def permutation(seed: int, epoch: int, samples: int) -> NDArray[np.int64]:
    """The order of ``samples`` samples in one epoch: sorted by a hash of (seed, epoch, sample).

    Needs no generator state, so that resuming needs one integer; does not depend on NumPy's version either.

    >>> sorted(permutation(0, 1, 5).tolist())
    [0, 1, 2, 3, 4]
    """
    return np.argsort(hash64(seed, epoch, np.arange(samples)), kind="stable")
