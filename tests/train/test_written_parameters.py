"""Parameters that a script writes between steps must be the same on every rank, or the run stops first."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import tutti
from tests import worlds
from tests.contract.table import largest_difference
from tutti.errors import TuttiError, UsageError
from tutti.train.script_checks import written_parameters
from tutti.train.script_checks.cross_worker_watch import CrossWorkerWatch

DATA = TensorDataset(torch.randn(16, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64))


def mean(net: Any, batch: Any) -> Any:
    return net(batch[0]).square().mean()


def trained(strategy: str, loop: bool, change: str) -> Any:
    """Write parameters after the first epoch: what the run says, or how many updates it makes."""
    torch.manual_seed(0)
    net: Any = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    run = tutti.prepare(net, optimizer, DATA, mean, strategy=strategy, batch_size=4)
    try:
        for epoch in range(2):
            for batch in run.microbatches(epoch) if loop else run.epoch(epoch):
                if loop:
                    optimizer.zero_grad()
                    run.backward(mean(net, batch))
                    optimizer.step()
                else:
                    run.step(batch)
                if change == "clamped":
                    with torch.no_grad():
                        net[0].weight.clamp_(-0.3, 0.3)
                if change == "noise" and run.updates == 2:
                    torch.manual_seed(tutti.rank())
                    net[1].weight.data.normal_()
            # Where every rank's draws are alike, so are the parameters.
            torch.manual_seed(7 if change == "seeded" else tutti.rank())
            if change in ("drawn", "seeded"):
                net[1].reset_parameters()
            if change == "data":
                net[1].weight.data.normal_()
            if change == "one rank" and tutti.rank() == 1:
                with torch.no_grad():
                    net[0].bias.add_(0.0)
    except UsageError as error:
        return run.updates, str(error)
    run.state()
    return run.updates


@pytest.mark.parametrize("loop", [False, True])
def test_other_draws_through_data_between_epochs_are_refused_before_they_are_used(loop: bool) -> None:
    for updates, said in worlds.run(2, trained, strategy="mirrored", loop=loop, change="data"):
        assert updates == 4 and "written other values into '1.weight' on each rank, such as through .data" in said
        assert "before step 5" in said and "test_written_parameters.py:" in said


def test_other_draws_through_data_within_an_epoch_are_refused_before_they_are_used() -> None:
    for updates, said in worlds.run(2, trained, strategy="mirrored", loop=True, change="noise"):
        assert updates == 2 and "written other values into '1.weight' on each rank, such as through .data" in said
    worlds.forget(2)


@pytest.mark.parametrize("strategy", ["mirrored", "mirrored:algorithm=native", "sharded:stage=1"])
@pytest.mark.parametrize("loop", [False, True])
def test_other_draws_on_each_rank_are_refused_before_they_are_used(strategy: str, loop: bool) -> None:
    for updates, said in worlds.run(2, trained, strategy=strategy, loop=loop, change="drawn"):
        assert updates == 4 and "written other values into '1.weight', and of 1 other tensor" in said
        assert "before step 5" in said and "test_written_parameters.py:" in said and "torch.manual_seed" in said


@pytest.mark.parametrize("change", ["seeded", "clamped", "one rank"])
@pytest.mark.parametrize("strategy", ["mirrored", "mirrored:algorithm=native", "sharded:stage=1"])
def test_the_same_values_on_every_rank_are_kept(strategy: str, change: str) -> None:
    assert worlds.run(2, trained, strategy=strategy, loop=False, change=change) == [8, 8]


def written_on_one_stage(strategy: str, folder: Path) -> None:
    torch.manual_seed(0)
    net: Any = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    run = tutti.prepare(net, optimizer, DATA, mean, strategy=strategy, workers=2, batch_size=4)
    try:
        for batch in run.epoch(0):
            run.step(batch)
            if tutti.rank() == 0:
                with torch.no_grad():
                    net[0].bias.add_(1)
    except TuttiError as error:
        (folder / str(tutti.rank())).write_text(str(error))
    # The last message of the comparison must have left.
    time.sleep(1)
    os._exit(0)


@pytest.mark.parametrize("strategy", ["hybrid:stages=2", "hybrid:shards=2,stages=2"])
def test_a_write_on_one_stage_alone_is_named(strategy: str, tmp_path: Path) -> None:
    """The data ranks of the other stage meet no difference; they end when their peers have ended."""
    with pytest.raises(worlds.RankError):
        worlds.run(4, written_on_one_stage, strategy=strategy, folder=tmp_path)
    for rank in ("0", "2"):
        said = (tmp_path / rank).read_text()
        assert "written other values into '0.bias' on each rank" in said and ": ranks 0, 2 differ" in said


class Writing(nn.Module):
    """Averages a frozen teacher in its forward, or clamps its own weights; ``how``: the way of the write."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.student, self.how = nn.Linear(3, 3), how
        self.teacher = nn.Linear(3, 3).requires_grad_(False)
        self.teacher.load_state_dict(self.student.state_dict())

    def forward(self, x: torch.Tensor) -> Any:
        with torch.no_grad():
            for average, parameter in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                if self.how == "average":
                    average.lerp_(parameter, 0.1)
                elif self.how == "data":
                    average.data.mul_(0.9).add_(parameter.data, alpha=0.1)
                elif self.how == "clamp":
                    parameter.clamp_(-0.1, 0.1)
        return self.student(x) - 0.5 * self.teacher(x)


