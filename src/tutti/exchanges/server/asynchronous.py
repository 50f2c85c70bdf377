"""Parameter servers that nobody waits at: every push is an update at once, or waits for the slowest worker only.

Downpour: Dean et al., NIPS 2012, §4.1, where a worker's parameters stay as they were read until it reads again. Bounded
staleness: Ho et al., NIPS 2013, §3. A worker reads together with its push, so that with N equally fast workers each
gradient is N - 1 updates old, also where one device plays them all in turn.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from tutti.exchanges.config import ParameterServerConfig
from tutti.exchanges.counting import Counting, clipped, own_mean
from tutti.exchanges.reducers import scale_all, squares_of
from tutti.exchanges.saved import read
from tutti.exchanges.server.client import Reply
from tutti.exchanges.server.core import Core
from tutti.exchanges.server.desks import NONE, AtOnce
from tutti.exchanges.server.flats import write
from tutti.exchanges.server.link import Link
from tutti.exchanges.server.shelf import Shelf
from tutti.exchanges.server.wire import BACK, PULL, PUSH, READ, SKIP, WAIT
from tutti.exchanges.verify import agree_on_state, spread_state
from tutti.exchanges.workers import WorkerBuffers
from tutti.laws.shares import share
from tutti.nn.swap import parameters
from tutti.types import Agreed, GradSink, OptimizerFactory, Piece, Replica, SavedState, Setting, Tick, Totals, Update
from tutti.world import context, lost


class Asynchronous:
    """The exchange of ``parameter_server:mode=async`` and ``bounded``."""

    gradient_over: Literal["step", "worker"] = "worker"

    def __init__(self, config: ParameterServerConfig, setting: Setting) -> None:
        self._config, self._setting = config, setting
        self._counting = Counting()
        self._loss = 0.0
        self._norms: list[float] = []
        self._culprits: list[str] = []
        self._stale: list[float] = []
        self._stop_at: float | None = None
        self._updates = self._version = self._clock = 0

    def attach(self, replica: Replica, make_optimizer: OptimizerFactory) -> GradSink:
        setting = self._setting
        agree_on_state(setting.comms.replica, replica.parts)
        spread_state(setting.comms.replica, replica.parts)
        self._replica, self._named = replica, parameters(replica.parts)
        self._trained = [(name, p) for name, p in self._named if p.requires_grad]
        self._buffers = WorkerBuffers(replica.parts, setting, replica.borrowed)
        handle = make_optimizer(self._named)
        if handle is None:
            raise ValueError("nothing is trained")
        self.optimizers: tuple[Optimizer, ...] = (handle,)
        self._link = Link(self._config, setting, self._trained, make_optimizer, handle, self._desk, self._extras)
        self._alone = self._link.home and len(setting.mine) == 1
        first = self._link.values if self._alone else [p.data for _, p in self._trained]
        mine = setting.mine
        self._copies = {w: first if w == mine[0] else [t.clone() for t in first] for w in mine}
        self._seen = {w: [0] * self._config.servers for w in mine}
        self._allowed = dict.fromkeys(mine, True)
        self._accrued: dict[int, list[Tensor | None]] = {w: [None] * len(self._trained) for w in mine}
        for (_, parameter), copy in zip(self._trained, first, strict=True):
            parameter.data = copy
        return self

    def _desk(self, shelf: Shelf) -> AtOnce:
        """In a server's process."""
        lease = (self._config.lease or context.current().timeout) if self._config.mode == "bounded" else math.inf
        together = self._config.steps == "all"
        core = Core(self._setting.workers, self._config.staleness, lease, gone=self._gone, together=together)
        return AtOnce(shelf, core, len(shelf.keys), self._config.over_staleness)

    def _gone(self) -> Collection[int]:
        """Workers of ranks that are lost, in a server's process."""
        ranks, workers, notes = self._setting.comms.replica.size, self._setting.workers, lost.notes()
        return [worker for rank in notes.lost() for worker in share(workers, ranks, rank)] if notes is not None else []

    def _extras(self, settings: int) -> Mapping[int, int]:
        return {PUSH: settings + len(self._trained) + 2}

    def arm(self, part: Totals | None) -> None:
        """Nothing to do: gradients go when the worker is through."""

    def ready(self, parameter: Tensor) -> None:
        """Nothing to do."""

    def enter(self, worker: int, tick: Tick) -> None:
        """Its own buffers and parameters; in ``bounded`` it waits here for the slowest."""
        self._tick = tick
        self._buffers.enter(worker)
        for (_, parameter), copy in zip(self._trained, self._copies[worker], strict=True):
            parameter.data = copy
        if not self._allowed[worker]:
            text = f"waiting for the slowest worker in step {tick.clock + 1}"
            self._link.client.send(PULL, worker, tick.clock, flags=WAIT, seen=self._seen[worker])
            # The others' silence is theirs: after the lease those that are gone are no longer waited for.
            self._take(worker, self._link.client.wait(text, (self._link.comm.global_rank,), patient=True))

    def leave(self, worker: int, part: Totals | None) -> None:
        """Push what is due, unless it is not finite, and read what is due."""
        gradients = [p.grad for _, p in self._trained]
        sound = part is not None and self._prepare(part, gradients)
        if sound and self._config.push > 1:
            gradients = self._add(worker, gradients)
        due = (self._tick.clock + 1) % self._config.push == 0 and any(g is not None for g in gradients)
        used = write(self._link.gradients, gradients) if due and (sound or self._config.push > 1) else []
        back = (self._tick.clock + 1) % self._config.fetch == 0
        norm = math.sqrt(sum(squares_of([g for g in gradients if g is not None]))) if used else 0.0
        settings = self._link.settings(self._tick.lr_factor)
        replies = self._link.client.ask(
            PUSH,
            worker,
            self._tick.clock,
            f"push of gradients in step {self._tick.clock + 1}",
            (self._link.comm.global_rank,),
            flags=(0 if used else SKIP) | (BACK if back else 0),
            extras=[*settings, *(used or [False] * len(self._trained)), norm, float(self._tick.stop)],
            seen=self._seen[worker],
        )
        if used:
            self._accrued[worker] = [None] * len(self._trained)
            self._stale.append(replies[0].extras[0])
        for _, parameter in self._trained:
            parameter.grad = None
        self._take(worker, replies, read=back)
        self._counting.add(part)

    def _prepare(self, part: Totals, gradients: list[Tensor | None]) -> bool:
        """Make it the mean over what the loss counts, clip it; False where it is not finite."""
        there = [g for g in gradients if g is not None]
        norm = own_mean(there, part, self._tick.loss_scale)
        if not math.isfinite(norm):
            pairs = zip(self._trained, gradients, strict=True)
            self._culprits += [n for (n, _), g in pairs if g is not None and not bool(torch.isfinite(g).all())]
            return False
        factor, _ = clipped(norm, self._setting.clip)
        if factor != 1.0:
            scale_all(there, factor)
        self._norms.append(norm)
        return True

    def _add(self, worker: int, gradients: list[Tensor | None]) -> list[Tensor | None]:
        """Add to what has not been pushed yet."""
        accrued = self._accrued[worker]
        for index, gradient in enumerate(gradients):
            before = accrued[index]
            if gradient is not None:
                accrued[index] = gradient.clone() if before is None else before.add_(gradient)
        return accrued

    def _take(self, worker: int, replies: list[Reply], read: bool = True) -> None:
        """What the servers said, and the parameters where they came with it.

        Where all workers' steps are counted together, the first server's count is the one that all go by.
        """
        counting = replies[:1] if self._config.steps == "all" else replies
        stops = [reply.extras[2] for reply in counting if reply.extras[2] != NONE]
        self._stop_at = max(stops, default=self._stop_at)
        self._clock = max(self._clock, int(replies[0].extras[4]))
        self._allowed[worker] = all(reply.extras[3] for reply in replies)
        self._version = replies[0].header.seen
        if read:
            self._seen[worker] = [reply.header.seen for reply in replies]
            if not self._alone:
                torch._foreach_copy_(self._copies[worker], self._link.values)

    def finish(self, tick: Tick) -> Agreed:
        """What this rank knows of the step: its own workers' totals. No message; whether all stop is agreed on."""
        lanes = self._counting.take()
        loss, count, *metrics = [self._loss, 0.0] if lanes is None else lanes.tolist()
        self._loss = loss / count if count else self._loss
        named = self._counting.means(metrics, count) if count else {}
        if self._stale:
            named["staleness"] = sum(self._stale) / len(self._stale)
        norm = sum(self._norms) / len(self._norms) if self._norms else 0.0
        clock = self._clock if self._config.steps == "all" else tick.clock + 1
        stop = self._stop_at is not None and clock >= self._stop_at
        self._norms, self._stale = [], []
        return Agreed(self._loss, count, named, norm, finite=not self._culprits, stop=stop)

    def update(self, agreed: Agreed, tick: Tick) -> Update:
        """The servers have made theirs; those of all workers since the last step are counted."""
        made, self._updates = self._version - self._updates, self._version
        culprits, self._culprits = tuple(dict.fromkeys(self._culprits)), []
        clock = self._clock if self._config.steps == "all" else None
        return Update(max(made, 0), not agreed.finite, culprits, together=False, clock=clock)

    def merged(self) -> dict[str, Tensor]:
        self._read()
        self._link.meet("the parameters are read")
        return self._whole()

    def _read(self) -> None:
        """What the servers have when all workers have come as far as this."""
        self._link.meet("reading the parameters")
        replies = self._link.ask(READ, "reading the parameters")
        if self._alone:
            self._seen[self._setting.mine[0]] = [reply.header.seen for reply in replies]

    def _whole(self) -> dict[str, Tensor]:
        fixed = {name: p.data for name, p in self._named if not p.requires_grad}
        read = {name: value for (name, _), value in zip(self._trained, self._link.values, strict=True)}
        return {**fixed, **{name: value.to(self._link.comm.device) for name, value in read.items()}} | (
            self._buffers.merged()
        )

    def state(self) -> dict[str, Mapping[str, Tensor | Piece]]:
        """The servers' parameters and optimizer, and every worker's own buffers: all from rank 0.

        What another rank was to write would be missing where it is lost before it has.
        """
        self._read()
        optim = self._link.optimizer_state()
        self._link.meet("the parameters and the optimizer are read")
        model, workers = self._whole(), self._buffers.of_all()
        return {"model": model, "optim": optim, "workers": workers} if self._link.comm.rank == 0 else {}

    def load(self, saved: SavedState) -> None:
        """All workers begin at the saved model; what a push period had not pushed yet is not in it."""
        for name, parameter in self._named:
            parameter.data.copy_(read(saved, "model", name, self._replica, parameter.shape))
        self._buffers.load(saved)
        versions = self._link.become(saved, {name: p.data for name, p in self._named}, self._replica.specs)
        for worker, copies in self._copies.items():
            for (name, _), copy in zip(self._trained, copies, strict=True):
                copy.copy_(read(saved, "model", name, self._replica, copy.shape))
            self._seen[worker], self._allowed[worker] = list(versions), True
        self._updates = self._version = versions[0]
        self._stop_at, self._clock = None, 0

    def facts(self) -> dict[str, object]:
        """What the servers tell of themselves at the end of a run."""
        return self._link.facts()
