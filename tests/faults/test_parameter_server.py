"""Parameter servers under fire: killed, asked twice, lied to, asked by strangers; workers that stop or die."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import socket
import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest
import torch
import zmq

from tests.launching import until
from tests.parallel.parameter_server.test_server_wire import fuzz
from tests.servers import RUN, served
from tutti.errors import AuthenticationError
from tutti.parallel.parameter_server import curve_keys, server_wire
from tutti.parallel.parameter_server.client import Client
from tutti.parallel.parameter_server.server_wire import FACTS, PULL, WAIT

pytestmark = [pytest.mark.faults]


def facts(client: Client) -> dict[str, Any]:
    [reply] = client.ask(FACTS, 0, 0, "facts", (0,))
    found: dict[str, Any] = json.loads(reply.frames[0])
    return found


def in_a_process(work: Callable[[], None]) -> int:
    """Fork a process that does ``work`` and ends."""
    pid = os.fork()
    if pid == 0:
        try:
            # The threads of OpenMP are not there after a fork.
            torch.set_num_threads(1)
            work()
        finally:
            os._exit(0)
    return pid


# --- the server dies (7) -------------------------------------------------------------------------------------------


@pytest.mark.row(7)
def test_a_killed_server_goes_on_from_its_snapshot(seed: int, record_property: Callable[[str, object], None]) -> None:
    rng, every = random.Random(seed), 10
    with served(clients=2, snapshot=every) as at:
        clients = [at.client(rank) for rank in range(2)]
        made, seen = rng.randint(15, 40), [0, 0]
        for clock in range(made):
            for rank in range(2):
                seen[rank] = at.push(clients[rank], rank, clock, seen[rank]).header.seen
        assert at.read(clients[0]) == (2 * made, -2.0 * made)
        start = time.monotonic()
        os.kill(at.pid(), signal.SIGKILL)
        reply = at.push(clients[0], 0, made, seen[0])
        record_property("recovery of a server, s", time.monotonic() - start)
        version, value = at.read(clients[0])
        assert value == -version, "the snapshot is of one moment"
        lost = 2 * made - (version - 1)
        assert 0 <= lost <= every
        assert reply.extras[1] <= at.push(clients[1], 1, made, seen[1]).extras[1] == lost, "what was lost is told"
        record_property("acknowledged updates lost", lost)
        for clock in range(made + 1, made + 11):
            at.push(clients[0], 0, clock, version)
        assert at.read(clients[0]) == (version + 11, value - 11)


@pytest.mark.row(7)
def test_a_server_that_is_killed_again_and_again_never_has_half_a_push(seed: int) -> None:
    rng = random.Random(seed)
    with served(clients=1, snapshot=1, elements=3000) as at:
        client = at.client(0)
        clock = 0
        for _ in range(4):
            end = time.monotonic() + rng.uniform(0.05, 0.3)
            while time.monotonic() < end:
                at.push(client, 0, clock)
                clock += 1
            os.kill(at.pid(), signal.SIGKILL)
            before, clock = clock, clock + 1
            at.push(client, 0, before)
            version, value = at.read(client)
            # With a snapshot an update, at most the push whose answer was not yet sent is lost.
            assert value == -version and clock - version <= 4
        at.host.look()


@pytest.mark.row(7)
def test_a_worker_that_waits_for_a_server_while_it_dies_is_answered_by_its_next_process() -> None:
    """The snapshot is of a moment in which the worker's request has arrived and its reply has not been sent."""
    with served(clients=3, bound=1, snapshot=1) as at:
        first, slow, third = (at.client(rank) for rank in range(3))
        at.push(slow, 1, 0)
        for clock in range(3):
            at.push(first, 0, clock)
        first.send(PULL, 0, 3, flags=WAIT)
        assert at.read(slow, 1) == (4, -4.0)
        at.push(third, 2, 0)
        assert at.read(third, 2) == (5, -5.0), "the snapshot after the push is written"
        assert not first._done(0.0), "two steps ahead of the slowest"
        os.kill(at.pid(), signal.SIGKILL)
        at.push(slow, 1, 1)
        at.push(third, 2, 1)
        [reply] = first.wait("read", (0,))
        assert reply.header.seen >= 6
        assert at.read(first) == (7, -7.0)


@pytest.mark.row(7)
def test_a_repeated_push_whose_reply_died_with_the_server_counts_once_and_is_answered() -> None:
    with served(clients=1, snapshot=1) as at:
        client = at.client(0)
        at.push(client, 0, 0)
        assert at.read(client) == (1, -1.0)
        os.kill(at.pid(), signal.SIGKILL)
        client._seq[0] = 0
        assert at.push(client, 0, 0).header.seen == 1
        assert at.read(client) == (1, -1.0)