def written_within(how: str, loop: bool, workers: int, strategy: str = "mirrored") -> Any:
    torch.manual_seed(0)
    net: Any = Writing(how).double()
    optimizer = torch.optim.SGD(net.student.parameters(), lr=0.1)
    run = tutti.prepare(net, optimizer, DATA, mean, batch_size=4, workers=workers, strategy=strategy)
    try:
        for batch in run.microbatches(0) if loop else run.epoch(0):
            if loop:
                optimizer.zero_grad()
                run.backward(mean(net, batch))
                optimizer.step()
            else:
                run.step(batch)
    except UsageError as error:
        return run.updates, str(error)
    return run.updates


@pytest.mark.parametrize("how", ["average", "data"])
def test_a_teacher_that_the_forward_averages_in_every_micro_batch_is_refused(how: str) -> None:
    updates, said = worlds.alone(written_within, how=how, loop=False, workers=2)
    assert updates == 1, "the first step leaves a teacher as it is that equals its student"
    assert "writes the parameter teacher.weight, and moves it in every micro-batch" in said and "step 2" in said
    updates, said = worlds.alone(written_within, how=how, loop=True, workers=2)
    assert updates <= 1 and "the loop's body writes parameters" in said
    for loop in (False, True):
        assert worlds.alone(written_within, how=how, loop=loop, workers=1) == 4


def followed_in_hashes() -> tuple[int, int]:
    """How often parameters are hashed around a forward, and how many calls of that are followed for carried values."""
    hashes, calls, hashing = 0, 0, False

    def digests(tensors: Any, real: Any = written_parameters.tensor_digests) -> list[int]:
        nonlocal hashes, hashing
        hashes, hashing = hashes + 1, True
        try:
            return real(tensors)
        finally:
            hashing = False

    def follow(mode: Any, *given: Any, real: Any = CrossWorkerWatch.__torch_function__) -> Any:
        nonlocal calls
        calls += hashing
        return real(mode, *given)

    with (
        patch.object(written_parameters, "tensor_digests", digests),
        patch.object(CrossWorkerWatch, "__torch_function__", follow),
    ):
        assert written_within("clamp", loop=False, workers=2) == 4
    return hashes, calls


def test_hashes_around_a_forward_are_not_followed_for_carried_values() -> None:
    """Each has hundreds of small calls, and a check of the first steps would look at all of them."""
    hashes, calls = worlds.alone(followed_in_hashes)
    assert hashes > 0 and calls == 0


def test_a_teacher_that_workers_of_a_rank_would_share_is_refused() -> None:
    updates, said = worlds.alone(written_within, how="data", loop=False, workers=2, strategy="local_sgd:period=2")
    assert updates <= 2 and "has written the frozen parameter teacher." in said
    assert worlds.alone(written_within, how="data", loop=False, workers=1, strategy="local_sgd:period=2") == 4


def test_weights_that_the_forward_clamps_pass() -> None:
    assert worlds.alone(written_within, how="clamp", loop=False, workers=2) == 4


def decayed(strategy: str, how: str) -> Any:
    """Weight decay by hand between backward and update, as scripts write it."""
    torch.manual_seed(0)
    net: Any = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    run = tutti.prepare(net, optimizer, DATA, batch_size=4, strategy=strategy)
    try:
        for batch in run.microbatches(0):
            optimizer.zero_grad()
            run.backward(mean(net, batch))
            for group in optimizer.param_groups:
                for p in group["params"]:
                    if how == "assigned":
                        p.data = p.data.add(p.data, alpha=-0.01)
                    else:
                        p.data.mul_(0.99)
            optimizer.step()
    except UsageError as error:
        return run.updates, str(error)
    return run.updates


@pytest.mark.parametrize("strategy", ["central_storage", "parameter_server"])
def test_writes_between_backward_and_update_are_refused_where_they_would_be_lost(strategy: str) -> None:
    for how in ("assigned", "in place"):
        for updates, said in worlds.run(2, decayed, strategy=strategy, how=how):
            assert updates == 0 and "outside of optimizer.step() (step 1)" in said
    worlds.forget(2)


def assigned_between_steps(strategy: str, workers: int, how: str) -> Any:
    """Assign ``.data`` after every update, or move a matrix's rows, which keeps its norm; evaluate other weights."""
    torch.manual_seed(0)
    net: Any = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    run = tutti.prepare(net, optimizer, DATA, mean, batch_size=4, strategy=strategy, workers=workers)
    seen = 0.0
    try:
        for batch in run.epoch(0):
            run.step(batch)
            if how == "rolled":
                net[0].weight.data.copy_(net[0].weight.data.roll(1, 0))
            else:
                for p in net.parameters():
                    p.data = p.data * 0.9
        if how == "swapped":
            kept = [p.data for p in net.parameters()]
            for p in net.parameters():
                p.data = p.data * 0.5
            seen = run.evaluate(DATA, loss=mean).loss
            for p, data in zip(net.parameters(), kept, strict=True):
                p.data = data
    except UsageError as error:
        return run.updates, str(error)
    return seen, {name: tensor.numpy() for name, tensor in run.state().items()}


