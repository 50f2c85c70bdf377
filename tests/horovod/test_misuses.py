"""Misuses of ``hvd`` are refused at the call with its name, and the job goes on; uneven data, and two models."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tutti.horovod.torch as hvd
from tests.horovod.test_horovod_torch import with_horovod
from tests.worlds import run


def sgd() -> torch.optim.Optimizer:
    return torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)


ONES = torch.ones(4)
MISUSES: dict[str, tuple[Callable[[], Any], str]] = {
    "none": (lambda: hvd.allreduce(None, name="x"), r"of type NoneType \(rank \d, allreduce 'allreduce.x'\)"),
    "in place": (lambda: hvd.allreduce_(None, name="x"), r"of type NoneType \(rank \d, allreduce"),
    "number": (lambda: hvd.allgather(3.0, name="x"), r"of type float \(rank \d, allgather 'allgather.x'\)"),
    "array": (lambda: hvd.broadcast(np.ones(2), 0, "x"), r"of type ndarray \(rank \d, broadcast 'broadcast.x'\)"),
    "list": (lambda: hvd.alltoall([1, 2], name="x"), r"of type list \(rank \d, alltoall 'alltoall.x'\)"),
    "scattered": (lambda: hvd.reducescatter(2, name="x"), r"of type int \(rank \d, reducescatter"),
    "group": (lambda: hvd.grouped_allreduce([ONES, 1], name="x"), r"of type int \(rank \d, allreduce"),
    "group in place": (lambda: hvd.grouped_allreduce_([ONES, 1], name="x"), r"of type int \(rank \d, allreduce"),
    "gathered group": (lambda: hvd.grouped_allgather([1], name="x"), r"of type int \(rank \d, allgather"),
    "dense": (lambda: hvd.sparse_allreduce_async(ONES, "x", hvd.Sum), "no sparse COO layout"),
    "meta": (lambda: hvd.allreduce(ONES.to("meta"), name="x"), "on the meta device has no values"),
    "number of a set": (lambda: hvd.allreduce(ONES, process_set=0), "process_set is of type int"),
    "ranks of a set": (lambda: hvd.alltoall(ONES, process_set=[0]), "process_set is of type list"),
    "no set": (lambda: hvd.broadcast_object(1, process_set=None), "process_set is of type NoneType"),
    "other set": (lambda: hvd.allreduce(ONES, process_set=hvd.ProcessSet([0])), "is not known"),
    "wrapped": (lambda: hvd.DistributedOptimizer(hvd.DistributedOptimizer(sgd())), "is wrapped .* already"),
    "compression": (lambda: hvd.DistributedOptimizer(sgd(), compression="fp16"), "compression must be .* not 'fp16'"),
    "passes": (lambda: hvd.DistributedOptimizer(sgd(), backward_passes_per_step=1.5), "a whole number"),  # type: ignore[arg-type]
    "factor": (lambda: hvd.DistributedOptimizer(sgd(), gradient_predivide_factor=0.0), "must not be 0"),
}


def misuse() -> None:
    """Misuse every call on one rank alone; the others make the right calls after it."""
    for call, text in MISUSES.values():
        if hvd.rank() == hvd.size() - 1:
            with pytest.raises(ValueError, match=text):
                call()
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum, name="x").item() == hvd.size()


@pytest.mark.parametrize("size", [2, 3])
def test_misuses_of_one_rank_are_refused_at_the_call(size: int) -> None:
    run(size, with_horovod, inside=misuse)


def sum_by_average() -> list[tuple[str, float]]:
    """File and result of each sum that is asked for by the deprecated argument."""
    calls: list[Callable[[Any], Any]] = [
        lambda x: hvd.allreduce(x, average=False, name="x"),
        lambda x: hvd.allreduce_(x, average=False, name="x"),
        lambda x: hvd.synchronize(hvd.allreduce_async(x, average=False, name="x")),
        lambda x: hvd.synchronize(hvd.allreduce_async_(x, average=False, name="x")),
        lambda x: hvd.grouped_allreduce([x], average=False, name="x")[0],
        lambda x: hvd.grouped_allreduce_([x], average=False, name="x")[0],
    ]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sums = [call(torch.ones(1)).item() for call in calls]
    return [(warning.filename, result) for warning, result in zip(caught, sums, strict=True)]


def test_the_deprecated_average_is_told_at_the_line_of_the_script() -> None:
    """Python shows this warning for the script alone."""
    assert run(2, with_horovod, inside=sum_by_average) == [[(__file__, 2.0)] * 6] * 2


EPOCHS = 2


def samples(size: int) -> torch.Tensor:
    return torch.randn(EPOCHS, size, size + 1, 5, 4, generator=torch.Generator().manual_seed(3))


def with_fewer_batches() -> list[Any]:
    """Rank r has r + 1 batches an epoch, and joins."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters())
    last = []
    for epoch in samples(hvd.size()):
        for batch in epoch[hvd.rank(), : hvd.rank() + 1]:
            optimizer.zero_grad()
            net(batch).square().mean().backward()
            optimizer.step()
        last.append(hvd.join())
        hvd.broadcast_parameters(net.state_dict(), root_rank=last[-1])
    return [last, [p.detach() for p in net.parameters()]]


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_with_fewer_batches_send_zeros(size: int) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for epoch in samples(size):
        for step in range(size):
            optimizer.zero_grad()
            for rank in range(step, size):
                (net(epoch[rank, step]).square().mean() / size).backward()
            optimizer.step()
    for last, parameters in run(size, with_horovod, inside=with_fewer_batches):
        assert last == [size - 1] * EPOCHS
        for mine, expected in zip(parameters, net.parameters(), strict=True):
            torch.testing.assert_close(mine, expected.detach())


