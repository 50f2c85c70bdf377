"""Broadcast of many tensors in few messages, and of the result or the exception of a function of one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, TypeVar

import torch
from torch import Tensor

from tutti import errors
from tutti.comm.communicator import Communicator

T = TypeVar("T")

_MESSAGE_BYTES = 64 << 20


def broadcast_tensors(comm: Communicator, tensors: Sequence[Tensor], name: str) -> None:
    """Broadcast the values of ``tensors`` from the first rank of ``comm`` to its other ranks, in place.

    Collective over the ranks of ``comm``: several broadcasts, each after a comparison of the ranks' calls; blocks until
    this rank has all tensors. With one rank nothing is done.

    Consecutive tensors of equal dtype travel together, up to 64 MiB; a larger one travels alone. Tensors may be on
    several devices, as with FSDP2, which moves parameters to the accelerator later than buffers are moved there.

    Args:
        comm: the ranks that take part.
        tensors: equal in number, shape and dtype on all ranks. They are written in place, so that they must not require
            a gradient unless the caller disables autograd; of a parameter, give ``.data``.
        name: names the call in both errors; equal on all ranks.

    Raises:
        MismatchError: numbers, shapes or dtypes of the tensors, or the names, differ between ranks.
        PeerError: a rank has ended, or did not make the call in time.
    """
    if comm.size == 1:
        return
    for dtype, same in groupby(tensors, key=lambda t: t.dtype):
        for message in in_messages(same, lambda t: t.nbytes):
            flat = torch.cat([t.reshape(-1).to(comm.device) for t in message])
            comm.broadcast(flat, 0, f"{name}, {dtype}")
            for tensor, part in zip(message, flat.split([t.numel() for t in message]), strict=True):
                tensor.copy_(part.view_as(tensor))


def in_messages(items: Iterable[T], size: Callable[[T], int]) -> Iterator[list[T]]:
    """Divide tensors, or their descriptions, in order into lists, each of which is sent as one message.

    A message has at most 64 MiB, or a single tensor that is larger.

    Args:
        items: the tensors, or their descriptions, in the order in which they are sent.
        size: returns the bytes of an item.

    Yields:
        Lists of at least one item.

    >>> [len(message) for message in in_messages([40 << 20, 1, 30 << 20, 2, 70 << 20, 3], lambda size: size)]
    [2, 2, 1, 1]
    """
    message: list[T] = []
    full = 0
    for item in items:
        if message and full + size(item) > _MESSAGE_BYTES:
            yield message
            message, full = [], 0
        message.append(item)
        full += size(item)
    if message:
        yield message


def broadcast_result(comm: Communicator, source: int, function: Callable[[], Any], name: str) -> Any:
    """Call a function on one rank, and return its result or raise its exception on all ranks.

    Collective over the ranks of ``comm``: broadcasts a JSON value, the result or a description of the exception;
    blocks. So no rank waits in vain for the result of a function that has raised.

    Args:
        comm: the ranks that take part.
        source: the rank that calls ``function``, as an index in ``comm``.
        function: called without arguments on ``source`` alone; its result must be a JSON value. It must perform no
            collective of ``comm``.
        name: names the result in both errors of the broadcast; equal on all ranks.

    Returns:
        The result, on all ranks as JSON decodes it: tuples are lists. With one rank the result itself.

    Raises:
        TuttiError: on all ranks, the exception of ``function`` in its own class, if it is tutti's own.
        Exception: on ``source``, any other exception of ``function``.
        PeerError: on the other ranks, ``function`` has raised an exception that is not tutti's own, which the message
            names; or a rank has ended, or did not make the call in time.
        MismatchError: ranks are in different calls.
    """
    answer, raised = None, None
    if comm.rank == source:
        try:
            answer = {"value": function()}
        except Exception as error:
            answer, raised = _told(error, comm.global_rank, name), error
    answer = comm.broadcast_json(answer, source, name)
    if raised is not None:
        raise raised
    if "value" in answer:
        return answer["value"]
    raise getattr(errors, answer["class"])(answer["what"], **answer["more"])


def _told(error: Exception, rank: int, name: str) -> dict[str, Any]:
    """Return a JSON value of which the other ranks make their exception."""
    if not isinstance(error, errors.TuttiError):
        what, why = f"rank {rank} has failed: {name}", f"{type(error).__name__}: {error}"
        return {"class": errors.PeerError.__name__, "what": what, "more": {"why": why}}
    known = next(each.__name__ for each in type(error).__mro__ if each.__module__ == errors.__name__)
    return {
        "class": known,
        "what": error.what,
        "more": {"where": error.where, "why": error.why, "remedy": error.remedy},
    }
