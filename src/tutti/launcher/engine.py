"""The seam between tutti and what starts processes: a protocol of four calls, of which each engine is one file.

``tutti.launcher.supervisor`` drives an engine, so that restarts, logs, the first cause and exit codes are the same on
all of them. ``hosts.py`` starts ranks on this node and over SSH, ``ray_engine.py`` on a Ray cluster. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class EndedRank:
    """Record of the end of a rank's process, as ``Engine.poll`` returns it.

    Attributes:
        code: exit code of the process; -N if signal N killed it, as ``subprocess`` has it.
        node: name of the node on which the process ran.
        lost: why the rank was lost together with its slot, the room for one rank on a node, such as with a node that
            failed; empty if the process itself ended.
        why: how the process was ended, in words such as ``was killed …``, where the engine knows more than its code.
        remedy: advice for the user, if known.
    """

    code: int
    node: str
    lost: str = ""
    why: str = ""
    remedy: str | None = None


class SlotsGone(Exception):
    """Raised when an engine cannot start the ranks, because there are fewer free slots than it had reported.

    A slot is room for one rank on a node. The text, if any, says what has failed.
    """


class EngineGone(Exception):
    """Raised when an engine does not answer any more, such as a Ray cluster whose head was killed.

    An engine is the object that starts the ranks of a job.
    """


class Engine(Protocol):
    """Protocol of an engine, the object by which a launcher starts, polls and ends the ranks of a job on its nodes.

    Ranks are started on slots: a slot takes one rank with its device. Rank 0's output is the terminal's; that of the
    other ranks goes to ``rank{N}.log`` in the engine's log folder.
    """

    def slots(self) -> Mapping[str, int]:
        """Return the free slots of each node; a slot is room for one rank, and the slots of running ranks are not free.

        ``supervise`` calls this method before each start of the ranks, and every two seconds while the job could grow.

        Returns:
            Name of the node → number of free slots.

        Raises:
            EngineGone: the engine, which starts the ranks, does not answer.
            AuthenticationError: a Ray cluster refuses this process.
        """

    def start(self, size: int, words: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start the processes of ranks 0 to ``size`` - 1 on free slots, without waiting for them to end.

        ``supervise`` calls this method once for each attempt of the job. A slot is room for one rank. Consecutive ranks
        fill one node before the next. Ranks that this method started earlier must have ended.

        Args:
            size: number of ranks.
            words: arguments of the Python interpreter, the same for every rank.
            environment: additional environment variables of every rank; the engine adds torchrun's variables for rank,
                number of ranks, and address and port of rank 0.

        Raises:
            SlotsGone: there are fewer than ``size`` slots by now.
            EngineGone: the engine does not answer.
            DiskError: a log for the output of ranks cannot be written.
            UsageError: a program that the engine needs, such as ``ssh``, is missing, or the engine refuses the ranks.
        """

    def poll(self) -> Sequence[EndedRank | None]:
        """Return how the process of each rank has ended; returns at once, or after a fraction of a second.

        ``supervise`` calls this method again and again until all ranks have ended.

        Returns:
            One entry for each rank, in rank order: None for a rank that still runs; else ``code`` (exit code, -N if
            signal N killed the process), ``node``, ``lost`` (why the rank was lost together with its slot, the room for
            a rank; empty if the process itself ended), ``why`` (how the process was ended, in words; empty if only the
            code is known) and ``remedy`` (advice for the user, or None).

        Raises:
            EngineGone: the engine, which starts the ranks, does not answer.
            DiskError: an engine that passes on the ranks' output, such as Ray's, cannot write a log.
        """

    def stop(self, number: int) -> None:
        """Send a signal to every rank that still runs.

        ``supervise`` passes on a signal that it got, SIGTERM to the ranks that are left after a failure, and SIGKILL at
        the end of each attempt of the job.

        Args:
            number: number of the signal. For SIGKILL the call blocks until the processes have ended, and their slots
                (places for a rank) are free for the next start.
        """
