"""Read this rank's part of every global batch and cut it into the micro-batches of its logical workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tutti.comm.partition import chunks, even_share, sharers
from tutti.comm.random_keys import mix
from tutti.data.batches import length, script_batch, slice_batch
from tutti.data.epochs import EarlierEpochs, Epochs
from tutti.data.loader import IN_PROCESS, Prefetch
from tutti.data.reader import BatchReader, RankBatch
from tutti.data.source import Source
from tutti.data.transfer import Transfer
from tutti.types.micro_batch import Batch, MicroBatch

Plan = list[tuple[int, list[tuple[range | None, float]]]]
"""Each worker's micro-batches: range within the rank's batch (None: the whole batch), and weight of a sample."""


class Feed:
    """Reads this data rank's samples of every global batch to the device, and cuts them into micro-batches.

    A global batch is divided over a fixed number of logical workers (shares of the batch), whatever the number of
    ranks; each data rank computes one or more workers, and accumulates gradients over the micro-batches of each.

    Args:
        reader: reads the rank's samples from the data set.
        epochs: batch size of each epoch, and its division over logical workers and ranks.
        rank: this data rank.
        seed: seed of all random draws.
        place: moves a batch to the device, and casts it to the model's dtype and memory format.
        prefetch: fetches held-out samples, in this process or in loader processes.
        workers_as_one: whether all samples of this rank form one micro-batch, assigned to the rank's first worker, as
            synchronised batch norm needs.
        transfer: copies batches to the device ahead of their steps; None to copy each as it is read.
        in_order: gradients are summed in the order of workers and micro-batches (reproducible mode).

    Attributes:
        contract: the division of the present epochs' global batches over logical workers and ranks.
        workers: indices of the logical workers for which this rank computes.
    """

    def __init__(
        self,
        reader: BatchReader,
        epochs: Epochs,
        rank: int,
        seed: int,
        place: Callable[[Batch], Batch],
        prefetch: Prefetch = IN_PROCESS,
        workers_as_one: bool = False,
        transfer: Transfer | None = None,
        in_order: bool = False,
    ) -> None:
        self.reader, self.epochs, self._rank, self.seed, self.place = reader, epochs, rank, seed, place
        self.workers_as_one = workers_as_one
        self.prefetch, self._transfer = prefetch, transfer
        self.contract = epochs.first
        self.workers = self.contract.mine(rank)
        ranks = sharers(self.contract.workers, self.contract.ranks, rank)
        # Autograd adds up the first micro-batches of a worker in order; later ones are added to the sum of others'.
        self._separate = in_order and rank != ranks.start
        self._plans: dict[tuple[int, int, str], Plan] = {}
        self._most: dict[int, int] = {}

    def follow(self, earlier: Sequence[EarlierEpochs]) -> None:
        """Record the batch sizes of the epochs before a resume with another batch size or data set.

        Steps and samples of those epochs are then counted with their own batch size. Called when a run is resumed,
        before the first step; no communication.

        Args:
            earlier: the epochs before the resume in spans of one batch size, in order. Each has ``end`` (number of the
                first epoch after the span, from 0), ``batch`` (samples in its global batches) and ``samples`` (samples
                in its data set; None if unknown). Spans that an earlier call recorded are replaced.
        """
        self.epochs = replace(self.epochs, earlier=tuple(earlier))
        self.reader.follow(self.epochs)

    @property
    def source(self) -> Any:
        """The training data: a ``Source`` (map-style, read by index) or a ``Stream`` (iterable)."""
        return self.reader.source

    def describe(self) -> dict[str, str]:
        """Return lines for the run's header about the batches that a rank reads: sizes, order and loader processes.

        Returns:
            The text of each line by its label, such as ``global batch``.
        """
        lines = {**self.epochs.describe(), **self.reader.describe()}
        if self.workers_as_one:
            lines["micro-batch"] = "all samples of a device at once, normalised over the global batch"
        return lines

    def read(self, epoch: int, start: int = 0) -> Iterator[RankBatch]:
        """Yield this rank's samples of each global batch of an epoch, on the device, sorted by logical worker.

        A logical worker is one of N fixed shares of the global batch, of which a data rank computes one or more. For a
        map-style data set without a sampler no collective is performed. With a sampler, or for an iterable data set,
        the iteration is collective over all ranks, which must iterate alike: they all-gather and compare digests of the
        sampler's order when the iteration begins, or of the iterable's samples in batches ``start`` + 0, 1, 2, 4, 8, ….
        Where an iterable data set differs between data ranks, every step all-gathers their sample counts.

        Args:
            epoch: from 0.
            start: first global batch to yield, counted in the epoch from 0.

        Yields:
            For each global batch a ``RankBatch``: this rank's samples (``batch``), the number of samples in the global
            batch over all ranks (``samples``), the data position (epoch, global batch) after it (``after``), and, if
            this rank has no samples, samples for a dummy micro-batch (``dummy``), whose gradient is ignored.

        Raises:
            MismatchError: ranks have read different samples, or their samplers have drawn different orders.
            DataError: a sample cannot be read or collated, or a sampler yields invalid indices.
            UsageError: an item of a map-style data set, which on several ranks is read twice in the first call,
                differs.
            LoaderError: a loader process ended, or gave no batch within the timeout.
        """
        parts = self.reader.read(epoch, start)
        return map(self._placed, parts) if self._transfer is None else self._transfer.parts(parts, self._placed)

    def _placed(self, part: RankBatch) -> RankBatch:
        dummy = None if part.dummy is None else self.place(part.dummy)
        return RankBatch(self.place(part.batch), part.samples, part.after, dummy)

    def micro_batches(
        self, batch: Batch, local_step: int, samples: int, over: str, scale: float = 1.0, noise: float = 0.0
    ) -> list[tuple[int, list[MicroBatch]]]:
        """Cut this rank's samples of a global batch into micro-batches, the parts that one forward and backward takes.

        The tensors of the micro-batches are views of those of ``batch``. No collective is performed.

        Args:
            batch: this rank's samples, sorted by logical worker (fixed share of the global batch).
            local_step: number of steps that this rank has taken before this one; it keys, with seed, worker and index,
                each micro-batch's random draws.
            samples: samples in the global batch. For a batch that the script made itself, of any size, a number that is
                equal on all ranks suffices, since the gradient synchronisation divides by the true count.
            over: ``step`` if a gradient is the mean over the global batch, ``worker`` if over the samples of one
                logical worker on this rank; decides the weight of each micro-batch's loss.
            scale: the loss scale of fp16, a factor on the weight of each micro-batch's loss.
            noise: standard deviation of the random weights, of mean 1, on the losses of samples; 0 for none.

        Returns:
            A list of pairs, one for each worker of this rank, to be run in this order: the index of the worker, and the
            list of the worker's micro-batches. A ``MicroBatch`` has samples (``batch``), their number (``samples``), a
            random ``key``, and ``weight``, the factor on each sample's loss in backward: ``scale`` / number of samples
            that ``over`` names. If that mean is over this micro-batch alone, ``whole`` is True and ``weight`` the
            factor ``scale`` on the micro-batch's mean loss. Where several ranks share a worker in reproducible mode,
            ranks other than the first return a pair (worker, [micro-batch]) for each micro-batch, because the gradients
            of these micro-batches are added in a fixed tree, one by one.

        Raises:
            DataError: ``batch`` holds no tensor or list whose first dimension is the sample.
            UsageError: ``batch`` must be cut, and holds objects other than tensors and lists of strings, or is a
                ``CollatedBatch`` of other micro-batches.
        """
        work = []
        contract, have = self.contract, length(batch)
        first, shared = self._first_micro(samples, have), contract.shared
        for worker, pieces in self._plan(samples, have, over):
            micro_batches = []
            alone = len(pieces) == 1 and (over == "worker" or contract.workers == 1)
            whole = self.is_single(samples) if shared else alone
            for micro, (span, weight) in enumerate(pieces, first):
                part = script_batch(batch) if span is None else slice_batch(batch, span.start, span.stop)
                count = have if span is None else len(span)
                key = mix(self.seed, local_step, worker, micro)
                factor = scale if whole else weight * scale
                last = micro == first + len(pieces) - 1
                micro_batches.append(MicroBatch(worker, micro, part, count, factor, key, last, noise, whole))
            if self._separate and len(micro_batches) > 1:
                work += [(worker, [micro_batch]) for micro_batch in micro_batches]
            else:
                work.append((worker, micro_batches))
        return work

    def _first_micro(self, samples: int, have: int) -> int:
        """Return the index, within its worker, of this rank's first micro-batch; ``have``: samples of this rank."""
        contract = self.contract
        if not contract.shared:
            return 0
        # In a batch of the caller's own a rank has at most as many micro-batches as in a full global batch.
        planned = have == len(contract.part(samples, self._rank))
        return contract.first_micro(samples if planned else contract.batch, self._rank)

    def is_single(self, samples: int) -> bool:
        """Return whether the whole global batch is one micro-batch, whose gradient needs no sum over micro-batches.

        True if there is a single logical worker (share of the global batch), whose share is not cut into several
        micro-batches. The result is equal on all ranks.

        Args:
            samples: samples in the global batch.
        """
        return self.contract.workers == 1 and len(self.contract.micro_batches(samples)) == 1

    def dummy_micro_batch(self, batch: Batch, local_step: int, worker: int, last: bool = True) -> MicroBatch:
        """Return a dummy micro-batch for a rank that has none left in a step while other ranks still compute.

        The model runs on ``batch``, so that the collectives of its forward and backward meet those of the other ranks;
        its loss has weight 0 in backward, and its sample count is 0.

        Args:
            batch: real samples on the rank's device, whose values do not matter.
            local_step: number of steps that this rank has taken before this one; it keys the random draws.
            worker: index of the logical worker (fixed share of the global batch), from 0.
            last: whether the dummy is the worker's last micro-batch in this step, after which its gradients are
                complete.

        Returns:
            A ``MicroBatch`` that holds ``batch`` itself, not a copy.
        """
        return MicroBatch(worker, 0, batch, 0, 0.0, mix(self.seed, local_step, worker, 0), last)

    def most_micro_batches(self, samples: int) -> int:
        """Return the number of micro-batches, in one step, of the data rank that has the most of them.

        A data rank computes one or more logical workers (fixed shares of the global batch), each cut into
        micro-batches, which are counted together. The number is 1 with synchronised batch norm, where all samples of a
        rank form one micro-batch.

        Args:
            samples: number of samples in the step's global batch.
        """
        most = self._most.get(samples)
        if most is None:
            most = self._most[samples] = 1 if self.workers_as_one else self.contract.most_micro_batches(samples)
        return most

    def _plan(self, samples: int, have: int, over: str) -> Plan:
        """Return each worker's micro-batches as ranges of this rank's batch; cached, because most steps are alike."""
        plan = self._plans.get((samples, have, over))
        if plan is None:
            plan = self._plans[samples, have, over] = self._make_plan(samples, have, over)
        return plan

    def _make_plan(self, samples: int, have: int, over: str) -> Plan:
        if self.workers_as_one:
            return [(self.workers[0], [(None, 1.0 / samples)] if have else [])]
        plan: Plan = []
        for worker, pieces in self.contract.spans(samples, self._rank, have):
            weight = 1.0 / (samples if over == "step" else max(sum(map(len, pieces)), 1))
            plan.append((worker, [(None if len(piece) == have else piece, weight) for piece in pieces]))
        return plan


