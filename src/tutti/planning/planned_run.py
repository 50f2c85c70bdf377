"""The configuration of a run that is planned or simulated, on a stated number of devices."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from typing import Any

from tutti.config.strategy_choice import parse_strategy
from tutti.config.train_config import TrainConfig


@dataclass(frozen=True, kw_only=True)
class PlannedRun(TrainConfig):
    """Options of a run on a stated number of devices: a ``TrainConfig`` whose option ``devices`` is a whole number.

    Properties give the number of devices (``device_count``), the device mesh (``shape``) and the number of
    ``data_ranks``.
    """

    @classmethod
    def of(cls, config: TrainConfig) -> PlannedRun:
        """Return a configuration of ``tutti train`` as one of a planned run, whose number of devices is known.

        Args:
            config: options of the run; ``devices`` must be a whole number as text, which is not checked here.

        Returns:
            A ``PlannedRun`` with the same options, which has ``device_count`` and the device mesh (``shape``) as
            properties; ``config`` itself if it is a ``PlannedRun`` already.
        """
        if isinstance(config, cls):
            return config
        return cls(**{field.name: getattr(config, field.name) for field in fields(TrainConfig)})

    @cached_property
    def device_count(self) -> int:
        """Number of devices of the planned run, as an int; the option ``devices`` is a text.

        Raises ValueError if the text is no whole number, such as ``auto``.
        """
        return int(self.devices)

    @cached_property
    def shape(self) -> dict[str, int]:
        """Device mesh of the planned run: number of ranks along each axis, by the axis's name.

        The axes are ``replica``, ``shard``, ``stage`` and ``tensor``; the product of the four numbers is the number of
        devices. Raises UsageError if the number of devices does not fit the strategy.
        """
        return self.strategy_choice.shape(self.device_count)

    @cached_property
    def data_ranks(self) -> int:
        """Number of data ranks, among which the planned run divides a global batch: mesh extents replica × shard.

        The stages and tensor ranks of one replica compute the same samples, and count as one data rank.

        Raises UsageError if the number of devices does not fit the strategy.
        """
        return self.shape["replica"] * self.shape["shard"]

    def sized(self, batch_size: int, micro_batch: int | None, activation_checkpointing: str) -> PlannedRun:
        """Return a copy of this run with other batch sizes, which shares the parsed options with this run.

        A search makes such a copy for each of its thousands of plans. To be fast, it takes the sizes as valid: options
        are parsed and checked again only in a run whose batch grows (``--batch-growth``).

        Args:
            batch_size: global batch, in samples.
            micro_batch: largest number of samples in a micro-batch; None for the whole share of a logical worker.
            activation_checkpointing: value of ``--activation-checkpointing``, such as ``none`` or ``selective``.

        Raises:
            UsageError: the number of devices does not fit the strategy, or ``--batch-growth`` conflicts with
                ``batch_size``.
        """
        changed: dict[str, Any] = {
            "batch_size": batch_size,
            "micro_batch": micro_batch,
            "activation_checkpointing": activation_checkpointing,
        }
        if self.batch_growth is not None:
            # Whether a batch may grow is checked anew.
            return replace(self, **changed)
        made = object.__new__(type(self))
        own = vars(self)
        vars(made).update({name: own[name] for name in _OPTIONS} | changed | {n: getattr(self, n) for n in _PARSED})
        return made


_OPTIONS = tuple(field.name for field in fields(PlannedRun))
_PARSED = ("strategy_choice", "optimizer_choice", "device_count", "shape", "data_ranks")
"""Properties that ``sized`` shares between copies: they do not depend on sizes."""


def mesh_extents(strategy: str, devices: int) -> dict[str, int]:
    """Return the number of ranks along each axis of a device mesh, as ``StrategyChoice.shape`` does, from a cache.

    Args:
        strategy: text of ``--strategy``.
        devices: number of devices of the run.

    Returns:
        Number of ranks by name of the axis: ``replica``, ``shard``, ``stage`` and ``tensor``; a new dict each time.

    Raises:
        UsageError: an unknown strategy or option, or the number of devices does not fit the strategy.
    """
    return dict(_known_extents(strategy, devices))


@lru_cache(maxsize=4096)
def _known_extents(strategy: str, devices: int) -> dict[str, int]:
    return parse_strategy(strategy).shape(devices)
