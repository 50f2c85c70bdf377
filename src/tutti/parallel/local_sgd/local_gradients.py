"""Gradients and updates in a custom training loop under local SGD: one logical worker a rank, with its own gradient."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

from torch import Tensor, nn
from torch.optim import Optimizer

from tutti.optim.several import acting, members_of
from tutti.parallel.ddp.gradient_arithmetic import accumulated, scale_all, squares_of
from tutti.parallel.ddp.optimizer_step import optimizer_step
from tutti.parallel.ddp.unsharded_gradients import TrainedGradients
from tutti.parallel.normalisation import clip_norm, finite_by_norm, nonfinite_names
from tutti.types.custom_loop_sync import GradientPlace
from tutti.types.run_context import RunContext
from tutti.types.step_records import StepContext, UpdateResult


class LocalGradients(TrainedGradients):
    """Mixin of ``LocalSGDSync``: ``.grad`` in custom training loops where each logical worker makes its own updates.

    For runs with one worker a rank; it implements methods of ``LocalStepSync``. The model on a rank and the script's
    optimizers belong to the rank's worker. After ``run.backward``, ``.grad`` is the whole gradient of the worker's own
    samples; it differs between workers, and the script may edit it.

    Attributes:
        gradient_at: ``"rank"``: this rank has the whole gradient.
        by_worker: always False: a rank has one worker.
        accumulated: whether the last ``add_gradients`` was given gradients of earlier calls.
    """

    gradient_at: GradientPlace = "rank"
    by_worker = accumulated = False
    _run_context: RunContext
    _optimizer_of: dict[int, Optimizer]
    _acting_on: Sequence[nn.Parameter] | None = None

    def pop_gradients(self) -> dict[nn.Parameter, Tensor]:
        """Return the gradients that earlier calls of ``run.backward`` left, and set every ``.grad`` to None.

        The gradients belong to this rank's logical worker. A custom training loop gives them to ``add_gradients`` after
        the next backward. Not collective.

        Returns:
            The gradients by parameter, not copied; parameters without a gradient are left out.
        """
        held = {p: p.grad for p in self.script_parameters() if p.grad is not None}
        for parameter in self.script_parameters():
            parameter.grad = None
        return held

    def add_gradients(self, held: Mapping[nn.Parameter, Tensor]) -> None:
        """Add the gradients just computed to the gradients of earlier calls of ``run.backward``, in place.

        Not collective. The ``.grad`` of a parameter with an earlier gradient is then the tensor of ``held`` itself, and
        has the sum, unless that is sparse and the new gradient dense. Sets the attribute ``accumulated`` to whether
        ``held`` has gradients.

        Args:
            held: the earlier gradients by parameter, as ``pop_gradients`` returned them; it may be empty.
        """
        self.accumulated = bool(held)
        for parameter, before in held.items():
            parameter.grad = accumulated(before, parameter.grad)

    def apply_edits(self, edited: Collection[nn.Parameter]) -> None:
        """Do nothing: in local SGD the script edits the ``.grad`` that its logical worker's update uses.

        Args:
            edited: unused.
        """

    def norm_of(self, members: Sequence[nn.Parameter], step_context: StepContext) -> float:
        """Return the L2 norm of the present gradients of ``members`` together, on this rank. Not collective.

        Args:
            members: some of the model's parameters; those without a gradient count as 0.
            step_context: unused.
        """
        return math.sqrt(sum(squares_of([p.grad for p in members if p.grad is not None])))

    @contextmanager
    def stepping(self, index: int | None, members: Sequence[nn.Parameter]) -> Iterator[None]:
        """Return a context in which an update steps one of the script's optimizers and clips its gradients alone.

        Within it, ``step_own`` steps only this optimizer, and ``clip_gradients`` scales only the gradients of its
        parameters. Not collective.

        Args:
            index: position of the optimizer among those of the script, from 0; None steps all of them.
            members: parameters of this optimizer; only their gradients are clipped, and searched for non-finite values.
        """
        with ExitStack() as stack:
            for optimizer in self._optimizer_of.values():
                stack.enter_context(acting(optimizer, index))
            self._acting_on = members
            try:
                yield
            finally:
                self._acting_on = None

    def clip_gradients(self, norm: float) -> float:
        """Scale the gradients in place, so that their norm is at most the run's clipping norm.

        Within ``stepping`` only the gradients of one optimizer are scaled. Not collective. Does nothing in a run
        without a clipping norm.

        Args:
            norm: L2 norm of these gradients.

        Returns:
            The norm afterwards: ``norm`` where nothing is scaled.
        """
        members = self.script_parameters() if self._acting_on is None else self._acting_on
        gradients = [p.grad for p in members if p.grad is not None]
        return clip_norm(norm, self._run_context.clip, partial(scale_all, gradients))

    def steps_whole(self, optimizer: Optimizer) -> bool:
        """Return whether an optimizer is one of this rank's logical worker, whose parameters are whole on this rank.

        Where the result is True, ``optimizer.step(closure)`` may call the closure several times, as LBFGS does. True
        for the script's own optimizers.

        Args:
            optimizer: any optimizer.
        """
        return any(optimizer is own for each in self._optimizer_of.values() for own in members_of(each))

    def step_own(self, step_context: StepContext) -> UpdateResult:
        """Clip this worker's own gradient and step its optimizer; skip the update where the gradient is not finite.

        A worker is a logical worker, one of N fixed shares of the global batch. Within ``stepping`` only the chosen
        optimizer steps, and its gradients alone are clipped. Not collective.

        Args:
            step_context: the step under way, whose ``lr_factor`` multiplies the optimizers' initial learning rates.

        Returns:
            An ``UpdateResult`` with ``updates`` 1, also for a skipped update, and ``in_sync`` False; ``skipped`` says
            whether the update was skipped, and then ``nonfinite`` has the names of up to three of this worker's
            parameters with a non-finite gradient.
        """
        members = self.script_parameters() if self._acting_on is None else self._acting_on
        norm = self.norm_of(members, step_context)
        if not finite_by_norm(norm):
            names = nonfinite_names((name, p.grad) for name, p in self.named_trained())
            return UpdateResult(1, skipped=True, nonfinite=tuple(names[:3]), in_sync=False)
        norm = self.clip_gradients(norm)
        for optimizer in self._optimizer_of.values():
            optimizer_step(optimizer, step_context.lr_factor, norm)
        return UpdateResult(1, in_sync=False)
