"""Send activations to the next stage, and their gradients to the previous one."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tutti.comm.communicator import Communicator, Pending
from tutti.errors import UsageError
from tutti.nn.written_tensors import share_memory

KINDS = {"activations": 1, "gradients": -1}
"""Direction along the stages: 1 to the next rank, -1 to the previous one."""

MEMORY_FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
"""PyTorch's memory formats by their names in a ``MessageForm``."""


class MessageForm(NamedTuple):
    """Shape, dtype and memory format of a tensor that one pipeline stage sends to another; or a value of another type.

    Attributes:
        shape: shape of the tensor; None for a value that is no tensor.
        dtype: name of the dtype in ``torch``, such as ``float32``; "" for a value that is no tensor.
        memory: memory format, ``contiguous`` or ``channels_last``; "" for a value that is no tensor.
        learns: whether the tensor may have a gradient: its dtype is a floating-point or complex type.
        value: the value itself where it is no tensor; None for a tensor.
        shared: whether the tensor shared memory with another sent value, or with an argument of the model's call, on
            the stage that sent it; known for activations, from the first of all batches with the same forms.
    """

    shape: tuple[int, ...] | None
    dtype: str
    memory: str
    learns: bool
    value: Any = None
    shared: bool = False

    def __str__(self) -> str:
        return f"{self.value}" if self.shape is None else f"{self.dtype} {self.shape}"


class _Coming(NamedTuple):
    """Values that are being received."""

    values: list[Any]
    pending: list[Pending]


