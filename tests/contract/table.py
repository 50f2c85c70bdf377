"""The table that every strategy and optimizer joins. One line here puts a member through every contract."""

from __future__ import annotations

import random
import tomllib
from collections.abc import Callable, Set
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations, product
from pathlib import Path
from types import CodeType
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

import tutti
from tests.contract.models import MODELS

STEPS = 4
BATCH = 25
DEVICES = (1, 2, 3, 4, 8)
_PREFERRED = {1: 0.8, 2: 1.0, 3: 1.0, 4: 0.7, 8: 0.3} | {"odd": 1.0, "digits": 0.7, "unet": 0.4, "gpt": 0.4}
"""Weights of the choice among cases that hold as many missing pairs, by devices and model: what takes long is light."""

STRATEGIES = {
    # name: (specification, reference on one device, whether it is bit-identical in reproducible mode)
    "mirrored": ("mirrored", "single", True),
    "mirrored, native": ("mirrored:algorithm=native", "single", True),
    "mirrored, small buckets": ("mirrored:algorithm=native,bucket_mb=0.001", "single", True),
    "mirrored, ring": ("mirrored:algorithm=ring", "single", False),
    "mirrored, tree": ("mirrored:algorithm=tree,bucket_mb=0.001", "single", False),
    "mirrored, halving": ("mirrored:algorithm=halving", "single", False),
    "mirrored, hierarchical": ("mirrored:algorithm=hierarchical,bucket_mb=0.001", "single", False),
    "mirrored, central": ("mirrored:algorithm=central", "single", False),
    "model_parallel": ("model_parallel", "single", True),
    "model_parallel × 2": ("model_parallel:stages=2", "single", True),
    "local_sgd": ("local_sgd:period=2", "local_sgd:period=2", True),
    "tensor": ("tensor:least=1", "single", False),
    "tensor × 2": ("tensor:tensor=2,least=1", "single", False),
    "sharded": ("sharded:units={units}", "single", False),
    "sharded, stage 2": ("sharded:stage=2,units={some}", "single", False),
    "sharded, stage 1": ("sharded:stage=1", "single", False),
    "sharded × 2": ("sharded:shards=2,units={few}", "single", False),
    "hybrid": ("hybrid:stages=2,tensor=2,least=1", "single", False),
    "hybrid, shards": ("hybrid:shards=2,tensor=2,least=1", "single", False),
    "hybrid, whole shards": ("hybrid:shards=2,stage=3,units={units},tensor=2,least=1", "single", False),
    "hybrid, shards of stages": ("hybrid:shards=2,stages=2", "single", False),
    "hybrid, sequence": ("hybrid:tensor=2,least=1,sequence=true", "single", False),
    "hybrid zero_bubble": ("hybrid:stages=2,tensor=2,least=1,schedule=zero_bubble", "single", False),
    "pipeline gpipe": ("pipeline:schedule=gpipe", "single", True),
    "pipeline 1f1b": ("pipeline:schedule=1f1b", "single", True),
    "pipeline interleaved": ("pipeline:schedule=interleaved", "single", True),
    "pipeline zero_bubble": ("pipeline:schedule=zero_bubble", "single", True),
    "pipeline 1f1b × 2": ("pipeline:stages=2,schedule=1f1b", "single", True),
    "pipeline interleaved × 2": ("pipeline:stages=2,schedule=interleaved,virtual=3", "single", True),
    "parameter_server": ("parameter_server", "single", True),
    "parameter_server × 2": ("parameter_server:servers=2,transport=tcp", "single", True),
    "central_storage": ("central_storage", "single", True),
    "local_sgd, post": ("local_sgd:period=2,post=2", "local_sgd:period=2,post=2", True),
    "diloco": ("diloco:period=2", "diloco:period=2", True),
}
OPTIMIZERS = {
    "sgd": "sgd:lr=0.1",
    "sgd momentum": "sgd:lr=0.05,momentum=0.9,nesterov=true,weight_decay=0.01",
    "adam": "adam:lr=0.01",
    "adamw": "adamw:lr=0.01,weight_decay=0.1",
    "lars": "lars:lr=2,trust=0.01,weight_decay=0.01",
    "larc": "larc:lr=0.05,weight_decay=0.01,nesterov=true,adapt_1d=true",
    "lamb": "lamb:lr=0.01,max_grad_norm=0.5",
    "novograd": "novograd:lr=0.01,weight_decay=0.01,decay_1d=true",
    "muon": "muon:lr=0.02,adam_lr=0.01,weight_decay=0.1,adam={last}",
    # instances that PyTorch makes: see MADE
    "torch muon": "torch.Muon",
    "torch adafactor": "torch.Adafactor",
}
MADE: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "torch.Muon": lambda model: torch.optim.Muon([p for p in model.parameters() if p.dim() == 2], lr=0.02),
    "torch.Adafactor": lambda model: torch.optim.Adafactor(model.parameters(), lr=0.02, weight_decay=0.1),
}
# What an update of one number depends on: that number's own past, all numbers of its tensor, or all of a matrix.
KINDS = dict.fromkeys(("sgd", "sgd momentum", "adam", "adamw"), "elementwise")
KINDS |= dict.fromkeys(("lars", "larc", "lamb", "novograd"), "layerwise")
KINDS |= dict.fromkeys(("muon", "torch muon", "torch adafactor"), "matrix")
# micro-batch, clipping, channels-last, batch norm
VARIANTS = ((None, None, False, "worker"), (2, 0.5, True, "worker"), (None, None, True, "ghost:size=2"))


