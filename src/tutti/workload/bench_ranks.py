"""Measure what ranks do together: start, links, collectives, overlap of both with computing, jitter."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from tutti.comm.communicator import Communicator
from tutti.comm.mesh_communicators import Communicators
from tutti.comm.rank_mesh import RankMesh
from tutti.device import is_accelerator, synchronize
from tutti.launcher.context import World
from tutti.workload.bench_device import ROUNDS, bench_operators, bench_optimizer
from tutti.workload.bench_timing import Findings, curve_point, fastest
from tutti.workload.machine_file import CurvePoint

_SIZES = tuple(2**power for power in (10, 12, 14, 16, 18, 20, 22, 24))
_OVERLAPPED = 2**24
_STEPS = 60
_UNRELATED = 1 << 26
"""Bytes of memory that ranks write between two messages: a guess at what a step's other tensors take."""
_SHARED = 0.03
"""Seconds to spend on each size of a call in all ranks at once."""


def bench_links(world: World, found: Findings) -> None:
    """Measure the seconds of messages between ranks I and I + 1: one each way at the same time, and one way alone.

    The pairs are measured one after the other. The last rank exchanges no message with rank 0; a single rank measures
    nothing.

    Ring algorithms use both directions of a link at once, which slows each of them down on some links: acknowledgements
    share the rate, or both directions take the same cores. The seconds of a message one way are half of a round trip,
    so that no clock of another rank is read. The function is collective over all ranks: before each message all ranks
    all-gather one number, as a barrier, and rank I broadcasts the curve of its pair.

    Args:
        world: this process's membership in the launch: rank, number of ranks and device; all ranks are measured.
        found: receives the curves ``links/I-J`` (both ways) and ``one_way/I-J`` of median seconds over bytes, I and J
            being the two ranks; equal on all ranks.

    Raises:
        PeerError: a rank is lost, or does not take part within the timeout.
    """
    comms = Communicators(world, RankMesh(replica=world.identity.size, rank=world.identity.rank))
    line = comms.p2p_channels({"there": 1, "back": -1}, "replica")
    for sender in range(line.size - 1):
        for name, call in (("links", _both_ways), ("one_way", _there_and_back)):
            points = [_message(line, sender, size, world.device, call) for size in _SIZES]
            _draw(line, f"{name}/{sender}-{sender + 1}", points, sender, found)


