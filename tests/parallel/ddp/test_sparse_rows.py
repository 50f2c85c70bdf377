"""Rows of sparse gradients travel by all-gather, and the updates are those of one device and of plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tutti
from tests import worlds
from tests.covering import in_turn
from tests.parallel.models import NATIVE
from tutti.comm.communicator import world_communicator
from tutti.comm.uneven_gather import gather_uneven
from tutti.launcher import context
from tutti.parallel.ddp.sparse_gradients import RowForm, SparseReducer

ROWS, WIDTH = 400, 6
WORDS = torch.randint(1, ROWS - 50, (36, 3), generator=torch.Generator().manual_seed(0))
WORDS[::5] = 0
TARGETS = torch.randn(36, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
Loop = Callable[[Any, Any, Any], None]


class Rare(nn.Module):
    """Two tables, one of which is read only for some samples, and a layer that is dense."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.words = nn.Embedding(ROWS, WIDTH, sparse=True, padding_idx=0)
        self.rare = nn.EmbeddingBag(ROWS, WIDTH, sparse=True)
        self.last, self.tied = nn.Linear(WIDTH, WIDTH), tied
        self.double()

    def forward(self, words: Tensor) -> Tensor:
        made: Tensor = self.last(self.words(words[:, :2]).prod(1))
        chosen = (words[:, 2] % 7 == 0).nonzero().squeeze(1)
        if len(chosen):
            made = made.index_add(0, chosen, self.rare(words[chosen]))
        return made + 0.1 * made @ self.words.weight[:WIDTH].tanh() if self.tied else made


def squared(called: Any, batch: Any) -> Tensor:
    words, targets = batch
    loss: Tensor = ((called(words) - targets) ** 2).sum(1).mean()
    return loss


def optimizers(model: Rare, kind: str) -> list[torch.optim.Optimizer]:
    tables = [model.words.weight, model.rare.weight]
    if kind == "sparse adam":
        return [torch.optim.SparseAdam(tables, 0.05), torch.optim.Adam(model.last.parameters(), 0.01)]
    if kind == "adagrad":
        return [torch.optim.Adagrad(model.parameters(), 0.1)]
    return [torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)]


def edited(model: Rare, edit: str) -> None:
    """What scripts do to gradients between backward and update."""
    for parameter in model.parameters():
        gradient = parameter.grad
        if gradient is None or edit == "none":
            continue
        if edit == "coalesced":
            parameter.grad = gradient.coalesce() if gradient.is_sparse else gradient
        elif edit == "scaled":
            gradient.mul_(0.5)
        elif edit == "clipped":
            values = gradient.coalesce().values() if gradient.is_sparse else gradient
            parameter.grad = gradient * min(0.05 / (float(values.norm()) + 1e-6), 1.0)
        elif gradient.is_sparse:
            gradient = gradient.coalesce()
            values = gradient.values().clamp(-0.01, 0.01)
            parameter.grad = torch.sparse_coo_tensor(gradient.indices(), values, gradient.shape, check_invariants=False)


def plain(kind: str, edit: str, batch: int, tied: bool = False) -> dict[str, Any]:
    """PyTorch alone, over the batches that a run sees."""
    run = tutti.prepare(nn.Linear(1, 1).double(), "sgd", (WORDS, TARGETS), squared, batch_size=batch, strategy="single")
    batches = [each for epoch in range(2) for each in run.epoch(epoch)]
    model = Rare(tied)
    made = optimizers(model, kind)
    for each in batches:
        for optimizer in made:
            optimizer.zero_grad()
        squared(model, each).backward()
        edited(model, edit)
        for optimizer in made:
            optimizer.step()
    return {name: tensor.numpy().copy() for name, tensor in model.state_dict().items()}


def trained(kind: str, edit: str, batch: int, loop: bool = True, tied: bool = False, **options: Any) -> Any:
    model = Rare(tied)
    made = optimizers(model, kind)
    run = tutti.prepare(model, made, (WORDS, TARGETS), None if loop else squared, batch_size=batch, **options)
    for epoch in range(2):
        for each in run.microbatches(epoch) if loop else run.epoch(epoch):
            if not loop:
                run.step(each)
                continue
            for optimizer in made:
                optimizer.zero_grad()
            run.backward(squared(run.model, each))
            edited(model, edit)
            for optimizer in made:
                optimizer.step()
    facts = run.gradient_sync.facts().get("collectives", {})
    return {name: tensor.numpy().copy() for name, tensor in run.state().items()}, facts


def check(got: Any, want: dict[str, Any]) -> None:
    assert got.keys() == want.keys()
    for name in want:
        assert got[name] == pytest.approx(want[name], rel=1e-10, abs=1e-10), name


