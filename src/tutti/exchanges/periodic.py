"""Every worker trains a copy by itself; every H steps all copies become their average.

Local SGD: Stich 2019, arXiv 1805.09767. With H = 1 and plain SGD it is synchronous data parallelism. Momentum and other
optimizer state stay with the worker. Memory: parameters and optimizer state once a worker, not once a device.

Post-local SGD (Lin et al. 2018, arXiv 1808.07217) begins with synchronous steps: every worker makes the update of the
whole global batch, on its own copy and with its own optimizer, so that all are equal until they part.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from tutti.comm.tree import TreeSum
from tutti.exchanges.allreduce import culprits, step
from tutti.exchanges.buckets import DIGESTS, METRICS, agreed, digests
from tutti.exchanges.config import PeriodicConfig
from tutti.exchanges.counting import Counting, clipped, own_mean
from tutti.exchanges.reducers import TreeReducer, refuse, scale_all
from tutti.exchanges.saved import load_optimizer, mine_of, optimizer_tensors
from tutti.exchanges.verify import agree_on_state, spread_state
from tutti.exchanges.workers import WorkerBuffers
from tutti.nn.swap import parameters
from tutti.types import Agreed, GradSink, OptimizerFactory, Replica, SavedState, Setting, Tick, Totals, Update

_LANES = 6 + METRICS + DIGESTS


class Periodic:
    """The exchange of ``local_sgd``. Sums over workers always go through the fixed tree, so it is reproducible."""

    gradient_over: Literal["step", "worker"] = "worker"

    def __init__(self, config: PeriodicConfig, setting: Setting) -> None:
        self._period, self._setting = config.period, setting
        self._post = int(config.together().value)
        self._counting = Counting()
        self._culprits: dict[str, None] = {}

    def attach(self, replica: Replica, make_optimizer: OptimizerFactory) -> GradSink:
        comm, mine = self._setting.comms.replica, self._setting.mine
        agree_on_state(comm, replica.parts)
        spread_state(comm, replica.parts)
        self._named = parameters(replica.parts)
        self._trained = [(name, p) for name, p in self._named if p.requires_grad]
        self._copies = {w: [p.data if w == mine[0] else p.data.clone() for _, p in self._trained] for w in mine}
        made = {w: make_optimizer(self._named) for w in mine}
        self._of = {w: optimizer for w, optimizer in made.items() if optimizer is not None}
        self.optimizers: Sequence[Optimizer] = tuple(self._of.values())
        self._buffers = WorkerBuffers(replica.parts, self._setting)
        workers = self._setting.workers
        self._sums = {
            dtype: TreeSum(comm, workers, sum(p.numel() for _, p in self._trained if p.dtype == dtype))
            for dtype in sorted({p.dtype for _, p in self._trained}, key=str)
        }
        self._totals = TreeSum(comm, workers, _LANES)
        self._reducer = TreeReducer(self._named, self._setting) if self._post else None
        return self

    def arm(self, part: Totals | None) -> None:
        """Nothing to do: gradients stay with the worker."""

    def ready(self, parameter: Tensor) -> None:
        """Nothing to do."""

    def enter(self, worker: int, tick: Tick) -> None:
        self._tick = tick
        self._buffers.enter(worker)
        self._put(worker)

    def leave(self, worker: int, part: Totals | None) -> None:
        """The inner update, unless this worker's gradient is not finite; its totals go into the tree."""
        if (reducer := self._jointly(self._tick)) is not None:
            self._contribute(reducer, worker, part)
            return
        norm, bad = 0.0, 0
        gradients = [p.grad for _, p in self._trained if p.grad is not None]
        if part is not None:
            norm = own_mean(gradients, part, self._tick.loss_scale)
            if math.isfinite(norm):
                factor, left = clipped(norm, self._setting.clip)
                if factor != 1.0:
                    scale_all(gradients, factor)
                step(self._of[worker], self._tick.lr_factor, left)
            else:
                bad = 1
                self._culprits |= {
                    name: None
                    for name, p in self._trained
                    if p.grad is not None and not bool(torch.isfinite(p.grad).all())
                }
        for _, parameter in self._trained:
            parameter.grad = None
        lanes = torch.zeros(_LANES, dtype=torch.float64)
        lanes[:4] = torch.tensor([norm if not bad else 0.0, bad, part is not None, self._tick.stop])
        if part is not None:
            self._counting.note(part)
            lanes[4 : 4 + len(part.lanes)] = part.lanes.double().cpu()
        lanes[-DIGESTS:] = torch.tensor(digests(self._tick))
        self._totals.add(worker, lanes)

    def finish(self, tick: Tick) -> Agreed:
        """All workers' totals, and every H steps the average of their parameters. Collective."""
        if (reducer := self._jointly(tick)) is not None:
            return self._together(reducer, tick)
        norm, bad, active, stop, loss, count, *metrics = self._totals.total().tolist()
        if not agreed(metrics[METRICS:], digests(tick), self._setting.workers):
            refuse(self._setting.comms.replica, tick)
        if self._due(tick):
            self._write(self._average())
        named = self._counting.means(metrics, count)
        return Agreed(loss / count, count, named, norm / max(active - bad, 1), finite=bad == 0, stop=stop > 0)

    def update(self, agreed: Agreed, tick: Tick) -> Update:
        """The inner updates are done; a worker whose gradient was not finite has skipped its own."""
        if (reducer := self._jointly(tick)) is not None:
            return self._update_all(reducer, agreed, tick)
        nonfinite: dict[str, None] = {}
        if not agreed.finite:
            found, self._culprits = "\n".join(list(self._culprits)[:3]), {}
            said = self._setting.comms.replica.texts(found, "names of gradients that are not finite")
            nonfinite = dict.fromkeys(name for text in said for name in text.splitlines())
        return Update(1, skipped=not agreed.finite, nonfinite=tuple(nonfinite), together=self._due(tick))

    def merged(self) -> dict[str, Tensor]:
        averages = dict(zip((name for name, _ in self._trained), self._average(), strict=True))
        fixed = {name: p.data for name, p in self._named if not p.requires_grad}
        return {**fixed, **averages, **self._buffers.merged()}

    def state(self) -> dict[str, dict[str, Tensor]]:
        """The average as the model, worker 0's optimizer state as its optimizer's, and every worker's own of both."""
        comm = self._setting.comms.replica
        own: dict[str, Tensor] = dict(self._buffers.state())
        for worker, copies in self._copies.items():
            own |= {f"{worker}/parameter/{name}": c for (name, _), c in zip(self._trained, copies, strict=True)}
            if worker in self._of:
                tensors = optimizer_tensors(self._of[worker], self._trained)
                own |= {f"{worker}/optimizer/{name}": tensor for name, tensor in tensors.items()}
        first = optimizer_tensors(self._of[0], self._trained) if 0 in self._of else {}
        return {"model": mine_of(self.merged(), comm.rank, comm.size), "optim": first, "workers": own}

    def load(self, saved: SavedState) -> None:
        """Each worker's own where there are as many as were saved; else all begin at the average."""
        names, workers = saved.names("workers"), self._setting.workers
        first = self._trained[0][0] if self._trained else ""
        same = f"{workers - 1}/parameter/{first}" in names and f"{workers}/parameter/{first}" not in names
        for name, parameter in self._named:
            if not parameter.requires_grad:
                parameter.data.copy_(saved.get("model", name))
        for worker, copies in self._copies.items():
            for (name, _), copy in zip(self._trained, copies, strict=True):
                copy.copy_(saved.get("workers", f"{worker}/parameter/{name}") if same else saved.get("model", name))
            if worker in self._of:
                group, prefix = ("workers", f"{worker}/optimizer/") if same else ("optim", "")
                load_optimizer(self._of[worker], self._trained, saved, group, prefix)
        self._buffers.load(saved)

    def facts(self) -> dict[str, object]:
        """None."""
        return {}

    def _put(self, worker: int) -> None:
        """Let the model hold this worker's parameters."""
        for (_, parameter), copy in zip(self._trained, self._copies[worker], strict=True):
            parameter.data = copy

    def _due(self, tick: Tick) -> bool:
        """Whether the copies become one at the end of this step."""
        alone = tick.clock + 1 - self._post
        return alone > 0 and alone % self._period == 0

    def _jointly(self, tick: Tick) -> TreeReducer | None:
        """What sums the gradients in a synchronous step; None in the others."""
        return self._reducer if tick.clock < self._post else None

    def _contribute(self, reducer: TreeReducer, worker: int, part: Totals | None) -> None:
        """A worker's gradient in a synchronous step: from the mean over its samples to their sum."""
        if part is not None:
            self._counting.note(part)
            gradients = [p.grad for _, p in self._trained if p.grad is not None]
            scale_all(gradients, part.samples / self._tick.loss_scale)
        reducer.collect(self._tick, worker, None if part is None else part.lanes)

    def _together(self, reducer: TreeReducer, tick: Tick) -> Agreed:
        """The gradient of the global batch. Collective."""
        sums = reducer.finish(tick, None)
        count = sums.samples or math.nan
        reducer.scale(1 / count)
        norm = math.sqrt(sum(reducer.squares()))
        finite = math.isfinite(norm) or all(
            p.grad is None or bool(torch.isfinite(p.grad).all()) for _, p in self._trained
        )
        return self._counting.agreed(sums, norm, finite, sums.stop)

    def _update_all(self, reducer: TreeReducer, agreed: Agreed, tick: Tick) -> Update:
        """The same update on every worker's copy."""
        nonfinite: tuple[str, ...] = ()
        if agreed.finite:
            factor, norm = clipped(agreed.grad_norm, self._setting.clip)
            if factor != 1.0:
                reducer.scale(factor)
            for worker, optimizer in self._of.items():
                self._put(worker)
                step(optimizer, tick.lr_factor, norm)
        else:
            nonfinite = culprits(self._setting.comms.replica, self._named)
        for _, parameter in self._trained:
            parameter.grad = None
        return Update(int(agreed.finite), skipped=not agreed.finite, nonfinite=nonfinite)

    def _average(self) -> list[Tensor]:
        """Mean over all N workers of each parameter, the same bits on every rank. Collective."""
        means: dict[int, Tensor] = {}
        for dtype, total in self._sums.items():
            members = [i for i, (_, p) in enumerate(self._trained) if p.dtype == dtype]
            for worker in self._setting.mine:
                total.add(worker, torch.cat([self._copies[worker][i].reshape(-1) for i in members]))
            flat = total.total().div_(self._setting.workers)
            pieces = flat.split([self._trained[i][1].numel() for i in members])
            means |= {i: piece.view(self._trained[i][1].shape) for i, piece in zip(members, pieces, strict=True)}
        return [means[i] for i in range(len(self._trained))]

    def _write(self, means: Sequence[Tensor]) -> None:
        for copies in self._copies.values():
            torch._foreach_copy_(copies, list(means))
