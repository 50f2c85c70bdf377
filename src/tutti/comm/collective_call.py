"""Description of one rank's collective, which ranks compare before any arithmetic."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any


class ReduceOperation(StrEnum):
    """Operation by which a reduction combines the ranks' tensors.

    Values are ``average``, ``sum``, ``min``, ``max``, ``product`` (all element by element) and ``adasum``, which
    combines pairs of whole tensors by ``tutti.comm.adasum.adasum_pair``.
    """

    AVERAGE = "average"
    SUM = "sum"
    MIN = "min"
    MAX = "max"
    PRODUCT = "product"
    ADASUM = "adasum"


UNEVEN = frozenset(("allgather", "alltoall"))
"""Kinds whose tensors may differ between ranks in their first dimension."""


@dataclass(frozen=True)
class CollectiveCall:
    """Description of one rank's call of a collective, which is compared with the other ranks' calls of the same name.

    Attributes:
        kind: ``allreduce``, ``allgather``, ``broadcast``, ``alltoall``, ``reducescatter``, ``barrier``, ``join``,
            ``add_process_set`` or ``remove_process_set``.
        name: name of the call; ranks' calls with equal names belong together.
        process_set: number of the process set: the ranks that perform the collective.
        shapes: shape of each tensor; without the first dimension for kinds where it may differ between ranks
            (``UNEVEN``).
        dtypes: dtype of each tensor, such as ``float32``.
        device: device type of the tensors.
        op: value of ``ReduceOperation``; empty for kinds that do not reduce. The all-gather by which a sparse tensor is
            all-reduced has the operation and factors of that all-reduce.
        prescale, postscale: factors before and after the reduction.
        root: global rank of a broadcast's source; number of a process set that is removed; else -1.
        ranks: members of a process set that is added.
        unnamed: whether ``name`` was derived from the order of calls.
        sparse_shape: shape of the sparse tensor whose indices and values are gathered; empty for dense tensors.
        extents: numbers that may differ between ranks: for an all-gather the first dimension of each tensor, for an
            all-to-all the rows for each rank.
    """

    kind: str
    name: str
    process_set: int = 0
    shapes: tuple[tuple[int, ...], ...] = ()
    dtypes: tuple[str, ...] = ()
    device: str = ""
    op: str = ""
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = -1
    ranks: tuple[int, ...] = ()
    unnamed: bool = False
    sparse_shape: tuple[int, ...] = ()
    extents: tuple[int, ...] = ()

    @property
    def key(self) -> tuple[int, str]:
        """Pair (number of the process set, name), by which the ranks' calls of one collective are matched.

        A process set is a set of ranks that perform collectives among themselves; number 0 is the set of all ranks.
        """
        return self.process_set, self.name

    @property
    def signature(self) -> CollectiveCall:
        """Copy of this description of a collective without the sizes that may differ between ranks (``extents``).

        Ranks' calls of one name match if their signatures are equal.
        """
        return replace(self, extents=()) if self.extents else self

    def to_json(self) -> list[Any]:
        """Return this description of a collective as a JSON list, which ``from_json`` reads.

        The list has one value for each field, in the order in which the class declares them: ``kind``, ``name``,
        ``process_set``, ``shapes``, ``dtypes``, ``device``, ``op``, … ``extents``.
        """
        return [getattr(self, field) for field in _FIELDS]

    @staticmethod
    def from_json(fields: list[Any]) -> CollectiveCall:
        """Rebuild and return the description of a collective from the list that ``to_json`` returned.

        Args:
            fields: values of all fields, in the order in which the class declares them; tuples may have become lists by
                a round trip through JSON.
        """
        values = dict(zip(_FIELDS, fields, strict=True))
        values["shapes"] = tuple(tuple(shape) for shape in values["shapes"])
        for field in ("dtypes", "ranks", "sparse_shape", "extents"):
            values[field] = tuple(values[field])
        return CollectiveCall(**values)

    def __str__(self) -> str:
        text = f"{self.kind} '{self.name}'" if not self.unnamed else f"{self.kind} without a name ({self.name})"
        if self.op:
            text += f" ({self.op})"
        if self.ranks:
            text += f" of ranks {list(self.ranks)}"
        if self.shapes:
            shown = [f"{dtype} {self._whole_shape(index)}" for index, dtype in enumerate(self.dtypes[:3])]
            more = len(self.shapes) - len(shown)
            text += " of " + ", ".join(shown) + f" and {more} more" * (more > 0) + f" on {self.device}"
        if self.sparse_shape:
            text += f", sparse {list(self.sparse_shape)}"
        if self.root >= 0:
            text += f" from rank {self.root}"
        for factor, value in (("prescale", self.prescale), ("postscale", self.postscale)):
            text += f", {factor} {value:g}" * (value != 1.0)
        if self.kind == "alltoall":
            text += f", splits {list(self.extents)}"
        return text + f" in process set {self.process_set}" * bool(self.process_set)

    def _whole_shape(self, index: int) -> list[int]:
        shape = list(self.shapes[index])
        if self.kind == "allgather":
            return [self.extents[index], *shape] if index < len(self.extents) else shape
        return [sum(self.extents), *shape] if self.kind == "alltoall" else shape


_FIELDS = tuple(CollectiveCall.__dataclass_fields__)


def describe_mismatch(calls: Mapping[int, CollectiveCall]) -> str | None:
    """Compare the ranks' calls of one name and describe the first disagreement; None if all calls match.

    Args:
        calls: each rank's call, by global rank; not empty.

    Returns:
        Text for a MismatchError: the property in which the lowest rank's call and another one differ (kind, operation,
        shape, dtype, …; worded as Horovod words it), then both ranks' calls.
    """
    ranks = sorted(calls)
    first = calls[ranks[0]]
    for rank in ranks[1:]:
        other = calls[rank]
        if other.signature != first.signature:
            return f"{_difference(first, other)} Rank {ranks[0]} called {first}; rank {rank} called {other}."
    return None


def _difference(a: CollectiveCall, b: CollectiveCall) -> str:
    kind = a.kind.upper()
    if a.kind != b.kind:
        return f"Mismatched collective operations: One rank did an {kind}, but another rank did an {b.kind.upper()}."
    if a.dtypes != b.dtypes:
        one, two = _first_different(a.dtypes, b.dtypes)
        return f"Mismatched data types: One rank had type {one}, but another rank had type {two}."
    if a.shapes != b.shapes or a.sparse_shape != b.sparse_shape:
        sizes = (a.shapes, b.shapes) if a.shapes != b.shapes else ((a.sparse_shape,), (b.sparse_shape,))
        one, two = _first_different(*sizes)
        return (
            f"Mismatched {kind} tensor shapes: One rank sent a tensor of shape {one}, but another rank sent a tensor "
            f"of shape {two}."
        )
    if a.device != b.device:
        return (
            f"Mismatched {kind} CPU/GPU device selection: One rank specified device {a.device}, but another rank "
            f"specified device {b.device}."
        )
    if a.root != b.root:
        return (
            f"Mismatched {kind} root ranks: One rank specified root rank {a.root}, but another rank specified root "
            f"rank {b.root}."
        )
    if a.op != b.op:
        return f"Mismatched reduce operations: One rank specified {a.op}, but another rank specified {b.op}."
    if (a.prescale, a.postscale) != (b.prescale, b.postscale):
        return (
            f"Mismatched scale factors: One rank specified prescale {a.prescale:g} and postscale {a.postscale:g}, but "
            f"another rank specified {b.prescale:g} and {b.postscale:g}."
        )
    return f"Mismatched {kind} arguments."


def _first_different(a: tuple[Any, ...], b: tuple[Any, ...]) -> tuple[str, str]:
    for one, two in zip(a, b, strict=False):
        if one != two:
            return _shown(one), _shown(two)
    return f"list of {len(a)}", f"list of {len(b)}"


def _shown(value: Any) -> str:
    return json.dumps(value) if isinstance(value, tuple) else str(value)
