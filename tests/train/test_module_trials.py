"""Layers whose forward changes Python numbers: of each worker its own, without an effect, or refused."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import tutti
from tests import worlds
from tests.covering import table
from tutti.errors import TuttiError

DATA = TensorDataset(
    torch.randn(24, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64), torch.arange(24) % 3
)
WIDTH = 8


class Warm(nn.Module):
    """A layer whose scale grows with the number of its forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.step = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.step += self.training
        return inputs * (1 - 0.5**self.step)


class Delayed(Warm):
    """A layer that does more from its third forward on."""

    def forward(self, inputs: Tensor) -> Tensor:
        self.step += self.training
        return 2 * inputs if self.step >= 3 else inputs


class Dropping(nn.Module):
    """Dropout whose probability grows with each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.p = 0.0

    def forward(self, inputs: Tensor) -> Tensor:
        self.p = min(0.5, self.p + 0.1 * self.training)
        return functional.dropout(inputs, self.p, self.training)


class Logging(Warm):
    """A layer that counts its forwards for a log, and keeps the largest length for a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.cached = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.step += 1
        if len(inputs) > self.cached:
            self.cached = len(inputs)
            self.places = torch.arange(self.cached, dtype=inputs.dtype).cos()[:, None]
        return inputs * self.places[: len(inputs)]


class Scheduled(Dropping):
    """Dropout whose probability the script sets."""

    def forward(self, inputs: Tensor) -> Tensor:
        return functional.dropout(inputs, self.p, self.training)


KINDS: dict[str, Callable[[], nn.Module]] = {
    kind.__name__: kind for kind in (Warm, Delayed, Dropping, Logging, Scheduled)
}


def train(strategy: str, kind: str, form: str, workers: int, compiled: bool = False) -> Any:
    torch.manual_seed(0)
    layer: Any = KINDS[kind]()
    model: Any = nn.Sequential(nn.Linear(4, WIDTH), layer, nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3))
    model.double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if compiled:
        model.compile(backend="eager")

    def loss(model: Any, batch: Any) -> Tensor:
        return functional.cross_entropy(model(batch[0]), batch[1])

    run = tutti.prepare(model, optimizer, DATA, loss, strategy=strategy, workers=workers, batch_size=12, seed=0)
    try:
        for epoch in range(2):
            if kind == "Scheduled":
                layer.p = 0.2 * (epoch + 1)
            if form == "step":
                for batch in run.epoch(epoch):
                    run.step(batch)
                continue
            for batch in run.microbatches(epoch):
                optimizer.zero_grad()
                run.backward(loss(model, batch))
                optimizer.step()
                if kind == "Scheduled" and run.stepped:
                    layer.p += 0.1
    except TuttiError as error:
        return run.updates, str(error)
    return {name: tensor.numpy().copy() for name, tensor in run.state().items()}


STRATEGIES = ["mirrored", "sharded:stage=2"]


@pytest.mark.parametrize(
    ("kind", "form", "strategy"), table(["Warm", "Delayed", "Dropping"], ["step", "loop"], STRATEGIES)
)
def test_numbers_that_each_micro_batch_changes_are_refused_where_workers_share_them(
    kind: str, form: str, strategy: str
) -> None:
    for updates, said in worlds.run(2, train, strategy=strategy, kind=kind, form=form, workers=4):
        assert updates == (kind == "Delayed"), "the first step does not reach the threshold"
        assert kind in said and "as many workers as data ranks (2)" in said


def test_the_model_on_three_ranks_is_refused_too() -> None:
    for updates, said in worlds.run(3, train, strategy="mirrored", kind="Warm", form="loop", workers=6):
        assert updates == 0 and "Warm.step" in said


def without_diagnostics(form: str) -> Any:
    with patch.dict(os.environ, TUTTI_DIAGNOSTICS="off"):
        return train(strategy="mirrored", kind="Warm", form=form, workers=2)


@pytest.mark.parametrize("form", ["step", "loop"])
def test_the_model_is_refused_without_diagnostics_too(form: str) -> None:
    updates, said = worlds.alone(without_diagnostics, form=form)
    assert updates == 0 and "Warm.step" in said


@pytest.mark.parametrize("strategy", ["tensor:least=1", "model_parallel"])
def test_a_layer_of_a_split_model_is_tried(strategy: str) -> None:
    worlds.forget(2)
    for kind in ("Warm", "Delayed"):
        outcomes = worlds.run(2, train, strategy=strategy, kind=kind, form="loop", workers=2)
        assert any(f"{kind}.step" in said for _, said in outcomes)
        assert all(updates == (kind == "Delayed") for updates, _ in outcomes)
        worlds.forget(2)


@pytest.mark.parametrize("form", ["step", "loop"])
def test_numbers_of_compiled_layers_are_seen(form: str) -> None:
    arguments = {"strategy": "mirrored", "form": form, "compiled": True}
    for kind in ("Warm", "Delayed"):
        updates, said = worlds.alone(train, kind=kind, workers=2, **arguments)
        assert updates == (kind == "Delayed") and f"{kind}.step" in said
    assert isinstance(worlds.alone(train, kind="Logging", workers=2, **arguments), dict)


@pytest.mark.parametrize(("kind", "form", "strategy"), table(["Logging", "Scheduled"], ["step", "loop"], STRATEGIES))
def test_counts_for_a_log_caches_and_what_the_script_sets_are_right(kind: str, form: str, strategy: str) -> None:
    want = worlds.alone(train, strategy="mirrored", kind=kind, form=form, workers=4)
    for got in worlds.run(2, train, strategy=strategy, kind=kind, form=form, workers=4):
        assert all(abs(got[name] - value).max() <= 1e-12 for name, value in want.items())


@pytest.mark.parametrize("form", ["step", "loop"])
def test_as_many_workers_as_ranks_have_numbers_of_their_own(form: str) -> None:
    want = worlds.alone(train, strategy="single", kind="Warm", form=form, workers=1)
    for got in worlds.run(2, train, strategy="mirrored", kind="Warm", form=form, workers=2):
        assert all(abs(got[name] - value).max() <= 1e-12 for name, value in want.items())
