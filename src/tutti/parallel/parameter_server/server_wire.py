"""Wire format between a rank and a parameter server: header of fixed size, floats, tensors as raw bytes.

A message is a list of frames: the header; ``extras``, 64-bit floats; frames of tensor bytes as ``Terms.frames`` lists
them, or one blob. Each length is compared with the agreed ``Terms`` before anything is allocated or computed. There is
no pickle, and no message selects code to run.
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
"""Kinds of requests; a reply has the kind of its request."""
SMALL = 64 << 10
"""Bytes below which ZeroMQ copies a message, which is quicker than tracking when the buffer has been sent."""
NAMES = ("", "hello", "push", "sum", "apply", "pull", "read", "save", "load", "facts")
_LAST_KIND = FACTS

SHARED, SKIP, BACK, WAIT, EDITED = 1, 2, 4, 8, 16
"""Flags: tensors are in shared memory; make no update; reply with parameters, or with summed gradients to a SUM; reply
once the worker may proceed, or all ranks have asked; the gradients of the update itself, in place of terms of a sum."""
OK, LATE, REFUSED = range(3)
"""Status of a reply: done; too late to count; non-finite gradient or unserved request."""


class Malformed(ValueError):
    """Raised for a message to a parameter server that differs from the agreed ``Terms``; the server ignores it."""


class MessageHeader(NamedTuple):
    """First frame of a message between a rank and a parameter server, of fixed size.

    Attributes:
        kind: kind of request: HELLO (first contact), PUSH (gradients), SUM (statistics of the summed gradients), APPLY
            (make the update), PULL (read parameters for a step), READ (read parameters), SAVE and LOAD (state of the
            server) or FACTS (statistics); a reply has its request's.
        flags: flags of a request (SHARED, SKIP, BACK, WAIT, EDITED, combined by ``|``); in a reply the status (OK, LATE
            or REFUSED).
        run: identifier of the run; other runs' messages are refused.
        layout: digest of names, shapes, dtypes and partition of the parameters.
        client: rank that sends the request; must be the owner of the connection's key.
        worker: index of the logical worker (share of the global batch) that the request is for.
        seq: sequence number of the request, which grows with each request of a rank to a server.
        clock: steps that the worker has taken; of a synchronous server the number of the sum.
        seen: updates contained in the worker's parameters; in a reply, updates made so far.
        extras: number of floats that follow.
        tensors: number of tensor or blob frames that follow.
        size: bytes in these frames.
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
        """Return this message header as bytes: the first frame of a message between a rank and a parameter server.

        The frame has a fixed length of ``HEADER_BYTES`` bytes, little-endian and without padding: the magic number
        ``TUTI`` (4 bytes) and the version of the wire format (1 byte), then the header's 12 fields as unsigned
        integers, in the order of the named tuple: ``kind`` (1 byte), ``flags`` (2), ``run`` and ``layout`` (8 each),
        ``client`` and ``worker`` (4 each), ``seq``, ``clock`` and ``seen`` (8 each), ``extras`` and ``tensors`` (4
        each) and ``size`` (8). The tensors of the message follow in other frames.
        """
        return _HEADER.pack(MAGIC, VERSION, *self)


@dataclass(frozen=True)
class Terms:
    """Identifiers and lengths, agreed before the first message, that a parameter server checks each request against.

    Attributes:
        run: random identifier of this run.
        layout: digest of names, shapes, dtypes and partition of the parameters.
        workers: for each rank the range of indices of its logical workers (shares of the global batch).
        frames: bytes of each tensor frame of this server, in the order of the message.
        extras: number of floats of each kind of request; 0 for kinds not listed.
        most: largest size of a blob, bytes.
    """

    run: int
    layout: int
    workers: tuple[range, ...]
    frames: tuple[int, ...]
    extras: Mapping[int, int]
    most: int


def read_header(frames: Sequence[memoryview], terms: Terms, client: int) -> MessageHeader:
    """Check a request to a parameter server against the agreed terms, and return its header.

    Compared are the identifiers of run and parameter layout, the sending rank, the index of the logical worker (share
    of the global batch) and every length. The tensors themselves are not decoded.

    Args:
        frames: the message without its address: header, floats, then tensors or saved state.
        terms: identifiers and lengths that ranks and server have agreed on at the start.
        client: rank whose key the connection was made with, as an index among the data ranks.

    Returns:
        The header, all of whose fields agree with the terms.

    Raises:
        Malformed: the message differs from the terms.
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


def unpack(raw: memoryview | bytes) -> MessageHeader | None:
    """Parse the first frame of a message between a rank and a parameter server.

    Args:
        raw: the frame, as ``MessageHeader.pack`` writes it.

    Returns:
        The header; None if length, magic number, version or kind of request are wrong. The other fields are not
        checked.
    """
    if len(raw) != HEADER_BYTES:
        return None
    magic, version, kind, *rest = _HEADER.unpack(raw)
    if magic != MAGIC or version != VERSION or not 0 < kind <= _LAST_KIND:
        return None
    return MessageHeader(kind, *rest)


def _check_payload(header: MessageHeader, terms: Terms) -> None:
    if header.kind == LOAD:
        right = header.tensors == 1 and header.size <= terms.most
    elif header.kind == PUSH and not header.flags & (SHARED | SKIP):
        right = header.tensors == len(terms.frames) and header.size == sum(terms.frames)
    else:
        right = header.tensors == header.size == 0
    if not right:
        raise Malformed("tensors of another size")


def _lengths(header: MessageHeader, terms: Terms) -> Sequence[int]:
    if not header.tensors:
        return ()
    return (header.size,) if header.kind == LOAD else terms.frames
