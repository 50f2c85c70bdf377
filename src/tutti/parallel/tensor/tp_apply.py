"""Apply a TP plan: slice a model's parameters and convert its layers on this tensor rank, in place."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import takewhile
from typing import Any

import torch
from torch import nn

from tutti.comm.broadcast import broadcast_result
from tutti.comm.differentiable import TensorRanks
from tutti.config.layout_config import TensorConfig
from tutti.errors import UsageError
from tutti.nn.ac_and_compile import restore_forwards
from tutti.nn.script_mode import ScriptMode
from tutti.nn.swap import describe_tensors, other_names, parameters
from tutti.parallel.ddp.replica_part import ReplicaPart
from tutti.parallel.ddp.sync_module_states import broadcast_state
from tutti.parallel.tensor.block_call import record_calls
from tutti.parallel.tensor.head_parallel import HeadParallelAttention
from tutti.parallel.tensor.local_shape import HeadParallelBlock, run_within
from tutti.parallel.tensor.loss_parallel_plan import add_loss_parallel, hooked
from tutti.parallel.tensor.slice_hooks import SliceHooks
from tutti.parallel.tensor.split_reads import SplitReads, watch_trial
from tutti.parallel.tensor.stacked_experts import ExpertParallelSlice, note_split
from tutti.parallel.tensor.tensor_slice import LayerSlice
from tutti.parallel.tensor.tp_layers import (
    ColumnParallelLinear,
    GatheredOutput,
    LossParallelLinear,
    ParallelDropout,
    RowParallelLinear,
    TensorParallelLayer,
    VocabParallelEmbedding,
    WidenedLayer,
    divide,
)
from tutti.parallel.tensor.tp_plan import (
    PlanEntry,
    PlanFinder,
    blocks_with_arguments,
    summary,
)
from tutti.parallel.tensor.tp_plan_by_hand import check_asked, roles_asked
from tutti.parallel.tensor.tp_verify import TensorCut
from tutti.parallel.tensor.unwrap_split import seen_as_shares
from tutti.parallel.tensor.whole_flop import whole_flop_share
from tutti.torch_compat import FUSED_ACTIVATION, module_parameters
from tutti.types.run_context import RunContext
from tutti.types.shard_spec import ShardSpec

_LARGE = 0.2
"""Share of whole parameters, or of whole FLOP, from which on the header warns."""
_KINDS: dict[str, type[TensorParallelLayer]] = {
    "column": ColumnParallelLinear,
    "row": RowParallelLinear,
    "heads": HeadParallelAttention,
    "vocabulary": VocabParallelEmbedding,
    "gathered": GatheredOutput,
    "scores": LossParallelLinear,
    "experts": ExpertParallelSlice,
    "dropout": ParallelDropout,
    "within": HeadParallelBlock,
    "widened": WidenedLayer,
}


class TensorParallelizer:
    """Derives the tensor-parallel (TP) plan of a whole model, and slices the model for this rank by it.

    The plan says which layers are split over the tensor ranks, and how. The constructor is collective over the ranks of
    one replica (stages and tensor ranks): these compare their models; the first tensor rank finds the plan, by
    computing with the model's blocks and with the loss function, and broadcasts it over the tensor ranks. All ranks of
    the job construct the object together, as its first use of the tensor axis makes process groups. The constructor
    leaves the parameters whole; ``apply`` slices them. With one tensor rank neither sends or splits anything.

    Args:
        plain: the whole model.
        run_context: mesh, communicators and flags of the run.
        config: options of tensor parallelism.

    Attributes:
        plan: entries of the modules that do not stay whole; empty with one rank.
        closed: names of blocks whose own forward runs on this rank's heads or features, and which a graph trace must
            not enter.
        parted: whether layers may return ``SplitTensor``s, outputs that stay split over ranks.

    Raises:
        MismatchError: the ranks have built different models.
        UsageError: the model is already split, or sequence parallelism meets hooks on the gradients of modules (also
            with one rank), or the user's plan by hand cannot be carried out.
    """

    def __init__(self, plain: nn.Module, run_context: RunContext, config: TensorConfig) -> None:
        self._comm, self._plain, self._config = run_context.comms.axis("tensor"), plain, config
        self._compiled, self._staged = run_context.compile is not None, run_context.mesh.stage > 1
        self._holders = self._comm if self._staged else run_context.comms.world
        self.plan: list[PlanEntry] = []
        self._said: dict[str, str] = {}
        if config.sequence:
            _check_sequence(plain)
        self._specs: dict[str, ShardSpec] = {}
        if self._comm.size > 1:
            _check(plain)
            restore_forwards(plain)
            run_context.comms.model.agree(describe_tensors([plain]), "the model", "build the same model on every rank")
            self.plan, whole_flop = self._find(plain, run_context)
            between = "; positions between them" if config.sequence else ""
            self._said = {"split": _said(plain, self.plan, self._comm.size, whole_flop) + between}
        self.parted = is_parted(self.plan, config)
        self.closed = closed_blocks(self.plan)

    def check(self, read: Collection[str]) -> None:
        """Check that tensor parallelism splits no parameter that is read outside of the forward of its own layer.

        Such a read, for example of ``embedding.weight`` in the model's own forward, would get this rank's slice. Not
        collective.

        Args:
            read: names of the parameters that are read outside of their layers' forwards.

        Raises:
            UsageError: the tensor-parallel plan (which layers are split, and how) splits one of them; the message names
                the option that leaves the layer whole.
        """
        split = {f"{entry.name}.{key}": entry.name for entry in self.plan for key in entry.cuts}
        for name in sorted(split.keys() & set(read)):
            raise UsageError(
                f"the model's own forward reads {name}, which would be split over tensor ranks",
                remedy=f"leave the layer whole: hybrid:whole={split[name]}",
            )

    def apply(self) -> None:
        """Slice the model's parameters as its tensor-parallel plan says and convert its layers, in place.

        The plan says which layers are split over the tensor ranks, and how. Parameters stay the same objects, which an
        optimizer may hold; the ``.data`` of a split one becomes a copy of this rank's slice and its ``.grad`` None.
        Collective over the tensor ranks: a broadcast of the first tensor rank's parameters and buffers, which the whole
        model takes over before it is sliced. With one rank nothing is done.

        Raises:
            PeerError: a rank is lost, or does not take part within the timeout.
        """
        if self._comm.size == 1:
            return
        broadcast_state(self._comm, [self._plain])
        self._comm.share_memory()
        ranks = TensorRanks(self._comm)
        self._specs = split_layers(self._plain, self.plan, ranks, sequence=self._config.sequence)
        _note_hookable(self._plain, self.plan, compiled=self._compiled)

    def split_parameters(self) -> dict[str, nn.Parameter]:
        """Return the model's parameters of which this tensor-parallel rank has a slice, by name in the model.

        The mapping is empty before ``apply`` has sliced the model, and with one rank.
        """
        return {name: p for name, p in parameters([self._plain]) if name in self._specs}

    def mark(self, replica: ReplicaPart) -> None:
        """Record in a replica which of its tensors are slices, and which of its whole tensors this rank does not save.

        Sets the replica's ``specs`` (position of each slice in the whole tensor), ``not_owned`` (names of tensors that
        another rank saves), ``summary`` (lines for the run's header), and the contexts and hook adapters by which reads
        and writes of slices by the script are checked. Tensors that are whole on every rank are owned by the first
        tensor rank, which alone counts them in norms and saves them. Not collective. With one rank nothing is done.

        Args:
            replica: replica whose modules ``apply`` has converted; changed in place.
        """
        if self._comm.size == 1:
            return
        here = {name: spec for name, spec in self._specs.items() if name in replica.specs}
        replica.summary = {**replica.summary, **self._said}
        split = self.split_parameters()
        specs = {name: self._specs[name] for name in split}
        mode = SplitReads(split, specs, _blocks(self._plain, self.plan), self._comm, self._holders)
        mode.gathers = not self._staged
        reads = ScriptMode(mode)
        if not self._staged:
            # Stages have different parameters, and so different edits.
            mode.edits.cover(dict(parameters(replica.parts)))
            replica.edits = mode.edits
        replica.around_fsdp_hooks, replica.slice_name = seen_as_shares, mode.name_of
        replica.also_seen = mode.also_seen
        replica.asks_sizes = lambda: mode.sizes_in_forward
        whole = dict(parameters([self._plain]))
        replica.adapt_hooks = SliceHooks(whole, mode, reads.script_code, sequence=self._config.sequence)
        replica.script_code, replica.model_code = reads.script_code, reads.model_code
        if self._comm.rank:
            replica.not_owned = {*replica.not_owned, *(name for name in replica.specs if name not in here)}
        replica.specs = {**replica.specs, **here}

    def _find(self, module: nn.Module, run_context: RunContext) -> tuple[list[PlanEntry], float | None]:
        """Broadcast the plan that the first rank finds, and the share of FLOP that stays whole, to all ranks."""
        comm, config, trial = self._comm, self._config, run_context.trial

        def find() -> tuple[list[Any], float | None]:
            plan = find_tp_plan(module, comm.size, config, trial, comm.device, compiled=run_context.compile is not None)
            return [entry.as_json() for entry in plan], whole_flop_share(module, plan, trial, comm.device)

        entries, whole_flop = broadcast_result(comm, 0, find, "plan of the split")
        plan = [PlanEntry.from_json(entry) for entry in entries]
        check_asked(plan, _asked(module, config))
        return plan, whole_flop


def find_tp_plan(
    module: nn.Module,
    ranks: int,
    config: TensorConfig,
    trial: Callable[..., Any] | None,
    device: torch.device,
    *,
    compiled: bool = False,
) -> list[PlanEntry]:
    """Derive the tensor-parallel plan of a model by computing with its blocks and its loss function. Not collective.

    The plan says which layers are split over the tensor ranks, and how. A block of the user's own class is in the plan
    only if outputs and gradients on slices of random numbers equal those of the whole block; for PyTorch's own
    attention, linear, convolution and embedding layers the splits are known to be right. ``trial`` runs several times.

    Args:
        module: the whole model, with real parameters; it stays as it was.
        ranks: number of tensor ranks.
        config: options of tensor parallelism.
        trial: ``trial(model, most)`` calls the loss function on a model with at most ``most`` samples of the data; its
            result is not used. None where no data is at hand: blocks are then computed with made arguments, and the
            model's output is gathered for the loss.
        device: device on which the loss function runs.
        compiled: whether the run compiles the model. If so, the model's output is gathered on every tensor rank, and
            never handed to the loss function in slices.

    Returns:
        One ``PlanEntry`` for each module that is split or computes on a slice, in the model's order: name, role (such
        as ``column``), the number of units that are divided, and how each parameter is cut. All other modules stay
        whole.

    Raises:
        UsageError: a pattern of the user's plan by hand matches no module, or a module of another kind than its style
            is for.
    """
    read, with_hooks = watch_trial(module, trial, device)
    whole = [*config.whole, *read]
    calls = record_calls(module, blocks_with_arguments(module), trial, device)
    asked = _asked(module, config) if config.plan else None
    # Compiled code takes no split tensors.
    finder = PlanFinder(
        module, ranks, config.least, whole, device.type == "cpu", calls, asked, parts=not compiled, hooked=with_hooks
    )
    return add_loss_parallel(module, finder.find(), None if compiled else trial, device)


def split_layers(
    plain: nn.Module, plan: Sequence[PlanEntry], ranks: TensorRanks, *, sequence: bool
) -> dict[str, ShardSpec]:
    """Slice the parameters of a model as its tensor-parallel plan says and convert its layers, in place.

    The ``.data`` of a split parameter becomes a copy of this rank's slice, its ``.grad`` None. Not collective.

    Args:
        plain: the whole model, with equal values on all tensor ranks.
        plan: for each module that does not stay whole: name, role (such as ``column``), units and cuts of its
            parameters.
        ranks: collectives of the split layers, with this rank's index and the number of tensor ranks.
        sequence: sequence parallelism: activations between the split layers are split by positions.

    Returns:
        A ``ShardSpec`` for each sliced parameter, by name: shape of the whole tensor and position of this rank's slice.
    """
    names = {id(p): name for name, p in parameters([plain])}
    tied, specs = other_names([plain]), dict[str, ShardSpec]()
    for entry in plan:
        layer = plain.get_submodule(entry.name)
        for key, cut in entry.cuts.items():
            parameter = module_parameters(layer)[key]
            if parameter is not None and names[id(parameter)] not in specs:
                name = names[id(parameter)]
                specs[name] = _cut(parameter, cut, ranks, tied.get(name, ()))
        _become(layer, entry, ranks, sequence)
    return specs


def is_parted(plan: Sequence[PlanEntry], config: TensorConfig) -> bool:
    """Return whether layers of a tensor-parallel plan may return outputs that stay split over ranks (``SplitTensor``).

    True for a plan with a layer of role ``scores`` (a last linear layer whose logits stay split by classes) or with a
    block that returns this rank's heads (attention weights), and for any plan with entries under sequence parallelism.

    Args:
        plan: entries of the modules that do not stay whole.
        config: options of tensor parallelism.
    """
    return bool(plan) and (config.sequence or any(entry.role == "scores" or entry.local.outs for entry in plan))


def closed_blocks(plan: Sequence[PlanEntry]) -> frozenset[str]:
    """Return the names of modules, such as attention, whose unchanged forward runs on this rank's heads or features.

    These modules have the role ``within`` or ``experts`` in the tensor-parallel plan. The forward is the user's code,
    and the layers or parameters in it are split; a graph trace must treat such a module as one operation.

    Args:
        plan: entries of the tensor-parallel plan, one for each module that does not stay whole.
    """
    return frozenset(entry.name for entry in plan if entry.role in ("within", "experts"))


def _blocks(plain: nn.Module, plan: Sequence[PlanEntry]) -> dict[nn.Module, nn.Module]:
    """Return, for each column-parallel layer, the module that holds it and the row-parallel layer after it."""
    return {plain.get_submodule(first): plain.get_submodule(block) for first, block, _ in _pairs(plan)}


def _pairs(plan: Sequence[PlanEntry]) -> Iterator[tuple[str, str, str]]:
    """Yield names: a column-parallel layer, the module that holds it and the row-parallel layer after it, and that."""
    for number, entry in enumerate(plan):
        last = next((other.name for other in plan[number + 1 :] if other.role == "row"), None)
        if entry.role == "column" and last is not None:
            common = [a for a, b in takewhile(_alike, zip(entry.name.split("."), last.split("."), strict=False))]
            yield entry.name, ".".join(common), last


def _note_hookable(plain: nn.Module, plan: Sequence[PlanEntry], *, compiled: bool) -> None:
    """Tell each column-parallel layer the modules whose forward hooks would be given slices of its outputs."""
    for first, name, last in _pairs(plan):
        block, prefix = plain.get_submodule(name), f"{name}." if name else ""
        own = [key for key, _ in block.named_children()]
        if isinstance(block, nn.Sequential):
            begin, end = (own.index(each.removeprefix(prefix).partition(".")[0]) for each in (first, last))
            own = own[begin : end + 1]
        layer = plain.get_submodule(first)
        layer.tutti_hookable = [  # type: ignore[assignment]
            (".".join(filter(None, (prefix + key, inner))), module)
            for key in own
            for inner, module in block.get_submodule(key).named_modules()
        ]
        layer.tutti_compiled = compiled  # type: ignore[assignment]


def _alike(pair: tuple[str, str]) -> bool:
    return pair[0] == pair[1]


def _asked(module: nn.Module, config: TensorConfig) -> dict[str, str]:
    return roles_asked(module, config.styles) if config.plan else {}


def _cut(parameter: nn.Parameter, cut: TensorCut, ranks: TensorRanks, tied: tuple[str, ...]) -> ShardSpec:
    shape = tuple(parameter.shape)
    ranges = cut.ranges(shape[cut.dim], ranks.rank, ranks.size)
    offset = tuple(ranges[0][0] if dim == cut.dim else 0 for dim in range(len(shape)))
    spec = ShardSpec(shape, offset, tied, cut.dim, tuple(ranges) if len(ranges) > 1 else ())
    parameter.grad = None
    parameter.data = cut.take(parameter.data, ranks.rank, ranks.size).clone()
    return spec


def _become(layer: nn.Module, entry: PlanEntry, ranks: TensorRanks, sequence: bool) -> None:
    if entry.role == "slow":
        # PyTorch's fused kernel for evaluation reads the weights and ignores slices.
        setattr(layer, "use_nested_tensor" if isinstance(layer, nn.TransformerEncoder) else FUSED_ACTIVATION, False)
        return
    if entry.role == "row" and type(layer).__module__.startswith("torch.") and type(layer) is not nn.Linear:
        return  # the attention computes its output projection itself
    divide(layer, _KINDS[entry.role], LayerSlice(entry.name, ranks, entry.units, sequence))
    if isinstance(layer, ColumnParallelLinear):
        layer.tutti_sections = entry.cuts["weight"].sections
    if entry.role == "within":
        run_within(layer, entry.local)
    elif entry.role == "experts":
        note_split(layer, entry.cuts, entry.local.forms)


def _check_sequence(plain: nn.Module) -> None:
    if hooked(plain):
        raise UsageError(
            "sequence=true cannot be combined with hooks on the gradients of modules",
            why="they would get only a share of the positions",
            remedy="leave out one of the two",
        )


def _check(module: nn.Module) -> None:
    if any(isinstance(m, TensorParallelLayer) for m in module.modules()):
        raise UsageError(
            "the model has been split over ranks before",
            why="this rank has slices of its weights, and other ranks have the rest",
            remedy="build a new model",
        )


def _said(module: nn.Module, plan: Sequence[PlanEntry], ranks: int, whole_flop: float | None) -> str:
    """Return a line for the run's header: how many modules have which role, and how much stays whole."""
    found = summary(module, plan)
    parts = [f"{len(found[role])} {role} ({_few(found[role])})" for role in sorted(found)]
    share = _whole_share(module, plan)
    flop = "" if whole_flop is None else f" and {whole_flop:.0%} of the FLOP"
    warning = "; warning: every device holds and computes this part" if max(share, whole_flop or 0) >= _LARGE else ""
    return f"over {ranks}: {', '.join(parts)}; {share:.0%} of the parameters{flop} stay whole{warning}"


def _whole_share(module: nn.Module, plan: Sequence[PlanEntry]) -> float:
    """Return the share of a model's parameters that each rank holds whole."""
    cut = {id(module_parameters(module.get_submodule(entry.name))[key]) for entry in plan for key in entry.cuts}
    sizes = {id(p): p.numel() for _, p in parameters([module])}
    return sum(size for key, size in sizes.items() if key not in cut) / (sum(sizes.values()) or 1)


def _few(names: Sequence[str], most: int = 4) -> str:
    return " ".join(names[:most]) + f" and {len(names) - most} more" * (len(names) > most)
