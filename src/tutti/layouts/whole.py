"""A replica lives whole on one device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from tutti.layouts import outcome
from tutti.layouts.config import WholeConfig
from tutti.layouts.part import Part
from tutti.nn import units
from tutti.nn.swap import buffers
from tutti.types import Cell, GradSink, LossFn, Setting, Totals


class Whole:
    """The layout of ``single``, ``mirrored`` and all strategies that copy the model."""

    def __init__(self, config: WholeConfig, setting: Setting) -> None:
        self._setting = setting

    def build(self, plain: nn.Module) -> WholeReplica:
        """Move the model to this rank's device. Raises UsageError where it has nothing to compute again."""
        units.check(plain, self._setting.activation_checkpointing)
        return WholeReplica(plain, self._setting)


class WholeReplica(Part):
    """One whole model on this rank's device."""

    def run(self, cells: Sequence[Cell], loss: LossFn, sink: GradSink | None) -> Totals:
        """Forward and, with a sink, backward of one worker's cells."""
        model, total = self.parts[0], None
        for cell in cells:
            self.begin(cell)
            objective, start, part = outcome.read(loss(model, cell.batch), cell)
            total = part if total is None else total + part
            if sink is not None:
                self._backward(objective, start, sink, total if cell.last else None)
        if total is None:
            raise ValueError("run needs at least one cell")
        return total

    def begin(self, cell: Cell) -> None:
        """Enter a cell's random stream; in an own loop the caller runs the forward itself."""
        self.draws.enter(cell.key)
        # A forward on a stand-in must leave no trace in the statistics of batch norm.
        self._kept = [] if cell.samples else [(slot, slot.get().clone()) for slot in buffers(self.parts)]

    def backward(self, result: Any, cell: Cell, before: Totals | None, sink: GradSink) -> Totals | None:
        """Backward of one cell in an own loop, from what its loss function gave; the worker's totals so far."""
        if not cell.samples:
            for slot, tensor in self._kept:
                slot.put(tensor)
            return before
        objective, start, part = outcome.read(result, cell)
        total = part if before is None else before + part
        self._backward(objective, start, sink, total if cell.last else None)
        return total

    def _backward(self, objective: Tensor, start: Tensor, sink: GradSink, complete: Totals | None) -> None:
        if complete is not None:
            sink.arm(complete)
        objective.backward(start)
