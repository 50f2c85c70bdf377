"""Compute the layout and header of a safetensors file from the slices in it: one definition for writer and reader.

Format: github.com/huggingface/safetensors. Eight bytes of little-endian length, a JSON header, the tensors' bytes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

DTYPES = {
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "F8_E4M3FNUZ": ("float8_e4m3fnuz", 1),
    "F8_E5M2FNUZ": ("float8_e5m2fnuz", 1),
    "F8_E8M0": ("float8_e8m0fnu", 1),
    "C64": ("complex64", 8),
    "I64": ("int64", 8),
    "I32": ("int32", 4),
    "I16": ("int16", 2),
    "I8": ("int8", 1),
    "U64": ("uint64", 8),
    "U32": ("uint32", 4),
    "U16": ("uint16", 2),
    "U8": ("uint8", 1),
    "BOOL": ("bool", 1),
}
"""Every dtype of the format: its name there → its name in PyTorch and the bytes of one element. No torch."""

MOST_DIMENSIONS = 64
"""Most dimensions of a tensor, the limit of NumPy 2."""
_MOST_BYTES = 2**63 - 1


def checked_size(value: object) -> int:
    """Return a number that a file states if it can be a number of bytes, elements or steps.

    Args:
        value: a parsed JSON value.

    Raises:
        ValueError: it is no integer from 0 to 2⁶³ - 1.
    """
    if type(value) is not int or not 0 <= value <= _MOST_BYTES:
        raise ValueError(f"{value!r} is not a size")
    return value


def check_within(name: str, shape: Sequence[int], offset: Sequence[int], part: Sequence[int]) -> None:
    """Raise ValueError unless a slice lies within its tensor.

    Args:
        name: the tensor's name, for the message.
        shape: shape of the whole tensor.
        offset: index of the slice's first element in the whole tensor, one number a dimension.
        part: shape of the slice.
    """
    within = len(shape) == len(offset) == len(part) and all(
        min(begin, length) >= 0 and begin + length <= size
        for size, begin, length in zip(shape, offset, part, strict=True)
    )
    if not within:
        raise ValueError(
            f"a slice of {name!r}, {list(part)} at {list(offset)}, does not lie within shape {list(shape)}"
        )


@dataclass(frozen=True)
class SliceRecord:
    """Name, dtype and place of a stored tensor slice, without its values.

    Attributes:
        name: the tensor's name, of any characters.
        dtype: safetensors' name of the dtype, such as ``BF16``; a key of ``DTYPES``.
        shape: shape of the whole tensor.
        offset: index of the slice's first element in the whole tensor, one number a dimension.
        part: shape of the slice.

    Raises:
        ValueError: an unknown dtype, a shape of more than 64 dimensions or 2⁶³ - 1 bytes, or a slice that does not lie
            within its tensor.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    part: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"{self.name!r} has the unknown dtype {self.dtype!r}")
        # A size of 0 counts as 1: strides are computed from the other dimensions all the same.
        extent = math.prod(max(size, 1) for size in self.shape)
        if len(self.shape) > MOST_DIMENSIONS or extent * self.itemsize > _MOST_BYTES:
            raise ValueError(f"{self.name!r} has the impossible shape {list(self.shape)}")
        check_within(self.name, self.shape, self.offset, self.part)

    @classmethod
    def whole(cls, name: str, dtype: str, shape: Sequence[int]) -> SliceRecord:
        """Return the record of a whole tensor: a slice at offset 0, of the tensor's shape.

        Args:
            name: the tensor's name, of any characters.
            dtype: safetensors' name of the dtype, such as ``BF16``; a key of ``DTYPES``.
            shape: shape of the tensor.

        Raises:
            ValueError: an unknown dtype, or a shape of too many dimensions or bytes.
        """
        return cls(name, dtype, tuple(shape), (0,) * len(shape), tuple(shape))

    @property
    def itemsize(self) -> int:
        """Bytes of one element of the tensor slice's dtype."""
        return DTYPES[self.dtype][1]

    @property
    def end(self) -> tuple[int, ...]:
        """Index in the whole tensor just after the tensor slice's last element, one number for each dimension.

        Equal to the slice's ``offset`` plus its shape (``part``).
        """
        return tuple(map(sum, zip(self.offset, self.part, strict=True)))

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor slice's elements in its file, without the file's header."""
        return math.prod(self.part) * self.itemsize


@dataclass(frozen=True)
class FileLayout:
    """Header and offsets of one safetensors file.

    Attributes:
        header: the file's first bytes: length field and JSON.
        begins: byte at which each slice starts, counted from the file's start.
        size: bytes of the file.
    """

    header: bytes
    begins: tuple[int, ...]
    size: int


def file_layout(slices: Sequence[SliceRecord], metadata: Mapping[str, str] | None = None) -> FileLayout:
    """Lay out a safetensors file with tensor slices one after another.

    Args:
        slices: the tensor slices, in the order of their bytes.
        metadata: further entries of the header's ``__metadata__``.

    Returns:
        A ``FileLayout``: ``header`` (the file's first bytes), ``begins`` (the byte at which each slice starts, counted
        from the file's start) and ``size`` (bytes of the file).

    >>> layout = file_layout([SliceRecord("w", "F32", (2, 3), (0, 0), (2, 3))])
    >>> layout.size - layout.begins[0]
    24
    """
    ends = list(accumulate((item.nbytes for item in slices), initial=0))
    entries: dict[str, object] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    for item, key, begin, end in zip(slices, _keys(slices), ends, ends[1:], strict=False):
        entries[key] = {"dtype": item.dtype, "shape": item.part, "data_offsets": (begin, end)}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return FileLayout(header, tuple(len(header) + begin for begin in ends[:-1]), len(header) + ends[-1])


def _keys(slices: Sequence[SliceRecord]) -> Iterator[str]:
    """Yield each slice's unique key in the header: the tensor's name, with the index range if it is not whole."""
    taken = {"__metadata__"}
    for item in slices:
        # The header must be valid UTF-8, which a Python string with lone surrogates is not.
        key = item.name.encode(errors="backslashreplace").decode()
        if item.part != item.shape:
            ranges = zip(item.offset, item.part, strict=True)
            key += "[" + ",".join(f"{begin}:{begin + length}" for begin, length in ranges) + "]"
        while key in taken:
            key += "'"
        taken.add(key)
        yield key
