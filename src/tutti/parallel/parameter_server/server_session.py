"""Session of one rank with the parameter servers: start them, exchange keys and addresses, send requests."""

from __future__ import annotations

import json
import os
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tutti.comm import shared_memory as segments
from tutti.comm.broadcast import broadcast_result
from tutti.comm.random_keys import mix
from tutti.config.sync_config import ParameterServerConfig
from tutti.errors import PeerError, UsageError, counted, script_line
from tutti.launcher import context
from tutti.launcher.interface import address_of
from tutti.optim.learning_rate import set_learning_rates
from tutti.optim.mixing_rules import agreed_mixing, refuse_changed_settings, refuse_exchanges, refuse_parts
from tutti.optim.several import SeveralOptimizers, slots
from tutti.parallel.ddp.step_agreement import layout_key
from tutti.parallel.parameter_server import curve_keys, flat_views, hyperparameters, server_wire
from tutti.parallel.parameter_server.client import Address, Client, ClientIdentity, Reply
from tutti.parallel.parameter_server.parameter_shard import ParameterShard, cut_for_server, join_server_state
from tutti.parallel.parameter_server.request_handlers import RequestHandler
from tutti.parallel.parameter_server.server import ServerJob, SharedBuffers, serve
from tutti.parallel.parameter_server.server_partition import ServerPlan, plan_servers
from tutti.parallel.parameter_server.server_snapshot import Snapshots
from tutti.parallel.parameter_server.server_supervisor import ServerSupervisor
from tutti.parallel.parameter_server.server_wire import Terms
from tutti.types.optimizer_protocols import NamedParameters, OptimizerFactory
from tutti.types.run_context import RunContext
from tutti.types.saved_state import SavedState
from tutti.types.shard_spec import ShardSpec

_SNAPSHOT = 100
_BLOB = 1 << 24