@dataclass(frozen=True)
class Case:
    """One line of the table."""

    strategy: str
    optimizer: str
    workers: int
    devices: int
    micro_batch: int | None = None
    clip: float | None = None
    channels_last: bool = False
    batch_norm: str = "worker"
    model: str = "odd"
    reproducible: bool | None = None
    """In reproducible mode or not; None: in both, where the strategy promises bits."""

    def __str__(self) -> str:
        last = " channels-last" * self.channels_last
        extra = "".join([f" micro={self.micro_batch}" * bool(self.micro_batch), f" clip={self.clip}" * bool(self.clip)])
        norm = f" {self.batch_norm}" * (self.batch_norm != "worker")
        head = f"{self.model} {self.strategy} {self.optimizer} N={self.workers} P={self.devices}"
        mode = " reproducible" * bool(self.reproducible)
        return f"{head}{extra}{last}{norm}{mode}".replace(" ", "-")

    @property
    def modes(self) -> tuple[bool, ...]:
        """Whether it is run in reproducible mode; both, where the case does not choose and the strategy has both."""
        exact = STRATEGIES[self.strategy][2]
        return ((False, True) if exact else (False,)) if self.reproducible is None else (self.reproducible,)

    def listed(self) -> list[Refusal]:
        """The entries of ``refused.toml`` that say that this case is refused; none where it runs."""
        return [refusal for refusal in REFUSED if refusal.covers(self)]


@dataclass(frozen=True)
class Refusal:
    """One entry of ``refused.toml``, whose columns are explained there."""

    when: str
    says: str
    why: str
    strategies: tuple[str, ...] = tuple(STRATEGIES)
    models: tuple[str, ...] = tuple(MODELS)

    def covers(self, case: Case) -> bool:
        """Whether it says that ``case`` is refused."""
        if case.strategy not in self.strategies or case.model not in self.models:
            return False
        values = {"workers": case.workers, "devices": case.devices, "batch_norm": case.batch_norm}
        values |= {"optimizer": case.optimizer, "micro_batch": case.micro_batch}
        return bool(eval(_compiled(self.when), {"__builtins__": {}}, values))


@cache
def _compiled(condition: str) -> CodeType:
    return compile(condition, "refused.toml", "eval")


def refusals(text: str) -> list[Refusal]:
    """The entries of a file such as ``refused.toml``."""
    return [
        Refusal(**{key: tuple(value) if isinstance(value, list) else value for key, value in entry.items()})
        for entry in tomllib.loads(text)["refused"]
    ]


REFUSED = refusals(Path(__file__).with_name("refused.toml").read_text(encoding="utf-8"))


def named(specification: str, model: str) -> str:
    """A strategy's or an optimizer's for one of the models, whose layers have names of their own: see Model.names."""
    return specification.format(**MODELS[model].names)


def updates_on_host(case: Case) -> bool:
    """Whether the host makes the update, so that its kernels' rounding counts and not that of the device's."""
    return case.strategy.startswith(("parameter_server", "central_storage"))


def in_another_order(case: Case) -> bool:
    """Whether a compiled loop of the host makes the update, which adds up in another order than a device."""
    return updates_on_host(case) and case.optimizer in ("lars", "larc", "lamb", "novograd")


def optimizer_of(specification: str, model: str, built: nn.Module) -> torch.optim.Optimizer | str:
    """One of ``OPTIMIZERS`` as ``tutti.prepare`` takes it, for ``built``, which is one of the models."""
    make = MADE.get(specification)
    return named(specification, model) if make is None else make(built)


HOST_ONLY = "mirrored, hierarchical"
"""Strategy whose ranks of a node exchange gradients in the host's memory: refused on accelerators."""


@cache
def every() -> list[Case]:
    """Model × strategy × optimizer × workers × devices × variant, whether it runs or not."""
    table = product(MODELS, STRATEGIES, OPTIMIZERS, (1, 3, 4, 8), DEVICES, VARIANTS)
    return [Case(s, o, n, p, *rest, model=m) for m, s, o, n, p, rest in table]


@cache
def whole() -> list[Case]:
    """Every case but those that ``refused.toml`` lists."""
    return [case for case in every() if not case.listed()]


