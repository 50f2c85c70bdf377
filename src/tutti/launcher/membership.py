"""A rank's line to the elastic driver: it asks for a place in the next generation, and hears of lost ranks. No torch.

A generation is a job of fixed members, with a store of its own. The line is a socket pair that the rank inherits.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import socket
import threading
from collections.abc import Callable, MutableMapping
from typing import Any

from tutti.errors import PeerError


class Membership:
    """Connection of this rank to the driver of its elastic job, which assigns rank numbers and reports lost ranks.

    A generation is the time during which the job's set of ranks stays the same; each has a store of its own.

    Args:
        line: socket to the driver, on which a thread of this object listens.
        environ: environment variables; ``join`` writes the rank, size and store of each generation to them.

    Attributes:
        generation: number of the generation that this rank belongs to; -1 before the first.
        interrupted: why this generation cannot go on, as text; None while it can.
        on_lost: called with the reason, in the listening thread, when a rank of this generation is lost.
        on_update: called in the listening thread when ranks wait to join or to leave, with the time (Unix time in
            seconds) and the kind (1: ranks leave, 2: ranks join, 3: both).
    """

    def __init__(self, line: socket.socket, environ: MutableMapping[str, str]) -> None:
        self._line, self._environ = line, environ
        self.generation = -1
        self.interrupted: str | None = None
        self.on_lost: Callable[[str], None] = lambda _: None
        self.on_update: Callable[[float, int], None] = lambda _time, _kind: None
        # None once the driver has ended.
        self._places: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._lock = threading.Lock()
        threading.Thread(target=self._listen, name="tutti-membership", daemon=True).start()

    def join(self, failed: bool, leave: Callable[[], None]) -> None:
        """Leave the present set of ranks (generation) of an elastic job and join the next one.

        Blocks until the launcher has formed the next generation, for which every rank of the present one must have
        called this method or ended. Sets ``RANK``, ``WORLD_SIZE``, ``TUTTI_STORE`` and their local counterparts in the
        environment.

        Args:
            failed: whether this generation failed, so that the launcher interrupts the other ranks of this generation.
            leave: function without arguments that drops the connections of this generation; called when the launcher
                has answered, which is after every rank has left the generation, and before the environment is set.
                Called before the SystemExit too, but not before the PeerError.

        Raises:
            PeerError: the launcher of the elastic job has ended.
            SystemExit: the next generation has no place for this rank, because its slot was removed, or because other
                ranks have finished training before this rank became a member; the code is 0.
        """
        # A driver that has ended is found by the read, which follows its last message.
        with contextlib.suppress(OSError):
            self._line.sendall(json.dumps({"ready": self.generation, "failed": failed}).encode() + b"\n")
        place = self._places.get()
        if place is None:
            self._places.put(None)
            raise PeerError(
                "the launcher of the elastic job has ended, and gives no more places",
                remedy="start the job again; look for the launcher's end in its log, or for a kill by the system",
            )
        leave()
        if not place:
            raise SystemExit(0)
        with self._lock:
            self.generation, self.interrupted = place["generation"], None
        rank, size = str(place["rank"]), str(place["size"])
        self._environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
        self._environ.update(TUTTI_STORE=place["store"], TORCHELASTIC_RUN_ID="elastic")

    def check(self) -> None:
        """Raise PeerError if a rank of the elastic job has been lost since the present set of ranks began.

        ``tutti.init`` and ``hvd.init`` call this method while they wait for the other ranks of the set. It sends
        nothing: the thread that listens to the driver has recorded the loss in ``interrupted``.

        Raises:
            PeerError: a rank was lost; the message says why.
        """
        if self.interrupted is not None:
            raise PeerError(self.interrupted)

    def _listen(self) -> None:
        # A driver that is killed may leave half a line.
        with contextlib.suppress(OSError, json.JSONDecodeError), self._line.makefile("rb") as lines:
            for line in lines:
                message = json.loads(line)
                if "lost" in message:
                    # A later generation's loss cannot arrive before this rank has its place there.
                    self._lose(message["generation"], message["lost"])
                elif "update" in message:
                    self.on_update(message["time"], message["update"])
                else:
                    self._places.put(message["place"])
        self._places.put(None)

    def _lose(self, generation: int, text: str) -> None:
        with self._lock:
            # The place may still lie in the queue: wait for ``join`` to take it.
            current = generation == self.generation
            if current:
                self.interrupted = text
        if current:
            self.on_lost(text)
        elif generation > self.generation:
            threading.Timer(0.05, self._lose, (generation, text)).start()


_membership: Membership | None = None


def connect(line: socket.socket) -> None:
    """Make this process a rank of an elastic job: open its connection to the driver, which gives ranks their numbers.

    ``current_membership`` returns the connection from then on.

    Args:
        line: socket to the elastic driver, inherited from it.
    """
    global _membership
    _membership = Membership(line, os.environ)


def current_membership() -> Membership | None:
    """Return this process's connection to the driver of its elastic job, whose set of ranks changes while it runs.

    Returns:
        The connection, with ``join`` (leave the present set of ranks and join the next), ``check`` (raise if a rank was
        lost) and ``generation`` (number of the present set); None outside of elastic jobs.
    """
    return _membership
