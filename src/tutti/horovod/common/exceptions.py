"""Exceptions with Horovod's names."""

from __future__ import annotations


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
