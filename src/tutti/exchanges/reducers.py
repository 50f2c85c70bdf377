"""Two ways to sum gradients over all workers: overlapped with backward, or in an order that never changes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from tutti.comm.communicator import Communicator, Pending
from tutti.comm.tree import TreeSum
from tutti.errors import MismatchError
from tutti.exchanges.buckets import Bucket, Sums, Tail, plan
from tutti.laws.keys import mix, name_key
from tutti.types import Setting, Tick

Named = Sequence[tuple[str, nn.Parameter]]
_WIRE = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Reducer(Protocol):
    """Sums gradients and totals over all workers; afterwards every parameter's ``.grad`` holds the sum."""

    @property
    def listens(self) -> bool:
        """Whether gradients must be reported as they come."""

    def arm(self, tick: Tick, lanes: Tensor | None) -> None:
        """The next backward is this rank's last of the step; ``lanes`` are its totals."""

    def ready(self, parameter: Tensor) -> None:
        """A gradient is there. An autograd hook."""

    def collect(self, tick: Tick, worker: int, lanes: Tensor | None) -> None:
        """A worker is through; ``lanes`` are its totals, None if it had no samples."""

    def finish(self, tick: Tick, lanes: Tensor | None) -> Sums:
        """Complete the sums; ``lanes`` are this rank's totals over its workers. Raises MismatchError."""

    def squares(self) -> list[float]:
        """Sums of squares of the summed gradients here, by parts whose number never changes; borrowed ones count 0."""

    def scale(self, factor: float) -> None:
        """Multiply all summed gradients."""


