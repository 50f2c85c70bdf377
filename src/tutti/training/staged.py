"""What each device of a pipeline will hold, where the model is really cut; and other cuts, where that is too much."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch._subclasses.fake_tensor import FakeTensorMode

from tutti import strategies
from tutti.data.contract import BatchContract
from tutti.errors import UsageError
from tutti.laws.memory import Memory
from tutti.measure.memory import Tracker
from tutti.nn.config import Sync, check_batch_norm
from tutti.nn.forwards import recompute
from tutti.spec import Spec
from tutti.strategies import Choice
from tutti.tasks import table
from tutti.tasks.task import Task
from tutti.training.config import TrainConfig
from tutti.training.main import prepare_process, prepared
from tutti.training.memory import Facts, backward, batch_of, first_sample, model_of, summing
from tutti.world import context

SECONDS = "seconds.json"
_FEW = 2


@dataclass(frozen=True)
class Cells:
    """How a worker's share of a full batch is cut: so many micro-batches, of at most so many samples."""

    count: int
    samples: int

    @classmethod
    def of(cls, config: TrainConfig) -> Cells:
        """As the configuration says."""
        choice = strategies.parse(config.strategy)
        ranks = choice.data_ranks(int(config.devices))
        workers = config.workers or ranks
        micro = strategies.micro_batch(choice, config.micro_batch, config.batch_size, workers)
        contract = BatchContract(1, config.batch_size, workers, ranks, micro)
        if isinstance(check_batch_norm(config.batch_norm), Sync):
            return cls(1, len(contract.part(config.batch_size, 0)))
        cells = contract.cells(len(contract.worker(config.batch_size, 0)))
        return cls(len(cells), len(cells[0]))


def timed(config: TrainConfig) -> bool:
    """Whether a run would cut the model by how long its modules take."""
    layout = strategies.parse(config.strategy).layout
    return layout.schedule != "one_by_one" and not config.reproducible and not layout.cuts


def clock(name: str, config: TrainConfig, directory: Path) -> None:
    """Measure, in a process of its own, how long each module takes, as a run does; into ``directory``."""
    world = context.init(config.device, config.timeout)
    prepare_process(config, world)
    task = table.load(name, data=config.data, model=config.model, augment=config.augment)
    model = task.model()
    setting = prepared(task, model, config, world).setting
    found = strategies.ahead().seconds(model, setting.trial, setting.comms.world)
    (directory / SECONDS).write_text(json.dumps(found), encoding="utf-8")
    context.shutdown()


def alone(config: TrainConfig) -> TrainConfig:
    """The configuration with which ``clock`` sees micro-batches of the same size on one device."""
    workers = config.workers or strategies.parse(config.strategy).data_ranks(int(config.devices))
    micro = Cells.of(config).samples
    return replace(config, strategy="single", devices="1", workers=workers, micro_batch=micro)


def look(name: str, config: TrainConfig, seconds: Mapping[str, float]) -> Any:
    """The model's blocks and where a run would cut it, as ``layouts.ahead.Ahead``. Raises UsageError if nowhere."""
    task = table.load(name, data=config.data, model=config.model, augment=config.augment)
    samples = Cells.of(config).samples
    try:
        return _look(task, config, seconds, samples, FakeTensorMode(allow_non_fake_inputs=True))
    except UsageError:
        raise
    except Exception:
        # It looks at numbers, which shapes alone do not have: compute with few samples.
        return _look(task, config, seconds, min(samples, _FEW), nullcontext())


def _look(
    task: Task, config: TrainConfig, seconds: Mapping[str, float], samples: int, fake: AbstractContextManager[Any]
) -> Any:
    ahead, choice = strategies.ahead(), strategies.parse(config.strategy)
    sample = first_sample(task)
    with fake:
        model = model_of(task, config)
    model.train()
    found = ahead.find(choice.layout, model, choice.shape(int(config.devices))["stage"], seconds)
    recompute(model, config.activation_checkpointing)
    with fake, Tracker() as tracker:
        batch = None if sample is None else batch_of(sample, samples, config)

        def run(called: Any) -> None:
            if batch is not None:
                backward(called, task, config, batch)

        return ahead.look(model, found, seconds, run, tracker, samples)


def plan(found: Facts, ahead: Any, config: TrainConfig) -> list[Memory]:
    """Bytes on each device of a replica."""
    choice, cells = strategies.parse(config.strategy), Cells.of(config)
    ranks = choice.shape(int(config.devices))["stage"]
    held = ahead.held(choice.layout, ranks, cells.count, cells.samples / ahead.samples)
    return [_memory(one, found, choice, config) for one in held]


def fitting(found: Facts, ahead: Any, config: TrainConfig, room: float) -> Any:
    """The most even cut whose stages all fit into ``room`` bytes; None where there is none."""
    choice, cells = strategies.parse(config.strategy), Cells.of(config)
    ranks = choice.shape(int(config.devices))["stage"]

    def part(held: Any) -> float:
        return _memory(held, found, choice, config).total / room

    return ahead.fitting(choice.layout, ranks, cells.count, cells.samples / ahead.samples, part)


def pinned(config: TrainConfig, ahead: Any) -> TrainConfig:
    """The configuration that cuts the model there, whatever modules take."""
    if not all(ahead.names):
        return config
    return replace(config, strategy=_with(config.strategy, cuts="+".join(ahead.names)))


def nearest(found: Facts, ahead: Any, config: TrainConfig, room: float) -> TrainConfig | None:
    """The plan next to ``config`` that fits: smaller micro-batches, or more stages; None where there is none."""
    for other in _others(config, len(ahead.blocks)):
        if (cut := fitting(found, ahead, other, room)) is not None:
            return pinned(other, cut)
    return None


def _others(config: TrainConfig, blocks: int) -> Iterator[TrainConfig]:
    """Plans with smaller micro-batches and more stages, the nearest first."""
    choice, samples = strategies.parse(config.strategy), Cells.of(config).samples
    stages = choice.shape(int(config.devices))["stage"]
    sync = isinstance(check_batch_norm(config.batch_norm), Sync)
    for times in range(1, max(blocks // (stages * choice.layout.chunks), 1) + 1):
        text = _with(config.strategy, cuts=None, micro_batches=None)
        if choice.layout.stages is not None:
            text = _with(text, stages=times * stages)
        for halvings in range(1 if sync else 1 + int(math.log2(samples))):
            micro = config.micro_batch if sync else math.ceil(samples / 2**halvings)
            yield replace(config, strategy=text, devices=str(times * int(config.devices)), micro_batch=micro)


def _memory(held: Any, found: Facts, choice: Choice, config: TrainConfig) -> Memory:
    shape, ranks = choice.shape(int(config.devices)), choice.data_ranks(int(config.devices))
    tensor, shards = shape["tensor"], shape["shard"]
    trained = held.trained / tensor
    return Memory(
        held.parameters / tensor,
        trained,
        found.words * trained / shards,
        messages=held.messages + summing(trained, shards, ranks),
        average=trained * (config.averaging() is not None),
        activations=held.activations / tensor,
        buffers=held.buffers * -(-(config.workers or ranks) // ranks),
    )


def _with(text: str, **options: Any) -> str:
    """A strategy with other options; None leaves one out."""
    spec = Spec.parse(text, "--strategy")
    merged = {k: v for k, v in {**spec.options, **options}.items() if v is not None}
    return ":".join([spec.name, *([",".join(f"{k}={v}" for k, v in merged.items())] if merged else [])])
