"""What an exchange has to do with its servers: start them, agree on everything with them, and talk to them."""

from __future__ import annotations

import json
import os
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tutti.comm import segment as segments
from tutti.errors import PeerError, UsageError
from tutti.exchanges.config import ParameterServerConfig
from tutti.exchanges.reducers import Named, layout_key
from tutti.exchanges.server import flats, hyper, keys, wire
from tutti.exchanges.server.client import Address, Client, Identity, Reply
from tutti.exchanges.server.desks import Desk
from tutti.exchanges.server.host import Host
from tutti.exchanges.server.server import Job, Shared, serve
from tutti.exchanges.server.shelf import Shelf, cut, join
from tutti.exchanges.server.slices import Plan, plan
from tutti.exchanges.server.snapshot import Snapshots
from tutti.exchanges.server.wire import Terms
from tutti.laws.keys import mix
from tutti.types import OptimizerFactory, SavedState, Setting, ShardSpec
from tutti.world import context
from tutti.world.interface import address_of

_SNAPSHOT = 100
_BLOB = 1 << 24
_ELEMENTWISE = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
)
"""Optimizers that treat every element by itself, so that a tensor may be cut."""


class Link:
    """Of one rank. Making it is collective: the first rank of each host starts the servers of that host.

    Args:
        config: as asked for.
        setting: of the run.
        trained: the parameters that are trained.
        make_optimizer: as the exchange was given it.
        handle: an optimizer over all of them on this rank, whose settings go to the servers.
        desk: how a server serves.
        extras: of each kind of request, how many floats it has, given how many the settings are.

    Attributes:
        gradients: views of what a push sends, a parameter each.
        values: views of where parameters arrive.
        client: connections to the servers.
    """

    def __init__(
        self,
        config: ParameterServerConfig,
        setting: Setting,
        trained: Named,
        make_optimizer: OptimizerFactory,
        handle: Optimizer,
        desk: Callable[[Shelf], Desk],
        extras: Callable[[int], Mapping[int, int]],
    ) -> None:
        self.comm, self._config, self._setting, self._trained = setting.comms.replica, config, setting, trained
        self._handle, self.keys = handle, hyper.keys(handle)
        parameters = [p for _, p in trained]
        whole = setting.reproducible or type(handle) not in _ELEMENTWISE
        self.plan = _plan(config.servers, parameters, whole)
        self._workers = played(setting)
        self._segment = self._share()
        pushed, given = self._memory(self.comm.rank)
        self.gradients, self.values = (flats.over(self.plan, parameters, memory) for memory in (pushed, given))
        for view, parameter in zip(self.values, parameters, strict=True):
            view.copy_(parameter.data)
        own = keys.make()
        public = [text.encode() for text in self.comm.texts(own.public.decode(), "keys of the ranks")]
        told = {"run": secrets.randbits(62), "token": secrets.token_hex(8)} if self.comm.rank == 0 else {}
        told = self.comm.broadcast_json(told, 0, "number of the run")
        self._host: Host | None = None
        homes, places = self._homes(), dict[str, list[str]]()
        for home in sorted(set(homes)):
            listening: dict[str, list[str]] = {}
            if self.comm.rank == home:
                mine = [number for number, other in enumerate(homes) if other == home]
                listening = self._start(mine, told, public, given, make_optimizer, desk, extras(len(self.keys)))
            places |= self.comm.broadcast_json(listening, home, "addresses of the servers")
        layout = self._layout(whole)
        found = (places[str(number)] for number in range(config.servers))
        self._addresses = [Address(endpoint, key.encode()) for endpoint, key in found]
        self.client = Client(
            *(Identity(told["run"], layout, self.comm.rank, own), self._addresses, self.plan, pushed, given),
            *(self._segment is not None, self.comm.stall, context.current().timeout, self._look),
        )
        self.ask(wire.HELLO, "meeting the parameter servers")

    # --- the start -------------------------------------------------------------------------------------------------

    def _share(self) -> segments.Segment | None:
        if self._config.transport == "tcp":
            return None
        # Hosts that are containers may have memory in common, but not the names of sockets.
        alone = context.cross_size() == 1
        segment = segments.attach(self.comm, 2 * self.plan.size) if alone else None
        if segment is None and self._config.transport == "shared_memory":
            raise UsageError(
                "these ranks cannot share memory",
                why="they are on several hosts, the processor is not x86-64, or /dev/shm is too small",
                remedy="take transport=tcp",
            )
        return segment

    def _memory(self, rank: int) -> tuple[Tensor, Tensor]:
        """What a rank pushes and what it is given, (plan.size,) bytes each."""
        size = self.plan.size
        if self._segment is None:
            return torch.zeros(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
        slot = self._segment.slot(rank)
        return slot[:size], slot[size : 2 * size]

    def _layout(self, whole: bool) -> int:
        return mix(layout_key(self._trained), self._config.servers, whole) >> 1

    def _homes(self) -> list[int]:
        """The data rank that starts each server: they go round the hosts, on each to its first rank. Collective."""
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
        desk: Callable[[Shelf], Desk],
        extras: Mapping[int, int],
    ) -> dict[str, list[str]]:
        """Start these servers; the endpoint and the public key of each."""
        whole = self._setting.reproducible or type(self._handle) not in _ELEMENTWISE
        run, token, config = told["run"], told["token"], self._config
        initial, restart = initial.clone(), config.mode != "sync" and config.snapshot != 0
        jobs: list[Job] = []
        listening: list[socket.socket] = []
        for number in servers:
            terms = Terms(
                run, self._layout(whole), self._workers, tuple(map(len, self.plan.frames(number))), extras, self._most()
            )
            # A name that is no file, where that will do.
            endpoint, listener = f"ipc://@tutti-{token}-{number}", None
            if self._segment is None:
                endpoint, listener = listen(_own_address())
                listening.append(listener)

            def make(number: int = number) -> tuple[Shelf, Desk]:
                torch.set_num_threads(1)
                shelf = Shelf(self.plan, number, self._trained, initial, make_optimizer, self._handle, self.keys)
                return shelf, desk(shelf)

            jobs.append(
                Job(
                    *(terms, keys.make(), clients, endpoint, None if listener is None else listener.fileno()),
                    *(self._shared(number), make, Snapshots() if restart else None, config.snapshot or _SNAPSHOT),
                )
            )
        kept = [job.snapshots for job in jobs if job.snapshots is not None]
        descriptors = [s.fileno() for s in listening] + [d for s in kept for d in s.descriptors]
        self._host = Host([lambda job=job: serve(job) for job in jobs], descriptors, restart)  # type: ignore[misc]
        for listener in listening:
            listener.close()
        for snapshots in kept:
            snapshots.close()
        return {
            str(number): [job.endpoint, job.keys.public.decode()] for number, job in zip(servers, jobs, strict=True)
        }

    def _most(self) -> int:
        return 16 * self.plan.size + _BLOB

    def _shared(self, server: int) -> list[Shared]:
        """What a server sees of each rank's memory."""
        if self._segment is None:
            return []
        dtypes = [self._trained[section.order[0]][1].dtype for section in self.plan.sections]
        regions = self.plan.regions(server)
        found = []
        for rank in range(self.comm.size):
            parts = [[memory[r.start : r.stop] for r in regions] for memory in self._memory(rank)]
            typed = [[part.view(dtype) for part, dtype in zip(row, dtypes, strict=True)] for row in parts]
            found.append(Shared(*typed))
        return found

    # --- afterwards ------------------------------------------------------------------------------------------------

    @property
    def servers(self) -> int:
        """How many there are."""
        return self._config.servers

    @property
    def home(self) -> bool:
        """Whether parameters can live where they arrive."""
        return self._segment is not None and self.comm.device.type == "cpu"

    def settings(self, lr_factor: float | None) -> list[float]:
        """The optimizer's settings as numbers, at ``lr_factor`` times the initial rates (None: as they are)."""
        if lr_factor is not None:
            for group in self._handle.param_groups:
                group["lr"] = group.setdefault("initial_lr", group["lr"]) * lr_factor
        return hyper.values(self._handle, self.keys)

    def ask(self, kind: int, text: str, clock: int = 0, **more: object) -> list[Reply]:
        """All servers, as this rank's first worker."""
        return self.client.ask(kind, self._setting.mine[0], clock, text, (self.comm.global_rank,), **more)

    def meet(self, text: str) -> None:
        """Wait for all ranks. Collective."""
        self.comm.agree([text], text, "make all ranks save, load and evaluate after the same steps")

    def become(self, saved: SavedState, values: Mapping[str, Tensor], specs: Mapping[str, ShardSpec]) -> list[int]:
        """The servers load these values and the saved optimizer; updates that they count. Collective."""
        if self.comm.rank == 0:
            known = {other: name for name, spec in specs.items() for other in spec.tied}
            states = {}
            for key in saved.names("optim"):
                owner, _, entry = key.rpartition("/")
                states[f"{known.get(owner, owner)}/{entry}"] = saved.get("optim", key)
            servers = range(self._config.servers)
            blobs = [cut(self.plan, m, self._trained, dict(values), states) for m in servers]
            if max(map(len, blobs)) > self._most():
                raise UsageError("the optimizer's saved state is too large for a parameter server")
            self.ask(wire.LOAD, "loading the servers' state", blobs=blobs)
        self.meet("the servers have loaded their state")
        return [reply.header.seen for reply in self.ask(wire.HELLO, "meeting the parameter servers")]

    def optimizer_state(self) -> dict[str, Tensor]:
        """``{parameter}/{key}`` of the whole optimizer on rank 0, nothing elsewhere."""
        if self.comm.rank:
            return {}
        replies = self.ask(wire.SAVE, "reading the servers' state")
        return join(self.plan, self._trained, [reply.frames[0] for reply in replies])

    def facts(self) -> dict[str, Any]:
        """What the servers tell of themselves, on rank 0."""
        if self.comm.rank:
            return {}
        replies = self.ask(wire.FACTS, "asking the servers")
        told = zip(self._addresses, replies, strict=True)
        return {"servers": [{"at": address.endpoint, **json.loads(reply.frames[0])} for address, reply in told]}

    def pids(self) -> dict[int, int]:
        """The processes of the servers that this rank started, as far as it has heard of them."""
        if self._host is None:
            return {}
        self._host.look()
        return dict(self._host.pids)

    def close(self) -> None:
        """End the servers. Nothing can be asked afterwards."""
        self.client.close()
        if self._host is not None:
            self._host.close()

    def _look(self) -> None:
        """Raise what this rank knows of its servers that have ended for good."""
        if self._host is not None:
            self._host.look()
            if self._host.failed:
                raise PeerError(
                    self._host.failed,
                    where=f"the host of rank {self.comm.global_rank}",
                    why="a synchronous server holds what ranks have added up, and is not started again"
                    if self._config.mode == "sync"
                    else None,
                    remedy="--resume continues from the last checkpoint; --max-restarts does so by itself",
                )


