"""Runs with parameter servers under fire: the server is killed, a worker is stopped, and nothing stays behind."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.forkserver import Process
from tests.launching import SAFETY_NET, alive, status, until
from tutti.errors import PeerError

pytestmark = [pytest.mark.faults]


def ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


_TRAIN = """
import os, signal, sys, time
import torch, tutti
sys.path.insert(0, sys.argv[4])
from tests.contract.models import loss, model, samples
tutti.init("cpu", timeout=20)
mode, kill, stop = sys.argv[1], int(sys.argv[2]), int(sys.argv[5])
run = tutti.prepare(model(), "sgd:lr=0.02", samples(), loss, strategy=mode, workers=3, batch_size=24, precision="fp64")
with open(f"{sys.argv[3]}/pid{tutti.rank()}", "w") as file:
    file.write(str(os.getpid()))
epoch = 0
while run.global_step < 60:
    for batch in run.epoch(epoch):
        run.step(batch)
        with open(f"{sys.argv[3]}/{tutti.rank()}", "w") as file:
            file.write(str(run.global_step))
        time.sleep(0.02)
        if tutti.rank() == 2 and run.global_step == stop:
            os.kill(os.getpid(), signal.SIGSTOP)
        pids = run.gradient_sync._link.pids()
        if tutti.rank() == 0 and run.global_step == kill and pids:
            print("server", pids[0], flush=True)
            os.kill(pids[0], signal.SIGKILL)
        if run.global_step == 60:
            break
    epoch += 1
print("weights", run.weights_sha256(), flush=True)
tutti.shutdown()
"""


def run_of_three(folder: Path, mode: str, kill: int = -1, stop: int = -1) -> Process:
    """Three ranks under our launcher. Rank 0 kills a server after step ``kill``, and rank 2 stops after ``stop``."""
    script = folder / "train.py"
    script.write_text(_TRAIN)
    words = [str(script), mode, str(kill), str(folder), str(Path(__file__).parents[2]), str(stop)]
    return Process(["-m", "tutti", "run", "-np", "3", *words], folder, os.environ)


def clock_of(folder: Path, rank: int) -> int:
    try:
        return int((folder / str(rank)).read_text() or 0)
    except OSError:
        return 0


@pytest.mark.row(7)
def test_a_run_outlives_its_server(seed: int, tmp_path: Path) -> None:
    running = run_of_three(tmp_path, "parameter_server:mode=async,snapshot=5", kill=10 + seed)
    out, err = running.communicate(timeout=SAFETY_NET)
    assert running.returncode == 0, err
    assert "server" in out and "weights" in out


@pytest.mark.row(7)
def test_a_synchronous_run_ends_with_its_server_and_says_so(seed: int, tmp_path: Path) -> None:
    running = run_of_three(tmp_path, "parameter_server", kill=10 + seed)
    out, err = running.communicate(timeout=SAFETY_NET)
    assert running.returncode == PeerError.exit_code, err
    assert "parameter server 0 was killed by signal 9" in err and "--resume" in err
    assert ended(int(out.split()[1]))


@pytest.mark.row(5)
@pytest.mark.parametrize(("mode", "most"), [("mode=async", None), ("mode=bounded,staleness=2", 2)])
def test_others_go_on_beside_a_stopped_worker(
    mode: str, most: int | None, seed: int, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    stopped = 12 + seed
    running = run_of_three(tmp_path, f"parameter_server:{mode}", stop=stopped)
    try:
        until(lambda: clock_of(tmp_path, 2) == stopped or running.poll() is not None)
        victim = int((tmp_path / "pid2").read_text())
        until(lambda: status(psutil.Process(victim)) == psutil.STATUS_STOPPED)
        lead, end = 0, time.monotonic() + (2 if most is not None else 60)
        while lead < 10 and time.monotonic() < end:
            time.sleep(0.05)
            lead = max(clock_of(tmp_path, rank) for rank in range(2)) - stopped
        os.kill(victim, signal.SIGCONT)
        _, err = running.communicate(timeout=SAFETY_NET)
        assert running.returncode == 0, err
        record_property("lead over a stopped worker, steps", lead)
        assert lead >= 10 if most is None else lead <= most + 1
    finally:
        running.kill()
        running.wait()


@pytest.mark.row(3)
@pytest.mark.parametrize("victim", ["rank 0", "launcher"])
def test_no_server_stays_when_a_rank_or_the_launcher_is_killed(victim: str, tmp_path: Path) -> None:
    running = run_of_three(tmp_path, "parameter_server:mode=async,servers=2")
    until(lambda: clock_of(tmp_path, 0) >= 5 or running.poll() is not None)
    family = psutil.Process(running.pid).children(recursive=True)
    rank0 = psutil.Process(int((tmp_path / "pid0").read_text()))
    servers = rank0.children(recursive=True)
    assert len(servers) >= 3
    os.kill(rank0.pid if victim == "rank 0" else running.pid, signal.SIGKILL)
    running.wait(SAFETY_NET)
    until(lambda: not alive(family))
