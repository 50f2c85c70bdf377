"""How often a server is asked the same thing, and whose call misses whom, by a clock of the test's own."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import zmq

from tests.servers import LAYOUT, RUN
from tutti.comm.stall import Call, is_complete
from tutti.parallel.parameter_server import client as module
from tutti.parallel.parameter_server import curve_keys
from tutti.parallel.parameter_server.client import Address, Client, ClientIdentity, Reply
from tutti.parallel.parameter_server.server_partition import Size, plan_servers
from tutti.parallel.parameter_server.server_wire import PUSH, SUM, MessageHeader

ELEMENTS = 5_000_000
TIMES = [0.0, 2.9, 3.1, 8.9, 9.2, 21.0, 21.3, 45.2, 45.4]


class Line:
    """A socket to a server that says nothing, and takes down when it was sent something."""

    full = False

    def __init__(self, now: SimpleNamespace) -> None:
        self._now, self.sent = now, []  # type: ignore[var-annotated]
        self.replies: list[list[zmq.Frame]] = []

    def poll(self, milliseconds: int) -> bool:
        return bool(self.replies)

    def recv_multipart(self, copy: bool) -> list[zmq.Frame]:
        return self.replies.pop()

    def send_multipart(self, frames: Any, flags: int, copy: bool) -> None:
        if self.full:
            raise zmq.Again
        self.sent.append(self._now.time)


class Noted:
    """The part of a stall inspector in which a rank says what it has sent."""

    def __init__(self) -> None:
        self.sent: list[str] = []


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(time=0.0)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.time))
    return clock


@pytest.fixture
def client(now: SimpleNamespace) -> Iterator[Client]:
    """One whose push is 20 MB: three seconds of patience. Its socket is a line."""
    shared_out = plan_servers([Size(ELEMENTS, 4, "float32")], 1, whole=False)
    memory = [torch.zeros(shared_out.size, dtype=torch.uint8) for _ in range(2)]
    who, where = (
        ClientIdentity(RUN, LAYOUT, 0, curve_keys.make_keys()),
        [Address("tcp://127.0.0.1:9", curve_keys.make_keys().public)],
    )
    made = Client(who, where, shared_out, *memory, False, Noted(), 20.0)  # type: ignore[arg-type]
    sockets = made._sockets
    made._sockets = [Line(now)]  # type: ignore[list-item]
    yield made
    made._sockets = sockets
    made.close()


def ask_at(client: Client, now: SimpleNamespace, times: list[float]) -> list[float]:
    """When, of ``times``, a message went out: a push at the first, and whatever is due at the others."""
    now.time = times[0]
    client.send(PUSH, 0, 0, extras=[1.0])
    for now.time in times[1:]:
        client._ask_again()
    line: Any = client._sockets[0]
    return list(line.sent)


def test_a_push_is_repeated_when_a_slow_link_must_have_taken_it_and_then_half_as_often(
    client: Client, now: SimpleNamespace
) -> None:
    assert ask_at(client, now, TIMES) == [0.0, 3.1, 9.2, 21.3, 45.4]


def test_a_push_is_not_repeated_while_it_takes_as_long_as_the_last_one(client: Client, now: SimpleNamespace) -> None:
    """Sixteen ranks that share a slow link wait longer than the patience of one."""
    line: Any = client._sockets[0]
    ask_at(client, now, [0.0])
    now.time = 10.0
    header = MessageHeader(PUSH, 0, RUN, LAYOUT, 0, 0, 1, 0, 0)
    line.replies = [[zmq.Frame(header.pack()), zmq.Frame(b"")]]
    client._receive(0)
    line.sent = []
    assert ask_at(client, now, [20.0, 30.0, 39.9, 40.1]) == [20.0, 40.1]


def test_where_there_is_nobody_to_send_to_it_is_tried_again_soon(client: Client, now: SimpleNamespace) -> None:
    line: Any = client._sockets[0]
    line.full = True
    assert ask_at(client, now, [0.0, 0.04]) == []
    line.full = False
    now.time = 0.06
    client._ask_again()
    now.time = 2.0
    client._ask_again()
    assert line.sent == [0.06]


def test_who_has_its_answer_already_is_not_missing_in_the_call_of_those_who_have_not(client: Client) -> None:
    """An answer to rank 1 is on its way over a full link while rank 0, next to the server, is one step ahead."""
    told: Any = client._stall
    for step in (1, 2):
        client._replies[0] = Reply(MessageHeader(SUM, 0, RUN, LAYOUT, 0, 0, 1, step, 0), [], [])
        client.wait(f"sum of gradients in step {step}", (0, 1))
    assert told.sent == ["sum of gradients in step 2"]
    behind = Call("sum of gradients in step 2", (0, 1))
    ahead = Call("sum of gradients in step 3", (0, 1), tuple(told.sent))
    waiting = {0: ahead, 1: behind}
    assert [is_complete(call, waiting) for call in waiting.values()] == [False, True]
