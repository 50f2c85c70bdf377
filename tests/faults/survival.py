"""Runs that are interrupted and go on (faults 1, 3 and 4): what they train, and what they must come to.

Fifty samples in batches of fourteen over five workers, two at a time, on three or four devices: nothing divides. A
fault is played by the task itself, at a step that a test draws, so that it strikes there however slow the machine is.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.faults.commands import starting, write_task

STEPS, EVERY, WORKERS = 40, 10, 5
TASK = """
import json, threading
from tutti.train.run import Run

FAULT = json.loads(os.environ.get("FAULT", "{}"))
FIRST = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
BEGAN, STEP, CALL, ARMED, HELD = None, 0, 0, None, False

class Samples(Samples):
    def __len__(self):
        return 50

def step(self, batch, real=Run.step):
    global BEGAN, STEP, CALL, ARMED
    STEP, CALL = self.global_step, 0
    if BEGAN is None:
        BEGAN, ARMED = STEP, signal.getsignal(signal.SIGTERM)
        mark("began")
    return real(self, batch)

Run.step = step

def mark(name):
    with open(os.path.join(HERE, f"{name}-{RANK}"), "w") as file:
        file.write(str(time.time()))

def kill():
    "First one rank, soon after the step begins; then, in the second attempt, wait to be killed."
    if FIRST and RANK == FAULT["rank"]:
        if STEP == FAULT["step"] and CALL == 0:
            threading.Timer(FAULT["delay"], die).start()
        if STEP == FAULT["step"] + 6:
            die()
    if not FIRST and STEP == BEGAN + FAULT["later"]:
        mark("later")
    while not FIRST and STEP == BEGAN + FAULT["later"] + 6:
        time.sleep(1)

def freeze():
    if FIRST and RANK == FAULT["rank"] and STEP == FAULT["step"] and CALL == 0:
        mark("frozen")
        os.kill(os.getpid(), signal.SIGSTOP)

def die():
    mark("killed")
    os.kill(os.getpid(), signal.SIGKILL)

def stop():
    "Wait in the middle of a step until this rank is asked to stop."
    if FAULT["when"] == "step" and RANK == FAULT["rank"] and STEP >= FAULT["step"] and CALL == FAULT["call"]:
        hold()

def hold():
    global HELD
    if not HELD:
        HELD = True
        mark("holding")
        while not asked():
            time.sleep(0.005)

def asked():
    return ARMED is not None and signal.getsignal(signal.SIGTERM) is not ARMED

def fsync(descriptor, real=os.fsync):
    "Wait in the middle of a save until this rank is asked to stop, or for ever when it was."
    if FAULT["when"] == "save" and RANK == FAULT["rank"] and BEGAN is not None:
        hold()
    if FAULT["when"] == "again" and asked():
        mark("saving")
        time.sleep(600)
    real(descriptor)

if FAULT.get("kind") == "stop":
    os.fsync = fsync

def loss(model, batch):
    global CALL
    if FAULT:
        globals()[FAULT["kind"]]()
        time.sleep(0.004)
    CALL += 1
    inputs, labels = batch
    return nn.functional.cross_entropy(model(inputs), labels)
"""
_OPTIONS = (
    *("--workers", str(WORKERS), "--batch-size", "14", "--steps", str(STEPS), "--optimizer", "adam:lr=0.01"),
    *("--checkpoint-every", f"{EVERY}st", "--eval-every", "none", "--log-every", "1", "--out", "out"),
    *("--micro-batch", "2", "--timeout", "60"),
)


@dataclass(frozen=True)
class Member:
    """One way of sharing the work, and whether it is bit-identical on any number of devices."""

    name: str
    strategy: str
    anywhere: bool = False

    def __str__(self) -> str:
        return self.name

    def devices(self, seed: int) -> int:
        """Three or four, in turn over seeds and members."""
        return {"single": 1, "hybrid": 4}.get(self.name, 3 + (seed + MEMBERS.index(self)) % 2)

    def words(self, devices: int, *more: str) -> tuple[str, ...]:
        exact = ("--reproducible",) if self.anywhere else ("--threads", "1")
        where = ("--strategy", self.strategy, "--devices", str(devices))
        return ("train", "own.py:task", *_OPTIONS, *exact, *where, *more)


MEMBERS = (
    Member("single", "single"),
    Member("mirrored", "mirrored"),
    Member("native", "mirrored:algorithm=native"),
    Member("reproducible", "mirrored", anywhere=True),
    Member("model_parallel", "model_parallel"),
    Member("local_sgd", "local_sgd:period=4", anywhere=True),
    Member("central_storage", "central_storage"),
    Member("diloco", "diloco:period=4", anywhere=True),
    Member("sharded", "sharded"),
    Member("zero1", "sharded:stage=1"),
    Member("pipeline", "pipeline"),
    Member("tensor", "tensor"),
    Member("hybrid", "hybrid:stages=2"),
    Member("parameter_server", "parameter_server:servers=2"),
)


@dataclass(frozen=True)
class End:
    """What a finished run came to."""

    digest: str
    losses: dict[int, float]
    means: dict[str, float]


def end(folder: Path) -> End:
    """From the run's files; every step must be there once."""
    summary = json.loads((folder / "out" / "summary.json").read_text())
    assert (summary["steps"], summary["exit_code"]) == (STEPS, 0)
    steps = [record for record in metrics(folder) if record["group"] == "train"]
    assert [record["step"] for record in steps] == list(range(1, STEPS + 1))
    return End(summary["weights_sha256"], {r["step"]: r["loss"] for r in steps}, summary["train"])


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]


def uninterrupted(member: Member, devices: int, kept: Path) -> End:
    """What the run comes to when nothing happens to it; once for all of pytest's processes, which share ``kept``."""
    if member.anywhere:
        member, devices = Member(f"{member}-alone", member.strategy.replace("mirrored", "single"), anywhere=True), 1
    folder = kept / f"{member}-{devices}"
    with kept.joinpath(f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            folder.mkdir()
            write_task(folder, TASK)
            with starting(folder, *member.words(devices)) as running:
                result = running.finish()
                assert result.code == 0, result.err
    return end(folder)


def resumed(folder: Path, member: Member, devices: int) -> tuple[End, list[int]]:
    """Continue the run in ``folder`` to its end: what it came to, and the steps that it printed."""
    with starting(folder, *member.words(devices, "--resume", "out")) as running:
        result = running.finish()
    assert result.code == 0, result.err
    return end(folder), printed(result.err)


def largest_difference(a: End, b: End) -> float:
    """max|Δloss| over all steps."""
    return max(abs(a.losses[step] - b.losses[step]) for step in a.losses)


def printed(text: str) -> list[int]:
    """The steps whose lines are in what a run printed."""
    return [int(step) for step in re.findall(r"^train +(\d+) ", text, re.MULTILINE)]


def saved(folder: Path) -> list[int]:
    """Steps of the complete checkpoints."""
    paths = (folder / "out" / "checkpoints").glob("step-????????/manifest.json")
    return sorted(int(path.parent.name.removeprefix("step-")) for path in paths)


def when(folder: Path, name: str) -> float:
    """The time that a task has left under ``name``."""
    return float((folder / name).read_text())


def marked(folder: Path, name: str) -> int:
    """How many ranks have left a time under ``name``."""
    return sum(file.name.startswith(f"{name}-") and bool(file.stat().st_size) for file in os.scandir(folder))
