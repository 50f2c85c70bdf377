"""How samples become global batches: from the arguments of ``tutti.prepare``, or from a PyTorch ``DataLoader``."""

from __future__ import annotations

from collections import UserList
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from tutti.data.order import SampledOrder, SampleOrder, SequentialOrder, ShuffledOrder
from tutti.data.source import Source
from tutti.errors import DataError, UsageError, counted

LONGEST_EPOCH = 10**9
"""Most samples that a sampler may draw in an epoch: 8 GB of numbers in each process."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """A data set with its batching options: batch size, order of samples, collate function and loader processes.

    Attributes:
        dataset: the data set, map-style or iterable.
        batch_size: number of samples in a global batch; None to find it from ``sampler``.
        collate: the script's function from a list of samples to a batch; None for the default collation.
        shuffle: whether every epoch has another order; None for the default of the kind of data.
        drop_last: whether an epoch ends before a batch that would be smaller than the others.
        sampler: a PyTorch sampler, or with ``whole`` a batch sampler, in place of ``shuffle``; None for none.
        generator: ``generator`` of the ``DataLoader``; None for none.
        whole: whether each list that ``sampler`` yields is one global batch.
        processes: number of loader processes of each rank.
        begin: called in each loader process before it reads, with the number of the process from 0, as a
            ``DataLoader``'s ``worker_init_fn``; None for no call.
        timeout: seconds to wait for a batch of a loader process; None for the default.
        persistent: whether loader processes go on with the next epoch.
    """

    dataset: Any
    batch_size: int | None
    collate: Callable[[list[Any]], Any] | None = None
    shuffle: bool | None = None
    drop_last: bool = False
    sampler: Any = None
    generator: torch.Generator | None = None
    whole: bool = False
    processes: int = 0
    begin: Callable[[int], None] | None = None
    timeout: float | None = None
    persistent: bool = False

    def sized(self, seed: int) -> Sampling:
        """Return this data set with its batching options, with the batch size filled in from a batch sampler.

        A batch sampler yields lists of sample indices, each of which is one global batch. If the options name a batch
        sampler and no ``batch_size``, the sampler is iterated for epoch 0, and ``batch_size`` becomes the length of its
        longest list.

        Args:
            seed: seed of the run, for the sampler's draws.

        Returns:
            A copy with ``batch_size`` set; in all other cases this object itself.

        Raises:
            UsageError: the batch sampler cannot be copied.
            DataError: the sampler yields no list, or an element that is no list of indices in the data set.
        """
        if not self.whole or self.batch_size is not None:
            return self
        first = SampledOrder(self.sampler, self.generator, self.dataset, seed, whole=True).batches(0, 1)
        return replace(self, batch_size=max(map(len, first)))

    def in_an_epoch(self, count: int) -> int | None:
        """Return the number of samples that an epoch uses: the length of the sampler, or ``count`` without a sampler.

        With the option ``drop_last`` the number is rounded down to whole global batches.

        Args:
            count: number of samples in the data set.

        Returns:
            The number of samples; None for a batch sampler, which decides on the sizes of its batches only while it is
            iterated.

        Raises:
            DataError: ``drop_last`` leaves no samples.
            UsageError: the sampler's length is above 10⁹ samples, of which each rank would hold the order in memory.
        """
        if self.whole:
            return None
        total = count if self.sampler is None else len(self.sampler)
        if total > LONGEST_EPOCH and self.sampler is not None:
            raise UsageError(
                f"the sampler {type(self.sampler).__name__} draws {total:,} samples an epoch, and at most "
                f"{LONGEST_EPOCH:,} are supported",
                why=f"each rank holds the order of an epoch in memory, {8 * total / 1e9:,.0f} GB here",
                remedy="give it a smaller num_samples, such as that of the steps you train, and loop over epochs",
            )
        batch = self.batch_size or 1
        used = total // batch * batch if self.drop_last else total
        if total and not used:
            raise DataError(
                f"drop_last leaves none of {counted(total, 'sample')}, fewer than a batch of {batch}",
                remedy="leave drop_last out, or take a smaller batch",
            )
        return used

    def order(self, seed: int, count: int) -> SampleOrder:
        """Return the object that gives the order in which each epoch draws the samples of a map-style data set.

        If the attribute ``sampler`` is set, this PyTorch sampler gives the order. Otherwise the samples are shuffled
        anew in each epoch, or sequential if ``shuffle`` is False.

        Args:
            seed: seed of the run, for the shuffles and for the draws of a sampler; sequential order ignores it.
            count: number of samples in the data set.

        Returns:
            A ``SampleOrder``. The method ``batches(epoch, batch)``, with ``epoch`` from 0 and ``batch`` the number of
            samples in a global batch, returns a sequence with one int64 array (samples,) for each global batch of the
            epoch: the indices of the batch's samples in the data set.

        Raises:
            UsageError: the sampler cannot be copied, or its length is above 10⁹ samples.
            DataError: the option ``drop_last`` leaves no samples.
        """
        if self.whole:
            return SampledOrder(self.sampler, self.generator, self.dataset, seed, whole=True, largest=self.batch_size)
        used = self.in_an_epoch(count) or 0
        if self.sampler is not None:
            return SampledOrder(self.sampler, self.generator, self.dataset, seed, len(self.sampler), used)
        return SequentialOrder(used) if self.shuffle is False else ShuffledOrder(seed, count, used)


def given_sampling(
    dataset: Any,
    batch_size: int | None,
    collate: Callable[[list[Any]], Any] | None,
    shuffle: bool | None,
    drop_last: bool,
    data_workers: int | None,
) -> Sampling:
    """Combine a ``DataLoader``, or a data set, with arguments of ``tutti.prepare`` into one description of its batches.

    Neither the data set nor a loader is read.

    Args:
        dataset: the data set, or a ``DataLoader``.
        batch_size: number of samples in a global batch; None if not given.
        collate: function from a list of samples to a batch; None for the default collation.
        shuffle: whether every epoch has another order; None for the default: a map-style data set is shuffled, an
            iterable has the order of its own samples.
        drop_last: whether an epoch ends before a batch that would be smaller than the others.
        data_workers: number of loader processes of each rank; None for none, or for the ``DataLoader``'s number. They
            stay for all epochs if there is no ``DataLoader``.

    Returns:
        A ``Sampling``: data set, size of the global batch, collate function, sampler and number of loader processes.
        The object has the values of a ``DataLoader`` where one is given, else those of the arguments. If the loader has
        a batch sampler of the script's own, the argument ``batch_size`` is taken, as the size of its largest batch.

    Raises:
        UsageError: with a ``DataLoader``, ``collate``, ``shuffle`` or ``drop_last`` is given, ``batch_size`` or
            ``data_workers`` differs from the loader's, or the loader cannot be reproduced on several ranks: it has an
            ``__iter__`` of its own, makes no batches, has a ``tutti.data.Source`` as its data set, divides its samples
            over ranks as a ``DistributedSampler`` does, or has a sampler without a length.
    """
    if not isinstance(dataset, DataLoader):
        return Sampling(
            dataset=dataset,
            batch_size=batch_size,
            collate=None if collate is default_collate else collate,
            shuffle=shuffle,
            drop_last=drop_last,
            processes=data_workers or 0,
            persistent=bool(data_workers),
        )
    found = of_loader(dataset)
    if found.whole and batch_size is not None:
        found = replace(found, batch_size=batch_size)
    for name, given, own in (
        ("batch_size", batch_size, found.batch_size),
        ("collate", collate, None),
        ("shuffle", shuffle, None),
        ("drop_last", drop_last or None, None),
        ("data_workers", data_workers, found.processes),
    ):
        if given is not None and given != own:
            raise UsageError(
                f"{name} is given beside a DataLoader",
                why=f"the loader has its own{'' if own is None else f', {own}'}",
                remedy="leave it out, or give the data set in place of the loader",
            )
    return found


def of_loader(loader: DataLoader[Any]) -> Sampling:
    """Return the data set, sampler, batch size, ``collate_fn`` and worker settings of a PyTorch ``DataLoader``.

    The loader's ``batch_size`` becomes the size of the global batch, over all ranks. The loader is not iterated.

    Args:
        loader: the loader that the script has made for one device.

    Returns:
        A ``Sampling``, which holds these values; its ``batch_size`` is None with a batch sampler of the script's own.

    Raises:
        UsageError: the loader has an ``__iter__`` of its own, makes no batches (``batch_size=None``), has a
            ``tutti.data.Source`` as its data set, divides its samples over ranks as a ``DistributedSampler`` does, or
            has a sampler without a length.
    """
    stream = isinstance(loader.dataset, IterableDataset)
    found = Sampling(
        dataset=_samples(loader.dataset),
        batch_size=loader.batch_size,
        collate=None if loader.collate_fn is default_collate else loader.collate_fn,
        drop_last=loader.drop_last,
        processes=loader.num_workers,
        begin=loader.worker_init_fn,
        timeout=loader.timeout or None,
        persistent=loader.persistent_workers,
        generator=loader.generator,
    )
    if type(loader).__iter__ is not DataLoader.__iter__:
        raise UsageError(
            f"the {type(loader).__name__} has an __iter__ of its own",
            why="it may yield other batches than its data set and sampler say",
            remedy="give a torch.utils.data.DataLoader (as it was before accelerator.prepare or another library took"
            " it), or the data set with batch_size and collate",
        )
    if loader.batch_sampler is None:
        raise UsageError(
            "a DataLoader with batch_size=None makes no batches",
            why="its data set or its sampler makes them, so that they cannot be divided over devices",
            remedy="let the data set yield samples, and give batch_size; a sampler of batches as batch_sampler=…",
        )
    if stream:
        return found
    if isinstance(loader.dataset, Source):
        raise UsageError(
            "tutti.prepare was given a DataLoader of a tutti.data.Source",
            why="a source makes whole batches",
            remedy="give the source itself",
        )
    sampler, whole = loader.sampler, False
    if loader.batch_size is None:
        sampler, whole = loader.batch_sampler, True
        if type(sampler) is BatchSampler:
            found = replace(found, batch_size=sampler.batch_size, drop_last=sampler.drop_last)
            sampler, whole = sampler.sampler, False
    _check_undivided(sampler)
    if whole:
        _check_undivided(getattr(sampler, "sampler", None))
        return replace(found, sampler=sampler, whole=True)
    if type(sampler) is SequentialSampler and len(sampler) == len(loader.dataset):  # type: ignore[arg-type]
        return replace(found, shuffle=False)
    own = isinstance(sampler, RandomSampler) and sampler.generator is None and len(sampler) == len(loader.dataset)  # type: ignore[arg-type]
    if own and type(sampler) is RandomSampler and not sampler.replacement:
        return replace(found, shuffle=True)
    if not hasattr(sampler, "__len__"):
        raise UsageError(
            f"the sampler {type(sampler).__name__} has no length",
            why="an epoch of a map-style data set has a known number of samples",
            remedy="give it __len__, or make it a batch_sampler, whose epoch ends with its batches",
        )
    return replace(found, sampler=sampler)


def _samples(data: Any) -> Any:
    """Return a loader's data set; a list of tensors, which are its samples, not as a list, which means columns."""
    tensors = isinstance(data, tuple | list) and all(isinstance(each, Tensor) for each in data)
    return UserList(data) if tensors else data


def _check_undivided(sampler: Any) -> None:
    """Raise UsageError for a sampler that divides the samples over ranks."""
    if isinstance(sampler, DistributedSampler) or (hasattr(sampler, "num_replicas") and hasattr(sampler, "rank")):
        raise UsageError(
            f"tutti.prepare was given a DataLoader with a {type(sampler).__name__}",
            why="it divides the samples over ranks, which tutti does itself, and repeats some to make the shares even",
            remedy="leave the sampler out and give shuffle=True, and the global batch as batch_size",
        )
