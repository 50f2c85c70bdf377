"""More data ranks than logical workers: ranks share a worker's micro-batches, with the result of one device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import tutti
from tests import worlds
from tutti.errors import TuttiError

STEPS = 5


class Shift(nn.Module):
    """A buffer that no forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.full((6,), 0.1))

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.tanh(inputs + self.shift)


def model(norm: bool) -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Linear(3, 6), *([nn.BatchNorm1d(6)] if norm else []), Shift(), nn.Dropout(0.2), nn.Linear(6, 1)
    return nn.Sequential(*layers).double()


def data(count: int) -> Tensor:
    return torch.randn(count, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def loss(net: Any, batch: Tensor) -> Any:
    return net(batch).square().mean()


def train(
    strategy: str, workers: int, norm: bool, reproducible: bool, own: bool = False, micro: int = 3, count: int = 52
) -> dict[str, Any]:
    """Train two epochs of 52 samples, whose last batch has 4; return weights, losses and counts."""
    net = model(norm)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    options: dict[str, Any] = {"workers": workers, "batch_size": 24, "micro_batch": micro, "clip": 0.5}
    run = tutti.prepare(
        net, optimizer, data(count), None if own else loss, strategy=strategy, reproducible=reproducible, **options
    )
    losses = []
    for epoch in range(2):
        if own:
            for batch in run.microbatches(epoch):
                optimizer.zero_grad()
                run.backward(loss(run.model, batch))
                optimizer.step()
        else:
            losses += [run.step(batch) for batch in run.epoch(epoch)]
    state = {name: tensor.clone() for name, tensor in run.state().items()}
    return {"state": state, "sha": run.weights_sha256(), "losses": losses, "updates": run.updates}


CASES = [
    ("mirrored", 1, 3, True, True),
    ("mirrored", 1, 4, True, False),
    ("mirrored", 2, 4, True, True),
    ("mirrored", 2, 3, True, True),
    ("mirrored:algorithm=ring", 1, 3, False, False),
    ("central_storage", 1, 4, True, True),
    ("central_storage", 2, 3, True, False),
    ("sharded:stage=1", 1, 4, True, False),
    ("sharded:stage=2", 1, 3, True, False),
    ("sharded:stage=3", 2, 3, False, False),
    ("pipeline:stages=2,schedule=1f1b", 1, 4, True, False),
    ("hybrid:shards=2,stages=2", 1, 4, False, False),
]


@pytest.mark.parametrize(("strategy", "workers", "devices", "norm", "reproducible"), CASES)
def test_ranks_share_a_worker(strategy: str, workers: int, devices: int, norm: bool, reproducible: bool) -> None:
    arguments = {"workers": workers, "norm": norm, "reproducible": reproducible}
    want = worlds.alone(train, strategy="single", **arguments)
    for got in worlds.run(devices, train, strategy=strategy, **arguments):
        compare(got, want, reproducible)


def compare(got: dict[str, Any], want: dict[str, Any], reproducible: bool) -> None:
    assert got["updates"] == want["updates"]
    if reproducible:
        assert got["sha"] == want["sha"] and got["losses"] == want["losses"]
    for name, tensor in want["state"].items():
        assert (got["state"][name] - tensor).abs().max() <= 1e-10, name


@pytest.mark.parametrize(("workers", "devices", "reproducible"), [(1, 4, False), (2, 4, True)])
def test_ranks_share_a_worker_in_a_custom_loop(workers: int, devices: int, reproducible: bool) -> None:
    arguments = {"workers": workers, "norm": True, "reproducible": reproducible, "own": True}
    arguments["micro"] = 24 // 4 if reproducible else 3
    want = worlds.alone(train, strategy="single", **arguments)
    for got in worlds.run(devices, train, strategy="mirrored", **arguments):
        compare(got, want, reproducible)


class Counter(nn.Module):
    """A buffer that forwards change and read."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(6))

    def forward(self, inputs: Tensor) -> Tensor:
        with torch.no_grad():
            self.scale.mul_(0.9).add_(0.1 * inputs.detach().abs().mean(0))
        return inputs * self.scale


def train_with_counter(strategy: str, again: bool = False) -> Any:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 6), Counter(), nn.Linear(6, 1)).double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    options: dict[str, Any] = {"workers": 1, "batch_size": 24, "micro_batch": 4}
    run = tutti.prepare(net, optimizer, data(52), None if again else loss, strategy=strategy, **options)
    if again:
        for batch in run.microbatches(0):
            optimizer.zero_grad()
            run.backward(loss(run.model, batch))
            loss(run.model, batch)
            optimizer.step()
        return None
    for batch in run.epoch(0):
        run.step(batch)
    return {name: tensor.clone() for name, tensor in run.state().items()}


def test_each_forward_sees_the_buffers_that_it_sees_on_one_device() -> None:
    [want] = worlds.run(1, train_with_counter, strategy="single")
    for got in worlds.run(3, train_with_counter, strategy="mirrored"):
        assert all((got[name] - tensor).abs().max() <= 1e-10 for name, tensor in want.items())


@pytest.mark.parametrize(
    ("strategy", "again", "words"),
    [("sharded:stage=3", False, "FSDP2's forwards are collective"), ("mirrored", True, "outside the forwards before")],
)
def test_buffers_that_ranks_cannot_hand_over_are_refused(strategy: str, again: bool, words: str) -> None:
    with pytest.raises(worlds.RankError, match=words):
        worlds.run(2, train_with_counter, strategy=strategy, again=again)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "Take micro_batch=12 or less"),
        ({"strategy": "local_sgd"}, "each worker's gradient or update is made on one device"),
        ({"lr_scale": "adascale", "micro_batch": 3}, "never whole on one device"),
    ],
)
def test_workers_that_ranks_cannot_share_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(worlds.RankError, match=words):
        worlds.run(2, prepare, **options)


def prepare(**options: Any) -> None:
    net = model(norm=False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    tutti.prepare(net, optimizer, data(52), loss, workers=1, batch_size=24, **options)


def with_own_generator(seeded: bool) -> tuple[str, list[float]]:
    """Train with noise of a generator that the loss function keeps; return the error, or the losses."""
    generator = np.random.default_rng(0)

    def noisy(net: Any, batch: Tensor) -> Any:
        nonlocal generator
        if seeded:
            generator = np.random.default_rng(0)
        return loss(net, batch + torch.from_numpy(generator.normal(size=tuple(batch.shape))))

    run = tutti.prepare(model(False), "sgd:lr=0.1", data(24), noisy, workers=1, batch_size=24, micro_batch=6)
    try:
        return "", [run.step(batch) for batch in run.epoch(0)]
    except TuttiError as error:
        assert run.updates == 0
        return str(error), []


def test_draws_that_go_on_from_one_micro_batch_to_the_next_are_refused() -> None:
    for error, _ in worlds.run(2, with_own_generator, seeded=False):
        assert "depends on the generator generator" in error and "ranks share the micro-batches" in error
    worlds.forget(2)
    [want] = worlds.run(1, with_own_generator, seeded=True)
    for error, losses in worlds.run(2, with_own_generator, seeded=True):
        assert error == "" and losses == pytest.approx(want[1], rel=1e-12)
