"""Under torchrun, mpirun and srun the same command joins the processes that are there, and trains the same weights."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from tests.launching import SAFETY_NET, SOURCE

TRAIN = ["train", "digits", "--workers", "2", "--steps", "4", "--batch-size", "32", "--reproducible", "--json"]
TUTTI = [sys.executable, "-m", "tutti", *TRAIN, "--device", "cpu"]
FOREIGN = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "MASTER_", "TUTTI_", "SLURM_", "OMPI_", "PMI", "HOROVOD_")


def environment(**more: str) -> dict[str, str]:
    """Nothing of a job that the tests themselves may run in."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
    return clean | {"PYTHONPATH": str(SOURCE), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"} | more


def start(command: list[str], folder: Path, **more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command, cwd=folder, env=environment(**more), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finished(process: subprocess.Popen[str]) -> str:
    try:
        out, err = process.communicate(timeout=SAFETY_NET)
    finally:
        process.kill()
    assert process.returncode == 0, err
    return out


def summary(out: str) -> dict[str, Any]:
    """The one summary that rank 0 printed: whoever else printed one made two."""
    found: dict[str, Any] = json.loads(out)
    return found


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("launched")
    return summary(finished(start([*TUTTI, "--devices", "2"], folder)))


def check(joined: dict[str, Any], launched: dict[str, Any], folder: Path) -> None:
    assert launched["devices"] == joined["devices"] == 2
    assert joined["weights_sha256"] == launched["weights_sha256"]
    assert joined["exit_code"] == 0
    assert len(list(folder.glob("runs/*/summary.json"))) == 1


def test_torchrun(launched: dict[str, Any], tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    check(summary(finished(start([*torchrun, *TUTTI[1:]], tmp_path))), launched, tmp_path)


def test_slurm(launched: dict[str, Any], tmp_path: Path) -> None:
    """Two processes with the variables that srun sets on one host of two tasks."""
    step = {
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_STEP_NODELIST": socket.gethostname(),
        "SLURM_NODEID": "0",
    }
    ranks = [start(TUTTI, tmp_path, **step, SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank)) for rank in range(2)]
    try:
        first, second = (finished(rank) for rank in ranks)
    finally:
        for rank in ranks:
            rank.kill()
    check(summary(first), launched, tmp_path)
    assert second == ""


@lru_cache(maxsize=1)
def has_open_mpi() -> bool:
    if shutil.which("mpirun") is None:
        return False
    version = subprocess.run(["mpirun", "--version"], capture_output=True, text=True).stdout
    return "Open MPI" in version or "OpenRTE" in version


@pytest.mark.skipif(not has_open_mpi(), reason="there is no mpirun of Open MPI")
def test_open_mpi(launched: dict[str, Any], tmp_path: Path) -> None:
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    process = start(["mpirun", "--oversubscribe", "-np", "2", *TUTTI], tmp_path, **root)
    check(summary(finished(process)), launched, tmp_path)


def test_a_number_of_devices_that_the_job_has_not_is_refused(tmp_path: Path) -> None:
    job = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    process = start([*TUTTI, "--devices", "3"], tmp_path, **job)
    _, err = process.communicate(timeout=SAFETY_NET)
    assert process.returncode == 2
    assert "this job was started with 2 processes" in err
