"""The nouns that rooms share. No torch at run time: ``tutti --help`` reads this file.

Layouts, exchanges and optimizers never import each other; they meet in the protocols below.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeAlias

from tutti.laws.averaging import Averaging

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from tutti.comm.communicator import Communicators
    from tutti.world.grid import Grid

Batch: TypeAlias = Any
"""What a loss function is given: a tensor, or a tuple, list or dict of them, first dimension the samples."""

LossFn: TypeAlias = "Callable[[Any, Batch], Any]"
"""``loss_fn(model, batch)`` → a scalar (mean over samples), ``(sum, count)``, or ``(sum, count, metric_sums)``.

A 1-d tensor of one loss a sample may stand in place of the mean or of the sum."""


@dataclass(frozen=True)
class Cell:
    """One micro-batch of one worker: the unit of computation.

    Attributes:
        worker: logical replica, 0 … N-1.
        micro: index of this micro-batch within the worker's share of the global batch.
        batch: the samples.
        samples: how many they are; 0 for a stand-in, which an own loop computes on and which counts for nothing.
        weight: loss scale / samples in the global batch; a sample's part in the gradient that backward makes.
        key: 64-bit key of this cell's random draws, a function of (seed, step, worker, micro).
        last: whether this is the worker's last micro-batch in this step.
        noise: standard deviation σ of the weights z ~ N(1, σ²) on its samples' losses.
    """

    worker: int
    micro: int
    batch: Batch
    samples: int
    weight: float
    key: int
    last: bool
    noise: float = 0.0


@dataclass
class Totals:
    """Sums over samples. ``lanes`` is a float tensor ``[loss_sum, count, *metric_sums]`` on the compute device.

    ``names`` are those of the metric sums, in order. ``samples`` is the number of samples, which the count that a loss
    function gives may differ from (tokens, pixels). Two totals of the same names add lane by lane.
    """

    lanes: Tensor
    names: tuple[str, ...] = ()
    samples: int = 0

    def __add__(self, other: Totals) -> Totals:
        return Totals(self.lanes + other.lanes, self.names or other.names, self.samples + other.samples)


@dataclass(frozen=True)
class ShardSpec:
    """Where a local tensor sits in the global one: its global shape, this rank's slice, and its other names.

    ``blocks``: so many equal parts of the first dimension are split alike, as queries, keys and values in one matrix;
    this rank has the same slice of each, one behind the other, and ``offset`` is that in the first. ``rows``: the local
    tensor is not all of these slices, but has their rows from the first number on, of as many as the second says.
    """

    shape: tuple[int, ...]
    offset: tuple[int, ...]
    tied: tuple[str, ...] = ()
    blocks: int = 1
    rows: tuple[int, int] | None = None

    def regions(self, local: Sequence[int]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Offset and shape in the global tensor of what a local tensor of shape ``local`` is made of, row by row.

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
        """Of rows from ``begin`` on of a local tensor of shape ``local`` that is as this says."""
        if self.blocks > 1:
            return replace(self, rows=(begin, local[0]))
        return replace(self, offset=(self.offset[0] + begin, *self.offset[1:]))


class Piece(NamedTuple):
    """A tensor's part that this rank holds, where it does not hold all of it, and where that sits.

    ``shape``, ``offset``, ``blocks`` and ``rows`` as in ``ShardSpec``.
    """

    tensor: Tensor
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    blocks: int = 1
    rows: tuple[int, int] | None = None


@dataclass(frozen=True)
class Tick:
    """What is the same for all workers in one step.

    Attributes:
        clock: steps taken before this one.
        samples: samples in this step's global batch; of a batch of the caller's own, those of the batch contract.
        lr_factor: factor on every parameter group's initial learning rate; None leaves the rate to the user.
        stop: this rank asks all to stop after the step; not the same for all, and so agreed on with the totals.
        loss_scale: what backward's gradients are too large by; the exchange divides by it before it looks at them.
    """

    clock: int
    samples: int
    lr_factor: float | None = None
    stop: bool = False
    loss_scale: float = 1.0


class Spread(NamedTuple):
    """How large the workers' own gradients were, before clipping and without loss scale.

    ``mean_of_squares`` is Σ pᵢ‖gᵢ‖², pᵢ a worker's part of all counts; ``workers``: how many had any.
    """

    mean_of_squares: float
    workers: int


@dataclass(frozen=True)
class Agreed:
    """What all ranks know alike once gradients are exchanged: sums over the global batch and the gradient's norm."""

    loss: float
    count: float
    metrics: Mapping[str, float]
    grad_norm: float
    finite: bool
    stop: bool = False
    spread: Spread | None = None


