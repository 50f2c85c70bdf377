"""Which layers of a model are split over tensor ranks, and how: found from the model, as data.

Shoeybi et al. 2019, arXiv 1909.08053, §3: of two linear layers with something between them that works on each feature
by itself, the first is split by outputs and the second by inputs, so that one sum at the end is all that ranks need of
each other; attention likewise, by heads; an embedding by rows. Whatever else can be split alone is, with its output
gathered: that saves memory, not time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from itertools import pairwise
from types import BuiltinFunctionType, FunctionType
from typing import Any

from torch import nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from tutti.layouts.proof import Cut, Region, examine
from tutti.nn.draws import draws
from tutti.nn.units import is_sequence

ROLES = ("column", "row", "heads", "vocabulary", "gathered", "scores", "dropout", "within", "slow")
_TABLES = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


@dataclass(frozen=True)
class Entry:
    """What becomes of one module.

    Attributes:
        name: in the plain model.
        role: one of ``ROLES``; ``dropout`` and ``within`` hold no parameters but draw or compute for a share, ``slow``
            must not take PyTorch's fused way, which knows of no slices.
        units: what is divided: outputs, inputs, heads, rows or features.
        cuts: of its own parameters, by name.
        local: of ``within``: see ``tutti.nn.local.Local``.
    """

    name: str
    role: str
    units: int = 0
    cuts: Mapping[str, Cut] = field(default_factory=dict)
    local: tuple[int, Sequence[int], Sequence[int]] = (0, (), ())

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Entry:
        """An entry as another rank sent it."""
        cuts = {name: Cut(*cut) for name, cut in value["cuts"].items()}
        return cls(value["name"], value["role"], value["units"], cuts, tuple(value["local"]))

    def as_json(self) -> dict[str, Any]:
        """For other ranks."""
        return asdict(self) | {"cuts": {name: list(cut) for name, cut in self.cuts.items()}}


class Finder:
    """Finds the plan of one model.

    Args:
        model: as a user wrote it.
        ranks: T.
        least: parameters from which on a layer is split alone.
        whole: patterns of names of modules that stay as they are, with all that is in them.
        drops: whether attention that drops by itself can be split: not where a fused kernel draws.
    """

    def __init__(self, model: nn.Module, ranks: int, least: int, whole: Sequence[str], drops: bool) -> None:
        self._model, self._ranks, self._least, self._drops = model, ranks, least, drops
        self._entries: dict[str, Entry] = {}
        self._tried: dict[Hashable, Region | None] = {}
        everywhere = list(model.named_modules(remove_duplicate=False))
        self._again = {key for key, times in Counter(id(m) for _, m in everywhere).items() if times > 1}
        users: dict[int, list[tuple[str, str]]] = {}
        for name, module in model.named_modules():
            for key, parameter in module._parameters.items():
                if parameter is not None:
                    users.setdefault(id(parameter), []).append((name, key))
        self._tied = [places for places in users.values() if len(places) > 1]
        self._left = {name for name, _ in everywhere if _within(name, whole)}

    def find(self) -> list[Entry]:
        """The plan; modules that are not in it stay whole."""
        for name, module in reversed(list(self._model.named_modules())):
            if isinstance(module, nn.MultiheadAttention):
                self._attention(name, module)
            elif isinstance(module, _TABLES):
                self._transformer(name, module)
            elif isinstance(module, nn.TransformerEncoder) and self._holds_any(name):
                self._add(Entry(name, "slow"))
        for name, module in reversed(list(self._model.named_modules())):
            if is_sequence(module):
                self._windows(name, module)
            elif not type(module).__module__.startswith("torch.nn."):
                self._block(name, module)
        for name, module in self._model.named_modules():
            if self._free(name, module):
                self._alone(name, module)
        self._agree_on_tied()
        return [self._entries[name] for name, _ in self._model.named_modules() if name in self._entries]

    def _free(self, name: str, module: nn.Module, *, once: bool = False) -> bool:
        """Whether the module may be given a role; ``once``: one that depends on what is around it."""
        tied = once and any(name == place for places in self._tied for place, _ in places)
        return name not in self._entries and name not in self._left and not tied and not (once and self._twice(module))

    def _twice(self, module: nn.Module) -> bool:
        return id(module) in self._again

    def _add(self, *entries: Entry) -> None:
        self._entries |= {entry.name: entry for entry in entries}

    # --- blocks that need no gathering -----------------------------------------------------------------------------

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
            key: Cut(0, heads, 3 if key.startswith("in_proj") else 1)
            for key, parameter in module._parameters.items()
            if parameter is not None
        }
        self._add(Entry(name, "heads", heads, cuts), Entry(inner, "row", heads, {"weight": Cut(1, heads)}))

    def _transformer(self, name: str, layer: nn.Module) -> None:
        """PyTorch's encoder and decoder layers: their feed-forward, which is no module of its own."""
        names = [f"{name}.{key}" if name else key for key in ("linear1", "dropout", "linear2")]
        members = [self._model.get_submodule(n) for n in names]
        first, drop, last = members
        able = isinstance(first, nn.Linear) and isinstance(last, nn.Linear) and isinstance(drop, nn.Dropout)
        if able and all(self._free(n, m, once=True) for n, m in zip(names, members, strict=True)):
            hidden = int(first.out_features)  # type: ignore[arg-type]
            if hidden >= self._ranks:
                self._pair(names[0], [(names[1], drop)], names[2], hidden)
        if self._holds_any(name):
            self._add(Entry(name, "slow"))

    def _holds_any(self, name: str) -> bool:
        return any(n.startswith(f"{name}." if name else "") for n in self._entries)

    def _windows(self, name: str, sequence: nn.Module) -> None:
        """Linear layers with nothing but functions between them, in a sequence."""
        children = [(f"{name}.{key}" if name else key, child) for key, child in sequence.named_children()]
        places = [i for i, (n, m) in enumerate(children) if _is_linear(m) and self._free(n, m, once=True)]
        taken = -1
        for begin, end in pairwise(places):
            between = children[begin + 1 : end]
            if begin <= taken or self._twice(sequence) or not all(self._passes(n, m) for n, m in between):
                continue
            region = self._examine(nn.Sequential(*(m for _, m in children[begin : end + 1])), ("0", str(end - begin)))
            if region is not None and not region.sizes and all(dim == -1 for dim in region.draws):
                self._pair(children[begin][0], between, children[end][0], region.units)
                taken = end

    def _passes(self, name: str, module: nn.Module) -> bool:
        """Whether what is between two layers may draw for a share of the features, if it draws at all."""
        ours = type(module).__module__.startswith("torch.nn.") and name not in self._left
        return ours and (type(module) is nn.Dropout or not draws(module)) and not self._twice(module)

    def _pair(self, first: str, between: Sequence[tuple[str, nn.Module]], last: str, units: int) -> None:
        self._add(
            Entry(first, "column", units, self._linear(first, Cut(0, units))),
            *(Entry(n, "dropout", units) for n, m in between if isinstance(m, nn.Dropout)),
            Entry(last, "row", units, {"weight": Cut(1, units)}),
        )

    def _block(self, name: str, module: nn.Module) -> None:
        """A block of the user's own: attention or feed-forward in any form, if it can be shown to be right."""
        inner = [(n, f"{name}.{n}" if name else n, m) for n, m in module.named_modules() if m is not module]
        linears = [short for short, n, m in inner if _is_linear(m) and self._free(n, m, once=True)]
        computed = any(n in self._entries and self._entries[n].role == "heads" for _, n, _ in inner)
        if computed or len(linears) < 2 or not self._free(name, module, once=True):
            return
        region = self._examine(module, linears)
        if region is None or (region.dropout and not self._drops):
            return
        self._region(name, region)

    def _examine(self, block: nn.Module, linears: Sequence[str]) -> Region | None:
        """``examine``, once for blocks that are built alike."""
        key = (*linears, *(_likeness(name, module) for name, module in block.named_modules()))
        if key not in self._tried:
            self._tried[key] = examine(block, self._ranks, linears)
        return self._tried[key]

    def _region(self, name: str, region: Region) -> None:
        prefix = f"{name}." if name else ""
        self._add(
            *(
                Entry(prefix + n, "column", cut.units, self._linear(prefix + n, cut))
                for n, cut in region.columns.items()
            ),
            Entry(prefix + region.row, "row", region.units, {"weight": Cut(1, region.units)}),
            Entry(name, "within", region.units, {}, (region.width, region.sizes, region.draws)),
        )

    def _linear(self, name: str, cut: Cut) -> dict[str, Cut]:
        parameters = self._model.get_submodule(name)._parameters
        return {key: cut for key in ("weight", "bias") if parameters.get(key) is not None}

    # --- layers by themselves --------------------------------------------------------------------------------------

    def _alone(self, name: str, module: nn.Module) -> None:
        if sum(p.numel() for p in module._parameters.values() if p is not None) < self._least:
            return
        if _is_linear(module) and int(module.out_features) >= self._ranks:  # type: ignore[arg-type]
            units = int(module.out_features)  # type: ignore[arg-type]
            self._add(Entry(name, "gathered", units, self._linear(name, Cut(0, units))))
        elif _is_convolution(module) and int(module.out_channels) >= self._ranks:  # type: ignore[arg-type]
            units = int(module.out_channels)  # type: ignore[arg-type]
            weight = Cut(int(isinstance(module, _ConvTransposeNd)), units)
            cuts = {"weight": weight} if module.bias is None else {"weight": weight, "bias": Cut(0, units)}
            self._add(Entry(name, "gathered", units, cuts))
        elif _is_embedding(module) and int(module.num_embeddings) >= self._ranks:  # type: ignore[arg-type]
            rows = int(module.num_embeddings)  # type: ignore[arg-type]
            self._add(Entry(name, "vocabulary", rows, {"weight": Cut(0, rows)}))

    def _agree_on_tied(self) -> None:
        """A tensor that several layers share is split alike in all of them or in none."""
        dropped = True
        while dropped:
            dropped = False
            for places in self._tied:
                cuts = [self._entries[n].cuts.get(key) if n in self._entries else None for n, key in places]
                if any(cut != cuts[0] for cut in cuts):
                    dropped = True
                    for n, _ in places:
                        self._entries.pop(n, None)


