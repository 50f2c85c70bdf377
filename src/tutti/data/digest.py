"""Digest a sample, to compare the samples that ranks have read."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from types import NoneType
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tutti.data.keyed_random import hash64

_WIDTH = 256
"""Most sums by which the floats of one tensor or array are compared."""
_ROWS = 1 << 12
"""Floats of each sum that are read at a time."""
_WITHIN = {2: 1e-2, 4: 1e-4, 8: 1e-10}
"""Relative difference of floats up to which samples count as equal, by bytes of a float: a thousand roundings of 4
bytes, and for 8 bytes the precision to which runs on any number of devices agree."""


class SampleSketch(NamedTuple):
    """Digest of a sample and sums of its floats, by which ranks compare samples up to rounding of the floats.

    Attributes:
        digest: digest of the sample.
        exact: digest of its structure, types and values, without the values of finite floats.
        sums: float64 (sums,), sums over floats with fixed signs: up to 256 for each tensor or array.
        slack: float64 (sums,), largest change of each sum by rounding.
    """

    digest: str
    exact: str
    sums: Tensor
    slack: Tensor

    def is_close(self, other: SampleSketch) -> bool:
        """Return whether two samples are equal but for rounding of floats.

        Args:
            other: sketch of the other sample.
        """
        if self.digest == other.digest or self.exact != other.exact:
            return self.digest == other.digest
        return bool(((self.sums - other.sums).abs() <= self.slack + other.slack).all())

    def as_json(self) -> Any:
        """Return the sketch of a sample as a JSON value, a list, from which ``of_json`` makes it again."""
        return [self.digest, self.exact, self.sums.tolist(), self.slack.tolist()]

    @classmethod
    def of_json(cls, value: Any) -> SampleSketch:
        """Make the sketch of a sample from the JSON value that ``as_json`` has returned.

        Args:
            value: a result of ``as_json``.
        """
        return cls(value[0], value[1], *(torch.tensor(each, dtype=torch.float64) for each in value[2:]))


def digest(sample: Any) -> str:
    """Return a 64-bit digest of a sample's structure, types and values, as 16 hexadecimal digits.

    Objects other than dense tensors, arrays of numbers, numbers, strings, bytes, None, and tuples, lists and mappings
    of them count by the name of their type alone. Tensors of an accelerator are copied to the CPU, which blocks.

    Args:
        sample: a sample of a data set.

    >>> digest({"x": 1, "y": [2.0, "three"]}) == digest({"x": 1, "y": [2.0, "three"]})
    True
    >>> len({digest(1), digest(1.0), digest("1"), digest([1]), digest((1,)), digest(b"1"), digest(None)})
    7
    >>> digest(torch.eye(2).to_sparse()) == digest(torch.eye(3).to_sparse()) != digest(1)
    True
    """
    state = hashlib.blake2b(digest_size=8)
    _add(state, sample)
    return state.hexdigest()


def sketch(sample: Any) -> SampleSketch:
    """Return the sketch of a sample, by which two samples can be compared up to rounding of their floats.

    Args:
        sample: a sample of a data set, of any nesting of tensors, arrays, numbers and texts.

    >>> one, third = torch.ones(3), torch.full((3,), 1 / 3)
    >>> sketch([1, third * 3 + 2]).is_close(sketch([1, one + 2]))
    True
    >>> sketch([1, one]).is_close(sketch([2, one])) or sketch([1, one]).is_close(sketch([1, 2 * one]))
    False
    """
    state, found = hashlib.blake2b(digest_size=8), list[NDArray[np.float64]]()
    _add(state, sample, found)
    sums, slack = (torch.from_numpy(np.concatenate([np.empty(0), *each])) for each in (found[::2], found[1::2]))
    return SampleSketch(digest(sample), state.hexdigest(), sums, slack)


def _add(state: Any, value: Any, sums: list[NDArray[np.float64]] | None = None) -> None:
    """Add a value to the state of a digest; with ``sums`` add sums of floats there, and their slack, in turn."""
    state.update(f"{type(value).__name__} ".encode())
    if isinstance(value, Tensor) and value.layout == torch.strided and not value.is_nested:
        value = value.detach().cpu().contiguous()
        state.update(f"{value.dtype}{list(value.shape)}".encode())
        if sums is not None and (value.is_floating_point() or value.is_complex()):
            value = torch.view_as_real(value.resolve_conj()) if value.is_complex() else value
            known = value if value.dtype in (torch.float32, torch.float64) else value.float()
            _add_floats(state, known.numpy(), value.itemsize, sums)
        else:
            state.update(memoryview(value.flatten().view(torch.uint8).numpy()))
    elif isinstance(value, np.ndarray) and value.dtype != object:
        state.update(f"{value.dtype}{value.shape}".encode())
        _add_array(state, value, sums)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _add(state, key)
            _add(state, item, sums)
    elif isinstance(value, tuple | list):
        state.update(f"{len(value)} ".encode())
        for item in value:
            _add(state, item, sums)
    elif sums is not None and isinstance(value, float | complex | np.inexact):
        _add_array(state, np.asarray(value), sums)
    elif isinstance(value, str | bytes | bool | int | float | complex | np.generic | NoneType):
        text = value if isinstance(value, bytes) else repr(value).encode()
        state.update(f"{len(text)} ".encode() + text)


def _add_array(state: Any, value: NDArray[Any], sums: list[NDArray[np.float64]] | None) -> None:
    if sums is None or value.dtype.kind not in "fc":
        state.update(np.ascontiguousarray(value).tobytes())
    elif value.dtype.kind == "c":
        _add_floats(state, np.stack((value.real, value.imag), axis=-1), value.itemsize // 2, sums)
    else:
        _add_floats(state, value, value.itemsize, sums)


def _add_floats(state: Any, value: NDArray[Any], size: int, sums: list[NDArray[np.float64]]) -> None:
    """Add signed sums of floats to ``sums``, and their slack; values that are not finite count as such in the digest.

    Each sum is over every 256th float, with signs of a hash, so that no float is left out, and roundings add up as
    independent ones do. A float near zero may be rounded by a part of the other floats' sizes, from which it was
    computed.

    Args:
        state: state of a digest.
        value: the floats.
        size: bytes of a float before it was converted to ``value``.
        sums: where to add them.
    """
    flat, width = value.reshape(-1), max(min(_WIDTH, value.size), 1)
    total, squares = np.zeros(width), np.zeros(width)
    for start in range(0, len(flat), _WIDTH * _ROWS):
        part = flat[start : start + _WIDTH * _ROWS].astype(np.float64)
        finite = np.isfinite(part)
        if not finite.all():
            state.update(finite.tobytes())
            part[~finite] = 0
        part *= 1.0 - 2.0 * (hash64(np.arange(start, start + len(part))) & np.uint64(1)).astype(np.float64)
        rows = np.resize(part, (-(-len(part) // width), width))
        rows.reshape(-1)[len(part) :] = 0
        total += rows.sum(axis=0)
        with np.errstate(over="ignore"):
            squares += np.square(rows).sum(axis=0)
    sizes = np.sqrt(squares)
    some = np.sort(sizes[sizes > 0])
    usual = some[(len(some) - 1) // 2] if len(some) else 0.0
    sums += total, _WITHIN.get(size, _WITHIN[2 if size < 4 else 8]) * (sizes + usual)
