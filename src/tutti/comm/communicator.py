"""Collectives and messages among a group of ranks.

Every *control* collective first all-gathers a header (sequence number, operation, shape, dtype, name); where headers
differ nothing is sent, and every rank raises MismatchError showing both calls. The gradient path skips the header: its
buckets are compared once at the start, carry a digest in every step, and travel in a process group of their own, so
that they never mix with another collective. ``Communicator.share_memory`` lets its small messages travel in shared
memory, where every message carries a digest of its call.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from tutti.comm.collective_schedules import LinkTraffic
from tutti.comm.file_all_gather import FileAllGather
from tutti.comm.graph_breaks import ends_graph
from tutti.comm.process_groups import channel_purpose, count_message, process_groups
from tutti.comm.random_keys import mix, name_key
from tutti.comm.shared_memory import CONTROL_BYTES, SmallMessages, attach_small
from tutti.comm.stall import Call, StallInspector
from tutti.device import is_accelerator
from tutti.errors import MismatchError, UsageError, script_line
from tutti.launcher.context import World
from tutti.torch_compat import all_gather_single, reduce_scatter_single

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work


class Pending:
    """Handle of an asynchronous collective or point-to-point transfer, whose ``wait`` blocks until its end.

    Args:
        work: handle of ``torch.distributed``; None for a call that is complete already, as with one rank.
        call: description of the collective or transfer, for error messages; None without ``work``.
        stall: waits for ``work`` with a timeout; None without ``work``.
    """

    def __init__(self, work: Work | None, call: Call | None, stall: StallInspector | None) -> None:
        self._work, self._call, self._stall = work, call, stall

    @property
    def done(self) -> bool:
        """Whether the collective or transfer has completed, so that ``wait`` would return at once. Does not block."""
        return self._work is None or self._work.is_completed()

    def wait(self) -> None:
        """Block until the collective or transfer is complete, so that its tensors may be used, or until it has failed.

        Raises:
            MismatchError: deadlock: every rank waits in a call that at least one other rank has not made.
            PeerError: a connection broke, or the timeout has passed; names the missing ranks.
        """
        if self._work is not None and self._stall is not None and self._call is not None:
            self._stall.wait(self._work, self._call)
            if self._call.text in self._stall.sent:
                self._stall.sent.remove(self._call.text)


_DONE = Pending(None, None, None)


class Communicator:
    """Collectives and messages among some ranks of the job, such as the ranks along one axis of the device mesh.

    A communicator of one rank returns at once from every call.

    Args:
        name: shown in error messages.
        ranks: global ranks of the members, in increasing order; this rank is one of them.
        world: rank, device, store and timeout of this process, as ``tutti.init`` has set them.
        control_group: process group for control messages (Gloo, CPU tensors); None for one rank.
        gradient_group: process group for gradients (default backend); None for one rank.

    Attributes:
        name, ranks: name and members, as given to the constructor.
        size: number of members.
        rank: index of this rank in ``ranks``; ``source`` and ``to`` in the methods are such indices, too.
        global_rank: this rank's number in the job.
        node: index of this rank's node.
        device: device of this rank's tensors.
        stall: waits for this process's collectives with a timeout.
        file_all_gather: all-gather over files that performs the collectives which compare calls, once the run
            tolerates lost ranks; None where all ranks end with the first.
    """

    def __init__(
        self,
        name: str,
        ranks: tuple[int, ...],
        world: World,
        control_group: ProcessGroup | None,
        gradient_group: ProcessGroup | None,
    ) -> None:
        self.name, self.ranks, self.size = name, ranks, len(ranks)
        self.rank = ranks.index(world.identity.rank)
        self.device = world.device
        identity = world.identity
        self._control_group, self._gradient_group = control_group, gradient_group
        self.global_rank, self.node = identity.rank, identity.cross_rank
        self.stall = StallInspector(world, world.timeout)
        self.file_all_gather: FileAllGather | None = None
        self._small: SmallMessages | None = None
        self._control: SmallMessages | None = None
        self._sequence = 0
        self._counted: dict[tuple[int, int], LinkTraffic] = {}
        self._collectives: dict[str, LinkTraffic] = {}

    @property
    def alive_ranks(self) -> Sequence[int]:
        """Indices, within this communicator, of the ranks that are alive as far as known, in increasing order. Local.

        All ranks, unless ``Communicators.tolerate_loss`` has let the run go on without killed ranks. From then on they
        are the ranks that took part in the last collective that compares calls (``all_reduce``, ``broadcast``,
        ``all_gather`` and methods built on these), of the communicator ``world`` or ``replica``, whichever was later.
        """
        return range(self.size) if self.file_all_gather is None else self.file_all_gather.alive

    def lost_ranks(self) -> Mapping[int, str]:
        """Return the ranks of the job that were killed while the run continued: global rank → text on how it ended.

        Empty unless ``Communicators.tolerate_loss`` was called, which lets the run go on without killed ranks. Local,
        not collective.
        """
        return {} if self.file_all_gather is None else self.file_all_gather.notes.lost()

    # --- the gradient path: verified once, no header ---------------------------------------------------------------

    def share_memory(self, like: Communicator | None = None) -> None:
        """Make collectives of small CPU tensors on this communicator use shared memory instead of Gloo.

        Small are tensors of at most 1 MiB on a rank. Faster on one node. Affects ``sum_in_place``, ``gather_slices``,
        ``gather_into`` and ``scatter_sum``. To make new memory, the call is collective over the ranks of this
        communicator (a broadcast of the file's name and all-reduces) and blocks; if the ranks are on several nodes, or
        there is no shared memory, none is made, and Gloo stays in use. A call for accelerators, or for a communicator
        that has shared memory already, does nothing.

        Args:
            like: a communicator whose shared memory is used, without a message, if it has the same ranks; otherwise,
                and for None, new memory is made.

        Raises:
            MismatchError: ranks are in different calls.
            PeerError: a rank has ended, or did not make the call in time.
        """
        if self._small is not None:
            return
        if like is not None and like.ranks == self.ranks:
            self._small = like._small
        elif self.size > 1 and not is_accelerator(self.device):
            self._small = attach_small(self)

    def sum_in_place(self, tensor: Tensor, text: str) -> None:
        """All-reduce (sum) ``tensor`` in place, a small CPU tensor through shared memory if ``share_memory`` made some.

        Collective over the ranks of this communicator; blocks. Shape and dtype must be equal on all ranks; only in
        shared memory number of elements and dtype are checked.

        Args:
            tensor: contiguous, overwritten by the sum over the ranks.
            text: names the call in PeerError and MismatchError; equal on all ranks.

        Raises:
            MismatchError: deadlock: the ranks wait in different calls; in shared memory also where their calls, numbers
                of elements or dtypes differ.
            PeerError: a rank has ended, a connection broke, or the timeout has passed.
        """
        if self._small is not None and self._small.takes(tensor):
            self._count_collective("shared_memory", tensor, self.size)
            torch.sum(self._small.gather(tensor, text), dim=0, out=tensor.view(-1))
        else:
            self.start_all_reduce(tensor, text).wait()

    def start_all_reduce(self, flat: Tensor, text: str) -> Pending:
        """Start an all-reduce (sum) of ``flat`` in place, and return a handle to wait for it.

        Collective over the ranks of this communicator; does not block.

        Args:
            flat: contiguous, of equal shape and dtype on all ranks, which is not checked; not to be used before
                ``wait`` of the handle.
            text: names the call in the errors of ``wait``; equal on all ranks.

        Returns:
            A ``Pending``, whose ``wait`` blocks until ``flat`` holds the sum, or raises PeerError (a rank is lost or
            late) or MismatchError (the ranks wait in different calls).
        """
        if self.size == 1:
            return _DONE
        self._count_collective("all_reduce", flat)
        work = dist.all_reduce(flat, group=self._gradient_group, async_op=True)
        return Pending(work, Call(text, self.ranks), self.stall)

    def exchange_slices(self, send: Tensor, receive: Tensor, parts: Sequence[int], mine: int, text: str) -> None:
        """All-to-all of rows: send ``mine`` rows to each rank and receive ``parts[s]`` rows from rank ``s``.

        Collective over the ranks of this communicator; blocks. A row has n elements, the same number on all ranks.

        Args:
            send: (size · mine, n), rows for rank 0 first; ``size`` is the number of ranks.
            receive: (sum(parts), n), overwritten; rows from rank 0 first.
            parts: for each rank, the number of rows that it sends to every rank, itself included.
            mine: rows that this rank sends to each rank, ``parts[rank]``.
            text: names the call in PeerError and MismatchError; equal on all ranks.

        Raises:
            MismatchError: deadlock: every rank waits in a call that at least one other rank has not made.
            PeerError: a connection broke, or the timeout has passed; names the missing ranks.
        """
        self._count_collective("all_to_all", send)
        if self.size == 1:
            receive.copy_(send)
            return
        work = dist.all_to_all_single(
            receive, send, list(parts), [mine] * self.size, group=self._gradient_group, async_op=True
        )
        self.stall.wait(work, Call(text, self.ranks))

    def exchange_parts(self, send: Tensor, sizes: Sequence[int], receive: Sequence[int], text: str) -> Tensor:
        """All-to-all of uneven parts: send ``sizes[r]`` elements to rank r and receive ``receive[r]`` elements from it.

        Collective over the ranks of this communicator; blocks.

        Args:
            send: (sum(sizes),), the part for rank 0 first.
            sizes: for each rank, itself included, the number of elements that this rank sends to it.
            receive: for each rank, itself included, the number of elements that it sends to this rank; not checked.
            text: names the call in PeerError and MismatchError; equal on all ranks.

        Returns:
            The received elements, a tensor of shape (sum(receive),), the part from rank 0 first; with one rank ``send``
            itself.

        Raises:
            MismatchError: deadlock: every rank waits in a call that at least one other rank has not made.
            PeerError: a connection broke, or the timeout has passed; names the missing ranks.
        """
        if self.size == 1:
            return send
        received = send.new_empty(sum(receive))
        work = dist.all_to_all_single(
            received, send, list(receive), list(sizes), group=self._gradient_group, async_op=True
        )
        self._wait(work, text)
        return received

    def gather_slices(self, mine: Tensor, text: str) -> Tensor:
        """All-gather equal slices and concatenate them in rank order. Collective over the communicator's ranks; blocks.

        Args:
            mine: (n,), this rank's slice; equal n and dtype on all ranks.
            text: names the call in PeerError and MismatchError; equal on all ranks.

        Returns:
            The concatenated slices, a tensor of shape (size · n,), equal on all ranks; ``size`` is the number of ranks.
            With one rank ``mine`` itself.

        Raises:
            MismatchError: deadlock: the ranks wait in different calls; in shared memory also where their calls, numbers
                of elements or dtypes differ.
            PeerError: a rank has ended, a connection broke, or the timeout has passed.
        """
        if self.size == 1:
            return mine
        if self._small is not None and self._small.takes(mine):
            self._count_collective("shared_memory", mine, self.size)
            return self._small.gather(mine, text).flatten()
        self._count_collective("all_gather", mine, self.size)
        whole = mine.new_empty(self.size * mine.numel())
        work = dist.all_gather(
            list(whole.view(self.size, -1).unbind()), mine, group=self._gradient_group, async_op=True
        )
        self._wait(work, text)
        return whole

    def gather_into(self, whole: Tensor, mine: Tensor, text: str) -> None:
        """All-gather equal slices (n,) of the ranks into ``whole`` (size · n,), in rank order.

        Collective over the ranks of this communicator; blocks.

        Args:
            whole: (size · n,), overwritten; ``size`` is the number of ranks. With one rank nothing is copied.
            mine: (n,), this rank's slice; may be a view of its place in ``whole``; with one rank it is ``whole``.
            text: names the call in PeerError and MismatchError; equal on all ranks.

        Raises:
            MismatchError: deadlock: the ranks wait in different calls; in shared memory also where their calls, numbers
                of elements or dtypes differ.
            PeerError: a rank has ended, a connection broke, or the timeout has passed.
        """
        if self._small is not None and self._small.takes(mine):
            self._count_collective("shared_memory", mine, self.size)
            whole.view(self.size, -1).copy_(self._small.gather(mine, text))
        elif self.size > 1:
            self._count_collective("all_gather", whole)
            self._wait(all_gather_single(whole, mine, group=self._gradient_group, async_op=True), text)

    def scatter_sum(self, mine: Tensor, whole: Tensor, text: str) -> None:
        """Reduce-scatter: sum ``whole`` over the ranks and write slice r of the sum into ``mine`` on rank r.

        Collective over the ranks of this communicator; blocks.

        Args:
            mine: (n,), overwritten.
            whole: (size · n,), this rank's summand, slice of rank 0 first; ``size`` is the number of ranks.
            text: names the call in PeerError and MismatchError; equal on all ranks.

        Raises:
            MismatchError: deadlock: the ranks wait in different calls; in shared memory also where their calls, numbers
                of elements or dtypes differ.
            PeerError: a rank has ended, a connection broke, or the timeout has passed.
        """
        if self.size == 1:
            mine.copy_(whole)
            return
        if is_accelerator(whole.device):
            self._count_collective("reduce_scatter", whole)
            self._wait(reduce_scatter_single(mine, whole, group=self._gradient_group, async_op=True), text)
            return
        if self._small is not None and self._small.takes(whole):
            self._count_collective("shared_memory", whole, self.size)
            slices = self._small.gather(whole, text).view(self.size, self.size, -1)[:, self.rank]
            torch.sum(slices, dim=0, out=mine)
            return
        # Gloo's reduce-scatter is an all-reduce, and its work cannot be waited for with a timeout.
        self._count_collective("all_to_all", whole)
        parts = torch.empty_like(whole)
        self._wait(dist.all_to_all_single(parts, whole, group=self._gradient_group, async_op=True), text)
        torch.sum(parts.view(self.size, -1), dim=0, out=mine)

    @property
    def gradient_group(self) -> ProcessGroup | None:
        """Process group on which this communicator's gradients travel, to pass to PyTorch's own collectives.

        Its backend is the default one (NCCL or another for an accelerator). None for a communicator of one rank.
        """
        return self._gradient_group

    def start_send(self, tensor: Tensor, to: int, kind: str) -> Pending:
        """Start to send ``tensor`` to rank ``to``, which must receive it by ``start_receive`` or ``receive``.

        Does not block if ``Communicators.p2p_channels`` or ``Communicators.connect`` has made the channel; otherwise
        the first message makes a process group, and blocks until all ranks of the job make it. The receiver must know
        shape and dtype, and name the same ``kind``. Messages of one kind from one rank to another arrive in the order
        of sending; messages of different kinds or directions are independent.

        Args:
            tensor: the message, contiguous; must live, unchanged, until ``wait`` of the returned handle.
            to: index of the receiving rank within this communicator.
            kind: channel of the message: a key of the ``kinds`` that were given to ``p2p_channels``, or
                ``ALGORITHM all-reduce`` after ``connect``.

        Returns:
            Handle, whose ``wait`` blocks until the message is sent, or raises PeerError (a rank is lost or late) or
            MismatchError (the ranks wait for each other in different calls).
        """
        return self._transfer(tensor, self.rank, to, kind, sending=True)

    def start_receive(self, tensor: Tensor, source: int, kind: str) -> Pending:
        """Start to receive the next message of a kind from rank ``source`` into ``tensor``.

        Does not block if ``Communicators.p2p_channels`` or ``Communicators.connect`` has made the channel; otherwise
        the first message makes a process group, and blocks until all ranks of the job make it.

        Args:
            tensor: contiguous, of the shape and dtype sent; overwritten, and not to be read before ``wait`` of the
                returned handle.
            source: index of the sending rank within this communicator.
            kind: channel of the message, as given to ``start_send``.

        Returns:
            Handle, whose ``wait`` blocks until the message has arrived, or raises PeerError (a rank is lost or late) or
            MismatchError (the ranks wait for each other in different calls).
        """
        return self._transfer(tensor, source, self.rank, kind)

    def receive(self, tensor: Tensor, source: int, kind: str) -> None:
        """Receive the next message of a kind from rank ``source`` into ``tensor``. Blocks until it has arrived.

        Args:
            tensor: of the shape and dtype sent; overwritten.
            source: index of the sending rank within this communicator.
            kind: channel of the message, as given to ``start_send``.

        Raises:
            MismatchError: deadlock: every rank waits in a call that at least one other rank has not made.
            PeerError: a connection broke, or the timeout has passed; names the missing ranks.
        """
        self.start_receive(tensor, source, kind).wait()

    def broadcast_unchecked(self, tensor: Tensor, source: int, text: str) -> None:
        """Broadcast one tensor in place from rank ``source``, without a comparison of the ranks' calls beforehand.

        Collective over the ranks of this communicator; blocks. Faster than ``broadcast``; for tensors whose shapes are
        known to agree.

        Args:
            tensor: of equal shape and dtype on all ranks, which is not checked.
            source: index of the sending rank within this communicator.
            text: names the call in PeerError and MismatchError; equal on all ranks.

        Raises:
            MismatchError: deadlock: every rank waits in a call that at least one other rank has not made.
            PeerError: a connection broke, or the timeout has passed; names the missing ranks.
        """
        if self.size > 1:
            self._count_collective("broadcast", tensor)
            self._wait(dist.broadcast(tensor, self.ranks[source], group=self._gradient_group, async_op=True), text)

    @ends_graph
    def _transfer(self, tensor: Tensor, source: int, to: int, kind: str, sending: bool = False) -> Pending:
        # A broadcast in a group of two: Gloo closes the connection if a receive is waited for with a timeout, whereas
        # the wait for a broadcast may be split into short ones.
        sender, receiver = self.ranks[source], self.ranks[to]
        pair = min(sender, receiver), max(sender, receiver)
        channel = pair, channel_purpose(kind, sender)
        work = dist.broadcast(tensor, sender, group=process_groups(*channel)[1], async_op=True)
        number = count_message(*channel)
        call = Call(f"{kind} {number} from rank {sender} to rank {receiver}", pair)
        if sending:
            self.count(source, to, tensor.nbytes)
            self.stall.sent.append(call.text)
        return Pending(work, call, self.stall)

    # --- counters ----------------------------------------------------------------------------------------------------

    def count(self, source: int, to: int, size: int) -> None:
        """Add one message from rank ``source`` to rank ``to`` to this communicator's traffic statistics. Local.

        To be called on one of the two ranks only, because ``traffic`` sums over the ranks.

        Args:
            source: index within this communicator of the sending rank.
            to: index within this communicator of the receiving rank.
            size: bytes of the message.
        """
        messages, bytes_ = self._counted.get((source, to), (0, 0))
        self._counted[source, to] = LinkTraffic(messages + 1, bytes_ + size)

    def traffic(self) -> dict[tuple[int, int], LinkTraffic]:
        """Return messages and bytes on each link between ranks of this communicator so far, summed over the ranks.

        Collective over the ranks of this communicator, an all-reduce of the counts; blocks. Counted are point-to-point
        messages and the transfers of a ``ScheduledAllReduce`` through shared memory, but not the messages that a
        backend such as NCCL sends inside a collective, which this process does not see.

        Returns:
            A dict from (source, destination), as indices within the communicator, to a ``LinkTraffic`` with the number
            of ``messages`` and their ``bytes``; links without traffic are missing. Equal on all ranks.

        Raises:
            MismatchError: ranks are in different calls.
            PeerError: a rank has ended, or did not make the call in time.
        """
        table = torch.zeros(self.size, self.size, 2, dtype=torch.int64)
        for (source, to), counted in self._counted.items():
            table[source, to] = torch.tensor(counted)
        self.all_reduce(table, "traffic of the links")
        links = [(source, to) for source in range(self.size) for to in range(self.size)]
        return {link: LinkTraffic(*table[link].tolist()) for link in links if table[link][0]}

    def _count_collective(self, kind: str, tensor: Tensor, times: int = 1) -> None:
        """Count one collective of the gradient path over several ranks, and ``times`` the bytes of a tensor."""
        if self.size > 1:
            calls, size = self._collectives.get(kind, (0, 0))
            # torch.compile traces this line in a forward that gathers; it does not know ``nbytes``.
            self._collectives[kind] = LinkTraffic(calls + 1, size + times * tensor.numel() * tensor.element_size())

    def collective_facts(self) -> dict[str, dict[str, int]]:
        """Return the number of calls and bytes of this rank's collectives on gradients and activations so far. Local.

        The bytes of a call are those of the whole tensor: the vector to sum or to broadcast, all rows that a rank sends
        in an all-to-all, all slices that it has after an all-gather, all ranks' tensors in shared memory. How many of
        these bytes pass a link depends on the backend's algorithm. Collectives that PyTorch itself makes (FSDP2 on
        accelerators) and calls of ``exchange_parts`` are not counted.

        Returns:
            Kind of collective → ``{"calls": N, "bytes": N}``, as ``summary.json`` records it. Kinds are ``all_reduce``,
            ``all_gather``, ``reduce_scatter``, ``all_to_all``, ``broadcast``, and ``shared_memory`` for small tensors
            that all ranks read in the memory of their node.
        """
        return {kind: {"calls": calls, "bytes": size} for kind, (calls, size) in self._collectives.items()}

    # --- control: every call is compared first ---------------------------------------------------------------------

    def share_control(self, like: Communicator | None = None) -> None:
        """Make control messages of up to 16 KiB use shared memory instead of Gloo, where all ranks are on one node.

        Faster: one barrier in place of two collectives over sockets. Affects ``all_reduce``, ``broadcast``,
        ``all_gather`` and the methods built on them, for tensors on the CPU. To make new memory, the call is collective
        over the ranks of this communicator (a broadcast of the file's name and all-reduces) and blocks; if the ranks
        are on several nodes, or there is no shared memory, none is made, and Gloo stays in use.

        Args:
            like: a communicator whose memory for control messages is used, without a message, if it has the same ranks;
                otherwise, and for None, new memory is made.

        Raises:
            MismatchError: ranks are in different calls.
            PeerError: a rank has ended, or did not make the call in time.
        """
        if like is not None and like.ranks == self.ranks:
            self._control = like._control
        elif self.size > 1:
            self._control = attach_small(self, CONTROL_BYTES)

    def all_reduce(self, tensor: Tensor, name: str) -> None:
        """All-reduce (sum) ``tensor`` in place, after a comparison of the ranks' calls.

        Collective over the ranks of this communicator; blocks. After ``Communicators.tolerate_loss``, the sum is over
        the ranks that are alive.

        Args:
            tensor: of equal shape and dtype on all ranks.
            name: names the call in MismatchError and PeerError; equal on all ranks.

        Raises:
            MismatchError: shape, dtype, name or operation differ between ranks.
            PeerError: a rank has ended, or did not make the call in time.
        """
        if self.size > 1:
            call = f"all_reduce '{name}' of {_shape(tensor)}"
            if self._fits_in_memory(tensor):
                tensor.copy_(self._gather_in_memory(tensor, call, call).sum(0).view_as(tensor))
                return
            self._compare(call)
            if self.file_all_gather is not None:
                tensor.copy_(torch.stack(self.file_all_gather.tensors(tensor, f"all_reduce '{name}'")).sum(0))
                return
            self._wait(dist.all_reduce(tensor, group=self._carrier(tensor), async_op=True), f"all_reduce '{name}'")

    def broadcast(self, tensor: Tensor, source: int, name: str) -> None:
        """Broadcast ``tensor`` in place from rank ``source``, after a comparison of the ranks' calls.

        Collective over the ranks of this communicator; blocks.

        Args:
            tensor: of equal shape and dtype on all ranks.
            source: index of the sending rank within this communicator.
            name: names the call in MismatchError and PeerError; equal on all ranks.

        Raises:
            MismatchError: shape, dtype, source, name or operation differ between ranks.
            PeerError: a rank has ended, or did not make the call in time.
        """
        if self.size > 1:
            call = f"broadcast '{name}' of {_shape(tensor)} from {source}"
            if self._fits_in_memory(tensor):
                tensor.copy_(self._gather_in_memory(tensor, call, call)[source].view_as(tensor))
                return
            self._compare(call)
            if self.file_all_gather is not None:
                self.file_all_gather.copy(tensor, source, f"broadcast '{name}'")
                return
            work = dist.broadcast(tensor, self.ranks[source], group=self._carrier(tensor), async_op=True)
            self._wait(work, f"broadcast '{name}'")

    def all_gather(self, tensor: Tensor, name: str) -> list[Tensor]:
        """All-gather a tensor from each rank, after a comparison of the ranks' calls.

        Collective over the ranks of this communicator; blocks.

        Args:
            tensor: of equal shape and dtype on all ranks.
            name: names the call in MismatchError and PeerError; equal on all ranks.

        Returns:
            One new tensor for each rank, in rank order, without ranks that were killed while the run goes on
            (``alive_ranks``). With one rank a list of ``tensor`` itself.

        Raises:
            MismatchError: shape, dtype, name or operation differ between ranks.
            PeerError: a rank has ended, or did not make the call in time.
        """
        if self.size == 1:
            return [tensor]
        call = f"all_gather '{name}' of {_shape(tensor)}"
        if not self._fits_in_memory(tensor):
            self._compare(call)
        return self._gather(tensor, f"all_gather '{name}'", call)

    def broadcast_json(self, value: Any, source: int, name: str) -> Any:
        """Broadcast a JSON value from rank ``source`` to all ranks, without pickle, and return it.

        Collective over the ranks of this communicator; blocks.

        Args:
            value: on ``source``, a value that ``json.dumps`` accepts; ignored on other ranks.
            source: index of the sending rank within this communicator.
            name: names the call in MismatchError and PeerError; equal on all ranks.

        Returns:
            The value of ``source``, as it is after a round trip through JSON (tuples become lists); with one rank,
            ``value`` itself.

        Raises:
            MismatchError: the ranks are in different calls.
            PeerError: a rank has ended, or did not make the call in time.
        """
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
        """Check that a text is the same on all ranks; otherwise raise on every rank.

        Collective over the ranks of this communicator: an all-gather of digests and, only where these differ, one of
        the lines; blocks.

        Args:
            lines: the text to compare, line by line.
            name: subject of the text, which both errors name; equal on all ranks.
            remedy: how to make the ranks agree, a text for MismatchError.

        Raises:
            MismatchError: on every rank, naming two ranks and the first line in which they differ. Or the ranks are in
                different calls.
            PeerError: a rank has ended, or did not make the call in time.
        """
        if self.size == 1:
            return
        sums = self.all_gather(_digests(lines), f"comparing {name}")
        other = next((r for r, digest in enumerate(sums) if not torch.equal(digest, sums[0])), None)
        if other is None:
            return
        texts = [json.loads(text) for text in self.all_gather_strings(json.dumps(list(lines)), f"comparing {name}")]
        pairs = enumerate(zip_longest(texts[0], texts[other], fillvalue="(nothing)"))
        differ, (first, line) = next((place, pair) for place, pair in pairs if pair[0] != pair[1])
        raise MismatchError(
            f"ranks disagree about {name}: rank {self.ranks[0]} has {first}, "
            f"rank {self.ranks[self.alive_ranks[other]]} has {line}",
            where=f"rank {self.global_rank}, entry {differ}",
            remedy=remedy,
        )

    def _compare(self, call: str) -> None:
        """All-gather a digest of this call and raise MismatchError on every rank if two ranks differ."""
        digest = torch.tensor([self._sequence + 1, _signed(mix(name_key(call), len(call)))])
        if self._fits_in_memory(digest):
            self._gather_in_memory(digest, call, call)
            return
        self._sequence += 1
        digests = torch.stack(self._gather(digest, call))
        if bool((digests == digests[0]).all()):
            return
        other = int((digests != digests[0]).any(dim=1).nonzero()[0])
        raise self.calls_differ(f"call {self._sequence}: {call}", other)

    def calls_differ(self, call: str, other: int) -> MismatchError:
        """Build, without raising it, a MismatchError that shows the different collective calls of two ranks.

        Collective over the ranks of this communicator, which all-gathers the descriptions of the calls; blocks.

        Args:
            call: describes this rank's call, as text that the error shows.
            other: position in ``alive_ranks`` of a rank whose call differs from the call of the first rank in
                ``alive_ranks``; equal on all ranks.

        Returns:
            The error, whose message names both ranks and their calls.

        Raises:
            PeerError: a rank has ended, or did not make the call in time.
        """
        calls = self._gather_strings(f"{call} ({script_line()})", "comparing calls", self._gather)
        return MismatchError(
            f"ranks are in different collectives: rank {self.ranks[0]} in {calls[0]}, "
            f"rank {self.ranks[self.alive_ranks[other]]} in {calls[other]}",
            where=f"rank {self.global_rank}",
            why="they did not run the same sequence of collectives; nothing was added up",
            remedy="make all ranks take the same steps and call the same collectives with equal shapes, in one order;"
            " read norms and values of split or sharded tensors on every rank, and print them on rank 0",
        )

    def all_gather_strings(self, text: str, name: str) -> list[str]:
        """All-gather a string of any length from each rank.

        Collective over the ranks of this communicator: an all-gather of the lengths and, unless all strings are empty,
        one of the strings; blocks.

        Args:
            text: this rank's string; may differ between ranks.
            name: names the call in MismatchError and PeerError; equal on all ranks.

        Returns:
            One string for each rank, in rank order, without ranks that were killed while the run goes on
            (``alive_ranks``).

        Raises:
            MismatchError: the ranks are in different calls.
            PeerError: a rank has ended, or did not make the call in time.
        """
        return [text] if self.size == 1 else self._gather_strings(text, name, self.all_gather)

    def _gather_strings(
        self, text: str, name: str, gather_lengths: Callable[[Tensor, str], Sequence[Tensor]]
    ) -> list[str]:
        """All-gather the strings and before them, by ``gather_lengths``, which may compare the calls, their lengths."""
        raw = text.encode()
        lengths = gather_lengths(torch.tensor([len(raw)]), f"{name}, length")
        longest = max(int(length) for length in lengths)
        if not longest:
            return [""] * len(lengths)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(raw)] = torch.tensor(list(raw), dtype=torch.uint8)
        return [bytes(each.numpy()).rstrip(b"\0").decode() for each in self._gather(padded, name)]

    def _fits_in_memory(self, tensor: Tensor) -> bool:
        """Return whether a control message with ``tensor`` goes through shared memory, where calls are compared."""
        return self._control is not None and self.file_all_gather is None and self._control.takes(tensor)

    def _gather_in_memory(self, tensor: Tensor, text: str, call: str) -> Tensor:
        """All-gather a small tensor in shared memory: (size, n); raise MismatchError if calls differ between ranks."""
        assert self._control is not None
        self._sequence += 1
        return self._control.gather(tensor, f"{text} ({self.name})", call and f"call {self._sequence}: {call}")

    def _gather(self, tensor: Tensor, text: str, call: str = "") -> list[Tensor]:
        """All-gather a tensor for control; ``call``, where given, is compared if shared memory carries the tensor."""
        if self.file_all_gather is not None:
            return self.file_all_gather.tensors(tensor, text)
        if self._fits_in_memory(tensor):
            rows = self._gather_in_memory(tensor, text, call)
            return list(rows.clone().view(self.size, *tensor.shape).unbind())
        parts = [torch.empty_like(tensor) for _ in self.ranks]
        self._wait(dist.all_gather(parts, tensor, group=self._carrier(tensor), async_op=True), text)
        return parts

    def _carrier(self, tensor: Tensor) -> ProcessGroup | None:
        """Return the control group (Gloo) for CPU tensors, the fast group for an accelerator's, for its backend.

        Raises:
            UsageError: the script has destroyed the process groups.
        """
        if not dist.is_initialized():
            raise UsageError(
                "the script has destroyed the process groups, which this call needs",
                where=script_line(),
                why="dist.destroy_process_group() and accelerator.end_training() do so",
                remedy="call them last, or leave them out: tutti destroys its groups when the script ends",
            )
        return self._gradient_group if is_accelerator(tensor.device) else self._control_group

    def _wait(self, work: Work | None, text: str) -> None:
        if work is not None:
            self.stall.wait(work, Call(f"{text} ({self.name})", self.ranks))


def world_communicator(world: World) -> Communicator:
    """Return a new communicator of all ranks of the job, for use before the device mesh is known.

    The first call makes the process groups of all ranks, which is collective over all ranks of the job and blocks;
    later calls take the cached groups and are local.

    Args:
        world: rank, device, store and timeout of this process, as ``tutti.init`` returned them.

    Raises:
        RuntimeError: in the first call, a rank does not make the call within the timeout.
    """
    ranks = tuple(range(world.identity.size))
    return Communicator("world", ranks, world, *process_groups(ranks))


def _digests(lines: Sequence[str]) -> Tensor:
    """Return two independent 64-bit digests of ``lines``, (2,) int64."""
    keys = [name_key(line) for line in lines]
    return torch.tensor([_signed(mix(1, len(lines), *keys)), _signed(mix(2, *reversed(keys)))])


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def _shape(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
