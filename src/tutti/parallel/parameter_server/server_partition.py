"""Partition of the parameters over the servers. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

_ALIGN = 64
_FRAME = 1 << 20


class Size(NamedTuple):
    """Size of a tensor that is placed on parameter servers.

    Attributes:
        elements: number of elements.
        itemsize: bytes of an element.
        dtype: name of the dtype, such as ``torch.float32``.
    """

    elements: int
    itemsize: int
    dtype: str


class ServerSlice(NamedTuple):
    """Slice of a flattened parameter that one parameter server has.

    Attributes:
        section: index of the section, the flat buffer of all tensors of one dtype.
        tensor: index of the parameter in ``ServerPlan.sizes``.
        begin: first element of the slice in the flattened parameter.
        end: element after the last one.
        at: element at which the slice begins in the server's part of the section.
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
        dtype: name of the tensors' dtype.
        itemsize: bytes of an element.
        order: indices of the tensors (in ``ServerPlan.sizes``), in order of memory.
        offsets: element of the section at which each tensor begins, in the same order.
        start: byte of the whole buffer at which the section begins.
        cuts: server m has the elements from ``cuts[m]`` up to, but not including, ``cuts[m + 1]`` of the section.
    """

    dtype: str
    itemsize: int
    order: tuple[int, ...]
    offsets: tuple[int, ...]
    start: int
    cuts: tuple[int, ...]


@dataclass(frozen=True)
class ServerPlan:
    """Layout of all parameters in one buffer of ``size`` bytes, and each parameter server's part of the buffer.

    Attributes:
        sizes: sizes of the parameters, in the model's order.
        sections: one flat region for each dtype, in order of memory.
        size: bytes of the whole buffer.
    """

    sizes: tuple[Size, ...]
    sections: tuple[DtypeSection, ...]
    size: int

    def regions(self, server: int) -> list[range]:
        """Return a parameter server's part of the buffer that holds all parameters: for each dtype one range of bytes.

        Args:
            server: index of the server.

        Returns:
            Ranges of byte positions in the buffer, in order of memory; a range is empty where the server has no element
            of a dtype.
        """
        return [
            range(s.start + s.cuts[server] * s.itemsize, s.start + s.cuts[server + 1] * s.itemsize)
            for s in self.sections
        ]

    def frames(self, server: int) -> list[range]:
        """Return a server's part of the buffer that holds all parameters, cut into message frames of up to 1 MiB.

        Several frames let sending one overlap with encrypting the next and decrypting the previous.

        Args:
            server: index of the server.

        Returns:
            Ranges of byte positions in the buffer, in order.
        """
        return [
            range(at, min(at + _FRAME, region.stop))
            for region in self.regions(server)
            for at in range(region.start, region.stop, _FRAME)
        ]

    def slices(self, server: int) -> Iterator[ServerSlice]:
        """Yield the slices of parameters that a parameter server has, in the order of its memory.

        A parameter can be divided among several servers, unless ``plan_servers`` was called with ``whole``.

        Args:
            server: index of the server.

        Yields:
            One ``ServerSlice`` (named tuple) for each parameter of which the server has elements: indices of the
            dtype's section (``section``) and of the parameter (``tensor``); first element (``begin``) and end,
            exclusive (``end``), in the flattened parameter; and the element at which the slice begins in the server's
            part of the section (``at``).
        """
        for number, section in enumerate(self.sections):
            low, high = section.cuts[server], section.cuts[server + 1]
            for index, at in zip(section.order, section.offsets, strict=True):
                begin, end = max(low, at), min(high, at + self.sizes[index].elements)
                if begin < end:
                    yield ServerSlice(number, index, begin - at, end - at, begin - low)


def plan_servers(sizes: Sequence[Size], servers: int, whole: bool) -> ServerPlan:
    """Partition tensors over the parameter servers: positions in one buffer, and each server's part of it.

    Args:
        sizes: elements, bytes of an element and dtype of each tensor, in the model's order.
        servers: number of servers.
        whole: True keeps each tensor whole on one server: the largest first, each goes to the server with the fewest
            bytes. False cuts each section (all tensors of a dtype) into parts that are equal up to the alignment of 64
            bytes, across tensors.

    Returns:
        A ``ServerPlan``: ``sizes`` as given; the bytes of the buffer (``size``), in which each tensor begins at a
        multiple of 64 bytes; and the ``sections``, one for each dtype, with the order and offsets of its tensors
        (``order``, ``offsets``) and ``cuts``: server m has the elements ``cuts[m]`` to ``cuts[m + 1]``, exclusive.

    >>> sizes = [Size(100, 4, "f"), Size(28, 4, "f"), Size(64, 4, "f")]
    >>> plan_servers(sizes, 2, whole=False).sections[0].cuts, plan_servers(sizes, 2, whole=True).sections[0].order
    ((0, 112, 208), (0, 1, 2))
    >>> [piece[1:] for piece in plan_servers(sizes, 2, whole=False).slices(1)]
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
