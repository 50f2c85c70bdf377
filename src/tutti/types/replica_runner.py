"""Protocols of a model layout: it splits a replica over ranks, whose parts run forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from tutti.types.micro_batch import LossFn, LossSums, MicroBatch
from tutti.types.shard_spec import ShardSpec

if TYPE_CHECKING:
    from torch import Tensor, nn

    from tutti.comm.communicator import Communicator


class GradientReadyHook(Protocol):
    """Receiver (protocol) of a model replica's gradients as backward produces them.

    A ``GradientSync`` implements it, and may start the reduction of gradients over the data ranks while backward goes
    on. No method waits for other ranks.
    """

    def prepare_for_backward(self, part: LossSums | None) -> None:
        """Announce the backward of a logical worker's last micro-batch, after which its gradients are complete.

        The replica calls it right before that backward. With all-reduced gradients (DDP), calls of ``gradient_ready``
        after the announcement for the rank's last worker start all-reduces over the data ranks; other strategies start
        none. Where several ranks compute micro-batches of one worker, this rank starts to send the worker's buffers to
        the next of them. Does not block. A logical worker is one of N fixed shares of the global batch, of which a rank
        may compute several.

        Args:
            part: sums of loss, count and metrics over the worker's micro-batches of this step, including the one whose
                backward begins; None where this rank does not compute the loss.

        Raises:
            UsageError: several ranks compute micro-batches of the worker, and a forward has changed a buffer (outside
                reproducible mode: other than batch-norm statistics), either with FSDP2 or after a first step in which
                no forward changed a buffer.
        """

    def gradient_ready(self, parameter: Tensor) -> None:
        """Receive a parameter whose gradient a backward has accumulated into ``parameter.grad``.

        The gradient is the sum over the micro-batches whose backwards have run since ``.grad`` was None. In the
        backward of the rank's last micro-batch of a step, a strategy that all-reduces gradients may start the
        all-reduce of a bucket, over the data ranks, without waiting for it; ``parameter.grad`` must not be written from
        then on until ``GradientSync.reduce_gradients`` has returned. Other strategies do nothing. The signature is that
        of a hook of ``register_post_accumulate_grad_hook``.

        Args:
            parameter: the parameter whose gradient is ready.
        """


class SilentHook:
    """Gradient-ready hook that does nothing: gradients are read from ``.grad`` after the backward.

    For strategies whose logical workers step optimizers of their own, or push gradients to servers, in ``end_worker``;
    and for all strategies in steps whose gradient noise is measured, part by part.
    """

    def prepare_for_backward(self, part: LossSums | None) -> None:
        """Do nothing at the announcement of a logical worker's last backward, as no reduction starts during it.

        Args:
            part: unused.
        """

    def gradient_ready(self, parameter: Tensor) -> None:
        """Do nothing when a backward has accumulated a gradient: it is read from ``.grad`` after the backward.

        Args:
            parameter: unused.
        """


class EditRecords(Protocol):
    """Records, on one rank, of the script's calls of PyTorch that wrote parameters or gradients split over ranks."""

    @property
    def line(self) -> str:
        """Place in the script of the latest recorded edit on this rank, as ``FILE:LINE`` ("the script" if none)."""
        ...

    def lines(self, named: Iterable[tuple[str, Tensor]]) -> list[str]:
        """Return a line of text for each of these tensors that the script has edited. Not collective.

        A line such as ``weight: mul(0.5) #1f3a`` has the tensor's name, the last call that edited it, and a hash of all
        these calls. Ranks that have made the same edits have equal lines, which the caller compares. The records stay.

        Args:
            named: (name, tensor) pairs, such as gradients; tensors without an edit get no line.
        """
        ...

    def forget(self, tensors: Iterable[Tensor]) -> None:
        """Delete the records of the script's edits of tensors, as tutti has given them new values. Not collective.

        Args:
            tensors: the tensors, such as gradients that have just been reduced.
        """
        ...

    def take(self) -> list[str]:
        """Return a line of text for each parameter that the script has written since the previous call of ``take``.

        Each line has the form that ``lines`` describes; the list is empty without writes. Deletes the records of these
        writes. Not collective: the lines are equal on all ranks whose scripts have made the same writes, so that the
        caller can compare them.
        """
        ...


