"""The gradient of a global batch in a custom training loop: the bodies' parts are banked, and reduced in the last.

Within the loop's body ``.grad`` means what it means in PyTorch. In the body of a rank's last micro-batch
``run.backward`` reduces the gradient over all micro-batches of the global batch before it returns: ``.grad`` then
equals the gradient on one device, so that the script may clip it, add to it, or accumulate several. In earlier bodies
tutti banks the micro-batch's gradient, and ``.grad`` shows that micro-batch's part alone; the script's changes to that
part have no effect.

Where workers make updates of their own (local SGD), a rank has one worker, and ``.grad`` is the gradient of this
worker's samples. ``run.backward`` then reduces the loss alone, so that ranks may make different numbers of updates.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from tutti.errors import UsageError, script_line
from tutti.launcher.heartbeat import Phase
from tutti.nn.incomplete_gradient import is_zeroed
from tutti.train.custom_loop_state import Contribution, CustomLoopState, Gradients
from tutti.train.void_body import VoidBody
from tutti.types.custom_loop_sync import SPLIT_OVER_MODEL, LocalStepSync
from tutti.types.micro_batch import LossSums, MicroBatch
from tutti.types.replica_runner import GradientReadyHook, SilentHook
from tutti.types.step_records import StepContext, StepStats

if TYPE_CHECKING:
    from tutti.train.run import Run

BodyWork: TypeAlias = "Callable[[LossSums | None, GradientReadyHook], LossSums]"
"""Adds the weighted gradient of a body's micro-batch to ``.grad``. Takes the worker's loss sums so far (None at first)
and the gradient-ready hook, and returns the loss sums including this micro-batch."""

_NOT_COMBINED = "cannot be combined with parameter servers that do not wait for all workers"
_ALL_WAIT = "take strategy='parameter_server' with mode=sync and no backup"


class CustomLoopGradients:
    """Computes the gradients of a custom loop's micro-batches, and reduces those of each global batch over ranks.

    A body is one pass of the script's loop over ``run.microbatches``: the code for one micro-batch. A reduction is a
    call of ``run.backward`` or ``run.reduce_gradients`` in the body; a body may make several, as with several losses.

    Args:
        run: the run to train.
        state: the global batch and body under way.

    Attributes:
        calls: number of reductions so far in the body under way.
        pending: results of the reductions since the last update.
        latest: result of the last reduction; None before the first.
        is_pushed: whether this rank has pushed a gradient to parameter servers since the last update.
        evaluated_again: whether the optimizer is calling its closure a second or later time in this step.
    """

    def __init__(self, run: Run, state: CustomLoopState) -> None:
        self._run, self._lifecycle, self._state = run, run.lifecycle, state
        self._sync, self._replica = run.gradient_sync, run.replica
        self._origin, self._bodies, self._local = state.origin, state.bodies, state.local
        self.calls = 0
        # Whether the reduction under way has gradients of a plain loss.backward().
        self._mixed = False
        self.pending: list[StepStats] = []
        self.latest: StepStats | None = None
        self.is_pushed = False
        # Where workers make updates of their own: reductions of losses in this body, and in the last one that had any.
        self._reductions = self._usual_reductions = 0
        self.evaluated_again = False

    def begin_body(self) -> None:
        """Set the counters of reductions to 0, before the script's loop body runs for a micro-batch. Not collective."""
        self.calls, self._reductions, self._origin.exchanged = 0, 0, False

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
        micro_batch = self._state.micro_batch_of_body("run.backward")
        self._lifecycle.check_left()
        self.follow_script()
        self._run.checks.end_body(loss)
        self._lifecycle.values.check(loss)
        self._lifecycle.values.check_divisor(loss, micro_batch)
        self._lifecycle.loaders.check()
        self._bodies.note("backward", 0)
        try:
            with self._lifecycle.values.backward(), self._run.model_code():
                self._contribute(micro_batch, partial(self._backward_of, loss, retain_graph, micro_batch))
        except BaseException as error:
            # The sum over the bodies would lack this one, and other ranks may have begun to sum gradients.
            if self._bodies.several or self._run.context.comms.world.size > 1:
                self._lifecycle.leave(error)
            raise

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
        micro_batch = self._state.micro_batch_of_body("run.reduce_gradients")
        self.follow_script()
        self._sync.show_gradients()
        if self._sync.gradient_at == "shards":
            self._origin.check_shards()
            if not self.calls and not self.shown():
                raise UsageError(
                    "run.reduce_gradients() finds no gradient",
                    where=script_line(),
                    why="each rank has shards of the parameters, and gradients that the script assigns to gathered"
                    " parameters are lost",
                    remedy="call run.backward(loss), or take strategy='mirrored' or 'sharded:stage=1'",
                )
        elif not self._origin.is_whole_batch or self._origin.local(self._origin.script_parameters(), means=True):
            self.exchange_local(micro_batch, means=True)

    def exchange_local(self, micro_batch: MicroBatch, means: bool = False) -> None:
        """Average the gradients of a plain ``loss.backward()`` over the global batch, as ``backward`` does.

        Takes the gradients from ``.grad``. Collective over the data ranks in the rank's last micro-batch of a global
        batch; before it, gradients are added to this rank's sums.

        Args:
            micro_batch: the micro-batch of the body.
            means: whether every ``.grad`` is taken for a mean over this micro-batch's samples, as in
                ``run.reduce_gradients``; False: only gradients that autograd has computed outside of ``run.backward``.

        Raises:
            UsageError: the model is split over ranks, or the run has ``gradient_noise``.
        """
        self._bodies.note("gradients", 0)
        parameter = self._origin.script_parameters()[0]
        dtype = torch.float64 if parameter.dtype == torch.float64 else torch.float32
        sums = torch.tensor([math.nan if micro_batch.samples else 0.0, micro_batch.samples], dtype=dtype)
        own = LossSums(sums.to(parameter.device), (), micro_batch.samples)
        self._contribute(micro_batch, partial(_count_samples, own), means)

    def _backward_of(
        self,
        loss: Any,
        retain_graph: bool,
        micro_batch: MicroBatch,
        before: LossSums | None,
        grad_hook: GradientReadyHook,
    ) -> LossSums:
        """Run the backward of a loss: the ``BodyWork`` of ``run.backward``, once its first arguments are bound."""
        with self._origin.own_backward():
            if self._state.void is not None:
                return self._void_backward(loss, micro_batch, retain_graph)
            return self._replica.backward(loss, micro_batch, before, grad_hook, retain_graph)

    def _void_backward(self, loss: Any, micro_batch: MicroBatch, retain_graph: bool) -> LossSums:
        """Leave gradients of a dummy micro-batch in ``.grad``, for a body that has no effect; return sums of zero."""
        VoidBody.backward(loss, retain_graph)
        gradients = self.shown()
        # Restores the buffers, and clears the gradients; a further forward of this body is a dummy's, too.
        part = self._replica.backward(loss, micro_batch, None, self._run.grad_hook)
        self._replica.begin(micro_batch)
        self.show(gradients)
        return part

    # --- the gradient of one body -------------------------------------------------------------------------------------

    def shown(self) -> Gradients:
        """Return ``.grad`` of the script's parameters as a dict by parameter, without parameters that have none.

        The tensors are the gradients themselves, not copies. Not collective.
        """
        return {p: p.grad for p in self._origin.script_parameters() if p.grad is not None}

    def show(self, gradients: Gradients) -> None:
        """Set ``.grad`` of each of the script's parameters to its entry in ``gradients``, or to None without one.

        Args:
            gradients: gradient by parameter, as ``shown`` returns it.
        """
        for parameter in self._origin.script_parameters():
            parameter.grad = gradients.get(parameter)

    def follow_script(self) -> None:
        """Tell the strategy which gradients the script has cleared, and which ``requires_grad`` it has changed.

        Collective over the data ranks if the script has set ``requires_grad`` to True: an all-gather of digests.

        Raises:
            UsageError: the strategy cannot train a parameter that the script has unfrozen, or the bodies of this global
                batch have made different calls.
        """
        self._sync.apply_clearing()
        if self._state.batch.bank and self._run.trainability.changed:
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
        found = {}
        for parameter in local:
            if parameter.grad is not None and (weighted := self._origin.weighted(parameter, micro_batch)) is not None:
                found[parameter] = weighted
            parameter.grad = None
        return found

    def _contribute(self, micro_batch: MicroBatch, work: BodyWork, means: bool = False) -> None:
        """Add the gradient that ``work`` computes to that of the global batch. Collective in a rank's last body.

        Args:
            micro_batch: the micro-batch of the body.
            work: computes the gradient and the loss sums of the body.
            means: see ``GradientOrigin.local``.
        """
        self._check_cleared()
        local = self._take_local(micro_batch, means)
        call, self.calls = self.calls, self.calls + 1
        self._state.batch.settings.setdefault(call, self._run.shared_settings.text())
        if self._state.is_last_body:
            self._reduce_batch(micro_batch, call, local, work)
        else:
            self._bank_body(micro_batch, call, local, work)
        self._sync.show_gradients()
        self._origin.exchanged = True
        self._origin.remember()
        if self._state.batch.is_watched:
            self._lifecycle.values.note_gradients(self.shown().values(), self._state.is_last_body)

    def _add_body(
        self, micro_batch: MicroBatch, call: int, local: Gradients, work: BodyWork, before: LossSums | None
    ) -> LossSums:
        """Add the gradients of a body to those of earlier bodies in ``.grad``; measure them by themselves if due.

        Args:
            micro_batch: the micro-batch of the body.
            call: number of the reduction in the body; the noise is measured in the first.
            local: gradients that the script computed without ``run.backward``.
            work: computes the others; see ``BodyWork``.
            before: loss sums of the worker's earlier bodies; None for none.

        Returns:
            The loss sums including this body.
        """
        measured = self._state.batch.measured
        if measured is None or call:
            return _add_gradients(local, work, before, self._run.grad_hook)
        alone = partial(_add_gradients, local, work, None, SilentHook())
        part = measured.measure(alone, micro_batch.worker, micro_batch.samples)
        return part if before is None else before + part

    def _bank_body(self, micro_batch: MicroBatch, call: int, local: Gradients, work: BodyWork) -> None:
        """Bank the gradient and loss sums of a micro-batch that is not the rank's last."""
        staged = self._sync.gradient_at == "stages"
        if staged:
            self._sync.apply_edits([])
        shown = self.shown()
        self.show({})
        kept = self._state.batch.bank.setdefault(
            (call, micro_batch.worker if self._sync.by_worker else -1), Contribution()
        )
        sums = kept.loss_sums.get(micro_batch.worker)
        kept.loss_sums[micro_batch.worker] = self._add_body(micro_batch, call, local, work, sums)
        used = self._sync.pop_reached()
        kept.used = [a or b for a, b in zip(kept.used or used, used, strict=True)]
        for parameter, gradient in self.shown().items():
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

    # --- the reduction ------------------------------------------------------------------------------------------------

    def _reduce_batch(self, micro_batch: MicroBatch, call: int, local: Gradients, work: BodyWork) -> None:
        """Reduce the gradients of this call over ranks. Collective."""
        run, sync = self._run, self._sync
        self._check_one_push()
        self._check_one_loss(call)
        self.check_pending()
        step_context, settings = self._lifecycle.step_context, self._state.batch.settings.pop(call)
        if (call, settings) != (step_context.call, step_context.settings):
            self._lifecycle.step_context = step_context = replace(step_context, call=call, settings=settings)
        held = sync.pop_gradients()
        sync.begin_worker(micro_batch.worker, step_context)
        for worker in self._state.batch.busy[:-1]:
            self.end_banked_worker(call, worker)
        kept = self._state.batch.bank.pop((call, micro_batch.worker if sync.by_worker else -1), Contribution())
        for worker in self._state.batch.busy[:-1]:
            if worker in kept.loss_sums:
                sync.end_worker(worker, kept.loss_sums[worker])
        if kept.gradients or local:
            self.show(kept.gradients)
        if kept.used:
            sync.mark_reached(kept.used)
        part = self._add_body(micro_batch, call, local, work, kept.loss_sums.get(micro_batch.worker))
        part.whole = micro_batch.whole
        self._end_measured_worker(call, micro_batch.worker, part)
        if self._state.batch.is_local_step and self._local is not None:
            self._reduce_own(self._local, micro_batch, part, step_context)
            sync.add_gradients(held)
            return
        sync.end_worker(micro_batch.worker, part)
        for worker in self._state.batch.idle:
            sync.begin_worker(worker, step_context)
            sync.end_worker(worker, None)
        if self._state.batch.idle:
            sync.begin_worker(micro_batch.worker, step_context)
        self._lifecycle.enter(Phase.COMPUTE)
        stats = sync.reduce_gradients(step_context)
        run.hooks.check_sum(stats, step_context)
        self._check_counts(stats, step_context.samples)
        self._finish_noise(stats)
        sync.add_gradients(held)
        self.pending.append(stats)
        self.is_pushed = sync.gradient_at == "servers"
        run.stats = self.latest = stats

    def end_banked_worker(self, call: int, worker: int) -> None:
        """Call ``GradientSync.end_worker`` with a logical worker's gradients, which its loop bodies have summed.

        For strategies that sum gradients worker by worker, where a worker (a fixed share of the global batch) has
        several micro-batches: each body, the script's code for one of them, adds its gradients to a sum outside of
        ``.grad``. Called after the worker's last body, or in the next reduction. Does nothing for a worker without such
        a sum. ``.grad`` is the same before and after. Not collective.

        Args:
            call: index of the ``run.backward`` in the body, from 0, whose gradients are meant.
            worker: index of the logical worker.
        """
        kept = self._state.batch.bank.pop((call, worker), None)
        if kept is not None:
            shown = self.shown()
            self.show(kept.gradients)
            self._end_measured_worker(call, worker, kept.loss_sums[worker])
            self._sync.end_worker(worker, kept.loss_sums[worker])
            self.show(shown)

    def _reduce_own(
        self, local: LocalStepSync, micro_batch: MicroBatch, part: LossSums, step_context: StepContext
    ) -> None:
        """Complete the gradient of a worker that makes updates of its own, and reduce the loss over workers.

        Collective, but not in a later evaluation of a closure: each worker's optimizer makes as many as it needs.
        """
        run = self._run
        run.hooks.check_part(part)
        local.end_own(micro_batch.worker, part if micro_batch.samples else None)
        self._lifecycle.enter(Phase.COMPUTE)
        if not self.evaluated_again or self.latest is None:
            self._reductions += 1
            run.stats = self.latest = local.reduce_losses(step_context)
            self._check_counts(self.latest, step_context.samples)
            self._finish_noise(self.latest)
        self.pending.append(self.latest)

    def join_losses(self, local: LocalStepSync, micro_batch: MicroBatch) -> None:
        """Take part in the other ranks' reductions of losses, where this rank's body has called no ``run.backward``.

        Under local SGD, where each worker makes updates of its own, a body may skip a batch because of its content.
        This rank then contributes a loss of no samples, as many times as its last body with ``run.backward`` made
        reductions. Called at the end of each body. Collective over the data ranks, as ``run.backward`` in the bodies of
        the other ranks.

        Args:
            local: the gradient synchronisation.
            micro_batch: the micro-batch of the body.
        """
        if self._reductions:
            self._usual_reductions = self._reductions
            return
        for call in range(self._usual_reductions):
            step_context = replace(self._lifecycle.step_context, call=call)
            self._sync.begin_worker(micro_batch.worker, step_context)
            local.end_own(micro_batch.worker, None)
            stats = local.reduce_losses(step_context)
            self._finish_noise(stats)
            if stats.count:
                self._run.stats = stats

    def _end_measured_worker(self, call: int, worker: int, part: LossSums) -> None:
        """Tell the measurement of the gradient noise that ``.grad`` has a worker's gradient of the first reduction."""
        if self._state.batch.measured is not None and not call:
            self._state.batch.measured.end_worker(worker, part)

    def _finish_noise(self, stats: StepStats) -> None:
        """Estimate the gradient noise from the first reduction of a batch, if it is measured. Collective then."""
        if self._state.batch.measured is not None and self._run.noise_probe is not None:
            self._run.noise_probe.finish(stats)

    # --- checks -------------------------------------------------------------------------------------------------------

    def check_pending(self) -> None:
        """Compare over ranks the script's edits of reduced gradients, before a further reduction adds to them.

        Collective over the data ranks if the script has edited such a gradient: all-gathers. Under local SGD nothing is
        compared.

        Raises:
            UsageError: ranks have edited a gradient in different ways.
        """
        for stats in self.pending:
            stats.known()
        reduced = bool(self.pending) and not self._state.batch.is_local_step
        if reduced and self._origin.edited(self._origin.script_parameters()):
            self._origin.check_edits()

    def check_served(self) -> None:
        """Raise UsageError with asynchronous parameter servers for a global batch in which the script made no update.

        Such servers take one gradient of each rank in every step. Not collective; called at the end of a global batch.
        """
        if self._sync.gradient_at == "servers":
            raise UsageError(
                f"a global batch without an update {_NOT_COMBINED}",
                where=f"step {self._run.global_step + 1}",
                why="the servers take one gradient of each rank in every step",
                remedy=f"call run.backward and optimizer.step() for each, or {_ALL_WAIT}",
            )

    def _check_one_push(self) -> None:
        """Raise UsageError for a second gradient of a global batch on parameter servers, which take one push."""
        if self._sync.gradient_at == "servers" and self._state.batch.is_counted:
            raise UsageError(
                f"a second update of one global batch {_NOT_COMBINED}",
                where=f"step {self._run.global_step}, {script_line()}",
                why="the servers take one gradient of each rank in every step, and have updated with this step's",
                remedy="call run.backward and optimizer.step() once for each batch of run.microbatches(), train more"
                f" epochs in place of several passes over a batch, or {_ALL_WAIT}",
            )
        if self._sync.gradient_at == "servers" and self.is_pushed:
            raise UsageError(
                f"a second gradient before optimizer.step() {_NOT_COMBINED}",
                where=f"step {self._run.global_step + 1}",
                why="the first one is on the servers, where a script cannot add to it",
                remedy=f"add the losses up and call run.backward once, or {_ALL_WAIT}",
            )

    def _check_one_loss(self, call: int) -> None:
        """Raise UsageError for two reductions in one update of a batch, if the gradient noise is to be measured."""
        if call and self.pending and self._run.noise_probe is not None:
            raise UsageError(
                f"noise_every with {call + 1} reductions of gradients in one update of a batch",
                where=f"step {self._run.global_step + 1}, {script_line()}",
                why="the gradient of the update is their sum, and the noise compares micro-batches in one reduction",
                remedy="add the losses up and call run.backward once, or leave out noise_every",
            )

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

    def _check_cleared(self) -> None:
        """Raise UsageError for gradients that a script adds to those of an update, which parameter servers hold."""
        if self._sync.gradient_at == "servers" and not self.is_pushed and self._origin.uncleared_parameters():
            raise UsageError(
                "gradients that are not cleared after an update cannot be combined with parameter servers",
                where=f"step {self._run.global_step + 1}",
                why="the servers have applied them and keep none, and the script adds the next ones to them",
                remedy="call optimizer.zero_grad() in every step, or take strategy='mirrored'",
            )


def _add_gradients(local: Gradients, work: BodyWork, before: LossSums | None, grad_hook: GradientReadyHook) -> LossSums:
    """Add the script's own gradients to ``.grad``, and then those of ``work``; return the loss sums of ``work``."""
    for parameter, gradient in local.items():
        banked = parameter.grad
        parameter.grad = gradient if banked is None else banked.add_(gradient)
    return work(before, grad_hook)


def _count_samples(own: LossSums, before: LossSums | None, grad_hook: GradientReadyHook) -> LossSums:
    """Count samples whose gradients the script has computed: a ``BodyWork`` without a backward."""
    del grad_hook
    return own if before is None else before + own
