"""Batch growth instead of learning-rate decay: worked numbers, the same noise as decay, what cannot grow."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as some

from tutti.config.growth import BatchGrowth
from tutti.errors import UsageError

LR, DATASET, BATCH, MOMENTUM = 0.1, 50_000, 128, 0.9


def noise(batch: int, rate: float) -> float:
    """Return ε (N/B - 1) / (1 - m), the noise scale of SGD (Smith, Kindermans, Ying, Le 2018, arXiv 1711.00489)."""
    return LR * rate * (DATASET / batch - 1) / (1 - MOMENTUM)


def test_worked_numbers() -> None:
    """ε = 0.1, N = 50000, B = 128, m = 0.9: 389.625. Then × 5 up to N/10, and what is left divides the rate."""
    growth = BatchGrowth.parse("milestones=60ep+120ep+160ep+180ep,factor=5")
    assert growth.epochs == (60, 120, 160, 180)
    largest = growth.most(BATCH, DATASET)
    assert largest == 5000
    found = [growth.at(passed, BATCH, largest) for passed in range(5)]
    assert found == [(128, 1.0), (640, 1.0), (3200, 1.0), (5000, 0.3125), (5000, 0.0625)]
    scales = [noise(*row) for row in found]
    assert scales == pytest.approx([389.625, 77.125, 14.625, 2.8125, 0.5625])
    assert scales[3] / scales[4] == pytest.approx(5), "from the largest batch on it falls by just the factor"


def test_the_noise_falls_for_growth_as_for_decay() -> None:
    """ε N/B alike; ε (N/B - 1) by up to B/N more for growth, a tenth at most."""
    growth = BatchGrowth.parse("milestones=1ep+2ep+3ep+4ep+5ep,factor=3")
    for passed in range(6):
        batch, rate = growth.at(passed, BATCH, 5000)
        decayed = noise(BATCH, 3.0**-passed)
        assert rate / batch == pytest.approx(3.0**-passed / BATCH)
        assert noise(batch, rate) / decayed == pytest.approx((1 - batch / DATASET) / (1 - BATCH / DATASET))
        assert 0.9 * decayed < noise(batch, rate) <= decayed


@given(some.integers(1, 500), some.floats(1.01, 100), some.integers(0, 200), some.integers(501, 10_000))
def test_the_batch_and_the_rate_share_every_factor(batch: int, factor: float, passed: int, largest: int) -> None:
    got, rate = BatchGrowth(milestones=("1ep",), factor=factor).at(passed, batch, largest)
    assert batch <= got <= largest and 0 <= rate <= 1
    assert rate == 1 or got == largest, "the rate stays until the batch cannot grow any more"
    if passed < 50:
        assert got / rate == pytest.approx(batch * factor**passed, rel=1e-12, abs=0.5 + 1e-9)


def test_it_is_read_and_written_alike() -> None:
    for text in ("milestones=30ep+60ep,factor=5", "milestones=1ep,factor=1.5,largest=640"):
        assert str(BatchGrowth.parse(text)) == text and BatchGrowth.parse(
            str(BatchGrowth.parse(text))
        ) == BatchGrowth.parse(text)
    assert BatchGrowth.parse("factor=5, milestones=2ep") == BatchGrowth(milestones=("2ep",), factor=5)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "it has no milestones. Write milestones=30ep"),
        ("5", "cannot read '5' in '5' (--batch-growth). Write milestones=30ep"),
        ("milestones=30ep", "its factor is 0"),
        ("milestones=30ep,factor=1", "its factor is 1"),
        ("milestones=30ep,factor=inf", "not a finite number"),
        ("milestones=30ep,facto=2", "Did you mean 'factor'?"),
        ("milestones=0.5ep,factor=2", "cannot grow at 0.5ep: all batches of an epoch have one size"),
        ("milestones=500st,factor=2", "Give whole epochs"),
        ("milestones=0ep,factor=2", "the first at 1ep or later"),
        ("milestones=60ep+30ep,factor=2", "cannot grow at 60ep and then at 30ep"),
        ("milestones=30ep+30ep,factor=2", "rising order"),
    ],
)
def test_what_cannot_be_read_is_refused(text: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        BatchGrowth.parse(text)
    assert words in str(caught.value)


def test_what_cannot_grow_is_refused() -> None:
    growth = BatchGrowth.parse("milestones=1ep,factor=2")
    with pytest.raises(UsageError, match="a batch of 128 cannot grow: the largest is 100, a tenth of the 1000 samples"):
        growth.most(128, 1000)
    assert growth.most(128, None) is None
    to = BatchGrowth.parse("milestones=1ep,factor=2,largest=128")
    for dataset in (None, 50_000):
        with pytest.raises(UsageError, match="a batch of 128 cannot grow: the largest is 128\\. Begin"):
            to.most(128, dataset)
    assert to.most(64, 128) == to.most(64, None) == 128
    with pytest.raises(UsageError, match="the largest batch of 128 is more than the 127 samples of an epoch"):
        to.most(64, 127)
