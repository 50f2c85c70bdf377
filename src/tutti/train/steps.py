"""Steps of a run: counters, the step context, watchdog phases and the bookkeeping after an update."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from tutti.data.feed import Feed
from tutti.data.reader import Position, RankBatch
from tutti.errors import NonFiniteError, UsageError
from tutti.launcher import heartbeat
from tutti.launcher.heartbeat import Phase
from tutti.optim.adascale import AdaScale
from tutti.optim.gradient_noise import Multiplicative
from tutti.optim.loss_scale import LossScale
from tutti.optim.mixing import needs_closure
from tutti.optim.several import SeveralOptimizers
from tutti.parallel import Choice
from tutti.train.custom_loop import CustomLoop
from tutti.train.hook_watch import HookWatch
from tutti.train.lost_ranks import LostRanks
from tutti.train.mistake_checks import Checks
from tutti.train.replicas import check_replicas, seldom
from tutti.train.step import train_step
from tutti.train.trainability import TrainabilityWatch
from tutti.types import (
    Average,
    Batch,
    GradientReadyHook,
    GradientSync,
    LossFn,
    MicroBatch,
    ReplicaRunner,
    RunContext,
    StepContext,
    StepStats,
    UpdateResult,
)

if TYPE_CHECKING:
    from tutti.checkpoint.manager import Checkpoints


class Steps:
    """Base class of ``Run``: one model in training, in the same way on every rank.

    "Worker" is the logical worker; the caller, or script, is the user's code.

    Args:
        replica: this rank's part of the model.
        sync: gradient synchronisation, which owns the update.
        sink: gradient-ready hook of ``sync``.
        feed: this rank's batches.
        loss: the loss function; None for custom training loops alone.
        run_context: mesh, communicators and workers of this rank.
        max_nonfinite: number of skipped steps in a row that raises NonFiniteError.
        average: average of the weights, None for none.
        loss_scale: loss scaling, None for none.
        optimizers: the caller's optimizers; none where ``tutti.prepare`` was given options.
        hooks: refuses gradient hooks that the strategy cannot call.
        choice: the strategy, which custom training loops ask whether it has any.
        noise: noise on the gradient, None for none.
        adascale: AdaScale, None for none.
        named_workers: whether the caller gave the number of workers.

    Attributes:
        model: the module to call in a custom training loop.
        stats: reduced results of the last step: loss, metrics, gradient norm.
        updated: result of the last update.
        clock: global step: steps taken, or steps of all workers together with asynchronous servers that count these.
        taken: local step: steps taken by this rank; equal to ``clock`` unless all workers' steps are counted.
        compared: local step at which copies of tensors were last compared over ranks.
        samples: samples consumed.
        at: this rank's position in the data.
        within: epoch whose loop has not ended, even if all its batches are consumed; None outside of a loop.
        updates: number of updates.
        average: average of the weights; None for none.
        optimizer: the caller's optimizer, several as one; None where ``tutti.prepare`` was given options.
        savers: checkpoint manager by folder and ``keep``, for ``save`` and ``restore``.
        custom: runs custom training loops.
        loss_scale: factor on the loss in backward; None without loss scaling.
        noise: noise on the gradient; None for none.
        adascale: AdaScale's gain of each step; None without AdaScale.
        hooks: refuses gradient hooks that the strategy cannot call.
        checks: checks for common mistakes, and their findings.
        named_workers: whether the caller gave the number of workers; otherwise it is the number of data ranks.
        losses: ranks that were killed while the run continued; None on ranks other than 0, and where the strategy does
            not tolerate lost ranks.
    """

    def __init__(
        self,
        replica: ReplicaRunner,
        sync: GradientSync,
        sink: GradientReadyHook,
        feed: Feed,
        loss: LossFn | None,
        run_context: RunContext,
        max_nonfinite: int = 10,
        average: Average | None = None,
        loss_scale: LossScale | None = None,
        optimizers: Sequence[Optimizer] = (),
        *,
        hooks: HookWatch,
        choice: Choice,
        noise: Multiplicative | None,
        adascale: AdaScale | None,
        named_workers: bool,
    ) -> None:
        self.replica, self.exchange, self.feed, self.context = replica, sync, feed, run_context
        self.average, self.hooks = average, hooks
        self._sink, self._loss, self._max_nonfinite = sink, loss, max_nonfinite
        self.loss_scale = loss_scale
        self.model: nn.Module = replica.parts[0]
        self.clock = self.taken = self.compared = self.updates = self.samples = 0
        self.at = Position()
        self.within: int | None = None
        self.lr_factor: Callable[[int], float] | None = None
        self.noise, self.adascale, self.named_workers = noise, adascale, named_workers
        self.stats: StepStats | None = None
        self.updated: UpdateResult | None = None
        self._nonfinite, self._rate = 0, 1.0
        self._drawn: RankBatch | None = None
        self._resumed: Position | None = None
        self._stepping = self._stop = self._warm = False
        self.optimizer = SeveralOptimizers(optimizers) if len(optimizers) > 1 else next(iter(optimizers), None)
        self._trainability = TrainabilityWatch(replica, sync, optimizers, average)
        self.custom = CustomLoop(self, optimizers, choice)
        self._closure = next((type(each).__name__ for each in optimizers if needs_closure(each)), None)
        self.savers: dict[tuple[Path, int], Checkpoints] = {}
        self.checks = Checks(self)
        self.losses: LostRanks | None = None

    @property
    def steps_per_epoch(self) -> int:
        """Global batches in an epoch. Raises UsageError for a stream of unknown length, and if the batch size grows."""
        if self.feed.epochs.growth is not None:
            raise UsageError("the batch grows, and epochs have fewer steps", remedy="call run.steps_of(epoch)")
        return self.steps_of(0)

    def steps_of(self, epoch: int) -> int:
        """Return the number of global batches in ``epoch``, counted from 0. Raises UsageError for unknown lengths."""
        return self.feed.epochs.at(epoch).steps_per_epoch

    @property
    def progress(self) -> int:
        """Steps for the schedule and the run's length: ``clock``, or ⌊τ⌋ of AdaScale."""
        return self.clock if self.adascale is None else int(self.adascale.tau)

    @property
    def place(self) -> Position:
        """Position of the run in the data after ``clock`` steps."""
        return self.at if self.taken == self.clock else Position(*self.feed.epochs.place(self.clock))

    def ask_to_stop(self) -> None:
        """Ask all ranks to stop after the next step, which sets ``stats.stop`` on all. Safe in a signal handler."""
        self._stop = True

    # --- steps: the same code for every strategy -------------------------------------------------------------------

    def epoch(self, number: int, start: int | None = None) -> Iterator[Batch]:
        """Iterate over this rank's part of every global batch of an epoch, for ``step``.

        Collective for a stream, which ranks read in step.

        Args:
            number: the epoch, from 0.
            start: first batch; default: 0, or after ``restore`` the batch after the last one consumed.

        Raises:
            UsageError: ``restore`` has loaded a later epoch.
        """
        start = self._start(number) if start is None else start
        self.within, self._rate = number, self.feed.epochs.phase(number).rate
        parts = iter(()) if start is None else self.feed.read(number, start)
        while (part := self._draw(parts)) is not None:
            self._drawn = part
            try:
                yield part.batch
            finally:
                # Also after an exception or a break in the caller's loop: the step is over.
                heartbeat.training.enter(Phase.IDLE)
        # A checkpoint saved from here on resumes after this epoch's loop.
        self._drawn = self.within = None
        if seldom(self):
            check_replicas(self, f"epoch {number + 2}")

    def _start(self, number: int) -> int | None:
        """Return the first batch of epoch ``number``; None if a restored run has consumed all of them."""
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

    def _draw(self, parts: Iterator[RankBatch]) -> RankBatch | None:
        """Return this rank's part of the next global batch; None at the end."""
        self._enter(Phase.DATA)
        try:
            return next(parts, None)
        finally:
            heartbeat.training.enter(Phase.IDLE)

    def step(self, batch: Batch) -> float:
        """Train on one batch of ``epoch``. Collective: the gradient synchronisation of the strategy.

        Args:
            batch: a batch of ``epoch``, or one that the caller made: this rank's share of a global batch. Ranks may
                bring different numbers of samples.

        Returns:
            The loss, as the mean over the global batch (with asynchronous servers over this rank's workers).

        Raises:
            UsageError: no loss function; the optimizer needs a closure; or this rank has no sample of a batch that the
                caller made where every rank must take part.
            NonFiniteError: too many steps in a row had a gradient that is not finite.
            MismatchError, PeerError: ranks are about to run different collectives, or a rank has died.
        """
        if self._loss is None:
            raise UsageError("run.step needs a loss function", remedy="give tutti.prepare a loss_fn")
        if self._closure is not None:
            raise UsageError(
                f"{self._closure} needs a closure, and run.step gives none",
                remedy="loop over run.microbatches(epoch) and call optimizer.step(closure), one worker a device",
            )
        self._enter(Phase.COMPUTE)
        step_context = self._step_context()
        if self._trainability(late=False):
            self.hooks.watch(self.replica.parts)
        work = self._cells(batch, step_context)
        if self.feed.together and not work[0][1]:
            work = [(work[0][0], [self._dummy_micro_batch(work[0][0], step_context)])]
        if self.replica.sharded:
            work = self._even(work, step_context)
        step_context = self._step_context_now
        try:
            with self._open_gate():
                stats, updated = train_step(
                    self.replica, self.exchange, self._sink, work, self._loss, step_context, self.hooks, self.adascale
                )
            return self._record(stats, updated)
        except Exception as error:
            error.step = step_context.global_step + 1  # type: ignore[attr-defined]
            raise
        finally:
            heartbeat.training.enter(Phase.IDLE)

    def _dummy_micro_batch(self, worker: int, step_context: StepContext) -> MicroBatch:
        """Return the dummy micro-batch with which a rank without samples takes part in the collectives."""
        if self._drawn is None or self._drawn.dummy is None:
            raise UsageError(
                "a batch without samples",
                why="batch_norm='sync' and sharded weights need every device to take part",
                remedy="bring at least one sample on every rank",
            )
        return self.feed.dummy_micro_batch(self._drawn.dummy, step_context.global_step, worker)

    def _even(
        self, work: list[tuple[int, list[MicroBatch]]], step_context: StepContext
    ) -> list[tuple[int, list[MicroBatch]]]:
        """Pad ``work`` with leading dummy micro-batches to equally many on every rank, as forwards all-gather weights.

        Collective for a batch that the caller made: an all-gather of the numbers of micro-batches.
        """
        have = sum(len(micro_batches) for _, micro_batches in work)
        if self._drawn is not None:
            most = self.feed.most_micro_batches(step_context.samples)
        else:
            comm = self.context.comms.replica
            counts = comm.gather_slices(torch.tensor([have], device=comm.device), "micro-batches of a batch")
            most = int(counts.max())
        if have >= most:
            return work
        place = next((i for i, (_, micro_batches) in enumerate(work) if micro_batches), 0)
        worker, own = work[place]
        own = own or [self._dummy_micro_batch(worker, step_context)]
        missing = most - max(have, 1)
        more = [
            self.feed.dummy_micro_batch(own[0].batch, step_context.global_step, worker, last=False)
            for _ in range(missing)
        ]
        return [*work[:place], (worker, [*more, *own]), *work[place + 1 :]]

    @property
    def within_batch(self) -> bool:
        """Whether a global batch has begun and its update has not."""
        return self.custom.within_batch or self._stepping

    @property
    def stepping(self) -> bool:
        """Whether an update is under way, in which the optimizer's own ``step`` runs."""
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
        """Multiply the caller's learning rates by the phase's rate for one update; return the original rates.

        The rate is below 1 where the batch size could not grow as much as its schedule asks.
        """
        given = self.exchange.optimizers if self.optimizer is None else (self.optimizer,)
        rates = [(group, group["lr"]) for optimizer in given for group in optimizer.param_groups]
        for group, rate in rates:
            group["lr"] = rate * self._rate
        return rates

    def _cells(self, batch: Batch, step_context: StepContext) -> list[tuple[int, list[MicroBatch]]]:
        noise = 0.0 if self.noise is None else self.noise.sigma(step_context.samples)
        over = self.exchange.loss_normalisation
        work = self.feed.micro_batches(
            batch, step_context.global_step, step_context.samples, over, step_context.loss_scale, noise
        )
        micro_batches = [micro_batch for _, micro_batches in work for micro_batch in micro_batches]
        alone = all(micro_batch.whole for micro_batch in micro_batches)
        self.hooks(alone)
        self._step_context_now = replace(step_context, whole=alone and bool(micro_batches) and over == "step")
        if self.checks.looking:
            own = self.custom.within_batch
            self.checks.look(batch, work, None if own else self._loss, given=self._drawn is None)
        return work

    def _step_context(self) -> StepContext:
        """Return the facts that all workers share in the coming step."""
        if self._drawn is None and self.feed.epochs.growth is not None:
            raise UsageError(
                "a batch of your own does not grow", remedy="loop over run.epoch(), or leave batch_growth out"
            )
        samples = self.feed.contract.batch if self._drawn is None else self._drawn.samples
        factor = self.lr_factor(self.progress) * self._rate if self.lr_factor is not None else None
        scale = self.loss_scale.value if self.loss_scale is not None else 1.0
        self._step_context_now = StepContext(self.taken, samples, factor, self._stop, scale)
        return self._step_context_now

    def _enter(self, phase: int) -> None:
        """Report this step's phase to the watchdog; the first step may compile and is reported as start-up."""
        heartbeat.training.enter(phase if self._warm else Phase.START, self.clock + 1)

    def _record(self, stats: StepStats, updated: UpdateResult) -> float:
        self._advance(stats, updated.global_step)
        self._after_update(stats, updated)
        return stats.loss

    def _advance(self, stats: StepStats | None, clock: int | None) -> None:
        """Count a global batch as consumed; ``clock``: steps of all workers together, None to count this rank's."""
        self._warm = True
        self.taken += 1
        self.clock = self.taken if clock is None else max(self.clock, clock)
        if self._drawn is not None:
            own = self.samples + self._drawn.samples
            self.samples = own if clock is None else self.feed.epochs.consumed(self.clock)
            self.at = self._drawn.after
        elif stats is not None:
            self.samples += round(stats.count)
        if self.losses is not None:
            self.losses.look()

    def _after_update(self, stats: StepStats, updated: UpdateResult) -> None:
        """Update counters, average and loss scale after an update or a skipped one; raise NonFiniteError if due."""
        self.stats, self.updated = stats, updated
        self.updates += updated.updates
        if self.average is not None and updated.updates and updated.together:
            self.average.update()
        # A lower loss scale may cure an overflow of the gradient, but not of the loss.
        curable = self.loss_scale is not None and self.loss_scale.can_fall and math.isfinite(stats.loss)
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
