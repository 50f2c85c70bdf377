"""Mistakes that no run on CPUs shows, planted one at a time: each changes the weights, raises, or is counted."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
import torch
from torch import Tensor, nn

import tutti
from tests import worlds
from tests.contract import test_state
from tests.contract.table import OPTIMIZERS
from tests.simulated_accelerator.build import DEVICE
from tests.simulated_accelerator.test_simulated_accelerator import syncs
from tutti.checkpoint.save_snapshot import slices as real_slices
from tutti.comm.communicator import Communicator
from tutti.config.strategy_table import TABLE
from tutti.data.transfer import Transfer
from tutti.errors import TuttiError

pytestmark = pytest.mark.timeout(600)


def loss(net: Any, batch: Any) -> Tensor:
    inputs, targets = batch
    return nn.functional.cross_entropy(net(inputs), targets)


def prepare(strategy: str = "mirrored", **options: Any) -> tutti.Run:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 3))
    draw = torch.Generator().manual_seed(1)
    data = torch.randn(48, 5, generator=draw), torch.randint(0, 3, (48,), generator=draw)
    return tutti.prepare(model, "adam:lr=0.01", data, loss, strategy=strategy, workers=2, batch_size=8, **options)


def train(mistake: str = "", strategy: str = "mirrored") -> str:
    """Hash of the weights after an epoch, or the error."""
    with MISTAKES[mistake]():
        try:
            run = prepare(strategy)
            for batch in run.epoch(0):
                run.step(batch)
            return run.weights_sha256()
        except (RuntimeError, IndexError, TuttiError) as error:
            return f"{type(error).__name__}: {error}"


def no_wait() -> AbstractContextManager[Any]:
    """The step does not wait for the copy of its batch."""
    return patch.object(Transfer, "_arrived", lambda self, moving: moving.part)


def host_group() -> AbstractContextManager[Any]:
    """Gradients of the device are sent over the host's process group."""
    return patch.object(Communicator, "_carrier", lambda self, tensor: self._control_group)


def host_batch() -> AbstractContextManager[Any]:
    """The batch stays in host memory."""
    return patch("tutti.train.prepare.placer", lambda *_: lambda batch: batch)


def wrong_generator() -> AbstractContextManager[Any]:
    """Keyed draws seed the host's generator, and the device draws from its own."""
    return patch("tutti.nn.rng_streams.default_generator", lambda device: torch.default_generator)


def pinned_again() -> AbstractContextManager[Any]:
    """The next batch is pinned in the memory of the batch before, whose copy may be under way."""
    kept, pin = dict[Any, Tensor](), Tensor.pin_memory

    def reused(tensor: Tensor) -> Tensor:
        key = tensor.shape, tensor.dtype
        kept[key] = kept[key].copy_(tensor) if key in kept else pin(tensor)
        return kept[key]

    return patch.object(Tensor, "pin_memory", reused)


def unawaited(method: str) -> AbstractContextManager[Any]:
    """What a transfer between devices gives is used before the wait for it, which is that of the next transfer."""
    real, begun = getattr(Communicator, method), list[Any]()

    def start(self: Communicator, tensor: Tensor, *arguments: Any) -> Any:
        if tensor.device.type == "cpu" or not tensor.is_floating_point():
            return real(self, tensor, *arguments)
        while begun:
            begun.pop().wait()
        begun.append(real(self, tensor, *arguments))
        return MagicMock(done=True)

    return patch.object(Communicator, method, start)


MISTAKES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "": nullcontext,
    "pinned again": pinned_again,
    "no wait for gradients": partial(unawaited, "start_all_reduce"),
    "no wait for activations": partial(unawaited, "start_receive"),
    "no wait": no_wait,
    "host group": host_group,
    "host batch": host_batch,
    "wrong generator": wrong_generator,
}


@pytest.mark.parametrize("mistake", [name for name in MISTAKES if name])
def test_a_planted_mistake_is_caught(mistake: str) -> None:
    strategy = "pipeline" if mistake == "no wait for activations" else "mirrored"
    want = worlds.run_on("cpu", 2, train, strategy=strategy)
    assert worlds.run_on(DEVICE, 2, train, strategy=strategy) == want
    got = worlds.run_on(DEVICE, 2, train, mistake=mistake, strategy=strategy)
    assert all(one != other for one, other in zip(got, want, strict=True)), got


