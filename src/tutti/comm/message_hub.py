"""Sockets between every rank and rank 0: length-prefixed JSON messages, delivered in order, without polling.

On one node a Unix socket in a directory that only this user can open; across nodes TCP on the address by which rank 0
is known, where both sides prove that they hold the run's key.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import secrets
import select
import selectors
import shutil
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from tutti.errors import PeerError
from tutti.launcher.membership import current_membership

_LENGTH = struct.Struct("<I")
_NONCE = 32
_CHUNK = 1 << 16
_ADDRESS, _KEY = "hub", "hub key"
_LOOK = "look for the first error in the log of rank 0"


class _Framing:
    """Splits a stream of bytes into messages."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> list[Any]:
        self._data += data
        found, at = [], 0
        while len(self._data) - at >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._data, at)
            end = at + _LENGTH.size + length
            if len(self._data) < end:
                break
            found.append(json.loads(self._data[at + _LENGTH.size : end]))
            at = end
        del self._data[:at]
        return found


def _frame(message: Any) -> bytes:
    raw = json.dumps(message, separators=(",", ":")).encode()
    return _LENGTH.pack(len(raw)) + raw


class HubConnection:
    """A rank's connection to the message hub, a thread on rank 0 with which all ranks exchange JSON values.

    Args:
        store: key-value store of the job, where rank 0 has put the hub's address.
        rank: number of the connection: this rank, or another number that no other connection has, for a further one.
        limit: seconds for which the constructor waits for the hub.

    Raises:
        PeerError: rank 0 has ended, opened no hub within the limit, or does not hold the run's key; or a rank of the
            job is lost.
    """

    def __init__(self, store: dist.Store, rank: int, limit: float) -> None:
        _await_hub(store, rank, limit)
        address = json.loads(bytes(store.get(_ADDRESS)).decode())
        key = bytes.fromhex(bytes(store.get(_KEY)).decode())
        self._framing = _Framing()
        self._lock = threading.Lock()
        try:
            self._connect(address, key, rank)
        except OSError as error:
            raise PeerError("rank 0 has ended", where=f"rank {rank}", why=error.strerror, remedy=_LOOK) from error

    def _connect(self, address: Any, key: bytes, rank: int) -> None:
        if isinstance(address, str):
            self._socket = socket.socket(socket.AF_UNIX)
            self._socket.connect(address)
        else:
            self._socket = socket.create_connection(tuple(address))
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        nonce = self._exactly(_NONCE)
        mine = secrets.token_bytes(_NONCE)
        self._socket.sendall(_proof(key, nonce, rank) + _LENGTH.pack(rank) + mine)
        if not hmac.compare_digest(self._exactly(_NONCE), _proof(key, mine, -1)):
            raise PeerError(
                "the process at rank 0's address does not hold the key of this run",
                where=f"rank {rank}",
                why="another process listens there",
                remedy="start the run again",
            )

    def send(self, message: Any) -> None:
        """Send a message to rank 0's message hub, without waiting for an answer; safe from any thread.

        The hub is a thread on rank 0 with which all ranks exchange JSON values.

        Args:
            message: a value that ``json.dumps`` accepts.

        Raises:
            PeerError: rank 0 has ended.
        """
        data = _frame(message)
        try:
            with self._lock:
                self._socket.sendall(data)
        except OSError as error:
            raise PeerError("rank 0 has ended", why=error.strerror, remedy=_LOOK) from error

    def receive(self) -> list[Any]:
        """Block until at least one message of rank 0 has arrived on this connection. For one thread at a time.

        Returns:
            All messages that have arrived, as decoded JSON values, in the order of sending; empty once either side has
            closed the connection.
        """
        while True:
            try:
                data = self._socket.recv(_CHUNK)
            except OSError:
                data = b""
            if not data:
                return []
            if found := self._framing.feed(data):
                return found

    def readable(self, seconds: float | None) -> bool:
        """Block until a message of rank 0 has arrived or the connection has ended, and return whether either is so.

        Args:
            seconds: longest wait; None: no limit.

        Returns:
            True if ``receive`` would not block; False if ``seconds`` have passed before.
        """
        return bool(select.select([self._socket], [], [], seconds)[0])

    def close(self) -> None:
        """Shut this connection to rank 0 down, from any thread; a ``receive`` that blocks returns an empty list."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _exactly(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            more = self._socket.recv(count - len(data))
            if not more:
                raise PeerError("rank 0 has closed the connection by which ranks match their collectives", remedy=_LOOK)
            data += more
        return data


def _await_hub(store: dist.Store, rank: int, limit: float) -> None:
    """Wait for the hub's address; raise PeerError after ``limit`` seconds, or when a rank of this job is lost."""
    end, pause = time.monotonic() + limit, 0.001
    while not store.check([_ADDRESS]):
        if (member := current_membership()) is not None:
            member.check()
        if time.monotonic() > end:
            raise PeerError(
                "rank 0 has not called a collective",
                where=f"rank {rank}",
                why=f"this rank has waited {limit:g} s for it",
                remedy="call the collective on every rank",
            )
        time.sleep(pause)
        pause = min(2 * pause, 0.05)