def pairwise() -> list[Case]:
    """Few cases that together hold every pair of values of any two columns, by preference those that take little time.

    Of strategies and optimizers they hold every strategy with each kind of optimizer; ``make contract`` has each with
    each. Whether a case runs in reproducible mode is a column of its own; ``make contract`` runs each in both modes. It
    also has every strategy on 4 and 8 devices and with the digits' model, of which these few have some: each strategy
    on 1, 2 and 3 devices, and on 4 where it does not run on 3, with every other model.
    Greedy, among a few that hold the first pair that is missing (Cohen et al. 1997, AETG).
    """
    rows = [replace(case, reproducible=mode) for case in whole() for mode in case.modes]
    random.Random(0).shuffle(rows)
    holding: dict[tuple[Any, ...], list[Case]] = {}
    for row in rows:
        for pair in pairs(row):
            holding.setdefault(pair, []).append(row)
    three = {row.strategy for row in rows if row.devices == 3}
    missing, chosen = dict.fromkeys(pair for pair in sorted(holding, key=str) if not _only_whole(pair, three)), []
    while missing:
        candidates = holding[next(iter(missing))][:50]
        best = max(candidates, key=lambda row: len(missing.keys() & pairs(row)) * _weight(row))
        chosen.append(best)
        for pair in pairs(best):
            missing.pop(pair, None)
    # Worlds of one size after the other: the next one need not wait beside ranks that have nothing to do.
    return sorted(chosen, key=lambda case: case.devices)


def pairs(row: Case) -> set[tuple[Any, ...]]:
    """Every two columns' values of a case: beside a strategy not its optimizer but the kind of it."""
    columns = dict(model=row.model, strategy=row.strategy, optimizer=row.optimizer, kind=KINDS[row.optimizer])
    columns |= dict(workers=row.workers, devices=row.devices, micro_batch=row.micro_batch, batch_norm=row.batch_norm)
    columns |= dict(reproducible=row.reproducible)
    both = combinations(columns.items(), 2)
    return {(one, other) for one, other in both if (one[0], other[0]) != ("strategy", "optimizer")}


def _only_whole(pair: tuple[Any, ...], three: Set[str]) -> bool:
    """Whether a pair may be missing in ordinary runs, for the time that it would take.

    One of a strategy or an optimizer and the largest world; one of a strategy that runs on three devices (``three``)
    and four; and one of a strategy and the digits' model.
    """
    values = dict(pair)
    largest = values.get("devices") == max(DEVICES) and ("strategy" in values or "optimizer" in values)
    fourth = values.get("devices") == 4 and values.get("strategy") in three
    return largest or fourth or ("strategy" in values and values.get("model") == "digits")


def _weight(row: Case) -> float:
    return _PREFERRED[row.devices] * _PREFERRED[row.model]


def part(text: str) -> list[Case]:
    """``2/30``: the second of thirty parts of the whole table, each with something of everything."""
    number, _, of = text.partition("/")
    if not (number.isdecimal() and of.isdecimal() and 1 <= int(number) <= int(of)):
        raise pytest.UsageError(f"CONTRACT_PART (make contract PART=…) is '{text}': write 2/30, the second of thirty")
    return random.Random(0).sample(whole(), len(whole()))[int(number) - 1 :: int(of)]


def train(
    strategy: str,
    optimizer: str,
    workers: int,
    *,
    trained: str = "odd",
    steps: int = STEPS,
    batch_size: int = BATCH,
    precision: str = "fp64",
    **options: Any,
) -> tuple[dict[str, NDArray[Any]], list[float], str]:
    """Train for a few steps on this world: state as one plain model's, losses, hash. Batches of 25, 25, 20, 25 samples.

    The average of the weights is in the state too, and evaluated beside them. The hash is "" outside of reproducible
    mode, where the bits are not promised: every tensor of the state is gathered for it once more.
    """
    chosen = MODELS[trained]
    built = chosen.build()
    run = tutti.prepare(
        built,
        optimizer_of(optimizer, trained, built),
        chosen.samples(70),
        chosen.loss,
        strategy=named(strategy, trained),
        workers=workers,
        batch_size=batch_size,
        ema="0.8:warmup",
        precision=precision,
        **options,
    )
    losses: list[float] = []
    epoch = 0
    while len(losses) < steps:
        losses += [run.step(batch) for batch in run.epoch(epoch)]
        epoch += 1
    for averaged in (True, False):
        evaluation = run.evaluate(run.feed.source, batch=24, averaged=averaged)
        losses += evaluation.values.values()
    state = {name: tensor.cpu().numpy().copy() for name, tensor in run.state().items()}
    state |= {f"average of {name}": tensor.cpu().numpy().copy() for name, tensor in run.state(averaged=True).items()}
    hashes = run.weights_sha256() + run.weights_sha256(averaged=True) if options.get("reproducible") else ""
    return state, losses, hashes


def largest_difference(a: dict[str, NDArray[Any]], b: dict[str, NDArray[Any]]) -> float:
    """max|Δ| relative to max(1, max|p|), over all tensors. Fails where names differ."""
    if a.keys() != b.keys():
        raise AssertionError(f"different names: {sorted(a.keys() ^ b.keys())}")
    scale = max(1.0, *(float(np.abs(v).max()) for v in b.values()))
    return max(float(np.abs(a[n].astype(float) - b[n].astype(float)).max()) for n in a) / scale
