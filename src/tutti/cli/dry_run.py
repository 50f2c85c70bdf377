"""``tutti train --dry-run``: the memory that each device will need, and what one step has really taken."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tutti import strategies
from tutti.cli.devices import count_gpus
from tutti.errors import ExitCode, UsageError
from tutti.measure.finding import size
from tutti.training.config import TrainConfig
from tutti.world.launch import launch

if TYPE_CHECKING:
    from tutti.laws.memory import Memory
    from tutti.training.memory import Facts

_PATIENCE = 120.0
# Guesses: what a process takes besides its tensors, and what the C library's heap holds for each byte that is in use.
_RUNTIME, _HEAP = 0.4 * 2**30, 1.3
_REST = ("gradients", "messages", "average", "activations")


def dry_run(task: str, config: TrainConfig, memory: str | None, preload: Sequence[str]) -> int:
    """Print the prediction, refuse what cannot fit, and measure one step of what can.

    Args:
        task: what is trained.
        config: with a number of devices.
        memory: of a device, such as ``16GB``; None for what is here.
        preload: modules that every rank imports.

    Raises:
        UsageError: it does not fit, with the nearest plan that does.
    """
    from tutti.training import memory as planned

    room = _room(config, memory)
    found = planned.facts(task, config)
    print(f"{found.parameters:,} parameters · {config.strategy} · {config.devices} devices of {size(room)}")
    for text in _notes(config, known=found.activations is not None):
        print(text)
    if strategies.parse(config.strategy).shape(int(config.devices))["stage"] > 1:
        own, other, chosen = _of_stages(task, config, found, room, preload)
    else:
        chosen, own = config, planned.plan(found, config)
        other = planned.nearest(found, config, room) if own.total > room else None
    rows = planned.rows_of(own)
    if own.total > room:
        print(_table(rows, {}))
        raise _too_large(config, other, room, own.total)
    if (said := _short(config, own.total)) is not None:
        print(_table(rows, {}))
        print(said)
        return ExitCode.DONE
    with tempfile.TemporaryDirectory(prefix="tutti-dry-run-") as folder:
        code = launch(
            _step,
            (task, chosen, Path(folder)),
            processes=int(config.devices),
            logs=Path(folder) / "logs",
            timeout=config.timeout,
            preload=preload,
            limits=config.limits(),
        )
        if code == ExitCode.DONE:
            ranks = json.loads((Path(folder) / planned.MEASURED).read_text(encoding="utf-8"))
            print(_table(rows, max(ranks, key=lambda rank: rank["total"])))
    return code


def _of_stages(
    task: str, config: TrainConfig, found: Facts, room: int, preload: Sequence[str]
) -> tuple[Memory, TrainConfig | None, TrainConfig]:
    """What the fullest device of a pipeline holds, the nearest plan where that is too much, and what to run.

    Where the cut that a run would make does not fit, another one is taken that does.
    """
    from tutti.training import memory as planned
    from tutti.training import staged

    ahead = staged.look(task, config, _seconds(task, config, preload))
    plans = staged.plan(found, ahead, config)
    other = None
    if max(plan.total for plan in plans) > room:
        asked = "as asked for" if strategies.parse(config.strategy).layout.cuts else f"most even in {_kind(ahead)}"
        print(f"{asked}: {_cut(ahead, plans)}, which does not fit")
        if (better := staged.fitting(found, ahead, config, room)) is not None:
            ahead, plans = better, staged.plan(found, better, config)
            print(f"most even that fits: {_cut(ahead, plans)}")
            print(f"to train so: {staged.pinned(config, ahead).strategy}")
        else:
            workers = config.workers and max(config.workers, int(config.devices))
            shared = replace(config, strategy="sharded", workers=workers)
            other = staged.nearest(found, ahead, config, room) or planned.nearest(found, shared, room)
    else:
        print(f"stages: {_cut(ahead, plans)}")
    return max(plans, key=lambda plan: plan.total), other, staged.pinned(config, ahead)


def _cut(ahead: Any, plans: Sequence[Memory]) -> str:
    """Where a model is cut, each stage's share, and what each device holds."""
    shares = " | ".join(f"{share:.0%}" for share in ahead.shares)
    held = " | ".join(size(plan.total) for plan in plans)
    where = ", ".join(name or "something without a name" for name in ahead.names)
    return f"{len(ahead.shares)}, cut before {where} ({shares} of the {_kind(ahead)}; {held})"


