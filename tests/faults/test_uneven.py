"""Fault 20: shares that are uneven, tiny or empty. No hang, no sample lost, the same result as on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import tutti
from tests import worlds
from tests.contract.models import loss, model, samples
from tests.contract.table import largest_difference

pytestmark = [pytest.mark.faults, pytest.mark.row(20)]

TOLERANCE = 1e-10


class Items:
    """A map-style data set, which is read sample by sample and collated."""

    def __init__(self, count: int) -> None:
        self.images, self.labels = samples(count)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.images[index], int(self.labels[index])


def train(
    strategy: str, count: int, batch_size: int, items: bool, custom_loop: bool, reproducible: bool, workers: int = 4
) -> Any:
    """Three epochs; state, losses, and how many samples an evaluation of one sample counted."""
    plain = model()
    optimizer = torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    run = tutti.prepare(
        plain,
        optimizer,
        Items(count) if items else samples(count),
        loss,
        strategy=strategy,
        workers=workers,
        batch_size=batch_size,
        reproducible=reproducible,
    )
    losses = []
    for epoch in range(3):
        if custom_loop:
            for batch in run.microbatches(epoch):
                total, number, _ = loss(run.model, batch)
                run.backward((total, number))
                optimizer.step()
                optimizer.zero_grad()
            losses.append(run.stats.loss if run.stats else None)
        else:
            losses += [run.step(batch) for batch in run.epoch(epoch)]
    one = Items(1) if items else samples(1)
    evaluation = run.evaluate(tutti.data.adapt.adapt(one))
    return {name: t.numpy().copy() for name, t in run.state().items()}, [*losses, evaluation.loss], run.global_step


CASES = [
    # samples, global batch: the last batch is smaller than the workers; a batch of all; larger than the set
    (5, 4),
    (5, 5),
    (5, 9),
    (1, 4),
    (9, 4),
]


@pytest.mark.parametrize("items", [False, True])
@pytest.mark.parametrize("ranks", [3, 4])
@pytest.mark.parametrize(
    ("strategy", "reproducible", "custom_loop"),
    [
        ("mirrored", False, False),
        ("mirrored", False, True),
        ("mirrored:algorithm=native", False, False),
        ("mirrored:algorithm=native", False, True),
        ("mirrored", True, True),
        ("model_parallel", False, False),
        ("local_sgd:period=2", False, False),
        ("central_storage", False, False),
        ("central_storage", True, True),
    ],
)
def test_equals_one_device(
    strategy: str,
    reproducible: bool,
    custom_loop: bool,
    ranks: int,
    items: bool,
    record_property: Callable[[str, object], None],
) -> None:
    for count, batch_size in CASES:
        settings = {"count": count, "batch_size": batch_size, "items": items, "reproducible": reproducible}
        single = strategy if "local" in strategy else "single"
        want, losses, steps = worlds.alone(train, strategy=single, custom_loop=custom_loop, **settings)
        assert steps == 3 * -(-count // batch_size)
        for state, own, clock in worlds.run(ranks, train, strategy=strategy, custom_loop=custom_loop, **settings):
            assert clock == steps
            assert own == pytest.approx(losses, rel=1e-9)
            difference = largest_difference(state, want)
            record_property(f"max|Δ| {'reproducible' if reproducible else 'by default, float64'}", difference)
            assert difference <= (0 if reproducible else TOLERANCE)


@pytest.mark.parametrize("ranks", [3, 4])
def test_an_empty_set_is_refused_on_every_rank(ranks: int) -> None:
    with pytest.raises(worlds.RankError) as raised:
        worlds.run(
            ranks, train, strategy="mirrored", count=0, batch_size=4, items=True, custom_loop=False, reproducible=False
        )
    assert [f and (f.kind, f.exit_code) for f in raised.value.failures] == [("DataError", 3)] * ranks


def small_batch(batch_size: int) -> None:
    tutti.prepare(model(), "sgd", samples(20), loss, workers=4, batch_size=batch_size)


def test_a_batch_smaller_than_the_workers_is_refused() -> None:
    with pytest.raises(worlds.RankError) as raised:
        worlds.run(3, small_batch, batch_size=3)
    for failure in raised.value.failures:
        assert failure is not None
        assert (failure.kind, failure.exit_code) == ("UsageError", 2)
        assert "take batch_size=4 or more" in failure.text.lower()
