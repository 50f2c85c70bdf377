"""Partition of the parameters over the servers. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

_ALIGN = 64
_FRAME = 1 << 20


class Size(NamedTuple):
    """A tensor: its number of elements, bytes of an element, and dtype."""

    elements: int
    itemsize: int
    dtype: str


class ServerPiece(NamedTuple):
    """Slice of a flat tensor on a server.

    Elements ``begin`` … ``end`` of tensor ``tensor``, stored from element ``at`` on in the server's part of a section.
    """

    section: int
    tensor: int
    begin: int
    end: int
    at: int


@dataclass(frozen=True)
class DtypeSection:
    """All tensors of one dtype in one flat buffer, each at a multiple of 64 bytes.

    The alignment affects results: matrix products of unaligned tensors differ in their last bits.

    Attributes:
        dtype: of the tensors.
        itemsize: bytes of an element.
        order: indices of the tensors, in order of memory.
        offsets: element of the section at which each tensor begins.
        start: byte of the plan at which the section begins.
        cuts: server m has elements ``cuts[m]`` … ``cuts[m + 1]``.
    """

    dtype: str
    itemsize: int
    order: tuple[int, ...]
    offsets: tuple[int, ...]
    start: int
    cuts: tuple[int, ...]


@dataclass(frozen=True)
class ServerPlan:
    """Layout of all tensors in one buffer of ``size`` bytes, and each server's part of it.

    Attributes:
        sizes: of the tensors.
        sections: one for each dtype.
        size: bytes of the whole buffer.
    """

    sizes: tuple[Size, ...]
    sections: tuple[DtypeSection, ...]
    size: int

    def regions(self, server: int) -> list[range]:
        """Return a server's part of the buffer that holds all parameters: for each dtype section a range of bytes.

        Args:
            server: index of the server.
        """
        return [
            range(s.start + s.cuts[server] * s.itemsize, s.start + s.cuts[server + 1] * s.itemsize)
            for s in self.sections
        ]

    def frames(self, server: int) -> list[range]:
        """Return a server's part of the buffer that holds all parameters, cut into message frames of up to 1 MiB.

        Several frames overlap sending one with encrypting the next and decrypting the last.

        Args:
            server: index of the server.

        Returns:
            Ranges of bytes in the buffer, in order.
        """
        return [
            range(at, min(at + _FRAME, region.stop))
            for region in self.regions(server)
            for at in range(region.start, region.stop, _FRAME)
        ]

    def pieces(self, server: int) -> Iterator[ServerPiece]:
        """Yield the slices of parameters that a server has, in the order of its memory.

        A parameter can be divided among several servers, unless ``plan_servers`` was called with ``whole``.

        Args:
            server: index of the server.
        """
        for number, section in enumerate(self.sections):
            low, high = section.cuts[server], section.cuts[server + 1]
            for index, at in zip(section.order, section.offsets, strict=True):
                begin, end = max(low, at), min(high, at + self.sizes[index].elements)
                if begin < end:
                    yield ServerPiece(number, index, begin - at, end - at, begin - low)


def plan_servers(sizes: Sequence[Size], servers: int, whole: bool) -> ServerPlan:
    """Partition tensors over the parameter servers: positions in one buffer, and each server's part of it.

    Args:
        sizes: elements, bytes of an element and dtype of each tensor.
        servers: number of servers.
        whole: keep each tensor whole, assigning the largest first to the server with the fewest bytes; otherwise cut
            each section (all tensors of a dtype) into equal parts, across tensors.

    >>> sizes = [Size(100, 4, "f"), Size(28, 4, "f"), Size(64, 4, "f")]
    >>> plan_servers(sizes, 2, whole=False).sections[0].cuts, plan_servers(sizes, 2, whole=True).sections[0].order
    ((0, 112, 208), (0, 1, 2))
    >>> [piece[1:] for piece in plan_servers(sizes, 2, whole=False).pieces(1)]
    [(1, 0, 28, 0), (2, 0, 64, 32)]
    """
    owners = _owners(sizes, servers) if whole else [0] * len(sizes)
    sections, start = [], 0
    for dtype in sorted({size.dtype for size in sizes}):
        members = [i for i, size in enumerate(sizes) if size.dtype == dtype]
        order = sorted(members, key=lambda i: (owners[i], i))
        itemsize = sizes[order[0]].itemsize
        step = _ALIGN // itemsize
        *offsets, total = accumulate((-(-sizes[i].elements // step) * step for i in order), initial=0)
        if whole:
            owned = [sum(owners[i] < m for i in order) for m in range(servers)]
            cuts = [[*offsets, total][count] for count in owned]
        else:
            cuts = [-(-total * m // servers // step) * step for m in range(servers)]
        sections.append(DtypeSection(dtype, itemsize, tuple(order), tuple(offsets), start, (*cuts, total)))
        start += total * itemsize
    return ServerPlan(tuple(sizes), tuple(sections), start)


def _owners(sizes: Sequence[Size], servers: int) -> list[int]:
    loads, owners = [0] * servers, [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i].elements * sizes[i].itemsize, i)):
        owners[index] = loads.index(min(loads))
        loads[owners[index]] += sizes[index].elements * sizes[index].itemsize
    return owners
