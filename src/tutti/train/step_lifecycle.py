"""Beginning and end of each step of a run, the same in ``run.step`` and in custom training loops."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import torch
from torch.optim import Optimizer

from tutti.comm.random_keys import mix
from tutti.data.batches import CollatedBatch
from tutti.data.reader import RankBatch
from tutti.device import default_generator
from tutti.errors import NonFiniteError, UsageError, counted, script_line
from tutti.launcher import heartbeat
from tutti.launcher.heartbeat import Phase
from tutti.optim.learning_rate import multiply_learning_rates, restore_learning_rates, set_learning_rates
from tutti.train.script_checks.both_watches import BothWatches
from tutti.train.script_checks.cross_step_watch import CrossStepWatch
from tutti.train.script_checks.cross_worker_watch import CrossWorkerWatch
from tutti.train.script_checks.iterator_watch import IteratorWatch
from tutti.train.script_checks.loader_watch import LoaderWatch
from tutti.train.script_checks.loss_watch import LossWatch
from tutti.train.script_checks.step_inputs import StepInputs
from tutti.train.script_checks.watch_windows import WatchWindows
from tutti.train.script_checks.worker_trials import WorkerTrials
from tutti.train.script_checks.written_parameters import WrittenParameters
from tutti.types.micro_batch import Batch, LossFn, MicroBatch
from tutti.types.step_records import StepContext, StepStats, UpdateResult

if TYPE_CHECKING:
    from tutti.train.run import Run

WorkerBatches: TypeAlias = list[tuple[int, list[MicroBatch]]]
"""Pairs (index of a logical worker, its micro-batches) of this rank's workers, in order; workers without samples have
none."""

_DRAWS = 5
"""First steps of a process in which Python's and NumPy's generators are seeded for every micro-batch (a guess)."""


class StepLifecycle:
    """Begins each step of a run, opens its update, and counts it when it is over.

    ``begin`` makes this rank's micro-batches of the global batch before the forwards; ``updating`` surrounds the update
    of the parameters; ``count_batch`` and ``count_update`` bring the run's counters, schedulers, average and loss scale
    up to date. Attributes of this object last for one step; state that a checkpoint holds is in attributes of the run.
    A worker is a logical worker, a fixed share of the global batch.

    Args:
        run: the run, whose step number, position in the data and results are updated.
        max_nonfinite: number of skipped steps in a row that raises NonFiniteError.

    Attributes:
        step_context: facts of the step under way that all workers share.
        drawn: this rank's part of the global batch under way; None for a batch that the caller made.
        rate: factor on the learning rates in the present epoch, from the batch-size schedule: below 1 where the batch
            size could not grow as much as the schedule asks, else 1.
        values: the check of losses that depend on samples of another logical worker, or on samples of earlier steps
            that other ranks have not had.
        inputs: the check of optimizers whose step reads values of a part of the samples.
        loaders: the check for DataLoaders of the script that advance with every micro-batch.
        in_update: whether the run itself is making an update at this moment.
        in_any_update: number of updates that runs of this process are making at this moment.
        windows: the steps at the turn of an epoch in which the checks of the first steps act again.
        stop_asked: whether this rank asks all ranks to stop after the next step; set by ``Run.ask_to_stop`` and never
            reset.
    """

    in_any_update: ClassVar[int] = 0

    def __init__(self, run: Run, max_nonfinite: int) -> None:
        self._run = run
        self._written = WrittenParameters(run)
        self._across_workers, self._across_steps = CrossWorkerWatch(run), CrossStepWatch(run)
        self.values: LossWatch | BothWatches = self._across_workers
        self.inputs = StepInputs(run)
        self.windows = WatchWindows()
        self._trials, self.loaders = WorkerTrials(run, self._across_steps), LoaderWatch(run)
        self._iterators = IteratorWatch(run)
        run.replica.around_stage = self._around_stage
        self.step_context = StepContext(run.local_step, run.feed.contract.batch)
        self.drawn: RankBatch | None = None
        self.rate = 1.0
        self.in_update = self.stop_asked = self._warm = False
        # A step that an exception has left with parts that would count in the next one; and that exception.
        self._left: tuple[int, str] | None = None
        self._nonfinite, self._max_nonfinite = 0, max_nonfinite
        # Steps of this process, which a resume does not count.
        self._steps = 0
        # The script's own stream of random numbers, which goes on after the step.
        self._generator = default_generator(run.context.comms.world.device)
        self._script_draws = self._generator.get_state()

    def enter(self, phase: int) -> None:
        """Report the step's phase to the watchdog; the first step may compile and is reported as start-up.

        Args:
            phase: a value of ``Phase``, such as ``Phase.COMPUTE``.
        """
        heartbeat.training.enter(phase if self._warm else Phase.START, self._run.global_step + 1)

    # --- before the forwards ---------------------------------------------------------------------------------------

    def begin(self, batch: Batch, loss: LossFn | None) -> WorkerBatches:
        """Begin a step: set ``step_context``, and return this rank's micro-batches of the global batch.

        Collective over the data ranks if the script has thawed parameters, that is set their ``requires_grad`` to True
        (an all-gather of digests of ``requires_grad``), and in the first steps of several workers, whose samples are
        compared (an all-gather of digests). No forward is run, except that rank 0 may check the loss function on a few
        samples in the first step.

        Args:
            batch: this rank's share of the global batch.
            loss: the loss function, which the checks for mistakes read; None in a custom training loop.

        Returns:
            Pairs (index of a logical worker, its micro-batches on the device), one for each worker of this rank, in
            order; a worker without samples has an empty list.

        Raises:
            UsageError: the caller made the batch, and the batch size grows; or the script has converted the model,
                replaced optimizer state, thawed a parameter that the strategy cannot train, registered gradient hooks
                that the strategy cannot call, or caught an exception of a step that cannot be skipped.
            MismatchError: data ranks have thawed different parameters.
        """
        run = self._run
        self.check_left()
        self._script_draws = self._generator.get_state()
        self.windows.begin_step(None if self.drawn is None else self.drawn.after)
        begins = self.drawn is not None and self.drawn.after.batch <= 2
        run.replica.draws.of_python.begin_step(self._steps < _DRAWS or begins or self.windows.is_open)
        self._steps += 1
        self.step_context = self._make_step_context()
        if run.trainability.follow(late=False):
            run.hooks.watch(run.replica)
            self._written.watch()
        noise = 0.0 if run.noise is None else run.noise.sigma(self.step_context.samples)
        normalisation = run.gradient_sync.loss_normalisation
        batch = self._collated(batch)
        work = run.feed.micro_batches(
            batch,
            self.step_context.local_step,
            self.step_context.samples,
            normalisation,
            self.step_context.loss_scale,
            noise,
        )
        micro_batches = [micro_batch for _, micro_batches in work for micro_batch in micro_batches]
        single = self._are_single(micro_batches)
        run.hooks.check_hooks(single)
        if single and (run.feed.contract.shared or micro_batches) and normalisation == "step":
            self.step_context = replace(self.step_context, whole=True)
        if run.checks.looking:
            run.checks.look(batch, work, loss, given=self.drawn is None)
        return work

    def _are_single(self, micro_batches: Sequence[MicroBatch]) -> bool:
        """Return whether every gradient of the step is that of a single micro-batch, as in plain PyTorch."""
        feed = self._run.feed
        if feed.contract.shared:
            # Other ranks may have further micro-batches of this rank's worker.
            return feed.is_single(self.step_context.samples)
        return all(micro_batch.whole for micro_batch in micro_batches)

    def _make_step_context(self) -> StepContext:
        """Return the facts of the coming step, which all workers share, after checks of what the script has done."""
        run, drawn = self._run, self.drawn
        if drawn is None and run.feed.epochs.growth is not None:
            raise UsageError(
                "a batch that does not come from the run cannot grow",
                remedy="loop over run.epoch(), or leave batch_growth out",
            )
        run.conversions.check(run.global_step + 1)
        for guard in run.state_guards:
            guard.check()
        edits = run.replica.edits
        edited = [] if edits is None else edits.take()
        return StepContext(
            run.local_step,
            run.feed.contract.batch if drawn is None else drawn.samples,
            run.lr_schedule(run.progress) * self.rate if run.lr_schedule is not None else None,
            self.stop_asked,
            run.loss_scale.value if run.loss_scale is not None else 1.0,
            settings=run.shared_settings.text(),
            data_position=(0, 0) if drawn is None else (drawn.after.epoch, drawn.after.batch),
            written=self._digest(),
            compare=self._compare,
            edits=edited,
            edited_in=edits.line if edits is not None and edited else "",
        )

    def _digest(self) -> Callable[[], int]:
        """Return a function that hashes the values that data ranks compare with the gradients; 0 for no values."""
        written = self._written.digest_once()

        def digest() -> int:
            kept = self._across_steps.digest()
            return (mix(written(), kept) >> 1) or 1 if kept else written()

        return digest

    def _compare(self) -> None:
        """Raise UsageError where data ranks have kept or written other values. Collective over them."""
        self._across_steps.compare()
        self._written.compare()

    def watch(self, work: Sequence[tuple[int, Sequence[MicroBatch]]]) -> bool:
        """Choose the check to which this step's losses are subject, store it in ``values``, and return whether it acts.

        There are two checks. ``CrossWorkerWatch`` finds losses that depend on samples of another logical worker; it
        acts in the first two steps of a rank with several micro-batches, and at the turn of an epoch (``windows``). In
        other steps ``CrossStepWatch`` may act, which finds losses that depend on values that this rank alone has kept
        from its earlier samples. To be called once in each step, before the micro-batches. Not collective.

        Args:
            work: pairs (index of a logical worker, its micro-batches), one for each worker of this rank. A logical
                worker is a fixed share of the global batch.

        Returns:
            True if one of the checks acts in this step.
        """
        self.inputs.begin_batch(work)
        carried = self._across_workers.begin_batch(work)
        kept = self._across_steps.begin_batch(watched=carried)
        if kept and carried:
            self.values = BothWatches(self._across_steps, self._across_workers)
        else:
            self.values = self._across_steps if kept else self._across_workers
        return carried or kept

    def _collated(self, batch: Batch) -> Batch:
        """Return the drawn batch as its micro-batches if the script's own function has collated it."""
        drawn = None if self.drawn is None else self.drawn.batch
        if isinstance(batch, CollatedBatch) or not isinstance(drawn, CollatedBatch) or len(drawn.parts) != 1:
            return batch
        # The script may have edited the batch that it was shown.
        return CollatedBatch((batch,), drawn.sizes)

    def dummy_micro_batch(self, worker: int) -> MicroBatch:
        """Return the dummy micro-batch with which a rank without samples takes part in the collectives of a step.

        It has real samples of the global batch to compute with, weight 0 and ``samples`` 0, so that its gradient is
        zero or ignored. Not collective.

        Args:
            worker: index of the logical worker that computes it.

        Raises:
            UsageError: the caller made the batch, and this rank has no sample of it, from which the shape could be
                taken.
        """
        if self.drawn is None or self.drawn.dummy is None:
            raise UsageError(
                "this rank's batch has no samples",
                why="batch_norm='sync' and sharded weights need every device to take part",
                remedy="bring at least one sample on every rank",
            )
        return self._run.feed.dummy_micro_batch(self.drawn.dummy, self.step_context.local_step, worker)

    def padded(self, work: WorkerBatches) -> WorkerBatches:
        """Return ``work`` with dummy micro-batches in front, so that every rank has the same number of micro-batches.

        Needed where the weights are sharded, because each forward all-gathers them; otherwise ``work`` itself is
        returned. For sharded weights and a batch that the caller made, collective over the data ranks: an all-gather of
        the numbers of micro-batches.

        Args:
            work: the result of ``begin``.

        Raises:
            UsageError: the caller made the batch, and this rank has no sample of it.
        """
        run = self._run
        if not run.replica.sharded:
            return work
        present = sum(len(micro_batches) for _, micro_batches in work)
        if self.drawn is not None:
            most = run.feed.most_micro_batches(self.step_context.samples)
        else:
            comm = run.context.comms.replica
            counts = comm.gather_slices(torch.tensor([present], device=comm.device), "micro-batches of a batch")
            most = int(counts.max())
        if present >= most:
            return work
        index = next((i for i, (_, micro_batches) in enumerate(work) if micro_batches), 0)
        worker, micro_batches_here = work[index]
        micro_batches_here = micro_batches_here or [self.dummy_micro_batch(worker)]
        missing = most - max(present, 1)
        dummies = [
            run.feed.dummy_micro_batch(micro_batches_here[0].batch, self.step_context.local_step, worker, last=False)
            for _ in range(missing)
        ]
        return [*work[:index], (worker, [*dummies, *micro_batches_here]), *work[index + 1 :]]

    def guarded(self, loss: LossFn, work: WorkerBatches) -> LossFn:
        """Return the loss function of ``run.step`` with the checks that are due in this step around it.

        Called once in each step, after ``begin``. The returned function raises UsageError for a loss that depends on
        samples of another logical worker (share of the global batch; checked in steps 1 and 2), for a loss that is a
        sum divided by the global batch's size (in steps that ``watch`` chooses), for a forward that changes parameters
        in every micro-batch (steps 1 to 3), for a loss that depends on Python objects which another worker's
        micro-batch has changed (steps 1 to 8, 16, 32, 64, …), and for a loss that takes batches of a DataLoader (steps
        1 and 2). In the first step it warns of a loss that mixes samples. In some steps it records values of earlier
        steps on which the loss depends, which data ranks then compare with the gradients. Checks of the first steps
        act again at the turn of an epoch (``windows``). Not collective.

        Args:
            loss: the loss function.
            work: this rank's micro-batches of the step, in the order in which the runner computes them.

        Returns:
            A function with the arguments and the result of ``loss``; ``loss`` itself where no check is due.
        """
        # The guard's hashes take hundreds of small calls, which are none of those that the watch is to follow.
        probed = self._run.checks.probed(loss)
        watched = self._across_steps.noting_leaves(self.values.watched(probed, work)) if self.watch(work) else probed
        count = sum(len(micro_batches) for _, micro_batches in work)
        once = self._iterators.watched(loss, self._written.guarded(watched, work), count)
        return self.loaders.watched(self._trials.watched(loss, once, work), count)

    def uncompiled(self) -> AbstractContextManager[None]:
        """Return a context manager around a step's forwards and backwards, in which compiled code may run uncompiled.

        Code of ``torch.compile`` runs uncompiled in the first two steps if the losses are checked for samples of
        another logical worker (``guarded``), as the check does not see the calls of compiled code; otherwise the
        context does nothing. To be called after ``guarded``, and entered at once.
        """
        return self._across_workers.uncompiled()

    @contextmanager
    def _around_stage(self, stage: int, given: Any) -> Iterator[Callable[[Any], None]]:
        """Return a context manager around the forward of a pipeline stage, with the checks of the first steps."""
        with self._written.unmoved(stage), self._across_workers.stage(given) as check:
            yield check

    # --- the update, and after it ----------------------------------------------------------------------------------

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Return a context manager within which ``step`` of the script's optimizers updates the parameters at once.

        Outside of it the wrapped ``step`` of these optimizers is the script's call in a custom training loop. If the
        run has no schedule of its own (``Run.lr_schedule`` is None), the optimizers' learning rates are multiplied
        within the context by the attribute ``rate``, the factor of the epoch's phase, and restored at its end. Not
        collective.
        """
        run = self._run
        self.in_update = True
        StepLifecycle.in_any_update += 1
        optimizers = run.gradient_sync.optimizers if run.optimizer is None else (run.optimizer,)
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        if run.optimizer is not None:
            # Rebuilt copies of the script's optimizers take its settings before each step.
            set_learning_rates(groups, self.step_context.lr_factor)
        rates = multiply_learning_rates(groups, self.rate if run.lr_schedule is None else 1)
        try:
            yield
        finally:
            self.in_update = False
            StepLifecycle.in_any_update -= 1
            restore_learning_rates(rates)

    @contextmanager
    def abandoning(self) -> Iterator[None]:
        """Return a context manager around a step's forward, backward and update, to skip a step that an exception ends.

        The exception propagates, and the script may catch it and go on. The step's gradients and loss sums are dropped,
        as if the script had skipped the batch. Where other ranks may hold a part of them, so that this is not possible,
        ``check_left`` raises UsageError in further steps. Not collective.
        """
        try:
            yield
        except BaseException as error:
            if not self._run.gradient_sync.abandon_step():
                self.leave(error)
            raise

    def leave(self, error: BaseException) -> None:
        """Record that an exception has ended a step that cannot be skipped, so that ``check_left`` raises from now on.

        Args:
            error: the exception, whose class the UsageError names.
        """
        self._left = self.step_context.local_step + 1, type(error).__name__

    def check_left(self) -> None:
        """Raise UsageError if an exception has ended an earlier step that cannot be skipped. Not collective.

        Such a step has left a part of its gradients here, with other ranks or with servers; the script has caught the
        exception and goes on. The run calls this at the beginning of each step and in ``run.backward``.
        """
        if self._left is not None:
            step, name = self._left
            raise UsageError(
                f"the script has caught a {name} within step {step} and goes on",
                where=script_line(),
                why="a part of the step's gradients is computed or sent, here or on other ranks, and would count in the"
                " next update",
                remedy="check the batch on every rank before the step, and skip it on all; or let the exception end the"
                " run, and resume it; or take one device with strategy='single'",
            )

    def count_batch(self, stats: StepStats | None, global_step: int | None) -> None:
        """Count a global batch as consumed: the run's steps, samples and position in the data. Not collective.

        The default generators of the device, Python and NumPy get back their states from before the batch, so that the
        script's next draws, such as weights of its next model, depend on no micro-batch. In a run that continues
        without killed ranks, rank 0 then looks for such ranks (``LostRanks.look``).

        Args:
            stats: reduced results of the step; None for a global batch without an update.
            global_step: steps of all logical workers together (asynchronous servers that count these); None to count
                this rank's.
        """
        run, drawn = self._run, self.drawn
        self._warm = True
        run.callbacks.step_taken()
        run.local_step += 1
        run.global_step = run.local_step if global_step is None else max(run.global_step, global_step)
        if drawn is not None:
            run.samples = (
                run.samples + drawn.samples if global_step is None else run.feed.epochs.consumed(run.global_step)
            )
            run.data_position = drawn.after
        elif stats is not None:
            run.samples += round(stats.count)
        self._generator.set_state(self._script_draws)
        run.replica.draws.end_step()
        if run.replica.draws.of_python.late:
            run.replica.draws.of_python.late = False
            run.checks.report_late_draws()
        if run.lost_ranks is not None:
            run.lost_ranks.look()

    def count_update(self, stats: StepStats, updated: UpdateResult, optimizer: Optimizer | None = None) -> None:
        """Record an update in the run: its results, counters, schedulers, average of the weights and loss scale.

        Sets ``run.stats`` and ``run.updated``. Schedulers and average do not advance for a skipped update. Not
        collective.

        Args:
            stats: reduced results of the step.
            updated: result of the update, which may have been skipped.
            optimizer: the script's optimizer that made it; None for all.

        Raises:
            NonFiniteError: too many updates in a row were skipped because a gradient is not finite. Skips that a lower
                loss scale can cure (the loss itself is finite) do not count.
        """
        run = self._run
        run.stats, run.updated = stats, updated
        run.updates += updated.updates
        run.workers_differ = run.workers_differ or not updated.in_sync
        self._written.note()
        if not updated.skipped:
            run.schedulers.after_update(optimizer)
        if run.average is not None and updated.updates and updated.in_sync:
            run.average.update()
        # A lower loss scale may cure an overflow of the gradient, but not of the loss.
        curable = run.loss_scale is not None and run.loss_scale.can_fall and math.isfinite(stats.loss)
        if not (updated.skipped and curable):
            self._nonfinite = self._nonfinite + 1 if updated.skipped else 0
        if run.loss_scale is not None:
            run.loss_scale.update(not updated.skipped)
        if self._nonfinite >= self._max_nonfinite:
            raise NonFiniteError(
                f"{counted(self._nonfinite, 'step')} in a row had a NaN or infinite gradient",
                where=f"step {run.global_step}, {', '.join(updated.nonfinite[:3])}",
                why="the loss diverged, or a batch holds values that are not finite",
                remedy="lower the learning rate, warm up, clip the gradient (clip=1), or check the data"
                + ", or take precision='bf16', whose range is wider" * (run.loss_scale is not None),
            )
