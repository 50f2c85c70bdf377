"""What is said between a rank and a parameter server: a header of fixed size, numbers, and tensors as raw bytes.

A message is a list of frames: the header; ``extras``, 64-bit floats; a frame for each section of the parameters, or a
blob. Everything is compared with what was agreed before the first message, before anything of it is allocated or
computed with. There is no pickle, and nothing in a message says what code is to run.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

MAGIC, VERSION = b"TUTI", 1
_HEADER = struct.Struct("<4sBBHQQIIQQQIIQ")
HEADER_BYTES = _HEADER.size

HELLO, PUSH, SUM, APPLY, PULL, READ, SAVE, LOAD, FACTS = range(1, 10)
"""Kinds of requests; an answer has the kind of its request."""
SMALL = 64 << 10
"""Bytes of a message below which it is quicker to copy it than to keep track of when it has been sent."""
NAMES = ("", "hello", "push", "sum", "apply", "pull", "read", "save", "load", "facts")
_LAST_KIND = FACTS

SHARED, SKIP, BACK, WAIT = 1, 2, 4, 8
"""Flags: the tensors are in shared memory; nothing is to be updated; answer with the parameters; when it may be."""
OK, LATE, LOST, REFUSED = range(4)
"""What an answer says: done; too late to count; the server was restored and knows less; the numbers are not finite."""


class Malformed(ValueError):
    """A message that is not what was agreed. It changes nothing."""


class Header(NamedTuple):
    """The first frame.

    Attributes:
        kind: what is asked.
        flags: of a request; in an answer how it went.
        run: of which run; another run's messages are refused.
        layout: digest of names, shapes, types and their cutting.
        client: the rank that asks; it must be the one that its key belongs to.
        worker: the worker concerned.
        seq: number of the request, growing with every one that a rank sends to a server.
        clock: the worker's steps so far.
        seen: updates of the parameters that the worker has; in an answer those made so far.
        extras: how many floats follow.
        tensors: how many frames of tensors follow.
        size: bytes in them.
    """

    kind: int
    flags: int
    run: int
    layout: int
    client: int
    worker: int
    seq: int
    clock: int
    seen: int
    extras: int = 0
    tensors: int = 0
    size: int = 0

    def pack(self) -> bytes:
        """As bytes."""
        return _HEADER.pack(MAGIC, VERSION, *self)


@dataclass(frozen=True)
class Terms:
    """What was agreed before the first message.

    Attributes:
        run: a random number of this run.
        layout: see ``Header``.
        workers: of each client, which it plays.
        frames: bytes of each frame that tensors for this server come in.
        extras: of each kind of request, how many floats it has.
        most: bytes that a blob may have.
    """

    run: int
    layout: int
    workers: tuple[range, ...]
    frames: tuple[int, ...]
    extras: Mapping[int, int]
    most: int


def read(frames: Sequence[memoryview], terms: Terms, client: int) -> Header:
    """The header of a request whose every length is as agreed. Raises Malformed.

    Args:
        frames: the message without its address.
        terms: what was agreed.
        client: the rank whose key the connection was made with.
    """
    header = unpack(frames[0]) if frames else None
    if header is None:
        raise Malformed("no header")
    if header.run != terms.run or header.layout != terms.layout:
        raise Malformed("of another run")
    if header.client != client or not 0 <= client < len(terms.workers):
        raise Malformed("of another client")
    if header.worker not in terms.workers[client]:
        raise Malformed("for another's worker")
    if max(header.seq, header.clock, header.seen) >= 1 << 62:
        raise Malformed("a count that is too large")
    if header.extras != terms.extras.get(header.kind, 0):
        raise Malformed("a wrong number of floats")
    _check_payload(header, terms)
    expected = [HEADER_BYTES, 8 * header.extras, *_lengths(header, terms)]
    if [len(frame) for frame in frames] != expected:
        raise Malformed("frames of other lengths than announced")
    return header


def unpack(raw: memoryview | bytes) -> Header | None:
    """A header from bytes; None where they are none."""
    if len(raw) != HEADER_BYTES:
        return None
    magic, version, kind, *rest = _HEADER.unpack(raw)
    if magic != MAGIC or version != VERSION or not 0 < kind <= _LAST_KIND:
        return None
    return Header(kind, *rest)


def _check_payload(header: Header, terms: Terms) -> None:
    if header.kind == LOAD:
        right = header.tensors == 1 and header.size <= terms.most
    elif header.kind == PUSH and not header.flags & (SHARED | SKIP):
        right = header.tensors == len(terms.frames) and header.size == sum(terms.frames)
    else:
        right = header.tensors == header.size == 0
    if not right:
        raise Malformed("tensors of another size")


def _lengths(header: Header, terms: Terms) -> Sequence[int]:
    if not header.tensors:
        return ()
    return (header.size,) if header.kind == LOAD else terms.frames
