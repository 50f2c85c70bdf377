"""Measure the seconds of each strategy's Python code: steps of tiny models by tutti, less the same steps by hand."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

import tutti
from tutti.comm.grid import Grid
from tutti.comm.mesh_communicators import Communicators
from tutti.config.optimizer_config import check_optimizer
from tutti.config.task_config import GptConfig
from tutti.launcher.context import World
from tutti.optim.factory import from_config
from tutti.tasks.gpt import gpt
from tutti.workload.bench_timing import Findings

_LAYERS, _MICRO_BATCHES = (2, 6), (1, 4)
_WARM, _STEPS = 4, 24
_TOKENS, _VOCABULARY, _SAMPLES = 8, 16, 64
_OPTIMIZER = "adam:lr=0.001"
_WRAPPED = ("sharded-2", "sharded-3")


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
    """Measure the seconds in which the Python code of each strategy keeps a rank busy, besides the model's own.

    A tiny GPT, whose kernels take next to no time, is trained with each strategy for a few steps, with 2 and 6 layers
    and 1 and 4 micro-batches. From the CPU seconds of the main thread, which do not count while it sleeps, those of the
    same passes and update without tutti are subtracted. What is left is a + b·micro-batches + layers·(c +
    d·micro-batches). Collective over all ranks; one rank measures the strategy ``single``, two all others.

    Args:
        world: this process's membership in the launch: rank, number of ranks and device.
        found: receives figures in seconds: ``strategy/NAME/step`` (a), ``strategy/NAME/micro_batch`` (b),
            ``strategy/NAME/tensor`` (c divided by the number of a layer's parameter tensors) and ``strategy/NAME/unit``
            (d divided by the same number; with FSDP, which wraps layers, d itself). Figures below 0 become 0.
    """
    ranks = world.identity.size
    group = Communicators(world, Grid(replica=ranks, rank=world.identity.rank)).world
    for subject in (_SINGLE,) if ranks == 1 else _SUBJECTS:
        excess: dict[tuple[int, int], float] = {}
        for layers in _LAYERS:
            for parts in _MICRO_BATCHES:
                here = parts * (ranks if subject.data else 1)
                passes, update = _by_hand(layers, parts)
                whole = _trained(subject.strategy.format(parts), layers, here)
                # A run's watches of its script last until it is collected, and would slow the next one down.
                gc.collect()
                mine = torch.tensor([whole - subject.layers * passes - subject.update * update], dtype=torch.float64)
                excess[layers, parts] = float(torch.stack(group.all_gather(mine, "seconds of a strategy")).mean())
        for part, seconds in _fitted(excess, wrapped=subject.name in _WRAPPED).items():
            found.add(f"strategy/{subject.name}/{part}", "s", [seconds])


def _fitted(excess: dict[tuple[int, int], float], wrapped: bool) -> dict[str, float]:
    """Return the seconds a step, micro-batch, tensor and unit of excesses by (layers, micro-batches)."""
    (few, many), (one, more) = _LAYERS, _MICRO_BATCHES
    grown = excess[many, more] - excess[few, more] - excess[many, one] + excess[few, one]
    layer = grown / (many - few) / (more - one)
    micro = (excess[few, more] - excess[few, one]) / (more - one) - few * layer
    held = (excess[many, one] - excess[few, one]) / (many - few) - one * layer
    step = excess[few, one] - one * micro - few * (held + one * layer)
    number = sum(1 for _ in _model(1).get_submodule("block1").parameters())
    found = {"step": step, "micro_batch": micro, "tensor": held / number, "unit": layer / (1 if wrapped else number)}
    return {name: max(0.0, seconds) for name, seconds in found.items()}


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
