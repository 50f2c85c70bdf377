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
    """One kind of request that a rank makes to a parameter server in each step, and the reply.

    Attributes:
        server: number of the server.
        kind: name of the request, such as ``push``.
        sent: bytes of the request without tensors.
        received: bytes of the reply without tensors.
        pushed: bytes of gradients that go with the request.
        pulled: bytes of parameters that come with the reply.
        push_period: steps from one transfer of gradients to the next; the request itself is made in each step.
        pull_period: steps from one transfer of parameters to the next.
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
    """Return how many 64-bit floats beside tensors each kind of request to a synchronous server carries.

    Args:
        leaves: gradients that the server sums in a step: one for each logical worker (share of the global batch), or
            one for each rank.
        parameters: number of trained tensors of the whole model; a push to each server carries as many floats for them,
            whatever part of the parameters the server has.
        settings: number of hyperparameters of the optimizer.
        variance: whether the variance of the workers' gradients is measured.

    Returns:
        A mapping from a kind of request, an integer constant of ``server_wire``, to the number of floats. ``PUSH``
        (gradients) has 13 + ``parameters``, with ``variance`` another 1 + ``parameters``; ``SUM`` (statistics of the
        summed gradients) 2 + ``leaves``; ``APPLY`` (make the update) 3 + ``settings``.
    """
    return {PUSH: TAIL + parameters + (parameters + 1) * variance, SUM: 2 + leaves, APPLY: 3 + settings}


def async_floats(parameters: int, settings: int) -> Mapping[int, int]:
    """Return how many 64-bit floats beside the gradients a push to an asynchronous parameter server carries.

    Args:
        parameters: number of trained tensors of the whole model; a push to each server carries as many floats for them,
            whatever part of the parameters the server has.
        settings: number of hyperparameters of the optimizer.

    Returns:
        A mapping with one key, the integer constant ``server_wire.PUSH``; its value is ``settings`` + ``parameters`` +
        2, the number of floats.
    """
    return {PUSH: settings + parameters + 2}


def server_bytes(plan: ServerPlan, server: int) -> int:
    """Return the bytes of all parameter slices that one parameter server has.

    The padding that aligns each tensor is included.

    Args:
        plan: partition of the parameters over the servers.
        server: index of the server.
    """
    return sum(map(len, plan.frames(server)))


def sync_step_flows(plan: ServerPlan, servers: int, leaves: int, settings: int) -> list[ServerFlow]:
    """Predict the traffic of a rank with synchronous parameter servers in a step with a finite gradient.

    Pure arithmetic. A rank pushes one sum over its logical workers (fixed shares of the global batch) to every server,
    asks for statistics of the sum over all ranks, and has the update applied, which is answered with parameters.

    Args:
        plan: partition of the parameters over the servers.
        servers: number of servers.
        leaves: gradients that a server sums in a step, one a rank.
        settings: number of hyperparameters of the optimizer.

    Returns:
        One ``ServerFlow`` for each kind of request (push, sum, apply) and server, by kind and then server: bytes of
        request and reply without tensors (``sent``, ``received``), bytes of gradients with a push (``pushed``) and of
        parameters with the reply to an apply (``pulled``).
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
    """Predict the traffic of one logical worker with asynchronous parameter servers in a step. Pure arithmetic.

    A logical worker is one of N fixed shares of the global batch. In each step the worker makes one request ``push`` to
    every server; the request may carry gradients, and the reply parameters. Further requests, with which a worker that
    is too many steps ahead of the slowest one waits (bounded staleness), are not in the list.

    Args:
        plan: partition of the parameters over the servers, which gives the bytes of the tensors.
        servers: number of servers.
        settings: number of hyperparameters of the optimizer, which go with each request as 64-bit floats.
        push: number of steps from one request that carries gradients to the next.
        fetch: number of steps from one reply that carries parameters to the next.

    Returns:
        One ``ServerFlow`` for each server, by its index: bytes of request and reply without tensors (``sent``,
        ``received``), bytes of gradients and of parameters in the steps that transfer them (``pushed``, ``pulled``),
        and ``push`` and ``fetch`` as ``push_period`` and ``pull_period``.
    """
    sent, received = _message(async_floats(len(plan.sizes), settings)[PUSH]), _message(_ASYNC_REPLY)
    return [
        ServerFlow(server, NAMES[PUSH], sent, received, size, size, push, fetch)
        for server, size in enumerate(server_bytes(plan, server) for server in range(servers))
    ]


def flow_totals(
    flows: Sequence[ServerFlow], steps: int, *, tensors_in_messages: bool
) -> dict[tuple[int, str], tuple[int, int, int]]:
    """Add up the requests of a rank to the parameter servers, and their bytes, over a number of steps.

    Args:
        flows: the requests of one step: for each its server, kind, bytes of the message, bytes of tensors, and the
            numbers of steps from one transfer of tensors to the next.
        steps: number of steps, counted from the start of these periods.
        tensors_in_messages: whether tensors travel in the messages and their bytes count; False with shared memory.

    Returns:
        A dict from (index of the server, name of the kind of request, such as ``"push"``) to (number of requests, bytes
        sent, bytes received).

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
