"""What a small message among the ranks of a node costs in shared memory, and what over Gloo's sockets.

    python benchmarks/small_messages.py             # about a minute
    python benchmarks/small_messages.py --save      # keeps results/DATE-small-messages.json

Two, three and four processes. ``sum``: a sum of activations of tensor ranks, by ``Communicator.sum_in_place``;
``broadcast``: a control message of 256 bytes, whose call is compared. Both ways take turns, eleven times; a figure
is the median of the seconds of a call on rank 0. Exit codes: 0, 2 usage.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import torch
from step_tax import hardware, join_group
from torch.multiprocessing.spawn import start_processes

from tutti.comm.communicator import world_communicator
from tutti.launcher import context

BYTES = (1 << 10, 1 << 12, 1 << 15, 1 << 17, 1 << 19, 1 << 20)
ROUNDS = 11


def seconds_a_call(call: Callable[[], None], calls: int) -> float:
    """Seconds of a call, of many."""
    began = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - began) / calls


def measure(rank: int, ranks: int, folder: str) -> None:
    """One of the processes; rank 0 writes ``folder/result.json``."""
    join_group(rank, folder, ranks)
    memory, sockets = (world_communicator(context.current()) for _ in range(2))
    memory.share_memory()
    memory.share_control()
    rows = []
    for size in (*BYTES, 0):
        tensor = torch.ones(size // 4 or 64)
        calls = max(5, min(100, (1 << 22) // (size or 1)))
        taken: dict[str, list[float]] = {"memory": [], "sockets": []}
        for _ in range(ROUNDS):
            for name, comm in (("memory", memory), ("sockets", sockets)):

                def call(comm=comm, tensor=tensor, size=size) -> None:  # type: ignore[no-untyped-def]
                    if size:
                        comm.sum_in_place(tensor, "activations")
                    else:
                        comm.broadcast(tensor, 0, "control")

                taken[name].append(seconds_a_call(call, calls))
        microseconds = {name: round(1e6 * statistics.median(values), 1) for name, values in taken.items()}
        rows.append({"what": "sum" if size else "broadcast", "bytes": tensor.nbytes, **microseconds})
    if rank == 0:
        Path(folder, "result.json").write_text(json.dumps(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", action="store_true", help="keep results/DATE-small-messages.json")
    arguments = parser.parse_args()
    found = {}
    for ranks in (2, 3, 4):
        with tempfile.TemporaryDirectory() as folder:
            start_processes(measure, (ranks, folder), nprocs=ranks, start_method="spawn")
            found[str(ranks)] = rows = json.loads(Path(folder, "result.json").read_text())
        print(f"{ranks} ranks, µs a call:")
        for row in rows:
            ratio = row["memory"] / row["sockets"]
            print(f"  {row['what']:9} {row['bytes']:>8} bytes: {row['memory']:8} / {row['sockets']:8} = {ratio:.2f}")
    if arguments.save:
        date = datetime.now(UTC).strftime("%Y-%m-%d")
        text = json.dumps({"date": date, "hardware": hardware(), "unit": "µs a call", "ranks": found}, indent=1)
        Path(__file__).with_name("results").joinpath(f"{date}-small-messages.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
