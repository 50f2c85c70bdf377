"""Flows between a rank and the parameter servers in a step, as data: the requests, and bytes of them and of replies.

The numbers of floats are the terms that ranks and servers agree on when a run starts; the tensor bytes are those of the
``ServerPlan`` by which the parameters are divided.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tutti.parallel.parameter_server.request_handlers import TAIL
from tutti.parallel.parameter_server.server_partition import ServerPlan
from tutti.parallel.parameter_server.server_wire import APPLY, HEADER_BYTES, NAMES, PUSH, SUM

_ASYNC_REPLY = 5
"""Floats of the reply to an asynchronous push: staleness, lost updates, stop step, may proceed, joint clock."""


class ServerFlow(NamedTuple):
    """One request of a rank to a server, and its reply.

    Attributes:
        server: number of the server.
        kind: name of the request, such as ``push``.
        sent: bytes of the request without tensors.
        received: bytes of the reply without tensors.
        pushed: bytes of gradients that go with the request.
        pulled: bytes of parameters that come with the reply.
        push_period, pull_period: steps from one transfer of gradients, and of parameters, to the next; the request
            itself is made in each step.
    """

    server: int
    kind: str
    sent: int
    received: int
    pushed: int = 0
    pulled: int = 0
    push_period: int = 1
    pull_period: int = 1


def sync_floats(leaves: int, parameters: int, settings: int, variance: bool = False) -> Mapping[int, int]:
    """Return the number of floats that each kind of request to a synchronous server carries.

    Args:
        leaves: contributions to a step: logical workers or ranks.
        parameters: number of trained tensors.
        settings: number of hyperparameters of the optimizer.
        variance: whether the variance of the workers' gradients is measured.
    """
    return {PUSH: TAIL + parameters + (parameters + 1) * variance, SUM: 2 + leaves, APPLY: 2 + settings}


def async_floats(parameters: int, settings: int) -> Mapping[int, int]:
    """Return the number of floats that a push to an asynchronous server carries.

    Args:
        parameters: number of trained tensors.
        settings: number of hyperparameters of the optimizer.
    """
    return {PUSH: settings + parameters + 2}


def server_bytes(plan: ServerPlan, server: int) -> int:
    """Return the tensor bytes of one server's part of the parameters, alignment included."""
    return sum(map(len, plan.frames(server)))


def sync_step_flows(plan: ServerPlan, servers: int, leaves: int, settings: int) -> list[ServerFlow]:
    """List the requests of a rank to synchronous servers in a step with a finite gradient, in order.

    A rank pushes one sum over its logical workers, asks for the sum over all ranks, and has the update applied.

    Args:
        plan: partition of the parameters over the servers.
        servers: number of servers.
        leaves: contributions to a step, one a rank.
        settings: number of hyperparameters of the optimizer.
    """
    count = len(plan.sizes)
    floats = sync_floats(leaves, count, settings)
    replies = {PUSH: 0, SUM: floats[PUSH] + 2 * count + leaves, APPLY: 0}
    return [
        ServerFlow(
            server,
            NAMES[kind],
            _message(floats[kind]),
            _message(replies[kind]),
            pushed=server_bytes(plan, server) if kind == PUSH else 0,
            pulled=server_bytes(plan, server) if kind == APPLY else 0,
        )
        for kind in (PUSH, SUM, APPLY)
        for server in range(servers)
    ]


def async_step_flows(plan: ServerPlan, servers: int, settings: int, push: int, fetch: int) -> list[ServerFlow]:
    """List the requests of one logical worker to asynchronous servers in a step: a push, answered with parameters.

    With bounded staleness a worker that is ahead makes a further request, which waits; it is not in the list.

    Args:
        plan: partition of the parameters over the servers.
        servers: number of servers.
        settings: number of hyperparameters of the optimizer.
        push, fetch: steps between two transfers of gradients, and of parameters.
    """
    sent, received = _message(async_floats(len(plan.sizes), settings)[PUSH]), _message(_ASYNC_REPLY)
    return [
        ServerFlow(server, NAMES[PUSH], sent, received, size, size, push, fetch)
        for server, size in enumerate(server_bytes(plan, server) for server in range(servers))
    ]


def flow_totals(
    flows: Sequence[ServerFlow], steps: int, *, tensors_in_messages: bool
) -> dict[tuple[int, str], tuple[int, int, int]]:
    """Return requests, bytes sent and bytes received over a number of steps, by server and kind of request.

    Args:
        flows: of a step.
        steps: number of steps, counted from the start of the push and fetch periods.
        tensors_in_messages: whether tensors travel in the messages, and not in shared memory.

    >>> flow_totals([ServerFlow(0, "push", 10, 5, 100, 100, 2, 1)], 3, tensors_in_messages=True)
    {(0, 'push'): (3, 130, 315)}
    """
    found: dict[tuple[int, str], tuple[int, int, int]] = {}
    for flow in flows:
        there = steps // flow.push_period * flow.pushed * tensors_in_messages
        back = steps // flow.pull_period * flow.pulled * tensors_in_messages
        requests, sent, received = found.get((flow.server, flow.kind), (0, 0, 0))
        found[flow.server, flow.kind] = (
            requests + steps,
            sent + steps * flow.sent + there,
            received + steps * flow.received + back,
        )
    return found


def _message(floats: int) -> int:
    """Return the bytes of a message without tensors: the header, and 64-bit floats."""
    return HEADER_BYTES + 8 * floats