class ServerSession:
    """One rank's connections and buffers for all parameter servers, which are child processes of some of the ranks.

    The constructor is collective over the data ranks: the nodes get the servers round robin, and the first rank of each
    node starts the servers of its node. It tries the optimizer by steps on small tensors, exchanges keys and addresses
    by all-gathers and broadcasts, and returns once every server has answered this rank's first request.

    Args:
        config: options of the ``parameter_server`` strategy, such as the number of servers and the transport.
        run_context: communicators and settings of the run.
        trained: (name, parameter) pairs of the trained parameters; their values become the servers' initial ones.
        make_optimizer: builds each server's optimizer, in the server's process.
        handle: optimizer over all trained parameters on this rank, whose hyperparameters are sent to the servers.
        make_handler: makes the request handler of a server from its parameter shard, in the server's process.
        extras: takes the number of hyperparameters, and returns how many floats a request carries, by kind of request
            (the numbers of ``server_wire``).

    Attributes:
        comm: the data ranks.
        keys: identifies the hyperparameters that are sent, in the order of ``settings``.
        plan: partition of the parameters over the servers.
        gradients: for each trained parameter a view, of its shape and dtype, of the buffer from which gradients are
            sent; a CPU tensor.
        values: for each trained parameter such a view of the buffer into which updated parameters are received; at
            first the parameters' values.
        client: sends the requests and receives the replies.

    Raises:
        MismatchError: the ranks are in different calls.
        UsageError: the optimizer cannot step on servers, tensors are too few for the servers, the transport asked for
            is not available, or this rank, which starts servers, has no address that other hosts reach.
        PeerError: a server does not answer, or has ended.
        AuthenticationError: a server does not accept this rank's key.
    """

    def __init__(
        self,
        config: ParameterServerConfig,
        run_context: RunContext,
        trained: NamedParameters,
        make_optimizer: OptimizerFactory,
        handle: Optimizer,
        make_handler: Callable[[ParameterShard], RequestHandler],
        extras: Callable[[int], Mapping[int, int]],
    ) -> None:
        self.comm, self._config, self._run_context, self._trained = (
            run_context.comms.replica,
            config,
            run_context,
            trained,
        )
        self._handle, self.keys = handle, hyperparameters.keys(handle)
        self._unsent = hyperparameters.unsent(handle, self.keys)
        parameters = [p for _, p in trained]
        if isinstance(handle, SeveralOptimizers) and (config.mode != "sync" or config.backup):
            raise UsageError(
                "several optimizers cannot be combined with parameter servers that do not wait for all workers",
                why="a server updates all of its parameters at once, with the gradients that have arrived",
                remedy="put the parameters into groups of one optimizer, or take mode=sync without backup",
            )
        self._whole = whole = self._keeps_whole(handle)
        self.plan = _plan(config.servers, parameters, whole)
        self._workers = workers_by_rank(run_context)
        self._segment = self._share()
        pushed, given = self._memory(self.comm.rank)
        self.gradients, self.values = (flat_views.over(self.plan, parameters, memory) for memory in (pushed, given))
        for view, parameter in zip(self.values, parameters, strict=True):
            view.copy_(parameter.data)
        own = curve_keys.make_keys()
        public = [text.encode() for text in self.comm.all_gather_strings(own.public.decode(), "keys of the ranks")]
        told = {"run": secrets.randbits(62), "token": secrets.token_hex(8)} if self.comm.rank == 0 else {}
        told = self.comm.broadcast_json(told, 0, "number of the run")
        self._host: ServerSupervisor | None = None
        homes, places = self._homes(), dict[str, list[str]]()
        for home in sorted(set(homes)):
            mine = [number for number, other in enumerate(homes) if other == home]
            start = partial(
                self._start, mine, told, public, given, make_optimizer, make_handler, extras(len(self.keys))
            )
            places |= broadcast_result(self.comm, home, start, "addresses of the servers")
        layout = self._layout(whole)
        found = (places[str(number)] for number in range(config.servers))
        self._addresses = [Address(endpoint, key.encode()) for endpoint, key in found]
        self.client = Client(
            ClientIdentity(told["run"], layout, self.comm.rank, own),
            self._addresses,
            self.plan,
            pushed,
            given,
            shared=self._segment is not None,
            stall=self.comm.stall,
            timeout=context.current().timeout,
            look=self._look,
        )
        self.ask(server_wire.HELLO, "meeting the parameter servers")
        # Servers end once no rank is connected: an error on this rank must not take them from ranks yet to connect.
        self.comm.all_reduce(torch.zeros(1), "all ranks have met the parameter servers")

    def _keeps_whole(self, handle: Optimizer) -> bool:
        """Return whether each tensor is to stay whole on one server. Collective; refuses optimizers without servers."""
        flat = True
        for member in slots(handle):
            mixing = agreed_mixing(member, self._run_context, elsewhere=True)
            refuse_exchanges(member, mixing)
            if mixing.closure:
                raise UsageError(
                    f"{type(member).__name__} needs a closure, and parameter servers have no model to call",
                    remedy="take strategy='mirrored', or an optimizer whose step needs no closure",
                )
            if mixing.untried is not None:
                raise UsageError(
                    f"{type(member).__name__} cannot be tried, and parameter servers step on tensors of their own",
                    why=mixing.untried,
                    remedy="take strategy='mirrored', or let its step need nothing but its parameter groups and state",
                )
            refuse_changed_settings(member, mixing)
            refuse_parts(member, mixing, self._config.servers, "parameter servers")
            flat = flat and mixing.flat
        return self._run_context.reproducible or not flat

    # --- the start -------------------------------------------------------------------------------------------------

    def _share(self) -> segments.SharedMemorySegment | None:
        if self._config.transport == "tcp":
            return None
        # Only on one node: nodes that are containers may share /dev/shm, but not the abstract names of sockets.
        segment = segments.attach(self.comm, 2 * self.plan.size)
        if segment is None and self._config.transport == "shared_memory":
            raise UsageError(
                "these ranks cannot share memory",
                why="they are on several hosts, the processor is not x86-64, or /dev/shm is too small",
                remedy="take transport=tcp",
            )
        return segment

    def _memory(self, rank: int) -> tuple[Tensor, Tensor]:
        """Return a rank's send buffer of gradients and receive buffer of parameters, (plan.size,) uint8 each."""
        size = self.plan.size
        if self._segment is None:
            return torch.zeros(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
        slot = self._segment.slot(rank)
        return slot[:size], slot[size : 2 * size]

    def _layout(self, whole: bool) -> int:
        return mix(layout_key(self._trained), self._config.servers, whole) >> 1

    def _homes(self) -> list[int]:
        """Return the data rank that starts each server: the first rank of each node, round robin. Collective."""
        here = torch.tensor([context.cross_rank()])
        hosts = [int(host) for host in self.comm.all_gather(here, "hosts of the ranks")]
        first = [hosts.index(host) for host in dict.fromkeys(hosts)]
        return [first[server % len(first)] for server in range(self._config.servers)]

    def _start(
        self,
        servers: Sequence[int],
        told: Mapping[str, Any],
        clients: Sequence[bytes],
        initial: Tensor,
        make_optimizer: OptimizerFactory,
        make_handler: Callable[[ParameterShard], RequestHandler],
        extras: Mapping[int, int],
    ) -> dict[str, list[str]]:
        """Start the servers of this node in child processes; return endpoint and public key by server number.

        Args:
            servers: numbers of the servers.
            told: ``run`` and ``token``, random identifiers of this run.
            clients: public keys of the ranks.
            initial: (plan.size,) uint8, initial parameters.
            make_optimizer, make_handler: as in the constructor.
            extras: floats of each kind of request.
        """
        run, token, config = told["run"], told["token"], self._config
        initial, restart = initial.clone(), config.mode != "sync" and config.snapshot != 0
        jobs: list[ServerJob] = []
        listening: list[socket.socket] = []
        for number in servers:
            terms = Terms(
                run=run,
                layout=self._layout(self._whole),
                workers=self._workers,
                frames=tuple(map(len, self.plan.frames(number))),
                extras=extras,
                most=self._most(),
            )
            # On one node an abstract Unix socket, which leaves no file.
            endpoint, listener = f"ipc://@tutti-{token}-{number}", None
            if self._segment is None:
                endpoint, listener = listen(_own_address())
                listening.append(listener)

            def make(number: int = number) -> tuple[ParameterShard, RequestHandler]:
                torch.set_num_threads(1)
                shard = ParameterShard(
                    self.plan, number, self._trained, initial, make_optimizer, self._handle, self.keys
                )
                return shard, make_handler(shard)

            jobs.append(
                ServerJob(
                    terms=terms,
                    keys=curve_keys.make_keys(),
                    clients=clients,
                    endpoint=endpoint,
                    descriptor=None if listener is None else listener.fileno(),
                    shared=self._shared(number),
                    make=make,
                    snapshots=Snapshots() if restart else None,
                    every=config.snapshot or _SNAPSHOT,
                )
            )
        kept = [job.snapshots for job in jobs if job.snapshots is not None]
        descriptors = [s.fileno() for s in listening] + [d for s in kept for d in s.descriptors]
        self._host = ServerSupervisor([lambda job=job: serve(job) for job in jobs], descriptors, restart)  # type: ignore[misc]
        for listener in listening:
            listener.close()
        for snapshots in kept:
            snapshots.close()
        return {
            str(number): [job.endpoint, job.keys.public.decode()] for number, job in zip(servers, jobs, strict=True)
        }

    def _most(self) -> int:
        return 16 * self.plan.size + _BLOB

    def _shared(self, server: int) -> list[SharedBuffers]:
        """Return ``server``'s regions of each rank's send and receive buffers; none without shared memory."""
        if self._segment is None:
            return []
        dtypes = [self._trained[section.order[0]][1].dtype for section in self.plan.sections]
        regions = self.plan.regions(server)
        found = []
        for rank in range(self.comm.size):
            parts = [[memory[r.start : r.stop] for r in regions] for memory in self._memory(rank)]
            typed = [[part.view(dtype) for part, dtype in zip(row, dtypes, strict=True)] for row in parts]
            found.append(SharedBuffers(*typed))
        return found

    # --- afterwards ------------------------------------------------------------------------------------------------

    @property
    def servers(self) -> int:
        """Number of parameter servers of the whole run, over all nodes."""
        return self._config.servers

    @property
    def home(self) -> bool:
        """Whether the model can compute directly with the buffer that servers write updated parameters into.

        True if servers and ranks share memory and the device of this rank is the CPU. The model's parameters can then
        be views of the buffer (``values``), with no copy after a reply; otherwise the values are copied to the device.
        """
        return self._segment is not None and self.comm.device.type == "cpu"

    def settings(self, lr_factor: float | None) -> list[float]:
        """Set the learning rates of this rank's optimizer, and return its hyperparameters for the parameter servers.

        Sends nothing: the caller puts the values into its next request.

        Args:
            lr_factor: factor by which each parameter group's initial learning rate is multiplied; None leaves the rates
                as they are.

        Returns:
            A flat list of the values of all hyperparameters that the servers' optimizers follow (learning rate, weight
            decay, betas, …), of all parameter groups, in the order of the attribute ``keys``.

        Raises:
            UsageError: the script has changed an option that the servers do not follow, such as ``nesterov``.
        """
        now = hyperparameters.unsent(self._handle, self.keys)
        for (group, name), before in self._unsent.items():
            if now.get((group, name), before) != before:
                raise UsageError(
                    f"{name} of parameter group {group} was changed from {before} to {now[group, name]}",
                    where=script_line(),
                    why="parameter servers follow changes of numbers such as lr, betas and weight_decay alone",
                    remedy=f"give the optimizer its {name} before tutti.prepare, or take strategy='mirrored'",
                )
        set_learning_rates(self._handle.param_groups, lr_factor)
        return hyperparameters.values(self._handle, self.keys)

    def ask(self, kind: int, text: str, clock: int = 0, **more: object) -> list[Reply]:
        """Send a request to all parameter servers, and wait for their replies. Not collective.

        The request counts as one of the first logical worker (share of the global batch) that this rank computes.

        Args:
            kind: a constant of ``server_wire``: HELLO (first contact), PUSH (gradients), SUM (statistics of the summed
                gradients), APPLY (make the update), PULL (read parameters for a step), READ (read parameters), SAVE and
                LOAD (state of the server) or FACTS (statistics).
            text: names the request in the messages of the errors below.
            clock: steps that the worker has taken; for synchronous servers the number of the sum of gradients.
            more: further keyword arguments of ``Client.send``: ``flags``, ``extras`` (floats), ``seen`` (number of
                updates in the parameters read last, for each server), ``blobs`` (for each server its state to load) and
                ``servers`` (indices of those to ask).

        Returns:
            One ``Reply`` for each server, in the servers' order: message header (``header``), floats (``extras``), and
            for SAVE and FACTS the saved state or statistics (``frames``, a list of bytes). Parameters that came with
            the replies are in the receive buffer (the attribute ``values``).

        Raises:
            PeerError: no reply came in time, or a server has ended and is not started again.
            AuthenticationError: a server does not accept this rank's key.
        """
        return self.client.ask(kind, self._run_context.mine[0], clock, text, (self.comm.global_rank,), **more)

    def barrier(self, text: str) -> None:
        """Wait until all data ranks have called ``barrier`` with the same ``text``. Collective over the data ranks.

        The parameter servers, which are processes of their own, take no part.

        Args:
            text: names the place in the program; the ranks compare the texts, and the error names them.

        Raises:
            MismatchError: ranks passed different texts.
            PeerError: a rank is lost, or does not call in time.
        """
        self.comm.agree([text], text, "make all ranks save, load and evaluate after the same steps")

    def restore(self, saved: SavedState, values: Mapping[str, Tensor], specs: Mapping[str, ShardSpec]) -> list[int]:
        """Load parameters and the optimizer state of a checkpoint into the parameter servers.

        Rank 0 sends parameters and state to the servers and waits for their replies. Collective over the data ranks:
        rank 0 then broadcasts whether the servers have loaded the state, for which all wait. Then every rank asks all
        servers for their numbers of updates.

        Args:
            saved: the checkpoint, whose group ``optim`` is read, on rank 0 alone.
            values: whole parameters by name; read on rank 0 alone.
            specs: a ``ShardSpec`` of each parameter by name; only its ``tied``, the other names of tied parameters, is
                read.

        Returns:
            A list with, for each server in order, the number of updates that the server has made so far.

        Raises:
            UsageError: on every rank, the saved optimizer state is larger than a server accepts.
            CheckpointError: on every rank, a file of the checkpoint differs from its manifest.
            PeerError: a server does not reply in time, or has ended.
        """
        send = partial(self._send_state, saved, values, specs)
        broadcast_result(self.comm, 0, send, "whether the servers have loaded their state")
        return [reply.header.seen for reply in self.ask(server_wire.HELLO, "meeting the parameter servers")]

    def _send_state(self, saved: SavedState, values: Mapping[str, Tensor], specs: Mapping[str, ShardSpec]) -> None:
        """Send parameters and the optimizer state of a checkpoint to the parameter servers. Called on rank 0."""
        known = {other: name for name, spec in specs.items() for other in spec.tied}
        states = {}
        for key in saved.names("optim"):
            owner, _, entry = key.rpartition("/")
            states[f"{known.get(owner, owner)}/{entry}"] = saved.get("optim", key)
        servers = range(self._config.servers)
        blobs = [cut_for_server(self.plan, m, self._trained, dict(values), states) for m in servers]
        if max(map(len, blobs)) > self._most():
            raise UsageError(
                "the optimizer's saved state is too large for a parameter server",
                why="a server takes sixteen times the bytes of the parameters",
                remedy="take more servers, or strategy='mirrored'",
            )
        self.ask(server_wire.LOAD, "loading the servers' state", blobs=blobs)

    def optimizer_state(self) -> dict[str, Tensor]:
        """Read the optimizer state of all parameter servers on rank 0, which alone waits for them. Not collective.

        Returns:
            On rank 0 a dict with keys ``"{parameter name}/{state key}"``, such as ``"head.weight/exp_avg"``, whose
            tensors, new and on the CPU, have the shape of the whole parameter or are 0-d; an empty dict on all other
            ranks.

        Raises:
            PeerError: on rank 0, no reply came in time, or a server has ended and is not started again.
        """
        if self.comm.rank:
            return {}
        replies = self.ask(server_wire.SAVE, "reading the servers' state")
        return join_server_state(self.plan, self._trained, [reply.frames[0] for reply in replies])

    def facts(self) -> dict[str, Any]:
        """Ask the parameter servers for their statistics for ``summary.json``. Not collective: rank 0 alone asks.

        Returns:
            On rank 0 ``{"servers": [{"at": endpoint, …}]}`` with one entry for each server: its ZeroMQ address
            (``at``), the facts of its request handler (``updates``, number of updates; dropped pushes, ``late`` of a
            synchronous server, ``stale`` and ``refused`` of an asynchronous one, which also has ``steps``,
            ``staleness`` and ``lost``), numbers of refused messages (``malformed``) and connections (``keys_refused``),
            bytes of tensors sent and received (``bytes``), and, after a push, ``updates_per_second``. An empty dict on
            all other ranks.

        Raises:
            PeerError: on rank 0, no reply came in time, or a server has ended and is not started again.
        """
        if self.comm.rank:
            return {}
        replies = self.ask(server_wire.FACTS, "asking the servers")
        told = zip(self._addresses, replies, strict=True)
        return {"servers": [{"at": address.endpoint, **json.loads(reply.frames[0])} for address, reply in told]}

    def pids(self) -> dict[int, int]:
        """Return the current process ids of the parameter servers that this rank started. Does not block.

        Returns:
            Process ids by the servers' index among those of this rank, from 0: on one node this is the server's number.
            Empty on ranks that started no server.
        """
        if self._host is None:
            return {}
        self._host.look()
        return dict(self._host.pids)

    def close(self) -> None:
        """Close this rank's connections to the parameter servers, and end the server processes that this rank started.

        Blocks until these processes have ended (about 5 s at most). No request can be sent afterwards. Not collective,
        but all ranks must have their last replies before any rank calls it, for example by ``barrier``.
        """
        self.client.close()
        if self._host is not None:
            self._host.close()

    def _look(self) -> None:
        """Raise PeerError if a server that this rank started has ended for good."""
        if self._host is not None:
            self._host.look()
            if self._host.failed:
                raise PeerError(
                    self._host.failed,
                    where=f"the host of rank {self.comm.global_rank}",
                    why="a synchronous server holds what ranks have added up, and is not started again"
                    if self._config.mode == "sync"
                    else None,
                    remedy="resume from the last checkpoint (--resume, in a script run.restore(folder)); --max-restarts"
                    " does so by itself",
                )


def workers_by_rank(run_context: RunContext) -> tuple[range, ...]:
    """All-gather over the data ranks which logical workers each rank computes.

    A logical worker is one of N fixed shares of the global batch; one rank can compute several in turn. Where a rank
    computes its workers in one batch, as if they were one worker, the rank's range has the first of these workers only.

    Args:
        run_context: communicators and settings of the run, with this rank's own range (``mine``).

    Returns:
        For each data rank, in rank order, the range of the indices of its workers.

    Raises:
        MismatchError: the ranks are in different calls.
        PeerError: a rank has ended, or did not make the call in time.
    """
    mine = torch.tensor([run_context.mine.start, run_context.mine.stop])
    ends = run_context.comms.replica.all_gather(mine, "workers of the ranks")
    return tuple(range(int(start), int(stop)) for start, stop in ends)


def _plan(servers: int, parameters: Sequence[torch.nn.Parameter], whole: bool) -> ServerPlan:
    if servers > len(parameters) and whole:
        raise UsageError(
            f"{servers} servers cannot share {counted(len(parameters), 'tensor')} out",
            why="each tensor is whole on one server, for reproducible runs and optimizers of whole layers",
            remedy=f"take servers={len(parameters)} or fewer",
        )
    return plan_servers(flat_views.sizes(parameters), servers, whole)


def listen(address: str) -> tuple[str, socket.socket]:
    """Open a TCP socket that listens on a free port of one address, for a server process to take over.

    Args:
        address: IPv4 address or host name of a network interface of this node; no other interface accepts connections.

    Returns:
        The ZeroMQ endpoint, ``tcp://HOST:PORT``, and the socket, which child processes inherit.

    Raises:
        OSError: the address is unknown, or not one of this node.
    """
    listener = socket.socket()
    listener.bind((address, 0))
    listener.listen(64)
    listener.set_inheritable(True)
    host, port = listener.getsockname()
    return f"tcp://{host}:{port}", listener


def _own_address() -> str:
    """Return the address at which other nodes reach this one; the loopback address in a job on one machine."""
    # Ranks that meet at a loopback address are on one machine, whatever their launcher counts as nodes.
    if context.cross_size() == 1 or os.environ.get("MASTER_ADDR", "").startswith("127."):
        return "127.0.0.1"
    # ``tutti.init`` sets the variable where it is not set.
    chosen = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    address = address_of(chosen)
    if address is None or address.startswith("127."):
        raise UsageError(
            "the parameter servers have no address that the other hosts reach",
            where=f"rank {context.rank()}",
            why=f"GLOO_SOCKET_IFNAME is '{chosen}'",
            remedy="set it to the interface between the hosts",
        )
    return address
