"""The coordinator's rules: what is agreed upon, refused and cached, without sockets."""

from __future__ import annotations

from typing import Any

from tutti.comm.collective_call import CollectiveCall, describe_mismatch
from tutti.comm.negotiation import Coordinator, loss_line


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def coordinator(size: int = 2, clock: Clock | None = None, **options: Any) -> Coordinator:
    made = Coordinator(size, clock or Clock())
    made.receive(0, ["open", 1, {"warn": 60.0, "limit": 0.0, "fusion": 100, "capacity": 4, **options}])
    return made


def reduction(name: str = "x", shape: tuple[int, ...] = (2,), dtype: str = "float32", **given: Any) -> list[Any]:
    call = CollectiveCall("allreduce", name, shapes=(shape,), dtypes=(dtype,), device="cpu", op="sum", **given)
    return ["call", 1, call.to_json()]


def test_a_call_runs_once_all_ranks_have_made_it() -> None:
    made = coordinator()
    made.receive(0, reduction())
    assert made.take_answers() == []
    made.receive(1, reduction())
    assert [(rank, message[0]) for rank, message in made.take_answers()] == [(0, "run"), (1, "run")]


def test_an_agreed_call_travels_as_a_number() -> None:
    made = coordinator()
    for rank in range(2):
        made.receive(rank, reduction())
    [(_, message), _] = made.take_answers()
    number = message[2][0][2]
    for rank in range(2):
        made.receive(rank, ["hit", 1, number, []])
    [(_, message), _] = made.take_answers()
    assert message[2] == [[number, None, number, None]]


def test_a_call_of_another_shape_under_a_cached_name_is_compared() -> None:
    made = coordinator()
    for rank in range(2):
        made.receive(rank, reduction())
    made.take_answers()
    made.receive(0, ["hit", 1, 0, []])
    made.receive(1, reduction(shape=(3,)))
    errors = made.take_answers()
    assert [message[0] for _, message in errors] == ["error", "error"]
    assert "shape [2], but another rank sent a tensor of shape [3]" in errors[0][1][4]


def test_order_does_not_matter_and_fused_calls_are_those_of_one_turn() -> None:
    made = coordinator(fusion=16)
    for rank, names in ((0, "abc"), (1, "cba")):
        for name in names:
            made.receive(rank, reduction(name))
    runs = [message[2] for rank, message in made.take_answers() if rank == 0]
    # 8 bytes each, 16 fit into one.
    assert [[item[0][1] for item in items] for items in runs] == [["c", "b"], ["a"]]


def test_a_barrier_overtakes_an_incomplete_call() -> None:
    made = coordinator()
    made.receive(0, reduction())
    for rank in range(2):
        made.receive(rank, ["call", 1, CollectiveCall("barrier", "b").to_json()])
    assert [message[0] for _, message in made.take_answers()] == ["done", "done"]


def test_joined_ranks_send_zeros_to_sums_only() -> None:
    made = coordinator(3)
    made.receive(2, ["join", 1])
    for rank in range(2):
        made.receive(rank, reduction())
    runs = made.take_answers()
    assert [rank for rank, _ in runs] == [0, 1, 2]
    assert CollectiveCall.from_json(runs[2][1][2][0][3]).shapes == ((2,),)
    for rank in range(2):
        made.receive(rank, ["call", 1, CollectiveCall("allgather", "g", shapes=((),), dtypes=("int8",)).to_json()])
    assert "Allgather is not supported with Join" in made.take_answers()[0][1][4]
    for rank in (1, 0):
        made.receive(rank, ["join", 1])
    assert [message for _, message in made.take_answers()] == [["joined", 1, 0]] * 3


def test_ranks_that_all_wait_for_different_calls_are_told_so() -> None:
    made = coordinator()
    made.receive(0, reduction("a"))
    made.receive(1, reduction("b"))
    made.receive(0, ["wait", 1, [0, "a"]])
    assert made.take_answers() == []
    made.receive(1, ["wait", 1, [0, "b"]])
    text = made.take_answers()[0][1][4]
    assert "rank 0 called allreduce 'a'" in text and "rank 1 called allreduce 'b'" in text


def test_a_rank_that_can_still_call_is_waited_for() -> None:
    made = coordinator(3)
    for rank in range(2):
        made.receive(rank, reduction("ab"[rank]))
        made.receive(rank, ["wait", 1, [0, "ab"[rank]]])
    assert made.take_answers() == []


def test_a_lost_rank_fails_calls_now_and_later() -> None:
    made = coordinator()
    made.receive(0, reduction("a"))
    made.lose(1, "rank 1 has ended", orderly=False)
    made.receive(0, reduction("b"))
    kinds = [(rank, message[0]) for rank, message in made.take_answers()]
    assert kinds == [(loss_line(0, 2), "lost"), (0, "error"), (0, "error")]


def test_a_closed_session_leaves_the_next_one_alone() -> None:
    made = coordinator()
    made.receive(0, reduction())
    made.receive(1, ["close", 1])
    assert [message[0] for _, message in made.take_answers()] == ["error", "closed"]
    for rank in range(2):
        made.receive(rank, [reduction()[0], 2, reduction()[2]])
    assert [message[:2] for _, message in made.take_answers()] == [["run", 2]] * 2


def test_a_stall_is_reported_once_and_fails_at_the_limit() -> None:
    clock = Clock()
    made = coordinator(3, clock, warn=10.0, limit=30.0)
    assert made.seconds_to_stall() is None
    made.receive(0, reduction("late"))
    assert made.seconds_to_stall() == 10.0
    clock.now = 10.0
    [text] = made.check_stalls()
    assert "'late'" in text and "missing ranks: [1, 2]" in text
    assert made.check_stalls() == [] and made.seconds_to_stall() == 20.0
    clock.now = 30.0
    made.check_stalls()
    assert [message[0] for _, message in made.take_answers()] == ["error"]


def test_a_removed_process_set_is_unknown() -> None:
    made = coordinator()
    for kind, given in (("add_process_set", {"ranks": (0,)}), ("remove_process_set", {"root": 1})):
        for rank in range(2):
            made.receive(rank, ["call", 1, CollectiveCall(kind, kind, **given).to_json()])
    assert [message[3] for _, message in made.take_answers()] == [1, 1, None, None]
    made.receive(0, reduction(process_set=1))
    assert "does not exist any more" in made.take_answers()[0][1][4]


def test_a_mismatch_names_what_differs() -> None:
    base = {"name": "x", "shapes": ((2,),), "dtypes": ("float32",), "device": "cpu", "op": "sum"}
    changes = {
        "Mismatched collective operations": {"kind": "reducescatter"},
        "Mismatched data types: One rank had type float32, but another rank had type int32.": {"dtypes": ("int32",)},
        "CPU/GPU device selection": {"device": "gpu"},
        "Mismatched reduce operations": {"op": "max"},
        "Mismatched scale factors": {"prescale": 2.0},
        "root ranks": {"root": 1},
    }
    for text, change in changes.items():
        calls = {0: CollectiveCall("allreduce", **base), 1: CollectiveCall(**{"kind": "allreduce", **base, **change})}
        found = describe_mismatch(calls)
        assert found is not None and text in found and "Rank 0 called" in found and "rank 1 called" in found
