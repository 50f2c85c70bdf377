"""Seed Python's, NumPy's and PyTorch's global generators for one sample, and restore their states afterwards."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def own_generators() -> Iterator[None]:
    """Return a context manager that restores the states of the global random generators at its end.

    Within the block, code may seed and use the generators of Python, NumPy and PyTorch (CPU) without an effect on later
    draws.
    """
    states = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.default_generator.set_state(states[2])


def seed_generators(key: int) -> None:
    """Seed the global random generators of Python, NumPy and PyTorch (CPU); call it inside ``own_generators``.

    Args:
        key: 64-bit seed.
    """
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)
    torch.default_generator.manual_seed(key >> 1)
