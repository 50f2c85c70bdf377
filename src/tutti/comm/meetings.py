"""What ranks tell each other where one of them may be lost on the way: through files, which nobody dead can hold up.

Everyone leaves a file at each meeting and waits for everyone else's. Who is lost has left all files that it ever will,
so that all others find the same ones there: they agree on who took part without asking. Files live until all have read
them. One host, under tutti's own launcher.
"""

from __future__ import annotations

import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch
from torch import Tensor

from tutti.comm.stall import Call, StallInspector
from tutti.errors import PeerError
from tutti.world.context import World
from tutti.world.lost import Notes, write

_NAP = 0.001


class Meetings:
    """Of all ranks of a job.

    Args:
        notes: who is lost.
        world: this process's place.

    Attributes:
        there: the ranks that took part in the last meeting; nobody else comes to a later one.
    """

    def __init__(self, notes: Notes, world: World) -> None:
        identity = world.identity
        self.notes, self._rank, self._ranks = notes, identity.rank, tuple(range(identity.size))
        self.there = self._ranks
        # Who is stuck is ended by its watchdog within one time-out, and is lost then.
        self._stall = StallInspector(world.store, identity.rank, identity.size, 2 * world.timeout)
        self._number = 0

    def gather(self, raw: bytes, text: str) -> list[bytes]:
        """What each rank of ``there`` brought, in rank order. ``text`` is shown where a rank does not come.

        Raises PeerError as ``StallInspector.poll``.
        """
        self._number += 1
        write(self._path(self._rank), raw)
        awaited = list(self.there)

        def done(limit: timedelta) -> bool:
            end = time.monotonic() + limit.total_seconds()
            while True:
                # In this order: who is lost by now writes nothing any more.
                lost = self.notes.lost()
                awaited[:] = [rank for rank in awaited if not self._path(rank).exists() and rank not in lost]
                if not awaited or time.monotonic() > end:
                    return not awaited
                time.sleep(_NAP)

        if not done(timedelta()):
            self._stall.poll(done, Call(text, self.there))
        self.there = tuple(rank for rank in self.there if self._path(rank).exists())
        brought = [self._path(rank).read_bytes() for rank in self.there]
        # All have come here, and so have read what was left at the meeting before.
        with suppress(FileNotFoundError):
            self._path(self._rank, self._number - 1).unlink()
        return brought

    def tensors(self, tensor: Tensor, text: str) -> list[Tensor]:
        """Every present rank's tensor; all of one shape and dtype."""
        return [_tensor(raw, tensor) for raw in self.gather(_bytes(tensor), text)]

    def copy(self, tensor: Tensor, source: int, text: str) -> None:
        """In-place copy from rank ``source``."""
        brought = self.gather(_bytes(tensor) if self._rank == source else b"", text)
        if source not in self.there:
            raise PeerError(f"{text} failed: rank {source} has ended", where=f"rank {self._rank}")
        tensor.copy_(_tensor(brought[self.there.index(source)], tensor))

    def _path(self, rank: int, number: int | None = None) -> Path:
        return self.notes.meetings / f"{self._number if number is None else number}-{rank}"


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _tensor(raw: bytes, like: Tensor) -> Tensor:
    flat = torch.frombuffer(bytearray(raw), dtype=like.dtype) if raw else torch.empty(0, dtype=like.dtype)
    return flat.view(like.shape).to(like.device)
