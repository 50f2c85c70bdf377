"""Who may talk to a parameter server: keys that are made for one run, and a list of them.

CURVE (rfc.zeromq.org/spec/26) encrypts and proves who holds a key. By itself it lets every key in: that a key is on the
list is asked of a ZAP handler (rfc.zeromq.org/spec/27), which a server answers in its own loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import zmq
from zmq.utils import z85

DOMAIN = b"tutti"
_ENDPOINT = "inproc://zeromq.zap.01"
_VERSION = b"1.0"


@dataclass(frozen=True)
class Keys:
    """A pair in Z85, 40 characters each. The secret one never leaves the processes that it was made in."""

    public: bytes
    secret: bytes

    def __repr__(self) -> str:
        return f"Keys({self.public.decode()})"


def make() -> Keys:
    """A new pair."""
    return Keys(*zmq.curve_keypair())


class DoorKeeper:
    """Answers who may come in.

    Args:
        context: of the server's sockets.
        clients: public keys of those that may, in rank order.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], clients: Sequence[bytes]) -> None:
        self.socket = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind(_ENDPOINT)
        self._known = {z85.decode(key): str(rank).encode() for rank, key in enumerate(clients)}
        self.refused = 0

    def answer(self) -> None:
        """Answer one question that is there."""
        version, request, _domain, _address, _identity, mechanism, *credentials = self.socket.recv_multipart()
        known = mechanism == b"CURVE" and len(credentials) == 1 and version == _VERSION
        user = self._known.get(credentials[0]) if known else None
        self.refused += user is None
        status, text = (b"200", b"OK") if user is not None else (b"400", b"this key is not on the list")
        self.socket.send_multipart([_VERSION, request, status, text, user or b"", b""])


def lock(socket: zmq.Socket[bytes], keys: Keys) -> None:
    """Let in at ``socket`` only who has a key that the door keeper knows."""
    socket.curve_server = True
    socket.curve_secretkey = keys.secret
    socket.zap_domain = DOMAIN


def unlock(socket: zmq.Socket[bytes], keys: Keys, server: bytes) -> None:
    """Come as the holder of ``keys``, to the server with this public key and no other."""
    socket.curve_serverkey = server
    socket.curve_publickey = keys.public
    socket.curve_secretkey = keys.secret