@dataclass(frozen=True)
class HeldOut:
    """Held-out samples, divided into blocks that are evaluated as one batch each.

    The blocks do not depend on the number of ranks, which divide them among themselves.

    Attributes:
        source: map-style data set that holds the samples.
        blocks: indices in ``source`` of the samples of each block, int64 (samples,).
    """

    source: Source
    blocks: Sequence[NDArray[np.int64]]

    @property
    def samples(self) -> int:
        """Number of held-out samples in all blocks, each of which is evaluated as one batch."""
        return sum(map(len, self.blocks))

    @property
    def sizes(self) -> dict[int, int]:
        """Number of samples of each block of held-out samples, by the index of the block from 0.

        A block is a list of held-out samples that one rank reads and evaluates as one batch; the ranks divide the
        blocks among themselves. Blocks do not depend on the number of ranks, and so the loss sums of the blocks, added
        in order, do not either.
        """
        return dict(enumerate(map(len, self.blocks)))

    @property
    def rows(self) -> int:
        """Number of blocks of held-out samples; an evaluation's table of loss sums has one row for each."""
        return len(self.blocks)

    def shares(self, ranks: int) -> list[list[int]]:
        """Divide the blocks of held-out samples, which are evaluated as one batch each, over ``ranks`` data ranks.

        Args:
            ranks: number of data ranks.

        Returns:
            For each data rank, in order, a list of the indices of its blocks. The indices are consecutive, and the
            lengths of the lists differ by at most 1.
        """
        return [list(even_share(len(self.blocks), ranks, rank)) for rank in range(ranks)]


