"""Optimizers whose methods a script has replaced on the instance before ``tutti.prepare``."""

from __future__ import annotations

import time
from types import MethodType
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import tutti
from tests import worlds
from tutti.errors import UsageError
from tutti.parallel.parameter_server.client import Client

DATA = torch.randn(8, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def replaced(optimizer: Any, calls: list[str], bound: bool) -> None:
    """Set functions in place of ``step`` and ``zero_grad``, with a scheduler before or after."""
    plain, cleared = optimizer.step, optimizer.zero_grad

    def step(*arguments: Any) -> Any:
        calls.append("step")
        return plain(*arguments)

    def zero_grad() -> None:
        calls.append("zero_grad")
        cleared()

    optimizer.step = MethodType(lambda self, *arguments: step(*arguments), optimizer) if bound else step
    optimizer.zero_grad = zero_grad


def trained(
    strategy: str, micro: int | None, bound: bool, closure: bool, by_run: bool = False, late: bool = False
) -> Any:
    """Train with functions of the script's own: the calls, the size of the first update, and updates of all kinds."""
    torch.manual_seed(0)
    net = nn.Linear(3, 1).double()
    optimizer, calls = torch.optim.SGD(net.parameters(), lr=1.0), list[str]()
    if not late:
        replaced(optimizer, calls, bound)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1) if bound else None

    def loss(model: Any, batch: Tensor) -> Tensor:
        result: Tensor = 10 * model(batch).square().mean()
        return result

    try:
        run = tutti.prepare(
            *(net, optimizer, DATA, loss),
            strategy=strategy,
            batch_size=4,
            micro_batch=micro,
            clip=0.1,
            ema=0.5,
            scheduler=scheduler,
        )
    except UsageError as error:
        return str(error)
    if late:
        replaced(optimizer, calls, bound)
    before = net.weight.detach().clone(), net.bias.detach().clone()

    def whole(batch: Tensor) -> Tensor:
        optimizer.zero_grad()
        found = loss(net, batch)
        run.backward(found)
        return found

    if by_run:
        run.step(next(iter(run.epoch(0))))
    for batch in [] if by_run else run.microbatches(0):
        if closure:
            optimizer.step(lambda: whole(batch))  # noqa: B023
        else:
            whole(batch)
            optimizer.step()
        if run.updates:
            break
    moved = [(now.detach() - then).square().sum() for now, then in zip((net.weight, net.bias), before, strict=True)]
    return calls, round(float(sum(moved)) ** 0.5, 4), run.updates, scheduler and scheduler.last_epoch


@pytest.mark.parametrize("bound", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_function_in_place_of_step_is_called_once_an_update(ranks: int, bound: bool) -> None:
    rest = 0.1, 1, 1 if bound else None
    got = worlds.run(ranks, trained, strategy="mirrored", micro=None, bound=bound, closure=False)
    assert got == [(["zero_grad", "step"], *rest)] * ranks
    [got] = worlds.run(1, trained, strategy="mirrored", micro=2, bound=bound, closure=False)
    assert got == (["zero_grad", "zero_grad", "step"], *rest)
    got = worlds.run(ranks, trained, strategy="mirrored", micro=None, bound=bound, closure=True)
    assert got == [(["step", "zero_grad"], *rest)] * ranks
    got = worlds.run(ranks, trained, strategy="mirrored", micro=None, bound=bound, closure=False, by_run=True)
    assert got == [(["step"], *rest)] * ranks


@pytest.mark.parametrize("closure", [False, True])
def test_a_function_that_is_set_after_the_preparation_is_called_once_an_update(closure: bool) -> None:
    [got] = worlds.run(1, trained, strategy="mirrored", micro=None, bound=False, closure=closure, late=True)
    assert sorted(got[0]) == ["step", "zero_grad"] and got[1:] == (0.1, 1, None)


def refused_while_a_rank_is_late(strategy: str) -> Any:
    connect = Client.__init__

    def late(*arguments: Any, **more: Any) -> None:
        if tutti.rank() == 1:
            time.sleep(0.5)  # the other rank has met the servers, which end with its refusal
        connect(*arguments, **more)

    with patch.object(Client, "__init__", late):
        return trained(strategy, micro=None, bound=False, closure=False)


@pytest.mark.parametrize("strategy", ["sharded", "parameter_server"])
def test_a_function_in_place_of_step_is_refused_where_ranks_update_parts(strategy: str) -> None:
    for said in worlds.run(2, refused_while_a_rank_is_late, strategy=strategy):
        assert "SGD.step is a function of the script" in said and "strategy='mirrored'" in said, said


def test_a_second_run_finds_the_scripts_own_methods() -> None:
    net = nn.Linear(3, 1).double()
    optimizer, calls = torch.optim.SGD(net.parameters(), lr=0.1), list[str]()
    replaced(optimizer, calls, bound=False)
    for _ in range(2):
        run = tutti.prepare(net, optimizer, DATA, lambda model, batch: model(batch).square().mean(), batch_size=8)
        for batch in run.epoch(0):
            run.step(batch)
    assert calls == ["step", "step"]


class NamedOtherwise(torch.optim.Optimizer):
    """Steps by the signs of large gradients; the methods name their object ``this``."""

    def __init__(this, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(this, closure: Any = None) -> None:
        for group in this.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    large = torch.where(parameter.grad.abs() > 0.01, parameter.grad, torch.zeros_like(parameter))
                    parameter.sub_(large, alpha=0.1)


def named_otherwise(strategy: str) -> Any:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1)).double()
    optimizer = NamedOtherwise(net.parameters())
    run = tutti.prepare(net, optimizer, DATA, strategy=strategy, workers=1, batch_size=4)
    try:
        for batch in run.microbatches(0):
            optimizer.zero_grad()
            run.backward(net(batch).square().mean())
            optimizer.step()
    except UsageError as error:
        return str(error)
    return {name: tensor.numpy().copy() for name, tensor in run.state().items()}


