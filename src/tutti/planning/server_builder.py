"""Build the programs of central storage and of parameter servers, whose sums and updates are made in host memory.

A server, and the memory of a node, are shared resources: what they do for all data ranks follows in turn. The program
of one rank therefore has the seconds of all ranks' requests, and its number of actions does not grow with their number.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import nn

from tutti.comm.collective_schedules import LinkTraffic
from tutti.comm.partition import owners
from tutti.config.optimizer_config import OptimizerChoice
from tutti.config.sync_config import ParameterServerConfig
from tutti.errors import UsageError, counted
from tutti.optim.factory import from_config
from tutti.optim.mixing import Mixing, mixing_of
from tutti.parallel.ddp.shared_memory_reducer import shared_buckets
from tutti.parallel.parameter_server import hyperparameters
from tutti.parallel.parameter_server.server_flows import ServerFlow, async_step_flows, server_bytes, sync_step_flows
from tutti.parallel.parameter_server.server_partition import ServerPlan, Size, plan_servers
from tutti.planning.communication_seconds import BARRIERS, COPIED, READ_WRITE
from tutti.planning.host_prices import HostPrices
from tutti.planning.monte_carlo import DRAWS
from tutti.planning.replica_builder import ReplicaBuilder
from tutti.planning.scaling_laws import Array
from tutti.planning.step_facts import TensorFacts
from tutti.planning.step_program import COMMUNICATION, StepAction, StepProgram


def central_links(tensors: Sequence[TensorFacts], ranks: int) -> dict[tuple[int, int], LinkTraffic]:
    """Return how much gradient data the ranks read from each other in a step of the strategy ``central_storage``.

    Every parameter has one owner rank, which reads the other ranks' gradients of it in shared memory.

    Args:
        tensors: trainable parameters, in the model's order.
        ranks: number of data ranks.

    Returns:
        A dict from (source rank, owner rank) to a ``LinkTraffic``: ``messages``, the number of reads (one for each
        bucket), and ``bytes`` of all these reads.
    """
    found: dict[tuple[int, int], LinkTraffic] = {}
    owner = owners([t.bytes for t in tensors], ranks)
    for bucket in shared_buckets([(t.bytes, str(t.dtype)) for t in tensors], owner):
        size, to = sum(tensors[i].bytes for i in bucket), owner[bucket[0]]
        for source in filter(lambda rank: rank != to, range(ranks)):
            before = found.get((source, to), LinkTraffic(0, 0))
            found[source, to] = LinkTraffic(before.messages + 1, before.bytes + size)
    return found


def server_plan(tensors: Sequence[TensorFacts], servers: int, optimizer: OptimizerChoice) -> ServerPlan:
    """Partition the trainable parameters over parameter servers, as a run without ``--reproducible`` does.

    The parameters of each dtype are cut, across tensors, into parts that are equal up to 64 bytes. For an optimizer
    whose update of an element depends on other elements of the tensor, such as Muon, each tensor stays whole: the
    largest first, each goes to the server with the fewest bytes.

    Args:
        tensors: trainable parameters, in the model's order.
        servers: number of servers.
        optimizer: the optimizer with its options.

    Returns:
        A ``ServerPlan``, the layout of all parameters in one buffer of ``size`` bytes. Its methods ``pieces(server)``
        and ``regions(server)`` return the pieces of parameters that a server holds, and their ranges of bytes.

    Raises:
        UsageError: the tensors must stay whole, and there are fewer of them than servers.
    """
    whole = not optimizer_mixing(optimizer, tuple((t.name, t.shape) for t in tensors)).flat
    if servers > len(tensors) and whole:
        raise UsageError(
            f"{servers} servers cannot share {counted(len(tensors), 'tensor')} out",
            remedy=f"take servers={len(tensors)} or fewer",
        )
    return plan_servers([Size(t.elements, t.dtype.itemsize, str(t.dtype)) for t in tensors], servers, whole)


Shapes = tuple[tuple[str, tuple[int, ...]], ...]
"""Names and shapes of parameters."""


@lru_cache(maxsize=64)
def optimizer_mixing(optimizer: OptimizerChoice, named: Shapes) -> Mixing:
    """Find out by a trial on small tensors whether an optimizer's update mixes elements of its tensors; cached.

    An optimizer that mixes no elements, such as Adam, can update each slice of a tensor by itself.

    Args:
        optimizer: the optimizer with its options.
        named: a pair (name, shape) for each parameter, as tuples.

    Returns:
        A ``Mixing``. Four of its attributes are True if a step on slices of the tensors gives these slices of the step
        on whole tensors: ``rows`` (slices along the first dimension), ``columns`` (along other dimensions), ``flat``
        (pieces of the flattened tensor) and ``tensors`` (a subset of the tensors). ``draws`` is True if a step draws
        random numbers, ``closure`` if it needs a closure. ``untried`` is the reason why the trial failed, or None.

    Raises:
        UsageError: there is no parameter.
    """
    return mixing_of(_small_optimizer(optimizer, named))


def is_elementwise(optimizer: OptimizerChoice) -> bool:
    """Return whether an optimizer updates each element independently, so that it can step on slices of tensors.

    Found by a trial on a small matrix and a small vector. False also for an optimizer that draws random numbers or
    needs a closure, and for tutti's LARS, LARC, LAMB, NovoGrad and Muon.

    Args:
        optimizer: the optimizer with its options.
    """
    return optimizer_mixing(optimizer, (("weight", (4, 4)), ("bias", (4,)))) == Mixing()


@lru_cache(maxsize=64)
def server_hyperparameters(optimizer: OptimizerChoice, named: Shapes) -> int:
    """Return the number of hyperparameter values that a rank sends to each parameter server in a step; cached.

    Hyperparameters are numbers in the optimizer's parameter groups, such as the learning rate and both betas of Adam;
    each parameter group has its own.

    Args:
        optimizer: the optimizer with its options.
        named: a pair (name, shape) for each parameter, as tuples; some optimizers make several groups of them.

    Raises:
        UsageError: there is no parameter.
    """
    return len(hyperparameters.keys(_small_optimizer(optimizer, named)))


def _small_optimizer(optimizer: OptimizerChoice, named: Shapes) -> torch.optim.Optimizer:
    """Make the optimizer over parameters of the same names and numbers of dimensions, of few elements."""
    small = [(name, nn.Parameter(torch.zeros([min(size, 4) for size in shape]))) for name, shape in named]
    made = from_config(optimizer.options)(small)
    if made is None:
        raise UsageError("nothing is trained", remedy="train at least one parameter")
    return made


class ServerBuilder(ReplicaBuilder):
    """Builds the simulated training step of the strategies ``central_storage`` and ``parameter_server``.

    A simulated step (``StepProgram``) holds the computations and messages of one rank, which stands for all.
    """

    def central_storage(self, parts: Sequence[Sequence[int]]) -> StepProgram:
        """Build the simulated step of the strategy ``central_storage``, which sums gradients in shared memory.

        Each rank packs its gradients; each parameter's owner rank adds them up and updates the parameter. The owner of
        most bytes sets the time. Accelerators copy gradients to the host, and updated parameters back.

        Args:
            parts: number of samples in each micro-batch of a data rank, one list for each of its logical workers (fixed
                shares of the global batch).

        Returns:
            Computations and messages of one rank, which stands for all. Each of ``actions`` has a device, a phase, a
            duration (seconds, one value for each of the Monte Carlo draws of the machine's uncertain constants) and the
            indices in ``actions`` of the actions that have to end before this action begins; ``between_ranks`` counts
            the reads of other ranks' gradients, by (source rank, owner rank).

        Raises:
            UsageError: the devices are on several nodes, or the machine's data lack a class of operators or the
                optimizer.
        """
        program, tensors, ranks = StepProgram(), self.facts.tensors, self.shape["replica"]
        if self.costs.network.nodes(ranks) > 1:
            raise UsageError(
                f"central_storage is for one node, and {ranks} devices are on {self.costs.network.nodes(ranks)}",
                where="--devices",
                remedy=f"take at most {counted(self.costs.network.per_node, 'device')}, or --strategy mirrored",
            )
        self.passes(program, parts)
        last, elements = len(program.actions) - 1, sum(t.elements for t in tensors)
        host, whole, held = HostPrices(self.costs), sum(t.bytes for t in tensors), len(tensors)
        if host.apart:
            last = self.message(program, host.moved(whole), (last,), "gradients to the host")
        if ranks > 1:
            self.costs.note(BARRIERS)
            program.between_ranks = central_links(tensors, ranks)
            owner = owners([t.bytes for t in tensors], ranks)
            owned = [[t for t, rank in zip(tensors, owner, strict=True) if rank == own] for own in range(ranks)]
            most = max(sum(t.bytes for t in own) for own in owned)
            elements = max(sum(t.elements for t in own) for own in owned)
            held = max(map(len, owned))
            if not host.apart:
                last = self.message(program, host.copied(COPIED * whole, len(tensors)), (last,), "gradients packed")
            added = (ranks - 1) * host.copied(READ_WRITE * most, 1, "other")
            last = self.message(program, added, (last,), "gradients added up by their owners")
        if not host.apart:
            self.update(program, elements, [last], tensors=held)
            return program
        last = self.message(
            program, host.updated(self.config.optimizer_choice.name, elements), (last,), "update on the host"
        )
        self.message(program, host.moved(whole), (last,), "parameters to the device")
        return program

    def servers(self, sync: ParameterServerConfig, parts: Sequence[Sequence[int]]) -> StepProgram:
        """Build the simulated step with parameter servers, processes that sum gradients and update parameters.

        In the mode ``sync`` the step is one update of all ranks together. In ``async`` and ``bounded`` the step is the
        mean step of one rank, with the time that the rank waits for a server that is busy with other ranks.

        Args:
            sync: options of the servers: number, mode, transport, steps between pushes and fetches.
            parts: number of samples in each micro-batch of a data rank, one list for each of its logical workers (fixed
                shares of the global batch).

        Returns:
            Computations and messages of one rank, which stands for all; the work of the servers counts as messages.
            Each of ``actions`` has a device, a phase, a duration (seconds, one value for each of the Monte Carlo draws
            of the machine's uncertain constants) and the indices in ``actions`` of the actions that have to end before
            this action begins; ``flows`` lists the kinds of requests of a rank to the servers, with their bytes.

        Raises:
            UsageError: the optimizer needs each tensor whole on one server, and there are fewer tensors than servers;
                or the machine's data lack a class of operators, the optimizer or the cost of a link.
        """
        self.costs.note("parameter servers compute at the speed of a rank, whose cores they share")
        shared = sync.transport != "tcp" and self.costs.network.nodes(self.shape["replica"]) == 1
        if not shared:
            self.costs.note("encrypting messages to parameter servers takes no time")
        tensors, optimizer = self.facts.tensors, self.config.optimizer_choice
        plan = server_plan(tensors, sync.servers, optimizer)
        settings = server_hyperparameters(optimizer, tuple((t.name, t.shape) for t in tensors))
        service = _Service(self, plan, sync.servers, shared)
        if sync.mode == "sync":
            return self._synchronous(
                service, sync_step_flows(plan, sync.servers, self.shape["replica"], settings), parts
            )
        flows = async_step_flows(plan, sync.servers, settings, sync.push, sync.fetch)
        return self._asynchronous(service, sync, flows, parts)

    def _synchronous(
        self, service: _Service, flows: Sequence[ServerFlow], parts: Sequence[Sequence[int]]
    ) -> StepProgram:
        program, ranks = StepProgram(), self.shape["replica"]
        program.flows += flows
        self.passes(program, parts)
        last = len(program.actions) - 1
        # A server receives from all but the delayed rank during its delay.
        others = service.pushed - service.transfer
        self.message(program, others, (self.undelayed(program),), "pushes of other ranks")
        for text, seconds in (
            ("gradients written", service.written),
            ("push", service.transfer + service.requests(flows, "push")),
            ("server: sum", ranks * service.added + service.looked_at + service.requests(flows, "sum")),
            ("server: update", service.updated),
            ("parameters to all ranks", service.pulled + service.requests(flows, "apply")),
            ("parameters read", service.read),
        ):
            last = self.message(program, seconds, (last,), text)
        return program

    def _asynchronous(
        self,
        service: _Service,
        sync: ParameterServerConfig,
        flows: Sequence[ServerFlow],
        parts: Sequence[Sequence[int]],
    ) -> StepProgram:
        """Build the mean step of asynchronous workers: each waits for its own pushes, and for a server that is busy.

        A server serves N workers in turn, each for s seconds: a step lasts as long as a worker computes and is served,
        and at least N · s (bounds of a closed queueing network: Denning & Buzen 1978, ACM Computing Surveys 10(3)).
        """
        program, ranks = StepProgram(), self.shape["replica"]
        sent = service.transfer / sync.push + service.transfer_back / sync.fetch
        served = (service.looked_at + service.updated) / sync.push + service.requests(flows, "push")
        for worker, delay in zip(parts, self.delays(parts), strict=True):
            program.flows += flows
            self.passes(program, [worker], [delay])
            last = len(program.actions) - 1
            if ranks > 1:
                others = (service.senders - 1) * sent + (ranks - 1) * served
                program.add(StepAction(0, COMMUNICATION, others, link=True, text="server: other workers"))
            last = self.message(program, service.written / sync.push, (last,), "gradients written")
            last = self.message(program, sent + served, (last,), "push, update, and parameters")
            self.message(program, service.read / sync.fetch, (last,), "parameters read")
        return program


class _Service:
    """Seconds of what the busiest server does, and of a rank's copies, one element a draw.

    Attributes:
        written, read: a rank's gradients into its send buffer, and parameters out of its receive buffer; from and to
            the device, if it is an accelerator.
        transfer, transfer_back: gradients of one rank over the link of the server's node; parameters to one rank.
        senders: ranks whose gradients take this link; those on a server's own node do not.
        pushed, pulled: gradients of all ranks to the server at once; parameters to all of them.
        added: one rank's gradients added up.
        looked_at: norm and finiteness of the sum.
        updated: the update.
    """

    def __init__(self, builder: ReplicaBuilder, plan: ServerPlan, servers: int, shared: bool) -> None:
        self._builder, self._devices = builder, builder.config.device_count
        costs, host, sizes = (
            builder.costs,
            HostPrices(builder.costs),
            [server_bytes(plan, server) for server in range(servers)],
        )
        most, whole, nodes = max(sizes), plan.size, costs.network.nodes(self._devices)
        ranks = builder.shape["replica"]
        self.senders = ranks if nodes == 1 else max(1, ranks - costs.network.per_node)
        elements = max(sum(piece.end - piece.begin for piece in plan.slices(server)) for server in range(servers))
        self.written = host.moved(whole) if host.apart else host.copied(COPIED * whole)
        self.added = host.copied(READ_WRITE * most, 1, "other")
        self.looked_at = host.copied(most, 1, "other")
        self.updated = host.updated(builder.config.optimizer_choice.name, elements)
        if shared:
            self.transfer, self.read = np.zeros(DRAWS), host.moved(whole)
            self.transfer_back = host.copied(COPIED * most)
            self.pushed, self.pulled = self.transfer, ranks * self.transfer_back
        else:
            # Servers go round the nodes; those of one node share its link to the others.
            together = -(-servers // nodes) if nodes > 1 else 1
            self.transfer = self.transfer_back = costs.message(together * most, self._devices)
            # One message as large as all: their waits are at the same time.
            self.pushed = self.pulled = costs.message(self.senders * together * most, self._devices)
            self.read = host.moved(whole) if host.apart else host.copied(COPIED * whole)

    def requests(self, flows: Sequence[ServerFlow], kind: str) -> Array:
        """Return the seconds of a rank's requests of one kind to all parameter servers at once, without their tensors.

        Args:
            flows: kinds of requests of the step, with the bytes sent and received.
            kind: ``push``, ``sum`` or ``apply``.
        """
        costs, devices = self._builder.costs, self._devices
        return max(
            (costs.message(f.sent, devices) + costs.message(f.received, devices) for f in flows if f.kind == kind),
            key=lambda seconds: float(seconds.sum()),
        )
