"""A profile names the phases of a step on every rank, changes nothing, and leaves nothing in the run's way."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import tutti
from tests import worlds
from tutti.errors import DiskError
from tutti.metrics.profile import PHASES, TABLE, _table
from tutti.train.step_windows import Window, phases
from tutti.train.step_windows import profiled as profile_of

BATCHES = 4


def prepared(strategy: str, custom_loop: bool = False) -> tuple[tutti.Run, Any]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1), nn.Tanh()).double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    data = torch.randn(4 * 6, 3, dtype=torch.float64)
    options: dict[str, Any] = {"strategy": strategy, "workers": 4, "batch_size": 6, "reproducible": True}
    return tutti.prepare(net, optimizer, data, None if custom_loop else loss, **options), optimizer


def loss(net: Any, batch: Any) -> Any:
    return net(batch).square().mean()


def train(run: tutti.Run, optimizer: Any, custom_loop: bool) -> None:
    if not custom_loop:
        for batch in run.epoch(0):
            run.step(batch)
        return
    for batch in run.microbatches(0):
        run.model.zero_grad()
        run.backward(loss(run.model, batch))
        optimizer.step()


def owned(run: tutti.Run) -> list[Any]:
    """What the objects have of their own that a profile puts names around."""
    named = {"_draw", "begin_worker", "end_worker", "reduce_gradients", "optimizer_step", "forward"}
    found = [sorted(named & vars(owner).keys()) for owner in (run, run.gradient_sync, run.model)]
    return [*found, torch.autograd.backward, run.loss_fn]


def profiled(strategy: str, custom_loop: bool, folder: str | None) -> Any:
    run, optimizer = prepared(strategy, custom_loop)
    before = owned(run)
    if folder is None:
        train(run, optimizer, custom_loop)
    else:
        with run.profile(Path(folder) / "deep"):
            train(run, optimizer, custom_loop)
        assert owned(run) == before
    return run.weights_sha256()


def names(file: Path) -> Counter[str]:
    events = json.loads(file.read_text())["traceEvents"]
    return Counter(event["name"] for event in events if event.get("cat") == "user_annotation")


@pytest.mark.parametrize(
    ("strategy", "devices", "custom_loop"),
    [("single", 1, False), ("mirrored", 3, False), ("mirrored", 2, True), ("model_parallel", 3, False)],
)
def test_every_rank_has_a_trace_with_the_phases(strategy: str, devices: int, custom_loop: bool, tmp_path: Path) -> None:
    case = {"strategy": strategy, "custom_loop": custom_loop}
    want = worlds.run(devices, profiled, folder=None, **case)
    assert worlds.run(devices, profiled, folder=str(tmp_path), **case) == want
    traces = {f"rank{rank}.json" for rank in range(devices)}
    assert {path.name for path in (tmp_path / "deep").iterdir()} == traces | {TABLE}
    for trace in traces:
        found = names(tmp_path / "deep" / trace)
        # The end of an epoch is asked for like a batch.
        assert (found["data"], found["update"]) == (BATCHES + 1, BATCHES)
        # Weights' gradients are told apart from backward by zero_bubble alone.
        assert all(found[phase] for phase in PHASES if phase != "weight")
    text = (tmp_path / "deep" / TABLE).read_text()
    assert text.startswith(f"{BATCHES} steps on rank 0\ndata ")
    assert "ms a step" in text and "aten::" in text and "Self CPU" in text


def windowed(folder: str, first: int, steps: int) -> list[int]:
    """In which steps of a run that has taken one the phases have names."""
    run, _ = prepared("mirrored")
    run.step(next(run.epoch(0)))
    window, named = Window(run, profile_of, Path(folder), TABLE, first, steps), []
    window.look()
    for batch in run.epoch(0, 1):
        if "_draw" in vars(run):
            named.append(run.global_step)
        run.step(batch)
        window.look()
    window.close()
    assert "_draw" not in vars(run)
    table = window.table()
    assert ("of an earlier start" not in table) and ("the run ended before" in table) != bool(named)
    return named


@pytest.mark.parametrize(("first", "steps", "named"), [(1, 1, [1]), (2, 2, [2, 3]), (2, 9, [2, 3]), (9, 1, [])])
def test_a_window_is_counted_from_where_the_run_is(first: int, steps: int, named: list[int], tmp_path: Path) -> None:
    (tmp_path / TABLE).write_text("of an earlier start\n")
    assert worlds.run(1, windowed, folder=str(tmp_path), first=first, steps=steps) == [named]
    assert (tmp_path / "rank0.json").exists() == bool(named)
    if named:
        # A batch that is under way when it begins was drawn before.
        assert names(tmp_path / "rank0.json")["update"] == len(named)


def into_a_file(place: str) -> str:
    run, _ = prepared("single")
    try:
        with run.profile(Path(place) / "inside"):
            run.step(next(run.epoch(0)))
    except DiskError as error:
        return str(error)
    return ""


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    [said] = worlds.run(1, into_a_file, place=str(tmp_path / "file"))
    assert said.startswith("cannot write the profile") and "Not a directory" in said


def failing() -> bool:
    run, _ = prepared("single")
    before = owned(run)
    try:
        with phases(run):
            raise ValueError
    except ValueError:
        return owned(run) == before


def test_names_are_taken_away_after_an_error() -> None:
    assert worlds.run(1, failing) == [True]


class Averages(list[Any]):
    """Averages of a profile on an accelerator, where each phase is there for the host and for its kernels."""

    def table(self, **_: object) -> str:
        return " ".join(event.key for event in self)


def test_a_phase_has_the_hosts_time_beside_that_of_its_kernels() -> None:
    rows = [("forward", 8000.0), ("aten::mm", 5000.0), ("forward", 0.0)]
    found = Averages(SimpleNamespace(key=key, cpu_time_total=time) for key, time in rows)
    profiler: Any = SimpleNamespace(key_averages=lambda: found)
    said = _table(profiler, 4, "self_device_time_total")
    assert said.splitlines()[1].split()[:2] == ["forward", "2.000"] and said.strip().endswith("aten::mm")
