"""The update in a custom training loop, where the script calls ``optimizer.step(closure)``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tutti.comm.stall import TellFailures
from tutti.config.strategy_choice import StrategyChoice
from tutti.errors import NonFiniteError, UsageError, script_line
from tutti.optim.mixing import calls_closure_once, unlike_one_closure
from tutti.parallel.normalisation import finite_by_norm, is_finite
from tutti.torch_compat import tensor_version
from tutti.train.custom_loop_gradients import CustomLoopGradients
from tutti.train.custom_loop_state import CustomLoopState
from tutti.train.custom_loop_update import CustomLoopUpdate
from tutti.types.micro_batch import MicroBatch
from tutti.types.step_records import StepStats, UpdateResult

if TYPE_CHECKING:
    from tutti.train.run import Run


class _NothingWritten(Exception):
    """Ends an optimizer's step before it has written parameters, because the gradient is not finite.

    Args:
        loss: what the closure returned.
    """

    def __init__(self, loss: Any) -> None:
        super().__init__()
        self.loss = loss


class ClosureUpdate:
    """Makes the updates of a custom training loop where the script gives its optimizer a closure.

    Args:
        run: the run to train.
        state: the global batch and body under way.
        gradients: the gradients of the global batch.
        update: makes updates without a closure.
        choice: the strategy.
    """

    def __init__(
        self,
        run: Run,
        state: CustomLoopState,
        gradients: CustomLoopGradients,
        update: CustomLoopUpdate,
        choice: StrategyChoice,
    ) -> None:
        self._run, self._lifecycle, self._choice = run, run.lifecycle, choice
        self._state, self._gradients, self._update = state, gradients, update
        self._sync, self._optimizers, self._bodies = run.gradient_sync, state.optimizers, state.bodies
        # By index of the optimizer why closures are refused, or None.
        self._refusals: dict[int, str | None] = {}

    @TellFailures()
    def step(self, index: int, closure: Callable[[], Any], plain: Callable[[Any], Any], replaced: bool = False) -> Any:
        """Update the parameters where the script calls ``optimizer.step(closure)`` in a custom loop over micro-batches.

        The optimizer's own step calls the closure as often as it needs (LBFGS several times). Each call reduces the
        gradients over the data ranks, which is collective, so that all of them must make equally many; under local SGD
        the first call alone is collective, and reduces losses. The optimizer gets the mean gradient over the global
        batch, clipped as the run clips. If each rank updates a part of the parameters, or the optimizer calls a closure
        once only, this method calls the closure itself, and then makes the update as ``CustomLoopUpdate.step``. If the
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
                the script; or for a reason for which ``CustomLoopUpdate.step`` raises.
            NonFiniteError: the gradient of a later call was not finite, and the optimizer has written it into the
                parameters; or too many updates in a row were skipped.
        """
        run, micro_batch = self._run, self._state.micro_batch_of_body("optimizer.step(closure)")
        if self._bodies.several:
            raise UsageError(
                "optimizer.step(closure) with several micro-batches a rank",
                why="a closure sees the samples of one micro-batch, and its optimizer asks for the loss of all",
                remedy=f"take as many workers as data ranks ({run.context.mesh.data_ranks}), and no micro_batch",
            )

        evaluations = _Evaluations(run, self._state, self._gradients, self._update, index, closure)
        optimizer = self._optimizers[index]
        whole = self._sync.steps_whole(optimizer)
        if not whole:
            self._check_closure(index, replaced)
        self._update.check_not_averaged()
        if not whole or self._state.void is not None or (calls_closure_once(optimizer) and not replaced):
            loss = evaluations.loss(micro_batch)
            self._update.step(index)
            return loss
        return self._step_whole(evaluations, micro_batch, plain)

    def _step_whole(self, evaluations: _Evaluations, micro_batch: MicroBatch, plain: Callable[[Any], Any]) -> Any:
        """Let an optimizer evaluate the closure as often as it asks, each time with the reduced and clipped gradient.

        Args:
            evaluations: evaluations of the closure.
            micro_batch: the micro-batch of the body.
            plain: the optimizer's own step, which takes a closure and returns its loss.

        Returns:
            The loss, as ``plain`` returns it.
        """
        run, is_local, index, found = self._run, self._state.batch.is_local_step, evaluations.index, evaluations.found
        self._update.stepped = True
        updated = UpdateResult(1, in_sync=not is_local)
        with self._lifecycle.updating():
            try:
                loss = plain(partial(evaluations.loss_with_gradient, micro_batch))
            except _NothingWritten as skipped:
                loss = skipped.loss
                updated = self._update.make_update(found[0], self._lifecycle.step_context)
            finally:
                self._gradients.evaluated_again = False
        finite = all(stats.finite for stats in found) or all(map(is_finite, evaluations.members))
        if not (updated.skipped or finite):
            raise NonFiniteError(
                f"{type(self._optimizers[index]).__name__} has written NaN or infinity into the parameters",
                where=f"step {run.global_step + 1}, {script_line()}",
                why="the gradient was not finite in a later evaluation of the closure, where a step can no longer be"
                " skipped",
                remedy="restore a checkpoint; lower the learning rate, clip the gradient (clip=1), or check the data",
            )
        # The loss and gradient before the update, as the optimizer returns them.
        stats = found[0] if found and not is_local else self._gradients.latest
        stats = stats or self._update.stats_for(evaluations.members, False)
        run.stats = self._gradients.latest = stats
        updated = replace(updated, skipped=updated.skipped or (is_local and not stats.finite))
        self._bodies.note("step", index)
        self._update.count_update(stats, updated, index)
        return loss

    def _check_closure(self, index: int, replaced: bool) -> None:
        """Raise UsageError for an optimizer that does more with a closure than to call it once before its update."""
        if replaced:
            self._refusals[index] = "its step is a function of the script"
        elif index not in self._refusals:
            self._refusals[index] = unlike_one_closure(self._optimizers[index])
        unlike = self._refusals[index]
        if unlike is not None:
            raise UsageError(
                f"optimizer.step(closure) of {type(self._optimizers[index]).__name__} cannot be combined with strategy"
                f" '{self._choice.name}'",
                where=f"step {self._run.global_step + 1}, {script_line()}",
                why=f"each rank updates a part of the parameters, and {unlike}",
                remedy="take strategy='mirrored', where each rank updates all parameters",
            )


class _Evaluations:
    """Evaluations of a closure in one step of an optimizer, each with a reduction of the gradients it computes.

    Args:
        run: the run to train.
        state: the global batch and body under way.
        gradients: the gradients of the global batch.
        update: takes the norm of the reduced gradients.
        index: index of the optimizer among those passed to ``tutti.prepare``.
        closure: the script's function.

    Attributes:
        index: as given.
        members: the optimizer's parameters, as objects of the script's model.
        found: results of the gradients of ``loss_with_gradient``, one for each call.
    """

    def __init__(
        self,
        run: Run,
        state: CustomLoopState,
        gradients: CustomLoopGradients,
        update: CustomLoopUpdate,
        index: int,
        closure: Callable[[], Any],
    ) -> None:
        self._sync, self._replica, self._lifecycle = run.gradient_sync, run.replica, run.lifecycle
        self._state, self._origin, self._gradients, self._update = state, state.origin, gradients, update
        self.index, self._closure = index, closure
        self.members = self._origin.members(index)
        self._versions = [tensor_version(parameter) for parameter in self.members]
        self.found: list[StepStats] = []

    def loss(self, micro_batch: MicroBatch) -> Any:
        """Call the closure and reduce the gradients that it leaves without ``run.backward``.

        Collective as ``run.backward``.

        Args:
            micro_batch: the micro-batch of the body.

        Returns:
            What the closure returns; a tensor is filled with the mean loss over the global batch.
        """
        with torch.enable_grad(), self._replica.script_code():
            loss = self._closure()
        members = self._origin.members(self.index)
        if self._origin.local(members):
            self._gradients.exchange_local(micro_batch)
        if self._state.batch.is_local_step:
            return loss
        if self._origin.edited(members):
            self._origin.check_edits()
        stats = self._gradients.latest
        return loss if stats is None or not isinstance(loss, Tensor) else torch.full_like(loss, stats.loss)

    def loss_with_gradient(self, micro_batch: MicroBatch) -> Any:
        """Return ``loss``, with the reduced gradient in ``.grad``, clipped as the run clips: the optimizer's closure.

        Args:
            micro_batch: the micro-batch of the body.

        Raises:
            _NothingWritten: the first gradient is not finite, and the optimizer has not written parameters.
        """
        self._gradients.evaluated_again = bool(self.found)
        loss = self.loss(micro_batch)
        edited = self._origin.edited(self.members)
        self._sync.apply_edits(edited)
        stats = self._update.stats_for(self.members, bool(edited))
        if self._state.batch.is_local_step:
            norm = self._sync.norm_of(self.members, self._lifecycle.step_context)
            stats = replace(stats.known(), grad_norm=norm, finite=finite_by_norm(norm))
        self.found.append(stats)
        if stats.finite:
            with self._sync.stepping(self.index, self.members):
                self._sync.clip_gradients(stats.grad_norm)
        elif len(self.found) == 1 and self._versions == [tensor_version(parameter) for parameter in self.members]:
            raise _NothingWritten(loss)
        return loss
