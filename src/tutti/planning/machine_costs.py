"""Seconds of computing, of messages and of updates on a machine, as samples of its uncertain constants.

A machine is measured (``machine.json``) or published (``a100x8``: rows of `published_hardware.json`). Where a constant
is neither measured nor published it is stated by the user, or guessed and named in ``guesses``, or refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from tutti.comm.collective_schedules import Algorithm, LinkCost
from tutti.config.bounds import check_least
from tutti.config.optimizer_config import check_optimizer
from tutti.errors import UsageError, counted
from tutti.planning.hardware_anchor import (
    ONE_SOURCE,
    anchored_rate,
    chip_of,
    matching_anchors,
    shipped_anchors,
    usual_links,
)
from tutti.planning.scaling_laws import DRAWS, Array
from tutti.planning.strategy_work import StrategyWork
from tutti.workload.machine_file import Curve, Machine, peak_name, read_machine
from tutti.workload.workload_file import PassWork

_PUBLISHED = re.compile(r"(.+?)x0*([1-9]\d*)$")
_HOST_HOP, _NODE_HOP = 1e-5, 3e-5
"""Latencies of a message within and between nodes of published hardware, in seconds: guesses."""
_LAUNCH = 5e-6
"""Seconds in which a host launches an operator on an accelerator: a guess."""
_JITTER = 0.02
"""Standard deviation of a rank's seconds of computing over their mean, where it was not measured: a guess."""
_LATENCY_BOUND = 1024
"""Bytes up to which a message takes its latency alone: the shortest message that ``tutti bench links`` measures."""
_SHORT = 1.35
"""Interquartile range over standard deviation of a normal distribution."""


