"""The table that every strategy and optimizer joins. One line here puts a member through every contract.

A case trains five steps in ``make contract``, which sets ``CONTRACT_PART``, and four in ``make test``, whose cases are
the table's daily part.
"""

from __future__ import annotations

import os
import random
import re
import tomllib
from collections.abc import Callable, Set
from dataclasses import dataclass
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

STEPS = 5 if os.environ.get("CONTRACT_PART") else 4
BATCH = 25
WORKERS = (1, 3, 4, 8)
DEVICES = (1, 2, 3, 4, 8)
_COST = {"odd": 1.0, "digits": 1.8, "unet": 2.4, "gpt": 2.7, "hybrid": 1.7, "tensor": 1.8, "tensor × 2": 3.0}
_COST |= {"sharded": 1.8, "sharded × 2": 3.0, "hybrid, whole shards": 4.0, "pipeline": 1.5, "model_parallel": 1.5}
_COST |= {"parameter_server": 1.6, "local_sgd": 1.3}
"""What a case takes, by its model and its strategy, or the first word of its specification; others take 1."""

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
# micro-batch, clipping, channels-last, batch norm; of three samples each worker has a smaller last micro-batch
VARIANTS = ((None, None, False, "worker"), (3, 0.5, True, "worker"), (None, None, True, "ghost:size=2"))


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
        return self.applies(case)

    def applies(self, case: Case) -> bool:
        """Whether its condition holds for ``case``."""
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
    table = product(MODELS, STRATEGIES, OPTIMIZERS, WORKERS, DEVICES, VARIANTS)
    return [Case(s, o, n, p, *rest, model=m) for m, s, o, n, p, rest in table]


@cache
def whole() -> list[Case]:
    """Every case but those that ``refused.toml`` lists."""
    return [case for case, runs in zip(every(), _runs().flat, strict=True) if runs]


def running(model: str, workers: Set[int], devices: Set[int]) -> list[Case]:
    """Those of ``whole`` with this model, and so many workers and devices."""
    table = product(STRATEGIES, OPTIMIZERS, WORKERS, DEVICES, VARIANTS)
    cases = zip(table, _runs()[list(MODELS).index(model)].flat, strict=True)
    return [
        Case(s, o, n, p, *rest, model=model)
        for (s, o, n, p, rest), runs in cases
        if runs and n in workers and p in devices
    ]


@cache
def _runs() -> NDArray[np.bool_]:
    """Whether each case of ``every`` runs, by model, strategy and all that ``refused.toml`` has conditions of."""
    free = [Case("", o, n, p, *rest) for o, n, p, rest in product(OPTIMIZERS, WORKERS, DEVICES, VARIANTS)]
    runs = np.ones((len(MODELS), len(STRATEGIES), len(free)), dtype=np.bool_)
    for refusal in REFUSED:
        models = [number for number, name in enumerate(MODELS) if name in refusal.models]
        strategies = [number for number, name in enumerate(STRATEGIES) if name in refusal.strategies]
        runs[np.ix_(models, strategies, [number for number, case in enumerate(free) if refusal.applies(case)])] = False
    return runs.reshape(*runs.shape[:2], len(OPTIMIZERS), len(WORKERS), len(DEVICES), len(VARIANTS))


@cache
def pairwise() -> list[Case]:
    """Few cases that together hold nearly every pair of values of any two columns, and take little time.

    Of strategies and optimizers they hold every strategy with each kind of optimizer; ``make contract`` has each with
    each. Whether a case runs in reproducible mode is a column of its own; ``make contract`` runs each in both modes. It
    also has every strategy on 4 and 8 devices, with 8 workers and with the digits' model, of which these few have some:
    each strategy on 1, 2 and 3 devices, and on 4 where it does not run on 3; with 1, 3 and 4 workers, and with 8 where
    it runs with none of these; and with every other model, but for those of ``ONE_MODEL``.
    Greedy, among the cases that hold that missing pair which fewest cases hold (Cohen et al. 1997, AETG).
    """
    columns, cost = _columns()
    labels: list[tuple[Any, ...]] = []
    held, place = [], []
    for (one, (values, own)), (other, (others, its)) in combinations(columns.items(), 2):
        if (one, other) != ("strategy", "optimizer"):
            place += [len(held)] * (len(values) * len(others))
            held.append((len(labels) + own * len(others) + its).astype(np.int32))
            labels += product([(one, value) for value in values], [(other, value) for value in others])
    pairs = np.stack(held)
    frequency = np.bincount(pairs.ravel(), minlength=len(labels))
    exist = {label for label, count in zip(labels, frequency, strict=True) if count}
    missing = np.array([label in exist and not _only_whole(label, exist) for label in labels])
    chosen = []
    while missing.any():
        rarest = np.where(missing, frequency, frequency.max() + 1).argmin()
        candidates = np.flatnonzero(pairs[place[rarest]] == rarest)
        best = candidates[(missing[pairs[:, candidates]].sum(axis=0) / cost[candidates] ** 0.7).argmax()]
        missing[pairs[:, best]] = False
        chosen.append({name: values[numbers[best]] for name, (values, numbers) in columns.items()})
    # Worlds of one size after the other: the next one need not wait beside ranks that have nothing to do.
    return sorted(map(_case, chosen), key=lambda case: case.devices)


