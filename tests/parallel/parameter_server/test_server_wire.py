"""Messages that are not as agreed are refused by their lengths alone, whatever they claim."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tutti.parallel.parameter_server import server_wire
from tutti.parallel.parameter_server.server_wire import HELLO, LOAD, PUSH, SHARED, Malformed, MessageHeader, Terms

TERMS = Terms(run=7, layout=9, workers=(range(0, 2), range(2, 3)), frames=(64, 32), extras={PUSH: 3}, most=1000)
GOOD = MessageHeader(PUSH, 0, 7, 9, 0, 1, 5, 3, 2, extras=3, tensors=2, size=96)


def frames(header: MessageHeader, extras: int = 24, parts: tuple[int, ...] = (64, 32)) -> list[memoryview]:
    return [memoryview(header.pack()), memoryview(bytes(extras)), *(memoryview(bytes(n)) for n in parts)]


def test_good_messages_are_read() -> None:
    assert server_wire.read_header(frames(GOOD), TERMS, 0) == GOOD
    shared = GOOD._replace(flags=SHARED, tensors=0, size=0)
    assert server_wire.read_header(frames(shared, parts=()), TERMS, 0) == shared
    hello = MessageHeader(HELLO, 0, 7, 9, 1, 2, 1, 0, 0)
    assert server_wire.read_header(frames(hello, 0, ()), TERMS, 1) == hello
    load = MessageHeader(LOAD, 0, 7, 9, 0, 0, 1, 0, 0, tensors=1, size=500)
    assert server_wire.read_header(frames(load, 0, (500,)), TERMS, 0) == load


BAD: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "another run": ({"run": 8}, {}),
    "another layout": ({"layout": 8}, {}),
    "another client": ({"client": 1}, {}),
    "another's worker": ({"worker": 2}, {}),
    "no such worker": ({"worker": 1 << 31}, {}),
    "a lying size": ({"size": 1 << 63}, {}),
    "a huge clock": ({"clock": 1 << 63}, {}),
    "too few floats": ({"extras": 2}, {"extras": 16}),
    "too many floats": ({"extras": 1 << 31}, {}),
    "no tensors": ({"tensors": 0, "size": 0}, {"parts": ()}),
    "a frame too many": ({}, {"parts": (64, 32, 1)}),
    "a frame cut off": ({}, {"parts": (64, 31)}),
    "frames exchanged": ({}, {"parts": (32, 64)}),
    "an unknown kind": ({"kind": 99}, {}),
    "kind zero": ({"kind": 0}, {}),
    "tensors where there are none": ({"kind": HELLO, "extras": 0}, {"extras": 0}),
    "a blob that is too large": (
        {"kind": LOAD, "extras": 0, "tensors": 1, "size": 1001},
        {"extras": 0, "parts": (1001,)},
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_messages_are_refused(case: str) -> None:
    changes, shape = BAD[case]
    with pytest.raises(Malformed):
        server_wire.read_header(frames(GOOD._replace(**changes), **shape), TERMS, 0)


def mutated(rng: random.Random) -> list[memoryview]:
    """A good message with something done to it."""
    parts = [bytearray(frame) for frame in frames(GOOD)]
    for _ in range(rng.randint(1, 3)):
        victim = rng.choice(parts) if parts else bytearray()
        match rng.randrange(6):
            case 0 if victim:
                victim[rng.randrange(len(victim))] ^= 1 << rng.randrange(8)
            case 1:
                del victim[rng.randrange(len(victim) + 1) :]
            case 2:
                victim += rng.randbytes(rng.randint(1, 40))
            case 3 if parts:
                parts.remove(victim)
            case 4:
                parts.insert(rng.randint(0, len(parts)), bytearray(rng.randbytes(rng.randint(0, 200))))
            case _ if victim:
                at = rng.randrange(len(victim))
                victim[at : at + 8] = rng.choice([b"\xff" * 8, b"\x00" * 8, (1 << 62).to_bytes(8, "little")])
    return [memoryview(bytes(part)) for part in parts]


def fuzz(count: int, seed: int) -> tuple[int, int]:
    """How many of so many messages were refused, and how many read."""
    rng, refused = random.Random(seed), 0
    for _ in range(count):
        message = mutated(rng)
        try:
            header = server_wire.read_header(message, TERMS, 0)
        except Malformed:
            refused += 1
            continue
        # What is read has the lengths that were agreed, whatever else was changed.
        assert header.client == 0 and header.worker in (0, 1) and header.run == 7
        lengths = [len(frame) for frame in message]
        assert lengths in (
            [server_wire.HEADER_BYTES, 24, 64, 32],
            [server_wire.HEADER_BYTES, 24],
            [server_wire.HEADER_BYTES, 0],
        )
    return refused, count - refused


def test_random_messages_are_refused_or_as_agreed() -> None:
    refused, read = fuzz(3000, 0)
    assert refused > 2000 and read > 0
