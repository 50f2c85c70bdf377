"""Predict a run's memory on each device from shapes, and measure it in a step."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tutti.config import optimizer_config as options
from tutti.config.module_config import SyncBatchNormConfig
from tutti.data.adapt import adapt_training
from tutti.data.batches import map_tensors
from tutti.data.contract import BatchContract
from tutti.data.stream import Stream
from tutti.device import peak_memory, reset_peak_memory
from tutti.launcher import context
from tutti.nn.ac_and_compile import recompute
from tutti.nn.swap import to_float64
from tutti.parallel.fsdp import fsdp_wrap_policy
from tutti.planning.planned_run import PlannedRun
from tutti.planning.script_task import optimizer_text
from tutti.tasks import task_registry
from tutti.tasks.task import Task
from tutti.torch_compat import FakeTensorMode, is_dtensor
from tutti.train.task_run import build_task_model, prepare_process, prepare_task
from tutti.workload.memory_formula import DeviceSplit, Memory, State, state_memory
from tutti.workload.tensor_memory import Tracker, bytes_of

MEASURED = "memory.json"
_CAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
_BUCKETS = 2 * (25 << 20)


@dataclass(frozen=True)
class MemoryFacts:
    """Sizes of a model and its task, in bytes unless stated, before any split over devices.

    Attributes:
        parameters: number of parameters.
        whole, trained: bytes of all parameters, and of trainable parameters.
        words: number of state elements that the optimizer keeps for each trainable element, such as 2 for Adam.
        buffers: buffers of one logical worker (a fixed share of the global batch).
        unit, rest: bytes of the parameters of the largest FSDP-wrapped module, and of those outside of all of them.
        samples: number of samples in the largest forward.
        activations: activations of these samples; None if unknown.
        dataset: number of training samples, which a global batch has at most; None for a stream.
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
    dataset: int | None = None


def resolve_task(task: str | Task, config: PlannedRun) -> Task:
    """Return the task of a run (its model, loss and data): load it by name, or return a task object unchanged.

    Args:
        task: the task; or its name, which is loaded with the run's data, model and augmentation.
        config: configuration of the run; not read where ``task`` is an object.

    Returns:
        A ``Task``, the definition of what is trained. Its attributes are ``model``, a function without arguments that
        returns a new model; ``loss``, the loss function; ``train``, the training samples; ``eval``, the held-out
        samples or None; and further ones, such as ``name``.

    Raises:
        UsageError: there is no such task, model or option, or the user's function fails.
        DataError: the data are missing or malformed.
    """
    if isinstance(task, Task):
        return task
    return task_registry.load_task(task, data=config.data, model=config.model, augment=config.augment)


def model_facts(name: str | Task, config: PlannedRun) -> MemoryFacts:
    """Return the bytes of a task's parameters, buffers, optimizer state and activations before any split over devices.

    The sizes come from shapes, on fake tensors: nothing is allocated or computed. The exception are the activations of
    a model or loss that depends on values (``.item()``, boolean indexing), which are measured on a few real samples.

    Args:
        name: the task, or its name.
        config: configuration of the run: model, batch, precision, optimizer, strategy, and a number of devices.

    Returns:
        A ``MemoryFacts``: ``parameters`` (number), ``whole`` and ``trained`` (bytes of all and of trainable
        parameters), ``words`` (state elements of the optimizer for each trainable element), ``buffers`` (bytes),
        ``unit`` and ``rest`` (bytes of the largest FSDP-wrapped module, and of the parameters outside of all
        FSDP-wrapped modules), ``samples`` of the run's largest forward, ``activations`` (bytes of that forward and its
        backward; None where the task reads a stream), and ``dataset`` (number of training samples; None for a stream).

    Raises:
        UsageError: the task cannot be loaded, or the strategy's wrap policy names a module that the model lacks, or a
            container without a forward.
        DataError: the task's data are missing or malformed.
    """
    task = resolve_task(name, config)
    data = adapt_training(task.train, task.collate)
    dataset = None if isinstance(data, Stream) else len(data)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = task_model(task, config)
        found = MemoryFacts(
            sum(p.numel() for p in model.parameters()),
            sum(p.nbytes for p in model.parameters()),
            sum(p.nbytes for p in model.parameters() if p.requires_grad),
            _words(with_task_optimizer(task, model, config).optimizer_choice.options),
            sum(b.nbytes for b in model.buffers()),
            *wrapped_bytes(model, config.strategy_choice.sync.wrap_policy),
            _largest(config, dataset),
            None,
            dataset,
        )
    return replace(found, activations=_activations(task, config, found.samples))


