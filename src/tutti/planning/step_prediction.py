"""Predict a step: gather what the model computes, build the step's program, evaluate it, and say what it rests on."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
from torch import nn

from tutti import parallel
from tutti.config.layout_config import LayersConfig, PipelineConfig, TensorConfig
from tutti.config.spec import StrategyOptions
from tutti.config.strategy_choice import StrategyChoice
from tutti.data.adapt import adapt_training
from tutti.data.stream import Stream
from tutti.errors import UsageError
from tutti.parallel.fsdp.fsdp_wrap_policy import wrapped_modules
from tutti.parallel.pipeline.stage_memory import GraphMemory, StagePlan, find_measured_partition
from tutti.parallel.pipeline.stage_partition import StagePartition, TracedForward
from tutti.parallel.pipeline.virtual_stage import body, last_uses
from tutti.planning.conformal_band import NO_BAND, Residuals, band_factor, band_unit, distance_class
from tutti.planning.memory_plan import (
    MemoryFacts,
    memory_rows,
    model_facts,
    plan_memory,
    resolve_task,
    task_model,
    with_task_optimizer,
    wrapped_bytes,
)
from tutti.planning.monte_carlo import DRAWS
from tutti.planning.pipeline_memory import observe_stages, plan_stage_memory, run_graph, stage_layout
from tutti.planning.planned_run import PlannedRun
from tutti.planning.scaling_laws import Array
from tutti.planning.script_task import ScriptLoopLoss
from tutti.planning.step_builders import build_step, check_buildable, rank_micro_batches
from tutti.planning.step_costs import StepCosts, costs_json
from tutti.planning.step_facts import StageFacts, StepFacts, TensorFacts, crossing_groups, pipeline_layout
from tutti.planning.step_program import StepTimes, evaluate_program
from tutti.planning.tensor_split import TensorSplit
from tutti.tasks.task import Task
from tutti.torch_compat import FakeTensorMode
from tutti.workload.memory_formula import Memory
from tutti.workload.message_log import GroupMessage, MessageLog
from tutti.workload.workload_file import REST, Workload
from tutti.workload.workload_trace import ModuleTraces, TracedModel, trace_modules

SIMULATED = "simulated step"


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of a model and its training step that do not change with the number of replicas.

    Attributes:
        step: FLOP, parameters, pipeline stages and tensor-parallel collectives of a training step.
        memory: bytes of parameters, optimizer state and activations before any split.
        optimizer: text of ``--optimizer`` for the optimizer of the run, which a task may make itself.
    """

    step: StepFacts
    memory: MemoryFacts
    optimizer: str


@dataclass(frozen=True)
class StepPrediction:
    """A predicted training step: its time, memory and messages.

    Attributes:
        strategy, devices, batch: strategy, number of devices and global batch (samples) of the run.
        micro_batches: samples of each micro-batch of data rank 0.
        seconds: seconds of a step, the median over Monte Carlo draws of the machine's uncertain constants.
        draws: 5 % and 95 % quantile of the seconds over these draws; unlike ``band``, they leave out errors of the
            prediction model.
        band: low and high end of the 90 % band of the seconds; None where no similar prediction was checked.
        band_text: source of the band, or the reason why there is none, in words.
        shares: compute, communication and idling as fractions of the devices' time; for a pipeline ``bubble`` too.
        samples_per_second: throughput of all devices together.
        efficiency: throughput of a device, divided by the throughput of a run on one device alone.
        memory: bytes on the fullest device, by kind.
        messages: ``vectors``, the number of vectors that are added up over data ranks in a step, and ``bytes``, their
            total size.
        delays: delays of ranks or logical workers (``--slow``), in words.
    """

    strategy: str
    devices: int
    batch: int
    micro_batches: tuple[int, ...]
    seconds: float
    draws: tuple[float, float]
    band: tuple[float, float] | None
    band_text: str
    shares: Mapping[str, float]
    samples_per_second: float
    efficiency: float
    memory: Mapping[str, float]
    messages: Mapping[str, int]
    delays: tuple[str, ...] = ()


