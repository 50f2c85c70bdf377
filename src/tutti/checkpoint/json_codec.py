"""Encode the values that a script saves beside the model, such as a scheduler's state, as lossless strict JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from tutti.errors import UsageError

_TAG = "~"


def encode_json(value: Any, name: str) -> Any:
    """Encode a Python value as a JSON value that ``decode_json`` turns back into an equal value.

    Numbers (NaN and infinities too), strings, booleans, None, and lists, tuples and dicts of them are allowed. Plain
    JSON would turn tuples into lists and a dict's number keys, such as the milestones of a ``MultiStepLR``, into
    strings: these are marked by the key ``~``.

    Args:
        value: the value.
        name: path of the value, such as ``extra``, which the UsageError states.

    Raises:
        UsageError: the value, or one within it, is of another type.

    >>> encode_json({"milestones": {30: 1}, "betas": (0.9, 0.99)}, "extra")
    {'milestones': {'~': 'dict', 'items': [[30, 1]]}, 'betas': {'~': 'tuple', 'items': [0.9, 0.99]}}
    """
    if value is None or type(value) in (bool, int, str):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {_TAG: "float", "items": str(float(value))}
    if type(value) is list:
        return [encode_json(item, f"{name}[{number}]") for number, item in enumerate(value)]
    if type(value) is tuple:
        return {_TAG: "tuple", "items": encode_json(list(value), name)}
    if isinstance(value, Mapping):
        pairs = [
            [encode_json(key, f"a key of {name}"), encode_json(item, f"{name}[{key!r}]")] for key, item in value.items()
        ]
        if all(type(key) is str for key in value) and _TAG not in value:
            return dict(pairs)
        return {_TAG: "dict", "items": pairs}
    raise UsageError(
        f"{name} is a {type(value).__name__}, which cannot be saved beside the model",
        remedy="save numbers, strings, lists, tuples and dicts of them; tensors belong into the model",
    )


def decode_json(value: Any) -> Any:
    """Return the value that ``encode_json`` has encoded, with its tuples, number keys, NaN and infinities restored.

    Args:
        value: a JSON value, the result of ``encode_json``.

    >>> decode_json(encode_json({"best": float("-inf"), "milestones": {30: 1}, "betas": (0.9, 0.99)}, "extra"))
    {'best': -inf, 'milestones': {30: 1}, 'betas': (0.9, 0.99)}
    """
    if isinstance(value, list):
        return [decode_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    if _TAG not in value:
        return {key: decode_json(item) for key, item in value.items()}
    items = decode_json(value["items"])
    kind = value[_TAG]
    return float(items) if kind == "float" else tuple(items) if kind == "tuple" else {key: item for key, item in items}
