"""Cutting a model between layers: as even as brute force finds it, and only where it can be cut."""

from __future__ import annotations

import random
from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tutti
from tests import worlds
from tutti.errors import UsageError
from tutti.layouts.layers import balance, cut


def test_balance_is_what_brute_force_finds() -> None:
    generator = random.Random(0)
    for _ in range(60):
        weights = [generator.choice([0, 0, 1, 3, 10, 50]) for _ in range(generator.randrange(1, 9))]
        for parts in range(1, len(weights) + 1):
            bounds = balance(weights, parts)
            assert (bounds[0], bounds[-1], len(bounds)) == (0, len(weights), parts + 1)
            assert all(a < b for a, b in pairwise(bounds)), "no stage is empty"
            best = min(cost(weights, [0, *c, len(weights)]) for c in combinations(range(1, len(weights)), parts - 1))
            assert cost(weights, bounds) == best


def cost(weights: list[int], bounds: list[int]) -> tuple[int, int]:
    sums = [sum(weights[a:b]) for a, b in pairwise(bounds)]
    return max(sums), sum(s * s for s in sums)


def test_models_are_cut_by_their_parameters() -> None:
    model = nn.Sequential(nn.Linear(10, 100), nn.ReLU(), nn.Linear(100, 10), nn.ReLU(), nn.Linear(10, 1))
    assert cut(model, 1) == [0, 5]
    assert cut(model, 2) in ([0, 1, 5], [0, 2, 5])


def test_a_module_that_comes_again_is_not_left_out() -> None:
    activation = nn.Tanh()
    model = nn.Sequential(nn.Linear(4, 4), activation, nn.Linear(4, 4), activation)
    assert cut(model, 2)[-1] == 4
    for devices in (1, 2, 3):
        assert worlds.run(devices, own_activation, strategy="model_parallel") == worlds.run(1, own_activation) * devices


def own_activation(strategy: str = "single") -> float:
    torch.manual_seed(0)
    activation = nn.Tanh()
    net = nn.Sequential(nn.Linear(4, 4), activation, nn.Linear(4, 4), activation)
    run = tutti.prepare(
        net, "sgd", torch.randn(8, 4), lambda m, b: m(b).square().mean(), strategy=strategy, batch_size=8
    )
    return run.step(next(run.epoch(0)))


def tied() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    return model


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (nn.Linear(2, 2), "cannot cut a Linear"),
        (nn.Sequential(nn.Linear(2, 2)), "1 blocks cannot be cut into 2 stages"),
        (tied(), "shared by blocks on both sides of a cut"),
    ],
)
def test_what_cannot_be_cut_is_refused(model: nn.Module, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        cut(model, 2)
    assert words in str(caught.value)
    if not isinstance(model, nn.Linear) and len(list(model.children())) > 2:
        assert cut(tied(), 1) == [0, 3]


class Shapes(nn.Module):
    """Integers, other sizes and three dimensions on the way from stage to stage."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.scale = kind, nn.Parameter(torch.ones(1, dtype=torch.float64))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.kind == "tokens":
            return inputs + 1
        if self.kind == "embed":
            return nn.functional.one_hot(inputs, 5).double() * self.scale
        return inputs.flatten(1).sum(1, keepdim=True) * self.scale


def ragged(strategy: str) -> list[Any]:
    """Two batches of other shapes in turn, the last one smaller; the first stage passes integers on."""
    model = nn.Sequential(*(Shapes(kind) for kind in ("tokens", "embed", "sum", "sum")))
    generator = torch.Generator().manual_seed(0)
    data = torch.randint(0, 4, (10, 6), generator=generator)

    def loss(called: Any, batch: Tensor) -> Any:
        short = batch[:, : 3 + int(len(batch) > 2)]
        result = called(short)
        return (result**2).sum(), len(batch), {"mean": result.sum()}

    run = tutti.prepare(model, "sgd:lr=0.0001", data, loss, strategy=strategy, workers=1, batch_size=4)
    told: list[Any] = []
    for epoch in range(2):
        for batch in run.epoch(epoch):
            told.append(run.step(batch))
            told.append(run.agreed.metrics["mean"] if run.agreed else None)
    evaluation = run.evaluate(run.feed.source, batch=3)
    return [*told, evaluation.loss, evaluation.metrics["mean"], *(v.tolist() for _, v in sorted(run.state().items()))]


def test_shapes_and_types_between_stages() -> None:
    [want] = worlds.run(1, ragged, strategy="single")
    for devices in (3, 4):
        for got in worlds.run(devices, ragged, strategy="model_parallel"):
            for mine, other in zip(got, want, strict=True):
                assert mine == pytest.approx(other, rel=1e-12)


def changing() -> str:
    class Changing(nn.Linear):
        calls = 0

        def forward(self, inputs: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(inputs)[:, : 3 + self.calls % 2]

    class Any_(nn.Linear):
        def forward(self, inputs: Tensor) -> Tensor:
            return inputs.sum(1, keepdim=True) * self.weight.sum()

    model = nn.Sequential(Changing(4, 4), Any_(4, 4), Any_(4, 4))
    run = tutti.prepare(model, "sgd", torch.randn(8, 4), lambda m, b: m(b).mean(), strategy="model_parallel")
    try:
        for batch in run.epoch(0):
            run.step(batch[:4])
            if tutti.rank() == 0:
                run.step(batch[4:])
    except UsageError as error:
        return str(error)
    return ""


def test_an_output_that_changes_its_shape_is_refused_before_it_is_sent() -> None:
    said = worlds.run(3, changing)
    assert "for an equal batch" in said[0] and "(4, 3)" in said[0]
