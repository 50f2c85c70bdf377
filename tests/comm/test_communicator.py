"""Collectives against their definition, and calls that do not fit together: refused on every rank, with both sides."""

from __future__ import annotations

import re
from typing import Any
from unittest.mock import patch

import pytest
import torch

import tutti
from tests import worlds
from tutti.checkpoint.gather import GatheredParts
from tutti.comm.broadcast import broadcast_result
from tutti.comm.communicator import Communicator
from tutti.comm.mesh_communicators import Communicators
from tutti.comm.rank_mesh import RankMesh
from tutti.errors import MismatchError, NotEnoughMemory, TuttiError
from tutti.launcher import context
from tutti.types.shard_spec import ShardSpec


def line() -> Communicator:
    return Communicators(context.current(), RankMesh(replica=tutti.size(), rank=tutti.rank())).world


def every_collective() -> list[Any]:
    comm, rank, size = line(), tutti.rank(), tutti.size()
    told = []
    tensor = torch.full((2, 3), float(rank + 1), dtype=torch.float64)
    comm.all_reduce(tensor, "sum")
    told.append(tensor.tolist())
    fast = torch.arange(5.0) * (rank + 1)
    comm.start_all_reduce(fast, "fast sum").wait()
    told.append(fast.tolist())
    for source in range(size):
        copy = torch.tensor([rank, 7])
        comm.broadcast(copy, source, "copy")
        spread = torch.tensor([float(rank)])
        comm.broadcast_unchecked(spread, source, "spread")
        value = {"name": f"λ{rank}", "list": [rank, None, 1.5]} if rank == source else "ignored"
        told.append([copy.tolist(), spread.tolist(), comm.broadcast_json(value, source, "json")])
    told.append([t.tolist() for t in comm.all_gather(torch.tensor([rank, rank * rank]), "gather")])
    told.append(comm.gather_slices(torch.tensor([rank * 10, rank * 10 + 1]), "slices").tolist())
    told.append(comm.broadcast_json("" if rank == 0 else 3, 0, "empty text"))
    told.append(comm.all_gather_strings("", "empty texts"))
    told.append(comm.all_gather_strings("λ" * 5000 * rank, "long texts"))
    return told


@pytest.mark.parametrize("size", [1, 3, 4])
def test_collectives_do_what_they_say(size: int) -> None:
    total = size * (size + 1) / 2
    want: list[Any] = [[[total] * 3] * 2, [i * total for i in range(5)]]
    want += [[[s, 7], [float(s)], {"name": f"λ{s}", "list": [s, None, 1.5]}] for s in range(size)]
    want += [[[r, r * r] for r in range(size)], [r * 10 + i for r in range(size) for i in (0, 1)], ""]
    want += [[""] * size, ["λ" * 5000 * r for r in range(size)]]
    if size == 1:
        want[1] = [float(i) for i in range(5)]
        want[2] = [[0, 7], [0.0], {"name": "λ0", "list": [0, None, 1.5]}]
    assert worlds.run(size, every_collective) == [want] * size


def with_and_without_shared_memory() -> list[Any]:
    """Small messages and one that is too large, by turns, so that a half that is used again would show."""
    told = []
    for shared in (False, True):
        comm, rank, size = line(), tutti.rank(), tutti.size()
        if shared:
            comm.share_memory()
        generator, found = torch.Generator().manual_seed(rank), []
        for turn in range(12):
            elements = 300_000 if turn == 6 else 1 + turn % 7
            mine = torch.randn(elements, generator=generator)
            whole, part = torch.empty(size * elements), torch.empty(elements)
            comm.gather_into(whole, mine, f"gather {turn}")
            comm.scatter_sum(part, torch.randn(size * elements, generator=generator), f"scatter {turn}")
            counts = torch.tensor([rank, turn], dtype=torch.float64)
            comm.sum_in_place(counts, f"sum {turn}")
            found += [whole.sum().item(), part.sum().item(), *counts.tolist()]
            found += comm.gather_slices(torch.tensor([rank, turn]), f"slices {turn}").tolist()
        told.append(found)
    return told


@pytest.mark.parametrize("size", [2, 3])
def test_small_messages_in_shared_memory_give_what_messages_give(size: int) -> None:
    results = worlds.run(size, with_and_without_shared_memory)
    assert all(shared == sent for sent, shared in results)
    assert results[0][1][2:4] == [sum(range(size)), 0.0]