@dataclass(frozen=True)
class Network:
    """A cluster of equal nodes and the links between them.

    Attributes:
        per_node: devices of a node.
        between: cost of a message between nodes over a node's link; None where nothing is known of it.
        messages: measured seconds of messages between nodes over bytes, which say more than the line of ``between``
            where links are shared by both ways; None where the line is all that is known.
        collectives: measured curves of collectives with one rank a node, by ``KIND/NODES``; a ring's law from
            ``between`` for a kind without one.
    """

    per_node: int
    between: LinkCost | None = None
    messages: Curve | None = None
    collectives: Mapping[str, Curve] = field(default_factory=dict)

    def nodes(self, ranks: int) -> int:
        """Return the smallest number of nodes of the cluster that hold ``ranks`` devices."""
        return math.ceil(ranks / self.per_node)

    def spread(self, ranks: int, apart: int) -> tuple[int, int]:
        """Return how the ranks of a collective are placed on the cluster: ranks on one node, and number of nodes.

        Args:
            ranks: number of ranks of the collective.
            apart: stride in devices from one of these ranks to the next.

        Returns:
            A pair: number of the collective's ranks on a full node (at least 1), and number of nodes with ranks of the
            collective, of which the last may have fewer.

        >>> Network(8).spread(4, 2), Network(8).spread(4, 8), Network(8).spread(16, 1)
        ((4, 1), (1, 4), (8, 2))
        """
        here = max(1, min(ranks, self.per_node // apart))
        return here, math.ceil(ranks / here)

    def sharing(self, apart: int, together: int | None = None) -> int:
        """Return how many of several collectives that run at once share the link of one node.

        Args:
            apart: stride in devices from one rank of a collective to the next.
            together: number of these collectives; None: ``apart``.
        """
        return min(apart if together is None else together, self.per_node)


class StepCosts(Protocol):
    """Predicts how long computing, messages and optimizer updates take on a machine.

    Most methods return seconds, an array of shape (256,): one value for each of the ``DRAWS`` Monte Carlo draws of the
    machine's uncertain constants. Nothing is computed or sent on a device. Implemented by ``MeasuredCosts``, from
    ``machine.json`` of ``tutti bench``, and ``PublishedCosts``, from published jobs. A method raises UsageError where
    the machine's data lack what the prediction needs, such as the cost of a link between nodes.

    Attributes:
        name: name of the machine.
        basis: ``measured`` or ``published``.
        network: the machine's nodes and links.
        rests: lines in words on what the durations rest on.
        guesses: lines in words on every number that is guessed, without repetition.
        overlaps: whether collectives run beside computing; on CPUs those of the strategy ``sharded`` block.
    """

    name: str
    basis: str
    network: Network
    rests: list[str]
    guesses: list[str]
    overlaps: bool

    def note(self, text: str) -> None:
        """Append a line to ``guesses``, the list of guessed numbers about the machine, unless it is there already.

        Builders of simulated steps call it wherever a prediction rests on a number that was not measured; reports show
        the list.

        Args:
            text: the line, which names a guessed number.
        """

    def share_node(self, devices: int) -> None:
        """Set the number of devices of the run, on which all durations that are asked for later depend.

        Called before the steps of each number of devices are predicted; a further call replaces the number. On CPUs the
        devices of a node share its threads and memory, so that each computes slower.

        Args:
            devices: number of devices of the run, on all nodes.
        """

    def compute(self, works: Sequence[PassWork], samples: float, *, backward: bool = False) -> Array:
        """Return the seconds of forward or backward work on one device of the machine.

        Args:
            works: one or more passes, such as a backward and its recomputation, whose seconds are added up. Each maps a
                class of operator, such as ``matmul``, to FLOP, bytes and number of calls as functions of the samples.
            samples: number of samples in the micro-batch, for which these functions are evaluated.
            backward: whether the first of ``works`` is a backward, whose operators run at rates of their own.

        Returns:
            Seconds, array of shape (256,): one value for each of the Monte Carlo draws of the machine's uncertain
            constants.

        Raises:
            UsageError: the data on the machine lack a class of operators.
        """

    def strategy_work(self, key: str) -> StrategyWork:
        """Return the seconds of a strategy's Python work on the machine, besides the model's operators and the update.

        Args:
            key: name of the strategy, from ``strategy_key``.

        Returns:
            A ``StrategyWork``: seconds a step, parameter tensor, micro-batch, and tensor or wrapped module of a
            micro-batch; all 0 where nothing is known.
        """

    def update(self, optimizer: str, parameters: float, tensors: int = 1) -> Array:
        """Return the seconds of an optimizer step on one device of the machine.

        Args:
            optimizer: text of ``--optimizer``, such as ``adam:lr=0.001``.
            parameters: number of parameters that the step updates.
            tensors: number of tensors that hold them.

        Returns:
            Seconds, array of shape (256,): one value for each of the Monte Carlo draws of the machine's uncertain
            constants.

        Raises:
            UsageError: the data on the machine lack the optimizer, or there is none of this name.
        """

    def collective(self, kind: str, ranks: int, size: float, apart: int = 1, together: int | None = None) -> Array:
        """Predict the seconds of one collective of the communication backend on this machine; nothing is sent.

        Args:
            kind: ``all_reduce``, ``all_gather``, ``reduce_scatter`` or ``broadcast``.
            ranks: number of ranks that take part; one alone sends nothing, for 0 s.
            size: bytes of the whole tensor: the vector to sum, to scatter or to broadcast, or the gathered result.
            apart: stride in devices from one of these ranks to the next.
            together: number of such collectives that run at once and share the links between nodes; None: ``apart``.

        Returns:
            Seconds, array of shape (256,): one value for each of the Monte Carlo draws of the machine's uncertain
            constants.

        Raises:
            UsageError: the data on the machine lack the collective, or the link between nodes is not known.
        """

    def within(self) -> LinkCost:
        """Return the cost of a transfer within a node of the machine.

        Returns:
            A ``LinkCost``: ``alpha``, seconds of latency of a transfer, and ``beta``, bytes a second: n bytes take
            alpha + n / beta seconds.

        Raises:
            UsageError: the data on the machine lack transfers within a node.
        """

    def transfer(self, size: float, ranks: int, together: int = 1) -> float:
        """Return the expected seconds of one message over the slowest link among a run's devices, without uncertainty.

        Args:
            size: bytes of the message.
            ranks: number of devices of the run; where a node has fewer, the slowest link is between nodes.
            together: devices of a node that send such a message at the same time, over the node's link.

        Raises:
            UsageError: the link is not known.
        """

    def message(self, size: float, ranks: int) -> Array:
        """Return the seconds of one point-to-point message between neighbouring devices.

        Args:
            size: bytes of the message.
            ranks: number of ranks of the run; where a node has fewer devices, the message goes between nodes.

        Returns:
            Seconds, array of shape (256,): one value for each of the Monte Carlo draws of the machine's uncertain
            constants.

        Raises:
            UsageError: the link is not known.
        """

    def slowest(self, ranks: int, seconds: float) -> Array:
        """Return how many times longer the slowest of some ranks computes than a typical rank.

        Args:
            ranks: number of ranks that wait for each other.
            seconds: seconds of computing in a step on a typical rank.

        Returns:
            Ratios of seconds, array of shape (256,), at least 1: one for each of the Monte Carlo draws of the
            machine's uncertain constants.
        """


def schedule_seconds(
    algorithm: Algorithm,
    ranks: int,
    size: float,
    network: LinkCost | Transfer,
    node: LinkCost | None = None,
    per_node: int = 1,
) -> float:
    """Return the seconds of one all-reduce, by the closed form of its algorithm.

    A message takes latency + bytes ÷ bandwidth, and each rank has a network port of its own. For full nodes the result
    equals that of the simulated schedule (``Schedule.seconds``).

    Args:
        algorithm: ``ring``, ``tree``, ``halving``, ``central`` or ``hierarchical``.
        ranks: number of ranks N; 0 s for fewer than 2.
        size: bytes of the vector.
        network: cost of a message between nodes: latency in seconds and bytes a second, or a function that returns the
            seconds of a message from its bytes.
        node: cost of a transfer within a node, for ``hierarchical``; None: as between nodes.
        per_node: ranks of a node, for ``hierarchical``; the number of nodes, N over this, is rounded down.

    >>> round(schedule_seconds("ring", 8, 1e8, LinkCost(2e-5, 1e10)), 6)
    0.01778
    """
    if ranks < 2:
        return 0.0
    over = _line(network) if isinstance(network, LinkCost) else network
    if algorithm != "hierarchical":
        return sum(number * over(share * size) for number, share in _rounds(algorithm, ranks))
    inner, slices = over if node is None else _line(node), min(per_node, ranks)
    nodes = max(1, ranks // slices)
    within = 2 * (slices - 1) * inner(size / slices)
    return within + (2 * (nodes - 1) * over(size / slices / nodes) if nodes > 1 else 0.0)


Transfer = Callable[[float], float]
"""Seconds of a message by its bytes."""


def _line(cost: LinkCost) -> Transfer:
    return lambda size: cost.alpha + size / cost.beta


def _rounds(algorithm: Algorithm, ranks: int) -> list[tuple[int, float]]:
    """Return numbers of rounds, each with the share of the vector that passes the busiest port."""
    levels = (ranks - 1).bit_length()
    if algorithm == "ring":
        return [(2 * (ranks - 1), 1 / ranks)]
    if algorithm == "tree":
        return [(2 * levels, 1.0)]
    if algorithm == "halving":
        power = ranks.bit_length() - 1
        folded = [(2, 1.0)] if 1 << power < ranks else []
        return [*folded, *((2, 0.5**level) for level in range(1, power + 1))]
    return [(2, ranks - 1.0)]


@dataclass
class MeasuredCosts:
    """Predicts how long computing, messages and optimizer updates take on a machine that ``tutti bench`` has measured.

    Args:
        machine: measured curves and figures, the content of the machine's ``machine.json``.
        precision: precision of the run, such as ``bf16``.
        network: nodes of this machine; a link between nodes must be stated, because it was not measured.
        rests: lines in words on what the durations rest on, to which more are added.
        guesses: lines in words on numbers that are guessed, to which more are added.
        basis: ``measured``.
    """

    machine: Machine
    precision: str
    network: Network
    rests: list[str] = field(default_factory=list)
    guesses: list[str] = field(default_factory=list)
    basis: str = "measured"

    def __post_init__(self) -> None:
        host, date = self.machine.host.get("name", "this machine"), self.machine.measured[:10]
        self.name = f"{self.machine.device.get('name', host)}"
        self.rests.append(f"measured on {host}, {date or 'undated'}: {', '.join(self.machine.parts)}")
        self.overlaps = self.machine.device.get("type") != "cpu"
        self._threads, self._memory, self._local = 1.0, 1.0, 1
        self._drawn: dict[str, Array] = {}

    def compute(self, works: Sequence[PassWork], samples: float, *, backward: bool = False) -> Array:
        """Return the seconds of forward or backward work on one device, from the machine's measured curves.

        Operators with FLOP take the longer of computing and of moving their bytes, all others the seconds of their
        bytes; each call adds the seconds of an operation, in training where they were measured.

        Args:
            works: one or more passes, such as a backward and its recomputation, whose seconds are added up. Each maps a
                class of operator, such as ``matmul``, to FLOP, bytes and number of calls as functions of the samples.
            samples: number of samples in the micro-batch, for which these functions are evaluated.
            backward: whether the first of ``works`` is a backward, which has curves of its own for some operators.

        Returns:
            Seconds, array of shape (256,): one value for each of the Monte Carlo draws of the measurement errors.

        Raises:
            UsageError: the machine file has no curve of a class of operators with FLOP in the run's precision, no curve
                of copies, or no seconds of an operator.
        """
        total = np.zeros(DRAWS)
        operation = self._operation()
        for number, work in enumerate(works):
            for kind, each in work.items():
                flop, moved = max(each.flop.at(samples), 0.0), max(each.bytes.at(samples), 0.0)
                calls = max(each.calls.at(samples), 0.0)
                if not calls:
                    continue
                moving, slower = self._here(self._moving_curve(kind if not flop else "copy"), self._memory)
                memory = calls * curve_seconds(self.machine.curve(moving), moved / calls) * slower
                if not flop:
                    total += memory * self._draw(moving) + calls * operation
                    continue
                name, slower = self._here(
                    self._curve_of(kind, each.masked_flop.at(samples) > 0, backward and not number), self._threads
                )
                kernels = calls * curve_seconds(self.machine.curve(name), flop / calls) * slower
                total += np.maximum(kernels * self._draw(name), memory) + calls * operation
        return total

    def _here(self, name: str, slower: float) -> tuple[str, float]:
        """Return the curve that was measured in as many ranks at once and 1; else the given one and its slowdown."""
        together = f"shared/{name.removeprefix('device/')}/{self._local}"
        return (together, 1.0) if together in self.machine.curves else (name, slower)

    def _operation(self) -> float:
        """Return the seconds that each operator adds to those of its kernel."""
        kernel = self.machine.figure("device/operation/seconds").value
        for name in (f"shared/operation/training/{self._local}", "device/operation/training"):
            if name in self.machine.figures:
                # A kernel's curve has the seconds of its call.
                return max(self.machine.figures[name].value - kernel, 0.0)
        return kernel

    def strategy_work(self, key: str) -> StrategyWork:
        """Return the measured seconds of a strategy's Python work; if there are none, add a line to ``guesses``.

        Args:
            key: name of the strategy, from ``strategy_key``.

        Returns:
            A ``StrategyWork``: seconds a step, parameter tensor, micro-batch, and tensor or wrapped module of a
            micro-batch; all 0 where they were not measured, and on accelerators, which compute meanwhile.
        """
        if self.overlaps:
            return StrategyWork()
        found = {
            part.name: self.machine.figures[f"strategy/{key}/{part.name}"].value
            for part in fields(StrategyWork)
            if f"strategy/{key}/{part.name}" in self.machine.figures
        }
        if not found:
            self.note("the Python work of the strategies takes no time: tutti bench strategies measures it")
        return StrategyWork(**found)

    def update(self, optimizer: str, parameters: float, tensors: int = 1) -> Array:
        """Return the seconds of an optimizer step on one device, from its measured curve of seconds over parameters.

        If AdamW, LAMB, LARS, Muon or NovoGrad is asked for and was not measured, the curve of Adam is taken, and a line
        on this is added to the list ``guesses``.

        Args:
            optimizer: text of ``--optimizer``, such as ``adam:lr=0.001``.
            parameters: number of parameters that the step updates.
            tensors: number of tensors that hold them; each but one adds its measured seconds.

        Returns:
            Seconds, array of shape (256,): one value for each of the Monte Carlo draws of the measurement errors.

        Raises:
            UsageError: the machine file has no curve of this optimizer.
        """
        kind = optimizer.partition(":")[0]
        name = f"optimizer/{kind}"
        if name not in self.machine.curves and kind in ("adamw", "lamb", "lars", "muon", "novograd"):
            self.note(f"a step of {kind} takes as long as one of adam")
            name = "optimizer/adam"
        curve, slower = self._here(name, self._memory)
        further = self.machine.figures.get(f"{name}/tensor")
        more = 0.0 if further is None else max(tensors - 1, 0) * further.value
        return curve_seconds(self.machine.curve(curve), parameters) * slower * self._draw(curve) + more

    def collective(self, kind: str, ranks: int, size: float, apart: int = 1, together: int | None = None) -> Array:
        """Return the seconds of a collective, from measured curves within a node and between nodes.

        If a node's curves are of other numbers of ranks, one of them is scaled as a ring's time is. If there is none,
        an all-reduce of at most 1,024 bytes takes the messages of a ring over the measured links, so that pipelines,
        which send messages and agree on the gradient norm, need no measured collective. A broadcast without a curve
        takes as long as an all-gather. Between nodes the curve is one of one rank a node; without such a curve, a
        ring's closed form over the stated link is taken. Lines on all this are added to ``guesses``.

        Args:
            kind: ``all_reduce``, ``all_gather``, ``reduce_scatter`` or ``broadcast``.
            ranks: number of ranks that take part; one alone takes 0 s.
            size: bytes of the whole tensor: the vector to sum, to scatter or to broadcast, or the gathered result.
            apart: stride in devices from one of these ranks to the next.
            together: number of such collectives that run at once and share the links between nodes; None: ``apart``.

        Returns:
            Seconds, array of shape (256,): one value for each of the Monte Carlo draws of the measurement errors.

        Raises:
            UsageError: the machine file has no curve of this collective, or no cost of a message between nodes.
        """
        if ranks < 2:
            return np.zeros(DRAWS)
        here, nodes = self.network.spread(ranks, apart)
        found = np.zeros(DRAWS)
        if here > 1 and kind == "all_reduce" and size <= _LATENCY_BOUND and not self._collective_sizes(kind):
            self.note(
                f"an all-reduce of few bytes over {here} ranks of a node takes {2 * (here - 1)} messages over its "
                "measured links, as a ring does: tutti bench collectives measures it"
            )
            found += 2 * (here - 1) * self.message(size / here, here)
        elif here > 1:
            name, known = self._measured_collective(kind, here)
            whole = _ring_scaled(self.machine.curve(name), size, known, here)
            if known != here:
                # A ring's own law carries the measurement to another number of ranks.
                self.note(
                    f"{kind} over {here} ranks of a node scales from {known} as a ring does ({_steps(kind)} passes)"
                )
            found += whole * self._draw(name)
        if nodes > 1:
            found += self._over_nodes(kind, nodes, size * self.network.sharing(apart, together), ranks * apart)
        return found

    def _over_nodes(self, kind: str, nodes: int, size: float, devices: int) -> float:
        """Return the seconds of a collective with one rank a node, from a measured curve or a ring's law."""
        known = _nodes_of(self.network.collectives, kind)
        if not known:
            between = self._between(devices)
            self.note(f"{kind} between nodes, which was not measured, takes a ring's messages over their link")
            return _ring_seconds(kind, nodes, size, between)
        nearest = min(known, key=lambda count: abs(math.log(count / nodes)))
        if nearest != nodes:
            self.note(f"{kind} over {nodes} nodes scales from {nearest} as a ring does ({_steps(kind)} passes)")
        return _ring_scaled(self.network.collectives[f"{kind}/{nearest}"], size, nearest, nodes)

    def within(self) -> LinkCost:
        """Return the cost of a copy in the memory of a node, from the line fitted to the machine's measured copies.

        Returns:
            A ``LinkCost``: ``alpha``, seconds of latency of a copy, and ``beta``, bytes a second: n bytes take alpha +
            n / beta seconds.

        Raises:
            UsageError: the machine file has no measured copies.
        """
        copy = self.machine.curve("device/copy")
        return LinkCost(copy.fixed, copy.rate)

    def transfer(self, size: float, ranks: int, together: int = 1) -> float:
        """Return the expected seconds of one message over the slowest link among a run's devices, without uncertainty.

        Args:
            size: bytes of the message.
            ranks: number of devices of the run; where a node has fewer, the slowest link is between nodes.
            together: devices of a node that send such a message at the same time, over the node's link; without effect
                on one node.

        Raises:
            UsageError: links were not measured, or the cost of a link between nodes is not stated.
        """
        if self.network.nodes(ranks) == 1:
            return curve_seconds(self.machine.curve(self._link_name()), size)
        cost = self._between(ranks)
        if self.network.messages is not None:
            return curve_seconds(self.network.messages, size * together)
        return cost.alpha + size * together / cost.beta

    def message(self, size: float, ranks: int) -> Array:
        """Return the seconds of a point-to-point message over the slowest link, from its measured curve or stated cost.

        Args:
            size: bytes of the message.
            ranks: number of ranks of the run; where a node has fewer devices, the message goes between nodes.

        Returns:
            Seconds, array of shape (256,): one value for each of the Monte Carlo draws of the measurement errors; all
            equal between nodes.

        Raises:
            UsageError: links were not measured, or the cost of a link between nodes is not stated.
        """
        if self.network.nodes(ranks) > 1:
            return np.full(DRAWS, self.transfer(size, ranks))
        name = self._link_name()
        return curve_seconds(self.machine.curve(name), size) * self._draw(name)

    def slowest(self, ranks: int, seconds: float) -> Array:
        """Return how many times longer the slowest of some ranks computes than a typical rank, from measured jitter.

        Where jitter was not measured, one rank's seconds deviate by 2 %, which ``guesses`` says.

        Args:
            ranks: number of ranks that wait for each other.
            seconds: seconds of computing in a step on a typical rank; jitter over time averages out over longer
                computing.

        Returns:
            Ratios of seconds, array of shape (256,), at least 1: one for each of the Monte Carlo draws; all 1 for one
            rank.

        Raises:
            UsageError: the machine file has jitter, but no curve of matrix products.
        """
        if ranks < 2:
            return np.ones(DRAWS)
        known = sorted(int(name.rpartition("/")[2]) for name in self.machine.figures if name.startswith("jitter/time/"))
        if not known:
            self.note(
                f"stragglers: computing varies by {100 * _JITTER:g} % between ranks, independently and normally; this "
                "machine file has no jitter: tutti bench collectives measures it"
            )
            return slowest_factor(ranks, _JITTER)
        over_time = self.machine.figure(f"jitter/time/{known[-1]}").value
        over_ranks = self.machine.figure(f"jitter/ranks/{known[-1]}").value
        probe = 4 * curve_seconds(self.machine.curve(f"device/matmul/{self._known('fp32')}"), 2.0 * 256**3)
        sigma = math.hypot(over_ranks, over_time * math.sqrt(min(1.0, probe / max(seconds, probe))))
        self.note(
            f"stragglers: computing varies by {sigma:.1%} between ranks, independently and normally, from the jitter "
            "of short products"
        )
        return slowest_factor(ranks, sigma)

    def _link_name(self) -> str:
        names = [name for name in self.machine.curves if name.startswith("links/")]
        if not names:
            raise self._lacks("links", "links")
        return max(names, key=lambda name: curve_seconds(self.machine.curves[name], 2.0**20))

    def _between(self, ranks: int) -> LinkCost:
        if self.network.between is None:
            nodes = self.network.nodes(ranks)
            raise UsageError(
                f"{ranks} devices are on {nodes} nodes, and a link between nodes was never measured",
                where=f"--machine, {counted(self.network.per_node, 'device')} a node",
                remedy="state it: --network alpha=30e-6,beta=1.25e9 (seconds a message, bytes a second); or take at "
                f"most {self.network.per_node} devices",
            )
        return self.network.between

    def _measured_collective(self, kind: str, ranks: int) -> tuple[str, int]:
        known = self._collective_sizes(kind)
        if not known and kind == "broadcast":
            self.note("a broadcast takes as long as an all-gather of as many bytes")
            return self._measured_collective("all_gather", ranks)
        if not known:
            raise self._lacks(f"collectives/{kind}", "collectives")
        nearest = min(known, key=lambda count: abs(math.log(count / ranks)))
        return f"collectives/{kind}/{nearest}", nearest

    def _collective_sizes(self, kind: str) -> list[int]:
        """Return the numbers of ranks with which a kind of collective was measured."""
        prefix = f"collectives/{kind}/"
        return sorted(int(name.removeprefix(prefix)) for name in self.machine.curves if name.startswith(prefix))

    def _curve_of(self, kind: str, causal: bool, backward: bool) -> str:
        """Return the curve of an operator with FLOP; older files have none of causal attention and of backwards."""
        if kind == "recurrent":
            self.note("recurrent layers compute at the rate of matrix products")
            kind = "matmul"
        name = f"device/{kind}/{self.precision}"
        for ending, asked in (("/causal", causal), ("/backward", backward)):
            if asked and f"{name}{ending}" in self.machine.curves:
                name += ending
        return name

    def _known(self, precision: str) -> str:
        return precision if f"device/matmul/{precision}" in self.machine.curves else self.precision

    def share_node(self, devices: int) -> None:
        """Set by how much the devices of one node slow each other's computing down, for all durations asked for later.

        Where the machine file has curves of as many ranks computing at once, those are used. Else durations are
        multiplied by factors, one of matrix products and one of memory traffic: those in an older file, or else those
        of dividing the CPU threads among the ranks, on which a line is added to ``guesses``. A further call replaces
        the setting.

        Args:
            devices: number of devices of the run, on all nodes.
        """
        local = self._local = min(devices, self.network.per_node)
        self._threads, self._memory = 1.0, 1.0
        if f"shared/matmul/{self.precision}/{local}" in self.machine.curves:
            return
        names = [f"shared/{kind}/{local}" for kind in ("matmul", "elementwise")]
        if local > 1 and all(name in self.machine.figures for name in names):
            # Ranks cannot compute faster together than each alone with all threads of the node.
            self._threads, self._memory = (max(1.0, self.machine.figures[name].value) for name in names)
            return
        self._threads = self._thread_factor(local)
        if local > 1 and self.machine.device.get("type") == "cpu":
            self._memory = self._threads
            self.note(f"{local} ranks of a node slow each other down by the division of its threads alone")

    def _moving_curve(self, kind: str) -> str:
        """Return the curve of operators whose seconds depend on their bytes; an older file has copies alone."""
        if kind == "copy":
            return "device/copy"
        name = f"device/{kind}" if kind in ("normalisation", "transcendental") else "device/elementwise"
        if name in self.machine.curves:
            return name
        self.note(
            f"operators without {name} in the machine file take as long as copies: tutti bench device measures it"
        )
        return "device/copy"

    def _thread_factor(self, local: int) -> float:
        """Return by how much computing slows down where so many devices of a node share its threads."""
        measured = self.machine.device.get("threads")
        if measured is None:
            return 1.0
        threads = max(1, int(self.machine.host.get("cores", measured)) // local)
        if threads == measured:
            return 1.0
        names = [peak_name(self.precision, count) for count in (measured, threads)]
        if all(name in self.machine.figures for name in names):
            whole, part = (self.machine.figures[name].value for name in names)
            return max(1.0, whole / part) if threads < measured else whole / part
        self.note(f"computing with {threads} threads takes {measured / threads:g} × as long as with {measured}")
        return float(measured) / threads

    def _draw(self, name: str) -> Array:
        """Return a factor on a curve's seconds: its median's standard error over its points."""
        if name not in self._drawn:
            points = self.machine.curve(name).points
            errors = [1.2533 * p.spread / _SHORT / p.seconds / math.sqrt(p.n) for p in points if p.n and p.seconds]
            sigma = float(np.median(errors)) if errors else 0.0
            seed = sum(map(ord, name))
            self._drawn[name] = np.exp(sigma * np.random.default_rng(seed).standard_normal(DRAWS))
        return self._drawn[name]

    def note(self, text: str) -> None:
        """Append a line to ``guesses``, the list of guessed numbers about the machine, unless it is there already.

        Args:
            text: the line, which names a guessed number.
        """
        if text not in self.guesses:
            self.guesses.append(text)

    def _lacks(self, what: str, part: str) -> UsageError:
        return UsageError(
            f"this machine file has no {what}", where="--machine", remedy=f"measure it: tutti bench {part}"
        )


@dataclass
class PublishedCosts:
    """Predicts how long computing and messages take on hardware that published training jobs ran on.

    One FLOP/s rate, reached by these jobs, holds for all computing; links are guessed.

    Args:
        hardware: name of the chip, as people write it, such as ``A100-80GB``.
        precision: precision of the run, such as ``bf16``.
        network: nodes and links; a stated link between nodes replaces the guess.
        rests: lines in words on what the durations rest on, to which more are added.
        guesses: lines in words on numbers that are guessed, to which more are added.
        basis: ``published``.

    Raises:
        UsageError: no published job ran on this chip in this precision.
    """

    hardware: str
    precision: str
    network: Network
    rests: list[str] = field(default_factory=list)
    guesses: list[str] = field(default_factory=list)
    basis: str = "published"

    def __post_init__(self) -> None:
        rate, sigma, why = anchored_rate(self.hardware, self.precision, shipped_anchors(), without="")
        if why:
            raise UsageError(
                f"the machine '{self.hardware}' cannot be priced: {why}",
                where="--machine",
                remedy="take another --precision, a chip with published rows "
                f"({', '.join(published_chips())}), or a machine.json of tutti bench",
            )
        self.name = f"{self.hardware} × {self.network.per_node} a node"
        self.overlaps = True
        self._rate = rate
        self._factor = np.exp(sigma * np.random.default_rng(0).standard_normal(DRAWS))
        chip, sets = chip_of(self.hardware)[0], sorted({a.set_name for a in shipped_anchors()})
        rows = [a for a in shipped_anchors() if a.chip == chip]
        names = ", ".join(name for name in sets if any(a.set_name == name for a in rows))
        self.rests.append(f"published rows of {chip} in {self.precision}: {rate / 1e12:.3g} TFLOP/s a device ({names})")
        self.guesses.append(
            "all computing runs at the rate that published jobs reach; small models and small batches do not reach it"
        )
        if len(matching_anchors(self.hardware, self.precision, shipped_anchors())) == 1:
            self.note(f"the rate is known from one source; others would differ by {100 * ONE_SOURCE:g} %")

    def share_node(self, devices: int) -> None:
        """Do nothing: accelerators of a node share no threads, so that durations do not depend on their number.

        Args:
            devices: ignored.
        """

    def compute(self, works: Sequence[PassWork], samples: float, *, backward: bool = False) -> Array:
        """Return the seconds of forward or backward work on one device: FLOP ÷ the rate that published jobs reached.

        The seconds are at least the number of operator calls times 5 µs, a guess at the launch of one; bytes are not
        used.

        Args:
            works: one or more passes, such as a backward and its recomputation, whose seconds are added up. Each maps a
                class of operator, such as ``matmul``, to FLOP, bytes and number of calls as functions of the samples.
            samples: number of samples in the micro-batch, for which these functions are evaluated.
            backward: ignored.

        Returns:
            Seconds, array of shape (256,): one value for each of the Monte Carlo draws of the uncertain rate.
        """
        kernels = [each for work in works for each in work.values()]
        flop = sum(max(each.flop.at(samples), 0.0) for each in kernels)
        launching = _LAUNCH * sum(max(each.calls.at(samples), 0.0) for each in kernels)
        self.note(f"launching an operator takes {_LAUNCH * 1e6:g} µs, which computing hides where it takes longer")
        return np.maximum(flop / self._rate * self._factor, launching)

    def strategy_work(self, key: str) -> StrategyWork:
        """Return zeros: the rates of published jobs include the Python work of their frameworks.

        Args:
            key: ignored.
        """
        return StrategyWork()

    def update(self, optimizer: str, parameters: float, tensors: int = 1) -> Array:
        """Return zeros as the seconds of an optimizer step: the rates of published jobs include their updates.

        Args:
            optimizer: text of ``--optimizer``, such as ``adam:lr=0.001``.
            parameters: ignored.
            tensors: ignored.

        Returns:
            Zeros, array of shape (256,), one value for each of the Monte Carlo draws.

        Raises:
            UsageError: there is no such optimizer, or it has no such option.
        """
        check_optimizer(optimizer)
        self.note("updates are in the published rate, whose jobs made them too: 0 s")
        return np.zeros(DRAWS)

    def collective(self, kind: str, ranks: int, size: float, apart: int = 1, together: int | None = None) -> Array:
        """Return the seconds of a collective: the closed form of a ring within a node, plus that of one between nodes.

        Args:
            kind: ``all_reduce``, ``all_gather``, ``reduce_scatter`` or ``broadcast``.
            ranks: number of ranks that take part; one alone takes 0 s.
            size: bytes of the whole tensor: the vector to sum, to scatter or to broadcast, or the gathered result.
            apart: stride in devices from one of these ranks to the next.
            together: number of such collectives that run at once and share the links between nodes; None: ``apart``.

        Returns:
            Seconds, array of shape (256,), one value for each of the Monte Carlo draws; all are equal.
        """
        if ranks < 2:
            return np.zeros(DRAWS)
        here, nodes = self.network.spread(ranks, apart)
        found = _ring_seconds(kind, here, size, self._within())
        if nodes > 1:
            found += _ring_seconds(
                kind, nodes, size * self.network.sharing(apart, together), self._between(self.network.per_node)
            )
        return np.full(DRAWS, found)

    def within(self) -> LinkCost:
        """Return the guessed cost of a transfer within a node; ``guesses`` receives a line on it.

        Returns:
            A ``LinkCost``: ``alpha``, seconds of latency of a transfer, and ``beta``, the chip's usual bytes a second:
            n bytes take alpha + n / beta seconds.
        """
        return self._within()

    def transfer(self, size: float, ranks: int, together: int = 1) -> float:
        """Return the seconds of one message over the slowest link among a run's devices: latency + size ÷ bandwidth.

        Args:
            size: bytes of the message.
            ranks: number of devices of the run; where a node has fewer, the slowest link is between nodes.
            together: devices of a node that send such a message at the same time. These devices share one link between
                nodes if the cost of this link was stated; if the cost is guessed, each device has a link of its own.
        """
        if self.network.nodes(ranks) == 1:
            cost, together = self._within(), 1
        else:
            cost = self._between()
            together = 1 if self.network.between is None else together
        return cost.alpha + size * together / cost.beta

    def message(self, size: float, ranks: int) -> Array:
        """Return the seconds of a point-to-point message: latency + ``size`` ÷ bandwidth of the slowest link.

        Args:
            size: bytes of the message.
            ranks: number of ranks of the run; where a node has fewer devices, the message goes between nodes.

        Returns:
            Seconds, array of shape (256,), one value for each of the Monte Carlo draws; all are equal.
        """
        return np.full(DRAWS, self.transfer(size, ranks))

    def slowest(self, ranks: int, seconds: float) -> Array:
        """Return how many times longer the slowest of some ranks computes than a typical rank, for a spread of 2 %.

        The seconds of one rank are normally distributed with a standard deviation of 2 % of their mean, which is a
        guess.

        Args:
            ranks: number of ranks that wait for each other.
            seconds: ignored, because the deviation is relative.

        Returns:
            Ratios of seconds, array of shape (256,), at least 1: one for each of the Monte Carlo draws; all 1 for one
            rank.
        """
        if ranks < 2:
            return np.ones(DRAWS)
        self.note(f"stragglers: computing varies by {100 * _JITTER:g} % between ranks, independently and normally")
        return slowest_factor(ranks, _JITTER)

    def _within(self) -> LinkCost:
        local, _ = usual_links(self.hardware)
        self.note(f"links within a node: {_HOST_HOP * 1e6:g} µs and {local / 1e9:g} GB/s")
        return LinkCost(_HOST_HOP, local)

    def _between(self, adapters: int = 1) -> LinkCost:
        """Return the link between nodes over which some adapters send together: one message, or a node's ring."""
        if self.network.between is not None:
            return self.network.between
        wire = usual_links(self.hardware)[1]
        self.note(
            f"links between nodes: {_NODE_HOP * 1e6:g} µs and {wire / 1e9:g} GB/s a device; state a node's with "
            "--network alpha=…,beta=…"
        )
        return LinkCost(_NODE_HOP, wire * adapters)

    def note(self, text: str) -> None:
        """Append a line to ``guesses``, the list of guessed numbers about the machine, unless it is there already.

        Args:
            text: the line, which names a guessed number.
        """
        if text not in self.guesses:
            self.guesses.append(text)


def open_machine(text: str, precision: str, per_node: int | None, between: LinkCost | Path | None) -> StepCosts:
    """Make the object that predicts the seconds of computing, messages and updates on a machine or a published chip.

    Args:
        text: path of a ``machine.json`` of ``tutti bench``; or CHIPxN, such as ``a100x8``: a chip and the devices of a
            node.
        precision: precision of the run, such as ``bf16``.
        per_node: devices of a node; None: as many as were measured together, or as ``text`` says.
        between: cost of a message between nodes (latency and bandwidth), or path of a ``machine.json`` that was
            measured with one rank a node; None: unknown, so that a collective over several nodes of a measured machine
            raises UsageError.

    Returns:
        An object whose methods give the seconds of passes, optimizer steps, collectives and messages:
        ``MeasuredCosts`` for a file, ``PublishedCosts`` for a chip.

    Raises:
        UsageError: there is no such file or chip; no published job ran on the chip in this precision; a file has
            another format or version; the file ``between`` has no links; or ``per_node`` is below 1.
    """
    check_least({"--devices-per-node": per_node})
    match = _PUBLISHED.fullmatch(text)
    if match is not None and not Path(text).exists() and chip_of(match[1])[0]:
        link = measured_network(between, 1).between if isinstance(between, Path) else between
        return PublishedCosts(match[1], precision, Network(per_node or int(match[2]), link))
    if not Path(text).exists() and not text.endswith(".json"):
        raise UsageError(
            f"there is no machine '{text}'",
            where="--machine",
            remedy=f"give machine.json of tutti bench, or a chip and devices a node, such as a100x8: "
            f"{', '.join(published_chips())}",
        )
    machine = read_machine(Path(text))
    devices = per_node or _ranks_together(machine)
    if isinstance(between, Path):
        network = measured_network(between, devices)
        costs = MeasuredCosts(machine, precision, network)
        kinds = ", ".join(sorted(network.collectives)) or "none: a ring's law"
        costs.rests.append(f"links between nodes as measured in {between}; collectives over nodes: {kinds}")
        return costs
    costs = MeasuredCosts(machine, precision, Network(devices, between))
    if between is not None:
        costs.rests.append(f"stated link between nodes: {between.alpha * 1e6:g} µs, {between.beta / 1e9:g} GB/s")
    return costs


def _ranks_together(machine: Machine) -> int:
    """Return the largest number of ranks of a node between which collectives or links were measured."""
    parts = [name.split("/") for name in machine.curves]
    counts = [int(ranks) for kind, *_, ranks in parts if kind == "collectives"]
    counts += [int(pair.rpartition("-")[2]) + 1 for kind, pair, *_ in parts if kind == "links"]
    return max(counts, default=1)


def measured_network(path: Path, per_node: int) -> Network:
    """Read the links between the nodes of a cluster, and collectives over them, from a ``machine.json``.

    Args:
        path: file of ``tutti bench links collectives`` whose ranks were on a node each.
        per_node: devices of a node of the cluster; stated, because the file does not say it.

    Returns:
        The network, with ``per_node`` as given; ``between``, latency and bytes a second of the slowest measured link;
        ``messages``, the curve of this link's seconds over bytes; and ``collectives``, measured curves of collectives
        with one rank a node, by ``KIND/NODES`` such as ``all_reduce/4``.

    Raises:
        UsageError: no such file, of another format or version, or without links.
    """
    machine = read_machine(path)
    links = [curve for name, curve in machine.curves.items() if name.startswith("links/")]
    if not links:
        raise UsageError(
            "the file has no links",
            where=f"--network {path}",
            remedy="measure links between ranks on a node each, or state the link: --network alpha=30e-6,beta=1.25e9",
        )
    slowest = max(links, key=lambda curve: curve_seconds(curve, 2.0**20))
    prefix = "collectives/"
    over = {name.removeprefix(prefix): curve for name, curve in machine.curves.items() if name.startswith(prefix)}
    return Network(per_node, LinkCost(slowest.fixed, slowest.rate), slowest, over)


def published_chips() -> list[str]:
    """Return the names of the chips, such as ``A100``, whose training speed is known from published jobs, sorted."""
    return sorted({anchor.chip for anchor in shipped_anchors()})


def curve_seconds(curve: Curve, size: float) -> float:
    """Return the seconds of a call of a given size, by interpolation in a measured curve of seconds over size.

    Between points the logarithms are interpolated; a smaller size takes the seconds of the first point, a larger one
    the rate (size a second) of the last. A curve without points is its fitted line.

    Args:
        curve: measured points of seconds over size, and a line fitted to them.
        size: work or bytes of one call, in the curve's unit.
    """
    if not curve.points:
        return curve.seconds(size)
    sizes = [point.size for point in curve.points]
    seconds = [point.seconds for point in curve.points]
    if size <= sizes[0]:
        return seconds[0]
    if size >= sizes[-1]:
        return seconds[-1] * size / sizes[-1]
    return float(np.exp(np.interp(np.log(size), np.log(sizes), np.log(seconds))))


def slowest_factor(ranks: int, sigma: float) -> Array:
    """Return 256 random draws of the ratio by which the slowest of N ranks takes longer than the typical one.

    A draw is 1 + σ·z, but at least 1, where z is the largest of N standard normal numbers, with the distribution
    function Φ(z)^N. All calls transform the same 256 uniform numbers (``DRAWS`` of them, from a fixed seed), so that
    equal arguments give equal ratios, and element i of every result comes from the same uniform number.

    Args:
        ranks: N, at least 1.
        sigma: σ, standard deviation of one rank's seconds over their mean; 0 or more.

    Returns:
        Ratios of seconds, a new array of shape (256,), each at least 1.

    >>> bool(slowest_factor(2, 0.1).mean() < slowest_factor(1024, 0.1).mean() < 1.4)
    True
    """
    return np.asarray(np.maximum(1.0, 1 + sigma * _largest_normal(ranks)))


@lru_cache(maxsize=64)
def _largest_normal(ranks: int) -> Array:
    from scipy.special import ndtri

    uniform = np.random.default_rng(1).random(DRAWS)
    return np.asarray(ndtri(uniform ** (1 / ranks)))


def median_draw(draws: Array) -> float:
    """Return the median of one-dimensional draws, as ``numpy.median`` does, in a fifth of its time.

    Args:
        draws: (n,) draws of a quantity, n at least 1; the median is in its unit.

    >>> median_draw(np.array([4.0, 1.0, 3.0, 2.0])), median_draw(np.array([3.0, 1.0, 2.0]))
    (2.5, 2.0)
    """
    ordered = np.sort(draws)
    half = len(ordered) // 2
    return float(ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2)


def _nodes_of(curves: Mapping[str, Curve], kind: str) -> list[int]:
    """Return the numbers of nodes with which a kind of collective was measured."""
    return sorted(int(name.rpartition("/")[2]) for name in curves if name.startswith(f"{kind}/"))


def _ring_scaled(curve: Curve, size: float, known: int, ranks: int) -> float:
    """Return the seconds of a collective over a number of ranks, from those of a known number, as a ring's grow."""
    whole = curve_seconds(curve, size)
    if known == ranks:
        return whole
    fixed = curve_seconds(curve, 1.0)
    moved = max(whole - fixed, 0.0) * ((ranks - 1) / ranks) / ((known - 1) / known)
    return fixed * (ranks - 1) / (known - 1) + moved


def _steps(kind: str) -> int:
    return 2 if kind == "all_reduce" else 1


def _ring_seconds(kind: str, ranks: int, size: float, cost: LinkCost) -> float:
    return _steps(kind) * (ranks - 1) * (cost.alpha + size / ranks / cost.beta)


def costs_json(costs: StepCosts) -> dict[str, Any]:
    """Return name, basis, sources and guesses of a machine's predicted durations as a JSON object, for reports.

    Args:
        costs: the object that predicts the durations, from ``open_machine``.

    Returns:
        A new dict with the keys ``machine`` (name), ``basis`` (``measured`` or ``published``), and the lists of lines
        ``rests_on`` and ``guesses``, which are those of ``costs`` itself and not copies: later guesses appear in them.
    """
    return {"machine": costs.name, "basis": costs.basis, "rests_on": costs.rests, "guesses": costs.guesses}
