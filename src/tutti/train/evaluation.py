"""Evaluation of a run on held-out samples, divided over the data ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from tutti.data.adapt import Collate, adapt_training
from tutti.data.feed import HeldOut, evaluation, evaluation_blocks
from tutti.data.held_out_stream import HeldOutStream
from tutti.data.loader import IN_PROCESS, Prefetch
from tutti.data.sampling import given_sampling
from tutti.data.source import Sharded, Source
from tutti.data.stream import Stream
from tutti.errors import UsageError, counted
from tutti.launcher import heartbeat
from tutti.launcher.heartbeat import Phase
from tutti.parallel.ddp.loss_output import read_loss
from tutti.train.script_checks.metric_objects import metric_objects
from tutti.types.micro_batch import LossFn, LossSums, MicroBatch

if TYPE_CHECKING:
    from tutti.train.run import Run


Blocks: TypeAlias = HeldOut | HeldOutStream
"""Held-out samples in blocks: by number, or of a stream."""

Result = TypeVar("Result")

BLOCK = 512
"""Default of the largest number of samples in one forward."""


@dataclass(frozen=True)
class Evaluation:
    """Result of evaluating a model on held-out samples: means over all samples, each counted once.

    Attributes:
        loss: mean loss.
        metrics: mean of each metric by name.
        samples: number of held-out samples.
        averaged: whether the average of the weights (EMA) was evaluated, in place of the weights in training.
    """

    loss: float
    metrics: dict[str, float]
    samples: int
    averaged: bool = False

    @property
    def values(self) -> dict[str, float]:
        """Mean loss and mean of each metric over the held-out samples, as Python floats by name.

        The dict is ``{"loss": …, "accuracy": …}``, with the names of the metrics that the loss function reports.
        """
        return {"loss": self.loss, **self.metrics}


def evaluate_samples(
    run: Run, source: Any, batch: int, loss: LossFn | None, averaged: bool, collate: Collate | None = None
) -> Evaluation:
    """Return mean loss and metrics of a run's model on held-out samples, each counted once. Collective over all ranks.

    Where replicas of the model differ between synchronisations, their merged weights are evaluated. All ranks first
    compare the call (an all-gather of digests), and data ranks all-gather the buffers, and replicas that differ, of all
    logical workers (fixed shares of the global batch), to merge them. Each data rank evaluates a part of the samples in
    eval mode; rank 0 broadcasts the names of the metrics, and an all-reduce over the data ranks sums the results. The
    model is unchanged afterwards. If a rank is killed meanwhile, the ranks alive evaluate all samples again.

    Args:
        run: the run, whose model is evaluated.
        source: held-out samples or a stream of them, the same on every rank; or a ``DataLoader``, whose batches are
            then evaluated.
        batch: largest number of samples in one forward, where ``source`` is no ``DataLoader``.
        loss: the loss function; None: the run's.
        averaged: whether to evaluate the average of the weights over steps, in place of the weights.
        collate: makes a batch of a list of samples; None: as PyTorch's ``DataLoader``.

    Returns:
        An ``Evaluation`` with mean loss, mean of each metric and number of samples; the same on every rank, but for the
        last bit between ranks of one replica. Means are NaN if the loss function counts nothing, such as where a mask
        leaves every sample out.

    Raises:
        UsageError: neither ``loss`` nor the run gives a loss function; the loss function updates a metric object (with
            ``update``, ``compute`` and ``reset``) and weights are sharded, so that dummy forwards would count;
            ``averaged`` without an average; or ``source`` is a ``DataLoader`` that cannot be reproduced on several
            ranks, such as one with a ``DistributedSampler``, or a stream that shards itself.
        MismatchError: ranks make different calls, have taken different numbers of steps, or read different streams.
        DataError: the stream has no samples.
    """
    chosen = loss or run.loss_fn
    if chosen is None:
        raise UsageError("run.evaluate needs a loss function", remedy="give one here or to tutti.prepare")
    if run.replica.sharded and (found := metric_objects(chosen)):
        raise UsageError(
            f"the loss function updates '{found[0]}', and sharded weights are gathered in dummy forwards",
            why="a device with fewer blocks than another repeats one, which the object would count",
            remedy="return sums from the loss function, or compute the metric from the outputs of run.predict",
        )
    held_out = in_blocks(source, batch, collate, run.feed.seed, run.context.mesh.rank)
    run.check_same_call(f"evaluation of {described(held_out)}" + " on the average" * averaged)
    if isinstance(held_out, HeldOut):
        with heartbeat.training.during(Phase.EVALUATE):
            run.checks.held_out(held_out.source, loss)
    names, table = on_ranks_alive(run, averaged, lambda ranks, rank: _totals(run, held_out, chosen, ranks, rank))
    value, count, *sums = table.sum(dim=0).tolist()
    # As 0 / 0 of a tensor: nothing was counted, such as where a mask leaves every sample out.
    loss_value, *means = (total / count if count else math.nan for total in (value, *sums))
    return Evaluation(loss_value, dict(zip(names, means, strict=True)), held_out.samples, averaged)


def on_ranks_alive(run: Run, averaged: bool, compute: Callable[[int, int], Result]) -> Result:
    """Compute with the run's weights in eval mode on held-out samples that are divided over the data ranks alive.

    If a rank is killed meanwhile, its samples are missing, and the ranks alive compute all of them again. All ranks of
    the run must call it. Collective over the data ranks: all-gathers of the buffers, of which each logical worker
    (fixed share of the global batch) has its own; under local SGD, where each also has its own parameters, an
    all-to-all and an all-gather of these; with parameter servers, which may have newer ones, two barriers around a
    read; then the collectives of ``compute``.

    Args:
        run: the run, whose model has its weights of training and its mode back afterwards.
        averaged: whether to compute with the average of the weights over steps.
        compute: function of the number of data ranks alive and this rank's index among them.

    Returns:
        The result of that call of ``compute`` during which no rank was lost.

    Raises:
        UsageError: ``averaged``, and the run keeps no average; or the script has written a buffer between steps that
            forwards write too, other than by a reset to zeros (ones for a variance), and this rank computes several
            logical workers, each with its own value of the buffer.
    """
    comm = run.context.comms.replica
    with (
        _own_draws(run),
        run.checks.aside(),
        heartbeat.training.during(Phase.EVALUATE),
        run.replica.evaluating(run.merged(averaged, as_trained=True)),
    ):
        while True:
            there = comm.alive_ranks
            result = compute(len(there), there.index(comm.rank))
            if there == comm.alive_ranks:
                return result


@contextmanager
def _own_draws(run: Run) -> Iterator[None]:
    """Restore the RNG streams at the end: the script's next draws do not depend on the samples evaluated here."""
    draws = run.replica.draws
    moment, state = draws.moment, draws.state
    try:
        yield
    finally:
        draws.moment, draws.state = moment, state


