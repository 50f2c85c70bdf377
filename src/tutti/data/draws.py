"""The global generators that people draw from, keyed for one sample and given back as they were."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def own_generators() -> Iterator[None]:
    """Give Python's, NumPy's and PyTorch's global generators back as they were."""
    states = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.default_generator.set_state(states[2])


def seed_generators(key: int) -> None:
    """Let the three generators draw what belongs to the 64-bit ``key``; inside ``own_generators``."""
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)
    torch.default_generator.manual_seed(key >> 1)
