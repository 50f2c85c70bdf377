"""Costs of hardware that published training jobs ran on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tutti.comm.collective_schedules import LinkCost
from tutti.errors import UsageError
from tutti.planning.cluster_network import Network
from tutti.planning.collective_laws import ring_passes
from tutti.planning.hardware_anchor import (
    ONE_SOURCE,
    anchored_rate,
    chip_of,
    data_sheet,
    kindred_rate,
    matching_anchors,
    shipped_anchors,
    usual_links,
)
from tutti.planning.monte_carlo import DRAWS, GUESSED_JITTER, slowest_factor
from tutti.planning.scaling_laws import Array
from tutti.planning.step_costs import StepCosts
from tutti.planning.strategy_work import StrategyWork
from tutti.workload.workload_file import PassWork

_HOST_HOP, _NODE_HOP = 5e-6, 1.5e-5
"""Latencies of a message within and between nodes of published hardware, in seconds: that of published all-reduces over
eight A100 of a node, and a guess by which a ring over eight such nodes has the hops fitted to published jobs."""
_LAUNCH = 5e-6
"""Seconds in which a host launches an operator on an accelerator: a guess."""


@dataclass
class PublishedCosts(StepCosts):
    """Predicts the seconds of computing and messages on hardware, from the speed of published training jobs.

    All computing has one rate in FLOP/s, which these jobs reached; links are guessed. For a chip without such jobs the
    rate is its peak times the utilisation that jobs on other chips reached.

    Args:
        hardware: name of the chip, as people write it, such as ``A100-80GB``.
        precision: precision of the run, such as ``bf16``.
        network: nodes and links; a stated link between nodes replaces the guess.
        rests: sources of the durations, one line of text each; this object adds further lines.
        guesses: guessed numbers, one line of text each; this object adds further lines.
        basis: kind of the machine's data; always ``published``.

    Raises:
        UsageError: the chip's data sheet has no peak in this precision, or no published job ran in it on any chip.
    """

    hardware: str
    precision: str
    network: Network
    rests: list[str] = field(default_factory=list)
    guesses: list[str] = field(default_factory=list)
    basis: str = "published"

    def __post_init__(self) -> None:
        chip, rows = chip_of(self.hardware)[0], shipped_anchors()
        rate, sigma, lacking = anchored_rate(self.hardware, self.precision, rows, without="")
        own = not lacking
        if lacking:
            rate, sigma, lacking = kindred_rate(self.hardware, self.precision, rows, without="")
        if lacking:
            known = [name for name in ("bf16", "fp16", "fp32") if not kindred_rate(self.hardware, name, rows, "")[2]]
            raise UsageError(
                f"the machine '{self.hardware}' cannot be priced: {lacking}",
                where="--machine",
                remedy=f"take --precision {' or '.join(known) or 'fp32'}, another chip with published rows "
                f"({', '.join(published_chips())}), or a machine.json of tutti bench",
            )
        self.name = f"{self.hardware} × {self.network.per_node} a node"
        self.overlaps = True
        self._rate = rate
        self._factor = np.exp(sigma * np.random.default_rng(0).standard_normal(DRAWS))
        reached = f"{rate / 1e12:.3g} TFLOP/s a device"
        if own:
            near = matching_anchors(self.hardware, self.precision, rows)
            names = ", ".join(sorted({each.set_name for each in near}))
            self.rests.append(f"published rows of {chip} in {self.precision}: {reached} ({names})")
        else:
            near = []
            self.rests.append(
                f"no published row of {chip} in {self.precision}: {reached}, the part of the peak that jobs on other "
                f"chips reached, times or over {np.exp(sigma):.2f} ({data_sheet(chip)})"
            )
        self.guesses.append(
            "all computing runs at the rate that published jobs reach; small models and small batches do not reach it"
        )
        if len(near) == 1:
            self.note(f"the rate is known from one source; others would differ by {100 * ONE_SOURCE:g} %")

    def share_node(self, devices: int) -> None:
        """Do nothing: accelerators share no threads, so that durations do not depend on the number of devices.

        Args:
            devices: ignored; number of devices of the run.
        """

    def compute(
        self, works: Sequence[PassWork], samples: float, *, backward: bool = False, resident: float = math.inf
    ) -> Array:
        """Return the seconds of forward or backward work on one device: FLOP ÷ the rate that published jobs reached.

        The seconds are at least 5 µs for each operator call, a guess at the time of its launch; bytes are not used.

        Args:
            works: one or more passes, such as a backward and its recomputation, whose seconds are added up. Each maps a
                class of operator, such as ``matmul``, to FLOP, bytes and number of calls as functions of the samples.
            samples: number of samples in the micro-batch, for which these functions are evaluated.
            backward, resident: ignored.

        Returns:
            Seconds, array of shape (256,): one value for each of the Monte Carlo draws of the uncertain rate.
        """
        kernels = [each for work in works for each in work.values()]
        flop = sum(max(each.flop.at(samples), 0.0) for each in kernels)
        launching = _LAUNCH * sum(max(each.calls.at(samples), 0.0) for each in kernels)
        self.note(f"launching an operator takes {_LAUNCH * 1e6:g} µs, which computing hides where it takes longer")
        return np.maximum(flop / self._rate * self._factor, launching)

    def strategy_work(self, key: str) -> StrategyWork:
        """Return zeros as the seconds of a strategy's Python work: the rates of published jobs include such work.

        Args:
            key: ignored; name of the strategy.

        Returns:
            A ``StrategyWork`` whose four numbers of seconds are 0.
        """
        return StrategyWork()

    def update(self, optimizer: str, parameters: float, tensors: int = 1) -> Array:
        """Return zeros as the seconds of an optimizer step: the rates of published jobs include their updates.

        Args:
            optimizer: ignored.
            parameters: ignored.
            tensors: ignored.

        Returns:
            Zeros, array of shape (256,), one value for each of the Monte Carlo draws.
        """
        self.note("updates are in the published rate, whose jobs made them too: 0 s")
        return np.zeros(DRAWS)

    def collective(self, kind: str, ranks: int, size: float, apart: int = 1, together: int | None = None) -> Array:
        """Return the seconds of a collective by the closed form of one ring over all ranks.

        The slower of the links within nodes and the link between nodes sets the rate of the bytes; the latencies of
        both add up.

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
        within = self.within()
        latency, slowest = (here - 1) * within.alpha, (here - 1) / here / within.beta
        if nodes > 1:
            between = self._between(self.network.per_node)
            latency += (nodes - 1) * between.alpha
            slowest = max(slowest, (nodes - 1) / nodes * self.network.sharing(apart, together) / between.beta)
        return np.full(DRAWS, ring_passes(kind) * (latency + size * slowest))

    def within(self) -> LinkCost:
        """Return the guessed cost of a transfer within a node; a line on it is added to the list ``guesses``.

        Returns:
            A ``LinkCost``: ``alpha``, seconds of latency of a transfer, and ``beta``, the chip's usual bytes a second:
            n bytes take alpha + n / beta seconds.
        """
        local, _ = usual_links(self.hardware)
        self.note(f"links within a node: {_HOST_HOP * 1e6:g} µs and {local / 1e9:g} GB/s")
        return LinkCost(_HOST_HOP, local)

    def transfer(self, size: float, ranks: int, together: int = 1, ways: int = 2) -> float:
        """Return the seconds of one message over the slowest link among a run's devices: latency + size ÷ bandwidth.

        Args:
            size: bytes of the message.
            ranks: number of devices of the run; where a node has fewer, the slowest link is between nodes.
            together: devices of a node that send such a message at the same time. These devices share one link between
                nodes if the cost of this link was stated; if the cost is guessed, each device has a link of its own.
            ways: ignored: links of accelerators carry both ways at once.
        """
        del ways
        if self.network.nodes(ranks) == 1:
            cost, together = self.within(), 1
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
        self.note(
            f"stragglers: computing varies by {100 * GUESSED_JITTER:g} % between ranks, independently and normally"
        )
        return slowest_factor(ranks, GUESSED_JITTER)

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


def published_chips() -> list[str]:
    """Return the names of the chips, such as ``A100``, whose training speed is known from published jobs, sorted."""
    return sorted({anchor.chip for anchor in shipped_anchors()})