def played(setting: Setting) -> tuple[range, ...]:
    """Which workers each data rank plays; where a rank's compute as one, its first. Collective."""
    mine = torch.tensor([setting.mine.start, setting.mine.stop])
    ends = setting.comms.replica.all_gather(mine, "workers of the ranks")
    return tuple(range(int(start), int(stop)) for start, stop in ends)


def _plan(servers: int, parameters: Sequence[torch.nn.Parameter], whole: bool) -> Plan:
    if servers > len(parameters) and whole:
        raise UsageError(
            f"{servers} servers cannot share {len(parameters)} tensors out",
            why="each tensor is whole on one server, for reproducible runs and optimizers of whole layers",
            remedy=f"take servers={len(parameters)} or fewer",
        )
    return plan(flats.sizes(parameters), servers, whole)


def listen(address: str) -> tuple[str, socket.socket]:
    """A free port of one address, never of all: where a server is, and the socket that is its."""
    listener = socket.socket()
    listener.bind((address, 0))
    listener.listen(64)
    listener.set_inheritable(True)
    host, port = listener.getsockname()
    return f"tcp://{host}:{port}", listener


def _own_address() -> str:
    """The address of this host that the other hosts of the job reach; the loopback where there are none."""
    if context.cross_size() == 1:
        return "127.0.0.1"
    # ``tutti.init`` has chosen it where nobody else had.
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
