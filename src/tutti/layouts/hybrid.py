"""A replica is cut into stages, and the layers of each stage are split over tensor ranks."""

from __future__ import annotations

from torch import nn

from tutti.layouts.config import HybridConfig
from tutti.layouts.divide import Division
from tutti.layouts.pipeline import Pipeline, PipelineReplica
from tutti.layouts.scores import Outputs
from tutti.layouts.sections import read_directly
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
        pipeline, division = Pipeline(config, setting), Division(plain, setting, config)
        sections, holding = pipeline.sections(plain, division.closed)
        if holding is not None:
            division.check([name for nodes in holding.cuts.stages for name in read_directly(nodes, plain)])
        division.apply()
        replica = pipeline.replica(plain, sections, holding)
        for section in sections if division.parted else ():
            # The last one's output goes to the loss function, what goes from stage to stage is whole.
            Outputs(section.module, keep=not section.outgoing)
        division.mark(replica)
        return replica
