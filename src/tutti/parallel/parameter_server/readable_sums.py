"""Synchronous parameter servers whose sums a custom training loop reads, edits and accumulates, as in plain PyTorch.

A loop that does not look at ``.grad`` sends and receives what ``run.step`` does. ``.grad`` is a placeholder: the first
operation on it reads the summed gradients from the servers, on the rank that asks alone. Gradients that the script has
edited alike on all ranks are pushed again with the update, to each server by one rank. The servers make an update once
all ranks have asked for it. Until then ranks may read the sums, and a rank that alone has edited gradients is found.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NoReturn
from weakref import WeakMethod

import torch
from torch import Tensor, nn

from tutti.config.sync_config import ParameterServerConfig
from tutti.errors import UsageError
from tutti.nn.incomplete_gradient import is_zeroed
from tutti.nn.summed_gradient import GradientSums, SummedGradient
from tutti.parallel.ddp.gradient_arithmetic import accumulated, scale_all, squares_of
from tutti.parallel.normalisation import clipped, nonfinite_names
from tutti.parallel.parameter_server.request_handlers import NONE
from tutti.parallel.parameter_server.server_wire import APPLY, EDITED, SKIP, WAIT
from tutti.parallel.parameter_server.synchronous import SynchronousServerSync
from tutti.types.run_context import RunContext
from tutti.types.saved_state import SavedState
from tutti.types.step_records import StepContext, StepStats, UpdateResult


class ReadableServerSync(SynchronousServerSync):
    """Gradient synchronisation with synchronous parameter servers that wait for all ranks (``mode=sync``, no backup).

    Equal to ``SynchronousServerSync`` in ``run.step``. In a custom loop the script may read and edit the gradients,
    accumulate several, make several updates of a global batch, and have several optimizers.

    Args:
        config: options of the ``parameter_server`` strategy.
        run_context: communicators and settings of the run.

    Attributes:
        gradient_at: ``"servers"``; from the first custom loop on ``"rank"``, as every rank can read all gradients.
        accumulated: whether the latest ``add_gradients`` was given gradients that are not zeros.
    """

    def __init__(self, config: ParameterServerConfig, run_context: RunContext) -> None:
        super().__init__(config, run_context)
        # Sums that the servers hold for the script; whether the latest reduction's are not in ``.grad`` yet.
        self._sums: GradientSums | None = None
        self._is_new = self._is_by_script = False
        self._acts: int | None = None
        self._members: Sequence[nn.Parameter] = ()

    def begin_custom_loop(self) -> None:
        """Let the script read the summed gradients in ``.grad`` from now on, in custom training loops. Not collective.

        The call also changes the rule for the script's writes to buffers. Each logical worker, a fixed share of the
        global batch, has its own copy of buffers such as batch-norm statistics. The rule holds on a rank that computes
        several workers, for a buffer that forwards write, too, and that the script writes between an update and the
        next step. Until ``leave_custom_loop`` such a write goes to the copy of the rank's last worker; outside of
        custom loops it raises UsageError in the next step, unless it is a reset to zeros, or to ones for a variance.
        """
        super().begin_custom_loop()
        self.gradient_at = "rank"

    def begin_worker(self, worker: int, step_context: StepContext) -> None:
        """Put a logical worker's buffers into the model, before the worker's first micro-batch.

        If the servers still hold sums of gradients of an earlier batch that no update has used, the call first reads
        the sums that the script has not cleared into ``.grad``, and has the servers drop them. It is then collective
        over the data ranks, and blocks until all of them have asked the servers to drop the sums.

        Args:
            worker: index of the logical worker (fixed share of the global batch), one of this rank's.
            step_context: the step under way; kept until the next call.

        Raises:
            UsageError: since the last step the script has written a buffer that forwards write too, such as batch-norm
                statistics, and this rank computes several workers, each with its own value of the buffer; on an
                accelerator ``reduce_gradients`` raises this. Allowed are a reset to zeros, or to ones for a variance,
                and writes in a custom loop.
            PeerError: a server does not reply in time, or has ended.
        """
        self._keep_sums()
        super().begin_worker(worker, step_context)

    def reduce_gradients(self, step_context: StepContext) -> StepStats:
        """Push this rank's gradients to the servers, and wait until they have summed the gradients of all data ranks.

        All data ranks have to call this: the servers answer once they have the pushes of all of them. The summed
        gradients stay on the servers, which divide them by the global count; in a custom loop the caller then calls
        ``add_gradients``, after which the script can read them in ``.grad``.

        Args:
            step_context: the step under way, with its number and the loss scale that the gradients contain.

        Returns:
            A ``StepStats``, equal on all ranks: ``loss`` and ``metrics`` (by name), means over the global batch;
            ``count`` (samples or tokens); ``grad_norm``, the L2 norm of the whole gradient before clipping; ``finite``,
            whether this gradient is finite; and ``stop``, whether a rank asks to stop.

        Raises:
            UsageError: since the last update the script has written a parameter; or, on an accelerator, a buffer in the
                way that ``begin_worker`` refuses on a CPU.
            MismatchError: ranks are in different steps.
            PeerError: a server does not reply in time, or has ended.
        """
        stats = super().reduce_gradients(step_context)
        self._is_new = True
        return stats

    def pop_gradients(self) -> dict[nn.Parameter, Tensor]:
        """Return the gradients that earlier reductions left in ``.grad``, and set every ``.grad`` to None.

        The call reads from the servers the gradients that the script has not cleared and that no update has used; then
        the servers drop their sums. Where the servers hold sums, as after each ``run.backward`` without an update, the
        call is collective over the data ranks: it blocks until all have asked the servers to drop the sums.

        Returns:
            A dict from parameters to gradients, tensors on this rank that no later step changes. The value is a
            placeholder (``SummedGradient``) for a gradient that the script has set to zero, and for a gradient that an
            update has used before the script read it; the servers no longer have its values. Parameters without
            gradient have no entry.

        Raises:
            PeerError: a server does not reply in time, or has ended.
        """
        held: dict[nn.Parameter, Tensor] = {}
        for parameter in self._parameters:
            gradient = parameter.grad
            if isinstance(gradient, SummedGradient) and gradient.readable and not gradient.zeroed:
                gradient = gradient.value()
            if gradient is not None:
                held[parameter] = gradient
            parameter.grad = None
        self._drop_sums()
        return held

    def add_gradients(self, held: Mapping[nn.Parameter, Tensor]) -> None:
        """Set ``.grad`` to placeholders of the gradients just summed on the servers, and add earlier gradients.

        A placeholder (``SummedGradient``) reads the sums of all parameters from the servers when the script first uses
        its values. Called after ``reduce_gradients`` or, to restore gradients that were set aside, after
        ``pop_gradients``. If ``held`` has gradients to add, this call itself reads the sums. A placeholder in ``held``
        whose values the servers have dropped becomes the ``.grad``, because the sum with it cannot be computed. Not
        collective.

        Args:
            held: the earlier gradients by parameter, as ``pop_gradients`` returned them; it may be empty.

        Raises:
            UsageError: a gradient of ``held`` is to be added to one that an update has used already; the servers no
                longer have it.
            PeerError: a server does not reply in time, or has ended.
        """
        fresh, self._is_new = self._is_new, False
        if fresh:
            read = WeakMethod(self._read)
            self._sums = GradientSums(lambda: read()())  # type: ignore[misc]
            for index, (parameter, used) in enumerate(zip(self._parameters, self._pushes.used, strict=True)):
                parameter.grad = SummedGradient(parameter, self._sums, index) if used else None
        self.accumulated = not all(map(is_zeroed, held.values()))
        for parameter, before in held.items():
            added = parameter.grad
            if added is None:
                parameter.grad = torch.zeros_like(parameter) if fresh and is_zeroed(before) else before
            elif isinstance(before, SummedGradient):
                if not before.zeroed:
                    # The sum cannot be read either: a script such as a GAN's clears it before the next update.
                    parameter.grad = before
            else:
                parameter.grad = accumulated(before, self._value(parameter))

    def apply_edits(self, edited: Collection[nn.Parameter]) -> None:
        """Let the next ``optimizer_step`` use the gradients that the script has left in ``.grad``. Not collective.

        Called at the script's ``optimizer.step()``, before ``optimizer_step``. Without this call ``optimizer_step``
        uses the sums on the servers, as ``run.step`` does.

        Args:
            edited: unused; the update compares the gradients with those of the servers.
        """
        self._is_by_script = True

    def norm_of(self, members: Sequence[nn.Parameter], step_context: StepContext) -> float:
        """Return the L2 norm of the summed gradients of ``members`` together. Not collective.

        Called between a backward and the update. Where the script has edited none of these gradients, the servers have
        computed the norm, and the call waits for their replies; otherwise it is computed here, from ``.grad``. Equal on
        all ranks whose scripts have made the same edits.

        Args:
            members: some of the trained parameters; those without a gradient count as 0.
            step_context: unused.

        Raises:
            UsageError: an earlier update has used one of these gradients, and the script has neither read nor cleared
                it; the servers no longer have it.
            PeerError: a server does not reply in time, or has ended.
        """
        if self._untouched(members):
            squares = dict(zip(self._parameters, self._pushes.squares(), strict=True))
            return math.sqrt(sum(squares[parameter] for parameter in members))
        return math.sqrt(sum(squares_of(self._values(members))))

    @contextmanager
    def stepping(self, index: int | None, members: Sequence[nn.Parameter]) -> Iterator[None]:
        """Return a context in which ``optimizer_step`` has the servers step only one of the script's optimizers.

        Args:
            index: position of the optimizer among those of the script, from 0; None steps all of them.
            members: parameters of this optimizer, whose gradients the update uses; ignored where ``index`` is None.
        """
        self._acts, self._members = index, members
        try:
            yield
        finally:
            self._acts, self._members = None, ()

    def optimizer_step(self, stats: StepStats, step_context: StepContext) -> UpdateResult:
        """Have the servers make the update, and copy the new parameters into the model.

        In a custom loop (after ``apply_edits``) collective over the data ranks: the servers wait until all of them have
        asked for the update. If the script has edited gradients of the update, or the servers no longer hold their
        sums, one rank for each server first pushes the server's part of the gradients. Within ``stepping`` the servers
        step one of several optimizers; before that, this rank reads the gradients of the other optimizers into
        ``.grad``, because the servers drop all sums after an update. In ``run.step`` every rank makes the request, and
        there is no barrier.

        Args:
            stats: results of the reduction, with the norm of the gradients of the update.
            step_context: the step under way, with the factor on the initial learning rate.

        Returns:
            An ``UpdateResult``: ``updates`` is 1, or 0 if the gradient was not finite; then ``skipped`` is True, and
            ``nonfinite`` has the names of parameters whose gradient is not finite.

        Raises:
            UsageError: the script has written parameters since its backward; or it has changed an option of the
                optimizer that servers do not follow (they follow floats such as weight decay, not ``nesterov``); or an
                earlier update has used a gradient that this one needs, and the script has neither read nor cleared it.
            MismatchError: ranks make different calls, or only some of the ranks have edited gradients.
            PeerError: a rank is lost, or a server does not reply in time or has ended.
        """
        self._is_new = False
        if not self._is_by_script:
            return super().optimizer_step(stats, step_context)
        self._is_by_script = False
        self._guard.check_update(self._trained, f"step {step_context.local_step + 1}")
        members = self._parameters if self._acts is None else self._members
        factor, norm = clipped(stats.grad_norm, self._run_context.clip)
        settings = self._link.settings(step_context.lr_factor)
        untouched = self._untouched(members)
        if self._acts is not None:
            own = set(members)
            self._read_left([p for p in self._parameters if p not in own])
        names = self._pushes.nonfinite if untouched else ()
        if not untouched:
            values = {p: self._value(p) for p in members if p.grad is not None}
            names = tuple(nonfinite_names((n, values.get(p)) for n, p in self._trained))
            if stats.finite:
                scale_all(list(values.values()), factor)
                self._pushes.send_edited([values.get(p) for p in self._parameters], step_context)
        numbers = [factor if untouched else 1.0, norm, NONE if self._acts is None else self._acts, *settings]
        self._end_sums(
            f"update of the parameters in step {step_context.local_step + 1}",
            numbers if stats.finite else [0.0] * len(numbers),
            (0 if untouched else EDITED) | (0 if stats.finite else SKIP),
        )
        if stats.finite:
            self._take_update()
        return UpdateResult.joint(stats, () if stats.finite else names)

    def load(self, saved: SavedState) -> None:
        """Restore parameters and buffers on this rank, and parameters and optimizer state on the parameter servers.

        Collective over the data ranks: rank 0 sends parameters and state to the servers, and broadcasts whether the
        servers have loaded them, for which all ranks wait. Gradients that the script has left without an update are
        read from the servers into ``.grad`` first, and the servers drop their sums.

        Args:
            saved: the checkpoint, whose groups ``model``, ``optim`` and ``workers`` are read.

        Raises:
            CheckpointError: the checkpoint lacks a parameter or buffer, or a file of it differs from its manifest.
            UsageError: the saved optimizer state is larger than a server accepts.
            PeerError: a server does not reply in time, or has ended.
        """
        self._keep_sums()
        super().load(saved)

    # --- gradients of this rank ------------------------------------------------------------------------------------

    def _read(self) -> list[Tensor]:
        """Read the summed gradients from the servers, as new tensors on the parameters' device. Not collective."""
        self._pushes.read()
        pairs = zip(self._link.gradients, self._parameters, strict=True)
        return [gradient.to(parameter.device, copy=True) for gradient, parameter in pairs]

    def _untouched(self, members: Sequence[nn.Parameter]) -> bool:
        """Return whether ``.grad`` of ``members`` still refers to the gradients on the servers, without an edit."""
        if self._sums is None:
            return False
        used = dict(zip(self._parameters, self._pushes.used, strict=True))
        for parameter in members:
            gradient = parameter.grad
            if not isinstance(gradient, SummedGradient):
                if gradient is not None or used[parameter]:
                    return False
            elif not gradient.belongs_to(self._sums) or gradient.edited:
                return False
        return True

    def _value(self, parameter: nn.Parameter) -> Tensor:
        """Return the gradient of ``parameter``, which has one, read from the servers where it is not here."""
        gradient = parameter.grad
        if isinstance(gradient, SummedGradient):
            if not gradient.readable:
                self._refuse_used()
            return gradient.value()
        return gradient  # type: ignore[return-value]

    def _values(self, members: Sequence[nn.Parameter]) -> list[Tensor]:
        return [self._value(parameter) for parameter in members if parameter.grad is not None]

    def _read_left(self, members: Sequence[nn.Parameter]) -> None:
        """Read gradients that the servers are about to drop, of parameters in whose ``.grad`` the script left them."""
        for parameter in members:
            gradient = parameter.grad
            if isinstance(gradient, SummedGradient) and gradient.belongs_to(self._sums) and not gradient.zeroed:
                gradient.value()

    def _keep_sums(self) -> None:
        if self._sums is not None:
            self._read_left(self._parameters)
            self._drop_sums()

    def _drop_sums(self) -> None:
        """Have the servers drop their sums without an update, if they hold some. Collective then."""
        if self._sums is not None:
            text = f"end of a sum of gradients before step {self._step_context.local_step + 1}"
            self._end_sums(text, [0.0] * (3 + len(self._link.keys)), SKIP)

    def _end_sums(self, text: str, numbers: Sequence[float], flags: int) -> None:
        """Ask the servers for an update, or with SKIP to drop their sums; they act once all ranks have asked."""
        if self._sums is not None:
            self._sums.close()
            self._sums = None
        client, worker = self._link.client, self._run_context.mine[0]
        client.send(APPLY, worker, self._pushes.number, extras=numbers, flags=flags | WAIT)
        client.wait(text, self._link.comm.ranks, patient=True)
        self._pushes.number += 1

    def _refuse_used(self) -> NoReturn:
        raise UsageError(
            "gradients that are not cleared after an update cannot be combined with parameter servers",
            where=f"step {self._step_context.local_step + 1}",
            why="the servers have applied them and keep none, and the script adds the next ones to them",
            remedy="call optimizer.zero_grad() in every step, or take strategy='mirrored'",
        )
