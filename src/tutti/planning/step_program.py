"""One step as a static program: actions on resources with their dependencies, evaluated in max-plus over samples.

An action begins when the actions that it needs and the action before it on the same resource have ended; it ends its
duration later. Durations are arrays with one element a sample of the uncertain constants, so that one pass over the
actions evaluates all samples (Baccelli et al. 1992, "Synchronization and Linearity"). Replicas that are equal in
distribution are one device here, so that a program does not grow with their number.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from tutti.comm.collective_schedules import LinkTraffic, Schedule
from tutti.metrics.timeline import WORK, TimelineSegment
from tutti.parallel.parameter_server.server_flows import ServerFlow
from tutti.planning.scaling_laws import Array

COMMUNICATION = "communication"
UPDATE = "update"
IDLE = "idle"
"""Delays of ``--slow``."""


@dataclass(frozen=True)
class GradientVector:
    """A flat vector that data ranks all-reduce: a gradient bucket, or loss sums and flags.

    The last bucket may hold the loss sums and flags, too; otherwise they are a vector of their own.

    Attributes:
        parameters: indices of the bucket's parameters in the model's list of trainable parameters; empty for a vector
            of loss sums and flags alone.
        elements: number of elements of the vector, loss sums and flags included.
        itemsize: bytes of an element in messages.
    """

    parameters: tuple[int, ...]
    elements: int
    itemsize: int

    @property
    def bytes(self) -> int:
        """Bytes that the whole gradient vector takes in messages: ``elements`` × ``itemsize``."""
        return self.elements * self.itemsize


@dataclass(frozen=True)
class PeriodicCollective:
    """A collective over ranks along axes of the device mesh, which recurs every ``period`` training steps.

    Attributes:
        kind: ``all_reduce``, ``all_gather``, ``reduce_scatter``, ``all_to_all``, ``broadcast`` or ``shared_memory``.
        bytes: bytes of the whole tensor: the vector to sum or to broadcast, the gathered result, or in shared memory
            all ranks' tensors.
        period: training steps from one such collective to the next.
        axis: ranks that take part: ``data``, ``shard``, ``replica``, ``stage``, ``tensor``, ``model`` (the ranks of one
            replica) or ``tied`` (the stages of a replica that hold copies of a parameter).
        stage: index of the pipeline stage whose ranks take part; a collective across stages has an object for each
            stage that takes part.
        calls: number of such collectives in each period, one after the other.
    """

    kind: str
    bytes: int
    period: int = 1
    axis: str = "data"
    stage: int = 0
    calls: int = 1


@dataclass(frozen=True)
class StepAction:
    """One computation or message of one device in a simulated training step.

    Attributes:
        device: index of the simulated device, from 0; each stands for all devices with the same work.
        phase: ``forward``, ``backward``, ``weight`` (weight gradients), ``update``, ``idle`` or ``communication``.
        seconds: duration, array of shape (draws,): one element for each Monte Carlo draw, ``DRAWS`` = 256 of them in
            the steps that ``build_step`` makes.
        needs: indices in ``StepProgram.actions`` of the actions that end before this one begins.
        link: whether the action occupies the device's link, and not its compute units.
        text: name of the computation or message, for timelines.
    """

    device: int
    phase: str
    seconds: Array
    needs: tuple[int, ...] = ()
    link: bool = False
    text: str = ""


@dataclass
class StepProgram:
    """The computations and messages (actions) of one simulated training step, each after the actions that it needs.

    Attributes:
        devices: number of devices that are simulated; each stands for all with the same work.
        actions: actions, each after the actions that it needs. A resource (the compute units or the link of a device)
            runs its actions in this order.
        vectors: vectors that the step adds up over the data ranks, in order.
        collectives: collectives that are no sum of vectors, in order.
        between_stages: messages and bytes from one device of a pipeline to another, by (source, destination).
        between_ranks: reads and bytes by which a data rank takes another's gradients from shared memory, by (source,
            destination).
        flows: requests of each data rank to parameter servers.
    """

    devices: int = 1
    actions: list[StepAction] = field(default_factory=list)
    vectors: list[GradientVector] = field(default_factory=list)
    collectives: list[PeriodicCollective] = field(default_factory=list)
    between_stages: dict[tuple[int, int], LinkTraffic] = field(default_factory=dict)
    between_ranks: dict[tuple[int, int], LinkTraffic] = field(default_factory=dict)
    flows: list[ServerFlow] = field(default_factory=list)

    def add(self, action: StepAction) -> int:
        """Append a computation or message to the simulated step.

        Args:
            action: the computation or message; its ``needs`` are indices of actions that were added before.

        Returns:
            Index of the action, for ``needs`` of later actions.

        Raises:
            ValueError: ``needs`` names an action that has not been added yet.
        """
        if action.needs and max(action.needs) >= len(self.actions):
            raise ValueError(f"action {len(self.actions)} needs a later one: {action.needs}")
        self.actions.append(action)
        return len(self.actions) - 1

    def count_between_stages(self, source: int, to: int, messages: int, size: int) -> None:
        """Add messages to the simulated step's count of traffic between pipeline ranks; nothing is timed.

        Args:
            source: pipeline rank of the sender.
            to: pipeline rank of the receiver.
            messages: number of messages.
            size: bytes of all these messages together.
        """
        before = self.between_stages.get((source, to), LinkTraffic(0, 0))
        self.between_stages[source, to] = LinkTraffic(before.messages + messages, before.bytes + size)

    def traffic(self, schedule: Schedule) -> Mapping[tuple[int, int], LinkTraffic]:
        """Return messages and bytes that the all-reduces of the step's gradients send over each link.

        Other collectives, and messages between pipeline stages, are not included.

        Args:
            schedule: the all-reduce algorithm over the data ranks.

        Returns:
            A dict from (source, destination), ranks among the data ranks of one all-reduce, to a ``LinkTraffic`` with
            the number of ``messages`` and their ``bytes``; links without a message are missing.
        """
        total: dict[tuple[int, int], LinkTraffic] = {}
        for vector in self.vectors:
            for link, found in schedule.traffic(vector.elements, vector.itemsize).items():
                before = total.get(link, LinkTraffic(0, 0))
                total[link] = LinkTraffic(before.messages + found.messages, before.bytes + found.bytes)
        return total


def collective_totals(collectives: Sequence[PeriodicCollective], steps: int) -> dict[str, LinkTraffic]:
    """Return the number of calls and bytes of collectives over a number of steps, by kind of collective.

    Args:
        collectives: the collectives, each with its period in steps, and its calls and bytes each time.
        steps: number of steps, counted from the start of a period.

    Returns:
        A dict from the kind, such as ``all_gather``, to a ``LinkTraffic``: ``messages`` (number of calls) and ``bytes``
        (of all calls together).

    >>> collective_totals([PeriodicCollective("all_gather", 8), PeriodicCollective("all_gather", 100, 4)], 6)
    {'all_gather': LinkTraffic(messages=7, bytes=148)}
    """
    found: dict[str, LinkTraffic] = {}
    for each in collectives:
        before, calls = found.get(each.kind, LinkTraffic(0, 0)), steps // each.period * each.calls
        found[each.kind] = LinkTraffic(before.messages + calls, before.bytes + calls * each.bytes)
    return found


@dataclass(frozen=True)
class StepTimes:
    """Start and end of every action (computation or message) of a simulated training step.

    Attributes:
        program: the simulated step.
        start, end: seconds from the start of the step, (actions, draws): a row for each of ``program.actions``, a
            column for each Monte Carlo draw of the machine's uncertain constants.
    """

    program: StepProgram
    start: Array
    end: Array

    @property
    def seconds(self) -> Array:
        """Seconds of the simulated step: a new vector with one value for each column of the array ``end``.

        The columns are the Monte Carlo draws of the machine's uncertain constants. ValueError for a step without
        actions.
        """
        return np.asarray(self.end.max(axis=0))

    def shares(self) -> dict[str, float]:
        """Return the fractions of all devices' time that the simulated step spends computing, communicating and idle.

        They are those of the Monte Carlo draw whose step time is nearest to the median.

        Returns:
            ``compute``: forward, backward and update; ``communication``: messages while the device does not compute;
            ``idling``: the rest, with the delays of ``--slow``. They sum to 1.
        """
        place = self.median_sample
        total = float(self.seconds[place])
        parts: dict[str, float] = defaultdict(float)
        for busy, sending in self._intervals(place):
            both = _union([*busy, *sending])
            computed = sum(end - start for start, end in _union(busy))
            parts["compute"] += computed
            parts["communication"] += sum(end - start for start, end in both) - computed
        whole = total * self.program.devices
        found = (
            {name: value / whole for name, value in parts.items()} if whole else {"compute": 1.0, "communication": 0.0}
        )
        return {**found, "idling": max(0.0, 1 - sum(found.values()))}

    @property
    def median_sample(self) -> int:
        """Index of the Monte Carlo draw in which the simulated step's seconds are nearest to their median."""
        return int(np.argmin(np.abs(self.seconds - np.median(self.seconds))))

    def delayed(self) -> float:
        """Return the fraction of all devices' time that the simulated step spends in the delays of ``--slow``.

        The option ``--slow`` delays ranks or logical workers on purpose. The fraction is that of the Monte Carlo draw
        whose step time is nearest to the median; 0 for a step that takes no time.
        """
        place = self.median_sample
        spent = sum(float(a.seconds[place]) for a in self.program.actions if a.phase == IDLE)
        whole = float(self.seconds[place]) * self.program.devices
        return spent / whole if whole else 0.0

    def rows(self) -> list[list[TimelineSegment]]:
        """Return the simulated step's timeline in the median Monte Carlo draw.

        Communication is a segment only while the same device does not compute.

        Returns:
            One list for each simulated device: its segments by start time, without overlaps. A ``TimelineSegment`` has
            ``phase`` (such as ``forward`` or ``communication``), ``start`` and ``end`` in seconds from the start of the
            step, and ``call``, the text of its action.
        """
        place, found = self.median_sample, []
        for device in range(self.program.devices):
            computing: list[TimelineSegment] = []
            hidden: list[TimelineSegment] = []
            for number, action in enumerate(self.program.actions):
                start, end = float(self.start[number, place]), float(self.end[number, place])
                if action.device == device and end > start:
                    kept = hidden if action.link else computing
                    kept.append(TimelineSegment(action.phase, start, end, action.text))
            covered = _union([(s.start, s.end) for s in computing])
            exposed = [
                segment._replace(start=low, end=high)
                for segment in hidden
                for low, high in _without((segment.start, segment.end), covered)
            ]
            found.append(sorted([*computing, *exposed], key=lambda segment: segment.start))
        return found

    def _intervals(self, place: int) -> list[tuple[list[tuple[float, float]], list[tuple[float, float]]]]:
        """Return for each device the intervals in which it computes, and those of its messages, in one draw."""
        found: list[tuple[list[tuple[float, float]], list[tuple[float, float]]]]
        found = [([], []) for _ in range(self.program.devices)]
        times = zip(self.start[:, place].tolist(), self.end[:, place].tolist(), strict=True)
        for action, interval in zip(self.program.actions, times, strict=True):
            if action.link or action.phase in (*WORK, UPDATE):
                found[action.device][action.link].append(interval)
        return found