class StageMessages:
    """Point-to-point messages of activations and gradients between this rank and its neighbours along the pipeline.

    The first batch of each shape sends the values' shapes and dtypes first; later batches send the tensors' data only.
    The waits raise ``PeerError`` if a rank is lost or late, and ``MismatchError`` if ranks wait for each other in
    different calls.

    Args:
        comm: communicator over the ranks of the pipeline stages, from ``Communicators.p2p_channels`` with ``KINDS``.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._forms: dict[tuple[Any, ...], list[MessageForm]] = {}
        self._reached: dict[tuple[Any, int], bool] = {}
        self._under_way: list[tuple[Pending, Tensor]] = []
        self._ahead: dict[str, deque[_Coming]] = {kind: deque() for kind in KINDS}

    def send(
        self, kind: str, values: Sequence[Any], key: tuple[Any, ...], beside: Sequence[Tensor] = ()
    ) -> list[MessageForm]:
        """Start to send activations to the next pipeline stage, or gradients to the previous one. Does not block.

        The first call with a ``kind`` and ``key`` also sends the values' forms: shapes, dtypes and memory formats. The
        neighbour calls ``receive`` with the same ``kind`` and ``key``, in the same order. Dense tensors are sent from
        their own memory, which must not be written until ``finish`` has returned.

        Args:
            kind: ``activations`` or ``gradients``.
            values: tensors, and other values that JSON can hold, such as numbers.
            key: tuple that is equal for batches whose values have the same forms. Its first entry is the index, in the
                whole model, of the stage that receives the activations or sends the gradients; the others tell batches
                apart, such as the shapes of a batch's tensors.
            beside: further tensors that this stage has; for activations, the returned form's ``shared`` says whether a
                value shares memory with another of ``values`` or with one of these tensors. They are not sent.

        Returns:
            A ``MessageForm`` (shape, dtype, memory format) for each of ``values``, in order, as found in the first call
            with this key.

        Raises:
            UsageError: batches of an equal key have values of different forms, or a value is neither a tensor nor a
                value that JSON can hold.
        """
        forms = [message_form(value) for value in values]
        known = self._forms.get((kind, *key))
        if known is None:
            forms = _with_shared(forms, values, beside) if kind == "activations" else forms
            self._forms[kind, *key] = known = forms
            self._tell(kind, forms)
        elif (first := [form._replace(shared=False) for form in known]) != forms:
            now, before = next((a, b) for a, b in zip_longest(forms, first) if a != b)
            raise UsageError(
                f"a stage's {kind} are {now} and were {before} for an equal batch",
                remedy="the shape of every tensor between stages must depend only on the batch's shape",
            )
        for value, form in zip(values, forms, strict=True):
            if form.shape is not None:
                # A conjugate is a flag on the memory that is sent.
                plain = value.detach().resolve_conj().resolve_neg()
                self._start(kind, plain.contiguous(memory_format=MEMORY_FORMATS[form.memory]))
        return known

    def send_gradients(
        self, gradients: Sequence[Tensor | None], values: Sequence[Tensor], key: tuple[Any, ...]
    ) -> None:
        """Start to send the gradients of received activations to the previous pipeline stage. Does not block.

        Where the loss depended on an activation in the first batch of this key, a later gradient of None is sent as
        zeros, which is the same in a sum. Dense gradients are sent from their own memory, which must not be written
        until ``finish`` has returned.

        Args:
            gradients: for each of ``values`` its gradient; None where the loss does not depend on this value.
            values: the activations that this stage has received.
            key: identifies batches whose values have equal shapes and dtypes, as for ``send``; its first entry is the
                index of this virtual stage in the whole model.

        Raises:
            UsageError: an activation has a gradient, but had none in the first batch of this key; or a gradient has
                another form than in that batch.
        """
        known = self._forms.get(("gradients", *key))
        for number, gradient in enumerate(gradients) if known is not None else ():
            if gradient is not None and known is not None and known[number].shape is None:
                raise UsageError(
                    "the loss depends on values of an earlier stage in some batches only",
                    where=f"value {number} that stage {key[0]} takes",
                    why="the earlier stage expects a gradient in every batch or in none",
                    remedy="multiply by zero in place of detach(), or take strategy='mirrored'",
                )
            if known is not None and known[number].shape is not None:
                place = key[0], number
                self._reached[place] = self._reached.get(place, False) or gradient is not None
        rows = [
            torch.zeros_like(value)
            if gradient is None and known is not None and known[n].shape is not None
            else gradient
            for n, (gradient, value) in enumerate(zip(gradients, values, strict=True))
        ]
        self.send("gradients", rows, key)

    def receive(self, kind: str, key: tuple[Any, ...]) -> tuple[list[Any], list[MessageForm]]:
        """Wait for the next activations or gradients from a neighbouring pipeline stage, and return them.

        Where ``expect`` has already started to receive the values, this call waits for those receives. Tensors keep the
        sender's memory format, because kernels round differently in another format. The neighbour's call is ``send`` or
        ``send_gradients``. With the first values of a key their forms (shape, dtype, memory format) arrive, and hold
        for all later values of this key: a sender of other forms raises UsageError.

        Args:
            kind: ``activations`` (from the previous stage) or ``gradients`` (from the next).
            key: tuple that is equal for batches whose values have the same forms, as the neighbour gives it to
                ``send``. Several micro-batches have one key, and arrive in the order in which they were sent.

        Returns:
            The values in the sender's order: new tensors on this rank's device, and other values of JSON, such as
            numbers, that were sent among them; and a list with a ``MessageForm`` for each value.

        Raises:
            PeerError: the neighbour's rank is lost, or does not send within the timeout.
            MismatchError: the neighbour's rank is in another call.
        """
        if not self._ahead[kind]:
            if (kind, *key) not in self._forms:
                self._forms[kind, *key] = self._told(kind)
            self._begin(kind, key)
        coming = self._ahead[kind].popleft()
        for pending in coming.pending:
            pending.wait()
        return coming.values, self._forms[kind, *key]

    def expect(self, kind: str, key: tuple[Any, ...]) -> bool:
        """Start to receive the next values from a neighbouring pipeline stage, without waiting for them.

        A later ``receive`` with the same ``kind`` and ``key`` waits for the values and returns them. Where this method
        returns False, the caller must call ``receive`` for these values before it expects or receives any later ones of
        the same kind.

        Args:
            kind: ``activations`` (from the previous stage) or ``gradients`` (from the next).
            key: the key with which the neighbour sends the values.

        Returns:
            True where the receives have started. False, with nothing started, before the first ``receive`` with this
            kind and key: the values' shapes and dtypes are not known yet.
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
                dtype, memory = getattr(torch, form.dtype), MEMORY_FORMATS[form.memory]
                value = torch.empty(form.shape, dtype=dtype, device=self._comm.device, memory_format=memory)
                pending.append(self._comm.start_receive(value, self._neighbour(-KINDS[kind]), kind))
            values.append(value)
        self._ahead[kind].append(_Coming(values, pending))

    def finish(self) -> None:
        """Wait until every activation and gradient of this rank has been sent to its neighbours along the pipeline.

        Called after the last micro-batch of a run through the stages; afterwards the sent tensors may be written.

        Raises:
            PeerError: a neighbour's rank is lost, or does not receive within the timeout.
            UsageError: since the previous call of ``finish``, no micro-batch's loss depended on one of the received
                activations, though the loss depended on this activation in the first batch of its key; the stages
                before would get gradients of zero.
        """
        for pending, _ in self._under_way:
            pending.wait()
        self._under_way = []
        reached, self._reached = self._reached, {}
        lost = next((place for place, any_ in reached.items() if not any_), None)
        if lost is not None:
            raise UsageError(
                "the loss no longer depends on a value of an earlier stage",
                where=f"value {lost[1]} that stage {lost[0]} takes",
                why="parameters before it would be updated with gradients of zero (weight decay, momentum), where plain"
                " PyTorch skips a parameter without a gradient",
                remedy="freeze them with requires_grad_(False) before tutti.prepare, or take strategy='mirrored'",
            )

    def forget(self, key: tuple[Any, ...]) -> None:
        """Discard the recorded shapes and dtypes of messages, to free memory; the next such message sends them again.

        Sends nothing, but the neighbouring stages' ranks must make the same call between the same messages.

        Args:
            key: a prefix: messages are discarded whose ``key``, without its first entry (the index of a stage), begins
                with these entries.
        """
        self._forms = {known: forms for known, forms in self._forms.items() if known[2 : 2 + len(key)] != key}

    def _neighbour(self, way: int) -> int:
        return (self._comm.rank + way) % self._comm.size

    def _start(self, kind: str, tensor: Tensor) -> None:
        over = [entry for entry in self._under_way if entry[0].done]
        for entry in over:
            entry[0].wait()
            self._under_way.remove(entry)
        started = self._comm.start_send(tensor, self._neighbour(KINDS[kind]), kind)
        self._under_way.append((started, tensor))

    def _tell(self, kind: str, forms: Sequence[MessageForm]) -> None:
        raw = bytearray(json.dumps(forms, default=_refuse).encode())
        self._start(kind, torch.tensor([len(raw)], device=self._comm.device))
        self._start(kind, torch.frombuffer(raw, dtype=torch.uint8).to(self._comm.device))

    def _told(self, kind: str) -> list[MessageForm]:
        source = self._neighbour(-KINDS[kind])
        length = torch.zeros(1, dtype=torch.int64, device=self._comm.device)
        self._comm.receive(length, source, kind)
        raw = torch.zeros(int(length), dtype=torch.uint8, device=self._comm.device)
        self._comm.receive(raw, source, kind)
        return [MessageForm(*map(tuples, row)) for row in json.loads(bytes(raw.cpu().numpy()))]


