"""Loops that must stay as they are: the caller's own forward, ``backward`` and ``optimizer.step()``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

from tutti.errors import UsageError
from tutti.training.steps import Steps
from tutti.types import Batch, Cell, OwnLoopReplica, Totals
from tutti.world import heartbeat
from tutti.world.heartbeat import Phase


class OwnLoop(Steps):
    """A run that a caller's loop drives, micro-batch by micro-batch."""

    _cell: Cell | None = None
    _totals: Totals | None = None
    _idle: Sequence[int] = ()
    _last = _complete = False

    def cells(self, number: int, start: int | None = None) -> Iterator[Batch]:
        """Every micro-batch of this rank's workers in epoch ``number``, for an own loop with ``backward``.

        ``optimizer.step()`` and ``zero_grad()`` act only after the last one of each global batch. Begins as ``epoch``.
        Where a last batch has no sample for this rank, the loop's body runs once on one that another rank has, so that
        it misses no turn; there it counts for nothing.
        """
        if not hasattr(self.replica, "begin"):
            raise UsageError("this strategy has no loop of your own", remedy="call run.step(batch) with run.epoch()")
        if self._begun:
            raise UsageError(
                "the last loop over run.cells() was left in the middle of a global batch",
                remedy="leave it only after an optimizer.step() with run.stepped",
            )
        replica = cast(OwnLoopReplica, self.replica)
        for batch in self.epoch(number, start):
            tick = self._tick()
            self._begun = True
            work = self._cells(batch, tick)
            if self.replica.sharded:
                work = self._even(work, tick)
            busy = [(worker, cells) for worker, cells in work if cells]
            # Shares differ by at most one sample, so that the workers without any are the last ones.
            self._idle = [worker for worker, cells in work if not cells]
            if not busy and self._drawn is not None:
                worker = self._idle.pop(0)
                busy = [(worker, [self._stand_in(worker, tick)])]
            for worker, cells in busy:
                self.exchange.enter(worker, tick)
                for cell in cells:
                    replica.begin(cell)
                    self._cell, self._complete = cell, False
                    self._last = worker == busy[-1][0] and cell.last
                    self._enter(Phase.COMPUTE)
                    yield cell.batch
                    if self._cell is not None:
                        raise UsageError("a batch was left without backward", remedy="call run.backward(loss) for each")
            if self.checks.ended is not None:
                self.checks.ended()
            if self._complete:
                raise UsageError(
                    "a global batch was left without a step", remedy="call optimizer.step() after backward"
                )

    def backward(self, loss: Any) -> None:
        """Backward of one micro-batch of ``cells``, weighted as its part of the global batch.

        Args:
            loss: mean over the batch's samples, ``(sum, count)``, or a 1-d tensor of one loss a sample in place of
                either.
        """
        cell, self._cell = self._cell, None
        if cell is None:
            raise UsageError("run.backward needs a batch of run.cells()", remedy="loop over run.cells(epoch)")
        self._totals = cast(OwnLoopReplica, self.replica).backward(loss, cell, self._totals, self._sink)
        if cell.last:
            self.exchange.leave(cell.worker, self._totals)
            self._totals = None
        if self._last:
            self._leave_idle()
        self._complete = self._last

    def _leave_idle(self) -> None:
        """The workers that have no sample in this batch take part with nothing, before the update."""
        for worker in self._idle:
            self.exchange.enter(worker, self._tick_now)
            self.exchange.leave(worker, None)

    def gated_step(self) -> bool:
        """What ``optimizer.step()`` does in an own loop; True where it was a step, False in the middle of a batch."""
        if not self._begun:
            raise UsageError("optimizer.step() without a batch of run.cells()", remedy="loop over run.cells(epoch)")
        self.stepped = self._complete
        if not self._complete:
            return False
        self._complete = self._begun = False
        tick = self._tick_now
        agreed = self.exchange.finish(tick)
        with self._open_gate():
            updated = self.exchange.update(agreed, tick)
        self._record(agreed, updated)
        heartbeat.training.enter(Phase.IDLE)
        return True
