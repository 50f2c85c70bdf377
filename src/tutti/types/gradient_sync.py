"""Protocol of gradient synchronisation: it reduces gradients over replicas and makes the optimizer's update."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from tutti.types.micro_batch import LossSums
from tutti.types.optimizer_protocols import OptimizerFactory
from tutti.types.replica_runner import GradientReadyHook, ReplicaRunner
from tutti.types.saved_state import SavedState
from tutti.types.shard_spec import TensorSlice
from tutti.types.step_records import StepContext, StepStats, UpdateResult

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer


class UpdatedSlice(NamedTuple):
    """A parameter, or a slice of one, that this rank alone updates.

    Attributes:
        name: name of the parameter in the model.
        tensor: parameter of the optimizer, whose ``.grad`` has the gradient of the global batch after the reduction.
        placed: function from a tensor of the shape of ``tensor`` to the tensor with its position in the whole one; None
            for a tensor without elements.
    """

    name: str
    tensor: nn.Parameter
    placed: Callable[[Tensor], Tensor | TensorSlice | None]


@dataclass(frozen=True)
class OwnGradients:
    """This rank's own gradients before the reduction over data ranks, for the gradient noise scale.

    Where ``optimizers`` or ``optimizer_of`` have second moments (Adam's), the noise of the preconditioned gradient is
    estimated as well, otherwise only that of the plain gradient.

    Attributes:
        parameters: trained parameters whose ``.grad`` accumulates this rank's micro-batches, and which this rank counts
            in the gradient's norm.
        take_squares: function without arguments for gradients that backward itself reduces (FSDP2): returns the sum of
            squares of this rank's gradients as they were before that reduction, over the backwards since the last call,
            and resets it. None where backward reduces none.
        optimizers: the optimizers that have the state of ``parameters``, in full, or of ``slices`` on this rank; empty
            where that state is on servers or in host memory.
        names: names of ``parameters`` in the model, in the same order; empty without ``slices``.
        slices: function without arguments, not collective, that returns the parameters, or slices of them, that this
            rank alone updates (ZeRO stage 1, central storage); those of all ranks together are ``parameters``. None
            where every rank updates all of its parameters.
        optimizer_of: in place of ``optimizers`` where each logical worker (share of the global batch) updates
            parameters of its own on this rank (local SGD): index of the worker → its optimizer. Empty where all workers
            make one update together, or servers make the updates.
        equal_before: function from a step's number, from 0, to whether all workers have equal parameters before that
            step; for strategies where they do before some steps only (local SGD), otherwise None.
    """

    parameters: Sequence[nn.Parameter]
    take_squares: Callable[[], float] | None = None
    optimizers: Sequence[Optimizer] = ()
    names: Sequence[str] = ()
    slices: Callable[[], Sequence[UpdatedSlice]] | None = None
    optimizer_of: Mapping[int, Optimizer] = field(default_factory=dict)
    equal_before: Callable[[int], bool] | None = None


class GradientSync(Protocol):
    """Protocol of the part of a strategy that reduces gradients over replicas and makes the optimizer's update.

    Attributes:
        loss_normalisation: the number by which backward divides losses: ``step``, the samples of the global batch;
            ``worker``, the samples of each logical worker (fixed share of the global batch), which then makes updates
            of its own.
        shares_parameters: whether other ranks write into the memory of this rank's parameters.
        optimizers: the optimizers over this rank's parameters.
    """

    loss_normalisation: Literal["step", "worker"]
    """Samples over which a gradient is the mean: "step" the global batch, "worker" the worker's share of it."""

    shares_parameters: bool
    """Whether other ranks write into the memory of this rank's parameters (``central_storage`` on a CPU)."""

    optimizers: Sequence[Optimizer]

    def attach(self, replica: ReplicaRunner, make_optimizer: OptimizerFactory) -> GradientReadyHook:
        """Build the optimizer over this rank's part of the model, and make all data ranks start from one state.

        ``tutti.prepare`` calls this once, after ``ModelLayout.build``. Collective over the data ranks: an all-gather of
        digests verifies that they hold models with the same names, shapes, dtypes and ``requires_grad``, and broadcasts
        give them data rank 0's parameters and buffers. Further: sharding (FSDP2, ZeRO) replaces parameters of the model
        by new objects; ``central_storage`` moves them into shared memory; parameter servers are started or joined.

        Args:
            replica: this rank's part of the model; its parameters and buffers are overwritten or replaced in place.
            make_optimizer: builds the optimizer over a list of (name, parameter), or returns None where this rank has
                nothing to train. Local SGD calls it once for each logical worker of the rank, other strategies once;
                ``adopt`` and ``reattach`` may call it again.

        Returns:
            The receiver of gradients for ``replica.connect`` and ``replica.run``: its ``gradient_ready(parameter)`` is
            called for each gradient that a backward has accumulated.

        Raises:
            MismatchError: the data ranks hold models with different parameters or buffers.
            UsageError: the strategy cannot step the optimizer on this rank's part of the model, cannot shard or share
                its parameters, or cannot start or join parameter servers.
            ValueError: with parameter servers, no parameter is trained.
            PeerError: a rank or a parameter server is lost, or does not take part within the timeout.
        """

    def begin_worker(self, worker: int, step_context: StepContext) -> None:
        """Load a logical worker's own state into the model before the worker's micro-batches run.

        A training step calls this for each logical worker of this rank, one of N fixed shares of the global batch, in
        turn. The state is the worker's buffers, such as batch-norm statistics, and its parameters where workers differ
        (local SGD, asynchronous servers). The call blocks in four cases only. Where several data ranks share a worker,
        it receives the worker's buffers from the rank before. With ZeRO stage 1, if the script has written its rows of
        parameters since the last update (which it must then do on all shard ranks), the first call of a step
        all-gathers the parameters over these ranks. With synchronous servers that hold sums of gradients of which no
        update was made, all data ranks meet and tell the servers to drop the sums. With asynchronous servers of mode
        ``bounded``, it waits for workers that are too many steps behind.

        Args:
            worker: index of the logical worker, one of those of this rank.
            step_context: facts of the step, such as its number and loss scale; kept for the calls that end the step.

        Raises:
            UsageError: since the last update the script has written a parameter or buffer of which each worker has its
                own value, and the strategy cannot tell for which worker the write is meant; or, where ranks share a
                worker, any buffer.
            PeerError: a parameter server does not reply in time, or has ended.
        """

    def end_worker(self, worker: int, part: LossSums | None) -> None:
        """Collect a logical worker's gradients and loss sums for the reduction, after its last micro-batch of the step.

        A training step calls this for each logical worker of this rank, one of N fixed shares of the global batch. With
        most strategies the loss sums are added to the rank's, gradients stay in ``.grad``, and nothing is sent. Where
        gradients are summed worker by worker (reproducible mode, AdaScale), the worker's gradients go to a summation
        tree, and ``.grad`` becomes None. Where workers train parameters of their own, this makes the worker's update in
        place of ``optimizer_step``, without other data ranks, and sets ``.grad`` to None: local SGD steps the worker's
        optimizer, with asynchronous servers the gradient is pushed and the call waits for the servers' reply.
        Synchronous servers may receive the gradient here as well.

        Args:
            worker: index of the logical worker, that of the last ``begin_worker``.
            part: the worker's sums of loss, count and metrics in this step; None if it had no samples on this rank.

        Raises:
            PeerError: a parameter server does not reply in time, or has ended.
            UsageError: with parameter servers, the script has changed an option of its optimizer that is not sent to
                the servers, such as ``nesterov``; or a gradient is sparse in a form that the strategy cannot sum.
        """

    def reduce_gradients(self, step_context: StepContext) -> StepStats:
        """Complete the reduction of this step's gradients over ranks; return the reduced loss and metrics.

        Called after the last ``end_worker`` of the step. Afterwards ``.grad`` is the mean over the global batch,
        without loss scale and not yet clipped; with these exceptions: ranks with shards have their rows of it,
        parameter servers keep it, under ``central_storage`` a rank has only those of the parameters that it updates
        (all of them in a custom training loop), and where logical workers (shares of the global batch) make updates of
        their own there is none.

        Collective over the data ranks, for which it waits: all-reduces (data parallelism; a reduction in shared memory
        under ``central_storage``), reduce-scatters over the shard ranks and all-reduces over their copies (FSDP2,
        ZeRO), or a sum of the workers' losses by an all-to-all and an all-gather (local SGD), which in every H-th step
        also averages parameters. The gradient norm takes an all-reduce over the stages and tensor ranks of a replica.
        Synchronous parameter servers: waits for the servers' sums. Asynchronous ones: sends nothing and waits for
        nothing.

        Args:
            step_context: facts of the step, such as its number and loss scale; the ranks compare its number, batch size
                and settings.

        Returns:
            A ``StepStats`` of Python numbers, equal on all data ranks except with asynchronous servers: ``loss`` and
            ``metrics`` (by name), means over the global batch; ``count`` (samples or tokens); ``grad_norm``, the L2
            norm of the whole gradient before clipping (of workers with updates of their own the mean of their norms);
            ``finite``, whether all gradients are; and ``stop``, whether a rank asks all ranks to stop after this step.

        Raises:
            MismatchError: ranks are in different steps, or their settings differ.
            UsageError: between the previous update and this call, the script has written parameters that are shared,
                sharded or on servers (``central_storage``, FSDP2, ZeRO stage 1, synchronous servers), or a buffer of
                which each logical worker has its own value; or its edits of parameters that are split over ranks differ
                between these.
            PeerError: a rank or a parameter server is lost, or does not take part within the timeout.
        """

    def optimizer_step(self, stats: StepStats, step_context: StepContext) -> UpdateResult:
        """Clip the reduced gradients and step the optimizers, or skip the update where a gradient is not finite.

        Called on every rank after ``reduce_gradients``. Messages for the update: none with all-reduced gradients,
        unless an optimizer needs whole tensors that are split over ranks; with ZeRO stage 1 an all-gather of the
        updated rows over the shard ranks (with FSDP2 the next forward all-gathers); under ``central_storage`` a
        barrier; with synchronous servers a request to each server, for whose reply the call waits. Where logical
        workers made their updates in ``end_worker`` (local SGD, asynchronous servers), this only reports them. For a
        skipped update names of parameters are all-gathered over the ranks that may have different ones: the stages and
        tensor ranks of a replica (data parallelism), all ranks (FSDP2, ZeRO), the data ranks (local SGD,
        ``central_storage``), none with servers.

        Args:
            stats: the result of ``reduce_gradients`` in this step: norm of the gradient, and whether it is finite.
            step_context: facts of the step, such as the factor on the learning rate.

        Returns:
            An ``UpdateResult``: ``updates``, the number of updates made (0 if the update was skipped; with asynchronous
            servers those of all workers since this rank's last step); ``skipped``, whether the update, or that of one
            of the workers, was skipped; ``nonfinite``, the names of parameters whose gradient is not finite (where
            names are all-gathered at most three from each rank); ``in_sync``, whether the parameters on this rank are
            now those of the whole run; and ``global_step``, the steps of all workers with asynchronous servers that
            count these, else None.

        Raises:
            UsageError: an optimizer does not take sparse gradients. Under ``central_storage`` and with synchronous
                servers also: the script has written parameters since its backward. With servers also: it has changed an
                option of its optimizer that is not sent to them, such as ``nesterov``.
            PeerError: a rank or a parameter server is lost, or does not take part within the timeout.
        """

    def clear(self) -> None:
        """Set ``.grad`` of all trained parameters on this rank to None after the update. Not collective.

        With shards, ``.grad`` of the model's parameters and of the optimizer's rows. The next step's backward then
        starts from no gradients.
        """

    def abandon_step(self) -> bool:
        """Drop the gradients and loss sums of a step that an exception has ended before its update. Not collective.

        Returns:
            Whether training can go on with the next step as if this one had been skipped. False where other ranks or
            servers may have received gradients of the step, may wait for this rank, or logical workers (fixed shares of
            the global batch) may have made updates of their own in it.
        """

    def merged(self) -> dict[str, Tensor]:
        """Return this rank's parameters and buffers as one model, merged over all ranks' logical workers.

        Called for evaluations, predictions, checkpoints and ``run.state``. A logical worker is one of N fixed shares of
        the global batch, with its own buffers. Collective over the data ranks: one all-gather of all workers' buffers
        for each dtype, none for N = 1. Batch-norm statistics are pooled over the workers, other floating buffers
        averaged, of integers the largest is taken. Parameters are exchanged only where workers have their own (local
        SGD: their mean, by an all-to-all and an all-gather for each dtype), where servers have newer ones (read between
        two barriers), and where the script has written rows of ZeRO stage 1 (an all-gather over the shard ranks).

        Returns:
            A new dict from names in the unsplit model to detached tensors; those that are split over ranks are this
            rank's slices or rows. Except with local SGD and asynchronous servers, parameters share memory with the
            model's, so that the next update changes them; for N = 1 buffers do, too. Do not write to them.

        Raises:
            UsageError: since the last update, the script has written parameters under ``central_storage`` on several
                ranks, with asynchronous servers, or under local SGD where this rank has several workers; or it has
                written a buffer of which each of several workers on this rank has its own value.
            PeerError: a rank or a parameter server is lost, or does not take part within the timeout.
        """

    def replicated(self) -> Mapping[str, Tensor] | None:
        """Return this rank's tensors of which several ranks must hold equal copies; None where ranks may differ in all.

        The run compares digests of them over ranks, before checkpoints and at the end of some epochs, to find ranks
        that have diverged. Not collective, except that ZeRO stage 1 first all-gathers rows that the script has written,
        over the shard ranks. None with asynchronous servers, and with synchronous ones that have backup workers.

        Returns:
            A mapping from names to tensors, not copied. Where ``ReplicaRunner.specs`` has the name, the tensor is this
            rank's slice, of which all ranks with the same slice hold copies; tensors of other names are whole. Tensors
            that differ by design are left out, such as parameters between two averages of local SGD, and buffers where
            the run has several logical workers (shares of the global batch, each with its own buffers).

        Raises:
            UsageError: since the last update, the script has written parameters under ``central_storage`` on several
                ranks, or under local SGD where this rank has several workers.
        """

    def state(self) -> Mapping[str, Mapping[str, Tensor | TensorSlice]]:
        """Return this rank's tensors for a checkpoint; those of all ranks together are the full state.

        Called on every rank. Collective over the data ranks: all-gathers of all workers' buffers, and of parameters
        where workers have their own (as in ``merged``). With parameter servers rank 0 also reads the optimizer state
        from them.

        Returns:
            Tensors by group and name, which may share memory with the model and the optimizer: write them before the
            next step. A tensor of which several ranks hold copies is returned by one of them; with asynchronous servers
            rank 0 returns everything. Group ``model`` has parameters and buffers by name, ``optim`` the optimizer state
            by ``{parameter}/{key}``; neither depends on the strategy. ``workers`` has the own state of each logical
            worker (fixed share of the global batch), such as buffers. A tensor that is split over ranks is given as a
            ``TensorSlice``, with its position in the full tensor.

        Raises:
            UsageError: since the last update, the script has written parameters with asynchronous servers, or under
                local SGD where this rank has several workers; or it has written a buffer of which each of several
                workers on this rank has its own value.
            PeerError: a rank or a parameter server is lost, or does not take part within the timeout.
        """

    def load(self, saved: SavedState) -> None:
        """Restore parameters, buffers and optimizer state of this rank from a checkpoint.

        Called on every rank for a resume, a warm start and ``load_state_dict`` of the model. Tensors are overwritten in
        place; a parameter without optimizer state in ``saved`` keeps the state that it has. Each rank reads for itself,
        so that data parallelism and local SGD exchange nothing. ZeRO stage 1 then all-gathers parameters over the shard
        ranks, ``central_storage`` waits at a barrier of all ranks, and with parameter servers rank 0 sends them what it
        has read, after which all data ranks meet at a barrier. The group ``workers`` has state of each logical worker
        (fixed share of the global batch), such as buffers; for state that is missing there, the worker starts from the
        merged model in the group ``model``.

        Args:
            saved: the checkpoint's tensors, of which this rank reads its slices.

        Raises:
            CheckpointError: the checkpoint lacks a parameter or buffer, or a file of it is damaged.
            UsageError: the optimizer state is larger than a parameter server accepts.
            PeerError: a rank or a parameter server is lost, or does not take part within the timeout.
        """

    def own_gradients(self) -> OwnGradients:
        """Return this rank's gradients before their reduction over ranks, to measure the gradient noise scale.

        Called at the beginning of a step that may measure the noise scale. Not collective. Parameters that another rank
        of the replica counts in the norm (weights tied over pipeline stages) are left out.

        Returns:
            An ``OwnGradients``. ``parameters``: the trained parameters in whose ``.grad`` backward leaves this rank's
            gradients, not reduced. ``take_squares``: None, or where backward itself reduces gradients (FSDP2) a
            function without arguments that returns, as a float, the sum of squares of the elements of this rank's
            gradients from before their reduction, added up over the backwards since its last call. ``optimizers``:
            the optimizers that hold the whole state (such as moments) of ``parameters`` on this rank; empty where the
            state is on other ranks, on servers or in host memory. ``optimizer_of``: by logical worker (share of the
            global batch), the optimizer of a worker that makes updates of its own. ``equal_before``: under local SGD a
            function from a step's number to whether all workers have equal parameters before this step.
        """

    def facts(self) -> Mapping[str, Any]:
        """Return figures of this strategy, such as its traffic over ranks, for ``summary.json`` at the end of the run.

        Called on all ranks. Collective over the data ranks only if tutti's own all-reduce schedule sums the gradients
        (the strategy's option ``algorithm``): an all-reduce of counts. With parameter servers rank 0 alone asks the
        servers.

        Returns:
            JSON values by key, of which those of rank 0 are written; empty if the strategy has none.

        Raises:
            PeerError: a rank is lost, or does not take part within the timeout.
        """

    def adopt(self, optimizer: Optimizer) -> None:
        """Begin to update the parameters that the script has added to one of its optimizers since ``tutti.prepare``.

        The run calls this on every rank at the next step, for each of the script's optimizers of which a parameter
        group has changed its size. Data parallelism and local SGD use the optimizer as it is, and a rank that had none
        builds one; FSDP2 and ZeRO replace the new parameters in the groups by this rank's rows, in place. Collective
        only where tensor ranks build one: an all-gather over the tensor ranks of the stage; otherwise nothing is sent.

        Args:
            optimizer: one of the script's optimizers, with its present parameter groups.

        Raises:
            UsageError: the strategy cannot add parameters after ``tutti.prepare``: with parameter servers, with several
                ranks under ``central_storage``, for one of several optimizers of a model on several pipeline stages,
                and for an optimizer that steps on whole tensors, which ranks gather for it.
            PeerError: a rank is lost, or does not take part within the timeout.
        """

    def reattach(self, names: Sequence[str], late: bool = False) -> None:
        """Begin to train parameters that were frozen: reduce their gradients and update them from now on.

        The run calls this on every rank once it finds that the script has set ``requires_grad`` of parameters, before
        the step or its update. Collective over the data ranks: an all-gather of digests of the model's names, shapes,
        dtypes and ``requires_grad``. Data parallelism then plans the gradient buckets anew, FSDP2 and ZeRO shard those
        of the parameters that they have not sharded yet, which gives the model new parameter objects, and local SGD
        gives each logical worker its own copy. With parameter servers nothing is sent: the call only checks that the
        parameters were trainable in ``tutti.prepare``.

        Args:
            names: names, in the unsplit model, of the parameters on this rank whose ``requires_grad`` the script has
                set to True since the previous call of this method; at least one. The run does not call this on pipeline
                stages without such a parameter.
            late: True if the forward of the present step has already used these parameters, as in the body of a custom
                training loop; a strategy that shards them then does so after the step's backward. Others ignore it.

        Raises:
            UsageError: the strategy cannot begin to train these parameters: an optimizer of the run steps on whole
                tensors that are gathered from ranks, or parameter servers were started without them.
            MismatchError: the data ranks have unfrozen different parameters; never with parameter servers.
            PeerError: a rank is lost, or does not take part within the timeout.
        """
