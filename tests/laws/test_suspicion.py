"""Rules of thumb fire on the classic mistake and stay silent on what is merely unusual."""

from __future__ import annotations

import pytest

from tutti.laws import suspicion as laws


@pytest.mark.parametrize(
    ("optimizer", "rate", "batch", "far"),
    [
        ("sgd", 0.1, 256, False),
        ("sgd", 0.1, 4096, True),
        ("sgd", 1.6, 4096, False),
        ("sgd", 0.01, 64, False),
        ("adam", 1e-3, 64, False),
        ("adam", 1e-3, 8192, False),
        ("adam", 0.1, 256, True),
        ("adamw", 1e-6, 512, True),
        ("lamb", 100.0, 64, False),
    ],
)
def test_a_rate_far_from_the_rule(optimizer: str, rate: float, batch: int, far: bool) -> None:
    assert (laws.rate_is_far(rate, laws.usual_rate(optimizer, batch)) is not None) is far


def test_few_updates_need_a_large_batch_of_many_workers() -> None:
    assert laws.too_few_updates(100, 1000, 100, 4)
    assert not laws.too_few_updates(100, 1000, 100, 1), "one worker is the reference itself"
    assert not laws.too_few_updates(100, 10_000, 100, 4), "a short run with a small batch"
    assert not laws.too_few_updates(200, 1000, 100, 4)


def test_data_that_is_everywhere_the_same_is_no_padding() -> None:
    assert laws.padding([1] * 10, 3) == 0
    assert laws.padding([], 3) == 0
    assert laws.padding([1, 2, 3, 4, 5, 1], 7) == 1


def test_a_sum_that_is_not_finite_is_none() -> None:
    assert not laws.is_sum(float("nan"), float("nan"))
    assert not laws.is_sum(1.0, 2.1)
