"""The table of known strategies: a layout (where a replica lives) and an exchange (how replicas agree). No torch.

A new strategy is one new file in ``layouts/`` or ``exchanges/`` and one line here.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from tutti.errors import UsageError, did_you_mean
from tutti.exchanges.config import (
    AllReduceConfig,
    CentralConfig,
    DiLoCoConfig,
    ParameterServerConfig,
    PeriodicConfig,
    ShardedConfig,
    SplitConfig,
)
from tutti.layouts.config import HybridConfig, LayersConfig, PipelineConfig, TensorConfig, WholeConfig
from tutti.spec import Duration, Spec, build
from tutti.types import Average, Exchange, Layout, Replica, Setting


@dataclass(frozen=True)
class Strategy:
    """One row: which classes make it, with which options, and what it promises.

    Attributes:
        layout, exchange: ``module:class`` below ``tutti.layouts`` and ``tutti.exchanges``.
        layout_config, exchange_config: their options; field names do not overlap.
        summary: one line for people.
        reproducible: bit-identical on any number of data ranks in reproducible mode (has a tolerance-0 row).
        workers_together: all workers make one update, from the sum of their gradients.
        own_loop: works with ``run.backward`` and a gated ``optimizer.step``.
        one_model: workers hold the same weights at any time, so that their samples may be normalised together.
        averages: all ranks see the same parameters after an update, so that their average can be kept.
        worker_gradients: each worker's own gradient can be seen before the sum.
        outlives: ranks go on where one is killed; none needs another for a step.
        in_step: every rank makes as many steps as the run has.
        most_devices: largest number of devices; None for no limit.
        needs: module, package and extra that it does not work without.
    """

    layout: str
    layout_config: type
    exchange: str
    exchange_config: type
    summary: str
    reproducible: bool = True
    workers_together: bool = True
    own_loop: bool = True
    one_model: bool = True
    averages: bool = True
    worker_gradients: bool = True
    outlives: bool = False
    in_step: bool = True
    most_devices: int | None = None
    needs: tuple[str, str, str] | None = None


_WHOLE, _ALLREDUCE = ("whole:Whole", WholeConfig), ("allreduce:AllReduce", AllReduceConfig)

TABLE: Mapping[str, Strategy] = {
    "single": Strategy(*_WHOLE, *_ALLREDUCE, "one device; still any number of workers", most_devices=1),
    "mirrored": Strategy(*_WHOLE, *_ALLREDUCE, "a copy on every device, gradients summed"),
    "model_parallel": Strategy(
        "pipeline:Pipeline",
        LayersConfig,
        *_ALLREDUCE,
        "layers on different devices, which work in turn",
        own_loop=False,
    ),
    "pipeline": Strategy(
        "pipeline:Pipeline",
        PipelineConfig,
        *_ALLREDUCE,
        "layers on different devices, with micro-batches under way on all of them",
        own_loop=False,
    ),
    "tensor": Strategy(
        "tensor:Tensor",
        TensorConfig,
        *_ALLREDUCE,
        "each layer split over devices that compute it together",
        reproducible=False,
    ),
    "hybrid": Strategy(
        "hybrid:Hybrid",
        HybridConfig,
        "allreduce:AllReduce",
        SplitConfig,
        "replicas × shards × stages × split layers, on one grid",
        reproducible=False,
        own_loop=False,
    ),
    "central_storage": Strategy(
        *_WHOLE, "central:Central", CentralConfig, "one copy of parameters and optimizer state in the host's memory"
    ),
    "local_sgd": Strategy(
        *_WHOLE,
        "periodic:Periodic",
        PeriodicConfig,
        "every worker trains alone, parameters averaged every H steps",
        workers_together=False,
        own_loop=False,
        one_model=False,
    ),
    "diloco": Strategy(
        *_WHOLE,
        "diloco:DiLoCo",
        DiLoCoConfig,
        "every worker trains alone, an outer optimizer steps along their mean change",
        workers_together=False,
        own_loop=False,
        one_model=False,
    ),
    "parameter_server": Strategy(
        *_WHOLE,
        "server.synchronous:Synchronous",
        ParameterServerConfig,
        "parameters and optimizer on servers, to which workers push their gradients",
        needs=("zmq", "pyzmq", "server"),
    ),
    "sharded": Strategy(
        *_WHOLE,
        "sharded:Sharded",
        ShardedConfig,
        "optimizer state, gradients and parameters shared out over the devices",
        reproducible=False,
        worker_gradients=False,
    ),
}


# Which option of a layout or an exchange sets the extent of which axis of the grid.
_AXES = {"replicas": "replica", "shards": "shard", "stages": "stage", "tensor": "tensor"}


@dataclass(frozen=True)
class Choice:
    """A strategy with its options filled in."""

    name: str
    row: Strategy
    layout: Any
    exchange: Any

    def shape(self, devices: int) -> dict[str, int]:
        """Extents of the grid's axes, from the options called stages, tensor, shards and replicas.

        One of the first three that is None takes all devices that the others leave; replicas are what is left then.
        Raises UsageError where the number of devices does not fit.
        """
        given = {option: self._option(option) for option in _AXES}
        open_ = [option for option, extent in given.items() if extent is None and option != "replicas"]
        fixed = math.prod(extent or 1 for extent in given.values())
        if devices % fixed or (given["replicas"] and not open_ and devices != fixed):
            names = {"tensor": "tensor ranks"}
            chosen = {names.get(option, option): n for option, n in given.items() if n and n > 1}
            parts = " × ".join(f"{n} {option}" for option, n in chosen.items())
            raise UsageError(
                f"{devices} devices cannot hold {parts}",
                remedy=self._nearest(devices, given, exact=bool(given["replicas"])),
            )
        if open_:
            given[open_[0]] = devices // fixed
        shape = {axis: given[option] or 1 for option, axis in _AXES.items()}
        return {**shape, "replica": devices // math.prod(n for axis, n in shape.items() if axis != "replica")}

    def data_ranks(self, devices: int) -> int:
        """Ranks that see different samples."""
        shape = self.shape(devices)
        return shape["replica"] * shape["shard"]

    def _option(self, name: str) -> int | None:
        """An extent: as asked for, None where it is open, 1 where the strategy does not know it."""
        found = [getattr(config, name) for config in (self.layout, self.exchange) if hasattr(config, name)]
        return found[0] if found else (None if name == "replicas" else 1)

    def _nearest(self, devices: int, given: Mapping[str, int | None], exact: bool) -> str:
        """What to do where ``devices`` do not fit."""
        chosen = {option: extent for option, extent in given.items() if extent and extent > 1}
        fixed = math.prod(chosen.values())
        if len(chosen) > 1 or exact:
            return f"take {fixed} devices" if exact else f"take a multiple of {fixed} devices"
        option = next(iter(chosen))
        return f"take a multiple of {fixed} devices, or {option}={_divisor(devices, fixed)}"

    def counted(self, steps: Callable[[Duration], int]) -> Choice:
        """The same with the lengths among its options in steps."""
        counted = getattr(self.exchange, "counted", None)
        return self if counted is None else dataclasses.replace(self, exchange=counted(steps))

    def make(self, setting: Setting) -> tuple[Layout, Exchange]:
        """The two objects that run it."""
        layout = _load("layouts", self.row.layout)(self.layout, setting)
        return layout, _load("exchanges", self.row.exchange)(self.exchange, setting)


def check_sync(choice: Choice, devices: int, reproducible: bool, by_worker: str | None = None) -> None:
    """Raise UsageError where batch norm over the whole global batch does not go with the strategy.

    ``by_worker``: an option that needs each worker computed by itself.
    """
    if by_worker is not None:
        raise UsageError(
            f"--batch-norm sync does not go with {by_worker}",
            why="a device's workers compute as one, and it needs each by itself",
            remedy="leave out one of the two, or take --batch-norm ghost:size=32",
        )
    if not choice.row.one_model:
        raise UsageError(
            f"--batch-norm sync does not go with strategy '{choice.name}'",
            why="its workers hold different weights, so that their activations have no statistics in common",
            remedy="take --strategy mirrored, or --batch-norm ghost:size=32",
        )
    if reproducible and choice.data_ranks(devices) > 1:
        raise UsageError(
            "--batch-norm sync is not reproducible on several devices",
            why="each sums over its own samples first, so that the last bits depend on how many there are",
            remedy="leave out --reproducible, or take --devices 1 or --batch-norm ghost:size=32",
        )


def micro_batch(choice: Choice, given: int | None, batch: int, workers: int) -> int | None:
    """Largest micro-batch, in samples: as given, or what cuts a worker's share of ``batch`` into ``micro_batches``."""
    number: int | None = getattr(choice.layout, "micro_batches", None)
    if number is None:
        return given
    if given is not None:
        raise UsageError(
            f"--micro-batch {given} and micro_batches={number} both say how a worker's share is cut",
            remedy="leave out one of the two",
        )
    return math.ceil(math.ceil(batch / workers) / number)