# --- pushes (8, 9) -------------------------------------------------------------------------------------------------


@pytest.mark.row(8)
def test_a_client_killed_in_a_push_leaves_all_of_it_or_nothing(
    seed: int, record_property: Callable[[str, object], None]
) -> None:
    rng, size = random.Random(seed), 400_000
    with served(clients=6, elements=size) as at:
        honest = at.client(0)

        def push_for_ever(rank: int) -> None:
            client, clock = at.client(rank), 0
            while True:
                at.push(client, rank, clock, flags=0)
                clock += 1

        half = 0
        for rank in range(1, 6):
            before = at.read(honest)[0]
            victim = in_a_process(lambda rank=rank: push_for_ever(rank))  # type: ignore[misc]
            until(lambda before=before: at.read(honest)[0] > before)  # type: ignore[misc]
            time.sleep(rng.uniform(0, 0.3))
            os.kill(victim, signal.SIGKILL)
            os.waitpid(victim, 0)
            version, value = at.read(honest)
            half += value != -version
        record_property("pushes applied in part", half)
        assert half == 0
        assert version > 0
        at.push(honest, 0, 1000)
        assert at.read(honest)[0] == version + 1


@pytest.mark.row(9)
def test_repeated_and_reordered_pushes_count_once(seed: int, record_property: Callable[[str, object], None]) -> None:
    rng = random.Random(seed)
    with served(clients=2) as at:
        line, clocks = at.raw(0), 30
        sent = [at.frames(0, seq=clock + 1, clock=clock) for clock in range(clocks)]
        # Each a few times, a window of them out of order; the last one last, so that its answer tells of all.
        order = [i for i in range(clocks) for _ in range(rng.randint(1, 3))]
        mixed = [*sorted(order, key=lambda i: i + rng.uniform(0, 3)), clocks - 1]
        for index in mixed:
            line.send_multipart(sent[index])
        applied = set()
        highest = -1
        for index in mixed:
            if index > highest:
                applied.add(index)
                highest = index
        answered = 0
        while server_wire.unpack(line.recv_multipart()[0]).seq < clocks:  # type: ignore[union-attr]
            answered += 1
        honest = at.client(1)
        version, value = at.read(honest, 1)
        wrong = abs(version - len(applied))
        record_property("wrong applies", wrong)
        assert (wrong, value) == (0, -version)
        # The same clock under a new number is the same push.
        line.send_multipart(at.frames(0, seq=clocks + 5, clock=clocks - 1))
        while server_wire.unpack(line.recv_multipart()[0]).seq < clocks + 5:  # type: ignore[union-attr]
            pass
        assert at.read(honest, 1)[0] == version
        line.close()


# --- strangers (23, 24, 25) ----------------------------------------------------------------------------------------


@pytest.mark.row(23)
def test_strangers_reach_nothing(record_property: Callable[[str, object], None]) -> None:
    with served(clients=2) as at:
        honest = at.client(0)
        at.push(honest, 0, 0)
        with pytest.raises(AuthenticationError) as refused:
            at.push(at.client(1, keys=curve_keys.make_keys()), 1, 0)
        assert refused.value.exit_code == 7
        stranger = curve_keys.make_keys()
        for own, server in [(at.clients[1], stranger.public), (stranger, stranger.public)]:
            line = zmq.Context.instance().socket(zmq.DEALER)
            line.linger, line.rcvtimeo = 0, 500
            curve_keys.secure_client(line, own, server)
            line.connect(at.address.endpoint)
            line.send_multipart(at.frames(1, 1, 0))
            with pytest.raises(zmq.Again):
                line.recv()
            line.close()
        plain = zmq.Context.instance().socket(zmq.DEALER)
        plain.linger, plain.rcvtimeo = 0, 500
        plain.connect(at.address.endpoint)
        plain.send_multipart(at.frames(1, 1, 0))
        with pytest.raises(zmq.Again):
            plain.recv()
        plain.close()
        host, _, port = at.address.endpoint.removeprefix("tcp://").partition(":")
        with socket.create_connection((host, int(port))) as garbage:
            garbage.sendall(os.urandom(5000))
        # A key of this run, and messages of another: an old run's, another client's.
        line = at.raw(1)
        for changes in ({"run": 4}, {"layout": 4}, {"client": 0, "worker": 0}, {"worker": 0}):
            line.send_multipart(at.frames(1, 1, 0, **changes))
        line.send_multipart(at.frames(1, 1, 0))
        line.recv_multipart()
        line.close()
        at.push(honest, 0, 1)
        assert at.read(honest) == (3, -3.0)
        found = facts(honest)
        record_property("strangers let in", found["updates"] - 3)
        assert found["keys_refused"] > 0 and found["malformed"] == 4


