"""Parameter servers in whole runs: what each mode promises, with real ranks and real servers."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import pytest
import torch

import tutti
from tests import worlds
from tests.contract.models import loss, model, samples
from tests.contract.table import OPTIMIZERS, largest_difference
from tests.contract.test_state import saver
from tests.parallel.mixers import Counted
from tutti import parallel
from tutti.config.strategy_choice import parse_strategy
from tutti.errors import CheckpointError, UsageError
from tutti.parallel.parameter_server import server_session
from tutti.parallel.parameter_server.server_session import ServerSession


def prepare(strategy: str, optimizer: Any = "sgd:lr=0.05", workers: int = 4, **options: Any) -> tutti.Run:
    arguments = {"batch_size": 24, "precision": "fp64", **options}
    return tutti.prepare(model(), optimizer, samples(72), loss, strategy=strategy, workers=workers, **arguments)


def go_on(run: tutti.Run, steps: int) -> list[float]:
    """Train until so many steps are done; the losses."""
    losses: list[float] = []
    while run.global_step < steps:
        for batch in run.epoch(*run.data_position):
            losses.append(run.step(batch))
            if run.global_step == steps:
                break
    return losses


def told(strategy: str, steps: int = 30, **options: Any) -> dict[str, Any]:
    run = prepare(strategy, **options)
    before = run.evaluate(run.feed.source).loss
    losses = go_on(run, steps)
    return {
        "digest": run.weights_sha256(),
        "before": before,
        "after": run.evaluate(run.feed.source).loss,
        "losses": losses,
        "updates": run.updates,
        "facts": run.gradient_sync.facts(),
    }


ASYNCHRONOUS = [
    ("parameter_server:mode=async", 3),
    ("parameter_server:mode=async,servers=2,transport=tcp", 4),
    ("parameter_server:mode=async,over_staleness=true", 2),
    ("parameter_server:mode=bounded,staleness=1,servers=2", 3),
]


@pytest.mark.parametrize(("strategy", "devices"), ASYNCHRONOUS)
def test_every_push_is_an_update(strategy: str, devices: int) -> None:
    answers = worlds.run(devices, told, strategy=strategy)
    assert len({answer["digest"] for answer in answers}) == 1
    for server in answers[0]["facts"]["servers"]:
        assert server["updates"] == sum(server["staleness"].values()) == 4 * 30
        assert server["lost"] == server["refused"] == server["malformed"] == server["keys_refused"] == 0
    assert answers[0]["after"] < answers[0]["before"]


@pytest.mark.parametrize("bound", [0, 2])
def test_staleness_is_within_the_bound(bound: int) -> None:
    """A gradient misses at most what N - 1 others do in s + 1 steps before and s after it began, and one each."""
    answers = worlds.run(4, told, strategy=f"parameter_server:mode=bounded,staleness={bound}")
    [server] = answers[0]["facts"]["servers"]
    assert max(map(int, server["staleness"])) <= 3 * (2 * bound + 2)


def counted(total: int, every: int) -> dict[str, Any]:
    """A loop that ends when all workers together have made so many steps, and evaluates in between; rank 1 is slow."""
    run = prepare("parameter_server:mode=async,steps=all,servers=2", workers=5)
    values, epoch = [], 0
    while run.global_step < total:
        for batch in run.epoch(epoch):
            before = run.global_step
            if tutti.rank() == 1:
                time.sleep(0.15)
            run.step(batch)
            if run.global_step // every > before // every:
                values.append(
                    (run.global_step, run.samples, run.position()["epoch"], run.evaluate(run.feed.source).loss)
                )
            if run.global_step >= total:
                break
        epoch += 1
    return {
        "values": values,
        "taken": run.local_step,
        "digest": run.weights_sha256(),
        "mine": list(run.feed.workers),
        "steps": [server["steps"] for server in run.gradient_sync.facts().get("servers", ())],
    }


@pytest.mark.parametrize("devices", [1, 3, 4])
def test_where_the_steps_of_all_count_a_slow_worker_makes_fewer_and_all_meet(devices: int) -> None:
    answers = worlds.run(devices, counted, total=40, every=10)
    assert len({answer["digest"] for answer in answers}) == 1
    # 72 samples in batches of 24: three steps an epoch.
    want = [(10, 240, 3), (20, 480, 6), (30, 720, 10), (40, 960, 13)]
    for answer in answers:
        assert [value[:3] for value in answer["values"]] == want
        assert answer["values"] == answers[0]["values"]
    for steps in answers[0]["steps"]:
        assert 5 * 40 <= sum(steps) <= 5 * 40 + 4
        assert all(steps[worker] == answer["taken"] for answer in answers for worker in answer["mine"])
    taken = [answer["taken"] for answer in answers]
    assert taken == [40] if devices == 1 else taken[1] < min(taken[0], *taken[2:]) < max(taken) > 40


def stream() -> Iterator[tuple[torch.Tensor, int]]:
    yield from ((torch.zeros(4), 0) for _ in range(8))


def streamed() -> None:
    tutti.prepare(model(), "sgd:lr=0.1", stream, loss, batch_size=4, strategy="parameter_server:mode=async,steps=all")


def test_where_the_steps_of_all_count_ranks_cannot_be_in_step() -> None:
    with pytest.raises(worlds.RankError, match="steps=all cannot be combined with a stream"):
        worlds.run(1, streamed)
    with pytest.raises(UsageError, match=r"needs run\.step"):
        parallel.check_strategy(parse_strategy("parameter_server:mode=async,steps=all"), 2, custom_loop=True)


def test_one_device_plays_equally_fast_workers_to_the_bit() -> None:
    first, again = (worlds.run(1, told, strategy="parameter_server:mode=async")[0] for _ in range(2))
    assert first["digest"] == again["digest"] and first["losses"] == again["losses"]
    assert first["facts"]["servers"][0]["staleness"] == {"0": 1, "1": 1, "2": 1, "3": 117}
    other = worlds.run(1, told, strategy="parameter_server:mode=async,over_staleness=true")[0]
    assert other["digest"] != first["digest"]


def test_periods_of_pushing_and_fetching() -> None:
    [answer] = worlds.run(1, told, strategy="parameter_server:mode=async,push=3,fetch=2", workers=1)
    assert answer["facts"]["servers"][0]["updates"] == 10
    assert answer["after"] < answer["before"]


def slope_of(model: Any, batch: Any) -> Any:
    """A loss whose gradient is the mean of the batch, whatever the weights are."""
    return model(batch[0]).mean()


def pushed(bad: int, push: int) -> Any:
    """Train one linear layer for four steps, of which one has a gradient that is not finite."""
    net = torch.nn.Linear(3, 1, bias=False).double()
    torch.nn.init.zeros_(net.weight)
    data = torch.utils.data.TensorDataset(torch.arange(24).reshape(8, 3).double())
    strategy = f"parameter_server:mode=async,push={push}"
    options = {"strategy": strategy, "workers": 1, "batch_size": 2}
    run = tutti.prepare(net, "sgd:lr=1", data, slope_of, **options)
    seen = []
    for step, (inputs,) in enumerate(run.epoch(0)):
        seen.append(inputs.mean(dim=0).numpy().copy())
        run.step((inputs * float("nan") if step == bad else inputs,))
    return run.state()["weight"].numpy()[0], -sum(seen[step] for step in range(4) if step != bad)


@pytest.mark.parametrize("push", [2, 4])
@pytest.mark.parametrize("bad", range(4))
def test_a_push_period_leaves_out_what_is_not_finite_alone(bad: int, push: int) -> None:
    [(got, want)] = worlds.run(1, pushed, bad=bad, push=push)
    assert got == pytest.approx(want, abs=1e-12)


def alone(strategy: str) -> tuple[Any, list[float], str]:
    run = prepare(strategy, OPTIMIZERS["adamw"], workers=1, clip=0.3)
    losses = go_on(run, 5)
    return {name: tensor.numpy().copy() for name, tensor in run.state().items()}, losses, run.weights_sha256()


def test_one_worker_that_nobody_disturbs_trains_as_on_one_device() -> None:
    want, losses, _ = worlds.alone(alone, strategy="single")
    for mode in ("mode=async", "mode=async,servers=2,transport=tcp", "mode=bounded,staleness=0"):
        [(got, own, _)] = worlds.run(1, alone, strategy=f"parameter_server:{mode}")
        assert largest_difference(got, want) <= 1e-10 and own == pytest.approx(losses, rel=1e-9)


def with_backup(strategy: str) -> dict[str, Any]:
    run = prepare(strategy)
    losses = []
    for _ in range(4):
        for batch in run.epoch(0):
            if tutti.rank() == 2:
                time.sleep(0.05)
            losses.append(run.step(batch))
    return {"losses": losses, "digest": run.weights_sha256(), "facts": run.gradient_sync.facts()}


def test_backup_workers_hide_one_that_is_slow() -> None:
    answers = worlds.run(3, with_backup, strategy="parameter_server:backup=1,servers=2")
    assert all(answer["losses"] == answers[0]["losses"] for answer in answers)
    assert len({answer["digest"] for answer in answers}) == 1
    for server in answers[0]["facts"]["servers"]:
        assert server["updates"] == 12 and server["late"] > 0


def adascaled(strategy: str) -> tuple[list[float], float]:
    run = prepare(strategy, lr_scale="adascale")
    losses = go_on(run, 6)
    assert run.adascale is not None
    return losses, run.adascale.tau


def test_adascale_measures_the_same() -> None:
    want = worlds.alone(adascaled, strategy="single")
    for got in worlds.run(3, adascaled, strategy="parameter_server:servers=2"):
        assert got[0] == pytest.approx(want[0], rel=1e-9) and got[1] == pytest.approx(want[1], rel=1e-9)


def as_one(strategy: str) -> Any:
    """Batch norm over the whole global batch, for which a rank's workers compute as one."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    data = torch.utils.data.TensorDataset(torch.randn(48, 6).double(), torch.randint(0, 3, (48,)))

    def mean(model: Any, batch: Any) -> Any:
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])

    options = {"strategy": strategy, "workers": 4, "batch_size": 12, "batch_norm": "sync"}
    run = tutti.prepare(net.double(), "sgd:lr=0.1", data, mean, **options)
    go_on(run, 4)
    return {name: tensor.numpy().copy() for name, tensor in run.state().items()}


