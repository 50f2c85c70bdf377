"""Under torchrun, mpirun and srun the same command joins the processes that are there, and trains the same weights."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from tests.forkserver import Process, run
from tests.launching import SAFETY_NET, SOURCE, free_port

TRAIN = ["train", "linear", "--workers", "2", "--steps", "4", "--batch-size", "32", "--reproducible", "--json"]
TUTTI = [sys.executable, "-m", "tutti", *TRAIN, "--device", "cpu"]
FOREIGN = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "MASTER_", "TUTTI_", "SLURM_", "OMPI_", "PMI", "HOROVOD_")
FOREIGN += ("MPI_", "PALS_", "FLUX_", "MV2_", "JSM_")


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


def played(told: list[dict[str, str]], folder: Path, *words: str) -> list[str]:
    """What the ranks print of a run whose launcher tells each of them these variables."""
    ranks = [Process([*TUTTI[1:], *words], folder, environment(**own)) for own in told]
    try:
        outs = [rank.communicate(SAFETY_NET) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.wait() for rank in ranks] == [0] * len(ranks), outs
    return [out for out, _ in outs]


def summary(out: str) -> dict[str, Any]:
    """The one summary that rank 0 printed: whoever else printed one made two."""
    found: dict[str, Any] = json.loads(out)
    return found


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("launched")
    return summary(*played([{}], folder, "--devices", "2"))


def check(joined: dict[str, Any], launched: dict[str, Any], folder: Path) -> None:
    assert launched["devices"] == joined["devices"] == 2
    assert joined["weights_sha256"] == launched["weights_sha256"]
    assert joined["exit_code"] == 0
    assert len(list(folder.glob("runs/*/summary.json"))) == 1


def test_torchrun(launched: dict[str, Any], tmp_path: Path) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = run([*torchrun, *TUTTI[1:]], tmp_path, environment(), SAFETY_NET)
    assert done.returncode == 0, done.stderr
    check(summary(done.stdout), launched, tmp_path)


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
    first, second = played([step | {"SLURM_PROCID": str(n), "SLURM_LOCALID": str(n)} for n in range(2)], tmp_path)
    check(summary(first), launched, tmp_path)
    assert second == ""


def test_parameter_servers_of_two_nodes_on_one_machine(launched: dict[str, Any], tmp_path: Path) -> None:
    """Nodes of a test cluster share the loopback address, at which their servers are reached too."""
    nodes = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_WORLD_SIZE": "2"}
    nodes |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    told = [nodes | {"RANK": str(rank), "GROUP_RANK": str(rank)} for rank in range(2)]
    first, _ = played(told, tmp_path, "--strategy", "parameter_server")
    check(summary(first), launched, tmp_path)


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


HYDRA = {"PMI_SIZE": "{size}", "PMI_RANK": "{rank}", "MPI_LOCALRANKID": "{rank}", "MPI_LOCALNRANKS": "{size}"}
PALS = {"PALS_APID": "{job}", "PALS_RANKID": "{rank}", "PALS_NODEID": "0", "PALS_LOCAL_RANKID": "{rank}"}
PALS |= {"PALS_LOCAL_SIZE": "{size}", "PMI_SIZE": "{size}", "PMI_RANK": "{rank}"}
FLUX = {"FLUX_JOB_ID": "ƒ{job}", "FLUX_JOB_SIZE": "{size}", "FLUX_JOB_NNODES": "1", "FLUX_TASK_RANK": "{rank}"}
FLUX |= {"FLUX_TASK_LOCAL_ID": "{rank}", "PMI_SIZE": "{size}", "PMI_RANK": "{rank}"}


def started_as(launcher: dict[str, str], size: int, command: list[str], folder: Path) -> list[subprocess.Popen[str]]:
    """Processes of one host with the variables that a launcher sets."""
    return [start(command, folder, **own) for own in told_by(launcher, size)]


def told_by(launcher: dict[str, str], size: int) -> list[dict[str, str]]:
    """What a launcher tells each rank of one host in variables."""
    return [{n: v.format(rank=r, size=size, job=os.getpid()) for n, v in launcher.items()} for r in range(size)]


@pytest.mark.parametrize("launcher", [HYDRA, PALS, FLUX], ids=["hydra", "pals", "flux"])
def test_played(launcher: dict[str, str], launched: dict[str, Any], tmp_path: Path) -> None:
    first, second = played(told_by(launcher, 2), tmp_path)
    check(summary(first), launched, tmp_path)
    assert second == ""


SCRIPT = """
import sys

import torch
import tutti

tutti.init()
net = torch.nn.Linear(2, 1)
run = tutti.prepare(net, "sgd:lr=0.1", torch.ones(12, 2), lambda m, b: m(b).square().mean(), batch_size=6)
for batch in run.epoch(0):
    run.step(batch)
