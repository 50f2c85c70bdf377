"""Typed codec for Python values on the wire: no pickle, so that decoding runs no code.

Values are None, bool, int, float, complex, str, bytes, list, tuple, set, frozenset, dict with any of these as keys,
``torch.Size``, dtypes, tensors on any device, NumPy arrays and scalars, paths and ``argparse.Namespace``. Another type
is refused by name.
"""

from __future__ import annotations

import copy
import struct
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tutti.errors import UsageError

_LENGTH = struct.Struct("<Q")
_FLOAT = struct.Struct("<d")
_COMPLEX = struct.Struct("<dd")

_SEQUENCES: dict[type, bytes] = {list: b"l", tuple: b"t", set: b"e", frozenset: b"z", torch.Size: b"S"}
_CONSTANTS = {b"N": None, b"T": True, b"F": False}
_MAKERS: dict[bytes, Callable[[list[Any]], Any]] = {tag: kind for kind, tag in _SEQUENCES.items()}


def encode_object(value: Any, tensors: list[Tensor] | None = None) -> bytes:
    """Serialise a Python value to bytes without pickle, for ``decode_object``.

    Types: None, bool, int, float, complex, str, bytes, list, tuple, set, frozenset, dict, ``torch.Size``, dtypes,
    tensors, NumPy arrays and scalars, ``pathlib.Path``, ``argparse.Namespace``, and nestings of them.

    Args:
        value: the value to encode.
        tensors: if given, tensors in ``value`` are appended to this list, detached and not copied, and the bytes hold
            only their index, dtype and shape; None: the bytes hold their elements, too.

    Returns:
        The bytes. A bytearray is encoded as bytes, a defaultdict as a dict.

    Raises:
        UsageError: a value of another type, or a sparse or quantized tensor; names its place in ``value`` and its type.

    >>> decode_object(encode_object({"a": [1, None, (2.5, {3})], b"b": "text"}))
    {'a': [1, None, (2.5, {3})], b'b': 'text'}
    """
    out: list[bytes] = []
    _encode(value, out, tensors, "the object")
    return b"".join(out)


def encode_or_error(value: Any, where: str, tensors: list[Tensor] | None = None) -> bytes:
    """Serialise a Python value as ``encode_object`` does; if it cannot be encoded, serialise the error instead.

    Raises nothing itself: every rank that gets the bytes of an error raises it as UsageError, in ``decode_object`` or
    ``tensors_described``. Not collective.

    Args:
        value: the value to encode.
        where: rank and call, as text for the error.
        tensors: if given, tensors in ``value`` are appended to this list, detached and not copied, and the bytes only
            describe them.

    Returns:
        The bytes of the value or of the error.
    """
    try:
        return encode_object(value, tensors)
    except UsageError as error:
        fields = error.what, where, error.why, error.remedy
    except Exception as error:
        fields = "the object cannot be sent to other ranks", where, f"{type(error).__name__}: {error}", None
    return b"!" + encode_object(fields)


def decode_object(data: bytes, tensors: list[Tensor] | None = None) -> Any:
    """Rebuild and return the value that ``encode_object`` encoded. Runs no code from the bytes, unlike pickle.

    Args:
        data: result of ``encode_object``.
        tensors: the list that ``encode_object`` has filled, or equal tensors in its order; None if it was given none.

    Returns:
        A value equal to the encoded one; its tensors are new ones on the CPU, or those of ``tensors`` themselves.

    Raises:
        UsageError: the bytes have an unknown tag, as of another version of tutti; or they hold an error that
            ``encode_or_error`` has serialised in place of a value, and which is raised here.
    """
    return _Decoder(data, tensors).value()


def tensors_described(data: bytes) -> list[Tensor]:
    """Allocate CPU tensors for a receiver, like those that ``encode_object`` has put into its list of tensors.

    The receiver fills the tensors, by a broadcast for example, and gives them to ``decode_object`` with the bytes.
    This function sends and receives nothing.

    Args:
        data: result of ``encode_object`` with a list of tensors.

    Returns:
        Uninitialised tensors of the dtypes and shapes of that list, in its order.

    Raises:
        UsageError: ``data`` has an unknown tag, or holds an error that ``encode_or_error`` has serialised in place of a
            value, and which is raised here.
    """
    decoder = _Decoder(data, None)
    decoder.value()
    return decoder.described


def _text(out: list[bytes], raw: bytes) -> None:
    out.append(_LENGTH.pack(len(raw)))
    out.append(raw)


