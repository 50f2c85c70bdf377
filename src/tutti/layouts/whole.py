"""A replica lives whole on one device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from tutti.layouts import outcome
from tutti.layouts.config import WholeConfig
from tutti.layouts.part import Part
from tutti.nn import units
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
            result = loss(model, cell.batch)
            if sink is not None:
                total = self.backward(result, cell, total, sink)
            else:
                part = outcome.read(result, cell)[2]
                total = part if total is None else total + part
        if total is None:
            raise ValueError("run needs at least one cell")
        return total

    def begin(self, cell: Cell) -> None:
        """Enter a cell's random stream; in an own loop the caller runs the forward itself."""
        self.enter(cell)

    def backward(self, result: Any, cell: Cell, before: Totals | None, sink: GradSink) -> Totals:
        """Backward of one cell, from what its loss function gave; the worker's totals so far."""
        self.draws.check()
        objective, start, part = outcome.read(result, cell)
        total = part if before is None else before + part
        # A stand-in goes backward only where others wait for messages of it, and has no gradient.
        if cell.samples and cell.last:
            sink.arm(total)
        if cell.samples or self.peers is not None or self.sharded:
            objective.backward(start)
        if not cell.samples:
            self.forget()
        return total
