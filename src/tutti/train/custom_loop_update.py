"""The update in a custom training loop, where the script calls ``optimizer.step()``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import nn

from tutti.comm.stall import TellFailures
from tutti.errors import MismatchError, UsageError, script_line
from tutti.launcher import heartbeat
from tutti.launcher.heartbeat import Phase
from tutti.nn.swap import parameters
from tutti.parallel.ddp.step_agreement import agree_on_settings
from tutti.parallel.normalisation import finite_by_norm
from tutti.train.custom_loop_gradients import CustomLoopGradients
from tutti.train.custom_loop_state import CustomLoopState
from tutti.types.step_records import PendingStats, StepContext, StepStats, UpdateResult

if TYPE_CHECKING:
    from tutti.train.run import Run


_CALL = "optimizer.step()"


class CustomLoopUpdate:
    """Makes the updates of a custom training loop from the gradients that the loop has reduced.

    Args:
        run: the run to train.
        state: the global batch under way, and the micro-batch of the loop body that is running.
        gradients: the gradients of the global batch.

    Attributes:
        stepped: whether the last ``optimizer.step()`` was in the body of a rank's last micro-batch of a global batch,
            and so made an update; for earlier micro-batches it does nothing.
    """

    def __init__(self, run: Run, state: CustomLoopState, gradients: CustomLoopGradients) -> None:
        self._run, self._lifecycle, self._state, self._gradients = run, run.lifecycle, state, gradients
        self._sync, self._replica, self._optimizers = run.gradient_sync, run.replica, state.optimizers
        self._origin, self._bodies, self._local = state.origin, state.bodies, state.local
        self.stepped = False

    @TellFailures()
    def step(self, index: int | None) -> bool:
        """Update the parameters where the script calls ``optimizer.step()`` in a custom loop over micro-batches.

        The update is made in the rank's last micro-batch of a global batch; in earlier ones nothing is done. After the
        loop it is made from the gradients that the last global batch has left, as where the script accumulates them and
        the last group is smaller. Collectives of the update, in this order:

        - Gradients of a plain ``loss.backward()`` are reduced over the data ranks, as by ``run.backward``.
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
            UsageError: before a loop over ``run.microbatches()``; the script has edited the gradient of a single
                micro-batch, or added one to that of the global batch; with AdaScale, several reductions of gradients in
                one update; the body makes other calls than for the rank's first micro-batch; ranks have edited a
                gradient in different ways, or set different values of an optimizer's setting, such as ``lr``, since
                ``run.backward``; with parameter servers no gradient was computed before; under local SGD after the
                loop, or ``run.save`` has already ended the step with an average; an optimizer does not take sparse
                gradients; or with parameter servers, or ``central_storage`` on several ranks, the script has written
                parameters since its backward.
            NonFiniteError: too many updates in a row were skipped because a gradient is not finite.
        """
        in_body = self._state.in_body or not self._is_left
        if in_body:
            self._state.micro_batch_of_body(_CALL)
        self._gradients.follow_script()
        self._sync.show_gradients()
        members = self._origin.members(index)
        if self._sync.gradient_at == "shards":
            self._origin.check_shards()
        elif self._origin.local(members):
            self._gradients.exchange_local(self._state.micro_batch_of_body(_CALL))
        if in_body:
            self._bodies.note("step", -1 if index is None else index)
            if self._bodies.several:
                self._bodies.second_updates.note_step(members)
        is_last = self.stepped = self._state.is_last_body
        edited = self._origin.edited(members) if is_last or self._bodies.several else []
        if self._bodies.several and in_body:
            self._bodies.note_edited(bool(edited))
        if not is_last:
            return False
        self.check_not_averaged()
        if edited and not self._state.batch.is_local_step:
            self._origin.check_edits()
        if edited and self._bodies.several and self._state.batch.is_watched and in_body:
            names = {p: name for name, p in parameters([self._replica.plain])}
            named = {names.get(p, "a parameter"): p.grad for p in edited if p.grad is not None}
            self._lifecycle.values.check_edits(named)
        self._check_settings()
        self._sync.apply_edits(edited)
        reductions = list(self._gradients.pending)
        if not self._update_first(reductions, bool(edited), index):
            stats = self.stats_for(members, bool(edited))
            step_context = self._with_adascale(stats, reductions)
            with self._lifecycle.updating(), self._sync.stepping(index, members):
                updated = self.make_update(stats, step_context)
            self.count_update(stats, updated, index)
        return True

    @property
    def _is_left(self) -> bool:
        """Whether the loop has ended, and its last gradients are still those of the next update.

        Not where workers make updates of their own, which are averaged at the end of the last body.
        """
        return self._state.batch.is_counted and self._local is None and self._sync.gradient_at != "servers"

    def check_not_averaged(self) -> None:
        """Raise UsageError if ``run.save`` in this loop body has already averaged the workers' parameters (local SGD).

        The average ends the step, and an update after it would belong to no step. Not collective.
        """
        if not self._state.batch.averaged:
            return
        raise UsageError(
            "an update in the body of a loop after run.save, in a step that ends with an average of the workers",
            where=f"step {self._run.global_step}, {script_line()}",
            why="the average belongs after the last update of the step, and the checkpoint has it",
            remedy="make all updates of the body before; or save after run.microbatches() has ended, or in a callback",
        )

    def _check_settings(self) -> None:
        """Compare over data ranks the settings that the script has changed between ``run.backward`` and the update.

        Collective if it has. Settings that are changed earlier are compared with the gradients. Raises UsageError on
        every rank where they differ.
        """
        run, before, settings = self._run, self._lifecycle.step_context, self._run.shared_settings.text()
        if settings != before.settings and self._sync.loss_normalisation == "step":
            self._lifecycle.step_context = now = replace(before, settings=settings)
            try:
                agree_on_settings(run.context.comms.replica, now)
            except MismatchError as error:
                raise UsageError(
                    error.what,
                    where=f"step {run.global_step + 1}, {script_line()}",
                    why="the script has set them since run.backward, and every rank would make another update",
                    remedy=error.remedy,
                ) from error

    def _update_first(self, reductions: Sequence[StepStats], edited: bool, index: int | None) -> bool:
        """Make the update before the host has read the results of its reduction; return whether it was made.

        Only where nothing but these results decides on the update.
        """
        run = self._run
        several = len(reductions) != 1 or self._sync.accumulated or len(self._optimizers) > 1
        decides = edited or run.context.clip is not None or run.adascale is not None
        if several or decides or self._state.batch.is_local_step:
            return False
        [stats] = reductions
        if not isinstance(stats, PendingStats):
            return False
        with self._lifecycle.updating(), self._sync.stepping(index, ()):
            made = stats.update_first(self._lifecycle.step_context)
        if made:
            self._gradients.pending = []
            run.stats = self._gradients.latest = stats.known()
            self.count_update(self._gradients.latest, UpdateResult.joint(self._gradients.latest, ()), index)
        return made

    # --- the gradient and the step of an update -----------------------------------------------------------------------

    def stats_for(self, members: Sequence[nn.Parameter], edited: bool) -> StepStats:
        """Return loss, metrics, gradient norm and finite flag of the gradients of some parameters, reduced over ranks.

        Takes the results of the reductions since the last update, and sets ``run.stats`` (not with parameter servers).
        Collective over the ranks among which a gradient is split where its norm is computed anew: after edits, after
        several reductions, with several optimizers, with pipeline stages, and for clipping.

        Args:
            members: the parameters that the update changes.
            edited: whether the script has edited one of their gradients.

        Returns:
            A ``StepStats``, equal on all ranks of the step; losses of several reductions are added. Before any
            reduction its loss is NaN.

        Raises:
            UsageError: with parameter servers no gradient was computed since the last update.
            PeerError: a rank is lost, or does not take part within the timeout.
        """
        run, sync = self._run, self._sync
        pending, self._gradients.pending = self._gradients.pending, []
        latest = self._gradients.latest
        if latest is None:
            latest = StepStats(math.nan, self._lifecycle.step_context.samples, {}, math.nan, True)
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
            self._gradients.is_pushed = False
            return latest
        # Not every stage has parameters that tell that gradients were accumulated. Edits through ``.grad.data``, which
        # change no version counter, matter where the norm decides on a factor or a skipped update.
        decides = run.replica.edits is None and (run.context.clip is not None or not latest.finite)
        anew = edited or decides or sync.accumulated or sync.gradient_at == "stages"
        if not self._state.batch.is_local_step and (anew or len(pending) != 1 or len(self._optimizers) > 1):
            norm = sync.norm_of(members, self._lifecycle.step_context)
            unedited = latest.finite and not edited
            latest = replace(latest.known(), grad_norm=norm, finite=finite_by_norm(norm, lambda: unedited))
        run.stats = self._gradients.latest = latest = latest.known()
        return latest

    def _with_adascale(self, stats: StepStats, reductions: Sequence[StepStats]) -> StepContext:
        """Return the step context of the update, with AdaScale's gain in its factor on the learning rate.

        Args:
            stats: results of the gradient of the update, after the script's edits.
            reductions: results of the reductions of gradients since the last update.

        Raises:
            UsageError: AdaScale, and the gradient is not that of one reduction.
        """
        run, step_context = self._run, self._lifecycle.step_context
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

    def make_update(self, stats: StepStats, step_context: StepContext) -> UpdateResult:
        """Update the parameters by ``GradientSync.optimizer_step``, or under local SGD by this worker's own optimizer.

        The collectives are those of the strategy's update (see ``step``). Under local SGD nothing is sent, and a worker
        without samples in this step makes no update.

        Args:
            stats: results of the gradient of the update.
            step_context: the step under way.

        Returns:
            An ``UpdateResult``, whose ``skipped`` is True if the gradient is not finite.
        """
        if not self._state.batch.is_local_step or self._local is None:
            return self._sync.optimizer_step(stats, step_context)
        own = UpdateResult(1, in_sync=False) if self._state.void is not None else self._local.step_own(step_context)
        return replace(own, skipped=own.skipped or not stats.finite)

    def count_update(self, stats: StepStats, updated: UpdateResult, index: int | None) -> None:
        """Count an update that an optimizer has made: step schedulers, update the weight average and the loss scale.

        A skipped update changes the loss scale alone. The first update of a global batch, skipped or not, also counts
        the batch as consumed. Not collective.

        Args:
            stats: loss, metrics and gradient norm of the gradient of the update, reduced over ranks.
            updated: number of updates made, and whether the update was skipped, as ``GradientSync.optimizer_step``
                returns them.
            index: index of the optimizer that has made it, whose schedulers step; None for all optimizers.

        Raises:
            NonFiniteError: too many updates in a row were skipped because a gradient is not finite.
        """
        first, self._state.batch.is_counted = not self._state.batch.is_counted, True
        if first:
            self._state.batch.is_open = False
            self._lifecycle.count_batch(stats, updated.global_step)
        self._lifecycle.count_update(stats, updated, None if index is None else self._optimizers[index])
        heartbeat.training.enter(Phase.IDLE)
