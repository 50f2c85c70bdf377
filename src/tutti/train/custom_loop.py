"""Custom training loops: the script's own forward, ``run.backward(loss)`` and ``optimizer.step()``.

The loop's body runs once for each micro-batch of this rank, and within it ``.grad`` means what it means in PyTorch. In
the body of a rank's last micro-batch ``run.backward`` reduces the gradient over all micro-batches of the global batch
before it returns: ``.grad`` then equals the gradient on one device, so that the script may clip it, add to it, or
accumulate several. In earlier bodies tutti banks the micro-batch's gradient, and ``.grad`` shows that micro-batch's
part alone; the script's changes to that part have no effect. "Worker" is the logical worker.

Where workers make updates of their own (local SGD), a rank has one worker, and ``.grad`` is the gradient of this
worker's samples. ``run.backward`` then reduces the loss alone, so that ranks may make different numbers of updates; the
workers' parameters are averaged after the body of the step in which that is due.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tutti.comm.stall import TellFailures
from tutti.config.strategy_choice import Choice
from tutti.errors import MismatchError, NonFiniteError, TuttiError, UsageError, script_line, script_line_of
from tutti.launcher import heartbeat
from tutti.launcher.heartbeat import Phase
from tutti.nn.incomplete_gradient import conceal, is_zeroed
from tutti.nn.swap import parameters
from tutti.optim.mixing import calls_closure_once, unlike_one_closure
from tutti.parallel import check_custom_loop
from tutti.parallel.ddp.step_agreement import agree_on_settings
from tutti.parallel.normalisation import finite_by_norm, is_finite
from tutti.torch_compat import tensor_version
from tutti.train.noise_parts import MeasuredParts, SilentHook
from tutti.train.script_checks.body_comparison import BodyComparison
from tutti.train.script_checks.carried_state import CarriedState
from tutti.train.script_checks.gradient_origin import GradientOrigin
from tutti.train.script_checks.skipped_bodies import SkippedBodies
from tutti.train.void_body import VoidBody
from tutti.types.custom_loop_sync import SPLIT_OVER_MODEL, AloneLoopSync
from tutti.types.micro_batch import Batch, LossSums, MicroBatch
from tutti.types.replica_runner import GradientReadyHook
from tutti.types.step_records import PendingStats, StepContext, StepStats, UpdateResult

if TYPE_CHECKING:
    from tutti.train.run import Run

Gradients: TypeAlias = dict[nn.Parameter, Tensor]
BodyWork: TypeAlias = "Callable[[LossSums | None, GradientReadyHook], LossSums]"
"""Computes the gradient of a body from the worker's loss sums so far; see ``CustomLoop._contribute``."""

_NOT_COMBINED = "cannot be combined with parameter servers that do not wait for all workers"
_ALL_WAIT = "take strategy='parameter_server' with mode=sync and no backup"
_OF_PARTS = ("rows", "shards", "sliced_rows")
"""Places of gradients where each rank updates a part of the parameters; optimizers see its gradient in the rank's last
body alone."""


class _NothingWritten(Exception):
    """Ends an optimizer's step before it has written parameters, because the gradient is not finite.

    Args:
        loss: what the closure returned.
    """

    def __init__(self, loss: Any) -> None:
        super().__init__()
        self.loss = loss


@dataclass
class Contribution:
    """Gradients and loss sums of a rank's earlier micro-batches of a global batch, kept until the last one is reduced.

    Attributes:
        gradients: gradient by parameter; parameters without a gradient are missing.
        used: under FSDP2, whose backward reduces gradients by itself: for each parameter of ``pop_reached``, in its
            order, whether a backward on this rank has given it a gradient; empty under other strategies.
        loss_sums: loss sums of each logical data-parallel worker (a fixed share of the global batch) by its number, in
            increasing order.
    """

    gradients: Gradients = field(default_factory=dict)
    used: list[bool] = field(default_factory=list)
    loss_sums: dict[int, LossSums] = field(default_factory=dict)


@dataclass
class _GlobalBatch:
    """State of the global batch that the bodies of a custom training loop train on this rank; it lasts until the next.

    Attributes:
        is_open: whether the batch has begun, and neither an update nor the end of the last body has ended it.
        is_counted: whether it counts as consumed.
        busy: workers of this rank with samples in it, in order.
        idle: workers of this rank without.
        is_watched: whether the losses of its bodies are checked for values of other workers' samples.
        bank: gradients of earlier bodies, by reduction of the body and by worker (-1: of all together).
        settings: the optimizers' settings at each reduction of the first body, by which ranks of any number of bodies
            compare them.
        alone: whether workers make updates of their own in this step (local SGD).
        ending: the step, until the parameters of such workers are averaged where that is due; None otherwise.
        averaged: whether they were averaged in this step.
        measured: measures the gradient noise in the first reduction of the batch; None where it is not measured.
    """

    is_open: bool = False
    is_counted: bool = False
    busy: Sequence[int] = ()
    idle: Sequence[int] = ()
    is_watched: bool = False
    bank: dict[tuple[int, int], Contribution] = field(default_factory=dict)
    settings: dict[int, str] = field(default_factory=dict)
    alone: bool = False
    ending: StepContext | None = None
    averaged: bool = False
    measured: MeasuredParts | None = None


