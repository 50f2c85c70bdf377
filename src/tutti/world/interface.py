"""By which network interface a host reaches the others. Pure questions to the kernel: nothing is sent.

Left alone Gloo listens where the host's own name points to, which is the loopback on many hosts (Debian writes
``127.0.1.1`` into ``/etc/hosts``), and the other hosts cannot reach it there.
"""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct

_SIOCGIFADDR = 0x8915


def way_to(address: str) -> str:
    """This host's own address on the way to ``address``; empty where there is no way, or it does not leave the host.

    >>> way_to("127.0.0.1"), way_to("no-such-host.invalid")
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


def name_of(own: str) -> str | None:
    """The interface with the IPv4 address ``own``; None where there is none, or the system cannot say.

    >>> name_of("127.0.0.1")
    'lo'
    """
    return next((name for _, name in socket.if_nameindex() if address_of(name) == own), None)


def address_of(name: str) -> str | None:
    """The IPv4 address of the interface ``name``; None where it has none, or is not there.

    >>> address_of("lo"), address_of("no-such-one")
    ('127.0.0.1', None)
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        try:
            answer = fcntl.ioctl(asked, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])
