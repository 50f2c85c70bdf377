"""Collectives among the ranks of one line of the grid.

Every collective of the *control* kind first compares a header (sequence number, operation, shape, dtype, name) over the
ranks; where headers differ nothing is sent, and every rank raises MismatchError showing both calls. The gradient path
skips that: its buckets are compared once at the start, carry a digest in every step, and travel in a process group of
their own, so that they never meet another collective.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from tutti.comm.groups import groups
from tutti.comm.meetings import Meetings
from tutti.comm.stall import Call, StallInspector
from tutti.errors import MismatchError
from tutti.laws.keys import mix, name_key
from tutti.world import lost
from tutti.world.context import World
from tutti.world.grid import Grid

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work

_TEXT = 1024

# The names since PyTorch 2.13, and those before.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Pending:
    """A collective under way. ``wait`` returns when its result is there."""

    def __init__(self, work: Work | None, call: Call | None, stall: StallInspector | None) -> None:
        self._work, self._call, self._stall = work, call, stall

    @property
    def done(self) -> bool:
        """Whether ``wait`` would return at once."""
        return self._work is None or self._work.is_completed()

    def wait(self) -> None:
        """Block until done. Raises PeerError or MismatchError as ``StallInspector.wait``."""
        if self._work is not None and self._stall is not None and self._call is not None:
            self._stall.wait(self._work, self._call)
            if self._call.text in self._stall.sent:
                self._stall.sent.remove(self._call.text)


_DONE = Pending(None, None, None)


class Communicator:
    """The ranks of one line of the grid, in order.

    A communicator of one rank does nothing, quickly.

    Args:
        name: shown in messages.
        ranks: their global numbers, in increasing order; this rank is one of them.
        world: this process's place.
        group: control process group; None for one rank.
        fast: process group of the gradient path; None for one rank.

    Attributes:
        meetings: what carries control calls once ranks may be lost on the way; None where all end together.
    """

    def __init__(
        self,
        name: str,
        ranks: tuple[int, ...],
        world: World,
        group: ProcessGroup | None,
        fast: ProcessGroup | None,
    ) -> None:
        self.name, self.ranks, self.size = name, ranks, len(ranks)
        self.rank = ranks.index(world.identity.rank)
        self.device = world.device
        self._group, self._fast, self.global_rank = group, fast, world.identity.rank
        self.stall = StallInspector(world.store, world.identity.rank, world.identity.size, world.timeout)
        self.meetings: Meetings | None = None
        self._sequence = 0
        self._transfers: dict[tuple[str, int, int], int] = {}

    @property
    def there(self) -> Sequence[int]:
        """Those of its ranks, by place, that took part in the last control call: all, where none may be lost."""
        return range(self.size) if self.meetings is None else self.meetings.there

    def lost(self) -> Mapping[int, str]:
        """Ranks that are lost, and how each ended."""
        return {} if self.meetings is None else self.meetings.notes.lost()

    # --- the gradient path: verified once, no header ---------------------------------------------------------------

    def start_all_reduce(self, flat: Tensor, text: str) -> Pending:
        """Begin an in-place sum of ``flat`` over the ranks; its shape must have been agreed before."""
        if self.size == 1:
            return _DONE
        work = dist.all_reduce(flat, group=self._fast, async_op=True)
        return Pending(work, Call(text, self.ranks), self.stall)

    def exchange_slices(self, send: Tensor, receive: Tensor, parts: Sequence[int], mine: int, text: str) -> None:
        """All-to-all of rows: ``mine`` equal rows go to each rank, ``parts[s]`` rows come from rank ``s``.

        Args:
            send: (size · mine, row), rows for rank 0 first.
            receive: (sum(parts), row).
        """
        if self.size == 1:
            receive.copy_(send)
            return
        work = dist.all_to_all_single(receive, send, list(parts), [mine] * self.size, group=self._fast, async_op=True)
        self.stall.wait(work, Call(text, self.ranks))

    def gather_slices(self, mine: Tensor, text: str) -> Tensor:
        """All-gather of equal slices: (n,) here → (size · n,) everywhere, in rank order."""
        if self.size == 1:
            return mine
        whole = mine.new_empty(self.size * mine.numel())
        work = dist.all_gather(list(whole.view(self.size, -1).unbind()), mine, group=self._fast, async_op=True)
        self._wait(work, text)
        return whole

    def gather_into(self, whole: Tensor, mine: Tensor, text: str) -> None:
        """All-gather of equal slices into ``whole`` (size · n,), of which ``mine`` (n,) may be this rank's part."""
        if self.size > 1:
            self._wait(_all_gather(whole, mine, group=self._fast, async_op=True), text)

    def scatter_sum(self, mine: Tensor, whole: Tensor, text: str) -> None:
        """Reduce-scatter: the sum over the ranks of each one's ``whole`` (size · n,); rank r keeps slice r (n,)."""
        if self.size == 1:
            mine.copy_(whole)
            return
        if whole.is_cuda:
            self._wait(_reduce_scatter(mine, whole, group=self._fast, async_op=True), text)
            return
        # Gloo's own is an all-reduce, and cannot be waited for with a limit.
        parts = torch.empty_like(whole)
        self._wait(dist.all_to_all_single(parts, whole, group=self._fast, async_op=True), text)
        torch.sum(parts.view(self.size, -1), dim=0, out=mine)

    @property
    def group(self) -> ProcessGroup | None:
        """Process group of the gradient path, for engines of PyTorch's that send by themselves; None for one rank."""
        return self._fast

    def start_send(self, tensor: Tensor, to: int, kind: str) -> Pending:
        """Begin to send to rank ``to``, which knows shape and dtype; ``tensor`` must live until ``wait`` of the result.

        Messages of one kind from one rank to another arrive in the order in which they were sent, those of different
        kinds or in different directions do not wait for each other. ``Communicators.linked`` makes their channels.
        """
        return self._transfer(tensor, self.rank, to, kind, sending=True)

    def start_receive(self, tensor: Tensor, source: int, kind: str) -> Pending:
        """Begin to receive into ``tensor`` the next message of this kind from rank ``source``."""
        return self._transfer(tensor, source, self.rank, kind)

    def receive(self, tensor: Tensor, source: int, kind: str) -> None:
        """Receive into ``tensor`` the next message of this kind from rank ``source``."""
        self.start_receive(tensor, source, kind).wait()

    def spread(self, tensor: Tensor, source: int, text: str) -> None:
        """In-place copy of a tensor whose shape was agreed before, from rank ``source`` of this communicator."""
        if self.size > 1:
            self._wait(dist.broadcast(tensor, self.ranks[source], group=self._fast, async_op=True), text)

    def _transfer(self, tensor: Tensor, source: int, to: int, kind: str, sending: bool = False) -> Pending:
        # Gloo closes a connection whose receive was waited for with a limit; a broadcast can be waited for in slices.
        sender, receiver = self.ranks[source], self.ranks[to]
        pair = min(sender, receiver), max(sender, receiver)
        number = self._transfers[kind, source, to] = self._transfers.get((kind, source, to), 0) + 1
        work = dist.broadcast(tensor, sender, group=groups(pair, _channel(kind, sender))[1], async_op=True)
        call = Call(f"{kind} {number} from rank {sender} to rank {receiver}", pair)
        if sending:
            self.stall.sent.append(call.text)
        return Pending(work, call, self.stall)

    # --- control: every call is compared first ---------------------------------------------------------------------

    def all_reduce(self, tensor: Tensor, name: str) -> None:
        """In-place sum over the ranks. Raises MismatchError where shape, dtype, name or operation differ."""
        if self.size > 1:
            self._compare(f"all_reduce '{name}' of {_shape(tensor)}")
            if self.meetings is not None:
                tensor.copy_(torch.stack(self.meetings.tensors(tensor, f"all_reduce '{name}'")).sum(0))
                return
            self._wait(dist.all_reduce(tensor, group=self._carrier(tensor), async_op=True), f"all_reduce '{name}'")

    def broadcast(self, tensor: Tensor, source: int, name: str) -> None:
        """In-place copy from rank ``source`` of this communicator. Raises MismatchError as ``all_reduce``."""
        if self.size > 1:
            self._compare(f"broadcast '{name}' of {_shape(tensor)} from {source}")
            if self.meetings is not None:
                self.meetings.copy(tensor, source, f"broadcast '{name}'")
                return
            work = dist.broadcast(tensor, self.ranks[source], group=self._carrier(tensor), async_op=True)
            self._wait(work, f"broadcast '{name}'")

    def all_gather(self, tensor: Tensor, name: str) -> list[Tensor]:
        """The tensor of every rank that is ``there``; all of one shape and dtype. Raises MismatchError as others."""
        if self.size == 1:
            return [tensor]
        self._compare(f"all_gather '{name}' of {_shape(tensor)}")
        return self._gather(tensor, f"all_gather '{name}'")

    def broadcast_json(self, value: Any, source: int, name: str) -> Any:
        """A JSON value from rank ``source``; other ranks' ``value`` is ignored. Two broadcasts, no pickle."""
        if self.size == 1:
            return value
        raw = json.dumps(value).encode() if self.rank == source else b""
        length = torch.tensor([len(raw)])
        self.broadcast(length, source, f"{name}, length")
        payload = torch.zeros(int(length), dtype=torch.uint8)
        if self.rank == source:
            payload = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
        self.broadcast(payload, source, name)
        return json.loads(bytes(payload.numpy()))

    def agree(self, lines: Sequence[str], name: str, remedy: str) -> None:
        """Compare text line by line over the ranks, by hash; where it differs, show the first difference.

        Raises:
            MismatchError: on every rank, naming two ranks and both their lines.
        """
        if self.size == 1:
            return
        sums = self._gather(_digests(lines), f"comparing {name}")
        other = next((r for r, digest in enumerate(sums) if not torch.equal(digest, sums[0])), None)
        if other is None:
            return
        counts = [int(c) for c in self._gather(torch.tensor([len(lines)]), f"comparing {name}")]
        padded = torch.zeros(max(counts), dtype=torch.int64)
        padded[: len(lines)] = torch.tensor([name_key(line) for line in lines])
        table = self._gather(padded, f"comparing {name}")
        differ = int((table[0] != table[other]).nonzero()[0])
        said = self.texts(lines[differ] if differ < len(lines) else "(nothing)", f"comparing {name}")
        raise MismatchError(
            f"ranks disagree about {name}: rank {self.ranks[0]} has {said[0]}, "
            f"rank {self.ranks[self.there[other]]} has {said[other]}",
            where=f"rank {self.global_rank}, entry {differ}",
            remedy=remedy,
        )

    def _compare(self, text: str) -> None:
        """Compare this call's header over the ranks before anything of it is sent."""
        self._sequence += 1
        header = torch.tensor([self._sequence, _signed(mix(name_key(text), len(text)))])
        headers = torch.stack(self._gather(header, text))
        if bool((headers == headers[0]).all()):
            return
        said = self.texts(f"call {self._sequence}: {text}", "comparing calls")
        other = int((headers != headers[0]).any(dim=1).nonzero()[0])
        raise MismatchError(
            f"ranks are in different collectives: rank {self.ranks[0]} in {said[0]}, "
            f"rank {self.ranks[self.there[other]]} in {said[other]}",
            where=f"rank {self.global_rank}",
            remedy="nothing was sent; make all ranks call the same collectives with the same shapes, in the same order",
        )

    def texts(self, text: str, name: str) -> list[str]:
        """The text of every rank that is ``there``, each cut to 1 KiB. ``name`` is shown where one does not come."""
        if self.size == 1:
            return [text]
        raw = text.encode()[:_TEXT]
        padded = torch.zeros(_TEXT, dtype=torch.uint8)
        padded[: len(raw)] = torch.tensor(list(raw), dtype=torch.uint8)
        texts = self._gather(padded, name)
        return [bytes(t.numpy()).rstrip(b"\0").decode(errors="replace") for t in texts]

    def _gather(self, tensor: Tensor, text: str) -> list[Tensor]:
        if self.meetings is not None:
            return self.meetings.tensors(tensor, text)
        parts = [torch.empty_like(tensor) for _ in self.ranks]
        self._wait(dist.all_gather(parts, tensor, group=self._carrier(tensor), async_op=True), text)
        return parts

    def _carrier(self, tensor: Tensor) -> ProcessGroup | None:
        """Headers and CPU tensors go by the control group; CUDA tensors need NCCL, which only the other one has."""
        return self._fast if tensor.is_cuda else self._group

    def _wait(self, work: Work | None, text: str) -> None:
        if work is not None:
            self.stall.wait(work, Call(f"{text} ({self.name})", self.ranks))


