"""Choose the builder of a step's program by its strategy, and refuse strategies and options without a program."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from tutti.config.layout_config import TensorConfig
from tutti.config.sync_config import (
    AllReduceConfig,
    CentralConfig,
    LocalSGDConfig,
    ParameterServerConfig,
    RowsConfig,
)
from tutti.data.contract import BatchContract
from tutti.errors import UsageError
from tutti.planning.monte_carlo import DRAWS, median_draw
from tutti.planning.pass_prices import PassPrices
from tutti.planning.pipeline_builder import PipelineBuilder
from tutti.planning.planned_run import PlannedRun
from tutti.planning.replica_builder import ReplicaBuilder
from tutti.planning.scaling_laws import Array
from tutti.planning.server_builder import ServerBuilder, is_elementwise
from tutti.planning.step_costs import StepCosts
from tutti.planning.step_delays import check_delays
from tutti.planning.step_facts import StepFacts, pipeline_layout, zero_stage
from tutti.planning.step_program import StepProgram


def rank_micro_batches(config: PlannedRun) -> list[list[int]]:
    """Return the sizes in samples of the micro-batches of data rank 0, which has the most samples of all data ranks.

    Args:
        config: configuration of the run, with a number of devices.

    Returns:
        One list for each logical worker (a fixed share of the global batch) of the rank: the number of samples in each
        of its micro-batches of a full global batch, in order.

    Raises:
        UsageError: ``--micro-batch`` and the strategy's option ``micro_batches`` are both given, or the devices do not
            fit the strategy.
    """
    ranks = config.data_ranks
    workers = config.workers or ranks
    micro = config.strategy_choice.micro_batch(config.micro_batch, config.batch_size, workers)
    return [[*worker] for worker in _micro_batches_of_rank(config.batch_size, workers, ranks, micro)]


@lru_cache(maxsize=4096)
def _micro_batches_of_rank(batch: int, workers: int, ranks: int, micro: int | None) -> tuple[tuple[int, ...], ...]:
    contract = BatchContract(1, batch, workers, ranks, micro)
    return tuple(
        tuple(len(part) for part in contract.micro_batches(len(contract.worker(batch, worker))))
        for worker in contract.mine(0)
    )


def check_buildable(config: PlannedRun) -> None:
    """Raise UsageError if the simulator cannot build the training step of a run with its strategy and options.

    It cannot build ``offload`` and ``param_dtype`` of sharding; ``backup`` workers of parameter servers; ``post`` of
    local SGD; ``--reproducible``; a ``--batch-norm`` other than ``worker``; and options that ``check_split`` (layers
    split over tensor ranks) or ``check_delays`` (``--slow``) refuses.

    Args:
        config: configuration of the run, with a number of devices.
    """
    where = f"--strategy {config.strategy}"
    sync = config.strategy_choice.sync
    check_split(config)
    check_delays(config)
    if isinstance(sync, RowsConfig) and (sync.offload or sync.param_dtype):
        raise UsageError(
            "offload and param_dtype cannot be simulated",
            where=where,
            why="nothing measures copies to the host, or casts of parameters",
            remedy="leave them out",
        )
    if isinstance(sync, ParameterServerConfig) and sync.backup:
        raise UsageError(
            "backup workers cannot be simulated",
            where=where,
            why="which gradients a step waits for depends on the stragglers of each step",
            remedy="leave out backup",
        )
    if isinstance(sync, LocalSGDConfig) and sync.post:
        raise UsageError(
            "a synchronous phase at the start cannot be simulated together with the local steps",
            where=where,
            why="its steps cost more than the local ones, and one step stands for all",
            remedy="leave out post; --strategy mirrored is near its steps",
        )
    for option, value in (("reproducible", config.reproducible), ("batch_norm", config.batch_norm != "worker")):
        if value:
            flag = option.replace("_", "-")
            raise UsageError(f"--{flag} cannot be simulated", where=where, remedy=f"leave out --{flag}")


def build_step(
    facts: StepFacts, config: PlannedRun, costs: StepCosts, prices: PassPrices | None = None
) -> tuple[StepProgram, Array]:
    """Build the simulated training step of a run: its computations and messages, with their seconds and dependences.

    Args:
        facts: FLOP, parameters, pipeline stages and tensor-parallel collectives of a step of the model.
        config: configuration of the run, with a number of devices.
        costs: predicts the seconds of computing and communication on the machine.
        prices: predicts the seconds of the model's forwards and backwards and caches them; may be shared by calls for
            the same model, machine and number of devices. None for a new one.

    Returns:
        A pair. First the simulated step, the computations and messages of a device that computes as long as the
        slowest, or of one pipeline of such devices: each of ``actions`` has a device, a phase, a duration (seconds, one
        value for each of the Monte Carlo draws of the machine's uncertain constants) and the indices in ``actions`` of
        the actions that have to end before this action begins. Second the ratios of the computing seconds of the
        slowest device to those of a typical device, array of shape (256,): one ratio for each draw.

    Raises:
        UsageError: the strategy or one of its options cannot be simulated (``check_buildable``), the number of devices
            does not fit the strategy, or the machine's data lack something that the step needs, such as the cost of a
            link.
        TypeError: the strategy's gradient synchronisation is of a kind that the simulator does not know.
    """
    check_buildable(config)
    # The number of devices must fit the strategy.
    choice, shape = config.strategy_choice, config.shape
    parts = rank_micro_batches(config)
    prices = PassPrices(facts.workload, costs) if prices is None else prices
    slow = slowness(config, costs, typical_computing(config, parts, prices))
    common = facts, config, costs, slow, prices, shape
    layout, sync = pipeline_layout(choice, shape), choice.sync
    if layout is not None and isinstance(sync, AllReduceConfig):
        return PipelineBuilder(*common).build(layout, sync, parts), slow
    stage = zero_stage(choice, shape)
    if stage > 1:
        return ReplicaBuilder(*common).fully_sharded(stage, parts), slow
    if stage == 1:
        return ReplicaBuilder(*common).sharded_optimizer(parts), slow
    if isinstance(sync, LocalSGDConfig):
        return ReplicaBuilder(*common).local_steps(sync, parts, config.device_count), slow
    if isinstance(sync, CentralConfig):
        return ServerBuilder(*common).central_storage(parts), slow
    if isinstance(sync, ParameterServerConfig):
        return ServerBuilder(*common).servers(sync, parts), slow
    if not isinstance(sync, AllReduceConfig):
        raise TypeError(f"no simulated step is built for strategy '{choice.name}'")
    return ReplicaBuilder(*common).whole(sync, parts, config.data_ranks), slow


def slowness(config: PlannedRun, costs: StepCosts, computing: Array) -> Array:
    """Predict the ratio of the computing seconds of the slowest device, for which all others wait, to a typical one's.

    The ratio grows with the number of devices and with the jitter of computing that was measured on the machine;
    without a measurement the seconds of a device vary by 2 % (a guess). With parameter servers in the mode ``async`` no
    logical worker waits for another, so that all ratios are 1.

    Args:
        config: configuration of the run, with a number of devices.
        costs: predicts the seconds of computing and communication on the machine.
        computing: seconds of all forwards and backwards of a data rank on a typical device, shape (256,) (Monte Carlo
            draws); jitter averages out over longer computing.

    Returns:
        Ratios of seconds, array of shape (256,), at least 1: one for each of the Monte Carlo draws.

    Raises:
        UsageError: the number of devices does not fit the strategy, or the machine's data have jitter and no curve of
            matrix products.
    """
    sync = config.strategy_choice.sync
    if isinstance(sync, ParameterServerConfig) and sync.mode == "async":
        return np.ones(DRAWS)
    return costs.slowest(config.device_count, median_draw(computing) / config.shape["stage"])


def check_split(config: PlannedRun) -> None:
    """Raise UsageError if the simulator cannot build the step of a model whose layers or shards lie on several ranks.

    Only strategies ``tensor`` and ``hybrid`` are checked. The simulator cannot build shards of pipeline stages; shards
    of gradients or parameters (ZeRO stages 2 and 3) of layers that are split over tensor ranks; sequence parallelism
    and activation checkpointing in pipeline stages whose layers are split; and an optimizer that mixes the elements of
    a tensor, such as Muon, where layers are split.

    Args:
        config: configuration of the run, with a number of devices.
    """
    layout, shape = config.strategy_choice.layout, config.shape
    if not isinstance(layout, TensorConfig):
        return
    where = f"--strategy {config.strategy}"
    if shape["shard"] > 1 and shape["stage"] > 1:
        raise UsageError(
            "shards of pipeline stages cannot be simulated",
            where=where,
            why="the rows of a stage's parameters are not in the program",
            remedy="leave out shards, or take stages=1",
        )
    if shape["shard"] > 1 and shape["tensor"] > 1 and config.strategy_choice.sync.zero_stage > 1:
        raise UsageError(
            "shards of the gradients or parameters of split layers cannot be simulated",
            where=where,
            why="FSDP gathers what split layers return, and these all-gathers are not in the program",
            remedy="take stage=1, which shards the optimizer state, or tensor=1",
        )
    if shape["tensor"] == 1:
        return
    if shape["stage"] > 1 and (layout.sequence or config.activation_checkpointing != "none"):
        part = "sequence" if layout.sequence else "--activation-checkpointing"
        raise UsageError(
            "sequence parallelism and recomputation in pipeline stages that are split over tensor ranks cannot be "
            "simulated",
            where=where,
            why="the all-gathers at the ends of the stages, and those made again in backward, are not in the program",
            remedy=f"leave out {part}, or take stages=1",
        )
    if not is_elementwise(config.optimizer_choice):
        raise UsageError(
            f"the update of {config.optimizer_choice.name} on slices of layers cannot be simulated",
            where=where,
            why="it mixes elements of a tensor, and the collectives that it needs are not in the program",
            remedy="take --optimizer adamw or sgd, or --strategy mirrored",
        )


def typical_computing(config: PlannedRun, parts: Sequence[Sequence[int]], prices: PassPrices) -> Array:
    """Predict the seconds of forward and backward of all micro-batches of a data rank, on one typical device.

    Args:
        config: configuration of the run, whose activation checkpointing decides what backward computes again.
        parts: number of samples in each micro-batch of the data rank, one list for each of its logical workers, which
            are fixed shares of the global batch (``rank_micro_batches``).
        prices: predicts the seconds of the model's forwards and backwards over a micro-batch, and caches them.

    Returns:
        Seconds, array of shape (256,), as if the device held the whole model: one value for each of the Monte Carlo
        draws of the machine's uncertain constants. The array is cached in ``prices`` and shared by later calls: do not
        change it.

    Raises:
        UsageError: the machine's data lack a class of operators, or the run's activation checkpointing finds nothing to
            recompute in this model.
    """
    choice = config.activation_checkpointing
    counts = Counter(samples for worker in parts for samples in worker)

    def add() -> Array:
        total = np.zeros(DRAWS)
        for samples, number in counts.items():
            total += number * (prices.total("forward", samples, choice) + prices.total("backward", samples, choice))
        return total

    return prices.once(("computing", tuple(counts.items()), choice), add)