@pytest.mark.parametrize("strategy", ["local_sgd:period=1", "diloco:period=1,outer_lr=1,outer_momentum=0"])
def test_workers_that_train_alone_go_on_from_assigned_data(strategy: str) -> None:
    seen, want = worlds.alone(assigned_between_steps, strategy="mirrored", workers=1, how="swapped")
    for workers in (2, 4):
        for got in worlds.run(2, assigned_between_steps, strategy=strategy, workers=workers, how="swapped"):
            if workers == 4:
                assert got[0] == 1 and "has written the parameter 0.weight outside of optimizer.step()" in got[1]
                continue
            assert got[0] == pytest.approx(seen, rel=1e-12)
            assert all(abs(got[1][name] - value).max() <= 1e-12 for name, value in want.items())


def evaluated_average(strategy: str, how: str) -> Any:
    """Evaluate a running average of the weights in their place, as scripts do, and train on."""
    torch.manual_seed(0)
    net: Any = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    run = tutti.prepare(net, optimizer, DATA, mean, batch_size=4, strategy=strategy)
    average = [p.detach().clone() for p in net.parameters()]
    seen = []
    for epoch in range(2):
        for batch in run.epoch(epoch):
            run.step(batch)
            for own, new in zip(average, net.parameters(), strict=True):
                own.lerp_(new.detach(), 0.3)
        kept = [p.data if how == "assigned" else p.data.clone() for p in net.parameters()]
        for values in (average, kept):
            for p, value in zip(net.parameters(), values, strict=True):
                if how == "assigned":
                    p.data = value.clone() if values is average else value
                else:
                    p.data.copy_(value)
            try:
                seen.append(run.evaluate(DATA, loss=mean).loss)
            except UsageError as error:
                return run.updates, str(error)
    return seen


@pytest.mark.parametrize("ranks", [2, 3])
def test_an_average_in_place_of_weights_that_ranks_share_is_refused_before_its_evaluation(ranks: int) -> None:
    for updates, said in worlds.run(ranks, evaluated_average, strategy="central_storage", how="copied"):
        assert updates == 4 and "has written the parameter" in said and "outside of optimizer.step()" in said
        assert "test_written_parameters.py:" in said and "ema=" in said
    worlds.forget(ranks)


def test_an_average_that_is_assigned_is_evaluated() -> None:
    want = worlds.alone(evaluated_average, strategy="single", how="copied")
    for strategy in ("central_storage", "mirrored"):
        for got in worlds.run(2, evaluated_average, strategy=strategy, how="assigned"):
            assert got == pytest.approx(want, rel=1e-12)


@pytest.mark.parametrize("workers", [2, 4])
def test_assigned_data_are_refused_where_they_would_be_lost(workers: int) -> None:
    arguments = {"strategy": "parameter_server:mode=async", "workers": workers, "how": "assigned"}
    for _, said in worlds.run(2, assigned_between_steps, **arguments):
        assert "has written the parameter 0.weight outside of optimizer.step() (step 2)" in said, said
    worlds.forget(2)


def test_a_write_that_keeps_the_norm_is_refused_where_it_would_be_lost() -> None:
    arguments = {"strategy": "parameter_server", "workers": 2, "how": "rolled"}
    for updates, said in worlds.run(2, assigned_between_steps, **arguments):
        assert updates == 1 and "has written the parameter 0.weight outside of optimizer.step() (step 2)" in said
    worlds.forget(2)


def clamped_data(strategy: str) -> Any:
    """As CLIP's scripts bound their logit scale: an assignment of values that are within the bounds."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = tutti.prepare(model, optimizer, torch.randn(12, 4).double(), strategy=strategy, batch_size=4, workers=2)
    try:
        for inputs in run.microbatches(0):
            optimizer.zero_grad()
            run.backward(model(inputs).square().mean())
            optimizer.step()
            model[2].bias.data = torch.clamp(model[2].bias.data, -10, 10)
    except UsageError as error:
        return run.updates, str(error)
    return {name: tensor.numpy() for name, tensor in run.state().items()}


def test_data_that_is_assigned_out_of_shared_memory_is_refused_at_the_next_step() -> None:
    want = worlds.alone(clamped_data, strategy="single")
    for got in worlds.run(2, clamped_data, strategy="mirrored"):
        assert largest_difference(got, want) <= 1e-10
    for updates, said in worlds.run(2, clamped_data, strategy="central_storage"):
        assert updates == 1 and "assigned the .data of 2.bias (step 2)" in said
    worlds.forget(2)
