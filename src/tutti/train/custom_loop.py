"""Custom training loops: the script's own forward, ``run.backward(loss)`` and ``optimizer.step()``.

The loop's body runs once for each micro-batch of this rank. ``CustomLoop`` begins and ends the bodies; gradients are
computed and reduced by ``CustomLoopGradients``, and updates made by ``CustomLoopUpdate`` and ``ClosureUpdate``.
"Worker" is the logical worker. Where workers make updates of their own (local SGD), their parameters are averaged after
the body of the step in which that is due.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NoReturn

from torch import Tensor
from torch.optim import Optimizer

from tutti.comm.stall import TellFailures
from tutti.config.strategy_choice import StrategyChoice
from tutti.errors import TuttiError, UsageError, script_line, script_line_of
from tutti.launcher.heartbeat import Phase
from tutti.nn.incomplete_gradient import conceal
from tutti.nn.owned_hooks import OwnedHook
from tutti.parallel import check_custom_loop
from tutti.parallel.ddp.loss_shape import is_gathered
from tutti.train.custom_loop_closure import ClosureUpdate
from tutti.train.custom_loop_gradients import CustomLoopGradients
from tutti.train.custom_loop_state import CustomLoopState, GlobalBatchState, Gradients
from tutti.train.custom_loop_update import CustomLoopUpdate
from tutti.train.script_checks.body_counters import break_out_of_loop
from tutti.train.script_checks.recurrent_state import RecurrentStateCheck
from tutti.train.script_checks.skipped_bodies import SkippedBodies
from tutti.train.script_checks.watched_calls import Root
from tutti.train.void_body import VoidBody
from tutti.types.micro_batch import Batch, MicroBatch

if TYPE_CHECKING:
    from tutti.train.run import Run

_OF_PARTS = ("rows", "shards", "sliced_rows")
"""Places of gradients where each rank updates a part of the parameters; optimizers see its gradient in the rank's last
body alone."""


class CustomLoop:
    """Runs a custom training loop: gives the script each micro-batch of this rank, and makes one update a global batch.

    A body is one pass of the script's loop over ``run.microbatches``: the code for one micro-batch.

    Args:
        run: the run to train.
        optimizers: the script's optimizers, in the order of ``tutti.prepare``.
        choice: the strategy.

    Attributes:
        optimizers: as given.
        gradients: computes the gradients of the bodies, and reduces those of a global batch.
        update: makes the update where the script calls ``optimizer.step()``.
        closures: makes the update where the script calls ``optimizer.step(closure)``.
        second_updates: records of parameters that a body reads again after it has updated them.
    """

    def __init__(self, run: Run, optimizers: Sequence[Optimizer], choice: StrategyChoice) -> None:
        self._run, self._lifecycle, self._choice = run, run.lifecycle, choice
        self._sync, self._replica = run.gradient_sync, run.replica
        self._state = state = CustomLoopState(run, optimizers)
        self.optimizers = state.optimizers
        self._origin, self._bodies, self._local = state.origin, state.bodies, state.local
        self.second_updates = state.bodies.second_updates
        self._recurrent, self._skipped = RecurrentStateCheck(run), SkippedBodies(run)
        self.gradients = CustomLoopGradients(run, state)
        self.update = CustomLoopUpdate(run, state, self.gradients)
        self.closures = ClosureUpdate(run, state, self.gradients, self.update, choice)
        # The error for a loop that was left by ``break`` too early.
        self._left: UsageError | None = None
        # How many loops over micro-batches are open.
        self._open = 0

    @property
    def within_batch(self) -> bool:
        """Whether the custom training loop is in the middle of a global batch.

        True from the start of this rank's first micro-batch of a global batch until the update of the parameters, or
        until the end of the rank's last micro-batch. While it is True, the run cannot be saved.
        """
        return self._state.batch.is_open

    def microbatches(self, number: int, start: int | None = None) -> Iterator[Batch]:
        """Iterate over the micro-batches of this rank in an epoch; the script's loop body runs on each.

        Every rank must iterate alike. A rank without samples in a global batch gets a dummy micro-batch of weight 0;
        with sharded weights (FSDP) dummies come before a rank's own micro-batches, so that all ranks run equally many
        forwards. A worker, below, is a logical worker, a fixed share of the global batch. Gradients are reduced over
        ranks while the loop body runs on the rank's last micro-batch of each global batch. The iterator itself performs
        collectives between bodies. Over all ranks these are all-gathers of callbacks' reasons to stop, and at the end
        of some epochs of digests of the copies of parameters; and, in steps that ``noise_every`` measures under ZeRO
        stage 1 and central storage, a gather of the factors of Adam's preconditioner. Over the data ranks they are
        all-gathers of digests of samples (streams and samplers; with several workers in the first steps), and of
        ``requires_grad`` where the script has thawed parameters; in the second step of several workers, all-gathers
        that merge batch-norm buffers; under local SGD the averages of parameters, and the reduction of losses for a
        body that has left out ``run.backward``; and under ``central_storage``, at its start, an exchange of addresses
        of shared memory.

        Args:
            number: the epoch, from 0.
            start: first global batch; default: 0, or after ``restore`` the batch after the last one consumed.

        Yields:
            The micro-batch's samples as the data set or collate function gives them, on the device.

        Raises:
            UsageError: the strategy has no custom training loops; ``compile`` is set to a mode with CUDA graphs;
                ``start`` is None, and ``restore`` has loaded a checkpoint of a later epoch; an earlier loop over
                micro-batches was left in the middle of a global batch, or by ``break`` after a number of its bodies,
                where they are several for a global batch; this loop begins in the body of another one, before its
                ``optimizer.step()``; in reproducible mode several ranks share a worker, and a rank other than the
                worker's first has several of its micro-batches; the body makes other backward and optimizer calls than
                for the rank's first micro-batch of the global batch, writes parameters before the last, or skips a
                micro-batch because of its size; with parameter servers that do not wait for all workers a global batch
                ends without an update; the script has converted the model, replaced a parameter or optimizer state, has
                registered hooks or thawed parameters that the strategy cannot handle, or has caught an exception of a
                step that cannot be skipped.
            MismatchError: ranks hold different copies of a parameter, read different samples, or have thawed different
                parameters.
        """
        self._check_beginning()
        self._open += 1
        is_first = True
        try:
            with TellFailures():
                for batch in self._run.epoch(number, start):
                    with self._run.model_code():
                        yield from self._bodies_of(batch)
                    is_first = False
        except GeneratorExit:
            # At the end of the process nothing follows, and modules are gone.
            if not sys.is_finalizing() and not (is_first and self._is_untrained):
                self._note_break()
            raise
        finally:
            self._open -= 1
            self._end_void()
            self._run.checks.end_body()
            self._lifecycle.values.end()
            self._lifecycle.inputs.end()
            self._sync.leave_custom_loop()
            if self._open:
                # The loop was in the body of another one, which goes on.
                self._sync.begin_custom_loop()

    @property
    def _is_untrained(self) -> bool:
        """Whether no body of the global batch has computed a gradient, as where the script looks at a batch first."""
        return not (self._state.batch.bank or self.gradients.calls or self.gradients.shown())

    def _note_break(self) -> None:
        """Record that the script leaves the loop by ``break``, where updates are missing by it: ``end_left`` raises.

        Python swallows exceptions here.
        """
        line, is_counted = break_out_of_loop() if self._bodies.several else ("", False)
        if line and (is_counted or not self._state.is_last_body):
            within = "after a number of its bodies" if self._state.is_last_body else "in the middle of a global batch"
            self._left = UsageError(
                f"the loop over run.microbatches() was left {within}, with several micro-batches a rank",
                where=f"step {self._run.global_step + 1}, {line}",
                why="this rank runs the body several times a global batch, so that one device would have made more"
                " updates by then",
                remedy="count global batches (run.global_step), and leave the loop where run.stepped is true",
            )
            self._run.model.register_state_dict_pre_hook(OwnedHook(self.check_break))
            self._run.model.register_forward_pre_hook(OwnedHook(self.check_break))

    def check_break(self, *_: Any) -> None:
        """Raise UsageError if the script has left the last loop over micro-batches by a ``break`` that loses an update.

        The loop records such a ``break``: in the middle of a global batch, or after one of several bodies. Called by
        ``end_left`` and, as hooks of the model, before ``model.state_dict()`` and the model's next forward. Not
        collective.
        """
        if (left := self._left) is not None:
            raise UsageError(left.what, where=left.where, why=left.why, remedy=left.remedy)

    def _check_beginning(self) -> None:
        """Check that a loop may begin now, and end the step of an earlier loop that the script has left.

        Raises:
            UsageError: the strategy, the compiler's mode or a loop under way do not allow it.
        """
        check_custom_loop(self._choice, self._run.context.workers, self._run.context.mesh.data_ranks)
        compiled = self._run.context.compile
        if compiled is not None and compiled.records_graphs:
            raise UsageError(
                f"compile='{compiled.mode}' cannot be combined with a custom training loop",
                why="it records CUDA graphs, whose gradients the next step overwrites, and the script may keep them",
                remedy="call run.step(batch) with a loss_fn, or take compile='default'",
            )
        if self._open and self._state.batch.is_open and not self._state.batch.is_counted:
            raise UsageError(
                "a loop over run.microbatches() begins within the body of another one, before optimizer.step()",
                where=script_line(),
                why="the global batch under way would take the weight of the other loop's batch",
                remedy="take further batches from a DataLoader of their own, or begin the loop after optimizer.step()",
            )
        if self._state.batch.is_open and not self._state.is_last_body and not self._is_untrained:
            raise UsageError(
                "the last loop over run.microbatches() was left in the middle of a global batch",
                remedy="leave it only after an optimizer.step() with run.stepped",
            )
        self.end_step()
        self._state.batch.is_open, self._state.batch.ending = False, None
        self._sync.begin_custom_loop()

    # --- the bodies of a global batch ------------------------------------------------------------------------------

    def _bodies_of(self, batch: Batch) -> Iterator[Batch]:
        """Iterate over this rank's micro-batches of a global batch; the script's loop body runs on each."""
        busy = self._begin_batch(batch)
        several, served = self._bodies.several, self._sync.gradient_at == "servers"
        pushed = self._origin.uncleared_parameters() if several and served else []
        # Complete gradients that the script accumulates over global batches.
        if several:
            self.gradients.check_pending()
        carried = self._sync.pop_gradients() if several else {}
        step_context = self._lifecycle.step_context
        for worker, micro_batches in busy:
            self._sync.begin_worker(worker, step_context)
            for micro_batch in micro_batches:
                final = worker == busy[-1][0] and micro_batch.last
                self._enter_body(micro_batch, final, carried)
                if pushed:
                    # The first body must clear them, as without several bodies.
                    conceal(pushed, "on the parameter servers, which have applied it")
                    pushed = []
                with self._replica.script_code():
                    yield micro_batch.batch
                self._leave_body()
        self._end_batch()

    def _begin_batch(self, batch: Batch) -> Sequence[tuple[int, Sequence[MicroBatch]]]:
        """Begin the step of a global batch.

        Returns:
            This rank's workers with samples in it, in order, each with its micro-batches; the first worker with a dummy
            micro-batch where none has samples.
        """
        run, lifecycle = self._run, self._lifecycle
        work = lifecycle.begin(batch, None)
        global_batch = self._state.batch = GlobalBatchState(is_open=True)
        self._bodies.begin_batch()
        lifecycle.loaders.begin_batch()
        work = lifecycle.padded(work)
        step_context = lifecycle.step_context
        global_batch.measured = None if run.noise_probe is None else run.noise_probe.begin(step_context)
        if self._local is not None:
            global_batch.is_local_step, global_batch.ending = self._local.is_local_step(step_context), step_context
        busy = [(worker, micro_batches) for worker, micro_batches in work if micro_batches]
        # Shares differ by at most one sample, so that workers without samples are the last ones.
        global_batch.idle = [worker for worker, micro_batches in work if not micro_batches]
        if not busy:
            worker, *global_batch.idle = global_batch.idle
            busy = [(worker, [lifecycle.dummy_micro_batch(worker)])]
        global_batch.busy = [worker for worker, _ in busy]
        global_batch.is_watched = lifecycle.watch(busy)
        if len(set(global_batch.busy)) < len(busy):
            self._refuse_parts_of_worker(len(busy))
        several = self._bodies.several = run.feed.most_micro_batches(step_context.samples) > 1
        served = self._sync.gradient_at == "servers"
        # Gradient noise is added by run.backward, and measured in reductions: other gradients must be told apart.
        whole = global_batch.is_local_step or run.context.comms.replica.size == 1
        self._origin.is_whole_batch = not (several or served or run.noise or run.noise_probe) and whole
        return busy

    def _refuse_parts_of_worker(self, count: int) -> NoReturn:
        raise UsageError(
            f"a custom training loop has {count} micro-batches of a worker on a device that is not the worker's first",
            why="in reproducible mode each of their gradients is added to the sum by itself",
            remedy="leave out reproducible, or take as many devices a worker as it has micro-batches, or run.step",
        )

    def _enter_body(self, micro_batch: MicroBatch, final: bool, carried: Gradients) -> None:
        """Begin the body of a micro-batch, before the script's code for it.

        Args:
            micro_batch: the micro-batch.
            final: whether it is the rank's last of the global batch.
            carried: complete gradients of earlier global batches, which the last body starts with.
        """
        self._state.micro_batch, self._state.is_last_body, self._state.in_body = micro_batch, final, True
        self.gradients.begin_body()
        if self._bodies.several:
            # Each body starts without gradients; the last one with those that the script carries over global batches.
            self.gradients.show({})
            if final and (carried or self._sync.gradient_at == "stages"):
                # With stages a collective, and only some of them may have gradients.
                self._sync.add_gradients(carried)
            self._origin.remember()
        self._bodies.begin_body(final)
        self._lifecycle.loaders.begin_body(self._bodies.several)
        self._recurrent.begin_body(micro_batch, self._bodies.several)
        self._lifecycle.inputs.begin()
        if self._state.batch.is_watched:
            self._lifecycle.values.begin_body(micro_batch)
        self._origin.watch()
        self._run.checks.begin_body(micro_batch)
        if self._state.batch.is_local_step and not micro_batch.samples:
            self._state.void = VoidBody(self._run)
        self._replica.begin(micro_batch)
        self._lifecycle.enter(Phase.COMPUTE)

    def _leave_body(self) -> None:
        """Close the body of a micro-batch, after the script's code for it has ended."""
        self._state.in_body = False
        self._end_void()
        self._run.checks.end_body()
        self._lifecycle.values.end()
        self._lifecycle.inputs.end()
        micro_batch = self._state.micro_batch
        if self._state.batch.is_watched and micro_batch is not None:
            trained = self.gradients.calls > 0 or bool(self.gradients.shown())
            self._skipped.end_body(micro_batch, trained, self._lifecycle.values.size_lines)
        self._bodies.end_body()
        if micro_batch is not None and not self._origin.is_whole_batch:
            self._leave_gradients(micro_batch)
        is_last = self._state.is_last_body
        if self._state.batch.is_local_step and self._local is not None and is_last and micro_batch is not None:
            self.gradients.join_losses(self._local, micro_batch)
        if not self._bodies.several or is_last or micro_batch is None:
            return
        if micro_batch.last and self.gradients.calls == 1 and self._sync.by_worker:
            self.gradients.end_banked_worker(0, micro_batch.worker)

    def _leave_gradients(self, micro_batch: MicroBatch) -> None:
        """Weight the gradients of a plain ``loss.backward()`` that the body has left for a later update.

        Raises:
            UsageError: some rank has several micro-batches.
        """
        if not self._bodies.several:
            self._origin.leave(micro_batch)
        elif not self.gradients.calls and self._origin.local(self._origin.script_parameters()):
            raise UsageError(
                "the loop's body leaves gradients of loss.backward(), and no update, with several micro-batches a rank",
                where=f"step {self._run.global_step + 1}",
                why="each body begins with the complete gradients of global batches, of which these are none yet",
                remedy="call run.backward(loss), whose gradients add up until the update",
            )

    def _end_batch(self) -> None:
        """End the step after the rank's last body, and count the batch if no update has."""
        self._count_without_update()
        self.end_step()
        self._state.batch.is_open, self._state.micro_batch = False, None
        self._bodies.end_batch()

    def _end_void(self) -> None:
        """Undo the body of a worker without samples, where workers make updates of their own."""
        void, self._state.void = self._state.void, None
        if void is not None:
            self._replica.forget()
            void.undo()

    # --- the end of a step --------------------------------------------------------------------------------------------

    def end_left(self) -> None:
        """End the step of a loop over micro-batches that the script has left by ``break``.

        To end a step means, under local SGD and DiLoCo, to average the parameters of the logical workers (fixed shares
        of the global batch) if an average is due after the step, collectively over the data ranks (``end_step``). With
        other strategies, and while a loop is still running, nothing is done. Called before each collective call of the
        run.

        Raises:
            UsageError: the ``break`` has lost an update (``check_break``).
        """
        if not self._open:
            self.check_break()
            self.end_step()

    def end_step(self) -> None:
        """Average the logical workers' parameters (local SGD, DiLoCo), if an average is due after the present step.

        With other strategies nothing is done. A logical worker is a fixed share of the global batch. An average is
        collective over the data ranks: an all-to-all and an all-gather for each dtype. The loop calls this after its
        body, and earlier where the script saves the run or begins another step in the body. The first call after the
        global batch counts as consumed ends the step; a call before that, or a second one for the same step, does
        nothing.

        Raises:
            UsageError: this rank's worker had no samples in the step, and the script has written a parameter in the
                body.
            PeerError: in the average, a rank is lost, or does not take part within the timeout.
        """
        step_context = self._state.batch.ending
        if step_context is not None and self._local is not None and self._state.batch.is_counted:
            self._state.batch.ending = None
            self._end_void()
            self._state.batch.averaged = self._local.end_step(step_context)
            if self._state.batch.averaged and self._run.average is not None:
                self._run.average.update()

    def _count_without_update(self) -> None:
        """Count the global batch as consumed, unless an update has counted it."""
        if not self._state.batch.is_counted and self._state.batch.is_open and self._state.is_last_body:
            self.gradients.check_served()
            self._state.batch.is_counted = True
            self._lifecycle.count_batch(None, None)

    # --- calls of the script in a body --------------------------------------------------------------------------------

    def refuse_step(self) -> None:
        """Raise UsageError if the body of a loop over micro-batches is under way; ``run.step`` calls this first."""
        if self._state.in_body:
            raise UsageError(
                "run.step is called in a loop over run.microbatches",
                where=script_line(),
                why="the loop counts its micro-batches, which make up the global batch that run.step trains on",
                remedy="loop over run.epoch(epoch)",
            )

    def plain_backward(self, roots: Sequence[Root]) -> AbstractContextManager[None]:
        """Return a context manager for a plain ``loss.backward()`` of the script, to mark gradients of unfit losses.

        Gradients of a loss that is no mean over the micro-batch's samples, such as one over tokens, cannot be averaged
        over micro-batches. They are marked, and the next ``run.backward``, ``run.reduce_gradients`` or
        ``optimizer.step()`` raises UsageError, unless the script clears them before. Outside of a loop's body nothing
        is done. Not collective.

        Args:
            roots: pairs (loss, gradient that the script gives for it) of the script's call of ``backward``; the
                gradient is None for a loss that is a number.

        Raises:
            UsageError: a loss is computed from tensors that several ranks have gathered.
        """
        if self._state.micro_batch is None or not self._state.in_body:
            return nullcontext()
        if self._run.context.comms.replica.size > 1 and any(is_gathered(loss.grad_fn) for loss, _ in roots):
            raise UsageError(
                "loss.backward() for a loss of tensors that ranks have gathered",
                where=script_line(),
                why="outside of run.backward the gradient through tutti.allgather is the average over ranks, as"
                " Horovod's, and would be too small by the number of ranks",
                remedy="call run.backward(loss)",
            )
        if not self._bodies.several:
            self._bodies.check_scaler()
        return self._origin.plain_backward(roots, self._state.micro_batch)

    def unfit_loss(self, loss: Tensor) -> Callable[[], UsageError] | None:
        """Return why gradients that ``torch.autograd.grad`` computes of a loss cannot be averaged over micro-batches.

        Called before the gradients are computed, which may free the loss's graph; ``mark_gradients`` then marks them.
        Not collective.

        Args:
            loss: the number of which the script computes gradients of parameters.

        Returns:
            A function that makes the error; None for a mean over samples, and outside of a loop's body.
        """
        if self._state.micro_batch is None or not self._state.in_body:
            return None
        return self._origin.unfit_loss(loss, self._state.micro_batch)

    def mark_gradients(self, gradients: Any, error: Callable[[], UsageError]) -> None:
        """Let ``run.reduce_gradients`` raise an error if the script has assigned one of these gradients to ``.grad``.

        Args:
            gradients: what ``torch.autograd.grad`` returned.
            error: makes the error, as ``unfit_loss`` returns it.
        """
        self._origin.mark_gradients(gradients, error)

    @contextmanager
    def explaining(self, call: str) -> Iterator[None]:
        """Return a context manager around a method of the script's optimizer that turns its errors into a UsageError.

        A loop's body runs once for each micro-batch of a rank. Where a rank's optimizer has only some of the
        parameters (shards, ZeRO rows), their ``.grad`` is None in all bodies of a global batch but the last. An error
        of the method in one of these bodies is attributed to the missing gradients. Not collective.

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
            if not self._state.in_body or self._state.is_last_body or self._sync.gradient_at not in _OF_PARTS:
                raise
            raise UsageError(
                f"{call} fails with several micro-batches a rank: {type(error).__name__}: {error}",
                where=f"step {self._run.global_step + 1}, {script_line_of(error)}",
                why="this rank runs the body once for each, and the optimizer's parameters have a gradient in the last"
                " body alone",
                remedy=f"take as many workers as data ranks ({self._run.context.mesh.data_ranks}), and no micro_batch",
            ) from error

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
