"""Exceptions with Horovod's names."""

from __future__ import annotations


class HorovodInternalError(RuntimeError):
    """A collective failed: ranks' calls differ, or a rank has ended or left."""


class HostsUpdatedInterrupt(RuntimeError):
    """Hosts of an elastic job were added or removed.

    Args:
        skip_sync: whether the state need not be synchronised again.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__()
        self.skip_sync = skip_sync