def evaluation(
    held_out: HeldOut,
    ranks: int,
    rank: int,
    place: Callable[[Batch], Batch],
    prefetch: Prefetch = IN_PROCESS,
    even: bool = False,
) -> Iterator[tuple[int, MicroBatch]]:
    """Yield the blocks of held-out samples that this data rank evaluates, each as one batch on the device.

    Blocks are divided over the data ranks, so that every sample is evaluated once. They do not depend on the number of
    ranks, and neither does the sum of their losses, added in order. No collective is performed: no samples are
    compared.

    Args:
        held_out: the held-out samples, divided into blocks.
        ranks: number of data ranks.
        rank: this data rank.
        place: moves a batch to the device, and returns it.
        prefetch: fetches the samples, in this process or in loader processes.
        even: give every rank equally many micro-batches, by dummy micro-batches at the end, so that all ranks perform
            equally many collectives in their forwards.

    Yields:
        (index of the block, its micro-batch), in order. A dummy micro-batch has the samples and the index of block 0,
        but ``samples`` is 0, so that the caller leaves its loss out; ``weight`` is 1 / number of held-out samples in
        all.

    Raises:
        DataError: a sample cannot be read or collated.
        LoaderError: a loader process ended, or gave no batch within the timeout.
    """
    blocks, total = held_out.blocks, held_out.samples
    mine = list(even_share(len(blocks), ranks, rank))
    turns = [*mine, *[0] * ((len(even_share(len(blocks), ranks, 0)) - len(mine)) if even else 0)]
    tasks = ((blocks[number], None) for number in turns)
    for turn, batch in enumerate(prefetch.batches(held_out.source, tasks)):
        samples = len(blocks[turns[turn]]) if turn < len(mine) else 0
        yield turns[turn], MicroBatch(0, 0, place(batch), samples, 1.0 / total, 0, True)


def evaluation_blocks(samples: int, largest: int) -> list[range]:
    """Divide held-out samples into blocks, each of which one rank evaluates as one batch.

    The blocks are the fewest of at most min(``largest``, max(16, ⌈samples / 32⌉)) samples, with sizes as even as
    possible: about 32 blocks, unless the set is small or ``largest`` demands more. The division does not depend on the
    number of ranks.

    Args:
        samples: number of held-out samples.
        largest: largest number of samples in a block.

    Returns:
        Each block as a range of sample numbers, in order.

    >>> len(evaluation_blocks(10_000, 512)), len(evaluation_blocks(20, 512))
    (32, 2)
    """
    return chunks(samples, min(largest, max(16, -(-samples // 32))))
