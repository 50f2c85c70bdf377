"""Updates that are launched before the host has read the step's results, which the device skips where it must."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import tutti
from tests import worlds
from tests.contract.table import largest_difference
from tutti.errors import TuttiError
from tutti.parallel.ddp import allreduce, update_first
from tutti.types.step_records import PendingStats

BAD = 4
"""Step, from 0, whose loss is not finite where a test asks for it."""


def data() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    return torch.randn(72, 5, generator=draw, dtype=torch.float64), torch.randint(0, 3, (72,), generator=draw)


def optimizer(name: str, parameters: Any) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01, fused=True)
    return torch.optim.AdamW(parameters, lr=0.01, fused=name == "adamw")


def train(
    first: bool, name: str = "adamw", loop: bool = False, bad: bool = False, tokens: bool = False, **options: Any
) -> Any:
    """Train for two epochs; ``first``: launch updates before the results are read, wherever that is possible."""
    calls, launched = [0], list[bool]()

    def loss(net: Any, batch: Any) -> Any:
        inputs, targets = batch
        each = nn.functional.cross_entropy(net(inputs), targets, reduction="none")
        if tokens:
            return each.sum() * 2, 2 * len(targets)
        return each.mean()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    with patch.object(allreduce, "LEAST_WAIT", 0.0 if first else 1e9):
        update = PendingStats.update_first

        def counted(self: PendingStats, context: Any) -> bool:
            launched.append(update(self, context))
            return launched[-1]

        arguments = {"workers": 1, "batch_size": 12, **options}
        with patch.object(PendingStats, "update_first", counted):
            made = optimizer(name, model.parameters())
            if loop:
                run = tutti.prepare(model, made, data(), **arguments)
                found = []
                for epoch in range(2):
                    for inputs, targets in run.microbatches(epoch):
                        made.zero_grad()
                        value = nn.functional.cross_entropy(model(inputs), targets)
                        value = value * float("nan") if bad and run.local_step == BAD else value
                        run.backward(value)
                        made.step()
                        found.append(run.stats.loss)
            else:
                run = tutti.prepare(model, made, data(), loss, **arguments)
                found = []
                for epoch in range(2):
                    for inputs, targets in run.epoch(epoch):
                        if bad and run.local_step == BAD:
                            inputs = inputs * float("nan")
                        found.append(run.step((inputs, targets)))
                        calls.append(run.updates)
    state = {key: value.cpu().numpy().copy() for key, value in run.state().items()}
    return state, found, run.updates, sum(launched), len(launched), run.stats.grad_norm


PLACES = [
    (1, {}),
    (1, {"name": "sgd"}),
    (1, {"clip": 0.05}),
    (2, {"workers": 2, "clip": 0.05}),
    (3, {"workers": 3, "name": "sgd"}),
    (1, {"loop": True}),
    (1, {"loop": True, "name": "sgd"}),
    (2, {"loop": True, "workers": 2}),
    (1, {"micro_batch": 4}),
    (1, {"bad": True}),
    (2, {"bad": True, "workers": 2, "clip": 0.05}),
    (1, {"bad": True, "loop": True}),
    (1, {"tokens": True}),
    (2, {"tokens": True, "workers": 2}),
]


@pytest.mark.parametrize(("devices", "options"), PLACES, ids=str)
def test_updates_before_the_results_equal_updates_after_them(devices: int, options: dict[str, Any]) -> None:
    """In two epochs of six batches the first update makes the optimizer's state, and waits."""
    after = worlds.run_on(worlds.ACCELERATOR, devices, train, first=False, **options)
    before = worlds.run_on(worlds.ACCELERATOR, devices, train, first=True, **options)
    for late, early in zip(after, before, strict=True):
        assert largest_difference(early[0], late[0]) <= 1e-12
        assert early[1] == pytest.approx(late[1], rel=1e-12, nan_ok=True)
        assert early[2] == late[2] == 12 - bool(options.get("bad"))
        assert early[5] == pytest.approx(late[5], rel=1e-12)
        assert late[4] == 0
        if options.get("loop") and devices > 1:
            assert early[4] == 0  # a script sees gradients of which only the count tells whether they are whole
        else:
            scaled = options.get("tokens") and devices > 1
            assert early[4] == 11 and early[3] == (0 if scaled else 11 - bool(options.get("bad")))


@pytest.mark.parametrize("options", [{"name": "foreach"}, {"reproducible": True}, {"strategy": "central_storage"}])
def test_an_update_that_the_device_cannot_skip_waits_for_the_results(options: dict[str, Any]) -> None:
    [found] = worlds.run_on(worlds.ACCELERATOR, 1, train, first=True, **options)
    assert found[4] == 0


def apart(rank_batches: bool) -> str:
    """Rank 1 leaves out a batch in the second epoch."""
    torch.manual_seed(0)
    model = nn.Linear(5, 3).double()
    made = optimizer("sgd", model.parameters())
    try:
        with patch.object(allreduce, "LEAST_WAIT", 0.0):
            run = tutti.prepare(
                model, made, data(), lambda m, b: nn.functional.cross_entropy(m(b[0]), b[1]), workers=2, batch_size=12
            )
            before: dict[str, Tensor] = {}
            for epoch in range(2):
                for number, batch in enumerate(run.epoch(epoch)):
                    if rank_batches and tutti.rank() == 1 and epoch == 1 and number == 1:
                        continue
                    before = {key: value.detach().clone() for key, value in model.state_dict().items()}
                    run.step(batch)
    except TuttiError as error:
        same = all(torch.equal(before[key], value) for key, value in model.state_dict().items())
        return f"{type(error).__name__} {same}"
    return "trained"


def test_ranks_in_different_steps_are_refused_without_the_update() -> None:
    found = worlds.run_on(worlds.ACCELERATOR, 2, apart, rank_batches=True)
    assert all(each.endswith("Error True") for each in found), found


def test_flags_are_taken_away_again() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    made = torch.optim.SGD([parameter], lr=0.1)
    with update_first.skipped_unless(torch.tensor(False), [made]):
        assert made.found_inf == 1  # type: ignore[attr-defined]
    assert not hasattr(made, "found_inf")