def test_workers_that_compute_as_one() -> None:
    want = worlds.alone(as_one, strategy="single")
    for got in worlds.run(3, as_one, strategy="parameter_server"):
        assert largest_difference(got, want) <= 1e-10


def own_optimizer(strategy: str) -> tuple[Any, list[float]]:
    """A user's optimizer of two groups, whose scheduler changes rate and momentum, in a loop of one's own."""
    net = model()
    groups = [{"params": list(net[4].parameters())}, {"params": [*net[0].parameters(), *net[9].parameters()]}]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[0.1, 0.2], total_steps=20)
    run = tutti.prepare(net, optimizer, samples(72), strategy=strategy, workers=3, batch_size=24, precision="fp64")
    losses = []
    for epoch in range(2):
        for images, labels in run.microbatches(epoch):
            optimizer.zero_grad()
            run.backward(torch.nn.functional.cross_entropy(net(images), labels))
            optimizer.step()
            if run.stepped:
                scheduler.step()
                assert run.stats is not None
                losses.append(run.stats.loss)
    return {name: tensor.detach().numpy().copy() for name, tensor in run.state().items()}, losses


def test_a_users_optimizer_and_its_scheduler_act_on_the_servers() -> None:
    want, losses = worlds.alone(own_optimizer, strategy="single")
    for strategy in ("parameter_server", "parameter_server:servers=2,transport=tcp"):
        for got, own in worlds.run(3, own_optimizer, strategy=strategy):
            assert largest_difference(got, want) <= 1e-10 and own == pytest.approx(losses, rel=1e-9)
    for got, _ in worlds.run(2, own_optimizer, strategy="parameter_server:mode=async"):
        assert largest_difference(got, want) > 1e-3


