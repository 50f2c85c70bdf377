"""Start ranks, then time and check all-reduces over them, in a separate process, because either may hang.

``python -m tutti.doctor.collective_probe RANKS DIRECTORY`` writes one JSON file of measurements a stage to
``DIRECTORY``.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tutti.doctor.finding import Finding
from tutti.errors import ExitCode, counted
from tutti.launcher import failure, isolated
from tutti.launcher.launch import launch
from tutti.launcher.orphans import die_with_parent

if TYPE_CHECKING:
    from torch import Tensor

    from tutti.comm.mesh_communicators import Communicators
    from tutti.launcher.context import World
    from tutti.types.run_context import RunContext

TIMEOUT = 20.0
"""Seconds until a measurement counts as hanging."""

STAGES = ("start", "gloo", "shared")
_PATIENCE = 15.0
# Position in Gloo's C++ source, which is of no use to users.
_NATIVE_PLACE = re.compile(r"\[enforce fail at [^\]]*\]\s*")
_LATENCY_BYTES, _BANDWIDTH_BYTES = 4 << 10, 16 << 20
_REPEATS = {_LATENCY_BYTES: 100, _BANDWIDTH_BYTES: 5}


def collectives(ranks: int) -> Iterator[Finding]:
    """Start ``ranks`` local processes by tutti's launcher, and check all-reduces over them by Gloo and shared memory.

    The processes start, do all measurements and end before the first line is yielded; this blocks for at most
    ``TIMEOUT`` (20) seconds, after which they are killed.

    Args:
        ranks: number of processes.

    Yields:
        One line of the report of ``tutti doctor`` (a ``Finding``) for each of three stages, named ``start_N``,
        ``all_reduce_N_gloo`` and ``all_reduce_N_shared`` for N = ``ranks``. The first has ``seconds`` until the
        processes have met; the others latency for 4 KiB, bandwidth at 16 MiB, and whether sums are right. A wrong sum
        is a problem; a machine without shared-memory all-reduces gets a note. A stage that does not finish is a
        problem, and no lines follow it.
    """
    with tempfile.TemporaryDirectory(prefix="tutti-doctor-", ignore_cleanup_errors=True) as folder:
        directory = Path(folder)
        # Files left by a killed process are removed with the directory.
        environ = {**os.environ, "TMPDIR": folder}
        try:
            ended = isolated.run_module("tutti.doctor.collective_probe", (str(ranks), folder), TIMEOUT, environ)
            complaint = "" if ended.code == 0 else _cause(directory, ranks) or ended.complaint
        except subprocess.TimeoutExpired:
            complaint = f"hung: no end within {TIMEOUT:g} s"
        for stage in STAGES:
            name = f"start_{ranks}" if stage == "start" else f"all_reduce_{ranks}_{stage}"
            file = directory / f"{stage}.json"
            if not file.exists():
                remedy = _remedy(complaint)
                yield Finding(name, "problem", complaint, {"ranks": ranks}, remedy, ExitCode.PEER)
                return
            yield _finding(name, ranks, stage, json.loads(file.read_text(encoding="utf-8")))


def _finding(name: str, ranks: int, stage: str, values: dict[str, Any]) -> Finding:
    values = {"ranks": ranks, **values}
    if stage == "start":
        return Finding(name, "ok", f"{counted(ranks, 'rank')} started and met in {values['seconds']:.2f} s", values)
    if not values["available"]:
        remedy = "Needs x86-64 and room in /dev/shm; without it, sums go by Gloo and take longer."
        return Finding(name, "note", "not available on this machine", values, remedy)
    text = (
        f"{values['latency_seconds'] * 1e6:,.0f} µs for 4 KiB, "
        f"{values['bandwidth_bytes_per_second'] / 1e9:.2f} GB/s at 16 MiB, sum "
    )
    if values["sum_is_right"]:
        return Finding(name, "ok", f"{text}right", values)
    remedy = "Do not train here: reinstall PyTorch, then test the machine's memory."
    return Finding(name, "problem", f"{text}WRONG", values, remedy, ExitCode.PEER)


def _cause(directory: Path, ranks: int) -> str:
    """Return the message of the rank that failed first; empty without failure reports."""
    failures = [found for rank in range(ranks) if (found := failure.read_failure((directory / "logs",), rank))]
    return _NATIVE_PLACE.sub("", failure.root_cause(failures).message) if failures else ""


def _remedy(complaint: str) -> str:
    if "too many open files" in complaint.lower():
        return "Run ulimit -n 4096 before tutti."
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return "Unset GLOO_SOCKET_IFNAME, and try again."
    return "Try tutti doctor with nothing else running; check that firewall or container let lo through."


def probe_main(ranks: int, directory: Path) -> int:
    """Start ``ranks`` local processes that time and check collectives, and wait for them.

    To be called in a process of its own, which from then on is killed when its parent process ends.

    Args:
        ranks: number of processes.
        directory: folder into which rank 0 writes its measurements, as ``start.json``, ``gloo.json`` and
            ``shared.json``.

    Returns:
        0 if all processes have succeeded; else the exit code of the process that failed first, a member of
        ``tutti.errors.ExitCode``.
    """
    die_with_parent()
    # Imported here so that the measured start does not include the import of torch.
    import torch  # noqa: F401

    return launch(_measure, (time.monotonic(), directory), processes=ranks, logs=directory / "logs", timeout=_PATIENCE)


def _measure(begin: float, directory: Path) -> None:
    """Measure on one rank; rank 0 writes one file a stage."""
    from tutti.comm.mesh_communicators import Communicators
    from tutti.comm.rank_mesh import RankMesh
    from tutti.launcher import context
    from tutti.types.run_context import RunContext

    world = context.init("cpu", timeout=_PATIENCE)
    seconds = time.monotonic() - begin
    rank = world.identity.rank
    mesh = RankMesh(replica=world.identity.size, rank=rank)
    comms = Communicators(world, mesh)
    _leave(world, directory, "start", {"seconds": round(seconds, 3)})
    _leave(world, directory, "gloo", _sums(comms, lambda elements: _by_gloo(comms, elements)))
    run_context = RunContext(mesh, comms, mesh.size, range(rank, rank + 1))
    _leave(world, directory, "shared", _sums(comms, lambda elements: _by_shared_memory(run_context, elements)))


def _leave(world: World, directory: Path, stage: str, values: dict[str, Any]) -> None:
    if world.identity.rank == 0:
        file = directory / f"{stage}.part"
        file.write_text(json.dumps(values), encoding="utf-8")
        file.rename(directory / f"{stage}.json")


Sum = Callable[["Tensor"], "Tensor"]


def _sums(comms: Communicators, make: Callable[[int], Sum | None]) -> dict[str, Any]:
    """Check and time all-reduces of both message sizes.

    Collective: all-reduces and an all-gather over all ranks.

    Args:
        comms: communicators of all ranks.
        make: takes a number of elements and returns the all-reduce of float32 vectors of that length, which may write
            into its argument; None if this machine does not support it.
    """
    import torch

    right, seconds = True, {}
    for bytes_, repeats in _REPEATS.items():
        sum_ = make(bytes_ // 4)
        if sum_ is None:
            return {"available": False}
        # Small whole numbers: their sums are exact in any order.
        pattern = torch.arange(bytes_ // 4, dtype=torch.float32).remainder_(1009)
        expected = pattern * (comms.world.size * (comms.world.size + 1) // 2)
        right &= torch.equal(sum_(pattern * (comms.world.rank + 1)), expected)
        zeros = torch.zeros_like(pattern)
        times = []
        for _ in range(repeats):
            begin = time.perf_counter()
            sum_(zeros)
            times.append(time.perf_counter() - begin)
        seconds[bytes_] = statistics.median(times)
    everywhere = comms.world.all_gather(torch.tensor([int(right)]), "whose sums are right")
    return {
        "available": True,
        "latency_seconds": round(seconds[_LATENCY_BYTES], 7),
        "latency_message_bytes": _LATENCY_BYTES,
        "bandwidth_bytes_per_second": round(_BANDWIDTH_BYTES / seconds[_BANDWIDTH_BYTES]),
        "bandwidth_message_bytes": _BANDWIDTH_BYTES,
        "sum_is_right": all(bool(flag) for flag in everywhere),
    }


def _by_gloo(comms: Communicators, elements: int) -> Sum:
    def sum_(vector: Tensor) -> Tensor:
        comms.world.start_all_reduce(vector, f"all-reduce of {elements} numbers").wait()
        return vector

    return sum_


def _by_shared_memory(run_context: RunContext, elements: int) -> Sum | None:
    """Return the shared-memory reducer of training over one parameter; None if it is not available."""
    import torch

    from tutti.parallel.ddp.shared_memory_reducer import attach_shared
    from tutti.types.step_records import StepContext

    parameter = torch.nn.Parameter(torch.zeros(elements))
    reducer = attach_shared([("vector", parameter)], run_context)
    if reducer is None:
        return None

    def sum_(vector: Tensor) -> Tensor:
        parameter.grad = vector
        reducer.finish(StepContext(0, run_context.workers), None)
        return parameter.grad

    return sum_


if __name__ == "__main__":
    sys.exit(probe_main(int(sys.argv[1]), Path(sys.argv[2])))
