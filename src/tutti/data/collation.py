"""Collate samples into a batch as PyTorch's DataLoader does; refuse samples of unequal structure, naming them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import default_collate

from tutti.errors import DataError, own_line_of
from tutti.types.micro_batch import Batch

_VALUES = Tensor | int | float | np.generic | str | bytes | None


def collate(samples: Sequence[Any], name: Callable[[int], str], where: str) -> Batch:
    """Collate samples with ``default_collate``, after checking that their structure, shapes and dtypes are equal.

    Which samples share a batch depends on the number of logical workers (fixed shares of the global batch) and of
    devices. ``default_collate`` promotes dtypes only within a batch, so that with unequal dtypes the result would
    depend on those numbers too. Floating dtypes may differ, because every batch is cast to the model's.

    Args:
        samples: at least one.
        name: maps a sample's index in ``samples`` to the name by which a DataError states the sample.
        where: the data set's name, which a DataError states.

    Returns:
        A batch of the samples' structure, in which tuples have become lists (named tuples stay): tensors with the
        samples as first dimension; strings, bytes and None become a list with one entry for each sample.

    Raises:
        DataError: two samples differ in structure, shape, type or (non-floating) dtype; a sample holds an object other
            than tensors, arrays, numbers, strings, bytes and None; or ``default_collate`` fails.
    """
    first = samples[0]
    for place, sample in enumerate(samples):
        if place and (found := _difference(first, sample, "")) is not None:
            field, mine, other = found
            raise DataError(
                f"{name(0)} and {name(place)} cannot be in one batch" + f": they differ in {field}" * bool(field),
                where=where,
                why=f"{mine} and {other}",
                remedy=_remedy(mine, other),
            )
        if (strange := _strange(sample, "")) is not None:
            field, kind = strange
            raise DataError(
                f"{name(place)} holds {kind}" + f" in {field}" * bool(field),
                where=where,
                why="a batch is made of tensors, arrays, numbers, texts and None, in tuples, lists and dicts",
                remedy="return numbers for it from the data set, leave it out, or give tutti.prepare(collate=…)",
            )
    try:
        return _collated(list(samples)) if _has_none(first) else default_collate(list(samples))
    except (RuntimeError, TypeError, ValueError, KeyError) as error:
        raise DataError(
            f"{name(0)} and the {len(samples) - 1} after it cannot be made a batch",
            where=where,
            why=f"{type(error).__name__}: {error}",
            remedy="return tensors of one shape and dtype from the data set",
        ) from error


def _has_none(sample: Any) -> bool:
    """Return whether a sample holds None, which ``default_collate`` does not take, or a string."""
    if isinstance(sample, Mapping | tuple | list):
        return any(map(_has_none, sample.values() if isinstance(sample, Mapping) else sample))
    return isinstance(sample, str | bytes | None)


def _collated(samples: list[Any]) -> Batch:
    """Collate as ``default_collate``; strings, bytes and None become a list."""
    first = samples[0]
    if isinstance(first, str | bytes | None):
        return samples
    if isinstance(first, Mapping):
        return {key: _collated([sample[key] for sample in samples]) for key in first}
    if isinstance(first, tuple | list):
        columns = [_collated(list(column)) for column in zip(*samples, strict=True)]
        return type(first)(*columns) if hasattr(first, "_fields") else columns
    return default_collate(samples)


def _difference(first: Any, other: Any, field: str) -> tuple[str, str, str] | None:
    """Return the field in which two samples differ and a description of each value; None if they can be collated."""
    if isinstance(first, Tensor):
        if not isinstance(other, Tensor):
            return field, _described(first), _described(other)
        same = first.dtype == other.dtype or (first.is_floating_point() and other.is_floating_point())
        alike = same and first.shape == other.shape
        return None if alike else (field, _described(first), _described(other))
    if isinstance(first, str | bytes | None) and isinstance(other, str | bytes | None):
        return None
    if type(first) is not type(other):
        return field, _described(first), _described(other)
    if isinstance(first, np.ndarray | np.generic):
        same = first.dtype == other.dtype or first.dtype.kind == other.dtype.kind == "f"
        alike = same and first.shape == other.shape
        return None if alike else (field, _described(first), _described(other))
    if isinstance(first, Mapping):
        for key in (*first, *other):
            if (key in first) != (key in other):
                there, missing = f"an entry {key!r}", f"no entry {key!r}"
                return (field, there, missing) if key in first else (field, missing, there)
        pairs = [(first[key], other[key], f"{field}[{key!r}]") for key in first]
    elif isinstance(first, tuple | list):
        if len(first) != len(other):
            return field, _described(first), _described(other)
        pairs = [(a, b, f"{field}[{place}]") for place, (a, b) in enumerate(zip(first, other, strict=True))]
    else:
        return None
    return next((found for pair in pairs if (found := _difference(*pair)) is not None), None)


def _strange(sample: Any, field: str) -> tuple[str, str] | None:
    """Return field and type of an object in the sample that cannot be collated; None if there is none."""
    if isinstance(sample, _VALUES):
        return None
    if isinstance(sample, np.ndarray):
        return (field, f"a NumPy array of {sample.dtype}") if sample.dtype.kind not in "biufc" else None
    if isinstance(sample, Mapping):
        found = (_strange(value, f"{field}[{key!r}]") for key, value in sample.items())
    elif isinstance(sample, tuple | list):
        found = (_strange(value, f"{field}[{place}]") for place, value in enumerate(sample))
    else:
        return field, _described(sample)
    return next((strange for strange in found if strange is not None), None)


def _described(value: Any) -> str:
    if isinstance(value, Tensor | np.ndarray):
        kind = "tensor" if isinstance(value, Tensor) else "NumPy array"
        return f"a {kind} of {str(value.dtype).removeprefix('torch.')} with shape {tuple(value.shape)}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    if value is None:
        return "None"
    return f"{'an' if type(value).__name__[0] in 'aeiou' else 'a'} {type(value).__name__}"


def _remedy(mine: str, other: str) -> str:
    if "shape" in mine and "shape" in other and mine.partition(" with")[0] == other.partition(" with")[0]:
        return (
            "return tensors of one shape: pad or crop each sample in the data set (and mask what is padding in the "
            "loss), or pad in a function given as tutti.prepare(collate=…)"
        )
    return "return the same structure, types and dtypes for every sample"


def unreadable_sample(what: str, name: str, error: Exception) -> DataError:
    """Return the error for a sample that the user's data set could not read; it names the line of the user's code.

    Args:
        what: the failure as the error states it first, such as ``cannot read sample 7``.
        name: name of the data set.
        error: the exception that the data set raised, whose type and text the error states.

    Returns:
        The DataError, for the caller to raise.
    """
    line = own_line_of(error)
    return DataError(what, where=f"{name}, {line}" if line else name, why=f"{type(error).__name__}: {error}")
