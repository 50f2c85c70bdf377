"""Asynchronous servers without a worker: killed anywhere, or stopped, while the other ranks train on to the end."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.faults.commands import starting, tutti, write_task
from tests.launching import Result, alive, until

pytestmark = pytest.mark.faults

STEPS, EVERY = 40, 10
BOUND = 2
# Nobody would live to see a lease of this length.
MODES = ["async", f"bounded,staleness={BOUND},lease=100000"]
TASK = """
import json
from functools import partial
from tutti.train.run import Run

FAULT = json.loads(os.environ.get("FAULT", "{}"))
FIRST = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
STEP = 0

class Samples(Samples):
    def __init__(self, count=57):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        inputs, label = super().__getitem__(index)
        inputs[0] = index
        return inputs, label

Task = partial(Task, eval=Samples(83))

def model():
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))

def step(self, batch, real=Run.step):
    global STEP
    STEP = self.local_step
    return real(self, batch)

Run.step = step

def loss(model, batch):
    inputs, labels = batch
    kind = "step" if model.training else "evaluation"
    if FIRST and FAULT.get("rank") == RANK and FAULT["in"] == kind and STEP == FAULT["step"]:
        with open(os.path.join(HERE, "victim"), "w") as file:
            file.write(str(os.getpid()))
        FAULT.clear()
        os.kill(os.getpid(), signal.SIGKILL if SIGNAL == "kill" else signal.SIGSTOP)
    if FIRST and FAULT.get("in") == kind == "step" and STEP > FAULT["step"]:
        # The others must not be done before the victim has come to its fault.
        limit = time.monotonic() + 60
        while not os.path.exists(os.path.join(HERE, "victim")) and time.monotonic() < limit:
            time.sleep(0.01)
    time.sleep(0.01 * model.training)
    total = nn.functional.cross_entropy(model(inputs / 10), labels, reduction="sum")
    return total, len(labels), {"index": inputs[:, 0].sum()}