class TaskSizes:
    """Traces a task's model and loss on fake tensors for predictions of many plans, each partition of the model once.

    Fake tensors have shapes and no values, so that nothing is computed. The exception is plans with tensor parallelism,
    for which a few samples are computed on the CPU to find out how the layers can be split.

    Args:
        task: the task, or its name.
        config: configuration of a run, for its data, model and precision.
        choices: activation checkpointing that plans may choose; a choice that finds nothing to recompute is left out.

    Attributes:
        samples: number of training samples of the task.
        optimizer: text of ``--optimizer`` for the optimizer of the run: the optimizer that the task makes, or else the
            option of ``config``.

    Raises:
        UsageError: the task reads a stream.
    """

    def __init__(self, task: str | Task, config: PlannedRun, choices: Sequence[str] = ()) -> None:
        self._task, self._choices = resolve_task(task, config), tuple(dict.fromkeys(("none", *choices)))
        self._name = task if isinstance(task, str) else task.name
        data = adapt_training(self._task.train, self._task.collate)
        if isinstance(data, Stream):
            raise UsageError(
                "the task reads a stream, whose samples are not known before it is read",
                where=self._name,
                remedy="simulate a task whose data set has __len__ and __getitem__",
            )
        self.samples, self._sample = len(data), data.fetch(np.arange(1), None)
        self._config = config
        with FakeTensorMode(allow_non_fake_inputs=True):
            self._model = task_model(self._task, config)
            self.optimizer = with_task_optimizer(self._task, self._model, config).optimizer
        self._traces: dict[int, ModuleTraces] = {}
        self._workloads: dict[tuple[tuple[str, ...], int], Workload] = {}
        self._messages: dict[int, Mapping[str, tuple[GroupMessage, ...]]] = {}
        self._traced = TracedForward(self._model)
        self._partitions: dict[tuple[Any, ...], StagePartition] = {}
        self._splits: dict[Hashable, TensorSplit] = {}
        self._slices: dict[int, dict[str, tuple[int, ...]]] = {}
        self._steps: dict[tuple[Any, ...], StepFacts | UsageError] = {}
        self._memory: dict[str, MemoryFacts] = {}
        self._wrapped: dict[tuple[str, ...], tuple[int, int]] = {}
        self._ran: dict[tuple[int, str], GraphMemory] = {}
        self._observed: dict[tuple[Any, ...], StagePlan] = {}

    def step(self, config: PlannedRun) -> StepFacts:
        """Trace the training step of a run: its work, parameters, pipeline stages and tensor-parallel collectives.

        The trace is made on fake tensors, or on real ones where layers return tensors that are split over ranks. Runs
        with an equal partition of the model into stages and tensor ranks share one trace. A module group is a module
        that FSDP wraps or a pipeline stage calls, the rest of the model, or the loss.

        Args:
            config: configuration of a run; of its devices only the numbers of pipeline stages and tensor ranks matter.

        Returns:
            A ``StepFacts``: ``workload`` (FLOP, bytes and calls by module group), ``tensors`` (trainable parameters;
            the first tensor rank's slices of split layers), ``frozen`` (parameters that are not trained), ``stages``
            (None without a pipeline), and ``messages``, tensor-parallel collectives of a micro-batch.

        Raises:
            UsageError: the strategy cannot be simulated, or the model cannot be traced or cut.
        """
        check_buildable(config)
        key = self._key(config)
        if isinstance(self._task.loss, ScriptLoopLoss) and key[1] > 1:
            raise UsageError(
                "a custom training loop cannot run in pipeline stages",
                where=f"{self._name}, --strategy {config.strategy}",
                remedy="give the loss to tutti.prepare(model, optimizer, data, loss), and call run.step(batch)",
            )
        if key not in self._steps:
            # A model that cannot be cut into some stages cannot be cut into more of them.
            fewer = [
                found
                for (other, stages, *rest), found in self._steps.items()
                if isinstance(found, UsageError) and (other, rest) == (key[0], [*key[2:]]) and stages < key[1]
            ]
            try:
                self._steps[key] = fewer[0] if fewer else self._trace(config)
            except UsageError as error:
                self._steps[key] = error
        found = self._steps[key]
        if isinstance(found, UsageError):
            raise found
        return found

    def memory(self, config: PlannedRun) -> MemoryFacts:
        """Return the bytes of the task's parameters, buffers, optimizer state and activations before any split.

        Results are cached by choice of activation checkpointing: ``samples`` and ``activations`` are those of the first
        ``config`` with this choice. The bytes of FSDP-wrapped modules are cached by wrap policy.

        Args:
            config: configuration of a run, whose activation checkpointing decides about the activations, and whose
                strategy about the FSDP-wrapped modules.

        Returns:
            A ``MemoryFacts``, whose attributes are sizes of the whole model: number of ``parameters``; bytes of all and
            of trainable parameters, ``whole`` and ``trained``; state elements of the optimizer for each trainable
            element, ``words``; bytes of ``buffers``; of parameters in the largest FSDP-wrapped module and outside of
            all, ``unit`` and ``rest``; number of ``samples`` in the largest forward, and bytes of its ``activations``.

        Raises:
            UsageError: the strategy's wrap policy names a module that the model lacks, or a container without a
                forward.
            DataError: a sample of the task's data cannot be read.
        """
        choice = config.activation_checkpointing
        if choice not in self._memory:
            self._memory[choice] = model_facts(self._task, config)
        policy = config.strategy_choice.sync.wrap_policy
        if policy not in self._wrapped:
            self._wrapped[policy] = wrapped_bytes(self._model, policy)
        unit, rest = self._wrapped[policy]
        return replace(self._memory[choice], unit=unit, rest=rest)

    def device_memory(self, config: PlannedRun) -> Memory:
        """Predict the bytes on the fullest device when the task is trained, by kind.

        Tensor-parallel ranks count as even parts of the model.

        Args:
            config: configuration of the run, with a number of devices.

        Returns:
            A ``Memory``: bytes of ``parameters``, ``gradients``, ``optimizer`` state, ``messages`` (communication
            buffers), ``average`` (averaged weights), ``activations`` and ``buffers``, and their sum ``total``.

        Raises:
            UsageError: the devices or the wrap policy do not fit strategy and model; or the run is a pipeline, and the
                model cannot be cut into stages.
            DataError: a sample of the task's data cannot be read.
        """
        facts = self.memory(config)
        if config.shape["stage"] == 1:
            return plan_memory(facts, config)
        # The parts of a stage on its tensor ranks count as even ones.
        key = (*self._key(config)[:-1], config.activation_checkpointing)
        if key not in self._observed:
            found = self._partition(stage_layout(config), config.shape["stage"], ())
            same = id(found.graph), config.activation_checkpointing
            if same not in self._ran:
                self._ran[same] = run_graph(self._task, config, found.graph)
            self._observed[key] = self._ran[same].stage_plan(found, {})
        return max(plan_stage_memory(facts, self._observed[key], config), key=lambda plan: plan.total)

    @staticmethod
    def _key(config: PlannedRun) -> tuple[Any, ...]:
        """Return all of a run that the modules and stages of its model depend on."""
        choice = config.strategy_choice
        policy, shape = choice.sync.wrap_policy, config.shape
        split = _split_key(choice.layout, shape["tensor"])
        if not isinstance(choice.layout, PipelineConfig | LayersConfig):
            return policy, 1, split
        return policy, shape["stage"], choice.layout.chunks, choice.layout.begins, split

    def _trace(self, config: PlannedRun) -> StepFacts:
        choice, model = config.strategy_choice, self._model
        shape, split = config.shape, self._split(choice.layout, config)
        names = {id(module): name for name, module in model.named_modules()}
        modules = [names[id(module)] for module in wrapped_modules(model, choice.sync.wrap_policy)]
        partition = None
        layout = pipeline_layout(choice, shape)
        if layout is not None:
            closed = () if split is None else split.closed
            partition = self._partition(layout, shape["stage"], closed)
            calls = [str(node.target) for node in body(partition.graph) if node.op == "call_module"]
            modules = list(dict.fromkeys(calls))
        owners: dict[int, str] = {}
        for name in modules:
            for parameter in model.get_submodule(name).parameters():
                owners.setdefault(id(parameter), name)
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        stages = None if partition is None else _stage_facts(partition, model, [name for name, _ in named])
        workload = self._workload(tuple(modules), config)
        tensors, frozen = _tensor_facts(model, _shapes_of(model), owners)
        if split is None:
            return StepFacts(workload, tensors, stages, frozen)
        whole = StepFacts(workload, tensors, frozen=frozen)
        if id(split) not in self._slices:
            with FakeTensorMode(allow_non_fake_inputs=True):
                self._slices[id(split)] = _shapes_of(split.build())
        tensors, frozen = _tensor_facts(model, self._slices[id(split)], owners)
        workload = self._workload(tuple(modules), config, split)
        return StepFacts(workload, tensors, stages, frozen, self._messages[id(workload)], whole)

    def _split(self, layout: StrategyOptions, config: PlannedRun) -> TensorSplit | None:
        """Return the split of the model over tensor ranks, found once for equal options; None for one rank."""
        ranks = config.shape["tensor"]
        if ranks == 1 or not isinstance(layout, TensorConfig):
            return None
        key = _split_key(layout, ranks)
        if key not in self._splits:
            self._splits[key] = TensorSplit(self._task, self._sample, config, layout, ranks)
        return self._splits[key]

    def _partition(self, layout: PipelineConfig | LayersConfig, ranks: int, closed: Collection[str]) -> StagePartition:
        """Return the partition of the model into the virtual stages of so many pipeline ranks, found once."""
        cut = ranks * layout.chunks, layout.begins, layout.modules
        key, anywhere = (*cut, frozenset(closed)), self._partitions.get((*cut, frozenset()))
        if key not in self._partitions:
            # A partition that looks into no closed module is also the one that must not look into them.
            self._partitions[key] = (
                anywhere
                if anywhere is not None and anywhere.record is None and anywhere.opened.isdisjoint(closed)
                else find_measured_partition(layout, self._model, ranks, {}, closed, self._traced)
            )
        return self._partitions[key]

    def _workload(self, modules: tuple[str, ...], config: PlannedRun, split: TensorSplit | None = None) -> Workload:
        whose = 0 if split is None else id(split)
        if whose not in self._traces:
            log = None if split is None else MessageLog(split.ranks)
            subject = TracedModel(
                name=self._name,
                build=self._task.model if split is None else partial(split.build, log),
                loss=self._task.loss,
                sample=self._sample,
                groups=lambda built: [],
                precision=config.precision,
                log=log,
            )
            real = split is not None and split.returns_slices
            self._traces[whose] = trace_modules(subject, real=real, choices=self._choices)
        key = modules, whose
        if key not in self._workloads:
            found = self._workloads[key] = self._traces[whose].workload(modules)
            self._messages[id(found)] = self._traces[whose].messages(modules)
        return self._workloads[key]


