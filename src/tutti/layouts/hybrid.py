"""A replica is cut into stages, and the layers of each stage are split over tensor ranks."""

from __future__ import annotations

from torch import nn

from tutti.errors import UsageError
from tutti.layouts.config import HybridConfig
from tutti.layouts.divide import Division
from tutti.layouts.pipeline import Pipeline, PipelineReplica
from tutti.layouts.tensor import Tensor
from tutti.layouts.whole import WholeReplica
from tutti.types import Setting


class Hybrid:
    """The layout of ``hybrid``: the stages of ``pipeline``, then in each the plan of ``tensor``."""

    def __init__(self, config: HybridConfig, setting: Setting) -> None:
        self._config, self._setting = config, setting

    def build(self, plain: nn.Module) -> PipelineReplica | WholeReplica:
        """This stage's layers, cut down to this tensor rank's slices. Raises as ``Pipeline`` and ``Division``."""
        setting, config = self._setting, self._config
        if setting.grid.stage == 1:
            return Tensor(config, setting).build(plain)
        pipeline = Pipeline(config, setting)
        sections, holding = pipeline.sections(plain)
        if setting.grid.tensor > 1 and holding is not None and any(len(ranks) > 1 for ranks, _ in holding.groups):
            raise UsageError(
                "weights that several stages share cannot be split over tensor ranks too",
                why="each stage would hold other slices of them",
                remedy="untie them, or take --strategy pipeline or --strategy tensor",
            )
        divisions = [Division(section.module, setting, config) for section in sections]
        replica = pipeline.replica(plain, sections, holding)
        for division in divisions:
            division.mark(replica)
        return replica