SIGNAL = os.environ.get("SIGNAL", "kill")
"""


def words(mode: str, devices: int, *more: str, steps: int = STEPS, every: str = f"{EVERY}st") -> tuple[str, ...]:
    return (
        *("train", "own.py:task", "--strategy", f"parameter_server:mode={mode}", "--devices", str(devices)),
        *("--workers", "5", "--batch-size", "20", "--steps", str(steps), "--optimizer", "sgd:lr=0.01,momentum=0.5"),
        *("--eval-every", every, "--checkpoint-every", every, "--log-every", "1", "--threads", "1"),
        *("--timeout", "60", *more),
    )


def summary(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "out" / "summary.json").read_text())
    return found


def lines(folder: Path, group: str) -> list[dict[str, Any]]:
    """The whole lines of the metrics so far."""
    file = folder / "out" / "metrics.jsonl"
    text = file.read_text() if file.exists() else ""
    return [line for line in map(json.loads, text.splitlines(keepends=False)) if line["group"] == group]


def played(folder: Path, fault: dict[str, object], *command: str, **environ: str) -> Result:
    """A run with a fault, of which nothing is left."""
    write_task(folder, TASK)
    with starting(folder, *command, "--out", "out", FAULT=json.dumps(fault), **environ) as running:
        until(lambda: (folder / "victim").exists() or running.launcher.poll() is not None)
        family = running.workers()
        result = running.finish()
        assert alive(family) == []
    assert list((folder / "temporary").glob("tutti-*")) == []
    assert [path for process in family for path in Path("/dev/shm").glob(f"tutti-{process.pid}-*")] == []
    return result


def goes_on(folder: Path, result: Result, rank: int, devices: int, step: int, cause: str) -> None:
    """The others came to the end, every evaluation has every sample, and it is said who is missing."""
    assert result.code == 0, result.err
    assert (
        f"warning: rank {rank} {cause}" in result.err and f"after step {step}: the other ranks continue" in result.err
    )
    found = summary(folder)
    assert (found["exit_code"], found["steps"], found["devices"]) == (0, STEPS, devices)
    [lost] = found["lost_ranks"]
    assert (lost["rank"], lost["steps"]) == (rank, step) and lost["cause"].startswith(cause)
    assert [found["servers"][0]["steps"][worker] for worker in lost["workers"]] == [step] * len(lost["workers"])
    assert "staleness of updates" in (folder / "out" / "servers.svg").read_text()
    evaluated = lines(folder, "eval")
    assert [line["step"] for line in evaluated] == list(range(EVERY, STEPS + 1, EVERY))
    assert {line["index"] for line in evaluated} == {41.0}, "each sample counts once"


@pytest.mark.row(1)
@pytest.mark.parametrize("devices", [3, 4])
@pytest.mark.parametrize("mode", MODES)
def test_others_go_on_without_a_killed_worker(
    mode: str, devices: int, seed: int, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    draw = random.Random(f"{mode} {devices} {seed}")
    rank, step = draw.randrange(1, devices), draw.randrange(STEPS)
    result = played(tmp_path, {"rank": rank, "in": "step", "step": step}, *words(mode, devices))
    goes_on(tmp_path, result, rank, devices, step, "was killed by SIGKILL")
    record_property("steps of the others after a worker was killed", STEPS - step)
    # What was saved without it is whole, and any strategy goes on from it.
    again = words("sync", 2, "--resume", "out", steps=STEPS + EVERY)
    resumed = tutti(tmp_path, *again)
    assert resumed.code == 0, resumed.err
    assert summary(tmp_path)["steps"] == STEPS + EVERY


@pytest.mark.row(1)
@pytest.mark.parametrize("devices", [3, 4])
def test_others_make_the_steps_of_a_killed_worker(devices: int, seed: int, tmp_path: Path) -> None:
    draw = random.Random(f"all {devices} {seed}")
    rank, step = draw.randrange(1, devices), draw.randrange(EVERY)
    result = played(tmp_path, {"rank": rank, "in": "step", "step": step}, *words("async,steps=all", devices))
    assert result.code == 0, result.err
    assert f"warning: rank {rank} was killed by SIGKILL" in result.err and "make its steps as well" in result.err
    found = summary(tmp_path)
    steps, [lost] = found["servers"][0]["steps"], found["lost_ranks"]
    assert found["steps"] == STEPS and 5 * STEPS <= sum(steps) < 5 * STEPS + 5
    assert all(steps[worker] < STEPS for worker in lost["workers"])
    evaluated = lines(tmp_path, "eval")
    assert [line["step"] for line in evaluated] == list(range(EVERY, STEPS + 1, EVERY))
    assert {line["index"] for line in evaluated} == {41.0}, "each sample counts once"


@pytest.mark.row(4)
@pytest.mark.parametrize("devices", [3, 4])
def test_a_run_that_counts_the_steps_of_all_stops_and_goes_on(devices: int, seed: int, tmp_path: Path) -> None:
    write_task(tmp_path, TASK)
    command = words("async,steps=all", devices, "--slow", "rank=1,ms=50", "--out", "out")
    with starting(tmp_path, *command) as running:
        until(lambda: len(lines(tmp_path, "train")) > 12 + seed or running.launcher.poll() is not None)
        running.launcher.send_signal(signal.SIGTERM)
        result = running.finish()
    assert result.code == 75, result.err
    saved = max(int(path.name.removeprefix("step-")) for path in (tmp_path / "out" / "checkpoints").glob("step-*"))
    assert 0 < saved < STEPS and f"step {saved}" in result.err
    result = tutti(tmp_path, *command, "--resume", "out")
    assert result.code == 0, result.err
    assert summary(tmp_path)["steps"] == STEPS
    assert [line["step"] for line in lines(tmp_path, "eval")] == list(range(EVERY, STEPS + 1, EVERY))


@pytest.mark.row(1)
@pytest.mark.parametrize("devices", [3, 4])
def test_an_evaluation_is_whole_where_a_worker_is_killed_in_it(devices: int, seed: int, tmp_path: Path) -> None:
    draw = random.Random(f"{devices} {seed}")
    rank, step = draw.randrange(1, devices), EVERY * draw.randrange(1, STEPS // EVERY + 1)
    result = played(tmp_path, {"rank": rank, "in": "evaluation", "step": step - 1}, *words("async", devices))
    goes_on(tmp_path, result, rank, devices, step, "was killed by SIGKILL")


@pytest.mark.row(5)
@pytest.mark.parametrize("mode", MODES)
def test_a_stopped_worker_comes_back(
    mode: str, seed: int, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    write_task(tmp_path, TASK)
    fault = {"rank": 1 + seed % 3, "in": "step", "step": 10 + seed}
    command = words(mode, 4, "--out", "out", steps=150, every="none")
    with starting(tmp_path, *command, FAULT=json.dumps(fault), SIGNAL="stop") as running:
        until(lambda: (tmp_path / "victim").exists() and (tmp_path / "victim").read_text())
        lead, end = 0, time.monotonic() + (60 if mode == "async" else 2)
        while lead < 10 and time.monotonic() < end:
            time.sleep(0.05)
            lead = len(lines(tmp_path, "train")) - fault["step"]  # type: ignore[operator]
        os.kill(int((tmp_path / "victim").read_text()), signal.SIGCONT)
        result = running.finish()
    assert result.code == 0, result.err
    found = summary(tmp_path)
    assert "lost_ranks" not in found and found["servers"][0]["steps"] == [150] * 5
    record_property("lead over a stopped worker, steps", lead)
    # A step that is under way is not in the metrics yet.
    assert lead >= 10 if mode == "async" else lead <= BOUND + 1


@pytest.mark.row(5)
def test_a_worker_that_stays_stopped_is_ended_and_gone_on_without(seed: int, tmp_path: Path) -> None:
    fault = {"rank": 1 + seed % 3, "in": "step", "step": 10 + seed}
    result = played(tmp_path, fault, *words(MODES[1], 4, "--step-timeout", "5"), SIGNAL="stop")
    [lost] = summary(tmp_path)["lost_ranks"]
    # Being asked where it is wakes it, so that it may end its step.
    assert lost["steps"] - 10 - seed in (0, 1) and lost["cause"].endswith(", stopped by a signal")
    goes_on(tmp_path, result, 1 + seed % 3, 4, lost["steps"], "made no progress for ")


@pytest.mark.row(1)
def test_the_run_ends_with_rank_0(tmp_path: Path) -> None:
    result = played(tmp_path, {"rank": 0, "in": "step", "step": 20}, *words("async", 3))
    assert result.code == 5 and "tutti: rank 0 was killed by SIGKILL" in result.err


@pytest.mark.row(1)
def test_a_run_that_may_start_again_does_so_with_all_its_workers(tmp_path: Path) -> None:
    result = played(tmp_path, {"rank": 1, "in": "step", "step": 35}, *words("async", 3, "--max-restarts", "1"))
    assert result.code == 0, result.err
    assert "restarting, 0 restarts left (from step " in result.err
    assert "lost_ranks" not in summary(tmp_path) and summary(tmp_path)["steps"] == STEPS


SCRIPT = """
import os, signal
import tutti
from own import task
tutti.init("cpu")
chosen = task()
options = dict(strategy="parameter_server:mode=async", workers=5, batch_size=20)
run = tutti.prepare(chosen.model(), "sgd:lr=0.01,momentum=0.9", chosen.train, chosen.loss, **options)
epoch = 0
while run.global_step < 40:
    for batch in run.epoch(epoch):
        run.step(batch)
        if tutti.rank() == 2 and run.global_step == 20:
            os.kill(os.getpid(), signal.SIGKILL)
    epoch += 1
run.save("saved")
print("weights", run.weights_sha256(), run.evaluate(chosen.eval).metrics["index"])
assert run.optimizer_state().keys() == {f"{name}/momentum_buffer" for name, _ in run.model.named_parameters()}

def numbers(model, batch):
    if tutti.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return batch[0][:, 0]

assert run.predict(chosen.eval, numbers, batch=9).tolist() == list(range(83))
print("predicted without", *sorted(run.context.comms.world.lost_ranks()))
"""


@pytest.mark.row(1)
def test_a_script_goes_on_without_a_killed_worker(tmp_path: Path) -> None:
    write_task(tmp_path, TASK)
    (tmp_path / "script.py").write_text(SCRIPT)
    result = tutti(tmp_path, "run", "-np", "4", "script.py")
    assert result.code == 0, result.err
    assert "weights" in result.out and "41.0" in result.out and "predicted without 1 2" in result.out, result.out
    assert (
        "tutti: rank 2 was killed by SIGKILL" in result.err and "after step 20: the other ranks continue" in result.err
    )
