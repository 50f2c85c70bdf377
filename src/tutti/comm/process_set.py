"""Process sets: sets of ranks that perform public collectives among themselves, as in Horovod."""

from __future__ import annotations

from collections.abc import Sequence

from tutti.comm.collective_call import CollectiveCall
from tutti.comm.collective_session import CollectiveHandle
from tutti.comm.current_session import current_session
from tutti.errors import UsageError
from tutti.launcher import context


class ProcessSet:
    """A set of ranks that perform collectives among themselves, in increasing order of their global ranks.

    Args:
        ranks: global ranks of the members, in any order.

    Attributes:
        ranks: global ranks of the members.
        process_set_id: number of the set; None before ``add_process_set``; 0 for the set of all ranks.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self._ranks: tuple[int, ...] | None = tuple(sorted(int(rank) for rank in ranks))
        self.process_set_id: int | None = None

    @classmethod
    def of_all_ranks(cls) -> ProcessSet:
        """Return a new process set (a set of ranks for collectives) of all ranks of the job, with number 0.

        Collectives accept it without ``add_process_set``. Its members are looked up at each use, so that it may be made
        before ``tutti.init``.
        """
        process_set = cls(())
        process_set._ranks, process_set.process_set_id = None, 0
        return process_set

    @property
    def ranks(self) -> list[int]:
        """Global ranks of the members of the process set, in increasing order; a new list.

        For the set of all ranks, raises UsageError before ``tutti.init``.
        """
        return list(range(context.size())) if self._ranks is None else list(self._ranks)

    def size(self) -> int:
        """Return the number of ranks that are members of the process set, a set of ranks for collectives.

        For the set of all ranks, raises UsageError before ``tutti.init``.
        """
        return len(self.ranks)

    def included(self) -> bool:
        """Return whether this process's rank is a member of the process set. Local.

        Members may call collectives on the set, once all ranks have registered it by ``add_process_set``.

        Raises UsageError before ``tutti.init``.
        """
        return context.rank() in self.ranks

    def rank(self) -> int:
        """Return the index of this process in the process set, from 0; not its global rank.

        Raises:
            UsageError: this process is no member, or ``tutti.init`` was not called.
        """
        if not self.included():
            raise UsageError(f"rank {context.rank()} is not in {self}", remedy="check included() first")
        return self.ranks.index(context.rank())

    def __repr__(self) -> str:
        ranks = self.ranks if self._ranks is not None or context.is_initialized() else "all"
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={ranks})"


all_ranks = ProcessSet.of_all_ranks()
"""The process set of all ranks."""


def registered_number(process_set: ProcessSet) -> int:
    """Return the number of a process set on which this rank may call collectives.

    Args:
        process_set: the argument ``process_set`` that the script has given a collective; any object.

    Raises:
        UsageError: it is no ``ProcessSet``, is not registered, or does not have this rank as a member.
    """
    if not isinstance(process_set, ProcessSet):
        raise UsageError(
            f"process_set is of type {type(process_set).__name__}",
            remedy="give the ProcessSet that add_process_set returned",
        )
    number = process_set.process_set_id
    if number is None or number not in current_session().sets:
        raise UsageError(f"{process_set} is not known", remedy="call add_process_set on every rank first")
    if context.rank() not in current_session().sets[number]:
        raise UsageError(f"rank {context.rank()} is not in {process_set}", remedy="call it on the members alone")
    return number


class DuplicateSetError(UsageError, ValueError):
    """Raised where a process set is added and a set of the same ranks is registered already."""


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Register a set of ranks as a process set, on which collectives can then be called, and make its process group.

    Collective over all ranks, members or not; blocks.

    Args:
        process_set: the set, or the global ranks of its members in any order, which the set sorts; the same set on all
            ranks.

    Returns:
        ``process_set`` itself, or a new set of the given ranks; its ``process_set_id`` is set.

    Raises:
        UsageError: the set is empty, names a rank twice, or names a rank outside of the job; or ``tutti.init`` was not
            called.
        DuplicateSetError: a set of these ranks is known already.
        MismatchError: ranks' calls differ.
        PeerError: a rank has ended, or did not make the call in time.
    """
    session = current_session()
    process_set = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    ranks = tuple(process_set.ranks)
    if not ranks or len(set(ranks)) < len(ranks) or not 0 <= ranks[0] <= ranks[-1] < context.size():
        raise UsageError(f"{process_set} is not a set of ranks", remedy=f"give ranks from 0 to {context.size() - 1}")
    if ranks in session.sets.values():
        raise DuplicateSetError(f"Attempted to add a duplicate process set: {process_set}")
    call = CollectiveCall("add_process_set", session.name(0, "sets"), ranks=ranks, unnamed=True)
    process_set.process_set_id = int(session.submit(CollectiveHandle(call, session, [])).wait())
    return process_set


def remove_process_set(process_set: ProcessSet) -> bool:
    """Unregister a process set (a set of ranks), so that collectives can no longer be called on it.

    Collective over all ranks, members or not; blocks.

    Args:
        process_set: the set, as ``add_process_set`` returned it; the same on all ranks.

    Returns:
        Whether the set was registered and is now removed. False, without communication, for a set that is not
        registered, and for the set of all ranks, which stays.

    Raises:
        UsageError: ``tutti.init`` was not called.
        MismatchError: ranks' calls differ.
        PeerError: a rank has ended, or did not make the call in time.
    """
    session, number = current_session(), process_set.process_set_id
    if number is None or number == 0 or number not in session.sets:
        return False
    call = CollectiveCall("remove_process_set", session.name(0, "sets"), root=number, unnamed=True)
    session.submit(CollectiveHandle(call, session, [])).wait()
    del session.sets[number]
    process_set.process_set_id = None
    return True