def message_form(value: Any) -> MessageForm:
    """Return a ``MessageForm`` that describes a value which one pipeline stage sends to the next.

    Args:
        value: a tensor, of which the form has shape, dtype and memory format; or another value that JSON can hold,
            which the form has in its attribute ``value``, lists as tuples.
    """
    if not isinstance(value, Tensor):
        return MessageForm(None, "", "", False, tuples(value))
    last = value.dim() == 4 and not value.is_contiguous() and value.is_contiguous(memory_format=torch.channels_last)
    memory = "channels_last" if last else "contiguous"
    learns = value.is_floating_point() or value.is_complex()
    return MessageForm(tuple(value.shape), str(value.dtype).removeprefix("torch."), memory, learns)


def _with_shared(forms: Sequence[MessageForm], values: Sequence[Any], beside: Sequence[Tensor]) -> list[MessageForm]:
    found = []
    for number, (form, value) in enumerate(zip(forms, values, strict=True)):
        others = [other for i, other in enumerate(values) if i != number and isinstance(other, Tensor)]
        shared = form.shape is not None and share_memory([value], [*others, *beside])
        found.append(form._replace(shared=shared))
    return found


def tuples(value: Any) -> Any:
    """Replace lists by tuples at every depth of a value that has gone through JSON, which turns tuples into lists.

    Args:
        value: a list, a tuple, or any other value, which is returned as it is.
    """
    return tuple(map(tuples, value)) if isinstance(value, list | tuple) else value


def _refuse(value: Any) -> Any:
    raise UsageError(
        f"a {type(value).__name__} would have to go from one stage to the next",
        why="only tensors and numbers can be sent",
        remedy="choose other cuts: pipeline:cuts=name+name",
    )


def shapes(batch: Any) -> list[torch.Size]:
    """Return the shapes of all tensors of a batch, in an order that is equal for batches of the same structure.

    Args:
        batch: a tensor, nested mappings, tuples and lists of tensors, or an object with such attributes (a dataclass).
    """
    found: list[torch.Size] = []
    ahead, seen = [batch], dict[int, Any]()  # with the values, which keeps their ids from being given to later values
    while ahead:
        value = ahead.pop()
        if isinstance(value, Tensor):
            found.append(value.shape)
        elif id(value) not in seen and not isinstance(value, type | ModuleType):
            seen[id(value)] = value
            inside = value if isinstance(value, tuple | list) else getattr(value, "__dict__", {}).values()
            ahead += value.values() if isinstance(value, Mapping) else inside
    return found
