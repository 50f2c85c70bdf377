"""Hyperparameters of an optimizer as floats: a rank's schedule changes them, the server's optimizer follows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

Key = tuple[int, str, int | None]
"""Index of the parameter group, name of the hyperparameter, and index in it where it is a tuple (betas)."""


def keys(optimizer: Optimizer) -> list[Key]:
    """Return keys of the hyperparameters that ranks send to the servers: all floats, tensors, float tuples and ``lr``.

    Returns:
        (parameter group index, name, index in a tuple or None) for each, in an order that is equal on every rank.
    """
    found: list[Key] = []
    for number, group in enumerate(optimizer.param_groups):
        for name, value in sorted((k, v) for k, v in group.items() if k not in ("params", "param_names")):
            if isinstance(value, float | Tensor) or name == "lr":
                found.append((number, name, None))
            elif isinstance(value, tuple) and value and all(isinstance(v, float) for v in value):
                found += [(number, name, i) for i in range(len(value))]
    return found


def values(optimizer: Optimizer, chosen: Sequence[Key]) -> list[float]:
    """Return the current values of the ``chosen`` hyperparameters as floats, in their order.

    Args:
        optimizer: read from its ``param_groups``.
        chosen: from ``keys``.
    """
    groups = optimizer.param_groups
    return [float(groups[n][name] if i is None else groups[n][name][i]) for n, name, i in chosen]


def put(groups: Sequence[dict[str, Any]], chosen: Sequence[Key], numbers: Sequence[float]) -> None:
    """Write hyperparameters into an optimizer's parameter groups, in place.

    Args:
        groups: the optimizer's ``param_groups``; a key's first entry is an index in it.
        chosen: keys from ``keys``.
        numbers: a value for each key.
    """
    for (n, name, i), number in zip(chosen, numbers, strict=True):
        group = groups[n]
        if i is None:
            group[name] = number
        else:
            before = group[name]
            group[name] = (*before[:i], number, *before[i + 1 :])
