"""The public collectives over real ranks: values, gradients, mismatches, order, process sets, join."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tutti
from tests.worlds import run
from tutti.comm import collective_session
from tutti.errors import TuttiError

SIZES = [2, 3, 4]


def refused(call: Any, *args: Any, **given: Any) -> str:
    """The kind and text of the error of a call that must fail."""
    try:
        call(*args, **given)
    except TuttiError as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("the call was accepted")


def reductions() -> dict[str, list[float]]:
    mine = torch.tensor([1.0, -2.0]) * (tutti.rank() + 1)
    found = {op: tutti.allreduce(mine, op).tolist() for op in ("sum", "average", "min", "max", "product")}
    found["scaled"] = tutti.allreduce(mine, "sum", prescale=0.5, postscale=4.0).tolist()
    found["truncated"] = tutti.allreduce(torch.tensor([tutti.rank(), -tutti.rank()])).tolist()
    return found


@pytest.mark.parametrize("size", SIZES)
def test_reductions(size: int) -> None:
    total = size * (size + 1) / 2
    factorial = float(torch.arange(1, size + 1).prod())
    expected = {
        "sum": [total, -2 * total],
        "average": [total / size, -2 * total / size],
        "min": [1.0, -2.0 * size],
        "max": [size, -2.0],
        "product": [factorial, factorial * (-2.0) ** size],
        "scaled": [2 * total, -4 * total],
        "truncated": [int((total - size) / size), -int((total - size) / size)],
    }
    for found in run(size, reductions):
        assert found == {key: pytest.approx(value) for key, value in expected.items()}


def every_dtype(dtype: torch.dtype) -> list[Any]:
    rank, size = tutti.rank(), tutti.size()
    rows = torch.full((rank + 1, 2), rank).to(dtype)
    gathered = tutti.allgather(rows)
    sent = tutti.broadcast(torch.full((3,), rank).to(dtype), size - 1)
    received, counts = tutti.alltoall(torch.arange(size).repeat_interleave(rank + 1).to(dtype), [rank + 1] * size)
    return [gathered.dtype, gathered[:, 0].int().tolist(), sent.int().tolist(), len(received), counts.tolist()]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.bool, torch.bfloat16, torch.float64])
def test_tensors_of_every_dtype_are_moved(dtype: torch.dtype) -> None:
    size, most = 3, 1 if dtype == torch.bool else 2
    for found in run(size, every_dtype, dtype=dtype):
        gathered = [min(rank, most) for rank in range(size) for _ in range(rank + 1)]
        assert found == [dtype, gathered, [min(size - 1, most)] * 3, 6, [1, 2, 3]]


def uneven_scatter() -> list[float]:
    whole = torch.arange(5.0) * (tutti.rank() + 1)
    return tutti.reducescatter(whole, "sum").tolist()


def test_a_reduce_scatter_of_an_uneven_dimension() -> None:
    assert run(3, uneven_scatter) == [[0.0, 6.0], [12.0, 18.0], [24.0]]


def adasum() -> tuple[list[float], list[float]]:
    basis = torch.eye(4)[tutti.rank()]
    parallel = torch.ones(2) * 2.0
    return tutti.allreduce(basis, "adasum").tolist(), tutti.allreduce(parallel, "adasum").tolist()


def test_adasum_adds_orthogonal_vectors_and_averages_parallel_ones() -> None:
    assert run(4, adasum) == [([1.0] * 4, [2.0, 2.0])] * 4


def adasum_of_three() -> str:
    return refused(tutti.allreduce, torch.ones(2), "adasum")


def test_adasum_refuses_three_ranks() -> None:
    assert all("power of two" in text for text in run(3, adasum_of_three))


def gradients() -> list[list[float]]:
    rank, size = tutti.rank(), tutti.size()
    found = []
    for call in (
        lambda x: tutti.allreduce(x, "average"),
        lambda x: tutti.allreduce(x, "sum"),
        lambda x: tutti.allgather(x),
        lambda x: tutti.broadcast(x, 1),
        lambda x: tutti.alltoall(x)[0],
        lambda x: tutti.reducescatter(x, "sum"),
    ):
        x = torch.ones(size, requires_grad=True)
        (call(x) * (rank + 1)).sum().backward()
        assert x.grad is not None
        found.append(x.grad.tolist())
    return found


def test_gradients() -> None:
    # Weights of the ranks' losses: 1 and 2.
    zero, one = run(2, gradients)
    assert zero == [[1.5, 1.5], [3.0, 3.0], [1.5, 1.5], [0.0, 0.0], [1.0, 2.0], [2.0, 4.0]]
    assert one == [[1.5, 1.5], [3.0, 3.0], [1.5, 1.5], [1.5, 1.5], [1.0, 2.0], [2.0, 4.0]]


MISMATCHES: dict[str, Any] = {
    "shapes": lambda rank: tutti.allreduce(torch.ones(2 + rank % 2), name="x"),
    "data types": lambda rank: tutti.allreduce(torch.ones(2).to((torch.float32, torch.int32)[rank % 2]), name="x"),
    "operations": lambda rank: (tutti.allgather if rank % 2 else tutti.allreduce)(torch.ones(2), name="x"),
    "reduce operations": lambda rank: tutti.allreduce(torch.ones(2), ("sum", "max")[rank % 2], name="x"),
    "scale": lambda rank: tutti.allreduce(torch.ones(2), prescale=1.0 + rank % 2, name="x"),
    "root ranks": lambda rank: tutti.broadcast(torch.ones(2), rank % 2, name="x"),
    "dimension": lambda rank: tutti.allgather(torch.ones(2, 2 + rank % 2), name="x"),
    "a group": lambda rank: tutti.grouped_allreduce([torch.ones(2)] * (1 + rank % 2), name="x"),
    "sparse shapes": lambda rank: tutti.allreduce(torch.ones(10 - 5 * (rank % 2)).to_sparse(), name="x"),
    "sparse operations": lambda rank: tutti.allreduce(torch.eye(2).to_sparse(), ("sum", "average")[rank % 2], name="x"),
    "unnamed": lambda rank: (tutti.allgather if rank % 2 else tutti.allreduce)(torch.ones(2)),
}


def mismatch(kind: str) -> tuple[str, list[float]]:
    text = refused(MISMATCHES[kind], tutti.rank())
    # The job goes on.
    return text, tutti.allreduce(torch.ones(1), "sum").tolist()


@pytest.mark.parametrize("kind", MISMATCHES)
def test_a_mismatch_is_an_error_on_every_rank_with_both_calls(kind: str) -> None:
    for text, after in run(3, mismatch, kind=kind):
        assert text.startswith("MismatchError: Mismatched")
        assert "Rank 0 called" in text and "rank 1 called" in text
        assert after == [3.0]


def order() -> str:
    return refused(tutti.allreduce, torch.ones(1), name=f"only on {tutti.rank()}")


def test_ranks_that_wait_for_different_names_are_told_so() -> None:
    for text in run(3, order):
        assert text.startswith("MismatchError: Ranks wait for different collectives")
        assert all(f"rank {rank} called allreduce 'only on {rank}'" in text for rank in range(3))


def names_in_any_order() -> list[float]:
    names = [f"tensor {i}" for i in range(20)]
    if tutti.rank() % 2:
        names.reverse()
    handles = {name: tutti.allreduce_async(torch.tensor([float(name[7:])]), "sum", name) for name in names}
    return [handles[f"tensor {i}"].wait().item() for i in range(20)]


def test_names_match_calls_in_any_order() -> None:
    assert run(3, names_in_any_order) == [[3.0 * i for i in range(20)]] * 3


def twice() -> tuple[str, float]:
    """A name that is used twice is refused by the call itself, and a barrier overtakes the first."""
    # However slow this machine is at the moment.
    collective_session.SETTLE = 600.0
    rank = tutti.rank()
    text = ""
    if rank == 0:
        handle = tutti.allreduce_async(torch.ones(1), "sum", "twice")
        text = refused(tutti.allreduce_async, torch.ones(1), "sum", "twice")
    tutti.barrier()
    if rank > 0:
        handle = tutti.allreduce_async(torch.ones(1), "sum", "twice")
        # Complete, but nobody has waited for it.
        handle.finished.wait()
        text = refused(tutti.allreduce_async, torch.ones(1), "sum", "twice")
    return text, handle.wait().item()


def test_a_name_that_is_pending_is_refused() -> None:
    for text, total in run(3, twice):
        assert "same name as another tensor" in text and total == 3.0


REFUSED = (torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.complex32)


def numbers_that_are_not_reduced() -> list[Any]:
    rows = torch.ones(1).expand(2)
    found = [
        refused(tutti.allreduce, torch.tensor([True]), "average", "x"),
        refused(tutti.reducescatter, torch.ones(2).bool(), "average", "x"),
        refused(tutti.allreduce, torch.tensor([1j]), "max", "x"),
        *(refused(tutti.allreduce, torch.ones(2).to(dtype), "sum", "x") for dtype in REFUSED),
        refused(tutti.reducescatter, torch.ones(2).to(torch.float8_e5m2), "sum", "x"),
        refused(tutti.allreduce_async, rows, "sum", "x", in_place=True),
        refused(tutti.broadcast_async, rows, 0, "x", in_place=True),
    ]
    value = torch.tensor([1 + 2j * tutti.rank()])
    return [
        *found,
        tutti.allreduce(value, "average", prescale=2.0, postscale=3.0).item(),
        tutti.allreduce(rows).tolist(),
    ]


def test_dtypes_and_places_that_cannot_be_reduced_are_refused_at_the_call() -> None:
    for rank, found in enumerate(run(2, numbers_that_are_not_reduced)):
        *refusals, mean, row = found
        assert [text for text in refusals if f"rank {rank}" not in text or "x'" not in text] == []
        assert "Tensor type bool is not supported by average" in refusals[0] and "complex64" in refusals[2]
        for dtype, text in zip(REFUSED, refusals[3:], strict=False):
            assert f"Tensor type {str(dtype).removeprefix('torch.')} is not supported by sum" in text
        assert "required to be contiguous" in refusals[-1] and [mean, row] == [6 + 6j, [1.0, 1.0]]


def sets() -> list[Any]:
    rank = tutti.rank()
    even, odd = tutti.add_process_set([0, 2]), tutti.add_process_set([1, 3])
    mine, other = (odd, even) if rank % 2 else (even, odd)
    found = [
        tutti.allreduce(torch.tensor([float(rank)]), "sum", process_set=mine).item(),
        tutti.allgather_object(rank, process_set=mine),
        tutti.broadcast_object(f"from {rank}", mine.ranks[1], process_set=mine),
        refused(tutti.allreduce, torch.ones(1), process_set=other),
        refused(tutti.add_process_set, [2, 0]),
        tutti.remove_process_set(odd),
        tutti.remove_process_set(even),
        tutti.remove_process_set(even),
    ]
    return [*found, refused(tutti.allreduce, torch.ones(1), process_set=mine)]


def test_process_sets() -> None:
    for rank, found in enumerate(run(4, sets)):
        assert found[:3] == [[2.0, 4.0][rank % 2], [rank % 2, rank % 2 + 2], f"from {rank % 2 + 2}"]
        assert f"rank {rank} is not in" in found[3] and "duplicate process set" in found[4]
        assert found[5:8] == [True, True, False] and "is not known" in found[8]


def joining() -> list[Any]:
    rank = tutti.rank()
    found: list[Any] = [tutti.allreduce(torch.ones(1), "sum", f"batch {i}").item() for i in range(rank)]
    if rank == 2:
        found.append(refused(tutti.allreduce, torch.ones(1), "max"))
        found.append(refused(tutti.allgather, torch.ones(1)))
    return [*found, tutti.join(), tutti.allreduce(torch.ones(1), "sum").item()]


def test_a_rank_that_has_joined_sends_zeros() -> None:
    zero, one, two = run(3, joining)
    assert zero == [2, 3.0] and one == [2.0, 2, 3.0]
    assert two[:2] == [2.0, 1.0] and two[4:] == [2, 3.0]
    assert "not supported with Join" in two[2] and "not supported with Join" in two[3]


def repeated() -> list[Any]:
    """Calls that ranks repeat: in any order, one of them with another shape, and one while a rank has joined."""
    rank, names, found = tutti.rank(), ["a", "b", "c"], []
    for step in range(3):
        order = names[rank:] + names[:rank]
        tensors = {name: torch.full((2,), float(rank + step)) for name in names}
        handles = {name: tutti.allreduce_async(tensors[name], "sum", name, in_place=True) for name in order}
        for name in names:
            handles[name].wait()
        found.append([tensors[name].tolist() for name in names])
    found.append(refused(tutti.allreduce, torch.ones(2 + (rank == 1)), "sum", "a"))
    found.append(tutti.allreduce(torch.ones(2), "sum", "a").tolist())
    if rank == 2:
        tutti.join()
        found.append([2.0, 2.0])
    else:
        found.append(tutti.allreduce(torch.ones(2), "sum", "b").tolist())
        tutti.join()
    return [*found, tutti.allreduce(torch.ones(2), "sum", "b").tolist()]


def test_calls_that_ranks_repeat() -> None:
    for *steps, mismatch, after, joined, last in run(3, repeated):
        assert steps == [[[3.0 * step + 3] * 2] * 3 for step in range(3)]
        assert "MismatchError" in mismatch and "rank 1 called allreduce 'a' (sum) of float32 [3]" in mismatch
        assert after == last == [3.0, 3.0] and joined == [2.0, 2.0]


def objects() -> list[Any]:
    rank = tutti.rank()
    return [tutti.broadcast_object({"rank": rank, 0: [1, 2]}, 1), tutti.allgather_object({"x" * rank: {rank}})]


def test_objects() -> None:
    expected = [{"rank": 1, 0: [1, 2]}, [{"": {0}}, {"x": {1}}, {"xx": {2}}]]
    assert run(3, objects) == [expected] * 3


def objects_refused() -> list[str]:
    """Messages of objects that one rank cannot send; the next collective shows that no rank is behind."""
    last, endless = tutti.rank() == tutti.size() - 1, [[]]
    endless[0].append(endless)  # type: ignore[arg-type]
    texts = [
        refused(tutti.broadcast_object, {"a": object() if last else 1}, tutti.size() - 1),
        refused(tutti.allgather_object, [torch.ones(2).to_sparse() if last else 1], "x"),
        refused(tutti.allgather_object, endless if last else 1),
        refused(tutti.broadcast_object, np.zeros(2, [("a", "i4"), ("b", "f4")]), 0),
    ]
    assert tutti.allreduce(torch.ones(1), "sum").tolist() == [tutti.size()]
    return texts


@pytest.mark.parametrize("size", [2, 3])
def test_an_object_that_one_rank_cannot_send_is_an_error_on_every_rank(size: int) -> None:
    found = run(size, objects_refused)
    assert found == [found[0]] * size
    whole, part, endless, records = found[0]
    assert f"(rank {size - 1}, broadcast_object without a name)" in whole and "['a'] is a builtins.object" in whole
    assert f"(rank {size - 1}, allgather_object 'x')" in part and "[0] is a tensor of layout torch.sparse_coo" in part
    assert "RecursionError" in endless and "is an array of records" in records


def conjugates() -> list[complex]:
    value: list[complex] = tutti.broadcast_object(torch.tensor([1 + 2j]).conj(), 0).tolist()
    return value


def test_a_lazy_conjugate_is_sent() -> None:
    assert run(2, conjugates) == [[1 - 2j]] * 2


def sparse(dtype: torch.dtype) -> list[Any]:
    """Sums and averages, and for each whether it is that of the dense tensors, of the same dtype."""
    rows = torch.tensor([[0, tutti.rank() + 1]])
    mine = torch.sparse_coo_tensor(rows, torch.full((2, 2), 5, dtype=dtype), (4, 2))
    found: list[Any] = []
    for op, factors in (("average", {}), ("sum", {"prescale": 0.5}), ("average", {"prescale": 0.3, "postscale": 1.5})):
        reduced, dense = (tutti.allreduce(tensor, op, **factors) for tensor in (mine, mine.to_dense()))
        same = reduced.dtype == dense.dtype and reduced.is_coalesced() and torch.equal(reduced.to_dense(), dense)
        found.append((reduced.to_dense()[:, 0].tolist(), same))
    return found


@pytest.mark.parametrize(
    ("dtype", "sums"),
    [
        (torch.float32, [[5, 2.5, 2.5, 0], [5, 2.5, 2.5, 0], [2.25, 1.125, 1.125, 0]]),
        (torch.int64, [[5, 2, 2, 0], [4, 2, 2, 0], [1, 0, 0, 0]]),
    ],
)
def test_sparse_tensors(dtype: torch.dtype, sums: list[list[float]]) -> None:
    assert run(2, sparse, dtype=dtype) == [[(total, True) for total in sums]] * 2


def sparse_refused() -> list[str]:
    mine = torch.eye(2).to_sparse()
    calls = (tutti.allreduce_async, tutti.allgather, lambda it: tutti.broadcast(it, 0), tutti.alltoall)
    said = [refused(call, mine) for call in (lambda it: tutti.grouped_allreduce([torch.ones(2), it]), *calls)]
    assert tutti.allreduce(torch.ones(1), "sum").tolist() == [2.0], "the engine has failed"
    return [*said, refused(tutti.allreduce, mine.to_sparse_csr())]


def test_sparse_tensors_elsewhere_are_refused() -> None:
    for said in run(2, sparse_refused):
        assert all(text.startswith("UsageError: a tensor of layout sparse_") and "to_dense()" in text for text in said)


def switches() -> dict[str, int]:
    """How often each of the engine's threads has gone to sleep."""
    found = {}
    for thread in threading.enumerate():
        if thread.name in ("tutti-collectives", "tutti-hub"):
            status = Path(f"/proc/self/task/{thread.native_id}/status").read_text()
            found[thread.name] = int(status.split("\nvoluntary_ctxt_switches:")[1].split()[0])
    return found


def at_rest() -> dict[str, int]:
    """Wait until no thread of the engine has woken up for a second."""
    tutti.barrier()
    before = switches()
    for _ in range(20):
        time.sleep(1.0)
        after = switches()
        if after == before:
            return after
        before = after
    raise AssertionError(f"the threads of an idle engine wake up: {after}")


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are counted in /proc")
def test_an_idle_engine_sleeps() -> None:
    for rank, threads in enumerate(run(2, at_rest)):
        assert set(threads) == ({"tutti-collectives", "tutti-hub"} if rank == 0 else {"tutti-collectives"})