PASSES = ((3, 1, 2), (2, 1, 3), (1, 3, 3))


def pass_inputs(rank: int) -> list[torch.Tensor]:
    """The inputs of a rank's backward passes, which are fewer than three in some steps and differ between ranks."""
    drawn = torch.randn(3, 3, 5, 4, generator=torch.Generator().manual_seed(rank))
    return [drawn[step, :count] for step, count in enumerate(PASSES[rank])]


def with_fewer_passes(compression: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), lr=0.1),
        net.named_parameters(),
        compression=getattr(hvd.Compression, compression),
        backward_passes_per_step=3,
        gradient_predivide_factor=2.0,
    )
    for inputs in pass_inputs(hvd.rank()):
        optimizer.zero_grad()
        for batch in inputs:
            net(batch).square().mean().backward()
        optimizer.step()
    return [p.detach() for p in net.parameters()]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(("compression", "tolerance"), [("none", 1e-6), ("fp16", 1e-3)])
def test_steps_with_fewer_passes_reduce_what_there_is(compression: str, tolerance: float, size: int) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for ranks in zip(*map(pass_inputs, range(size)), strict=True):
        optimizer.zero_grad()
        for inputs in ranks:
            for batch in inputs:
                (net(batch).square().mean() / size).backward()
        optimizer.step()
    for found in run(size, with_horovod, inside=with_fewer_passes, compression=compression):
        for mine, expected in zip(found, net.parameters(), strict=True):
            torch.testing.assert_close(mine, expected.detach(), rtol=tolerance, atol=tolerance)


def two_models(named: bool) -> Any:
    """Two models of one loss, whose parameters have equal names unless the script makes them different."""
    torch.manual_seed(0)
    nets = [nn.Linear(3, 3), nn.Linear(3, 3)]
    optimizers = [
        hvd.DistributedOptimizer(
            torch.optim.SGD(net.parameters(), lr=0.1),
            [(f"{index if named else ''}.{name}", parameter) for name, parameter in net.named_parameters()],
        )
        for index, net in enumerate(nets)
    ]
    loss = nets[1](nets[0](torch.full((2, 3), hvd.rank() + 1.0))).square().mean()
    if not named:
        with pytest.raises(ValueError, match="with the same name as another tensor"):
            loss.backward()
        return None
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    return [p.detach() for net in nets for p in net.parameters()]


@pytest.mark.parametrize("size", [2, 3])
def test_two_models_need_different_names(size: int) -> None:
    torch.manual_seed(0)
    nets = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    optimizer = torch.optim.SGD(nets.parameters(), lr=0.1)
    for rank in range(size):
        (nets(torch.full((2, 3), rank + 1.0)).square().mean() / size).backward()
    optimizer.step()
    for found in run(size, with_horovod, inside=two_models, named=True):
        for mine, expected in zip(found, nets.parameters(), strict=True):
            torch.testing.assert_close(mine, expected.detach())
    run(size, with_horovod, inside=two_models, named=False)


def first_step(how: str) -> Any:
    """The error of a first step, or None; the last rank's weights differ in one way or another."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    last = hvd.rank() == hvd.size() - 1
    part = hvd.add_process_set(range(hvd.size() - 1)) if how == "process set" else hvd.global_process_set
    if how == "frozen":
        net[0].requires_grad_(False)
    differing = {
        "frozen": net[0].weight,
        "buffers": net[1].running_mean,
        "equal": torch.ones(1),
        "joined": torch.ones(1),
    }
    with torch.no_grad():
        differing.get(how, net[2].bias)[0] += 1e-6 * last
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9),
        net.named_parameters(),
        op=hvd.Adasum if how == "adasum" else hvd.Average,
        process_set=part,
    )
    if how == "zeros first":
        for parameter in net.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        hvd.broadcast_parameters(net.state_dict(), root_rank=0)
    before = [p.tolist() for p in net.parameters()]
    found = None
    if not (how == "joined" and last):
        optimizer.zero_grad()
        net(torch.randn(5, 4)).square().mean().backward()
        try:
            if how == "clipped":
                optimizer.synchronize()
            optimizer.step()
        except ValueError as error:
            assert [p.tolist() for p in net.parameters()] == before, "an update was made"
            found = str(error)
    hvd.join()
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_parameters_that_differ_before_the_first_step_are_refused(size: int) -> None:
    for how in ("never broadcast", "clipped", *(["adasum"] if size == 2 else [])):
        for rank, text in enumerate(run(size, with_horovod, inside=first_step, how=how)):
            assert f"(rank {rank}, 1 of 6 parameters: '2.bias')" in text and "hvd.broadcast_parameters(model" in text
    for how in ("equal", "frozen", "buffers", "zeros first", "process set", "joined"):
        assert run(size, with_horovod, inside=first_step, how=how) == [None] * size, how
