"""Client side of a rank: one socket per server, one request at a time on each, repeated until it is answered."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import zmq
from torch import Tensor

from tutti.comm.stall import Call, StallInspector
from tutti.errors import AuthenticationError, PeerError
from tutti.launcher import heartbeat
from tutti.launcher.heartbeat import Phase
from tutti.parallel.parameter_server import curve_keys, server_wire
from tutti.parallel.parameter_server.curve_keys import Keys
from tutti.parallel.parameter_server.server_partition import ServerPlan
from tutti.parallel.parameter_server.server_wire import PUSH, SHARED, SKIP, MessageHeader

_AGAIN, _SOON = 1.0, 0.05
# Bytes a second of the slowest network on which a request is not repeated while it is still being sent.
_SLOW = 1e7
# Most seconds that a slow reply delays the repetition of later requests.
_MOST = 30.0
_WAIT_MS, _LOOK = 20, 0.2
_PATIENT = 3
_EVENTS = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL


@dataclass(frozen=True)
class Address:
    """Network address of a parameter server, and the key that proves its identity.

    Attributes:
        endpoint: ZeroMQ endpoint, such as ``tcp://HOST:PORT``.
        key: the server's public CURVE key in Z85, 40 bytes.
    """

    endpoint: str
    key: bytes


@dataclass(frozen=True)
class Reply:
    """A parameter server's reply to one request.

    Attributes:
        header: header of the message.
        extras: floats whose meaning and number depend on the kind of request.
        frames: frames other than parameters (saved state, statistics); empty for most kinds of request.
    """

    header: MessageHeader
    extras: list[float]
    frames: list[bytes]


class RequestTraffic(NamedTuple):
    """Traffic between a rank and one parameter server by one kind of request, frames of tensors included.

    Attributes:
        requests: number of requests; a repeated one counts once.
        sent: bytes of their messages.
        received: bytes of the messages of their replies.
    """

    requests: int
    sent: int
    received: int


@dataclass(frozen=True)
class ClientIdentity:
    """Identity of a rank towards the parameter servers, sent in the header of each of its messages.

    Attributes:
        run: random number of the run, which all its ranks and servers share.
        layout: digest of names, shapes, dtypes and partition of the parameters; a server ignores a rank with another.
        client: index of the rank among the data ranks.
        keys: the rank's CURVE key pair, with which it proves its identity; the secret key is not sent.
    """

    run: int
    layout: int
    client: int
    keys: Keys


class Client:
    """Connections of one rank to all parameter servers: sends requests, repeats them, and receives the replies.

    At most one request is open on each server. While ``wait`` waits, a request is sent again from time to time until
    the server has answered. The constructor opens the connections and waits for nothing.

    Args:
        identity: rank, run, layout of the parameters, and key pair.
        addresses: addresses of the servers, in the order of their numbers.
        plan: partition of the parameters over the servers.
        pushed: (plan.size,) uint8, send buffer of gradients; receives summed gradients that a SUM asks for.
        given: (plan.size,) uint8, receive buffer of parameters.
        shared: whether ``pushed`` and ``given`` are shared memory that the servers access directly.
        stall: stall inspector of this process, for waits that involve other ranks.
        timeout: seconds within which a server must reply; three times as many where it may wait for other ranks.
        look: called while waiting; raises if a server is known to have ended.

    Attributes:
        bytes: bytes of tensors and saved state sent so far, without repetitions.
        traffic: number of requests, and bytes of requests and replies, by server number and name of the kind of
            request; without encryption, and without tensors in shared memory.
        close: closes the sockets; also called when this object is collected.
    """

    def __init__(
        self,
        identity: ClientIdentity,
        addresses: Sequence[Address],
        plan: ServerPlan,
        pushed: Tensor,
        given: Tensor,
        shared: bool,
        stall: StallInspector,
        timeout: float,
        look: Callable[[], None] = lambda: None,
    ) -> None:
        self._identity, self._stall, self._timeout, self._look = identity, stall, timeout, look
        self._shared, self._count = shared, len(addresses)
        regions = [plan.frames(server) for server in range(self._count)]
        self._pushed = [[pushed[r.start : r.stop] for r in region] for region in regions]
        self._given = [[given[r.start : r.stop] for r in region] for region in regions]
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._sockets: list[zmq.Socket[bytes]] = []
        self._monitors: list[zmq.Socket[bytes]] = []
        for address in addresses:
            self._connect(address)
        self._seq = [0] * self._count
        self._open: dict[int, tuple[list[bytes | memoryview], float, float]] = {}
        self._replies: dict[int, Reply] = {}
        # Kind and time of the last request by server, and the seconds that replies took by server and kind.
        self._begun: dict[int, tuple[int, float]] = {}
        self._took: dict[tuple[int, int], float] = {}
        self._sent = ""
        self.bytes = 0
        self.traffic: dict[tuple[int, str], RequestTraffic] = {}
        self.close = weakref.finalize(self, _close, os.getpid(), self._context, self._sockets, self._monitors)

    def _connect(self, address: Address) -> None:
        socket = self._context.socket(zmq.DEALER)
        curve_keys.secure_client(socket, self._identity.keys, address.key)
        socket.linger = 0
        socket.reconnect_ivl, socket.reconnect_ivl_max = 20, 500
        # ZeroMQ reports a refused key once and does not connect again: the monitor is there before.
        self._monitors.append(socket.get_monitor_socket(_EVENTS))
        socket.connect(address.endpoint)
        self._sockets.append(socket)

    def send(
        self,
        kind: int,
        worker: int,
        clock: int,
        *,
        flags: int = 0,
        extras: Sequence[float] = (),
        seen: Sequence[int] | None = None,
        blobs: Sequence[bytes] | None = None,
        servers: Sequence[int] | None = None,
    ) -> None:
        """Send a request to the parameter servers and return at once; ``wait`` returns the replies.

        One request at a time may be open on each server: call ``wait`` for the previous request first. A PUSH carries
        the gradients in the send buffer, which must not be written until the replies have come.

        Args:
            kind: a constant of ``server_wire``: HELLO (first contact), PUSH (gradients), SUM (statistics of the summed
                gradients), APPLY (make the update), PULL (read parameters for a step), READ (read parameters), SAVE and
                LOAD (state of the server) or FACTS (statistics).
            worker: index of the logical worker (share of the global batch) in whose name the request is made.
            clock: steps that the worker has taken; for synchronous servers the number of the sum of gradients.
            flags: of ``server_wire``, combined by ``|``: SKIP to make no update and send no tensors, BACK to reply with
                parameters, WAIT to reply only once the worker is no longer too far ahead.
            extras: floats of the request, in the order that ``SyncHandler.handle`` or ``AsyncHandler.handle`` describes
                for its ``kind``; none for kinds that neither describes.
            seen: for each server, the number of updates in the parameters that the worker has; None: 0.
            blobs: for each server, the saved state to load (LOAD); None sends none.
            servers: indices of the servers; None for all.
        """
        raw = np.asarray(extras, dtype="<f8").tobytes()
        # The first server comes last: a request that it has received has been sent to all servers.
        for server in reversed(range(self._count) if servers is None else servers):
            self._seq[server] += 1
            payload: list[bytes | memoryview] = [] if blobs is None else [blobs[server]]
            own = flags | (SHARED if kind == PUSH and self._shared else 0)
            if kind == PUSH and not own & (SHARED | SKIP):
                payload = [part.numpy().data for part in self._pushed[server]]
            size = sum(len(part) for part in payload)
            self.bytes += size
            who = self._identity
            header = MessageHeader(
                kind=kind,
                flags=own,
                run=who.run,
                layout=who.layout,
                client=who.client,
                worker=worker,
                seq=self._seq[server],
                clock=clock,
                seen=0 if seen is None else seen[server],
                extras=len(extras),
                tensors=len(payload),
                size=size,
            )
            frames: list[bytes | memoryview] = [header.pack(), raw, *payload]
            self._add_traffic(server, kind, 1, sum(map(len, frames)), 0)
            # A link that many ranks share takes longer: repeating what is under way would congest it more.
            patience = max(_AGAIN + size / _SLOW, min(2 * self._took.get((server, kind), 0.0), _MOST))
            self._begun[server] = kind, time.monotonic()
            self._post(server, frames, patience)

    def wait(self, text: str, ranks: tuple[int, ...], patient: bool = False) -> list[Reply]:
        """Wait for the parameter servers' replies to the requests that ``send`` has sent.

        Parameters that come with the replies are in the client's receive buffer (the constructor's ``given``)
        afterwards.

        Args:
            text: names the call in the messages of the errors below.
            ranks: global ranks on whose requests the replies depend, this rank among them. With several, the wait is
                watched as a collective: ranks that do not call ``wait`` with the same ``text`` are reported as missing.
            patient: the servers may wait for other ranks; triples the timeout where ``ranks`` is this rank alone.

        Returns:
            One ``Reply`` for each server that the requests went to, in the servers' order: message header (``header``),
            floats (``extras``), and for SAVE and FACTS the saved state or statistics (``frames``, a list of bytes).

        Raises:
            PeerError: no reply came in time, or a server has ended and is not started again.
            MismatchError: ranks wait in different calls.
            AuthenticationError: a server does not accept this rank's key.
        """
        if len(ranks) > 1:
            self._told(text)
        if not self._done(0):
            if len(ranks) > 1:
                self._stall.poll(lambda limit: self._done(limit.total_seconds()), Call(text, ranks))
            else:
                self._wait_alone(text, self._timeout * (_PATIENT if patient else 1))
        replies, self._replies = self._replies, {}
        return [replies[server] for server in sorted(replies)]

    def _told(self, text: str) -> None:
        """Note the call as sent for the stall inspector, so that a rank with all replies does not count as missing."""
        if self._sent in self._stall.sent:
            self._stall.sent.remove(self._sent)
        self._sent = text
        self._stall.sent.append(text)

    def _wait_alone(self, text: str, seconds: float) -> None:
        """Wait for servers alone: without the stall inspector, since no other rank is involved."""
        end = time.monotonic() + seconds
        with heartbeat.training.during(Phase.WAITING):
            while not self._done(_LOOK):
                heartbeat.training.beat(text)
                if time.monotonic() > end:
                    raise self._silent(text, seconds)

    def ask(self, kind: int, worker: int, clock: int, text: str, ranks: tuple[int, ...], **more: object) -> list[Reply]:
        """Send a request to the parameter servers and wait for their replies: ``send``, then ``wait``.

        Parameters that come with the replies are in the client's receive buffer (the constructor's ``given``)
        afterwards.

        Args:
            kind: a constant of ``server_wire``: HELLO (first contact), PUSH (gradients), SUM (statistics of the summed
                gradients), APPLY (make the update), PULL (read parameters for a step), READ (read parameters), SAVE and
                LOAD (state of the server) or FACTS (statistics).
            worker: index of the logical worker (share of the global batch) in whose name the request is made.
            clock: steps that the worker has taken; for synchronous servers the number of the sum of gradients.
            text: names the request in the messages of the errors below.
            ranks: global ranks on whose requests the replies depend, this rank among them. With several, the wait is
                watched as a collective: ranks that do not wait with the same ``text`` are reported as missing.
            more: further arguments of ``send``, by name. ``extras``: floats, in the order that ``SyncHandler.handle``
                or ``AsyncHandler.handle`` describes for ``kind``. ``flags``: bits of ``server_wire``, such as SKIP.
                ``seen``: for each server, the number of updates in the parameters that the worker has. ``blobs``: for
                LOAD, each server's saved state. ``servers``: indices of the servers to ask; None, the default, asks
                all. The gradients of a PUSH are no argument: they are in the client's send buffer.

        Returns:
            One ``Reply`` for each server that was asked, in the servers' order: message header (``header``), floats
            (``extras``), and for SAVE and FACTS the saved state or statistics (``frames``, a list of bytes).

        Raises:
            PeerError: no reply came within the job's timeout, or a server has ended and is not started again.
            MismatchError: ranks wait in different calls.
            AuthenticationError: a server does not accept this rank's key.
        """
        self.send(kind, worker, clock, **more)  # type: ignore[arg-type]
        return self.wait(text, ranks)

    def _done(self, seconds: float) -> bool:
        """Wait up to ``seconds`` for all replies; return whether all have come."""
        end = time.monotonic() + seconds
        while self._open:
            for server in list(self._open):
                self._receive(server)
            left = end - time.monotonic()
            if not self._open or left <= 0:
                break
            server = next(iter(self._open))
            if not self._sockets[server].poll(min(_WAIT_MS, int(1000 * left) + 1)):
                self._look()
                self._check_keys()
                self._ask_again()
        return not self._open

    def _receive(self, server: int) -> None:
        """Receive from one server: copy parameters into the receive buffer, drop replies to earlier requests."""
        while server in self._open and self._sockets[server].poll(0):
            head, *frames = self._sockets[server].recv_multipart(copy=False)
            header = server_wire.unpack(head.buffer)
            if header is None or header.seq != self._seq[server] or not frames:
                continue
            extras = np.frombuffer(frames[0].buffer, dtype="<f8").tolist()
            parts = frames[1:]
            self._add_traffic(server, header.kind, 0, 0, len(head) + sum(map(len, frames)))
            if len(parts) == len(self._given[server]) and header.kind not in (server_wire.SAVE, server_wire.FACTS):
                into = self._pushed if header.kind == server_wire.SUM else self._given
                for given, part in zip(into[server], parts, strict=True):
                    given.copy_(torch.frombuffer(part.buffer, dtype=torch.uint8) if len(part) else given)
                parts = []
            self._replies[server] = Reply(header, extras, [part.bytes for part in parts])
            kind, begun = self._begun[server]
            self._took[server, kind] = max(time.monotonic() - begun, self._took.get((server, kind), 0.0) / 2)
            del self._open[server]

    def _add_traffic(self, server: int, kind: int, requests: int, sent: int, received: int) -> None:
        key = server, server_wire.NAMES[kind]
        before = self.traffic.get(key, RequestTraffic(0, 0, 0))
        self.traffic[key] = RequestTraffic(before.requests + requests, before.sent + sent, before.received + received)

    def _ask_again(self) -> None:
        now = time.monotonic()
        for server, (frames, due, patience) in list(self._open.items()):
            if now > due:
                # The frames' tensors have not changed: the send buffer is not written before the reply.
                self._post(server, frames, patience)

    def _post(self, server: int, frames: list[bytes | memoryview], patience: float) -> None:
        """Send a request, or try again after 50 ms where no connection takes it.

        ``patience``: seconds until the request is repeated; doubled each time, to relieve a congested network.
        """
        due, after = time.monotonic() + patience, 2 * patience
        try:
            small = sum(map(len, frames)) < server_wire.SMALL
            self._sockets[server].send_multipart(frames, zmq.NOBLOCK, copy=small)
        except zmq.Again:
            due, after = time.monotonic() + _SOON, patience
        self._open[server] = (frames, due, after)

    def _check_keys(self) -> None:
        for server, monitor in enumerate(self._monitors):
            if server in self._open and monitor.poll(0):
                monitor.recv_multipart()
                raise AuthenticationError(
                    f"parameter server {server} does not let rank {self._identity.client} in",
                    why="its key is not on the server's list, or the server is not the one it says it is",
                    remedy="start all ranks as one job: keys are made anew for each",
                )

    def _silent(self, text: str, seconds: float) -> PeerError:
        servers = ", ".join(str(server) for server in sorted(self._open))
        return PeerError(
            f"{text}: parameter server {servers} does not answer",
            where=f"rank {self._identity.client}",
            why=f"no answer came within {seconds:g} s",
            remedy="look at rank 0's log, whose process starts the servers, and at the network between the hosts",
        )


def _close(
    owner: int,
    context: zmq.Context[zmq.Socket[bytes]],
    sockets: Sequence[zmq.Socket[bytes]],
    monitors: Sequence[zmq.Socket[bytes]],
) -> None:
    if os.getpid() != owner:
        return
    for socket in (*sockets, *monitors):
        socket.close(linger=0)
    context.term()