def evaluate_program(program: StepProgram, samples: int) -> StepTimes:
    """Simulate a training step: compute start and end of every action, which is a computation or a message.

    A device has two resources, its compute units and its link, and each resource runs its actions in the order of
    ``program.actions``. An action starts when all actions that it needs, and the action before it on the same resource,
    have ended (max-plus algebra: Baccelli et al. 1992, "Synchronization and Linearity").

    Args:
        program: the simulated step; an action needs only actions that precede it in ``program.actions``.
        samples: number of Monte Carlo draws; ``seconds`` of every action has as many elements.

    Returns:
        A ``StepTimes`` with the arrays ``start`` and ``end``, seconds from the start of the step, both of shape
        (actions, samples). From these it computes the property ``seconds``, the step's duration, shape (samples,), and
        the methods ``shares`` (fractions of time) and ``rows`` (a timeline).

    >>> program = StepProgram()
    >>> first = program.add(StepAction(0, "backward", np.array([2.0, 3.0])))
    >>> sent = program.add(StepAction(0, "communication", np.array([4.0, 1.0]), (first,), link=True))
    >>> _ = program.add(StepAction(0, "backward", np.array([1.0, 1.0])))
    >>> evaluate_program(program, 2).seconds
    array([6., 4.])
    """
    count = len(program.actions)
    start, end = np.zeros((count, samples)), np.zeros((count, samples))
    last: dict[tuple[int, bool], int] = {}
    for place, action in enumerate(program.actions):
        resource = action.device, action.link
        for before in (*action.needs, *([last[resource]] if resource in last else [])):
            np.maximum(start[place], end[before], out=start[place])
        np.add(start[place], action.seconds, out=end[place])
        last[resource] = place
    return StepTimes(program, start, end)


def _union(intervals: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return disjoint intervals that cover the same time, sorted."""
    found: list[tuple[float, float]] = []
    for low, high in sorted(intervals):
        if found and low <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], high)
        else:
            found.append((low, high))
    return found


def _without(interval: tuple[float, float], covered: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the parts of an interval outside of disjoint, sorted intervals."""
    low, high = interval
    found = []
    for begin, end in covered:
        if end <= low or begin >= high:
            continue
        if begin > low:
            found.append((low, begin))
        low = max(low, end)
    return [*found, (low, high)] if low < high else found
