"""Seed Python's, NumPy's and PyTorch's global generators for one sample, and restore their states afterwards."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def own_generators() -> Iterator[None]:
    """Restore the states of Python's, NumPy's and PyTorch's global CPU generators after the block."""
    states = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.default_generator.set_state(states[2])


def seed_generators(key: int) -> None:
    """Seed the three global generators from the 64-bit ``key``; call it inside ``own_generators``."""
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)
    torch.default_generator.manual_seed(key >> 1)
