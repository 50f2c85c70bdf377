"""A replica's layers are split over several devices, which compute each of them together (Megatron-LM).

Shoeybi et al. 2019, arXiv 1909.08053.
"""

from __future__ import annotations

from torch import nn

from tutti.layouts.config import TensorConfig
from tutti.layouts.divide import Division
from tutti.layouts.whole import WholeReplica
from tutti.nn import units
from tutti.types import Setting


class Tensor:
    """The layout of ``tensor``."""

    def __init__(self, config: TensorConfig, setting: Setting) -> None:
        self._config, self._setting = config, setting

    def build(self, plain: nn.Module) -> WholeReplica:
        """Cut every layer of the plan down to this rank's slice, in place; see ``Division``. Collective."""
        units.check(plain, self._setting.activation_checkpointing)
        division = Division(plain, self._setting, self._config)
        division.apply()
        replica = WholeReplica(plain, self._setting)
        division.mark(replica)
        return replica
