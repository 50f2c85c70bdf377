"""Evaluation of a run on held-out samples, divided over the data ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from tutti.data.adapt import Collate, adapt
from tutti.data.feed import HeldOut, evaluation, evaluation_blocks
from tutti.data.sampling import given_sampling
from tutti.errors import UsageError
from tutti.launcher import heartbeat
from tutti.launcher.heartbeat import Phase
from tutti.types import LossFn, LossSums

if TYPE_CHECKING:
    from tutti.train.run import Run


BLOCK = 512
"""Default of the largest number of samples in one forward."""


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


def evaluate_samples(
    run: Run, source: Any, batch: int, loss: LossFn | None, averaged: bool, collate: Collate | None = None
) -> Evaluation:
    """See ``Run.evaluate``; ``loss`` None stands for the run's loss function. Collective."""
    chosen = loss or run.loss_fn
    if chosen is None:
        raise UsageError("run.evaluate needs a loss function", remedy="give one here or to tutti.prepare")
    held_out = in_blocks(source, batch, collate, run.feed.seed)
    run.together(f"evaluation of {held_out.samples} samples" + " on the average" * averaged)
    with heartbeat.training.during(Phase.EVALUATE):
        run.checks.held_out(held_out.source, loss)
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
            names, table = _totals(run, held_out, chosen)
    value, count, *sums = table.sum(dim=0).tolist()
    metrics = {n: s / count for n, s in zip(names, sums, strict=True)}
    return Evaluation(value / count, metrics, held_out.samples, averaged)


def in_blocks(source: Any, batch: int, collate: Collate | None, seed: int) -> HeldOut:
    """Return held-out samples in the blocks of an evaluation; those of a ``DataLoader`` are its batches.

    Args:
        source: held-out samples.
        batch: largest number of samples in a block.
        collate: the script's function from a list of samples to a batch; None for that of PyTorch.
        seed: of a sampler's draws.

    Raises UsageError as ``tutti.prepare`` does for a ``DataLoader``, and if the samples are a stream.
    """
    if not isinstance(source, DataLoader):
        adapted = adapt(source, collate)
        return HeldOut(adapted, [np.asarray(block) for block in evaluation_blocks(len(adapted), batch)])
    found = given_sampling(source, None, collate, None, False, None).sized(seed)
    # A mean does not depend on the order.
    found = replace(found, shuffle=False) if found.shuffle else found
    adapted = adapt(found.dataset, found.collate)
    return HeldOut(adapted, found.order(seed, len(adapted)).batches(0, found.batch_size or batch))


def _totals(run: Run, held_out: HeldOut, loss: LossFn) -> tuple[Sequence[str], Tensor]:
    """Evaluate blocks of samples, divided over the data ranks. Collective: a broadcast and an all-reduce.

    Returns:
        Names of the metrics, and a float64 table with ``[loss_sum, count, *metric_sums]`` for each block.
    """
    comms = run.context.comms
    there = comms.replica.alive_ranks
    rank, ranks = there.index(comms.replica.rank), len(there)
    blocks = evaluation(held_out, ranks, rank, run.feed.place, run.feed.prefetch, even=bool(run.replica.sharded))
    parts: dict[int, LossSums] = {}
    for number, micro_batch in blocks:
        heartbeat.training.beat()
        part = run.replica.run([micro_batch], loss, None)
        if micro_batch.samples:
            parts[number] = part
    names = comms.world.broadcast_json(parts[0].names if rank == 0 else (), 0, "names of the metrics")
    table = torch.zeros(len(held_out.blocks), 2 + len(names), dtype=torch.float64)
    for number, part in parts.items():
        table[number] = part.sums.double().cpu()
    comms.replica.all_reduce(table, "totals of the evaluation")
    return names, table
