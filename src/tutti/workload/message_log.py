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
    """One collective that was recorded while a model was traced.

    Attributes:
        path: names of the modules within whose calls the collective is made, the outermost first.
        passed: pass in which it is made: ``forward`` or ``backward``, which includes recomputation.
        kind: ``all_reduce``, ``all_gather`` or ``reduce_scatter``.
        bytes: bytes of the whole tensor.
    """

    path: tuple[str, ...]
    passed: str
    kind: str
    bytes: int


class GroupMessage(NamedTuple):
    """One collective over the tensor ranks in a micro-batch, with its bytes as a function of the number of samples.

    A module group is a module that FSDP wraps or a pipeline stage calls, the rest of the model, or the loss.

    Attributes:
        group: name of the module group within which the collective is made.
        passed: ``forward`` or ``backward``; recomputation is part of backward.
        kind: ``all_reduce``, ``all_gather`` or ``reduce_scatter``.
        bytes: bytes of the whole tensor, as a linear function of the samples of the micro-batch.
    """

    group: str
    passed: str
    kind: str
    bytes: Affine


class MessageLog:
    """Stand-in for the communicator of the tensor ranks: records the collectives of a traced model and sends nothing.

    One process traces the model of one tensor-parallel rank. A sum over ranks then holds this rank's summand alone, and
    the slices of other ranks are zeros: the shapes of results are right and the values are not. A module group is a
    module that FSDP wraps or a pipeline stage calls, the rest of the model, or the loss.

    Args:
        size: number of tensor ranks.

    Attributes:
        rank, size: index of the traced rank, which is the first, and number of ranks.
        place: returns the modules (``LoggedCall.path``) and the pass of the operator that is called now.
    """

    rank = 0

    def __init__(self, size: int) -> None:
        self.size = size
        self.place: Callable[[], tuple[tuple[str, ...], str]] = lambda: ((), "forward")
        self._calls: list[LoggedCall] = []
        self._traces: dict[str, list[tuple[int, list[LoggedCall]]]] = {}

    def sum_in_place(self, tensor: Tensor, text: str) -> None:
        """Record an all-reduce over the tensor ranks without making it: ``tensor`` is left unchanged.

        The log stands in for the communicator while one process traces the model of the first tensor rank.

        Args:
            tensor: the tensor that would be summed in place.
            text: ignored.
        """
        self._note("all_reduce", tensor.nbytes)

    def gather_slices(self, mine: Tensor, text: str) -> Tensor:
        """Record an all-gather over the tensor ranks without making it.

        The log stands in for the communicator while one process traces the model of the first tensor rank.

        Args:
            mine: (n,), this rank's slice.
            text: ignored.

        Returns:
            A tensor of shape (ranks · n,): ``mine``, followed by zeros in place of the other ranks' slices.
        """
        self._note("all_gather", mine.nbytes * self.size)
        return torch.cat([mine, mine.new_zeros((self.size - 1) * mine.numel())])

    def scatter_sum(self, mine: Tensor, whole: Tensor, text: str) -> None:
        """Record a reduce-scatter over the tensor ranks without making it.

        The log stands in for the communicator while one process traces the model of the first tensor rank.

        Args:
            mine: (n,), overwritten by this rank's own summand of its slice, not by the sum over ranks.
            whole: (ranks · n,), this rank's summand.
            text: ignored.
        """
        self._note("reduce_scatter", whole.nbytes)
        mine.copy_(whole[: mine.numel()])

    def begin(self, place: Callable[[], tuple[tuple[str, ...], str]]) -> None:
        """Start recording the collectives of a new trace of a model; collectives not yet passed to ``keep`` are lost.

        ``trace_modules`` calls it before each trace.

        Args:
            place: called at each collective; returns the names of the modules within whose calls it is made, the
                outermost first, and the pass (``forward``, ``backward`` or ``recompute``).
        """
        self.place, self._calls = place, []

    def keep(self, choice: str, samples: int) -> None:
        """Store the collectives recorded since ``begin`` as those of one traced forward and backward of a model.

        ``trace_modules`` calls it after each trace. ``lines`` later fits bytes over samples, and needs at least two
        stored traces of each ``choice``, the first two of them with different numbers of samples.

        Args:
            choice: kind of activation checkpointing that the trace was made with, such as ``none`` or ``blocks``.
            samples: number of samples in the traced micro-batch.
        """
        self._traces.setdefault(choice, []).append((samples, self._calls))

    def lines(self, group: Callable[[tuple[str, ...]], str]) -> dict[str, tuple[GroupMessage, ...]]:
        """Return the recorded collectives of a micro-batch, with their bytes as linear functions of its samples.

        Call it when ``keep`` has stored at least two traces of each kind of activation checkpointing. Each linear
        function goes through the first two traces, which must have different numbers of samples. A module group is a
        module that FSDP wraps or a pipeline stage calls, the rest of the model, or the loss.

        Args:
            group: returns the name of the module group that a path (``LoggedCall.path``) belongs to.

        Returns:
            For each kind of activation checkpointing, such as ``none``, a tuple of the collectives of a micro-batch in
            the order of the trace, each a ``GroupMessage``: ``group`` (name of the module group), ``passed``
            (``forward`` or ``backward``), ``kind``, such as ``all_reduce``, and ``bytes`` of the whole tensor as an
            ``Affine``: ``fixed`` + ``per_sample`` · samples.

        Raises:
            UsageError: the traces made different collectives, or the bytes of a further trace are not on the line.
        """
        return {choice: _lines(traces, group) for choice, traces in self._traces.items()}

    def _note(self, kind: str, size: int) -> None:
        path, passed = self.place()
        self._calls.append(LoggedCall(path, "forward" if passed == "forward" else "backward", kind, size))


def _lines(
    traces: list[tuple[int, list[LoggedCall]]], group: Callable[[tuple[str, ...]], str]
) -> tuple[GroupMessage, ...]:
    (few, low), (more, high), *others = traces
    found = []
    alike = all([c[:3] for c in calls] == [c[:3] for c in low] for _, calls in (traces[1], *others))
    for place, (first, second) in enumerate(zip(low, high, strict=False) if alike else ()):
        slope = (second.bytes - first.bytes) / (more - few)
        line = Affine(first.bytes - slope * few, slope)
        alike = alike and all(abs(line.at(n) - calls[place].bytes) <= _TOLERANCE * line.at(n) for n, calls in others)
        found.append(GroupMessage(group(first.path), first.passed, first.kind, line))
    if not alike:
        raise UsageError(
            "the messages between the tensor ranks are no line in samples",
            why="micro-batches of other sizes make other collectives, so that none can be foretold",
            remedy="take --strategy mirrored, or name the layers that depend on the batch in whole=",
        )
    return tuple(found)
