"""Process groups and communicators along the axes of the device mesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product

import torch

from tutti.comm.collective_schedules import Algorithm, Schedule, schedule_of
from tutti.comm.communicator import Communicator, world_communicator
from tutti.comm.file_all_gather import FileAllGather
from tutti.comm.process_groups import channel_purpose, messages_on, process_groups, replace_channel
from tutti.comm.rank_mesh import RankMesh
from tutti.launcher import lost_rank_notes
from tutti.launcher.context import World


class Communicators:
    """Makes and keeps the communicators along the axes of the device mesh.

    Collective over all ranks of the job: the constructor makes process groups and, on one node, shared memory for
    control messages; it blocks.

    Args:
        world: rank, device, store and timeout of this process.
        mesh: extents of the device mesh, and this rank's position on it.

    Attributes:
        world: communicator of all ranks.
        replica: communicator of the ranks that hold the same part of the model (axes replica and shard).
        model: communicator of the ranks of one replica (axes stage and tensor).

    Raises:
        RuntimeError: a rank does not construct its ``Communicators`` within the timeout.
        MismatchError, PeerError: while the shared memory is made, ranks are in different calls, or a rank has ended.
    """

    def __init__(self, world: World, mesh: RankMesh) -> None:
        self._job, self._mesh = world, mesh
        self._axes: dict[tuple[str, ...], Communicator] = {}
        self.world = world_communicator(world)
        self.world.share_control()
        self.replica = self._line("replica", "replica", "shard")
        self.model = self._line("model", "stage", "tensor")

    def axis(self, *names: str) -> Communicator:
        """Return the communicator along axes of the device mesh, for collectives and messages among these ranks.

        Its ranks have the same coordinates as this rank on all other axes. The first call for these axes, in this
        order, is collective over all ranks of the job and blocks: it makes process groups and, where the ranks of a
        communicator are on one node, shared memory for their control messages. Later calls return the cached
        communicator and send nothing.

        Args:
            names: one or more of ``replica`` and ``shard`` (data parallelism; the ranks along ``shard`` hold one copy
                of the training state together), ``stage`` (pipeline) and ``tensor`` (tensor parallelism).

        Raises:
            RuntimeError: in the first call, a rank does not make the call within the timeout.
            PeerError: in the first call, a rank has ended, or did not make the call in time, while the shared memory
                was made.
            MismatchError: in the first call, ranks are in different calls.
        """
        if names not in self._axes:
            self._axes[names] = self._line(f"{' × '.join(names)} axis", *names)
        return self._axes[names]

    def tolerate_loss(self) -> bool:
        """Let the run continue from now on if ranks other than rank 0 are killed.

        Where losses can be tolerated, collective over all ranks of the job: a barrier, which blocks. Elsewhere it does
        nothing. Afterwards the communicators ``world`` (all ranks) and ``replica`` perform ``all_reduce``,
        ``broadcast`` and ``all_gather`` over files, among the ranks that are alive. For strategies whose training steps
        need no other rank and that keep the whole model on every rank, such as asynchronous parameter servers.

        Returns:
            True if losses are tolerated; False with one data-parallel rank, or under a launcher that ends all ranks
            when the first one ends. Equal on all ranks.

        Raises:
            PeerError: a rank did not make the call in time.
            MismatchError: deadlock: every rank waits in a call that at least one other rank has not made.
        """
        notes = lost_rank_notes.lost_rank_notes()
        if notes is None or self.replica.size < 2:
            return False
        files = FileAllGather(notes, self._job)
        self.world.file_all_gather = self.replica.file_all_gather = files
        # A barrier: after it no rank is still in a collective that a lost rank would break.
        files.gather(b"", "the start of all ranks")
        if self._job.identity.rank:
            notes.mark_expendable(self._job.identity.rank)
        return True

    def p2p_channels(self, kinds: Mapping[str, int], *names: str) -> Communicator:
        """Make the channels (process groups) for point-to-point messages between neighbours along mesh axes.

        Collective over all ranks of the job; blocks. A channel connects each rank with its neighbour along the axes,
        and the last rank with the first. ``start_send`` of the returned communicator then does not block.

        Args:
            kinds: name of each kind of message → its direction: 1 to the next rank, -1 to the previous one. The name is
                the argument ``kind`` of ``start_send`` and ``start_receive``.
            names: mesh axes: ``replica``, ``shard``, ``stage``, ``tensor``.

        Returns:
            The communicator along these axes, as ``axis`` returns it: an object with collectives and point-to-point
            messages among the ranks that have this rank's coordinates on all other axes.

        Raises:
            RuntimeError: a rank does not make the call within the timeout.
            PeerError: in the first call for these axes, a rank has ended, or did not make the call in time.
            MismatchError: in the first call for these axes, ranks are in different calls.
        """
        channels = [
            _channel(rank, line[(index + direction) % len(line)], kind)
            for line in self._lines(*names)
            for (index, rank), (kind, direction) in product(enumerate(line), kinds.items())
        ]
        self._make_channels(channels)
        return self.axis(*names)

    def _make_channels(self, channels: Sequence[_Channel]) -> None:
        """Make the process groups of point-to-point channels. Collective over all ranks of the job; blocks.

        A channel that exists already is used again if its two ranks have started equally many messages. Otherwise a run
        was stopped, such as by an error, between a send and its receive: the next receive would get that message, which
        ends the process where the sizes differ. A new channel replaces it.
        """
        made = {channel: messages_on(*channel) for channel in channels if channel[0][0] != channel[0][1]}
        if any(count is not None for count in made.values()):
            counts = self.world.all_gather(
                torch.tensor([-1 if count is None else count for count in made.values()]), "messages on the channels"
            )
            for place, channel in enumerate(made):
                first, second = (int(counts[rank][place]) for rank in channel[0])
                if first != second:
                    replace_channel(*channel)
        for channel in made:
            process_groups(*channel)

    def connect(self, algorithm: Algorithm) -> tuple[Schedule, Sequence[int], Communicator | None]:
        """Make the point-to-point channels of an all-reduce by an explicit schedule, and return the schedule.

        Collective over all ranks of the job, which all-gathers the ranks' nodes and makes process groups; blocks. No
        tensor is all-reduced yet: the caller sends the messages of the schedule, over the attribute ``replica``, the
        communicator of the data-parallel ranks that hold the same part of the model. The messages are sent by
        ``replica.start_send`` with the kind ``ALGORITHM all-reduce``.

        Args:
            algorithm: ``ring``, ``tree``, ``halving``, ``hierarchical`` or ``central``.

        Returns:
            A triple. First the ``Schedule``: rounds of messages between ranks, given as indices in ``replica``. For
            ``hierarchical``, on a node with several ranks of ``replica``, then the indices of these ranks and a
            communicator of them; otherwise an empty sequence and None.

        Raises:
            MismatchError: ranks are in different calls.
            PeerError: a rank has ended, or did not make the call in time.
            RuntimeError: a rank ends, or does not make the call in time, while the process groups are made.
        """
        own_node = torch.tensor([self._job.identity.cross_rank])
        node_of = [int(node) for node in self.world.all_gather(own_node, "nodes of the ranks")]
        channel, node = f"{algorithm} all-reduce", None
        members: Sequence[int] = ()
        channels: list[_Channel] = []
        for line in self._lines("replica", "shard"):
            schedule, nodes = _schedule_over(line, node_of, algorithm)
            channels += [_channel(line[source], line[to], channel) for source, to in schedule.links()]
            for places in nodes if algorithm == "hierarchical" else []:
                ranks = tuple(line[place] for place in places)
                groups = process_groups(ranks, "within a node")
                if self._mesh.rank in ranks and len(ranks) > 1:
                    members, node = places, Communicator("ranks of a node", ranks, self._job, *groups)
        self._make_channels(channels)
        return _schedule_over(self.replica.ranks, node_of, algorithm)[0], members, node

    def subgroup(self, name: str, places: Sequence[int], purpose: str) -> Communicator | None:
        """Return a communicator over some of the ranks along a mesh axis, with its own process group.

        Collective over all ranks of the job, members or not; blocks. Ranks along the axis have the same coordinates on
        all other axes. One subgroup is made for each combination of these coordinates; a member gets the communicator
        of the subgroup with its own coordinates. A later call with the same arguments uses the same process groups, and
        sends nothing.

        Args:
            name: mesh axis: ``replica``, ``shard``, ``stage`` or ``tensor``.
            places: indices of the members on the axis, in increasing order.
            purpose: key of the process group and name of the communicator, which PeerError and MismatchError show.

        Returns:
            The communicator, an object with collectives and point-to-point messages among the members; None on a rank
            that is no member.

        Raises:
            RuntimeError: a rank does not make the call within the timeout.
        """
        own_line = self._mesh.along(name)
        for line in self._lines(name):
            made = process_groups(tuple(line[place] for place in places), purpose)
            if line == own_line:
                mine = made
        ranks = tuple(own_line[place] for place in places)
        return Communicator(purpose, ranks, self._job, *mine) if self._mesh.rank in ranks else None

    def new_group(self, purpose: str) -> Communicator:
        """Return a new communicator of the data-parallel ranks (axes replica and shard) with its own process group.

        Collective over all ranks of the job: makes the process groups and, where the data-parallel ranks are on one
        node, shared memory for their control messages; blocks. For messages that overlap with the gradient reduction
        on ``replica``, which one process group would serialise.

        Args:
            purpose: key of the process group, which PeerError and MismatchError show; one key gives one group.

        Raises:
            RuntimeError: a rank does not make the call within the timeout.
            PeerError: a rank has ended, or did not make the call in time, while the shared memory was made.
            MismatchError: ranks are in different calls.
        """
        return self._line(f"replica, {purpose}", "replica", "shard", purpose=purpose)

    def _line(self, name: str, *axes: str, purpose: str = "") -> Communicator:
        """Return the communicator along ``axes``. Collective: all ranks make the groups of all lines, in one order."""
        made = {line: process_groups(line, purpose) for line in self._lines(*axes)}
        mine = self._mesh.along(*axes)
        comm = Communicator(name, mine, self._job, *made[mine])
        comm.share_control(like=self.world)
        return comm

    def _lines(self, *axes: str) -> list[tuple[int, ...]]:
        """Return all lines of ranks along ``axes``, each once, in the same order on all ranks."""
        return sorted({RankMesh(*self._mesh.shape, rank).along(*axes) for rank in range(self._mesh.size)})


_Channel = tuple[tuple[int, int], str]
"""The two global ranks of a channel of point-to-point messages, in increasing order, and its ``channel_purpose``."""


def _channel(sender: int, receiver: int, kind: str) -> _Channel:
    return (min(sender, receiver), max(sender, receiver)), channel_purpose(kind, sender)


def _schedule_over(
    line: Sequence[int], node_of: Sequence[int], algorithm: Algorithm
) -> tuple[Schedule, list[Sequence[int]]]:
    """Return the schedule over the ranks of ``line``, and their indices on the line by node."""
    numbers = [node_of[rank] for rank in line]
    nodes: list[Sequence[int]] = [
        [place for place, other in enumerate(numbers) if other == node] for node in dict.fromkeys(numbers)
    ]
    return schedule_of(algorithm, nodes), nodes
