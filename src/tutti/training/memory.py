"""What a run will take of a device's memory, known before it starts, and what its first step has really taken."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tutti import strategies
from tutti.data.adapt import adapt_training
from tutti.data.batches import map_tensors
from tutti.data.contract import BatchContract
from tutti.data.stream import Stream
from tutti.laws.memory import Memory, Split, State, of_state
from tutti.measure.memory import Tracker, bytes_of
from tutti.nn import wrapping
from tutti.nn.config import Sync, check_batch_norm
from tutti.nn.forwards import recompute
from tutti.optim import config as options
from tutti.optim.config import check_optimizer
from tutti.strategies import Choice
from tutti.tasks import table
from tutti.tasks.task import Task
from tutti.training.config import TrainConfig
from tutti.training.main import built, prepare_process, prepared
from tutti.world import context

MEASURED = "memory.json"
_CAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
_BUCKETS = 2 * (25 << 20)


@dataclass(frozen=True)
class Facts:
    """What a model and its task are, in bytes, however they are split.

    Attributes:
        parameters: how many.
        whole, trained: all parameters, and those that are trained.
        words: numbers that the optimizer keeps for each trained one.
        buffers: of one worker.
        unit, rest: the largest unit that is gathered as one, and what is in none.
        samples: in the largest micro-batch.
        activations: of those; None where they could not be computed.
    """

    parameters: int
    whole: int
    trained: int
    words: float
    buffers: int
    unit: int
    rest: int
    samples: int
    activations: float | None


def facts(name: str, config: TrainConfig) -> Facts:
    """From shapes alone: nothing is allocated and nothing computed, where the model and its loss allow it."""
    task = table.load(name, data=config.data, model=config.model, augment=config.augment)
    choice = strategies.parse(config.strategy)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = model_of(task, config)
        units = wrapping.units(model, getattr(choice.exchange, "units", ("auto",)))
        inside = {id(p) for unit in units for p in unit.parameters()}
        whole = sum(p.nbytes for p in model.parameters())
        rest = sum(p.nbytes for p in model.parameters() if id(p) not in inside)
        found = Facts(
            sum(p.numel() for p in model.parameters()),
            whole,
            sum(p.nbytes for p in model.parameters() if p.requires_grad),
            _words(config.optimizer),
            sum(b.nbytes for b in model.buffers()),
            max([sum(p.nbytes for p in unit.parameters()) for unit in units], default=0),
            rest,
            _largest(config, choice, int(config.devices)),
            None,
        )
    return replace(found, activations=_activations(task, config, found.samples))


def plan(found: Facts, config: TrainConfig) -> Memory:
    """Bytes on the fullest device, under the strategy and on the devices of ``config``."""
    choice, devices = strategies.parse(config.strategy), int(config.devices)
    split, ranks = _split(choice, devices), choice.data_ranks(devices)
    each = State(*(b / found.parameters for b in (found.whole, found.trained, found.words * found.trained)))
    memory = of_state(found.parameters, each, split)
    model = split.stages * split.tensor
    workers = -(-(config.workers or ranks) // ranks)
    if not choice.row.workers_together:
        memory = replace(memory, parameters=memory.parameters * workers, optimizer=memory.optimizer * workers)
    samples = _largest(config, choice, devices)
    return replace(
        memory,
        messages=_messages(found, split, ranks),
        average=found.trained / model / (split.shards if split.zero > 1 else 1) * (config.averaging() is not None),
        activations=(found.activations or 0) * samples / found.samples / model,
        buffers=found.buffers * workers / model,
    )


def _largest(config: TrainConfig, choice: Choice, devices: int) -> int:
    """In the largest forward."""
    ranks = choice.data_ranks(devices)
    contract = BatchContract(1, config.batch_size, config.workers or ranks, ranks, config.micro_batch)
    together = isinstance(check_batch_norm(config.batch_norm), Sync)
    return len(contract.part(config.batch_size, 0) if together else contract.first_cell(config.batch_size))


def model_of(task: Task, config: TrainConfig) -> nn.Module:
    """The task's model in the precision of the configuration."""
    model = task.model()
    return model.double() if config.precision == "fp64" else model


def _split(choice: Choice, devices: int) -> Split:
    shape = choice.shape(devices)
    zero = getattr(choice.exchange, "stage", 0) if shape["shard"] > 1 else 0
    return Split(shape["shard"], zero, shape["stage"], shape["tensor"])


def _messages(found: Facts, split: Split, ranks: int) -> float:
    """Bytes that are there twice, or whole for a while."""
    if split.zero < 2:
        return summing(found.trained / (split.stages * split.tensor), split.shards if split.zero else 1, ranks)
    # Stage 2 keeps rows beside the whole; in stage 3 one unit is computed with while the next one is gathered. The
    # gradient of one is whole, and once more in the message that it leaves in.
    gathered = found.whole / split.shards if split.zero == 2 else found.rest + 2 * found.unit
    return (gathered + 2 * max(found.unit, found.rest)) / split.tensor


def summing(trained: float, shards: int, ranks: int) -> float:
    """Bytes of messages in which whole gradients are summed, beside those that backward makes."""
    if shards > 1:
        return min(_BUCKETS, 2 * trained) + trained / shards
    return trained if ranks > 1 else 0.0