def call_whole(run: Run, function: Callable[[Any, Any], Any], micro_batch: MicroBatch) -> Any:
    """Call a function with the whole model and one micro-batch of held-out samples, and return its result.

    Collective over the ranks of a replica, which all get the model's whole outputs: all pipeline stages compute one
    after the other, and the outputs are broadcast from the last one; tensor slices of outputs are all-gathered.

    Args:
        run: the run, within ``on_ranks_alive``.
        function: ``function(model, batch)``.
        micro_batch: the samples, on the device.
    """
    replica = run.replica
    replica.begin(micro_batch)
    with replica.script_code():
        return function(replica.plain, micro_batch.batch)


def in_blocks(source: Any, batch: int, collate: Collate | None, seed: int, rank: int = 0) -> Blocks:
    """Divide held-out samples into blocks, each of which one rank evaluates as one batch.

    The batches of a ``DataLoader`` are the blocks; the loader itself is not iterated. Not collective.

    Args:
        source: held-out samples: tensors, a data set, a stream or a ``DataLoader``.
        batch: largest number of samples in a block, where ``source`` is no ``DataLoader``.
        collate: the script's function from a list of samples to a batch; None for that of PyTorch.
        seed: seed of the random draws with which a sampler or a stream orders its samples.
        rank: index of this rank among all, for error messages of a stream's loader processes.

    Returns:
        A ``HeldOut``: ``source``, the samples, and ``blocks``, for each block an int64 array of the indices of its
        samples in ``source``. For a stream a ``HeldOutStream``, whose blocks are known once it has been read.

    Raises:
        UsageError: ``source`` is no data set, is a stream that shards itself over ranks, or a ``DataLoader`` that
            cannot be reproduced on several ranks, such as one with an ``__iter__`` of its own or a
            ``DistributedSampler``; or ``collate`` is given with a ``DataLoader`` or a ``tutti.data.Source``.
        DataError: there are no samples, or tensors have different numbers of them.
    """
    if not isinstance(source, DataLoader):
        data = _held_out(source, collate)
        if isinstance(data, Stream):
            return HeldOutStream(data, batch, seed, IN_PROCESS)
        return HeldOut(data, [np.asarray(block) for block in evaluation_blocks(len(data), batch)])
    found = given_sampling(source, None, collate, None, False, None).sized(seed)
    # A mean does not depend on the order.
    found = replace(found, shuffle=False) if found.shuffle else found
    data = _held_out(found.dataset, found.collate, found.drop_last, found.processes)
    if isinstance(data, Stream):
        prefetch = Prefetch(found.processes, rank, found.timeout or IN_PROCESS.timeout, found.begin)
        return HeldOutStream(data, found.batch_size or batch, seed, prefetch)
    return HeldOut(data, found.order(seed, len(data)).batches(0, found.batch_size or batch))


