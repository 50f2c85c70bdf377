"""Protocols and records that all rooms share. No torch at run time: ``tutti --help`` imports this module.

Model layouts, gradient synchronisation and optimizers never import each other; they meet in the protocols below.
"Worker" is the logical worker: one of N replicas of the algorithm, of which a rank plays one or several.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeAlias

from tutti.config.averaging import Averaging
from tutti.config.module_config import Checkpointing, CompileChoice

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from tutti.comm.communicator import Communicator
    from tutti.comm.grid import Grid
    from tutti.comm.mesh_communicators import Communicators

Batch: TypeAlias = Any
"""A tensor, or a tuple, list or dict of tensors; the first dimension of each is the samples."""

LossFn: TypeAlias = "Callable[[Any, Batch], Any]"
"""``loss_fn(model, batch)`` → a scalar (mean over samples), ``(sum, count)``, or ``(sum, count, metric_sums)``.

A 1-d tensor with one loss a sample may take the place of the mean or of the sum."""


@dataclass(frozen=True)
class MicroBatch:
    """Samples of one forward and backward pass of one logical worker.

    A logical worker is one of N fixed shares of the global batch; its share is cut into micro-batches.

    Attributes:
        worker: logical worker, 0 … N-1.
        micro: index, from 0, of this micro-batch among those into which the worker's share of the global batch is cut.
        batch: the samples.
        samples: number of samples; 0 for a dummy micro-batch, whose forward and backward keep collectives aligned and
            whose gradient is ignored.
        weight: factor on each sample's loss in backward: loss scale / samples in the global batch, or in the worker's
            share where ``GradientSync.loss_normalisation`` is "worker". For a ``whole`` micro-batch the loss scale.
        key: 64-bit key of this micro-batch's RNG streams, a function of (seed, step, worker, micro).
        last: whether this is the worker's last micro-batch in this step.
        noise: standard deviation σ of the weights z ~ N(1, σ²) on the samples' losses.
        whole: whether the gradient is the mean over this micro-batch alone. Backward then starts from loss scale /
            count, as in PyTorch, and the gradient is not divided by a count afterwards.
    """

    worker: int
    micro: int
    batch: Batch
    samples: int
    weight: float
    key: int
    last: bool
    noise: float = 0.0
    whole: bool = False

    @property
    def share(self) -> float:
        """Factor by which backward multiplies the mean loss of this micro-batch's samples.

        It is the loss scale times the number of ``samples``, divided by the samples of the global batch, or of the
        logical worker (a fixed share of the global batch) where each worker has a gradient of its own. For a ``whole``
        micro-batch, whose gradient is the mean over this micro-batch alone, it is the loss scale.
        """
        return self.weight if self.whole else self.samples * self.weight


@dataclass
class LossSums:
    """Loss sum, count and metric sums over samples. ``a + b`` adds two of them element by element.

    Attributes:
        sums: float tensor ``[loss_sum, count, *metric_sums]`` on the compute device.
        names: names of the metric sums, in order.
        samples: number of samples; the loss function's count may differ from it (tokens, pixels).
        whole: whether the gradient of these samples is the mean over a single micro-batch alone (``MicroBatch.whole``).
    """

    sums: Tensor
    names: tuple[str, ...] = ()
    samples: int = 0
    whole: bool = False

    def __add__(self, other: LossSums) -> LossSums:
        return LossSums(self.sums + other.sums, self.names or other.names, self.samples + other.samples)


@dataclass(frozen=True)
class ShardSpec:
    """Position of this rank's local tensor in the global tensor that is split over ranks.

    Attributes:
        shape: global shape.
        offset: offset of this rank's slice in the global tensor; with several ``blocks``, in the first block.
        tied: other names of the same tensor (tied weights).
        blocks: number of equal blocks along the first dimension that are split alike, such as queries, keys and values
            packed into one matrix. The local tensor holds the same slice of each block, one after the other.
        rows: ``(start, total)``: the local tensor holds only rows ``start : start + len(local)`` of the ``total`` rows
            of this slice; None for all rows.
    """

    shape: tuple[int, ...]
    offset: tuple[int, ...]
    tied: tuple[str, ...] = ()
    blocks: int = 1
    rows: tuple[int, int] | None = None

    def regions(self, local: Sequence[int]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Return the position in the global tensor of each contiguous part of this rank's local tensor.

        This spec states which slice the local tensor holds. A local tensor consists of several parts if the global
        tensor has several equal ``blocks`` along its first dimension that are split alike, such as packed queries, keys
        and values.

        Args:
            local: shape of the local tensor that has this spec.

        Returns:
            A list of pairs (offset in the global tensor, shape), one for each part, in the order of the local rows: a
            part for each of ``blocks`` of which the local tensor holds rows.

        >>> ShardSpec((12, 5), (2, 0), blocks=3).regions((6, 5))
        [((2, 0), (2, 5)), ((6, 0), (2, 5)), ((10, 0), (2, 5))]
        >>> ShardSpec((12, 5), (2, 0), blocks=3, rows=(3, 6)).regions((3, 5))
        [((7, 0), (1, 5)), ((10, 0), (2, 5))]
        """
        if self.blocks == 1:
            return [(self.offset, tuple(local))]
        begin, total = self.rows or (0, local[0])
        step, each = self.shape[0] // self.blocks, total // self.blocks
        first, *rest = self.offset
        found = []
        for block in range(self.blocks):
            low, high = max(begin, block * each), min(begin + local[0], (block + 1) * each)
            if low < high:
                found.append(((first + block * step + low - block * each, *rest), (high - low, *local[1:])))
        return found

    def cut(self, local: Sequence[int], begin: int) -> ShardSpec:
        """Return the position in the global tensor of some consecutive rows of this spec's local tensor.

        Used to shard the local tensor of a tensor-parallel rank further, by rows.

        Args:
            local: shape of the local tensor, whose position in the global tensor this spec states.
            begin: index in the local tensor of the first of these rows.

        Returns:
            The ``ShardSpec`` of the tensor that holds these rows. It does not state their number, which is the length
            of that tensor.
        """
        if self.blocks > 1:
            return replace(self, rows=(begin, local[0]))
        return replace(self, offset=(self.offset[0] + begin, *self.offset[1:]))


