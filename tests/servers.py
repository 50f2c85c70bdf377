"""Parameter servers of their own processes for tests, without ranks: whoever has a key can be a client."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import zmq
from torch import nn

from tutti.parallel.parameter_server import curve_keys, flat_views, hyperparameters
from tutti.parallel.parameter_server.client import Address, Client, ClientIdentity
from tutti.parallel.parameter_server.curve_keys import Keys
from tutti.parallel.parameter_server.parameter_shard import ParameterShard
from tutti.parallel.parameter_server.request_handlers import AsyncHandler, RequestHandler
from tutti.parallel.parameter_server.server import ServerJob, serve
from tutti.parallel.parameter_server.server_partition import ServerPlan, plan_servers
from tutti.parallel.parameter_server.server_session import listen
from tutti.parallel.parameter_server.server_snapshot import Snapshots
from tutti.parallel.parameter_server.server_supervisor import ServerSupervisor
from tutti.parallel.parameter_server.server_wire import BACK, PUSH, READ, MessageHeader, Terms
from tutti.parallel.parameter_server.staleness import StalenessTracker

RUN, LAYOUT = 5, 6


class Waiting:
    """Waits as a rank does, in nobody's view."""

    def poll(self, done: Callable[[timedelta], bool], call: Any) -> None:
        while not done(timedelta(seconds=0.2)):
            pass


@dataclass
class Served:
    """A server that takes 1 from every element of its parameters at each push of ones: a push is all or nothing."""

    host: ServerSupervisor
    address: Address
    clients: list[Keys]
    terms: Terms
    plan: ServerPlan
    parameters: list[nn.Parameter]
    settings: list[float]

    def client(self, rank: int, keys: Keys | None = None, timeout: float = 20.0, look: bool = True) -> Client:
        """One that pushes ones. ``given`` and ``pushed`` are its memory."""
        pushed, given = (torch.zeros(self.plan.size, dtype=torch.uint8) for _ in range(2))
        for view in flat_views.over(self.plan, self.parameters, pushed):
            view.fill_(1)
        who = ClientIdentity(RUN, LAYOUT, rank, keys or self.clients[rank])
        made = Client(who, [self.address], self.plan, pushed, given, False, Waiting(), timeout)  # type: ignore[arg-type]
        made.given = flat_views.over(self.plan, self.parameters, given)  # type: ignore[attr-defined]
        return made

    @property
    def numbers(self) -> list[float]:
        """The floats of a push."""
        return [*self.settings, *[1.0] * len(self.parameters), 1.0, 0.0]

    def push(self, client: Client, worker: int, clock: int, seen: int = 0, flags: int = BACK) -> Any:
        """One push, and its answer."""
        [reply] = client.ask(PUSH, worker, clock, "push", (0,), flags=flags, extras=self.numbers, seen=[seen])
        return reply

    def read(self, client: Client, worker: int = 0) -> tuple[int, float]:
        """Version and value of the parameters; fails where elements differ: a push was applied in part."""
        [reply] = client.ask(READ, worker, 0, "read", (0,))
        values = torch.cat([view.reshape(-1) for view in client.given])  # type: ignore[attr-defined]
        assert bool((values == values[0]).all()), "half a push was applied"
        return reply.header.seen, float(values[0])

    def frames(self, rank: int, seq: int, clock: int, **changes: Any) -> list[bytes]:
        """A push as it goes over the wire."""
        sizes = self.terms.frames
        header = MessageHeader(PUSH, 0, RUN, LAYOUT, rank, self.terms.workers[rank][0], seq, clock, 0)
        header = header._replace(extras=len(self.numbers), tensors=len(sizes), size=sum(sizes))._replace(**changes)
        ones = torch.ones(sum(sizes) // 8, dtype=torch.float64).numpy().tobytes()
        return [header.pack(), torch.tensor(self.numbers, dtype=torch.float64).numpy().tobytes(), ones]

    def raw(self, rank: int) -> zmq.Socket[bytes]:
        """A socket with the key of ``rank`` that sends whatever it is told."""
        socket = zmq.Context.instance().socket(zmq.DEALER)
        curve_keys.secure_client(socket, self.clients[rank], self.address.key)
        socket.linger, socket.rcvtimeo = 0, 10_000
        socket.connect(self.address.endpoint)
        return socket

    def pid(self) -> int:
        """The server's process."""
        end = time.monotonic() + 20
        while time.monotonic() < end:
            self.host.look()
            if 0 in self.host.pids:
                return self.host.pids[0]
            time.sleep(0.01)
        raise TimeoutError("the server did not start")


@contextmanager
def served(
    clients: int = 3,
    bound: int | None = None,
    lease: float = math.inf,
    snapshot: int = 10,
    elements: int = 30,
    begin: Callable[[], object] = lambda: None,
) -> Iterator[Served]:
    """A server that makes an update of every push, each client one worker; ``begin`` is called first in its process."""
    parameters = [nn.Parameter(torch.zeros(elements, dtype=torch.float64)), nn.Parameter(torch.zeros(2, 3).double())]
    named = [(f"p{i}", p) for i, p in enumerate(parameters)]
    handle = torch.optim.SGD(parameters, lr=1.0)
    chosen = hyperparameters.keys(handle)
    shared_out = plan_servers(flat_views.sizes(parameters), 1, whole=False)
    extras = {PUSH: len(chosen) + len(parameters) + 2}
    sizes = tuple(len(frame) for frame in shared_out.frames(0))
    workers = tuple(range(rank, rank + 1) for rank in range(clients))
    terms = Terms(RUN, LAYOUT, workers, sizes, extras, 1 << 20)
    endpoint, listener = listen("127.0.0.1")
    initial = torch.zeros(shared_out.size, dtype=torch.uint8)

    def make() -> tuple[ParameterShard, RequestHandler]:
        begin()
        torch.set_num_threads(1)
        shard = ParameterShard(
            shared_out, 0, named, initial, lambda n: torch.optim.SGD([p for _, p in n], 1.0), handle, chosen
        )
        return shard, AsyncHandler(shard, StalenessTracker(clients, bound, lease), len(chosen), over_staleness=False)

    own, pairs, kept = curve_keys.make_keys(), [curve_keys.make_keys() for _ in range(clients)], Snapshots()
    job = ServerJob(terms, own, [pair.public for pair in pairs], endpoint, listener.fileno(), [], make, kept, snapshot)
    host = ServerSupervisor([lambda: serve(job)], [listener.fileno(), *kept.descriptors], restart=True)
    listener.close()
    kept.close()
    values = hyperparameters.values(handle, chosen)
    try:
        yield Served(host, Address(endpoint, own.public), pairs, terms, shared_out, parameters, values)
    finally:
        host.close()
