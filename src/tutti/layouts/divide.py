"""A plan carried out: layers of a model cut down to this rank's slices, in place."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import Tensor, nn

from tutti.comm.differentiable import Ranks
from tutti.comm.spread import spread
from tutti.errors import UsageError
from tutti.layouts.config import TensorConfig
from tutti.layouts.part import Part
from tutti.layouts.plan import Entry, Finder, summary
from tutti.layouts.proof import Cut
from tutti.layouts.scores import hooked, with_scores
from tutti.nn.forwards import restore
from tutti.nn.heads import Heads
from tutti.nn.local import Within, run_within
from tutti.nn.parallel import Column, Divided, Dropped, Gathered, Row, Scores, Vocabulary, divide
from tutti.nn.slices import Slice
from tutti.nn.swap import buffers, describe, other_names, parameters
from tutti.types import Setting, ShardSpec

_FUSED = "activation_relu_or_gelu"
_KINDS: dict[str, type[Divided]] = {
    "column": Column,
    "row": Row,
    "heads": Heads,
    "vocabulary": Vocabulary,
    "gathered": Gathered,
    "scores": Scores,
    "dropout": Dropped,
    "within": Within,
}


class Division:
    """The slices of a model that this tensor rank holds. Collective among them.

    First the plan is found, on the whole model; ``apply`` carries it out once a layout knows where to cut into stages.

    Attributes:
        plan: what becomes of each module that does not stay whole.
        closed: names of blocks whose forward is run on a share, and that nothing else may see through.
        parted: whether outputs of layers may be split tensors that look whole (``nn.parted``).

    Raises:
        UsageError: the model has been divided before, or cannot be split by positions.
    """

    def __init__(self, plain: nn.Module, setting: Setting, config: TensorConfig) -> None:
        self._comm, self._plain, self._config = setting.comms.axis("tensor"), plain, config
        self.plan: list[Entry] = []
        self._said: dict[str, str] = {}
        if config.sequence:
            _check_sequence(plain)
        self._specs: dict[str, ShardSpec] = {}
        if self._comm.size > 1:
            _check(plain)
            restore(plain)
            setting.comms.model.agree(describe([plain]), "the model", "build the same model on every rank")
            self.plan = self._find(plain, setting)
            between = "; positions between them" if config.sequence else ""
            self._said = {"split": _said(plain, self.plan, self._comm.size) + between}
        self.parted = bool(self.plan) and (config.sequence or any(entry.role == "scores" for entry in self.plan))
        self.closed = frozenset(entry.name for entry in self.plan if entry.role == "within")

    def check(self, read: Collection[str]) -> None:
        """Raise UsageError where a parameter that would be split is read outside of its layer's forward."""
        split = {f"{entry.name}.{key}": entry.name for entry in self.plan for key in entry.cuts}
        for name in sorted(split.keys() & set(read)):
            raise UsageError(
                f"the model's own forward reads {name}, which would be split over tensor ranks",
                remedy=f"leave the layer whole: hybrid:whole={split[name]}",
            )

    def apply(self) -> None:
        """Cut the model's parameters down and its layers to what uses them, in place.

        The first rank's values become everybody's; parameters stay the objects that an optimizer may know.
        """
        if self._comm.size == 1:
            return
        spread(self._comm, _tensors(self._plain), "initial state")
        names = {id(p): name for name, p in parameters([self._plain])}
        tied, ranks = other_names([self._plain]), Ranks(self._comm)
        for entry in self.plan:
            layer = self._plain.get_submodule(entry.name)
            for key, cut in entry.cuts.items():
                parameter = layer._parameters[key]
                if parameter is not None and names[id(parameter)] not in self._specs:
                    name = names[id(parameter)]
                    self._specs[name] = self._cut(parameter, cut, tied.get(name, ()))
            self._become(layer, entry, ranks)

    def mark(self, replica: Part) -> None:
        """Tell a replica of the model what its tensors are slices of, and which others the first rank accounts for."""
        if self._comm.size == 1:
            return
        here = {name: spec for name, spec in self._specs.items() if name in replica.specs}
        replica.said = {**replica.said, **self._said}
        if self._comm.rank:
            replica.borrowed = {*replica.borrowed, *(name for name in replica.specs if name not in here)}
        replica.specs = {**replica.specs, **here}

    def _find(self, module: nn.Module, setting: Setting) -> list[Entry]:
        """The plan that the first rank finds, so that all have the same."""
        comm, config, found = self._comm, self._config, []
        if comm.rank == 0:
            finder = Finder(module, comm.size, config.least, config.whole, drops=comm.device.type == "cpu")
            # What is compiled sees plain tensors alone.
            trial = setting.trial if setting.compile == "none" else None
            found = [entry.as_json() for entry in with_scores(module, finder.find(), trial, comm.device)]
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
            setattr(layer, "use_nested_tensor" if isinstance(layer, nn.TransformerEncoder) else _FUSED, False)
            return
        if entry.role == "row" and type(layer) is not nn.Linear:
            return  # the output layer of an attention that computes it by itself
        divide(layer, _KINDS[entry.role], Slice(entry.name, ranks, entry.units, self._config.sequence))
        if entry.role == "within":
            run_within(layer, *entry.local)


def _tensors(module: nn.Module) -> list[Tensor]:
    return [p.data for _, p in parameters([module])] + [slot.get() for slot in buffers([module])]


def _check_sequence(plain: nn.Module) -> None:
    if hooked(plain):
        raise UsageError(
            "sequence=true does not go with hooks on the gradients of modules",
            why="they would be given a share of the positions",
            remedy="leave out one of the two",
        )


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
