"""Exceptions with Horovod's names, and the translation of tutti's exceptions to them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from tutti.errors import PeerError, UsageError

T = TypeVar("T", bound=Callable[..., Any])


class HorovodInternalError(RuntimeError):
    """Raised when a collective has failed: the calls of the ranks differ, or a rank has ended or left."""


class HostsUpdatedInterrupt(RuntimeError):
    """Raised when hosts of an elastic job were added or removed, so that the ranks leave the job and join it again.

    Args:
        skip_sync: whether the state need not be synchronised over the ranks again, because hosts were merely removed.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__()
        self.skip_sync = skip_sync


def translated(function: T) -> T:
    """Decorate a function so that it raises Horovod's exceptions instead of tutti's.

    ``PeerError`` (a failed collective, mismatched calls included) becomes HorovodInternalError, ``UsageError`` becomes
    ValueError; the cause is kept.

    Returns:
        A function with the arguments and result of ``function``.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except PeerError as error:
            raise HorovodInternalError(str(error)) from error
        except UsageError as error:
            if isinstance(error, ValueError):
                raise
            raise ValueError(str(error)) from error

    return call  # type: ignore[return-value]
