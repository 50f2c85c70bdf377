"""Pipeline schedules as data: the order in which each rank computes forwards and backwards.

A model is cut into virtual stages 0 … S-1, S = ranks · chunks; rank r holds stages r, r + ranks, r + 2·ranks …
An ``Order`` lists each rank's actions. The same object is executed over processes, proved free of deadlocks, and
priced.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

from tutti.comm.partition import even_share

Kind = Literal["F", "B", "I", "W"]


class Action(NamedTuple):
    """One computation of one micro-batch on one virtual stage of a pipeline.

    Attributes:
        kind: F forward, B backward; or in place of B, I the backward to the stage's inputs and later W the backward to
            its weights.
        stage: index of the virtual stage in the whole model, from 0.
        micro: index of the micro-batch, from 0.
    """

    kind: Kind
    stage: int
    micro: int


class Span(NamedTuple):
    """Start and end of one forward or backward in a simulated pipeline schedule.

    Attributes:
        action: the computation: its kind, virtual stage and micro-batch.
        start, end: times in the unit of the simulation; 0 is when the first action of the whole schedule begins.
    """

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Order:
    """A pipeline schedule: for every rank, the forwards and backwards that this rank computes, in order.

    Attributes:
        ranks: one tuple of actions for each pipeline rank, in the order of execution.
        chunks: virtual stages a rank, v.
        micro_batches: number of micro-batches, m.
    """

    ranks: tuple[tuple[Action, ...], ...]
    chunks: int
    micro_batches: int

    @property
    def stages(self) -> int:
        """Number of virtual stages into which this schedule cuts the model: ranks times virtual stages a rank."""
        return len(self.ranks) * self.chunks

    def needs(self, action: Action) -> list[Action]:
        """Return a list of the forwards and backwards of this pipeline schedule whose results one action needs.

        A forward needs the previous stage's forward of the same micro-batch. A backward, or input backward, needs its
        own stage's forward and the next stage's backward. A weight backward needs its own stage's input backward. The
        list says nothing about the order of actions on one rank; the attribute ``ranks`` has this order.

        Args:
            action: (kind, stage, micro-batch): kind F forward, B backward, I input backward or W weight backward.

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
    """Return the schedule that finishes one micro-batch before the next one begins, so that ranks work in turn.

    Args:
        ranks: pipeline ranks, p, each with one stage.
        micro_batches: number of micro-batches, m.

    Returns:
        An ``Order``: its ``ranks`` has for each pipeline rank a tuple of actions (kind, stage, micro-batch), with kind
        F forward or B backward, in the order of execution.
    """
    return Order(
        tuple(tuple(Action(k, r, i) for i in range(micro_batches) for k in ("F", "B")) for r in range(ranks)),
        1,
        micro_batches,
    )


def gpipe(ranks: int, micro_batches: int) -> Order:
    """Return GPipe's schedule: on each rank all forwards, then all backwards (Huang et al. 2018, arXiv 1811.06965).

    Each rank holds the activations of all m micro-batches at once.

    Args:
        ranks: pipeline ranks, p, each with one stage.
        micro_batches: number of micro-batches, m.

    Returns:
        An ``Order``: its ``ranks`` has for each pipeline rank a tuple of actions (kind, stage, micro-batch), with kind
        F forward or B backward, in the order of execution.
    """
    return Order(
        tuple(tuple(Action(k, r, i) for k in ("F", "B") for i in range(micro_batches)) for r in range(ranks)),
        1,
        micro_batches,
    )


def one_forward_one_backward(ranks: int, micro_batches: int) -> Order:
    """Return the 1F1B schedule: after a warm-up of forwards each rank alternates a forward and a backward.

    Rank i of p holds the activations of at most p-i micro-batches. Source: Narayanan et al. 2019 and 2021, arXiv
    1806.03377, 2104.04473.

    Args:
        ranks: pipeline ranks, p, each with one stage.
        micro_batches: number of micro-batches, m.

    Returns:
        An ``Order``: its ``ranks`` has for each pipeline rank a tuple of actions (kind, stage, micro-batch), with kind
        F forward or B backward, in the order of execution.
    """
    rows = []
    for rank in range(ranks):
        forwards = [Action("F", rank, i) for i in range(micro_batches)]
        backwards = [Action("B", rank, i) for i in range(micro_batches)]
        rows.append(_alternate(forwards, backwards, ranks - 1 - rank))
    return Order(tuple(rows), 1, micro_batches)


