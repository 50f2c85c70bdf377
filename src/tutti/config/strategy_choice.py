"""Parse the text of a strategy with its options, once, into the object that is carried to its use. No torch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from tutti.config.layout_config import PipelineConfig
from tutti.config.spec import Duration, Spec, StrategyOptions, build_options
from tutti.config.strategy_table import ALIASES, TABLE, Strategy
from tutti.errors import UsageError, counted, did_you_mean

# Option of a layout or gradient synchronisation → device mesh axis whose extent it sets.
_AXES = {"replicas": "replica", "shards": "shard", "stages": "stage", "tensor": "tensor"}


@dataclass(frozen=True)
class StrategyChoice:
    """A strategy with its options filled in, as ``--strategy`` names it: a model layout and a gradient synchronisation.

    Attributes:
        name: name of the strategy, never an alias.
        row: its row of the table of strategies, with the capabilities that hold for these options.
        layout: options of the model layout.
        sync: options of the gradient synchronisation.
        text: the strategy as it was given, ``name:key=value,…``; not compared.
    """

    name: str
    row: Strategy
    layout: StrategyOptions
    sync: StrategyOptions
    text: str = field(compare=False)

    def shape(self, devices: int) -> dict[str, int]:
        """Return the extent of each axis of this strategy's device mesh: ``replica``, ``shard``, ``stage``, ``tensor``.

        The product of the extents is ``devices``. The strategy's options ``replicas``, ``shards``, ``stages`` and
        ``tensor`` fix extents; an axis other than ``replica`` without an option of the strategy has extent 1. The first
        of ``shards``, ``stages`` and ``tensor`` that is None takes all devices that the fixed extents leave;
        ``replica`` takes the factor that then remains.

        Args:
            devices: number of devices of the run.

        Raises:
            UsageError: the fixed extents do not divide the number of devices, or leave some of the devices out.
        """
        given = {option: self._option(option) for option in _AXES}
        open_ = [option for option, extent in given.items() if extent is None and option != "replicas"]
        fixed = math.prod(extent or 1 for extent in given.values())
        if devices % fixed or (given["replicas"] and not open_ and devices != fixed):
            names = {"tensor": "tensor ranks"}
            chosen = {names.get(option, option): n for option, n in given.items() if n and n > 1}
            parts = " × ".join(f"{n} {option}" for option, n in chosen.items())
            raise UsageError(
                f"{counted(devices, 'device')} cannot hold {parts}",
                remedy=self._nearest(devices, given, exact=bool(given["replicas"])),
            )
        if open_:
            given[open_[0]] = devices // fixed
        shape = {axis: given[option] or 1 for option, axis in _AXES.items()}
        return {**shape, "replica": devices // math.prod(n for axis, n in shape.items() if axis != "replica")}

    def data_ranks(self, devices: int) -> int:
        """Return the number of ranks among which this strategy divides a global batch.

        The number is the product of the mesh extents ``replica`` and ``shard``; the ranks along ``stage`` and
        ``tensor`` work on the same samples.

        Args:
            devices: number of devices of the run.

        Raises:
            UsageError: the strategy does not fit this number of devices.
        """
        shape = self.shape(devices)
        return shape["replica"] * shape["shard"]

    def _option(self, name: str) -> int | None:
        """Return an option's extent: as given, None where it is open, 1 where the strategy has no such option."""
        extents = {**self.sync.extents, **self.layout.extents}
        return extents.get(name, None if name == "replicas" else 1)

    def _nearest(self, devices: int, given: Mapping[str, int | None], exact: bool) -> str:
        """Return the remedy for a number of devices that does not fit.

        Args:
            devices: their number.
            given: extents by option.
            exact: whether the extents fix the number of devices, and not only a divisor of it.
        """
        chosen = {option: extent for option, extent in given.items() if extent and extent > 1}
        fixed = math.prod(chosen.values())
        if len(chosen) > 1 or exact:
            return f"take {counted(fixed, 'device')}" if exact else f"take a multiple of {fixed} devices"
        option = next(iter(chosen))
        return f"take a multiple of {fixed} devices, or {option}={_divisor(devices, fixed)}"

    def parts(self, devices: int) -> bool:
        """Return whether each device keeps only a part of the parameters by this strategy.

        True with pipeline stages, with tensor parallelism, and with FSDP2's shards of the parameters; False with one
        device.

        Args:
            devices: number of devices of the run, from which options of the strategy that are not given (such as the
                number of stages) follow.

        Raises:
            UsageError: the strategy does not fit this number of devices.
        """
        shape = self.shape(devices)
        return shape["stage"] * shape["tensor"] > 1 or self.sync.shards_parameters(shape)

    def micro_batch(self, given: int | None, batch: int, workers: int) -> int | None:
        """Return the size limit of a micro-batch in samples, from an option of the strategy or from ``--micro-batch``.

        A pipeline may have the option ``micro_batches``: into how many micro-batches a worker's samples of a global
        batch are divided.

        Args:
            given: ``--micro-batch`` in samples, used where the strategy has no ``micro_batches``; None without the
                option.
            batch: samples of a global batch.
            workers: number of logical workers, the fixed shares into which a global batch is divided.

        Returns:
            The largest number of samples of a micro-batch: ``given``, or with ``micro_batches`` the samples of a worker
            (``batch / workers``, rounded up) divided by that number, again rounded up. None for no limit.

        Raises:
            UsageError: both ``--micro-batch`` and ``micro_batches`` are given.
        """
        number = self.layout.micro_batches if isinstance(self.layout, PipelineConfig) else None
        if number is None:
            return given
        if given is not None:
            raise UsageError(
                f"--micro-batch {given} and micro_batches={number} both say how a worker's share is cut",
                remedy="leave out one of the two",
            )
        return math.ceil(math.ceil(batch / workers) / number)

    def counted(self, steps: Callable[[Duration], int]) -> StrategyChoice:
        """Return a copy of this strategy with its duration options (``3ep``, ``20000sa``) converted to steps.

        Durations are in epochs (``ep``), samples (``sa``) or steps.

        Args:
            steps: function that returns the number of steps of the run that a duration takes.
        """
        return dataclasses.replace(self, sync=self.sync.resolve_durations(steps))


