"""Derive a TP plan from a model, as data: which layers are split over tensor ranks, and how.

Shoeybi et al. 2019, arXiv 1909.08053, §3: of two linear layers with only functions of single features between them, the
first is column-parallel and the second row-parallel, so that ranks need one sum at the end; attention is split
likewise, by heads, and an embedding by rows. Other layers that can be split alone are, with their outputs gathered:
that saves memory, not time.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from itertools import pairwise
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from tutti.nn.ac_policy import is_sequence
from tutti.nn.rng_streams import module_draws
from tutti.nn.swap import registered_children
from tutti.parallel.tensor.block_call import BlockArguments
from tutti.parallel.tensor.linear_layer import is_linear, matrix, output_dim
from tutti.parallel.tensor.local_shape import LocalForward
from tutti.parallel.tensor.stacked_experts import Cuts, find_expert_cuts, holds_stacked_experts
from tutti.parallel.tensor.tp_verify import MOST_LINEAR, BlockSplit, TensorCut, find_block_split, takes_one
from tutti.torch_compat import (
    MODULE_ATTRIBUTES,
    ConvBase,
    ConvTransposeBase,
    has_forward_hook,
    module_buffers,
    module_parameters,
    tree_flatten,
)

ROLES = (
    "column",
    "row",
    "heads",
    "vocabulary",
    "gathered",
    "scores",
    "experts",
    "dropout",
    "within",
    "widened",
    "slow",
)
SPLIT = ("column", "row", "heads", "vocabulary", "gathered")
"""Roles that a plan by hand can give to a layer."""
_NUMBERS = ("layer_idx", "layer_id", "layer_number")
"""Attributes in which equal blocks may differ: under the number of a layer caches file its keys and values."""
_TABLES = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


@dataclass(frozen=True)
class PlanEntry:
    """How tensor parallelism treats one module: an entry of the tensor-parallel (TP) plan.

    Attributes:
        name: name of the module in the unsplit model.
        role: one of ``ROLES``. Roles that split the module's parameters: ``column`` (a linear layer by outputs),
            ``row`` (by inputs), ``heads`` (attention by heads), ``vocabulary`` (an embedding by rows of its table),
            ``gathered`` (a layer by outputs, which are all-gathered), ``scores`` (the last linear layer by classes,
            whose scores stay split) and ``experts`` (stacked experts, each by its hidden features). ``dropout`` and
            ``within`` hold no parameters, but draw or compute on a slice; ``widened`` keeps its parameters whole and
            all-gathers its input (a norm over the features of all heads); ``slow`` turns off PyTorch's fused kernel,
            which ignores slices.
        units: number of outputs, inputs, heads, rows or features that are divided over ranks.
        cuts: how each of the module's own parameters is split, by the parameter's name.
        local: for ``within``, the adaptations of the module's own code to a slice; for ``experts``, the kinds of
            arguments.
    """

    name: str
    role: str
    units: int = 0
    cuts: Mapping[str, TensorCut] = field(default_factory=dict)
    local: LocalForward = field(default_factory=LocalForward)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> PlanEntry:
        """Return the entry of a tensor-parallel plan for one module from a dictionary that ``as_json`` has returned.

        An entry says how tensor parallelism treats the module: its role, and how its parameters are cut. The dictionary
        may have gone through JSON and come from another rank.

        Args:
            value: the dictionary.
        """
        cuts = {name: TensorCut.from_json(cut) for name, cut in value["cuts"].items()}
        return cls(value["name"], value["role"], value["units"], cuts, LocalForward(*value["local"]))

    def as_json(self) -> dict[str, Any]:
        """Return this entry of a tensor-parallel plan as a dictionary that JSON can hold, to broadcast the plan.

        An entry says how tensor parallelism treats one module. Keys are ``name``, ``role`` (such as ``column``),
        ``units`` (number of outputs, heads, … that are divided over ranks), ``cuts`` and ``local`` (the values of the
        ``LocalForward``, which adapts the code of a block to a slice). ``cuts`` has a list for each parameter: the
        split dimension, the number of units along it (such as heads), each of which stays on one rank, and the sizes of
        its sections, which are split alike.
        """
        return asdict(self) | {"cuts": {name: list(cut) for name, cut in self.cuts.items()}, "local": list(self.local)}


class PlanFinder:
    """Derives the tensor-parallel (TP) plan of one model: which layers are split over the tensor ranks, and how.

    ``find`` computes with copies of the model's blocks; the model stays as it is, and nothing is sent.

    Args:
        model: the unsplit model.
        ranks: number of tensor ranks.
        least: smallest number of parameters of a layer that is split by itself, outside of a block.
        whole: patterns (``fnmatch``) of names of modules that stay whole, with all their submodules.
        drops: whether attention with dropout may be split; False where a fused kernel draws the masks.
        parts: whether a block may return this rank's heads, such as attention weights, as a ``SplitTensor``.
        hooked: names of modules that get forward hooks in their first forward.
        calls: recorded arguments of blocks with several arguments, by the block's name; such a block is not split
            without them.
        asked: roles by module name from the user's plan by hand (``tp_plan_by_hand``), outside of which nothing is
            split and with which ``least`` is 0; None to split whatever can be.
    """

    def __init__(
        self,
        model: nn.Module,
        ranks: int,
        least: int,
        whole: Sequence[str],
        drops: bool,
        calls: Mapping[str, BlockArguments] | None = None,
        asked: Mapping[str, str] | None = None,
        *,
        parts: bool = True,
        hooked: Collection[str] = (),
    ) -> None:
        self._model, self._ranks, self._drops, self._calls = model, ranks, drops, calls or {}
        self._parts = parts
        self._hooked = {m for name, m in model.named_modules() if name in hooked or has_forward_hook(m)}
        self._asked, self._least = asked, least if asked is None else 0
        self._entries: dict[str, PlanEntry] = {}
        self._linears = {name for name, module in model.named_modules() if is_linear(module)}
        self._paired = {name for name in self._linears if self._may(name, "column", "row")}
        self._tried: dict[Hashable, BlockSplit | None] = {}
        self._experts: dict[Hashable, Cuts | None] = {}
        everywhere = list(model.named_modules(remove_duplicate=False))
        self._again = {key for key, times in Counter(id(m) for _, m in everywhere).items() if times > 1}
        users: dict[int, list[tuple[str, str]]] = {}
        for name, module in model.named_modules():
            for key, parameter in module_parameters(module).items():
                if parameter is not None:
                    users.setdefault(id(parameter), []).append((name, key))
        self._tied = [places for places in users.values() if len(places) > 1]
        self._left = {name for name, _ in everywhere if _within(name, whole)}
        self._left |= {name for name, module in everywhere if _is_patched(module)}
        if asked is not None:
            self._left |= {name for name, module in everywhere if splittable(module) and not self._may(name, *SPLIT)}

    def find(self) -> list[PlanEntry]:
        """Derive the tensor-parallel plan of the model: which layers are split over tensor ranks, and how.

        Not collective. A block of the user's own class is split only where running its slices on random numbers gives
        the outputs and gradients of the whole block, and in evaluation the outputs. Of blocks that differ only in the
        values of their weights and in an attribute such as ``layer_idx``, as repeated layers do, one is tried. Layers
        that share a parameter are split alike or stay whole.

        Returns:
            A ``PlanEntry`` for each module that is split or computes on a slice, in the model's order: name, role (such
            as ``column``), the number of units that are divided, and how each parameter is cut. All other modules stay
            whole on every rank.
        """
        for name, module in reversed(list(self._model.named_modules())):
            if isinstance(module, nn.MultiheadAttention):
                self._attention(name, module)
            elif isinstance(module, _TABLES):
                self._transformer(name, module)
            elif isinstance(module, nn.TransformerEncoder) and self._holds_any(name):
                self._add(PlanEntry(name, "slow"))
        for name, module in reversed(list(self._model.named_modules())):
            if is_sequence(module):
                self._windows(name, module)
            elif holds_stacked_experts(module):
                self._stacked_experts(name, module)
            elif not type(module).__module__.startswith("torch.nn."):
                self._block(name, module)
        for name, module in self._model.named_modules():
            if self._free(name, module) and self._may(name, "gathered", "vocabulary"):
                self._alone(name, module)
        self._agree_on_tied()
        return [self._entries[name] for name, _ in self._model.named_modules() if name in self._entries]

    def _free(self, name: str, module: nn.Module, *, once: bool = False) -> bool:
        """Return whether a module may get a role; ``once``: a role for modules that are used once and share nothing."""
        tied = once and any(name == place for places in self._tied for place, _ in places)
        return name not in self._entries and name not in self._left and not tied and not (once and self._twice(module))

    def _may(self, name: str, *roles: str) -> bool:
        """Return whether a module may get one of these roles in view of the plan by hand."""
        return self._asked is None or self._asked.get(name) in roles

    def _twice(self, module: nn.Module) -> bool:
        return id(module) in self._again

    def _add(self, *entries: PlanEntry) -> None:
        self._entries |= {entry.name: entry for entry in entries}

    # --- column-parallel and row-parallel pairs --------------------------------------------------------------------

    def _attention(self, name: str, module: nn.MultiheadAttention) -> None:
        inner = f"{name}.out_proj" if name else "out_proj"
        self._left.add(inner)
        plain = type(module) is nn.MultiheadAttention and module.bias_k is None and not module.add_zero_attn
        if not (plain and self._free(name, module, once=True) and self._free(name, module.out_proj, once=True)):
            return
        if module.num_heads < self._ranks or (module.dropout > 0 and not self._drops):
            return
        heads = module.num_heads
        cuts = {
            key: TensorCut(0, heads, (module.embed_dim,) * 3 if key.startswith("in_proj") else ())
            for key, parameter in module_parameters(module).items()
            if parameter is not None
        }
        self._add(
            PlanEntry(name, "heads", heads, cuts), PlanEntry(inner, "row", heads, {"weight": TensorCut(1, heads)})
        )

    def _transformer(self, name: str, layer: nn.Module) -> None:
        """Split the feed-forward of PyTorch's encoder and decoder layers, which is no module of its own."""
        names = [f"{name}.{key}" if name else key for key in ("linear1", "dropout", "linear2")]
        members = [self._model.get_submodule(n) for n in names]
        first, drop, last = members
        able = isinstance(first, nn.Linear) and isinstance(last, nn.Linear) and isinstance(drop, nn.Dropout)
        # A subclass may compute otherwise between the two.
        able = able and type(layer) in _TABLES and name not in self._left
        able = able and self._may(names[0], "column") and self._may(names[2], "row")
        able = able and self._hooked.isdisjoint(members)
        able = able and all(self._free(n, m, once=True) for n, m in zip(names, members, strict=True))
        if able and self._stays_in_features(first, layer.activation, last):
            hidden = int(first.out_features)  # type: ignore[arg-type]
            if hidden >= self._ranks:
                self._pair(names[0], [(names[1], drop)], names[2], hidden)
        if self._holds_any(name):
            self._add(PlanEntry(name, "slow"))

    def _stays_in_features(self, first: nn.Module, activation: Any, last: nn.Module) -> bool:
        """Return whether a trial shows that an activation, any function, mixes no features between two layers."""
        found = self._examine(nn.Sequential(first, _Called(activation), last), ("0", "2"))
        return found is not None and _by_feature(found.local)

    def _holds_any(self, name: str) -> bool:
        return any(n.startswith(f"{name}." if name else "") for n in self._entries)

    def _windows(self, name: str, sequence: nn.Module) -> None:
        """Split pairs of linear layers in a sequence that have only functions of single features between them."""
        if name in self._left:
            return
        children = [(f"{name}.{key}" if name else key, child) for key, child in registered_children(sequence)]
        places = [i for i, (n, m) in enumerate(children) if n in self._paired and self._free(n, m, once=True)]
        taken = -1
        for begin, end in pairwise(places):
            between = children[begin + 1 : end]
            if any(m in self._hooked for _, m in children[begin : end + 1]):
                continue
            if begin <= taken or self._twice(sequence) or not all(self._passes(n, m) for n, m in between):
                continue
            block_split = self._examine(
                nn.Sequential(*(m for _, m in children[begin : end + 1])), ("0", str(end - begin))
            )
            if block_split is not None and _by_feature(block_split.local):
                self._pair(children[begin][0], between, children[end][0], block_split.units)
                taken = end

    def _passes(self, name: str, module: nn.Module) -> bool:
        """Return whether a module between two layers may run on a slice: PyTorch's, drawing by dropout only."""
        ours = type(module).__module__.startswith("torch.nn.") and name not in self._left
        return ours and (type(module) is nn.Dropout or not module_draws(module)) and not self._twice(module)

    def _pair(self, first: str, between: Sequence[tuple[str, nn.Module]], last: str, units: int) -> None:
        self._add(
            PlanEntry(first, "column", units, self._linear(first, TensorCut(0, units))),
            *(PlanEntry(n, "dropout", units) for n, m in between if isinstance(m, nn.Dropout)),
            self._row(last, units),
        )

    def _block(self, name: str, module: nn.Module) -> None:
        """Split a block of the user's own, attention or feed-forward in any form, if the split is proved right.

        A block with forward hooks inside stays whole: they would be given slices.
        """
        inner = [(n, f"{name}.{n}" if name else n, m) for n, m in module.named_modules() if m is not module]
        linears = [short for short, n, m in inner if n in self._paired and self._free(n, m, once=True)]
        computed = any(n in self._entries and self._entries[n].role == "heads" for _, n, _ in inner)
        if computed or len(linears) < 2 or not self._free(name, module, once=True):
            return
        if any(m in self._hooked for _, _, m in inner):
            return
        block_split = self._examine(module, linears, self._calls.get(name))
        if block_split is None or (block_split.dropout and not self._drops):
            return
        # Layers whose parameters compute with this rank's heads: their inputs differ over ranks.
        within = {f"{name}.{key}".strip(".").rpartition(".")[0] for key in block_split.local.summed}
        if (block_split.local.outs and not self._parts) or any(each in self._entries for each in within):
            return
        widened = [f"{name}.{key}".strip(".") for key in block_split.local.widened]
        if not all(self._free(each, self._model.get_submodule(each), once=True) for each in widened):
            return
        self._left |= within
        self._add_block(name, block_split)

    def _stacked_experts(self, name: str, module: nn.Module) -> None:
        """Split experts whose weights are stacked, if a recorded call proves the split right."""
        call = self._calls.get(name)
        if call is None or not self._free(name, module, once=True) or not self._may(name, "experts"):
            return
        key = (call.form, *(_likeness(inner, each) for inner, each in module.named_modules()))
        if key not in self._experts:
            self._experts[key] = find_expert_cuts(module, self._ranks, call)
        if cuts := self._experts[key]:
            self._add(
                PlanEntry(name, "experts", next(iter(cuts.values())).units, cuts, LocalForward(forms=(call.form,)))
            )

    def _examine(
        self, block: nn.Module, linears: Sequence[str], call: BlockArguments | None = None
    ) -> BlockSplit | None:
        """Call ``find_block_split``, once for all blocks of the same structure."""
        key = (*linears, call and call.form, *(_likeness(name, module) for name, module in block.named_modules()))
        if key not in self._tried:
            self._tried[key] = find_block_split(block, self._ranks, linears, call)
        return self._tried[key]

    def _add_block(self, name: str, block_split: BlockSplit) -> None:
        prefix = f"{name}." if name else ""
        self._add(
            *(
                PlanEntry(prefix + n, "column", cut.units, self._linear(prefix + n, cut))
                for n, cut in block_split.columns.items()
            ),
            self._row(prefix + block_split.row, block_split.units),
            PlanEntry(name, "within", block_split.units, {}, block_split.local),
            *(PlanEntry(prefix + n, "widened", block_split.units) for n in block_split.local.widened),
        )

    def _linear(self, name: str, cut: TensorCut) -> dict[str, TensorCut]:
        """Return the cuts of a linear layer's parameters from that of its outputs."""
        layer = self._model.get_submodule(name)
        parameters = module_parameters(layer)
        cuts = {"weight": cut._replace(dim=output_dim(layer)), "bias": cut}
        return {key: cut for key, cut in cuts.items() if parameters.get(key) is not None}

    def _row(self, name: str, units: int) -> PlanEntry:
        dim = 1 - output_dim(self._model.get_submodule(name))
        return PlanEntry(name, "row", units, {"weight": TensorCut(dim, units)})

    # --- single layers ---------------------------------------------------------------------------------------------

    def _alone(self, name: str, module: nn.Module) -> None:
        if sum(p.numel() for p in module_parameters(module).values() if p is not None) < self._least:
            return
        if name in self._linears and len(matrix(module)) >= self._ranks:
            units = len(matrix(module))
            self._add(PlanEntry(name, "gathered", units, self._linear(name, TensorCut(0, units))))
        elif is_convolution(module) and int(module.out_channels) >= self._ranks:  # type: ignore[arg-type]
            units = int(module.out_channels)  # type: ignore[arg-type]
            weight = TensorCut(int(isinstance(module, ConvTransposeBase)), units)
            cuts = {"weight": weight} if module.bias is None else {"weight": weight, "bias": TensorCut(0, units)}
            self._add(PlanEntry(name, "gathered", units, cuts))
        elif is_embedding(module) and int(module.num_embeddings) >= self._ranks:  # type: ignore[arg-type]
            rows = int(module.num_embeddings)  # type: ignore[arg-type]
            self._add(PlanEntry(name, "vocabulary", rows, {"weight": TensorCut(0, rows)}))

    def _agree_on_tied(self) -> None:
        """Drop the entries of layers that share a parameter and do not cut it alike."""
        while unlike := {n for places in self._tied if not self._is_cut_alike(places) for n, _ in places}:
            self._entries = {name: entry for name, entry in self._entries.items() if name not in unlike}

    def _is_cut_alike(self, places: Sequence[tuple[str, str]]) -> bool:
        """Return whether all layers that share a parameter cut it alike, or leave it whole."""
        cuts = [self._entries[n].cuts.get(key) if n in self._entries else None for n, key in places]
        return all(cut == cuts[0] for cut in cuts)


