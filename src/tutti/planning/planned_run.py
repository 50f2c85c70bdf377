"""The configuration of a run that is planned or simulated, with its strategy parsed once."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property

from tutti import parallel
from tutti.config.train_config import TrainConfig
from tutti.parallel import Choice


@dataclass(frozen=True, kw_only=True)
class PlannedRun(TrainConfig):
    """Options of a run on a stated number of devices, as ``TrainConfig`` has them, with the strategy as an object."""

    @classmethod
    def of(cls, config: TrainConfig) -> PlannedRun:
        """Return a configuration as one of a planned run, which the functions of this package take.

        Args:
            config: options of the run; ``devices`` is a number.
        """
        if isinstance(config, cls):
            return config
        return cls(**{field.name: getattr(config, field.name) for field in fields(TrainConfig)})

    @cached_property
    def choice(self) -> Choice:
        """The strategy with its options. Raises UsageError for an unknown strategy or option."""
        return parallel.parse_strategy(self.strategy)

    @cached_property
    def device_count(self) -> int:
        """Number of devices."""
        return int(self.devices)

    @cached_property
    def shape(self) -> dict[str, int]:
        """Extent of each axis of the device mesh: ``replica``, ``shard``, ``stage`` and ``tensor``.

        Raises UsageError if the number of devices does not fit the strategy.
        """
        return self.choice.shape(self.device_count)

    @cached_property
    def data_ranks(self) -> int:
        """Number of ranks among which a global batch is divided.

        Raises UsageError if the number of devices does not fit the strategy.
        """
        return self.choice.data_ranks(self.device_count)