def bench_collectives(
    world: World, found: Findings, kinds: Sequence[str] | None = None, sizes: Sequence[int] = _SIZES
) -> None:
    """Measure the seconds of all-reduce, all-gather, reduce-scatter and broadcast over all ranks.

    Collective over all ranks, which pass the same ``kinds`` and ``sizes``. Before each measured call all ranks
    all-gather one number, as a barrier, which is not timed.

    Args:
        world: this process's membership in the launch: rank, number of ranks and device; all ranks are measured.
        kinds: some of ``all_reduce``, ``all_gather``, ``reduce_scatter`` and ``broadcast``; None: all four.
        sizes: bytes of the whole tensors.
        found: receives the curves ``collectives/KIND/RANKS`` of this rank's median seconds over bytes of the whole
            tensor.

    Raises:
        PeerError: a rank is lost, or does not take part within the timeout.
    """
    ranks = world.identity.size
    group = Communicators(world, RankMesh(replica=ranks, rank=world.identity.rank)).world
    makers: dict[str, Callable[[int], Callable[[], object]]] = {
        "all_reduce": partial(_all_reduce, group),
        "all_gather": partial(_all_gather, group),
        "reduce_scatter": partial(_reduce_scatter, group),
        "broadcast": partial(_broadcast, group),
    }
    for name in makers if kinds is None else kinds:
        points = [
            curve_point(size, _together(group, makers[name](size // 4), 30 if size < 2**20 else 8, world.device))
            for size in sizes
        ]
        found.add_curve(f"collectives/{name}/{ranks}", "byte", points)


def bench_shared(world: World, found: Findings) -> None:
    """Measure operators and optimizers in all ranks of a node at once, each with the threads it has in training.

    The curves show how far shared cores, caches and memory bandwidth slow each rank down, by class of operator and
    size. Collective over all ranks: before each group of curves they all-gather one number, as a barrier. Each rank
    keeps its own measurements.

    Args:
        world: this process's membership in the launch: rank, number of ranks and device; all ranks are on one node.
        found: receives the curves of ``bench_operators`` and ``bench_optimizer`` and their single numbers, as measured
            on this rank, under the names ``shared/CLASS/RANKS``, such as ``shared/matmul/fp32/2``.

    Raises:
        PeerError: a rank is lost, or does not take part within the timeout.
    """
    ranks = world.identity.size
    group = Communicators(world, RankMesh(replica=ranks, rank=world.identity.rank)).world

    def begin() -> None:
        group.all_gather(torch.zeros(1), "before computing together")

    def name(alone: str) -> str:
        return f"shared/{alone.removeprefix('device/')}/{ranks}"

    rounds, updates = [Findings(show=False) for _ in range(ROUNDS)], Findings(show=False)
    for each in rounds:
        bench_operators(world.device, each, _SHARED, begin)
    fastest(rounds, name, found)
    bench_optimizer(world.device, updates, _SHARED, begin)
    fastest([updates], name, found)


def bench_overlap(world: World, found: Findings) -> None:
    """Measure how much longer an all-reduce and matrix products take when they run at the same time.

    The function is collective over all ranks. They all-reduce 16 MiB, rank 0 broadcasts the number of matrix products,
    so that all compute equally much, and all-gathers of one number are barriers before the measurements.

    Args:
        world: this process's membership in the launch: rank, number of ranks and device; all ranks are measured.
        found: receives two ratios of this rank's seconds. ``overlap/compute/RANKS`` is the time of the matrix products
            during the all-reduce divided by their time alone. ``overlap/both/RANKS`` is the time until all-reduce and
            products have ended divided by the time of the slower of the two alone.

    Raises:
        PeerError: a rank is lost, or does not take part within the timeout.
    """
    ranks = world.identity.size
    group = Communicators(world, RankMesh(replica=ranks, rank=world.identity.rank)).world
    flat = torch.zeros(_OVERLAPPED // 4, device=world.device)
    left = torch.randn(256, 256, device=world.device)

    def compute(products: int) -> None:
        for _ in range(products):
            left @ left
        synchronize(world.device)

    alone = statistics.median(_together(group, _all_reduce(group, flat.numel()), 8, world.device))
    one = statistics.median(_together(group, partial(compute, 10), 10, world.device)) / 10
    # Ranks must compute equally much.
    products = int(group.broadcast_json(max(1, int(alone / one)), 0, "products"))
    computing = _together(group, partial(compute, products), 10, world.device)
    slower, longer = [], []
    for _ in range(10):
        group.all_gather(torch.zeros(1), "before overlap")
        begin = time.perf_counter()
        pending = group.start_all_reduce(flat, "overlapped all-reduce")
        compute(products)
        middle = time.perf_counter()
        pending.wait()
        synchronize(world.device)
        slower.append((middle - begin) / statistics.median(computing))
        longer.append((time.perf_counter() - begin) / max(alone, statistics.median(computing)))
    found.add(f"overlap/compute/{ranks}", "ratio", slower)
    found.add(f"overlap/both/{ranks}", "ratio", longer)


def bench_jitter(world: World, found: Findings) -> None:
    """Measure how the time of the same computation varies from repetition to repetition and from rank to rank.

    All ranks compute the same matrix products at once, 60 times. The function is collective over all ranks: they
    all-gather one number before each repetition, as a barrier, and at the end the seconds of all repetitions.

    Args:
        world: this process's membership in the launch: rank, number of ranks and device; all ranks are measured.
        found: receives two ratios of standard deviation to mean of the seconds: ``jitter/time/RANKS`` over the
            repetitions of a rank (median over ranks), ``jitter/ranks/RANKS`` over the ranks' medians; equal on all
            ranks.

    Raises:
        PeerError: a rank is lost, or does not take part within the timeout.
    """
    ranks = world.identity.size
    group = Communicators(world, RankMesh(replica=ranks, rank=world.identity.rank)).world
    left = torch.randn(256, 256, device=world.device)
    seconds = []
    for _ in range(_STEPS):
        group.all_gather(torch.zeros(1), "before computing")
        begin = time.perf_counter()
        for _ in range(4):
            left @ left
        synchronize(world.device)
        seconds.append(time.perf_counter() - begin)
    mine = torch.tensor(seconds, dtype=torch.float64)
    table = torch.stack(group.all_gather(mine, "seconds of computing"))
    found.add(f"jitter/time/{ranks}", "ratio", [float(row.std() / row.mean()) for row in table])
    medians = table.median(dim=1).values
    found.add(f"jitter/ranks/{ranks}", "ratio", [float(medians.std(correction=0) / medians.mean())])


def bench_start(world: World, begin: float, found: Findings) -> None:
    """Record the seconds from the launcher's call until now as the time that starting this number of ranks takes.

    Called right after the process group has been initialised. Not collective.

    Args:
        world: this process's membership in the launch: rank, number of ranks and device; all ranks are measured.
        begin: ``time.monotonic`` when the launcher was called.
        found: receives the figure ``start/RANKS``.
    """
    found.add(f"start/{world.identity.size}", "s", [time.monotonic() - begin])


def _draw(line: Communicator, name: str, points: list[CurvePoint], sender: int, found: Findings) -> None:
    """Draw the curve that rank ``sender`` measured, on rank 0."""
    values = torch.tensor([[p.size, p.seconds, p.spread, p.n] for p in points], dtype=torch.float64)
    line.broadcast(values, sender, "messages of a pair")
    known = [CurvePoint(size, seconds, spread, int(n)) for size, seconds, spread, n in values.tolist()]
    found.add_link_curve(name, known)


_Messages = Callable[[Communicator, int, Tensor, Tensor], float]
"""Sends and receives a tensor, and returns the number of messages that follow each other."""


def _both_ways(line: Communicator, sender: int, sent: Tensor, received: Tensor) -> float:
    other, (out, back) = (sender + 1, ("there", "back")) if line.rank == sender else (sender, ("back", "there"))
    pending = line.start_send(sent, other, out)
    line.receive(received, other, back)
    pending.wait()
    return 1.0


def _there_and_back(line: Communicator, sender: int, sent: Tensor, received: Tensor) -> float:
    if line.rank == sender:
        line.start_send(sent, sender + 1, "there").wait()
        line.receive(received, sender + 1, "back")
    else:
        line.receive(received, sender, "there")
        line.start_send(sent, sender, "back").wait()
    return 2.0


def _message(line: Communicator, sender: int, size: int, device: torch.device, call: _Messages) -> CurvePoint:
    """Time messages of ``size`` bytes between two ranks; other ranks return a point without meaning."""
    sent, received = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    rounds = 30 if size < 2**20 else 8
    seconds, memory = [], _unrelated(device)
    line.all_gather(torch.zeros(1), "before messages")
    for _ in range(rounds):
        memory.add_(1.0)
        line.all_gather(torch.zeros(1), "before a message")
        if line.rank not in (sender, sender + 1):
            continue
        begin = time.perf_counter()
        number = call(line, sender, sent, received)
        synchronize(device)
        seconds.append((time.perf_counter() - begin) / number)
    return curve_point(size, seconds[2:]) if seconds else CurvePoint(size, 1.0, 0.0, 0)


def _together(group: Communicator, call: Callable[[], object], rounds: int, device: torch.device) -> list[float]:
    """Return the seconds of each call, equally often on each rank, after two that do not count.

    Between two calls a rank on a CPU writes memory of its own, as it computes between two messages in training: what a
    call reads and writes is not in caches then.
    """
    found, memory = [], _unrelated(device)
    group.all_gather(torch.zeros(1), "before timing")
    for _ in range(rounds + 2):
        memory.add_(1.0)
        group.all_gather(torch.zeros(1), "before a call")
        begin = time.perf_counter()
        call()
        synchronize(device)
        found.append(time.perf_counter() - begin)
    return found[2:]


def _unrelated(device: torch.device) -> Tensor:
    """Return more memory than a CPU's caches hold; on accelerators, whose messages leave them, nothing."""
    return torch.zeros(0 if is_accelerator(device) else _UNRELATED // 4, device=device)


def _all_reduce(group: Communicator, elements: int) -> Callable[[], object]:
    flat = torch.zeros(elements, device=group.device)
    return lambda: group.start_all_reduce(flat, "all-reduce").wait()


def _all_gather(group: Communicator, elements: int) -> Callable[[], object]:
    mine = torch.zeros(max(elements // group.size, 1), device=group.device)
    return lambda: group.gather_slices(mine, "all-gather")


def _reduce_scatter(group: Communicator, elements: int) -> Callable[[], object]:
    mine = torch.zeros(max(elements // group.size, 1), device=group.device)
    whole = torch.zeros(group.size * mine.numel(), device=group.device)
    return lambda: group.scatter_sum(mine, whole, "reduce-scatter")


def _broadcast(group: Communicator, elements: int) -> Callable[[], object]:
    flat = torch.zeros(elements, device=group.device)
    return lambda: group.broadcast_unchecked(flat, 0, "broadcast")