def steps(strategy: str, item: bool = False) -> list[int]:
    """How often the host waits for the device in each step of the second epoch."""
    run, found = prepare(strategy), []
    for epoch in range(2):
        for batch in run.epoch(epoch):
            with syncs() as counted:
                run.step(batch)
                if item:
                    batch[0].sum().item()
            found.append(counted[0])
    return found[6:]


BOUNDS = {
    "mirrored": 1,
    "sharded:stage=1": 2,
    "sharded:stage=2": 2,
    "sharded": 2,
    "hybrid:shards=2": 2,
    "sharded:stage=1,offload=optimizer": 3,
    "local_sgd:period=2": 3,
    "diloco:period=2": 3,
    "sharded:offload=true": 5,
    "tensor:least=1": 5,
    "pipeline": 7,
    "model_parallel": 7,
    "central_storage": 11,
    "parameter_server": 11,
}
"""``mirrored``: one wait reads the loss sums and the gradient norm, when the gradients have arrived. The last two copy
each of the model's four gradients to the host, and the parameters back.
"""


def test_every_strategy_has_a_bound() -> None:
    assert {text.partition(":")[0] for text in BOUNDS} | {"single"} == set(TABLE)


@pytest.mark.parametrize("strategy", BOUNDS)
def test_waits_of_the_host_are_bounded_in_each_step(strategy: str) -> None:
    for found in worlds.run_on(DEVICE, 2, steps, strategy=strategy):
        # They are steps 7 to 12. The first steps and the last one of an epoch (``WatchWindows``), and steps at powers
        # of two (the 8th of servers and central storage, the 9th of others), also read digests.
        assert max(found[3:5]) <= BOUNDS[strategy], found
        assert max(found[:3] + found[5:]) <= BOUNDS[strategy] + 2, found


def waits_of_edits(edit: bool) -> list[int]:
    """How often the host waits in each step of a custom loop, which may edit each gradient on the device."""
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.ones(48, 5), torch.zeros(48, dtype=torch.long)
    run, found = tutti.prepare(model, optimizer, data, workers=2, batch_size=8), []
    for epoch in range(2):
        for batch in run.microbatches(epoch):
            with syncs() as counted:
                optimizer.zero_grad()
                run.backward(loss(model, batch))
                for parameter in model.parameters() if edit else ():
                    assert parameter.grad is not None
                    parameter.grad.clamp_(-0.1, 0.1)
                optimizer.step()
            found.append(counted[0])
    return found[6:]


def test_the_comparison_of_edited_gradients_waits_twice_for_all_of_them() -> None:
    plain, edited = (worlds.run_on(DEVICE, 2, waits_of_edits, edit=edit) for edit in (False, True))
    assert [max(row) - max(own) for row, own in zip(edited, plain, strict=True)] == [2, 2], (edited, plain)


def test_one_device_alone_waits_once_in_each_step() -> None:
    [found] = worlds.run_on(DEVICE, 1, steps, strategy="mirrored")
    # The first steps and the last one of an epoch are checked again (``WatchWindows``).
    assert found[2:5] == [1, 1, 1] and max(found) <= 3, found


def test_a_wait_more_is_counted() -> None:
    plain = worlds.run_on(DEVICE, 2, steps, strategy="mirrored")
    more = worlds.run_on(DEVICE, 2, steps, strategy="mirrored", item=True)
    assert more == [[count + 1 for count in row] for row in plain]


def copied_early(state: Any, copy: bool) -> Any:
    """A snapshot whose copies to pinned memory nothing waits for, and which is read at once."""

    def early(tensor: Tensor) -> Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype).pin_memory().copy_(tensor, non_blocking=True).clone()

    return real_slices(
        {group: {name: early(value) for name, value in named.items()} for group, named in state.items()}, copy
    )


def save(folder: str, early: bool) -> None:
    with patch("tutti.checkpoint.save_snapshot.slices", copied_early) if early else nullcontext():
        test_state.save("mirrored", OPTIMIZERS["adamw"], 4, folder)


@pytest.mark.parametrize("early", [False, True])
def test_a_snapshot_that_is_saved_before_it_is_there_shows_after_resuming(early: bool, tmp_path: Path) -> None:
    arguments = {"strategy": "single", "optimizer": OPTIMIZERS["adamw"], "workers": 4}
    [(_, want)] = worlds.run_on("cpu", 1, test_state.whole, **arguments)
    worlds.run_on(DEVICE, 1, save, folder=str(tmp_path), early=early)
    [found] = worlds.run_on("cpu", 1, test_state.resume, folder=str(tmp_path), **arguments)
    assert (found[1] == want) is not early
