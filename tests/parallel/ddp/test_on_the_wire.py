"""Bytes that really travel: counted by the system on the loopback interface of a network of the run's own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.commands import write_task
from tests.launching import SAFETY_NET, SOURCE

# 0.6 MB of parameters, so that what is said beside them is little.
LARGE = """
def model():
    return nn.Sequential(nn.Linear(4, 20_000), nn.Tanh(), nn.Linear(20_000, 3))
"""
# A network of its own: each strategy is run for two lengths, whose difference has nothing of start and end.
COUNTED = """
import json, subprocess, sys
strategies, lengths, words = json.loads(sys.argv[1])
if subprocess.run(["ip", "link", "set", "lo", "up"]).returncode:
    sys.exit(77)

def received():
    lines = open("/proc/net/dev").read().splitlines()
    return int(next(line for line in lines if line.strip().startswith("lo:")).split()[1])

found = []
for strategy in strategies:
    totals = []
    for steps in lengths:
        before = received()
        command = [sys.executable, "-m", "tutti", *words, "--strategy", strategy, "--steps", str(steps)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            sys.exit(done.stderr)
        totals.append(received() - before)
    found.append((totals[1] - totals[0]) / (lengths[1] - lengths[0]))
print(json.dumps(found))
"""
OPTIONS = (
    *("train", "own.py:task", "--devices", "3", "--batch-size", "12", "--out", "out", "--overwrite"),
    *("--eval-every", "none", "--checkpoint-every", "none"),
)


@pytest.mark.full
def test_workers_that_meet_every_eighth_step_send_an_eighth(tmp_path: Path) -> None:
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        pytest.skip("there is no unshare or no ip")
    write_task(tmp_path, LARGE)
    strategies = ["mirrored:algorithm=native", "local_sgd:period=8", "diloco:period=8"]
    asked = json.dumps([strategies, [8, 40], OPTIONS])
    command = ["unshare", "--net", sys.executable, "-c", COUNTED, asked]
    environ = os.environ | {"PYTHONPATH": str(SOURCE)}
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=SAFETY_NET)
    if done.returncode == 77 or "unshare failed" in done.stderr:
        pytest.skip("a network of one's own needs root")
    assert done.returncode == 0, done.stderr
    parallel, *rare = json.loads(done.stdout)
    for bytes_ in rare:
        assert bytes_ / parallel == pytest.approx(1 / 8, rel=0.2), (bytes_, parallel)
