"""Step hooks of optimizers: whole parameters and gradients as in PyTorch, or a refusal before the update."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import tutti
from tests import worlds
from tests.covering import in_turn
from tutti.errors import UsageError

DATA = torch.utils.data.TensorDataset(torch.randn(12, 4, generator=torch.Generator().manual_seed(1)).double())
Hook = Callable[[Any, Any, Any], None]


def clipped(optimizer: Any, args: Any, kwargs: Any) -> None:
    nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 0.05)


def centred(optimizer: Any, args: Any, kwargs: Any) -> None:
    for parameter in optimizer.param_groups[0]["params"]:
        half = parameter.grad * 0.5
        parameter.grad.sub_(half.mean())


def scaled(optimizer: Any, args: Any, kwargs: Any) -> None:
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad.mul_(0.5)
        parameter.data.clamp_(-0.3, 0.3)


def counted(optimizer: Any, args: Any, kwargs: Any) -> None:
    optimizer.counted = getattr(optimizer, "counted", 0) + 1


def mean(model: Any, batch: Any) -> Any:
    return model(batch[0]).square().mean()


def trained(strategy: str, hook: Hook | None = None, loop: bool = True) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    if hook is not None:
        optimizer.register_step_pre_hook(hook)
    if strategy == "plain":
        for batch in DATA.tensors[0].split(4):
            optimizer.zero_grad()
            mean(model, [batch]).backward()
            optimizer.step()
        return dict(model.state_dict())
    run = tutti.prepare(model, optimizer, DATA, mean, strategy=strategy, batch_size=4, shuffle=False)
    try:
        for batch in run.microbatches(0) if loop else run.epoch(0):
            if loop:
                optimizer.zero_grad()
                run.backward(mean(model, batch))
                optimizer.step()
            else:
                run.step(batch)
    except UsageError as error:
        return run.updates, str(error)
    return dict(run.state())


@pytest.mark.parametrize(
    ("place", "loop"),
    in_turn(
        [("tensor", clipped), ("sharded:stage=1", centred), ("sharded", clipped), ("central_storage", counted)],
        [False, True],
    ),
)
def test_hooks_that_would_see_parts_are_refused_before_the_update(place: tuple[str, Hook], loop: bool) -> None:
    strategy, hook = place
    for updates, said in worlds.run(2, trained, strategy=strategy, hook=hook, loop=loop):
        assert updates == 0 and "a step hook of an optimizer" in said and "test_step_hooks.py:" in said
    worlds.forget(2)


@pytest.mark.parametrize("loop", [False, True])
@pytest.mark.parametrize(
    ("strategy", "hook"), [("mirrored", clipped), ("tensor", scaled), ("sharded:stage=1", scaled), ("sharded", counted)]
)
def test_other_hooks_equal_one_device(strategy: str, hook: Hook, loop: bool) -> None:
    want = trained("plain", hook)
    for state in worlds.run(2, trained, strategy=strategy, hook=hook, loop=loop):
        torch.testing.assert_close(state, want, rtol=0, atol=1e-10)


def trained_twice(first: str, second: str, hook: Hook) -> Any:
    """Train under two strategies in turn, with a hook for all optimizers of the process; return the second result."""
    handle = register_optimizer_step_pre_hook(hook)
    try:
        trained(first)
        return trained(second)
    finally:
        handle.remove()


@pytest.mark.parametrize(("second", "hook"), [("central_storage", counted), ("sharded:stage=1", centred)])
def test_hooks_for_all_optimizers_are_refused_in_each_run(second: str, hook: Hook) -> None:
    for updates, said in worlds.run(2, trained_twice, first="sharded:stage=1", second=second, hook=hook):
        assert updates == 0 and "a step hook of an optimizer" in said and f"'{second.partition(':')[0]}'" in said
    worlds.forget(2)


def test_hooks_for_all_optimizers_may_mix_elements_outside_of_runs_with_parts() -> None:
    want = trained("plain", clipped)
    for state in worlds.run(2, trained_twice, first="sharded:stage=1", second="plain", hook=clipped):
        torch.testing.assert_close(state, want, rtol=0, atol=1e-10)
