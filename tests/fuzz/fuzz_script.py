"""What a drawn training script is: layers, optimizers, a loop with its edits, and where it runs.

``repr`` of a ``Script`` can be pasted into ``KNOWN`` of ``test_fuzz.py`` as it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

from tests.scripts import oracle
from tests.scripts.oracle import SYNCHRONOUS, Algorithm
from tutti.comm.partition import chunks, even_share

FEATURES, CLASSES, EPOCHS, WORDS = 5, 3, 2, 7
LOCAL = {"local_sgd:period=2": Algorithm(period=2), "diloco:period=2": Algorithm(period=2, outer=(0.7, 0.9))}
STAGES = ("pipeline", "model_parallel", "hybrid:stages=2")


class Short:
    """``repr`` without what is as by default."""

    def __repr__(self) -> str:
        said = [f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if getattr(self, f.name) != f.default]  # type: ignore[arg-type]
        return f"{type(self).__name__}({', '.join(said)})"


@dataclass(frozen=True, repr=False)
class Place(Short):
    """Where a script runs. ``workers``: logical workers; ``data_ranks``: devices with samples of their own."""

    strategy: str = "single"
    devices: int = 1
    workers: int = 1
    data_ranks: int = 1
    reproducible: bool = False

    @property
    def stages(self) -> bool:
        return self.strategy.startswith(STAGES)

    @property
    def custom_loop(self) -> bool:
        """Whether the strategy takes a loop of the script's own, with so many workers."""
        return not self.stages and (self.strategy not in LOCAL or self.workers == self.data_ranks)


@dataclass(frozen=True, repr=False)
class Edit(Short):
    """A change at one step of the run.

    Attributes:
        step: global batches before it.
        where: ``begin`` or ``end`` of the body, or ``between`` backward and the update.
        kind: ``thaw``, ``freeze``, ``add_group``, ``rate`` or ``hook``.
        layer: index into ``Script.layers``.
    """

    step: int = 0
    where: str = "begin"
    kind: str = "rate"
    layer: int = 0


@dataclass(frozen=True, repr=False)
class Loop(Short):
    """The body of the script's own loop.

    Attributes:
        backward: how gradients come about.
        middle: what is done to complete gradients before the update.
        zero: ``before`` or ``after`` the update, or ``never``.
        how: ``optimizer``, ``keep`` for zeros in place of None, or ``model``.
        every: global batches an update.
        skip: every so many global batches one without anything; 0 for none.
        after: what is done to parameters after an update.
        unstepped: every so many global batches one without an update, whose gradients are there; 0 for none.
    """

    backward: str = "run"
    middle: tuple[str, ...] = ()
    zero: str = "before"
    how: str = "optimizer"
    every: int = 1
    skip: int = 0
    after: str = "nothing"
    unstepped: int = 0


@dataclass(frozen=True, repr=False)
class Script(Short):
    """One drawn script. The layers are followed by a linear one, which is never frozen.

    Attributes:
        layers: kinds.
        frozen: indices of layers that begin frozen.
        outside: indices of layers that no optimizer has at first.
        tied: two indices of linear layers with one weight.
        unused: whether the model has a layer that no forward uses.
        optimizer: name in ``OPTIMIZERS``.
        groups: whether the head has a group of its own.
        loss: ``mean``, ``weighted`` or ``masked`` as (sum, count), or ``each``: one a sample.
        loop: None for ``run.step``.
    """

    place: Place = Place()
    layers: tuple[str, ...] = ()
    width: int = 4
    frozen: tuple[int, ...] = ()
    outside: tuple[int, ...] = ()
    tied: tuple[int, int] | None = None
    unused: bool = False
    optimizer: str = "sgd"
    groups: bool = False
    loss: str = "mean"
    samples: int = 12
    batch: int = 4
    micro: int | None = None
    clip: float | None = None
    loop: Loop | None = None
    edits: tuple[Edit, ...] = field(default=())

    @property
    def random(self) -> bool:
        return "Dropout" in self.layers

    @property
    def statistics(self) -> bool:
        return "BatchNorm1d" in self.layers

    @property
    def algorithm(self) -> Algorithm:
        return LOCAL.get(self.place.strategy, SYNCHRONOUS)

    @property
    def plain_is_enough(self) -> bool:
        """Whether one device with the whole batch is what N workers come to, in exact arithmetic."""
        alone = self.place.workers == 1 and self.micro is None and not self.place.stages
        return self.algorithm is SYNCHRONOUS and not self.random and (alone or not self.statistics)

    @property
    def parts(self) -> int:
        """Into how many micro-batches the strategy cuts a worker's share; 0 where the script says it."""
        pipelined = self.place.strategy.startswith(("pipeline", "hybrid:stages"))
        return 2 if pipelined and self.micro is None else 0

    @property
    def strategy(self) -> str:
        """As ``tutti.prepare`` takes it."""
        text = self.place.strategy
        return f"{text}{',' if ':' in text else ':'}micro_batches={self.parts}" if self.parts else text

    def shares(self) -> set[int]:
        """Numbers of samples in one forward."""
        micro = self.micro
        if self.parts:
            micro = math.ceil(math.ceil(self.batch / self.place.workers) / self.parts)
        sizes = {min(self.batch, self.samples - start) for start in range(0, self.samples, self.batch)}
        given = {len(even_share(size, self.place.workers, w)) for size in sizes for w in range(self.place.workers)}
        return {len(rows) for n in given for rows in (chunks(n, micro) if n else [range(0)])}