class Communicators:
    """The communicators along a grid's axes, made when first asked for (by all ranks alike) and kept.

    ``world`` has all ranks, ``replica`` those that hold the same part of the model, ``model`` those of one replica.
    """

    def __init__(self, world: World, grid: Grid) -> None:
        self._world, self._grid = world, grid
        self._axes: dict[tuple[str, ...], Communicator] = {}
        self.world = everybody(world)
        self.replica = self._line("replica", "replica", "shard")
        self.model = self._line("model", "stage", "tensor")

    def axis(self, *names: str) -> Communicator:
        """The ranks that differ from this one on these axes of the grid alone: replica, shard, stage or tensor.

        Collective when first asked for.
        """
        if names not in self._axes:
            self._axes[names] = self._line(f"{' × '.join(names)} axis", *names)
        return self._axes[names]

    def outlive(self) -> bool:
        """Go on without ranks that are killed from now on, not rank 0; whether the launcher lets them go. Collective.

        For exchanges in which nobody needs another rank for a step; every rank holds the whole model.
        """
        notes = lost.notes()
        if notes is None or self.replica.size < 2:
            return False
        self.world.meetings = self.replica.meetings = meetings = Meetings(notes, self._world)
        # Once all are here, nobody is in a collective any more that a lost one could break.
        meetings.gather(b"", "the start of all ranks")
        if self._world.identity.rank:
            notes.offer(self._world.identity.rank)
        return True

    def linked(self, name: str, kinds: Mapping[str, int]) -> Communicator:
        """``axis(name)`` with channels between neighbours, the last rank and the first among them, for ``start_send``.

        ``kinds`` says which way messages of a kind go: 1 to the next rank, -1 to the one before. Collective.
        """
        for line in self._lines(name):
            for (here, rank), (kind, way) in product(enumerate(line), kinds.items()):
                other = line[(here + way) % len(line)]
                if other != rank:
                    groups((min(rank, other), max(rank, other)), _channel(kind, rank))
        return self.axis(name)

    def among(self, name: str, places: Sequence[int], purpose: str) -> Communicator | None:
        """The ranks at ``places`` of ``axis(name)``, with a group of their own; None elsewhere. Collective."""
        here = self._grid.along(name)
        for line in self._lines(name):
            made = groups(tuple(line[place] for place in places), purpose)
            if line == here:
                mine = made
        ranks = tuple(here[place] for place in places)
        return Communicator(purpose, ranks, self._world, *mine) if self._grid.rank in ranks else None

    def apart(self, purpose: str) -> Communicator:
        """``replica`` with a process group of its own, for messages that may be under way while gradients are.

        Collective.
        """
        return self._line(f"replica, {purpose}", "replica", "shard", purpose=purpose)

    def _line(self, name: str, *axes: str, purpose: str = "") -> Communicator:
        """This rank's line along ``axes``. Collective: every rank makes the groups of all lines, in one order."""
        made = {line: groups(line, purpose) for line in self._lines(*axes)}
        mine = self._grid.along(*axes)
        return Communicator(name, mine, self._world, *made[mine])

    def _lines(self, *axes: str) -> list[tuple[int, ...]]:
        """Every rank's line along ``axes``, each once, in the same order on all ranks."""
        return sorted({Grid(*self._grid.shape, rank).along(*axes) for rank in range(self._grid.size)})


def everybody(world: World) -> Communicator:
    """All ranks of the job, whatever grid each believes in. Collective."""
    ranks = tuple(range(world.identity.size))
    return Communicator("world", ranks, world, *groups(ranks))


def _channel(kind: str, sender: int) -> str:
    """The purpose of the group that carries messages of one kind one way."""
    return f"{kind} from rank {sender}"


def _digests(lines: Sequence[str]) -> Tensor:
    """Two independent 64-bit digests of ``lines``."""
    keys = [name_key(line) for line in lines]
    return torch.tensor([_signed(mix(1, len(lines), *keys)), _signed(mix(2, *reversed(keys)))])


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def _shape(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
