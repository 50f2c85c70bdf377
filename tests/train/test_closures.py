"""``optimizer.step(closure)`` where each rank updates a part of the parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tutti
from tests import worlds
from tests.contract.table import largest_difference
from tutti.errors import NonFiniteError, UsageError
from tutti.optim.mixing import unlike_one_closure

DATA = torch.randn(12, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
PARTS = ["sharded", "sharded:stage=1", "tensor:least=1", "central_storage", "parameter_server"]


class SharpnessAware(torch.optim.SGD):
    """SAM: computes the loss, goes uphill, computes the loss there, goes back and steps."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = closure()
        members = [p for group in self.param_groups for p in group["params"]]
        uphill = [0.05 * p.grad / p.grad.norm() for p in members]
        for p, up in zip(members, uphill, strict=True):
            p.add_(up)
        with torch.enable_grad():
            closure()
        for p, up in zip(members, uphill, strict=True):
            p.sub_(up)
        super().step()
        return loss


class Perturbed(SharpnessAware):
    """Without a closure it steps as SGD does."""

    def step(self, closure: Any = None) -> Any:
        return torch.optim.SGD.step(self) if closure is None else super().step(closure)


class Signs(torch.optim.Optimizer):
    """Steps by the sign of the gradient, after a call of the closure if there is one."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad.sign(), alpha=group["lr"])
        return loss


def trained(strategy: str, kind: Callable[..., torch.optim.Optimizer]) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    optimizer: Any = kind(model.parameters(), lr=0.1)
    run = tutti.prepare(model, optimizer, DATA, strategy=strategy, batch_size=6)
    try:
        for batch in run.microbatches(0):

            def closure(batch: Tensor = batch) -> Any:
                optimizer.zero_grad()
                loss = model(batch).square().mean()
                run.backward(loss)
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                for parameter in model.parameters():
                    parameter.grad.add_(parameter.detach(), alpha=0.1)  # type: ignore[union-attr]
                return loss

            optimizer.step(closure)
    except UsageError as error:
        return run.updates, str(error)
    return {name: value.numpy().copy() for name, value in run.state().items()}


@pytest.mark.parametrize("kind", [SharpnessAware, Perturbed])
@pytest.mark.parametrize("strategy", [name for name in PARTS if name != "central_storage"])
def test_a_closure_that_is_called_twice_is_refused_where_ranks_update_parts(strategy: str, kind: Any) -> None:
    for updates, said in worlds.run(2, trained, strategy=strategy, kind=kind):
        assert updates == 0 and f"optimizer.step(closure) of {kind.__name__} cannot be combined" in said, said
        assert "test_closures.py:" in said and "strategy='mirrored'" in said


@pytest.mark.parametrize("strategy", [*PARTS, "mirrored"])
def test_a_closure_that_is_called_once_equals_one_device(strategy: str) -> None:
    want = worlds.alone(trained, strategy="single", kind=Signs)
    for got in worlds.run(2, trained, strategy=strategy, kind=Signs):
        assert largest_difference(got, want) <= 1e-10


def test_a_trial_tells_how_a_step_uses_its_closure() -> None:
    def of(kind: Any) -> str | None:
        return unlike_one_closure(kind([nn.Parameter(torch.ones(3, 2))], lr=0.1))

    assert of(Signs) is None and of(torch.optim.AdamW) is None
    assert "as often as" in str(of(torch.optim.LBFGS)) and "calls it 2 times" in str(of(Perturbed))


def lbfgs(params: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(params, lr=lr, max_iter=3)


KINDS = (torch.optim.SGD, lbfgs, SharpnessAware)
CLIP = 0.05


def step_by_step(strategy: str | None, kind: Any, bad: Sequence[int], **options: Any) -> list[Any]:
    """Train by closures; of each step what it was skipped for, and the weights. Without a strategy in plain PyTorch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    optimizer = kind(model.parameters(), lr=0.1)
    run: Any = strategy and tutti.prepare(
        model, optimizer, DATA, strategy=strategy, batch_size=4, shuffle=False, clip=CLIP, **options
    )
    found, calls = [], 0
    for number, batch in enumerate(run.microbatches(0) if run else DATA.split(4)):

        def closure(batch: Tensor = batch) -> Any:
            nonlocal calls
            optimizer.zero_grad()
            loss = model(batch).square().mean() * (float("nan") if calls in bad else 10)
            calls += 1
            if run:
                run.backward(loss)
            else:
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            return loss

        if run or number not in bad:
            optimizer.step(closure)
        state = run.state() if run else model.state_dict()
        found.append((run and (run.updates, run.updated.nonfinite[:1]), [t.tolist() for t in state.values()]))
    return found