def _tensor_facts(
    model: nn.Module, shapes: Mapping[str, tuple[int, ...]], owners: Mapping[int, str]
) -> tuple[tuple[TensorFacts, ...], tuple[TensorFacts, ...]]:
    """Return the trainable and the frozen parameters of ``model``, with their ``shapes`` on a rank by name."""
    trainable: list[TensorFacts] = []
    frozen: list[TensorFacts] = []
    for name, parameter in model.named_parameters():
        facts = TensorFacts(name, owners.get(id(parameter), REST), shapes[name], parameter.dtype)
        (trainable if parameter.requires_grad else frozen).append(facts)
    return tuple(trainable), tuple(frozen)


def _shapes_of(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(p.shape) for name, p in model.named_parameters()}


def _split_key(layout: StrategyOptions, ranks: int) -> Hashable:
    """Return all that the split of a model over tensor ranks depends on; None for one rank."""
    if ranks == 1 or not isinstance(layout, TensorConfig):
        return None
    return ranks, layout.least, layout.whole, layout.plan, layout.sequence


def _stage_facts(partition: StagePartition, model: nn.Module, names: Sequence[str]) -> StageFacts:
    """Return what the stages of a partition hold and send.

    Args:
        partition: of the model.
        model: the whole model.
        names: of its trainable parameters.
    """
    places = {name: place for place, name in enumerate(names)}
    held = tuple(tuple(places[name] for name in row if name in places) for row in partition.held(model))
    nodes, uses = body(partition.graph), last_uses(partition.graph)
    called: dict[str, tuple[int, int]] = {}
    for place, node in enumerate(nodes):
        if node.op == "call_module":
            called.setdefault(str(node.target), (place, uses[node]))
    groups = tuple(
        tuple(n for n, (place, _) in called.items() if low <= place < high) for low, high in pairwise(partition.bounds)
    )
    return StageFacts(groups, held, crossing_groups(called, partition.bounds))