class OverlappedReducer:
    """One all-reduce a bucket, begun as soon as backward has filled it, in the same order on every rank.

    A world of one sends nothing and leaves every ``.grad`` where autograd put it.
    """

    def __init__(
        self, parameters: Named, setting: Setting, wire: str, bucket_bytes: int, borrowed: Collection[str] = ()
    ) -> None:
        self._comm = setting.comms.replica
        trainable = [(name, p) for name, p in parameters if p.requires_grad]
        self._lent = {p for name, p in trainable if name in borrowed}
        self._order = [p for _, p in trainable]
        self._tail = Tail(len(trainable), layout_key(trainable))
        self._buckets: list[Bucket] = []
        self._wires: list[Tensor | None] = []
        if self._comm.size > 1:
            self._lay_out(trainable, wire, bucket_bytes)
        self._of = {p: i for i, bucket in enumerate(self._buckets) for p in bucket.parameters}
        self._sizes = [len(bucket.parameters) for bucket in self._buckets]
        self._armed = False
        self._missing: list[int] = []
        self._under_way: list[Pending] = []
        self._used: list[bool] = []
        self._lanes: Tensor | None = None
        self._tick = Tick(0, 0)

    @property
    def listens(self) -> bool:
        return self._comm.size > 1

    def _lay_out(self, trainable: Named, wire: str, bucket_bytes: int) -> None:
        sizes = [(p.nbytes, str(p.dtype)) for _, p in trainable]
        groups = plan(sizes, bucket_bytes)
        # Flags in the order of the buckets, so that a bucket's own are contiguous.
        self._order = [trainable[i][1] for group in groups for i in group]
        device = self._comm.device
        for n, group in enumerate(groups):
            members = [trainable[i][1] for i in group]
            rides = n == len(groups) - 1 and wire == "fp32" and members[0].dtype in (torch.float32, torch.float64)
            self._buckets.append(Bucket(members, members[0].dtype, device, self._tail.size if rides else 0))
            narrow = _WIRE.get(wire)
            self._wires.append(None if narrow is None else torch.empty_like(self._buckets[-1].flat, dtype=narrow))
        if not self._buckets or self._buckets[-1].tail.numel() == 0:
            self._buckets.append(Bucket([], torch.float64, device, self._tail.size))
            self._wires.append(None)

    def arm(self, tick: Tick, lanes: Tensor | None) -> None:
        self._armed = self._comm.size > 1
        self._missing = list(self._sizes)
        self._lanes, self._tick = lanes, tick

    def ready(self, parameter: Tensor) -> None:
        if not self._armed:
            return
        missing = self._missing
        missing[self._of[parameter]] -= 1  # type: ignore[index]
        launched = len(self._under_way)
        # The last bucket carries the totals, which a stage that is not the last learns only after backward.
        last = len(missing) - (self._lanes is None)
        while launched < last and missing[launched] == 0:
            self._launch()
            launched += 1

    def _launch(self) -> None:
        """Begin the next bucket's all-reduce."""
        index = len(self._under_way)
        bucket, wire = self._buckets[index], self._wires[index]
        self._used += bucket.pack()
        if bucket.tail.numel():
            self._tail.fill(bucket.tail, self._tick, self._lanes, self._used)
        if wire is not None:
            wire.copy_(bucket.flat)
        text = f"all_reduce of gradient bucket {index} in step {self._tick.clock + 1}"
        self._under_way.append(self._comm.start_all_reduce(bucket.flat if wire is None else wire, text))

    def collect(self, tick: Tick, worker: int, lanes: Tensor | None) -> None:
        """Nothing to do: autograd adds a rank's workers up by itself."""

    def finish(self, tick: Tick, lanes: Tensor | None) -> Sums:
        self._armed = False
        if self._comm.size == 1:
            totals = [0.0, 0.0] if lanes is None else lanes.tolist()
            return Sums(totals[0], totals[1], totals[2:], tick.stop, [p.grad is not None for p in self._order])
        self._tick, self._lanes = tick, lanes
        while len(self._under_way) < len(self._buckets):
            self._launch()
        for pending, bucket, wire in zip(self._under_way, self._buckets, self._wires, strict=True):
            pending.wait()
            if wire is not None:
                bucket.flat.copy_(wire)
        self._under_way, self._used = [], []
        tail = self._buckets[-1].tail.tolist()
        if not self._tail.same(tail, tick, self._comm.size):
            refuse(self._comm, tick)
        sums = self._tail.read(tail)
        expose(self._buckets, sums.used)
        return sums

    def squares(self) -> list[float]:
        if self._comm.size > 1 and not self._lent:
            return [sum(squares_of([bucket.gradients for bucket in self._buckets]))]
        return [sum(squares_of([p.grad for p in self._order if p.grad is not None and p not in self._lent]))]

    def scale(self, factor: float) -> None:
        scale_all([p.grad for p in self._order if p.grad is not None], factor)


class TreeReducer:
    """Sums each worker's own gradient in one fixed tree: the same bits for any number of data ranks."""

    listens = False

    def __init__(self, parameters: Named, setting: Setting, borrowed: Collection[str] = ()) -> None:
        self._comm, self._workers = setting.comms.replica, setting.workers
        trainable = [(name, p) for name, p in parameters if p.requires_grad]
        self._lent = {p for name, p in trainable if name in borrowed}
        self._order = [p for _, p in trainable]
        self._tail = Tail(len(trainable), layout_key(trainable))
        self._measured = len(trainable) + 1 if setting.spread else 0
        wide = (torch.float32, torch.float64)
        dtypes = sorted({p.dtype for _, p in trainable}, key=lambda d: (d in wide, str(d)))
        if not dtypes or dtypes[-1] not in wide:
            dtypes.append(torch.float64)
        self._buckets = [
            Bucket(
                [p for _, p in trainable if p.dtype == dtype],
                dtype,
                self._comm.device,
                self._tail.size + self._measured if dtype is dtypes[-1] else 0,
            )
            for dtype in dtypes
        ]
        self._sums = [TreeSum(self._comm, self._workers, bucket.flat.numel()) for bucket in self._buckets]

    def arm(self, tick: Tick, lanes: Tensor | None) -> None:
        """Nothing to do: gradients go when the worker is through."""

    def ready(self, parameter: Tensor) -> None:
        """Nothing to do."""

    def collect(self, tick: Tick, worker: int, lanes: Tensor | None) -> None:
        used: list[bool] = []
        size, own = self._tail.size, own_part(self.squares(), tick, lanes) if self._measured else None
        for bucket, total in zip(self._buckets, self._sums, strict=True):
            bucket.use(torch.empty_like(bucket.flat))
            used += bucket.pack()
            if bucket.tail.numel():
                self._tail.fill(bucket.tail[:size], tick, lanes, used)
                if own is not None:
                    bucket.tail[size:].copy_(own)
            total.add(worker, bucket.flat)
            for parameter in bucket.parameters:
                parameter.grad = None

    def finish(self, tick: Tick, lanes: Tensor | None) -> Sums:
        for bucket, total in zip(self._buckets, self._sums, strict=True):
            bucket.use(total.total())
        tail = self._buckets[-1].tail.tolist()
        if not self._tail.same(tail, tick, self._workers):
            refuse(self._comm, tick)
        sums = self._tail.read(tail[: self._tail.size])._replace(own=tail[self._tail.size :])
        expose(self._buckets, sums.used)
        return sums

    def squares(self) -> list[float]:
        """By parameter in the model's order, so that adding them up does not depend on the stages they live on."""
        return squares_by(self._order, self._lent)

    def scale(self, factor: float) -> None:
        scale_all([bucket.gradients for bucket in self._buckets], factor)


