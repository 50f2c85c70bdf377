"""A prepared training run: what ``tutti.prepare`` returns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from tutti.comm.gather import gather_named
from tutti.data.adapt import adapt
from tutti.data.feed import Feed, evaluation, evaluation_blocks, length
from tutti.errors import NonFiniteError, UsageError
from tutti.state.fingerprint import weights_sha256
from tutti.training.step import step
from tutti.types import (
    Agreed,
    Batch,
    Cell,
    Exchange,
    GradSink,
    LossFn,
    OwnLoopReplica,
    Replica,
    Setting,
    Tick,
    Totals,
    Update,
)


@dataclass(frozen=True)
class Evaluation:
    """Means over every held-out sample, each counted once."""

    loss: float
    metrics: dict[str, float]
    samples: int


class Run:
    """One model in training on all ranks alike.

    Attributes:
        model: the module to call in an own loop.
        agreed: what all ranks agreed on in the last step: loss, metrics, gradient norm.
        updated: what the last update did.
        clock: steps taken.
        updates: updates made.
        stepped: whether the last ``optimizer.step()`` of an own loop was the one that ends a global batch.
    """

    def __init__(
        self,
        replica: Replica,
        exchange: Exchange,
        sink: GradSink,
        feed: Feed,
        loss: LossFn | None,
        setting: Setting,
        max_nonfinite: int = 10,
    ) -> None:
        self.replica, self.exchange, self.feed, self.setting = replica, exchange, feed, setting
        self._sink, self._loss, self._max_nonfinite = sink, loss, max_nonfinite
        self.model: nn.Module = replica.parts[0]
        self.clock = self.updates = 0
        self.lr_factor: Callable[[int], float] | None = None
        self.agreed: Agreed | None = None
        self.updated: Update | None = None
        self._nonfinite = 0
        self._cell: Cell | None = None
        self._idle: list[int] = []
        self._part: Totals | None = None
        self._complete = self._begun = self.stepped = False
        self._stepping = self._stop = False

    @property
    def steps_per_epoch(self) -> int:
        """Global batches in an epoch."""
        return self.feed.contract.steps_per_epoch

    def ask_to_stop(self) -> None:
        """Ask all ranks to stop after the next step; ``agreed.stop`` says so on every one. Safe in a signal handler."""
        self._stop = True

    # --- one way for every strategy --------------------------------------------------------------------------------

    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        """This rank's part of every global batch of epoch ``number``, from batch ``start``; for ``step``."""
        for index in range(start, self.steps_per_epoch):
            self._samples = self.feed.contract.samples(index)
            yield self.feed.batch(number, index)

    def step(self, batch: Batch) -> float:
        """Train on one batch of ``epoch``; the loss, as the mean over the global batch, on every rank.

        A batch of the caller's own making is this rank's share of a global batch in which every rank has as many.

        Raises:
            NonFiniteError: too many steps in a row had a gradient that is not finite.
            MismatchError, PeerError: ranks do not do the same, or one is gone.
        """
        if self._loss is None:
            raise UsageError("run.step needs a loss function", remedy="give tutti.prepare a loss_fn")
        tick = self._tick(batch)
        work = self.feed.cells(batch, tick.clock, tick.samples, self.exchange.gradient_over)
        try:
            with self._open_gate():
                agreed, updated = step(self.replica, self.exchange, self._sink, work, self._loss, tick)
            return self._record(agreed, updated)
        except Exception as error:
            error.step = tick.clock + 1  # type: ignore[attr-defined]
            raise

    # --- loops that must stay as they are --------------------------------------------------------------------------

    def cells(self, number: int) -> Iterator[Batch]:
        """Every micro-batch of this rank's workers in epoch ``number``, for an own loop with ``backward``.

        ``optimizer.step()`` and ``zero_grad()`` act only after the last one of each global batch.
        """
        if not hasattr(self.replica, "begin"):
            raise UsageError("this strategy has no loop of your own", remedy="call run.step(batch) with run.epoch()")
        if self._begun:
            raise UsageError(
                "the last loop over run.cells() was left in the middle of a global batch",
                remedy="leave it only after an optimizer.step() with run.stepped",
            )
        contract = self.feed.contract
        last_batch = contract.samples(self.steps_per_epoch - 1)
        if not contract.worker(last_batch, contract.mine(contract.ranks - 1)[0]):
            raise UsageError(
                f"a last batch of {last_batch} samples leaves a device without any, whose loop would miss a turn",
                remedy="choose a batch size that leaves more, or call run.step(batch) with run.epoch()",
            )
        replica = cast(OwnLoopReplica, self.replica)
        for batch in self.epoch(number):
            tick = self._tick(batch)
            self._begun = True
            work = self.feed.cells(batch, tick.clock, tick.samples, self.exchange.gradient_over)
            busy = [(worker, cells) for worker, cells in work if cells]
            # Shares differ by at most one sample, so that the workers without any are the last ones.
            self._idle = [worker for worker, cells in work if not cells]
            for worker, cells in busy:
                self.exchange.enter(worker, tick)
                for cell in cells:
                    replica.begin(cell)
                    self._cell, self._complete = cell, False
                    self._last = worker == busy[-1][0] and cell.last
                    yield cell.batch
                    if self._cell is not None:
                        raise UsageError("a batch was left without backward", remedy="call run.backward(loss) for each")
            if self._complete:
                raise UsageError(
                    "a global batch was left without a step", remedy="call optimizer.step() after backward"
                )

    def backward(self, loss: Any) -> None:
        """Backward of one micro-batch of ``cells``, weighted as its part of the global batch.

        Args:
            loss: mean over the batch's samples, or ``(sum, count)``.
        """
        cell, self._cell = self._cell, None
        if cell is None:
            raise UsageError("run.backward needs a batch of run.cells()", remedy="loop over run.cells(epoch)")
        self._part = cast(OwnLoopReplica, self.replica).backward(loss, cell, self._part, self._sink)
        if cell.last:
            self.exchange.leave(cell.worker, self._part)
            self._part = None
        if self._last:
            self._leave_idle()
        self._complete = self._last

    def _leave_idle(self) -> None:
        """The workers that have no sample in this batch take part with nothing, before the update."""
        for worker in self._idle:
            self.exchange.enter(worker, self._tick_now)
            self.exchange.leave(worker, None)

    @property
    def stepping(self) -> bool:
        """Whether the optimizer's own step may run now: only inside an update."""
        return self._stepping

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
        return True

    @contextmanager
    def _open_gate(self) -> Iterator[None]:
        self._stepping = True
        try:
            yield
        finally:
            self._stepping = False

    # --- everything else -------------------------------------------------------------------------------------------

    def evaluate(self, source: Any, batch: int = 512, loss: LossFn | None = None) -> Evaluation:
        """Loss and metrics over all samples of ``source``, each once, on the workers' merged model. Collective."""
        chosen = loss or self._loss
        if chosen is None:
            raise UsageError("run.evaluate needs a loss function", remedy="give one here or to tutti.prepare")
        source = adapt(source)
        grid, comms = self.setting.grid, self.setting.comms
        self._together(f"evaluation of {len(source)} samples")
        parts: dict[int, Totals] = {}
        with self.replica.evaluating(self.exchange.merged()):
            for number, cell in evaluation(source, grid.data_ranks, grid.data_rank, batch, self.feed.place):
                parts[number] = self.replica.run([cell], chosen, None)
        names = comms.world.broadcast_json(parts[0].names if grid.data_rank == 0 else (), 0, "names of the metrics")
        table = torch.zeros(len(evaluation_blocks(len(source), batch)), 2 + len(names), dtype=torch.float64)
        for number, part in parts.items():
            table[number] = part.lanes.double().cpu()
        comms.replica.all_reduce(table, "totals of the evaluation")
        value, count, *sums = table.sum(dim=0).tolist()
        return Evaluation(value / count, {n: s / count for n, s in zip(names, sums, strict=True)}, len(source))

    def state(self) -> dict[str, Tensor]:
        """All parameters and persistent buffers as one plain model's, on every rank. Collective."""
        self._together("reading the whole state")
        merged = self.exchange.merged()
        first: dict[int, str] = {}
        for part in self.replica.parts:
            for name, parameter in part.named_parameters(remove_duplicate=False):
                # A tied parameter has several names in a plain model's state.
                merged[name] = merged[first.setdefault(id(parameter), name)]
        return gather_named(merged, self.setting.comms.model)

    def weights_sha256(self) -> str:
        """Hash of ``state``; equal hashes mean bit-identical models. Collective."""
        return weights_sha256(self.state())

    def _together(self, call: str) -> None:
        """Compare over the ranks what comes now, before any message of it could meet one of a step."""
        self.setting.comms.world.agree(
            [f"{call} after step {self.clock}"],
            "the call under way",
            "make every rank take the same steps and evaluations",
        )

    def _tick(self, batch: Batch) -> Tick:
        """What is the same for all workers in the step that ``batch`` begins."""
        samples = self.feed.global_samples(length(batch), getattr(self, "_samples", self.feed.contract.batch))
        factor = self.lr_factor(self.clock) if self.lr_factor is not None else None
        self._tick_now = Tick(self.clock, samples, factor, self._stop)
        return self._tick_now

    def _record(self, agreed: Agreed, updated: Update) -> float:
        self.agreed, self.updated = agreed, updated
        self.clock += 1
        self.updates += updated.updates
        self._nonfinite = self._nonfinite + 1 if updated.skipped else 0
        if self._nonfinite >= self._max_nonfinite:
            raise NonFiniteError(
                f"{self._nonfinite} steps in a row had a NaN or infinite gradient",
                where=f"step {self.clock}, {', '.join(updated.nonfinite[:3])}",
                why="the loss diverged, or a batch holds values that are not finite",
                remedy="lower the learning rate, warm up, clip the gradient (--clip 1), or check the data",
            )
        return agreed.loss
