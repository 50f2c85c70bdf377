"""The process of one parameter server: a loop that answers the requests of one ZeroMQ socket.

Malformed requests and connections without a listed key change nothing. Each request is carried out once: a repeated one
(its reply was lost or slow) gets the stored reply. A server that is started again has no replies stored, and handles a
repeated request anew: its handler counts a push of a worker's step once.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import zmq
from zmq.utils.monitor import recv_monitor_message

from tutti.parallel.parameter_server import curve_keys, server_wire
from tutti.parallel.parameter_server.curve_keys import Keys, ZapAuthenticator
from tutti.parallel.parameter_server.parameter_shard import ParameterShard, Vectors
from tutti.parallel.parameter_server.request_handlers import Answer, Request, RequestHandler
from tutti.parallel.parameter_server.server_snapshot import Snapshots
from tutti.parallel.parameter_server.server_supervisor import RETIRE
from tutti.parallel.parameter_server.server_wire import (
    FACTS,
    HELLO,
    LOAD,
    PUSH,
    READ,
    SAVE,
    SHARED,
    SKIP,
    Malformed,
    MessageHeader,
    Terms,
)

_PATIENCE = 100
_IDLE = 500
"""Milliseconds after which a server looks whether it is to end: a signal does not interrupt ZeroMQ's poll."""
_HIGH_WATER = 64
# Bytes allowed above the tensors, for extras and encryption.
_ENVELOPE = 1 << 20


@dataclass(frozen=True)
class SharedBuffers:
    """The regions of one rank's shared-memory buffers that one parameter server reads and writes.

    Attributes:
        pushed: gradients that the rank sends, or summed gradients that it reads, one flat tensor for each dtype of the
            parameters.
        given: updated parameters that the server returns, in the same form.
    """

    pushed: Vectors
    given: Vectors


@dataclass(frozen=True)
class ServerJob:
    """Configuration of one parameter server's process.

    Attributes:
        terms: identifiers and lengths that ranks and server have agreed on; a message with others is ignored.
        keys: the server's CURVE key pair.
        clients: public keys of the ranks, in rank order.
        endpoint: ZeroMQ address on which the server listens.
        descriptor: listening TCP socket to take over; None for an ``ipc`` endpoint.
        shared: buffers in shared memory of each rank, in rank order; empty where tensors travel in messages.
        make: makes the parameter shard and its request handler, in the server's process.
        snapshots: files for snapshots; None for no snapshots.
        every: updates between two snapshots.
    """

    terms: Terms
    keys: Keys
    clients: Sequence[bytes]
    endpoint: str
    descriptor: int | None
    shared: Sequence[SharedBuffers]
    make: Callable[[], tuple[ParameterShard, RequestHandler]]
    snapshots: Snapshots | None
    every: int