class TensorSlice(NamedTuple):
    """This rank's slice of a tensor that is split over ranks, with its position in the full tensor.

    Attributes:
        tensor: the slice.
        shape: shape of the full tensor.
        offset: index of the slice's first element in the full tensor, one number for each dimension; with several
            ``blocks``, that in the first block.
        blocks: number of equal blocks along the first dimension that are split alike, such as queries, keys and values
            packed into one matrix; ``tensor`` holds the same slice of each, one after the other.
        rows: ``(start, total)``: ``tensor`` holds only rows ``start : start + len(tensor)`` of the ``total`` rows of
            the slice; None for all rows.
    """

    tensor: Tensor
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    blocks: int = 1
    rows: tuple[int, int] | None = None


@dataclass(frozen=True)
class StepContext:
    """Facts of one training step that are the same for all logical workers, the N fixed shares of the global batch.

    Attributes:
        taken: steps that this rank has taken before this one; ranks of asynchronous servers may differ in it.
        samples: samples in this step's global batch; for a batch that the caller passed to ``run.step``, as many as the
            configuration states.
        lr_factor: factor on every parameter group's initial learning rate; None leaves the rate to the user.
        stop: whether this rank asks all ranks to stop after the step; may differ between ranks, and so is reduced with
            the loss sums.
        loss_scale: factor on the loss in backward; gradients are divided by it before their norm is taken.
        call: index of this gradient synchronisation within the step, from 0; a custom training loop may make several.
        whole: whether the global batch is a single micro-batch, whose backward divides by the loss's count.
        settings: learning rates, momenta and weight decays of the script's optimizers, compared over data ranks.
        place: epoch and global batch after which the data stand, compared over data ranks; (0, 0) for a batch that the
            caller made.
        written: digest of the parameters if the script has written them since the last update, compared over data
            ranks; 0 if it has not.
        compare: function that compares the parameters over the data ranks and raises UsageError where they differ. It
            is collective: all data ranks call it if ``written`` differs between any of them. None where the strategy
            cannot compare parameters.
        edits: a line for each parameter, of which each rank has a part, that the script has written since the last
            step; compared over all ranks.
        edited_in: place in the script of the last such write, as ``FILE:LINE``.
    """

    taken: int
    samples: int
    lr_factor: float | None = None
    stop: bool = False
    loss_scale: float = 1.0
    call: int = 0
    whole: bool = False
    settings: str = ""
    place: tuple[int, int] = (0, 0)
    written: int = 0
    compare: Callable[[], None] | None = None
    edits: Sequence[str] = ()
    edited_in: str = ""


class GradientVariance(NamedTuple):
    """Mean square of the logical workers' own gradients, before clipping and without loss scale.

    A logical worker is one of N fixed shares of the global batch.

    Attributes:
        mean_of_squares: Σ pᵢ‖gᵢ‖², where pᵢ is worker i's part of the global count.
        workers: number of workers with at least one sample.
    """

    mean_of_squares: float
    workers: int


@dataclass(frozen=True)
class OwnGradients:
    """This rank's own gradients before the reduction over data ranks, for the gradient noise scale.

    Attributes:
        parameters: trained parameters whose ``.grad`` accumulates this rank's micro-batches, and which this rank counts
            in the gradient's norm.
        take_squares: returns and resets the sum of squares of this rank's gradients that backward itself reduced
            (FSDP2) since the last call; None where backward reduces none.
        optimizers: the optimizers that have the state of ``parameters``, in full, on this rank; empty where that state
            is on other ranks, on servers or in host memory.
    """

    parameters: Sequence[nn.Parameter]
    take_squares: Callable[[], float] | None = None
    optimizers: Sequence[Optimizer] = ()


@dataclass(frozen=True)
class StepStats:
    """Results of one training step, reduced over the global batch.

    With asynchronous parameter servers the results are reduced over this rank's logical workers (fixed shares of the
    global batch) alone.

    Attributes:
        loss: mean over ``count``.
        count: samples, tokens, pixels or other units that the loss function counts.
        metrics: means over ``count`` by name.
        grad_norm: norm of the complete gradient, before clipping and without loss scale; where workers make updates of
            their own, the mean of their gradients' norms.
        finite: whether no gradient has a NaN or infinity.
        stop: whether a rank asked all ranks to stop after this step.
        gradient_variance: mean square of the workers' own gradients; None where it is not measured.
    """

    loss: float
    count: float
    metrics: Mapping[str, float]
    grad_norm: float
    finite: bool
    stop: bool = False
    gradient_variance: GradientVariance | None = None


