"""Metric objects that a loss function updates count each held-out sample once, or are refused."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import tutti
from tests import worlds
from tutti.errors import TuttiError


class Largest:
    """A metric that is no sum, with the methods of torchmetrics; it also counts what it sees."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.largest, self.seen = float("-inf"), 0

    def update(self, scores: Tensor) -> None:
        self.largest, self.seen = max(self.largest, scores.max().item()), self.seen + len(scores)

    def compute(self) -> float:
        return self.largest


def evaluated(strategy: str, workers: int) -> Any:
    torch.manual_seed(0)
    inputs = torch.randn(40, 3, dtype=torch.float64)
    model, metric = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double(), Largest()

    def loss(model: Any, batch: Any) -> Tensor:
        scores = model(batch)
        metric.update(scores)
        return nn.functional.mse_loss(scores, torch.zeros_like(scores))

    run = tutti.prepare(
        model,
        "sgd:lr=0.1",
        inputs,
        lambda model, batch: model(batch).square().mean(),
        batch_size=8,
        workers=workers,
        strategy=strategy,
    )
    try:
        run.evaluate(inputs, loss=loss)
    except TuttiError as error:
        return str(error)
    return metric.seen, metric.compute()


def test_an_object_counts_each_sample_once() -> None:
    [(seen, largest)] = worlds.run(1, evaluated, strategy="mirrored", workers=2)
    found = worlds.run(2, evaluated, strategy="mirrored", workers=2)
    assert seen == sum(each[0] for each in found) == 40
    assert max(each[1] for each in found) == largest


def test_an_object_counts_each_sample_on_each_rank_of_a_split_model() -> None:
    [want] = worlds.run(1, evaluated, strategy="mirrored", workers=1)
    for strategy in ("pipeline", "tensor:least=1", "model_parallel"):
        for seen, largest in worlds.run(2, evaluated, strategy=strategy, workers=1):
            assert seen == 40 and abs(largest - want[1]) < 1e-12


def test_an_object_is_refused_where_forwards_are_repeated() -> None:
    for text in worlds.run(2, evaluated, strategy="sharded:stage=3", workers=2):
        assert text.startswith("the loss function updates 'metric'") and "run.predict" in text
