"""Every device holds the whole state; gradients are summed over all of them, and each makes the same update.

Synchronous data parallelism: Goyal et al. 2017, arXiv 1706.02677, §2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from tutti.comm.communicator import Communicator
from tutti.errors import UsageError
from tutti.exchanges.buckets import DIGESTS, agreed, digests
from tutti.exchanges.config import AllReduceConfig
from tutti.exchanges.counting import Counting, clipped, share_of_batch
from tutti.exchanges.reducers import Named, OverlappedReducer, Reducer, TreeReducer, refuse
from tutti.exchanges.saved import load_optimizer, optimizer_tensors, read, written
from tutti.exchanges.shared import attach_shared
from tutti.exchanges.split import Split, complete
from tutti.exchanges.verify import agree_on_state, spread_state
from tutti.exchanges.workers import WorkerBuffers
from tutti.nn.swap import parameters
from tutti.types import (
    Agreed,
    GradSink,
    OptimizerFactory,
    Piece,
    Replica,
    SavedState,
    Setting,
    Spread,
    Tick,
    Totals,
    Update,
)

_BUCKET_MB = 25.0


class AllReduce:
    """Sums every rank's gradients, whatever part of the model it has. Also its own gradient sink.

    Those that keep the state elsewhere, but sum as it does, are made of it: they say with what all begin (``_unite``),
    how gradients are summed (``_make_reducer``) and who knows which of them are not finite (``_all_finite``,
    ``_culprits``).
    """

    gradient_over: Literal["step", "worker"] = "step"

    def __init__(self, config: AllReduceConfig, setting: Setting) -> None:
        if (setting.reproducible or setting.spread) and config.wire != "fp32":
            raise UsageError(
                f"{'reproducible' if setting.reproducible else 'adascale'} does not go with wire={config.wire}",
                why="compression acts once a device, so the result would depend on how many there are",
                remedy="leave out one of the two",
            )
        self._config, self._setting = config, setting
        self._tick = Tick(0, 0)
        self._counting = Counting()
        self._worker = -1
        self._parts: list[int] | None = None

    def attach(self, replica: Replica, make_optimizer: OptimizerFactory) -> GradSink:
        named = parameters(replica.parts)
        self._unite(replica, named)
        self._replica, self._parameters = replica, [p for _, p in named if p.requires_grad]
        self._named = named
        self._buffers = WorkerBuffers(replica.parts, self._setting, replica.borrowed)
        self._reducer = self._make_reducer(named)
        self._optimizer = make_optimizer(named)
        if self._optimizer and self._setting.grid.tensor > 1:
            found = {p: Split.of(replica.specs[name], p.shape) for name, p in named}
            split: dict[Tensor, Split] = {p: part for p, part in found.items() if part is not None}
            complete(self._optimizer, split, self._setting.comms.axis("tensor"))
        self._last = self._setting.mine[-1] if len(self._setting.mine) else -1
        self.optimizers: Sequence[Optimizer] = (self._optimizer,) if self._optimizer else ()
        self.ready = self._reducer.ready
        if self._reducer.listens:
            replica.connect(self)
        return self

    def arm(self, part: Totals | None) -> None:
        """The current worker's last backward comes; if it is this rank's last, gradients may leave as they come."""
        if self._worker == self._last:
            together = self._counting.together(part)
            self._reducer.arm(self._tick, None if together is None else together.lanes)

    def enter(self, worker: int, tick: Tick) -> None:
        self._tick, self._worker = tick, worker
        self._buffers.enter(worker)

    def leave(self, worker: int, part: Totals | None) -> None:
        self._counting.add(part)
        self._reducer.collect(self._tick, worker, None if part is None else part.lanes)

    def finish(self, tick: Tick) -> Agreed:
        sums = self._reducer.finish(tick, self._counting.take())
        whole = share_of_batch(sums, tick)
        factor = whole / tick.loss_scale
        if factor != 1.0:
            self._reducer.scale(factor)
        rows = [self._reducer.squares(), *([sums.own[:-1]] if sums.own else [])]
        (square, *own), stop = self._across_stages(rows, sums.stop)
        spread = Spread(own[0] * sums.samples * whole**2, round(sums.own[-1])) if own else None
        norm = math.sqrt(square)
        finite = math.isfinite(norm) or self._all_finite()
        return self._counting.agreed(sums, norm, finite, stop, spread)

    def update(self, agreed: Agreed, tick: Tick) -> Update:
        if agreed.finite:
            factor, norm = clipped(agreed.grad_norm, self._setting.clip)
            if factor != 1.0:
                self._reducer.scale(factor)
            for optimizer in self.optimizers:
                step(optimizer, tick.lr_factor, norm)
        nonfinite = () if agreed.finite else self._culprits()
        for parameter in self._parameters:
            parameter.grad = None
        return Update(int(agreed.finite), skipped=not agreed.finite, nonfinite=nonfinite)

    def merged(self) -> dict[str, Tensor]:
        return {**{name: p.data for name, p in self._named}, **self._buffers.merged()}

    def state(self) -> dict[str, Mapping[str, Tensor | Piece]]:
        comm = self._setting.comms.replica
        optim = optimizer_tensors(self._optimizer, self._named) if self._optimizer else {}
        return {
            "model": written(self.merged(), self._replica, comm),
            "optim": written(optim, self._replica, comm),
            "workers": self._buffers.state(),
        }

    def load(self, saved: SavedState) -> None:
        for name, parameter in self._named:
            parameter.data.copy_(read(saved, "model", name, self._replica, parameter.shape))
        self._buffers.load(saved)
        if self._optimizer:
            load_optimizer(self._optimizer, self._named, saved, "optim", specs=self._replica.specs)

    def facts(self) -> dict[str, object]:
        """None."""
        return {}

    def _unite(self, replica: Replica, named: Named) -> None:
        """See to it that all ranks hold the same, and begin with data rank 0's. Collective."""
        comm = self._setting.comms.replica
        agree_on_state(comm, replica.parts)
        spread_state(comm, replica.parts)

    def _culprits(self) -> tuple[str, ...]:
        return culprits(self._setting.comms.model, self._named)

    def _across_stages(self, rows: Sequence[Sequence[float]], stop: bool) -> tuple[list[float], bool]:
        """Each row's sum over the parts of the whole model, in the model's order; whether any stage asks to stop."""
        model = self._setting.comms.model
        if model.size > 1:
            if self._parts is None:
                mine = torch.tensor([len(rows[0])])
                self._parts = [int(n) for n in model.all_gather(mine, "parts of the gradient norm")]
            width = sum(self._parts)
            whole = torch.zeros(len(rows) * width + 1 + DIGESTS, dtype=torch.float64, device=model.device)
            start, table = sum(self._parts[: model.rank]), whole[: len(rows) * width].view(len(rows), width)
            table[:, start : start + len(rows[0])] = torch.tensor(rows, dtype=torch.float64)
            digest = digests(self._tick)
            whole[-1 - DIGESTS :] = torch.tensor([stop, *digest])
            model.start_all_reduce(whole, "all_reduce of the gradient norm").wait()
            asked, a, aa, b, bb = whole[len(rows) * width :].tolist()
            rows = table.tolist()
            if not agreed((a, aa, b, bb), digest, model.size):
                refuse(model, self._tick)
            stop = asked > 0
        return [_sum(row) for row in rows], stop

    def _make_reducer(self, named: Named) -> Reducer:
        config, setting, borrowed = self._config, self._setting, self._replica.borrowed
        if setting.reproducible or setting.spread:
            return TreeReducer(named, setting, borrowed)
        if config.algorithm != "native" and config.wire == "fp32" and config.bucket_mb is None:
            shared = attach_shared(named, setting, borrowed)
            if shared is not None:
                return shared
            if config.algorithm == "shared_memory" and setting.comms.replica.size > 1:
                raise UsageError(
                    "these ranks cannot share memory",
                    why="they are on several hosts or on GPUs, the processor is not x86-64, or /dev/shm is too small",
                    remedy="take algorithm=native",
                )
        bytes_ = int((config.bucket_mb or _BUCKET_MB) * 2**20)
        return OverlappedReducer(named, setting, config.wire, bytes_, borrowed)

    def _all_finite(self) -> bool:
        """The norm overflowed or is not a number: only the elements tell whether the gradient is finite."""
        if self._setting.comms.model.size > 1:
            return False
        return all(p.grad is None or bool(torch.isfinite(p.grad).all()) for p in self._parameters)


def _sum(row: Sequence[float]) -> float:
    """The sum of squares, exactly rounded, so that it does not depend on the order in which stages hold them."""
    try:
        return math.fsum(row)
    except OverflowError:
        return math.inf


def culprits(comm: Communicator, named: Named) -> tuple[str, ...]:
    """Parameters of any rank of ``comm`` whose gradient is not finite, at most three a rank. Collective."""
    found = [name for name, p in named if p.grad is not None and not bool(torch.isfinite(p.grad).all())]
    said = comm.texts("\n".join(found[:3]), "names of gradients that are not finite")
    return tuple(dict.fromkeys(name for text in said for name in text.splitlines()))


def step(optimizer: Optimizer, lr_factor: float | None, grad_norm: float | None = None) -> None:
    """One optimizer step at ``lr_factor`` times each group's initial learning rate (None: as the group says).

    An optimizer that clips by the norm of the whole gradient (``tutti.optim.LAMB``) is told it: its own parameters may
    be one stage's.
    """
    if hasattr(optimizer, "grad_norm"):
        optimizer.grad_norm = grad_norm
    if lr_factor is not None:
        for group in optimizer.param_groups:
            group["lr"] = group.setdefault("initial_lr", group["lr"]) * lr_factor
    optimizer.step()
