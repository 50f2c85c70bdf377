"""Collectives among the tensor ranks of a replica while one of them is traced alone, as lines in samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from tutti.errors import UsageError
from tutti.workload.workload_file import Affine

_TOLERANCE = 1e-6


class LoggedCall(NamedTuple):
    """One collective of a trace: module group and pass in which it is made, kind, and bytes of the whole tensor."""

    group: str
    passed: str
    kind: str
    bytes: int


class GroupMessage(NamedTuple):
    """One collective over the tensor ranks in a micro-batch.

    Attributes:
        group: name of the module group within which it is made.
        passed: ``forward`` or ``backward``; recomputation is part of backward.
        kind: all_reduce, all_gather or reduce_scatter.
        bytes: of the whole tensor, as a function of samples.
    """

    group: str
    passed: str
    kind: str
    bytes: Affine


class _Complete:
    """Handle of a collective that was not made."""

    def wait(self) -> None:
        """Return at once."""


class MessageLog:
    """Takes the place of a ``Communicator`` of the tensor ranks: records the collectives and sends nothing.

    Sums are this rank's summand alone and other ranks' slices are zeros, so that only shapes may be used.

    Args:
        size: number of tensor ranks.

    Attributes:
        rank, size: index of the traced rank, which is the first, and number of ranks.
        place: returns module group and pass of the operator that is called now.
    """

    rank = 0

    def __init__(self, size: int) -> None:
        self.size = size
        self.place: Callable[[], tuple[str, str]] = lambda: ("", "forward")
        self._calls: list[LoggedCall] = []
        self._traces: dict[str, list[tuple[int, list[LoggedCall]]]] = {}

    def start_all_reduce(self, flat: Tensor, text: str) -> _Complete:
        """Record an all-reduce of ``flat``. See ``Communicator.start_all_reduce``."""
        self._note("all_reduce", flat.nbytes)
        return _Complete()

    def gather_slices(self, mine: Tensor, text: str) -> Tensor:
        """Record an all-gather; return (size · n,) with this rank's slice in front. See ``Communicator``."""
        self._note("all_gather", mine.nbytes * self.size)
        return torch.cat([mine, mine.new_zeros((self.size - 1) * mine.numel())])

    def scatter_sum(self, mine: Tensor, whole: Tensor, text: str) -> None:
        """Record a reduce-scatter; write this rank's own summand into ``mine``. See ``Communicator.scatter_sum``."""
        self._note("reduce_scatter", whole.nbytes)
        mine.copy_(whole[: mine.numel()])

    def begin(self, place: Callable[[], tuple[str, str]]) -> None:
        """Forget the calls so far, and ask ``place`` from now on where a call belongs."""
        self.place, self._calls = place, []

    def keep(self, choice: str, samples: int) -> None:
        """Store the collectives recorded since ``begin`` as one traced forward and backward, for ``lines``.

        Args:
            choice: kind of activation checkpointing that the trace was made with, such as ``none`` or ``full``.
            samples: number of samples in the traced micro-batch; two traces or more of each choice make a line.
        """
        self._traces.setdefault(choice, []).append((samples, self._calls))

    def lines(self) -> dict[str, tuple[GroupMessage, ...]]:
        """Return the messages of a micro-batch by choice of activation checkpointing, as lines through the traces.

        Raises:
            UsageError: the messages of the traces are not alike, or a third trace is not on the line.
        """
        return {choice: _lines(traces) for choice, traces in self._traces.items()}

    def _note(self, kind: str, size: int) -> None:
        group, passed = self.place()
        self._calls.append(LoggedCall(group, "forward" if passed == "forward" else "backward", kind, size))


def _lines(traces: list[tuple[int, list[LoggedCall]]]) -> tuple[GroupMessage, ...]:
    (few, low), (more, high), *others = traces
    found = []
    alike = all([c[:3] for c in calls] == [c[:3] for c in low] for _, calls in (traces[1], *others))
    for place, (first, second) in enumerate(zip(low, high, strict=False) if alike else ()):
        slope = (second.bytes - first.bytes) / (more - few)
        line = Affine(first.bytes - slope * few, slope)
        alike = alike and all(abs(line.at(n) - calls[place].bytes) <= _TOLERANCE * line.at(n) for n, calls in others)
        found.append(GroupMessage(*first[:3], line))
    if not alike:
        raise UsageError(
            "the messages between the tensor ranks are no line in samples",
            why="micro-batches of other sizes make other collectives, so that none can be foretold",
            remedy="take --strategy mirrored, or name the layers that depend on the batch in whole=",
        )
    return tuple(found)
