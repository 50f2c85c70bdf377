"""Collective algorithms as data: which rank sends which chunk to which rank, in which round, to be added or copied.

An all-reduce of a vector is a sequence of rounds over the vector's chunks. The same ``Schedule`` is run
(``tutti.comm.scheduled_all_reduce.ScheduledAllReduce``), proved (``prove``), counted (``Schedule.traffic``) and priced
(``Schedule.seconds``). Pure: no torch, no processes.

Sources: ring, Patarasuk and Yuan 2009, J. Parallel Distrib. Comput. 69; binomial tree and recursive halving-doubling,
Thakur, Rabenseifner and Gropp 2005, Int. J. High Perform. Comput. Appl. 19.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from tutti.comm.partition import even_share

Algorithm = Literal["ring", "tree", "halving", "hierarchical", "central"]


class ChunkTransfer(NamedTuple):
    """One message of an all-reduce: rank ``source`` sends chunks ``first`` … ``last - 1`` of its vector to rank ``to``.

    Chunks are the parts that an all-reduce cuts the ranks' vectors into.

    Attributes:
        source, to: ranks, from 0.
        first, last: range of chunks, ``last`` exclusive.
        reduce: whether ``to`` adds the chunks to its own; otherwise they replace its own.
        within_node: whether both ranks are on one node and exchange through shared memory.
    """

    source: int
    to: int
    first: int
    last: int
    reduce: bool
    within_node: bool = False


Round = tuple[ChunkTransfer, ...]
"""Transfers that run at the same time; each reads the values from before the round."""


class LinkTraffic(NamedTuple):
    """Traffic on a link between two ranks, in one direction.

    Attributes:
        messages: number of messages.
        bytes: bytes of all messages together.
    """

    messages: int
    bytes: int


class LinkCost(NamedTuple):
    """Cost of a message of n bytes over a link between two ranks: ``alpha + n / beta`` seconds.

    Attributes:
        alpha: seconds of latency of a message.
        beta: bytes a second of one rank's port, each way.
    """

    alpha: float
    beta: float


@dataclass(frozen=True)
class Schedule:
    """An all-reduce algorithm as rounds of point-to-point messages (transfers) between ranks.

    Attributes:
        name: name of the algorithm, such as ``ring``.
        ranks: number of ranks.
        chunks: number of parts of nearly equal length that the vector is cut into; the first ones may be one longer.
        rounds: the rounds in order, each a tuple of the ``ChunkTransfer`` that run at the same time.
    """

    name: str
    ranks: int
    chunks: int
    rounds: tuple[Round, ...]

    def bounds(self, transfer: ChunkTransfer, elements: int) -> tuple[int, int]:
        """Return the range (start, end), end exclusive, of vector elements that one message of this all-reduce carries.

        The vector is split into chunks as even as possible, the first ones one longer; the range is that of one or
        several consecutive chunks. It is empty (start = end) if the vector has too few elements for these chunks.

        Args:
            transfer: one message of this schedule.
            elements: length of the vector.
        """
        first = even_share(elements, self.chunks, transfer.first)
        return first.start, even_share(elements, self.chunks, transfer.last - 1).stop

    def of_rank(self, rank: int) -> list[tuple[list[ChunkTransfer], list[ChunkTransfer]]]:
        """Return the messages that one rank sends and receives in this all-reduce.

        Args:
            rank: index of the rank among those of the all-reduce, from 0.

        Returns:
            A pair (sends, receives) for each round in which the rank takes part, in the order of the rounds. Both are
            lists of messages, each with ``source`` and ``to`` (such indices), the chunks of the vector from ``first``
            to ``last`` (excluded), and ``reduce`` (whether the receiver adds them); either list may be empty.
        """
        own = (([t for t in r if t.source == rank], [t for t in r if t.to == rank]) for r in self.rounds)
        return [(sends, receives) for sends, receives in own if sends or receives]

    def links(self) -> list[tuple[int, int]]:
        """Return the sorted (source, destination) pairs of ranks that this all-reduce connects over the network.

        Transfers within a node go through shared memory and are left out.
        """
        return sorted({(t.source, t.to) for transfers in self.rounds for t in transfers if not t.within_node})

    def traffic(self, elements: int, itemsize: int) -> dict[tuple[int, int], LinkTraffic]:
        """Count messages and bytes on each link that this all-reduce schedule sends for one vector. Arithmetic only.

        Chunks without an element are not sent. Transfers within a node through shared memory count, too.

        Args:
            elements: length of the vector.
            itemsize: bytes of an element.

        Returns:
            A dict from (source rank, destination rank) to a ``LinkTraffic`` with the number of ``messages`` and their
            ``bytes``; links without a message are missing.

        >>> ring_schedule(3).traffic(7, 4)[0, 1]
        LinkTraffic(messages=4, bytes=40)
        """
        found: dict[tuple[int, int], list[int]] = defaultdict(list)
        for transfers in self.rounds:
            for transfer in transfers:
                start, end = self.bounds(transfer, elements)
                if end > start:
                    found[transfer.source, transfer.to].append((end - start) * itemsize)
        return {link: LinkTraffic(len(sizes), sum(sizes)) for link, sizes in sorted(found.items())}

    def seconds(self, size: float, network: LinkCost, node: LinkCost | None = None) -> float:
        """Return the predicted duration of one all-reduce in seconds, by the alpha-beta cost model.

        A round takes as long as its slowest rank; rounds follow one another.

        A rank's port sends and receives at the same time, and shares its rate among the round's messages.

        Args:
            size: bytes of the vector.
            network: cost of messages over the network: ``alpha`` (seconds of latency) and ``beta`` (bytes a second).
            node: cost of transfers within a node; None: as the network.

        >>> round(ring_schedule(8).seconds(1e8, LinkCost(2e-5, 1e10)), 6)
        0.01778
        """
        return sum(self._round_seconds(transfers, size, network, node or network) for transfers in self.rounds)

    def _round_seconds(self, transfers: Round, size: float, network: LinkCost, node: LinkCost) -> float:
        loads: dict[tuple[str, int, bool], float] = defaultdict(float)
        for t in transfers:
            bytes_ = (t.last - t.first) * size / self.chunks
            loads["out", t.source, t.within_node] += bytes_
            loads["in", t.to, t.within_node] += bytes_
        costs = {True: node, False: network}
        return max((costs[way[2]].alpha + load / costs[way[2]].beta for way, load in loads.items()), default=0.0)


def ring_schedule(ranks: int) -> Schedule:
    """Return the ``Schedule`` of a ring all-reduce: a reduce-scatter and an all-gather, each rank sending to the next.

    A schedule has rounds of point-to-point messages between ranks. Cost for N ranks and n bytes, with latency α and
    bandwidth β of ``LinkCost``: 2(N-1)α + 2(N-1)/N·n/β.

    Args:
        ranks: number of ranks, N.
    """
    return Schedule("ring", ranks, ranks, tuple(_ring(range(ranks), 0)))


def tree_schedule(ranks: int) -> Schedule:
    """Return the ``Schedule`` of a binomial-tree all-reduce: vectors are added up towards rank 0 and broadcast back.

    A schedule has rounds of point-to-point messages between ranks. Cost for N ranks and n bytes, with latency α and
    bandwidth β of ``LinkCost``: 2⌈log₂N⌉(α + n/β).

    Args:
        ranks: number of ranks, N.
    """
    return Schedule("tree", ranks, 1, tuple(_tree(ranks)))


def halving_schedule(ranks: int) -> Schedule:
    """Return the ``Schedule`` of a recursive halving-doubling all-reduce over the largest power of two, 2^k ≤ N ranks.

    A schedule has rounds of point-to-point messages between ranks. Each of the N − 2^k ranks left over first adds its
    whole vector to the vector of a partner among the 2^k ranks, and receives the result from the partner at the end.
    Cost for n bytes, with latency α and bandwidth β of ``LinkCost``: 2log₂N·α + 2(N-1)/N·n/β for N = 2^k; otherwise
    that cost for 2^k ranks and 2(α + n/β) more.

    Args:
        ranks: number of ranks, N.
    """
    power = 1 << (ranks.bit_length() - 1)
    return Schedule("halving", ranks, power, tuple(_halving(ranks, power)))


def central_schedule(ranks: int) -> Schedule:
    """Return the ``Schedule`` of a central reducer: rank 0 receives all vectors, adds them up in order, sends the sum.

    A schedule has rounds of point-to-point messages between ranks.

    Cost for n bytes and W = N-1 other ranks, with latency α and bandwidth β of ``LinkCost``: 2α + 2W·n/β.

    Args:
        ranks: number of ranks, N.
    """
    reduce = tuple(ChunkTransfer(rank, 0, 0, 1, True) for rank in range(1, ranks))
    copy = tuple(ChunkTransfer(0, rank, 0, 1, False) for rank in range(1, ranks))
    return Schedule("central", ranks, 1, tuple(r for r in (reduce, copy) if r))


def hierarchical_schedule(nodes: Sequence[Sequence[int]]) -> Schedule:
    """Return the ``Schedule`` of a two-level all-reduce over nodes with several ranks each.

    A schedule has rounds of point-to-point messages between ranks. Here they perform a reduce-scatter within each node,
    then for each slice a ring between the nodes, then an all-gather within each node. The number of slices is M, the
    ranks of the smallest node; the i-th rank of each node owns slice i.

    With M ranks on each of K nodes, a vector of n bytes, latency and bandwidth α_i, β_i within a node, and α, β between
    nodes, the cost is 2(M-1)α_i + 2(M-1)/M·n/β_i + 2(K-1)α + 2(K-1)/K·(n/M)/β seconds.

    Args:
        nodes: ranks of each node; every rank of 0 … N-1 is on one.

    Raises:
        ValueError: ``nodes`` do not hold each rank from 0 once, or a node is empty.
    """
    ranks = sorted(rank for node in nodes for rank in node)
    if not nodes or not all(nodes) or ranks != list(range(len(ranks))):
        raise ValueError(f"nodes {nodes} do not hold each rank from 0 once")
    slices = min(len(node) for node in nodes)
    return Schedule("hierarchical", len(ranks), slices * len(nodes), tuple(_hierarchical(nodes, slices)))


_FLAT: Mapping[str, Callable[[int], Schedule]] = {
    "ring": ring_schedule,
    "tree": tree_schedule,
    "halving": halving_schedule,
    "central": central_schedule,
}


def schedule_of(algorithm: Algorithm, nodes: Sequence[Sequence[int]]) -> Schedule:
    """Return the all-reduce schedule (rounds of point-to-point messages) of the algorithm with a given name.

    Args:
        algorithm: ``ring``, ``tree``, ``halving``, ``hierarchical`` or ``central``.
        nodes: ranks of each node; together they are 0 … N-1. Only ``hierarchical`` distinguishes nodes; the other
            algorithms use the number of ranks.

    Returns:
        The rounds in order, each with the messages of all ranks in it: sender, receiver and chunk of the vector.

    Raises:
        KeyError: there is no such algorithm.
        ValueError: for ``hierarchical``, ``nodes`` do not hold each rank from 0 once, or a node is empty.
    """
    if algorithm == "hierarchical":
        return hierarchical_schedule(nodes)
    return _FLAT[algorithm](sum(len(node) for node in nodes))


def _ring(members: Sequence[int], first: int) -> Iterator[Round]:
    """Yield the rounds of a ring over ``members``, whose chunks start at ``first``."""
    count = len(members)
    for reduce in (True, False):
        for step in range(count - 1):
            chunks = [first + (place - step + (not reduce)) % count for place in range(count)]
            yield tuple(
                ChunkTransfer(members[place], members[(place + 1) % count], chunk, chunk + 1, reduce)
                for place, chunk in enumerate(chunks)
            )


def _tree(ranks: int) -> Iterator[Round]:
    distances = [1 << level for level in range((ranks - 1).bit_length())]
    for distance in distances:
        yield tuple(ChunkTransfer(r, r - distance, 0, 1, True) for r in range(distance, ranks, 2 * distance))
    for distance in reversed(distances):
        yield tuple(ChunkTransfer(r - distance, r, 0, 1, False) for r in range(distance, ranks, 2 * distance))


def _halving(ranks: int, power: int) -> Iterator[Round]:
    distances = [1 << level for level in range(power.bit_length() - 1)]
    if ranks > power:
        yield tuple(ChunkTransfer(rank, rank - power, 0, power, True) for rank in range(power, ranks))
    for distance in reversed(distances):
        partners = [rank ^ distance for rank in range(power)]
        # A rank keeps its own half of the block that both hold, and sends the partner's half.
        yield tuple(
            ChunkTransfer(rank, other, other - other % distance, other - other % distance + distance, True)
            for rank, other in enumerate(partners)
        )
    for distance in distances:
        yield tuple(
            ChunkTransfer(rank, rank ^ distance, rank - rank % distance, rank - rank % distance + distance, False)
            for rank in range(power)
        )
    if ranks > power:
        yield tuple(ChunkTransfer(rank - power, rank, 0, power, False) for rank in range(power, ranks))


def _hierarchical(nodes: Sequence[Sequence[int]], slices: int) -> Iterator[Round]:
    width, largest = len(nodes), max(len(node) for node in nodes)
    for shift in range(1, largest):
        yield tuple(
            ChunkTransfer(node[(own - shift) % len(node)], node[own], own * width, (own + 1) * width, True, True)
            for node in nodes
            for own in range(slices)
            if shift < len(node)
        )
    rings = [list(_ring([node[own] for node in nodes], own * width)) for own in range(slices)]
    for together in zip(*rings, strict=True):
        yield tuple(transfer for transfers in together for transfer in transfers)
    for shift in range(1, largest):
        yield tuple(
            ChunkTransfer(node[own], node[(own + shift) % len(node)], own * width, (own + 1) * width, False, True)
            for node in nodes
            for own in range(slices)
            if shift < len(node)
        )


# A sum as it was added: a rank's own contribution, or two sums added.
_Sum = int | tuple["_Sum", "_Sum"]


def prove(schedule: Schedule) -> None:
    """Verify that a schedule of messages is a correct all-reduce, by running it on symbolic chunks. Local.

    Every rank must end with the sum of every chunk, in which each rank's contribution is counted once and which is
    added in the same order on all ranks, so that replicas stay bit-identical. No round may send a chunk of a rank that
    the same round overwrites. No rank may wait for ever, even if no message is sent before its receiver is ready
    (rendezvous).

    Args:
        schedule: the rounds of messages.

    Raises:
        ValueError: the schedule is wrong; names the first rank and chunk, or the ranks, for which this does not hold.
    """
    held: list[list[_Sum]] = [[rank] * schedule.chunks for rank in range(schedule.ranks)]
    for number, transfers in enumerate(schedule.rounds):
        read = {(t.source, chunk) for t in transfers for chunk in range(t.first, t.last)}
        before = [list(row) for row in held]
        for t in transfers:
            for chunk in range(t.first, t.last):
                if (t.to, chunk) in read:
                    raise ValueError(f"round {number} reads and writes chunk {chunk} of rank {t.to}")
                value = before[t.source][chunk]
                held[t.to][chunk] = (held[t.to][chunk], value) if t.reduce else value
    everyone = list(range(schedule.ranks))
    for chunk in range(schedule.chunks):
        counted = sorted(_leaves(held[0][chunk]))
        if counted != everyone:
            raise ValueError(f"chunk {chunk} is the sum of ranks {counted}, not of {schedule.ranks} ranks once each")
        for rank in everyone:
            if held[rank][chunk] is not held[0][chunk] and held[rank][chunk] != held[0][chunk]:
                raise ValueError(f"chunk {chunk} of rank {rank} is another sum than that of rank 0")
    _prove_progress(schedule)


def _leaves(value: _Sum) -> Iterator[int]:
    stack: list[_Sum] = [value]
    while stack:
        top = stack.pop()
        if isinstance(top, int):
            yield top
        else:
            stack.extend(top)


_Posts = tuple[defaultdict[int, list[ChunkTransfer]], defaultdict[int, list[ChunkTransfer]]]
"""The messages that a rank has posted as their sender, and as their receiver, by the other rank."""
_Wait = tuple[int, int, int]
"""A message that a rank has posted: 0 as its sender or 1 as its receiver, the other rank, its index in that list."""


def _prove_progress(schedule: Schedule) -> None:
    """Play every rank's own program with rendezvous messages; raise ValueError where ranks wait for ever."""
    programs = [schedule.of_rank(rank) for rank in range(schedule.ranks)]
    at = [-1] * schedule.ranks
    posted: list[_Posts] = [(defaultdict(list), defaultdict(list)) for _ in programs]
    waiting: list[list[_Wait]] = [[] for _ in programs]
    moved = True
    while moved:
        moved = False
        for rank, program in enumerate(programs):
            if at[rank] < len(program) and all(_is_met(posted, rank, wait) for wait in waiting[rank]):
                at[rank], moved = at[rank] + 1, True
                waiting[rank] = _post(posted[rank], program[at[rank]]) if at[rank] < len(program) else []
    stuck = [rank for rank, program in enumerate(programs) if at[rank] < len(program)]
    if stuck:
        raise ValueError(f"ranks {stuck} wait for ever")


def _post(posts: _Posts, sides: Sequence[Sequence[ChunkTransfer]]) -> list[_Wait]:
    """Post a rank's messages of one round, those that it sends and those that it receives; return its waits."""
    waits = []
    for way, transfers in enumerate(sides):
        for transfer in transfers:
            other = transfer.to if way == 0 else transfer.source
            line = posts[way][other]
            waits.append((way, other, len(line)))
            line.append(transfer)
    return waits


def _is_met(posted: Sequence[_Posts], rank: int, wait: _Wait) -> bool:
    """Return whether the other rank has posted its side of this rank's message."""
    way, other, number = wait
    line = posted[other][1 - way][rank]
    return len(line) > number and line[number] == posted[rank][way][other][number]
