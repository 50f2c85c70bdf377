"""Starting workers and summing over them, timed and checked: in a process of its own, because either may hang.

``python -m tutti.cli.probe RANKS DIRECTORY`` leaves what it measured, stage by stage, in ``DIRECTORY``.
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

from tutti.errors import ExitCode
from tutti.measure import isolated
from tutti.measure.finding import Finding
from tutti.world import failure
from tutti.world.launch import launch
from tutti.world.orphans import die_with_parent

if TYPE_CHECKING:
    from torch import Tensor

    from tutti.comm.communicator import Communicators
    from tutti.types import Setting
    from tutti.world.context import World

TIMEOUT = 20.0
"""Seconds until a measurement counts as hanging."""

STAGES = ("start", "gloo", "shared")
_PATIENCE = 15.0
# Where in its C++ source Gloo noticed something: nothing that a user could look up.
_NATIVE_PLACE = re.compile(r"\[enforce fail at [^\]]*\]\s*")
_LATENCY_BYTES, _BANDWIDTH_BYTES = 4 << 10, 16 << 20
_REPEATS = {_LATENCY_BYTES: 100, _BANDWIDTH_BYTES: 5}


def collectives(ranks: int) -> Iterator[Finding]:
    """Start ``ranks`` workers with tutti's launcher and sum over them by every way there is.

    A stage that fails is a problem, and the last one.
    """
    with tempfile.TemporaryDirectory(prefix="tutti-doctor-", ignore_cleanup_errors=True) as folder:
        directory = Path(folder)
        # Whatever is left when the process has to be killed goes with the directory.
        environ = {**os.environ, "TMPDIR": folder}
        try:
            ended = isolated.run_module("tutti.cli.probe", (str(ranks), folder), TIMEOUT, environ)
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
        return Finding(name, "ok", f"{ranks} workers started and met in {values['seconds']:.2f} s", values)
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
    """What the rank that failed first said."""
    failures = [found for rank in range(ranks) if (found := failure.read((directory / "logs",), rank))]
    return _NATIVE_PLACE.sub("", failure.root_cause(failures).message) if failures else ""


def _remedy(complaint: str) -> str:
    if "too many open files" in complaint.lower():
        return "Run ulimit -n 4096 before tutti."
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return "Unset GLOO_SOCKET_IFNAME, and try again."
    return "Try tutti doctor with nothing else running; check that firewall or container let lo through."


def main(ranks: int, directory: Path) -> int:
    """Measure, and return the launcher's exit code."""
    die_with_parent()
    # What starting costs is told apart from what loading torch costs.
    import torch  # noqa: F401

    return launch(_measure, (time.monotonic(), directory), processes=ranks, logs=directory / "logs", timeout=_PATIENCE)


def _measure(begin: float, directory: Path) -> None:
    """One worker. Rank 0 writes a file a stage."""
    from tutti.comm.communicator import Communicators
    from tutti.types import Setting
    from tutti.world import context
    from tutti.world.grid import Grid

    world = context.init("cpu", timeout=_PATIENCE)
    seconds = time.monotonic() - begin
    rank = world.identity.rank
    grid = Grid(replica=world.identity.size, rank=rank)
    comms = Communicators(world, grid)
    _leave(world, directory, "start", {"seconds": round(seconds, 3)})
    _leave(world, directory, "gloo", _sums(comms, lambda elements: _by_gloo(comms, elements)))
    setting = Setting(grid, comms, grid.size, range(rank, rank + 1))
    _leave(world, directory, "shared", _sums(comms, lambda elements: _by_shared_memory(setting, elements)))


def _leave(world: World, directory: Path, stage: str, values: dict[str, Any]) -> None:
    if world.identity.rank == 0:
        file = directory / f"{stage}.part"
        file.write_text(json.dumps(values), encoding="utf-8")
        file.rename(directory / f"{stage}.json")


Sum = Callable[["Tensor"], "Tensor"]


def _sums(comms: Communicators, make: Callable[[int], Sum | None]) -> dict[str, Any]:
    """Check and time sums of both sizes. Collective.

    Args:
        comms: of all ranks.
        make: the sum of float32 vectors of so many elements, which may use its argument's memory; None where
            there is no such way on this machine.
    """
    import torch

    right, seconds = True, {}
    for bytes_, repeats in _REPEATS.items():
        sum_ = make(bytes_ // 4)
        if sum_ is None:
            return {"available": False}
        # Small whole numbers, whose sums are exact in any order.
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


def _by_shared_memory(setting: Setting, elements: int) -> Sum | None:
    """The reducer that training itself uses, with one parameter."""
    import torch

    from tutti.exchanges.shared import attach_shared
    from tutti.types import Tick

    parameter = torch.nn.Parameter(torch.zeros(elements))
    reducer = attach_shared([("vector", parameter)], setting)
    if reducer is None:
        return None

    def sum_(vector: Tensor) -> Tensor:
        parameter.grad = vector
        reducer.finish(Tick(0, setting.workers), None)
        return parameter.grad

    return sum_


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), Path(sys.argv[2])))
