"""Predict per-stage memory from the actual stage partition, and search for a partition that fits."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import fx

from tutti.config.layout_config import LayersConfig, PipelineConfig
from tutti.config.module_config import SyncBatchNormConfig
from tutti.config.spec import Spec
from tutti.data.contract import BatchContract
from tutti.errors import UsageError
from tutti.launcher import context
from tutti.nn.ac_and_compile import recompute
from tutti.parallel.pipeline.graph_trace import UntraceableError
from tutti.parallel.pipeline.module_timing import module_seconds
from tutti.parallel.pipeline.stage_memory import (
    GraphMemory,
    StageMemory,
    StagePlan,
    find_measured_partition,
    observe_graph,
)
from tutti.planning.memory_plan import (
    MemoryFacts,
    backward_of_loss,
    first_sample,
    reduction_buffer_bytes,
    repeated_sample,
    resolve_task,
    task_model,
)
from tutti.planning.planned_run import PlannedRun
from tutti.tasks import task_registry
from tutti.tasks.task import Task
from tutti.torch_compat import FakeTensorMode
from tutti.train.task_run import prepare_process, prepare_task
from tutti.workload.memory_formula import Memory
from tutti.workload.tensor_memory import Tracker

SECONDS = "seconds.json"
_FEW = 2


@dataclass(frozen=True)
class MicroBatchSizes:
    """Micro-batches into which a logical worker, a fixed share of the global batch, splits its samples of a full batch.

    Attributes:
        count: number of micro-batches.
        samples: number of samples in the first micro-batch, which is the largest.
    """

    count: int
    samples: int

    @classmethod
    def of(cls, config: PlannedRun) -> MicroBatchSizes:
        """Compute number and size of the micro-batches of logical worker 0, which has the most of all workers.

        A logical worker is a fixed share of the global batch.

        Both numbers follow from strategy, global batch and ``--micro-batch``. With synchronised batch norm there is one
        micro-batch, the share of data rank 0.

        Args:
            config: configuration of the run, with a number of devices.

        Returns:
            A ``MicroBatchSizes``: ``count``, the number of micro-batches of the worker in a full global batch, and
            ``samples``, the number of samples in the first micro-batch, which is the largest.

        Raises:
            UsageError: ``--micro-batch`` and the strategy's option ``micro_batches`` are both given, or the devices do
                not fit the strategy.
        """
        ranks = config.data_ranks
        workers = config.workers or ranks
        micro = config.strategy_choice.micro_batch(config.micro_batch, config.batch_size, workers)
        contract = BatchContract(1, config.batch_size, workers, ranks, micro)
        if isinstance(config.batch_norm_options, SyncBatchNormConfig):
            return cls(1, len(contract.part(config.batch_size, 0)))
        micro_batches = contract.micro_batches(len(contract.worker(config.batch_size, 0)))
        return cls(len(micro_batches), len(micro_batches[0]))


def stage_layout(config: PlannedRun) -> PipelineConfig | LayersConfig:
    """Return the stage options of a run whose strategy is a pipeline; raise TypeError for another strategy."""
    layout = config.strategy_choice.layout
    if not isinstance(layout, PipelineConfig | LayersConfig):
        raise TypeError(f"strategy '{config.strategy_choice.name}' has no pipeline stages")
    return layout


def needs_module_times(config: PlannedRun) -> bool:
    """Return whether a run balances its pipeline stages by measured seconds of modules, not by their parameters.

    False for the schedule ``one_by_one``, for reproducible runs, and where the strategy's options fix the cuts.

    Args:
        config: configuration of the run; its strategy is a pipeline, else TypeError is raised.
    """
    layout = stage_layout(config)
    return layout.schedule != "one_by_one" and not config.reproducible and not layout.begins


def time_modules(name: str, config: PlannedRun, directory: Path) -> None:
    """Measure the seconds of each of the model's modules on one device, and write them into the file ``seconds.json``.

    The file holds the seconds by name of the module. The function initialises and ends tutti on one device, so call it
    in a process of its own.

    Args:
        name: name of the task.
        config: configuration of the run, changed to one device by ``timing_config``.
        directory: folder for the file.

    Raises:
        UsageError: there is no such task, or an option is refused, as by ``tutti.prepare``.
        DataError: the task's data are missing or malformed.
    """
    world = context.init(config.device, config.timeout)
    prepare_process(config, world)
    task = task_registry.load_task(name, data=config.data, model=config.model, augment=config.augment)
    model = task.model()
    setting = prepare_task(task, model, config).context
    found = module_seconds(model, setting.trial, setting.comms.world)
    (directory / SECONDS).write_text(json.dumps(found), encoding="utf-8")
    context.shutdown()


def timing_config(config: PlannedRun) -> PlannedRun:
    """Return a copy of a pipeline run's configuration that computes on one device, for ``time_modules``.

    ``time_modules`` measures the seconds of each of the model's modules with it. A logical worker is a fixed share of
    the global batch.

    Args:
        config: configuration of the pipeline run, with a number of devices.

    Returns:
        A copy with ``--strategy single``, one device, the pipeline run's number of logical workers (its number of data
        ranks, where it states none), and ``--micro-batch`` set to the number of samples in the largest micro-batch of
        the pipeline run.

    Raises:
        UsageError: ``--micro-batch`` and the strategy's option ``micro_batches`` are both given, or the devices do not
            fit the strategy.
    """
    workers = config.workers or config.data_ranks
    micro = MicroBatchSizes.of(config).samples
    return replace(config, strategy="single", devices="1", workers=workers, micro_batch=micro)


def observe_stages(name: str | Task, config: PlannedRun, seconds: Mapping[str, float]) -> StagePlan:
    """Partition the model into pipeline stages as a run would, and measure the memory of each block of the model.

    Blocks are sequences of consecutive calls in the model's graph, between which stages may be cut. The model is built
    and run on fake tensors in this process, or with few real samples if it reads values; nothing is sent.

    Args:
        name: the task, or its name.
        config: configuration of a pipeline run.
        seconds: measured time of each module by its name; empty to partition by parameters.

    Returns:
        A ``StagePlan``: ``blocks`` in the order of the forward, each with its name and memory; ``bounds``, (stages +
        1,) indices of the blocks at which stages begin, and the number of blocks; and ``samples`` of the micro-batch
        that was run.

    Raises:
        UsageError: the model cannot be partitioned, or it is partitioned only when a run starts, by running its forward
            on a micro-batch.
        DataError: the task's data are missing or malformed.
        TypeError: the run is no pipeline.
    """
    task = resolve_task(name, config)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            model = task_model(task, config)
        model.train()
        found = find_measured_partition(stage_layout(config), model, config.shape["stage"], seconds)
    except UntraceableError as error:
        raise UsageError(
            "the memory of the stages of this model cannot be predicted",
            why="its forward is cut by running it on a micro-batch when the run starts",
            remedy="start the run, whose header names the cuts; or take --strategy sharded, whose memory is predicted",
        ) from error
    return run_graph(task, config, found.graph).stage_plan(found, seconds)


def run_graph(task: Task, config: PlannedRun, graph: fx.Graph) -> GraphMemory:
    """Run forward and backward of a model's graph in this process, and measure the memory of each of its nodes.

    The model is built anew and run on fake tensors, or with few real samples if it reads values; nothing is sent.

    Args:
        task: the task.
        config: configuration of a pipeline run, for its micro-batch, precision and activation checkpointing.
        graph: the graph of the forward of the task's model, such as that of a partition into stages.

    Returns:
        A ``GraphMemory``: bytes of each node's output, and of the tensors alive between nodes, from which the memory of
        the stages of any partition of this graph follows.

    Raises:
        UsageError: the devices do not fit the strategy, or ``--micro-batch`` and the strategy's ``micro_batches`` are
            both given.
        DataError: the task's data are missing or malformed.
    """
    samples = MicroBatchSizes.of(config).samples
    try:
        return _run_graph(task, config, graph, samples, FakeTensorMode(allow_non_fake_inputs=True))
    except UsageError:
        raise
    except Exception:
        # The model or its loss reads values, which fake tensors lack: compute with few real samples.
        return _run_graph(task, config, graph, min(samples, _FEW), nullcontext())


def _run_graph(
    task: Task, config: PlannedRun, graph: fx.Graph, samples: int, fake: AbstractContextManager[Any]
) -> GraphMemory:
    sample = first_sample(task)
    with fake:
        model = task_model(task, config)
    model.train()
    recompute(model, config.checkpointing)
    with fake, Tracker() as tracker:
        batch = None if sample is None else repeated_sample(sample, samples, config)

        def run(called: Any) -> None:
            if batch is not None:
                backward_of_loss(called, task, config, batch)

        return observe_graph(model, graph, run, tracker, samples)


def plan_stage_memory(found: MemoryFacts, plan: StagePlan, config: PlannedRun) -> list[Memory]:
    """Estimate the bytes that training takes on each device of a pipeline, by kind.

    Args:
        found: bytes of the model's parameters, buffers and optimizer state before any split, from ``model_facts``.
        plan: memory of the model's blocks (runs of consecutive calls) and their partition into stages, from
            ``observe_stages``.
        config: configuration of a pipeline run.

    Returns:
        One ``Memory`` for each pipeline rank, in order: bytes on its device, as attributes ``parameters``,
        ``gradients``, ``optimizer`` (state), ``messages`` (communication buffers), ``average`` (averaged weights),
        ``activations`` and ``buffers``, with their sum ``total``.

    Raises:
        UsageError: the devices do not fit the strategy, or ``--micro-batch`` and the strategy's ``micro_batches`` are
            both given.
        TypeError: the run is no pipeline.
    """
    micro_batches, ranks = MicroBatchSizes.of(config), config.shape["stage"]
    held = plan.held(stage_layout(config), ranks, micro_batches.count, micro_batches.samples / plan.samples)
    return [_memory(one, found, config) for one in held]


def fitting_stage_plan(found: MemoryFacts, plan: StagePlan, config: PlannedRun, room: float) -> StagePlan | None:
    """Find the most even partition of a model into pipeline stages each of which fits into a device's memory.

    Even stages take equal time or, where ``plan`` was made without measured seconds, have equal numbers of parameters.

    Args:
        found: bytes of the model's parameters, buffers and optimizer state before any split, from ``model_facts``.
        plan: memory of the model's blocks (runs of consecutive calls in its graph) and their partition into stages,
            from ``observe_stages``.
        config: configuration of a pipeline run.
        room: bytes of memory of one device that the run may use.

    Returns:
        A ``StagePlan`` with the same ``blocks`` of the model and new ``bounds``, (stages + 1,) indices of the blocks at
        which stages begin, and the number of blocks; None if no partition fits.

    Raises:
        UsageError: the devices do not fit the strategy, or ``--micro-batch`` and the strategy's ``micro_batches`` are
            both given.
        TypeError: the run is no pipeline.
    """
    micro_batches, ranks = MicroBatchSizes.of(config), config.shape["stage"]

    def part(held: StageMemory) -> float:
        return _memory(held, found, config).total / room

    return plan.fitting(stage_layout(config), ranks, micro_batches.count, micro_batches.samples / plan.samples, part)


def with_cuts(config: PlannedRun, plan: StagePlan) -> PlannedRun:
    """Write a partition of the model into pipeline stages into a run's strategy, as its option ``cuts``.

    Args:
        config: configuration of a pipeline run.
        plan: the model's blocks (runs of consecutive calls) with their memory, and the stages' bounds among them, from
            ``observe_stages``.

    Returns:
        A copy of ``config`` whose strategy names the first module of each stage but the first. A list of modules in the
        option ``stages`` becomes the number of stages. ``config`` itself if a stage begins with a module without a
        name, which cannot be written.

    Raises:
        TypeError: the run is no pipeline.
    """
    if not all(plan.names):
        return config
    if stage_layout(config).modules:
        stages = config.shape["stage"]
        config = replace(config, strategy=_with(config.strategy, stages=stages))
    return replace(config, strategy=_with(config.strategy, cuts="+".join(plan.names)))


def nearest_stage_plan(found: MemoryFacts, plan: StagePlan, config: PlannedRun, room: float) -> PlannedRun | None:
    """Search the pipeline plan nearest to ``config`` that fits: smaller micro-batches, or more stages and devices.

    ``config`` itself is tried first. Then its micro-batches are halved, rounded up, down to one or two samples; with
    synchronised batch norm they stay as they are. Then devices and stages are multiplied by 2, 3 and so on, as far as
    there are blocks, each with the same halvings. The first plan that fits is taken.

    Args:
        found: bytes of the model's parameters, buffers and optimizer state before any split, from ``model_facts``.
        plan: memory of the model's blocks (runs of consecutive calls in its graph) and their partition into stages,
            from ``observe_stages``.
        config: configuration of a pipeline run.
        room: bytes of memory of one device that the run may use.

    Returns:
        The changed configuration, with its partition as the strategy's option ``cuts``; None if no plan fits.

    Raises:
        UsageError: the devices do not fit the strategy, or ``--micro-batch`` and the strategy's ``micro_batches`` are
            both given.
        TypeError: the run is no pipeline.
    """
    for other in _others(config, len(plan.blocks)):
        if (cut := fitting_stage_plan(found, plan, other, room)) is not None:
            return with_cuts(other, cut)
    return None


def _others(config: PlannedRun, blocks: int) -> Iterator[PlannedRun]:
    """Yield configurations with smaller micro-batches and more stages, the nearest first."""
    layout, samples, stages = stage_layout(config), MicroBatchSizes.of(config).samples, config.shape["stage"]
    sync = isinstance(config.batch_norm_options, SyncBatchNormConfig)
    for times in range(1, max(blocks // (stages * layout.chunks), 1) + 1):
        text = _with(config.strategy, cuts=None, micro_batches=None)
        if layout.stages is not None:
            text = _with(text, stages=times * stages)
        for halvings in range(1 if sync else 1 + int(math.log2(samples))):
            micro = config.micro_batch if sync else math.ceil(samples / 2**halvings)
            yield replace(config, strategy=text, devices=str(times * config.device_count), micro_batch=micro)


def _memory(held: StageMemory, found: MemoryFacts, config: PlannedRun) -> Memory:
    shape, ranks = config.shape, config.data_ranks
    tensor, shards = shape["tensor"], shape["shard"]
    trained = held.trained / tensor
    return Memory(
        held.parameters / tensor,
        trained,
        found.words * trained / shards,
        messages=held.messages + reduction_buffer_bytes(trained, shards, ranks),
        average=trained * (config.averaging is not None),
        activations=held.activations / tensor,
        buffers=held.buffers * -(-(config.workers or ranks) // ranks),
    )


def _with(text: str, **options: object) -> str:
    """Return a strategy's text with changed options; None removes an option."""
    return str(Spec.parse(text, "--strategy").changed(**options))
