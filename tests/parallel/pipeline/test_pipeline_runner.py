"""Cutting a model into stages, and what goes from one to the next."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tutti
from tests import worlds
from tutti.errors import UsageError
from tutti.parallel.pipeline import stage_partition


def test_models_are_cut_by_their_parameters() -> None:
    model = nn.Sequential(nn.Linear(10, 100), nn.ReLU(), nn.Linear(100, 10), nn.ReLU(), nn.Linear(10, 1))
    found = stage_partition.find_stage_partition(model, 2, ())
    assert (found.names, len(found.stages)) == (("2",), 2)


def test_a_module_that_comes_again_is_not_left_out() -> None:
    activation = nn.Tanh()
    model = nn.Sequential(nn.Linear(4, 4), activation, nn.Linear(4, 4), activation)
    assert sum(map(len, stage_partition.find_stage_partition(model, 2, ()).stages)) == 4
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


class Deciding(nn.Module):
    """Looks at numbers, which no graph can."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))

    def forward(self, inputs: Tensor) -> Tensor:
        for layer in self.layers:
            inputs = layer(inputs) if inputs.sum() > 0 else -layer(inputs)
        return inputs


class Training(Deciding):
    """Does something else in evaluation."""

    def forward(self, inputs: Tensor) -> Tensor:
        for layer in self.layers[: 3 if self.training else 2]:
            inputs = layer(inputs)
        return inputs


def norms() -> nn.Sequential:
    norm = nn.BatchNorm1d(4)
    return nn.Sequential(nn.Linear(4, 4), norm, nn.Linear(4, 4), norm)


PLAIN = nn.Sequential(OrderedDict((n, nn.Linear(2, 2)) for n in "abc"))


@pytest.mark.parametrize(
    ("model", "named", "words"),
    [
        (nn.Sequential(nn.Linear(2, 2)), (), "1 block cannot be cut into 2 stages"),
        (nn.Identity(), (), "0 blocks cannot be cut into 2 stages: its forward calls no"),
        (Deciding(), (), f"torch.fx cannot follow its forward ({__file__}:"),
        (Training(), (), "something else in training"),
        (norms(), ("2",), "called on both sides of a cut"),
        (PLAIN, ("d",), "no module 'd' to be cut at. Choices: a, b, c."),
        (PLAIN, ("a",), "no stage can begin with a"),
        (PLAIN, ("b", "c"), "makes 3 stages, not 2"),
        (nn.Sequential(OrderedDict(x=Deciding(), y=nn.Linear(2, 2))), ("x.layers.1",), "cannot be cut inside x"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else str(value),
)
def test_what_cannot_be_cut_is_refused(model: nn.Module, named: tuple[str, ...], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        stage_partition.find_stage_partition(model, 2, named)
    assert words in str(caught.value)


def test_cuts_are_where_they_are_named() -> None:
    assert stage_partition.find_stage_partition(PLAIN, 3, ("b", "c")).names == ("b", "c")
    inside = nn.Sequential(OrderedDict(x=nn.Sequential(OrderedDict(p=nn.Linear(2, 2), q=nn.Tanh())), y=nn.Tanh()))
    assert stage_partition.find_stage_partition(inside, 2, ("x.q",)).names == ("x.q",)


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
            told.append(run.stats.metrics["mean"] if run.stats else None)
    evaluation = run.evaluate(run.feed.source, batch=3)
    return [*told, evaluation.loss, evaluation.metrics["mean"], *(v.tolist() for _, v in sorted(run.state().items()))]


def test_shapes_and_types_between_stages() -> None:
    want = worlds.alone(ragged, strategy="single")
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
    # Nothing more can be exchanged after a step that failed on one rank alone.
    pool = worlds.Pool(3)
    try:
        said = pool.run(changing)
    finally:
        pool.close()
    assert "for an equal batch" in said[0] and "(4, 3)" in said[0]