def _words(text: str) -> float:
    """Numbers that an optimizer keeps for each parameter."""
    chosen = check_optimizer(text)
    if isinstance(chosen, options.SGD):
        return float(chosen.momentum > 0)
    if isinstance(chosen, options.Adam | options.LAMB):
        return 2.0
    return 1.0


def _activations(task: Task, config: TrainConfig, samples: int) -> float | None:
    """Bytes that forward and backward of so many samples make, gradients of parameters apart; None if unknown."""
    sample = first_sample(task)
    if sample is None:
        return None
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            return _peak(model_of(task, config), task, config, sample, samples)
    except Exception:
        # It looks at numbers, which shapes alone do not have: compute with few samples.
        few = [_peak(model_of(task, config), task, config, sample, count) for count in (2, 4)]
        slope = (few[1] - few[0]) / 2
        return max(few[0] + slope * (samples - 2), 0.0)


def _peak(model: nn.Module, task: Task, config: TrainConfig, sample: Any, samples: int) -> float:
    recompute(model, config.activation_checkpointing)
    batch = batch_of(sample, samples, config)
    with Tracker() as tracker:
        backward(model, task, config, batch)
        gradients = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
    return float(max(tracker.peak - gradients, 0))


def first_sample(task: Task) -> Any:
    """A batch of the task's first sample; None for a stream, which is not to be read."""
    data = adapt_training(task.train)
    return None if isinstance(data, Stream) else data.fetch(np.arange(1), None)


def batch_of(sample: Any, samples: int, config: TrainConfig) -> Any:
    """So many samples like ``sample``."""

    def more(tensor: Tensor) -> Tensor:
        wide = torch.float64 if config.precision == "fp64" and tensor.is_floating_point() else tensor.dtype
        return torch.zeros((samples, *tensor.shape[1:]), dtype=wide) + tensor.to(wide)

    return map_tensors(sample, more)


def backward(model: Any, task: Task, config: TrainConfig, batch: Any) -> None:
    """Forward and backward of the task's loss."""
    narrow = _CAST.get(config.precision)
    with torch.autocast("cpu", narrow or torch.bfloat16, enabled=narrow is not None):
        result = task.loss(model, batch)
    objective = result if isinstance(result, Tensor) else result[0]
    objective.sum().backward()


def measure(name: str, config: TrainConfig, directory: Path) -> None:
    """Two steps, and what the second took of this rank's memory, for optimizers make their state in the first.

    Rank 0 writes all ranks' figures into ``directory``. Collective.
    """
    world = context.init(config.device, config.timeout)
    prepare_process(config, world)
    task = table.load(name, data=config.data, model=config.model, augment=config.augment)
    with Tracker() as tracker:
        run = prepared(task, built(task, config, world), config, world)
        batches = (batch for epoch in range(2) for batch in run.epoch(epoch))
        run.step(next(batches))
        tracker.peak = 0
        if world.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        run.step(next(batches))
    peak = torch.cuda.max_memory_allocated() if world.device.type == "cuda" else tracker.peak
    parts = nn.ModuleList(run.replica.parts)
    plain = [p for p in parts.parameters() if not hasattr(p, "to_local")]
    state = bytes_of([*plain, *run.replica.sharded.values()]), bytes_of(list(parts.buffers()))
    kept = [v for o in run.exchange.optimizers for s in o.state.values() for v in s.values() if isinstance(v, Tensor)]
    mine = torch.tensor([*state, bytes_of(kept), peak], dtype=torch.float64)
    rows = [row.tolist() for row in run.setting.comms.world.all_gather(mine, "bytes of a step")]
    if world.identity.rank == 0:
        names = ("parameters", "buffers", "optimizer", "total")
        ranks = [dict(zip(names, row, strict=True)) for row in rows]
        (directory / MEASURED).write_text(json.dumps(ranks), encoding="utf-8")
    context.shutdown()


def rows_of(memory: Memory) -> Mapping[str, float]:
    """Bytes by name, and their total."""
    named = {field.name: float(getattr(memory, field.name)) for field in fields(memory)}
    return {**{name: value for name, value in named.items() if value}, "total": memory.total}


def nearest(found: Facts, config: TrainConfig, room: float) -> TrainConfig | None:
    """The plan next to ``config`` that fits: smaller micro-batches, or devices that share out the state."""
    own = plan(found, config)
    each = own.activations / _largest(config, strategies.parse(config.strategy), int(config.devices))
    most = math.floor((room - own.total + own.activations) / each) if each else 0
    if most >= 1 and not isinstance(check_batch_norm(config.batch_norm), Sync):
        return replace(config, micro_batch=most)
    for devices in sorted({max(int(config.devices), 2), *(2**n for n in range(1, 11))}):
        for stage in (1, 2, 3):
            workers = max(config.workers or 0, devices) if config.workers else None
            batch = max(config.batch_size, devices)
            shared = f"sharded:stage={stage}"
            other = replace(config, strategy=shared, devices=str(devices), workers=workers, batch_size=batch)
            if devices >= int(config.devices) and plan(found, other).total <= room:
                return other
    return None
