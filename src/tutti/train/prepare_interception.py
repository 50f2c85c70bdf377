"""Hand the arguments of ``tutti.prepare`` to a caller that runs a script to look at its model, not to train it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

from tutti.train.run_options import Models, RunOptions
from tutti.types import LossFn

PrepareHandler: TypeAlias = "Callable[[Models, Any, Any, LossFn | None, RunOptions], Any]"
"""Takes model, optimizer, data set, loss and options of ``tutti.prepare``; its result is that of ``tutti.prepare``."""

_handlers: list[PrepareHandler] = []


@contextmanager
def intercept_prepare(handler: PrepareHandler) -> Iterator[None]:
    """Within the block, let ``tutti.prepare`` return ``handler(…)`` and prepare nothing; no rank is met.

    Args:
        handler: receives model, optimizer, data set, loss and options as the script gave them.
    """
    _handlers.append(handler)
    try:
        yield
    finally:
        _handlers.pop()


def prepare_handler() -> PrepareHandler | None:
    """Return the innermost handler of ``intercept_prepare``; None outside of every block."""
    return _handlers[-1] if _handlers else None