def average(replica: Replica, exchange: Exchange, setting: Setting) -> Average | None:
    """The average of the weights that the setting asks for; to be made once the exchange has taken the replica over.

    An exchange may keep it in a way of its own. Collective.
    """
    if setting.averaging is None:
        return None
    if own := getattr(exchange, "average", None):
        kept: Average = own(setting.averaging)
        return kept
    made: Average = _load("exchanges", "average:Average")(replica, setting.averaging, setting)
    return made


def ahead() -> Any:
    """The module that knows what devices of a pipeline hold before there are any, ``layouts.ahead``."""
    return import_module("tutti.layouts.ahead")


def parse(text: str) -> Choice:
    """``name:key=value,…`` as a strategy with options. Raises UsageError, naming the nearest name or key."""
    spec = Spec.parse(text, "--strategy")
    row = spec.choose(TABLE, "strategy")
    fields = {
        config: {f.name for f in dataclasses.fields(config)} for config in (row.layout_config, row.exchange_config)
    }
    for key in spec.options:
        if not any(key in names for names in fields.values()):
            known = sorted(set().union(*fields.values()))
            remedy = did_you_mean(key, known) if known else "it has no options"
            raise UsageError(f"unknown option '{key}'", where=f"--strategy {spec.name}", remedy=remedy)
    parts: list[Any] = [
        build(config, {k: v for k, v in spec.options.items() if k in names}, f"--strategy {spec.name}")
        for config, names in fields.items()
    ]
    # A mode of the same strategy may promise less than the others.
    promised = parts[1].promises() if hasattr(parts[1], "promises") else {}
    return Choice(spec.name, dataclasses.replace(row, **promised), *parts)


