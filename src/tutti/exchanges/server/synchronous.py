"""Parameter servers with a barrier a step: workers push gradients, servers add them up and make one update.

Equal to ``mirrored``: gradients are summed, scaled, clipped and applied in the same order, elsewhere. With backup
workers an update is made of those that come first (Chen et al. 2016, arXiv 1604.00981).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tutti.exchanges.allreduce import AllReduce
from tutti.exchanges.buckets import Sums, Tail
from tutti.exchanges.config import AllReduceConfig, ParameterServerConfig
from tutti.exchanges.counting import clipped
from tutti.exchanges.reducers import Named, layout_key, own_part, refuse, squares_by
from tutti.exchanges.saved import read, written
from tutti.exchanges.server.desks import NONE, TAIL, InTurn
from tutti.exchanges.server.flats import write
from tutti.exchanges.server.link import Link, played
from tutti.exchanges.server.rounds import Rounds
from tutti.exchanges.server.shelf import Shelf
from tutti.exchanges.server.wire import APPLY, PUSH, READ, SKIP, SUM
from tutti.exchanges.verify import agree_on_state, spread_state
from tutti.exchanges.workers import WorkerBuffers
from tutti.nn.swap import parameters
from tutti.types import Agreed, GradSink, OptimizerFactory, Piece, Replica, SavedState, Setting, Tick, Update


class ServerReducer:
    """Sums on the servers: of every worker's own gradient where that matters, else of every rank's sum."""

    listens = False

    def __init__(self, trained: Named, setting: Setting, link: Link, leaves: int, backup: int) -> None:
        self._setting, self._link, self._leaves, self._backup = setting, link, leaves, backup
        self._by_worker = leaves == setting.workers
        self._names, self._order = [name for name, _ in trained], [p for _, p in trained]
        self._tail = Tail(len(trained), layout_key(trained))
        self._measured = len(trained) + 1 if setting.spread else 0
        self._squares: list[float] = []
        self.nonfinite: tuple[str, ...] = ()
        self._under_way = False

    def arm(self, tick: Tick, lanes: Tensor | None) -> None:
        """Nothing to do: gradients go when the worker is through."""

    def ready(self, parameter: Tensor) -> None:
        """Nothing to do."""

    def collect(self, tick: Tick, worker: int, lanes: Tensor | None) -> None:
        if self._by_worker:
            self._push(tick, worker, lanes)

    def _push(self, tick: Tick, worker: int, lanes: Tensor | None) -> None:
        """Begin a push, once the one before has been taken."""
        self._settle(tick)
        numbers = torch.zeros(self._tail.size + self._measured, dtype=torch.float64)
        if self._measured:
            numbers[self._tail.size :] = own_part(squares_by(self._order), tick, lanes)
        used = write(self._link.gradients, [p.grad for p in self._order])
        self._tail.fill(numbers[: self._tail.size], tick, lanes, used)
        for parameter in self._order:
            parameter.grad = None
        self._link.client.send(PUSH, worker, tick.clock, extras=numbers.tolist())
        self._under_way = True

    def _settle(self, tick: Tick) -> None:
        if self._under_way:
            self._under_way = False
            self._link.client.wait(f"push of gradients in step {tick.clock + 1}", (self._link.comm.global_rank,))

    def finish(self, tick: Tick, lanes: Tensor | None) -> Sums:
        """Raises MismatchError where ranks are in different steps."""
        if not self._by_worker:
            self._push(tick, self._setting.mine[0], lanes)
        self._settle(tick)
        text = f"sum of gradients in step {tick.clock + 1}"
        worker, client = self._setting.mine[0], self._link.client
        # With backup workers ranks may well be in different steps.
        ranks = (self._link.comm.global_rank,) if self._backup else self._link.comm.ranks
        asked, servers = [float(tick.samples), tick.loss_scale], list(range(self._link.servers))
        first = servers[:1] if self._backup else servers
        client.send(SUM, worker, tick.clock, extras=[*asked, *[NONE] * self._leaves], servers=first)
        replies = client.wait(text, ranks, patient=True)
        if self._backup and servers[1:]:
            # The first server has decided who is in; all have been sent what it has.
            client.send(
                SUM, worker, tick.clock, extras=[*asked, *self._counted(replies[0].extras)], servers=servers[1:]
            )
            replies += client.wait(text, ranks, patient=True)
        return self._read(tick, [reply.extras for reply in replies])

    def _counted(self, extras: Sequence[float]) -> Sequence[float]:
        return extras[-self._leaves :]

    def _read(self, tick: Tick, answers: Sequence[Sequence[float]]) -> Sums:
        size, count = self._tail.size + self._measured, len(self._order)
        tail, own = answers[0][: self._tail.size], answers[0][self._tail.size : size]
        if not self._tail.same(tail, tick, int(sum(self._counted(answers[0])))):
            refuse(self._link.comm, tick)
        columns = zip(*(answer[size : size + count] for answer in answers), strict=True)
        self._squares = [sum(column) for column in columns]
        finite = zip(*(answer[size + count : size + 2 * count] for answer in answers), strict=True)
        self.nonfinite = tuple(name for name, flags in zip(self._names, finite, strict=True) if not all(flags))
        return self._tail.read(tail)._replace(own=own)

    def squares(self) -> list[float]:
        """By parameter in the model's order."""
        return self._squares

    def scale(self, factor: float) -> None:
        """Nothing to do: the servers know the batch and the loss scale, and are told the clipping with the update."""