class Server:
    """Request loop of one parameter server, restored from its newest snapshot if there is one.

    The constructor builds parameter shard and optimizer, and binds the ZeroMQ socket; ``run`` answers requests.

    Args:
        job: configuration of the server.
    """

    def __init__(self, job: ServerJob) -> None:
        self._job, self._terms = job, job.terms
        self._shard, self._handler = job.make()
        self._last: dict[int, tuple[int, list[bytes] | None]] = {}
        self._waiting: dict[int, tuple[bytes, Request]] = {}
        self._malformed = self._bytes = self._number = self._kept = 0
        # Version and time of the first push.
        self._began: tuple[int, float] | None = None
        self._copy: tuple[int, list[bytes]] = (-1, [])
        sizes = [value.nbytes for value in self._shard.values]
        staging = torch.zeros(0 if job.shared else sum(sizes), dtype=torch.uint8)
        self._staged, parts = staging.numpy(), [] if job.shared else staging.split(sizes)
        self._received = [part.view(v.dtype) for part, v in zip(parts, self._shard.values, strict=not job.shared)]
        self._restore()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._authenticator = ZapAuthenticator(self._context, job.clients)
        self._socket = self._context.socket(zmq.ROUTER)
        curve_keys.secure_server(self._socket, job.keys)
        self._socket.linger = 0
        self._socket.maxmsgsize = max(job.terms.most, *job.terms.frames) + _ENVELOPE
        self._socket.set_hwm(_HIGH_WATER)
        self._socket.set(zmq.ROUTER_HANDOVER, 1)
        if job.descriptor is not None:
            self._socket.set(zmq.USE_FD, job.descriptor)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self._connections = 0
        self._retiring = False
        self._socket.bind(job.endpoint)

    def run(self) -> None:
        """Receive and answer the requests of all ranks to this parameter server, until no rank needs the server.

        Blocks for the whole run. The call returns once two conditions hold: this process has received SIGTERM (its
        guard process sends it when the rank that started the server has dropped the run), and no rank is connected any
        more. Otherwise the process is killed, or ends with its parent. A request that must wait for requests of other
        logical workers (fixed shares of the global batch) is tried again after every message, and every 100 ms.
        """
        signal.signal(RETIRE, self._retire)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (RETIRE,))
        poller = zmq.Poller()
        for each in (self._socket, self._authenticator.socket, self._monitor):
            poller.register(each, zmq.POLLIN)
        while True:
            for socket, _ in poller.poll(_PATIENCE if self._waiting else _IDLE):
                if socket is self._socket:
                    self._receive()
                elif socket is self._monitor:
                    event = recv_monitor_message(self._monitor)["event"]
                    self._connections += 1 if event == zmq.EVENT_ACCEPTED else -1
                else:
                    self._authenticator.answer()
            for client, (address, request) in list(self._waiting.items()):
                self._try(client, address, request)
            # After a poll: the signal may have waited since before the first connection.
            if self._retiring and self._connections <= 0:
                return

    def _retire(self, number: int, frame: Any) -> None:
        self._retiring = True

    def _receive(self) -> None:
        address, *frames = self._socket.recv_multipart(copy=False)
        try:
            client = int(frames[0].get("User-Id")) if frames else -1
            header = server_wire.read_header([frame.buffer for frame in frames], self._terms, client)
        except (Malformed, ValueError, zmq.ZMQError):
            self._malformed += 1
            return
        seq, reply = self._last.get(client, (-1, None))
        if header.seq < seq:
            return
        if header.seq == seq:
            if reply is not None:
                self._socket.send_multipart([address.bytes, *reply])
            elif client in self._waiting:
                self._waiting[client] = (address.bytes, self._waiting[client][1])
            return
        self._last[client] = (header.seq, None)
        extras = np.frombuffer(frames[1].buffer, dtype="<f8").tolist()
        request = Request(header, extras, self._tensors(header, [frame.buffer for frame in frames[2:]]))
        if header.kind == LOAD:
            self._load(bytes(frames[2].buffer))
        self._try(client, address.bytes, request)

    def _tensors(self, header: MessageHeader, frames: Sequence[memoryview]) -> Vectors:
        if header.kind != PUSH:
            return []
        self._began = self._began or (self._handler.version, time.monotonic())
        if header.flags & SKIP:
            return []
        self._bytes += sum(self._terms.frames)
        if header.flags & SHARED:
            return list(self._job.shared[header.client].pushed)
        at = 0
        for frame in frames:
            self._staged[at : at + len(frame)] = np.frombuffer(frame, dtype=np.uint8)
            at += len(frame)
        return self._received if frames else []

    def _try(self, client: int, address: bytes, request: Request) -> None:
        answer = self._answer(request)
        if answer is None:
            self._waiting[client] = (address, request)
            return
        self._waiting.pop(client, None)
        header = request.header
        frames = [] if answer.blob is None else [answer.blob]
        if answer.values:
            frames = self._values(header)
        elif answer.gradients is not None:
            frames = self._summed(header, answer.gradients)
        told = header._replace(
            flags=answer.status,
            seen=self._handler.version,
            extras=len(answer.extras),
            tensors=len(frames),
            size=sum(map(len, frames)),
        )
        reply = [told.pack(), np.asarray(answer.extras, dtype="<f8").tobytes(), *frames]
        self._last[client] = (header.seq, reply)
        self._socket.send_multipart([address, *reply], copy=told.size < server_wire.SMALL)
        if self._handler.version >= self._kept + self._job.every:
            self._keep()

    def _answer(self, request: Request) -> Answer | None:
        kind = request.header.kind
        if kind in (HELLO, LOAD):
            return Answer()
        if kind == READ:
            return Answer(values=True)
        if kind == SAVE:
            return Answer(blob=self._shard.save())
        if kind == FACTS:
            said = {**self._handler.facts(), "malformed": self._malformed, "keys_refused": self._authenticator.refused}
            return Answer(blob=json.dumps({**said, "bytes": self._bytes, **self._rate()}).encode())
        return self._handler.handle(request)

    def _rate(self) -> dict[str, float]:
        """Return the updates per second since the first push to this process; empty before it."""
        if self._began is None:
            return {}
        version, begin = self._began
        return {"updates_per_second": (self._handler.version - version) / max(time.monotonic() - begin, 1e-9)}

    def _values(self, header: MessageHeader) -> list[bytes]:
        """Copy the parameters into the rank's shared receive buffer, or return them as frames without shared memory."""
        self._bytes += sum(self._terms.frames)
        if header.client < len(self._job.shared):
            for given, value in zip(self._job.shared[header.client].given, self._shard.values, strict=True):
                given.copy_(value)
            return []
        if self._copy[0] != self._handler.version:
            raw = np.concatenate([value.view(torch.uint8).numpy() for value in self._shard.values])
            ends = np.cumsum(self._terms.frames).tolist()
            parts = [raw[end - size : end].tobytes() for end, size in zip(ends, self._terms.frames, strict=True)]
            self._copy = (self._handler.version, parts)
        return self._copy[1]

    def _summed(self, header: MessageHeader, gradients: Vectors) -> list[bytes]:
        """Copy summed gradients into the rank's shared send buffer, or return them as frames without shared memory."""
        self._bytes += sum(self._terms.frames)
        if header.client < len(self._job.shared):
            for sent, gradient in zip(self._job.shared[header.client].pushed, gradients, strict=True):
                sent.copy_(gradient)
            return []
        raw = np.concatenate([gradient.view(torch.uint8).numpy() for gradient in gradients])
        ends = np.cumsum(self._terms.frames).tolist()
        return [raw[end - size : end].tobytes() for end, size in zip(ends, self._terms.frames, strict=True)]

    # --- state and snapshots ---------------------------------------------------------------------------------------

    def _load(self, raw: bytes) -> None:
        self._shard.load(raw)
        self._handler.forget()
        self._copy = (-1, [])
        self._keep()

    def _keep(self) -> None:
        self._kept = self._handler.version
        if self._job.snapshots is not None:
            state: dict[str, Any] = {
                "handler": self._handler.state(),
                "seqs": [[client, seq] for client, (seq, _) in self._last.items()],
            }
            head = json.dumps(state).encode()
            self._number += 1
            self._job.snapshots.write(self._number, len(head).to_bytes(8, "little") + head + self._shard.save())

    def _restore(self) -> None:
        found = None if self._job.snapshots is None else self._job.snapshots.newest()
        if found is not None:
            self._number, content = found
            length = int.from_bytes(content[:8], "little")
            state = json.loads(content[8 : 8 + length])
            self._shard.load(content[8 + length :])
            self._handler.load(state["handler"])
            # A rank's latest request may have waited for others, or its reply was lost with the process: the repetition
            # is handled like a new request, which changes nothing where the snapshot has its effect.
            self._last = {client: (seq - 1, None) for client, seq in state["seqs"]}
            self._kept = self._handler.version


def serve(job: ServerJob) -> None:
    """Build a parameter server, and answer requests until the server is told to end and no rank is connected.

    A server process runs only this function, and ends when the function returns. The signal SIGTERM tells the server to
    end.

    Args:
        job: configuration of the server: how the server makes its part of the parameters, the address at which it
            listens, and the keys of the ranks that may connect.
    """
    Server(job).run()
