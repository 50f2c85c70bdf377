"""Find the network interface by which a node reaches the other nodes. Only asks the kernel: nothing is sent.

By default Gloo listens on the address of the node's own host name, which is the loopback on many nodes (Debian writes
``127.0.1.1`` into ``/etc/hosts``), where other nodes cannot reach it.
"""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct

_SIOCGIFADDR = 0x8915


def source_address(address: str) -> str:
    """Return the own IP address of this node from which the kernel would send packets to another node; sends nothing.

    Empty if there is no route, the name does not resolve, or the own address would be the loopback. Blocks while a name
    is resolved.

    Args:
        address: host name or IP address of the other node.

    >>> source_address("127.0.0.1"), source_address("no-such-host.invalid")
    ('', '')
    """
    try:
        family, kind, _, _, target = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as asked:
            asked.connect(target)
            own = str(asked.getsockname()[0])
    except OSError:
        return ""
    return "" if ipaddress.ip_address(own.partition("%")[0]).is_loopback else own


def resolves(address: str) -> bool:
    """Return whether the resolver of this node finds an address for ``address``, a host name or IP address. May block.

    >>> resolves("127.0.0.1"), resolves("no-such-host.invalid")
    (True, False)
    """
    try:
        return bool(socket.getaddrinfo(address, None))
    except OSError:
        return False


def name_of(own: str) -> str | None:
    """Return the name of this node's network interface with the IPv4 address ``own``; None if no interface has it.

    >>> name_of("127.0.0.1")
    'lo'
    """
    return next((name for _, name in socket.if_nameindex() if address_of(name) == own), None)


def address_of(name: str) -> str | None:
    """Return the IPv4 address of this node's network interface ``name``; None if it has none, or does not exist.

    >>> address_of("lo"), address_of("no-such-one")
    ('127.0.0.1', None)
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        try:
            answer = fcntl.ioctl(asked, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])
