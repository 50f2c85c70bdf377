"""How parameters are shared out over servers. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

_ALIGN = 64
_FRAME = 1 << 20


class Size(NamedTuple):
    """A tensor: how many elements of how many bytes, of which type."""

    elements: int
    itemsize: int
    dtype: str


class Piece(NamedTuple):
    """Elements ``begin`` … ``end`` of tensor ``tensor``, from element ``at`` of a server's part of a section on."""

    section: int
    tensor: int
    begin: int
    end: int
    at: int


@dataclass(frozen=True)
class Section:
    """All tensors of one type, one behind the other, each at a multiple of 64 bytes.

    Where they begin is part of the result: matrix products of unaligned tensors differ in their last bits.

    Attributes:
        dtype: the type.
        itemsize: bytes of an element.
        order: which tensors.
        offsets: element at which each begins.
        start: byte at which it begins.
        cuts: server m has elements ``cuts[m]`` … ``cuts[m + 1]``.
    """

    dtype: str
    itemsize: int
    order: tuple[int, ...]
    offsets: tuple[int, ...]
    start: int
    cuts: tuple[int, ...]


@dataclass(frozen=True)
class Plan:
    """All tensors as one stretch of ``size`` bytes, and which server has what of it."""

    sizes: tuple[Size, ...]
    sections: tuple[Section, ...]
    size: int

    def regions(self, server: int) -> list[range]:
        """Bytes of each section that ``server`` has."""
        return [
            range(s.start + s.cuts[server] * s.itemsize, s.start + s.cuts[server + 1] * s.itemsize)
            for s in self.sections
        ]

    def frames(self, server: int) -> list[range]:
        """The same cut up for sending: while one frame is under way the next is encrypted and the last decrypted."""
        return [
            range(at, min(at + _FRAME, region.stop))
            for region in self.regions(server)
            for at in range(region.start, region.stop, _FRAME)
        ]

    def pieces(self, server: int) -> Iterator[Piece]:
        """What ``server`` has of which tensors."""
        for number, section in enumerate(self.sections):
            low, high = section.cuts[server], section.cuts[server + 1]
            for index, at in zip(section.order, section.offsets, strict=True):
                begin, end = max(low, at), min(high, at + self.sizes[index].elements)
                if begin < end:
                    yield Piece(number, index, begin - at, end - at, begin - low)


def plan(sizes: Sequence[Size], servers: int, whole: bool) -> Plan:
    """Share tensors out: evenly, cutting any of them, or with ``whole`` the largest first to who has least.

    >>> sizes = [Size(100, 4, "f"), Size(28, 4, "f"), Size(64, 4, "f")]
    >>> plan(sizes, 2, whole=False).sections[0].cuts, plan(sizes, 2, whole=True).sections[0].order
    ((0, 112, 208), (0, 1, 2))
    >>> [piece[1:] for piece in plan(sizes, 2, whole=False).pieces(1)]
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
        sections.append(Section(dtype, itemsize, tuple(order), tuple(offsets), start, (*cuts, total)))
        start += total * itemsize
    return Plan(tuple(sizes), tuple(sections), start)


def _owners(sizes: Sequence[Size], servers: int) -> list[int]:
    loads, owners = [0] * servers, [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i].elements * sizes[i].itemsize, i)):
        owners[index] = loads.index(min(loads))
        loads[owners[index]] += sizes[index].elements * sizes[index].itemsize
    return owners