def kept_shared_memory() -> list[str]:
    """The collectives of a communicator that has shared memory when it is told to take that of one without any."""
    comm = line()
    comm.share_memory()
    comm.share_memory(like=line())
    comm.gather_slices(torch.zeros(2), "a call that all make")
    return list(comm.collective_facts())


def test_shared_memory_is_not_given_up_for_that_of_a_communicator_without_any() -> None:
    assert worlds.run(2, kept_shared_memory) == [["shared_memory"]] * 2


def different_calls_in_shared_memory(calls: tuple[str, ...], elements: tuple[int, ...]) -> str:
    comm = line()
    comm.share_memory()
    comm.gather_slices(torch.zeros(2), "a call that all make")
    try:
        comm.gather_slices(torch.zeros(elements[tutti.rank()]), calls[tutti.rank()])
    except MismatchError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("calls", "elements"), [(("weights", "weights", "gradients"), (4, 4, 4)), (("weights",) * 3, (4, 8, 4))]
)
def test_ranks_in_different_calls_of_shared_memory_are_refused(
    calls: tuple[str, ...], elements: tuple[int, ...]
) -> None:
    for rank, text in enumerate(worlds.run(3, different_calls_in_shared_memory, calls=calls, elements=elements)):
        assert "different collectives" in text and calls[rank] in text
        other = next(r for r in (1, 2) if (calls[r], elements[r]) != (calls[0], elements[0]))
        for shown in (0, other):
            assert f"rank {shown} in {calls[shown]}, with {elements[shown]} of" in text


def rows_and_neighbours() -> list[Any]:
    comm, rank, size = line(), tutti.rank(), tutti.size()
    parts = [s + 1 for s in range(size)]
    send = torch.tensor([[100.0 * rank + 10 * to + row] for to in range(size) for row in range(parts[rank])])
    receive = torch.zeros(sum(parts), 1)
    comm.exchange_slices(send, receive, parts, parts[rank], "rows")
    mesh = RankMesh(stage=size, rank=rank)
    stages = Communicators(context.current(), mesh).p2p_channels({"down": 1, "up": -1}, "stage")
    # All send both ways before any receives, the last rank and the first among them.
    sent = [stages.start_send(torch.tensor([rank, n]), (rank + 1) % size, "down") for n in range(9)]
    sent += [stages.start_send(torch.tensor([-rank, n]), (rank - 1) % size, "up") for n in range(9)]
    passed = []
    for kind, source in (("up", (rank + 1) % size), ("down", (rank - 1) % size)):
        for _ in range(9):
            stages.receive(into := torch.tensor([0, 0]), source, kind)
            passed.append(into.tolist())
    for pending in sent:
        pending.wait()
    return [receive.flatten().tolist(), passed]


def left_with_a_message_on_the_way() -> list[int]:
    rank, mesh = tutti.rank(), RankMesh(stage=2, rank=tutti.rank())
    line = Communicators(context.current(), mesh).p2p_channels({"left": 1}, "stage")
    if rank == 0:
        line.start_send(torch.zeros(9, dtype=torch.int64), 1, "left")  # of a run that an error ends before the receive
    line = Communicators(context.current(), mesh).p2p_channels({"left": 1}, "stage")
    value = torch.tensor([rank - 7])
    if rank == 0:
        line.start_send(value, 1, "left").wait()
    else:
        line.receive(value, 0, "left")
    return value.tolist()


def test_a_message_of_a_run_that_was_stopped_is_not_received_by_the_next() -> None:
    assert worlds.run(2, left_with_a_message_on_the_way) == [[-7]] * 2


@pytest.mark.parametrize("size", [3, 4])
def test_rows_to_each_and_from_neighbour_to_neighbour(size: int) -> None:
    for rank, (rows, passed) in enumerate(worlds.run(size, rows_and_neighbours)):
        assert rows == [100.0 * s + 10 * rank + row for s in range(size) for row in range(s + 1)]
        above, below = (rank + 1) % size, (rank - 1) % size
        assert passed == [[-above, n] for n in range(9)] + [[below, n] for n in range(9)]