SCHEDULES = [f"mirrored:algorithm={name}" for name in ("ring", "tree", "halving", "hierarchical", "central")]
STRATEGIES = ["mirrored", NATIVE, "mirrored:algorithm=shared_memory", *SCHEDULES, "central_storage"]
KINDS = ["sgd", "adagrad", "sparse adam"]
EDITS = ["none", "coalesced", "scaled", "clipped", "clamped"]


PLACES = [("adagrad", 2), ("sgd", 2), ("sparse adam", 4), ("sgd", 3), ("adagrad", 4), ("sparse adam", 3), ("sgd", 4)]
PLACES += [("adagrad", 3), ("sparse adam", 2)]
"""Optimizers and ranks in the strategies' order: schedules of messages are played by three or four ranks."""


@pytest.mark.parametrize(("strategy", "place"), in_turn(STRATEGIES, PLACES), ids=str)
def test_custom_loops_equal_plain_pytorch(strategy: str, place: tuple[str, int]) -> None:
    kind, ranks = place
    if ranks == 3 and strategy == "mirrored:algorithm=halving":
        ranks = 4
    # Each strategy has each edit and number of workers in turn.
    turn = STRATEGIES.index(strategy) + 2 * KINDS.index(kind) + ranks
    edit, workers = EDITS[turn % len(EDITS)], [1, 4, 5][turn % 3]
    want = worlds.alone(plain, kind=kind, edit=edit, batch=12)
    options: dict[str, Any] = {"kind": kind, "edit": edit, "batch": 12, "workers": workers, "micro_batch": 1}
    for got, _ in worlds.run(ranks, trained, strategy=strategy, **options):
        check(got, want)


@pytest.mark.parametrize(("strategy", "tied"), in_turn(STRATEGIES, [True, False]))
def test_steps_equal_plain_pytorch(strategy: str, tied: bool) -> None:
    """A tied table has a dense gradient in PyTorch; so it has here, though the other table's is sparse."""
    options: dict[str, Any] = {"kind": "adagrad" if tied else "sgd", "edit": "none", "batch": 8, "tied": tied}
    want = worlds.alone(plain, **options)
    for got, _ in worlds.run(2, trained, loop=False, strategy=strategy, workers=4, micro_batch=2, **options):
        check(got, want)


def test_rows_travel_and_not_tables() -> None:
    """Four samples name fewer rows than the tables have: all messages of a step are smaller than half of one table."""
    for strategy in ("mirrored", NATIVE):
        options: dict[str, Any] = {"kind": "sgd", "edit": "none", "batch": 4, "loop": False, "strategy": strategy}
        for _, facts in worlds.run(2, trained, **options):
            rows = facts["shared_memory"]
            dense = facts.get("all_reduce", {"bytes": 0})
            # Eighteen steps; in each two messages of both ranks, the second without one where no row was named.
            assert 18 < rows["calls"] <= 36
            assert rows["bytes"] + dense["bytes"] < 18 * ROWS * WIDTH * 8 / 2


def reproducible(ranks_workers: int, micro_batch: int, **options: Any) -> Any:
    model = Rare()
    made = optimizers(model, "sparse adam")
    given: dict[str, Any] = {"batch_size": 12, "workers": ranks_workers, "micro_batch": micro_batch}
    run = tutti.prepare(model, made, (WORDS, TARGETS), squared, reproducible=True, **given, **options)
    for epoch in range(2):
        for each in run.epoch(epoch):
            run.step(each)
    return run.weights_sha256()


@pytest.mark.parametrize("workers", [1, 3, 6])
def test_reproducible_bits_are_the_same_on_any_number_of_ranks(workers: int) -> None:
    options: dict[str, Any] = {"ranks_workers": workers, "micro_batch": 1}
    found = {worlds.alone(reproducible, strategy="single", **options)}
    for ranks in (2, 3, 4):
        found |= set(worlds.run(ranks, reproducible, strategy="mirrored", **options))
    assert len(found) == 1


def adaptive(strategy: str) -> Any:
    model = Rare()
    options: dict[str, Any] = {"batch_size": 12, "workers": 6, "lr_scale": "adascale", "strategy": strategy}
    run = tutti.prepare(model, "sgd:lr=0.01", (WORDS, TARGETS), squared, **options)
    for each in run.epoch(0):
        run.step(each)
    assert run.stats is not None
    return {name: tensor.numpy().copy() for name, tensor in run.state().items()}, run.stats.gradient_variance


def test_adascale_counts_the_variance_of_sparse_gradients() -> None:
    state, variance = worlds.alone(adaptive, strategy="single")
    assert variance is not None
    for ranks in (2, 3):
        for got, other in worlds.run(ranks, adaptive, strategy="mirrored"):
            check(got, state)
            assert tuple(other) == pytest.approx(tuple(variance), rel=1e-10)


