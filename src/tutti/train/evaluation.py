"""Evaluation of a run on held-out samples, divided over the data ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tutti.data.adapt import adapt
from tutti.data.feed import evaluation, evaluation_blocks
from tutti.data.source import Source
from tutti.errors import UsageError
from tutti.launcher import heartbeat
from tutti.launcher.heartbeat import Phase
from tutti.types import LossFn, LossSums

if TYPE_CHECKING:
    from tutti.train.run import Run


@dataclass(frozen=True)
class Evaluation:
    """Means over all held-out samples, each counted once.

    Attributes:
        loss: mean loss.
        metrics: mean of each metric by name.
        samples: number of held-out samples.
        averaged: whether the average of the weights was evaluated.
    """

    loss: float
    metrics: dict[str, float]
    samples: int
    averaged: bool = False

    @property
    def values(self) -> dict[str, float]:
        """Loss and metrics by name: ``{"loss": …, "accuracy": …}``."""
        return {"loss": self.loss, **self.metrics}


def evaluate_samples(run: Run, source: Any, batch: int, loss: LossFn | None, averaged: bool) -> Evaluation:
    """See ``Run.evaluate``; ``loss`` None stands for the run's loss function. Collective."""
    chosen = loss or run.loss_fn
    if chosen is None:
        raise UsageError("run.evaluate needs a loss function", remedy="give one here or to tutti.prepare")
    source = adapt(source)
    run.together(f"evaluation of {len(source)} samples" + " on the average" * averaged)
    with heartbeat.training.during(Phase.EVALUATE):
        run.checks.held_out(source, loss)
    comm = run.context.comms.replica
    with (
        run.checks.aside(),
        heartbeat.training.during(Phase.EVALUATE),
        run.replica.evaluating(run.merged(averaged, as_trained=True)),
    ):
        there: Sequence[int] | None = None
        # If a rank is killed during the evaluation, its samples are missing: evaluate again on the ranks alive.
        while there != comm.alive_ranks:
            there = comm.alive_ranks
            names, table = _totals(run, source, batch, chosen)
    value, count, *sums = table.sum(dim=0).tolist()
    metrics = {n: s / count for n, s in zip(names, sums, strict=True)}
    return Evaluation(value / count, metrics, len(source), averaged)


def _totals(run: Run, source: Source, batch: int, loss: LossFn) -> tuple[Sequence[str], Tensor]:
    """Evaluate blocks of samples, divided over the data ranks. Collective: a broadcast and an all-reduce.

    Returns:
        Names of the metrics, and a float64 table with ``[loss_sum, count, *metric_sums]`` for each block.
    """
    comms = run.context.comms
    there = comms.replica.alive_ranks
    rank, ranks = there.index(comms.replica.rank), len(there)
    blocks = evaluation(
        *(source, ranks, rank, batch, run.feed.place, run.feed.prefetch), even=bool(run.replica.sharded)
    )
    parts: dict[int, LossSums] = {}
    for number, micro_batch in blocks:
        heartbeat.training.beat()
        part = run.replica.run([micro_batch], loss, None)
        if micro_batch.samples:
            parts[number] = part
    names = comms.world.broadcast_json(parts[0].names if rank == 0 else (), 0, "names of the metrics")
    table = torch.zeros(len(evaluation_blocks(len(source), batch)), 2 + len(names), dtype=torch.float64)
    for number, part in parts.items():
        table[number] = part.sums.double().cpu()
    comms.replica.all_reduce(table, "totals of the evaluation")
    return names, table