def _by_feature(local: LocalForward) -> bool:
    """Return whether layers compute on slices of the features without a block's own code around them."""
    return local == LocalForward(local.width, draws=(-1,) * len(local.draws))


def splittable(module: nn.Module) -> bool:
    """Return whether a module is of a kind whose parameters tensor parallelism can split.

    These are ``nn.MultiheadAttention`` (subclasses included), linear layers (``is_linear``), convolutions
    (``is_convolution``) and embeddings (``is_embedding``).

    Args:
        module: any module; its submodules do not count.
    """
    attention = isinstance(module, nn.MultiheadAttention)
    return attention or is_linear(module) or is_convolution(module) or is_embedding(module)


def blocks_with_arguments(model: nn.Module) -> list[str]:
    """Return the names of blocks whose forward does not take exactly one argument, such as attention with a mask.

    A block here is a module below the root that holds 2 to 16 linear layers, is of a class from outside of
    ``torch.nn``, and is no list or dictionary of modules; or a layer of stacked experts, with any arguments. Tensor
    parallelism can try to split such a block only with the arguments of a real call, which ``record_calls`` records.

    Args:
        model: the whole, unsplit model.
    """
    linears = [name for name, module in model.named_modules() if is_linear(module)]
    found = []
    for name, module in model.named_modules():
        if name and holds_stacked_experts(module):
            found.append(name)
            continue
        inside = sum(linear.startswith(f"{name}.") for linear in linears)
        if name and 2 <= inside <= 2 * MOST_LINEAR and not type(module).__module__.startswith("torch.nn."):
            found += [] if isinstance(module, nn.ModuleList | nn.ModuleDict) or takes_one(module) else [name]
    return found


