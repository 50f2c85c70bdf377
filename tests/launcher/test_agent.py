"""The port that ranks find as ``MASTER_PORT``, for process groups of a script's own."""

from __future__ import annotations

import errno
import socket
import struct
from contextlib import suppress

from torch.distributed import TCPStore

from tutti.launcher.agent import OneHost

# Linux's option of a socket from 6.3 on: the first and the last port that the system may give it.
_LOCAL_PORT_RANGE = 51


def taken(port: int, by_number: bool) -> bool:
    """Whether another program is refused the port when it asks for it, or for any port as Gloo's listeners do."""
    with socket.socket() as other:
        if not by_number:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with suppress(OSError):
                other.setsockopt(socket.IPPROTO_IP, _LOCAL_PORT_RANGE, struct.pack("I", port | port << 16))
        try:
            other.bind(("127.0.0.1", port if by_number else 0))
        except OSError as error:
            assert error.errno == errno.EADDRINUSE
            return True
        return not by_number and other.getsockname()[1] != port


def port_of_ranks(host: OneHost) -> int:
    found = host.next_rendezvous().bootstrap_store_info
    assert found is not None
    return int(found.master_port)


def test_the_port_of_the_ranks_is_kept_until_their_script_listens_there() -> None:
    host = OneHost()
    first = port_of_ranks(host)
    assert taken(first, by_number=True) and taken(first, by_number=False)
    second = port_of_ranks(host)
    assert not taken(first, by_number=True) and taken(second, by_number=True)
    host.shutdown()
    assert not taken(second, by_number=True)
    store = TCPStore("127.0.0.1", port_of_ranks(host), 1, True, wait_for_workers=False)
    store.set("key", "value")
    assert store.get("key") == b"value"
    host.shutdown()
