"""Seconds of collectives by the closed forms of their algorithms."""

from __future__ import annotations

from collections.abc import Callable

from tutti.comm.collective_schedules import Algorithm, LinkCost

Transfer = Callable[[float], float]
"""Seconds of a message by its bytes."""


def schedule_seconds(
    algorithm: Algorithm,
    ranks: int,
    size: float,
    network: LinkCost | Transfer,
    node: LinkCost | None = None,
    per_node: int = 1,
) -> float:
    """Return the seconds of one all-reduce, by the closed form of its algorithm.

    A message takes latency + bytes ÷ bandwidth, and each rank has a network port of its own. For full nodes the result
    equals that of the simulated schedule (``Schedule.seconds``).

    Args:
        algorithm: ``ring``, ``tree``, ``halving``, ``central`` or ``hierarchical``.
        ranks: number of ranks N; 0 s for fewer than 2.
        size: bytes of the vector.
        network: cost of a message between nodes: latency in seconds and bytes a second, or a function that returns the
            seconds of a message from its bytes.
        node: cost of a transfer within a node, for ``hierarchical``; None: as between nodes.
        per_node: ranks of a node, for ``hierarchical``; the number of nodes, N over this, is rounded down.

    >>> round(schedule_seconds("ring", 8, 1e8, LinkCost(2e-5, 1e10)), 6)
    0.01778
    """
    if ranks < 2:
        return 0.0
    over = _line(network) if isinstance(network, LinkCost) else network
    if algorithm != "hierarchical":
        return sum(number * over(share * size) for number, share in _rounds(algorithm, ranks))
    inner, slices = over if node is None else _line(node), min(per_node, ranks)
    nodes = max(1, ranks // slices)
    within = 2 * (slices - 1) * inner(size / slices)
    return within + (2 * (nodes - 1) * over(size / slices / nodes) if nodes > 1 else 0.0)


def _line(cost: LinkCost) -> Transfer:
    return lambda size: cost.alpha + size / cost.beta


def _rounds(algorithm: Algorithm, ranks: int) -> list[tuple[int, float]]:
    """Return numbers of rounds, each with the share of the vector that passes the busiest port."""
    levels = (ranks - 1).bit_length()
    if algorithm == "ring":
        return [(2 * (ranks - 1), 1 / ranks)]
    if algorithm == "tree":
        return [(2 * levels, 1.0)]
    if algorithm == "halving":
        power = ranks.bit_length() - 1
        folded = [(2, 1.0)] if 1 << power < ranks else []
        return [*folded, *((2, 0.5**level) for level in range(1, power + 1))]
    return [(2, ranks - 1.0)]


def ring_passes(kind: str) -> int:
    """Return the number of rounds of a vector in a ring: two for an ``all_reduce``, one for other collectives."""
    return 2 if kind == "all_reduce" else 1


def ring_seconds(kind: str, ranks: int, size: float, cost: LinkCost) -> float:
    """Return the seconds of a collective by the closed form of a ring: passes · (N − 1) · (α + n / N / β).

    Args:
        kind: ``all_reduce``, ``all_gather``, ``reduce_scatter`` or ``broadcast``.
        ranks: number of ranks N, at least 1; one alone takes 0 s.
        size: n, bytes of the whole tensor.
        cost: cost of a message between neighbours: α seconds of latency, and β bytes a second.

    >>> round(ring_seconds("all_reduce", 8, 1e8, LinkCost(2e-5, 1e10)), 6)
    0.01778
    """
    return ring_passes(kind) * (ranks - 1) * (cost.alpha + size / ranks / cost.beta)