def _likeness(name: str, module: nn.Module) -> Hashable:
    """Return a key that is equal for modules that compute alike but for their weights."""
    own = {k: v for k, v in vars(module).items() if k not in MODULE_ATTRIBUTES and k not in _NUMBERS}
    leaves, spec = tree_flatten((own, dict(module_buffers(module))))
    shapes = tuple((k, None if p is None else p.shape) for k, p in module_parameters(module).items())
    return name, type(module), repr(module), shapes, str(spec), tuple(map(_value, leaves))


def _value(leaf: Any) -> Hashable:
    """Return a key that is equal for equal values of attributes and buffers; for what has no value, the object."""
    if isinstance(leaf, Tensor) and leaf.layout == torch.strided and not leaf.is_meta:
        plain = leaf.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
        return leaf.shape, leaf.dtype, hashlib.sha256(plain.view(torch.uint8).numpy().data).digest()
    try:
        hash(leaf)
    except TypeError:
        return type(leaf), id(leaf)
    return type(leaf), leaf


def _is_patched(module: nn.Module) -> bool:
    """Return whether the script has set a function over a method of a module, such as ``forward`` or ``_ff_block``.

    It may read the weights otherwise than the class does.
    """
    return any(isinstance(getattr(type(module), name, None), FunctionType) for name in vars(module))