def overflowing(strategy: str) -> tuple[list[bool], Any, tuple[str, ...]]:
    """The third step has a gradient that is not finite."""
    run = prepare(strategy, clip=1.0)
    skipped, names = [], ()
    for step, batch in enumerate(run.epoch(0)):
        images, labels = batch
        images = images * float("nan") if step == 1 and tutti.rank() == 0 else images
        run.step((images, labels))
        assert run.updated is not None
        skipped.append(run.updated.skipped)
        names = names or run.updated.nonfinite
    return skipped, all(bool(t.isfinite().all()) for n, t in run.state().items() if "running" not in n), names


def changed(strategy: str, name: str) -> dict[str, Any]:
    """Settings that a script changes: from the default 0, and in a list."""
    net = model().double()
    made = {"SGD": {"lr": 0.05}, "NAdam": {"lr": 0.01, "betas": [0.0, 0.9]}}
    optimizer = getattr(torch.optim, name)(net.parameters(), **made[name])
    run = tutti.prepare(net, optimizer, samples(72), loss, strategy=strategy, workers=2, batch_size=24)
    for epoch in range(3):
        momentum = {"momentum": 0.4 * epoch} if name == "SGD" else {"betas": [0.4 * epoch, 0.9]}
        optimizer.param_groups[0].update(momentum, weight_decay=0.1 * epoch)
        for batch in run.epoch(epoch):
            run.step(batch)
    return {name: tensor.numpy().copy() for name, tensor in run.state().items()}


