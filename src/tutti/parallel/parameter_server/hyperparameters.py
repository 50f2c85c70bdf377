"""Hyperparameters of an optimizer as floats: a rank's schedule changes them, the server's optimizer follows.

Changes of other hyperparameters, such as ``nesterov``, do not reach the servers, and are refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from tutti.optim.mixing import IMPLEMENTATION_OPTIONS

Key = tuple[int, str, int | None]
"""Index of the parameter group, name of the hyperparameter, and index in it where it is a tuple or list (betas)."""

_REAL = frozenset({"lr", "momentum", "dampening", "weight_decay"})
"""Hyperparameters that are real numbers even where they are written as integers, such as the default 0."""


def keys(optimizer: Optimizer) -> list[Key]:
    """List an optimizer's hyperparameters that a rank sends to the parameter servers with each update.

    These are all entries of ``param_groups`` that are a float, a tensor, or a tuple or list of numbers with a float,
    and learning rate, momentum, dampening and weight decay also where they are integers.

    Args:
        optimizer: read from its ``param_groups``.

    Returns:
        One key for each number: a tuple of the index of the parameter group, the hyperparameter's name, and the index
        in the hyperparameter's value if this is a tuple or list such as ``betas``, else None. Keys come in the order of
        the groups, and within a group in alphabetical order of the names.
    """
    found: list[Key] = []
    for number, group in enumerate(optimizer.param_groups):
        for name, value in sorted(_entries(group)):
            if isinstance(value, float | Tensor) or (name in _REAL and isinstance(value, int)):
                found.append((number, name, None))
            elif isinstance(value, tuple | list) and {float} <= set(map(type, value)) <= {float, int}:
                found += [(number, name, i) for i in range(len(value))]
    return found


def unsent(optimizer: Optimizer, chosen: Sequence[Key]) -> dict[tuple[int, str], str]:
    """Return the options of an optimizer that a rank does not send, so that changes can be found by comparison.

    Only values of Python's plain types count. Options that select an implementation, such as ``foreach``, are left out:
    they do not change the update.

    Args:
        optimizer: read from its ``param_groups``.
        chosen: keys of the hyperparameters that are sent, from ``keys``.

    Returns:
        (index of the parameter group, name) → ``repr`` of the value.
    """
    left_out = {(number, name) for number, name, _ in chosen}
    return {
        (number, name): repr(value)
        for number, group in enumerate(optimizer.param_groups)
        for name, value in _entries(group)
        if (number, name) not in left_out and name not in IMPLEMENTATION_OPTIONS and _is_plain(value)
    }


def _entries(group: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return [(name, value) for name, value in group.items() if name not in ("params", "param_names")]


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def values(optimizer: Optimizer, chosen: Sequence[Key]) -> list[float]:
    """Return the current values of some hyperparameters of an optimizer as floats.

    Args:
        optimizer: read from its ``param_groups``.
        chosen: keys from ``keys``: (index of the parameter group, name, index in a tuple such as ``betas`` or None).

    Returns:
        A float for each key, in the order of ``chosen``.
    """
    groups = optimizer.param_groups
    return [float(groups[n][name] if i is None else groups[n][name][i]) for n, name, i in chosen]


def put(groups: Sequence[dict[str, Any]], chosen: Sequence[Key], numbers: Sequence[float]) -> None:
    """Write hyperparameter values into the parameter groups of an optimizer, in place.

    Args:
        groups: the optimizer's ``param_groups``.
        chosen: keys from ``keys``: (index of the parameter group, name, index in a tuple such as ``betas`` or None).
        numbers: the new value for each key, in the order of ``chosen``. For a key with an index, a new tuple with this
            entry changed replaces the tuple or list; a hyperparameter that was a tensor becomes a float.
    """
    for (n, name, i), number in zip(chosen, numbers, strict=True):
        group = groups[n]
        if i is None:
            group[name] = number
        else:
            before = group[name]
            group[name] = (*before[:i], number, *before[i + 1 :])
