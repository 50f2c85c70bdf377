"""Central storage: what there is once, who writes it, and that nobody reads what is half written."""

from __future__ import annotations

import time
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import tutti
from tests import worlds
from tests.covering import in_turn
from tests.simulated_accelerator.build import DEVICE
from tutti.comm import shared_memory as segments
from tutti.comm.partition import owners
from tutti.parallel.central_storage import central_storage
from tutti.parallel.central_storage.central_storage import CentralAverage, CentralStorageSync
from tutti.torch_compat import foreach_norm


def model() -> nn.Sequential:
    torch.manual_seed(0)
    frozen = nn.Linear(8, 8).requires_grad_(False)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 8), nn.BatchNorm1d(8), frozen, nn.Linear(8, 1))


def data() -> Tensor:
    return torch.randn(32, 6, generator=torch.Generator().manual_seed(1))


def loss(net: Any, batch: Tensor) -> Tensor:
    return (net(batch).squeeze(-1) - batch.sum(dim=1)).square().mean()


def prepare(optimizer: Any = "adam:lr=0.01", **options: Any) -> tutti.Run:
    arguments = {"strategy": "central_storage", "workers": 4, "batch_size": 16, **options}
    return tutti.prepare(model(), optimizer, data(), loss, **arguments)


def train(run: tutti.Run, epochs: int = 2) -> str:
    for epoch in range(epochs):
        for batch in run.epoch(epoch):
            run.step(batch)
    return run.weights_sha256()


def once() -> tuple[set[str], set[str], int, list[str]]:
    """Names that this rank owns, that it has optimizer state of, that of the average; and a write that all see."""
    run = prepare(ema="0.9")
    train(run)
    sync, average = run.gradient_sync, run.average
    assert isinstance(sync, CentralStorageSync) and isinstance(average, CentralAverage)
    named = dict(run.replica.parts[0].named_parameters())
    of = {id(p): name for name, p in named.items()}
    kept = {of[id(p)] for optimizer in sync.optimizers for p in optimizer.state}
    assert set(average.state()["ema"]) == kept
    for number, (_, parameter) in enumerate(sync._owned):
        parameter.data.fill_(number + 10 * tutti.rank())
    sync._segment.barrier("all have written")
    return (
        {name for name, _ in sync._owned},
        kept,
        sum(p.numel() for name, p in sync._owned if p.requires_grad),
        sorted(f"{name} {float(p.max()):g}" for name, p in named.items()),
    )


@pytest.mark.skipif(worlds.DEVICE != "cpu", reason="writes into the shared memory through parameters, as CPUs can")
@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_tensor_has_one_owner_one_state_and_one_place(size: int) -> None:
    answers = worlds.run(size, once)
    names = {name for name, _ in model().named_parameters()}
    trained = {name for name, p in model().named_parameters() if p.requires_grad}
    owned, kept = [a[0] for a in answers], [a[1] for a in answers]
    assert set.union(*owned) == names and sum(map(len, owned)) == len(names)
    assert set.union(*kept) == trained and sum(map(len, kept)) == len(trained)
    sizes = [a[2] for a in answers]
    assert max(sizes) - min(sizes) <= max(p.numel() for p in model().parameters())
    assert all(a[3] == answers[0][3] for a in answers), "all ranks read what each has written"


def test_owners_are_even() -> None:
    assert owners([4, 4, 4, 4], 2) == [0, 1, 0, 1]
    assert owners([], 3) == []
    for sizes in ([100, 1, 1, 1], [7, 6, 5, 4, 3, 2, 1], [0, 0, 3]):
        for parts in (1, 2, 3):
            of = owners(sizes, parts)
            loads = [sum(s for s, o in zip(sizes, of, strict=True) if o == part) for part in range(parts)]
            assert max(loads) - min(loads) <= max(sizes)


def late(rank: int) -> str:
    """One rank writes its slice long after the others; nobody may compute with what is still old there."""
    run = prepare("sgd:lr=0.1")
    if tutti.rank() == rank:
        for optimizer in run.gradient_sync.optimizers:
            optimizer.register_step_pre_hook(lambda *_: time.sleep(0.05))
    return train(run)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_nobody_reads_a_slice_that_is_not_written_yet(rank: int) -> None:
    want = worlds.run(3, late, rank=-1)
    assert worlds.run(3, late, rank=rank) == want


