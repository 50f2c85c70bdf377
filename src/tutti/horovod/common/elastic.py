"""States that survive failed collectives, and the loop that resets a job, with the names of ``horovod.common.elastic``.

A commit keeps a copy of the state in memory, on all ranks or on none. A failed collective brings it back; a change of
hosts keeps what is done. Then the ranks initialize again and continue with rank 0's state.
"""

from __future__ import annotations

import copy
import functools
import logging
import os
import queue
from collections.abc import Callable, Iterable
from enum import IntFlag
from typing import TYPE_CHECKING, Any, TypeVar

from tutti.errors import MismatchError
from tutti.horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt

log = logging.getLogger("tutti.elastic")

T = TypeVar("T")

RESET_LIMIT_EXCEEDED_MESSAGE = "Horovod was shutdown because number of resets during elastic job exceeded limit: {}"


class HostUpdateResult(IntFlag):
    """What changed about the hosts."""

    no_update = 0
    removed = 1
    added = 2
    mixed = 3


class State:
    """Something that a job keeps over resets; a subclass implements ``save``, ``restore`` and ``sync``.

    Args:
        bcast_object: returns rank 0's object; collective over all ranks.
        get_rank: returns this process's rank.
    """

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int]) -> None:
        self._bcast_object, self._rank = bcast_object, get_rank
        self._host_messages: queue.Queue[tuple[float, HostUpdateResult]] = queue.Queue()
        self._last_update = 0.0
        self._reset_callbacks: list[Callable[[], Any]] = []
        self.commits = 0

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], Any]]) -> None:
        """Add functions that are called after each reset, before the state is synchronised."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Forget messages about hosts, call ``reset`` and the registered functions."""
        self._host_messages = queue.Queue()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Take note of added or removed hosts, from any thread; rank 0's notes count at ``check_host_updates``."""
        self._host_messages.put((timestamp, HostUpdateResult(update_res)))

    def commit(self) -> None:
        """Save once every rank has come here, so that all ranks hold the same commit; then ``check_host_updates``.

        Collective over all ranks.
        """
        self._bcast_object(None)
        self.save()
        self.commits += 1
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Raise HostsUpdatedInterrupt on all ranks if rank 0 was told of new hosts. Collective over all ranks."""
        before, update = self._last_update, HostUpdateResult.no_update
        while not self._host_messages.empty():
            timestamp, found = self._host_messages.get()
            if timestamp > self._last_update:
                self._last_update = timestamp
                update |= found
        before, self._last_update, flags = self._bcast_object((before, self._last_update, int(update)))
        if self._last_update > before:
            raise HostsUpdatedInterrupt(flags == HostUpdateResult.removed)

    def save(self) -> None:
        """Keep a copy of the state in memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Return to the last copy."""
        raise NotImplementedError

    def sync(self) -> None:
        """Give all ranks rank 0's state."""
        raise NotImplementedError

    def reset(self) -> None:
        """Adapt to new ranks, after a reset."""

    def skip_sync(self) -> None:
        """Bring together what ranks hold apart, after a reset that needs no ``sync``: hosts were only removed."""


class ObjectState(State):
    """A state of attributes: None, numbers, texts, lists, tuples, sets, dicts, tensors and arrays.

    Args:
        bcast_object: returns rank 0's object; collective over all ranks.
        get_rank: returns this process's rank.
        kwargs: the attributes and their first values.
    """

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int], **kwargs: Any) -> None:
        super().__init__(bcast_object, get_rank)
        self._names = tuple(kwargs)
        self._saved_state: dict[str, Any] = {}
        for name, value in kwargs.items():
            setattr(self, name, value)
        ObjectState.save(self)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def _values(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._names}

    def save(self) -> None:
        """Copy the attributes."""
        self._saved_state = copy.deepcopy(self._values())

    def restore(self) -> None:
        """Set the attributes to the copy."""
        for name, value in copy.deepcopy(self._saved_state).items():
            setattr(self, name, value)

    def sync(self) -> None:
        """Set the attributes to rank 0's and copy them. Collective over all ranks.

        Raises:
            ValueError: on rank 0, for a value of another type, by name.
        """
        for name, value in self._bcast_object(self._values()).items():
            setattr(self, name, value)
        ObjectState.save(self)


def reset_limit() -> int | None:
    """Return the number of resets that ``HOROVOD_RESET_LIMIT`` allows; None without it."""
    text = os.environ.get("HOROVOD_RESET_LIMIT", "")
    if text and not text.isdecimal():
        raise ValueError(f"HOROVOD_RESET_LIMIT is '{text}'; it must be a whole number")
    return int(text) if text else None


def run_fn(func: Callable[..., T], reset: Callable[[bool], bool], hear: Callable[[State], None]) -> Callable[..., T]:
    """Return a function that calls ``func(state, …)`` again after each failed collective and each change of hosts.

    Args:
        func: trains; its first argument is a ``State``.
        reset: leaves the job and joins it again, told whether a collective failed; returns whether ranks may have
            been added, and raises HorovodInternalError where a rank is gone.
        hear: lets the state hear of changes of hosts from now on.

    Raises:
        HorovodInternalError: from the returned function, with the state of the last commit: the ranks could not join
            again, the resets are more than ``HOROVOD_RESET_LIMIT``, or ranks' calls differ twice at the same commit.
    """

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> T:
        limit, resets, skip_sync = reset_limit(), 0, False
        mismatched_at = -1
        joined = True
        reason: RuntimeError
        hear(state)
        while True:
            try:
                if not joined:
                    joined = True
                    state.on_reset()
                if skip_sync:
                    state.skip_sync()
                else:
                    state.sync()
                return func(state, *args, **kwargs)
            except HorovodInternalError as error:
                state.restore()
                if isinstance(error.__cause__, MismatchError):
                    if mismatched_at == state.commits:
                        raise
                    mismatched_at = state.commits
                reason, skip_sync = error, False
                log.warning("a collective failed; continuing from the last commit: %s", error)
            except HostsUpdatedInterrupt as interrupt:
                reason, skip_sync = interrupt, interrupt.skip_sync
                log.warning("hosts have changed")
            resets += 1
            if limit is not None and resets > limit:
                raise HorovodInternalError(RESET_LIMIT_EXCEEDED_MESSAGE.format(limit)) from reason
            # A rank that was added has no state: all synchronise.
            skip_sync = not reset(isinstance(reason, HorovodInternalError)) and skip_sync
            joined = False

    return wrapper