def _likeness(name: str, module: nn.Module) -> Hashable:
    """What modules have in common that compute alike but for their weights."""
    said = [(k, v) for k, v in vars(module).items() if type(v) in (int, float, str, bool) and k != "training"]
    functions = [(k, v) for k, v in vars(module).items() if isinstance(v, FunctionType | BuiltinFunctionType)]
    tensors = [(k, t.shape) for k, t in (*module._parameters.items(), *module._buffers.items()) if t is not None]
    return name, type(module), repr(module), tuple(said), tuple(functions), tuple(tensors)


def _within(name: str, patterns: Collection[str]) -> bool:
    parts = name.split(".")
    return any(fnmatchcase(".".join(parts[:end]), p) for p in patterns for end in range(1, len(parts) + 1))


def _is_linear(module: nn.Module) -> bool:
    return type(module) is nn.Linear and _plain(module)


def _is_convolution(module: nn.Module) -> bool:
    if not isinstance(module, _ConvNd) or type(module).__module__ != "torch.nn.modules.conv":
        return False
    return _plain(module) and module.groups == 1


def _is_embedding(module: nn.Module) -> bool:
    if type(module) is not nn.Embedding or not _plain(module):
        return False
    return module.max_norm is None and not module.sparse and not module.scale_grad_by_freq


def _plain(module: nn.Module) -> bool:
    """Whether its parameters are its own, and not computed from others in a hook or a parametrization."""
    return module._parameters.keys() == {"weight", "bias"} - ({"bias"} if isinstance(module, nn.Embedding) else set())


def summary(model: nn.Module, plan: Sequence[Entry]) -> dict[str, list[str]]:
    """Names of modules with parameters of their own, by what becomes of them; ``whole`` for those not in the plan."""
    roles = {entry.name: entry.role for entry in plan}
    found: dict[str, list[str]] = {}
    for name, role in _rows(model, roles):
        found.setdefault(role, []).append(name)
    return found


def _rows(model: nn.Module, roles: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for name, module in model.named_modules():
        if any(p is not None for p in module._parameters.values()):
            yield name or "the model", roles.get(name, "whole")
