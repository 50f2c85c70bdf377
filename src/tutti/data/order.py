"""The global order of samples: a function of (seed, epoch) alone, for any number of devices."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tutti.data.digest import digest
from tutti.data.global_generators import own_generators, seed_generators
from tutti.data.keyed_random import hash64
from tutti.errors import DataError, UsageError, counted

_DEPTH = 3
"""Depth of objects in a sampler whose attributes are settings."""
# A sampler's draws must not repeat those of sample 0.
_SAMPLER = int.from_bytes(b"sampler", "big")


class SampleOrder(Protocol):
    """Decides which samples are in each global batch of an epoch, the same on every rank (protocol)."""

    def batches(self, epoch: int, batch: int) -> Sequence[NDArray[np.int64]]:
        """Return the global batches of an epoch, in order: for each the indices of its samples in the data set.

        Called on every rank whenever an epoch is read; no communication. The order is a function of seed and epoch, the
        same on every rank.

        Args:
            epoch: from 0.
            batch: number of samples in a global batch; the last global batch may have fewer.

        Returns:
            A sequence of one int64 array (samples,) for each global batch.
        """

    def repeats(self, epoch: int, step: int) -> NDArray[np.int64] | None:
        """Return how often each sample of a global batch was drawn earlier in the epoch, by a draw with replacement.

        Called for each global batch after ``batches``: the numbers are part of the keys of random augmentation, so that
        a sample that is drawn twice can be augmented in two ways.

        Args:
            epoch: from 0; must be that of the last call of ``batches``.
            step: number of the global batch in the epoch, from 0.

        Returns:
            int64 (samples,), in the order of the batch; None if no sample of the epoch is drawn twice.
        """

    def digest(self, epoch: int) -> str:
        """Return a hexadecimal digest of the order of samples in an epoch, to compare over ranks and with a saved run.

        Called after ``batches`` when an epoch is read, and when a checkpoint is saved or loaded; no communication.

        Args:
            epoch: from 0.

        Returns:
            The digest; an empty string if the order follows from settings that the run compares anyway, such as the
            seed.
        """


@dataclass(frozen=True)
class ShuffledOrder:
    """Order of samples that shuffles the data set in each epoch by a hash of (seed, epoch, sample).

    Attributes:
        seed: seed of the run.
        samples: number of samples in the data set.
        used: number of samples at the start of each epoch's order that are used; fewer than ``samples`` with
            ``drop_last``.
    """

    seed: int
    samples: int
    used: int

    def batches(self, epoch: int, batch: int) -> Sequence[NDArray[np.int64]]:
        """Return the global batches of an epoch, each sample once, shuffled by (seed, epoch); the same on every rank.

        Args:
            epoch: from 0.
            batch: number of samples in a global batch; the last global batch may have fewer.

        Returns:
            For each global batch an int64 array (samples,) of indices in the data set.
        """
        return cut(permutation(self.seed, epoch, self.samples)[: self.used], batch)

    def repeats(self, epoch: int, step: int) -> None:
        """Return None, for any global batch: a shuffled order draws no sample twice in an epoch.

        Args:
            epoch: from 0; has no effect.
            step: number of the global batch in the epoch; has no effect.
        """

    def digest(self, epoch: int) -> str:
        """Return an empty string, as a shuffled order need not be compared between ranks or with a saved run.

        The order follows from seed and number of samples, which are compared anyway.

        Args:
            epoch: from 0; has no effect.
        """
        return ""


@dataclass(frozen=True)
class SequentialOrder:
    """Order of samples without shuffling: 0, 1, 2, … in every epoch.

    Attributes:
        used: number of samples in an epoch.
    """

    used: int

    def batches(self, epoch: int, batch: int) -> Sequence[NDArray[np.int64]]:
        """Return the global batches of an epoch, in the data set's own order.

        Args:
            epoch: from 0; has no effect.
            batch: number of samples in a global batch; the last global batch may have fewer.

        Returns:
            For each global batch an int64 array (samples,) of indices in the data set.
        """
        return cut(np.arange(self.used), batch)

    def repeats(self, epoch: int, step: int) -> None:
        """Return None, for any global batch: a sequential order draws no sample twice in an epoch.

        Args:
            epoch: from 0; has no effect.
            step: number of the global batch in the epoch; has no effect.
        """

    def digest(self, epoch: int) -> str:
        """Return an empty string, as a sequential order need not be compared between ranks or with a saved run.

        The order is 0, 1, 2, … in every epoch.

        Args:
            epoch: from 0; has no effect.
        """
        return ""


class SampledOrder:
    """The order of a PyTorch sampler, iterated once for each epoch as by a ``DataLoader``.

    Only deep copies of the sampler and of ``generator`` are used; the caller's objects do not advance. A sampler with a
    generator of its own draws from it epoch by epoch, as in PyTorch: to reach an epoch, a copy is iterated through all
    epochs before it. Before each epoch ``set_epoch`` of the sampler is called, if it has one. Draws from the global
    generators are keyed by (seed, epoch).

    Args:
        sampler: an iterable that yields indices of samples or, with ``whole``, lists of them (a batch sampler).
        generator: the ``DataLoader``'s ``generator``, from which a ``DataLoader`` draws a seed in each epoch before the
            first sample, and so does this class; None for none.
        data: the data set, with a length; a copy of the sampler refers to the same data set.
        seed: seed of the run.
        samples: number of samples that the sampler must yield in each epoch; None if any number but 0 is valid.
        used: number of samples at the start of each epoch that are used; None for all.
        whole: whether each list that the sampler yields is one global batch.
        largest: largest number of samples that a global batch of the sampler may have; None for any.

    Raises:
        UsageError: the sampler cannot be copied.
    """

    def __init__(
        self,
        sampler: Any,
        generator: torch.Generator | None,
        data: Any,
        seed: int,
        samples: int | None = None,
        used: int | None = None,
        whole: bool = False,
        largest: int | None = None,
    ) -> None:
        self._name, self._seed, self._samples, self._used = type(sampler).__name__, seed, samples, used
        self._whole, self._largest, self._data, self._count = whole, largest, data, len(data)
        self._given = sampler, generator
        self._first = self._copied(self._given)
        self._settings = _settings(self._first, data)
        self._now, self._next = self._first, 0
        self._epoch: int | None = None
        self._drawn, self._bounds = np.empty(0, dtype=np.int64), list[int]()
        self._before: NDArray[np.int64] | None = None

    def _copied(self, state: tuple[Any, torch.Generator | None]) -> tuple[Any, torch.Generator | None]:
        try:
            return copy.deepcopy(state, {id(self._data): self._data})
        except Exception as error:
            raise UsageError(
                f"the sampler {self._name} cannot be copied",
                why=f"a resumed run repeats its draws from the first epoch on ({type(error).__name__}: {error})",
                remedy="let it hold plain values and a torch.Generator, or leave it out and give shuffle",
            ) from error

    def batches(self, epoch: int, batch: int) -> Sequence[NDArray[np.int64]]:
        """Draw an epoch's samples from a PyTorch sampler, and return its global batches.

        Draws for the same epoch are equal in every call: the sampler is iterated for all epochs before this one, too,
        unless the previous call has done so. No collective is performed: ranks are not compared.

        Args:
            epoch: from 0.
            batch: number of samples in a global batch; the last global batch may have fewer. Has no effect for a batch
                sampler, whose batches are the global ones.

        Returns:
            For each global batch an int64 array (samples,) of indices in the data set.

        Raises:
            DataError: the sampler yields no index, an element that is no index in the data set, or another number of
                indices than the constructor's ``samples``; or a batch sampler yields a batch larger than ``largest``.
            UsageError: the sampler cannot be copied, or the script has changed a setting of it.
        """
        self._draw(epoch)
        if self._whole:
            return np.split(self._drawn, self._bounds[1:-1])
        found = cut(self._drawn, batch)
        self._bounds = [0, *np.cumsum([len(each) for each in found]).tolist()]
        return found

    def repeats(self, epoch: int, step: int) -> NDArray[np.int64] | None:
        """Return how often each sample of a global batch was drawn earlier in the epoch, by a sampler with replacement.

        Args:
            epoch: has no effect: the epoch is that of the last call of ``batches``.
            step: number of the global batch in the epoch, from 0.

        Returns:
            int64 (samples,), in the order of the batch; None if no sample of the epoch is drawn twice.
        """
        return None if self._before is None else self._before[self._bounds[step] : self._bounds[step + 1]]

    def digest(self, epoch: int) -> str:
        """Return a 64-bit digest, in hexadecimal, of the order in which the sampler draws an epoch's samples.

        The digest serves to compare ranks, and a resumed run with the saved one; for a batch sampler the digest
        includes the sizes of the batches.

        Args:
            epoch: from 0; the sampler draws this epoch anew, unless the last draw was for the same epoch.

        Raises:
            DataError: the sampler yields no index, an element that is no index in the data set, or another number of
                indices than the constructor's ``samples``; or a batch sampler yields a batch larger than ``largest``.
            UsageError: the sampler cannot be copied.
        """
        self._draw(epoch)
        state = hashlib.blake2b(self._drawn.tobytes(), digest_size=8)
        state.update(repr(self._bounds if self._whole else ()).encode())
        return state.hexdigest()

    def _draw(self, epoch: int) -> None:
        if self._epoch == epoch:
            return
        if epoch < self._next or self._now is self._first:
            self._now, self._next = self._copied(self._first), 0
        while self._next <= epoch:
            drawn = self._iterate(*self._now, self._next)
            self._next += 1
        # None until the draw has been checked: another call is to raise again.
        self._epoch = None
        self._check_unchanged()
        if self._whole:
            self._bounds = [0, *np.cumsum([len(each) for each in drawn]).tolist()]
            drawn = [number for each in drawn for number in each]
        self._drawn = self._checked(drawn, epoch)
        self._before = _repeats(self._drawn)
        self._epoch = epoch

    def _check_unchanged(self) -> None:
        """Raise UsageError if the script has changed a setting of its sampler, which the copy that draws does not have.

        Attributes that the copy has changed, as by ``set_epoch`` or with each epoch, are no settings.
        """
        if (given := _settings(self._given, self._data)) == self._settings:
            return
        own = _settings(self._now, self._data)
        changed = [name for name in given if own.get(name) == self._settings.get(name) != given[name]]
        if changed:
            raise UsageError(
                f"the script has changed {changed[0]} of the sampler {self._name} since tutti.prepare",
                why="a copy of the sampler draws every epoch, so that a resumed run can repeat its draws from the first"
                " epoch on",
                remedy="let set_epoch(epoch) of the sampler change it, which is called before each epoch, or let"
                " __iter__ read it from a global variable; or make a loader and a run for the further epochs",
            )

    def _iterate(self, sampler: Any, generator: torch.Generator | None, epoch: int) -> list[Any]:
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
        with own_generators():
            seed_generators(int(hash64(_SAMPLER, self._seed, epoch)))
            iterator = iter(sampler)
            if generator is not None:
                # A DataLoader draws the seed of its processes before the first sample.
                torch.empty((), dtype=torch.int64).random_(generator=generator)
            return [list(each) for each in iterator] if self._whole else list(iterator)

    def _checked(self, drawn: list[Any], epoch: int) -> NDArray[np.int64]:
        try:
            numbers = np.asarray([int(number) for number in drawn], dtype=np.int64)
        except (TypeError, ValueError) as error:
            raise DataError(
                f"the sampler {self._name} yields something else than indices of samples",
                why=str(error),
                remedy="let it yield integers from 0 on",
            ) from error
        if not len(numbers) or (self._samples is not None and len(numbers) != self._samples):
            raise DataError(
                f"the sampler {self._name} yields {counted(len(numbers), 'sample')} in epoch {epoch}",
                why="it has to yield at least one" if self._samples is None else f"its __len__ is {self._samples}",
                remedy="let it yield as many as its __len__ says in every epoch",
            )
        outside = numbers[(numbers < 0) | (numbers >= self._count)]
        if len(outside):
            raise DataError(
                f"the sampler {self._name} yields sample {outside[0]} of {self._count}",
                remedy="let it yield numbers from 0 on of samples in the data set",
            )
        if self._largest is not None and max(np.diff(self._bounds)) > self._largest:
            raise DataError(
                f"the batch sampler {self._name} yields {max(np.diff(self._bounds))} samples in epoch {epoch}, and at "
                f"most {self._largest} in the first",
                remedy="give the largest number in a batch as tutti.prepare(batch_size=…)",
            )
        return numbers[: self._used]


def _settings(state: tuple[Any, torch.Generator | None], data: Any) -> dict[str, str]:
    """Return digests of the numbers, texts, arrays and tensors that a sampler holds, and seeds of generators, by name.

    States of generators, and the samples of data sets, do not count.
    """
    found, ahead = dict[str, str](), [("the generator", state[1], 0), ("", state[0], 0)]
    while ahead:
        name, value, depth = ahead.pop()
        if isinstance(value, torch.Generator):
            found[name or "the generator"] = str(value.initial_seed())
        elif isinstance(value, list | tuple | range) and all(isinstance(each, int | float) for each in value):
            found[name or "the elements"] = digest(np.asarray(value))
        elif isinstance(value, int | float | str | np.ndarray | Tensor):
            found[name] = digest(value)
        elif value is not data and depth < _DEPTH and not callable(getattr(value, "__getitem__", None)):
            ahead += [
                (f"{name}.{key}".strip("."), each, depth + 1) for key, each in getattr(value, "__dict__", {}).items()
            ]
    return found


def _repeats(numbers: NDArray[np.int64]) -> NDArray[np.int64] | None:
    """Return how often each number occurs earlier in ``numbers``; None if each occurs once.

    >>> _repeats(np.array([5, 3, 5, 5, 3])).tolist()
    [0, 0, 1, 2, 1]
    """
    places = np.argsort(numbers, kind="stable")
    ordered = numbers[places]
    starts = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
    if len(starts) == len(numbers):
        return None
    counts = np.diff(np.append(starts, len(numbers)))
    before = np.empty(len(numbers), dtype=np.int64)
    before[places] = np.arange(len(numbers)) - np.repeat(starts, counts)
    return before


def cut(numbers: NDArray[np.int64], size: int) -> list[NDArray[np.int64]]:
    """Cut a 1-d array of sample numbers into consecutive views of ``size`` elements each; the last may have fewer.

    Args:
        numbers: int64 (samples,).
        size: number of elements of a view, such as the samples of a global batch.

    Returns:
        The views, in order; an empty list for an empty array.
    """
    return [numbers[start : start + size] for start in range(0, len(numbers), size)]


def permutation(seed: int, epoch: int, samples: int) -> NDArray[np.int64]:
    """Return a pseudo-random order of the samples in one epoch: sorted by a hash of (seed, epoch, sample).

    The order depends on the arguments alone: on no generator's state, and not on NumPy's version.

    Args:
        seed: seed of the run.
        epoch: from 0.
        samples: number of samples in the epoch.

    Returns:
        int64 (samples,): the numbers 0 … samples - 1, shuffled.

    >>> sorted(permutation(0, 1, 5).tolist())
    [0, 1, 2, 3, 4]
    """
    return np.argsort(hash64(seed, epoch, np.arange(samples)), kind="stable")
