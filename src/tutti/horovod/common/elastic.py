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
    """Flags that say how the hosts of an elastic job have changed since the last check.

    ``removed`` is 1, ``added`` 2, ``mixed`` (both) 3, and ``no_update`` 0.
    """

    no_update = 0
    removed = 1
    added = 2
    mixed = 3


class State:
    """State of a training script that an elastic job keeps when its set of ranks changes, as Horovod's ``State``.

    A reset of the job follows a failed collective or a change of hosts. A subclass implements ``save``, ``restore`` and
    ``sync``.

    Args:
        bcast_object: broadcasts an object from rank 0 to all ranks and returns it; collective over all ranks.
        get_rank: returns this process's rank.
    """

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int]) -> None:
        self._bcast_object, self._rank = bcast_object, get_rank
        self._host_messages: queue.Queue[tuple[float, HostUpdateResult]] = queue.Queue()
        self._last_update = 0.0
        self._reset_callbacks: list[Callable[[], Any]] = []
        self._commits = 0

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], Any]]) -> None:
        """Register functions that are called after each reset of the elastic job, before its state is synchronised.

        A reset follows a failed collective or a change of hosts; a callback may adapt the learning rate to
        ``hvd.size()``.

        Args:
            callbacks: functions without arguments, added to those registered before.
        """
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Prepare this training state for a new set of ranks: call ``reset``, then the reset callbacks in order.

        The function that ``run_fn`` returns calls this method after the ranks have joined again. Earlier records of
        changed hosts are dropped.
        """
        self._host_messages = queue.Queue()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Record that hosts were added or removed, for the next ``check_host_updates``; safe from any thread.

        Called in a thread that listens to the launcher. Only the records of rank 0 count.

        Args:
            timestamp: time of the change in seconds; a change that is not newer than the last one is ignored.
            update_res: value of ``HostUpdateResult``: 1 removed, 2 added, 3 both.
        """
        self._host_messages.put((timestamp, HostUpdateResult(update_res)))

    def commit(self) -> None:
        """Save an elastic job's training state in memory on all ranks, then check for changed hosts.

        After a later failed collective the ranks restore this state. Collective over all ranks: a broadcast from rank
        0, for which each rank waits before it saves, so that either all ranks save or none does; then the broadcast of
        ``check_host_updates``; blocks.

        Raises:
            HostsUpdatedInterrupt: hosts have changed; on all ranks, after the state has been saved.
            HorovodInternalError: a broadcast failed.
        """
        self._bcast_object(None)
        self.save()
        self._commits += 1
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Raise HostsUpdatedInterrupt on all ranks if rank 0 has recorded a change of hosts since the last check.

        Collective over all ranks: broadcasts rank 0's records; blocks. A script calls this method between commits, so
        that the job takes up new hosts, or leaves removed ones, without going back to the last commit.

        Raises:
            HostsUpdatedInterrupt: hosts have changed; ``skip_sync`` is True if hosts were merely removed.
            HorovodInternalError: the broadcast failed.
        """
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
        """Keep a copy of the training state of an elastic job in this rank's memory, for ``restore``.

        Called by ``commit``. To be implemented by subclasses; no communication. Raises NotImplementedError here.
        """
        raise NotImplementedError

    def restore(self) -> None:
        """Set the training state of an elastic job back to the copy that ``save`` made last, on this rank.

        Called after a failed collective, by the function that ``run_fn`` returns. To be implemented by subclasses; no
        communication. Raises NotImplementedError here.
        """
        raise NotImplementedError

    def sync(self) -> None:
        """Replace the training state of all ranks of an elastic job by rank 0's.

        Called before each call of the training function, by the function that ``run_fn`` returns. To be implemented by
        subclasses as a collective over all ranks, such as a broadcast from rank 0; a new copy is kept for ``restore``.
        Raises NotImplementedError here.
        """
        raise NotImplementedError

    def reset(self) -> None:
        """Adapt this state to a new number of ranks, after the ranks of the elastic job have joined again.

        Called by ``on_reset``, before the reset callbacks and before the state is synchronised. Does nothing by
        default; a subclass may override the method.
        """

    def skip_sync(self) -> None:
        """Exchange only the parts of an elastic job's training state that differ between ranks.

        The function that ``run_fn`` returns calls this method instead of ``sync`` if hosts were merely removed since
        the last call of the training function: the other parts are then equal on all ranks. Does nothing by default. A
        subclass may implement it by collectives over all ranks; every rank makes the call.
        """


class ObjectState(State):
    """State of an elastic job whose values are attributes of this object, as Horovod's ``ObjectState``.

    The values may be None, numbers, texts, lists, tuples, sets, dicts, tensors and arrays.

    Args:
        bcast_object: broadcasts an object from rank 0 to all ranks and returns it; collective over all ranks.
        get_rank: returns this process's rank.
        kwargs: names and first values of the attributes, which are saved at once.
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
        """Keep a deep copy of the attributes of this elastic state in memory, for ``restore``; no communication."""
        self._saved_state = copy.deepcopy(self._values())

    def restore(self) -> None:
        """Set this elastic state's attributes back to the copy of the last ``save``, on this rank; no communication."""
        for name, value in copy.deepcopy(self._saved_state).items():
            setattr(self, name, value)

    def sync(self) -> None:
        """Set all attributes of this elastic state to rank 0's values, and save them on every rank.

        Collective over all ranks: broadcasts the values from rank 0; blocks.

        Raises:
            ValueError: an attribute of rank 0 has a type that cannot be sent; every rank's error names the type.
            HorovodInternalError: the broadcast failed.
        """
        for name, value in self._bcast_object(self._values()).items():
            setattr(self, name, value)
        ObjectState.save(self)


def reset_limit() -> int | None:
    """Return how often an elastic job may be reset, from ``HOROVOD_RESET_LIMIT``; None without a limit.

    A reset follows a failed collective or a change of hosts: the ranks leave the job and join it again.

    Raises:
        ValueError: the variable is not a whole number.
    """
    text = os.environ.get("HOROVOD_RESET_LIMIT", "")
    if text and not text.isdecimal():
        raise ValueError(f"HOROVOD_RESET_LIMIT is '{text}'; it must be a whole number")
    return int(text) if text else None


def run_fn(func: Callable[..., T], reset: Callable[[bool], bool], hear: Callable[[State], None]) -> Callable[..., T]:
    """Wrap a training function so that it is called again after each failed collective and each change of hosts.

    After a failed collective the state is set back to the last commit; after a change of hosts it stays as it is.
    Before each call of ``func`` rank 0's state is broadcast to all ranks (``State.sync``), unless hosts were merely
    removed; the call of the returned function is therefore collective over all ranks.

    Args:
        func: the training function; its first argument is a ``State``.
        reset: called as ``reset(failed)``, with whether a collective failed; leaves the job and joins it again. Returns
            whether ranks may have been added. Its exceptions propagate, such as HorovodInternalError where a rank is
            gone.
        hear: called with the state at each call of the returned function, before training; it arranges that
            ``state.on_hosts_updated`` is called when hosts change.

    Returns:
        A function with the arguments and result of ``func``, whose exceptions, other than the two that reset the job,
        propagate.

    Raises:
        HorovodInternalError: from the returned function: there were more resets than ``HOROVOD_RESET_LIMIT``; or the
            ranks' calls of a collective differ (MismatchError is the cause) for the second time since the last commit.
        ValueError: from the returned function: ``HOROVOD_RESET_LIMIT`` is not a whole number.
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
                    if mismatched_at == state._commits:
                        raise
                    mismatched_at = state._commits
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