def _case(values: dict[str, Any]) -> Case:
    [variant] = [each for each in VARIANTS if (each[0], each[3]) == (values["micro_batch"], values["batch_norm"])]
    of_case = {name: value for name, value in values.items() if name not in ("kind", "micro_batch", "batch_norm")}
    return Case(micro_batch=variant[0], clip=variant[1], channels_last=variant[2], batch_norm=variant[3], **of_case)


def _columns() -> tuple[dict[str, tuple[list[Any], NDArray[Any]]], NDArray[Any]]:
    """Columns of the cases that run, in each of their modes: the values there are, and each case's; and its cost."""
    exact = np.array([own for _, _, own in STRATEGIES.values()])
    cases = np.argwhere(_runs())
    reproducible = np.repeat([0, 1], [len(cases), exact[cases[:, 1]].sum()])
    cases = np.concatenate([cases, cases[exact[cases[:, 1]]]])
    # Of 150 orders, the one whose few cases take least.
    order = np.random.default_rng(19).permutation(len(cases))
    model, strategy, optimizer, workers, devices, variant = cases[order].T
    kinds, micro, norms = ["elementwise", "layerwise", "matrix"], [None, 3], ["worker", "ghost:size=2"]
    columns = {
        "model": (list(MODELS), model),
        "strategy": (list(STRATEGIES), strategy),
        "optimizer": (list(OPTIMIZERS), optimizer),
        "kind": (kinds, np.array([kinds.index(KINDS[name]) for name in OPTIMIZERS])[optimizer]),
        "workers": (list(WORKERS), workers),
        "devices": (list(DEVICES), devices),
        "micro_batch": (micro, np.array([micro.index(each) for each, *_ in VARIANTS])[variant]),
        "batch_norm": (norms, np.array([norms.index(norm) for *_, norm in VARIANTS])[variant]),
        "reproducible": ([False, True], reproducible[order]),
    }
    heads = [re.match(r"\w+", specification).group() for specification, *_ in STRATEGIES.values()]
    own = [_COST.get(name, _COST.get(head, 1.0)) for name, head in zip(STRATEGIES, heads, strict=True)]
    cost = np.array([_COST[name] for name in MODELS])[model] * np.array(own)[strategy]
    # Micro-batches of a step: one of each worker, or nine of three samples at most.
    parts = np.where(columns["micro_batch"][1] == 1, 9, np.array(WORKERS)[workers])
    return columns, cost * np.array(DEVICES)[devices] * parts**0.6


ONE_MODEL = {
    *(name for name in STRATEGIES if name.startswith(("mirrored, ", "hybrid")) or name.endswith(" × 2")),
    *("local_sgd, post", "pipeline gpipe", "pipeline 1f1b"),
}
"""Strategies that ordinary runs have with the first model alone: some treat a model as another one of the table does,
and exchange or order its messages otherwise; hybrids have models of all shapes in
``tests/parallel/test_split_between.py`` and ``tests/parallel/tensor/test_tensor_layout.py``."""


def _only_whole(pair: tuple[Any, ...], exist: Set[tuple[Any, ...]]) -> bool:
    """Whether a pair may be missing in ordinary runs, for the time that it would take.

    One of a strategy, an optimizer or a model but the first and the largest world; one of a strategy that runs on three
    devices, or with four workers, and four devices or eight workers; one of a strategy and the digits' model; and one
    of a strategy of ``ONE_MODEL`` and any model but the first.
    """
    values = dict(pair)
    if "strategy" not in values:
        return values.get("devices") == max(DEVICES) and ("optimizer" in values or values.get("model", "odd") != "odd")
    own = ("strategy", values["strategy"])
    fourth = values.get("devices") == 4 and (own, ("devices", 3)) in exist
    most = values.get("workers") == max(WORKERS) and (own, ("workers", 4)) in exist
    model = values.get("model", "odd")
    alike = model == "digits" or (model != "odd" and values["strategy"] in ONE_MODEL)
    return fourth or most or values.get("devices") == max(DEVICES) or alike


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
    """Train for a few steps on this world: state as one plain model's, losses, hash.

    Batches of 25, 25, 20, 25, 25 samples. The average of the weights is in the state too, and evaluated beside them.
    The hash is "" outside of reproducible mode, where the bits are not promised: every tensor of the state is gathered
    for it once more.
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
        for batch in run.epoch(epoch):
            losses.append(run.step(batch))
            if len(losses) == steps:
                break
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
