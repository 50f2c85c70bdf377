"""Protocols of a gradient synchronisation that custom training loops can use."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias, runtime_checkable

from tutti.types.gradient_sync import GradientSync
from tutti.types.micro_batch import LossSums
from tutti.types.optimizer_protocols import NamedParameters
from tutti.types.step_records import StepContext, StepStats, UpdateResult

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

GradientPlace: TypeAlias = Literal["rank", "stages", "slices", "sliced_rows", "rows", "shards", "servers"]
"""Location of a complete gradient: ``rank`` on every rank, ``stages`` of a pipeline, ``slices`` of tensor parallelism,
``sliced_rows`` of sharded slices, ``rows`` of ZeRO stage 1, ``shards`` of FSDP2, or parameter ``servers``."""

SPLIT_OVER_MODEL: frozenset[GradientPlace] = frozenset({"stages", "slices", "sliced_rows"})
"""Locations where each rank of a replica has a part of the gradients."""


class CustomLoopSync(GradientSync, Protocol):
    """A ``GradientSync`` (reduces gradients and makes the update) that custom training loops can use.

    "Script" is the user's code, which computes losses and calls its optimizers itself.

    Attributes:
        gradient_at: location of the complete gradient after ``reduce_gradients``: ``rank`` (whole on this rank),
            ``stages`` (of each parameter on the ranks of its pipeline stage), ``slices`` (split over tensor ranks),
            ``sliced_rows`` (each slice in rows over ranks, which a script cannot edit), ``rows`` (in rows over ranks,
            which the model's ``.grad`` do not show), ``shards`` (in the model's DTensors) or ``servers`` (on parameter
            servers that ranks cannot read).
        by_worker: whether gradients are summed worker by worker (logical workers are fixed shares of the global batch)
            and not rank by rank.
        accumulated: whether the last ``add_gradients`` added gradients of earlier reductions to the new ones.
    """

    gradient_at: GradientPlace
    by_worker: bool
    accumulated: bool

    def begin_custom_loop(self) -> None:
        """Switch to custom training loops: make complete gradients visible in ``.grad`` from now on.

        A custom training loop is the script's own loop with forward, backward and update. Called on every rank before
        the first step of each such loop, and again where a loop in the body of another one has ended. The first call is
        collective under ``central_storage`` alone, whose data ranks allocate shared memory; other strategies and later
        calls send nothing. Complete gradients are those of the mean loss over the global batch. Where this
        rank has only a part of such a gradient, or none, as with parameter servers, ``add_gradients`` puts a
        placeholder into ``.grad``: a tensor with which the script computes as with the whole gradient.

        The call also changes a rule for buffers (batch-norm statistics), of which each logical worker, a fixed share of
        the global batch, has a copy of its own. On a rank that computes several workers, and until
        ``leave_custom_loop``, a buffer that the script writes after an update, and that forwards write too, takes the
        script's value in the copy of the rank's last worker only. Resets to zeros (ones for a variance), and writes to
        buffers that no forward writes, go to the copies of all workers.

        Raises:
            UsageError: under ``central_storage``, shared memory has too little room.
            PeerError: a rank is lost, or does not take part within the timeout.
        """

    def leave_custom_loop(self) -> None:
        """Leave the custom loop: have the next step refuse values that the script then writes into module buffers.

        Called after each epoch of the script's own loop, and where the script leaves the loop by ``break``. On a rank
        that computes several logical workers (fixed shares of the global batch), each has its own copy of buffers such
        as batch-norm statistics. Until the next ``begin_custom_loop``, a script's write to a buffer that forwards
        write, too, raises UsageError in the next step; within the loop the copy of the rank's last worker took it.
        Resets to zeros (ones for a variance), and writes to buffers that no forward writes, still go to the copies of
        all workers. Not collective.
        """

    def named_trained(self) -> NamedParameters:
        """Return names and objects of the trainable parameters of the script's model on this rank. Not collective.

        The objects are the parameters in the script's model: where the strategy shards, full parameters (ZeRO stage 1)
        or DTensors (FSDP2), and not the rows that the optimizer updates.

        Returns:
            A list with a pair (name, parameter) for each trainable parameter that this rank has, in the model's order
            unless the strategy shards. Parameters that the script has unfrozen and that are not yet sharded come last.
        """

    def script_parameters(self) -> Sequence[nn.Parameter]:
        """Return the trainable parameters as objects of the script's model, whose ``.grad`` the script uses.

        Where the strategy shards, these are full parameters (ZeRO stage 1) or DTensors (FSDP2), and not the rows that
        the optimizer updates.

        Returns:
            The parameters of the pairs (name, parameter) that ``named_trained`` returns, in the same order; without
            sharding this is the model's order.
        """

    def script_parameters_of(self, optimizer: Optimizer) -> list[nn.Parameter]:
        """Return the parameters of the script's model that one of the script's optimizers updates. Not collective.

        Args:
            optimizer: the optimizer; its parameter groups may hold shards in place of the model's parameters.

        Returns:
            A list of those of ``script_parameters`` to which the optimizer's groups belong, in that order.
        """

    def pop_gradients(self) -> dict[nn.Parameter, Tensor]:
        """Return the gradients that earlier reductions left in ``.grad``, and set every ``.grad`` to None.

        A custom training loop calls this method before the next backward, and ``add_gradients`` after it, to accumulate
        over several reductions. Gradients that the script has cleared are not returned. Not collective, except with
        synchronous parameter servers that hold sums of which no update was made: then all data ranks must call this
        together, read the sums, and tell the servers to drop them. With other parameter servers the sums stay on the
        servers, and the result is empty.

        Returns:
            The gradients, copies with FSDP2, by parameter object of the optimizer (with shards this rank's rows);
            parameters without a gradient are left out. With synchronous parameter servers a placeholder stands for a
            gradient that the script has zeroed in place.

        Raises:
            PeerError: a parameter server does not reply in time, or has ended.
        """

    def add_gradients(self, held: Mapping[nn.Parameter, Tensor]) -> None:
        """Add gradients of earlier reductions and those just reduced, and put the sums into ``.grad``.

        The sum is written into the earlier tensor, as autograd does; with FSDP2 it is a new one. Sets ``accumulated``.
        Collective with pipeline stages only: they all-gather which parameters have a gradient. Where this rank has only
        a part of a gradient (ZeRO stage 1 on several shards, tensor parallelism, pipeline stages), the model's
        ``.grad`` is afterwards a placeholder, with which the script computes as with the whole gradient; such a
        computation may be collective. With synchronous parameter servers a placeholder reads the sums from the servers.
        With other servers, and where slices of tensor ranks are sharded by rows further, a placeholder raises
        UsageError when it is read. The update uses the true gradients.

        Args:
            held: result of ``pop_gradients``: gradients by parameter object of the optimizer; may be empty.

        Raises:
            PeerError: a rank is lost, or does not take part within the timeout.
        """

    def trained_tensors(self) -> list[Tensor]:
        """Return the data of all trained parameters as this rank stores them.

        A custom training loop compares their sums before and after the loop body, to find parameters that the body has
        written.

        Returns:
            A detached tensor for each parameter that shares its memory: the full tensor, a slice (tensor parallelism)
            or this rank's rows (ZeRO stage 1, FSDP2). The order is that of ``script_parameters``. Each update changes
            the tensors: clone them to keep their values.
        """

    def pop_reached(self) -> list[bool]:
        """Return for each sharded parameter whether a backward gave it a gradient since the last call; reset the flags.

        A custom training loop calls this after the backward of each micro-batch but the last. It serves FSDP2, whose
        backward reduces gradients itself, so that the local ``.grad`` does not show which parameters got one.

        Returns:
            One flag for each trained parameter that is sharded, in the order of ``script_parameters``; always False for
            parameters that ZeRO stage 1 shards, whose ``.grad`` tells it. An empty list with strategies that do not
            shard.
        """

    def mark_reached(self, used: Sequence[bool]) -> None:
        """Mark trained parameters as reached by a backward on this rank, for the coming reduction of gradients.

        A custom training loop calls this before the backward of the rank's last micro-batch, with the flags of the
        earlier micro-batches of the same global batch. It serves FSDP2, whose backward reduces gradients itself; other
        strategies do nothing.

        Args:
            used: whether a backward gave the parameter a gradient, one flag for each trained parameter, as
                ``pop_reached`` returned them; False leaves a flag as it is.
        """

    def apply_clearing(self) -> None:
        """Clear the gradients of parameter shards where the script has cleared the full parameters' ``.grad``.

        For FSDP2, where the script sees the full, gathered parameters during a forward and the optimizer has shards. A
        shard's gradient becomes None or zeros, as the script has left the placeholder that ``show_gradients`` put into
        ``.grad`` of the full parameter. Called after a forward, and before each backward and update of a custom
        training loop; other strategies do nothing.
        """

    def show_gradients(self) -> None:
        """Set ``.grad`` of full parameters to placeholders, so that a script's clearing of them is noticed.

        For FSDP2, where the script sees the full, gathered parameters during a forward and gradients of earlier
        backward passes are in shards. A placeholder raises UsageError when it is read; ``apply_clearing`` finds out
        whether the script has cleared it. Called after a forward, and by a custom training loop after each backward and
        before each update; other strategies do nothing.
        """

    def apply_edits(self, edited: Collection[nn.Parameter]) -> None:
        """Make the coming update use the gradients as the script has edited them in ``.grad``, such as clipped ones.

        A custom training loop calls this right before ``optimizer_step``. If the optimizer updates other tensors than
        the script's parameters (shards), the gradients of these tensors are set to the script's. Nothing is sent: the
        caller has compared the edits over ranks.

        Args:
            edited: parameters of the update, as the script's model has them, whose ``.grad`` the script has edited or
                replaced by another tensor.

        Raises:
            UsageError: the script has cleared a gradient that parameter servers have added up already.
        """

    def on_zero_grad(self, optimizer: Optimizer, set_to_none: bool) -> None:
        """Clear the gradients that the script sees, after ``optimizer.zero_grad()`` has cleared those of the optimizer.

        Where an optimizer updates shards of the parameters, this clears ``.grad`` of the parameters that the script
        holds. Other strategies have nothing more to clear. Not collective.

        Args:
            optimizer: one of the script's optimizers.
            set_to_none: argument of ``zero_grad``: True sets ``.grad`` to None, False to zeros in place.
        """

    def norm_of(self, members: Sequence[nn.Parameter], step_context: StepContext) -> float:
        """Return the L2 norm of the complete gradients of some parameters together, for a script that clips them.

        Complete gradients are reduced over the global batch. All ranks among which the gradients are split must call
        it: an all-reduce over the shard ranks (FSDP2, ZeRO), and one over the stages and tensor ranks of a replica,
        where it has several. With synchronous parameter servers the call waits for the servers, and is not collective.
        Otherwise nothing is sent. Under local SGD in a step with updates of its own, the norm is that of this rank's
        logical worker.

        Args:
            members: the parameters, as objects of the script's model; those without a gradient count as 0.
            step_context: facts of the step, such as its number, which the ranks of a replica compare.

        Returns:
            The norm as a Python float, without loss scale; equal on all ranks, except where it is a worker's own.

        Raises:
            MismatchError: the ranks of a replica are in different steps.
            PeerError: a rank or a parameter server is lost, or does not take part within the timeout.
            ValueError: always with parameter servers that ranks cannot read, because the gradients are on the servers.
        """

    def stepping(self, index: int | None, members: Sequence[nn.Parameter]) -> AbstractContextManager[None]:
        """Return a context in which ``optimizer_step`` steps only one of the script's optimizers, or all of them.

        Args:
            index: position, from 0, of the optimizer in the list of optimizers that ``tutti.prepare`` got. None: within
                the context ``optimizer_step`` steps every optimizer of the script.
            members: the parameters that the optimizer at ``index`` updates, as objects of the script's model; the only
                ones whose gradients are clipped. Ignored where ``index`` is None.

        Returns:
            A context manager that yields nothing. Entering and leaving it send nothing. A custom training loop enters
            it for each ``step()`` that the script calls.
        """

    def clip_gradients(self, norm: float) -> float:
        """Scale the gradients, within ``stepping`` those of one optimizer, to at most the run's clipping norm.

        The gradients are scaled in place. Nothing changes in a run without a clipping norm. Not collective.

        Args:
            norm: L2 norm of these gradients of the whole model, equal on all ranks.

        Returns:
            The L2 norm of the gradients after the call: ``norm`` where nothing was scaled.

        Raises:
            ValueError: always with parameter servers, which clip the gradients themselves.
        """

    def steps_whole(self, optimizer: Optimizer) -> bool:
        """Return whether the script's optimizer object itself updates full parameters on this rank.

        Only then can its ``step`` call a closure (LBFGS); False where shards, servers or another rank make the update.

        Args:
            optimizer: one of the script's optimizers.
        """


@runtime_checkable
class LocalStepSync(CustomLoopSync, Protocol):
    """A ``CustomLoopSync`` where each logical worker makes updates of its own (local SGD), with one worker a rank.

    A logical worker is one of N fixed shares of the global batch. A custom training loop asks ``is_local_step`` in each
    step. Where it is True, the loop calls ``end_own``, ``reduce_losses`` and ``step_own`` in place of ``end_worker``,
    ``reduce_gradients`` and ``optimizer_step``.
    """

    def is_local_step(self, step_context: StepContext) -> bool:
        """Return whether each logical worker makes its own update in this step, with the gradient of its own samples.

        False in synchronous steps, with which a run may begin. Equal on all ranks; not collective.

        Args:
            step_context: the step under way.
        """

    def end_own(self, worker: int, part: LossSums | None) -> None:
        """Make ``.grad`` the gradient of the mean over a worker's own samples, and note its loss sums. Not collective.

        Divides ``.grad``, in which the worker's backwards have accumulated, in place by the worker's own count and the
        loss scale. Called after the worker's last backward in a step in which ``is_local_step`` is True, in place of
        ``end_worker`` and before ``step_own``.

        Args:
            worker: index of the logical worker.
            part: the worker's sums of loss, count and metrics; None if the worker has no samples in this step: then
                ``.grad`` stays as it is.
        """

    def reduce_losses(self, step_context: StepContext) -> StepStats:
        """Return loss, metrics and mean gradient norm over all logical workers, from the sums that ``end_own`` noted.

        Collective over the data ranks: an all-to-all and an all-gather of a few numbers a worker; blocks. Gradients are
        not exchanged. Called on every rank in each step in which ``is_local_step`` is True.

        Args:
            step_context: the step under way, whose number and batch size are compared over the ranks.

        Returns:
            A ``StepStats``, equal on all ranks: ``loss`` and ``metrics`` are means over the samples or tokens of all
            workers, ``grad_norm`` is the mean of the norms of the finite gradients, and ``finite`` is False where the
            gradient of any worker is not finite.

        Raises:
            MismatchError: ranks are in different steps, or make different calls.
            PeerError: a rank is lost, or does not take part within the timeout.
        """

    def step_own(self, step_context: StepContext) -> UpdateResult:
        """Clip the logical worker's gradient and step its optimizers; skip the update if the gradient is not finite.

        The gradient is the one that ``end_own`` has left in ``.grad``. By default all optimizers of the script step.
        Within the context ``stepping(index, members)``, which a custom training loop enters for the ``step()`` of one
        optimizer of the script, only the optimizer with this index steps, and only the gradients of ``members``, its
        parameters, are clipped and checked for NaN and infinity. Not collective.

        Args:
            step_context: the step under way, with the factor on the initial learning rates.

        Returns:
            An ``UpdateResult`` with ``updates`` 1, also for a skipped update, and ``in_sync`` False. ``skipped`` is
            True where this worker's update was skipped; then ``nonfinite`` has the names of at most three of its
            parameters whose gradient is not finite.
        """

    def end_step(self, step_context: StepContext) -> bool:
        """Average the logical workers' parameters if that is due after this step; all its updates have been made.

        Called on every rank after each step, synchronous steps included. The average is due after every H-th step of
        own updates, and then the call is collective over the data ranks: an all-to-all and an all-gather for each
        dtype, besides an all-gather of names where the model has frozen parameters. The means are written into the
        parameters in place; DiLoCo then makes its outer update. In other steps nothing is sent.

        Args:
            step_context: the step that ends; its number decides whether the average is due.

        Returns:
            Whether the parameters have been averaged, so that they are those of the whole run now.

        Raises:
            PeerError: a rank is lost, or does not take part within the timeout.
        """
