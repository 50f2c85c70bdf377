"""A prepared training run, as ``tutti.prepare`` returns it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from tutti.checkpoint.fingerprint import pairs_sha256, tensor_digests
from tutti.checkpoint.gather import GatheredModel, gathered_model
from tutti.checkpoint.write import step_name
from tutti.comm.graph_breaks import ends_graph
from tutti.comm.stall import TellFailures
from tutti.config.gradient_noise import MultiplicativeNoise
from tutti.config.named_changes import NamedChanges
from tutti.config.spec import Duration
from tutti.config.strategy_choice import StrategyChoice
from tutti.data.adapt import Collate
from tutti.data.batches import script_batch
from tutti.data.feed import Feed
from tutti.data.reader import Position, RankBatch
from tutti.device import release_graph_results
from tutti.errors import UsageError
from tutti.launcher import heartbeat
from tutti.launcher.heartbeat import Phase
from tutti.nn.script_mode import modes_aside, modes_entered
from tutti.optim.adascale import AdaScale
from tutti.optim.factory import is_known
from tutti.optim.loss_scale import LossScale
from tutti.optim.mixing import needs_closure
from tutti.optim.several import SeveralOptimizers, members_of
from tutti.torch_compat import step_hooks
from tutti.train import run_state
from tutti.train.argument_words import argument_words
from tutti.train.callbacks import Callbacks
from tutti.train.conversions import ModelConversions
from tutti.train.custom_loop import CustomLoop
from tutti.train.epoch_batches import EpochBatches
from tutti.train.evaluation import BLOCK, Evaluation, evaluate_samples
from tutti.train.lost_ranks import LostRanks
from tutti.train.noise_probe import NoiseProbe
from tutti.train.partial_reads import read_only_state
from tutti.train.partial_state import StateGuard, gathered_state
from tutti.train.prediction import predict_samples
from tutti.train.preemption import StopReason, stop_on_signals
from tutti.train.replicas import check_replicas, seldom
from tutti.train.schedulers import Schedulers
from tutti.train.script_checks.hook_watch import HookWatch
from tutti.train.script_checks.mistake_checks import Checks
from tutti.train.script_checks.shared_settings import SharedSettings
from tutti.train.script_checks.single_sample import note_single_sample
from tutti.train.script_checks.trainability import TrainabilityWatch
from tutti.train.step import train_step
from tutti.train.step_hooks import StepHookGuard
from tutti.train.step_lifecycle import StepLifecycle
from tutti.train.step_windows import profiled, traced
from tutti.types.custom_loop_sync import CustomLoopSync
from tutti.types.micro_batch import Batch, LossFn
from tutti.types.replica_runner import CustomLoopRunner, GradientReadyHook
from tutti.types.run_context import RunContext
from tutti.types.step_records import StepStats, UpdateResult
from tutti.types.weight_average import Average

if TYPE_CHECKING:
    from tutti.train.run_checkpoints import Checkpoints
    from tutti.train.state_loads import StateLoads


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Options of a run that act before and after each training step.

    Attributes:
        max_nonfinite: number of skipped steps in a row that raises NonFiniteError.
        average: average of the weights, None for none.
        loss_scale: loss scaling, None for none.
        noise: random weights on the samples' losses, which add noise to the gradient; None for none.
        adascale: AdaScale, None for none.
        noise_probe: measures the gradient noise scale, None for never.
        lr_schedule: factor on the initial learning rates by step; None leaves the rates to the caller.
        named_workers: whether the caller gave the number of logical workers (fixed shares of the global batch);
            otherwise it is the number of data ranks.
        fault_tolerant: whether training continues on the other ranks if a rank is killed.
        warn: receives each warning's text, on rank 0; None for Python's ``warnings`` and stderr.
        schedulers: PyTorch's schedulers, which the run steps.
        callbacks: the script's callbacks.
        optimizer_settings: options of each parameter group as they were given.
        epochs_as_steps: whether the strategy has an option in epochs or samples, which it counts in steps.
        in_bf16: layers with matrix products that ``precision=fp8`` leaves in bfloat16, with the reason by name.
        uncached: whether ``config.use_cache`` of modules was set to False, for activation checkpointing.
    """

    max_nonfinite: int
    average: Average | None
    loss_scale: LossScale | None
    noise: MultiplicativeNoise | None
    adascale: AdaScale | None
    noise_probe: NoiseProbe | None
    lr_schedule: Callable[[int], float] | None
    named_workers: bool
    fault_tolerant: bool
    warn: Callable[[str], None] | None
    schedulers: Schedulers
    callbacks: Callbacks
    optimizer_settings: list[dict[str, Any]]
    epochs_as_steps: bool
    in_bf16: Mapping[str, str]
    uncached: bool