def all_kinds(strategies: Sequence[str]) -> list[list[Any]]:
    return [step_by_step(strategy, kind, ()) for strategy in strategies for kind in KINDS]


def test_every_evaluation_of_a_closure_gives_the_clipped_gradient() -> None:
    want = [step_by_step(None, kind, ()) for kind in KINDS]
    [found] = worlds.run(1, all_kinds, strategies=("mirrored", "central_storage", "sharded"))
    for rank in ([found[:3]], [found[3:6]], [found[6:]], worlds.run(2, all_kinds, strategies=("mirrored",))):
        for got in rank:
            for steps, plain in zip(got, want, strict=True):
                assert [told for told, _ in steps] == [(number, ()) for number in (1, 2, 3)]
                for (_, weights), (_, reference) in zip(steps, plain, strict=True):
                    pairs = zip(weights, reference, strict=True)
                    assert all(torch.allclose(torch.tensor(a), torch.tensor(b), atol=1e-10) for a, b in pairs)


def skipped(kind: Any) -> tuple[list[Any], str]:
    found = step_by_step("mirrored", kind, (0,))
    try:
        step_by_step("mirrored", kind, (0, 1), max_nonfinite=2)
    except NonFiniteError as error:
        return found, str(error)
    return found, ""


@pytest.mark.parametrize("kind", KINDS)
def test_a_closure_of_a_gradient_that_is_not_finite_is_skipped(kind: Any) -> None:
    for found, said in worlds.run(2, skipped, kind=kind):
        assert [told for told, _ in found] == [(0, ("0.weight",)), (1, ()), (2, ())]
        assert "2 steps in a row had a NaN" in said, said


def test_weights_that_a_later_evaluation_ruins_end_the_run() -> None:
    with pytest.raises(worlds.RankError, match="SharpnessAware has written NaN or infinity into the parameters"):
        worlds.run(1, step_by_step, strategy="mirrored", kind=SharpnessAware, bad=(1,))


def by_turns(strategy: str | None) -> list[Any]:
    """Two optimizers, each with a closure of its own, and a loss that counts two a sample: the weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    optimizers: list[Any] = [lbfgs(model[0].parameters(), lr=0.5), SharpnessAware(model[2].parameters(), lr=0.1)]
    options: dict[str, Any] = {"batch_size": 4, "shuffle": False, "clip": CLIP, "loss_scale": "8"}
    run: Any = strategy and tutti.prepare(model, optimizers, DATA, strategy=strategy, **options)
    for batch in run.microbatches(0) if run else DATA.split(4):
        for optimizer, part in zip(optimizers, (model[0], model[2]), strict=True):

            def closure(batch: Tensor = batch, part: nn.Module = part) -> Any:
                model.zero_grad()
                loss = 30 * model(batch).square().sum()
                if run:
                    run.backward((loss, 2 * len(batch)))
                else:
                    (loss / (2 * len(batch))).backward()
                    nn.utils.clip_grad_norm_(part.parameters(), CLIP)
                return loss / (2 * len(batch))

            optimizer.step(closure)
    return [value.tolist() for value in (run.state() if run else model.state_dict()).values()]


@pytest.mark.parametrize("strategy", ["mirrored", "sharded"])
def test_each_of_two_optimizers_clips_its_own_gradients(strategy: str) -> None:
    [found] = worlds.run(1, by_turns, strategy=strategy)
    for got, want in zip(found, by_turns(None), strict=True):
        assert torch.allclose(torch.tensor(got), torch.tensor(want), atol=1e-10)
