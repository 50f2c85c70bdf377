"""What neighbouring stages send each other: activations one way, their gradients the other."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tutti.comm.communicator import Communicator, Pending
from tutti.errors import UsageError

KINDS = {"activations": 1, "gradients": -1}
"""Which way they go along the stages."""

_FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}


class Form(NamedTuple):
    """How a value is sent: a tensor by its numbers, anything else once, within this.

    ``learns``: it may have a gradient.
    """

    shape: tuple[int, ...] | None
    dtype: str
    memory: str
    learns: bool
    value: Any = None

    def __str__(self) -> str:
        return f"{self.value}" if self.shape is None else f"{self.dtype} {self.shape}"


class _Coming(NamedTuple):
    """Values that are on their way."""

    values: list[Any]
    pending: list[Pending]


class Messages:
    """Between this rank and its neighbours along the stages.

    Shape, dtype and memory format go first, once for each shape of the batch; then the numbers alone.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._forms: dict[tuple[Any, ...], list[Form]] = {}
        self._under_way: list[tuple[Pending, Tensor]] = []
        self._ahead: dict[str, deque[_Coming]] = {kind: deque() for kind in KINDS}

    def send(self, kind: str, values: Sequence[Any], key: tuple[Any, ...]) -> list[Form]:
        """Begin to send to the neighbour; ``key``: batches for which it is equal have values of equal forms.

        Raises UsageError where they have not.
        """
        forms = [_form(value) for value in values]
        if self._forms.setdefault((kind, *key), forms) is forms:
            self._tell(kind, forms)
        elif (known := self._forms[kind, *key]) != forms:
            now, before = next((a, b) for a, b in zip(forms, known, strict=True) if a != b)
            raise UsageError(
                f"a stage's {kind} are {now} and were {before} for an equal batch",
                remedy="what goes from stage to stage must have a shape that depends on the batch's shape alone",
            )
        for value, form in zip(values, forms, strict=True):
            if form.shape is not None:
                self._start(kind, value.detach().contiguous(memory_format=_FORMATS[form.memory]))
        return forms

    def receive(self, kind: str, key: tuple[Any, ...]) -> tuple[list[Any], list[Form]]:
        """The neighbour's next values of a kind, in its own memory format: kernels round differently in another."""
        if not self._ahead[kind]:
            if (kind, *key) not in self._forms:
                self._forms[kind, *key] = self._told(kind)
            self._begin(kind, key)
        coming = self._ahead[kind].popleft()
        for pending in coming.pending:
            pending.wait()
        return coming.values, self._forms[kind, *key]

    def expect(self, kind: str, key: tuple[Any, ...]) -> bool:
        """Begin to receive what ``receive`` will be asked for next but one; whether that could be done.

        It cannot where the forms are not known. Nothing that comes later may then be expected before it is received.
        """
        if (kind, *key) not in self._forms:
            return False
        self._begin(kind, key)
        return True

    def _begin(self, kind: str, key: tuple[Any, ...]) -> None:
        values, pending = [], []
        for form in self._forms[kind, *key]:
            value = form.value
            if form.shape is not None:
                dtype, memory = getattr(torch, form.dtype), _FORMATS[form.memory]
                value = torch.empty(form.shape, dtype=dtype, device=self._comm.device, memory_format=memory)
                pending.append(self._comm.start_receive(value, self._neighbour(-KINDS[kind]), kind))
            values.append(value)
        self._ahead[kind].append(_Coming(values, pending))

    def finish(self) -> None:
        """Wait until everything has been taken."""
        for pending, _ in self._under_way:
            pending.wait()
        self._under_way = []

    def _neighbour(self, way: int) -> int:
        return (self._comm.rank + way) % self._comm.size

    def _start(self, kind: str, tensor: Tensor) -> None:
        over = [entry for entry in self._under_way if entry[0].done]
        for entry in over:
            entry[0].wait()
            self._under_way.remove(entry)
        started = self._comm.start_send(tensor, self._neighbour(KINDS[kind]), kind)
        self._under_way.append((started, tensor))

    def _tell(self, kind: str, forms: Sequence[Form]) -> None:
        raw = bytearray(json.dumps(forms, default=_refuse).encode())
        self._start(kind, torch.tensor([len(raw)], device=self._comm.device))
        self._start(kind, torch.frombuffer(raw, dtype=torch.uint8).to(self._comm.device))

    def _told(self, kind: str) -> list[Form]:
        source = self._neighbour(-KINDS[kind])
        length = torch.zeros(1, dtype=torch.int64, device=self._comm.device)
        self._comm.receive(length, source, kind)
        raw = torch.zeros(int(length), dtype=torch.uint8, device=self._comm.device)
        self._comm.receive(raw, source, kind)
        return [Form(*map(_tuples, row)) for row in json.loads(bytes(raw.cpu().numpy()))]


def _form(value: Any) -> Form:
    if not isinstance(value, Tensor):
        return Form(None, "", "", False, _tuples(value))
    last = value.dim() == 4 and not value.is_contiguous() and value.is_contiguous(memory_format=torch.channels_last)
    memory = "channels_last" if last else "contiguous"
    return Form(tuple(value.shape), str(value.dtype).removeprefix("torch."), memory, value.is_floating_point())


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list | tuple) else value


def _refuse(value: Any) -> Any:
    raise UsageError(
        f"a {type(value).__name__} would have to go from one stage to the next",
        why="tensors and numbers can, other things cannot",
        remedy="choose other cuts: pipeline:cuts=name+name",
    )


def shapes(batch: Any) -> list[torch.Size]:
    """Shapes of all tensors of a batch."""
    if isinstance(batch, Tensor):
        return [batch.shape]
    values = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, tuple | list) else ()
    return [shape for value in values for shape in shapes(value)]