def named() -> dict[str, Any]:
    rank = tutti.rank()
    local = {f"{rank}.weight": torch.full((rank + 1, 2), float(rank)), f"{rank}.count": torch.tensor(rank)}
    specs = {name: ShardSpec(tuple(t.shape), (0,) * t.dim()) for name, t in local.items()}
    places = ((rank, rank + 1), (3 + rank, 4 + rank))
    local |= {"lent": torch.ones(1), "split": torch.full((2, 3), float(rank))}
    specs |= {"lent": ShardSpec((1,), (0,), ("other",)), "split": ShardSpec((6, 3), (rank, 0), ranges=places)}
    state, sent = GatheredParts(local, specs, () if rank == 1 else ("lent",), line()), []
    with patch.object(Communicator, "broadcast", lambda *args, send=Communicator.broadcast: sent.append(send(*args))):
        whole = state.all()
    # One message for each rank and dtype.
    assert len(sent) == 2 * tutti.size()
    memories = {t.untyped_storage().data_ptr() for name, t in whole.items() if name != "other"}
    assert len(memories) == len(whole) - 1
    assert {name: state[name].tolist() for name in whole} == {name: t.tolist() for name, t in whole.items()}
    return {name: (str(t.dtype), list(t.shape), t.tolist()) for name, t in whole.items()}


def test_named_tensors_of_all_ranks_become_one_set() -> None:
    want: dict[str, Any] = {name: ("torch.float32", [1], [1.0]) for name in ("lent", "other")}
    want["split"] = ("torch.float32", [6, 3], [[float(rank)] * 3 for rank in (0, 1, 2, 0, 1, 2)])
    for rank in range(3):
        want[f"{rank}.weight"] = ("torch.float32", [rank + 1, 2], [[float(rank)] * 2] * (rank + 1))
        want[f"{rank}.count"] = ("torch.int64", [], rank)
    assert worlds.run(3, named) == [want] * 3


def asked_of_rank_1(kind: str) -> tuple[str, str, str | None]:
    """A result, or the class, text and remedy of an exception."""

    def answer() -> Any:
        if kind == "own":
            raise NotEnoughMemory("too large", where="rank 1", why="it is", remedy="take less")
        if kind == "other":
            raise ValueError("3 is odd")
        return ("it", tutti.rank())

    try:
        return "result", str(broadcast_result(line(), 1, answer, "the answer")), None
    except (TuttiError, ValueError) as error:
        return type(error).__name__, str(error), getattr(error, "remedy", None)
    finally:
        line().all_gather(torch.zeros(1), "afterwards")


def test_an_exception_of_one_rank_is_raised_on_all() -> None:
    results = worlds.run(3, asked_of_rank_1, kind="result")
    assert {text for _, text, _ in results} == {"['it', 1]"}
    assert (
        worlds.run(3, asked_of_rank_1, kind="own")
        == [("NotEnoughMemory", "too large (rank 1): it is. Take less.", "take less")] * 3
    )
    first, second, third = worlds.run(3, asked_of_rank_1, kind="other")
    assert second == ("ValueError", "3 is odd", None)
    assert first == third == ("PeerError", "rank 1 has failed: the answer: ValueError: 3 is odd.", None)


def tried(comm: Communicator, kind: str, odd: bool) -> None:
    """One collective; the odd rank calls it in another way."""
    shape, dtype, name = torch.Size([2, 3]), torch.float32, "loss"
    if kind == "operation" and odd:
        comm.broadcast(torch.zeros(shape), 0, name)
    elif kind == "source":
        comm.broadcast(torch.zeros(shape), int(odd), name)
    elif kind == "order":
        for which in ("b", "a") if odd else ("a", "b"):
            comm.all_reduce(torch.zeros(shape), which)
    elif kind == "gather":
        comm.all_gather(torch.zeros(2 + odd), name)
    elif kind == "text" and odd:
        comm.all_gather_strings("a text", name)
    elif kind == "agreement" and odd:
        comm.agree(["a line"], name, "write the same")
    else:
        shape = torch.Size([3, 2]) if kind == "shape" and odd else shape
        dtype = torch.float64 if kind == "dtype" and odd else dtype
        comm.all_reduce(torch.zeros(shape, dtype=dtype), "accuracy" if kind == "name" and odd else name)