class Elements(nn.Module):
    """Its weight's gradient is sparse in both dimensions."""

    sparse = True

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.weight = nn.Parameter(torch.randn(ROWS, WIDTH, dtype=torch.float64))

    def forward(self, words: Tensor) -> Tensor:
        return torch.gather(self.weight, 1, words % WIDTH, sparse_grad=True).sum(1, keepdim=True)


def by_elements(strategy: str) -> Any:
    model = Elements()
    optimizer = torch.optim.SparseAdam(model.parameters(), 0.05)
    options: dict[str, Any] = {"batch_size": 12, "workers": 3, "strategy": strategy}
    run = tutti.prepare(model, optimizer, (WORDS, TARGETS), squared, **options)
    for each in run.epoch(0):
        run.step(each)
    return {name: tensor.numpy().copy() for name, tensor in run.state().items()}


def test_gradients_that_are_sparse_in_two_dimensions() -> None:
    want = worlds.alone(by_elements, strategy="single")
    start = Elements().weight.detach().numpy()
    assert 0 < (want["weight"] != start).sum() < start.size
    for strategy in ("mirrored", NATIVE):
        for got in worlds.run(3, by_elements, strategy=strategy):
            check(got, want)


def narrow(wire: str) -> Any:
    model = Rare()
    options: dict[str, Any] = {"batch_size": 12, "workers": 2, "strategy": f"mirrored:wire={wire}"}
    run = tutti.prepare(model, "sgd:lr=0.1", (WORDS, TARGETS), squared, **options)
    for each in run.epoch(0):
        run.step(each)
    return {name: tensor.numpy().copy() for name, tensor in run.state().items()}, run.weights_sha256()


def test_values_are_rounded_to_the_wire_and_equal_on_all_ranks() -> None:
    [(want, exact), _] = worlds.run(2, narrow, wire="fp32")
    found = worlds.run(2, narrow, wire="bf16")
    assert len({sha for _, sha in found}) == 1 and found[0][1] != exact
    for name in want:
        assert found[0][0][name] == pytest.approx(want[name], abs=0.02)


def uneven() -> Any:
    comm = world_communicator(context.current())
    lengths = [[rank * 3, rank % 2, 0, 5] for rank in range(comm.size)]
    mine = lengths[comm.rank]
    vectors = [
        torch.full((mine[0],), comm.rank, dtype=torch.int32),
        torch.full((mine[1],), 0.5 + comm.rank, dtype=torch.float64),
        torch.empty(0, dtype=torch.int64),
        torch.full((5,), bool(comm.rank)),
    ]
    nothing = gather_uneven(comm, [torch.empty(0)], [[0]] * comm.size, "nothing")
    return [[part.tolist() for part in parts] for parts in gather_uneven(comm, vectors, lengths, "all")], nothing


def test_vectors_of_uneven_lengths_are_gathered() -> None:
    for ranks in (1, 3):
        for got, nothing in worlds.run(ranks, uneven):
            assert got == [[[r] * 3 * r, [0.5 + r] * (r % 2), [], [bool(r)] * 5] for r in range(ranks)]
            assert [[len(part) for part in parts] for parts in nothing] == [[0]] * ranks


def test_uncoalesced_sums_are_scaled() -> None:
    """On an accelerator a sum of two sparse gradients, accumulated over reductions, is not coalesced."""
    parameter = nn.Parameter(torch.zeros(4))
    parameter.grad = torch.sparse_coo_tensor([[1, 1]], [2.0, 3.0], (4,), check_invariants=True)
    dense: Any = SimpleNamespace(scale=lambda factor: None)
    comm = SimpleNamespace(device=torch.device("cpu"), size=1, start_all_reduce=None, share_memory=lambda: None)
    run_context: Any = SimpleNamespace(comms=SimpleNamespace(replica=comm), begins_worker=True, gradient_variance=False)
    SparseReducer(dense, [("weight", parameter)], run_context).scale(0.5)
    assert parameter.grad.to_dense().tolist() == [0.0, 2.5, 0.0, 0.0]


def test_row_numbers_of_several_sparse_dimensions() -> None:
    gradient = torch.randn(3, 4, 5, 2).relu().to_sparse(3).coalesce()
    form = RowForm(gradient.shape, 3, gradient.dtype)
    matrix = form.matrix_of(gradient)
    assert torch.equal(matrix.to_dense(), gradient.to_dense().view(60, 2))
    again = form.gradient(matrix.indices()[0], matrix.values())
    assert torch.equal(again.to_dense(), gradient.to_dense()) and again.sparse_dim() == 3