def _encode(value: Any, out: list[bytes], tensors: list[Tensor] | None, place: str) -> None:
    kind = type(value)
    if value is None:
        out.append(b"N")
    elif kind is bool:
        out.append(b"T" if value else b"F")
    elif kind is int:
        out.append(b"i")
        _text(out, str(value).encode())
    elif kind is float:
        out.append(b"f" + _FLOAT.pack(value))
    elif kind is complex:
        out.append(b"c" + _COMPLEX.pack(value.real, value.imag))
    elif kind is str:
        out.append(b"s")
        _text(out, value.encode("utf-8", "surrogatepass"))
    elif kind in (bytes, bytearray):
        out.append(b"b")
        _text(out, bytes(value))
    elif kind in _SEQUENCES:
        out.append(_SEQUENCES[kind] + _LENGTH.pack(len(value)))
        _encode_items(value, out, tensors, place)
    elif kind in (dict, OrderedDict) or kind.__name__ == "defaultdict":
        out.append((b"O" if kind is OrderedDict else b"d") + _LENGTH.pack(len(value)))
        for key, inner in value.items():
            _encode(key, out, None, f"a key of {place}")
            _encode(inner, out, tensors, f"{place}[{key!r}]")
    elif isinstance(value, Tensor):
        _encode_tensor(value, out, tensors, place)
    elif isinstance(value, np.ndarray | np.generic):
        _encode_array(value, out, place)
    elif kind is torch.dtype:
        out.append(b"y")
        _text(out, str(value).removeprefix("torch.").encode())
    elif isinstance(value, Path):
        out.append(b"p")
        _encode(str(value), out, None, place)
    elif kind is Namespace:
        out.append(b"n")
        _encode(vars(value), out, tensors, place)
    elif isinstance(value, int | float) and value.__reduce_ex__(2)[0] in (int, float):
        # Numbers of a loop's body that remember their samples are plain ones in copies and pickles.
        _encode(copy.copy(value), out, tensors, place)
    else:
        raise UsageError(
            f"{place} is a {kind.__module__}.{kind.__qualname__}, which cannot be sent to other ranks",
            remedy="send None, bool, int, float, str, bytes, list, tuple, set, dict, tensors or arrays, such as the "
            "object's __dict__ or state_dict()",
        )


def _encode_items(values: Iterable[Any], out: list[bytes], tensors: list[Tensor] | None, place: str) -> None:
    for index, inner in enumerate(values):
        _encode(inner, out, tensors, f"{place}[{index}]")


def _encode_tensor(value: Tensor, out: list[bytes], tensors: list[Tensor] | None, place: str) -> None:
    if value.layout != torch.strided or value.is_quantized:
        raise UsageError(f"{place} is a tensor of layout {value.layout}", remedy="send a dense tensor")
    out.append(b"x" if tensors is None else b"r")
    _text(out, str(value.dtype).removeprefix("torch.").encode())
    out.append(_LENGTH.pack(value.dim()) + b"".join(_LENGTH.pack(n) for n in value.shape))
    if tensors is None:
        flat = value.detach().cpu().resolve_conj().resolve_neg().contiguous().view(-1)
        _text(out, flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"")
    else:
        out.append(_LENGTH.pack(len(tensors)))
        tensors.append(value.detach())


def _encode_array(value: Any, out: list[bytes], place: str) -> None:
    array = np.asarray(value)
    if array.dtype.hasobject:
        raise UsageError(f"{place} is an array of Python objects", remedy="send a list")
    if array.dtype.kind == "V":
        raise UsageError(f"{place} is an array of records", remedy="send a dict with an array for each field")
    out.append(b"a" if isinstance(value, np.ndarray) else b"g")
    _text(out, array.dtype.str.encode())
    out.append(_LENGTH.pack(array.ndim) + b"".join(_LENGTH.pack(n) for n in array.shape))
    _text(out, array.tobytes())


class _Decoder:
    """Reads values one after the other from bytes."""

    def __init__(self, data: bytes, tensors: list[Tensor] | None) -> None:
        self._data, self._at, self._tensors = memoryview(data), 0, tensors
        self.described: list[Tensor] = []

    def value(self) -> Any:
        tag = bytes(self._take(1))
        if tag in _MAKERS:
            return _MAKERS[tag]([self.value() for _ in range(self._length())])
        if tag in (b"d", b"O"):
            pairs = ((self.value(), self.value()) for _ in range(self._length()))
            return OrderedDict(pairs) if tag == b"O" else dict(pairs)
        if tag in _CONSTANTS:
            return _CONSTANTS[tag]
        if tag == b"i":
            return int(bytes(self._text()))
        if tag == b"f":
            return _FLOAT.unpack(self._take(8))[0]
        if tag == b"c":
            return complex(*_COMPLEX.unpack(self._take(16)))
        if tag == b"s":
            return bytes(self._text()).decode("utf-8", "surrogatepass")
        if tag == b"b":
            return bytes(self._text())
        if tag == b"y":
            return getattr(torch, bytes(self._text()).decode())
        if tag == b"p":
            return Path(self.value())
        if tag == b"n":
            return Namespace(**self.value())
        if tag in (b"x", b"r"):
            return self._tensor(tag)
        if tag in (b"a", b"g"):
            return self._array(tag)
        if tag == b"!":
            what, where, why, remedy = self.value()
            raise UsageError(what, where=where, why=why, remedy=remedy)
        raise UsageError(f"tag {tag!r} is unknown", why="the bytes were not made by this version of tutti")

    def _take(self, count: int) -> memoryview:
        found = self._data[self._at : self._at + count]
        self._at += count
        return found

    def _length(self) -> int:
        return int(_LENGTH.unpack(self._take(8))[0])

    def _text(self) -> memoryview:
        return self._take(self._length())

    def _shape(self) -> list[int]:
        return [self._length() for _ in range(self._length())]

    def _tensor(self, tag: bytes) -> Tensor:
        dtype = getattr(torch, bytes(self._text()).decode())
        shape = self._shape()
        if tag == b"x":
            raw = bytearray(self._text())
            return torch.frombuffer(raw, dtype=dtype).view(shape) if raw else torch.empty(shape, dtype=dtype)
        index = self._length()
        if self._tensors is not None:
            return self._tensors[index]
        self.described.append(torch.empty(shape, dtype=dtype))
        return self.described[-1]

    def _array(self, tag: bytes) -> Any:
        dtype = np.dtype(bytes(self._text()).decode())
        shape = self._shape()
        array = np.frombuffer(bytearray(self._text()), dtype=dtype).reshape(shape)
        return array if tag == b"a" else array[()]