@dataclass(frozen=True)
class Update:
    """What the update did: how many writes of the parameters it counts for, or which gradients stopped it.

    ``together``: the parameters here are now the whole run's, and not one worker's own. ``clock``: steps that all
    workers have made together, where the run counts those and not each rank its own.
    """

    updates: int
    skipped: bool = False
    nonfinite: tuple[str, ...] = ()
    together: bool = True
    clock: int | None = None


@dataclass(frozen=True)
class StepRecord:
    """One line of ``metrics.jsonl``."""

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


OptimizerFactory: TypeAlias = "Callable[[Sequence[tuple[str, nn.Parameter]]], Optimizer | None]"
"""Builds an optimizer over the named parameters that live here (None where none of them is trained); an exchange may
call it several times."""


class Norms(Protocol):
    """Completes the norms of tensors of which this rank holds pieces. What an exchange gives a layer-wise optimizer."""

    def __call__(self, squares: Tensor) -> Tensor:
        """Sums of squares of whole tensors from those of the pieces here, float64 on the CPU; one message for all.

        Every rank calls it with as many numbers in the same order. A tensor of which several ranks hold the same copy,
        such as weights tied over two stages, is counted once: its number is passed on, not added up.
        """


class Wholes(Protocol):
    """Makes whole tensors of the slices that ranks hold. What an exchange gives an optimizer that needs matrices whole.

    Every rank calls ``gather`` for the same parameters in the same order. One that is not split is passed on.
    """

    def gather(self, parameter: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Whole ones, from this rank's slices of tensors that lie as ``parameter`` does. Collective."""

    def mine(self, parameter: Tensor, whole: Tensor) -> Tensor:
        """This rank's slice of a tensor that is as ``parameter`` is when whole."""


@dataclass(frozen=True)
class Setting:
    """What a layout and an exchange are told about the run.

    Attributes:
        grid: all ranks by axis, and which one this is.
        comms: communicators along the grid's axes.
        workers: logical replicas N.
        mine: the contiguous workers that this data rank plays.
        reproducible: bit-identical on any number of data ranks.
        clip: largest gradient norm, None for no clipping.
        averaging: of the weights over the updates, None for none.
        activation_checkpointing: ``none``, ``blocks`` or ``selective`` with options, or names and classes of modules.
        compile: mode and options of ``torch.compile``, or ``none``.
        spread: measure each worker's own gradient before the sum: ``Agreed.spread``.
        draws: whether the model may draw random numbers in training.
        in_step: whether every rank makes as many steps as the run has.
        trial: calls the loss function on a model with a real micro-batch, or no more samples of it than the second
            argument says; None where there is none at hand.
        rows: the exchange leaves rows of the parameters alone, and moves them to the device itself.
    """

    grid: Grid
    comms: Communicators
    workers: int
    mine: range
    reproducible: bool = False
    clip: float | None = None
    averaging: Averaging | None = None
    activation_checkpointing: str | Sequence[str | type[nn.Module]] = "none"
    compile: str = "none"
    spread: bool = False
    draws: bool = True
    in_step: bool = True
    trial: Callable[..., Any] | None = None
    rows: bool = False


class GradSink(Protocol):
    """Receives a replica's gradients as backward produces them."""

    def arm(self, part: Totals | None) -> None:
        """Called between forward and backward of a worker's last cell, with its totals where this rank knows them."""

    def ready(self, parameter: Tensor) -> None:
        """``parameter.grad`` now holds the sum over the cells run so far. Usable as an autograd hook."""


class Replica(Protocol):
    """One model as laid out over stages and tensor ranks: the parts that live on this rank, and how to run them.

    ``specs`` has every parameter and persistent buffer here by its name in the plain model. ``borrowed`` names those
    that another rank of this replica holds just the same, and that are its to count in norms and to save; where it has
    one under another name, that is among the ``tied`` names here. ``said`` is for the run's header. ``sharded`` has the
    parameters of which an exchange leaves only rows here, as plain tensors: a forward gathers them, so that all ranks
    must run as many. ``holding`` is how other values are put in for a while.
    """

    parts: Sequence[nn.Module]
    specs: Mapping[str, ShardSpec]
    borrowed: Collection[str]
    said: Mapping[str, str]
    sharded: Mapping[str, Tensor]
    holding: Callable[[Mapping[str, Tensor]], AbstractContextManager[None]]

    def connect(self, sink: GradSink) -> None:
        """Report every gradient of ``run`` to ``sink`` from now on."""

    def replaced(self, by: Mapping[nn.Parameter, nn.Parameter]) -> None:
        """The parts now compute with other objects in place of some parameters."""

    def run(self, cells: Sequence[Cell], loss: LossFn, sink: GradSink | None) -> Totals:
        """Forward, and with a sink backward, of one worker's cells in order; totals are known on every rank."""

    def evaluating(self, values: Mapping[str, Tensor]) -> AbstractContextManager[None]:
        """Within the block the model here holds ``values``, does not train and records nothing."""


class OwnLoopReplica(Replica, Protocol):
    """A replica whose forward the caller may run: it is one module."""

    def begin(self, cell: Cell) -> None:
        """Enter a cell's random stream."""

    def backward(self, result: Any, cell: Cell, before: Totals | None, sink: GradSink) -> Totals:
        """Backward of one cell from what its loss function gave; the worker's totals so far, zero of a stand-in."""


class Layout(Protocol):
    """Answers *where does one replica live?*"""

    def build(self, plain: nn.Module) -> Replica:
        """Place ``plain`` on this rank's share of the grid."""


class SavedState(Protocol):
    """A checkpoint as exchanges read it."""

    def names(self, group: str) -> Collection[str]:
        """Names of the tensors in ``model``, ``ema``, ``optim`` or ``workers``; none where the group is not there."""

    def get(self, group: str, name: str) -> Tensor:
        """One whole tensor on the CPU."""

    def shape(self, group: str, name: str) -> tuple[int, ...]:
        """Of one whole tensor."""

    def part(self, group: str, name: str, offset: Sequence[int], shape: Sequence[int]) -> Tensor:
        """The region of ``shape`` at ``offset`` of one tensor, on the CPU."""


class Average(Protocol):
    """An average of the weights over the updates of a run."""

    updates: int

    def update(self) -> None:
        """Take in the parameters as they are after an update."""

    def within(self, merged: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The merged model with the average for its trained parameters, and its own buffers."""

    def state(self) -> Mapping[str, Mapping[str, Tensor | Piece]]:
        """What this rank writes of it into a checkpoint, as ``Exchange.state``."""

    def load(self, saved: SavedState, updates: int) -> None:
        """Become the average in ``saved``, of so many updates; where it has none, begin anew at its weights."""


class Exchange(Protocol):
    """Answers *how do replicas agree?* and owns the update."""

    gradient_over: Literal["step", "worker"]
    """What one gradient is the mean over: the global batch, or the worker's own share of it."""

    optimizers: Sequence[Optimizer]

    def attach(self, replica: Replica, make_optimizer: OptimizerFactory) -> GradSink:
        """Take the replica over: verify that ranks hold the same, broadcast data rank 0's state. Collective."""

    def enter(self, worker: int, tick: Tick) -> None:
        """Swap ``worker``'s own state in (buffers; parameters where workers differ)."""

    def leave(self, worker: int, part: Totals | None) -> None:
        """Take over its gradients and totals (None: it had no samples), or do its inner update."""

    def finish(self, tick: Tick) -> Agreed:
        """Complete the exchange of this step's gradients and totals. Collective."""

    def update(self, agreed: Agreed, tick: Tick) -> Update:
        """Write the parameters, or skip where the gradient is not finite."""

    def merged(self) -> dict[str, Tensor]:
        """Parameters and buffers here as *one* model: workers merged in worker order. Collective."""

    def state(self) -> Mapping[str, Mapping[str, Tensor | Piece]]:
        """What this rank writes into a checkpoint, by group; all ranks' parts together are the whole. Collective.

        ``model`` and ``optim`` say nothing of the strategy; ``workers`` holds what is each worker's own.
        """

    def load(self, saved: SavedState) -> None:
        """Become what ``saved`` says; what is missing of ``workers`` comes from the merged model."""

    def facts(self) -> Mapping[str, Any]:
        """What ``summary.json`` tells of the exchange, on rank 0. Not collective."""