class Run:
    """A training run, as ``tutti.prepare`` returns it: this rank's model, optimizer, data and strategy.

    Every rank has such an object and makes the same calls of it. A worker is a logical data-parallel worker with its
    share of the global batch; a rank may compute several. The caller, or script, is the user's code.

    Args:
        replica: this rank's part of the model.
        sync: gradient synchronisation.
        grad_hook: gradient-ready hook of ``sync``.
        feed: this rank's batches.
        loss_fn: the loss function; None for custom training loops alone.
        run_context: mesh, communicators and workers of this rank.
        choice: the strategy.
        optimizers: the caller's optimizers; none where ``tutti.prepare`` was given options.
        hooks: refuses gradient hooks that the strategy cannot call.
        conversions: refuses conversions of the model to another dtype or device.
        settings: options that act before and after each step, and the objects made of them.

    Attributes:
        model: the module to call in a custom training loop.
        stats: reduced results of the last step (loss, metrics, gradient norm); None before the first.
        updated: result of the last update; None before the first.
        global_step: steps taken, or steps of all workers together with asynchronous servers that count these.
        local_step: steps taken by this rank; equal to ``global_step`` unless all workers' steps are counted.
        compared: local step at which copies of tensors were last compared over ranks.
        samples: samples consumed.
        data_position: this rank's position in the data: ``epoch`` and ``batch`` of the next global batch.
        open_epoch: epoch whose loop has not ended, even if all its batches are consumed; None outside of a loop.
        updates: number of updates.
        average: average of the weights; None for none.
        optimizer: the caller's optimizer, several as one; None where ``tutti.prepare`` was given options.
        savers: checkpoint manager by folder and ``keep``, for ``save`` and ``restore``.
        lifecycle: begins each step, opens its update, and counts it.
        custom: runs custom training loops.
        loss_scale: factor on the loss in backward; None without loss scaling.
        noise: noise on the gradient; None for none.
        adascale: AdaScale's gain of each step; None without AdaScale.
        noise_probe: measures the gradient noise scale in some steps; None for never.
        hooks: refuses gradient hooks that the strategy cannot call.
        trainability: detects parameters that the script thaws, freezes or replaces.
        conversions: refuses conversions of the model to another dtype or device.
        model_code: function without arguments that returns a context manager for code of tutti and the model, in which
            reads and writes of parameters are not checked as the script's are.
        state_guards: guards of ``state`` and step hooks of the caller's optimizers where this rank has a part of it;
            ``accumulate_steps`` adds those of each optimizer that it wraps.
        checks: checks for common mistakes, and their findings.
        lr_schedule: factor on the initial learning rates by step; None leaves the rates to the caller.
        schedulers: PyTorch's schedulers, which the run steps.
        callbacks: the script's callbacks.
        settings: the argument ``settings``.
        shared_settings: learning rates, momenta and weight decays of the caller's optimizers, equal on all ranks.
        changes: settings that the user has changed on resuming, a list of ``{"step": …, "changed": {name: [saved,
            now]}}``, one for each resume that changed any.
        workers_differ: whether an update of this run has left logical workers with different parameters (local SGD).
        returned: ``tensor_digest`` of each tensor that ``state`` has returned since ``workers_differ`` became true, on
            a rank with several workers; ``load_state_dict`` accepts these tensors alone on a single data rank.
        lost_ranks: tracker of ranks that were killed while the run continued; None on ranks other than 0, and if
            training ends when a rank is killed.
    """

    def __init__(
        self,
        replica: CustomLoopRunner,
        sync: CustomLoopSync,
        grad_hook: GradientReadyHook,
        feed: Feed,
        loss_fn: LossFn | None,
        run_context: RunContext,
        choice: StrategyChoice,
        optimizers: Sequence[Optimizer],
        hooks: HookWatch,
        conversions: ModelConversions,
        settings: RunSettings,
    ) -> None:
        self.replica, self.gradient_sync, self.feed, self.context = replica, sync, feed, run_context
        self.model: nn.Module = replica.plain
        self.loss_fn, self.hooks, self.grad_hook = loss_fn, hooks, grad_hook
        self.conversions = conversions
        self.model_code = self._unchecked_code if replica.model_code is modes_aside else replica.model_code
        self.state_guards: list[StateGuard | StepHookGuard] = []
        self.average, self.loss_scale = settings.average, settings.loss_scale
        self.noise, self.adascale = settings.noise, settings.adascale
        self.noise_probe = settings.noise_probe
        self.lr_schedule = settings.lr_schedule
        self.schedulers, self.callbacks, self.settings = settings.schedulers, settings.callbacks, settings
        self.schedulers.begin(run_context.comms.world)
        self.changes: list[dict[str, Any]] = []
        self.global_step = self.local_step = self.compared = self.updates = self.samples = 0
        self.data_position = Position()
        self.open_epoch: int | None = None
        self.stats: StepStats | None = None
        self.updated: UpdateResult | None = None
        self.workers_differ, self.returned = False, set[int]()
        self._resumed: Position | None = None
        self._over: int | None = None  # the last epoch that was over
        self.optimizer = SeveralOptimizers(optimizers) if len(optimizers) > 1 else next(iter(optimizers), None)
        self.trainability = TrainabilityWatch(
            replica, sync, optimizers, self.average, hooks.originals.values(), run_context.mesh.shard > 1
        )
        self.shared_settings = SharedSettings(optimizers)
        self._closure = next((type(each).__name__ for each in optimizers if needs_closure(each)), None)
        self.savers: dict[tuple[Path, int], Checkpoints] = {}
        self._state_loads: StateLoads | None = None
        self.checks = Checks(self, settings.warn)
        tracks = settings.fault_tolerant and run_context.mesh.rank == 0
        self.lost_ranks = LostRanks(self, not choice.row.synchronous, settings.warn) if tracks else None
        self._script_code = ExitStack()
        self.lifecycle = StepLifecycle(self, settings.max_nonfinite)
        self.custom = CustomLoop(self, optimizers, choice)

    def begin_script(self, state_loads: StateLoads) -> None:
        """Begin to check the reads and writes that the user's script makes of parameters that are split over ranks.

        ``tutti.prepare`` calls this as its last action. A read or write that would give each rank another result then
        raises UsageError in the script. The checks last until the run object is deleted. Does nothing for strategies
        that leave each rank whole parameters of its own.

        Args:
            state_loads: makes ``load_state_dict`` of the script's model act on all ranks as long as the run exists.
        """
        self._state_loads = state_loads
        self._script_code.enter_context(self.replica.script_code())

    def _unchecked_code(self) -> AbstractContextManager[None]:
        """Return a context for code of a run that splits no parameters, which other runs' function modes need not see.

        They stay active where the script's optimizer or step hooks may read other runs' parameters. A backward has no
        function modes in any case.
        """
        if not modes_entered():
            return nullcontext()
        members = [member for optimizer in self.gradient_sync.optimizers for member in members_of(optimizer)]
        plain = all(is_known(type(member)) and not any(step_hooks(member)) for member in members)
        return modes_aside() if plain else nullcontext()

    @property
    def steps_per_epoch(self) -> int:
        """Number of global batches, and so of steps, in each epoch of the training data.

        Raises UsageError for a stream of unknown length, and if the batch size grows (see ``steps_of``).
        """
        if self.feed.epochs.growth is not None:
            raise UsageError("the batch grows, and epochs have fewer steps", remedy="call run.steps_of(epoch)")
        return self.steps_of(self.data_position.epoch)

    def steps_of(self, epoch: int) -> int:
        """Return the number of global batches, and so of steps, in an epoch.

        Args:
            epoch: counted from 0; with a growing batch later epochs have fewer.

        Raises:
            UsageError: the training data are a stream of unknown length.
        """
        return self.feed.epochs.contract_of(epoch).steps_per_epoch

    @property
    def progress(self) -> int:
        """Number of steps of the training run so far, as the learning-rate schedule and the run's length count them.

        Equal to ``global_step``, the steps taken; with AdaScale ⌊τ⌋, where τ is the sum of the gains of all steps: the
        gain is the number of steps on the batch of one logical worker (share of the global batch) that a step is worth.
        """
        return self.global_step if self.adascale is None else int(self.adascale.tau)

    def ask_to_stop(self) -> None:
        """Ask all ranks to stop training after the next step, which sets ``run.stats.stop`` to True on all ranks.

        The loop over steps must then end. Returns at once, is not collective, and may be called in a signal handler.
        """
        self.lifecycle.stop_asked = True

    def stop(self, reason: str) -> None:
        """End training on every rank after the event that a callback handles; only callbacks may call this method.

        Args:
            reason: why training ends; the property ``stopped`` returns this text afterwards.

        Raises:
            UsageError: no callback is being called.
        """
        self.callbacks.stop(reason)

    @property
    def stopped(self) -> str | None:
        """The reason for which a callback has ended training, as text; None while no callback has."""
        return self.callbacks.reason

    # --- steps: the same code for every strategy -------------------------------------------------------------------

    def epoch(self, number: int, start: int | None = None) -> Iterator[Batch]:
        """Iterate over this rank's part of every global batch of an epoch, and call the callbacks of epoch and step.

        Every rank must iterate alike. Collective over all ranks, by all-gathers: of reasons to stop after events of
        callbacks; of digests of the copies of parameters at the end of an epoch, if the last comparison is at least 100
        steps old; and, if the data are a stream or have a sampler, of digests of samples. Yields nothing once a
        callback has ended training.

        Args:
            number: the epoch, from 0.
            start: first batch; default: 0, or after ``restore`` the batch after the last one consumed.

        Returns:
            An iterator over this rank's samples of each global batch, to be passed to ``step``. Its ``len()`` is the
            number of the epoch's global batches.

        Raises:
            UsageError: ``number`` is not a whole number of at least 0; ``start`` is None, and ``restore`` has loaded a
                checkpoint of a later epoch than ``number``; or the script has replaced a parameter of the model, or
                with pipeline stages a module.
            MismatchError: ranks hold different copies of a parameter, or read different samples.
        """
        EpochBatches.check_number(number, "run.epoch")
        return EpochBatches(self._batches_of(number, start), partial(self.steps_of, number))

    def _batches_of(self, number: int, start: int | None) -> Iterator[Batch]:
        """Iterate over this rank's part of every global batch of an epoch; see ``epoch``."""
        with TellFailures():
            self.callbacks.end_left(self)
            self.trainability.check_replaced()
            self.hooks.check_tree()
            repeated = number == self._over and self._resumed is None
            start = self._start(number) if start is None else start
            self.callbacks.begin(self)
            if self.callbacks.ended():
                return
            self.callbacks.begin_epoch(self, number)
            self.open_epoch, self.lifecycle.rate = number, self.feed.epochs.phase(number).rate
            parts = iter(()) if start is None else self.feed.read(number, start)
            while not self.callbacks.ended() and (part := self._draw(parts)) is not None:
                self.lifecycle.drawn, taken = part, self.local_step
                try:
                    yield script_batch(part.batch)
                except GeneratorExit:
                    # A break, or an exception of one rank alone: collective calls wait until all ranks make them.
                    if self.lifecycle.drawn is part:
                        self.lifecycle.drawn = None
                        self.callbacks.leave_step()
                    raise
                finally:
                    # Also after an exception or a break in the caller's loop: the step is over.
                    heartbeat.training.enter(Phase.IDLE)
                if self.local_step > taken:
                    if repeated:
                        self.checks.repeated(number)
                    self.callbacks.end_step(self)
            self.lifecycle.drawn = None
            if self.callbacks.ended() and self.callbacks.in_epoch:
                # The epoch is not over: a checkpoint saved from here on resumes within it.
                return
            # A checkpoint saved from here on resumes after this epoch's loop.
            self.open_epoch, self._over = None, number
            self.schedulers.after_epoch()
            self.callbacks.end_epoch(self, number)
            if seldom(self):
                check_replicas(self, f"epoch {number + 2}")

    def _start(self, number: int) -> int | None:
        """Return the first batch of epoch ``number``; None if a restored run has consumed all of them."""
        resumed, self._resumed = self._resumed, None
        if resumed is None or number > resumed.epoch:
            return 0
        if number == resumed.epoch:
            return resumed.batch
        if number != self.open_epoch:
            raise UsageError(
                f"epoch {number} was over when this run was saved, which was in epoch {resumed.epoch}",
                remedy="loop over run.epochs(number), which gives those that are left",
            )
        return None

    def _draw(self, parts: Iterator[RankBatch]) -> RankBatch | None:
        """Return this rank's part of the next global batch; None at the end."""
        self.lifecycle.enter(Phase.DATA)
        try:
            with self.model_code():
                return next(parts, None)
        finally:
            heartbeat.training.enter(Phase.IDLE)

    @ends_graph
    @TellFailures()
    def step(self, batch: Batch) -> float:
        """Train on one global batch, of which ``batch`` is this rank's share: forward, backward and update.

        Every rank must call it. Collective over all ranks of the run: a split or sharded model exchanges activations,
        slices or shards in forward and backward (stages, tensor ranks, shard ranks of a replica); then the data ranks
        reduce gradients, losses and metrics (an all-reduce, with shards a reduce-scatter, with local SGD losses alone
        and at times parameters), except with parameter servers, which sum them; asynchronous ones wait for no other
        rank. In the first steps checks compare samples over the data ranks. Blocks until the loss is known. Afterwards
        every ``.grad`` is None.

        Args:
            batch: a batch that ``epoch`` yielded, or one that the caller made. Ranks may bring different numbers of
                samples.

        Returns:
            The loss, as the mean over the global batch (with asynchronous servers over this rank's logical workers).

        Raises:
            UsageError: the run has no loss function; it is called in the body of a loop over ``run.microbatches``; the
                optimizer needs a closure; the caller made the batch, and the batch size grows, or this rank has no
                sample of it and the strategy needs samples on every rank; the loss has an unknown form; the script has
                converted the model, or has written parameters or buffers, or registered hooks, that the strategy
                refuses (``central_storage`` and parameter servers, for example, refuse parameters written between
                steps); or the script has caught an exception of an earlier step, of which other ranks may hold a part
                (under ``single`` every step can be skipped).
            NonFiniteError: ``max_nonfinite`` updates in a row were skipped because a gradient is not finite.
            MismatchError, PeerError: ranks are about to run different collectives, or a rank has died.
        """
        self.callbacks.end_left(self)
        self.custom.refuse_step()
        self.custom.end_step()
        if self.loss_fn is None:
            raise UsageError("run.step needs a loss function", remedy="give tutti.prepare a loss_fn")
        if self._closure is not None:
            raise UsageError(
                f"{self._closure} needs a closure, and run.step gives none",
                remedy="loop over run.microbatches(epoch) and call optimizer.step(closure), one worker a device",
            )
        with self.model_code():
            self.lifecycle.enter(Phase.COMPUTE)
            work = self.lifecycle.begin(batch, self.loss_fn)
            # Synchronised batch norm takes statistics over all ranks, also from one without samples.
            if self.feed.workers_as_one and not work[0][1]:
                work = [(work[0][0], [self.lifecycle.dummy_micro_batch(work[0][0])])]
            work = self.lifecycle.padded(work)
            step_context = self.lifecycle.step_context
            if self.context.compile is not None and self.context.compile.records_graphs:
                release_graph_results()
            try:
                with self.lifecycle.updating(), self.lifecycle.abandoning():
                    guarded = self.lifecycle.guarded(self.loss_fn, work)
                    with self.lifecycle.uncompiled(), self.lifecycle.inputs.watching():
                        stats, updated = train_step(
                            self.replica,
                            self.gradient_sync,
                            self.grad_hook,
                            work,
                            guarded,
                            step_context,
                            self.hooks,
                            self.adascale,
                            self.noise_probe,
                        )
                self.lifecycle.count_batch(stats, updated.global_step)
                self.lifecycle.count_update(stats, updated)
                return stats.loss
            except Exception as error:
                error.step = step_context.local_step + 1  # type: ignore[attr-defined]
                note_single_sample(error, self.feed.contract)
                raise
            finally:
                heartbeat.training.enter(Phase.IDLE)

    @property
    def within_batch(self) -> bool:
        """Whether a custom training loop is in the middle of a global batch, or the run is making an update.

        In the middle of a global batch ``save`` raises UsageError.
        """
        return self.custom.within_batch or self.lifecycle.in_update

    @property
    def stepping(self) -> bool:
        """Whether the training run itself is making an update at this moment.

        If so, the wrapped ``step`` of the script's optimizers updates parameters at once; otherwise such a call is the
        script's, in a custom training loop.
        """
        return self.lifecycle.in_update

    # --- custom training loops: see ``CustomLoop`` -----------------------------------------------------------------

    def microbatches(self, number: int, start: int | None = None) -> Iterator[Batch]:
        """Iterate over the micro-batches of this rank's logical workers in an epoch, for a custom training loop.

        A logical worker is a fixed share of the global batch; a rank computes one or several. The loop's body runs once
        for each micro-batch (once a global batch with one worker on one device), and ``optimizer.step()`` acts in a
        rank's last body of each global batch. If this rank has no sample in the last global batch, the body runs once
        on a dummy micro-batch of weight 0, so that collectives stay aligned. Every rank must iterate alike: the
        iterator has the collectives of ``epoch``, under local SGD also the averages of parameters.

        Args:
            number: the epoch, from 0.
            start: first global batch; default: 0, or after ``restore`` the batch after the last one consumed.

        Returns:
            An iterator over the samples of each micro-batch as the data set or collate function gives them, on the
            device. Its ``len()`` is the number of the epoch's global batches, as that of the loader which it replaces.

        Raises:
            UsageError: ``number`` is not a whole number of at least 0; the strategy or an option (CUDA graphs) has no
                custom training loops; the previous loop was left in the middle of a global batch; the bodies of one
                global batch make different calls; or a body writes parameters, steps twice or uses a GradScaler
                although this rank has several micro-batches.
            MismatchError: ranks hold different copies of a parameter, or read different samples.
        """
        EpochBatches.check_number(number, "run.microbatches")
        return EpochBatches(self.custom.microbatches(number, start), partial(self.steps_of, number))

    def cells(self, number: int, start: int | None = None) -> Iterator[Batch]:
        """Call ``microbatches``, of which this is the former name, and warn (DeprecationWarning).

        The result iterates over the micro-batches of this rank in an epoch, for a custom training loop.

        Args:
            number: the epoch, from 0.
            start: first global batch; default: 0, or after ``restore`` the batch after the last one consumed.

        Returns:
            An iterator over the samples of each micro-batch, on the device.
        """
        warnings.warn("run.cells is now run.microbatches", DeprecationWarning, stacklevel=2)
        return self.microbatches(number, start)

    @property
    def agreed(self) -> StepStats | None:
        """Loss, metrics and gradient norm of the last step, reduced over the global batch; None before the first step.

        A ``StepStats`` with Python numbers, such as ``loss`` and ``grad_norm``. Former name of ``stats``. Reading it
        raises a DeprecationWarning.
        """
        warnings.warn("run.agreed is now run.stats", DeprecationWarning, stacklevel=2)
        return self.stats

    @property
    def clock(self) -> int:
        """Number of steps of the run so far: former name of ``global_step``. Reading it raises a DeprecationWarning."""
        warnings.warn("run.clock is now run.global_step", DeprecationWarning, stacklevel=2)
        return self.global_step

    @property
    def at(self) -> Position:
        """Former name of ``data_position``, the position of the next global batch. Reads raise a DeprecationWarning."""
        warnings.warn("run.at is now run.data_position", DeprecationWarning, stacklevel=2)
        return self.data_position

    @ends_graph
    @TellFailures()
    def backward(self, loss: Any, *, retain_graph: bool = False) -> None:
        """Compute gradients, in place of ``loss.backward()``, and reduce them in a rank's last micro-batch.

        ``.grad`` is then the gradient of the global batch, the same on every rank. With shards, ``.grad`` has this
        rank's rows, or raises UsageError when it is read; with parameter servers it is read from synchronous ones, and
        raises UsageError with others; under local SGD it is the gradient of this rank's logical worker. In earlier
        micro-batches of a global batch it has this micro-batch's part. Several calls before ``optimizer.step()``
        accumulate gradients, as in PyTorch. Collective over the data ranks in the last micro-batch: an all-reduce of
        the gradients, with shards a reduce-scatter, with parameter servers an exchange with them, under local SGD an
        exchange of losses alone.

        Args:
            loss: mean over the micro-batch's samples, ``(sum, count)``, or a 1-d tensor of one loss a sample in place
                of mean or sum.
            retain_graph: keep the graph for another backward, as in PyTorch.

        Raises:
            UsageError: outside of ``run.microbatches()``; the script has edited or assigned ``.grad`` of a micro-batch
                before; the body makes other calls than for the rank's first micro-batch of this global batch; or with
                parameter servers an earlier gradient was not cleared, or this is a second one of the global batch and
                the servers do not wait for all workers.
            MismatchError, PeerError: ranks are in different steps or make different calls, or a rank has died.
        """
        self.custom.gradients.backward(loss, retain_graph)

    @ends_graph
    @TellFailures()
    def reduce_gradients(self) -> None:
        """Average the gradients that the script has assigned to ``.grad`` over the samples of the global batch.

        For gradients that no backward has put into ``.grad``: from ``torch.autograd.grad``, ``torch.func`` or a
        formula. Call it once in the loop's body, which computes one micro-batch, after the assignments. Each ``.grad``
        must be a mean over the micro-batch's samples. In a rank's last micro-batch of a global batch the call is
        collective over the data ranks, so that every rank must make it; ``.grad`` is then the gradient of the global
        batch, which the script may clip or edit.

        Raises:
            UsageError: outside of ``run.microbatches()``; the strategy keeps gradients where a script cannot assign
                them (``tensor``, stages 2 and 3 of ``sharded``); the run has ``gradient_noise``; or the body differs
                from that of the rank's first micro-batch of this global batch.
            MismatchError, PeerError: ranks are in different steps or make different calls, or a rank has died.
        """
        self.custom.gradients.reduce_gradients()

    @property
    def stepped(self) -> bool:
        """True if the latest call of ``optimizer.step()`` in a custom training loop updated the parameters.

        False before the first call. ``step`` makes an update in the rank's last micro-batch of a global batch, and does
        nothing in earlier ones. A step that was skipped because a gradient is not finite counts as an update here.
        """
        return self.custom.update.stepped

    def gated_step(self) -> bool:
        """Update the parameters in a custom loop, for an optimizer that ``tutti.prepare`` was given as options.

        Called in place of ``optimizer.step()``. The update is made in the rank's last micro-batch of a global batch; in
        earlier ones nothing is done. Gradients of a plain ``loss.backward()`` are reduced first, which is collective
        over the data ranks. In the update ZeRO stage 1 all-gathers rows over the shard ranks, ``central_storage`` waits
        at a barrier, and parameter servers are asked for it; edited gradients are compared over the ranks that hold
        them. Otherwise nothing is sent.

        Returns:
            True in the rank's last micro-batch, also if the update was skipped because the gradient is not finite.

        Raises:
            UsageError: outside of a loop over ``run.microbatches()``; the script has edited the gradient of a single
                micro-batch, or ranks have edited gradients in different ways; with AdaScale, gradients were reduced
                several times; with parameter servers none was computed; or the body makes other calls than for the
                rank's first micro-batch.
            NonFiniteError: too many updates in a row were skipped because a gradient is not finite.
        """
        return self.custom.update.step(None)

    # --- the length of a run -----------------------------------------------------------------------------------------

    def stopping(self) -> AbstractContextManager[StopReason]:
        """Return a context within which SIGTERM, SIGUSR1, SIGUSR2 and the first Ctrl-C call ``ask_to_stop``.

        All ranks then stop after the next step; a second signal ends the process at once. The script's loop checks
        ``run.stats.stop``, saves and leaves.

        Returns:
            A context manager; ``with run.stopping() as reason`` gives a ``StopReason``, whose ``exit_code`` is 75, or
            130 after Ctrl-C.
        """
        return stop_on_signals(self)

    def epochs(self, number: int) -> Iterable[int]:
        """Return the numbers of the epochs that are left of ``number`` epochs, for a loop over them.

        The loop ends early when a callback stops the run. If there are callbacks, ``on_train_begin`` is called before
        the first epoch and ``on_train_end`` after the last; after a ``break`` out of the loop ``on_train_end`` is
        called before the run's next collective call, such as ``evaluate`` or ``save``. Both calls are collective over
        all ranks: an all-gather of reasons to stop.

        Args:
            number: number of epochs of the whole run.

        Returns:
            0 … ``number`` - 1, or after ``restore`` the epochs from the checkpoint's on.
        """
        if self.feed.contract.dataset is not None:
            self.checks.planned(self.feed.epochs.steps(Duration(number, "ep")))
        left = range(self.data_position.epoch if self.open_epoch is None else self.open_epoch, number)
        return self._until_stopped(left) if self.callbacks.own else left

    def _until_stopped(self, epochs: Iterable[int]) -> Iterator[int]:
        self.callbacks.end_left(self)
        self.callbacks.begin(self)
        for epoch in epochs:
            if not self.callbacks.ended():
                try:
                    yield epoch
                except GeneratorExit:
                    self.callbacks.leave_training()
                    raise
        self.callbacks.end_left(self)
        self.callbacks.end(self)

    # --- evaluation, profiling, state ------------------------------------------------------------------------------

    @TellFailures()
    def evaluate(
        self,
        source: Any,
        batch: int = BLOCK,
        loss: LossFn | None = None,
        averaged: bool | None = None,
        collate: Collate | None = None,
    ) -> Evaluation:
        """Return mean loss and metrics of the model over all samples of ``source``, each counted once.

        Collective over all ranks: each data rank evaluates its part of the samples in eval mode, and an all-reduce sums
        the results. Where replicas of the model differ (local SGD), their mean is evaluated. Steps the schedulers of
        ``scheduler_every="evaluation"``, and calls the callbacks' ``on_evaluation``.

        Args:
            source: held-out samples or a stream of them, the same on every rank; or a ``DataLoader``, whose batches are
                then evaluated.
            batch: largest number of samples in one forward, where ``source`` is no ``DataLoader``.
            loss: the loss function; default: that of ``tutti.prepare``.
            averaged: whether to evaluate the average of the weights over updates (EMA) in place of the weights;
                default: True if the run keeps such an average.
            collate: makes a batch of a list of samples; default: as PyTorch's ``DataLoader``.

        Returns:
            An ``Evaluation``: ``loss``, ``metrics`` (mean of each by name), ``samples`` (number) and ``averaged``
            (whether the average of the weights was evaluated); the same on every rank, but for the last bit between
            ranks of one replica. Means are NaN if the loss function counts nothing.

        Raises:
            UsageError: no loss function; ``averaged`` without an average; a scheduler follows a metric that is not
                reported; the weights are sharded, and the loss function updates a metric object (with ``update``,
                ``compute`` and ``reset``); or ``source`` is a
                ``DataLoader`` that cannot be reproduced on several ranks, such as one with a ``DistributedSampler``, or
                a stream that shards itself.
            MismatchError: ranks make different calls, have taken different numbers of steps, or read different streams.
            DataError: the stream has no samples.
        """
        averaged = self.average is not None if averaged is None else averaged
        found = evaluate_samples(self, source, batch, loss, averaged, collate)
        # Before the callbacks, which may save a checkpoint.
        self.schedulers.after_evaluation(found.values)
        self.callbacks.evaluated(self, found)
        return found

    @TellFailures()
    def predict(
        self,
        source: Any,
        function: Callable[[Any, Batch], Any],
        batch: int = 512,
        averaged: bool | None = None,
        collate: Collate | None = None,
    ) -> Any:
        """Return ``function(model, batch)`` for all samples of ``source`` in their order, on the CPU of every rank.

        Collective over all ranks: each data rank computes its part of the samples, in eval mode, and all-gathers join
        the results. Where replicas of the model differ (local SGD), the merged replicas are used.

        Args:
            source: the samples or a stream, the same on every rank; or a ``DataLoader``, whose batches are then taken.
            function: returns a tensor, or tuples, lists and dicts of tensors, with a row for each sample.
            batch: largest number of samples in one forward, where ``source`` is no ``DataLoader``.
            averaged: whether to use the average of the weights over updates (EMA) in place of the weights; default:
                True if the run keeps such an average.
            collate: makes a batch of a list of samples; default: as PyTorch's ``DataLoader``.

        Returns:
            The structure that ``function`` returns, with tensors that have a row for each sample of ``source``.

        Raises:
            UsageError: ``averaged`` without an average; a prediction holds something else than tensors, or a tensor
                without one row for each sample; or ``function`` calls a model in pipeline stages otherwise than the
                stages can compute it.
            DataError: predictions of two batches of a rank have rows of different shapes.
            MismatchError: ranks make different calls, have taken different numbers of steps, or have predictions of
                different shapes.
        """
        averaged = self.average is not None if averaged is None else averaged
        return predict_samples(self, source, function, batch, averaged, collate)

    @contextmanager
    def profile(self, folder: str | Path) -> Iterator[None]:
        """Return a context manager that profiles the steps within its block with PyTorch's profiler, on this rank.

        Not collective: each rank that is to be profiled enters a block of its own. At its end the rank writes
        ``rank{N}.json`` for ui.perfetto.dev, and rank 0 ``operations.txt``, too, a table of operators. If an exception
        leaves the block, nothing is written.

        Args:
            folder: directory for the files, which is made.

        Raises:
            DiskError: ``folder`` cannot be written.
        """
        with profiled(self, Path(folder)):
            yield

    @contextmanager
    def trace(self, folder: str | Path) -> Iterator[None]:
        """Return a context manager that measures the phases of each step within its block on all ranks.

        Collective over all ranks: at its beginning two all-gathers that compare the step number and align the ranks'
        clocks, at its end one broadcast of the measured times from each rank.

        At its end rank 0 writes ``timeline.svg`` (the phases over time), ``trace.json`` (for ui.perfetto.dev) and
        ``shares.txt`` (time in each phase). If an exception leaves the block, nothing is sent or written.

        Args:
            folder: directory for the files, which is made.

        Raises:
            DiskError: rank 0 cannot write ``folder``; raised there alone, at the end of the block.
            MismatchError: ranks have taken different numbers of steps.
        """
        with traced(self, Path(folder)):
            yield

    @TellFailures()
    def state(self, averaged: bool = False) -> dict[str, Tensor]:
        """Return all parameters and persistent buffers of the plain model on every rank.

        Collective over all ranks, which first compare the call and their copies of tensors (all-gathers of digests).

        Shards and slices are gathered in messages of about 64 MiB, by broadcasts from each rank that has some, or by
        all-gathers of rows; replicas that differ (local SGD) are merged over the data ranks. Each rank needs memory for
        the whole model.

        Args:
            averaged: return the average of the weights over the updates (EMA) in place of the trained parameters, with
                the model's own buffers.

        Returns:
            A dict of whole tensors by name. A tensor may be the model's own, which the next step changes, or a copy,
            whose writes raise UsageError, because they would be lost (with ``averaged`` they raise nothing): to change
            weights, write into a ``copy.deepcopy`` of the dict, and give that to ``model.load_state_dict``.

        Raises:
            UsageError: ``averaged``, and the run keeps no average; the script has replaced a parameter of the model, or
                with pipeline stages a module; a persistent buffer was made since ``tutti.prepare``; or the script has
                written a buffer between steps that forwards write too, other than by a reset to zeros (ones for a
                variance), and this rank computes several logical workers (fixed shares of the global batch), each with
                its own value of the buffer.
            MismatchError: ranks hold different copies of a parameter, or make different calls.
        """
        found = self.whole_state(averaged)
        return found if averaged else read_only_state(self, found)

    def whole_state(self, averaged: bool = False) -> dict[str, Tensor]:
        """Return all parameters and persistent buffers of the plain model on every rank, as writable tensors.

        Collective over all ranks, as ``state``: all-gathers of digests of the call and of copies, broadcasts or
        all-gathers of shards and slices, and merging of replicas that differ.

        Args:
            averaged: return the average of the weights over the updates (EMA) in place of the trained parameters.

        Returns:
            A dict of whole tensors by name, each the model's own tensor or a copy. A write to a copy does not change
            the model, and raises nothing, in contrast to the copies of ``state``.

        Raises:
            UsageError, MismatchError: for the same reasons as ``state``, such as ``averaged`` in a run without an
                average, or copies of a parameter that differ between ranks.
        """
        with self.replica.model_code():
            self._read_whole(averaged)
            found = self._gathered(averaged).all()
        if self.workers_differ and len(self.context.mine) > 1:
            self.returned |= set(tensor_digests(found.values()))
        return found

    @TellFailures()
    def optimizer_state(self) -> dict[str, Tensor]:
        """Return the optimizer's state as whole tensors on every rank, as a checkpoint has it.

        A script calls it to compute figures of the state, such as a norm of Adam's ``exp_avg``, under strategies that
        shard or split the state, or keep it on servers. Collective over all ranks: the rank that has a tensor, or a
        slice, broadcasts it. Each rank needs memory for the whole state.

        Returns:
            A dict of whole tensors by ``"{parameter}/{key}"``, such as ``0.weight/exp_avg``; numbers such as ``step``
            are 0-d tensors. Under local SGD and DiLoCo, which keep one state for each logical worker, the state of the
            first worker. A tensor may be the optimizer's own and not a copy.

        Raises:
            MismatchError: ranks make different calls.
        """
        self.check_same_call("reading the optimizer's state")
        return gathered_state(self.gradient_sync.state().get("optim", {}), self.context.comms.world)

    @TellFailures()
    def weights_sha256(self, averaged: bool = False) -> str:
        """Return a SHA-256 hash of the tensors that ``state`` returns, on every rank. Collective over all ranks.

        The tensors are all parameters and persistent buffers of the plain model. Equal hashes mean bit-identical
        models. Gathers tensors of together about 64 MiB at a time.

        Args:
            averaged: hash the average of the weights in place of the trained parameters.

        Raises:
            UsageError: ``averaged``, and the run keeps no average; the script has replaced a parameter of the model, or
                with pipeline stages a module; a persistent buffer was made since ``tutti.prepare``; or the script has
                written a buffer between steps that forwards write too, other than by a reset to zeros (ones for a
                variance), and this rank computes several logical workers (fixed shares of the global batch), each with
                its own value of the buffer.
            MismatchError: ranks hold different copies of a parameter, or make different calls.
        """
        with self.replica.model_code():
            self._read_whole(averaged)
            # A sharded model may not fit into one device: gather a message of tensors at a time.
            gathered = self._gathered(averaged)
            return pairs_sha256(gathered.pairs(sorted(gathered)))

    def _read_whole(self, averaged: bool) -> None:
        """Compare over ranks this call and the copies of the model. Collective."""
        self.trainability.check_replaced()
        self.trainability.check_buffers()
        self.hooks.check_tree()
        self.check_same_call("reading the whole state" + " with the average" * averaged)
        check_replicas(self, "reading the whole state")

    def _gathered(self, averaged: bool) -> GatheredModel:
        """Return lazy access to the full tensors of the plain model. Collective."""
        at_first_shard = self.context.mesh.at("shard") == 0
        return gathered_model(self.replica, self.context.comms, self.merged(averaged), at_first_shard)

    def merged(self, averaged: bool, as_trained: bool = False) -> dict[str, Tensor]:
        """Return this rank's parameters and buffers, merged over logical data-parallel workers.

        A logical worker is a fixed share of the global batch, with buffers of its own; under local SGD each worker has
        its own parameters, too, and their mean over workers is returned. Collective over the data ranks, and all ranks
        must call it: all-gathers of the workers' buffers; under local SGD an all-to-all and an all-gather of
        parameters; with parameter servers, which may have newer ones, two barriers around a read.

        Args:
            averaged: return the average of the weights over the updates (EMA) in place of the trained parameters.
            as_trained: cast the average of the weights to the dtypes of the parameters.

        Returns:
            A dict of tensors by their name in the script's model; of a tensor that is split over ranks this rank's
            slice. Tensors may be those of the model or of the average, not copies.

        Raises:
            UsageError: ``averaged``, and the run keeps no average; or the script has written a buffer between steps
                that forwards write too, other than by a reset to zeros (ones for a variance), and this rank computes
                several logical workers, each with its own value of the buffer.
        """
        merged = self.gradient_sync.merged()
        if not averaged:
            return merged
        if self.average is None:
            raise UsageError("no average of the weights is kept", remedy="call tutti.prepare with ema=0.999")
        within = self.average.within(merged)
        return {name: t.to(merged[name].dtype) for name, t in within.items()} if as_trained else within

    def position(self) -> dict[str, Any]:
        """Return the run's position in the training data as a JSON value for a checkpoint and ``seek``. Not collective.

        Returns:
            A dict with ``epoch`` (whole epochs consumed), ``batch`` (global batches consumed of the next epoch),
            ``samples`` (consumed in all, over all ranks), and ``state`` (of the data set's reader, or None). Rank 0's
            result is to be saved: where an iterable data set has a state of its own, ``state`` is None on other ranks.
        """
        place = self.data_position
        if self.local_step != self.global_step:
            # Asynchronous servers count the steps of all workers together.
            place = Position(*self.feed.epochs.position_after(self.global_step))
        return {**place._asdict(), "samples": self.samples, "state": self.feed.reader.state()}

    def seek(self, position: Mapping[str, Any]) -> None:
        """Continue at a saved position in the training data, without training: the next ``epoch(number)`` starts there.

        Sets ``data_position`` (epoch and global batch), ``samples`` (consumed so far) and the state of the data set's
        reader. To be called on every rank, outside of an iteration over the data; not collective. Weights,
        optimizer and step number stay as they are.

        Args:
            position: the result of ``position`` on rank 0 of the saved run: ``epoch``, ``batch``, ``samples`` and
                ``state``.

        Raises:
            CheckpointError: the data set cannot continue there, such as a sampler of another order.
        """
        self.data_position = self._resumed = Position(position["epoch"], position["batch"])
        self.samples = position["samples"]
        self.feed.reader.load(self.data_position, position["state"])

    # --- checkpoints -----------------------------------------------------------------------------------------------

    @TellFailures()
    def save(self, folder: str | Path, extra: Mapping[str, Any] | None = None, keep: int = 2) -> Path:
        """Write a checkpoint to ``folder/step-N``, and return when it is on disk. Collective over all ranks.

        The checkpoint holds the model, the optimizer with its settings, the own state of each logical worker (a fixed
        share of the global batch) and the position in the data. ``restore`` reads it on any number of devices and under
        any strategy; with another number of workers if ``tutti.prepare`` was given that number. Then the callbacks'
        ``on_checkpoint`` is called.

        Args:
            folder: directory for this run's checkpoints alone, on a file system that all ranks share.
            extra: state of the script, such as ``{"scheduler": scheduler.state_dict()}``: numbers, texts, lists, tuples
                and dicts of them, the same on every rank.
            keep: number of newest checkpoints to keep.

        Returns:
            The directory of the checkpoint.

        Raises:
            UsageError: in the middle of a global batch; ``extra``, or a state of a scheduler or callback, has a value
                of another type; the script has replaced a parameter of the model, or with pipeline stages a module; a
                persistent buffer was made since ``tutti.prepare``; or the script has written a buffer between steps
                that forwards write too, other than by a reset to zeros (ones for a variance), and this rank computes
                several logical workers, each with its own value of the buffer.
            CheckpointError: the ranks do not share ``folder``.
            MismatchError: ranks hold different copies of a parameter; nothing is written.
            DiskError: the checkpoint could not be written; earlier checkpoints are intact.
        """
        if self.custom.within_batch:
            raise UsageError(
                "a run cannot be saved in the middle of a global batch",
                remedy="save where run.stepped is true after optimizer.step(), or after run.microbatches() has ended",
            )
        self.callbacks.end_left(self)
        self.custom.end_step()
        self.trainability.check_replaced()
        self.trainability.check_buffers()
        self.hooks.check_tree()
        saver = run_state.saver(self, Path(folder), keep)
        saver.save(run_state.run_facts(self, extra or {}))
        saver.wait()
        path = saver.folder / step_name(self.global_step)
        self.callbacks.checkpoint_written(self, path)
        return path

    @TellFailures()
    def restore(self, folder: str | Path, change: str | Sequence[str] = ()) -> dict[str, Any] | None:
        """Restore the newest intact checkpoint of ``folder``. Collective over all ranks.

        Parameters and optimizer state are overwritten in place. Afterwards ``epochs``, ``epoch`` and ``microbatches``
        continue at the checkpoint's position in the data.

        Args:
            folder: the directory that ``save`` was given.
            change: names of the settings in which this run may differ from the saved one, such as ``"lr,batch_size"``:
                options of the optimizer, ``batch_size``, ``data`` and ``seed``, the last three only from a checkpoint
                at the end of an epoch. An option of the optimizer that is not named must have been given as in the
                saved run, and gets the value that it had when the run was saved, such as a rate that a scheduler had
                set.

        Returns:
            ``extra`` as ``save`` was given it, empty if it was given none; None if there is no checkpoint, and the run
            is unchanged.

        Raises:
            UsageError: ``change`` has an unknown name, or ``lr`` and the run has schedulers; or ``folder`` is a file, a
                checkpoint, or a run directory with its checkpoints in another folder.
            CheckpointError: no checkpoint of ``folder`` is intact; the newest is of another model or class of
                optimizer; its data set, batch size, seed or an option of the optimizer was given otherwise, and
                ``change`` does not name the setting; a named setting cannot change at this position; or the checkpoint
                has another number of workers, and ``tutti.prepare`` was not given ``workers`` (if it was, there is only
                a warning).
        """
        self.callbacks.end_left(self)
        named = NamedChanges.parse(change)
        named.check({key for group in self.settings.optimizer_settings for key in group}, "change")
        self.schedulers.refuse_change(named)
        with argument_words():
            facts = run_state.saver(self, Path(folder)).restore(named)
        return None if facts is None else run_state.restore_run(self, facts, named)

    def check_same_call(self, call: str) -> None:
        """Check that all ranks make the same call after the same step, before the call's own collectives.

        Collective over all ranks: an all-gather of a digest. Calls first the events of callbacks that a ``break`` out
        of a loop has left out.

        Args:
            call: description of the call about to be made, such as ``predictions for 100 samples``; compared over ranks
                together with the step number, and shown in the error.

        Raises:
            MismatchError: calls or step numbers differ between ranks.
        """
        self.callbacks.end_left(self)
        self.context.comms.world.agree(
            [f"{call} after step {self.global_step}"],
            "the call under way",
            "make every rank take the same steps and evaluations",
        )