def gather_sizes(task: str | Task, config: PlannedRun) -> ModelSizes:
    """Trace a training step on fake tensors: its work, tensor-parallel collectives, and the memory of its state.

    Fake tensors have shapes and no values, so that nothing is computed. Exceptions, computed with a few samples, are
    the split of layers over tensor ranks, and the activations of a model that reads values.

    Args:
        task: the task, or its name.
        config: configuration of a run; of its devices only the numbers of pipeline stages and tensor ranks matter.

    Returns:
        A ``ModelSizes`` with the attributes ``step``: work, parameters, pipeline stages and messages of the step;
        ``memory``: bytes of the model's state and activations before any split.

    Raises:
        UsageError: the task reads a stream, the strategy cannot be simulated, or the model cannot be traced or cut.
        DataError: the task's data are missing or malformed.
    """
    check_buildable(config)
    sizes = TaskSizes(task, config, (config.activation_checkpointing,))
    if config.optimizer != sizes.optimizer:
        config = replace(config, optimizer=sizes.optimizer)
    return ModelSizes(sizes.step(config), sizes.memory(config), sizes.optimizer)


def predict_step(
    task: str | Task, sizes: ModelSizes, config: PlannedRun, costs: StepCosts, residuals: Residuals
) -> tuple[StepPrediction, StepTimes]:
    """Predict time, memory and messages of a training step by simulating it.

    The call sets the number of devices in ``costs`` (``share_node``), and adds lines to the list ``costs.guesses``.

    Args:
        task: the task, or its name.
        sizes: sizes of the task's model, from ``gather_sizes``.
        config: configuration of the run, with a number of devices.
        costs: predicts the seconds of computing and communication on the machine.
        residuals: scores of earlier predictions for the 90 % band, by class of prediction and source.

    Returns:
        A pair. First a ``StepPrediction`` with the attributes ``seconds`` of the step (median), ``draws`` (5 % and 95 %
        quantile over Monte Carlo draws), ``band`` (90 % band, or None), ``shares`` of computing, communication and
        idling, ``samples_per_second``, ``memory`` (bytes on the fullest device, by kind), ``messages`` and others.
        Second a ``StepTimes`` with the arrays ``start`` and ``end``, seconds of every action (computation or message)
        of the simulated step, shape (actions, 256); its method ``rows`` makes a timeline.

    Raises:
        UsageError: the strategy or an option is refused (``check_strategy``, ``check_buildable``), the machine's data
            lack something that the step needs, such as the cost of a link, or the memory of the model's pipeline stages
            cannot be predicted (``observe_stages``).
        DataError: the run is a pipeline, and the task's data are missing or malformed.
    """
    if config.optimizer != sizes.optimizer:
        config = replace(config, optimizer=sizes.optimizer)
    devices = config.device_count
    compiled = config.compile_choice
    choice = config.strategy_choice
    parallel.check_strategy(
        choice,
        devices,
        workers=config.workers,
        compiled=compiled is not None,
        graphs=compiled is not None and compiled.records_graphs,
    )
    costs.share_node(devices)
    program, slow = build_step(sizes.step, config, costs)
    times = evaluate_program(program, DRAWS)
    seconds = float(np.median(times.seconds))
    low, high = (float(value) for value in np.quantile(times.seconds, [0.05, 0.95]))
    band, text = step_band(times.seconds, costs, devices, residuals)
    baseline = alone_config(config)
    alone, _ = build_step(sizes.step.without_tensor_parallelism(), baseline, costs)
    single = float(np.median(evaluate_program(alone, DRAWS).seconds))
    note_partition(choice, costs)
    if sizes.step.workload.not_affine:
        costs.note(f"work that is no line in samples: {'; '.join(sizes.step.workload.not_affine[:2])}")
    if sizes.step.workload.without_formula:
        costs.note(f"counted as 0 FLOP: {', '.join(sorted(sizes.step.workload.without_formula))}")
    prediction = StepPrediction(
        strategy=config.strategy,
        devices=devices,
        batch=config.batch_size,
        micro_batches=tuple(count for worker in rank_micro_batches(config) for count in worker),
        seconds=seconds,
        draws=(low, high),
        band=band,
        band_text=text,
        shares=step_shares(times, slow, program.devices > 1),
        samples_per_second=config.batch_size / seconds,
        efficiency=(config.batch_size / seconds / devices) / (baseline.batch_size / single),
        memory=_memory(task, sizes.memory, config),
        messages={"vectors": len(program.vectors), "bytes": sum(vector.bytes for vector in program.vectors)},
        delays=tuple(map(str, config.slowness)),
    )
    return prediction, times


