"""``tutti train --dry-run``: predict the memory of each device, and measure it in a trained step."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tutti.errors import ExitCode, UsageError, counted
from tutti.host_memory import format_bytes, free_memory, memory_share, parse_bytes
from tutti.launcher import isolated
from tutti.launcher.devices import count_accelerators
from tutti.launcher.launch import launch

if TYPE_CHECKING:
    from tutti.parallel.pipeline.stage_memory import StagePlan
    from tutti.planning.memory_plan import MemoryFacts
    from tutti.planning.planned_run import PlannedRun
    from tutti.workload.memory_formula import Memory

_PATIENCE = 120.0
# Guesses: memory of a process besides its tensors, and heap memory of the C library for each byte in use.
_RUNTIME, _HEAP = 0.4 * 2**30, 1.3
_REST = ("gradients", "messages", "average", "activations")


def dry_run(task: str, config: PlannedRun, memory: str | None, preload: Sequence[str]) -> int:
    """Print the predicted memory of a device; if the run fits, train two steps and print the measured memory too.

    The steps run on all devices of the configuration: this function starts a process for each device on this host, and
    waits for the processes. It prints the memory of the fullest device, and for a pipeline the stage partition. On CPUs
    with too little free memory on this host it runs no step, and prints a line that says so. If a run would balance its
    stages by measured times, another process measures the seconds of the modules first.

    Args:
        task: name of the task.
        config: configuration of the run, with a number of devices.
        memory: memory of a device, such as ``16GB``; None: the memory of this host's smallest accelerator, or without
            accelerators a process's share of the host's memory.
        preload: names of modules that every rank's process imports at its start.

    Returns:
        The process exit code: 0 if the steps ran, or if none ran for lack of free memory on this host; otherwise the
        exit code of the failed launch.

    Raises:
        UsageError: the run does not fit (the message names the nearest plan that does, if there is one), ``memory``
            cannot be parsed, there is no such task, an option or the strategy is refused, or the model of a pipeline
            cannot be cut into stages.
        DataError: the task's data are missing or malformed.
        TuttiError: a process that this function forked to trace the model has ended without an answer.
    """
    from tutti.planning import memory_plan as planned

    room = _room(config, memory)
    found = isolated.call_forked(planned.model_facts, task, config)
    devices = counted(int(config.devices), "device")
    print(f"{found.parameters:,} parameters · {config.strategy} · {devices} of {format_bytes(room)}")
    for text in _notes(config, known=found.activations is not None):
        print(text)
    if config.shape["stage"] > 1:
        own, other, chosen = _of_stages(task, config, found, room, preload)
    else:
        chosen, own = config, planned.plan_memory(found, config)
        other = planned.nearest_plan(found, config, room) if own.total > room else None
    rows = planned.memory_rows(own)
    if own.total > room:
        print(_table(rows, {}))
        raise _too_large(config, other, room, own.total)
    if (message := _short(config, own.total)) is not None:
        print(_table(rows, {}))
        print(message)
        return ExitCode.DONE
    with tempfile.TemporaryDirectory(prefix="tutti-dry-run-") as folder:
        code = launch(
            _step,
            (task, chosen, Path(folder)),
            processes=config.device_count,
            logs=Path(folder) / "logs",
            timeout=config.timeout,
            preload=preload,
            limits=config.limits,
        )
        if code == ExitCode.DONE:
            ranks = json.loads((Path(folder) / planned.MEASURED).read_text(encoding="utf-8"))
            print(_table(rows, max(ranks, key=lambda rank: rank["total"])))
    return code


def _of_stages(
    task: str, config: PlannedRun, found: MemoryFacts, room: int, preload: Sequence[str]
) -> tuple[Memory, PlannedRun | None, PlannedRun]:
    """Predict the stages of a pipeline, print the stage partition, and search for a better one if it does not fit.

    Args:
        task: name of the task.
        config: configuration of the run.
        found: sizes of the model.
        room: bytes of a device.
        preload: modules that every rank imports.

    Returns:
        Memory of the fullest device, the nearest plan if no partition fits (else None), and the configuration to run.
    """
    from tutti.planning import memory_plan as planned
    from tutti.planning import pipeline_memory

    plan = isolated.call_forked(pipeline_memory.observe_stages, task, config, _seconds(task, config, preload))
    plans = pipeline_memory.plan_stage_memory(found, plan, config)
    other = None
    if max(plan.total for plan in plans) > room:
        asked = "as asked for" if pipeline_memory.stage_layout(config).begins else f"most even in {_kind(plan)}"
        print(f"{asked}: {_cut(plan, plans)}, which does not fit")
        if (better := pipeline_memory.fitting_stage_plan(found, plan, config, room)) is not None:
            plan, plans = better, pipeline_memory.plan_stage_memory(found, better, config)
            print(f"most even that fits: {_cut(plan, plans)}")
            print(f"to train so: {pipeline_memory.with_cuts(config, plan).strategy}")
        else:
            workers = config.workers and max(config.workers, config.device_count)
            shared = replace(config, strategy="sharded", workers=workers)
            other = pipeline_memory.nearest_stage_plan(found, plan, config, room) or planned.nearest_plan(
                found, shared, room
            )
    else:
        print(f"stages: {_cut(plan, plans)}")
    return max(plans, key=lambda plan: plan.total), other, pipeline_memory.with_cuts(config, plan)


def _cut(plan: StagePlan, plans: Sequence[Memory]) -> str:
    """Describe a stage partition: number of stages, first module of each, shares, and bytes on each device."""
    shares = " | ".join(f"{share:.0%}" for share in plan.shares)
    held = " | ".join(format_bytes(plan.total) for plan in plans)
    where = ", ".join(name or "a call of no module" for name in plan.names)
    return f"{len(plan.shares)}, cut before {where} ({shares} of the {_kind(plan)}; {held})"


def _kind(plan: StagePlan) -> str:
    return "time" if plan.measured else "parameters"


def _seconds(task: str, config: PlannedRun, preload: Sequence[str]) -> dict[str, float]:
    """Measure the seconds of each module in a process of its own; empty if a run would not measure, or it fails."""
    from tutti.planning import pipeline_memory

    if not pipeline_memory.needs_module_times(config):
        return {}
    with tempfile.TemporaryDirectory(prefix="tutti-dry-run-") as folder:
        code = launch(
            _clock,
            (task, pipeline_memory.timing_config(config), Path(folder)),
            processes=1,
            logs=Path(folder) / "logs",
            timeout=config.timeout,
            preload=preload,
            limits=config.limits,
        )
        # The launcher has reported any failure; a model too large for one device is partitioned by parameters.
        seconds: dict[str, float] = (
            json.loads((Path(folder) / pipeline_memory.SECONDS).read_text("utf-8")) if code == 0 else {}
        )
    return seconds


def _clock(task: str, config: PlannedRun, folder: Path) -> None:
    from tutti.planning.pipeline_memory import time_modules

    time_modules(task, config, folder)


def _notes(config: PlannedRun, known: bool) -> list[str]:
    """Return the assumptions of the prediction, for the user."""
    choice = config.strategy_choice
    shape = config.shape
    notes = [] if known else ["without activations: what a stream gives is not known before it is read"]
    if shape["tensor"] > 1:
        notes.append("layers are taken to be split into equal parts; the fullest one may need more")
    if choice.row.one_copy:
        notes.append("counted as if every device had its own parameters and optimizer, not one copy for all")
    return notes


def _room(config: PlannedRun, memory: str | None) -> int:
    """Return the bytes of a device: as given, else of the smallest GPU, else a process's share of this node."""

    if memory is not None:
        return parse_bytes(memory, "--memory")
    if count_accelerators(config.device, os.environ):
        result = isolated.run_module("tutti.launcher.torch_facts", [], _PATIENCE)
        gpus = json.loads(result.out)["gpus"] if result.code == 0 else []
        if gpus:
            return min(int(gpu["memory_bytes"]) for gpu in gpus)
    return memory_share(config.device_count)