sys.stdout.write(f"rank {tutti.rank()} of {tutti.size()} {tutti.local_rank()} {tutti.cross_size()}\\n")
"""


@pytest.mark.full
def test_a_script_of_three_ranks_that_a_shell_of_each_starts(tmp_path: Path) -> None:
    """The ranks' parents are shells of their own: what they have in common is above these."""
    (tmp_path / "script.py").write_text(SCRIPT)
    command = ["bash", "-c", f"{sys.executable} -m tutti run script.py; exit $?"]
    ranks = started_as(HYDRA, 3, command, tmp_path)
    try:
        outs = [finished(rank) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert outs == [f"rank {rank} of 3 {rank} 1\n" for rank in range(3)]


needs_hydra = pytest.mark.skipif(shutil.which("mpiexec.hydra") is None, reason="there is no mpiexec.hydra (MPICH)")


@needs_hydra
def test_mpich(launched: dict[str, Any], tmp_path: Path) -> None:
    check(summary(finished(start(["mpiexec.hydra", "-n", "2", *TUTTI], tmp_path))), launched, tmp_path)


@needs_hydra
@pytest.mark.full
def test_mpich_with_a_script_and_three_ranks_in_shells(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = ["mpiexec.hydra", "-n", "3", "bash", "-c", f"{sys.executable} script.py; exit $?"]
    out = finished(start(command, tmp_path))
    assert sorted(out.splitlines()) == [f"rank {rank} of 3 {rank} 1" for rank in range(3)]


MPI_LAUNCHERS = [path for path in os.environ.get("MPI_LAUNCHERS", "").split(":") if path]
"""Other installations, such as Open MPI 5 and Intel MPI from pip: paths of their mpirun or mpiexec."""

AS_ROOT = {f"{name}_ALLOW_RUN_AS_ROOT{end}": "1" for name in ("OMPI", "PRTE") for end in ("", "_CONFIRM")}


@pytest.mark.engines
@pytest.mark.skipif(not MPI_LAUNCHERS, reason="MPI_LAUNCHERS names no mpirun")
@pytest.mark.parametrize("launcher", MPI_LAUNCHERS)
def test_other_mpi(launcher: str, launched: dict[str, Any], tmp_path: Path) -> None:
    command = [launcher, "-n", "2", *TUTTI]
    if "Open MPI" in subprocess.run([launcher, "--version"], capture_output=True, text=True).stdout:
        command[1:1] = ["--oversubscribe", "--bind-to", "none"]
    check(summary(finished(start(command, tmp_path, **AS_ROOT))), launched, tmp_path)


DIES = SCRIPT.replace("    run.step(batch)", "    if tutti.rank() == 1:\n        END\n    run.step(batch)")
ENDS = {
    "exception": "raise ValueError('of rank 1')",
    "kill": "import os; os.kill(os.getpid(), 9)",
    "end": "raise SystemExit",
}


@pytest.mark.parametrize("end", ENDS)
def test_a_rank_that_dies_under_a_foreign_launcher_leaves_no_native_frames(end: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(DIES.replace("END", ENDS[end]))
    ranks = [Process(["script.py"], tmp_path, environment(**own)) for own in told_by(HYDRA, 2)]
    try:
        shown = [rank.communicate(SAFETY_NET)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert ranks[0].returncode == 5, shown[0]
    assert ranks[1].returncode == {"exception": 1, "kill": -9, "end": 0}[end], shown[1]
    said = r"tutti\.errors\.PeerError: .* failed(: rank 1 has|, because another rank) ended .*\(rank 0, .*script.py:"
    assert re.search(said, shown[0]) and "make this call on every rank" in shown[0], shown[0]
    for text in shown:
        assert not [word for word in ("frame #", "terminate called", ".cc:", ".cpp:", "GLHF") if word in text], text


@pytest.mark.parametrize("rank", [0, 1])
def test_a_name_that_does_not_resolve_is_said_in_one_line(rank: int, tmp_path: Path) -> None:
    job = {"RANK": f"{rank}", "WORLD_SIZE": "2", "LOCAL_RANK": f"{rank}", "LOCAL_WORLD_SIZE": "2"}
    meeting = {"MASTER_ADDR": "no-such-host.invalid", "MASTER_PORT": "29511", "TUTTI_TIMEOUT": "1"}
    process = Process([*TUTTI[1:]], tmp_path, environment(**job, **meeting))
    try:
        _, err = process.communicate(SAFETY_NET)
    finally:
        process.kill()
    assert process.wait() == 5 and err.count("\n") == 1, err
    assert f"no-such-host.invalid of rank 0's node does not resolve here within 1 s (rank {rank} of 2)" in err


def refused(words: list[str], folder: Path, **told: str) -> tuple[int, str]:
    """The exit code of a command, and what it said."""
    done = run(words, folder, environment(**told), SAFETY_NET, torch=False)
    return done.returncode, done.stderr


def test_the_ranks_of_a_launcher_that_is_not_understood_begin_no_runs_of_their_own(tmp_path: Path) -> None:
    for environ in ({"PMI_RANK": "1", "PMI_SIZE": "2"}, {"MV2_COMM_WORLD_RANK": "1", "MV2_COMM_WORLD_SIZE": "2"}):
        code, err = refused(TUTTI[1:], tmp_path, **environ)
        assert code == 2 and err.count("\n") == 1
        assert "is missing" in err or "MV2_COMM_WORLD_SIZE is '2'" in err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("words", ["compare digits", "bench optimizer", "landscape run"])
def test_a_measurement_is_not_made_once_a_rank(words: str, tmp_path: Path) -> None:
    environ = {name: value.format(rank=0, size=2) for name, value in HYDRA.items()}
    code, err = refused(["-m", "tutti", *words.split()], tmp_path, **environ)
    assert code == 2 and f"tutti {words.split()[0]} starts processes of its own" in err
    assert not list(tmp_path.iterdir())


def test_ranks_on_several_hosts_ask_where_to_meet(tmp_path: Path) -> None:
    more = {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}
    code, err = refused(TUTTI[1:], tmp_path, **more)
    assert code == 2 and "MASTER_ADDR is missing (rank 0 of 2, started by hydra)" in err


def test_a_number_of_devices_that_the_job_has_not_is_refused(tmp_path: Path) -> None:
    job = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    code, err = refused([*TUTTI[1:], "--devices", "3"], tmp_path, **job)
    assert code == 2
    assert "this job was started with 2 processes" in err
