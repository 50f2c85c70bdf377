"""A strategy with its options: read from text, laid out on devices, made."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol, runtime_checkable

from tutti.errors import UsageError, did_you_mean
from tutti.laws.averaging import Averaging
from tutti.layouts.config import PipelineConfig
from tutti.spec import Duration, Spec, StrategyOptions, build
from tutti.strategies.table import TABLE, Strategy
from tutti.types import Average, Exchange, Layout, Replica, Setting

# Which option of a layout or an exchange sets the extent of which axis of the grid.
_AXES = {"replicas": "replica", "shards": "shard", "stages": "stage", "tensor": "tensor"}


@dataclass(frozen=True)
class Choice:
    """A strategy with its options filled in."""

    name: str
    row: Strategy
    layout: Any
    exchange: StrategyOptions

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

    def parts(self, devices: int) -> bool:
        """Whether every device keeps a part of the model alone."""
        shape = self.shape(devices)
        return shape["stage"] * shape["tensor"] > 1 or self.exchange.takes_rows(shape)

    def counted(self, steps: Callable[[Duration], int]) -> Choice:
        """The same with the lengths among its options in steps."""
        return dataclasses.replace(self, exchange=self.exchange.counted(steps))

    def make(self, setting: Setting) -> tuple[Layout, Exchange]:
        """The two objects that run it."""
        layout = _load("layouts", self.row.layout)(self.layout, setting)
        return layout, _load("exchanges", self.row.exchange)(self.exchange, setting)


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
    layout, exchange = (
        build(config, {k: v for k, v in spec.options.items() if k in names}, f"--strategy {spec.name}")
        for config, names in fields.items()
    )
    # A mode of the same strategy may promise less than the others.
    return Choice(spec.name, dataclasses.replace(row, **layout.promises(), **exchange.promises()), layout, exchange)


def micro_batch(choice: Choice, given: int | None, batch: int, workers: int) -> int | None:
    """Largest micro-batch, in samples: as given, or what cuts a worker's share of ``batch`` into ``micro_batches``."""
    number = choice.layout.micro_batches if isinstance(choice.layout, PipelineConfig) else None
    if number is None:
        return given
    if given is not None:
        raise UsageError(
            f"--micro-batch {given} and micro_batches={number} both say how a worker's share is cut",
            remedy="leave out one of the two",
        )
    return math.ceil(math.ceil(batch / workers) / number)


@runtime_checkable
class KeepsAverage(Protocol):
    """An exchange that keeps the average of the weights in a way of its own."""

    def average(self, averaging: Averaging) -> Average:
        """Begin one at the weights as they are. Collective."""


def average(replica: Replica, exchange: Exchange, setting: Setting) -> Average | None:
    """The average of the weights that the setting asks for; to be made once the exchange has taken the replica over.

    An exchange may keep it in a way of its own. Collective.
    """
    if setting.averaging is None:
        return None
    if isinstance(exchange, KeepsAverage):
        return exchange.average(setting.averaging)
    made: Average = _load("exchanges", "average:Average")(replica, setting.averaging, setting)
    return made


def ahead() -> Any:
    """The module that knows what devices of a pipeline hold before there are any, ``layouts.ahead``."""
    return import_module("tutti.layouts.ahead")


def _load(room: str, name: str) -> Any:
    module, _, attribute = name.partition(":")
    return getattr(import_module(f"tutti.{room}.{module}"), attribute)


def _divisor(devices: int, stages: int) -> int:
    return max(d for d in range(1, devices + 1) if devices % d == 0 and d <= stages)
