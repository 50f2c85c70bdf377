"""Whole runs on the simulated accelerator: profile, trace, a killed process, and the watchdog."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.commands import write_task
from tests.forkserver import run
from tests.simulated_accelerator import build

pytestmark = pytest.mark.timeout(600)


def command(folder: Path, *words: str, code: int = 0) -> str:
    """Run ``tutti`` with two simulated devices; return its stderr. Fails where it does not exit with ``code``."""
    done = run(["-m", "tutti", *words], folder, {**os.environ, **build.environment(2)}, 240)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stderr


def weights(folder: Path) -> str:
    return str(json.loads((folder / "summary.json").read_text("utf-8"))["weights_sha256"])


def test_profile_and_trace_change_nothing_and_see_the_device(tmp_path: Path) -> None:
    build.require()
    words = ["train", "digits", "--devices", "2", "--steps", "6", "--seed", "3"]
    done = run(["-m", "tutti", *words, "--device", "cpu", "--out", "cpu"], tmp_path, os.environ, 240)
    assert done.returncode == 0, done.stderr
    command(tmp_path, *words, "--device", build.DEVICE, "--profile", "2:2", "--trace", "2:2", "--out", "device")
    assert weights(tmp_path / "device") == weights(tmp_path / "cpu")
    assert sorted((tmp_path / "device").glob("trace*")) and sorted((tmp_path / "device").glob("profile*"))


@pytest.mark.full
def test_a_killed_process_on_the_device_is_survived(tmp_path: Path) -> None:
    build.require()
    words = ["train", "digits", "--device", build.DEVICE, "--devices", "2", "--steps", "60"]
    command(tmp_path, "chaos", "kill", "--verify", "--", *words, "--out", "run")


STUCK = """
STEP = 0

def loss(model, batch):
    global STEP
    STEP += torch.is_grad_enabled()
    inputs, labels = batch
    if RANK == 1 and STEP == 4:
        # A collective on the device that no other rank enters.
        torch.distributed.all_reduce(torch.ones(1, device=inputs.device))
    return nn.functional.cross_entropy(model(inputs), labels)
"""


def test_a_rank_that_hangs_in_a_collective_on_the_device_is_named(tmp_path: Path) -> None:
    build.require()
    own = write_task(tmp_path, STUCK)
    words = ["train", own, "--device", build.DEVICE, "--devices", "2", "--steps", "9", "--batch-size", "12"]
    said = command(tmp_path, *words, "--step-timeout", "5", "--timeout", "60", "--out", "out", code=5)
    found = re.search(r"tutti: rank (\d) made no progress for \d+ s in step (\d) \(phase (\w+)\), in (\w+)", said)
    assert found is not None and found.groups()[:3] == ("1", "4", "compute"), said
    assert 'own.py", line' in said and "in all_reduce" in said and said.count("tutti: rank") == 1


LAUNCHED = """
import sys
import torch
import tutti

first = torch.ones(2, device="simgpu" if "device" in sys.argv else "cpu", requires_grad="backward" in sys.argv)
if "backward" in sys.argv:
    (first * 2).sum().backward()

def train():
    model = torch.nn.Linear(3, 2)
    data = torch.ones(8, 3), torch.zeros(8, dtype=torch.long)
    loss = lambda net, batch: torch.nn.functional.cross_entropy(net(batch[0]), batch[1])
    run = tutti.prepare(model, "sgd:lr=0.1", data, loss, batch_size=4)
    return [run.step(batch) for batch in run.epoch(0)] and str(next(run.model.parameters()).device)

print(tutti.launch(train, devices=2))
"""


@pytest.mark.parametrize(
    ("done", "words"),
    [
        ([], ""),
        (["device"], "has used the SIMGPU driver, which does not work in a forked process"),
        (["backward"], "a backward in this process has started the threads of autograd"),
    ],
)
def test_ranks_are_forked_from_a_process_that_has_not_computed(done: list[str], words: str, tmp_path: Path) -> None:
    """By a Python of its own, which finds the device as it imports torch."""
    build.require()
    (tmp_path / "script.py").write_text(LAUNCHED, encoding="utf-8")
    environ = {**os.environ, **build.environment(2)}
    ended = subprocess.run(
        [sys.executable, "script.py", *done], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=240
    )
    if words:
        assert ended.returncode and words in ended.stderr and "Call tutti.launch first" in ended.stderr, ended.stderr
    else:
        assert ended.stdout.splitlines()[-1] == "['simgpu:0', 'simgpu:1']", ended.stdout + ended.stderr