def step_basis(costs: StepCosts, devices: int, scaled: bool = False) -> str:
    """Return the class of a predicted step time in words, such as ``simulated step on measured CPUs``.

    Predictions of one class have errors alike, from which their bands are made (``conformal_band``). The class depends
    on the data of the machine (measured or published), its kind (CPUs or accelerators), whether the step has more
    devices than were measured together, and ``scaled``.

    Args:
        costs: predicts durations on the machine; read are the kind of its data and the devices of a node.
        devices: number of devices of the step.
        scaled: whether the prediction is multiplied by measured ÷ predicted seconds of other steps.
    """
    kind = "accelerators" if costs.overlaps else "CPUs"
    more = costs.basis == "measured" and devices > costs.network.per_node
    basis = f"{SIMULATED} on more {kind} than measured" if more else f"{SIMULATED} on {costs.basis} {kind}"
    return f"{basis} and scaled by measured steps" if scaled else basis


def step_band(
    seconds: Array, costs: StepCosts, devices: int, residuals: Residuals, scaled: bool = False
) -> tuple[tuple[float, float] | None, str]:
    """Return the 90 % band of a step's predicted seconds, and its source in words.

    The band is m · exp(±q·u) around the median m of ``seconds``. u = (σ² + 0.1²)^⅜ is the unit of errors
    (``band_unit``), with the standard deviation σ of ln ``seconds``; q is chosen so that 90 % of the checked
    predictions of the same class (``step_basis``) are off by a factor of at most exp(q·u) (``band_factor``).

    Args:
        seconds: predicted seconds of a step, shape (256,): one value for each of the Monte Carlo draws of the
            machine's uncertain constants.
        costs: predicts durations on the machine; read are the kind of its data (``basis``) and the devices of a node.
        devices: number of devices of the run.
        residuals: scores of checked predictions, |ln(measured ÷ predicted)| / u, by class of prediction and then by
            source.
        scaled: whether ``seconds`` are multiplied by measured ÷ predicted seconds of other steps.

    Returns:
        A pair: the band as (low end, high end) in seconds, or None where the class has too few predictions; and the
        text on its source, or the reason why there is none.
    """
    measured = costs.network.per_node if costs.basis == "measured" else devices
    cell = f"{step_basis(costs, devices, scaled)}, {distance_class(devices / measured)}"
    factor = band_factor(residuals, cell, "")
    if factor is None:
        return None, NO_BAND
    centre, sigma = float(np.median(seconds)), float(np.log(seconds).std())
    wide = float(np.exp(factor * band_unit(sigma)))
    return (centre / wide, centre * wide), _checked_words(residuals, cell)


