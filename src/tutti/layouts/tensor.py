"""A replica's layers are split over several devices, which compute each of them together (Megatron-LM).

Shoeybi et al. 2019, arXiv 1909.08053.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from tutti.layouts.config import TensorConfig
from tutti.layouts.divide import Division
from tutti.layouts.scores import Outputs
from tutti.layouts.whole import WholeReplica
from tutti.nn import units
from tutti.types import Cell, GradSink, LossFn, Setting, Totals


class Tensor:
    """The layout of ``tensor``."""

    def __init__(self, config: TensorConfig, setting: Setting) -> None:
        self._config, self._setting = config, setting

    def build(self, plain: nn.Module) -> WholeReplica:
        """Cut every layer of the plan down to this rank's slice, in place; see ``Division``. Collective."""
        units.check(plain, self._setting.activation_checkpointing)
        division = Division(plain, self._setting, self._config)
        division.apply()
        replica = (TensorReplica if division.parted else WholeReplica)(plain, self._setting)
        division.mark(replica)
        return replica


class TensorReplica(WholeReplica):
    """One model whose output may be split. It gives what is whole, but to the loss function of a run."""

    def __init__(self, module: nn.Module, setting: Setting) -> None:
        super().__init__(module, setting)
        self._outputs = Outputs(module)

    def run(self, cells: Sequence[Cell], loss: LossFn, sink: GradSink | None) -> Totals:
        """As that of a whole model."""
        with self._outputs.kept():
            return super().run(cells, loss, sink)