def _held_out(data: Any, collate: Collate | None, drop_last: bool = False, processes: int = 0) -> Source | Stream:
    """Wrap held-out samples. Raises UsageError for a stream that shards itself."""
    if isinstance(data, Sharded):
        raise UsageError(
            "held-out samples cannot be a stream that shards itself",
            why="each sample counts once, and the ranks' streams may end at different blocks",
            remedy="give every rank the whole stream: tutti divides its blocks over the ranks",
        )
    return adapt_training(data, collate, drop_last, processes)


def described(held_out: Blocks) -> str:
    """Return a phrase for messages that names held-out samples: ``{N} samples``, or ``the stream {name}``.

    Args:
        held_out: a data set of known length (``HeldOut``) or a stream (``HeldOutStream``), divided into blocks.
    """
    return (
        counted(held_out.samples, "sample") if isinstance(held_out, HeldOut) else f"the stream {held_out.stream.name}"
    )


def micro_batches(run: Run, held_out: Blocks, ranks: int, rank: int, even: bool) -> Iterator[tuple[int, MicroBatch]]:
    """Yield the held-out samples that this data rank evaluates, as tuples (block number, micro-batch on the device).

    A block is a list of samples that is evaluated as one batch. Blocks are numbered from 0 over all ranks. Not
    collective for data sets with indices. For a stream (an iterable of samples), which every rank reads whole,
    collective over all ranks, which must all exhaust the iterator: they all-gather and compare digests of the samples
    of blocks 0, 1, 2, 4, 8, …, and at the end the number of samples.

    Args:
        run: the training run whose model is evaluated.
        held_out: the samples, divided into blocks: the result of ``in_blocks``.
        ranks: number of data ranks.
        rank: index of this data rank.
        even: give every rank equally many blocks, padded with dummy micro-batches: block number 0, a batch of real
            samples to compute with, and ``samples`` 0, so that the caller leaves their loss out.

    Raises:
        MismatchError: on every rank, if ranks have read different streams.
        DataError: the stream has no samples, or a sample cannot be read or collated.
        LoaderError: a loader process ended, or gave no batch within the timeout.
    """
    if isinstance(held_out, HeldOutStream):
        return held_out.micro_batches(ranks, rank, run.feed.place, even, run.context.comms.world)
    return evaluation(held_out, ranks, rank, run.feed.place, run.feed.prefetch, even=even)


def _totals(run: Run, held_out: Blocks, loss: LossFn, ranks: int, rank: int) -> tuple[Sequence[str], Tensor]:
    """Evaluate blocks of samples, divided over ``ranks`` data ranks. Collective: a broadcast and an all-reduce.

    Returns:
        Names of the metrics, and a float64 table with ``[loss_sum, count, *metric_sums]`` for each block.
    """
    comms = run.context.comms
    blocks = micro_batches(run, held_out, ranks, rank, even=bool(run.replica.sharded))
    parts: dict[int, LossSums] = {}
    # Otherwise the last stage alone runs the loss function to its end, and other ranks' objects see no sample.
    by_all = run.context.mesh.stage > 1 and bool(metric_objects(loss))
    for number, micro_batch in blocks:
        heartbeat.training.beat()
        if by_all:
            part = read_loss(call_whole(run, loss, micro_batch), micro_batch)[2]
        else:
            part = run.replica.run([micro_batch], loss, None)
        if micro_batch.samples:
            parts[number] = part
    names = comms.world.broadcast_json(parts[0].names if rank == 0 else (), 0, "names of the metrics")
    table = torch.zeros(held_out.rows, 2 + len(names), dtype=torch.float64)
    for number, part in parts.items():
        table[number] = part.sums.cpu().double()
    comms.replica.all_reduce(table, "totals of the evaluation")
    return names, table
