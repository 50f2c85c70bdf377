"""Find metric objects, such as those of torchmetrics, that a loss function updates."""

from __future__ import annotations

import inspect
from types import FunctionType
from typing import Any

_METHODS = ("update", "compute", "reset")
_DEPTH = 3


def metric_objects(function: Any, depth: int = _DEPTH) -> list[str]:
    """Return the names of variables of a function that hold metric objects, such as those of torchmetrics.

    A metric object is any object with the methods ``update``, ``compute`` and ``reset``. Looked at are the global and
    enclosing variables that the function reads.

    Args:
        function: a Python function; the functions that it reads are searched, too.
        depth: how many functions deep to search; 1 for ``function`` alone.

    Returns:
        Names of the variables; empty for an object that is no Python function.

    >>> class Mean:
    ...     update = compute = reset = lambda self: None
    >>> mean = Mean()
    >>> metric_objects(lambda model, batch: mean.update(batch))
    ['mean']
    """
    try:
        found = inspect.getclosurevars(function)
    except (TypeError, ValueError):
        return []
    names: list[str] = []
    for name, value in {**found.globals, **found.nonlocals}.items():
        if isinstance(value, FunctionType) and depth > 1:
            names += metric_objects(value, depth - 1)
        elif not isinstance(value, type) and all(callable(getattr(value, method, None)) for method in _METHODS):
            names.append(name)
    return names
