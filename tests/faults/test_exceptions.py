"""Fault 28: one rank fails. The first cause is what the user reads, with its rank; the exit code says of what kind."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from tests.faults.commands import complaint, tutti, write_task
from tests.launching import Result

pytestmark = [pytest.mark.faults, pytest.mark.row(28)]

FLAGS = ("--batch-size", "12", "--epochs", "40", "--out", "out", "--eval-every", "none")
STRATEGIES = [
    "mirrored",
    "mirrored:algorithm=native",
    "model_parallel",
    "local_sgd",
    "central_storage",
    "pipeline",
    "sharded",
]

# In the loss or in the data of one rank, in one step: what goes wrong is put in for {action}.
FAULT = """
STEP = 0

def fail():
    {action}

def loss(model, batch):
    global STEP
    # Rank 0 looks at the first losses before it trains, and lets no error of that look end the run.
    STEP += torch.is_grad_enabled()
    inputs, labels = batch
    if {place!r} == "loss" and RANK == {rank} and STEP == {step} and torch.is_grad_enabled():
        fail()
    return nn.functional.cross_entropy(model(inputs), labels)

class Samples(Samples):
    def __getitem__(self, index):
        if {place!r} == "data" and RANK == {rank} and STEP >= {step}:
            fail()
        return super().__getitem__(index)
"""


def train(
    folder: Path, strategy: str, devices: int, action: str, rank: int, step: int, place: str, *more: str
) -> Result:
    own = write_task(folder, FAULT.format(action=action, rank=rank, step=step, place=place))
    words = ("--strategy", strategy, "--devices", str(devices), *FLAGS, *(more or ("--timeout", "20")))
    result = tutti(folder, "train", own, *words)
    assert json.loads((folder / "out" / "summary.json").read_text())["exit_code"] == result.code
    return result


KINDS = [
    ("loss", "raise ValueError('the first cause')", 1, "ValueError: the first cause"),
    ("data", "raise OSError(5, 'Input/output error')", 3, "DataError: cannot read sample"),
    ("data", "raise ZeroDivisionError('in an item')", 1, "ZeroDivisionError: in an item"),
    ("loss", "raise OSError(28, 'No space left on device')", 8, "No space left on device"),
    ("loss", "raise MemoryError('too large')", 2, "there is not enough memory"),
    ("loss", "sys.exit(9)", 9, "exited with code 9"),
]


@pytest.mark.parametrize(("place", "action", "code", "said"), KINDS, ids=[action for _, action, _, _ in KINDS])
def test_an_exception_of_one_rank(place: str, action: str, code: int, said: str, tmp_path: Path, seed: int) -> None:
    draw = random.Random(f"{action} {seed}")
    devices = draw.choice([3, 4])
    strategy = STRATEGIES[(seed + KINDS.index((place, action, code, said))) % len(STRATEGIES)]
    # The data of a batch are read by every stage; the loss after the model's call only by the last one.
    rank, step = draw.randrange(devices), draw.randrange(2, 9)
    result = train(tmp_path, strategy, devices, action, rank, step, place)
    assert result.code == code, result.err
    first = complaint(result)[0]
    assert first.startswith(f"tutti: rank {rank} ") and said in first, result.err
    assert result.err.count("tutti: rank") == 1, "what followed from it is told, too"


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", ["SIGKILL", "SIGSEGV"])
def test_a_killed_rank_is_named(strategy: str, name: str, tmp_path: Path, seed: int) -> None:
    draw = random.Random(f"{strategy} {name} {seed}")
    devices = draw.choice([3, 4])
    rank, step = draw.randrange(devices), draw.randrange(2, 9)
    result = train(tmp_path, strategy, devices, f"os.kill(os.getpid(), signal.{name})", rank, step, "loss")
    assert result.code == 5, result.err
    assert complaint(result)[0].startswith(f"tutti: rank {rank} was killed by {name}"), result.err
    assert result.err.count("tutti: rank") == 1


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_stopped_rank_is_named_by_those_that_wait_for_it(strategy: str, tmp_path: Path, seed: int) -> None:
    """Without a watchdog's help."""
    draw = random.Random(f"{strategy} {seed}")
    devices = draw.choice([3, 4])
    rank, step = draw.randrange(devices), draw.randrange(2, 9)
    stop = "os.kill(os.getpid(), signal.SIGSTOP)"
    result = train(tmp_path, strategy, devices, stop, rank, step, "loss", "--timeout", "5", "--step-timeout", "0")
    assert result.code == 5, result.err
    first = complaint(result)[0]
    assert f"missing: rank {rank}" in first and "within 5 s" in first, result.err
    assert not first.startswith(f"tutti: rank {rank} ")
    assert "Traceback" not in result.err


RESET = """import socket
    for number in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(number))) as line:
                if line.family in (socket.AF_INET, socket.AF_INET6) and line.getpeername():
                    line.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass"""


@pytest.mark.row(10)
@pytest.mark.parametrize("strategy", ["mirrored:algorithm=native", "pipeline"])
def test_a_rank_whose_connections_are_reset_hangs_nobody(strategy: str, tmp_path: Path, seed: int) -> None:
    """As by a router between hosts: every process lives, and no message comes through."""
    draw = random.Random(f"reset {strategy} {seed}")
    devices = draw.choice([3, 4])
    rank, step = draw.randrange(devices), draw.randrange(2, 9)
    result = train(tmp_path, strategy, devices, RESET, rank, step, "loss", "--timeout", "60")
    assert result.code == 5, result.err
    assert "the network broke" in complaint(result)[0], result.err
    assert "Traceback" not in result.err
