"""Parse a strategy with its options, lay it out on a device mesh, and build its layout and gradient synchronisation."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import Any, Protocol, runtime_checkable

from tutti.config.averaging import Averaging
from tutti.config.layout_config import PipelineConfig
from tutti.config.spec import Duration, Spec, StrategyOptions, build_options
from tutti.errors import UsageError, counted, did_you_mean
from tutti.parallel.registry import ALIASES, TABLE, Strategy
from tutti.types.gradient_sync import GradientSync
from tutti.types.replica_runner import ModelLayout, ReplicaRunner
from tutti.types.run_context import RunContext
from tutti.types.weight_average import Average

# Option of a layout or gradient synchronisation → device mesh axis whose extent it sets.
_AXES = {"replicas": "replica", "shards": "shard", "stages": "stage", "tensor": "tensor"}


@dataclass(frozen=True)
class Choice:
    """A strategy with its options filled in, as ``--strategy`` names it: a model layout and a gradient synchronisation.

    Attributes:
        name: name of the strategy, never an alias.
        row: its row of the registry of strategies, with the capabilities that hold for these options.
        layout: options of the model layout.
        exchange: options of the gradient synchronisation.
    """

    name: str
    row: Strategy
    layout: StrategyOptions
    exchange: StrategyOptions

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
        extents = {**self.exchange.extents, **self.layout.extents}
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
        return shape["stage"] * shape["tensor"] > 1 or self.exchange.shards_parameters(shape)

    def counted(self, steps: Callable[[Duration], int]) -> Choice:
        """Return a copy of this strategy with its duration options (``3ep``, ``20000sa``) converted to steps.

        Durations are in epochs (``ep``), samples (``sa``) or steps.

        Args:
            steps: function that returns the number of steps of the run that a duration takes.
        """
        return dataclasses.replace(self, exchange=self.exchange.resolve_durations(steps))

    def make(self, run_context: RunContext) -> tuple[ModelLayout, GradientSync]:
        """Construct the model layout and the gradient synchronisation of this strategy. Not collective.

        Neither has the model yet; the caller hands the model to the layout's ``build``, and its result to the
        synchronisation's ``attach``.

        Args:
            run_context: communicators and settings of the run.

        Returns:
            A pair. The layout (``ModelLayout``) places a replica of the model on one rank or several: whole, cut into
            pipeline stages, or split over tensor ranks. The synchronisation (``GradientSync``) reduces gradients over
            the replicas and makes the updates.

        Raises:
            UsageError: options of the strategy cannot be combined with settings of the run, such as a compressed
                ``wire`` in reproducible mode.
        """
        layout = _load(self.row.layout)(self.layout, run_context)
        return layout, _load(self.row.exchange)(self.exchange, run_context)


@lru_cache(maxsize=256)
def parse_strategy(text: str) -> Choice:
    """Parse the text of ``--strategy`` into a strategy with its options, defaults filled in. The result is cached.

    Args:
        text: ``NAME`` or ``NAME:KEY=VALUE,KEY=VALUE``.

    Returns:
        A ``Choice``: the strategy's ``name`` (in place of an alias), its row of the registry with its capabilities
        (``row``), and the options of its model layout (``layout``) and of its gradient synchronisation (``exchange``).

    Raises:
        UsageError: an unknown name, key or value; the message proposes the nearest known one.

    >>> parse_strategy("fsdp:stage=2").name
    'sharded'
    """
    given = Spec.parse(text, "--strategy")
    row = given.choose({**TABLE, **{alias: TABLE[name] for alias, name in ALIASES.items()}}, "strategy")
    spec = Spec(ALIASES.get(given.name, given.name), given.options)
    fields = {
        config: {f.name for f in dataclasses.fields(config)} for config in (row.layout_config, row.exchange_config)
    }
    for key in spec.options:
        if not any(key in names for names in fields.values()):
            known = sorted(set().union(*fields.values()))
            remedy = did_you_mean(key, known) if known else "it has no options"
            raise UsageError(f"unknown option '{key}'", where=f"--strategy {spec.name}", remedy=remedy)
    layout, exchange = (
        build_options(config, {k: v for k, v in spec.options.items() if k in names}, f"--strategy {spec.name}")
        for config, names in fields.items()
    )
    # Options may change the class and capabilities of the strategy.
    if exchange.variant is not None:
        row = dataclasses.replace(row, exchange=row.variants[exchange.variant])
    return Choice(
        spec.name, dataclasses.replace(row, **layout.capabilities(), **exchange.capabilities()), layout, exchange
    )


def micro_batch(choice: Choice, given: int | None, batch: int, workers: int) -> int | None:
    """Return the size limit of a micro-batch in samples, from the options of the strategy or from ``--micro-batch``.

    Args:
        choice: the strategy. A pipeline may have the option ``micro_batches``: into how many micro-batches a worker's
            samples of a global batch are divided.
        given: ``--micro-batch`` in samples, used where the strategy has no ``micro_batches``; None without the option.
        batch: samples of a global batch.
        workers: number of logical workers, the fixed shares into which a global batch is divided.

    Returns:
        The largest number of samples of a micro-batch: ``given``, or with ``micro_batches`` the samples of a worker
        (``batch / workers``, rounded up) divided by that number, again rounded up. None for no limit.

    Raises:
        UsageError: both ``--micro-batch`` and ``micro_batches`` are given.
    """
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
    """Protocol of a gradient synchronisation that has its own moving average (EMA) of the weights.

    The function ``average`` of this module uses a ``ParameterAverage`` for all other synchronisations.
    """

    def average(self, averaging: Averaging) -> Average:
        """Create a moving average (EMA) of the model's weights that starts from their current values.

        A gradient synchronisation has this method if it keeps the weights, and so their average, in a place of its own,
        such as memory that all ranks of a node share (``CentralStorageSync``). Called once on every rank, after
        ``attach``; collective over the data ranks, which allocate the memory of the average together.

        Args:
            averaging: decay and warm-up of the average.

        Returns:
            An ``Average``, an object whose ``update()`` is to be called after each update of the parameters;
            ``within(merged)`` returns a dict of the model's tensors with the averages in place of the weights.

        Raises:
            UsageError: shared memory has no room for the average.
            PeerError: a rank is lost, or does not take part within the timeout.
        """


def average(replica: ReplicaRunner, sync: GradientSync, run_context: RunContext) -> Average | None:
    """Create the moving average (EMA) of the weights that the run asks for; called on all ranks.

    Collective under the strategy ``central_storage``, whose ranks allocate and share one average in memory; under all
    other strategies each rank averages the parameters that it holds, without communication.

    Args:
        replica: the model on this rank and what runs it, after ``sync.attach``.
        sync: the gradient synchronisation; if it has a method ``average`` (``KeepsAverage``), this makes the average.
        run_context: settings of the run; ``averaging`` in it has decay and warm-up, or is None.

    Returns:
        An ``Average``, an object whose ``update()`` is to be called after each update of the parameters;
        ``within(merged)`` returns a dict of the model's tensors with the averages in place of the weights. None where
        ``averaging`` is None.

    Raises:
        UsageError: under ``central_storage``, the shared memory has no room for the average.
        PeerError: a rank is lost, or does not take part within the timeout.
    """
    if run_context.averaging is None:
        return None
    if isinstance(sync, KeepsAverage):
        return sync.average(run_context.averaging)
    made: Average = _load("parameter_average:ParameterAverage")(replica, run_context.averaging, run_context)
    return made


def _load(name: str) -> Any:
    module, _, attribute = name.partition(":")
    return getattr(import_module(f"tutti.parallel.{module}"), attribute)


def _divisor(devices: int, stages: int) -> int:
    return max(d for d in range(1, devices + 1) if devices % d == 0 and d <= stages)