def _checked_words(residuals: Residuals, cell: str) -> str:
    kinds = residuals[cell]
    series = sum(each.series for each in kinds.values())
    return f"90 % of checked predictions like this were within it ({cell}; {series} series of {len(kinds)} kinds)"


def alone_config(config: PlannedRun) -> PlannedRun:
    """Return a run's configuration changed to one device: the same global batch, in micro-batches of the same size.

    The simulated step of this configuration is the baseline for the efficiency of a run on several devices.

    Args:
        config: configuration of the run, with a number of devices.

    Returns:
        A copy of ``config`` with ``--strategy single``, one device and one logical worker, micro-batches as large as
        the largest of data rank 0, and no ``--slow``, which delays ranks.

    Raises:
        UsageError: ``--micro-batch`` and the strategy's option ``micro_batches`` are both given, or the devices do not
            fit the strategy.

    >>> alone_config(PlannedRun(devices="4", batch_size=64)).micro_batch
    16
    """
    most = max(count for worker in rank_micro_batches(config) for count in worker)
    return replace(config, strategy="single", devices="1", workers=None, micro_batch=most, slow=None)


def note_partition(choice: StrategyChoice, costs: StepCosts) -> None:
    """Append the simulation's assumptions about pipeline stages and split layers to the guesses of ``costs``.

    Nothing is appended for a strategy that neither cuts nor splits the model.

    Args:
        choice: the parsed strategy, of which ``layout``, the options of the model layout, is read.
        costs: durations on the machine, whose list ``guesses`` receives the lines.
    """
    if isinstance(choice.layout, TensorConfig) and choice.layout.tensor != 1:
        costs.note("layers are split as in a run on CPUs, which also splits attention with dropout")
    if isinstance(choice.layout, PipelineConfig | LayersConfig):
        costs.note("work outside of the modules between which the pipeline is cut is spread evenly over the stages")
        if not choice.layout.begins:
            costs.note("stages are even in parameters; a run may cut by measured seconds: cuts=NAME+NAME fixes them")
        if choice.layout.schedule == "zero_bubble":
            costs.note("input and weight backward each take half of a backward")