class ReplicaRunner(Protocol):
    """This rank's part of a replica of the model (protocol), which runs its forward and backward.

    The replica may span pipeline stages and tensor ranks.

    Attributes:
        parts: modules on this rank: the whole model, or one for each virtual pipeline stage.
        specs: position in the full tensor of every parameter and persistent buffer on this rank, by its name in the
            unsplit model.
        not_owned: names of tensors on this rank of which another rank of this replica owns the copy that is counted in
            norms and saved. If the owner has it under another name, that name is among ``tied`` in ``specs``.
        summary: lines for the run's header, text by label.
        sharded: parameters of which this rank keeps only rows (FSDP), as plain tensors. A forward all-gathers them over
            the shard ranks, so that all of these ranks must run equally many forwards.
        swap_values: context manager within which the model holds other values, given by name.
        around_fsdp_hooks: context manager around FSDP2's registration of its hooks on a module, which unwraps tensors
            that these hooks do not know.
        unify_flags: copies the ``requires_grad`` that the script has set on one of the objects that stand for a
            parameter to the others (FSDP).
        replaced_name: returns the name of a parameter in whose place the script has put another object (FSDP), or None.
        slice_name: returns the name of the parameter from whose tensor-parallel slice the script has made a tensor,
            element by element, or None.
        also_seen: ``also_seen({new: old})`` registers further objects that stand for parameters, such as FSDP2's, so
            that ``slice_name`` knows them.
        adapt_hooks: lets hooks that the script has registered on the gradients of parameters of which this rank has a
            part see whole gradients; returns the names of the parameters with hooks that did not before the call.
        is_dummy: whether the micro-batch that ``run`` or ``begin`` began most recently is a dummy, without samples.
        script_code: context manager around the script's own code, in which reads and writes of parameters that would
            give each rank another result raise UsageError.
        model_code: context manager within ``script_code``, around code of which reads and writes are not checked.
        plain: the module that a custom training loop calls: the whole model, also where this rank has a part of it.
        own_backward: whether ``run`` makes the backward of each micro-batch by a call of this object's method
            ``backward``, right after its forward; False where a pipeline schedule interleaves the micro-batches.
        edits: records of the script's edits of parameters and gradients of which each rank has a part; None without
            such parameters.
        passes: one ``StagePasses`` for each model that is cut into pipeline stages: it runs the calls of the model
            through the stages; otherwise empty.
        split_backwards: for each virtual stage of a zero-bubble schedule its input backward and weight backward;
            otherwise empty.
        bubble: idle fraction, 0 to 1, of the ranks' time in the pipeline schedule of the last training step, for equal
            stages and backwards of twice a forward; None without pipeline stages, and before the first step.
        draws: the model's RNG streams on this rank (``RngStreams``), whose properties ``moment`` and ``state`` hold
            their position and the device generator's state.
        around_stage: context manager around the forward of a virtual pipeline stage; called with the stage's number and
            the tensors that it is given. Its value is called with the stage's results, and raises UsageError where they
            depend on another logical worker's micro-batch.
    """

    plain: nn.Module
    own_backward: bool
    parts: Sequence[nn.Module]
    specs: Mapping[str, ShardSpec]
    not_owned: Collection[str]
    summary: Mapping[str, str]
    sharded: Mapping[str, Tensor]
    swap_values: Callable[[Mapping[str, Tensor]], AbstractContextManager[None]]
    around_fsdp_hooks: Callable[[nn.Module], AbstractContextManager[None]]
    unify_flags: Callable[[], None]
    replaced_name: Callable[[], str | None]
    slice_name: Callable[[Tensor], str | None]
    also_seen: Callable[[Mapping[nn.Parameter, nn.Parameter]], None]
    adapt_hooks: Callable[[], Sequence[str]]
    is_dummy: bool
    script_code: Callable[[], AbstractContextManager[None]]
    model_code: Callable[[], AbstractContextManager[None]]
    edits: EditRecords | None
    passes: Sequence[Any]
    split_backwards: Sequence[Any]
    bubble: float | None
    draws: Any
    around_stage: Callable[[int, Any], AbstractContextManager[Callable[[Any], None]]]

    @property
    def stage_copies(self) -> Sequence[tuple[Communicator, Sequence[nn.Parameter]]]:
        """Trained parameters on this rank of which other pipeline stages of the replica hold copies (tied weights).

        Pairs: a communicator over the stages' ranks that hold the same parameters, and these parameters, in an order
        equal on all of these ranks. Empty without such parameters.
        """
        ...

    def connect(self, grad_hook: GradientReadyHook) -> None:
        """Register the gradient-ready hook that is called for each gradient of the model's parameters on this rank.

        A ``GradientSync`` that starts to reduce gradients while backward goes on calls this when the run is prepared,
        and again when parameters are unfrozen; the new hook replaces the one of the call before. Not collective.

        Args:
            grad_hook: receiver, whose ``gradient_ready(parameter)`` is called each time that a backward has accumulated
                a gradient in ``parameter.grad``.
        """

    def replaced(self, by: Mapping[nn.Parameter, nn.Parameter]) -> None:
        """Replace parameter objects in the runner's own records, after sharding has given the modules new ones.

        ``GradientSync`` calls this method. A runner without such records does nothing; a pipeline's has some. Not
        collective.

        Args:
            by: maps each ``nn.Parameter`` of this rank's modules that was replaced to the object in its place.
        """

    def run(self, micro_batches: Sequence[MicroBatch], loss: LossFn, grad_hook: GradientReadyHook | None) -> LossSums:
        """Run the forward of one logical worker's micro-batches and, with ``grad_hook``, their backward.

        A training step calls this once for each logical worker of the rank (one of N fixed shares of the global batch),
        an evaluation for each batch of held-out samples. Gradients of all micro-batches add up in the parameters'
        ``.grad``. The messages between ranks depend on the layout. With pipeline stages: point-to-point messages
        between neighbouring stages, sums of the gradients of tied weights over the stages that have them, and a
        broadcast of the loss sums from the last stage. With tensor parallelism: the collectives of the split layers,
        over the tensor ranks. With FSDP2: all-gathers of parameters in forward and backward and reduce-scatters of
        gradients in backward, over the shard ranks. A whole, unsharded model sends nothing but what ``grad_hook``
        starts.

        Args:
            micro_batches: this rank's micro-batches of the worker in one step, in order.
            loss: the user's loss function ``loss(model, batch)``, which returns a mean, ``(sum, count)`` or ``(sum,
                count, metric_sums)``.
            grad_hook: its ``prepare_for_backward`` is called before the worker's last backward; gradients are reported
                to the hook that ``connect`` registered. None runs forwards only, without gradients.

        Returns:
            A ``LossSums`` over the micro-batches, on every rank of the replica: ``sums``, a float tensor ``[loss sum,
            count, *metric sums]``, with the metrics' ``names`` and the number of ``samples``.

        Raises:
            UsageError: the loss has an unknown form, requires no gradient although ``grad_hook`` is given, or cannot be
                added up over micro-batches; or ``loss`` reads split parameters as if they were whole, or calls a model
                in pipeline stages otherwise than the stages can compute it.
            ValueError: ``micro_batches`` is empty.
            PeerError: a rank with which this one exchanges messages is lost or late.
        """

    def evaluating(self, values: Mapping[str, Tensor]) -> AbstractContextManager[None]:
        """Return a context manager within which this rank's part of the model evaluates with the given tensors.

        ``run.evaluate`` and ``run.predict`` use it with weights merged over logical workers, or averaged over updates
        (EMA). Within the block the modules hold the tensors of ``values`` as parameters and buffers, are in eval mode,
        and autograd is off (``torch.no_grad``). On exit the modules get their own tensors and their training modes
        back. Not collective.

        Args:
            values: tensors by the name that the parameter or buffer has in the model before it is split over ranks; a
                tensor that is split is this rank's slice. Parameters and buffers that are not named keep their tensors.
        """