def late_average(rank: int) -> list[float]:
    """One rank takes its slice into the average long after the others; nobody may read what is still old there."""
    run = prepare("sgd:lr=0.1", ema="0.5")
    assert run.average is not None
    train(run, 1)
    merged = run.gradient_sync.merged()
    if tutti.rank() == rank:
        time.sleep(0.1)
    run.average.update()
    within = run.average.within(merged)
    return [float(tensor.double().sum()) for tensor in within.values()]


def test_nobody_reads_an_average_that_is_not_written_yet() -> None:
    want = worlds.run(3, late_average, rank=-1)
    assert want[0] == want[1] == want[2]
    for rank in range(3):
        assert worlds.run(3, late_average, rank=rank) == want


def refused(hosts: list[str], directory: str) -> str:
    names, before = central_storage.socket.gethostname, segments._DIRECTORY
    try:
        if hosts:
            central_storage.socket.gethostname = lambda: hosts[tutti.rank()]  # type: ignore[attr-defined]
        segments._DIRECTORY = segments.Path(directory)
        prepare()
    except tutti.errors.UsageError as error:
        return str(error)
    finally:
        central_storage.socket.gethostname, segments._DIRECTORY = names, before  # type: ignore[attr-defined]
    return ""


def test_several_hosts_and_no_shared_memory_are_refused_on_every_rank() -> None:
    for said in worlds.run(3, refused, hosts=["a", "b", "a"], directory="/dev/shm"):
        assert "is for one node, and these ranks are on a, b" in said and "strategy='mirrored'" in said
    for said in worlds.run(2, refused, hosts=[], directory="/dev/no-such-thing"):
        assert "cannot share" in said and "--shm-size" in said


def given() -> tuple[str, list[float]]:
    """An optimizer of the caller's own with a scheduler, in a loop that stays as it is."""
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.02, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    run = tutti.prepare(net, optimizer, data(), strategy="central_storage", workers=4, batch_size=16, reproducible=True)
    rates = []
    for epoch in range(2):
        for batch in run.microbatches(epoch):
            optimizer.zero_grad()
            run.backward(loss(net, batch))
            optimizer.step()
        rates += [group["lr"] for o in run.gradient_sync.optimizers for group in o.param_groups]
        scheduler.step()
    return run.weights_sha256(), rates


def test_a_custom_loop_with_its_optimizer_and_scheduler() -> None:
    [(want, rates)] = worlds.run(1, given)
    assert rates == [0.02, 0.01]
    for digest, own in worlds.run(3, given):
        assert (digest, own) == (want, rates)


def placed() -> dict[str, Any]:
    """Where parameters, optimizer state and average are, and the model after training, saving and loading."""
    run = prepare(ema="0.9", clip=0.5)
    train(run)
    sync, average = run.gradient_sync, run.average
    assert isinstance(sync, CentralStorageSync) and isinstance(average, CentralAverage)
    states = [
        tensor for optimizer in sync.optimizers for state in optimizer.state.values() for tensor in state.values()
    ]
    weights = {name: tensor.clone() for name, tensor in run.state().items()}
    run.model.load_state_dict({name: torch.ones_like(tensor) for name, tensor in weights.items()})
    loaded = {float(tensor.min()) for tensor in run.state().values()}
    run.model.load_state_dict(weights)
    return {
        "parameters": {p.device.type for p in run.model.parameters()},
        "state": {tensor.device.type for tensor in states},
        "average": {tensor.device.type for tensor in average.state()["ema"].values()},
        "loaded": loaded,
        "after": train(run),
    }


def clipped_by_hand() -> str:
    """A custom training loop, which reads and edits ``.grad`` on the device, and reads it after the update."""
    own = model()
    optimizer = torch.optim.AdamW(own.parameters(), lr=0.01)
    run = tutti.prepare(own, optimizer, data(), strategy="central_storage", workers=4, batch_size=16)
    for batch in run.microbatches(0):
        run.backward(loss(own, batch))
        torch.nn.utils.clip_grad_norm_(own.parameters(), 0.1)
        optimizer.step()
        assert all(p.grad is None or p.grad.device == p.device for p in own.parameters())
        optimizer.zero_grad()
    return run.weights_sha256()