class CustomLoop:
    """Runs the body of a script's loop for every micro-batch of this rank, and synchronises gradients.

    Args:
        run: the run to train.
        optimizers: the script's optimizers, in the order of ``tutti.prepare``.
        choice: the strategy.

    Attributes:
        stepped: whether the last ``optimizer.step()`` was in the body of a rank's last micro-batch of a global batch,
            and so made an update; for earlier micro-batches it does nothing.
    """

    def __init__(self, run: Run, optimizers: Sequence[Optimizer], choice: Choice) -> None:
        self._run, self._lifecycle, self.optimizers, self._choice = run, run.lifecycle, optimizers, choice
        self._sync, self._replica = run.gradient_sync, run.replica
        self._origin, self._bodies = GradientOrigin(run, optimizers), BodyComparison(run)
        self._carried, self._skipped = CarriedState(run), SkippedBodies(run)
        self.stepped = False
        # Loops over micro-batches: whether there has been one, and how many are open.
        self._open = 0
        self._batch = _GlobalBatch()
        # The body under way: its micro-batch, whether it is the rank's last of the batch, its reductions so far.
        self._micro_batch: MicroBatch | None = None
        self._in_body = self._is_last_body = False
        self._calls = 0
        # Whether the reduction under way has gradients of a plain loss.backward().
        self._mixed = False
        # Results of the reductions since the last update, and of the last one; whether parameter servers have them.
        self._pending: list[StepStats] = []
        self._latest: StepStats | None = None
        self._is_pushed = False
        # Where workers make updates of their own: the synchronisation, and the body of a worker without samples.
        self._local = run.gradient_sync if isinstance(run.gradient_sync, AloneLoopSync) else None
        self._void: VoidBody | None = None
        # Their reductions of losses in this body, and in the last one that had any.
        self._reductions = self._usual_reductions = 0
        # Closures: whether this evaluation is not the first of its step; by optimizer why closures are refused, if so.
        self._evaluated_again = False
        self._closures: dict[int, str | None] = {}

    @property
    def within_batch(self) -> bool:
        """Whether the custom training loop is in the middle of a global batch.

        True from the start of this rank's first micro-batch of a global batch until the update of the parameters, or
        until the end of the rank's last micro-batch. While it is True, the run cannot be saved.
        """
        return self._batch.is_open

    # --- the micro-batches -----------------------------------------------------------------------------------------

    def microbatches(self, number: int, start: int | None = None) -> Iterator[Batch]:
        """Iterate over the micro-batches of this rank in an epoch; the script's loop body runs on each.

        Every rank must iterate alike. Dummy micro-batches of weight 0 stand in where this rank has no sample in a
        global batch, and with sharded weights (FSDP) come before a rank's own, so that all ranks run equally many
        forwards. Gradients are reduced over ranks while the loop body runs on the rank's last micro-batch of each
        global batch. The iterator itself performs collectives between bodies. Over all ranks these are all-gathers of
        callbacks' reasons to stop, and at the end of some epochs of digests of the copies of parameters; and, in steps
        that ``noise_every`` measures where ranks share the update out, a gather of the factors of Adam's
        preconditioner. Over the data ranks they are all-gathers of digests of samples (streams and samplers; with
        several workers in the first steps), and of ``requires_grad`` where the script has thawed parameters; in the
        second step of several workers, all-gathers that merge batch-norm buffers; under local SGD the averages of
        parameters, and the reduction of losses for a body that has left out ``run.backward``; and under
        ``central_storage``, at its start, an exchange of addresses of shared memory.

        Args:
            number: the epoch, from 0.
            start: first global batch; default: 0, or after ``restore`` the batch after the last one consumed.

        Yields:
            The micro-batch's samples as the data set or collate function gives them, on the device.

        Raises:
            UsageError: the strategy has no custom training loops; ``compile`` is set to a mode with CUDA graphs;
                ``start`` is None, and ``restore`` has loaded a checkpoint of a later epoch; an earlier loop over
                micro-batches was left in the middle of a global batch; this loop begins in the body of another one,
                before its ``optimizer.step()``; in reproducible mode several ranks share a worker, and a rank other
                than the worker's first has several of its micro-batches; the body makes other backward and optimizer
                calls than for the rank's first micro-batch of the global batch, writes parameters before the last, or
                skips a micro-batch because of its size; with parameter servers that do not wait for all workers a
                global batch ends without an update; the script has converted the model, replaced a parameter or
                optimizer state, has registered hooks or thawed parameters that the strategy cannot handle, or has
                caught an exception of a step that cannot be skipped.
            MismatchError: ranks hold different copies of a parameter, read different samples, or have thawed different
                parameters.
        """
        self._check_beginning()
        self._open += 1
        try:
            with TellFailures():
                for batch in self._run.epoch(number, start):
                    with self._run.model_code():
                        yield from self._bodies_of(batch)
        finally:
            self._open -= 1
            self._end_void()
            self._run.checks.end_body()
            self._lifecycle.values.end()
            self._sync.leave_custom_loop()
            if self._open:
                # The loop was in the body of another one, which goes on.
                self._sync.begin_custom_loop()

    def _bodies_of(self, batch: Batch) -> Iterator[Batch]:
        """Iterate over this rank's micro-batches of a global batch; the script's loop body runs on each."""
        run, lifecycle = self._run, self._lifecycle
        work = lifecycle.begin(batch, None)
        self._batch = _GlobalBatch(is_open=True)
        self._bodies.begin_batch()
        lifecycle.loaders.begin_batch()
        work = lifecycle.padded(work)
        step_context = lifecycle.context
        self._batch.measured = None if run.noise_probe is None else run.noise_probe.begin(step_context)
        if self._local is not None:
            self._batch.alone, self._batch.ending = self._local.updates_alone(step_context), step_context
        busy = [(worker, micro_batches) for worker, micro_batches in work if micro_batches]
        # Shares differ by at most one sample, so that workers without samples are the last ones.
        self._batch.idle = [worker for worker, micro_batches in work if not micro_batches]
        if not busy:
            worker, *self._batch.idle = self._batch.idle
            busy = [(worker, [lifecycle.dummy_micro_batch(worker)])]
        self._batch.busy = [worker for worker, _ in busy]
        self._batch.is_watched = self._lifecycle.watch(busy)
        if len(set(self._batch.busy)) < len(self._batch.busy):
            self._refuse_parts_of_worker(len(busy))
        several = self._bodies.several = run.feed.most_micro_batches(step_context.samples) > 1
        served = self._sync.gradient_at == "servers"
        # Gradient noise is added by run.backward, and measured in reductions: other gradients must be told apart.
        whole = self._batch.alone or run.context.comms.replica.size == 1
        self._origin.alone = not (several or served or run.noise or run.noise_probe) and whole
        pushed = self._origin.carried() if several and served else []
        # Complete gradients that the script accumulates over global batches.
        if several:
            self._check_pending()
        carried = self._sync.pop_gradients() if several else {}
        for worker, micro_batches in busy:
            run.gradient_sync.begin_worker(worker, step_context)
            for micro_batch in micro_batches:
                final = worker == self._batch.busy[-1] and micro_batch.last
                self._enter_body(micro_batch, final, carried)
                if pushed:
                    # The first body must clear them, as without several bodies.
                    conceal(pushed, "on the parameter servers, which have applied it")
                    pushed = []
                with self._replica.script_code():
                    yield micro_batch.batch
                self._leave_body()
        self._end_batch()

    def _refuse_parts_of_worker(self, count: int) -> NoReturn:
        raise UsageError(
            f"a custom training loop has {count} micro-batches of a worker on a device that is not the worker's first",
            why="in reproducible mode each of their gradients is added to the sum by itself",
            remedy="leave out reproducible, or take as many devices a worker as it has micro-batches, or run.step",
        )

    def _check_beginning(self) -> None:
        check_custom_loop(self._choice, self._run.context.workers, self._run.context.mesh.data_ranks)
        compiled = self._run.context.compile
        if compiled is not None and compiled.records_graphs:
            raise UsageError(
                f"compile='{compiled.mode}' cannot be combined with a custom training loop",
                why="it records CUDA graphs, whose gradients the next step overwrites, and the script may keep them",
                remedy="call run.step(batch) with a loss_fn, or take compile='default'",
            )
        if self._open and self._batch.is_open and not self._batch.is_counted:
            raise UsageError(
                "a loop over run.microbatches() begins within the body of another one, before optimizer.step()",
                where=script_line(),
                why="the global batch under way would take the weight of the other loop's batch",
                remedy="take further batches from a DataLoader of their own, or begin the loop after optimizer.step()",
            )
        if self._batch.is_open and not self._is_last_body:
            raise UsageError(
                "the last loop over run.microbatches() was left in the middle of a global batch",
                remedy="leave it only after an optimizer.step() with run.stepped",
            )
        self.end_step()
        self._batch.is_open, self._batch.ending = False, None
        self._sync.begin_custom_loop()

    def plain_backward(self, loss: Tensor, gradient: Any = None) -> AbstractContextManager[None]:
        """Return a context manager for a plain ``loss.backward()`` of the script, to mark gradients of unfit losses.

        Gradients of a loss that is no mean over the micro-batch's samples, such as one over tokens, cannot be averaged
        over micro-batches. They are marked, and the next ``run.backward``, ``run.reduce_gradients`` or
        ``optimizer.step()`` raises UsageError, unless the script clears them before. Outside of a loop's body nothing
        is done. Not collective.

        Args:
            loss: the tensor whose ``backward`` the script calls.
            gradient: the argument of that call, which a loss of several elements has; None for none.
        """
        if self._micro_batch is None or not self._in_body:
            return nullcontext()
        return self._origin.plain_backward(loss, gradient, self._micro_batch)

    def _shown(self) -> Gradients:
        """Return the gradients that the script sees in ``.grad``."""
        return {p: p.grad for p in self._origin.script_parameters() if p.grad is not None}

    def _enter_body(self, micro_batch: MicroBatch, final: bool, carried: Gradients) -> None:
        self._micro_batch, self._is_last_body, self._in_body = micro_batch, final, True
        self._calls, self._reductions, self._origin.exchanged = 0, 0, False
        if self._bodies.several:
            # Each body starts without gradients; the last one with those that the script carries over global batches.
            self._show({})
            if final and carried:
                self._sync.add_gradients(carried)
            self._origin.remember()
        self._bodies.begin_body(final)
        self._lifecycle.loaders.begin_body(self._bodies.several)
        self._carried.begin_body(micro_batch, self._bodies.several)
        if self._batch.is_watched:
            self._lifecycle.values.begin_body(micro_batch)
        self._origin.watch()
        self._run.checks.begin_body(micro_batch)
        if self._batch.alone and not micro_batch.samples:
            self._void = VoidBody(self._run)
        self._replica.begin(micro_batch)
        self._lifecycle.enter(Phase.COMPUTE)

    def refuse_step(self) -> None:
        """Raise UsageError if the body of a loop over micro-batches is under way; ``run.step`` calls this first."""
        if self._in_body:
            raise UsageError(
                "run.step is called in a loop over run.microbatches",
                where=script_line(),
                why="the loop counts its micro-batches, which make up the global batch that run.step trains on",
                remedy="loop over run.epoch(epoch)",
            )

    def _micro_batch_of_body(self, call: str) -> MicroBatch:
        """Return the micro-batch of the body that the script is in; raise UsageError for a call outside of a body."""
        if self._micro_batch is None or not self._in_body:
            raise UsageError(
                f"{call} needs a batch of run.microbatches()",
                where=script_line(),
                why="only its batches have a weight in the global batch",
                remedy="loop over run.microbatches(epoch), in place of the old loader",
            )
        return self._micro_batch

    def _leave_body(self) -> None:
        """Close the body of a micro-batch, after the script's code for it has ended."""
        self._in_body = False
        self._end_void()
        self._run.checks.end_body()
        self._lifecycle.values.end()
        micro_batch = self._micro_batch
        if self._batch.is_watched and micro_batch is not None:
            trained = self._calls > 0 or bool(self._shown())
            self._skipped.end_body(micro_batch, trained, self._lifecycle.values.size_lines)
        self._bodies.end_body()
        if self._batch.alone and self._local is not None and self._is_last_body and micro_batch is not None:
            self._join_losses(self._local, micro_batch)
        if not self._bodies.several or self._is_last_body or micro_batch is None:
            return
        if micro_batch.last and self._calls == 1 and self._sync.by_worker:
            self._end_banked_worker(0, micro_batch.worker)

    def _end_batch(self) -> None:
        """End the step after the rank's last body, and count the batch if no update has."""
        self._count_without_update()
        self.end_step()
        self._batch.is_open, self._micro_batch = False, None
        self._bodies.end_batch()

    def _end_void(self) -> None:
        """Undo the body of a worker without samples, where workers make updates of their own."""
        void, self._void = self._void, None
        if void is not None:
            self._replica.forget()
            void.undo()

    def end_left(self) -> None:
        """End the step of a loop over micro-batches that the script has left by ``break``.

        To end a step means, under local SGD and DiLoCo, to average the workers' parameters if an average is due after
        the step, collectively over the data ranks (``end_step``). With other strategies, and while a loop is still
        running, nothing is done.
        """
        if not self._open:
            self.end_step()

    def end_step(self) -> None:
        """Average the parameters of workers that make updates of their own, if that is due after the present step.

        For local SGD and DiLoCo; with other strategies nothing is done. An average is collective over the data ranks:
        an all-to-all and an all-gather for each dtype. The loop calls this after its body, and earlier where the script
        saves the run or begins another step in the body. The first call after the global batch counts as consumed ends
        the step; a call before that, or a second one for the same step, does nothing.
        """
        step_context = self._batch.ending
        if step_context is not None and self._local is not None and self._batch.is_counted:
            self._batch.ending = None
            self._end_void()
            self._batch.averaged = self._local.end_step(step_context)
            if self._batch.averaged and self._run.average is not None:
                self._run.average.update()

    def _count_without_update(self) -> None:
        """Count the global batch as consumed, unless an update has counted it."""
        if not self._batch.is_counted and self._batch.is_open and self._is_last_body:
            if self._sync.gradient_at == "servers":
                raise UsageError(
                    f"a global batch without an update {_NOT_COMBINED}",
                    where=f"step {self._run.global_step + 1}",
                    why="the servers take one gradient of each rank in every step",
                    remedy=f"call run.backward and optimizer.step() for each, or {_ALL_WAIT}",
                )
            self._batch.is_counted = True
            self._lifecycle.count_batch(None, None)

    # --- backward --------------------------------------------------------------------------------------------------

    def backward(self, loss: Any, retain_graph: bool = False) -> None:
        """Compute the gradients of a micro-batch, in place of ``loss.backward()``, and reduce them in the last one.

        In the rank's last micro-batch of a global batch the gradients of all its micro-batches are reduced. That is
        collective over the data ranks: an all-reduce, with shards a reduce-scatter, with parameter servers a push to
        them and a wait for their sums; the stages and tensor ranks of a replica further all-reduce the norm. ``.grad``
        is then the gradient of the global batch, where the strategy lets a script read it. In earlier micro-batches
        ``.grad`` has this micro-batch's part, and only a model that is split or sharded over ranks sends anything.
        Under local SGD ``.grad`` is the gradient of this rank's worker, and the losses alone are reduced. If the script
        has unfrozen parameters, the data ranks also all-gather digests of ``requires_grad``.

        Args:
            loss: mean over the micro-batch's samples, ``(sum, count)``, or a 1-d tensor of one loss a sample in place
                of mean or sum.
            retain_graph: keep the graph for another backward, as in PyTorch.

        Raises:
            UsageError: outside of a loop over ``run.microbatches()``; the script has edited or assigned ``.grad`` of a
                micro-batch before; the body makes other calls than for the rank's first micro-batch of this global
                batch; the loss has an unknown form or requires no gradient; in the first steps, the loss depends on
                another worker's samples or is a sum divided by the global batch's size, or the body takes batches of a
                DataLoader of its own for each micro-batch; the loss counts another unit than samples, such as tokens,
                and a gradient hook of the script saw gradients divided by samples; a plain ``loss.backward()`` has left
                gradients that cannot be reduced together with these, because the model is split, the run has
                ``gradient_noise``, or this loss counts another unit than samples; or with parameter servers an earlier
                gradient was not cleared, or this is a second one of the global batch and the servers do not wait for
                all workers; or, with ``noise_every``, this is a second one of the global batch before an update.
            MismatchError: ranks are in different steps, or make different calls.
            PeerError: a rank or a parameter server is lost, or does not take part within the timeout.
        """
        micro_batch = self._micro_batch_of_body("run.backward")
        self._lifecycle.check_left()
        self._follow_script()
        self._run.checks.end_body(loss)
        self._lifecycle.values.check_divisor(loss, micro_batch)
        self._lifecycle.values.check(loss)
        self._lifecycle.loaders.check()
        self._bodies.note("backward", 0)

        def work(before: LossSums | None, grad_hook: GradientReadyHook) -> LossSums:
            with self._origin.own_backward():
                if self._void is not None:
                    return self._void_backward(loss, micro_batch, retain_graph)
                return self._replica.backward(loss, micro_batch, before, grad_hook, retain_graph)

        try:
            with self._lifecycle.values.updating(), self._run.model_code():
                self._contribute(micro_batch, work)
        except BaseException as error:
            # The sum over the bodies would lack this one, and other ranks may have begun to sum gradients.
            if self._bodies.several or self._run.context.comms.world.size > 1:
                self._lifecycle.leave(error)
            raise

    def _void_backward(self, loss: Any, micro_batch: MicroBatch, retain_graph: bool) -> LossSums:
        """Leave gradients of a dummy micro-batch in ``.grad``, for a body that has no effect; return sums of zero."""
        VoidBody.backward(loss, retain_graph)
        gradients = self._shown()
        # Restores the buffers, and clears the gradients; a further forward of this body is a dummy's, too.
        part = self._replica.backward(loss, micro_batch, None, self._run.grad_hook)
        self._replica.begin(micro_batch)
        self._show(gradients)
        return part

    def _contribute(self, micro_batch: MicroBatch, work: BodyWork, means: bool = False) -> None:
        """Add the gradient that ``work`` computes to that of the global batch. Collective in a rank's last body.

        Args:
            micro_batch: the micro-batch of the body.
            work: adds this micro-batch's weighted gradient to ``.grad``; takes the worker's loss sums so far (None at
                first) and the gradient-ready hook, and returns the loss sums including this micro-batch.
            means: see ``GradientOrigin.local``.
        """
        self._check_cleared()
        local = self._take_local(micro_batch, means)
        call, self._calls = self._calls, self._calls + 1
        self._batch.settings.setdefault(call, self._run.shared_settings.text())
        if self._is_last_body:
            self._reduce_batch(micro_batch, call, local, work)
        else:
            self._bank_body(micro_batch, call, local, work)
        self._sync.show_gradients()
        self._origin.exchanged = True
        self._origin.remember()
        if self._batch.is_watched:
            self._lifecycle.values.note_gradients(self._shown().values(), self._is_last_body)

    def _show(self, gradients: Gradients) -> None:
        """Set every ``.grad`` to its entry in ``gradients``, or None."""
        for parameter in self._origin.script_parameters():
            parameter.grad = gradients.get(parameter)

    def _computed(
        self, micro_batch: MicroBatch, call: int, local: Gradients, work: BodyWork, before: LossSums | None
    ) -> LossSums:
        """Add the gradients of a body to those of earlier bodies in ``.grad``; measure them by themselves if due.

        Args:
            micro_batch: the micro-batch of the body.
            call: number of the reduction in the body; the noise is measured in the first.
            local: gradients that the script computed without ``run.backward``.
            work: computes the others; see ``_contribute``.
            before: loss sums of the worker's earlier bodies; None for none.

        Returns:
            The loss sums including this body.
        """

        def add_local() -> None:
            for parameter, gradient in local.items():
                banked = parameter.grad
                parameter.grad = gradient if banked is None else banked.add_(gradient)

        def alone() -> LossSums:
            add_local()
            return work(None, SilentHook())

        measured = self._batch.measured
        if measured is None or call:
            add_local()
            return work(before, self._run.grad_hook)
        part = measured.measure(alone, micro_batch.worker, micro_batch.samples)
        return part if before is None else before + part

    def _bank_body(self, micro_batch: MicroBatch, call: int, local: Gradients, work: BodyWork) -> None:
        """Bank the gradient and loss sums of a micro-batch that is not the rank's last."""
        staged = self._sync.gradient_at == "stages"
        if staged:
            self._sync.apply_edits([])
        shown = self._shown()
        self._show({})
        kept = self._batch.bank.setdefault((call, micro_batch.worker if self._sync.by_worker else -1), Contribution())
        sums = kept.loss_sums.get(micro_batch.worker)
        kept.loss_sums[micro_batch.worker] = self._computed(micro_batch, call, local, work, sums)
        used = self._sync.pop_reached()
        kept.used = [a or b for a, b in zip(kept.used or used, used, strict=True)]
        for parameter, gradient in self._shown().items():
            # A copy: the script may write to .grad.
            if parameter in kept.gradients:
                kept.gradients[parameter].add_(gradient)
            else:
                kept.gradients[parameter] = gradient.clone()
        for parameter, before in shown.items():
            if parameter.grad is None:
                parameter.grad = before
            elif not is_zeroed(before):
                parameter.grad = before + parameter.grad
        if staged:
            # A rank must not read the gradients of its stage as those of the model in this body either.
            self._sync.add_gradients({})

    def _reduce_batch(self, micro_batch: MicroBatch, call: int, local: Gradients, work: BodyWork) -> None:
        """Reduce the gradients of this call over ranks. Collective."""
        run, sync = self._run, self._sync
        self._check_one_push()
        self._check_one_loss(call)
        self._check_pending()
        step_context, settings = self._lifecycle.context, self._batch.settings.pop(call)
        if (call, settings) != (step_context.call, step_context.settings):
            self._lifecycle.context = step_context = replace(step_context, call=call, settings=settings)
        held = sync.pop_gradients()
        sync.begin_worker(micro_batch.worker, step_context)
        for worker in self._batch.busy[:-1]:
            self._end_banked_worker(call, worker)
        kept = self._batch.bank.pop((call, micro_batch.worker if sync.by_worker else -1), Contribution())
        for worker in self._batch.busy[:-1]:
            if worker in kept.loss_sums:
                sync.end_worker(worker, kept.loss_sums[worker])
        if kept.gradients or local:
            self._show(kept.gradients)
        if kept.used:
            sync.mark_reached(kept.used)
        part = self._computed(micro_batch, call, local, work, kept.loss_sums.get(micro_batch.worker))
        part.whole = micro_batch.whole
        self._end_measured_worker(call, micro_batch.worker, part)
        if self._batch.alone and self._local is not None:
            self._reduce_own(self._local, micro_batch, part, step_context)
            sync.add_gradients(held)
            return
        sync.end_worker(micro_batch.worker, part)
        for worker in self._batch.idle:
            sync.begin_worker(worker, step_context)
            sync.end_worker(worker, None)
        if self._batch.idle:
            sync.begin_worker(micro_batch.worker, step_context)
        self._lifecycle.enter(Phase.COMPUTE)
        stats = sync.reduce_gradients(step_context)
        run.hooks.check_sum(stats, step_context)
        self._check_counts(stats, step_context.samples)
        self._finish_noise(stats)
        sync.add_gradients(held)
        self._pending.append(stats)
        self._is_pushed = sync.gradient_at == "servers"
        run.stats = self._latest = stats

    def _reduce_own(
        self, local: AloneLoopSync, micro_batch: MicroBatch, part: LossSums, step_context: StepContext
    ) -> None:
        """Complete the gradient of a worker that makes updates of its own, and reduce the loss over workers.

        Collective, but not in a later evaluation of a closure: each worker's optimizer makes as many as it needs.
        """
        run = self._run
        run.hooks.check_part(part)
        local.end_own(micro_batch.worker, part if micro_batch.samples else None)
        self._lifecycle.enter(Phase.COMPUTE)
        if not self._evaluated_again or self._latest is None:
            self._reductions += 1
            run.stats = self._latest = local.reduce_losses(step_context)
            self._check_counts(self._latest, step_context.samples)
            self._finish_noise(self._latest)
        self._pending.append(self._latest)

    def _join_losses(self, local: AloneLoopSync, micro_batch: MicroBatch) -> None:
        """Take part in the reductions of losses of a step whose body this rank has skipped, and others may not have.

        A worker that makes updates of its own may leave out a batch by its content. Collective as ``run.backward`` in
        the other ranks' bodies, if the loop has called it in an earlier step.
        """
        if self._reductions:
            self._usual_reductions = self._reductions
            return
        for call in range(self._usual_reductions):
            step_context = replace(self._lifecycle.context, call=call)
            self._sync.begin_worker(micro_batch.worker, step_context)
            local.end_own(micro_batch.worker, None)
            stats = local.reduce_losses(step_context)
            self._finish_noise(stats)
            if stats.count:
                self._run.stats = stats

    def _end_measured_worker(self, call: int, worker: int, part: LossSums) -> None:
        """Tell the measurement of the gradient noise that ``.grad`` has a worker's gradient of the first reduction."""
        if self._batch.measured is not None and not call:
            self._batch.measured.end_worker(worker, part)

    def _finish_noise(self, stats: StepStats) -> None:
        """Estimate the gradient noise from the first reduction of a batch, if it is measured. Collective then."""
        if self._batch.measured is not None and self._run.noise_probe is not None:
            self._run.noise_probe.finish(stats)

    def _check_one_loss(self, call: int) -> None:
        """Raise UsageError for two reductions in one update of a batch, if the gradient noise is to be measured."""
        if call and self._pending and self._run.noise_probe is not None:
            raise UsageError(
                f"noise_every with {call + 1} reductions of gradients in one update of a batch",
                where=f"step {self._run.global_step + 1}, {script_line()}",
                why="the gradient of the update is their sum, and the noise compares micro-batches in one reduction",
                remedy="add the losses up and call run.backward once, or leave out noise_every",
            )

    def _check_pending(self) -> None:
        """Compare edits of gradients that wait for an update, before others are added to them. Collective if edited."""
        for stats in self._pending:
            stats.known()
        if self._pending and not self._batch.alone and self._origin.edited(self._origin.script_parameters()):
            self._origin.check_edits()

    def _check_counts(self, stats: StepStats, samples: int) -> None:
        """Raise UsageError if one reduction mixes gradients of means over samples with those of another count."""
        mixed, self._mixed = self._mixed, False
        if mixed and stats.count != samples:
            raise UsageError(
                "loss.backward() before a run.backward that counts something else than samples",
                where=f"step {self._run.global_step + 1}",
                why=f"the one is a mean over {samples} samples, the other over {stats.count:g}, and both are exchanged"
                " together",
                remedy="call run.backward for both losses, or clear the gradients (zero_grad) in between",
            )

    def _end_banked_worker(self, call: int, worker: int) -> None:
        """Pass a worker's banked gradients to ``GradientSync.end_worker``, for sums worker by worker."""
        kept = self._batch.bank.pop((call, worker), None)
        if kept is not None:
            shown = self._shown()
            self._show(kept.gradients)
            self._end_measured_worker(call, worker, kept.loss_sums[worker])
            self._sync.end_worker(worker, kept.loss_sums[worker])
            self._show(shown)

    def _check_one_push(self) -> None:
        """Raise UsageError for a second gradient of a global batch on parameter servers, which take one push."""
        if self._sync.gradient_at == "servers" and self._batch.is_counted:
            raise UsageError(
                f"a second update of one global batch {_NOT_COMBINED}",
                where=f"step {self._run.global_step}, {script_line()}",
                why="the servers take one gradient of each rank in every step, and have updated with this step's",
                remedy="call run.backward and optimizer.step() once for each batch of run.microbatches(), train more"
                f" epochs in place of several passes over a batch, or {_ALL_WAIT}",
            )
        if self._sync.gradient_at == "servers" and self._is_pushed:
            raise UsageError(
                f"a second gradient before optimizer.step() {_NOT_COMBINED}",
                where=f"step {self._run.global_step + 1}",
                why="the first one is on the servers, where a script cannot add to it",
                remedy=f"add the losses up and call run.backward once, or {_ALL_WAIT}",
            )

    def _check_cleared(self) -> None:
        """Raise UsageError for gradients that a script adds to those of an update, which parameter servers hold."""
        if self._sync.gradient_at == "servers" and not self._is_pushed and self._origin.carried():
            raise UsageError(
                "gradients that are not cleared after an update cannot be combined with parameter servers",
                where=f"step {self._run.global_step + 1}",
                why="the servers have applied them and keep none, and the script adds the next ones to them",
                remedy="call optimizer.zero_grad() in every step, or take strategy='mirrored'",
            )

    # --- gradients without run.backward ----------------------------------------------------------------------------

    def _follow_script(self) -> None:
        """Follow what the script has done to parameters since: cleared gradients, and ``requires_grad``."""
        self._sync.apply_clearing()
        if self._batch.bank and self._run.trainability.changed:
            # Before ranks wait for each other in the change: ranks with a single body go on to the update.
            self._bodies.refuse_different()
        if self._run.trainability.follow(late=True):
            self._bodies.retrained()
            self._origin.watch()

    def _take_local(self, micro_batch: MicroBatch, means: bool) -> Gradients:
        """Remove and return this micro-batch's gradients that the script computed without ``run.backward``, weighted.

        The weight is the factor on the micro-batch's mean loss in ``run.backward``. ``means``: see
        ``GradientOrigin.local``.
        """
        if self._sync.gradient_at == "shards":
            self._origin.check_shards()
            return {}
        local = self._origin.local(self._origin.script_parameters(), means)
        if local and self._sync.gradient_at in SPLIT_OVER_MODEL:
            raise UsageError(
                "gradients of a model that is split over ranks, which run.backward did not make",
                where=f"step {self._run.global_step + 1}",
                why="each rank has a part of them, and what the script has done to them meanwhile cannot be known",
                remedy="call run.backward(loss), or take strategy='mirrored'",
            )
        if local and self._run.noise is not None:
            raise UsageError(
                "gradient_noise with gradients that run.backward did not make",
                where=f"step {self._run.global_step + 1}, {script_line()}",
                why="it is random weights on the samples' losses, which run.backward multiplies",
                remedy="call run.backward(losses) with one loss a sample, or leave gradient_noise out",
            )
        self._mixed |= bool(local)
        weight, found = micro_batch.share, {}
        for parameter in local:
            if parameter.grad is not None and micro_batch.samples:
                found[parameter] = parameter.grad * weight
            parameter.grad = None
        return found

    # --- the update ------------------------------------------------------------------------------------------------

    @TellFailures()
    def step(self, index: int | None) -> bool:
        """Update the parameters where the script calls ``optimizer.step()`` in a custom loop over micro-batches.

        The update is made in the rank's last micro-batch of a global batch; in earlier ones nothing is done.
        Collectives of the update, in this order:

        - Gradients of a plain ``loss.backward()`` are reduced over the data ranks, as by ``CustomLoop.backward``.
        - If the script has edited gradients, they are compared by all-gathers, over the data ranks, or over all ranks
          where each has a part of a gradient. If it has changed settings such as ``lr`` since ``backward``, the data
          ranks all-gather these.
        - After edits, after several reductions and with several optimizers, the gradient norm is computed anew:
          all-reduces over the ranks among which a gradient is split.
        - For the update ZeRO stage 1 all-gathers rows over the shard ranks, ``central_storage`` waits at a barrier, and
          parameter servers are asked for it; optimizers that need whole tensors gather them where they are split.
          Otherwise the update sends nothing.

        Args:
            index: index of the optimizer among those passed to ``tutti.prepare``; None for all of them.

        Returns:
            True in the rank's last micro-batch, also if the update was skipped because the gradient is not finite.

        Raises:
            UsageError: outside of ``run.microbatches()``; the script has edited the gradient of a single micro-batch,
                or added one to that of the global batch; with AdaScale, several reductions of gradients in one update;
                the body makes other calls than for the rank's first micro-batch; ranks have edited a gradient in
                different ways, or set different values of an optimizer's setting, such as ``lr``, since
                ``run.backward``; with parameter servers no gradient was computed before; under local SGD ``run.save``
                has already ended the step with an average; an optimizer does not take sparse gradients; or with
                parameter servers, or ``central_storage`` on several ranks, the script has written parameters since its
                backward.
            NonFiniteError: too many updates in a row were skipped because a gradient is not finite.
        """
        micro_batch = self._micro_batch_of_body("optimizer.step()")
        self._follow_script()
        self._sync.show_gradients()
        members = self._origin.members(index)
        if self._sync.gradient_at == "shards":
            self._origin.check_shards()
        elif self._origin.local(members):
            self._exchange_local(micro_batch)
        self._bodies.note("step", -1 if index is None else index)
        self.stepped = self._is_last_body
        if not self._is_last_body:
            return False
        if self._batch.averaged:
            self._refuse_late()
        edited = self._origin.edited(members)
        if edited and not self._batch.alone:
            self._origin.check_edits()
        if edited and self._bodies.several and self._batch.is_watched:
            names = {p: name for name, p in parameters([self._replica.plain])}
            named = {names.get(p, "a parameter"): p.grad for p in edited if p.grad is not None}
            self._lifecycle.values.check_edits(named)
        self._check_settings()
        self._sync.apply_edits(edited)
        reductions = list(self._pending)
        if not self._update_first(reductions, bool(edited), index):
            stats = self._stats_for(members, bool(edited))
            step_context = self._adapted(stats, reductions)
            with self._lifecycle.updating(), self._sync.stepping(index, members):
                updated = self._updated(stats, step_context)
            self._count_update(stats, updated, index)
        return True

    def _update_first(self, reductions: Sequence[StepStats], edited: bool, index: int | None) -> bool:
        """Make the update before the host has read the results of its reduction; return whether it was made.

        Only where nothing but these results decides on the update.
        """
        run = self._run
        several = len(reductions) != 1 or self._sync.accumulated or len(self.optimizers) > 1
        decides = edited or run.context.clip is not None or run.adascale is not None
        if several or decides or self._batch.alone:
            return False
        [stats] = reductions
        if not isinstance(stats, PendingStats):
            return False
        with self._lifecycle.updating(), self._sync.stepping(index, ()):
            made = stats.update_first(self._lifecycle.context)
        if made:
            self._pending = []
            run.stats = self._latest = stats.known()
            self._count_update(self._latest, UpdateResult.joint(self._latest, ()), index)
        return made

    def _updated(self, stats: StepStats, step_context: StepContext) -> UpdateResult:
        """Make the update: of all workers together, or by this rank's worker alone, if it has samples in this step."""
        if not self._batch.alone or self._local is None:
            return self._sync.optimizer_step(stats, step_context)
        own = UpdateResult(1, together=False) if self._void is not None else self._local.step_own(step_context)
        return replace(own, skipped=own.skipped or not stats.finite)

    def _refuse_late(self) -> NoReturn:
        raise UsageError(
            "an update in the body of a loop after run.save, in a step that ends with an average of the workers",
            where=f"step {self._run.global_step}, {script_line()}",
            why="the average belongs after the last update of the step, and the checkpoint has it",
            remedy="make all updates of the body before; or save after run.microbatches() has ended, or in a callback",
        )

    def _adapted(self, stats: StepStats, reductions: Sequence[StepStats]) -> StepContext:
        """Return the step context of the update, with AdaScale's gain in its factor on the learning rate.

        Args:
            stats: results of the gradient of the update, after the script's edits.
            reductions: results of the reductions of gradients since the last update.

        Raises:
            UsageError: AdaScale, and the gradient is not that of one reduction.
        """
        run, step_context = self._run, self._lifecycle.context
        if run.adascale is None:
            return step_context
        if len(reductions) != 1 or self._sync.accumulated:
            raise UsageError(
                f"lr_scale='adascale' with {len(reductions)} reductions of gradients in an update",
                where=f"step {run.global_step + 1}, {script_line()}",
                why="its gain compares the gradients of the logical workers in one reduction",
                remedy="call run.backward once before each optimizer step, or take another lr_scale",
            )
        # As run.step does, with the gradient before it is clipped.
        return run.adascale(replace(reductions[0].known(), finite=stats.finite), step_context)

    def _check_settings(self) -> None:
        """Compare over data ranks the settings that the script has changed between ``run.backward`` and the update.

        Collective if it has. Settings that are changed earlier are compared with the gradients. Raises UsageError on
        every rank where they differ.
        """
        run, before, settings = self._run, self._lifecycle.context, self._run.shared_settings.text()
        if settings != before.settings and self._sync.loss_normalisation == "step":
            self._lifecycle.context = now = replace(before, settings=settings)
            try:
                agree_on_settings(run.context.comms.replica, now)
            except MismatchError as error:
                raise UsageError(
                    error.what,
                    where=f"step {run.global_step + 1}, {script_line()}",
                    why="the script has set them since run.backward, and every rank would make another update",
                    remedy=error.remedy,
                ) from error

    # --- gradients that the script assigns -------------------------------------------------------------------------

    def reduce_gradients(self) -> None:
        """Average the gradients that the script has assigned to ``.grad`` over the samples of the global batch.

        To be called once in each micro-batch. Each assigned gradient is a mean over the micro-batch's samples. Before
        this rank's last micro-batch of a global batch the loop adds a copy to a sum of its own, weighted by the number
        of samples, and the script may assign ``.grad`` anew. In the last one the strategy reduces the sums
        (``GradientSync.reduce_gradients``), which is collective over the data ranks, and ``.grad`` becomes the gradient
        of the global batch. Does nothing where ``.grad`` is complete already: one rank with one micro-batch, or a
        worker of local SGD with updates of its own.

        Raises:
            UsageError: called outside of a loop over ``run.microbatches()``; the strategy keeps slices or shards of
                gradients, which a script cannot assign; the run has ``gradient_noise``; or the body differs from that
                of the rank's first micro-batch.
            MismatchError: ranks are in different steps, or make different calls.
            PeerError: a rank is lost, or does not take part within the timeout.
        """
        micro_batch = self._micro_batch_of_body("run.reduce_gradients")
        self._follow_script()
        self._sync.show_gradients()
        if self._sync.gradient_at == "shards":
            self._origin.check_shards()
        elif not self._origin.alone or self._origin.local(self._origin.script_parameters(), means=True):
            self._exchange_local(micro_batch, means=True)

    def _exchange_local(self, micro_batch: MicroBatch, means: bool = False) -> None:
        """Contribute gradients that the script computed without ``run.backward``, as means over the micro-batch.

        ``means``: see ``GradientOrigin.local``.
        """
        self._bodies.note("gradients", 0)
        parameter = self._origin.script_parameters()[0]
        dtype = torch.float64 if parameter.dtype == torch.float64 else torch.float32

        def work(before: LossSums | None, grad_hook: GradientReadyHook) -> LossSums:
            del grad_hook
            sums = torch.tensor([math.nan if micro_batch.samples else 0.0, micro_batch.samples], dtype=dtype)
            own = LossSums(sums.to(parameter.device), (), micro_batch.samples)
            return own if before is None else before + own

        self._contribute(micro_batch, work, means)

    # --- results of an update --------------------------------------------------------------------------------------

    def _stats_for(self, members: Sequence[nn.Parameter], edited: bool) -> StepStats:
        """Return the reduced results of the gradients of ``members``.

        Collective where the norm must be taken anew: after edits, several reductions, with several optimizers, and for
        clipping.

        Args:
            members: parameters of the update.
            edited: whether the script edited one of their gradients.
        """
        run, sync = self._run, self._sync
        pending, self._pending = self._pending, []
        latest = self._latest
        if latest is None:
            latest = StepStats(math.nan, self._lifecycle.context.samples, {}, math.nan, True)
        if len(pending) > 1:
            metrics = {name: value for stats in pending for name, value in stats.metrics.items()}
            loss = sum(stats.loss for stats in pending)
            latest = replace(
                pending[0].known(),
                loss=loss,
                metrics=metrics,
                stop=any(stats.stop for stats in pending),
                finite=all(stats.finite for stats in pending),
            )
        if sync.gradient_at == "servers":
            if not pending:
                raise UsageError(
                    "optimizer.step() without a gradient", remedy="call run.backward(loss) before, once a global batch"
                )
            self._is_pushed = False
            return latest
        # Not every stage has parameters that tell that gradients were accumulated. Edits through ``.grad.data``, which
        # change no version counter, matter where the norm decides on a factor or a skipped update.
        decides = run.replica.edits is None and (run.context.clip is not None or not latest.finite)
        anew = edited or decides or sync.accumulated or sync.gradient_at == "stages"
        if not self._batch.alone and (anew or len(pending) != 1 or len(self.optimizers) > 1):
            norm = sync.norm_of(members, self._lifecycle.context)
            unedited = latest.finite and not edited
            latest = replace(latest.known(), grad_norm=norm, finite=finite_by_norm(norm, lambda: unedited))
        run.stats = self._latest = latest = latest.known()
        return latest

    def _count_update(self, stats: StepStats, updated: UpdateResult, index: int | None) -> None:
        """Count the update that optimizer ``index`` has made (None: all); the batch's first counts the batch, too."""
        first, self._batch.is_counted = not self._batch.is_counted, True
        if first:
            self._batch.is_open = False
            self._lifecycle.count_batch(stats, updated.global_step)
        self._lifecycle.count_update(stats, updated, None if index is None else self.optimizers[index])
        heartbeat.training.enter(Phase.IDLE)

    # --- an update with a closure ----------------------------------------------------------------------------------

    @TellFailures()
    def step_with(
        self, index: int, closure: Callable[[], Any], plain: Callable[[Any], Any], replaced: bool = False
    ) -> Any:
        """Update the parameters where the script calls ``optimizer.step(closure)`` in a custom loop over micro-batches.

        The optimizer's own step calls the closure as often as it needs (LBFGS several times). Each call reduces the
        gradients over the data ranks, which is collective, so that all of them must make equally many; under local SGD
        the first call alone is collective, and reduces losses. The optimizer gets the mean gradient over the global
        batch, clipped as the run clips. If each rank updates a part of the parameters, or the optimizer calls a closure
        once only, this method calls the closure itself, and then makes the update as ``CustomLoop.step``. If the
        gradient of the first call is not finite, the update is skipped.

        Args:
            index: index of the optimizer among those passed to ``tutti.prepare``.
            closure: clears gradients, computes the loss, calls ``run.backward`` and returns the loss.
            plain: the optimizer's own step, which takes a closure and returns its loss.
            replaced: whether ``plain`` is a function of the script, and not the class's method.

        Returns:
            The loss, as ``plain`` returns it. If the closure returns a tensor, ``plain`` gets a tensor of the same
            shape filled with the mean loss over the global batch; any other result is passed on unchanged.

        Raises:
            UsageError: outside of ``run.microbatches()``; a rank has several micro-batches; each rank updates a part of
                the parameters, and the optimizer needs more than one call of the closure, or its step is a function of
                the script; or for a reason for which ``CustomLoop.step`` raises.
            NonFiniteError: the gradient of a later call was not finite, and the optimizer has written it into the
                parameters; or too many updates in a row were skipped.
        """
        run, micro_batch = self._run, self._micro_batch_of_body("optimizer.step(closure)")
        if self._bodies.several:
            raise UsageError(
                "optimizer.step(closure) with several micro-batches a rank",
                why="a closure sees the samples of one micro-batch, and its optimizer asks for the loss of all",
                remedy=f"take as many workers as data ranks ({run.context.mesh.data_ranks}), and no micro_batch",
            )

        def evaluated() -> Any:
            with torch.enable_grad(), self._replica.script_code():
                loss = closure()
            members = self._origin.members(index)
            if self._origin.local(members):
                self._exchange_local(micro_batch)
            if self._batch.alone:
                return loss
            if self._origin.edited(members):
                self._origin.check_edits()
            stats = self._latest
            return loss if stats is None or not isinstance(loss, Tensor) else torch.full_like(loss, stats.loss)

        optimizer = self.optimizers[index]
        whole = self._sync.steps_whole(optimizer)
        if not whole:
            self._check_closure(index, replaced)
        if self._batch.averaged:
            self._refuse_late()
        if not whole or self._void is not None or (calls_closure_once(optimizer) and not replaced):
            loss = evaluated()
            self.step(index)
            return loss
        return self._step_whole(index, evaluated, plain)

    def _step_whole(self, index: int, evaluated: Callable[[], Any], plain: Callable[[Any], Any]) -> Any:
        """Let an optimizer evaluate the closure as often as it asks, each time with the reduced and clipped gradient.

        Args:
            index: index of the optimizer among those passed to ``tutti.prepare``.
            evaluated: calls the closure, reduces the gradients, and returns the mean loss over the global batch.
            plain: the optimizer's own step, which takes a closure and returns its loss.

        Returns:
            The loss, as ``plain`` returns it.
        """
        run, sync, members = self._run, self._sync, self._origin.members(index)
        before = [tensor_version(parameter) for parameter in members]
        found: list[StepStats] = []

        def handed() -> Any:
            self._evaluated_again = bool(found)
            loss = evaluated()
            edited = self._origin.edited(members)
            sync.apply_edits(edited)
            stats = self._stats_for(members, bool(edited))
            if self._batch.alone:
                norm = sync.norm_of(members, self._lifecycle.context)
                stats = replace(stats.known(), grad_norm=norm, finite=finite_by_norm(norm))
            found.append(stats)
            if stats.finite:
                with sync.stepping(index, members):
                    sync.clip_gradients(stats.grad_norm)
            elif len(found) == 1 and before == [tensor_version(parameter) for parameter in members]:
                raise _NothingWritten(loss)
            return loss

        self.stepped = True
        updated = UpdateResult(1, together=not self._batch.alone)
        with self._lifecycle.updating():
            try:
                loss = plain(handed)
            except _NothingWritten as skipped:
                loss = skipped.loss
                updated = self._updated(found[0], self._lifecycle.context)
            finally:
                self._evaluated_again = False
        if not (updated.skipped or all(stats.finite for stats in found) or all(map(is_finite, members))):
            raise NonFiniteError(
                f"{type(self.optimizers[index]).__name__} has written NaN or infinity into the parameters",
                where=f"step {run.global_step + 1}, {script_line()}",
                why="the gradient was not finite in a later evaluation of the closure, where a step can no longer be"
                " skipped",
                remedy="restore a checkpoint; lower the learning rate, clip the gradient (clip=1), or check the data",
            )
        # The loss and gradient before the update, as the optimizer returns them.
        stats = found[0] if found and not self._batch.alone else self._latest or self._stats_for(members, False)
        run.stats = self._latest = stats
        updated = replace(updated, skipped=updated.skipped or (self._batch.alone and not stats.finite))
        self._bodies.note("step", index)
        self._count_update(stats, updated, index)
        return loss

    def _check_closure(self, index: int, replaced: bool) -> None:
        """Raise UsageError for an optimizer that does more with a closure than to call it once before its update."""
        if replaced:
            self._closures[index] = "its step is a function of the script"
        elif index not in self._closures:
            self._closures[index] = unlike_one_closure(self.optimizers[index])
        unlike = self._closures[index]
        if unlike is not None:
            raise UsageError(
                f"optimizer.step(closure) of {type(self.optimizers[index]).__name__} cannot be combined with strategy"
                f" '{self._choice.name}'",
                where=f"step {self._run.global_step + 1}, {script_line()}",
                why=f"each rank updates a part of the parameters, and {unlike}",
                remedy="take strategy='mirrored', where each rank updates all parameters",
            )

    @contextmanager
    def explaining(self, call: str) -> Iterator[None]:
        """Return a context manager that explains why a method of the script's optimizer fails in an earlier loop body.

        Where each rank updates a part of the parameters (shards, ZeRO rows), the optimizer's parameters have gradients
        only in the loop's body for a rank's last micro-batch of a global batch. If the method raises in the body for an
        earlier micro-batch, it is taken to have needed them. Not collective.

        Args:
            call: the method as a message names it, such as ``SAM.first_step()``.

        Raises:
            UsageError: the method raises under such a strategy in the body for an earlier micro-batch. In all other
                cases, and if it is a ``TuttiError``, its exception propagates.
        """
        try:
            yield
        except TuttiError:
            raise
        except Exception as error:
            if not self._in_body or self._is_last_body or self._sync.gradient_at not in _OF_PARTS:
                raise
            raise UsageError(
                f"{call} fails with several micro-batches a rank: {type(error).__name__}: {error}",
                where=f"step {self._run.global_step + 1}, {script_line_of(error)}",
                why="this rank runs the body once for each, and the optimizer's parameters have a gradient in the last"
                " body alone",
                remedy=f"take as many workers as data ranks ({self._run.context.mesh.data_ranks}), and no micro_batch",
            ) from error

    # --- clearing --------------------------------------------------------------------------------------------------

    def cleared(self, index: int, set_to_none: bool) -> None:
        """Clear ``.grad`` of the model's own parameter objects after the script has called ``optimizer.zero_grad()``.

        The wrapped ``zero_grad`` calls this method once the optimizer has cleared the parameters in its groups. Where
        these are other objects than the model's, such as shards, ``.grad`` of the model's parameters is cleared, too.
        Also deletes the record of which gradients were reduced over ranks. Not collective.

        Args:
            index: index of the optimizer among those passed to ``tutti.prepare``.
            set_to_none: argument of ``zero_grad``: True sets ``.grad`` to None, False to zeros.
        """
        self._sync.on_zero_grad(self.optimizers[index], set_to_none)
        self._origin.cleared(self._origin.members(index))
