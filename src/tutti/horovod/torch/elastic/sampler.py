"""A sampler that knows which samples of an epoch are done, and gives the ranks the remaining ones."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Any

import torch
from torch.utils.data import Sampler

from tutti.horovod.torch.job import rank, size


class ElasticSampler(Sampler[int]):
    """Sampler of an elastic job: divides the samples of an epoch that are not processed yet over the ranks.

    As Horovod's ``ElasticSampler``. The script records which samples it has processed, and gives the sampler to
    ``TorchState``, whose ``commit``, ``check_host_updates`` and ``sync`` merge the records of all ranks; ``sync`` then
    divides the remaining samples anew. Every sample is given once in an epoch. If the remaining samples are not a
    multiple of the ranks, up to ``size() - 1`` samples are given twice at the end of a division, so that all ranks have
    equally many.

    Args:
        dataset: any object with a length; only its length is used.
        shuffle: whether to shuffle the samples, by ``torch.randperm`` seeded with ``seed + epoch``.
        seed: seed of the order; equal on all ranks.

    Attributes:
        indices: dataset indices of this rank's samples since the last division, in the order in which they are given.
        num_samples: number of ``indices``, equal on all ranks.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self.epoch = 0
        # In the order in which they were recorded; a dict is an ordered set.
        self._processed: dict[int, None] = {}
        self._unshared: list[int] = []
        self._batch_size = self.num_samples = 0
        self.indices: list[int] = []
        self.reset()

    @property
    def processed_indices(self) -> set[int]:
        """Dataset indices of the samples of this epoch that have been processed, as a new set.

        They are the samples that this rank has recorded, and those that other ranks had recorded when the ranks last
        exchanged their records: at a ``commit``, ``check_host_updates`` or ``sync`` of the ``TorchState``.
        """
        return set(self._processed)

    @property
    def processed_num(self) -> int:
        """Number of the epoch's samples that have been processed, as far as this rank knows.

        It is the number of entries of ``processed_indices``: samples that this rank has recorded, and those that other
        ranks had recorded when the ranks last exchanged their records (``commit``, ``check_host_updates``, ``sync``).
        """
        return len(self._processed)

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch: forget the processed samples, and divide all samples over the ranks.

        To be called on every rank at the start of an epoch; performs no communication. Does nothing if this epoch is
        the present one, so that a restored epoch continues.

        Args:
            epoch: number of the epoch, which seeds the order of the samples.

        Raises:
            ValueError: ``hvd.init`` was not called.
        """
        if epoch == self.epoch:
            return
        self.epoch = epoch
        self._processed, self._unshared = {}, []
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Record the samples of a batch of this rank as processed, on this rank only.

        Other ranks learn of the samples at the next ``commit``, ``check_host_updates`` or ``sync`` of the
        ``TorchState`` with this sampler.

        Args:
            batch_idx: number of the batch on this rank, from 0 since the last reset or ``set_epoch``.
            batch_size: number of samples of a batch, equal in all calls; that of the last batch may be smaller.

        Raises:
            ValueError: this rank has no such batch since the last reset, or ``batch_size`` differs from that of the
                first recorded batch; only the rank's last batch may be smaller.
        """
        self._batch_size = self._batch_size or batch_size
        start = batch_idx * self._batch_size
        last = batch_size < self._batch_size and start + batch_size == self.num_samples
        if start >= self.num_samples or not (batch_size == self._batch_size or last):
            raise ValueError(
                f"record_batch({batch_idx}, {batch_size}) on rank {self.rank}: there is no such batch among the "
                f"{self.num_samples} samples since the last reset, of which the first batch had {self._batch_size}. "
                "Count batches from 0 after each reset, or give the samples to record_indices"
            )
        self.record_indices(self.indices[start : start + batch_size])

    def record_indices(self, indices: Iterable[int]) -> None:
        """Record samples as processed, on this rank only.

        Other ranks learn of the samples at the next ``commit``, ``check_host_updates`` or ``sync`` of the
        ``TorchState`` with this sampler.

        Args:
            indices: indices into the dataset.
        """
        new = [int(index) for index in indices]
        self._unshared += new
        self._processed.update(dict.fromkeys(new))

    def unshared(self) -> list[int]:
        """Return the dataset indices of the samples that this rank has processed, but other ranks do not know of yet.

        These are the samples recorded since the ranks last exchanged their records; a sample that was recorded twice
        occurs twice. The list is the sampler's own, to which later records are appended.
        """
        return self._unshared

    def share(self, indices: Iterable[int]) -> None:
        """Add samples that any rank has processed to this rank's records; no communication.

        Called by ``TorchState`` after the ranks have exchanged their records. All samples of this rank count as known
        to the other ranks from then on: ``unshared`` is empty.

        Args:
            indices: dataset indices that any rank has processed.
        """
        self._processed.update(dict.fromkeys(indices))
        self._unshared = []

    def get_indices(self, batch_idx: int, batch_size: int) -> list[int]:
        """Return the dataset indices of a batch of this rank, as a list.

        Args:
            batch_idx: number of the batch on this rank, from 0 since the last reset or ``set_epoch``.
            batch_size: number of samples of a batch; the last batch may be smaller, and batches behind it are empty.
        """
        return self.indices[batch_idx * batch_size : (batch_idx + 1) * batch_size]

    def reset(self) -> None:
        """Divide the samples of this epoch that have not been processed evenly over the present ranks of the job.

        If the number of ranks does not divide that of the samples, the first samples are given out again, so that all
        ranks get equally many.

        Performs no communication; all ranks must have the same records of processed samples. Sets the attributes
        ``indices`` (list of this rank's samples), ``num_samples`` (their number), ``num_replicas`` (number of ranks)
        and ``rank``. Batches are numbered from 0 again.

        Raises:
            ValueError: ``hvd.init`` was not called.
        """
        self.num_replicas, self.rank = size(), rank()
        self._batch_size = 0
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
        """Return the pair (epoch, processed samples) as a copy in memory, for ``return_to``.

        The processed samples are a dict with dataset indices as keys, in the order in which they were recorded, and
        None as values.
        """
        return self.epoch, self._processed.copy()

    def return_to(self, snapshot: tuple[int, dict[int, None]]) -> None:
        """Set the epoch and the processed samples of this rank back to an earlier state; no communication.

        All samples of that state count as known to the other ranks: ``unshared`` is empty. The samples are divided anew
        over the ranks only if the epoch differs; otherwise their division stays until ``reset``.

        Args:
            snapshot: pair (epoch, processed samples) that the method ``snapshot`` has returned; copied.

        Raises:
            ValueError: the epoch differs, and ``hvd.init`` was not called.
        """
        epoch, processed = snapshot
        changed, self.epoch, self._processed = epoch != self.epoch, epoch, processed.copy()
        self._unshared = []
        if changed:
            self.reset()

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch and the processed samples, for ``load_state_dict``.

        Keys: ``epoch``, ``processed_num`` (number of samples) and ``processed_indices`` (list of dataset indices).
        """
        return {"epoch": self.epoch, "processed_num": self.processed_num, "processed_indices": list(self._processed)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Set the epoch and the processed samples, and divide the remaining samples anew over the ranks.

        Performs no communication. All processed samples count as known to the other ranks: ``unshared`` is empty.

        Args:
            state_dict: dict with ``epoch`` and ``processed_indices``, as the method ``state_dict`` returns it; equal on
                all ranks.

        Raises:
            ValueError: the state has no ``processed_indices``, or ``hvd.init`` was not called.
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
