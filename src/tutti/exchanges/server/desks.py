"""What a server does with a request that is well-formed: wait for all workers, or act at once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from tutti.exchanges.buckets import DIGESTS, METRICS, read_sums
from tutti.exchanges.reducers import squares_of
from tutti.exchanges.server.core import Core
from tutti.exchanges.server.rounds import MOST_BEHIND, Rounds
from tutti.exchanges.server.shelf import Shelf, Vectors
from tutti.exchanges.server.wire import APPLY, BACK, LATE, OK, PULL, PUSH, REFUSED, SKIP, SUM, WAIT, Header

NONE = -1.0


@dataclass
class Request:
    """A request, its floats, and the tensors that came with it, in memory that is the sender's again once answered."""

    header: Header
    extras: Sequence[float]
    vectors: Vectors


@dataclass
class Answer:
    """What is sent back; ``values``: with the parameters as they are now."""

    status: int = OK
    extras: Sequence[float] = ()
    values: bool = False
    blob: bytes | None = None
    seen: int = field(default=0)


class Desk(Protocol):
    """One way to serve."""

    @property
    def version(self) -> int:
        """Updates made."""

    def handle(self, request: Request) -> Answer | None:
        """The answer; None where it has to wait, and to be asked for again."""

    def forget(self) -> None:
        """Another state was loaded."""

    def state(self) -> dict[str, Any]:
        """What a snapshot keeps besides the parameters and the optimizer."""

    def load(self, state: dict[str, Any]) -> None:
        """Go on where a snapshot was."""

    def facts(self) -> dict[str, Any]:
        """What is worth telling at the end."""


class InTurn:
    """A barrier a step: the update is made of all workers' gradients (with backup workers, of those that came first).

    Args:
        shelf: the parameters.
        rounds: the barrier.
        leaf: which contribution a worker's push is.
        parameters: how many tensors there are on all servers.
    """

    def __init__(self, shelf: Shelf, rounds: Rounds, leaf: Mapping[int, int], parameters: int) -> None:
        self._shelf, self._rounds, self._leaf, self._parameters = shelf, rounds, leaf, parameters
        self._indices = [piece.tensor for piece in shelf.pieces]
        self._at: dict[int, int] = {}
        self._result: list[float] | None = None
        self._gradients: list[Tensor | None] = []
        self.version = 0

    def handle(self, request: Request) -> Answer | None:
        kinds = {PUSH: self._push, SUM: self._sum, APPLY: self._apply}
        return kinds[request.header.kind](request)

    def _push(self, request: Request) -> Answer:
        header = request.header
        totals = torch.tensor(request.extras, dtype=torch.float64)
        taken = self._rounds.push(self._leaf[header.worker], header.clock, request.vectors, totals)
        return Answer(OK if taken else LATE)

    def _sum(self, request: Request) -> Answer | None:
        """[samples, loss scale, for every leaf 1, 0 or -1] → totals, squares and finiteness by parameter, leaves."""
        clock = request.header.clock
        self._at[request.header.client] = clock
        if clock - min(self._at.values()) >= MOST_BEHIND:
            return None
        if self._rounds.clock is not None and clock < self._rounds.clock:
            return Answer(extras=self._rounds.result(clock) or (), seen=self.version)
        samples, scale, *mask = request.extras
        counted = None if NONE in mask else {leaf for leaf, flag in enumerate(mask) if flag}
        total = self._rounds.total(counted)
        if total is None:
            return None
        if self._result is None:
            sums = read_sums(total.totals[DIGESTS:].tolist())
            factor = (samples / sums.samples if sums.samples else 1.0) / scale
            if factor != 1.0:
                for vector in total.vectors:
                    vector.mul_(factor)
            self._gradients = [
                view if sums.used[index] else None
                for index, view in zip(self._indices, self._shelf.views(total.vectors), strict=True)
            ]
            self._result = [*total.totals.tolist(), *self._looked_at(), *self._mask(len(mask))]
        return Answer(extras=self._result, seen=self.version)

    def _looked_at(self) -> list[float]:
        """Sums of squares by parameter, 0 where it is not here; then 1 where all elements here are finite."""
        squares, finite = [0.0] * self._parameters, [1.0] * self._parameters
        there = [(i, g) for i, g in zip(self._indices, self._gradients, strict=True) if g is not None]
        for (index, gradient), square in zip(there, squares_of([g for _, g in there]), strict=True):
            squares[index] = square
            finite[index] = float(math.isfinite(square) or bool(torch.isfinite(gradient).all()))
        return squares + finite

    def _mask(self, leaves: int) -> list[float]:
        return [float(leaf in self._rounds.counted) for leaf in range(leaves)]

    def _apply(self, request: Request) -> Answer:
        """[factor on the gradient, its norm, settings]; or nothing but the end of the step."""
        header, (factor, norm, *settings) = request.header, request.extras
        if header.clock == self._rounds.clock and self._result is not None:
            if not header.flags & SKIP:
                if factor != 1.0:
                    torch._foreach_mul_([g for g in self._gradients if g is not None], factor)
                self._shelf.update(self._gradients, settings, norm)
                self.version += 1
            self._rounds.finish(self._result)
            self._result = None
        return Answer(values=not header.flags & SKIP, seen=self.version)

    def forget(self) -> None:
        self._rounds.clock, self._at = None, {}

    def state(self) -> dict[str, Any]:
        return {}

    def load(self, state: dict[str, Any]) -> None:
        raise NotImplementedError("what other ranks have already added is lost with the process")

    def facts(self) -> dict[str, Any]:
        return {"updates": self.version, "late": self._rounds.late}