class _Called(nn.Module):
    """A function as a module, for a trial of what stands between two layers."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._function = function

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the function's result."""
        return self._function(inputs)


def _within(name: str, patterns: Collection[str]) -> bool:
    parts = name.split(".")
    return any(fnmatchcase(".".join(parts[:end]), p) for p in patterns for end in range(1, len(parts) + 1))


def is_convolution(module: nn.Module) -> bool:
    """Return whether a module is a PyTorch convolution that tensor parallelism can split by output channels.

    True for convolutions of one group, transposed ones included. False for subclasses, and where a hook or a
    parametrization computes the parameters.

    Args:
        module: any module.
    """
    if not isinstance(module, ConvBase) or type(module).__module__ != "torch.nn.modules.conv":
        return False
    return _plain(module) and module.groups == 1


def is_embedding(module: nn.Module) -> bool:
    """Return whether a module is an ``nn.Embedding`` that tensor parallelism can split by rows of its table.

    False for subclasses, with ``max_norm``, ``sparse`` or ``scale_grad_by_freq``, and where a parametrization computes
    the weight.

    Args:
        module: any module.
    """
    if type(module) is not nn.Embedding or not _plain(module):
        return False
    return module.max_norm is None and not module.sparse and not module.scale_grad_by_freq


def _plain(module: nn.Module) -> bool:
    """Return whether a module has the parameters of its class, none computed by a hook or a parametrization."""
    expected = {"weight"} if isinstance(module, nn.Embedding) else {"weight", "bias"}
    return module_parameters(module).keys() == expected


def summary(model: nn.Module, plan: Sequence[PlanEntry]) -> dict[str, list[str]]:
    """Return the names of the model's modules by their role in the tensor-parallel plan, for a run's header.

    Args:
        model: the whole, unsplit model.
        plan: entries of the model's plan.

    Returns:
        By role (``column``, ``row``, ``heads``, …), the names of modules with parameters of their own; under ``whole``
        the modules outside of the plan.
    """
    roles = {entry.name: entry.role for entry in plan}
    found: dict[str, list[str]] = {}
    for name, role in _rows(model, roles):
        found.setdefault(role, []).append(name)
    return found


def _rows(model: nn.Module, roles: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for name, module in model.named_modules():
        if any(p is not None for p in module_parameters(module).values()):
            yield name or "the model", roles.get(name, "whole")
