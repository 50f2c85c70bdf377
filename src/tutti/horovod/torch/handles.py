"""Integer handles of asynchronous collectives, as in ``horovod.torch``: ``poll`` and ``synchronize``."""

from __future__ import annotations

import itertools
from typing import Any

from tutti.comm.collective_session import CollectiveHandle
from tutti.horovod.common.exceptions import translated

_handles: dict[int, CollectiveHandle] = {}

_numbers = itertools.count()


def new_handle(handle: CollectiveHandle) -> int:
    """Register a started collective, and return the number that the script passes to ``poll`` and ``synchronize``.

    Args:
        handle: the collective.
    """
    number = next(_numbers)
    _handles[number] = handle
    return number


def forget_handles() -> None:
    """Forget all asynchronous collectives, at the end of a job or of one set of ranks of an elastic job.

    ``poll`` then raises ValueError for their numbers, and ``synchronize`` returns None.
    """
    _handles.clear()


def poll(handle: int) -> bool:
    """Return whether a collective has ended or failed, so that ``synchronize`` would not block. Does not block.

    Args:
        handle: number that an asynchronous collective has returned, and for which ``synchronize`` was not called yet;
            not the function that ``sparse_allreduce_async`` returns.

    Raises:
        ValueError: the handle is unknown.
    """
    if handle not in _handles:
        raise ValueError(f"Handle {handle} was not created or has been cleared.")
    return _handles[handle].done


@translated
def synchronize(handle: Any) -> Any:
    """Block until an asynchronous collective is complete and return its result; the handle is invalid from then on.

    Args:
        handle: result of an asynchronous collective: a number, or the function of ``sparse_allreduce_async``.

    Returns:
        The result; None, as in Horovod, for a number that was synchronised before or that no collective returned.

    Raises:
        HorovodInternalError: ranks' calls differ, or a rank is lost.
    """
    if callable(handle):
        return handle()
    if (found := _handles.get(handle)) is None:
        return None
    try:
        return found.wait()
    finally:
        _handles.pop(handle, None)