@pytest.mark.row(24)
def test_a_hundred_thousand_random_messages_are_refused(seed: int) -> None:
    refused, read = fuzz(100_000, seed)
    assert refused > 80_000 and read + refused == 100_000


@pytest.mark.row(24)
def test_a_holder_of_a_key_that_sends_nonsense_stops_nobody(
    seed: int, record_property: Callable[[str, object], None]
) -> None:
    rng = random.Random(seed)
    with served(clients=2) as at:
        honest, line = at.client(0), at.raw(1)
        at.push(honest, 0, 0)
        memory = psutil.Process(at.pid()).memory_info().rss
        for number in range(10_000):
            # No single bit makes of it a push of this run.
            parts = [bytearray(part) for part in at.frames(1, 2 * number, 0, run=RUN ^ 7)]
            victim = rng.choice(parts)
            match rng.randrange(4):
                case 0:
                    victim[rng.randrange(len(victim))] ^= 1 << rng.randrange(8)
                case 1:
                    del victim[rng.randrange(len(victim)) :]
                case 2:
                    parts.remove(victim)
                case _:
                    parts = [bytearray(rng.randbytes(rng.randint(0, 300))) for _ in range(rng.randint(1, 6))]
            line.send_multipart([bytes(part) for part in parts])
            if number % 1000 == 0:
                at.push(honest, 0, 1 + number // 1000)
        assert at.read(honest) == (11, -11.0)
        # Not even its own worker's parameters can be pushed to with numbers that are not finite.
        nan = at.frames(1, 10**6, 0)
        nan[2] = b"\xff" * len(nan[2])
        line.send_multipart(nan)
        assert server_wire.unpack(line.recv_multipart()[0]).flags == server_wire.REFUSED  # type: ignore[union-attr]
        assert at.read(honest) == (11, -11.0)
        found = facts(honest)
        grown = (psutil.Process(at.pid()).memory_info().rss - memory) / 2**20
        record_property("growth of memory, MiB", grown)
        assert found["malformed"] > 9000 and grown < 50
        line.close()


@pytest.mark.row(25)
def test_idle_connections_keep_nobody_from_working(record_property: Callable[[str, object], None]) -> None:
    count = 1000
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 3 * count:
        pytest.skip("too few open files are allowed")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        with served(clients=1) as at:
            honest = at.client(0)

            def rate(first: int) -> float:
                start = time.monotonic()
                for clock in range(first, first + 300):
                    at.push(honest, 0, clock)
                return 300 / (time.monotonic() - start)

            rate(0)
            alone = rate(300)
            host, _, port = at.address.endpoint.removeprefix("tcp://").partition(":")
            idle = [socket.create_connection((host, int(port))) for _ in range(count)]
            for one in idle[::2]:
                one.sendall(b"\xff")  # begins a handshake, and does not go on
            beside = rate(600)
            record_property("throughput beside idle connections", beside / alone)
            assert at.read(honest)[0] == 900
            for one in idle:
                one.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# --- workers that stop or die (5, 8) -------------------------------------------------------------------------------


@pytest.mark.row(5, 8)
def test_others_go_on_without_a_worker_that_died(record_property: Callable[[str, object], None]) -> None:
    with served(clients=3, bound=2, lease=1.0) as at:
        clients = [at.client(rank) for rank in range(2)]

        def work_for_ever() -> None:
            client, clock = at.client(2), 0
            while True:
                at.push(client, 2, clock)
                clock += 1
                client.ask(PULL, 2, clock, "pull", (0,), flags=WAIT)

        victim = in_a_process(work_for_ever)
        largest = 0
        for clock in range(40):
            for rank in range(2):
                client = clients[rank]
                client.ask(PULL, rank, clock, "pull", (0,), flags=WAIT)
                at.push(client, rank, clock)
            if clock == 10:
                os.kill(victim, signal.SIGKILL)
                os.waitpid(victim, 0)
                stood = time.monotonic()
            if clock == 14:
                largest = int(1000 * (time.monotonic() - stood))
        record_property("until a dead worker is no longer waited for, ms", largest)
        version, value = at.read(clients[0])
        assert value == -version and version >= 80
