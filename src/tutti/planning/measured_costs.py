"""Costs of a machine that ``tutti bench`` has measured."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

import numpy as np

from tutti.comm.collective_schedules import LinkCost
from tutti.errors import UsageError, counted
from tutti.planning.cluster_network import Network
from tutti.planning.collective_laws import ring_passes, ring_seconds
from tutti.planning.measured_curves import curve_seconds, kernel_seconds, ring_scaled_seconds
from tutti.planning.monte_carlo import DRAWS, GUESSED_JITTER, slowest_factor
from tutti.planning.scaling_laws import Array
from tutti.planning.step_costs import StepCosts
from tutti.planning.strategy_work import StrategyWork
from tutti.workload.machine_file import Curve, Machine, peak_name
from tutti.workload.workload_file import PassWork

_LATENCY_BOUND = 1024
"""Bytes up to which a message takes its latency alone: the shortest message that ``tutti bench links`` measures."""
_IQR_RATIO = 1.35
"""Interquartile range over standard deviation of a normal distribution."""


@dataclass
class MeasuredCosts(StepCosts):
    """Predicts the seconds of computing, messages and updates on a machine from the measurements of ``tutti bench``.

    Args:
        machine: measured curves and figures, the content of the machine's ``machine.json``.
        precision: precision of the run, such as ``bf16``.
        network: nodes of this machine; a link between nodes must be stated, because it was not measured.
        rests: sources of the durations, one line of text each; this object adds further lines.
        guesses: guessed numbers, one line of text each; this object adds further lines.
        basis: kind of the machine's data; always ``measured``.
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

    def compute(
        self, works: Sequence[PassWork], samples: float, *, backward: bool = False, resident: float = math.inf
    ) -> Array:
        """Return the seconds of forward or backward work on one device, from the machine's measured curves.

        Operators with FLOP take the longer of computing and of moving their bytes, all others the seconds of their
        bytes. Each call adds the fixed seconds of an operation, as measured in training or, without such a measurement,
        alone. Bytes take the seconds of the operator's measured curve, or less if ``resident`` fits into a CPU's cache:
        the rate is then that of a tensor of ``resident`` bytes which is used again at once.

        Args:
            works: one or more passes, such as a backward and its recomputation, whose seconds are added up. Each maps a
                class of operator, such as ``matmul``, to FLOP, bytes and number of calls as functions of the samples.
            samples: number of samples in the micro-batch, for which these functions are evaluated.
            backward: whether the first of ``works`` is a backward, which has curves of its own for some operators.
            resident: bytes that the step touches between two uses of a tensor, such as activations, parameters and
                gradients; if they fit into a CPU's cache, a tensor is still there at its next use.

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
                memory = calls * self._moved_seconds(moving, moved / calls, resident) * slower
                if not flop:
                    total += memory * self._draw(moving) + calls * operation
                    continue
                name, slower = self._here(
                    self._curve_of(kind, each.masked_flop.at(samples) > 0, backward and not number), self._threads
                )
                kernels = calls * kernel_seconds(self.machine.curve(name), flop / calls, self._kernel()) * slower
                total += np.maximum(kernels * self._draw(name), memory) + calls * operation
        return total

    def _here(self, name: str, slower: float) -> tuple[str, float]:
        """Return the curve that was measured in as many ranks at once and 1; else the given one and its slowdown."""
        together = f"shared/{name.removeprefix('device/')}/{self._local}"
        return (together, 1.0) if together in self.machine.curves else (name, slower)

    def _moved_seconds(self, name: str, size: float, resident: float) -> float:
        """Return the seconds of an operator that moves so many bytes, of a step that touches ``resident`` bytes."""
        beyond = kernel_seconds(self.machine.curve(name), size, self._kernel())
        kind, _, ranks = name.partition("/")[2].partition("/")
        reused = f"{name}/reused" if not name.startswith("shared/") else f"shared/{kind}/reused/{ranks}"
        if reused not in self.machine.curves or resident == math.inf:
            return beyond
        curve = self.machine.curves[reused]
        rate = max(resident, size) / curve_seconds(curve, max(resident, size))
        return min(beyond, max(kernel_seconds(curve, size, self._kernel()), size / rate))

    def _kernel(self) -> float:
        """Return the seconds of a call of an operator on next to no data."""
        return self.machine.figure("device/operation/seconds").value

    def _operation(self) -> float:
        """Return the seconds that each operator adds to those of its kernel."""
        kernel = self._kernel()
        for name in (f"shared/operation/training/{self._local}", "device/operation/training"):
            if name in self.machine.figures:
                # A kernel's curve has the seconds of its call.
                return max(self.machine.figures[name].value - kernel, 0.0)
        return kernel

    def strategy_work(self, key: str) -> StrategyWork:
        """Return the seconds that the Python code of a strategy takes, as ``tutti bench strategies`` measured them.

        If none were measured, a line on this is added to the list ``guesses``.

        Args:
            key: name of the strategy as ``strategy_key`` returns it, such as ``sharded-3``.

        Returns:
            A ``StrategyWork``: ``step``, seconds of a step; ``tensor``, additional seconds of a step for each parameter
            tensor; ``micro_batch``, seconds of a micro-batch; and ``unit``, additional seconds of a micro-batch for
            each parameter tensor, with FSDP for each wrapped module. All are 0 where they were not measured, and on
            accelerators, which compute meanwhile.
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

        If the optimizer was not measured, the curve of Adam is taken, and a line on this is added to the list
        ``guesses``.

        Args:
            optimizer: name of the optimizer, such as ``adam``.
            parameters: number of parameters that the step updates.
            tensors: number of tensors that hold the parameters; each tensor after the first adds its measured seconds.

        Returns:
            Seconds, array of shape (256,): one value for each of the Monte Carlo draws of the measurement errors.

        Raises:
            UsageError: the machine file has no curve of this optimizer, and none of Adam.
        """
        name = f"optimizer/{optimizer}"
        if name not in self.machine.curves and "optimizer/adam" in self.machine.curves:
            self.note(f"a step of {optimizer} takes as long as one of adam")
            name = "optimizer/adam"
        curve, slower = self._here(name, self._memory)
        further = self.machine.figures.get(f"{name}/tensor")
        more = 0.0 if further is None else max(tensors - 1, 0) * further.value
        return curve_seconds(self.machine.curve(curve), parameters) * slower * self._draw(curve) + more

    def collective(self, kind: str, ranks: int, size: float, apart: int = 1, together: int | None = None) -> Array:
        """Return the seconds of a collective, from measured curves within a node and between nodes.

        Within a node, a curve of another number of ranks is scaled as the time of a ring, and a broadcast without a
        curve takes as long as an all-gather. Without any curve, an all-reduce of at most 1,024 bytes takes the seconds
        of a ring's messages over the measured links, so that pipelines, which send messages and agree on the gradient
        norm, need no measured collective. Between nodes, the seconds are those of the curve measured with one rank a
        node, or of a ring's closed form over the stated link. Each such replacement adds a line to ``guesses``.

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
            name = self._link_name(2)
            each = curve_seconds(self.machine.curve(name), size / here) * self._draw(name)
            found += 2 * (here - 1) * each
        elif here > 1:
            name, known = self._measured_collective(kind, here)
            whole = ring_scaled_seconds(self.machine.curve(name), size, known, here)
            if known != here:
                # A ring's own law carries the measurement to another number of ranks.
                self.note(
                    f"{kind} over {here} ranks of a node scales from {known} as a ring does "
                    f"({ring_passes(kind)} passes)"
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
            return ring_seconds(kind, nodes, size, between)
        nearest = min(known, key=lambda count: abs(math.log(count / nodes)))
        if nearest != nodes:
            self.note(f"{kind} over {nodes} nodes scales from {nearest} as a ring does ({ring_passes(kind)} passes)")
        return ring_scaled_seconds(self.network.collectives[f"{kind}/{nearest}"], size, nearest, nodes)

    def within(self) -> LinkCost:
        """Return the cost of a copy in the memory of a node, from the line fitted to the machine's measured copies.

        Returns:
            A ``LinkCost``: ``alpha``, seconds of latency of a copy, and ``beta``, bytes a second: a tensor of n bytes
            takes alpha + n / beta seconds.

        Raises:
            UsageError: the machine file has no measured copies.
        """
        copy = self.machine.curve("device/copy")
        # The curve is over the bytes that a copy reads and writes.
        return LinkCost(copy.fixed, copy.rate / 2)

    def transfer(self, size: float, ranks: int, together: int = 1, ways: int = 2) -> float:
        """Return the expected seconds of one message over the slowest link among a run's devices, without uncertainty.

        Args:
            size: bytes of the message.
            ranks: number of devices of the run; where a node has fewer, the slowest link is between nodes.
            together: devices of a node that send such a message at the same time, over the node's link; without effect
                on one node.
            ways: 2 where each of two ranks sends to the other at once, 1 where one sends and the other receives.

        Raises:
            UsageError: links were not measured, or the cost of a link between nodes is not stated.
        """
        if self.network.nodes(ranks) == 1:
            return curve_seconds(self.machine.curve(self._link_name(ways)), size)
        cost = self._between(ranks)
        if self.network.messages is not None:
            return curve_seconds(self.network.messages, size * together)
        return cost.alpha + size * together / cost.beta

    def message(self, size: float, ranks: int) -> Array:
        """Return the seconds of a point-to-point message over the slowest link, from its measured curve or stated cost.

        One rank sends and the other receives. If the machine file has only messages both ways at once (an older file),
        the seconds are theirs.

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
        name = self._link_name(1)
        return curve_seconds(self.machine.curve(name), size) * self._draw(name)

    def slowest(self, ranks: int, seconds: float) -> Array:
        """Return how many times longer the slowest of some ranks computes than a typical rank, from measured jitter.

        One rank's seconds are normally distributed around the typical seconds, independently of other ranks. Where
        jitter was not measured, their standard deviation is 2 %. A line on the deviation is added to the list
        ``guesses``.

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
                f"stragglers: computing varies by {100 * GUESSED_JITTER:g} % between ranks, independently and "
                "normally; this machine file has no jitter: tutti bench collectives measures it"
            )
            return slowest_factor(ranks, GUESSED_JITTER)
        over_time = self.machine.figure(f"jitter/time/{known[-1]}").value
        over_ranks = self.machine.figure(f"jitter/ranks/{known[-1]}").value
        probe = 4 * curve_seconds(self.machine.curve(f"device/matmul/{self._known('fp32')}"), 2.0 * 256**3)
        sigma = math.hypot(over_ranks, over_time * math.sqrt(min(1.0, probe / max(seconds, probe))))
        self.note(
            f"stragglers: computing varies independently and normally by {over_ranks:.1%} between ranks and by "
            f"{over_time:.1%} over time (measured over {1e3 * probe:.2g} ms; longer computing varies less)"
        )
        return slowest_factor(ranks, sigma)

    def _link_name(self, ways: int) -> str:
        """Return the curve of the slowest measured link, of messages in one or both ways at once."""
        both = [name for name in self.machine.curves if name.startswith("links/")]
        names = [name for name in self.machine.curves if ways == 1 and name.startswith("one_way/")] or both
        if not names:
            raise self._lacks("links", "links")
        return max(names, key=lambda name: curve_seconds(self.machine.curves[name], 2.0**20))

    def _between(self, ranks: int) -> LinkCost:
        if self.network.between is None:
            nodes = self.network.nodes(ranks)
            raise UsageError(
                f"{ranks} devices are on {nodes} nodes, and a link between nodes was never measured",
                where=f"--machine, {counted(self.network.per_node, 'device')} a node",
                remedy="state the link: --network alpha=30e-6,beta=1.25e9 (seconds a message, bytes a second); or take "
                f"at most {self.network.per_node} devices",
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
        """Set the number of devices of the run; devices on one node slow each other's computing down.

        All later durations depend on the number, which a further call replaces. The slowdown comes from the machine
        file: from curves that were measured with as many ranks computing on one node, or in older files from two
        factors on durations, one for matrix products and one for memory traffic. Without either, accelerators are not
        slowed down. On CPUs one factor then serves both: the loss of speed with a rank's share of the node's threads,
        by measured peaks of that many threads if the file has them; a line on this is added to the list ``guesses``.

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
            errors = [1.2533 * p.spread / _IQR_RATIO / p.seconds / math.sqrt(p.n) for p in points if p.n and p.seconds]
            sigma = float(np.median(errors)) if errors else 0.0
            seed = sum(map(ord, name))
            self._drawn[name] = np.exp(sigma * np.random.default_rng(seed).standard_normal(DRAWS))
        return self._drawn[name]

    def _lacks(self, what: str, part: str) -> UsageError:
        return UsageError(
            f"this machine file has no {what}", where="--machine", remedy=f"measure it: tutti bench {part}"
        )


def _nodes_of(curves: Mapping[str, Curve], kind: str) -> list[int]:
    """Return the numbers of nodes with which a kind of collective was measured."""
    return sorted(int(name.rpartition("/")[2]) for name in curves if name.startswith(f"{kind}/"))
