"""A sampler that knows which samples of an epoch are done, and gives the ranks the remaining ones."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Any

import torch
from torch.utils.data import Sampler

from tutti.horovod.torch.mpi_ops import rank, size


class ElasticSampler(Sampler[int]):
    """Gives each rank its part of the samples that are not done yet, in an order drawn from ``seed + epoch``.

    The script records what it has processed, and gives the sampler to ``TorchState``, whose ``commit`` and ``sync`` put
    the ranks' records together; ``sync`` parts the rest anew. Every sample is given once an epoch; where the samples
    are not a multiple of the ranks, up to ``size() - 1`` are given twice at the end of a partition, so that all ranks
    have equally many.

    Args:
        dataset: has a length.
        shuffle: whether to shuffle.
        seed: equal on all ranks.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self.epoch = 0
        # In the order in which they were recorded; a dict is an ordered set.
        self._processed: dict[int, None] = {}
        self._unshared: list[int] = []
        self.reset()

    @property
    def processed_indices(self) -> set[int]:
        """Samples of this epoch that are done: this rank's, and up to the last commit or ``sync`` all ranks'."""
        return set(self._processed)

    @property
    def processed_num(self) -> int:
        """Number of samples of this epoch that are done."""
        return len(self._processed)

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch with no sample done. The epoch that is under way continues: nothing changes."""
        if epoch == self.epoch:
            return
        self.epoch = epoch
        self._processed, self._unshared = {}, []
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Record batch ``batch_idx`` of this rank, counted since the last reset or ``set_epoch``, as done."""
        self.record_indices(self.get_indices(batch_idx, batch_size))

    def record_indices(self, indices: Iterable[int]) -> None:
        """Record samples as done."""
        new = [int(index) for index in indices]
        self._unshared += new
        self._processed.update(dict.fromkeys(new))

    def unshared(self) -> list[int]:
        """Return what was recorded since the ranks' records were last put together."""
        return self._unshared

    def share(self, indices: Iterable[int]) -> None:
        """Take over the records of all ranks."""
        self._processed.update(dict.fromkeys(indices))
        self._unshared = []

    def get_indices(self, batch_idx: int, batch_size: int) -> list[int]:
        """Return the samples of a batch of this rank."""
        return self.indices[batch_idx * batch_size : (batch_idx + 1) * batch_size]

    def reset(self) -> None:
        """Part the samples that are not done over the present ranks."""
        self.num_replicas, self.rank = size(), rank()
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            order = torch.randperm(len(self.dataset), generator=generator).tolist()
        else:
            order = list(range(len(self.dataset)))
        self.remaining_indices = [index for index in order if index not in self._processed]
        self.num_samples = math.ceil(len(self.remaining_indices) / self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas
        padded = itertools.islice(itertools.cycle(self.remaining_indices), self.total_size)
        self.indices = list(padded)[self.rank :: self.num_replicas]

    def snapshot(self) -> tuple[int, dict[int, None]]:
        """Return the epoch and what is done, as a copy."""
        return self.epoch, self._processed.copy()

    def return_to(self, snapshot: tuple[int, dict[int, None]]) -> None:
        """Set what is done to a snapshot; the partition stays, unless the epoch differs, until ``reset``."""
        epoch, processed = snapshot
        changed, self.epoch, self._processed = epoch != self.epoch, epoch, processed.copy()
        self._unshared = []
        if changed:
            self.reset()

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch and the samples that are done."""
        return {"epoch": self.epoch, "processed_num": self.processed_num, "processed_indices": list(self._processed)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over ``state_dict`` and part the rest anew.

        Raises:
            ValueError: the state has no ``processed_indices``.
        """
        if "processed_indices" not in state_dict:
            raise ValueError(f"the state of a sampler needs processed_indices; it has {', '.join(state_dict)}")
        self.epoch = state_dict["epoch"]
        self._processed = dict.fromkeys(int(index) for index in state_dict["processed_indices"])
        self._unshared = []
        self.reset()

    def __iter__(self) -> Iterator[int]:
        return iter(list(self.indices))

    def __len__(self) -> int:
        return self.num_samples
