"""Runs of split models against those of one device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

import tutti
from tests import worlds
from tests.contract.table import MADE, largest_difference
from tests.parallel.shapes import build, data, loss

TOLERANCE = 1e-10
SPLIT, SEQUENCE = "tensor:least=1", "tensor:least=1,sequence=true"


def prepare(shape: str, strategy: str, optimizer: str = "adamw:lr=0.01", **options: Any) -> tutti.Run:
    arguments = {"workers": 1, "batch_size": 8, "micro_batch": 5, "precision": "fp64", "ema": 0.8, **options}
    plain = build(shape)
    made = MADE[optimizer](plain) if optimizer in MADE else optimizer
    return tutti.prepare(plain, made, data(shape), loss(shape), strategy=strategy, **arguments)


def train(run: tutti.Run, steps: int) -> list[Any]:
    said: list[Any] = []
    while len(said) < steps:
        for batch in run.epoch(*run.data_position):
            run.step(batch)
            said.append(run.stats and (run.stats.loss, run.stats.grad_norm))
            if len(said) == steps:
                break
    return said


def outcome(run: tutti.Run) -> dict[str, Any]:
    state = {name: tensor.numpy().copy() for name, tensor in run.state().items()}
    return state | {f"average of {n}": t.numpy().copy() for n, t in run.state(averaged=True).items()}


def trained(shape: str, strategy: str, steps: int = 3, **options: Any) -> Any:
    """Train on batches of 8, 8 and 4 samples, which are an epoch.

    State, what was said of each step, the evaluation, and what this rank holds of how much.
    """
    run = prepare(shape, strategy, **options)
    said = train(run, steps)
    evaluation = run.evaluate(run.feed.source, batch=7)
    with run.replica.model_code():  # the script would be given the sizes of whole parameters
        here = sum(p.numel() for p in run.replica.parts[0].parameters())
    return outcome(run), said, evaluation.loss, here


def few_large(rows: Sequence[tuple[str, str, int, str]]) -> list[Any]:
    """Rows of shape, strategy, devices and optimizer: those with 6 or more devices, but the first, are ``full``."""
    large = [row for row in rows if row[2] >= 6][1:]
    return [pytest.param(*row, marks=pytest.mark.full) if row in large else row for row in rows]


def check(shape: str, strategy: str, devices: int, **options: Any) -> list[int]:
    want, told, evaluated, whole = worlds.alone(trained, shape=shape, strategy="single", **options)
    answers = worlds.run(devices, trained, shape=shape, strategy=strategy, **options)
    for got, said, loss_, _ in answers:
        assert largest_difference(got, want) <= TOLERANCE
        for mine, other in zip(said, told, strict=True):
            assert mine == pytest.approx(other, rel=1e-9)
        assert loss_ == pytest.approx(evaluated, rel=1e-9)
    return [whole, *(here for *_, here in answers)]
