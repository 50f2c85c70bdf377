"""Faults 5 and 6: a rank that makes no progress is named with its step and phase and ended, a slow one left alone."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest

from tests.faults.commands import complaint, starting, tutti, write_task
from tests.launching import Result

pytestmark = [pytest.mark.faults, pytest.mark.row(5)]

FLAGS = ("--batch-size", "12", "--eval-every", "none", "--out", "out", "--timeout", "60")
STRATEGIES = ["mirrored", "mirrored:algorithm=native", "model_parallel", "local_sgd", "central_storage"]

LOSS = """
STEP = 0

def loss(model, batch):
    global STEP
    # Rank 0 looks at the first losses before it trains.
    STEP += torch.is_grad_enabled()
    if RANK == {rank} and STEP == {step} and torch.is_grad_enabled():
        while True:
            pass
    inputs, labels = batch
    return nn.functional.cross_entropy(model(inputs), labels)
"""
DATA = """
import re
import threading
READ = 0

class Samples(Samples):
    def __getitem__(self, index):
        global READ
        READ += 1
        if RANK == {rank} and READ > {step} * 4:
            lock = threading.Lock()
            lock.acquire()
            lock.acquire()
        return super().__getitem__(index)
"""
SAVE = """
SYNC = os.fsync

def stuck(descriptor):
    if "rank{rank}.safetensors" in os.readlink(f"/proc/self/fd/{{descriptor}}"):
        time.sleep(600)
    SYNC(descriptor)

os.fsync = stuck
"""
MODEL = """
class Model(nn.Sequential):
    def __init__(self, *parts):
        super().__init__(*parts)
        if RANK == {rank}:
            time.sleep(600)