class AtOnce:
    """Every push is an update.

    Args:
        shelf: the parameters.
        core: clocks and staleness.
        settings: how many numbers the optimizer's settings are.
        over_staleness: divide the learning rate of an update by its staleness.
    """

    def __init__(self, shelf: Shelf, core: Core, settings: int, over_staleness: bool) -> None:
        self._shelf, self._core, self._settings, self._over = shelf, core, settings, over_staleness
        self._indices = [piece.tensor for piece in shelf.pieces]
        self._refused = 0

    @property
    def version(self) -> int:
        return self._core.version

    def handle(self, request: Request) -> Answer | None:
        header = request.header
        if header.kind == PULL:
            self._core.hear(header.worker, header.clock, header.seen)
            allowed = self._core.may_proceed(header.worker)
            return None if header.flags & WAIT and not allowed else self._answer(allowed)
        return self._push(request) if header.kind == PUSH else Answer(REFUSED)

    def _push(self, request: Request) -> Answer:
        """[settings, for every parameter whether it has a gradient, gradient's norm, whether to stop]."""
        header, extras = request.header, request.extras
        settings, (*used, norm, stop) = extras[: self._settings], extras[self._settings :]
        sound = header.flags & SKIP or self._finite(request.vectors, extras)

        def update(staleness: int) -> None:
            views = self._shelf.views(request.vectors)
            gradients = [view if used[i] else None for i, view in zip(self._indices, views, strict=True)]
            rate = 1.0 / max(1, staleness) if self._over else 1.0
            self._shelf.update(gradients, settings, norm, rate)

        skip = header.flags & SKIP or not sound
        pushed = self._core.push(header.worker, header.clock, header.seen, None if skip else update)
        if stop:
            self._core.ask_to_stop()
        self._refused += not sound
        answer = self._answer(self._core.may_proceed(header.worker), pushed.staleness)
        answer.status, answer.values = (OK if sound else REFUSED), bool(header.flags & BACK)
        return answer

    def _finite(self, vectors: Vectors, extras: Sequence[float]) -> bool:
        # A sum is finite unless an element is not, or it overflows: only then is it worth a second look.
        sums = all(math.isfinite(float(v.sum())) or bool(torch.isfinite(v).all()) for v in vectors)
        return sums and all(map(math.isfinite, extras))

    def _answer(self, allowed: bool, staleness: int = 0) -> Answer:
        """With the parameters: [staleness, lost, step to stop after, whether the worker may go on, steps of all]."""
        stop = self._core.stop_at
        core = self._core
        extras = [staleness, core.lost, NONE if stop is None else stop, allowed, core.clock]
        return Answer(extras=[float(number) for number in extras], values=True, seen=self.version)

    def forget(self) -> None:
        self._core.forget_workers()

    def state(self) -> dict[str, Any]:
        return self._core.state()

    def load(self, state: dict[str, Any]) -> None:
        self._core.load(state)

    def facts(self) -> dict[str, Any]:
        core = self._core
        histogram = {str(tau): count for tau, count in sorted(core.staleness.items())}
        return {
            "updates": core.version,
            "steps": core.steps,
            "staleness": histogram,
            "lost": core.lost,
            "stale": core.stale,
            "refused": self._refused,
        }


TAIL = DIGESTS + 3 + METRICS
"""Numbers of a push before the flags; see ``tutti.exchanges.buckets.Tail``."""