def prediction_json(found: Sequence[StepPrediction], costs: StepCosts, task_name: str) -> dict[str, Any]:
    """Return predictions for several runs, and the sources of the machine's durations, as one JSON object.

    Args:
        found: the predictions, one for each number of devices.
        costs: durations on the machine, with their basis and guesses.
        task_name: name of the task.

    Returns:
        The keys ``format`` and ``version`` (of the file), ``task``, ``units`` (unit by name of a quantity), ``machine``
        (its name), ``basis`` (such as ``measured``), ``rests_on`` and ``guesses`` (lists of lines in words), and
        ``steps``, a list with one object for each prediction: ``strategy``, ``devices``, ``batch``, ``seconds``,
        ``band``, ``shares``, ``memory`` and the further attributes of ``StepPrediction``.
    """
    units = {"seconds": "s", "memory": "byte", "bytes": "byte"}
    steps = [asdict(each) for each in found]
    return {
        "format": "tutti simulation",
        "version": 1,
        "task": task_name,
        "units": units,
        **costs_json(costs),
        "steps": steps,
    }


def step_shares(times: StepTimes, slow: Array, pipeline: bool) -> dict[str, float]:
    """Return which fractions of the devices' time go to computing, communication and waiting, for a typical device.

    The simulated device is as slow as the slowest; a typical device computes less, and waits for the rest.

    Args:
        times: start and end of every action of the simulated step.
        slow: ratios of the computing seconds of the slowest device to those of a typical device, shape (256,): one
            for each of the Monte Carlo draws.
        pipeline: whether idling of devices is the bubble of a pipeline.

    Returns:
        Fractions ``compute``, ``communication``, ``idling`` (with the delays of ``--slow``), and for a pipeline
        ``bubble``, which sum to 1.
    """
    found = times.shares()
    factor = float(np.median(slow))
    waiting = found["compute"] * (1 - 1 / factor)
    shares = {"compute": found["compute"] - waiting, "communication": found["communication"]}
    delayed = min(times.delayed(), found["idling"])
    return {
        **shares,
        **({"bubble": found["idling"] - delayed} if pipeline else {}),
        "idling": waiting + (delayed if pipeline else found["idling"]),
    }


def _memory(task: str | Task, facts: MemoryFacts, config: PlannedRun) -> Mapping[str, float]:
    if config.shape["stage"] > 1:
        plans = plan_stage_memory(facts, observe_stages(task, config, {}), config)
        return memory_rows(max(plans, key=lambda plan: plan.total))
    return memory_rows(plan_memory(facts, config))
