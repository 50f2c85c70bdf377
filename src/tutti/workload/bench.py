"""Measure a machine in parts, each in ranks that tutti's launcher starts, and collect the parts in one ``Machine``."""

from __future__ import annotations

import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tutti.config.verbosity import is_quiet
from tutti.device import cpu_model, usable_cores
from tutti.distribution import VERSION
from tutti.errors import ExitCode, TuttiError
from tutti.launcher.launch import launch
from tutti.workload.bench_scaling import bench_scaling
from tutti.workload.machine_file import Curve, CurvePoint, Figure, Machine

if TYPE_CHECKING:
    from tutti.launcher.context import World
    from tutti.workload.bench_timing import Findings

Measure = Callable[["World", "Findings"], None]
"""A measurement that each rank of a launch makes and adds to its findings."""
PARTS = ("device", "links", "collectives", "data", "disk", "optimizer", "strategies")
_ALONE, _TOGETHER = ("device", "optimizer", "data", "disk"), ("links", "collectives")
_FACTS = "facts.json"
_BUSY = 0.3
"""Load a core above which other processes disturb the measurement: a guess."""


def bench_machine(
    parts: Sequence[str],
    ranks: Sequence[int],
    device: str,
    folder: Path,
    strategies: Measure,
    scaling: Sequence[str] = (),
    counts: Sequence[int] = (),
) -> Machine:
    """Measure parts of this machine, in processes that the launcher starts; blocks until all are measured.

    Args:
        parts: some of ``device``, ``links``, ``collectives``, ``data``, ``disk``, ``optimizer`` and ``strategies``.
        ranks: numbers of ranks to measure links and collectives with, one after the other.
        device: ``auto``, ``cpu`` or the name of an accelerator.
        folder: a folder on the disk to measure.
        strategies: function that measures the part ``strategies``, such as ``bench_strategies``; it is pickled and
            called as ``strategies(world, found)`` on each rank of two launches, of one rank and of two.
        scaling: a task and further flags of ``tutti train``, whose throughput is measured; empty for none.
        counts: numbers of devices on which to measure the throughput of ``scaling``.

    Returns:
        A ``Machine``: ``figures`` (single numbers) and ``curves`` (seconds over size), by name, with ``host``,
        ``device``, ``parts`` and date of the measurement.

    Raises:
        TuttiError: a rank or a run of ``scaling`` failed; the error has its exit code, and its own message is printed
            before.
        UsageError: called outside the main thread.
    """
    begin = time.perf_counter()
    load = os.getloadavg()[0]
    if load > _BUSY * usable_cores():
        print(
            f"warning: {load:.1f} processes were running in the last minute: the numbers are of a busy machine",
            file=sys.stderr,
        )
    figures: dict[str, Figure] = {}
    curves: dict[str, Curve] = {}
    facts: Mapping[str, Any] = {}
    if scaling:
        figures |= bench_scaling(scaling[0], scaling[1:], counts, device)
    together = [part for part in parts if part in _TOGETHER]
    jobs: list[tuple[tuple[str, ...], int]] = [((part,), 1) for part in parts if part in _ALONE]
    jobs += [(tuple(together), count) for count in ranks if together]
    jobs += [(("strategies",), count) for count in (1, 2) if "strategies" in parts]
    # A rank that measures nothing tells which device it has.
    jobs = jobs or [((), 1)]
    for number, (names, count) in enumerate(jobs, 1):
        where = f", {count} ranks" if count > 1 else ""
        if names and not is_quiet(os.environ):
            print(f"[{number}/{len(jobs)}] {' and '.join(names)}{where}", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(prefix="tutti-bench-") as scratch:
            directory = Path(scratch)
            # Python works on the host, whatever the device.
            kind = "cpu" if names == ("strategies",) else device
            arguments = (names, kind, time.monotonic(), directory, folder.absolute(), strategies)
            code = launch(bench_rank, arguments, processes=count, logs=directory / "logs")
            if code:
                raise _Failed(names, code)
            content = json.loads((directory / _FACTS).read_text(encoding="utf-8"))
        figures |= {name: Figure(**entry) for name, entry in content["figures"].items()}
        for name, entry in content["curves"].items():
            curves[name] = Curve(**{**entry, "points": tuple(CurvePoint(**point) for point in entry["points"])})
        facts = facts or content["device"]
    host = {
        "name": platform.node(),
        "cpu": cpu_model(),
        "cores": usable_cores(),
        "load": round(load, 2),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "versions": {"tutti": VERSION, "python": platform.python_version(), "torch": facts.get("torch")},
    }
    date = datetime.now(UTC).isoformat(timespec="seconds")
    named = (*parts, " ".join(("scaling", *scaling))) if scaling else tuple(parts)
    return Machine(host, facts, named, figures, curves, date, round(time.perf_counter() - begin, 1))


class _Failed(TuttiError):
    """A part whose ranks failed."""

    def __init__(self, names: Sequence[str], code: int) -> None:
        super().__init__(f"measuring {' and '.join(names)} failed", remedy="see the message above, or leave it out")
        self.exit_code = ExitCode(code) if code in set(ExitCode) else ExitCode.UNEXPECTED


def bench_rank(
    parts: Sequence[str], device: str, begin: float, directory: Path, folder: Path, strategies: Measure
) -> None:
    """Measure parts of the machine as one of the ranks that the launcher has started.

    Collective over all ranks of the launch, which call it with equal arguments as their main function; it initialises
    the process group, and ends it on return, but not after an error. The part ``links`` sends messages between
    neighbouring ranks, ``collectives`` makes all-reduces, all-gathers, reduce-scatters and broadcasts over all ranks,
    and ``strategies`` trains with them; all other parts send nothing. Rank 0 writes figures and curves as JSON into
    ``directory``.

    Args:
        parts: parts to measure: some of ``device``, ``links``, ``collectives``, ``data``, ``disk``, ``optimizer`` and
            ``strategies``.
        device: ``auto``, ``cpu`` or the name of an accelerator.
        begin: ``time.monotonic`` when the launcher was called.
        directory: folder for the JSON file.
        folder: a folder on the disk to measure.
        strategies: function that measures the part ``strategies``, such as ``bench_strategies``; called as
            ``strategies(world, found)`` with this process's membership in the launch and the findings to add to.

    Raises:
        DiskError: a file in ``folder`` cannot be written.
        PeerError: a rank is lost, or does not take part within the timeout.
    """
    import torch

    from tutti.device import device_names, is_accelerator
    from tutti.launcher import context
    from tutti.workload import bench_device, bench_ranks, bench_storage
    from tutti.workload.bench_timing import Findings

    world = context.init(device)
    found = Findings(show=world.identity.rank == 0)
    if "links" in parts or "collectives" in parts:
        bench_ranks.bench_start(world, begin, found)
    if "device" in parts:
        bench_device.bench_device(world.device, found)
    if "optimizer" in parts:
        bench_device.bench_optimizer(world.device, found)
    if "data" in parts:
        bench_storage.bench_data(found)
    if "disk" in parts:
        bench_storage.bench_disk(folder, found)
    if "collectives" in parts:
        # Before messages, whose large buffers an allocator would keep.
        bench_ranks.bench_shared(world, found)
    if "links" in parts:
        bench_ranks.bench_links(world, found)
    if "collectives" in parts:
        bench_ranks.bench_collectives(world, found)
        bench_ranks.bench_overlap(world, found)
        bench_ranks.bench_jitter(world, found)
    if "strategies" in parts:
        strategies(world, found)
    if world.identity.rank == 0:
        accelerator = is_accelerator(world.device)
        facts = {
            "type": world.device.type,
            "name": device_names()[world.device.index or 0] if accelerator else cpu_model(),
            "threads": None if accelerator else torch.get_num_threads(),
            "torch": torch.__version__,
        }
        (directory / _FACTS).write_text(json.dumps({"device": facts, **found.content()}), encoding="utf-8")
    context.shutdown()