@pytest.mark.parametrize("name", ["SGD", "NAdam"])
def test_settings_that_a_script_changes_from_0_reach_the_servers(name: str) -> None:
    [alone] = worlds.run(1, changed, strategy="single", name=name)
    for found in worlds.run(2, changed, strategy="parameter_server", name=name):
        assert largest_difference(found, alone) < 1e-12


def switched() -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    run = tutti.prepare(net, optimizer, samples(72), loss, strategy="parameter_server", workers=2, batch_size=24)
    batches = iter(run.epoch(0))
    run.step(next(batches))
    optimizer.param_groups[0]["nesterov"] = True
    with pytest.raises(UsageError, match=r"nesterov .* from False to True \(.*test_parameter_server"):
        run.step(next(batches))


def test_an_option_that_servers_do_not_follow_is_refused_when_it_changes() -> None:
    worlds.run(2, switched)


def estimating(strategy: str) -> None:
    net = model()
    optimizer = Counted(net.parameters())
    with pytest.raises(UsageError, match="Counted changes count of its parameter groups in its steps"):
        tutti.prepare(net, optimizer, samples(72), loss, strategy=strategy, batch_size=24)


@pytest.mark.parametrize("strategy", ["parameter_server", "central_storage", "pipeline"])
def test_a_setting_that_the_optimizer_itself_changes_is_refused(strategy: str) -> None:
    worlds.run(2, estimating, strategy=strategy)


class Demanding(torch.optim.SGD):
    """Its step fails wherever no closure is given, of a kind that the trial cannot tell."""

    def step(self, closure: Any = None) -> Any:
        assert closure is not None
        return super().step(closure)


def untried(mode: str) -> None:
    net = model()
    with pytest.raises(UsageError, match=r"Demanding cannot be tried, and parameter servers step .*AssertionError"):
        tutti.prepare(net, Demanding(net.parameters()), samples(72), loss, strategy=f"parameter_server:{mode}")


def test_an_optimizer_that_cannot_be_tried_is_refused() -> None:
    for mode in ("mode=sync", "mode=async"):
        worlds.run(2, untried, mode=mode)


