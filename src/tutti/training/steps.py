"""How a run takes its steps: one way for every strategy."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from tutti.data.feed import Feed
from tutti.data.reader import Part, Position
from tutti.errors import NonFiniteError, UsageError
from tutti.optim.adascale import AdaScale
from tutti.optim.loss_scale import LossScale
from tutti.optim.noise import Multiplicative
from tutti.training.checks import Checks
from tutti.training.losses import Losses
from tutti.training.step import step
from tutti.types import (
    Agreed,
    Average,
    Batch,
    Cell,
    Exchange,
    GradSink,
    LossFn,
    Replica,
    Setting,
    Tick,
    Update,
)
from tutti.world import heartbeat
from tutti.world.heartbeat import Phase

if TYPE_CHECKING:
    from tutti.training.checkpoint import Checkpoints


class Steps:
    """One model in training on all ranks alike.

    Attributes:
        model: the module to call in an own loop.
        agreed: what all ranks agreed on in the last step: loss, metrics, gradient norm.
        updated: what the last update did.
        clock: steps taken; by all workers together, where those are counted.
        taken: steps that this rank has taken, which are as many where each rank's are counted.
        samples: samples consumed.
        at: where in the data this rank is.
        within: the epoch whose loop has not ended yet, even if all its batches are behind it.
        updates: updates made.
        average: of the weights, None where none is kept.
        optimizer: the caller's, where ``tutti.prepare`` was given one.
        savers: of the folders that ``save`` and ``restore`` were given.
        stepped: whether the last ``optimizer.step()`` of an own loop was the one that ends a global batch.
        loss_scale: what the loss is multiplied by for backward; None without loss scaling.
        noise: on the gradient; None without.
        adascale: the gain of each step; None without.
        checks: what looks for classic mistakes, and what it found.
        losses: ranks that the run goes on without; None on other ranks than 0, and where it would end with any.
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
        average: Average | None = None,
        loss_scale: LossScale | None = None,
    ) -> None:
        self.replica, self.exchange, self.feed, self.setting = replica, exchange, feed, setting
        self.average = average
        self._sink, self._loss, self._max_nonfinite = sink, loss, max_nonfinite
        self.loss_scale = loss_scale
        self.model: nn.Module = replica.parts[0]
        self.clock = self.taken = self.updates = self.samples = 0
        self.at = Position()
        self.within: int | None = None
        self.lr_factor: Callable[[int], float] | None = None
        self.noise: Multiplicative | None = None
        self.adascale: AdaScale | None = None
        self.agreed: Agreed | None = None
        self.updated: Update | None = None
        self._nonfinite, self._rate = 0, 1.0
        self._drawn: Part | None = None
        self._resumed: Position | None = None
        self._begun = self.stepped = False
        self._stepping = self._stop = self._warm = False
        self.optimizer: Optimizer | None = None
        self.savers: dict[tuple[Path, int], Checkpoints] = {}
        self.checks = Checks(self)
        self.losses: Losses | None = None

    @property
    def steps_per_epoch(self) -> int:
        """Global batches in an epoch. Raises UsageError for a stream of unknown length, and where the batch grows."""
        if self.feed.epochs.growth is not None:
            raise UsageError("the batch grows, and epochs have fewer steps", remedy="call run.steps_of(epoch)")
        return self.steps_of(0)

    def steps_of(self, epoch: int) -> int:
        """Global batches in this epoch, from 0. Raises UsageError for a stream whose length is not known."""
        return self.feed.epochs.at(epoch).steps_per_epoch

    @property
    def progress(self) -> int:
        """Steps as the schedule and the run's length count them: those taken, or ⌊τ⌋ of AdaScale."""
        return self.clock if self.adascale is None else int(self.adascale.tau)

    @property
    def place(self) -> Position:
        """Where in the data the run is, as its steps count."""
        return self.at if self.taken == self.clock else Position(*self.feed.epochs.place(self.clock))

    def ask_to_stop(self) -> None:
        """Ask all ranks to stop after the next step; ``agreed.stop`` says so on every one. Safe in a signal handler."""
        self._stop = True

    # --- one way for every strategy --------------------------------------------------------------------------------

    def epoch(self, number: int, start: int | None = None) -> Iterator[Batch]:
        """This rank's part of every global batch of epoch ``number``, from batch ``start``; for ``step``.

        Without ``start`` it begins with the first batch, after ``restore`` with the one that comes next. Collective
        where the data are a stream: ranks read in step.
        """
        start = self._start(number) if start is None else start
        self.within, self._rate = number, self.feed.epochs.phase(number).rate
        parts = iter(()) if start is None else self.feed.read(number, start)
        while (part := self._draw(parts)) is not None:
            self._drawn = part
            try:
                yield part.batch
            finally:
                # However the caller's loop ends, what comes after it is no longer a step.
                heartbeat.training.enter(Phase.IDLE)
        # A run that is saved from here on continues after the loop, not at its end.
        self._drawn = self.within = None

    def _start(self, number: int) -> int | None:
        """The batch that epoch ``number`` goes on with; None where a restored run has had all of them."""
        resumed, self._resumed = self._resumed, None
        if resumed is None or number > resumed.epoch:
            return 0
        if number == resumed.epoch:
            return resumed.batch
        if number != self.within:
            raise UsageError(
                f"epoch {number} was over when this run was saved, which was in epoch {resumed.epoch}",
                remedy="loop over run.epochs(number), which gives those that are left",
            )
        return None

    def _draw(self, parts: Iterator[Part]) -> Part | None:
        """The next global batch's part."""
        self._enter(Phase.DATA)
        try:
            return next(parts, None)
        finally:
            heartbeat.training.enter(Phase.IDLE)

    def step(self, batch: Batch) -> float:
        """Train on one batch of ``epoch``; the loss, as the mean over the global batch, on every rank.

        A batch of the caller's own making is this rank's share of a global batch; ranks may bring different numbers.

        Raises:
            NonFiniteError: too many steps in a row had a gradient that is not finite.
            MismatchError, PeerError: ranks do not do the same, or one is gone.
        """
        if self._loss is None:
            raise UsageError("run.step needs a loss function", remedy="give tutti.prepare a loss_fn")
        self._enter(Phase.COMPUTE)
        tick = self._tick()
        work = self._cells(batch, tick)
        if self.feed.together and not work[0][1]:
            work = [(work[0][0], [self._stand_in(work[0][0], tick)])]
        if self.replica.sharded:
            work = self._even(work, tick)
        try:
            with self._open_gate():
                agreed, updated = step(self.replica, self.exchange, self._sink, work, self._loss, tick, self.adascale)
            return self._record(agreed, updated)
        except Exception as error:
            error.step = tick.clock + 1  # type: ignore[attr-defined]
            raise
        finally:
            heartbeat.training.enter(Phase.IDLE)

    def _stand_in(self, worker: int, tick: Tick) -> Cell:
        """What a rank without samples computes on, because the others wait for its messages."""
        if self._drawn is None or self._drawn.stand_in is None:
            raise UsageError(
                "a batch without samples",
                why="batch_norm='sync' and sharded weights need every device to take part",
                remedy="bring at least one sample on every rank",
            )
        return self.feed.stand_in(self._drawn.stand_in, tick.clock, worker)

    def _even(self, work: list[tuple[int, list[Cell]]], tick: Tick) -> list[tuple[int, list[Cell]]]:
        """As many cells on every rank, with stand-ins before the first: each forward gathers weights from all."""
        have = sum(len(cells) for _, cells in work)
        if self._drawn is not None:
            most = self.feed.most_cells(tick.samples)
        else:
            comm = self.setting.comms.replica
            counts = comm.gather_slices(torch.tensor([have], device=comm.device), "micro-batches of a batch")
            most = int(counts.max())
        if have >= most:
            return work
        place = next((i for i, (_, cells) in enumerate(work) if cells), 0)
        worker, own = work[place]
        own = own or [self._stand_in(worker, tick)]
        missing = most - max(have, 1)
        more = [self.feed.stand_in(own[0].batch, tick.clock, worker, last=False) for _ in range(missing)]
        return [*work[:place], (worker, [*more, *own]), *work[place + 1 :]]

    @property
    def within_batch(self) -> bool:
        """Whether a global batch has begun and has not been stepped on."""
        return self._begun or self._stepping

    @property
    def stepping(self) -> bool:
        """Whether the optimizer's own step may run now: only inside an update."""
        return self._stepping

    @contextmanager
    def _open_gate(self) -> Iterator[None]:
        self._stepping = True
        rates = self._divided() if self._rate != 1 and self.lr_factor is None else []
        try:
            yield
        finally:
            self._stepping = False
            for group, rate in rates:
                group["lr"] = rate

    def _divided(self) -> list[tuple[dict[str, Any], Any]]:
        """Divide the caller's learning rates, for one update, by what the batch could not grow; what they were."""
        given = self.exchange.optimizers if self.optimizer is None else (self.optimizer,)
        rates = [(group, group["lr"]) for optimizer in given for group in optimizer.param_groups]
        for group, rate in rates:
            group["lr"] = rate * self._rate
        return rates

    def _cells(self, batch: Batch, tick: Tick) -> list[tuple[int, list[Cell]]]:
        noise = 0.0 if self.noise is None else self.noise.sigma(tick.samples)
        over = self.exchange.gradient_over
        work = self.feed.cells(batch, tick.clock, tick.samples, over, tick.loss_scale, noise)
        if self.checks.looking:
            self.checks.look(batch, work, None if self._begun else self._loss, given=self._drawn is None)
        return work

    def _tick(self) -> Tick:
        """What is the same for all workers in the step that begins."""
        if self._drawn is None and self.feed.epochs.growth is not None:
            raise UsageError(
                "a batch of your own does not grow", remedy="loop over run.epoch(), or leave batch_growth out"
            )
        samples = self.feed.contract.batch if self._drawn is None else self._drawn.samples
        factor = self.lr_factor(self.progress) * self._rate if self.lr_factor is not None else None
        scale = self.loss_scale.value if self.loss_scale is not None else 1.0
        self._tick_now = Tick(self.taken, samples, factor, self._stop, scale)
        return self._tick_now

    def _enter(self, phase: int) -> None:
        """Tell the watchdog what this step does now; the first one may compile and counts as part of the start."""
        heartbeat.training.enter(phase if self._warm else Phase.START, self.clock + 1)

    def _record(self, agreed: Agreed, updated: Update) -> float:
        self.agreed, self.updated, self._warm = agreed, updated, True
        self.taken += 1
        self.clock = self.taken if updated.clock is None else max(self.clock, updated.clock)
        if self._drawn is None:
            self.samples += round(agreed.count)
        else:
            own = self.samples + self._drawn.samples
            self.samples = own if updated.clock is None else self.feed.epochs.consumed(self.clock)
            self.at = self._drawn.after
        self.updates += updated.updates
        if self.losses is not None:
            self.losses.look()
        if self.average is not None and updated.updates and updated.together:
            self.average.update()
        # A lower scale may cure a gradient that overflowed, but not a loss that did.
        curable = self.loss_scale is not None and self.loss_scale.can_fall and math.isfinite(agreed.loss)
        if not (updated.skipped and curable):
            self._nonfinite = self._nonfinite + 1 if updated.skipped else 0
        if self.loss_scale is not None:
            self.loss_scale.update(not updated.skipped)
        if self._nonfinite >= self._max_nonfinite:
            raise NonFiniteError(
                f"{self._nonfinite} steps in a row had a NaN or infinite gradient",
                where=f"step {self.clock}, {', '.join(updated.nonfinite[:3])}",
                why="the loss diverged, or a batch holds values that are not finite",
                remedy="lower the learning rate, warm up, clip the gradient (--clip 1), or check the data"
                + ", or take --precision bf16, whose range is wider" * (self.loss_scale is not None),
            )
        return agreed.loss
