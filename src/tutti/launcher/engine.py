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
    """The end of a rank's process.

    Attributes:
        code: its exit code; negative for a signal, as ``subprocess`` has it.
        node: name of its node.
        lost: why the rank was lost together with its slot; empty if the process itself ended.
        remedy: advice for the user, if known.
    """

    code: int
    node: str
    lost: str = ""
    remedy: str | None = None


class SlotsGone(Exception):
    """An engine could not start the ranks: slots that it had counted are not there any more."""


class EngineGone(Exception):
    """An engine does not answer any more, such as a Ray cluster whose head was killed."""


class Engine(Protocol):
    """Protocol of what starts the ranks of a job, such as SSH, Slurm or Ray.

    Ranks are started on slots: a slot takes one rank with its device. Rank 0's output is the terminal's; that of the
    other ranks goes to ``rank{N}.log`` in the engine's log folder.
    """

    def slots(self) -> Mapping[str, int]:
        """Return node name → number of free slots; a slot takes one rank, and the slots of running ranks are not free.

        Raises:
            EngineGone: the engine does not answer.
        """

    def start(self, size: int, words: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start the processes of ranks 0 to ``size`` - 1 on free slots, without waiting for them to end.

        Consecutive ranks fill one node before the next. Earlier ranks must have ended.

        Args:
            size: number of ranks.
            words: arguments of the Python interpreter, the same for every rank.
            environment: additional variables of every rank; the engine adds rank, size and rendezvous.

        Raises:
            SlotsGone: there are fewer slots by now.
            EngineGone: the engine does not answer.
        """

    def poll(self) -> Sequence[EndedRank | None]:
        """Return how each rank's process has ended, in rank order; None for a rank that still runs.

        Does not wait for an end.

        Raises:
            EngineGone: the engine does not answer.
        """

    def stop(self, number: int) -> None:
        """Send a signal to every rank that still runs.

        Args:
            number: number of the signal. For SIGKILL the call blocks until the processes have ended and their slots are
                free.
        """
