"""In which order a pipeline's ranks compute forwards and backwards: orders as data.

A model is cut into virtual stages 0 … S-1, S = ranks · chunks; rank r holds stages r, r + ranks, r + 2·ranks …
An order says for each rank what it computes, one after the other. The same object is executed over processes, proved
free of deadlocks, and priced.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

from tutti.laws.shares import share

Kind = Literal["F", "B", "I", "W"]


class Action(NamedTuple):
    """One computation of one micro-batch on one virtual stage.

    ``kind``: F forward, B backward; or in its place I, the gradient of the stage's input, and later W, that of its
    weights.
    """

    kind: Kind
    stage: int
    micro: int


class Span(NamedTuple):
    """When an action runs."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Order:
    """What every rank computes, in order.

    Attributes:
        ranks: for each rank its actions.
        chunks: virtual stages a rank, v.
        micro_batches: m.
    """

    ranks: tuple[tuple[Action, ...], ...]
    chunks: int
    micro_batches: int

    @property
    def stages(self) -> int:
        """Virtual stages in all."""
        return len(self.ranks) * self.chunks

    def needs(self, action: Action) -> list[Action]:
        """The actions that must be over before this one begins.

        >>> gpipe(2, 1).needs(Action("B", 0, 0))
        [Action(kind='F', stage=0, micro=0), Action(kind='B', stage=1, micro=0)]
        """
        kind, stage, micro = action
        if kind == "F":
            return [Action("F", stage - 1, micro)] if stage else []
        if kind == "W":
            return [Action("I", stage, micro)]
        before = [Action("F", stage, micro)]
        return before + ([Action(kind, stage + 1, micro)] if stage < self.stages - 1 else [])


def one_by_one(ranks: int, micro_batches: int) -> Order:
    """One micro-batch is under way at a time: ranks work in turn."""
    return Order(
        tuple(tuple(Action(k, r, i) for i in range(micro_batches) for k in ("F", "B")) for r in range(ranks)),
        1,
        micro_batches,
    )


def gpipe(ranks: int, micro_batches: int) -> Order:
    """All forwards, then all backwards (Huang et al. 2018, arXiv 1811.06965). Holds m micro-batches at once."""
    return Order(
        tuple(tuple(Action(k, r, i) for k in ("F", "B") for i in range(micro_batches)) for r in range(ranks)),
        1,
        micro_batches,
    )


def one_forward_one_backward(ranks: int, micro_batches: int) -> Order:
    """1F1B (Narayanan et al. 2019 and 2021, arXiv 1806.03377, 2104.04473): stage i holds at most p-i micro-batches."""
    rows = []
    for rank in range(ranks):
        forwards = [Action("F", rank, i) for i in range(micro_batches)]
        backwards = [Action("B", rank, i) for i in range(micro_batches)]
        rows.append(_alternate(forwards, backwards, ranks - 1 - rank))
    return Order(tuple(rows), 1, micro_batches)


