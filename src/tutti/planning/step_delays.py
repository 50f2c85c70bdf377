"""Simulated delays of ranks and logical workers (``--slow``) in a predicted step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tutti.comm.partition import workers_of
from tutti.config.slowness import Slowness
from tutti.config.sync_config import ParameterServerConfig
from tutti.errors import UsageError
from tutti.planning.monte_carlo import DRAWS, median_draw
from tutti.planning.planned_run import PlannedRun
from tutti.planning.scaling_laws import Array


def check_delays(config: PlannedRun) -> None:
    """Raise UsageError if the delays that a run's ``--slow`` asks for cannot be simulated.

    The option delays ranks or logical workers (fixed shares of the global batch) on purpose. An error is raised if a
    named rank or worker does not exist, and if ``--slow`` is given to a run with parameter servers in the mode
    ``async``.

    Args:
        config: configuration of the run, with a number of devices.
    """
    if not config.slowness:
        return
    sync = config.strategy_choice.sync
    for slow in config.slowness:
        slow.check(config.device_count, config.workers or config.data_ranks)
    if isinstance(sync, ParameterServerConfig) and sync.mode == "async":
        raise UsageError(
            "delays of asynchronous workers cannot be simulated",
            where=f"--slow {config.slow}",
            why="no worker waits for another, so that their steps differ, and one step stands for all",
            remedy="take --strategy parameter_server, or parameter_server:mode=bounded, whose workers keep together",
        )


def worker_delays(config: PlannedRun, computing: Sequence[Array], stage: int = 0) -> list[Array]:
    """Return the delays by ``--slow`` of each logical worker, on the data rank with the longest delays.

    The option ``--slow`` delays ranks or workers on purpose, by a factor on their seconds of computing and by a number
    of milliseconds: the delay is (factor - 1) × computing + milliseconds. A logical worker is a fixed share of the
    global batch. A delay follows all micro-batches of its worker, as in a run, and precedes the collectives of the
    update. The data rank is the one whose workers' delays have the largest sum.

    Args:
        config: configuration of the run, with a number of devices.
        computing: for each logical worker of a data rank the seconds of its forwards and backwards on the device, shape
            (256,) (Monte Carlo draws).
        stage: pipeline stage of the device.

    Returns:
        One array for each element of ``computing``, in their order: the delay in seconds, shape (256,), one value for
        each of the Monte Carlo draws; zeros where nothing is delayed.
    """
    nothing = [np.zeros(DRAWS) for _ in computing]
    if not config.slowness:
        return nothing
    shape, data_ranks = config.shape, config.data_ranks
    workers = config.workers or data_ranks
    most = nothing
    for data_rank in range(data_ranks):
        # The ranks of a replica have adjacent numbers: stages, and within them tensor ranks.
        first = (data_rank * shape["stage"] + stage) * shape["tensor"]
        mine = workers_of(workers, data_ranks, data_rank)
        for rank in range(first, first + shape["tensor"]):
            found = [
                sum(
                    ((s.factor - 1) * each + s.ms / 1000 for s in config.slowness if _delays(s, rank, worker)),
                    np.zeros(DRAWS),
                )
                for worker, each in zip(mine, computing, strict=False)
            ]
            found += nothing[len(found) :]
            if median_draw(sum(found, np.zeros(DRAWS))) > median_draw(sum(most, np.zeros(DRAWS))):
                most = found
    return most


def _delays(slow: Slowness, rank: int, worker: int) -> bool:
    return rank in slow.rank or worker in slow.worker