def closes() -> str:
    own = model()
    try:
        tutti.prepare(
            own, torch.optim.LBFGS(p for p in own.parameters() if p.requires_grad), data(), loss,
            strategy="central_storage", batch_size=16,
        )  # fmt: skip
    except tutti.errors.UsageError as error:
        return str(error)
    return ""


def written(by_assignment: bool = False) -> list[str]:
    """What happens to a write of the script: of one rank it is kept, of several refused."""
    run = prepare()
    train(run, 1)
    with torch.no_grad():
        for parameter in run.model.parameters():
            if by_assignment:
                parameter.data = parameter.data * 0.5
            else:
                parameter.mul_(0.5)
    try:
        return [train(run, 1)]
    except tutti.errors.UsageError as error:
        return [str(error).partition("parameter")[0]]


def assigned() -> list[str]:
    return written(by_assignment=True)


def compared_within_a_step() -> str:
    """Train with norms of which the CPU's kernels round otherwise than the accelerator's.

    The last batch has one sample: the rank without samples has not seen the number of the loss, so that ranks compare.
    """

    def rounded(tensors: list[Tensor]) -> list[Tensor]:
        return [n.double() * (1 + 2**-50 * (n.device.type == "cpu")) for n in foreach_norm(tensors)]

    own = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    with patch("tutti.parallel.ddp.write_guard.foreach_norm", rounded):
        return train(
            tutti.prepare(
                own, "sgd:lr=0.1", data()[:13], lambda net, batch: 0.5 * loss(net, batch), strategy="central_storage",
                batch_size=6, seed=0,
            )
        )  # fmt: skip


def written_during_a_forward() -> str:
    """Rank 1 writes into the shared parameters while rank 0 computes with them: the write is at fault, no forward."""

    def slow(net: Any, batch: Tensor) -> Tensor:
        time.sleep(0.1)
        return loss(net, batch)

    run = tutti.prepare(
        model(), "adam:lr=0.01", data(), slow if tutti.rank() == 0 else loss, strategy="central_storage", workers=4,
        batch_size=16,
    )  # fmt: skip
    train(run, 1)
    batch = next(iter(run.epoch(1)))
    if tutti.rank() == 1:
        time.sleep(0.15)
        for parameter in run.model.parameters():
            parameter.data.mul_(0.5)
    try:
        run.step(batch)
    except tutti.errors.UsageError as error:
        return str(error)
    return ""


@pytest.mark.skipif(worlds.DEVICE != "cpu", reason="on accelerators every rank computes with a copy")
def test_a_write_during_another_ranks_forward_is_refused_on_both() -> None:
    for said in worlds.run(2, written_during_a_forward):
        assert "in another way on each rank: rank 0 has (nothing), rank 1 has 0.weight: mul(0.5)" in said, said


@pytest.mark.timeout(600)
@pytest.mark.parametrize("size", [1, 3])
def test_an_accelerator_computes_and_the_host_updates(size: int) -> None:
    there, here = worlds.run_on(DEVICE, size, placed), worlds.run_on("cpu", size, placed)
    for one, other in zip(there, here, strict=True):
        assert one["parameters"] == {DEVICE} and one["state"] | one["average"] == {"cpu"}
        assert one["loaded"] == other["loaded"] == {1.0} and one["after"] == other["after"]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("function", "size"), in_turn([clipped_by_hand, written, assigned], [2, 1]))
def test_a_custom_loop_and_a_write_do_on_an_accelerator_what_they_do_on_a_cpu(size: int, function: Any) -> None:
    there, here = worlds.run_on(DEVICE, size, function), worlds.run_on("cpu", size, function)
    assert there == here and len(set(map(str, there))) == 1


@pytest.mark.timeout(600)
def test_values_are_compared_by_the_kernels_of_one_device() -> None:
    assert len(set(worlds.run_on(DEVICE, 2, compared_within_a_step))) == 1


@pytest.mark.timeout(600)
def test_an_optimizer_that_calls_a_closure_is_refused_on_accelerators() -> None:
    [said] = worlds.run_on(DEVICE, 1, closes)
    assert "LBFGS needs a closure" in said