@pytest.mark.parametrize("mode", ["mode=sync,servers=2", "mode=async"])
def test_a_gradient_that_is_not_finite_changes_nothing(mode: str) -> None:
    answers = worlds.run(3, overflowing, strategy=f"parameter_server:{mode}")
    assert answers[0][0] == [False, True, False] and "4.weight" in answers[0][2]
    assert all(finite for _, finite, _ in answers)
    assert answers[1][0] == ([False, True, False] if "sync," in mode else [False] * 3)


def saved_and_on(strategy: str, folder: str, until: int) -> tuple[int, str, float]:
    run = prepare(strategy, OPTIMIZERS["adam"], seed=0)
    saver(run, folder, []).restore()
    resumed = run.global_step
    go_on(run, until)
    keeper = saver(run, folder, [])
    keeper.save({})
    keeper.wait()
    return resumed, run.weights_sha256(), run.evaluate(run.feed.source).loss


def too_large(strategy: str, folder: str) -> str:
    run = prepare(strategy, OPTIMIZERS["adam"], seed=0)
    with patch.object(ServerSession, "_most", lambda session: 0), pytest.raises(UsageError) as caught:
        saver(run, folder, []).restore()
    return str(caught.value)


def test_a_state_that_is_too_large_for_a_server_is_refused_on_every_rank(tmp_path: Path) -> None:
    worlds.run(1, saved_and_on, strategy="single", folder=str(tmp_path), until=2)
    for text in worlds.run(2, too_large, strategy="parameter_server", folder=str(tmp_path)):
        assert text.startswith("the optimizer's saved state is too large for a parameter server")


def unread(strategy: str, folder: str) -> str:
    run = prepare(strategy, OPTIMIZERS["adam"], seed=0)
    damaged = CheckpointError("a file is damaged")
    with patch.object(server_session, "cut_for_server", side_effect=damaged), pytest.raises(CheckpointError) as caught:
        saver(run, folder, []).restore()
    return str(caught.value)


def test_a_state_that_rank_0_cannot_read_is_refused_on_every_rank(tmp_path: Path) -> None:
    worlds.run(1, saved_and_on, strategy="single", folder=str(tmp_path), until=2)
    assert worlds.run(2, unread, strategy="parameter_server", folder=str(tmp_path)) == ["a file is damaged."] * 2


def test_what_was_trained_asynchronously_is_continued_by_others(tmp_path: Path) -> None:
    at = 0
    for devices, strategy in [
        (3, "parameter_server:mode=async,servers=2"),
        (2, "mirrored"),
        (4, "parameter_server:mode=bounded,staleness=1"),
    ]:
        answers = worlds.run(devices, saved_and_on, strategy=strategy, folder=str(tmp_path), until=at + 4)
        assert {answer[0] for answer in answers} == {at}
        assert len({answer[1:] for answer in answers}) == 1
        at += 4


def stopping(strategy: str, asking: int) -> int:
    """One rank is asked to stop in its sixth step; after which step this one is told."""
    run = prepare(strategy)
    while True:
        for batch in run.epoch(*run.data_position):
            if run.global_step == 5 and tutti.rank() == asking:
                run.ask_to_stop()
            run.step(batch)
            assert run.stats is not None
            if run.stats.stop:
                return run.global_step
            # Asynchronous ranks run free: on a busy machine one is many steps ahead of the rank that asks.
            assert run.global_step < 10_000


@pytest.mark.parametrize("mode", ["mode=async", "mode=bounded,staleness=1,servers=2"])
def test_all_stop_after_the_same_step(mode: str) -> None:
    stopped = worlds.run(3, stopping, strategy=f"parameter_server:{mode}", asking=1)
    assert len(set(stopped)) == 1 and stopped[0] > 5


def servers_of(strategy: str) -> list[int]:
    """Processes of the servers, once the run is over and forgotten."""
    run = prepare(strategy)
    go_on(run, 1)
    pids = list(run.gradient_sync._link.pids().values())  # type: ignore[attr-defined]
    run.context.comms.world.agree(["over"], "the end", "wait for the others")
    run.gradient_sync._link.close()  # type: ignore[attr-defined]
    return [pid for pid in pids if psutil.pid_exists(pid)] if pids else [os.getpid()]


