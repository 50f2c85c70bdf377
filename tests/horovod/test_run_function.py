"""``horovod.run`` calls a function in ranks of this machine; what a call cannot start is refused with the way out."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

import tutti.horovod
from tests.architecture.sources import ROOT
from tests.forkserver import run
from tutti.errors import UsageError

SCRIPT = """
import os
import horovod
import horovod.torch as hvd
import torch

def main(factor, devices):
    told = [int(os.environ[name]) for name in ("HOROVOD_RANK", "HOROVOD_SIZE")]
    hvd.init()
    assert told == [hvd.rank(), hvd.size()]
    total = hvd.allreduce(torch.tensor([float(hvd.rank() + 1)]), op=hvd.Sum, name="x")
    return hvd.rank(), hvd.size(), factor * total.item(), devices

print("answers", horovod.run(main, args=(2,), kwargs={"devices": "mine"}, np=3, hosts="localhost:3", use_gloo=True))
"""


# Rank 1 is killed, and the rank that takes its place knows the function and its argument, too.
ELASTIC = """
import os, pathlib, signal, time
import horovod
import horovod.torch as hvd
import torch

def main(step, failing):
    hvd.init()
    state = hvd.elastic.ObjectState(hvd.broadcast_object, hvd.rank, steps=0)

    @hvd.elastic.run
    def train(state):
        while state.steps < 3 or hvd.size() < 2:
            hvd.allreduce(torch.ones(1), name="x")
            if failing:
                raise OverflowError("in the function")
            if hvd.rank() == 1 and not pathlib.Path("killed").exists():
                pathlib.Path("killed").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            state.steps += step
            time.sleep(0.02)
            state.commit()
        return hvd.rank(), hvd.size(), state.steps >= 3

    return train(state)

print("answers", horovod.run(lambda: main(1, False), num_proc=2, min_num_proc=1, cooldown_range=(0.1, 0.2)))
try:
    horovod.run(main, args=(1, True), np=2, min_np=1, reset_limit=3)
except Exception as error:
    print("failed", repr(error))
"""


def ended(folder: Path, script: str) -> subprocess.CompletedProcess[str]:
    """The end of a script that calls ``horovod.run``."""
    (folder / "script.py").write_text(script)
    environ = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}"}
    return run(["-m", "tutti.horovod", "script.py"], folder, environ, 200)


def test_a_function_is_called_in_every_rank(tmp_path: Path) -> None:
    done = ended(tmp_path, SCRIPT)
    want = [(rank, 3, 12.0, "mine") for rank in range(3)]
    assert f"answers {want}" in done.stdout, done.stderr
    assert "without effect: use_gloo" in done.stderr


def test_ranks_of_a_function_are_replaced(tmp_path: Path) -> None:
    done = ended(tmp_path, ELASTIC)
    assert "answers [(0, 2, True), (1, 2, True)]" in done.stdout, done.stderr
    assert "failed OverflowError('in the function')" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"min_np": 1, "max_np": 3}, "Give host_discovery_script"),
        ({"min_np": 3}, "--min-np 3, -np 2"),
        ({"hosts": "localhost:1,far:1"}, "-H localhost:1,far:1"),
        ({"hosts": "localhost:1"}, "hosts='localhost:2'"),
        ({"hostfile": "hosts"}, "hosts=.localhost:2."),
    ],
)
def test_a_call_that_cannot_start_the_ranks_names_the_command(
    given: dict[str, object], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("hosts").write_text("localhost slots=1\n")
    with pytest.raises(UsageError, match=text):
        tutti.horovod.run(print, np=2, **given)  # type: ignore[arg-type]


def test_a_parameter_that_horovod_does_not_have_is_refused() -> None:
    with pytest.raises(TypeError, match="'num_procs'"):
        tutti.horovod.run(print, num_procs=2)
    with pytest.raises(TypeError, match="positional"):
        tutti.horovod.run(print, (), None, 2, 1)  # type: ignore[misc]
