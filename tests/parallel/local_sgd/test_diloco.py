"""Workers that meet rarely: the outer optimizer's formulas, what the limits are, and how many bytes are sent."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tutti
from tests import worlds
from tests.contract.models import loss, model, samples
from tests.contract.table import OPTIMIZERS, largest_difference, train
from tests.contract.test_state import saver
from tests.covering import in_turn
from tutti.comm.communicator import Communicator
from tutti.errors import UsageError
from tutti.parallel.local_sgd.diloco import outer_step


def test_outer_updates_by_hand() -> None:
    """θ = 1, workers at 0.90 and 0.94, then at 0.85 and 0.87; γ = 0.7, μ = 0.9, Nesterov."""
    theta, velocity = torch.ones(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    for workers, want in (((0.90, 0.94), 0.8936), ((0.85, 0.87), 0.803552)):
        mean = torch.tensor([sum(workers) / 2], dtype=torch.float64)
        outer_step([theta], [mean], [velocity], 0.7, 0.9, True)
        assert theta.item() == pytest.approx(want, rel=1e-14)


def test_the_outer_optimizer_is_that_of_pytorch() -> None:
    draw = torch.Generator().manual_seed(0)
    for lr, momentum, nesterov in ((0.7, 0.9, True), (0.3, 0.5, False), (1.0, 0.0, False)):
        theta = torch.randn(5, generator=draw, dtype=torch.float64)
        theirs, velocity = torch.nn.Parameter(theta.clone()), torch.zeros_like(theta)
        optimizer = torch.optim.SGD([theirs], lr=lr, momentum=momentum, nesterov=nesterov)
        for _ in range(4):
            mean = theta + torch.randn(5, generator=draw, dtype=torch.float64)
            theirs.grad = theirs.detach() - mean
            optimizer.step()
            outer_step([theta], [mean], [velocity], lr, momentum, nesterov)
            assert torch.allclose(theta, theirs.detach(), rtol=1e-14, atol=1e-14)
            if (lr, momentum) == (1.0, 0.0):
                assert torch.allclose(theta, mean, rtol=1e-14, atol=1e-14), "only the average is left"


@pytest.mark.parametrize("post", ["", ",post=2"])
def test_without_momentum_at_rate_one_it_is_local_sgd(post: str) -> None:
    arguments = {"optimizer": OPTIMIZERS["adamw"], "workers": 4, "steps": 6}
    [(want, losses, _)] = worlds.run(1, train, strategy=f"local_sgd:period=2{post}", **arguments)
    for got, own, _ in worlds.run(
        3, train, strategy=f"diloco:period=2,outer_lr=1,outer_momentum=0,nesterov=false{post}", **arguments
    ):
        assert largest_difference(got, want) <= 1e-12
        assert own == pytest.approx(losses, rel=1e-12)


@pytest.mark.parametrize(
    ("optimizer", "strategy"),
    in_turn(["sgd momentum", "lamb", "muon"], ["local_sgd:period=2,post=9", "diloco:period=2,post=2ep"]),
)
def test_before_workers_part_it_is_synchronous_training(strategy: str, optimizer: str) -> None:
    arguments = {"optimizer": OPTIMIZERS[optimizer], "workers": 4, "clip": 0.5, "micro_batch": 3}
    want, losses, _ = worlds.alone(train, strategy="single", **arguments)
    for got, own, _ in worlds.run(3, train, strategy=strategy, **arguments):
        # bfloat16 inside Muon amplifies what is left of rounding.
        assert largest_difference(got, want) <= (1e-4 if optimizer == "muon" else 1e-10)
        assert own == pytest.approx(losses, rel=1e-4 if optimizer == "muon" else 1e-9)


def parted(strategy: str, until: int) -> list[bool]:
    """After each step, whether all workers here have the same parameters."""
    run = tutti.prepare(model(), "sgd:lr=0.1", samples(), loss, strategy=strategy, workers=4, batch_size=25)
    same = []
    while run.global_step < until:
        for batch in run.epoch(run.data_position.epoch):
            run.step(batch)
            copies = list(run.gradient_sync._copies.values())
            same.append(all(torch.equal(a, b) for row in copies[1:] for a, b in zip(copies[0], row, strict=True)))
            assert run.updated is not None and run.updated.in_sync == same[-1]
    return same[:until]


@pytest.mark.parametrize(
    ("strategy", "want"),
    [
        ("local_sgd:period=2", [False, True, False, True, False, True]),
        ("local_sgd:period=2,post=3", [True, True, True, False, True, False]),
        ("local_sgd:period=3,post=1ep", [True, True, True, False, False, True]),
        ("diloco:period=3,post=1", [True, False, False, True, False, False]),
    ],
)
def test_when_workers_part_and_meet(strategy: str, want: list[bool]) -> None:
    assert worlds.run(1, parted, strategy=strategy, until=6) == [want]


@contextmanager
def counting() -> Iterator[list[int]]:
    """Bytes that this rank sends to others in collectives over tensors."""
    sent = [0]
    exchange, gather, reduce = Communicator.exchange_slices, Communicator.gather_slices, Communicator.start_all_reduce

    def exchanged(self: Communicator, send: Any, *rest: Any) -> None:
        sent[0] += send.nbytes * (self.size - 1) // self.size
        exchange(self, send, *rest)

    def gathered(self: Communicator, mine: Any, *rest: Any) -> Any:
        sent[0] += mine.nbytes * (self.size - 1)
        return gather(self, mine, *rest)

    def reduced(self: Communicator, flat: Any, *rest: Any) -> Any:
        sent[0] += 2 * flat.nbytes * (self.size - 1) // self.size
        return reduce(self, flat, *rest)

    Communicator.exchange_slices, Communicator.gather_slices = exchanged, gathered  # type: ignore[method-assign]
    Communicator.start_all_reduce = reduced  # type: ignore[method-assign]
    try:
        yield sent
    finally:
        Communicator.exchange_slices, Communicator.gather_slices = exchange, gather  # type: ignore[method-assign]
        Communicator.start_all_reduce = reduce  # type: ignore[method-assign]


def sent(strategy: str, steps: int) -> float:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 1))
    inputs = torch.randn(steps * 8, 64)
    run = tutti.prepare(
        net, "adamw", (inputs, inputs.sum(1, keepdim=True)), _squares, strategy=strategy, workers=4, batch_size=8
    )
    with counting() as bytes_:
        for batch in run.epoch(0):
            run.step(batch)
    return bytes_[0] / steps


def _squares(net: Any, batch: Any) -> Any:
    return (net(batch[0]) - batch[1]).square().mean()


@pytest.mark.parametrize("strategy", ["local_sgd", "diloco"])
def test_bytes_a_step_are_one_part_in_the_period(strategy: str) -> None:
    """Of what summing gradients by messages sends; beside it go some hundred bytes of totals in each step."""
    parallel = worlds.run(4, sent, strategy="mirrored:algorithm=native", steps=16)
    for period in (1, 4, 16):
        rare = worlds.run(4, sent, strategy=f"{strategy}:period={period}", steps=16)
        for all_, few in zip(parallel, rare, strict=True):
            assert few / all_ == pytest.approx(1 / period, rel=0.1)


def test_what_is_no_length_is_refused() -> None:
    for text in ("two", "-1", "1.5st"):
        with pytest.raises(UsageError):
            tutti.prepare(model(), "sgd", samples(), loss, strategy=f"local_sgd:post={text}", batch_size=25)


def without_targets() -> list[float]:
    """Losses of steps whose targets are all ignored, so that the count of the global batch is 0."""

    def ignored(net: Any, batch: Any) -> Any:
        return net(batch[0]).sum() * 0.0, 0, {"hits": torch.zeros(())}

    run = tutti.prepare(model(), "sgd:lr=0.1", samples(8), ignored, strategy="local_sgd:period=2", batch_size=4)
    return [run.step(batch) for batch in run.epoch(0)]


def test_a_mean_over_no_targets_is_nan() -> None:
    for losses in worlds.run(2, without_targets):
        assert losses == [pytest.approx(float("nan"), nan_ok=True)] * 2


class Tied(nn.Module):
    """One weight under two names, of which the first to be assigned is the one that checkpoints have."""

    def __init__(self, first: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        head, table = nn.Linear(3, 5, bias=False), nn.Embedding(5, 3)
        table.weight = head.weight
        for name, layer in sorted({"head": head, "table": table}.items(), key=lambda pair: pair[0] != first):
            setattr(self, name, layer)


def likelihood(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model.head(model.table(tokens)), tokens)


def resumed(strategies: tuple[str, str], names: tuple[str, str], folder: str) -> str:
    """Three steps, a checkpoint, and three steps of another run that resumes it."""
    digest = ""
    for epoch, (strategy, name) in enumerate(zip(strategies, names, strict=True)):
        run = tutti.prepare(
            Tied(name), "adam", torch.arange(12) % 5, likelihood, strategy=strategy, workers=2, batch_size=4, seed=0
        )
        keeper = saver(run, folder, [])
        keeper.restore()
        for batch in run.epoch(epoch):
            run.step(batch)
        keeper.save({})
        keeper.wait()
        digest = run.weights_sha256()
    return digest


@pytest.mark.parametrize("before", ["mirrored", "diloco:period=2"])
def test_a_tied_weight_is_resumed_under_any_of_its_names(before: str, tmp_path: Path) -> None:
    strategies = before, "diloco:period=2"
    found = [
        worlds.run(1, resumed, strategies=strategies, names=("head", name), folder=str(tmp_path / name))
        for name in ("head", "table")
    ]
    assert found[0] == found[1]


def frozen_between(strategy: str) -> list[Any]:
    """The first layer after each step; it is frozen after the first, while its copies differ."""
    net = model()
    name, parameter = next(iter(net.named_parameters()))
    options: dict[str, Any] = {"strategy": strategy, "workers": 2, "batch_size": 25}
    run = tutti.prepare(net, torch.optim.SGD(net.parameters(), 0.1), samples(), loss, **options)
    seen = []
    for epoch in range(2):
        for batch in run.epoch(epoch):
            run.step(batch)
            parameter.requires_grad_(False)
            seen.append(run.state()[name].clone().numpy())
    return seen


@pytest.mark.parametrize("strategy", ["local_sgd:period=3", "diloco:period=3"])
def test_a_frozen_layer_stays_where_it_is(strategy: str) -> None:
    """Ranks may differ in it until the next average, and the outer momentum does not move it on."""
    for first, *others in worlds.run(2, frozen_between, strategy=strategy):
        assert len(others) > 4
        assert all(abs(other - first).max() <= 1e-15 for other in others)
