"""Hand the arguments of ``tutti.prepare`` to a caller that runs a script to look at its model, not to train it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

from tutti.train.run_options import Models, RunOptions
from tutti.types.micro_batch import LossFn

PrepareHandler: TypeAlias = "Callable[[Models, Any, Any, LossFn | None, RunOptions], Any]"
"""Takes model, optimizer, data set, loss and options of ``tutti.prepare``; its result is that of ``tutti.prepare``."""

_handlers: list[PrepareHandler] = []


@contextmanager
def intercept_prepare(handler: PrepareHandler) -> Iterator[None]:
    """Return a context manager within which ``tutti.prepare`` calls ``handler`` and returns its result.

    For tools such as ``tutti simulate``, which run a training script to look at its model and not to train it. No run
    is prepared, no process group is joined and no model is moved. Of nested contexts, the innermost handler is called.

    Args:
        handler: takes model, optimizer, data set, loss function and options of ``tutti.prepare`` as the script gave
            them, in this order.
    """
    _handlers.append(handler)
    try:
        yield
    finally:
        _handlers.pop()


def prepare_handler() -> PrepareHandler | None:
    """Return the function that ``tutti.prepare`` must call instead of preparing a run; None if there is none.

    It is the handler of the innermost ``intercept_prepare`` block that is active, and takes model, optimizer, data set,
    loss function and options of ``tutti.prepare``, in this order.
    """
    return _handlers[-1] if _handlers else None
