"""The global order of samples: a permutation, another one each epoch and seed, and never changed by accident."""

from __future__ import annotations

import numpy as np
import pytest

from tutti.data.order import permutation


@pytest.mark.parametrize("samples", [1, 2, 10, 1797, 50_000])
def test_every_sample_once(samples: int) -> None:
    order = permutation(3, 5, samples)
    assert order.dtype == np.int64
    assert np.array_equal(np.sort(order), np.arange(samples))


def test_frozen_order() -> None:
    """A change here makes every old run resume with other samples."""
    assert permutation(0, 0, 10).tolist() == [0, 9, 1, 6, 3, 5, 4, 2, 8, 7]
    assert permutation(0, 1, 10).tolist() == [8, 3, 0, 1, 5, 2, 7, 4, 9, 6]
    assert permutation(7, 0, 10).tolist() == [8, 5, 3, 2, 9, 7, 6, 0, 1, 4]


def test_epochs_and_seeds_differ_and_repeat() -> None:
    orders = {(s, e): tuple(permutation(s, e, 100).tolist()) for s in range(4) for e in range(4)}
    assert len(set(orders.values())) == 16
    assert all(tuple(permutation(s, e, 100).tolist()) == order for (s, e), order in orders.items())


def test_no_sample_prefers_a_place() -> None:
    """Mean place of each of 20 samples over 2000 epochs: 9.5 within five standard errors."""
    places = np.mean([np.argsort(permutation(0, epoch, 20)) for epoch in range(2000)], axis=0)
    assert np.abs(places - 9.5).max() < 5 * np.sqrt((20**2 - 1) / 12 / 2000)