@dataclass(frozen=True)
class UpdateResult:
    """Result of the update at the end of a training step (``GradientSync.optimizer_step``).

    A worker is a logical worker, one of N fixed shares of the global batch; under local SGD each updates by itself.

    Attributes:
        updates: number of updates of the parameters that this step counts for: 1, 0 for a skipped update; with
            asynchronous parameter servers all updates since this rank's last step.
        skipped: whether the update, or that of one of the workers, was skipped because a gradient is not finite.
        nonfinite: names of parameters whose gradient is not finite.
        together: whether the parameters on this rank are now those of the whole run, and not one worker's own.
        global_step: steps of all workers together, where the run counts these (asynchronous servers); None where each
            rank's own steps count.
    """

    updates: int
    skipped: bool = False
    nonfinite: tuple[str, ...] = ()
    together: bool = True
    global_step: int | None = None

    @classmethod
    def joint(cls, stats: StepStats, nonfinite: tuple[str, ...]) -> UpdateResult:
        """Return the result of the one update that all workers make together, which a non-finite gradient skips.

        A worker is a logical worker, one of N fixed shares of the global batch. Makes no update itself.

        Args:
            stats: results of the step; its ``finite`` tells whether the update was made.
            nonfinite: names of parameters whose gradient is not finite; empty where all are.

        Returns:
            An ``UpdateResult`` with ``updates`` 1 and ``skipped`` False, or 0 and True where ``finite`` is False.
        """
        return cls(int(stats.finite), skipped=not stats.finite, nonfinite=nonfinite)


@dataclass(frozen=True)
class StepRecord:
    """Numbers of one training step for loggers; each step is a line of ``metrics.jsonl``.

    Attributes:
        step: number of steps made so far, this one included.
        epoch: epoch of the step, from 1.
        samples: number of training samples so far.
        updates: number of updates of the parameters so far.
        loss, metrics: means over the global batch.
        grad_norm: norm of the gradient, before clipping; None if unknown.
        lr: learning rate of the first parameter group; None without one.
        skipped: whether the update was skipped because a gradient is not finite.
        loss_scale: factor on the loss in backward; None without loss scaling.
        adascale: figures of AdaScale by name; empty without it.
        noise: figures of the gradient noise by name; empty in steps that do not measure it.
    """

    step: int
    epoch: int
    samples: int
    updates: int
    loss: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    grad_norm: float | None = None
    lr: float | None = None
    skipped: bool = False
    loss_scale: float | None = None
    adascale: Mapping[str, float] = field(default_factory=dict)
    noise: Mapping[str, float] = field(default_factory=dict)


NamedParameters: TypeAlias = "Sequence[tuple[str, nn.Parameter]]"
"""Pairs (name, parameter) of a model's parameters, as ``nn.Module.named_parameters`` yields."""

OptimizerFactory: TypeAlias = "Callable[[NamedParameters], Optimizer | None]"
"""Builds an optimizer over this rank's named parameters (None where none of them is trained). A ``GradientSync`` may
call it several times."""


class NormReducer(Protocol):
    """Function that sums squared norms of slices of tensors over the ranks that hold the slices.

    A ``GradientSync`` (reduces gradients and makes the update) installs it in a layer-wise optimizer (such as LAMB) if
    ranks hold slices of layers: rows over the shard ranks, slices over the tensor ranks, or both. The optimizer needs
    the norm of the whole layer.
    """

    def __call__(self, squares: Tensor) -> Tensor:
        """Return the squared norms of full tensors, from those of this rank's slices.

        Collective: an all-reduce over the shard ranks where they hold rows, then one over the tensor ranks where they
        hold slices. Every one of these ranks must pass as many numbers, in the same order. A tensor that is not split
        over the tensor ranks counts once, not once a rank.

        Args:
            squares: sum of squares of each of this rank's slices, a 1-d float64 tensor on the CPU; it may be
                overwritten.

        Returns:
            A tensor on the CPU of the same shape, with the sum of squares of each full tensor in the order of
            ``squares``.
        """