def _proof(key: bytes, nonce: bytes, rank: int) -> bytes:
    return hmac.new(key, nonce + str(rank).encode(), hashlib.sha256).digest()


class _Peer:
    """A connection as the hub sees it."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket, self.rank = connection, -1
        self.nonce, self.greeting = secrets.token_bytes(_NONCE), b""
        self.framing = _Framing()
        self.out = bytearray()


class MessageHub:
    """Rank 0's end of the connections from all ranks, which carry JSON values.

    The constructor starts one thread, which serves them all and sleeps while nothing arrives, and does not wait for
    other ranks.

    Args:
        store: key-value store of the job, where the hub's address is put.
        address: IP address or host to listen on; None: a Unix socket.
        on_message: called in the hub's thread with a connection's number (the rank) and a message of it.
        on_end: called in the hub's thread with the number of a connection that has ended.
        on_turn: called in the hub's thread after the messages that have arrived together; returns answers as (rank,
            message), and the seconds after which it must be called again, or None.
    """

    def __init__(
        self,
        store: dist.Store,
        address: str | None,
        on_message: Callable[[int, Any], None],
        on_end: Callable[[int], None],
        on_turn: Callable[[], tuple[list[tuple[int, Any]], float | None]],
    ) -> None:
        self._on_message, self._on_end, self._on_turn = on_message, on_end, on_turn
        self._key = secrets.token_bytes(32)
        self._directory: str | None = None
        if address is None:
            self._directory = tempfile.mkdtemp(prefix="tutti-hub-")
            place: Any = os.path.join(self._directory, "socket")
            self._listening = socket.socket(socket.AF_UNIX)
            self._listening.bind(place)
            self._listening.listen(128)
        else:
            self._listening = socket.create_server((address, 0), backlog=128)
            place = list(self._listening.getsockname()[:2])
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listening, selectors.EVENT_READ)
        self._ranks: dict[int, _Peer] = {}
        store.set(_KEY, self._key.hex())
        store.set(_ADDRESS, json.dumps(place))
        self._stop, self._wake = socket.socketpair()
        self._selector.register(self._stop, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="tutti-hub", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the hub, rank 0's thread that exchanges JSON messages with all ranks, once queued messages are sent.

        All ranks' connections are closed. Waits for the thread for at most five seconds.
        """
        self._wake.close()
        self._thread.join(5)
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)

    def _serve(self) -> None:
        pause: float | None = None
        open_ = True
        while open_:
            for key, events in self._selector.select(pause):
                if key.fileobj is self._stop:
                    open_ = False
                elif key.fileobj is self._listening:
                    self._accept()
                elif events & selectors.EVENT_READ:
                    self._read(key.data)
                else:
                    self._write(key.data)
            posts, pause = self._on_turn()
            for rank, message in posts:
                if (peer := self._ranks.get(rank)) is not None:
                    peer.out += _frame(message)
            for peer in list(self._ranks.values()):
                if peer.out:
                    self._write(peer)
        for peer in self._ranks.values():
            with contextlib.suppress(OSError):
                peer.socket.setblocking(True)
                peer.socket.sendall(peer.out)
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]

    def _accept(self) -> None:
        connection, _ = self._listening.accept()
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer = _Peer(connection)
        connection.sendall(peer.nonce)
        connection.setblocking(False)
        self._selector.register(connection, selectors.EVENT_READ, peer)

    def _read(self, peer: _Peer) -> None:
        try:
            data = peer.socket.recv(_CHUNK)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._end(peer)
            return
        if peer.rank < 0:
            data = self._greet(peer, data)
        for message in peer.framing.feed(data):
            self._on_message(peer.rank, message)

    def _greet(self, peer: _Peer, data: bytes) -> bytes:
        """Check that a new connection holds the key, and return the bytes after its greeting."""
        peer.greeting += data
        length = 2 * _NONCE + _LENGTH.size
        if len(peer.greeting) < length:
            return b""
        proof, (rank,) = peer.greeting[:_NONCE], _LENGTH.unpack_from(peer.greeting, _NONCE)
        if not hmac.compare_digest(proof, _proof(self._key, peer.nonce, rank)):
            self._end(peer)
            return b""
        peer.out += _proof(self._key, peer.greeting[_NONCE + _LENGTH.size : length], -1)
        peer.rank = rank
        self._ranks[rank] = peer
        return peer.greeting[length:]

    def _write(self, peer: _Peer) -> None:
        try:
            sent = peer.socket.send(peer.out)
            del peer.out[:sent]
        except BlockingIOError:
            pass
        except OSError:
            peer.out.clear()
        if peer.socket.fileno() >= 0 and peer.rank in self._ranks:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.out else 0)
            self._selector.modify(peer.socket, events, peer)

    def _end(self, peer: _Peer) -> None:
        self._selector.unregister(peer.socket)
        peer.socket.close()
        if self._ranks.get(peer.rank) is peer:
            del self._ranks[peer.rank]
            self._on_end(peer.rank)
