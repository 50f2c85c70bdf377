"""Two hosts: two network namespaces with a cable between them, which can be slow, pulled out, or lead nowhere.

Faults 10 and 11 (the link), 22 (who is not there), and a run directory that the hosts do not share.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from tests.faults.commands import complaint, tutti, write_task
from tests.forkserver import Process
from tests.launching import SAFETY_NET, SOURCE, Result, until

pytestmark = pytest.mark.faults

PAGE = Path(__file__).parents[2] / "docs" / "two-nodes.md"
FIRST, SECOND, NOBODY = "10.77.0.1", "10.77.0.2", "10.77.0.6"
FOREIGN = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "MASTER_", "SLURM_", "OMPI_", "PMIX_", "GLOO_", "TUTTI_", "OMP_")
SLOW = """
def loss(model, batch):
    inputs, labels = batch
    time.sleep(0.06)
    return nn.functional.cross_entropy(model(inputs), labels)
"""
OPTIONS = (
    *("--workers", "4", "--batch-size", "12", "--optimizer", "adam:lr=0.01"),
    *("--eval-every", "none", "--checkpoint-every", "50st"),
)


Started = subprocess.Popen[str] | Process


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


class Hosts:
    """Two network namespaces, their interfaces ``cable`` joined by a virtual cable."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.names = [f"tutti-{os.getpid()}-{letter}" for letter in "ab"]
        self._started: list[Started] = []

    def build(self) -> None:
        first, second = self.names
        try:
            ip("netns", "add", first)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"this system makes no network namespaces: {error.stderr}")
        for name in self.names[1:]:
            ip("netns", "add", name)
        ip("link", "add", "cable", "netns", first, "type", "veth", "peer", "name", "cable", "netns", second)
        for name, address in zip(self.names, (FIRST, SECOND), strict=True):
            ip("-n", name, "address", "add", f"{address}/29", "dev", "cable")
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", "cable", "up")

    def remove(self) -> None:
        for process in self._started:
            process.kill()
        for name in self.names:
            found = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout
            for pid in map(int, found.split()):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)
        for process in self._started:
            process.communicate()

    def cable(self, state: str) -> None:
        """Pull the cable out (``down``) or put it back (``up``)."""
        ip("-n", self.names[1], "link", "set", "cable", state)

    def throttle(self, rate: str) -> None:
        for name in self.names:
            words = ("qdisc", "add", "dev", "cable", "root", "tbf", "rate", rate, "burst", "32kbit", "latency", "400ms")
            subprocess.run(["tc", "-n", name, *words], check=True, capture_output=True)

    def start(self, host: int, command: list[str], **environ: str) -> subprocess.Popen[str]:
        """Start ``command`` on host 0 or 1."""
        process = subprocess.Popen(
            ["ip", "netns", "exec", self.names[host], *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self.folder,
            env=environment(**environ),
            start_new_session=True,
        )
        self._started.append(process)
        return process

    def slurm(self, tasks: list[int], rank: int, *words: str, **environ: str) -> Process:
        """``tutti words…`` as ``srun`` starts it as ``rank`` of a step with so many tasks on each host."""
        host = int(rank >= tasks[0])
        step = {
            "SLURM_JOB_ID": 7,
            "SLURM_STEP_ID": 0,
            "SLURM_PROCID": rank,
            "SLURM_LOCALID": rank - host * tasks[0],
            "SLURM_NODEID": host,
            "SLURM_STEP_NUM_TASKS": sum(tasks),
            "SLURM_STEP_NUM_NODES": 2,
            "SLURM_STEP_TASKS_PER_NODE": ",".join(map(str, tasks)),
            "SLURM_STEP_NODELIST": f"{FIRST},{SECOND}",
        }
        told = {name: str(value) for name, value in step.items()}
        return self.fork(host, ["-m", "tutti", *words], **told | environ)

    def fork(self, host: int, words: list[str], **environ: str) -> Process:
        """``python words…`` on host 0 or 1."""
        started = Process(words, self.folder, environment(**environ), self.names[host])
        self._started.append(started)
        return started


def environment(**more: str) -> dict[str, str]:
    """This process's, without what it was told of a job of its own."""
    outer = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
    return outer | {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"} | more


def ended(process: Started) -> Result:
    out, err = process.communicate(timeout=SAFETY_NET)
    return Result(process.returncode, out, err)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("tc") is None:
        pytest.skip("making network namespaces needs root and iproute2")
    made = Hosts(tmp_path)
    try:
        made.build()
        yield made
    finally:
        made.remove()


def summary(folder: Path, out: str) -> dict[str, object]:
    found: dict[str, object] = json.loads((folder / out / "summary.json").read_text())
    return found


def steps(folder: Path, out: str) -> int:
    """The last step on record."""
    file = folder / out / "metrics.jsonl"
    return max(map(int, re.findall(r'"step": (\d+)', file.read_text())), default=0) if file.exists() else 0


def torchrun(host: int, task: list[str]) -> list[str]:
    """What docs/two-nodes.md says for this host, with this test's address and task."""
    [line] = re.findall(rf"^host{host}\$ (torchrun .*)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    launcher, _ = line.split(" -m tutti train ")
    words = [word.replace("host0", FIRST) for word in shlex.split(launcher)]
    return [sys.executable, "-m", "torch.distributed.run", *words[1:], "-m", "tutti", "train", *task]


def interrupt(hosts: Hosts, started: Sequence[Started], out: str, step: int) -> None:
    """After ``step`` pull the cable out for two seconds; the last rank has not ended before, and all end well."""
    until(lambda: steps(hosts.folder, out) >= step or any(process.poll() is not None for process in started))
    hosts.cable("down")
    time.sleep(2)
    assert started[-1].poll() is None, ended(started[-1]).err
    hosts.cable("up")
    for result in map(ended, started):
        assert result.code == 0, result.err


@pytest.mark.row(11)
@pytest.mark.parametrize(
    ("strategy", "launcher"),
    [pytest.param("mirrored", "torchrun", marks=pytest.mark.full), ("parameter_server:servers=2", "srun")],
)
def test_a_slow_link_that_fails_for_two_seconds_changes_no_bit(strategy: str, launcher: str, hosts: Hosts) -> None:
    task = [write_task(hosts.folder, SLOW), *OPTIONS, "--reproducible", "--steps", "50", "--strategy", strategy]
    hosts.throttle("10mbit")
    words = [*task, "--out", "two"]
    if launcher == "torchrun":
        started: list[Started] = [hosts.start(host, torchrun(host, words)) for host in (0, 1)]
    else:
        started = [hosts.slurm([2, 2], rank, "train", *words) for rank in range(4)]
    interrupt(hosts, started, "two", 1)
    write_task(hosts.folder)
    alone = tutti(hosts.folder, "train", *task, "--out", "one", "--devices", "1")
    assert alone.code == 0, alone.err
    two, one = summary(hosts.folder, "two"), summary(hosts.folder, "one")
    assert (two["devices"], two["weights_sha256"]) == (4, one["weights_sha256"])


@pytest.mark.row(10)
@pytest.mark.parametrize("mode", ["async", "bounded,staleness=2"])
def test_workers_go_on_after_a_link_to_their_servers_was_down_for_two_seconds(mode: str, hosts: Hosts) -> None:
    task = [write_task(hosts.folder, SLOW), *OPTIONS, "--steps", "50", "--strategy", f"parameter_server:mode={mode}"]
    interrupt(hosts, [hosts.slurm([2, 2], rank, "train", *task, "--out", "out") for rank in range(4)], "out", 10)
    [server] = summary(hosts.folder, "out")["servers"]  # type: ignore[misc]
    assert (server["updates"], server["steps"]) == (4 * 50, [50] * 4), "each push has counted, and once"


@pytest.mark.row(10)
@pytest.mark.parametrize(
    "strategy",
    [
        *("mirrored:algorithm=native", "parameter_server"),
        pytest.param("parameter_server:mode=async", marks=pytest.mark.full),
    ],
)
def test_a_link_that_stays_down_ends_every_rank_on_both_sides(strategy: str, hosts: Hosts) -> None:
    options = [*OPTIONS, "--steps", "100000", "--strategy", strategy, "--timeout", "8", "--log-every", "1"]
    words = ["train", write_task(hosts.folder, SLOW), *options, "--out", "out"]
    ranks = [hosts.slurm([2, 1], rank, *words) for rank in range(3)]
    # These hosts have their memory in common, in which mirrored ranks would go on without the cable.
    until(lambda: steps(hosts.folder, "out") >= 10 or any(process.poll() is not None for process in ranks))
    hosts.cable("down")
    near, near_too, far = map(ended, ranks)
    for number, result in enumerate((near, near_too)):
        assert result.code == 5, result.err
        assert "did not finish within 8 s; missing: rank 2 " in complaint(result)[0]
        assert f"(rank {number})" in complaint(result)[0]
    assert far.code == 5, far.err
    # Of the servers it says "parameter server 0", where it waits for them alone.
    assert "0 does not answer (rank 2)" in complaint(far)[0]
    assert summary(hosts.folder, "out")["exit_code"] == 5


@pytest.mark.row(22)
def test_servers_go_round_the_hosts(hosts: Hosts) -> None:
    task = [write_task(hosts.folder), *OPTIONS, "--steps", "6"]
    words = ["train", *task, "--strategy", "parameter_server:servers=3", "--out", "two"]
    for result in map(ended, [hosts.slurm([2, 1], rank, *words) for rank in range(3)]):
        assert result.code == 0, result.err
    alone = tutti(hosts.folder, "train", *task, "--out", "one", "--devices", "1")
    assert alone.code == 0, alone.err
    two, one = summary(hosts.folder, "two"), summary(hosts.folder, "one")
    assert two["weights_sha256"] == one["weights_sha256"]
    at = [server["at"].rpartition(":")[0] for server in two["servers"]]  # type: ignore[attr-defined]
    assert at == [f"tcp://{FIRST}", f"tcp://{SECOND}", f"tcp://{FIRST}"]


LISTEN = """
import socket, sys
taken = socket.create_server((sys.argv[1], int(sys.argv[2])))
print(flush=True)
input()
"""


@pytest.mark.row(22)
def test_who_is_not_there_is_named_in_time(hosts: Hosts) -> None:
    (hosts.folder / "script.py").write_text("import tutti\ntutti.init('cpu', timeout=5)\n")
    taken = "29500"
    listener = hosts.start(0, [sys.executable, "-c", LISTEN, FIRST, taken])
    assert listener.stdout is not None and listener.stdout.readline() == "\n", "it listens"
    words = ("run", "script.py")
    absent = hosts.slurm([1, 1], 0, *words)
    wrong = hosts.slurm([1, 1], 1, *words, MASTER_ADDR=NOBODY)
    port = hosts.slurm([1, 1], 0, *words, MASTER_ADDR=FIRST, MASTER_PORT=taken)
    expected = {
        absent: ("rank 1 of 2 did not arrive within 5 s", f"store at {FIRST}:10112"),
        wrong: (f"cannot reach rank 0 at {NOBODY}:10112", "within 5 s", "MASTER_ADDR"),
        port: (f"cannot listen on {FIRST}:{taken}", "in use", "MASTER_PORT"),
    }
    for process, said in expected.items():
        result = ended(process)
        assert result.code == 5, result.err
        assert all(part in complaint(result)[0] for part in said), result.err
        assert "Traceback" not in result.err


# tutti on a host that has a disk of its own where the run directory is to be.
OWN_DISK = """
import ctypes, runpy, subprocess
assert ctypes.CDLL(None).unshare(0x20000) == 0  # CLONE_NEWNS
for options in (["--make-rprivate", "/"], ["-t", "tmpfs", "none", "runs"]):
    subprocess.run(["mount", *options], check=True)
runpy.run_module("tutti", run_name="__main__", alter_sys=True)
"""


@pytest.mark.row(22)
def test_a_run_directory_that_is_not_shared_is_refused_before_the_first_step(hosts: Hosts) -> None:
    """As ``mpirun`` starts it."""
    (hosts.folder / "runs").mkdir()
    (hosts.folder / "own_disk.py").write_text(OWN_DISK)
    words = ["train", write_task(hosts.folder), *OPTIONS, "--out", "runs/out"]
    ranks = []
    for rank, program in enumerate((["-m", "tutti"], ["own_disk.py"])):
        said = {"RANK": rank, "SIZE": 2, "LOCAL_RANK": 0, "LOCAL_SIZE": 1}
        environ = {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in said.items()}
        ranks.append(hosts.fork(rank, [*program, *words], **environ, MASTER_ADDR=FIRST, MASTER_PORT="29500"))
    for result in map(ended, ranks):
        assert result.code == 4, result.err
        [said] = complaint(result)
        assert "rank 1 on" in said and "cannot see rank 0's folder of checkpoints" in said and "runs/out" in said
    assert steps(hosts.folder, "runs/out") == 0
    assert summary(hosts.folder, "runs/out")["exit_code"] == 4
