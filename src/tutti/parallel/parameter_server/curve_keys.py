"""Authentication at a parameter server: CURVE keys made for one run, and a list of the accepted ones.

CURVE (rfc.zeromq.org/spec/26) encrypts and proves possession of a key, but accepts every key. A ZAP handler
(rfc.zeromq.org/spec/27), which runs in the server's own loop, accepts listed keys only.
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
    """A ZeroMQ CURVE key pair, which identifies one rank or one parameter server.

    Attributes:
        public: public key in Z85, 40 bytes.
        secret: secret key in the same form; never sent, nor shown by ``repr``.
    """

    public: bytes
    secret: bytes

    def __repr__(self) -> str:
        return f"Keys({self.public.decode()})"


def make_keys() -> Keys:
    """Generate a new random ZeroMQ CURVE key pair, which identifies one rank or one parameter server for this run.

    Returns:
        A ``Keys`` of ``public`` and ``secret``, in Z85, 40 bytes each.
    """
    return Keys(*zmq.curve_keypair())


class ZapAuthenticator:
    """ZeroMQ authentication (ZAP) handler that accepts the ranks' keys, and gives a connection its rank as user id.

    Args:
        context: ZeroMQ context of the server's sockets.
        clients: public keys of the ranks, in rank order.

    Attributes:
        socket: where ZeroMQ sends authentication requests.
        refused: number of connections refused.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], clients: Sequence[bytes]) -> None:
        self.socket = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind(_ENDPOINT)
        self._known = {z85.decode(key): str(rank).encode() for rank, key in enumerate(clients)}
        self.refused = 0

    def answer(self) -> None:
        """Answer one authentication request of ZeroMQ (ZAP) that is waiting on the attribute ``socket``.

        A connection to the parameter server is accepted if its CURVE public key is one of the ranks' keys; its messages
        then have the rank's index in the constructor's ``clients`` as user id. Other connections are refused and
        counted in the attribute ``refused``. Blocks where no request is waiting, so poll ``socket`` first.
        """
        version, request, _domain, _address, _identity, mechanism, *credentials = self.socket.recv_multipart()
        known = mechanism == b"CURVE" and len(credentials) == 1 and version == _VERSION
        user = self._known.get(credentials[0]) if known else None
        self.refused += user is None
        status, text = (b"200", b"OK") if user is not None else (b"400", b"this key is not on the list")
        self.socket.send_multipart([_VERSION, request, status, text, user or b"", b""])


def secure_server(socket: zmq.Socket[bytes], keys: Keys) -> None:
    """Make a parameter server's ZeroMQ socket encrypt and authenticate as a CURVE server; call this before ``bind``.

    The socket then accepts only connections whose key the ``ZapAuthenticator`` of its ZeroMQ context lists.

    Args:
        socket: a socket that is not bound yet.
        keys: the server's own key pair.
    """
    socket.curve_server = True
    socket.curve_secretkey = keys.secret
    socket.zap_domain = DOMAIN


def secure_client(socket: zmq.Socket[bytes], keys: Keys, server: bytes) -> None:
    """Make a ZeroMQ socket a CURVE client, which connects only to the server with a given public key.

    Args:
        socket: a socket that is not connected yet.
        keys: the client's own key pair.
        server: the server's public key in Z85, 40 characters.
    """
    socket.curve_serverkey = server
    socket.curve_publickey = keys.public
    socket.curve_secretkey = keys.secret
