"""What ``--on ray`` costs on one node, against tutti's own launcher: a step, and the start.

    python benchmarks/ray_cost.py                # some minutes on two idle cores
    python benchmarks/ray_cost.py --quick        # does it run? its times mean nothing
    python benchmarks/ray_cost.py --save         # keeps results/DATE-ray-cost.json
    python benchmarks/ray_cost.py --save --ranks 1    # keeps results/DATE-ray-cost-1.json; Ray has the other core
    python benchmarks/ray_cost.py --save --workloads gpt    # keeps results/DATE-ray-cost-gpt.json

Both launchers start ranks of the same script, one thread each, on one machine whose Ray cluster runs already. Both
jobs exist at once and step in turn, in blocks of random order, so that a drift of the machine cancels; each workload is
launched several times, because a process's luck in placing its tensors does not average out. While one job steps, the
processes of the other are stopped (SIGSTOP). Ray's daemons run with the Ray job, and in every third block with the own
launcher's job alone: what they cost there is no cost of tutti. Where two ranks fill two processors, the daemons take
time from them. A block takes seconds: what a daemon does once in a second is due as soon as it goes on, so that shorter
blocks count its work twice. The start is the time from the command to the moment when every rank has joined; both are
started in turn, after one start of each that does not count. Its first part ends where the script begins in the slower
rank: the rest, most of it the import of PyTorch in each rank, is no cost of Ray. Exit code 9 where the 95 %
interval of the step's ratio lies wholly above the bar (1.05 where a step takes less than 5 ms, else 1.02), or the start
takes more than 3 seconds longer.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import psutil

try:
    from benchmarks.paired import paired_ratio
    from benchmarks.soak import hardware
except ModuleNotFoundError:
    from paired import paired_ratio  # type: ignore[import-not-found, no-redef]
    from soak import hardware  # type: ignore[import-not-found, no-redef]

WARM_UP = 20
LIMIT = 300.0
HERE = "127.0.0.1"
# Steps in a block: some seconds. Actors kill the ranks of a launcher that is silent for half a minute.
STEPS = {"mlp": 4000, "gpt": 16}
# The own launcher, the own launcher beside the daemons of an idle Ray cluster, and Ray.
CASES = ("own", "beside", "ray")
SHORT_STEP = 0.005
SHORT_BAR, BAR, START_BAR = 1.05, 1.02, 3.0

SCRIPT = """
import sys, time
from pathlib import Path

(Path(sys.argv[1]) / "began").open("a").write(f"{time.time()}\\n")

import torch
from torch import distributed as dist

import tutti

