"""The two-level all-reduce against the flat ring, over two hosts of two ranks each with limited links.

    sudo python benchmarks/hierarchical_links.py            # under a minute; --save keeps the result
    sudo python benchmarks/hierarchical_links.py --quick    # does it run? its numbers mean nothing

Every host is a network namespace with a link of ``--mbit`` Mbit/s each way (``limited_links.cluster``). Both algorithms
sum the same vector in one job, in turns; a sum's time is that of the slowest rank, after a barrier that is not timed.
The backend's own all-reduce is measured beside them. Counted bytes are those of the ranks' communicators. Linux, root
and iproute2.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from limited_links import cluster

from tutti.errors import ExitCode

RESULTS = Path(__file__).parent / "results"
HOSTS, EACH, BAR = 2, 2, 0.7
_PORT = 29573


def measure(elements: int, rounds: int) -> dict[str, Any] | None:
    """One rank: seconds of each sum by algorithm on rank 0, None on the other ranks."""
    import torch

    import tutti
    from tutti.comm.mesh_communicators import Communicators
    from tutti.comm.rank_mesh import RankMesh
    from tutti.comm.scheduled_all_reduce import ScheduledAllReduce
    from tutti.launcher import context

    tutti.init("cpu", timeout=120)
    torch.set_num_threads(1)
    mesh = RankMesh(replica=tutti.size(), rank=tutti.rank())
    sums: dict[str, Callable[[torch.Tensor], None]] = {}
    lines = {}
    for algorithm in ("ring", "hierarchical"):
        comms = Communicators(context.current(), mesh)
        lines[algorithm] = comms.replica
        run = ScheduledAllReduce(comms, algorithm, 4 * elements)  # type: ignore[arg-type]
        sums[algorithm] = lambda flat, run=run: run.sum(flat, "sum")  # type: ignore[misc]
    comm = lines["ring"]
    sums["native"] = lambda flat: comm.start_all_reduce(flat, "sum").wait()
    seconds: dict[str, list[float]] = {name: [] for name in sums}
    want = tutti.size() * (tutti.size() + 1) / 2
    for _ in range(rounds + 1):
        for name, all_reduce in sums.items():
            flat = torch.full((elements,), tutti.rank() + 1.0)
            comm.all_reduce(torch.zeros(1), "start")
            start = time.perf_counter()
            all_reduce(flat)
            spent = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
            seconds[name].append(max(float(t) for t in comm.all_gather(spent, "seconds")))
            if not bool((flat == want).all()):
                raise RuntimeError(f"{name} is not the sum")
    traffic = {name: line.traffic() for name, line in lines.items()}
    between = {
        name: sum(count.bytes for (a, b), count in links.items() if a // EACH == 0 and b // EACH == 1) / (rounds + 1)
        for name, links in traffic.items()
    }
    tutti.shutdown()
    # The first of each meets cold connections.
    found = {name: {"seconds": values[1:], "median": statistics.median(values[1:])} for name, values in seconds.items()}
    return {"algorithms": found, "bytes_from_host_0_to_host_1": between}


def play(mbit: float, elements: int, rounds: int) -> dict[str, Any]:
    """One job of four ranks on two hosts; what rank 0 measured."""
    with cluster(HOSTS, mbit) as hosts:
        ranks = []
        for rank in range(HOSTS * EACH):
            host, local = divmod(rank, EACH)
            place = {"RANK": rank, "WORLD_SIZE": HOSTS * EACH, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": EACH}
            place |= {"GROUP_RANK": host, "GROUP_WORLD_SIZE": HOSTS, "MASTER_ADDR": "10.78.0.1", "MASTER_PORT": _PORT}
            environ = os.environ | {name: str(value) for name, value in (place | {"OMP_NUM_THREADS": 1}).items()}
            words = ["--rank", "--elements", str(elements), "--rounds", str(rounds)]
            command = ["ip", "netns", "exec", hosts[host], sys.executable, __file__, *words]
            ranks.append(subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE))
        said = [rank.communicate(timeout=600) for rank in ranks]
        if any(rank.returncode for rank in ranks):
            raise RuntimeError([text[1].decode()[-2000:] for text in said])
    found: dict[str, Any] = json.loads(said[0][0].decode().splitlines()[-1])
    return found


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line. Exits with 2 on a usage error."""
    parser = argparse.ArgumentParser(description="The two-level all-reduce against the flat ring on limited links.")
    add = parser.add_argument
    add("--mbit", type=float, default=200.0, help="Mbit/s of a host's link, each way")
    add("--elements", type=int, default=2_000_000, help="float32 numbers of the vector")
    add("--rounds", type=int, default=15)
    add("--quick", action="store_true", help="a short vector, few rounds: does it run?")
    add("--save", action="store_true", help="keep the result in benchmarks/results")
    add("--rank", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    if given.quick:
        given.elements, given.rounds = 100_000, 2
    if not given.rank and (os.geteuid() or not (shutil.which("ip") and shutil.which("tc"))):
        parser.error("making network namespaces needs root and iproute2")
    return given


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark and returns its exit code: 9 where the ratio is above the bar."""
    given = arguments(argv)
    if given.rank:
        print(json.dumps(measure(given.elements, given.rounds)))
        return int(ExitCode.DONE)
    found = play(given.mbit, given.elements, given.rounds)
    times = {name: row["seconds"] for name, row in found["algorithms"].items()}
    ratios = sorted(two / flat for two, flat in zip(times["hierarchical"], times["ring"], strict=True))
    found["ratio"] = {"median": statistics.median(ratios), "low": ratios[0], "high": ratios[-1], "bar": BAR}
    found["settings"] = {"mbit": given.mbit, "bytes": 4 * given.elements, "rounds": given.rounds, "hosts": HOSTS}
    found["settings"]["ranks_a_host"] = EACH
    print(json.dumps({**found, "algorithms": {n: r["median"] for n, r in found["algorithms"].items()}}, indent=2))
    if given.save:
        path = RESULTS / f"{datetime.now(UTC):%Y-%m-%d}-hierarchical.json"
        path.write_text(json.dumps(found, indent=2) + "\n")
    return int(ExitCode.DONE if found["ratio"]["median"] <= BAR or given.quick else ExitCode.THRESHOLD)


if __name__ == "__main__":
    sys.exit(main())