def test_servers_end_with_the_run() -> None:
    assert worlds.run(2, servers_of, strategy="parameter_server:servers=2")[0] == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("parameter_server:mode=bounded", "give staleness=2"),
        ("parameter_server:staleness=2", "staleness does nothing with mode=sync"),
        ("parameter_server:fetch=2", "fetch does nothing with mode=sync"),
        ("parameter_server:mode=bounded,staleness=1,push=2", "push does nothing with mode=bounded"),
        ("parameter_server:mode=async,backup=1", "backup does nothing with mode=async"),
        ("parameter_server:servers=0", "servers is 0"),
        ("parameter_server:mode=bounded,staleness=1,steps=all", "steps does nothing with mode=bounded"),
        ("parameter_server:lease=0,mode=bounded,staleness=1", "lease is 0"),
    ],
)
def test_options_that_do_nothing_are_refused(text: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_strategy(text)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("text", "options", "words"),
    [
        ("mode=async", {"reproducible": True}, "not reproducible"),
        ("backup=1", {"reproducible": True}, "not reproducible"),
        ("mode=async", {"averaging": True}, "--ema cannot be combined"),
        ("backup=1", {"averaging": True}, "--ema cannot be combined"),
        ("mode=async", {"adaptive": True, "workers": 2}, "adascale cannot be combined"),
    ],
)
def test_promises_that_a_mode_cannot_keep_are_refused(text: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        parallel.check_strategy(parse_strategy(f"parameter_server:{text}"), 2, **options)
    assert words in str(caught.value)


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError) as caught:
        parallel.check_strategy(parse_strategy("parameter_server"), 2)
    assert "needs the package pyzmq" in str(caught.value) and "tutti-train[server]" in str(caught.value)


def refuse_to_step(optimizer: torch.optim.Optimizer) -> None:
    raise RuntimeError("CUDA error: initialization error")


def served_by_forks_of_a_driver() -> float:
    """As where the ranks have used CUDA: a forked server cannot ask it whether it records a graph."""
    built = model()
    made = torch.optim.Adamax(built.parameters(), lr=0.01)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch.optim.Optimizer, "_accelerator_graph_capture_health_check", refuse_to_step)
        run = tutti.prepare(built, made, samples(24), loss, strategy="parameter_server", workers=2, batch_size=24)
        return go_on(run, 1)[0]


def test_servers_do_not_ask_an_accelerator() -> None:
    one, other = worlds.run(2, served_by_forks_of_a_driver)
    assert one == other > 0


def weighted(loop: bool) -> Any:
    """A loss that counts something else than samples, by which the gradient is divided once."""
    torch.manual_seed(0)
    net = torch.nn.Linear(4, 1).double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    draw = torch.Generator().manual_seed(1)
    inputs, targets = (torch.randn(12, n, generator=draw, dtype=torch.float64) for n in (4, 1))

    def loss_of(net: Any, batch: Any) -> Any:
        weights = (batch[1] > 0).double() + 0.25
        return ((net(batch[0]) - batch[1]).square() * weights).sum(), weights.sum()

    data = torch.utils.data.TensorDataset(inputs, targets)
    run = tutti.prepare(net, optimizer, data, loss_of, strategy="parameter_server:mode=async", batch_size=4, seed=0)
    for batch in run.microbatches(0) if loop else run.epoch(0):
        if not loop:
            run.step(batch)
            continue
        optimizer.zero_grad()
        run.backward(loss_of(net, batch))
        optimizer.step()
    return {name: tensor.clone().numpy() for name, tensor in run.state().items()}


def test_a_loop_of_asynchronous_workers_divides_by_the_loss_s_count_once() -> None:
    assert largest_difference(worlds.alone(weighted, loop=True), worlds.alone(weighted, loop=False)) <= 1e-12