def expose(buckets: Sequence[Bucket], used: Sequence[bool]) -> None:
    """Give every parameter its gradient out of its bucket."""
    start = 0
    for bucket in buckets:
        bucket.expose(used[start : start + len(bucket.parameters)])
        start += len(bucket.parameters)


def squares_of(tensors: Sequence[Tensor]) -> list[float]:
    """Sum of squares of each tensor, computed in float32 or wider. One look at the device for all of them."""
    if not tensors:
        return []
    norms = torch._foreach_norm([t.float() if t.dtype in (torch.float16, torch.bfloat16) else t for t in tensors])
    same = len({n.dtype for n in norms}) == 1
    return torch.stack(norms if same else [n.double() for n in norms]).double().square_().tolist()


def squares_by(parameters: Sequence[nn.Parameter], without: Collection[nn.Parameter] = ()) -> list[float]:
    """Sum of squares of each parameter's gradient, 0 where it has none and for those in ``without``."""
    gradients = [None if p in without else p.grad for p in parameters]
    found = iter(squares_of([g for g in gradients if g is not None]))
    return [0.0 if g is None else next(found) for g in gradients]


def own_part(squares: Sequence[float], tick: Tick, lanes: Tensor | None) -> Tensor:
    """One worker's part of ``Sums.own``, from its own gradients' squares and its totals."""
    count = 0.0 if lanes is None else float(lanes[1])
    if not count > 0:
        return torch.zeros(len(squares) + 1, dtype=torch.float64)
    below = count * tick.loss_scale**2
    return torch.tensor([*(square / below for square in squares), 1.0], dtype=torch.float64)


def scale_all(tensors: Sequence[Tensor], factor: float) -> None:
    """Multiply all tensors in place."""
    if tensors:
        torch._foreach_mul_(list(tensors), factor)


def refuse(comm: Communicator, tick: Tick) -> None:
    """Ranks contributed to different steps: show both sides. Nothing of it has been applied."""
    lines = [f"step {tick.clock + 1}", f"a global batch of {tick.samples} samples"]
    comm.agree(lines, "the step under way", "run the same number of steps with the same batches on every rank")
    raise MismatchError(
        "the gradients' digest is wrong although all ranks are in the same step",
        where=f"step {tick.clock + 1}",
        why="a model changed after tutti.prepare, or memory or the network is faulty",
        remedy="do not change parameters' shapes or trainability after tutti.prepare",
    )


def layout_key(trainable: Named) -> int:
    """A key of all names, shapes and dtypes, in order."""
    return mix(len(trainable), *(name_key(f"{name}{list(p.shape)}{p.dtype}") for name, p in trainable))
