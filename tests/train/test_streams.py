"""Training on streams with several ranks: what must be the same on all, what a self-sharding data set gives up."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset

import tutti
from tests import worlds
from tutti.config.spec import Duration
from tutti.data import Sharded
from tutti.errors import TuttiError
from tutti.metrics.listener import Listeners, RunHeader
from tutti.train.loop import train_loop
from tutti.train.train_plan import TrainPlan

COUNT = 22


def rows(count: int = COUNT) -> torch.Tensor:
    return torch.randn(count, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


class Rows(IterableDataset[Any]):
    """Rows from ``first`` in steps of ``by``; ``late`` is added to row 17."""

    def __init__(self, first: int = 0, by: int = 1, count: int = COUNT, late: float = 0.0) -> None:
        self.first, self.by, self.count, self.late = first, by, count, late

    def __iter__(self) -> Iterator[Any]:
        for number in range(self.first, self.count, self.by):
            yield {"row": rows(self.count)[number] + self.late * (number == 17), "number": number}


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.2), nn.Tanh(), nn.Linear(4, 1)).double()


def loss(net: Any, batch: Any) -> Any:
    return net(batch["row"]).square().sum(), len(batch["row"]), {"number": batch["number"].sum()}


def rank() -> int:
    return int(os.environ["RANK"])


def make(kind: str, devices: int) -> Any:
    """The data set of this rank."""
    return {
        "whole": lambda: Rows(),
        "by rank": lambda: Rows(rank(), devices),
        "one more": lambda: Rows(count=COUNT + (rank() == devices - 1)),
        "late": lambda: Rows(late=float(rank() == 1)),
        "sharded": lambda: Sharded(Rows(rank(), devices)),
        "uneven": lambda: Sharded(Rows(0, 1, 3 + 5 * rank())),
        "one empty": lambda: Sharded(Rows(count=5 * (rank() != 1))),
    }[kind]()


def prepared(kind: str, devices: int, **options: Any) -> tutti.Run:
    options = {"workers": 4, "batch_size": 6, "reproducible": True} | options
    return tutti.prepare(model(), "sgd:lr=0.1,momentum=0.9", make(kind, devices), loss, **options)


def trained(kind: str, devices: int, epochs: int = 2, **options: Any) -> Any:
    """Per step: loss, sum of the sample numbers, samples; and the hash. Or what was raised."""
    try:
        run = prepared(kind, devices, **options)
        steps = []
        for epoch in range(epochs):
            for batch in run.epoch(epoch):
                before = run.samples
                run.step(batch)
                assert run.stats is not None
                steps.append((run.stats.loss, run.stats.metrics["number"], run.samples - before, run.data_position))
        return steps, run.weights_sha256()
    except TuttiError as error:
        return f"{type(error).__name__} {int(error.exit_code)} {error}"


@pytest.mark.parametrize("strategy", ["mirrored", "model_parallel", "local_sgd"])
def test_a_stream_trains_the_same_weights_on_any_devices(strategy: str) -> None:
    single = "local_sgd" if strategy == "local_sgd" else "single"
    [want] = worlds.run(1, trained, kind="whole", devices=1, strategy=single)
    assert [samples for _, _, samples, _ in want[0]] == [6, 6, 6, 4] * 2
    for devices in (2, 3, 4):
        assert worlds.run(devices, trained, kind="whole", devices=devices, strategy=strategy) == [want] * devices


@pytest.mark.parametrize("devices", [2, 3, 4])
def test_a_stream_that_shards_itself_is_refused_before_it_trains(devices: int) -> None:
    for said in worlds.run(devices, trained, kind="by rank", devices=devices):
        assert said.startswith("MismatchError 5 ranks disagree about the samples of the stream: rank 0 has sample 0 ")
        assert "tutti.data.Sharded" in said


def test_streams_that_part_later_are_refused() -> None:
    for said in worlds.run(3, trained, kind="late", devices=3, batch_size=4):
        assert "MismatchError" in said and "sample 17 of epoch 0" in said
    for said in worlds.run(3, trained, kind="one more", devices=3):
        assert "MismatchError" in said


@pytest.mark.parametrize("devices", [2, 3, 4])
def test_own_streams_count_every_sample_once(devices: int) -> None:
    for kind, everything in (
        ("sharded", list(range(COUNT))),
        ("uneven", [n for r in range(devices) for n in range(3 + 5 * r)]),
    ):
        steps, digest = (answers := worlds.run(devices, trained, kind=kind, devices=devices, reproducible=False))[0]
        assert answers == [(steps, digest)] * devices
        half = len(steps) // 2
        for epoch in (steps[:half], steps[half:]):
            assert sum(samples for _, _, samples, _ in epoch) == len(everything)
            assert sum(round(mean * samples) for _, mean, samples, _ in epoch) == sum(everything)
        assert [at for *_, at in steps][half - 1 :: half] == [(1, 0), (2, 0)]


def test_what_own_streams_cannot_do_is_refused_on_every_rank() -> None:
    for said in worlds.run(3, trained, kind="one empty", devices=3, reproducible=False):
        assert said.startswith("DataError 3 the stream is empty in epoch 0 (Rows, data rank 1)")
    for said in worlds.run(3, trained, kind="sharded", devices=3):
        assert "reproducible cannot be combined with a data set that shards itself" in said
    for said in worlds.run(2, trained, kind="sharded", devices=2, reproducible=False, strategy="model_parallel"):
        assert "MismatchError" in said and "Give the stages of one replica the same stream" in said


def custom_loop(kind: str, devices: int, **options: Any) -> Any:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    run = tutti.prepare(net, optimizer, make(kind, devices), workers=4, **options)
    try:
        for batch in run.microbatches(0):
            total, count, _ = loss(run.model, batch)
            run.model.zero_grad()
            run.backward((total, count))
            optimizer.step()
    except TuttiError as error:
        return f"{type(error).__name__} {error}"
    return run.weights_sha256()


def test_a_custom_loop_reads_a_stream() -> None:
    options = {"batch_size": 6, "reproducible": True}
    [want] = worlds.run(1, custom_loop, kind="whole", devices=1, **options)
    assert "Error" not in want
    for devices in (2, 3):
        assert worlds.run(devices, custom_loop, kind="whole", devices=devices, **options) == [want] * devices
    options = {"batch_size": 5, "reproducible": True}
    [want] = worlds.run(1, custom_loop, kind="whole", devices=1, **options)
    assert worlds.run(3, custom_loop, kind="whole", devices=3, **options) == [want] * 3, "no sample in a last batch"
    got = worlds.run(3, custom_loop, kind="uneven", devices=3, batch_size=9)
    assert "Error" not in got[0] and len(set(got)) == 1


def looped(total: Any, evaluate: Any) -> Any:
    run = prepared("whole", 1)
    told: list[tuple[str, int]] = []

    class Told(Listeners):
        def stepped(self, record: Any, pace: Any) -> None:
            told.append(("step", record.samples))

        def evaluated(self, record: Any) -> None:
            told.append(("eval", record.step))

    summary = train_loop(run, TrainPlan(total, evaluate), Rows(count=4), RunHeader("", {}, None, None), Told(()))
    return told, summary["epochs"], summary["steps"], summary["samples"]


LENGTHS = [
    # total, evaluations, steps that end it, samples, epochs, steps that evaluate
    (Duration(2, "ep"), Duration(1, "ep"), 8, 44, 2, [4, 8]),
    (Duration(3, "ep"), Duration(2, "ep"), 12, 66, 3, [8, 12]),
    (Duration(30, "sa"), Duration(10, "sa"), 6, 34, 1, [2, 4, 6]),
    (Duration(22, "sa"), None, 4, 22, 1, [4]),
    (5, 2, 5, 28, 1, [2, 4, 5]),
]


@pytest.mark.parametrize(("total", "evaluate", "steps", "samples", "epochs", "evaluations"), LENGTHS)
def test_lengths_that_only_the_stream_tells(
    total: Any, evaluate: Any, steps: int, samples: int, epochs: int, evaluations: list[int]
) -> None:
    for told, *summary in worlds.run(2, looped, total=total, evaluate=evaluate):
        assert summary == [epochs, steps, samples]
        assert [number for kind, number in told if kind == "eval"] == evaluations
        assert [number for kind, number in told if kind == "step"] == [
            22 * (step // 4) + min(step % 4 * 6, 22) for step in range(1, steps + 1)
        ]
