"""Snapshots from which a killed server is restored: two unlinked temporary files, so that nothing is left behind.

They outlive the server's process but not the process that started it; checkpoints cover the loss of a node. Snapshots
alternate between the two files, so that one is always complete, also when a write is interrupted.
"""

from __future__ import annotations

import hashlib
import os
import struct
import tempfile
from contextlib import suppress

_HEAD = struct.Struct("<QQ32s")


class Snapshots:
    """Two snapshot files of one parameter server, from which the server is restored after its process was killed.

    The files are temporary and already unlinked. They are made before the server's process, which inherits their
    descriptors. Snapshots alternate between the two, so that one is always complete.
    """

    def __init__(self) -> None:
        self._files = [_nameless(), _nameless()]

    @property
    def descriptors(self) -> list[int]:
        """The file descriptors of the two snapshot files of a parameter server, as a list of two integers.

        The files have no names: the descriptors must stay open until the server's process has inherited them.
        """
        return self._files

    def close(self) -> None:
        """Close a parameter server's two snapshot files in this process; processes that have inherited them keep them.

        Called once the server's process has been started.
        """
        for file in self._files:
            os.close(file)

    def write(self, number: int, content: bytes) -> None:
        """Write a snapshot of a parameter server over the older of the two snapshot files; the newer one stays intact.

        Args:
            number: number of the snapshot, counting up from 1.
            content: the bytes of the snapshot, of any length.

        Raises:
            OSError: writing fails.
        """
        file = self._files[number % 2]
        head = _HEAD.pack(number, len(content), hashlib.blake2b(content, digest_size=32).digest())
        os.pwrite(file, bytes(_HEAD.size), 0)
        at, view = _HEAD.size, memoryview(content)
        while view:
            done = os.pwrite(file, view[: 1 << 26], at)
            at, view = at + done, view[done:]
        os.pwrite(file, head, 0)

    def newest(self) -> tuple[int, bytes] | None:
        """Read the newest of a parameter server's two snapshots that was written completely.

        A snapshot is complete if its content has the digest that is stored with it.

        Returns:
            Number and content (bytes) of the snapshot, as they were passed to ``write``; None if there is no complete
            one.
        """
        found = []
        for file in self._files:
            head = os.pread(file, _HEAD.size, 0)
            if len(head) == _HEAD.size:
                number, length, digest = _HEAD.unpack(head)
                if number and length <= os.fstat(file).st_size - _HEAD.size:
                    found.append((number, length, digest, file))
        for number, length, digest, file in sorted(found, reverse=True):
            with suppress(OSError, MemoryError):
                content = _read(file, length)
                if hashlib.blake2b(content, digest_size=32).digest() == digest:
                    return number, content
        return None


def _nameless() -> int:
    file, path = tempfile.mkstemp(prefix="tutti-")
    os.unlink(path)
    return file


def _read(file: int, length: int) -> bytes:
    parts, at = [], _HEAD.size
    while length > 0 and (part := os.pread(file, min(length, 1 << 26), at)):
        parts.append(part)
        at, length = at + len(part), length - len(part)
    return b"".join(parts)