def dataset(script: Script) -> TensorDataset:
    draw = torch.Generator().manual_seed(1)
    inputs = torch.randn(script.samples, FEATURES, generator=draw, dtype=torch.float64)
    if script.layers[:1] == ("Embedding",):
        inputs = torch.randint(0, WORDS, (script.samples, 2), generator=draw)  # type: ignore[assignment]
    return TensorDataset(inputs, torch.randint(0, CLASSES, (script.samples,), generator=draw))


def masked_somewhere(script: Script) -> bool:
    """Whether a global batch has no sample that counts."""
    data = dataset(script)
    batches = [b for epoch in range(EPOCHS) for b in oracle.global_batches(data, script.batch, epoch)]
    return any(int((targets != 0).sum()) == 0 for _, targets in batches)


# --- the model --------------------------------------------------------------------------------------------------------


class Drawn(nn.Module):
    """The layers one after the other, then the head."""

    def __init__(self, script: Script) -> None:
        super().__init__()
        layers, width = [], FEATURES
        for number, kind in enumerate(script.layers):
            layer, width = made_layer(kind, width, script, number)
            layers.append(layer)
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(width, CLASSES, bias=script.optimizer != "muon")
        if script.unused:
            self.unused = nn.Linear(3, 2, bias=script.optimizer != "muon")
        if script.tied is not None:
            first, second = script.tied
            self.layers[second].weight = self.layers[first].weight

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.layers(inputs))  # type: ignore[no-any-return]


def made_layer(kind: str, width: int, script: Script, number: int) -> tuple[nn.Module, int]:
    """A layer of a kind, and how many features it gives."""
    if kind == "Linear":
        return nn.Linear(width, script.width, bias=script.optimizer != "muon"), script.width
    if kind == "Embedding":
        return nn.Sequential(nn.Embedding(WORDS, 3), nn.Flatten()), 6
    if kind in ("LayerNorm", "BatchNorm1d"):
        return getattr(nn, kind)(width), width
    return (nn.Dropout(0.3) if kind == "Dropout" else getattr(nn, kind)()), width


def build(script: Script) -> tuple[Drawn, list[Optimizer]]:
    """The model, and its optimizers."""
    torch.manual_seed(0)
    model = Drawn(script).double()
    for number in script.frozen:
        model.layers[number].requires_grad_(False)
    outside = {p for number in script.outside for p in model.layers[number].parameters()}
    outside -= set(model.head.parameters())
    members = [p for p in model.parameters() if p not in outside]
    own = list(model.head.parameters())
    kind, options = OPTIMIZERS[script.optimizer]
    if script.optimizer == "muon_adamw":
        matrices = [p for p in members if p.ndim == 2]
        rest = [p for p in members if p.ndim != 2]
        return model, [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=0.01)]
    if script.optimizer == "sgd_adamw":
        rest = [p for p in members if not any(p is each for each in own)]
        first = [torch.optim.SGD(rest, lr=0.1)] if rest else []
        return model, [*first, torch.optim.AdamW(own, lr=0.01)]
    groups: Any = members
    if script.groups:
        rest = [p for p in members if not any(p is each for each in own)]
        groups = [{"params": rest}, {"params": own, "lr": 0.03}] if rest else members
    return model, [kind(groups, **options)]


OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    "nesterov": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "adam": (torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.01}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01}),
    "amsgrad": (torch.optim.AdamW, {"lr": 0.01, "amsgrad": True}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.5, "centered": True}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.05}),
    "adafactor": (torch.optim.Adafactor, {"lr": 0.05}),
    "adamax": (torch.optim.Adamax, {"lr": 0.01}),
    "asgd": (torch.optim.ASGD, {"lr": 0.05}),
    "muon": (torch.optim.Muon, {"lr": 0.02}),
    "muon_adamw": (torch.optim.Muon, {"lr": 0.02}),
    "sgd_adamw": (torch.optim.SGD, {"lr": 0.1}),
    "lbfgs": (torch.optim.LBFGS, {"lr": 0.1, "max_iter": 3}),
}


def losses(model: Any, batch: Any) -> Tensor:
    """One loss a sample."""
    inputs, targets = batch
    return nn.functional.cross_entropy(model(inputs), targets, reduction="none")


def in_form(script: Script, each: Tensor, targets: Tensor) -> Any:
    """The batch's loss in the form that the script gives it."""
    if script.loss == "mean":
        return each.mean()
    if script.loss == "each":
        return each
    weights = (targets != 0).double() if script.loss == "masked" else 1.0 + targets
    return (each * weights).sum(), weights.sum()


def global_batches(script: Script, epoch: int) -> Iterator[Any]:
    return oracle.global_batches(dataset(script), script.batch, epoch)
