"""A replica is cut into stages, and the layers of each stage are split over tensor ranks."""

from __future__ import annotations

from torch import nn

from tutti.layouts.config import HybridConfig, LayersConfig
from tutti.layouts.divide import Division
from tutti.layouts.layers import Layers, LayersReplica
from tutti.layouts.tensor import Tensor
from tutti.layouts.whole import WholeReplica
from tutti.types import Setting


class Hybrid:
    """The layout of ``hybrid``: the cut of ``model_parallel``, then in each stage the plan of ``tensor``."""

    def __init__(self, config: HybridConfig, setting: Setting) -> None:
        self._config, self._setting = config, setting

    def build(self, plain: nn.Module) -> LayersReplica | WholeReplica:
        """This stage's layers, cut down to this tensor rank's slices. Raises as ``Layers`` and ``Division``."""
        setting, config = self._setting, self._config
        if setting.grid.stage == 1:
            return Tensor(config, setting).build(plain)
        stage = Layers(LayersConfig(stages=setting.grid.stage), setting).stage(plain)
        division = Division(stage, setting, config)
        replica = LayersReplica(stage, setting)
        division.mark(replica)
        return replica
