"""All-gather over files that tolerates killed ranks, on one node under tutti's own launcher.

In each call every rank writes a file and waits for the files of the other ranks. A lost rank writes no more files, so
all surviving ranks see the same set of files and agree on the participants without another message. A file is removed
once all ranks have read it.
"""

from __future__ import annotations

import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch
from torch import Tensor

from tutti.comm.stall import ENDED_RANK, Call, StallInspector
from tutti.errors import PeerError
from tutti.launcher.context import World
from tutti.launcher.lost_rank_notes import LostRankNotes, write_whole

_NAP = 0.001


class FileAllGather:
    """All-gathers over files on one node, among the ranks of the job that have not been killed.

    Works under tutti's own launcher only, which records the ranks that were killed; calls do not wait for these.

    Args:
        notes: the launcher's record of lost ranks.
        world: rank, store and timeout of this process.

    Attributes:
        notes: the launcher's record of lost ranks.
        alive: global ranks that took part in the last call, ascending; only these take part in later ones. All ranks of
            the job before the first call.
    """

    def __init__(self, notes: LostRankNotes, world: World) -> None:
        identity = world.identity
        self.notes, self._rank, self._ranks = notes, identity.rank, tuple(range(identity.size))
        self.alive = self._ranks
        # Two timeouts: the watchdog of a stuck rank ends it within one, after which the rank counts as lost.
        self._stall = StallInspector(world, 2 * world.timeout)
        self._number = 0

    def gather(self, raw: bytes, text: str) -> list[bytes]:
        """All-gather bytes over files, among the ranks of the job that are alive, each of which must call it.

        Blocks until each rank has written its bytes or is marked as lost by the launcher, at most for twice the job's
        timeout. A rank that is lost takes no part in this call nor in later ones; all surviving ranks agree on this.

        Args:
            raw: this rank's bytes, of any length.
            text: names the call in PeerError and MismatchError.

        Returns:
            The bytes of each rank that took part, in order of global rank, the same list on all ranks. The attribute
            ``alive`` then has these global ranks.

        Raises:
            PeerError: a rank that is still alive did not make the call in time.
            MismatchError: deadlock: every rank waits in a call that at least one other rank has not made.
        """
        self._number += 1
        write_whole(self._path(self._rank), raw)
        awaited = list(self.alive)

        def done(limit: timedelta) -> bool:
            end = time.monotonic() + limit.total_seconds()
            while True:
                # Read the lost ranks before looking for files: a rank that is lost by now writes no more.
                lost = self.notes.lost()
                awaited[:] = [rank for rank in awaited if not self._path(rank).exists() and rank not in lost]
                if not awaited or time.monotonic() > end:
                    return not awaited
                time.sleep(_NAP)

        if not done(timedelta()):
            self._stall.poll(done, Call(text, self.alive))
        self.alive = tuple(rank for rank in self.alive if self._path(rank).exists())
        brought = [self._path(rank).read_bytes() for rank in self.alive]
        # Every rank has reached this call, and so has read the files of the call before.
        with suppress(FileNotFoundError):
            self._path(self._rank, self._number - 1).unlink()
        return brought

    def tensors(self, tensor: Tensor, text: str) -> list[Tensor]:
        """All-gather a tensor over files, among the ranks of the job that are alive, each of which must call it.

        Blocks for twice the job's timeout at most. Ranks that are killed meanwhile are left out.

        Args:
            tensor: of equal shape and dtype on all ranks, which is not checked; on any device.
            text: names the call in PeerError and MismatchError.

        Returns:
            A new tensor for each rank that took part, in order of global rank, on the device of ``tensor``; equal on
            all ranks. The attribute ``alive`` then has these global ranks.

        Raises:
            PeerError: a rank that is still alive did not make the call in time.
            MismatchError: deadlock: every rank waits in a call that at least one other rank has not made.
        """
        return [_tensor(raw, tensor) for raw in self.gather(_bytes(tensor), text)]

    def copy(self, tensor: Tensor, source: int, text: str) -> None:
        """Broadcast a tensor in place over files to the ranks of the job that are alive, all of which must call it.

        Blocks for twice the job's timeout at most.

        Args:
            tensor: of equal shape and dtype on all ranks, on any device; overwritten by the values of ``source``.
            source: global rank of the source.
            text: names the call in PeerError and MismatchError.

        Raises:
            PeerError: the source is lost, or a rank that is alive did not make the call in time.
            MismatchError: deadlock: every rank waits in a call that at least one other rank has not made.
        """
        brought = self.gather(_bytes(tensor) if self._rank == source else b"", text)
        if source not in self.alive:
            raise PeerError(f"{text} failed: rank {source} has ended", where=f"rank {self._rank}", remedy=ENDED_RANK)
        tensor.copy_(_tensor(brought[self.alive.index(source)], tensor))

    def _path(self, rank: int, number: int | None = None) -> Path:
        return self.notes.messages / f"{self._number if number is None else number}-{rank}"


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _tensor(raw: bytes, like: Tensor) -> Tensor:
    flat = torch.frombuffer(bytearray(raw), dtype=like.dtype) if raw else torch.empty(0, dtype=like.dtype)
    return flat.view(like.shape).to(like.device)