def wrapped_bytes(model: nn.Module, policy: Sequence[str]) -> tuple[int, int]:
    """Return the bytes of parameters in the largest FSDP-wrapped module, and outside of all FSDP-wrapped modules.

    A wrapped module counts with all its parameters, also with the parameters of wrapped modules inside it.

    Args:
        model: the model before any split, also on fake tensors.
        policy: names of the modules to wrap or of their classes, or ``("auto",)`` for repeated blocks or large modules.

    Returns:
        Bytes of the largest wrapped module, 0 if none is wrapped; and bytes of the parameters that only FSDP's root
        wrap covers.

    Raises:
        UsageError: ``policy`` has a name that is not in the model, or names a container that has no forward.
    """
    units = fsdp_wrap_policy.wrapped_modules(model, policy)
    inside = {id(p) for unit in units for p in unit.parameters()}
    largest = max([sum(p.nbytes for p in unit.parameters()) for unit in units], default=0)
    return largest, sum(p.nbytes for p in model.parameters() if id(p) not in inside)


def plan_memory(found: MemoryFacts, config: PlannedRun) -> Memory:
    """Estimate the bytes on the fullest device, with the strategy and number of devices of ``config``.

    Formulas over sizes; nothing is allocated or measured. Stages and tensor ranks count as even parts of the model.

    Args:
        found: sizes of the model and its task before any split (``model_facts``). Unknown activations count as 0.
        config: configuration of the run.

    Returns:
        The bytes by kind, as numbers with the attributes ``parameters``, ``gradients``, ``optimizer`` (state),
        ``messages`` (communication buffers), ``average`` (averaged weights), ``activations`` and ``buffers``, and their
        sum ``total``.

    Raises:
        UsageError: the devices do not fit the strategy.
    """
    split, ranks = _split(config), config.data_ranks
    # A model without parameters has 0 bytes of each kind.
    elements = max(found.parameters, 1)
    each = State(*(b / elements for b in (found.whole, found.trained, found.words * found.trained)))
    memory = state_memory(found.parameters, each, split)
    model = split.stages * split.tensor
    workers = -(-(config.workers or ranks) // ranks)
    if not config.strategy_choice.row.single_update:
        memory = replace(memory, parameters=memory.parameters * workers, optimizer=memory.optimizer * workers)
    samples = _largest(config, found.dataset)
    return replace(
        memory,
        messages=_messages(found, split, ranks),
        average=found.trained / model / (split.shards if split.zero > 1 else 1) * (config.averaging is not None),
        activations=(found.activations or 0) * samples / found.samples / model,
        buffers=found.buffers * workers / model,
    )


def _largest(config: PlannedRun, dataset: int | None) -> int:
    """Return the number of samples in the largest forward, given the number of training samples."""
    ranks = config.data_ranks
    contract = BatchContract(1, config.batch_size, config.workers or ranks, ranks, config.micro_batch)
    together = isinstance(config.batch_norm_options, SyncBatchNormConfig)
    batch = config.batch_size if dataset is None else min(config.batch_size, dataset)
    return max(len(contract.part(batch, 0) if together else contract.first_micro_batch(batch)), 1)


def task_model(task: Task, config: PlannedRun) -> nn.Module:
    """Build a task's model; for the precision fp64 convert it to float64.

    Args:
        task: the task, whose ``model`` builds the model.
        config: configuration of the run, of which the precision is read.
    """
    model = task.model()
    return to_float64(model) if config.precision == "fp64" else model


def _split(config: PlannedRun) -> DeviceSplit:
    shape = config.shape
    zero = config.strategy_choice.sync.zero_stage if shape["shard"] > 1 else 0
    return DeviceSplit(shape["shard"], zero, shape["stage"], shape["tensor"])


def _messages(found: MemoryFacts, split: DeviceSplit, ranks: int) -> float:
    """Return the bytes of communication buffers: summed gradients, gathered parameters."""
    if split.zero < 2:
        return reduction_buffer_bytes(
            found.trained / (split.stages * split.tensor), split.shards if split.zero else 1, ranks
        )
    # ZeRO stage 2 keeps rows beside the whole parameters; in stage 3 one FSDP-wrapped module computes while the next
    # one is gathered. The whole gradient of one module exists, and a copy of it in the message.
    gathered = found.whole / split.shards if split.zero == 2 else found.rest + 2 * found.unit
    return (gathered + 2 * max(found.unit, found.rest)) / split.tensor


def reduction_buffer_bytes(trained: float, shards: int, ranks: int) -> float:
    """Predict the bytes of the buffers in which a data rank sums up unsharded gradients by collectives.

    The gradients that backward makes are not included. The result is 0 for one rank.

    Args:
        trained: bytes of the trainable parameters on a device.
        shards: number of ranks that shard the optimizer state (ZeRO stage 1); 1 for an unsharded optimizer.
        ranks: number of data ranks.
    """
    if shards > 1:
        return min(_BUCKETS, 2 * trained) + trained / shards
    return trained if ranks > 1 else 0.0


def with_task_optimizer(task: Task, model: nn.Module, config: PlannedRun) -> PlannedRun:
    """Return a run's configuration with ``--optimizer`` set to the optimizer that the task makes itself, if any.

    In a run such an optimizer takes precedence over the option.

    Args:
        task: the task.
        model: the task's model, of real or fake tensors.
        config: configuration of the run.

    Returns:
        ``config`` with the option ``optimizer`` of the task; unchanged where the task makes none, or several.

    Raises:
        UsageError: the optimizer's options have no form as text of ``--optimizer``.
    """
    made = None if task.optimizer is None else optimizer_text(task.optimizer(model))
    return config if made is None or made == config.optimizer else replace(config, optimizer=made)


def _words(chosen: options.OptimizerConfig) -> float:
    """Return the number of state elements that an optimizer keeps for each parameter."""
    if isinstance(chosen, options.SGDConfig):
        return float(chosen.momentum > 0)
    # A guess for classes of other packages: most of them keep two moments.
    if isinstance(chosen, options.AdamConfig | options.LAMBConfig | options.ImportedOptimizerConfig):
        return 2.0
    return 1.0


def _activations(task: Task, config: PlannedRun, samples: int) -> float | None:
    """Return the peak bytes of a forward and backward, without parameters' gradients; None for a stream."""
    sample = first_sample(task)
    if sample is None:
        return None
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            return _peak(task_model(task, config), task, config, sample, samples)
    except Exception:
        # The model or its loss reads values, which fake tensors lack: compute with few real samples.
        few = [_peak(task_model(task, config), task, config, sample, count) for count in (2, 4)]
        slope = (few[1] - few[0]) / 2
        return max(few[0] + slope * (samples - 2), 0.0)


def _peak(model: nn.Module, task: Task, config: PlannedRun, sample: Any, samples: int) -> float:
    recompute(model, config.checkpointing)
    batch = repeated_sample(sample, samples, config)
    with Tracker() as tracker:
        backward_of_loss(model, task, config, batch)
        gradients = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
    return float(max(tracker.peak - gradients, 0))


def first_sample(task: Task) -> Any:
    """Return the first sample of the task's training data, without augmentation, as a batch.

    The batch has the nesting of the data's samples; each tensor has a first dimension of 1. None if the training data
    are a stream, which must not be read before the run.

    Raises:
        UsageError: the training data are of a type that tutti does not take, such as an iterator.
        DataError: the sample cannot be read or made a batch.
    """
    data = adapt_training(task.train, task.collate)
    return None if isinstance(data, Stream) else data.fetch(np.arange(1), None)


def repeated_sample(sample: Any, samples: int, config: PlannedRun) -> Any:
    """Return a batch of copies of one sample, with floats in float64 if the run's precision is fp64.

    Args:
        sample: batch of one sample, of any nesting of tensors.
        samples: number of samples of the new batch.
        config: configuration of the run, for its precision.

    Returns:
        New tensors in the nesting of ``sample``, each with a first dimension of ``samples``.
    """

    def more(tensor: Tensor) -> Tensor:
        wide = torch.float64 if config.precision == "fp64" and tensor.is_floating_point() else tensor.dtype
        return torch.zeros((samples, *tensor.shape[1:]), dtype=wide) + tensor.to(wide)

    return map_tensors(sample, more)


def backward_of_loss(model: Any, task: Task, config: PlannedRun, batch: Any) -> None:
    """Run forward and backward of the task's loss on a micro-batch, under CPU autocast for 16-bit precisions.

    The gradients are added to the parameters' ``grad``. If the loss function returns a tuple, its first element is the
    loss. Backward starts from the sum of the loss's elements.

    Args:
        model: the model, or a callable in its place.
        task: the task, whose loss function is called.
        config: configuration of the run, for its precision.
        batch: a micro-batch.
    """
    narrow = _CAST.get(config.precision)
    with torch.autocast("cpu", narrow or torch.bfloat16, enabled=narrow is not None):
        result = task.loss(model, batch)
    objective = result if isinstance(result, Tensor) else result[0]
    objective.sum().backward()


def measure_memory(name: str, config: PlannedRun, directory: Path) -> None:
    """Train two steps of a run as one of its ranks, and measure the memory that each rank takes in the last one.

    Optimizers make their state in the first step. Collective over all ranks of the launch: each calls this function,
    which initialises the process group, trains, all-gathers four numbers of each rank, and ends the process group. Rank
    0 writes a list by rank with the bytes of ``parameters``, ``buffers``, ``optimizer`` and ``total`` (the peak) as
    JSON into ``directory``.

    Args:
        name: name of the task.
        config: configuration of the run.
        directory: folder for the file ``memory.json``.

    Raises:
        UsageError: there is no such task, or an option or the strategy is refused, as by ``tutti.prepare``.
        DataError: the task's data are missing or malformed.
        TuttiError: training fails for another reason, such as a lost rank.
    """
    world = context.init(config.device, config.timeout)
    prepare_process(config, world)
    task = task_registry.load_task(name, data=config.data, model=config.model, augment=config.augment)
    with Tracker() as tracker:
        run = prepare_task(task, build_task_model(task, config, world), config)
        for batch in islice(chain.from_iterable(map(run.epoch, range(2))), 2):
            tracker.peak = 0
            reset_peak_memory(world.device)
            run.step(batch)
    on_device = peak_memory(world.device)
    peak = tracker.peak if on_device is None else on_device
    parts = nn.ModuleList(run.replica.parts)
    plain = [p for p in parts.parameters() if not is_dtensor(p)]
    state = bytes_of([*plain, *run.replica.sharded.values()]), bytes_of(list(parts.buffers()))
    kept = [
        v for o in run.gradient_sync.optimizers for s in o.state.values() for v in s.values() if isinstance(v, Tensor)
    ]
    mine = torch.tensor([*state, bytes_of(kept), peak], dtype=torch.float64)
    rows = [row.tolist() for row in run.context.comms.world.all_gather(mine, "bytes of a step")]
    if world.identity.rank == 0:
        names = ("parameters", "buffers", "optimizer", "total")
        ranks = [dict(zip(names, row, strict=True)) for row in rows]
        (directory / MEASURED).write_text(json.dumps(ranks), encoding="utf-8")
    context.shutdown()


def memory_rows(memory: Memory) -> Mapping[str, float]:
    """Return the bytes that training takes on a device as a table for people: kind of bytes → bytes.

    Kinds are ``parameters``, ``gradients``, ``optimizer`` (state), ``messages`` (communication buffers), ``average``
    (averaged weights), ``activations`` and ``buffers``, in this order; kinds of 0 bytes are left out. The last entry is
    ``total``, their sum.

    Args:
        memory: bytes of each kind on the device that holds most.
    """
    named = {field.name: float(getattr(memory, field.name)) for field in fields(memory)}
    return {**{name: value for name, value in named.items() if value}, "total": memory.total}


def nearest_plan(found: MemoryFacts, config: PlannedRun, room: float) -> PlannedRun | None:
    """Find a run that fits into the memory of a device and differs little from ``config``.

    The first choice is the largest smaller micro-batch that fits (not with synchronised batch norm). The second is
    ``--strategy sharded`` on the fewest devices with the lowest ZeRO stage; numbers of devices to try are that of
    ``config``, or two if it has one, and larger powers of two up to 1,024.

    Args:
        found: bytes of the model's parameters and activations, as ``model_facts`` measures them.
        config: configuration of a run that does not fit.
        room: bytes of memory of one device that the run may use.

    Returns:
        A copy of ``config`` with a smaller ``micro_batch``, or sharded, with at least as many logical workers (shares
        of the global batch) and samples in a global batch as devices. None if no such run fits.
    """
    own = plan_memory(found, config)
    each = own.activations / _largest(config, found.dataset)
    most = math.floor((room - own.total + own.activations) / each) if each else 0
    if most >= 1 and not isinstance(config.batch_norm_options, SyncBatchNormConfig):
        return replace(config, micro_batch=most)
    fewest = max(config.device_count, 2)
    for devices in [fewest, *(2**n for n in range(1, 11) if 2**n > fewest)]:
        workers = max(config.workers, devices) if config.workers else None
        batch = max(config.batch_size, devices)
        for stage in (1, 2, 3):
            shared = f"sharded:stage={stage}"
            other = replace(config, strategy=shared, devices=str(devices), workers=workers, batch_size=batch)
            if plan_memory(found, other).total <= room:
                return other
    return None