folder, name = Path(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
tutti.init("cpu")
rank = tutti.rank()
dist.barrier()
(folder / f"joined-{rank}").write_text(f"{time.time()}\\n")
if name == "none":
    sys.exit(0)

from contestants import prepared
from models import WORKLOADS
from step_tax import make_batches

data, batches = make_batches(WORKLOADS[name], rank)
run, _ = prepared(WORKLOADS[name], data)


def wait_for_turn(turn):
    path = folder / f"turn-{turn}"
    while not (path.exists() and path.read_text().endswith("\\n")):
        time.sleep(0.002)
    return int(path.read_text())


turn = 0
while True:
    count = torch.tensor([wait_for_turn(turn) if rank == 0 else 0])
    dist.broadcast(count, 0)
    if not count.item():
        break
    dist.barrier()
    began, worked = time.perf_counter(), time.process_time()
    for step in range(int(count)):
        run.step(batches[step % len(batches)])
    taken = torch.tensor([time.perf_counter() - began, time.process_time() - worked], dtype=torch.float64)
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    if rank == 0:
        (folder / f"time-{turn}").write_text(f"{taken[0].item()} {taken[1].item()}\\n")
    turn += 1
"""


class Job:
    """The script under one launcher.

    Args:
        on: address of a Ray cluster; empty for the own launcher.
        folder: a new folder of the job.
        workload: name of the workload; ``none`` to end when the ranks have joined.
        ranks: number of ranks.
    """

    def __init__(self, on: str, folder: Path, workload: str, ranks: int) -> None:
        folder.mkdir()
        self.folder, self.ranks, self._turn = folder, ranks, 0
        (folder / "script.py").write_text(SCRIPT)
        words = [sys.executable, "-m", "tutti", "run", "-np", str(ranks)]
        words += ["--on", f"ray:address={on}"] if on else []
        with (folder / "log").open("wb") as log:
            self.begun = time.time()
            self.process = subprocess.Popen(
                [*words, "script.py", str(folder), workload], cwd=folder, stdout=log, stderr=log
            )

    def began(self) -> float:
        """Return the seconds from the command to the first line of the script in the slower rank, which has joined."""
        return max(map(float, (self.folder / "began").read_text().split())) - self.begun

    def joined(self) -> float:
        """Wait until every rank has joined; return the seconds since the command."""
        return max(float(self._read(f"joined-{rank}")) for rank in range(self.ranks)) - self.begun

    def steps(self, count: int) -> tuple[float, float]:
        """Let the job take ``count`` steps; return elapsed and CPU seconds a step, those of the slower rank."""
        (self.folder / f"turn-{self._turn}").write_text(f"{count}\n")
        elapsed, cpu = self._read(f"time-{self._turn}").split()
        self._turn += 1
        return float(elapsed) / count, float(cpu) / count

    def end(self) -> None:
        """Let the job end, and wait for its end; raises RuntimeError if it fails."""
        (self.folder / f"turn-{self._turn}").write_text("0\n")
        if self.process.wait(LIMIT):
            raise RuntimeError(self._log())

    def family(self) -> set[int]:
        """Return the process ids of the command and its descendants; ranks on a Ray cluster are not among them."""
        return _family(self.process.pid)

    def _read(self, name: str) -> str:
        """Wait for a file of one line, and return it."""
        path, end = self.folder / name, time.monotonic() + LIMIT
        while not (path.exists() and path.read_text().endswith("\n")):
            if time.monotonic() > end or self.process.poll():
                raise RuntimeError(f"{name} is missing: {self._log()}")
            time.sleep(0.002)
        return path.read_text()

    def _log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")[-4000:]


def _family(pid: int) -> set[int]:
    with suppress(psutil.NoSuchProcess):
        return {pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))}
    return set()


@contextmanager
def stopped(pids: set[int]) -> Iterator[None]:
    """Within the block, the processes do not run."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def _actors() -> set[int]:
    """Return the process ids of the Ray job's actors and of their ranks."""
    found: set[int] = set()
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if process.cmdline()[:1] and process.cmdline()[0].startswith("ray::RankSupervisor"):
                found |= _family(process.pid)
    return found


def compare_steps(
    address: str, folder: Path, workload: str, ranks: int, rounds: int, draw: random.Random
) -> np.ndarray[Any, Any]:
    """Start both jobs; return elapsed and CPU seconds a step, [rounds, CASES, 2]."""
    jobs = [Job("", folder / "own", workload, ranks), Job(address, folder / "ray", workload, ranks)]
    try:
        for job in jobs:
            job.joined()
            job.steps(WARM_UP)
        times = np.zeros((rounds, len(CASES), 2))
        for turn in range(rounds):
            for case in draw.sample(CASES, len(CASES)):
                own, ray = jobs[0].family(), jobs[1].family() | _actors()
                all_of_ray = _family(os.getpid()) - own - {os.getpid()}
                with stopped({"own": all_of_ray, "beside": ray, "ray": own}[case]):
                    times[turn, CASES.index(case)] = jobs[case == "ray"].steps(STEPS[workload])
        for job in jobs:
            job.end()
        return times
    finally:
        for job in jobs:
            if job.process.poll() is None:
                job.process.terminate()
                job.process.wait(LIMIT)


def compare_starts(address: str, folder: Path, ranks: int, rounds: int, draw: random.Random) -> np.ndarray[Any, Any]:
    """Return seconds from the command to the ranks' scripts, and to joined ranks, [rounds, own launcher and Ray, 2]."""
    times = np.zeros((rounds + 1, 2, 2))
    for turn in range(rounds + 1):
        for index in draw.sample((0, 1), 2):
            job = Job(address if index else "", folder / f"start-{turn}-{index}", "none", ranks)
            joined = job.joined()
            times[turn, index] = job.began(), joined
            job.end()
    # The first start on a new cluster also starts parts of Ray.
    return times[1:]


def summed_up(times: np.ndarray[Any, Any], seed: int) -> dict[str, Any]:
    """Return one workload's part of the report, from times [launches, rounds, CASES, 2]."""
    found: dict[str, Any] = {"launches": len(times), "rounds": len(times[0])}
    for clock, name in enumerate(("elapsed", "cpu")):
        by_case = dict(zip(CASES, np.moveaxis(times[..., clock], 2, 0), strict=True))
        found[name] = {f"{case}_ms": 1e3 * float(np.median(taken)) for case, taken in by_case.items()}
        for what, above, below in (("ray", "ray", "own"), ("daemons", "beside", "own"), ("engine", "ray", "beside")):
            ratio = paired_ratio(by_case[above], by_case[below], seed)
            found[name][what] = {"ratio": ratio.median, "low": ratio.low, "high": ratio.high}
    found["bar"] = SHORT_BAR if found["elapsed"]["own_ms"] < 1e3 * SHORT_STEP else BAR
    found["above_bar"] = bool(found["elapsed"]["ray"]["low"] > found["bar"])
    return found


@contextmanager
def cluster(ranks: int) -> Iterator[str]:
    """Within the block, a Ray cluster of one node with a CPU for each rank runs here; yields its address."""
    # Without it Ray takes the machine's public address for 127.0.0.1; read when ray is imported.
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    # By default Ray's workers give way to all other processes of a node.
    os.environ.setdefault("RAY_worker_niceness", "0")
    from ray.cluster_utils import Cluster

    head = {"num_cpus": ranks, "include_dashboard": False, "node_ip_address": HERE, "object_store_memory": 100 << 20}
    made = Cluster(initialize_head=True, head_node_args=head)
    try:
        yield str(made.address)
    finally:
        made.shutdown()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return its exit code."""
    parser = argparse.ArgumentParser(description="What --on ray costs on one node, against tutti's own launcher.")
    parser.add_argument("--ranks", type=int, default=2, help="ranks of a job, of one thread each")
    parser.add_argument("--launches", type=int, default=4, help="how often both jobs of a workload are started")
    parser.add_argument("--rounds", type=int, default=6, help="blocks of steps of each job in a launch")
    parser.add_argument("--starts", type=int, default=8, help="starts by each launcher")
    parser.add_argument("--workloads", nargs="+", choices=list(STEPS), default=list(STEPS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="one launch of three rounds, one start: does it run?")
    parser.add_argument("--save", action="store_true", help="keep results/DATE-ray-cost.json")
    given = parser.parse_args(argv)
    if given.save and given.quick:
        parser.error("--quick measures nothing that is worth keeping: leave out --save or --quick")
    now, machine, draw = datetime.now(UTC), hardware(), random.Random(given.seed)
    launches, rounds, starts = (1, 3, 1) if given.quick else (given.launches, given.rounds, given.starts)
    benchmarks = Path(__file__).resolve().parent
    paths = [str(benchmarks.parent / "src"), str(benchmarks), os.environ.get("PYTHONPATH", "")]
    os.environ.update(PYTHONPATH=":".join(filter(None, paths)), OMP_NUM_THREADS="1")
    machine["versions"]["ray"] = metadata.version("ray")
    report: dict[str, Any] = {
        "benchmark": "ray_cost", "date": now.isoformat(timespec="seconds"), "hardware": machine, "seed": given.seed,
        "ranks": given.ranks, "workloads": {},
    }  # fmt: skip
    with cluster(given.ranks) as address, tempfile.TemporaryDirectory() as folder:
        for workload in given.workloads:
            times = []
            for launch in range(launches):
                place = Path(folder) / f"{workload}-{launch}"
                place.mkdir()
                times.append(compare_steps(address, place, workload, given.ranks, rounds, draw))
            part = summed_up(np.stack(times), given.seed)
            report["workloads"][workload] = part
            print(workload, json.dumps(part), flush=True)
        began = compare_starts(address, Path(folder), given.ranks, starts, draw)
    longer = [float(each) for each in began[:, 1, 1] - began[:, 0, 1]]
    report["start"] = {
        "rounds": starts,
        "own_until_script": statistics.median(began[:, 0, 0].tolist()),
        "ray_until_script": statistics.median(began[:, 1, 0].tolist()),
        "own_seconds": statistics.median(began[:, 0, 1].tolist()),
        "ray_seconds": statistics.median(began[:, 1, 1].tolist()),
        "longer_seconds": statistics.median(longer),
        "lowest": min(longer),
        "highest": max(longer),
        "bar": START_BAR,
    }
    machine["load_average_at_the_end"] = os.getloadavg()[0]
    print("start", json.dumps(report["start"]))
    if given.save:
        parts = [str(given.ranks)] if given.ranks != 2 else []
        parts += given.workloads if set(given.workloads) != set(STEPS) else []
        name = "-".join([f"{now.date()}-ray-cost", *parts])
        (benchmarks / "results" / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n")
    slow = any(part["above_bar"] for part in report["workloads"].values())
    late = report["start"]["longer_seconds"] > START_BAR
    return 9 if (slow or late) and not given.quick else 0


if __name__ == "__main__":
    sys.exit(main())