MISMATCHES = {
    "operation": ["all_reduce 'loss' of float32[2, 3]", "broadcast 'loss' of float32[2, 3] from 0"],
    "source": ["broadcast 'loss' of float32[2, 3] from 0", "broadcast 'loss' of float32[2, 3] from 1"],
    "shape": ["float32[2, 3]", "float32[3, 2]"],
    "dtype": ["float32[2, 3]", "float64[2, 3]"],
    "name": ["all_reduce 'loss'", "all_reduce 'accuracy'"],
    "order": ["all_reduce 'a'", "all_reduce 'b'"],
    "gather": ["all_gather 'loss' of float32[2]", "all_gather 'loss' of float32[3]"],
    "text": ["all_reduce 'loss'", "all_gather 'loss, length'"],
    "agreement": ["all_reduce 'loss'", "all_gather 'comparing loss'"],
}


def mismatches(odd: int, sockets: bool) -> list[tuple[str, float]]:
    comm, said = line(), []
    if sockets:
        comm._control = None
    for kind in MISMATCHES:
        try:
            tried(comm, kind, tutti.rank() == odd)
            text = "nothing was raised"
        except MismatchError as error:
            text = str(error)
        after = torch.tensor([1.0])
        comm.all_reduce(after, "afterwards")
        said.append((text, float(after)))
    return said


@pytest.mark.parametrize(("size", "odd", "sockets"), [(3, 0, False), (3, 2, True), (4, 1, False), (2, 1, True)])
def test_every_rank_refuses_with_both_sides_and_goes_on(size: int, odd: int, sockets: bool) -> None:
    for rank, said in enumerate(worlds.run(size, mismatches, odd=odd, sockets=sockets)):
        for (kind, words), (text, after) in zip(MISMATCHES.items(), said, strict=True):
            for word in [*words, f"rank {odd}", f"(rank {rank})", "nothing was added up"]:
                assert word in text, f"{kind} on rank {rank}: {text}"
            assert after == size


def one_call_more(odd: int) -> str:
    """The odd rank makes one call that the others do not; the next one tells, by its number in the sequence."""
    comm = line()
    comm._sequence += tutti.rank() == odd
    try:
        comm.all_reduce(torch.zeros(1), "same")
    except MismatchError as error:
        return str(error)
    return ""


def test_the_number_of_the_call_is_compared() -> None:
    for text in worlds.run(3, one_call_more, odd=1):
        numbers = re.findall(r"rank ([01]) in call (\d+): all_reduce 'same'", text)
        (first, calls), (second, more) = numbers
        assert (first, second, int(more) - int(calls)) == ("0", "1", 1)


def agreed(odd: int) -> list[str]:
    comm, mine, said = line(), tutti.rank() == odd, []
    same = ["layer.weight [3, 4]", "layer.bias [4]"]
    cases = [
        same,
        [same[0], "layer.bias [5]"] if mine else same,
        same[::-1] if mine else same,
        [*same, "extra [1]"] if mine else same,
        same[:1] if mine else same,
        [] if mine else same,
        ["λ" * 3000] if mine else same,
        [*same, ""] if mine else same,
    ]
    for lines in cases:
        try:
            comm.agree(lines, "the model", "build the same")
            said.append("")
        except MismatchError as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize(("size", "odd"), [(3, 0), (4, 3)])
def test_agreement_shows_the_first_difference_on_every_rank(size: int, odd: int) -> None:
    a, b = "layer.weight [3, 4]", "layer.bias [4]"
    want = [(b, "layer.bias [5]", 1), (a, b, 0), ("(nothing)", "extra [1]", 2), (b, "(nothing)", 1)]
    want += [(a, "(nothing)", 0), (a, "λλλ", 0), ("(nothing)", "", 2)]
    for rank, (fine, *said) in enumerate(worlds.run(size, agreed, odd=odd)):
        assert fine == ""
        for text, (others, own, entry) in zip(said, want, strict=True):
            for word in (others, own, f"rank {odd}", f"(rank {rank}, entry {entry})", "Build the same"):
                assert word in text, text


def pairs_in_flight() -> list[float]:
    """Two gradient messages under way while a control call is made: they travel apart."""
    comm = line()
    first, second = torch.ones(1000), torch.ones(1000) * 2
    pending = [comm.start_all_reduce(t, f"bucket {i}") for i, t in enumerate((first, second))]
    third = torch.ones(1)
    comm.all_reduce(third, "control")
    for work in reversed(pending):
        work.wait()
    return [float(first.sum()), float(second.sum()), float(third)]


def test_gradients_and_control_do_not_meet() -> None:
    assert worlds.run(3, pairs_in_flight) == [[3000.0, 6000.0, 3.0]] * 3