def check(
    text: str,
    devices: int,
    *,
    workers: int | None = None,
    reproducible: bool = False,
    own_loop: bool = False,
    adaptive: bool = False,
    averaging: bool = False,
    compiled: bool = False,
    cuda: bool = False,
) -> Choice:
    """The strategy, if this many devices and workers can run it.

    ``adaptive``: with ``--lr-scale adascale``; ``averaging``: with ``--ema``; ``compiled``: with ``--compile``;
    ``cuda``: devices are GPUs.

    Raises:
        UsageError: with the nearest combination that can.
    """
    choice = parse(text)
    row = choice.row
    _check_package(choice)
    if row.most_devices is not None and devices > row.most_devices:
        raise UsageError(
            f"strategy '{choice.name}' runs on {row.most_devices} device, not {devices}",
            remedy="take --strategy mirrored, or --devices 1",
        )
    for config in (choice.layout, choice.exchange):
        if hasattr(config, "check"):
            config.check(choice.shape(devices), cuda, compiled)
    ranks = choice.data_ranks(devices)
    if workers is not None and workers < ranks:
        raise UsageError(
            f"{workers} workers cannot be spread over {ranks} data ranks",
            why="a worker's share is never split over devices",
            remedy=f"take --workers {ranks} or more, or --devices {workers * (devices // ranks)} or fewer",
        )
    if reproducible and not row.reproducible:
        raise UsageError(
            f"strategy '{choice.name}' is not reproducible on any number of devices",
            remedy="leave out --reproducible, or take --strategy mirrored",
        )
    if averaging and not row.averages:
        raise UsageError(
            f"--ema does not go with these options of strategy '{choice.name}'",
            why="no two devices see the same parameters after an update",
            remedy="leave out --ema, or let all workers be waited for (mode=sync, no backup)",
        )
    if adaptive:
        _check_adaptive(choice, workers or ranks)
    if reproducible or adaptive:
        _check_tree(choice, "--reproducible" if reproducible else "--lr-scale adascale")
    if own_loop and not row.own_loop:
        able = ", ".join(name for name, other in TABLE.items() if other.own_loop)
        raise UsageError(f"strategy '{choice.name}' needs run.step(batch)", remedy=f"own loops work with: {able}")
    return choice


def _check_package(choice: Choice) -> None:
    """Raise UsageError where the strategy needs a package that is not there."""
    if choice.row.needs is None:
        return
    module, package, extra = choice.row.needs
    if importlib.util.find_spec(module) is None:
        raise UsageError(
            f"strategy '{choice.name}' needs the package {package}",
            remedy=f"run pip install 'tutti[{extra}]', or take --strategy mirrored",
        )


def _check_adaptive(choice: Choice, workers: int) -> None:
    """Raise UsageError where a step's gain cannot be known from the gradients of all workers."""
    if not choice.row.workers_together:
        raise UsageError(
            f"--lr-scale adascale does not go with strategy '{choice.name}'",
            why="its workers make updates of their own, and the gain belongs to one of all workers",
            remedy="take --strategy mirrored, or another --lr-scale",
        )
    if not choice.row.worker_gradients:
        raise UsageError(
            f"--lr-scale adascale does not go with strategy '{choice.name}'",
            why="the gain compares workers' gradients, which are never whole on one device",
            remedy="take --strategy mirrored, or another --lr-scale",
        )
    if workers < 2:
        raise UsageError(
            "--lr-scale adascale needs at least 2 workers",
            why="the gain compares workers' gradients, and one alone says nothing about their variance",
            remedy="take --workers 2 or more",
        )


def _check_tree(choice: Choice, option: str) -> None:
    """Raise UsageError where gradients are not summed worker by worker, as ``option`` needs."""
    if getattr(choice.exchange, "wire", "fp32") != "fp32":
        raise UsageError(
            f"{option} does not go with a compressed wire",
            why="compression acts once a device, so the result would depend on how many there are",
            remedy="leave out one of the two",
        )
    if getattr(choice.exchange, "algorithm", "auto") == "shared_memory":
        raise UsageError(
            f"{option} does not go with algorithm=shared_memory",
            why="its sums go through one fixed tree over messages",
            remedy="leave out the algorithm",
        )


def _load(room: str, name: str) -> Any:
    module, _, attribute = name.partition(":")
    return getattr(import_module(f"tutti.{room}.{module}"), attribute)


def _divisor(devices: int, stages: int) -> int:
    return max(d for d in range(1, devices + 1) if devices % d == 0 and d <= stages)
