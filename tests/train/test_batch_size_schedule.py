"""A batch that grows, over several ranks: the same run on any devices, each phase a plain run, resumed anywhere."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

import tutti
from tests import worlds
from tests.contract.models import loss, model, samples
from tests.contract.table import largest_difference, train
from tests.covering import in_turn, table
from tutti.config.growth import BatchGrowth
from tutti.data import Sharded
from tutti.errors import TuttiError

# 70 samples: batches of 8, 20, 30 and 30, in the last two at 0.6 and 0.24 of the rate.
GROWTH = "milestones=1ep+2ep+3ep,factor=2.5,largest=30"
STEPS = [9, 4, 3, 3]
MOMENTUM = "sgd:lr=0.05,momentum=0.9,nesterov=true,weight_decay=0.01"


@cache
def reference(strategy: str, optimizer: str, reproducible: bool, micro_batch: int | None) -> Any:
    return trained(1, strategy, optimizer, reproducible, micro_batch)[0]


def trained(devices: int, strategy: str, optimizer: str, reproducible: bool, micro_batch: int | None) -> list[Any]:
    options = {"workers": 4, "batch_size": 8, "batch_growth": GROWTH, "micro_batch": micro_batch, "steps": sum(STEPS)}
    return worlds.run(devices, train, strategy=strategy, optimizer=optimizer, reproducible=reproducible, **options)


WAYS = [
    ("mirrored", MOMENTUM, None),
    ("mirrored:algorithm=native", "adam:lr=0.01", 3),
    ("model_parallel", "lars:lr=2,trust=0.01,weight_decay=0.01", None),
    ("local_sgd:period=2", MOMENTUM, 3),
]


@pytest.mark.parametrize(("way", "devices", "reproducible"), table(WAYS, [2, 3, 4], [False, True], strength=1), ids=str)
def test_any_devices_train_the_same_through_every_phase(
    way: tuple[str, str, int | None], devices: int, reproducible: bool
) -> None:
    strategy, optimizer, micro_batch = way
    single = strategy if "local" in strategy else "single"
    want, losses, digest = reference(single, optimizer, reproducible, micro_batch)
    assert len(losses) == sum(STEPS) + 4
    for got, own_losses, own_digest in trained(devices, strategy, optimizer, reproducible, micro_batch):
        assert largest_difference(got, want) <= (0 if reproducible else 1e-10)
        assert own_losses == pytest.approx(losses, rel=0 if reproducible else 1e-9, abs=0)
        assert own_digest == digest or not reproducible


def prepared(batch: int, rate: float = 1.0, growth: BatchGrowth | str | None = None) -> tuple[tutti.Run, Any]:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05 * rate, momentum=0.9)
    options: dict[str, Any] = {"workers": 4, "batch_size": batch, "batch_growth": growth, "reproducible": True}
    return tutti.prepare(net, optimizer, samples(), loss, **options), optimizer


def one_epoch(run: tutti.Run, optimizer: Any, epoch: int, own: bool) -> list[float]:
    """The learning rate of every update of an epoch, by ``run.step`` or in a custom loop."""
    used: list[float] = []
    hook = optimizer.register_step_pre_hook(lambda *_: used.append(optimizer.param_groups[0]["lr"]))
    if own:
        for batch in run.microbatches(epoch):
            total, count, _ = loss(run.model, batch)
            run.model.zero_grad()
            run.backward((total, count))
            optimizer.step()
    else:
        for batch in run.epoch(epoch):
            run.step(batch)
    hook.remove()
    return used


def phases_and_plain_runs(own: bool) -> list[Any]:
    """Of each phase its parameters and rates, beside those of a plain run of its batch from the state before it."""
    grown, optimizer = prepared(8, growth=BatchGrowth.parse(GROWTH))
    found = []
    for epoch, phase in enumerate(grown.feed.epochs.phases):
        plain, other = prepared(phase.contract.batch, phase.rate)
        for mine, theirs in zip(plain.model.parameters(), grown.model.parameters(), strict=True):
            mine.data.copy_(theirs.data)
            if theirs in optimizer.state:
                other.state[mine]["momentum_buffer"] = optimizer.state[theirs]["momentum_buffer"].clone()
        plain.global_step = plain.local_step = grown.global_step
        pair = []
        for run, made in ((grown, optimizer), (plain, other)):
            rates = one_epoch(run, made, epoch, own)
            values = [p.detach().tolist() for p in run.model.parameters()]
            pair.append((values, rates, made.param_groups[0]["lr"]))
        found.append(pair)
    return found


@pytest.mark.parametrize(("devices", "own"), in_turn([1, 3], [False, True]))
def test_a_phase_is_a_plain_run_of_its_batch_and_rate_from_where_it_begins(devices: int, own: bool) -> None:
    answers = worlds.run(devices, phases_and_plain_runs, own=own)
    assert answers[1:] == answers[:1] * (devices - 1)
    for steps, factor, ((values, rates, left), (plain, want, _)) in zip(
        STEPS, (1, 1, 30 / 50, 30 / 125), answers[0], strict=True
    ):
        assert values == plain and rates == want == [0.05 * factor] * steps
        assert left == 0.05, "the rate is the caller's again after each update"


def interrupted(folder: str, strategy: str, stop: int, kind: str) -> Any:
    """Restore, train to step ``stop`` and save; or to the end of the fourth epoch, and tell the hash."""
    optimizer: Any = MOMENTUM
    net = model()
    if kind == "own":
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    data: Any = Sized() if kind == "stream" else samples()
    options: dict[str, Any] = {"strategy": strategy, "workers": 4, "batch_size": 8, "batch_growth": GROWTH}
    run = tutti.prepare(net, optimizer, data, loss, reproducible=True, ema=0.8, **options)
    run.restore(folder)
    positions = []
    for epoch in run.epochs(4):
        for batch in run.microbatches(epoch) if kind == "own" else run.epoch(epoch):
            if kind == "own":
                total, count, _ = loss(run.model, batch)
                run.model.zero_grad()
                run.backward((total, count))
                optimizer.step()
                if not run.stepped:
                    continue
            else:
                run.step(batch)
            positions.append((run.global_step, *run.data_position, run.samples))
            if run.global_step == stop:
                run.save(folder)
                return positions
    return positions, run.weights_sha256(), run.weights_sha256(averaged=True)


class Sized(IterableDataset[Any]):
    """The same samples as a stream that says how many it has."""

    def __len__(self) -> int:
        return 70

    def __iter__(self) -> Iterator[Any]:
        yield from zip(*samples(), strict=True)


@pytest.mark.parametrize(
    ("kind", "places"),
    [
        ("given", [(1, "single"), (3, "mirrored"), (2, "model_parallel"), (4, "mirrored"), (3, "model_parallel")]),
        ("local", [(4, "local_sgd"), (1, "local_sgd"), (3, "local_sgd"), (2, "local_sgd"), (4, "local_sgd")]),
        ("own", [(3, "mirrored"), (1, "single"), (4, "mirrored"), (2, "mirrored"), (3, "mirrored")]),
        ("stream", [(3, "mirrored"), (1, "single"), (4, "mirrored"), (2, "model_parallel"), (3, "mirrored")]),
    ],
)
def test_a_run_goes_on_in_the_middle_of_any_phase_on_other_devices(
    kind: str, places: list[tuple[int, str]], tmp_path: Path
) -> None:
    first = "local_sgd" if kind == "local" else "single"
    [(positions, *hashes)] = worlds.run(
        1, interrupted, folder=str(tmp_path / "whole"), strategy=first, stop=0, kind=kind
    )
    assert [p[0] for p in positions] == list(range(1, sum(STEPS) + 1)) and positions[-1] == (19, 4, 0, 280)
    done = []
    # In the first phase, in the second, at its end, and in the third.
    for stop, (devices, strategy) in zip((4, 11, 13, 15, 0), places, strict=True):
        answers = worlds.run(
            devices, interrupted, folder=str(tmp_path / "parts"), strategy=strategy, stop=stop, kind=kind
        )
        assert answers[1:] == answers[:1] * (devices - 1)
        done += answers[0] if stop else answers[0][0]
    assert done == positions and list(answers[0][1:]) == hashes


def refused(case: str, folder: str = "") -> str:
    """What is said of a run that cannot be, or of a call that cannot."""
    rank = int(os.environ["RANK"])
    made: dict[str, Any] = {"batch_growth": GROWTH, "batch_size": 8, "workers": 4}
    data: Any = samples()
    if case == "disagree":
        made["batch_growth"] = f"milestones={1 + (rank == 1)}ep,factor=2,largest=30"
    if case == "small":
        made["batch_growth"] = "milestones=1ep,factor=2"
    if case == "adascale":
        made["lr_scale"] = case
    if case == "noise":
        made["gradient_noise"] = "multiplicative:base_batch=4"
    if case in ("unknown", "sharded"):
        data = lambda: Sized()  # noqa: E731
        data = Sharded(Sized()) if case == "sharded" else data
    try:
        run = tutti.prepare(model(), "sgd", data, loss, **made)
        if case == "own batch":
            run.step(tuple(t[:4] for t in samples()))
        if case == "per epoch":
            assert [run.steps_of(epoch) for epoch in range(4)] == STEPS
            return str(run.steps_per_epoch)
        if case == "restore":
            run.save(folder)
            tutti.prepare(model(), "sgd", data, loss, **{**made, "batch_growth": None}).restore(folder)
    except TuttiError as error:
        return f"{type(error).__name__} {error}"
    return "nothing"


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("disagree", "MismatchError"),
        ("small", "UsageError a batch of 8 cannot grow: the largest is 7, a tenth of the 70 samples"),
        ("unknown", "UsageError the batch cannot grow with a stream whose length is not known"),
        ("sharded", "UsageError the batch cannot grow with a stream whose length is not known"),
        ("adascale", "UsageError a batch that grows cannot be combined with lr_scale='adascale'"),
        ("noise", "UsageError a batch that grows cannot be combined with gradient_noise"),
        ("own batch", "UsageError a batch that does not come from the run cannot grow"),
        ("per epoch", "UsageError the batch grows, and epochs have fewer steps. Call run.steps_of(epoch)"),
        ("restore", f"CheckpointError the checkpoint was made with batch_growth {GROWTH}, not None"),
    ],
)
def test_what_cannot_be_is_refused_on_every_rank(case: str, words: str, tmp_path: Path) -> None:
    for said in worlds.run(3, refused, case=case, folder=str(tmp_path)):
        assert said.startswith(words), said


def warned(net: str, **options: Any) -> list[str]:
    built = model() if net == "norm" else nn.Sequential(nn.Flatten(), nn.Linear(16, 4)).double()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        options = {"batch_growth": GROWTH, **options}
        tutti.prepare(built, "sgd", samples(), loss, workers=4, batch_size=8, **options)
    return [str(warning.message) for warning in told if "batch grows" in str(warning.message)]


def test_batch_norm_that_sees_more_is_told_of_once() -> None:
    [said], *others = worlds.run(3, warned, net="norm")
    assert "together: 2 at first, 8 in the end" in said and "ghost:size=2 or a micro-batch of 2" in said
    assert others == [[], []]
    for quiet in ({"net": "plain"}, {"batch_norm": "ghost:size=2"}, {"micro_batch": 2}, {"batch_growth": None}):
        assert worlds.run(3, warned, **{"net": "norm", **quiet}) == [[], [], []]


def seen_by_batch_norm(batch_norm: str, micro_batch: int | None) -> Any:
    """How many samples the model's forward had at once, in each phase."""
    seen: list[set[int]] = []

    def counted(net: Any, batch: tuple[Tensor, Tensor]) -> Any:
        if torch.is_grad_enabled():
            seen[-1].add(len(batch[1]))
        return loss(net, batch)

    options: dict[str, Any] = {"batch_size": 8, "batch_growth": GROWTH, "micro_batch": micro_batch}
    run = tutti.prepare(model(), "sgd", samples(), counted, workers=4, batch_norm=batch_norm, **options)
    for epoch in range(4):
        seen.append(set())
        for number, batch in enumerate(run.epoch(epoch)):
            if number < run.steps_of(epoch) - 1:
                run.step(batch)
    return [max(sizes) for sizes in seen]


def test_a_worker_s_share_grows_and_its_micro_batches_do_not() -> None:
    assert worlds.run(1, seen_by_batch_norm, batch_norm="worker", micro_batch=None) == [[2, 5, 8, 8]]
    assert worlds.run(1, seen_by_batch_norm, batch_norm="worker", micro_batch=2) == [[2, 2, 2, 2]]
