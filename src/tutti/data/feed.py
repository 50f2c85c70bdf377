"""From the global order to what each worker computes on: the one way of a batch through the data room."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tutti.data.contract import BatchContract
from tutti.data.order import permutation
from tutti.data.source import AugmentKey, Source
from tutti.errors import DataError, UsageError
from tutti.laws.keys import mix
from tutti.laws.shares import chunks, share
from tutti.types import Batch, Cell

Plan = list[tuple[int, list[tuple[range | None, float]]]]
"""For each worker its micro-batches: where they lie in the rank's batch (None: they are all of it), and weights."""


class Feed:
    """This data rank's part of every global batch.

    Args:
        source: all samples.
        contract: who gets which.
        rank: this data rank.
        seed: of the order and of all draws.
        place: moves a batch to the device, in the right precision and memory layout.
    """

    def __init__(
        self, source: Source, contract: BatchContract, rank: int, seed: int, place: Callable[[Batch], Batch]
    ) -> None:
        self.source, self.contract, self._seed, self.place = source, contract, seed, place
        self.workers = contract.mine(rank)
        self._plans: dict[tuple[int, int, str], Plan] = {}
        self._order: tuple[int, NDArray[np.int64]] = (-1, np.empty(0, dtype=np.int64))

    def batch(self, epoch: int, step: int) -> Batch:
        """This rank's samples of global batch ``step`` of ``epoch``, in worker order, on the device."""
        samples = self.contract.samples(step)
        start = step * self.contract.batch
        first = self.contract.worker(samples, self.workers[0]).start
        stop = self.contract.worker(samples, self.workers[-1]).stop
        indices = self._permutation(epoch)[start + first : start + stop]
        key = AugmentKey(self._seed, epoch)
        if not len(indices):
            # Few sources can make a batch of nothing; an empty part of a batch of one has its structure.
            return cut(self.place(self.source.fetch(self._permutation(epoch)[:1], key)), 0, 0)
        return self.place(self.source.fetch(indices, key))

    @lru_cache(maxsize=64)  # noqa: B019 - one feed lives as long as its run
    def global_samples(self, have: int, announced: int) -> int:
        """Samples of the global batch of which this rank has ``have``: the announced one's, if they fit together."""
        first = self.contract.worker(announced, self.workers[0]).start
        expected = self.contract.worker(announced, self.workers[-1]).stop - first
        return announced if have == expected else have * self.contract.ranks

    def cells(self, batch: Batch, clock: int, samples: int, over: str) -> list[tuple[int, list[Cell]]]:
        """A rank's batch cut into its workers' micro-batches.

        Args:
            batch: this rank's samples, in worker order.
            clock: steps taken before this one, which draws are keyed by.
            samples: samples of the global batch.
            over: ``step`` if a gradient is the mean over the global batch, ``worker`` if over the worker's share.
        """
        work = []
        for worker, pieces in self._plan(samples, length(batch), over):
            cells = []
            for micro, (span, weight) in enumerate(pieces):
                part = batch if span is None else cut(batch, span.start, span.stop)
                count = length(batch) if span is None else len(span)
                key = mix(self._seed, clock, worker, micro)
                cells.append(Cell(worker, micro, part, count, weight, key, micro == len(pieces) - 1))
            work.append((worker, cells))
        return work

    def _plan(self, samples: int, have: int, over: str) -> Plan:
        """Where each worker's micro-batches lie in this rank's batch; kept, because most steps are alike."""
        plan = self._plans.get((samples, have, over))
        if plan is None:
            plan = self._plans[samples, have, over] = self._make_plan(samples, have, over)
        return plan

    def _make_plan(self, samples: int, have: int, over: str) -> Plan:
        first = self.contract.worker(samples, self.workers[0]).start
        spans = [self.contract.worker(samples, w) for w in self.workers]
        if have != spans[-1].stop - first:
            # A batch of the caller's own size: its samples are shared out over this rank's workers.
            first = 0
            spans = [share(have, len(self.workers), i) for i in range(len(self.workers))]
        plan: Plan = []
        for worker, span in zip(self.workers, spans, strict=True):
            weight = 1.0 / (samples if over == "step" else max(len(span), 1))
            pieces: list[tuple[range | None, float]] = []
            for piece in self.contract.cells(len(span)):
                low, high = span.start - first + piece.start, span.start - first + piece.stop
                pieces.append((None if (low, high) == (0, have) else range(low, high), weight))
            plan.append((worker, pieces))
        return plan

    def _permutation(self, epoch: int) -> NDArray[np.int64]:
        if self._order[0] != epoch:
            self._order = (epoch, permutation(self._seed, epoch, self.contract.dataset))
        return self._order[1]


def evaluation(
    source: Source, ranks: int, rank: int, largest: int, place: Callable[[Batch], Batch]
) -> Iterator[tuple[int, Cell]]:
    """This data rank's held-out samples as numbered blocks: every sample once, without padding.

    The blocks do not depend on the number of ranks, so that their sums, added in order, do not either.
    """
    blocks = evaluation_blocks(len(source), largest)
    for number in share(len(blocks), ranks, rank):
        block = blocks[number]
        batch = place(source.fetch(np.arange(block.start, block.stop), None))
        yield number, Cell(0, 0, batch, len(block), 1.0 / len(source), 0, True)


def evaluation_blocks(samples: int, largest: int) -> list[range]:
    """Held-out samples in blocks of at most ``largest``, and enough of them to share out; whatever the ranks.

    >>> len(evaluation_blocks(10_000, 512)), len(evaluation_blocks(20, 512))
    (32, 2)
    """
    return chunks(samples, min(largest, max(16, -(-samples // 32))))


def length(batch: Batch) -> int:
    """Samples in a batch: the first dimension of its first tensor. Raises DataError where there is none."""
    if isinstance(batch, tuple | list) and batch and isinstance(batch[0], Tensor) and batch[0].dim():
        return batch[0].shape[0]
    for tensor in _leaves(batch):
        if tensor.dim() == 0:
            break
        return tensor.shape[0]
    raise DataError("a batch has no tensor whose first dimension is the sample", remedy="return tensors, or collate")


def cut(batch: Batch, low: int, high: int) -> Batch:
    """Samples ``low`` … ``high`` of a batch, as views."""
    return map_tensors(batch, lambda tensor: tensor[low:high])


def map_tensors(batch: Batch, function: Callable[[Tensor], Any]) -> Batch:
    """A batch of the same structure (tensor, tuple, list or dict) with ``function`` of every tensor."""
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, dict):
        return {key: map_tensors(value, function) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_tensors(value, function) for value in batch))
    if isinstance(batch, tuple | list):
        return type(batch)(map_tensors(value, function) for value in batch)
    raise UsageError(f"a batch holds a {type(batch).__name__}", remedy="tensors, tuples, lists and dicts of them work")


def placer(device: torch.device, dtype: torch.dtype, channels_last: bool) -> Callable[[Batch], Batch]:
    """A function that moves a batch to ``device``, its floating tensors to ``dtype``, its images to channels-last."""

    def place(tensor: Tensor) -> Tensor:
        wanted = dtype if tensor.is_floating_point() else tensor.dtype
        moved = tensor.to(device, wanted, non_blocking=True)
        return moved.contiguous(memory_format=torch.channels_last) if channels_last and moved.dim() == 4 else moved

    return lambda batch: map_tensors(batch, place)


def _leaves(batch: Batch) -> Sequence[Tensor]:
    if isinstance(batch, Tensor):
        return (batch,)
    values = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, tuple | list) else ()
    return [leaf for value in values for leaf in _leaves(value)]