def model():
    return Model(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
"""
# What is stuck, the limit that is to notice, and what is said of where.
PLACES = {
    "loss": (LOSS, ("--step-timeout", "5"), r"in step {step} (phase compute), in loss (own.py, line "),
    "data": (DATA, ("--step-timeout", "5"), " (phase data), in __getitem__ (own.py, line "),
    "save": (SAVE, ("--save-timeout", "5"), "in the save of step 2 (phase save), in stuck (own.py, line "),
    "start": (MODEL, ("--start-timeout", "12"), "at the start (phase start), in __init__ (own.py, line "),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_stuck_rank_is_named_with_step_phase_and_line(place: str, tmp_path: Path, seed: int) -> None:
    body, limit, where = PLACES[place]
    draw = random.Random(f"{place} {seed}")
    devices, step = draw.choice([3, 4]), draw.randrange(3, 9)
    rank = draw.randrange(devices)
    strategy = STRATEGIES[(seed + list(PLACES).index(place)) % len(STRATEGIES)]
    own = write_task(tmp_path, body.format(rank=rank, step=step))
    words = ("--strategy", strategy, "--devices", str(devices), "--epochs", "40", "--checkpoint-every", "2st")
    result = tutti(tmp_path, "train", own, *words, *FLAGS, *limit)
    assert result.code == 5, result.err
    first, *rest = complaint(result)
    waited = re.match(rf"tutti: rank {rank} made no progress for (\d+) s ", first)
    assert waited is not None and int(waited[1]) >= int(limit[1]), result.err
    assert where.format(step=step) in first, first
    assert any('own.py", line' in line for line in rest) and "Traceback" not in result.err
    assert result.err.count("tutti: rank") == 1, "what followed from it is told, too"
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["exit_code"] == 5
    check_dumps(tmp_path / "out" / "logs", rank, rest[-1], place)


def check_dumps(logs: Path, rank: int, told: str, place: str) -> None:
    """All threads' stacks are in the log; the collectives beside it, where there had been any."""
    log, flight = logs / f"rank{rank}.log", logs / f"flight-rank{rank}.json"
    assert f"The stacks of all its threads are in {log}" in told
    assert 'own.py", line' in log.read_text()
    assert f"its last collectives in {flight}" in told
    assert "entries" in json.loads(flight.read_text()) or place == "start"
    assert not list(logs.glob("*.tmp*"))


@pytest.mark.row(6)
def test_a_slow_rank_is_never_ended(tmp_path: Path) -> None:
    """Its steps take five times as long as those of the others, which wait for it."""
    own = write_task(
        tmp_path,
        """
        def loss(model, batch):
            inputs, labels = batch
            time.sleep(0.3 if RANK == 1 else 0.06)
            return nn.functional.cross_entropy(model(inputs), labels)
        """,
    )
    words = ("--devices", "3", "--steps", "12", *FLAGS, "--step-timeout", "6")
    result = tutti(tmp_path, "train", own, *words)
    assert result.code == 0, result.err
    assert "no progress" not in result.err
    assert not list((tmp_path / "out" / "logs").glob("f*-rank*"))


@pytest.mark.row(1)
def test_a_script_of_ones_own_is_started_again(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import os, sys\nattempt = os.environ['TORCHELASTIC_RESTART_COUNT']\n"
        "print('attempt', attempt, *sys.argv[1:])\nassert attempt != '0'\n"
    )
    result = tutti(tmp_path, "run", "-np", "2", "--max-restarts", "1", "script.py", "--max-restarts", "7")
    assert (result.code, result.out) == (0, "attempt 0 --max-restarts 7\nattempt 1 --max-restarts 7\n")
    assert "AssertionError" in result.err and "restarting, 0 restarts left" in result.err


SCRIPT = """
import time

import torch
import tutti

tutti.init("cpu", timeout=60)
torch.manual_seed(0)
inputs = torch.randn(64, 4)
model = torch.nn.Linear(4, 1)


def loss(model, batch):
    if tutti.rank() == 1 and run.global_step == 5:
        time.sleep(600)
    return model(batch[0]).square().mean()


run = tutti.prepare(model, "sgd:lr=0.1", (inputs,), loss, batch_size=8)
for epoch in range(10):
    for batch in run.epoch(epoch):
        run.step(batch)
"""


@pytest.mark.parametrize("verb", ["run", pytest.param("train", marks=pytest.mark.full)])
def test_a_stuck_rank_of_a_torchrun_job(verb: str, tmp_path: Path) -> None:
    result = torchrun(tmp_path, verb)
    assert result.code != 0
    words = r"tutti: rank 1 made no progress for \d+ s in step 6 \(phase compute\), in loss \("
    assert re.search(words, result.err), result.err
    assert ", line " in result.err and "in loss" in result.err
    logs = tmp_path / "out" / "logs"
    if verb == "train":
        assert 'own.py", line' in (logs / "rank1.log").read_text()
        assert json.loads((logs / "flight-rank1.json").read_text())["entries"]
        assert f"The stacks of all its threads are in {logs / 'rank1.log'}" in result.err


def torchrun(folder: Path, verb: str) -> Result:
    (folder / "script.py").write_text(SCRIPT)
    write_task(folder, LOSS.format(rank=1, step=6))
    words = {"run": ["script.py"], "train": ["-m", "tutti", "train", "own.py:task", *FLAGS, "--step-timeout", "6"]}
    program = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *words[verb])
    with starting(folder, program=program, TUTTI_STEP_TIMEOUT="6", GLOO_SOCKET_IFNAME="lo") as running:
        return running.finish()


LOOP = """
import time

import torch
import tutti

tutti.init("cpu", timeout=60)
model = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(3)])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run = tutti.prepare(model, optimizer, torch.ones(64, 4), batch_size=8, strategy="{strategy}")
for epoch in range(10):
    for batch in run.microbatches(epoch):
        if tutti.rank() == {rank} and epoch == 0 and run.updates == 4:
            time.sleep(600)  # here
        {more}
        run.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("strategy", "more"),
    [("sharded:stage=3,units=Linear", ""), ("mirrored", "torch.distributed.all_reduce(torch.ones(1))")],
)
def test_a_rank_that_sleeps_between_two_steps_is_named(strategy: str, more: str, rank: int, tmp_path: Path) -> None:
    """The other rank waits in FSDP2's all-gather of the first layer, or in a collective of the script itself."""
    (tmp_path / "script.py").write_text(LOOP.format(strategy=strategy, more=more, rank=rank))
    line = 1 + LOOP[: LOOP.index("# here")].count("\n")
    result = tutti(tmp_path, "run", "-np", "2", "--step-timeout", "5", "script.py")
    assert result.code == 5, result.err
    where = rf"in step 5 \(phase compute\), in <module> \(script.py, line {line}\)"
    assert re.match(rf"tutti: rank {rank} made no progress for \d+ s {where}", result.err), result.err
    assert result.err.count("tutti: rank") == 1, result.err