def _short(config: PlannedRun, each: float) -> str | None:
    """Return why no step is measured: this node has too little free memory for the processes. None if it has enough."""

    if count_accelerators(config.device, os.environ):
        return None
    here = free_memory(config.device_count)
    if _HEAP * each + _RUNTIME <= here:
        return None
    room = format_bytes(here)
    return f"not measured: this host has {room} free for each of {counted(int(config.devices), 'process')}, too little"


def _step(task: str, config: PlannedRun, folder: Path) -> None:
    from tutti.planning.memory_plan import measure_memory

    measure_memory(task, config, folder)


def _table(rows: Mapping[str, float], found: Mapping[str, float]) -> str:
    """Return a table with a line for each kind of bytes: predicted, and measured on the device that took most.

    >>> print(_table({"parameters": 1024, "gradients": 1024, "total": 2048}, {}))
                       predicted
    parameters             1 KiB
    gradients              1 KiB
    total                  2 KiB
    """
    shown, measured = dict(rows), dict(found)
    if found:
        total = shown.pop("total")
        shown |= {"rest": sum(rows.get(name, 0) for name in _REST), "total": total}
        measured["rest"] = max(found["total"] - sum(found[name] for name in ("parameters", "buffers", "optimizer")), 0)
    lines = [f"{'':<16}{'predicted':>12}" + f"{'measured':>12}" * bool(found)]
    for name, value in shown.items():
        text = "besides state" if name == "rest" else name
        lines.append(
            f"{text:<16}{format_bytes(value):>12}" + (f"{format_bytes(measured[name]):>12}" if name in measured else "")
        )
    return "\n".join(lines)


def _too_large(config: PlannedRun, other: PlannedRun | None, room: int, total: float) -> UsageError:
    """Return the error, with the nearest plan that fits as its remedy."""
    remedy = "no number of devices up to 1,024 makes it fit: take a smaller model"
    if other is not None:
        names = ("strategy", "devices", "workers", "batch_size", "micro_batch")
        changed = [name for name in names if getattr(other, name) != getattr(config, name)]
        flags = [f"--{name.replace('_', '-')} {getattr(other, name)}" for name in changed]
        remedy = f"take {' '.join(flags)}"
    return UsageError(
        f"a device needs {format_bytes(total)} and has {format_bytes(room)}",
        where=f"--strategy {config.strategy} on {counted(int(config.devices), 'device')}",
        why="parameters, gradients, optimizer state and activations together do not fit",
        remedy=remedy,
    )