@lru_cache(maxsize=256)
def parse_strategy(text: str) -> StrategyChoice:
    """Parse the text of ``--strategy`` into a strategy with its options, defaults filled in.

    A run parses its text once: ``TrainConfig.strategy_choice`` for a command, ``chosen_strategy`` for a script. Results
    are cached for searches of plans, which make the same texts thousands of times.

    Args:
        text: ``NAME`` or ``NAME:KEY=VALUE,KEY=VALUE``.

    Returns:
        A ``StrategyChoice``: the strategy's ``name`` (in place of an alias), its row of the table with its capabilities
        (``row``), and the options of its model layout (``layout``) and of its gradient synchronisation (``sync``).

    Raises:
        UsageError: an unknown name, key or value; the message proposes the nearest known one.

    >>> parse_strategy("fsdp:stage=2").name
    'sharded'
    """
    given = Spec.parse(text, "--strategy")
    row = given.choose({**TABLE, **{alias: TABLE[name] for alias, name in ALIASES.items()}}, "strategy")
    spec = Spec(ALIASES.get(given.name, given.name), given.options)
    fields = {config: {f.name for f in dataclasses.fields(config)} for config in (row.layout, row.sync)}
    for key in spec.options:
        if not any(key in names for names in fields.values()):
            known = sorted(set().union(*fields.values()))
            remedy = did_you_mean(key, known) if known else "it has no options"
            raise UsageError(f"unknown option '{key}'", where=f"--strategy {spec.name}", remedy=remedy)
    layout, sync = (
        build_options(config, {k: v for k, v in spec.options.items() if k in names}, f"--strategy {spec.name}")
        for config, names in fields.items()
    )
    # Options may change capabilities of the strategy.
    row = dataclasses.replace(row, **layout.capabilities(), **sync.capabilities())
    return StrategyChoice(spec.name, row, layout, sync, text)


def _divisor(devices: int, stages: int) -> int:
    return max(d for d in range(1, devices + 1) if devices % d == 0 and d <= stages)
