"""Rules of thumb fire on the classic mistake and stay silent on what is merely unusual."""

from __future__ import annotations

import pytest

from tutti.metrics import suspicion as laws


@pytest.mark.parametrize(
    ("optimizer", "rate", "batch", "momentum", "far"),
    [
        ("sgd", 0.1, 256, 0.9, False),
        ("sgd", 0.1, 6, 0.0, False),
        ("sgd", 1.0, 64, 0.0, False),
        ("sgd", 0.1, 4096, 0.9, True),
        ("sgd", 0.1, 4096, 0.0, True),
        ("sgd", 1.6, 4096, 0.9, False),
        ("sgd", 0.001, 64, 0.9, False),
        ("sgd", 10.0, 64, 0.9, True),
        ("sgd", 0.1, 256, 0.99, False),
        ("sgd", 0.0, 4096, 0.9, False),
        ("adam", 1e-3, 64, 0.0, False),
        ("adam", 1e-2, 64, 0.0, False),
        ("adam", 1e-3, 8192, 0.0, False),
        ("adam", 0.1, 256, 0.0, True),
        ("adamw", 1e-6, 512, 0.0, False),
        ("lamb", 100.0, 64, 0.0, False),
    ],
)
def test_a_rate_far_from_the_rule(optimizer: str, rate: float, batch: int, momentum: float, far: bool) -> None:
    assert (laws.far_from_usual(optimizer, rate, batch, momentum) is not None) is far


def test_few_updates_need_a_large_batch_of_many_workers() -> None:
    assert laws.too_few_updates(100, 1000, 100, 4)
    assert not laws.too_few_updates(100, 1000, 100, 1), "one worker is the reference itself"
    assert not laws.too_few_updates(100, 10_000, 100, 4), "a short run with a small batch"
    assert not laws.too_few_updates(200, 1000, 100, 4)
    assert not laws.too_few_updates(20, 1000, 100, 4), "short with one worker's batch, too"
    assert not laws.too_few_updates(80, 450, 64, 4), "a toy"


def test_a_sum_that_is_not_finite_is_none() -> None:
    assert not laws.is_sum(float("nan"), float("nan"))
    assert not laws.is_sum(1.0, 2.1)