def interleaved(ranks: int, micro_batches: int, chunks: int) -> Order:
    """Return the interleaved 1F1B schedule, with v virtual stages a rank, which divides the bubble by v.

    As in 1F1B, each rank alternates a forward and a backward after a warm-up of forwards. Micro-batches go through a
    rank's stages in groups of p; where p does not divide m, in ⌊m/p⌋ groups (at least one) of nearly equal size.
    Source: Narayanan et al. 2021, arXiv 2104.04473, §2.2.

    Args:
        ranks: pipeline ranks, p.
        micro_batches: number of micro-batches, m.
        chunks: virtual stages a rank, v; rank i has the stages i, i + p, i + 2p, … of the model.

    Returns:
        An ``Order``: its ``ranks`` has for each pipeline rank a tuple of actions (kind, stage, micro-batch), with kind
        F forward or B backward, in the order of execution.
    """
    number = max(1, micro_batches // ranks)
    groups = [even_share(micro_batches, number, i) for i in range(number)]
    rows = []
    for rank in range(ranks):
        forwards = [Action("F", c * ranks + rank, i) for g in groups for c in range(chunks) for i in g]
        backwards = [Action("B", c * ranks + rank, i) for g in groups for c in reversed(range(chunks)) for i in g]
        rows.append(_alternate(forwards, backwards, 2 * (ranks - 1 - rank) + (chunks - 1) * len(groups[0])))
    return Order(tuple(rows), chunks, micro_batches)


def zero_bubble(ranks: int, micro_batches: int) -> Order:
    """Return ZB-H1: 1F1B with backwards in two halves, of which the weight backwards are delayed to fill the bubble.

    The input backward (I) is on the critical path, the weight backward (W) is not. Source: Qi et al. 2023, arXiv
    2401.10241.

    Args:
        ranks: pipeline ranks, p, each with one stage.
        micro_batches: number of micro-batches, m.

    Returns:
        An ``Order``: its ``ranks`` has for each pipeline rank a tuple of actions (kind, stage, micro-batch), with kind
        F forward, I input backward or W weight backward, in the order of execution.
    """
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
    """Return ``ahead`` forwards, then one forward and one backward in turn, then the remaining backwards."""
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
def make_order(name: str, ranks: int, micro_batches: int, chunks: int = 1) -> Order:
    """Return the pipeline schedule of a name: each rank's order of forwards and backwards.

    Equal arguments return the same cached ``Order``.

    Args:
        name: a key of ``SCHEDULES``: ``gpipe``, ``1f1b``, ``interleaved``, ``zero_bubble`` or ``one_by_one``.
        ranks: pipeline ranks, p.
        micro_batches: number of micro-batches, m.
        chunks: virtual stages a rank, v; only ``interleaved`` reads it, the other schedules have one.

    Returns:
        An ``Order``: its ``ranks`` has for each pipeline rank a tuple of actions (kind, stage, micro-batch) in the
        order of execution, with the index of the virtual stage in the whole model. Kinds are F forward and B backward,
        or with ``zero_bubble`` in place of B the backward's two halves, I input backward and W weight backward.

    Raises:
        KeyError: ``SCHEDULES`` has no such name.
    """
    return SCHEDULES[name](ranks, micro_batches, chunks)


@lru_cache(maxsize=64)
def forwards(ranks: int, micro_batches: int, chunks: int = 1) -> Order:
    """Return a pipeline schedule of forwards without backwards, for evaluation.

    A rank runs one micro-batch on all of its virtual stages before the next micro-batch. Equal arguments return the
    same cached ``Order``.

    Args:
        ranks: pipeline ranks, p.
        micro_batches: number of micro-batches, m.
        chunks: virtual stages a rank, v; rank i has the stages i, i + p, i + 2p, … of the model.

    Returns:
        An ``Order``: its ``ranks`` has for each pipeline rank a tuple of actions ("F", stage, micro-batch), in the
        order of execution.
    """
    rows = [
        tuple(Action("F", c * ranks + r, i) for i in range(micro_batches) for c in range(chunks)) for r in range(ranks)
    ]
    return Order(tuple(rows), chunks, micro_batches)


def timeline(order: Order, cost: Callable[[Action], float], transfer: float = 0.0) -> list[list[Span]]:
    """Simulate a pipeline schedule: return start and end of each action if each begins as early as it can.

    An action is a forward or backward of one micro-batch on one stage. An action begins when its rank has finished the
    action before and all inputs have arrived.

    Args:
        order: the schedule.
        cost: function from an action to its duration in any unit of time.
        transfer: duration of a message to another rank, in the same unit.

    Returns:
        One list for each rank: a ``Span`` (``action``, ``start``, ``end``) for each of the rank's actions, in order.
        Times count from 0, when the first action of the whole schedule begins.

    Raises:
        ValueError: deadlock: every rank with actions left waits for a result that no rank can compute.
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
    """Return the pipeline bubble: the idle fraction, 0 to 1, of all ranks' time from 0 to the end of the last action.

    Args:
        rows: for each rank the list of its forwards and backwards with start and end (``Span``), as ``timeline``
            returns.

    Raises:
        ValueError: no rank has an action.
    """
    end = max(span.end for row in rows for span in row)
    busy = sum(span.end - span.start for row in rows for span in row)
    return 1 - busy / (end * len(rows))


@lru_cache(64)
def bubble_fraction(name: str, ranks: int, micro_batches: int, chunks: int = 1) -> float:
    """Return the idle fraction, 0 to 1, of all ranks' time in a pipeline schedule, under simple assumptions on costs.

    A backward takes twice a forward, all stages take the same, and messages take no time. The input and the weight
    backward of ``zero_bubble`` take as long as a forward each.

    Args:
        name: name of the schedule, a key of ``SCHEDULES``: ``gpipe``, ``1f1b``, ``interleaved``, ``zero_bubble`` or
            ``one_by_one``.
        ranks: pipeline ranks, p.
        micro_batches: number of micro-batches, m, at least 1.
        chunks: virtual stages a rank, v; only ``interleaved`` takes more than one.

    Raises:
        KeyError: ``SCHEDULES`` has no such name.
        ValueError: there is no micro-batch.

    >>> [round(bubble_fraction(name, 4, 8), 6) for name in ("1f1b", "zero_bubble", "one_by_one")]
    [0.272727, 0.111111, 0.75]
    """
    return bubble(
        timeline(make_order(name, ranks, micro_batches, chunks), lambda action: 2.0 if action.kind == "B" else 1.0)
    )


def peak_activations(actions: Sequence[Action], size: Callable[[int], float] = lambda stage: 1) -> float:
    """Return the peak of the activations that one pipeline rank holds at a time, in the unit of ``size``.

    A rank holds a micro-batch's activations from the forward to the backward, or to the weight backward where the
    backward comes in two halves.

    Args:
        actions: the rank's actions in order, one element of ``Order.ranks``.
        size: function from the index of a virtual stage to the size of one micro-batch's activations on this stage, in
            any unit. The default, 1, counts micro-batches.

    >>> [peak_activations(row) for row in one_forward_one_backward(4, 8).ranks]
    [4, 3, 2, 1]
    """
    now: float = 0
    most: float = 0
    for action in actions:
        now += {"F": 1, "B": -1, "I": 0, "W": -1}[action.kind] * size(action.stage)
        most = max(most, now)
    return most


def picture(order: Order, cost: Callable[[Action], int]) -> str:
    """Return the timeline of a pipeline schedule as text, one line a rank and one column a unit of time.

    ``F3`` is micro-batch 3's forward, dashes continue an action of several units, and dots are idle time. With several
    virtual stages a rank, a letter after the number names the rank's first (a), second (b), … stage.

    Args:
        order: the schedule, of at least one action.
        cost: function from an action, one forward or backward, to its duration, a whole number of units.

    Raises:
        ValueError: the schedule deadlocks, or has no action.

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