def interleaved(ranks: int, micro_batches: int, chunks: int) -> Order:
    """1F1B over v stages a rank, which divides the bubble by v (Narayanan et al. 2021, arXiv 2104.04473, §2.2).

    Micro-batches go through a rank's stages in groups of p, some of them larger where p does not divide m.
    """
    number = max(1, micro_batches // ranks)
    groups = [share(micro_batches, number, i) for i in range(number)]
    rows = []
    for rank in range(ranks):
        forwards = [Action("F", c * ranks + rank, i) for g in groups for c in range(chunks) for i in g]
        backwards = [Action("B", c * ranks + rank, i) for g in groups for c in reversed(range(chunks)) for i in g]
        rows.append(_alternate(forwards, backwards, 2 * (ranks - 1 - rank) + (chunks - 1) * len(groups[0])))
    return Order(tuple(rows), chunks, micro_batches)


def zero_bubble(ranks: int, micro_batches: int) -> Order:
    """ZB-H1 (Qi et al. 2023, arXiv 2401.10241): 1F1B whose weight gradients wait and fill what would be idle."""
    rows = []
    for rank, row in enumerate(one_forward_one_backward(ranks, micro_batches).ranks):
        actions: list[Action] = []
        for action in row:
            actions.append(action if action.kind == "F" else action._replace(kind="I"))
            if action.kind == "B" and action.micro >= rank:
                actions.append(Action("W", rank, action.micro - rank))
        done = sum(action.kind == "W" for action in actions)
        rows.append((*actions, *(Action("W", rank, i) for i in range(done, micro_batches))))
    return Order(tuple(rows), 1, micro_batches)


def _alternate(forwards: Sequence[Action], backwards: Sequence[Action], ahead: int) -> tuple[Action, ...]:
    """``ahead`` forwards, then one forward and one backward in turn, then the backwards that are left."""
    ahead = min(ahead, len(forwards))
    turns = len(forwards) - ahead
    middle = [action for pair in zip(forwards[ahead:], backwards, strict=False) for action in pair]
    return (*forwards[:ahead], *middle, *backwards[turns:])


SCHEDULES: Mapping[str, Callable[[int, int, int], Order]] = {
    "one_by_one": lambda ranks, micro_batches, chunks: one_by_one(ranks, micro_batches),
    "gpipe": lambda ranks, micro_batches, chunks: gpipe(ranks, micro_batches),
    "1f1b": lambda ranks, micro_batches, chunks: one_forward_one_backward(ranks, micro_batches),
    "interleaved": interleaved,
    "zero_bubble": lambda ranks, micro_batches, chunks: zero_bubble(ranks, micro_batches),
}


@lru_cache(maxsize=64)
def make(name: str, ranks: int, micro_batches: int, chunks: int = 1) -> Order:
    """The order called ``name`` in ``SCHEDULES``; kept."""
    return SCHEDULES[name](ranks, micro_batches, chunks)


@lru_cache(maxsize=64)
def forwards(ranks: int, micro_batches: int, chunks: int = 1) -> Order:
    """Forwards alone, for evaluation."""
    rows = [
        tuple(Action("F", c * ranks + r, i) for i in range(micro_batches) for c in range(chunks)) for r in range(ranks)
    ]
    return Order(tuple(rows), chunks, micro_batches)


def timeline(order: Order, cost: Callable[[Action], float], transfer: float = 0.0) -> list[list[Span]]:
    """When each action runs, each rank's in order, if every one begins as early as it can.

    Args:
        order: what is computed.
        cost: how long an action takes.
        transfer: how long a result is on its way to another rank.

    Raises:
        ValueError: ranks wait for each other for ever.
    """
    rows: list[list[Span]] = [[] for _ in order.ranks]
    ends: dict[Action, float] = {}
    left = sum(map(len, order.ranks))
    while left:
        before = left
        for rank, actions in enumerate(order.ranks):
            while len(rows[rank]) < len(actions):
                action = actions[len(rows[rank])]
                needs = order.needs(action)
                if any(need not in ends for need in needs):
                    break
                ranks = len(order.ranks)
                come = [ends[n] + transfer * (n.stage % ranks != action.stage % ranks) for n in needs]
                start = max([0.0, *come, *(span.end for span in rows[rank][-1:])])
                rows[rank].append(Span(action, start, start + cost(action)))
                ends[action] = rows[rank][-1].end
                left -= 1
        if left == before:
            waiting = [actions[len(row) :][:1] for row, actions in zip(rows, order.ranks, strict=True)]
            raise ValueError(f"deadlock: ranks wait before {waiting}")
    return rows


def bubble(rows: Sequence[Sequence[Span]]) -> float:
    """Part of all ranks' time that is idle, from the first action's start to the last one's end."""
    end = max(span.end for row in rows for span in row)
    busy = sum(span.end - span.start for row in rows for span in row)
    return 1 - busy / (end * len(rows))


def idle(name: str, ranks: int, micro_batches: int, chunks: int = 1) -> float:
    """Bubble fraction of an order if a backward takes twice a forward and all stages take the same.

    >>> round(idle("1f1b", 4, 8), 6), round(idle("zero_bubble", 4, 8), 6), idle("one_by_one", 4, 8)
    (0.272727, 0.111111, 0.75)
    """
    return bubble(timeline(make(name, ranks, micro_batches, chunks), lambda action: 2.0 if action.kind == "B" else 1.0))


def held(actions: Sequence[Action], size: Callable[[int], float] = lambda stage: 1) -> float:
    """Most activations that one rank keeps at once; ``size``: what a micro-batch leaves on a virtual stage.

    >>> [held(row) for row in one_forward_one_backward(4, 8).ranks]
    [4, 3, 2, 1]
    """
    now: float = 0
    most: float = 0
    for action in actions:
        now += {"F": 1, "B": -1, "I": 0, "W": -1}[action.kind] * size(action.stage)
        most = max(most, now)
    return most


def picture(order: Order, cost: Callable[[Action], int]) -> str:
    """A timeline in text, one row a rank: ``F3`` is micro-batch 3's forward; a letter names a rank's stage.

    >>> print(picture(gpipe(2, 2), lambda action: 1))
    rank 0  F0 F1 .. .. B0 B1
    rank 1  .. F0 F1 B0 B1 ..
    """
    rows = timeline(order, cost)
    end = round(max(span.end for row in rows for span in row))
    wide = 2 + (order.chunks > 1)
    lines = []
    for rank, row in enumerate(rows):
        cells = ["." * wide] * end
        for action, start, stop in row:
            chunk = chr(ord("a") + action.stage // len(order.ranks)) if order.chunks > 1 else ""
            text = f"{action.kind}{action.micro}{chunk}"
            cells[round(start) : round(stop)] = [text] + ["-" * wide] * (round(stop) - round(start) - 1)
        lines.append(f"rank {rank}  {' '.join(cells)}")
    return "\n".join(lines)
