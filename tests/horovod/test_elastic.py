"""Elastic training inside a process: states, the sampler, and ``run`` over failed collectives, on real ranks."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import tutti.horovod.torch as hvd
from tests.horovod.test_horovod_torch import with_horovod
from tests.worlds import Pool, RankError, run
from tutti.errors import PeerError
from tutti.horovod.common.elastic import HostUpdateResult
from tutti.horovod.torch import job
from tutti.launcher import membership

SAMPLES, BATCH = 36, 2


def states() -> list[Any]:
    rank = hvd.rank()
    torch.manual_seed(rank)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 + rank, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3 + rank)
    state = hvd.elastic.TorchState(model, optimizer, schedule=schedule, seen=[rank], epoch=10 + rank)
    state.sync()
    told = [list(state.seen), state.epoch, optimizer.param_groups[0]["lr"], schedule.step_size]
    committed = model.weight.detach().clone()
    told.append(committed.tolist())
    buffer = optimizer.state[model.weight]["momentum_buffer"].clone()
    told.append(buffer.tolist())
    with torch.no_grad():
        model.weight += 1
    state.seen.append(7)
    state.epoch = 99
    optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    state.restore()
    assert torch.equal(model.weight, committed) and state.epoch == 10 and state.seen == [0]
    assert torch.equal(optimizer.state[model.weight]["momentum_buffer"], buffer)
    assert model.weight.grad is None
    state.seen.append(8)
    state.commit()
    state.seen.append(9)
    state.restore()
    assert state.seen == [0, 8]
    other = nn.Linear(2, 1)
    weight = other.weight.detach().clone()
    state.model = other
    with torch.no_grad():
        other.weight.zero_()
    state.restore()
    assert state.model is other and torch.equal(other.weight, weight)
    assert hvd.elastic.TorchState(batch=0).model is None
    # As in Horovod's own test script: the attribute is the script's alone.
    counting = hvd.elastic.TorchState(commits=0)
    counting.commits += 1
    counting.commit()
    assert counting.commits == 1
    return told


class Unsendable:
    """An object with a state that no rank can send."""

    def __init__(self, part: Any) -> None:
        self.part = part

    def state_dict(self) -> dict[str, Any]:
        return {"part": self.part}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.part = state["part"]


def states_refused() -> list[str]:
    first = hvd.rank() == 0
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["note"] = object() if first else None
    said = []
    for state in (
        hvd.elastic.TorchState(value=object() if first else 1),
        hvd.elastic.TorchState(value=Unsendable(object() if first else 1)),
        hvd.elastic.TorchState(optimizer=optimizer),
    ):
        with pytest.raises(ValueError, match=r"is a builtins.object") as caught:
            state.sync()
        said.append(str(caught.value))
    hvd.barrier()
    return said


@pytest.mark.parametrize("size", [2, 3])
def test_a_state_that_rank_0_cannot_send_is_an_error_on_every_rank(size: int) -> None:
    found = run(size, with_horovod, inside=states_refused)
    assert found == [found[0]] * size and all("(rank 0, " in text for text in found[0])


def test_a_state_is_rank_0_s_and_returns_to_its_commit() -> None:
    found = run(3, with_horovod, inside=states)
    assert found[0] == found[1] == found[2]
    assert found[0][:4] == [[0], 10, 0.1, 3]


class Failing:
    """Raises on one rank, once at each of the given places."""

    def __init__(self, places: dict[tuple[int, str], int]) -> None:
        self.places = dict(places)

    def __call__(self, batch: int, where: str) -> None:
        if self.places.get((batch, where)) == hvd.rank():
            del self.places[batch, where]
            raise hvd.HorovodInternalError("injected")


def train_steps(places: dict[tuple[int, str], int], options: dict[str, Any]) -> list[Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), **options)
    fail, calls = Failing(places), [0]
    torch.manual_seed(1)
    data = torch.randn(8, 3, 5, 4)

    @hvd.elastic.run
    def steps(state: Any) -> None:
        calls[0] += 1
        while state.batch < len(data):
            fail(state.batch, "before backward")
            for _ in range(options.get("backward_passes_per_step", 1)):
                model(data[state.batch, hvd.rank()]).square().mean().backward()
            fail(state.batch, "after backward")
            optimizer.step()
            fail(state.batch, "after step")
            # Cleared after the step: what a failed step leaves in .grad must not reach the next.
            optimizer.zero_grad()
            state.batch += 1
            state.commit()
            fail(state.batch, "after commit")

    resets: list[int] = []
    state = hvd.elastic.TorchState(model, optimizer, batch=0)
    state.register_reset_callbacks([lambda: resets.append(hvd.size())])
    steps(state)
    return [calls[0], resets, [p.detach() for p in model.parameters()]]


PLACES = {(2, "after backward"): 1, (3, "before backward"): 2, (5, "after step"): 0, (6, "after commit"): 1}


@pytest.mark.parametrize("options", [{}, {"backward_passes_per_step": 2}], ids=str)
def test_failed_collectives_change_no_weight(options: dict[str, Any]) -> None:
    expected = run(3, with_horovod, inside=train_steps, places={}, options=options)
    found = run(3, with_horovod, inside=train_steps, places=PLACES, options=options)
    for calls, resets, parameters in found:
        assert (calls, resets) == (5, [3] * 4)
        assert all(torch.equal(a, b) for a, b in zip(parameters, expected[0][2], strict=True))


def count_samples(
    places: dict[tuple[int, str], int], length: int, hosts: int | None = None, epochs: int = 2
) -> list[list[int]]:
    """How often each sample counted in each epoch: the sums are part of the state, as weights are."""
    dataset = TensorDataset(torch.arange(length))
    sampler = hvd.elastic.ElasticSampler(dataset)
    loader = DataLoader(dataset, batch_size=BATCH, sampler=sampler)
    counted = nn.Module()
    counted.register_buffer("counts", torch.zeros(epochs, length))
    fail = Failing(places)

    @hvd.elastic.run
    def epochs_of(state: Any) -> None:
        while state.epoch < epochs:
            sampler.set_epoch(state.epoch)
            for batch, (numbers,) in enumerate(loader):
                seen = torch.zeros(length)
                seen[numbers] = 1
                fail(state.batch, "before")
                seen = hvd.allreduce(seen, op=hvd.Sum, name="seen")
                counted.counts[state.epoch] += seen  # type: ignore[operator, index]
                sampler.record_batch(batch, BATCH)
                fail(state.batch, "between")
                if hosts is not None and state.batch == 3 and hvd.rank() == 0 and not told:
                    told.append(True)
                    state.on_hosts_updated(1.0, hosts)
                state.batch += 1
                state.commit()
                fail(state.batch, "after")
            state.epoch += 1
            state.commit()

    told: list[bool] = []
    epochs_of(hvd.elastic.TorchState(counted, sampler=sampler, epoch=0, batch=0))
    assert hosts is None or told or hvd.rank()
    assert not fail.places or hvd.rank() not in fail.places.values()
    return counted.counts.int().tolist()  # type: ignore[operator]


FAULTS: list[dict[tuple[int, str], int]] = [
    {(1, "before"): 1},
    {(1, "between"): 0, (2, "between"): 2, (4, "before"): 0},
    {(3, "after"): 2, (5, "between"): 1, (6, "after"): 0, (9, "before"): 1},
]


@pytest.mark.parametrize("places", FAULTS, ids=lambda p: str(len(p)))
def test_no_sample_is_lost_or_counted_twice_after_failures(places: dict[tuple[int, str], int]) -> None:
    for counts in run(3, with_horovod, inside=count_samples, places=places, length=SAMPLES):
        assert counts == [[1] * SAMPLES] * 2


@pytest.mark.parametrize("update", [HostUpdateResult.added, HostUpdateResult.removed], ids=["added", "removed"])
def test_no_sample_is_lost_or_counted_twice_after_a_change_of_hosts(update: HostUpdateResult) -> None:
    for counts in run(3, with_horovod, inside=count_samples, places={}, length=SAMPLES, hosts=int(update)):
        assert counts == [[1] * SAMPLES] * 2


def parts(length: int) -> list[Any]:
    sampler = hvd.elastic.ElasticSampler(range(length), shuffle=False)
    first = list(sampler)
    sampler.record_indices(first[:1])
    state = sampler.state_dict()
    again = hvd.elastic.ElasticSampler(range(length), shuffle=False)
    again.load_state_dict(state)
    with pytest.raises(ValueError, match="processed_indices"):
        again.load_state_dict({"epoch": 0, "processed_num": 3})
    held = hvd.elastic.TorchState(sampler=sampler)
    held.sync()
    return [first, list(again), list(sampler), len(sampler), sampler.processed_num]


def test_ranks_have_equally_many_samples() -> None:
    zero, one, two = run(3, with_horovod, inside=parts, length=7)
    assert [zero[0], one[0], two[0]] == [[0, 3, 6], [1, 4, 0], [2, 5, 1]]
    # What this rank alone knows to be done is not in its part; after sync, what any rank has done.
    assert one[1] == [2, 5]
    assert [zero[2], one[2], two[2]] == [[3, 6], [4, 3], [5, 4]]
    assert zero[3:] == [2, 3]


def record_uneven_batches(length: int) -> list[Any]:
    """Samples of an epoch whose last batch is smaller, recorded by its own size as a script does by ``len(batch)``."""
    sampler = hvd.elastic.ElasticSampler(range(length), shuffle=False)
    for index, batch in enumerate(DataLoader(range(length), batch_size=2, sampler=sampler)):  # type: ignore[arg-type]
        sampler.record_batch(index, len(batch))
    recorded = sorted(sampler.processed_indices)
    for batch in ((len(sampler), 2), (0, 1), (1, 3)):
        with pytest.raises(ValueError, match=r"no such batch.*record_indices"):
            sampler.record_batch(*batch)
    assert sorted(sampler.processed_indices) == recorded
    return [recorded, sorted(sampler)]


@pytest.mark.parametrize("size", [2, 3])
def test_a_smaller_last_batch_is_recorded(size: int) -> None:
    for recorded, given in run(size, with_horovod, inside=record_uneven_batches, length=5 * size):
        assert recorded == given and len(given) == 5


def train_with_batch_norm(places: dict[tuple[int, str], int]) -> list[Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), hvd.SyncBatchNorm(8), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    data = torch.randn(4, 3, 5, 4)
    fail, calls = Failing(places), [0]

    @hvd.elastic.run
    def steps(state: Any) -> None:
        calls[0] += 1
        while state.batch < len(data):
            optimizer.zero_grad()
            loss = model(data[state.batch, hvd.rank()]).square().mean()
            fail(state.batch, "before backward")
            loss.backward()
            optimizer.step()
            state.batch += 1
            state.commit()

    steps(hvd.elastic.TorchState(model, optimizer, batch=0))
    return [calls[0], [value.clone() for value in model.state_dict().values()]]


@pytest.mark.parametrize("size", [2, 3])
def test_a_failure_in_the_backward_of_batch_norm_changes_no_weight(size: int) -> None:
    places = {(1, "before backward"): 1, (3, "before backward"): 0}
    expected = run(size, with_horovod, inside=train_with_batch_norm, places={})
    for calls, values in run(size, with_horovod, inside=train_with_batch_norm, places=places):
        assert calls == 3 and all(torch.equal(a, b) for a, b in zip(values, expected[0][1], strict=True))


def nothing_is_left() -> int:
    sampler = hvd.elastic.ElasticSampler(range(4))
    sampler.record_indices(range(4))
    sampler.reset()
    return len(list(sampler))


def test_a_finished_epoch_has_no_samples() -> None:
    assert run(2, with_horovod, inside=nothing_is_left) == [0, 0]


def always(kind: str) -> str:
    calls = [0]

    @hvd.elastic.run
    def fails(state: Any) -> None:
        calls[0] += 1
        if kind == "mismatch":
            hvd.allreduce(torch.ones(2 + hvd.rank()), name="x")
        raise hvd.HorovodInternalError("injected")

    os.environ["HOROVOD_RESET_LIMIT"] = "3"
    try:
        fails(hvd.elastic.TorchState(batch=0))
    except hvd.HorovodInternalError as error:
        return f"{calls[0]} {error}"
    finally:
        del os.environ["HOROVOD_RESET_LIMIT"]
    return ""


def test_resets_have_a_limit_and_a_mismatch_repeats_once() -> None:
    for text in run(2, with_horovod, inside=always, kind="injected"):
        assert text.startswith("4 Horovod was shutdown because number of resets during elastic job exceeded limit: 3")
    for text in run(2, with_horovod, inside=always, kind="mismatch"):
        assert text.startswith("2 Mismatched ALLREDUCE tensor shapes")


def test_ranks_that_cannot_join_again_raise_horovod_s_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(*_: object) -> None:
        raise PeerError("rank 1 did not arrive")

    @hvd.elastic.run
    def fails(state: Any) -> None:
        raise hvd.HorovodInternalError("injected")

    member = SimpleNamespace(join=lambda failed, leave: leave(), check=absent)
    monkeypatch.setattr(membership, "_membership", member)
    monkeypatch.setattr(job, "_join", absent)
    nothing = dict.fromkeys(("sync", "restore", "on_hosts_updated"), lambda: None)
    with pytest.raises(hvd.HorovodInternalError, match="rank 1 did not arrive"):
        fails(SimpleNamespace(**nothing))


@pytest.mark.parametrize("last", [b"", b'{"place": {"RA'], ids=["whole", "half a line"])
def test_a_rank_whose_launcher_has_ended_gets_no_place(last: bytes) -> None:
    here, there = socket.socketpair()
    member = membership.Membership(here, {})
    there.sendall(last)
    there.close()
    for _ in range(2):
        with pytest.raises(PeerError, match="launcher of the elastic job has ended"):
            member.join(failed=False, leave=lambda: None)
    here.close()


def commits_too_early() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    state = hvd.elastic.TorchState(model, optimizer)
    model(torch.ones(1, 2)).sum().backward()
    for early in (state.commit, state.check_host_updates):
        with pytest.raises(ValueError, match=r"after optimizer.step\(\)"):
            early()
    optimizer.step()
    state.commit()


def test_a_commit_between_backward_and_step_is_refused() -> None:
    run(2, with_horovod, inside=commits_too_early)


def loses_a_rank(victim: int) -> None:
    """Survivors return to the last commit, and the error that ends the loop names the rank."""
    hvd.init()
    model = nn.Linear(2, 1)
    state = hvd.elastic.TorchState(model, batch=0)

    @hvd.elastic.run
    def steps(state: Any) -> None:
        while state.batch < 8:
            with torch.no_grad():
                model.weight.fill_(state.batch + 1)
            if state.batch == 4 and hvd.rank() == victim:
                os.kill(os.getpid(), signal.SIGKILL)
            hvd.allreduce(model.weight.detach(), name="weight")
            state.batch += 1
            state.commit()

    try:
        steps(state)
    except hvd.HorovodInternalError as error:
        raise RuntimeError(f"batch {state.batch}, weight {model.weight[0, 0]:.0f}: {error}") from None


def lose_last() -> None:
    loses_a_rank(2)


def lose_first() -> None:
    loses_a_rank(0)


@pytest.mark.parametrize(("function", "victim"), [(lose_last, 2), (lose_first, 0)], ids=["last", "coordinator"])
def test_survivors_of_a_killed_rank_hold_the_last_commit(function: Callable[[], None], victim: int) -> None:
    pool = Pool(3)
    try:
        with pytest.raises(RankError) as caught:
            pool.run(function, limit=60)
    finally:
        pool.close()
    for rank, failure in enumerate(caught.value.failures):
        if rank != victim:
            assert failure is not None
            assert f"batch 4, weight 4: rank {victim} has ended" in failure.text
