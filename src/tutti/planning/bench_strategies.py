"""Measure the seconds of each strategy's Python code: steps of tiny models by tutti, less the same steps by hand."""

from __future__ import annotations

import gc
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import inf

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

import tutti
from tutti.comm.mesh_communicators import Communicators
from tutti.comm.rank_mesh import RankMesh
from tutti.config.optimizer_config import check_optimizer
from tutti.config.task_config import GptConfig
from tutti.launcher.context import World
from tutti.optim.factory import from_config
from tutti.tasks.gpt import gpt
from tutti.workload.bench_timing import Findings

_LAYERS, _MICRO_BATCHES = (2, 6), (1, 4)
_WARM, _STEPS, _ROUNDS = 4, 16, 2
_TOKENS, _VOCABULARY, _SAMPLES = 8, 16, 64
_OPTIMIZER = "adam:lr=0.001"
_WRAPPED = ("sharded-2", "sharded-3")
_PARTS = ("step", "tensor", "micro_batch", "unit")
_Run = tuple[int, int]
"""Layers of the tiny model, and micro-batches of a step."""


@dataclass(frozen=True)
class _Subject:
    """A strategy whose Python work is measured.

    Attributes:
        name: key of its figures.
        strategy: text of ``--strategy``; ``{}`` stands for the number of micro-batches.
        layers: share of the model's layers that a rank computes.
        update: share of the parameter tensors that a rank updates.
        data: whether each rank has samples of its own.
    """

    name: str
    strategy: str
    layers: float = 1.0
    update: float = 1.0
    data: bool = True


_SINGLE = _Subject("single", "single")
_SUBJECTS = (
    _Subject("mirrored", "mirrored:algorithm=native"),
    _Subject("schedule", "mirrored:algorithm=ring"),
    *(_Subject(f"sharded-{stage}", f"sharded:stage={stage}") for stage in (1, 2, 3)),
    _Subject("local_sgd", "local_sgd:period=1000"),
    _Subject("central_storage", "central_storage", update=1 / 2),
    _Subject("parameter_server", "parameter_server", update=0.0),
    _Subject("tensor", "tensor:tensor=2", data=False),
    _Subject("pipeline", "pipeline:stages=2,micro_batches={}", layers=1 / 2, update=1 / 2, data=False),
)


def bench_strategies(world: World, found: Findings) -> None:
    """Measure the CPU seconds that the Python code of each strategy adds to a training step on a rank.

    A tiny GPT, whose kernels take next to no time, is trained with each strategy for a few steps, with 2 and 6 layers
    and 1 and 4 micro-batches. The measured quantity is CPU seconds of the main thread, without the time in which the
    thread sleeps, minus the CPU seconds of the same passes and update without tutti. The law a + b·tensors + (c +
    d·units)·micro-batches is fitted to it, with the number of a rank's parameter tensors; units are these tensors, for
    FSDP the wrapped modules. Each run is measured twice, and the faster counts.

    Collective over all ranks of ``world``: each trains with them, and the seconds of each run are all-gathered, so that
    all ranks find the same figures. Call it in a launch of one rank, which measures the strategy ``single``, or of two
    ranks, which measure all other strategies.

    Args:
        world: this process's membership in the launch: rank, number of ranks and device.
        found: receives figures in seconds, none negative: ``strategy/NAME/step`` (a), ``strategy/NAME/tensor`` (b),
            ``strategy/NAME/micro_batch`` (c) and ``strategy/NAME/unit`` (d).

    Raises:
        PeerError: a rank is lost, or does not take part within the timeout.
    """
    ranks = world.identity.size
    group = Communicators(world, RankMesh(replica=ranks, rank=world.identity.rank)).world
    for subject in (_SINGLE,) if ranks == 1 else _SUBJECTS:
        whole, by_hand = defaultdict[_Run, float](lambda: inf), defaultdict[_Run, float](lambda: inf)
        # Another process disturbs all runs of one round.
        for _ in range(_ROUNDS):
            for layers, parts in product(_LAYERS, _MICRO_BATCHES):
                here = parts * (ranks if subject.data else 1)
                passes, update = _by_hand(layers, parts)
                seconds = _trained(subject.strategy.format(parts), layers, here)
                # A run's watches of its script last until it is collected, and would slow the next one down.
                gc.collect()
                mine = torch.tensor([seconds, subject.layers * passes + subject.update * update], dtype=torch.float64)
                means = torch.stack(group.all_gather(mine, "seconds of a strategy")).mean(dim=0)
                for seconds_of, mean in zip((whole, by_hand), means.tolist(), strict=True):
                    seconds_of[layers, parts] = min(seconds_of[layers, parts], mean)
        for part, seconds in _fitted(whole, by_hand, subject).items():
            found.add(f"strategy/{subject.name}/{part}", "s", [seconds])