@pytest.mark.parametrize("ranks", [2, 3])
def test_methods_may_name_their_object_as_they_like(ranks: int) -> None:
    want = worlds.alone(named_otherwise, strategy="single")
    for got in worlds.run(ranks, named_otherwise, strategy="tensor:least=1"):
        assert not isinstance(got, str), got
        assert max(abs(got[name] - want[name]).max() for name in want) <= 1e-10


def step(optimizer: Any, net: Any) -> Any:
    """A function of the script, and no method."""
    found = net[0].weight.bernoulli()
    optimizer.step()
    return found


def by_a_function() -> str:
    net = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1)).double()
    optimizer = NamedOtherwise(net.parameters())
    run = tutti.prepare(net, optimizer, DATA, strategy="tensor:least=1", workers=1, batch_size=4)
    try:
        for batch in run.microbatches(0):
            run.backward(net(batch).square().mean())
            step(optimizer, net)
    except UsageError as error:
        return str(error)
    return "nothing"


def test_a_function_that_is_given_an_optimizer_is_not_its_method() -> None:
    for said in worlds.run(2, by_a_function):
        assert "reads 0.weight, of which each tensor rank has a slice" in said


class SharpnessAware(torch.optim.Optimizer):
    """SAM as scripts have it (Foret et al. 2021, arXiv 2010.01412), around another optimizer."""

    def __init__(self, params: Any, base_optimizer: Any, rho: float = 0.05, **options: Any) -> None:
        super().__init__(params, {"rho": rho, **options})
        self.base_optimizer = base_optimizer(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self, zero_grad: bool = False) -> None:
        norms = [p.grad.norm() for group in self.param_groups for p in group["params"] if p.grad is not None]
        scale = 0.05 / torch.stack(norms).norm()
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["old"] = p.data.clone()
                p.add_(p.grad * scale)
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad: bool = False) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data = self.state[p]["old"]
        self.base_optimizer.step()
        if zero_grad:
            self.zero_grad()


def sharpness_aware(strategy: str, workers: int) -> Any:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1)).double()
    optimizer = SharpnessAware(net.parameters(), torch.optim.SGD, lr=0.1)
    try:
        run = tutti.prepare(net, optimizer, DATA, strategy=strategy, workers=workers, batch_size=workers)
        for batch in run.microbatches(0):
            for step in (optimizer.first_step, optimizer.second_step):
                run.backward(net(batch).square().mean())
                step(zero_grad=True)
    except UsageError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_method_that_needs_the_gradient_of_the_last_body_says_so(ranks: int) -> None:
    for strategy in ("sharded", "sharded:stage=1"):
        for said in worlds.run(ranks, sharpness_aware, strategy=strategy, workers=2 * ranks):
            assert "SharpnessAware.first_step() fails with several micro-batches a rank: RuntimeError: stack" in said
            assert "test_optimizers_of_scripts.py:" in said and f"as data ranks ({ranks})" in said
        worlds.forget(ranks)
    for said in worlds.run(ranks, sharpness_aware, strategy="mirrored", workers=2 * ranks):
        assert "the loop's body writes parameters, with several micro-batches a rank" in said
    worlds.forget(ranks)
