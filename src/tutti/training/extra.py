"""What a script keeps beside the model, such as a scheduler's state, as strict JSON and back without a loss."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from tutti.errors import UsageError

_TAG = "~"


def encode(value: Any, name: str) -> Any:
    """``value`` as JSON. Numbers (NaN and infinities too), texts, booleans, None, lists, tuples and dicts of them.

    A dict's keys may be numbers, which JSON would turn into texts: a ``MultiStepLR`` would never step again.
    Raises UsageError, saying where, for anything else.

    >>> encode({"milestones": {30: 1}, "betas": (0.9, 0.99)}, "extra")
    {'milestones': {'~': 'dict', 'items': [[30, 1]]}, 'betas': {'~': 'tuple', 'items': [0.9, 0.99]}}
    """
    if value is None or type(value) in (bool, int, str):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {_TAG: "float", "items": str(float(value))}
    if type(value) is list:
        return [encode(item, f"{name}[{number}]") for number, item in enumerate(value)]
    if type(value) is tuple:
        return {_TAG: "tuple", "items": encode(list(value), name)}
    if isinstance(value, Mapping):
        pairs = [[encode(key, f"a key of {name}"), encode(item, f"{name}[{key!r}]")] for key, item in value.items()]
        if all(type(key) is str for key in value) and _TAG not in value:
            return dict(pairs)
        return {_TAG: "dict", "items": pairs}
    raise UsageError(
        f"{name} is a {type(value).__name__}, which cannot be saved beside the model",
        remedy="save numbers, texts, lists, tuples and dicts of them; what has tensors belongs into the model",
    )


def decode(value: Any) -> Any:
    """What ``encode`` made JSON of.

    >>> decode(encode({"best": float("-inf"), "milestones": {30: 1}, "betas": (0.9, 0.99)}, "extra"))
    {'best': -inf, 'milestones': {30: 1}, 'betas': (0.9, 0.99)}
    """
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    if _TAG not in value:
        return {key: decode(item) for key, item in value.items()}
    items = decode(value["items"])
    kind = value[_TAG]
    return float(items) if kind == "float" else tuple(items) if kind == "tuple" else {key: item for key, item in items}