def _fitted(whole: Mapping[_Run, float], by_hand: Mapping[_Run, float], subject: _Subject) -> dict[str, float]:
    """Return the seconds a step, tensor, micro-batch and unit, none negative, that fit the excesses of all runs best.

    A run's weight is 1 over its seconds, because its error grows with them: the small runs, whose excess is no small
    difference of large numbers, decide.

    Args:
        whole: CPU seconds of a step by number of layers and of micro-batches.
        by_hand: CPU seconds of the same passes and update without tutti.
        subject: the strategy.
    """
    runs = [*whole]
    tensors = {layers: subject.layers * sum(1 for _ in _model(layers).parameters()) for layers, _ in runs}
    units = {layers: layers if subject.name in _WRAPPED else tensors[layers] for layers, _ in runs}
    table = np.array([[1, tensors[layers], parts, units[layers] * parts] for layers, parts in runs], dtype=float)
    excess, weights = np.array([[whole[run] - by_hand[run], 1 / whole[run]] for run in runs]).T
    found, error = np.zeros(len(_PARTS)), inf
    # Of the best fits by some of the causes, the best that is nowhere negative solves the non-negative least squares.
    for used in product((False, True), repeat=len(_PARTS)):
        fit, chosen = np.zeros(len(_PARTS)), np.array(used)
        fit[chosen] = np.linalg.lstsq(weights[:, None] * table[:, chosen], weights * excess, rcond=None)[0]
        left = float(np.sum((weights * (table @ fit - excess)) ** 2))
        if fit.min() >= 0 and left < error:
            found, error = fit, left
    return dict(zip(_PARTS, found.tolist(), strict=True))


def _model(layers: int) -> nn.Sequential:
    return gpt(GptConfig(layers=layers, heads=2, width=8, block=_TOKENS), _VOCABULARY)


def _data() -> tuple[Tensor, Tensor]:
    whole = torch.randint(0, _VOCABULARY, (_SAMPLES, _TOKENS + 1), generator=torch.Generator().manual_seed(0))
    return whole[:, :-1].contiguous(), whole[:, 1:].contiguous()


def _loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, targets = batch
    return functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def _trained(strategy: str, layers: int, batch: int) -> float:
    """Return the CPU seconds of this thread in a step of the tiny model with micro-batches of one sample."""
    model = _model(layers)
    micro_batch = None if "micro_batches" in strategy else 1
    run = tutti.prepare(model, _OPTIMIZER, _data(), _loss, strategy=strategy, batch_size=batch, micro_batch=micro_batch)
    seconds, before = list[float](), time.thread_time()
    epoch = 0
    while len(seconds) < _WARM + _STEPS:
        for batch_ in run.epoch(epoch):
            run.step(batch_)
            now = time.thread_time()
            seconds.append(now - before)
            before = now
        epoch += 1
    return _undisturbed(seconds[_WARM:])


def _by_hand(layers: int, micro_batches: int) -> tuple[float, float]:
    """Return the CPU seconds of this thread in the passes and the update of a step of plain PyTorch."""
    model, data = _model(layers), _data()
    optimizer = from_config(check_optimizer(_OPTIMIZER))(list(model.named_parameters()))
    found = []
    for _ in range(_WARM + _STEPS):
        begin = time.thread_time()
        for number in range(micro_batches):
            _loss(model, (data[0][number : number + 1], data[1][number : number + 1])).backward()
        middle = time.thread_time()
        if optimizer is not None:
            optimizer.step()
        found.append((middle - begin, time.thread_time() - middle))
        model.zero_grad()
    passes, updates = zip(*found[_WARM:], strict=True)
    return _undisturbed(passes), _undisturbed(updates)


def _undisturbed(seconds: Sequence[float]) -> float:
    """Return the lower quartile: in some steps a rank spins while it waits for a rank that another process delays."""
    return statistics.quantiles(seconds, n=4, method="inclusive")[0]
