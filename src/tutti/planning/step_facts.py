"""Sizes of what a training step computes and sends: parameters, stages, gradient buckets, rows, tensor messages."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

import torch

from tutti.comm.partition import even_share
from tutti.comm.shared_memory import SMALL_BYTES
from tutti.comm.tree_sum import tree_sum_traffic
from tutti.config.layout_config import HybridConfig, LayersConfig, PipelineConfig
from tutti.config.strategy_choice import StrategyChoice
from tutti.config.sync_config import RowsConfig, ShardedConfig
from tutti.parallel.ddp.buckets import Tail, plan_buckets
from tutti.parallel.local_sgd.local_sgd import STEP_SUMS
from tutti.planning.step_program import GradientVector, PeriodicCollective
from tutti.workload.message_log import GroupMessage
from tutti.workload.workload_file import LOSS, REST, Workload

_MEGABYTE = 1 << 20
_BUCKET_MB = 25.0
_WIRE_BYTES = {"bf16": 2, "fp16": 2}


@dataclass(frozen=True)
class TensorFacts:
    """Name, shape and dtype of a parameter of the model, or of one rank's slice of it; holds no tensor.

    A module group is a module that FSDP wraps or a pipeline stage calls, the rest of the model, or the loss.

    Attributes:
        name: name of the parameter in the model.
        group: name of the module group that holds the parameter.
        shape: shape of the parameter; of the first tensor rank's slice where the layer is split over tensor ranks, and
            of a rank's flattened rows in the result of ``row_tensors``.
        dtype: dtype of the parameter.
    """

    name: str
    group: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @cached_property
    def elements(self) -> int:
        """Number of elements of the parameter, or of one rank's slice of it: the product of ``shape``."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Bytes of the parameter, or of one rank's slice of it: ``elements`` × bytes of an element of ``dtype``."""
        return self.elements * self.dtype.itemsize

    def padded(self, ranks: int) -> int:
        """Return the number of the parameter's elements on all ranks if its rows are sharded evenly, padding included.

        Rows are slices along the first dimension. Padding gives every rank as many rows as the rank with the most has.

        Args:
            ranks: number of ranks over which the rows are sharded.
        """
        rows = self.shape[0] if self.shape else 1
        return len(even_share(rows, ranks, 0)) * ranks * (self.elements // max(rows, 1))


@dataclass(frozen=True)
class StageFacts:
    """Module groups, parameters and outgoing activations of the virtual stages of a pipeline.

    A module group is a module that a pipeline stage calls, the rest of the model, or the loss.

    Attributes:
        groups: names of the module groups of each virtual stage.
        tensors: indices of the trainable parameters of each virtual stage in ``StepFacts.tensors``.
        crossing: names of the module groups whose outputs cross each cut between two neighbouring virtual stages, from
            a stage before to a stage after the cut.
    """

    groups: tuple[tuple[str, ...], ...]
    tensors: tuple[tuple[int, ...], ...]
    crossing: tuple[tuple[str, ...], ...]

    def held(self, rank: int, ranks: int) -> list[int]:
        """Return the trainable parameters of all virtual stages of a pipeline rank, each once.

        Args:
            rank: index of the pipeline rank; of p ranks, rank r has the virtual stages r, r + p, r + 2p, ….
            ranks: number of pipeline ranks.

        Returns:
            Indices in ``StepFacts.tensors``, in the order of the virtual stages.
        """
        return list(dict.fromkeys(place for row in self.tensors[rank::ranks] for place in row))

    def tied(self, ranks: int) -> dict[tuple[int, ...], list[int]]:
        """Return the trainable parameters that several pipeline ranks hold, such as weights tied over stages.

        Args:
            ranks: number of pipeline ranks.

        Returns:
            A dict from each group of pipeline ranks (a tuple in ascending order) that hold copies of the same
            parameters to the indices of these parameters in ``StepFacts.tensors``, in ascending order. Empty where no
            parameter has copies.
        """
        holders: dict[int, list[int]] = {}
        for rank in range(ranks):
            for place in self.held(rank, ranks):
                holders.setdefault(place, []).append(rank)
        found: dict[tuple[int, ...], list[int]] = {}
        for place, group in sorted(holders.items()):
            if len(group) > 1:
                found.setdefault(tuple(group), []).append(place)
        return found


@dataclass(frozen=True)
class StepFacts:
    """Work, parameters and collectives of one training step of a model, before durations on a machine are known.

    A module group is a module that FSDP wraps or a pipeline stage calls, the rest of the model, or the loss.

    Attributes:
        workload: FLOP, bytes and calls of the model and its loss, by module group.
        tensors: trainable parameters, in the model's order; slices of the first tensor rank where layers are split.
        stages: stages of a pipeline; None without one.
        frozen: parameters that are not trained, in the model's order.
        messages: collectives over the tensor ranks in one micro-batch, in order, by choice of activation checkpointing;
            empty where no layer is split.
        whole: the same facts for the model on one device, without stages; None where no layer is split over tensor
            ranks.
    """

    workload: Workload
    tensors: tuple[TensorFacts, ...]
    stages: StageFacts | None = None
    frozen: tuple[TensorFacts, ...] = ()
    messages: Mapping[str, tuple[GroupMessage, ...]] = field(default_factory=dict)
    whole: StepFacts | None = None

    def without_tensor_parallelism(self) -> StepFacts:
        """Return FLOP, parameters and collectives of a training step of the same model without tensor parallelism.

        Returns:
            Where layers are split over tensor ranks, the facts of the whole model on one device, also without pipeline
            stages (``whole``). Otherwise this object itself, with its pipeline stages if it has any.
        """
        return self.whole or self


def whole_gradient_bytes(facts: StepFacts, places: Sequence[int] | None = None, shards: int = 1) -> list[int]:
    """Return the bytes of the gradients that every tensor-parallel rank holds whole, such as those of norm layers.

    Args:
        facts: FLOP, parameters, pipeline stages and tensor-parallel collectives of a step of the model.
        places: indices in ``facts.tensors`` of the parameters that count, such as those of a pipeline stage; None for
            all.
        shards: number of ranks over which the rows of each gradient are sharded; 1 for unsharded gradients.

    Returns:
        Bytes on the first of the ``shards`` ranks, which has most: one int for each dtype, in the order of the dtypes'
        names. Empty where no layer is split.
    """
    if facts.whole is None:
        return []
    shapes = {tensor.name: tensor.shape for tensor in facts.whole.tensors}
    here = facts.tensors if places is None else [facts.tensors[place] for place in places]
    return [*rank_row_bytes([tensor for tensor in here if shapes[tensor.name] == tensor.shape], shards).values()]


def pipeline_layout(choice: StrategyChoice, shape: Mapping[str, int]) -> PipelineConfig | LayersConfig | None:
    """Return the stage options of a parallel strategy that cuts each replica of the model into stages; else None.

    Args:
        choice: a parallel strategy with its options, as parsed from ``--strategy``.
        shape: size of each dimension of the device mesh by its name; of these ``stage`` is read, for ``hybrid`` only.

    Returns:
        A ``PipelineConfig`` (micro-batches pass through the stages in a schedule: ``schedule``, ``micro_batches``,
        ``virtual``) or a ``LayersConfig`` (the stages compute one after the other), both with the number of stages and
        the names of the modules that begin them. None for a strategy without stages, and for ``hybrid`` with one stage.
    """
    layout = choice.layout
    if not isinstance(layout, PipelineConfig | LayersConfig):
        return None
    return layout if not isinstance(layout, HybridConfig) or shape["stage"] > 1 else None


def zero_stage(choice: StrategyChoice, shape: Mapping[str, int]) -> int:
    """Return the ZeRO stage of a strategy on a device mesh; 0 for a strategy that does not shard by rows.

    For ``sharded`` with a single shard the stage is 1, whatever the option ``stage``: ranks then hold whole tensors.

    Args:
        choice: a parallel strategy with its options, as parsed from ``--strategy``.
        shape: size of each dimension of the device mesh by its name; of these ``shard`` is read.
    """
    sync = choice.sync
    if isinstance(sync, RowsConfig) and shape["shard"] > 1:
        return sync.stage
    return int(isinstance(sync, ShardedConfig))


def gradient_vectors(
    tensors: Sequence[TensorFacts], wire: str = "fp32", bucket_mb: float | None = None
) -> list[GradientVector]:
    """List the flat vectors that data ranks all-reduce in a step: gradient buckets, then loss sums and flags.

    The flags say for each parameter whether it had a gradient. Loss sums and flags are appended to the last bucket if
    its gradients are fp32 or fp64 and ``wire`` is ``fp32``; otherwise they are a float64 vector of their own.

    Args:
        tensors: trainable parameters, in the model's order.
        wire: dtype of the messages: ``fp32`` (as the gradients), ``bf16`` or ``fp16``.
        bucket_mb: megabytes (2²⁰ bytes) of a bucket; None: 25.

    Returns:
        One element for each vector, the bucket of the last parameters first: indices of its parameters in ``tensors``
        (``parameters``), its number of ``elements``, and the bytes of an element in messages (``itemsize``).
    """
    tail = Tail(len(tensors), 0).size
    groups = plan_buckets([(t.bytes, str(t.dtype)) for t in tensors], int((bucket_mb or _BUCKET_MB) * _MEGABYTE))
    found = []
    rides = False
    for number, group in enumerate(groups):
        dtype = tensors[group[0]].dtype
        rides = number == len(groups) - 1 and wire == "fp32" and dtype in (torch.float32, torch.float64)
        elements = sum(tensors[place].elements for place in group) + tail * rides
        found.append(GradientVector(tuple(group), elements, _WIRE_BYTES.get(wire, dtype.itemsize)))
    if not rides:
        found.append(GradientVector((), tail, torch.float64.itemsize))
    return found


def local_sgd_collectives(
    tensors: Sequence[TensorFacts], ranks: int, workers: int, period: int, rank: int = 0
) -> list[PeriodicCollective]:
    """List the collectives that a rank makes in local SGD: loss sums in each step, parameters once in a period.

    Args:
        tensors: trainable parameters.
        ranks: number of data ranks.
        workers: number of logical workers (fixed shares of the global batch) over all ranks.
        period: steps between two averages of the parameters.
        rank: index of the data rank; rank 0 has most workers.

    Returns:
        Pairs of an all-to-all and an all-gather: first one pair for the loss sums, then one pair for the parameters of
        each dtype. Each collective has ``kind``, ``bytes`` of the whole tensor and ``period`` in steps. Empty for one
        data rank.
    """
    lengths: Counter[torch.dtype] = Counter()
    for tensor in tensors:
        lengths[tensor.dtype] += tensor.elements
    sums = [(STEP_SUMS, torch.float64, 1), *((n, dtype, period) for dtype, n in sorted(lengths.items(), key=str))]
    return [
        PeriodicCollective(kind, size, every)
        for length, dtype, every in sums
        for kind, size in tree_sum_traffic(ranks, workers, rank, length, dtype.itemsize).items()
    ]


def row_bytes(tensors: Sequence[TensorFacts], ranks: int) -> list[int]:
    """Return the bytes of each gradient bucket that ZeRO stage 1 reduce-scatters, padded to equal rows on all ranks.

    Rows are slices of a parameter along its first dimension. A bucket's bytes are those on all ranks together, with the
    padding of each parameter's rows to a multiple of ``ranks``.

    Args:
        tensors: trainable parameters, in the model's order.
        ranks: number of ranks that shard the optimizer state.

    Returns:
        Bytes for each bucket, in the order in which backward completes buckets: the last parameters first.
    """
    buckets = plan_buckets([(t.bytes, str(t.dtype)) for t in tensors], int(_BUCKET_MB * _MEGABYTE))
    return [sum(tensors[i].padded(ranks) * tensors[i].dtype.itemsize for i in group) for group in buckets]


def rank_row_bytes(tensors: Sequence[TensorFacts], ranks: int) -> dict[str, int]:
    """Return the bytes of the first rank's shards of tensors whose rows are sharded over ranks, by dtype.

    The first rank has at least as many rows (slices along the first dimension) as any other.

    Args:
        tensors: trainable parameters.
        ranks: number of ranks over which the rows are sharded.

    Returns:
        Bytes by name of the dtype, such as ``torch.float32``.
    """
    sizes: Counter[str] = Counter()
    for tensor in tensors:
        sizes[str(tensor.dtype)] += tensor.padded(ranks) // ranks * tensor.dtype.itemsize
    return dict(sorted(sizes.items()))


def row_tensors(tensors: Sequence[TensorFacts], ranks: int) -> list[TensorFacts]:
    """Return the facts of one rank's rows of each sharded parameter as a flat tensor, padding included.

    Args:
        tensors: facts of the whole trainable parameters.
        ranks: number of ranks over which the rows (slices along the first dimension) are sharded.

    Returns:
        A copy of each of ``tensors``, in order, with a 1-d shape: the elements of the rows of the rank with the most
        rows, to which the other ranks are padded.
    """
    return [replace(tensor, shape=(tensor.padded(ranks) // ranks,)) for tensor in tensors]


def unwrapped_tensors(facts: StepFacts) -> list[TensorFacts]:
    """Return the trainable parameters that FSDP2 does not shard: scalars, and parameters of an unusual dtype.

    The usual dtype is that of most elements of the model's trainable parameters; all other dtypes are unusual. In a run
    tutti shards the optimizer state of these parameters as in ZeRO stage 1.

    Args:
        facts: FLOP, parameters, pipeline stages and tensor-parallel collectives of a step of the model; only the
            parameters are read.

    Returns:
        A list with one ``TensorFacts`` for each such parameter, in the model's order: ``name``, ``shape``, ``dtype``,
        and ``group``, the name of the FSDP-wrapped module that holds it, or of the rest of the model.
    """
    counts: Counter[torch.dtype] = Counter()
    for tensor in (*facts.tensors, *facts.frozen):
        counts[tensor.dtype] += tensor.elements * (tensor not in facts.frozen)
    usual = counts.most_common(1)[0][0] if counts else torch.float32
    return [tensor for tensor in facts.tensors if not tensor.shape or tensor.dtype != usual]


def module_bytes(facts: StepFacts, ranks: int, *, frozen: bool = False) -> dict[str, int]:
    """Return the bytes of the parameters that FSDP all-gathers for each module group, with the padding of rows.

    A module group is a module that FSDP wraps or a pipeline stage calls, the rest of the model, or the loss. Rows
    (slices along the first dimension) are padded to a multiple of ``ranks``. Parameters that FSDP2 does not shard are
    left out: scalars, and trainable parameters of another dtype than that of most trainable elements.

    Args:
        facts: FLOP, parameters, pipeline stages and tensor-parallel collectives of a step of the model.
        ranks: number of ranks over which the rows are sharded.
        frozen: include parameters that are not trained, which are gathered and have no gradient.

    Returns:
        Bytes on all ranks together, by name of the module group; 0 for a group without such parameters.
    """
    rest, sizes = unwrapped_tensors(facts), {group.name: 0 for group in facts.workload.groups}
    for tensor in (*facts.tensors, *(facts.frozen if frozen else ())):
        if tensor not in rest and tensor.shape:
            sizes[tensor.group] += tensor.padded(ranks) * tensor.dtype.itemsize
    return sizes


def wrapped_module_count(gathered: Mapping[str, int]) -> int:
    """Return the number of FSDP-wrapped modules with parameters, without the root module that wraps the model.

    Args:
        gathered: bytes of parameters by name of the module group (a wrapped module, the rest of the model, or the
            loss), from ``module_bytes``.
    """
    return sum(bool(size) for name, size in gathered.items() if name not in (REST, LOSS))


def carried(kind: str, ranks: int, size: float, *, cpu: bool, shared: bool, axis: str = "data") -> PeriodicCollective:
    """Return the backend collective that tutti's communicator really runs for a requested collective, and its bytes.

    On CPUs a reduce-scatter runs as an all-to-all, after which each rank adds up its slices, because Gloo's
    reduce-scatter is an all-reduce. On CPU ranks of one node, a collective of small tensors goes through shared memory:
    each rank reads the tensors of all ranks. Small is at most 1 MiB (``SMALL_BYTES``) in the tensor that one rank
    contributes: ``size`` / ``ranks`` for an all-gather, ``size`` for others.

    Args:
        kind: requested collective: ``all_reduce``, ``all_gather`` or ``reduce_scatter``.
        ranks: number of ranks.
        size: bytes of the whole tensor: the vector to sum or to scatter, or the gathered result.
        cpu: whether the ranks compute on CPUs.
        shared: whether the ranks are on one node and may use shared memory.
        axis: copied into the result: axis of the device mesh along which the ranks lie, ``data``, ``shard``,
            ``replica``, ``tensor`` or ``model``.

    Returns:
        One call in each step. Its ``kind`` is ``shared_memory``, ``all_to_all`` (for a reduce-scatter on CPUs) or the
        requested kind; its ``bytes`` are all ranks' contributions together for ``shared_memory``, and ``size``
        otherwise.

    >>> carried("reduce_scatter", 2, 1 << 22, cpu=True, shared=True)
    PeriodicCollective(kind='all_to_all', bytes=4194304, period=1, axis='data', stage=0, calls=1)
    """
    mine = size / ranks if kind == "all_gather" else size
    if cpu and shared and mine <= SMALL_BYTES:
        return PeriodicCollective("shared_memory", round(mine * ranks), axis=axis)
    return PeriodicCollective("all_to_all" if cpu and kind == "reduce_scatter" else kind, round(size), axis=axis)


def totals_bytes(tensors: Sequence[TensorFacts]) -> int:
    """Return the bytes of the small all-reduce at the end of a training step with ZeRO sharding.

    The message is a float64 vector: digests (hashes by which ranks check that they are in the same step), loss sums, a
    stop flag, a flag for each parameter that says whether it had a gradient, and the squared gradient norm.

    Args:
        tensors: trainable parameters; only their number counts.
    """
    return 8 * (Tail(len(tensors), 0).size + 1)


def crossing_groups(uses: Mapping[str, tuple[int, int]], bounds: Sequence[int]) -> tuple[tuple[str, ...], ...]:
    """Return for each cut between pipeline stages the names of the modules whose output a later stage needs.

    A node is one operation of the model's traced forward, in order.

    Args:
        uses: name of a module → index of the node that calls the module, index of the last node that uses its output.
        bounds: index of the first node of each stage, and at the end the number of nodes.

    Returns:
        One tuple of names for each cut, in order; a stage's outputs are also named at later cuts that they cross.

    >>> crossing_groups({"a": (0, 2), "b": (1, 2), "c": (2, 3)}, [0, 1, 2, 3])
    (('a',), ('a', 'b'))
    """
    inner = [high for _, high in pairwise(bounds)][:-1]
    return tuple(tuple(name for name, (place, last) in uses.items() if place < cut <= last) for cut in inner)
