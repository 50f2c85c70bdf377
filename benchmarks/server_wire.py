"""What a push and a pull cost between a worker and a parameter server, beside Gloo's send and receive.

    python benchmarks/server_wire.py                # about a minute
    python benchmarks/server_wire.py --quick        # does it run? its times mean nothing
    python benchmarks/server_wire.py --save         # keeps results/DATE-server-wire.json

Two ranks, one thread each, and the servers that rank 0 starts. In a round every contestant has a block of exchanges in
random order, and ratios are taken within the round. Gloo sends the gradient to rank 1 and gets as much back. A push and
a pull of a parameter server copy the gradient to where the server sees it, and end with the parameters in the memory
that the model computes with. The server's optimizer makes no step, so that all move the same bytes and nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from paired import order, paired_ratio
from torch import nn

import tutti
from tutti.comm.mesh_communicators import Communicators
from tutti.comm.rank_mesh import RankMesh
from tutti.config.sync_config import ParameterServerConfig
from tutti.launcher import context
from tutti.parallel.parameter_server.request_handlers import AsyncHandler
from tutti.parallel.parameter_server.server_session import ServerSession
from tutti.parallel.parameter_server.server_wire import BACK, PUSH
from tutti.parallel.parameter_server.staleness import StalenessTracker
from tutti.types.run_context import RunContext

SIZES = {"25 MB": 25 << 20, "4 KiB": 4 << 10}
BLOCKS = {"25 MB": 4, "4 KiB": 200}
TRANSPORTS = ("shared_memory", "tcp")


class Still(torch.optim.SGD):
    """An optimizer that leaves everything as it is."""

    def step(self, closure: Any = None) -> None:
        return None


class Pair:
    """A worker's connection to a server of parameters of so many bytes."""

    def __init__(self, size: int, transport: str, run_context: RunContext) -> None:
        named = [("weight", nn.Parameter(torch.zeros(size // 4)))]
        handle = Still([named[0][1]], lr=0.1)
        config = ParameterServerConfig(mode="async", snapshot=0, transport=transport)  # type: ignore[arg-type]
        self.link = ServerSession(
            *(config, run_context, named, lambda given: Still([p for _, p in given], lr=0.1), handle),
            lambda shard: AsyncHandler(shard, StalenessTracker(2), len(shard.keys), over_staleness=False),
            lambda settings: {PUSH: settings + 1 + 2},
        )
        self._numbers, self._clock = [*self.link.settings(None), 1.0, 1.0, 0.0], 0
        self._gradient, self._parameter = torch.ones(size // 4), torch.zeros(size // 4)

    def __call__(self) -> None:
        self.link.gradients[0].copy_(self._gradient)
        self.link.client.ask(PUSH, 0, self._clock, "push", (0,), flags=BACK, extras=self._numbers, seen=[self._clock])
        self._clock += 1
        if not self.link.home:
            self._parameter.copy_(self.link.values[0])


class Gloo:
    """Rank 0 sends to rank 1, which sends back."""

    def __init__(self, size: int) -> None:
        self._gradient, self._parameter = torch.ones(size // 4), torch.zeros(size // 4)

    def __call__(self) -> None:
        if dist.get_rank() == 0:
            dist.send(self._gradient, 1)
            dist.recv(self._parameter, 1)
        else:
            dist.recv(self._parameter, 0)
            dist.send(self._gradient, 0)


def race(size: str, run_context: RunContext, rounds: int) -> dict[str, Any]:
    """Times of every contestant in every round, and their ratios to Gloo's; on rank 0."""
    contestants: dict[str, Any] = {"gloo": Gloo(SIZES[size])}
    contestants |= {name: Pair(SIZES[size], name, run_context) for name in TRANSPORTS}
    times = {name: np.zeros((1, rounds)) for name in contestants}
    names, first = list(contestants), dist.get_rank() == 0
    for turn in range(-1, rounds):
        for index in order(len(names), 0, 0, turn + 1):
            dist.barrier()
            start = time.perf_counter()
            if first or names[index] == "gloo":
                for _ in range(BLOCKS[size]):
                    contestants[names[index]]()
            if turn >= 0:
                times[names[index]][0, turn] = (time.perf_counter() - start) / BLOCKS[size]
    for name in TRANSPORTS:
        contestants[name].link.close()
    row: dict[str, Any] = {"size": size, "gloo_us": float(np.median(times["gloo"]) * 1e6)}
    for name in TRANSPORTS:
        ratio = paired_ratio(times[name], times["gloo"])
        row[name] = {"us": float(np.median(times[name]) * 1e6), "ratio": [ratio.median, ratio.low, ratio.high]}
    return row


def rank(rounds: int) -> None:
    """One of the two; rank 0 prints what it found."""
    torch.set_num_threads(1)
    tutti.init("cpu", timeout=60)
    mesh = RankMesh(replica=2, rank=tutti.rank())
    run_context = RunContext(mesh, Communicators(context.current(), mesh), 2, range(tutti.rank(), tutti.rank() + 1))
    rows = [race(size, run_context, rounds) for size in SIZES]
    if tutti.rank() == 0:
        print(json.dumps(rows))
    tutti.shutdown()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two rounds")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--save", action="store_true", help="keep the result")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    rounds = 2 if options.quick else options.rounds
    if options.rank:
        rank(rounds)
        return 0
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "TUTTI_STORE": f"{folder}/store", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, "--rank", "--rounds", str(rounds)]
        ranks = []
        for number in range(2):
            place = {"RANK": str(number), "LOCAL_RANK": str(number), "GLOO_SOCKET_IFNAME": "lo"}
            ranks.append(subprocess.Popen(command, env={**os.environ, **common, **place}, stdout=subprocess.PIPE))
        outputs = [process.communicate(timeout=900)[0] for process in ranks]
        if any(process.returncode for process in ranks):
            return 1
    hardware = {"cores": os.cpu_count(), "python": platform.python_version(), "torch": torch.__version__}
    report = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "hardware": hardware | {"load_average": load},
        "rounds": rounds,
        "rows": json.loads(outputs[0]),
    }
    for row in report["rows"]:
        print(f"{row['size']}: gloo {row['gloo_us']:.0f} µs")
        for name in TRANSPORTS:
            median, low, high = row[name]["ratio"]
            print(f"  {name:14} {row[name]['us']:9.0f} µs  {median:.2f} [{low:.2f}–{high:.2f}] × gloo")
    if options.save:
        file = Path(__file__).parent / "results" / f"{datetime.now(UTC):%F}-server-wire.json"
        file.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