def _kind(ahead: Any) -> str:
    return "time" if ahead.measured else "parameters"


def _seconds(task: str, config: TrainConfig, preload: Sequence[str]) -> dict[str, float]:
    """How long each module takes, measured in a process of its own; empty where a run does not measure."""
    from tutti.training import staged

    if not staged.timed(config):
        return {}
    with tempfile.TemporaryDirectory(prefix="tutti-dry-run-") as folder:
        code = launch(
            _clock,
            (task, staged.alone(config), Path(folder)),
            processes=1,
            logs=Path(folder) / "logs",
            timeout=config.timeout,
            preload=preload,
            limits=config.limits(),
        )
        # What went wrong has been said; a model too large for one device is cut by parameters.
        told: dict[str, float] = json.loads((Path(folder) / staged.SECONDS).read_text("utf-8")) if code == 0 else {}
    return told


def _clock(task: str, config: TrainConfig, folder: Path) -> None:
    from tutti.training.staged import clock

    clock(task, config, folder)


def _notes(config: TrainConfig, known: bool) -> list[str]:
    """What the prediction takes for granted."""
    choice = strategies.parse(config.strategy)
    shape = choice.shape(int(config.devices))
    notes = [] if known else ["without activations: what a stream gives is not known before it is read"]
    if shape["tensor"] > 1:
        notes.append("layers are taken to be split into equal parts; the fullest one may need more")
    if choice.row.exchange.startswith(("central", "server")):
        notes.append("counted as if every device had its own parameters and optimizer, not one copy for all")
    return notes


def _room(config: TrainConfig, memory: str | None) -> int:
    """Bytes of a device: as told, or as found."""
    from tutti.measure import isolated
    from tutti.measure.memory import parse_bytes, room

    if memory is not None:
        return parse_bytes(memory, "--memory")
    if config.device != "cpu" and count_gpus(os.environ):
        told = isolated.run_module("tutti.measure.torch_facts", [], _PATIENCE)
        gpus = json.loads(told.out)["gpus"] if told.code == 0 else []
        if gpus:
            return min(int(gpu["memory_bytes"]) for gpu in gpus)
    return room(int(config.devices))


def _short(config: TrainConfig, each: float) -> str | None:
    """Why no step is measured: this host has less memory than its processes might take. None where it has enough."""
    from tutti.measure.memory import free

    if config.device != "cpu" and count_gpus(os.environ):
        return None
    here = free(int(config.devices))
    if _HEAP * each + _RUNTIME <= here:
        return None
    return f"not measured: this host has {size(here)} free for each of {config.devices} processes, too little for that"


def _step(task: str, config: TrainConfig, folder: Path) -> None:
    from tutti.training.memory import measure

    measure(task, config, folder)


def _table(rows: Mapping[str, float], found: Mapping[str, float]) -> str:
    """A line for each kind of bytes: predicted, and measured on the device that took most.

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
        lines.append(f"{text:<16}{size(value):>12}" + (f"{size(measured[name]):>12}" if name in measured else ""))
    return "\n".join(lines)


def _too_large(config: TrainConfig, other: TrainConfig | None, room: int, total: float) -> UsageError:
    """What to say, with the nearest plan that fits."""
    remedy = "no number of devices up to 1,024 makes it fit: take a smaller model"
    if other is not None:
        names = ("strategy", "devices", "workers", "batch_size", "micro_batch")
        changed = [name for name in names if getattr(other, name) != getattr(config, name)]
        flags = [f"--{name.replace('_', '-')} {getattr(other, name)}" for name in changed]
        remedy = f"take {' '.join(flags)}"
    return UsageError(
        f"a device needs {size(total)} and has {size(room)}",
        where=f"--strategy {config.strategy} on {config.devices} devices",
        why="parameters, gradients, optimizer state and activations together are more than fits",
        remedy=remedy,
    )
