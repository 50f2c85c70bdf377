"""A cluster of equal nodes, and the links between them, stated or measured."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tutti.comm.collective_schedules import LinkCost
from tutti.errors import UsageError
from tutti.planning.measured_curves import curve_seconds
from tutti.workload.machine_file import Curve, read_machine


@dataclass(frozen=True)
class Network:
    """A cluster of equal nodes and the links between them.

    Attributes:
        per_node: devices of a node.
        between: cost of a message between nodes over a node's link; None where nothing is known of it.
        messages: measured curve of the seconds of a message between nodes over its bytes, which predictions prefer to
            ``between``; None where only ``between`` is known.
        collectives: measured curves of seconds over bytes of collectives with one rank a node, by ``KIND/NODES``; a
            kind without a curve takes the closed form of a ring over ``between``.
    """

    per_node: int
    between: LinkCost | None = None
    messages: Curve | None = None
    collectives: Mapping[str, Curve] = field(default_factory=dict)

    def nodes(self, ranks: int) -> int:
        """Return the number of nodes that ``ranks`` devices take: ``ranks`` divided by ``per_node``, rounded up."""
        return math.ceil(ranks / self.per_node)

    def spread(self, ranks: int, apart: int) -> tuple[int, int]:
        """Return the placement of a collective's ranks on the cluster: ranks on one node, and number of nodes.

        Args:
            ranks: number of ranks of the collective.
            apart: stride in devices from one of these ranks to the next.

        Returns:
            A pair: number of the collective's ranks on a full node (at least 1), and number of nodes with ranks of the
            collective, of which the last may have fewer.

        >>> Network(8).spread(4, 2), Network(8).spread(4, 8), Network(8).spread(16, 1)
        ((4, 1), (1, 4), (8, 2))
        """
        here = max(1, min(ranks, self.per_node // apart))
        return here, math.ceil(ranks / here)

    def sharing(self, apart: int, together: int | None = None) -> int:
        """Return the number of collectives that share the link of one node, of several that run at the same time.

        The number is ``together``, but at most the number of devices of a node. For example, with 4 tensor ranks 4
        all-reduces of gradients run at the same time, each over data ranks that are 4 devices apart.

        Args:
            apart: stride in devices from one rank of a collective to the next.
            together: number of collectives at the same time; None: ``apart``, as in the example.

        >>> Network(8).sharing(4), Network(8).sharing(16), Network(8).sharing(1, together=2)
        (4, 8, 2)
        """
        return min(apart if together is None else together, self.per_node)


def measured_network(path: Path, per_node: int) -> Network:
    """Read the links between the nodes of a cluster, and collectives over them, from a ``machine.json``.

    Args:
        path: file of ``tutti bench links collectives`` whose ranks were on a node each.
        per_node: devices of a node of the cluster; stated, because the file does not say it.

    Returns:
        The network, with ``per_node`` as given; ``between``, latency and bytes a second of the slowest measured link;
        ``messages``, the curve of this link's seconds over bytes; and ``collectives``, measured curves of collectives
        with one rank a node, by ``KIND/NODES`` such as ``all_reduce/4``.

    Raises:
        UsageError: no such file, of another format or version, or without links.
    """
    machine = read_machine(path)
    links = [curve for name, curve in machine.curves.items() if name.startswith("links/")]
    if not links:
        raise UsageError(
            "the file has no measured links between ranks",
            where=f"--network {path}",
            remedy="measure links between ranks on a node each, or state the link: --network alpha=30e-6,beta=1.25e9",
        )
    slowest = max(links, key=lambda curve: curve_seconds(curve, 2.0**20))
    prefix = "collectives/"
    over = {name.removeprefix(prefix): curve for name, curve in machine.curves.items() if name.startswith(prefix)}
    return Network(per_node, LinkCost(slowest.fixed, slowest.rate), slowest, over)