class CustomLoopRunner(ReplicaRunner, Protocol):
    """A replica of the model, a single module, whose forward a custom training loop may call.

    A custom training loop is the user's own loop over batches, which computes the loss and calls ``run.backward`` and
    ``optimizer.step`` itself.
    """

    def begin(self, micro_batch: MicroBatch) -> None:
        """Seed the random generators for a micro-batch, before the script's loop body runs on it.

        ``run.microbatches`` calls this before it yields the micro-batch's samples. The seed is ``micro_batch.key``, so
        that draws such as dropout do not depend on the rank. For a dummy micro-batch the model also gets copies of its
        buffers, which ``forget`` and ``backward`` undo. Not collective.

        Args:
            micro_batch: the micro-batch on which the script's loop body runs next.
        """

    def backward(
        self,
        result: Any,
        micro_batch: MicroBatch,
        before: LossSums | None,
        grad_hook: GradientReadyHook,
        retain_graph: bool = False,
    ) -> LossSums:
        """Run the backward of one micro-batch from the loss that the script computed; gradients add up in ``.grad``.

        ``run.backward(loss)`` of a custom training loop calls this. A worker is a logical worker, one of N fixed shares
        of the global batch, which is cut into micro-batches. With pipeline stages all stages compute the backward
        together, with point-to-point messages and broadcasts over the stages of the replica; with FSDP2 the backward
        reduce-scatters gradients over the shard ranks; otherwise only ``grad_hook`` starts messages.

        Args:
            result: the loss that the script computed: a mean, ``(sum, count)`` or ``(sum, count, metric_sums)``.
            micro_batch: the micro-batch that was last passed to ``begin``, from which the loss was computed.
            before: loss sums of the worker's earlier micro-batches in this step; None at its first.
            grad_hook: its ``prepare_for_backward`` is called before the backward of the worker's last micro-batch;
                gradients are reported to the hook that ``connect`` registered.
            retain_graph: keep the graph for another backward, as in PyTorch.

        Returns:
            A ``LossSums`` of the worker's micro-batches including this one: ``sums`` is the float tensor ``[loss sum,
            count, *metric sums]``. A dummy micro-batch, which has no samples, adds zero.

        Raises:
            UsageError: the loss has an unknown form or requires no gradient, or cannot be added up over micro-batches.
            PeerError: a rank with which this one exchanges messages is lost or late.
        """

    def forget(self) -> None:
        """Undo a dummy micro-batch, which has no samples: restore the model's buffers, and set ``.grad`` to None.

        With FSDP2 the gradients stay, as the dummy may follow micro-batches with samples, to whose gradients it adds
        zero. Buffers of ``SyncBatchNorm`` keep their new values, which are equal on all ranks. Not collective.
        """


class ModelLayout(Protocol):
    """Protocol of the part of a strategy that splits one replica of the model over ranks.

    For example it cuts the model into pipeline stages, or splits layers over tensor ranks.
    """

    def build(self, plain: nn.Module) -> CustomLoopRunner:
        """Split a model over the ranks of a replica, in place, and return this rank's part.

        ``tutti.prepare`` calls this once, before ``GradientSync.attach``. A layout without stages and slices moves the
        model to this rank's device and sends nothing. Pipeline stages are cut collectively over all ranks, which
        compare their models; tensor slices over the tensor ranks, to which the first of them broadcasts plan and
        values. ``torch.compile`` and activation checkpointing are applied here, where the run asks for them.

        Args:
            plain: the script's model with all parameters, of the same structure on every rank; it is changed.

        Returns:
            The runner, whose ``run`` computes forward and backward of micro-batches on this rank, and whose ``specs``
            say which tensors, or slices of tensors, the rank holds.

        Raises:
            MismatchError: the ranks have built models with different parameters or buffers, where the layout compares
                them.
            UsageError: the model cannot be split by the strategy's options, or activation checkpointing or
                ``torch.compile`` cannot be applied.
            PeerError: where the layout is collective, a rank has ended, or did not make the call in time.
        """