class Synchronous(AllReduce):
    """The exchange of ``parameter_server:mode=sync``."""

    def __init__(self, config: ParameterServerConfig, setting: Setting) -> None:
        super().__init__(AllReduceConfig(), setting)
        self._servers = config
        by_worker = setting.reproducible or setting.spread or config.backup > 0
        self._leaves = setting.workers if by_worker else setting.comms.replica.size

    def attach(self, replica: Replica, make_optimizer: OptimizerFactory) -> GradSink:
        comm = self._setting.comms.replica
        self._named = parameters(replica.parts)
        agree_on_state(comm, replica.parts)
        spread_state(comm, replica.parts)
        trained = [(name, p) for name, p in self._named if p.requires_grad]
        self._replica, self._parameters = replica, [p for _, p in trained]
        self._buffers = WorkerBuffers(replica.parts, self._setting, replica.borrowed)
        self._optimizer = make_optimizer(self._named)
        if self._optimizer is None:
            raise ValueError("nothing is trained")
        count, tail = len(trained), TAIL + len(trained) + (len(trained) + 1) * self._setting.spread
        leaves, backup = self._leaves, self._servers.backup
        rows = enumerate(played(self._setting))
        leaf = {w: w if leaves == self._setting.workers else r for r, mine in rows for w in mine}

        def desk(shelf: Shelf) -> InTurn:
            return InTurn(shelf, Rounds(leaves, backup), leaf, count)

        def extras(settings: int) -> Mapping[int, int]:
            return {PUSH: tail, SUM: 2 + leaves, APPLY: 2 + settings}

        self._link = Link(self._servers, self._setting, trained, make_optimizer, self._optimizer, desk, extras)
        self._pushes = self._reducer = ServerReducer(trained, self._setting, self._link, leaves, backup)
        if self._link.home:
            for parameter, value in zip(self._parameters, self._link.values, strict=True):
                parameter.data = value
        self._last = -1
        self.optimizers = (self._optimizer,)
        self.ready = self._reducer.ready
        return self

    def update(self, agreed: Agreed, tick: Tick) -> Update:
        """The servers write the parameters, scaled down where the gradient is longer than the clipping allows."""
        factor, norm = clipped(agreed.grad_norm, self._setting.clip)
        settings = self._link.settings(tick.lr_factor)
        numbers = [factor, norm, *settings] if agreed.finite else [0.0] * (2 + len(settings))
        text = f"update of the parameters in step {tick.clock + 1}"
        self._link.ask(APPLY, text, tick.clock, extras=numbers, flags=0 if agreed.finite else SKIP)
        if agreed.finite:
            self._take()
        for parameter in self._parameters:
            parameter.grad = None
        nonfinite = () if agreed.finite else self._pushes.nonfinite
        return Update(int(agreed.finite), skipped=not agreed.finite, nonfinite=nonfinite)

    def _take(self) -> None:
        """Take the parameters over from where they have arrived."""
        if not self._link.home:
            torch._foreach_copy_([p.data for p in self._parameters], self._link.values)

    def merged(self) -> dict[str, Tensor]:
        if self._servers.backup:
            # Ranks that were not waited for have older parameters.
            self._link.meet("reading the parameters")
            self._link.ask(READ, "reading the parameters")
            self._take()
            self._link.meet("the parameters are read")
        return super().merged()

    def state(self) -> dict[str, Mapping[str, Tensor | Piece]]:
        comm, model = self._setting.comms.replica, self.merged()
        optim = self._link.optimizer_state()
        if self._servers.backup:
            self._link.meet("the optimizer is read")
        return {"model": written(model, self._replica, comm), "optim": optim, "workers": self._buffers.state()}

    def load(self, saved: SavedState) -> None:
        for name, parameter in self._named:
            parameter.data.copy_(read(saved, "model", name, self._replica, parameter.shape))
        self._buffers.load(saved)
        self._link.become(saved, {name: p.data for name, p in self._named}, self._replica.specs)

    def facts(self) -> dict[str, object]:
        """What the servers tell of themselves at the end of a run."""
        return self._link.facts()

    def _all_finite(self) -> bool:
        return not self._pushes.nonfinite
