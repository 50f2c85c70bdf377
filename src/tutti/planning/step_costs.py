"""Protocol of a machine's costs: seconds of computing, messages and updates, as draws of its uncertain constants.

A machine is measured (``machine.json``) or published (``a100x8``: rows of `published_hardware.json`). Where a constant
is neither measured nor published it is stated by the user, or guessed and named in ``guesses``, or refused.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

from tutti.comm.collective_schedules import LinkCost
from tutti.planning.cluster_network import Network
from tutti.planning.scaling_laws import Array
from tutti.planning.strategy_work import StrategyWork
from tutti.workload.workload_file import PassWork


class StepCosts(Protocol):
    """Predicts the seconds of computing, messages and optimizer updates on a machine (protocol).

    Most methods return seconds, an array of shape (256,): one value for each of the ``DRAWS`` Monte Carlo draws of the
    machine's uncertain constants. Nothing is computed or sent on a device. Subclasses are ``MeasuredCosts``, from
    ``machine.json`` of ``tutti bench``, and ``PublishedCosts``, from published jobs. A method raises UsageError where
    the machine's data lack what the prediction needs, such as the cost of a link between nodes.

    Attributes:
        name: name of the machine.
        basis: ``measured`` or ``published``.
        network: the machine's nodes and links.
        rests: sources of the durations, one line of text each.
        guesses: guessed numbers, one line of text each, without repetition.
        overlaps: whether collectives of the strategy ``sharded`` run beside computing; on CPUs they block.
    """

    name: str
    basis: str
    network: Network
    rests: list[str]
    guesses: list[str]
    overlaps: bool

    def note(self, text: str) -> None:
        """Append a line to ``guesses``, the list of guessed numbers about the machine, unless the list has it.

        Builders of simulated steps call it wherever a prediction rests on a number that was not measured; reports show
        the list.

        Args:
            text: the line, which names a guessed number.
        """
        if text not in self.guesses:
            self.guesses.append(text)

    def share_node(self, devices: int) -> None:
        """Set the number of devices of the run, on which all durations that are asked for later depend.

        Called before the steps of each number of devices are predicted; a further call replaces the number. On CPUs the
        devices of a node share its threads and memory, so that each computes slower.

        Args:
            devices: number of devices of the run, on all nodes.
        """

    def compute(
        self, works: Sequence[PassWork], samples: float, *, backward: bool = False, resident: float = math.inf
    ) -> Array:
        """Return the seconds of forward or backward work on one device of the machine.

        Args:
            works: one or more passes, such as a backward and its recomputation, whose seconds are added up. Each maps a
                class of operator, such as ``matmul``, to FLOP, bytes and number of calls as functions of the samples.
            samples: number of samples in the micro-batch, for which these functions are evaluated.
            backward: whether the first of ``works`` is a backward, whose operators run at rates of their own.
            resident: bytes that the step touches between two uses of a tensor, such as activations, parameters and
                gradients; if they fit into a CPU's cache, a tensor is still there at its next use.

        Returns:
            Seconds, array of shape (256,): one value for each of the Monte Carlo draws of the machine's uncertain
            constants.

        Raises:
            UsageError: the data on the machine lack a class of operators.
        """

    def strategy_work(self, key: str) -> StrategyWork:
        """Return the seconds of a strategy's Python work on the machine, besides the model's operators and the update.

        Args:
            key: name of the strategy as ``strategy_key`` returns it, such as ``sharded-3``.

        Returns:
            A ``StrategyWork``: ``step``, seconds of a step; ``tensor``, additional seconds of a step for each parameter
            tensor; ``micro_batch``, seconds of a micro-batch; and ``unit``, additional seconds of a micro-batch for
            each parameter tensor, with FSDP for each wrapped module. All are 0 where they were not measured.
        """

    def update(self, optimizer: str, parameters: float, tensors: int = 1) -> Array:
        """Return the seconds of an optimizer step on one device of the machine.

        Args:
            optimizer: name of the optimizer, such as ``adam``.
            parameters: number of parameters that the step updates.
            tensors: number of tensors that hold the parameters.

        Returns:
            Seconds, array of shape (256,): one value for each of the Monte Carlo draws of the machine's uncertain
            constants.

        Raises:
            UsageError: the data on the machine lack the optimizer.
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
            UsageError: the data on the machine lack the collective, or the cost of the link between nodes.
        """

    def within(self) -> LinkCost:
        """Return the cost of a transfer within a node of the machine.

        Returns:
            A ``LinkCost``: ``alpha``, seconds of latency of a transfer, and ``beta``, bytes a second: n bytes take
            alpha + n / beta seconds.

        Raises:
            UsageError: the data on the machine lack transfers within a node.
        """

    def transfer(self, size: float, ranks: int, together: int = 1, ways: int = 2) -> float:
        """Return the expected seconds of one message over the slowest link among a run's devices, without uncertainty.

        Args:
            size: bytes of the message.
            ranks: number of devices of the run; where a node has fewer, the slowest link is between nodes.
            together: devices of a node that send such a message at the same time, over the node's link.
            ways: 2 where each of two ranks sends to the other at once, 1 where one sends and the other receives.

        Raises:
            UsageError: the cost of the link is neither measured nor stated.
        """

    def message(self, size: float, ranks: int) -> Array:
        """Return the seconds of one point-to-point message between neighbouring devices, of which one sends.

        Args:
            size: bytes of the message.
            ranks: number of ranks of the run; where a node has fewer devices, the message goes between nodes.

        Returns:
            Seconds, array of shape (256,): one value for each of the Monte Carlo draws of the machine's uncertain
            constants.

        Raises:
            UsageError: the cost of the link is neither measured nor stated.
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


def costs_json(costs: StepCosts) -> dict[str, Any]:
    """Return name, basis, sources and guesses of a machine's predicted durations as a JSON object, for reports.

    Args:
        costs: the object that predicts the durations, from ``open_machine``.

    Returns:
        A new dict with the keys ``machine`` (name), ``basis`` (``measured`` or ``published``), and the lists of lines
        ``rests_on`` and ``guesses``, which are those of ``costs`` itself and not copies: later guesses appear in them.
    """
    return {"machine": costs.name, "basis": costs.basis, "rests_on": costs.rests, "guesses": costs.guesses}
