"""Values on the wire: what goes in comes out, with its type; other types are refused by name."""

from __future__ import annotations

import math
from argparse import Namespace
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tutti.comm.object_codec import decode_object, encode_object, tensors_described
from tutti.errors import UsageError
from tutti.train.script_checks.followed_numbers import FollowedNumbers

VALUES: list[Any] = [
    *(None, True, False, 0, -1, 2**200, 1.5, math.inf, 1 + 2j, "", "né\ud800", b"\x00", [], (), set(), {}),
    [1, [2, (3,)]],
    {"a": 1, 2: None, (1, "x"): [True], None: b"", 1.5: {"deep": {3, 4}}},
    frozenset({1, 2}),
    OrderedDict(b=1, a=2),
    torch.Size([2, 3]),
    torch.float16,
    Path("a/b"),
    Namespace(epochs=3, data=Path("c"), sizes=[1, (2,)]),
]


@pytest.mark.parametrize("value", VALUES, ids=str)
def test_a_value_comes_back_with_its_type(value: Any) -> None:
    found = decode_object(encode_object(value))
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64])
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)])
def test_tensors(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    value = torch.ones(shape).to(dtype)
    found = decode_object(encode_object({"t": value}))["t"]
    assert found.dtype == dtype and torch.equal(found, value)


def test_arrays_and_scalars() -> None:
    found = decode_object(encode_object([np.arange(6).reshape(2, 3), np.float32(1.5), np.array(["a", "bc"])]))
    assert (found[0] == np.arange(6).reshape(2, 3)).all() and found[0].flags.writeable
    assert type(found[1]) is np.float32 and list(found[2]) == ["a", "bc"]


def test_tensors_apart() -> None:
    tensors: list[torch.Tensor] = []
    data = encode_object({"a": torch.ones(2), "b": [torch.zeros(3, dtype=torch.int32)]}, tensors)
    assert [(t.dtype, t.shape) for t in tensors_described(data)] == [(t.dtype, t.shape) for t in tensors]
    assert decode_object(data, tensors)["b"][0] is tensors[1]


def test_numbers_that_remember_their_samples_arrive_as_plain_ones() -> None:
    follow = FollowedNumbers(lambda: True).follow
    sums = {"loss": follow(1.5, {0: "script.py:7"}) * 4, "correct": [follow(3, {0: "script.py:8"})]}
    found = decode_object(encode_object(sums))
    assert found == {"loss": 6.0, "correct": [3]}
    assert (type(found["loss"]), type(found["correct"][0])) == (float, int)


class Own:
    pass


class Metres(float):
    """A number of its own class, which would arrive as another one."""


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Metres(1.5), "Metres, which cannot be sent to other ranks"),
        ({"a": [Own()]}, r"the object\['a'\]\[0\] is a .*Own"),
        (lambda: 0, "function"),
        (np.array([Own()]), "Python objects"),
        (torch.ones(2).to_sparse(), "sparse"),
    ],
)
def test_other_types_are_refused_by_name(value: Any, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        encode_object(value)


@pytest.mark.parametrize("data", [b"", b"?", encode_object([1, 2])[:-10]])
def test_bytes_that_are_no_value_are_refused(data: bytes) -> None:
    with pytest.raises(UsageError, match="is unknown"):
        decode_object(data)
