"""A plan carried out: layers of a model cut down to this rank's slices, in place."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from tutti.comm.differentiable import Ranks
from tutti.comm.spread import spread
from tutti.errors import UsageError
from tutti.layouts.config import TensorConfig
from tutti.layouts.part import Part
from tutti.layouts.plan import Entry, Finder, summary
from tutti.layouts.proof import Cut
from tutti.nn.forwards import restore
from tutti.nn.heads import Heads
from tutti.nn.local import Within, run_within
from tutti.nn.parallel import Column, Divided, Dropped, Gathered, Row, Slice, Vocabulary, divide
from tutti.nn.swap import buffers, describe, other_names, parameters
from tutti.types import Setting, ShardSpec

_KINDS: dict[str, type[Divided]] = {
    "column": Column,
    "row": Row,
    "heads": Heads,
    "vocabulary": Vocabulary,
    "gathered": Gathered,
    "dropout": Dropped,
    "within": Within,
}


class Division:
    """The slices of a model, or of one stage of it, that this tensor rank holds. Collective among them.

    The first rank's values become everybody's; parameters stay the objects that an optimizer may know.

    Attributes:
        plan: what became of each module that did not stay whole.
        said: for the run's header.

    Raises:
        UsageError: the model has been divided before, or nothing of it can be.
    """

    def __init__(self, module: nn.Module, setting: Setting, config: TensorConfig) -> None:
        self._comm = comm = setting.comms.axis("tensor")
        self.plan: list[Entry] = []
        self.said: dict[str, str] = {}
        self._specs: dict[str, ShardSpec] = {}
        if comm.size == 1:
            return
        _check(module)
        restore(module)
        comm.agree(describe([module]), "the model", "build the same model on every rank")
        spread(comm, [t for t in _tensors(module)], "initial state")
        self.plan = self._find(module, config)
        self.said = {"split": _said(module, self.plan, comm.size)}
        names = {id(p): name for name, p in parameters([module])}
        tied = other_names([module])
        ranks = Ranks(comm)
        for entry in self.plan:
            layer = module.get_submodule(entry.name)
            for key, cut in entry.cuts.items():
                parameter = layer._parameters[key]
                if parameter is not None and names[id(parameter)] not in self._specs:
                    name = names[id(parameter)]
                    self._specs[name] = self._cut(parameter, cut, tied.get(name, ()))
            self._become(layer, entry, ranks)

    def mark(self, replica: Part) -> None:
        """Tell a replica of the module what its tensors are slices of, and which others the first rank accounts for."""
        if self._comm.size == 1:
            return
        replica.said = {**replica.said, **self.said}
        if self._comm.rank:
            replica.borrowed = {*replica.borrowed, *(name for name in replica.specs if name not in self._specs)}
        replica.specs = {**replica.specs, **self._specs}

    def _find(self, module: nn.Module, config: TensorConfig) -> list[Entry]:
        """The plan that the first rank finds, so that all have the same."""
        comm, found = self._comm, []
        if comm.rank == 0:
            finder = Finder(module, comm.size, config.least, config.whole, drops=comm.device.type == "cpu")
            found = [entry.as_json() for entry in finder.find()]
        return [Entry.from_json(entry) for entry in comm.broadcast_json(found, 0, "plan of the split")]

    def _cut(self, parameter: nn.Parameter, cut: Cut, tied: tuple[str, ...]) -> ShardSpec:
        rank, ranks, shape = self._comm.rank, self._comm.size, tuple(parameter.shape)
        spec = ShardSpec(shape, cut.offset(parameter, rank, ranks), tied, cut.blocks)
        parameter.grad = None
        parameter.data = cut.take(parameter.data, rank, ranks).clone()
        return spec

    def _become(self, layer: nn.Module, entry: Entry, ranks: Ranks) -> None:
        if entry.role == "slow":
            # The fused kernel of PyTorch's evaluation reads the weights and knows of no slices.
            layer.activation_relu_or_gelu = 0  # type: ignore[assignment]
            return
        if entry.role == "row" and type(layer) is not nn.Linear:
            return  # the output layer of an attention that computes it by itself
        divide(layer, _KINDS[entry.role], Slice(entry.name, ranks, entry.units))
        if entry.role == "within":
            run_within(layer, *entry.local)


def _tensors(module: nn.Module) -> list[Tensor]:
    return [p.data for _, p in parameters([module])] + [slot.get() for slot in buffers([module])]


def _check(module: nn.Module) -> None:
    if any(isinstance(m, Divided) for m in module.modules()):
        raise UsageError(
            "the model has been split over ranks before",
            why="this rank has slices of its weights, and the rest is elsewhere",
            remedy="build the model anew",
        )


def _said(module: nn.Module, plan: Sequence[Entry], ranks: int) -> str:
    """What became of which modules, in one line."""
    found = summary(module, plan)
    parts = [f"{len(found[role])} {role} ({_few(found[role])})" for role in sorted(found)]
    return f"over {ranks}: {', '.join(parts)}"


def _few(names: Sequence[str], most: int = 4) -> str:
    return " ".join(names[:most]) + f" and {len(names) - most} more" * (len(names) > most)