class FullTensorGatherer(Protocol):
    """Gatherer (protocol) of full tensors from the slices that ranks hold.

    A ``GradientSync`` (reduces gradients and makes the update) installs it in an optimizer that needs full matrices
    (Muon). All ranks among which parameters are split must call ``gather`` for the same parameters in the same order.
    """

    def gather(self, parameter: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Gather full tensors, such as gradients or momenta of a parameter, from the slices that the ranks hold.

        An optimizer calls this in its step, for each parameter whose update needs full matrices (Muon). Collective:
        where the parameter is sharded by rows, one all-gather over the shard ranks for each tensor; where it is split
        by tensor parallelism, then one all-reduce over the tensor ranks. Nothing is sent for a parameter that is not
        split. All these ranks must call it for the same parameters in the same order, with as many tensors.

        Args:
            parameter: the parameter, the object in the optimizer's groups; ``tensors`` are split over ranks in the same
                way.
            tensors: this rank's slices, each of the parameter's local shape.

        Returns:
            One full tensor for each of ``tensors``, on every rank: new tensors, or ``tensors`` themselves where the
            parameter is not split.
        """

    def mine(self, parameter: Tensor, whole: Tensor) -> Tensor:
        """Cut this rank's slice of a parameter out of a tensor of the parameter's full shape. Not collective.

        An optimizer that has computed an update from full matrices (``gather``) calls this to apply its rank's slice.

        Args:
            parameter: the parameter, as this rank holds it; the tensor is split over ranks in the same way.
            whole: a tensor of the parameter's full shape, such as an orthogonalised gradient (Muon).

        Returns:
            The slice, of the parameter's local shape; it may be a view of ``whole``, and is ``whole`` itself where the
            parameter is not split.
        """


@dataclass(frozen=True)
class RunContext:
    """Facts of a run that its strategy (``ModelLayout`` and ``GradientSync``) needs.

    Attributes:
        grid: the device mesh and this rank's coordinates in it.
        comms: communicators along the axes of the mesh.
        workers: number N of logical workers, the fixed shares of the global batch.
        mine: indices of the contiguous logical workers whose micro-batches this data rank computes.
        sharers: where there are more data ranks than workers, indices of the contiguous data ranks that share this
            rank's worker, this rank included; None where each worker is computed by a single rank.
        reproducible: whether weights are bit-identical on any number of data ranks.
        clip: largest gradient norm, None for no clipping.
        averaging: average of the weights over the updates, None for none.
        activation_checkpointing: options, or names and classes of modules; None for none.
        compile: mode and options of ``torch.compile``; None for none.
        gradient_variance: whether to measure each worker's gradient before the sum: ``StepStats.gradient_variance``.
        draws: whether the model may draw random numbers in training, as for dropout.
        in_step: whether every rank makes all steps of the run; False with asynchronous parameter servers that count the
            steps of all workers together.
        trial: ``trial(model, most=None)`` calls the run's loss function on ``model`` with the first micro-batch of the
            training data, or with at most ``most`` samples of that; it is not collective. None without a loss function.
        forward_trial: the function ``trial`` where the run has a loss function; otherwise a function with the same
            arguments that calls ``model`` on the inputs of the first micro-batch.
        rows: whether the ``GradientSync`` shards parameters (FSDP2); it then moves them to the device itself.
    """

    grid: Grid
    comms: Communicators
    workers: int
    mine: range
    sharers: range | None = None
    reproducible: bool = False
    clip: float | None = None
    averaging: Averaging | None = None
    activation_checkpointing: Checkpointing = None
    compile: CompileChoice | None = None
    gradient_variance: bool = False
    draws: bool = True
    in_step: bool = True
    trial: Callable[..., Any] | None = None
    forward_trial: Callable[..., Any] | None = None
    rows: bool = False

    @property
    def begins_worker(self) -> bool:
        """Whether this rank runs the first micro-batches of its logical workers in each step.

        A logical worker is one of N fixed shares of the global batch. False only where more than N data ranks share the
        workers' micro-batches, on every rank of a worker except its first.
        """
        return self.sharers is None or self.sharers.start == self.comms.replica.rank


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
            UsageError: several ranks compute micro-batches of the worker, and a forward has changed a buffer in a way
                in which the next rank cannot go on.
        """

    def gradient_ready(self, parameter: Tensor) -> None:
        """Take note that autograd has accumulated a gradient into ``parameter.grad``.

        The gradient is the sum over the micro-batches whose backwards have run since ``.grad`` was None. In the
        backward of the rank's last micro-batch of a step, a strategy that all-reduces gradients may start the
        all-reduce of a bucket, over the data ranks, without waiting for it; ``parameter.grad`` must not be written from
        then on until ``GradientSync.reduce_gradients`` has returned. Other strategies do nothing. The signature is that
        of a hook of ``register_post_accumulate_grad_hook``.

        Args:
            parameter: the parameter whose gradient is ready.
        """


class EditRecords(Protocol):
    """Records, on one rank, of the script's calls of PyTorch that wrote parameters or gradients split over ranks."""

    @property
    def line(self) -> str:
        """Place in the script of the latest recorded edit on this rank, as ``FILE:LINE`` ("the script" if none)."""
        ...

    def lines(self, named: Iterable[tuple[str, Tensor]]) -> list[str]:
        """Return a line of text for each of these tensors that the script has edited. Not collective.

        Equal edits give equal lines, so that the caller can compare the lines over ranks. The records stay.

        Args:
            named: (name, tensor) pairs, such as gradients.
        """
        ...

    def forget(self, tensors: Iterable[Tensor]) -> None:
        """Delete the records of edits of tensors to which tutti has given new values. Not collective.

        Args:
            tensors: the tensors, such as gradients that have just been reduced.
        """
        ...

    def take(self) -> list[str]:
        """Return a line of text for each parameter that the script has written since the previous call of ``take``.

        The records of these writes are deleted. Not collective: the lines are equal on all ranks whose scripts have
        made the same writes, so that the caller can compare them; empty without writes.
        """
        ...


class ReplicaRunner(Protocol):
    """This rank's part of a replica of the model (protocol), which runs its forward and backward.

    The replica may span pipeline stages and tensor ranks.

    Attributes:
        parts: modules on this rank.
        specs: position in the full tensor of every parameter and persistent buffer on this rank, by its name in the
            unsplit model.
        not_owned: names of tensors on this rank of which another rank of this replica owns the copy that is counted in
            norms and saved. If the owner has it under another name, that name is among ``tied`` in ``specs``.
        summary: lines for the run's header, text by label.
        sharded: parameters of which this rank keeps only rows (FSDP), as plain tensors. A forward all-gathers them over
            the shard ranks, so that all of these must run equally many.
        swap_values: context manager within which the model holds other values, given by name.
        around_fsdp_hooks: context manager around FSDP2's registration of its hooks on a module, which unwraps tensors
            that these hooks do not know.
        unify_flags: copies the ``requires_grad`` that the script has set on one of the objects that stand for a
            parameter to the others (FSDP).
        replaced_name: returns the name of a parameter in whose place the script has put another object (FSDP), or None.
        slice_name: returns the name of the parameter from whose tensor-parallel slice the script has made a tensor,
            element by element, or None.
        also_seen: is told, as a dictionary from new to old, of further objects that stand for parameters, such as
            FSDP2's, so that ``slice_name`` knows them.
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
        passes: for each model that is cut into pipeline stages, the calls of the model through its stages; otherwise
            empty.
        split_backwards: for each virtual stage of a zero-bubble schedule its input backward and weight backward;
            otherwise empty.
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
        """Make this rank's part of the model use new parameter objects.

        ``GradientSync`` calls this after it has sharded parameters, which gives the modules other ``nn.Parameter``
        objects. A runner that keeps records of parameter objects, such as a pipeline's, replaces the objects there. Not
        collective.

        Args:
            by: maps each ``nn.Parameter`` of this rank's modules that was replaced to the object in its place.
        """

    def run(self, micro_batches: Sequence[MicroBatch], loss: LossFn, grad_hook: GradientReadyHook | None) -> LossSums:
        """Run the forward of one logical worker's micro-batches and, with ``grad_hook``, their backward.

        A training step calls this once for each logical worker of the rank (one of N fixed shares of the global batch),
        an evaluation for each batch of held-out samples. Gradients of all micro-batches add up in the parameters'
        ``.grad``. What ranks exchange depends on the layout. With pipeline stages: point-to-point messages between
        neighbouring stages, sums of the gradients of tied weights over the stages that have them, and a broadcast of
        the loss sums from the last stage. With tensor parallelism: the collectives of the split layers, over the tensor
        ranks. With FSDP2: all-gathers of parameters in forward and backward and reduce-scatters of gradients in
        backward, over the shard ranks. A whole, unsharded model sends nothing but what ``grad_hook`` starts.

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
            UsageError: the loss has an unknown form or requires no gradient, or calls the model in a way that the
                layout cannot follow.
            ValueError: ``micro_batches`` is empty.
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
            UsageError: the loss has an unknown form or requires no gradient.
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

    def build(self, plain: nn.Module) -> ReplicaRunner:
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
            UsageError: the model cannot be split as asked, or activation checkpointing or ``torch.compile`` cannot be
                applied.
        """


class SavedState(Protocol):
    """Read access (protocol) to the tensors of a checkpoint, by group and name.

    A weights file (group ``model`` alone), or a state dict in memory (``model``, and ``optim`` where servers need it),
    may stand for the checkpoint. No method is collective: each rank reads for itself. Tensors that are read are on the
    CPU (those of a state dict on their own device), in the saved dtype, and may be memory that the reader keeps: copy
    them before you write to them.
    """

    def names(self, group: str) -> Collection[str]:
        """Return the names of the checkpoint's tensors in one group; empty if the checkpoint does not have the group.

        Args:
            group: ``model``, ``ema`` (average of the weights), ``optim`` or ``workers`` (state of each logical worker,
                a fixed share of the global batch).
        """

    def get(self, group: str, name: str) -> Tensor:
        """Read one tensor of the checkpoint in full, in the saved dtype.

        Args:
            group: ``model``, ``ema`` (averaged weights), ``optim`` or ``workers`` (state of each logical worker, a
                fixed share of the global batch).
            name: the tensor's name, one of ``names(group)``.

        Returns:
            The tensor, on the CPU if it comes from a file. It may be memory that this object keeps: the caller copies
            it before writing to it.

        Raises:
            CheckpointError: the checkpoint lacks the tensor, or the tensor's file is damaged.
        """

    def shape(self, group: str, name: str) -> tuple[int, ...]:
        """Return the full shape of one tensor of the checkpoint, without reading the tensor.

        Args:
            group: ``model``, ``ema`` (averaged weights), ``optim`` or ``workers`` (state of each logical worker, a
                fixed share of the global batch).
            name: the tensor's name.

        Returns:
            The size of each dimension; empty for a 0-d tensor.

        Raises:
            CheckpointError: the checkpoint lacks the tensor.
        """

    def part(self, group: str, name: str, offset: Sequence[int], shape: Sequence[int]) -> Tensor:
        """Read a rectangular region of one tensor of the checkpoint.

        A rank that holds a slice of a tensor reads its slice alone.

        Args:
            group: group of the tensor: ``model``, ``ema`` (averaged weights), ``optim`` or ``workers`` (state of each
                logical worker, a fixed share of the global batch).
            name: the tensor's name, one of ``names(group)``.
            offset: index of the region's first element in the tensor, one number for each dimension.
            shape: shape of the region, one number for each dimension.

        Returns:
            The region, in the saved dtype. It may be a view of memory that the reader keeps: copy it before you write
            to it.

        Raises:
            CheckpointError: the checkpoint lacks the tensor, or the tensor's file is damaged.
        """


class Average(Protocol):
    """Average of the weights over the updates of a run (protocol), such as an exponential moving average.

    Attributes:
        updates: number of updates that the average has seen.
    """

    updates: int

    def update(self) -> None:
        """Update this rank's part of the average with the present parameters; called after each optimizer update.

        Increments ``updates``. Not collective: ranks that hold the same parameters compute the same average.
        """

    def adopt(self, names: Collection[str]) -> None:
        """Include parameters that the script has newly made trainable in the average of the weights, from now on.

        The run calls this before the first step that trains them. Until then a parameter was constant, so that its
        average starts at its present value. Not collective.

        Args:
            names: names of these parameters in the unsplit model; their ``requires_grad`` has been set to True.

        Raises:
            UsageError: the strategy cannot average them: always under ``central_storage``, and with FSDP2 for a
                parameter that is sharded only after the present step.
        """

    def within(self, merged: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return parameters and buffers by name, with the averaged weights in place of the trained parameters.

        Called for evaluations, ``run.state(averaged=True)`` and hashes of the average, on every rank. Under
        ``central_storage`` it waits at a barrier of all ranks of the node; with other strategies nothing is sent.

        Args:
            merged: this rank's parameters and buffers by name, from ``GradientSync.merged``: those of one model, merged
                over the data-parallel workers.

        Returns:
            A new dict with the names of ``merged``. Its tensors are those of ``merged`` and of the average themselves,
            not copies: do not write to them, and expect that ``update`` changes the averages in place. Averages of
            16-bit parameters are float32.
        """

    def state(self) -> Mapping[str, Mapping[str, Tensor | TensorSlice]]:
        """Return this rank's part of the averaged weights (EMA) for a checkpoint. Not collective.

        Returns:
            ``{"ema": {name: tensor}}``, with the names of the parameters. The parts of all ranks together are the whole
            average. A tensor that is split over ranks is given as a ``TensorSlice``, with its position in the full
            tensor. The tensors are not copied: ``update`` changes them.
        """

    def load(self, saved: SavedState, updates: int) -> None:
        """Restore the average of the weights from a checkpoint, on a resume or a warm start.

        A parameter without an average in the checkpoint starts at its weights there. Not collective: each rank reads
        its part.

        Args:
            saved: the checkpoint's tensors.
            updates: number of optimizer updates that the saved average has seen; becomes the attribute ``updates``, on
                which the warm-up of the decay depends.

        Raises:
            CheckpointError: the checkpoint lacks a tensor that is needed, or a file of it is damaged.
            UsageError: the checkpoint has an average of a parameter that is frozen now, and the strategy cannot average
                it.
        """


class GradientSync(Protocol):
    """Protocol of the part of a strategy that reduces gradients over replicas and makes the optimizer's update.

    Attributes:
        loss_normalisation: what backward divides losses by: ``step``, the samples of the global batch; ``worker``, the
            samples of each logical worker (fixed share of the global batch), which then makes updates of its own.
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
                its parameters, or cannot start servers as asked.
            ValueError: with parameter servers, no parameter is trained.
        """

    def begin_worker(self, worker: int, step_context: StepContext) -> None:
        """Load a logical worker's own state into the model before the worker's micro-batches run.

        A training step calls this for each logical worker of this rank, one of N fixed shares of the global batch, in
        turn. The state is the worker's buffers, such as batch-norm statistics, and its parameters where workers differ
        (local SGD, asynchronous servers). What the call waits for depends on the strategy: where several data ranks
        share a worker, the message with the worker's buffers from the rank before; with ZeRO stage 1, in the first call
        of a step an all-gather of the parameters over the shard ranks if the script has written their rows, which all
        of these ranks must then have done; with asynchronous servers of mode ``bounded``, workers that are too many
        steps behind. Otherwise nothing.

        Args:
            worker: index of the logical worker, one of those of this rank.
            step_context: facts of the step, such as its number and loss scale; kept for the calls that end the step.

        Raises:
            UsageError: the script has written a buffer, or a parameter, of which each worker has a value of its own.
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
            UsageError: parameter servers cannot follow what the script has changed in its optimizer.
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
            UsageError: the script has written a parameter or buffer at a time at which the strategy cannot follow the
                write.
            PeerError: a rank or a parameter server is lost, or does not take part within the timeout.
        """

    def optimizer_step(self, stats: StepStats, step_context: StepContext) -> UpdateResult:
        """Clip the reduced gradients and step the optimizers, or skip the update where a gradient is not finite.

        Called on every rank after ``reduce_gradients``. What is exchanged for the update: nothing with all-reduced
        gradients, unless an optimizer needs whole tensors that are split over ranks; with ZeRO stage 1 an all-gather of
        the updated rows over the shard ranks (with FSDP2 the next forward all-gathers); under ``central_storage`` a
        barrier; with synchronous servers a request to each server, for whose reply the call waits. Where workers made
        their updates in ``end_worker`` (local SGD, asynchronous servers), this only reports them. For a skipped update
        names of parameters are all-gathered over the ranks that may have different ones: the stages and tensor ranks of
        a replica (data parallelism), all ranks (FSDP2, ZeRO), the data ranks (local SGD, ``central_storage``), none
        with servers.

        Args:
            stats: the result of ``reduce_gradients`` in this step: norm of the gradient, and whether it is finite.
            step_context: facts of the step, such as the factor on the learning rate.

        Returns:
            An ``UpdateResult``: ``updates``, the number of updates made (0 if the update was skipped; with asynchronous
            servers those of all workers since this rank's last step); ``skipped``, whether the update, or that of one
            of the workers, was skipped; ``nonfinite``, the names of parameters whose gradient is not finite (where
            names are all-gathered at most three from each rank); ``together``, whether the parameters on this rank are
            now those of the whole run; and ``global_step``, the steps of all workers with asynchronous servers that
            count these, else None.

        Raises:
            UsageError: an optimizer does not take sparse gradients; or the script has written parameters, or changed an
                optimizer's option, where the strategy cannot follow.
            PeerError: a rank or a parameter server is lost, or does not take part within the timeout.
        """

    def clear(self) -> None:
        """Set ``.grad`` of all trained parameters on this rank to None after the update. Not collective.

        With shards, ``.grad`` of the model's parameters and of the optimizer's rows. The next step's backward then
        starts from no gradients.
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
            UsageError: the script has written parameters, of which workers on this rank have values of their own.
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
            UsageError: the script has written parameters of which workers on this rank, or ranks that share memory,
                hold one copy.
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
        """

    def own_gradients(self) -> OwnGradients:
        """Return this rank's gradients before their reduction over ranks, to measure the gradient noise scale.

        Called at the beginning of each step that measures the noise scale. Not collective. Parameters that another rank
        of the replica counts in the norm (weights tied over pipeline stages) are left out.

        Returns:
            An ``OwnGradients``: ``parameters``, the trained parameters in whose ``.grad`` backward leaves this rank's
            gradients; ``take_squares``, where backward itself reduces gradients (FSDP2) a function that returns the sum
            of squares of those since its last call, else None; and ``optimizers``, which have the full state of these
            parameters on this rank, empty where that is elsewhere.

        Raises:
            UsageError: logical workers (shares of the global batch) make updates by themselves, so that there is no
                gradient of one global batch.
        """

    def facts(self) -> Mapping[str, Any]:
        """Return figures of this strategy, such as its traffic over ranks, for ``summary.json`` at the end of the run.

        Called on all ranks. Collective over the data ranks only if tutti's own all-reduce schedule sums the gradients
        (the strategy's option ``algorithm``). With parameter servers rank 0 alone asks the servers.

        Returns:
            JSON values by key, of which those of rank 0 are written; empty if the strategy has none.
        """

    def adopt(self, optimizer: Optimizer) -> None:
        """Begin to update the parameters that the script has added to one of its optimizers since ``tutti.prepare``.

        The run calls this on every rank at the next step, for each of the script's optimizers of which a parameter
        group has changed its size. Nothing is sent. Data parallelism and local SGD use the optimizer as it is, and a
        rank that had none builds one; FSDP2 and ZeRO replace the new parameters in the groups by this rank's rows, in
        place.

        Args:
            optimizer: one of the script's optimizers, with its present parameter groups.

        Raises:
            UsageError: the strategy cannot add parameters after ``tutti.prepare``: with parameter servers, with several
                ranks under ``central_storage``, and for one of several optimizers of a model on several pipeline
                stages.
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
        """


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
            servers).
        by_worker: whether gradients are summed worker by worker (logical workers are fixed shares of the global batch)
            and not rank by rank.
        accumulated: whether the last ``add_gradients`` added gradients of earlier reductions to the new ones.
    """

    gradient_at: GradientPlace
    by_worker: bool
    accumulated: bool

    def begin_custom_loop(self) -> None:
        """Switch to custom training loops: make complete gradients visible in ``.grad`` from now on.

        A custom training loop is the script's own loop with forward, backward and update. Called on every rank once,
        before the first step. Collective under ``central_storage`` alone, whose data ranks allocate shared memory;
        other strategies send nothing. Complete gradients are those of the mean loss over the global batch; where ranks
        hold shards of them, ``.grad`` is the shard of the complete gradient; with parameter servers it stays
        unreadable. From now on a buffer that the script writes after an update counts for the rank's last logical
        worker alone.
        """

    def leave_custom_loop(self) -> None:
        """Note that the script has left its own loop over an epoch: buffers that it writes now are for all its workers.

        A logical worker is a fixed share of the global batch, with its own copy of buffers such as batch-norm
        statistics. A value that the script writes into a buffer after this call is set for all workers of this rank; a
        value that it wrote within the loop, after an update, for the rank's last worker alone. Called after each epoch,
        and where the script leaves the loop by ``break``. Not collective.
        """

    def named_trained(self) -> NamedParameters:
        """Return names and objects of the trainable parameters of the script's model on this rank. Not collective.

        The objects are the parameters in the script's model: where the strategy shards, full parameters (ZeRO stage 1)
        or DTensors (FSDP2), and not the rows that the optimizer updates.

        Returns:
            A pair (name, parameter) for each trainable parameter that this rank has, without sharding in the model's
            order. Parameters that the script has unfrozen and that are not yet sharded come last.
        """

    def script_parameters(self) -> Sequence[nn.Parameter]:
        """Return the trainable parameters as objects of the script's model, whose ``.grad`` the script uses.

        Where the strategy shards, these are full parameters (ZeRO stage 1) or DTensors (FSDP2), and not the rows that
        the optimizer updates.

        Returns:
            The parameters of the pairs (name, parameter) that ``named_trained`` returns, in the same order: without
            sharding the model's.
        """

    def script_parameters_of(self, optimizer: Optimizer) -> list[nn.Parameter]:
        """Return the parameters of the script's model that one of the script's optimizers updates, as a list.

        Args:
            optimizer: the optimizer; its parameter groups may hold shards in place of the model's parameters.
        """

    def pop_gradients(self) -> dict[nn.Parameter, Tensor]:
        """Return the gradients that earlier reductions left in ``.grad``, and set every ``.grad`` to None.

        A custom training loop calls this method before the next backward, and ``add_gradients`` after it, to accumulate
        over several reductions. Gradients that the script has cleared are not returned. Not collective. With parameter
        servers the sums stay on the servers, and the result is empty.

        Returns:
            The gradients, copies with FSDP2, by parameter object of the optimizer (with shards this rank's rows);
            parameters without a gradient are left out.
        """

    def add_gradients(self, held: Mapping[nn.Parameter, Tensor]) -> None:
        """Add gradients of earlier reductions and those just reduced, and put the sums into ``.grad``.

        As in PyTorch the earlier tensors have the sums, but not with FSDP2. Sets ``accumulated``. Collective with
        pipeline stages only: they all-gather which parameters have a gradient. Where this rank has only a part of a
        gradient (ZeRO stage 1 on several shards, tensor parallelism, pipeline stages), the model's ``.grad`` is
        afterwards a placeholder, with which the script computes as with the whole gradient; such a computation may be
        collective. With parameter servers, and for rows of tensor slices, it raises UsageError when it is read. The
        update uses the true gradients.

        Args:
            held: result of ``pop_gradients``: gradients by parameter object of the optimizer; may be empty.
        """

    def trained_tensors(self) -> list[Tensor]:
        """Return the data of all trained parameters as this rank stores them.

        A custom training loop compares their sums before and after the loop body, to find parameters that the body has
        written.

        Returns:
            A detached tensor for each parameter that shares its memory: the full tensor, a slice (tensor parallelism)
            or this rank's rows (ZeRO stage 1, FSDP2). The order is that of ``script_parameters``. Each update changes
            the tensors; clone what is to be kept.
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
        """Make the coming update use what the script has written into ``.grad``, such as clipped gradients.

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
        where it has several. Otherwise nothing is sent. Under local SGD in a step with updates of its own, the norm is
        that of this rank's worker.

        Args:
            members: the parameters, as objects of the script's model; those without a gradient count as 0.
            step_context: facts of the step, such as its number, which the ranks of a replica compare.

        Returns:
            The norm as a Python float, without loss scale; equal on all ranks, except where it is a worker's own.

        Raises:
            MismatchError: the ranks of a replica are in different steps.
            ValueError: with parameter servers, always: the gradients are there.
        """

    def stepping(self, index: int | None, members: Sequence[nn.Parameter]) -> AbstractContextManager[None]:
        """Return a context in which ``optimizer_step`` updates the parameters of a single optimizer of the script.

        Args:
            index: position, from 0, of the optimizer in the list of optimizers that ``tutti.prepare`` got. None: within
                the context ``optimizer_step`` steps every optimizer of the script.
            members: the parameters that the optimizer at ``index`` updates, as objects of the script's model; the only
                ones whose gradients are clipped. Ignored where ``index`` is None.

        Returns:
            A context manager that yields nothing. Entering and leaving it send nothing.
        """

    def clip_gradients(self, norm: float) -> float:
        """Scale the gradients, within ``stepping`` those of one optimizer, to at most the run's clipping norm.

        Does nothing in a run without such a norm. Not collective.

        Args:
            norm: L2 norm of these gradients of the whole model, equal on all ranks.

        Returns:
            The norm afterwards.

        Raises:
            ValueError: with parameter servers, always: they clip.
        """

    def steps_whole(self, optimizer: Optimizer) -> bool:
        """Return whether the script's optimizer object itself updates full parameters on this rank.

        Only then can its ``step`` call a closure (LBFGS); False where shards, servers or another rank make the update.

        Args:
            optimizer: one of the script's optimizers.
        """


class AloneLoopSync(CustomLoopSync, Protocol):
    """A ``CustomLoopSync`` where each logical worker makes updates of its own (local SGD), with one worker a rank.

    A logical worker is one of N fixed shares of the global batch. In a step with updates of its own, a custom training
    loop calls these methods in place of ``end_worker``, ``reduce_gradients`` and ``optimizer_step``.
    """

    def updates_alone(self, step_context: StepContext) -> bool:
        """Return whether each worker makes updates of its own in this step, with the gradient of its own samples.

        False in synchronous steps, with which a run may begin.

        Args:
            step_context: the step under way.
        """

    def end_own(self, worker: int, part: LossSums | None) -> None:
        """Make ``.grad`` the gradient of the mean over a worker's own samples, and note its loss sums. Not collective.

        Args:
            worker: index of the logical worker.
            part: the worker's sums of loss, count and metrics; None if the worker has no samples in this step.
        """

    def reduce_losses(self, step_context: StepContext) -> StepStats:
        """Return loss, metrics and mean gradient norm over all workers, from the sums that ``end_own`` noted.

        Collective over the data ranks: an all-to-all and an all-gather of a few numbers a worker. Gradients are not
        exchanged.

        Args:
            step_context: the step under way, which is compared over the ranks.

        Returns:
            A ``StepStats``, equal on all ranks; ``finite`` is False where the gradient of any worker is not finite.

        Raises:
            MismatchError: ranks are in different steps, or make different calls.
        """

    def step_own(self, step_context: StepContext) -> UpdateResult:
        """Clip the worker's own gradient and step its optimizer; skip the update where the gradient is not finite.

        Within ``stepping`` only one of the worker's optimizers. Not collective.

        Args:
            step_context: the step under way, with the factor on the initial learning rates.

        Returns:
            An ``UpdateResult``: ``skipped``, and then ``nonfinite``, are those of this worker alone.
        """

    def end_step(self, step_context: StepContext) -> bool:
        """Average the workers' parameters if that is due after this step; all updates of the step must have been made.

        Called on every rank after each step, synchronous steps included. Collective over the data ranks in every H-th
        step of own updates, where the average is due: an all-to-all and an all-gather for each dtype; DiLoCo then makes
        its outer update. In other steps nothing is sent.

        Args:
            step_context: the step that ends; its number decides whether the average is due.

        Returns:
            Whether the parameters have been averaged, so that they are those of the whole run now.

        Raises:
            UsageError: the script has written frozen parameters, which the workers of this rank share.
        """
