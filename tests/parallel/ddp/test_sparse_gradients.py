"""Sparse gradients: several devices do what one does, and plain PyTorch where there is one worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tutti
from tests import worlds
from tests.covering import in_turn
from tests.parallel.models import NATIVE, trained
from tutti.errors import UsageError

VOCABULARY = 11
WORDS = torch.randint(0, VOCABULARY - 3, (24, 4), generator=torch.Generator().manual_seed(0))
"""The last three words never come."""
TARGETS = torch.randn(24, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


class Words(nn.Module):
    """Two tables of word vectors, one of them summed over a sample's words, and perhaps a layer that is dense."""

    def __init__(self, dense: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.each = nn.Embedding(VOCABULARY, 3, sparse=True)
        self.bag = nn.EmbeddingBag(VOCABULARY, 3, mode="sum", sparse=True)
        self.last = nn.Linear(3, 3) if dense else nn.Identity()
        self.double()

    def forward(self, words: Tensor) -> Tensor:
        result: Tensor = self.last(self.each(words[:, :2]).prod(1) + self.bag(words[:, 2:]))
        return result


def squared(called: Any, batch: Any) -> Tensor:
    words, targets = batch
    loss: Tensor = ((called(words) - targets) ** 2).sum(1).mean()
    return loss


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1),
    "sgd, momentum": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9),
    "sgd, nesterov": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, nesterov=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.1),
    "sparse adam": lambda p: torch.optim.SparseAdam(p, 0.01),
    "text": lambda p: "sgd:lr=0.05,momentum=0.9",
}


def words(optimizer: str, workers: int, **options: Any) -> Any:
    model = Words(dense=optimizer != "sparse adam")
    given = OPTIMIZERS[optimizer](list(model.parameters()))
    return trained(model, given, (WORDS, TARGETS), squared, steps=7, workers=workers, batch_size=8, **options)


def close(got: Any, want: Any) -> None:
    assert got[0].keys() == want[0].keys()
    for name in want[0]:
        assert got[0][name] == pytest.approx(want[0][name], rel=1e-10, abs=1e-10), name
    for mine, other in zip(got[1], want[1], strict=True):
        assert mine[:3] == pytest.approx(other[:3], rel=1e-10)


def plain(optimizer: str, clip: float | None) -> dict[str, Any]:
    """One worker in plain PyTorch, over the batches that a run with one worker sees."""
    seen = []
    run = tutti.prepare(Words(dense=False), "sgd", (WORDS, TARGETS), squared, batch_size=8, strategy="single")
    for epoch in range(3):
        seen += list(run.epoch(epoch))
    model = Words(dense=optimizer != "sparse adam")
    made = OPTIMIZERS[optimizer](list(model.parameters()))
    made = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9) if isinstance(made, str) else made
    for batch in seen[:7]:
        made.zero_grad()
        squared(model, batch).backward()
        if clip is not None:
            norm = torch.stack([p.grad.to_dense().norm() for p in model.parameters() if p.grad is not None]).norm()
            for p in model.parameters():
                assert p.grad is not None
                p.grad *= min(clip / (float(norm) + 1e-6), 1.0)
        made.step()
    return {name: p.detach().numpy() for name, p in model.named_parameters()}


def both(optimizer: str, clip: float | None) -> tuple[Any, Any]:
    return words(optimizer, 1, strategy="single", clip=clip), plain(optimizer, clip)


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_one_worker_does_what_plain_pytorch_does(optimizer: str, clip: float | None) -> None:
    [(got, want)] = worlds.run(1, both, optimizer=optimizer, clip=clip)
    for name in want:
        assert got[0][name] == pytest.approx(want[name], rel=1e-12, abs=1e-12), name


SEVERAL = ["mirrored", "central_storage", NATIVE, "mirrored:algorithm=native,bucket_mb=0.0001"]
PLACES = [*zip((3, 2, 2, 3), SEVERAL, strict=True), *zip((2, 3, 3, 2), SEVERAL, strict=True)]


@pytest.mark.parametrize(("optimizer", "place"), in_turn(list(OPTIMIZERS), PLACES, each=2), ids=str)
def test_several_devices_do_what_one_does(optimizer: str, place: tuple[int, str]) -> None:
    devices, strategy = place
    options: dict[str, Any] = {"clip": 0.5, "micro_batch": 1, "loss_scale": "8"}
    want = worlds.alone(words, optimizer=optimizer, workers=5, strategy="single", **options)
    for got in worlds.run(devices, words, optimizer=optimizer, workers=5, strategy=strategy, **options):
        close(got, want)


IN_PARTS = [
    *((2, "pipeline"), (3, "pipeline:micro_batches=2"), (2, "model_parallel"), (2, "tensor:least=1")),
    *((3, "tensor:least=1"), (4, "hybrid:tensor=2,least=1"), (4, "hybrid:stages=2")),
]
"""Devices and strategies that divide a replica, and keep sparse gradients for optimizers that need them."""


@pytest.mark.parametrize("place", IN_PARTS, ids=str)
def test_stages_and_split_layers_keep_the_rows_that_an_optimizer_needs(place: tuple[int, str]) -> None:
    devices, strategy = place
    options: dict[str, Any] = {"optimizer": "sparse adam", "workers": 4, "clip": 0.5, "loss_scale": "8"}
    want = worlds.alone(words, strategy="single", **options)
    for got in worlds.run(devices, words, strategy=strategy, **options):
        close(got, want)


class Twice(nn.Module):
    """A table that is read before a layer and behind it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.table, self.middle = nn.Embedding(VOCABULARY, 3, sparse=True), nn.Linear(3, 3)
        self.double()

    def forward(self, words: Tensor) -> Tensor:
        first = self.middle(self.table(words[:, :2]).sum(1))
        read: Tensor = first + self.table(words[:, 2:]).prod(1)
        return read


def twice(strategy: str) -> Any:
    model = Twice()
    rows = torch.optim.SparseAdam([model.table.weight], 0.01)
    given = [rows, torch.optim.Adam(model.middle.parameters(), 0.02)]
    return trained(model, given, (WORDS, TARGETS), squared, steps=5, workers=2, batch_size=8, strategy=strategy)


@pytest.mark.parametrize("strategy", ["pipeline:micro_batches=2", "model_parallel"])
def test_stages_that_share_a_table_add_up_its_rows(strategy: str) -> None:
    want = worlds.alone(twice, strategy="single")
    for got in worlds.run(2, twice, strategy=strategy):
        close(got, want)


@pytest.mark.parametrize("optimizer", ["sgd, momentum", "sparse adam"])
def test_reproducible_runs_have_the_same_bits_on_any_number_of_devices(optimizer: str) -> None:
    hashes = [
        got[2]
        for devices, strategy in [(1, "single"), (2, "mirrored"), (3, "mirrored"), (3, "central_storage")]
        for got in worlds.run(devices, words, optimizer=optimizer, workers=4, strategy=strategy, reproducible=True)
    ]
    assert len(set(hashes)) == 1


@pytest.mark.parametrize(
    ("strategy", "optimizer"),
    in_turn(["local_sgd:period=2", "local_sgd:period=2,post=3", "diloco:period=2"], ["sgd", "sparse adam"]),
)
def test_workers_that_train_alone_have_sparse_gradients_too(strategy: str, optimizer: str) -> None:
    options: dict[str, Any] = {"optimizer": optimizer, "workers": 3, "strategy": strategy, "clip": 0.5}
    want = worlds.alone(words, **options)
    for devices in (2, 3):
        for got in worlds.run(devices, words, **options):
            close(got, want)


def moving(strategy: str) -> Any:
    """Two steps in which worker 0 reads row 1 and worker 1 row 2, the second with gradients of zero."""
    model, factor = nn.Embedding(4, 2, sparse=True).double(), [1.0]
    with torch.no_grad():
        model.weight.fill_(1.0)
    run = tutti.prepare(
        model,
        torch.optim.SparseAdam(model.parameters(), 0.1),
        torch.tensor([1, 2]),
        lambda called, batch: called(batch).mean() * factor[0],
        strategy=strategy,
        workers=2,
        batch_size=2,
    )
    seen = []
    for epoch in range(2):
        for batch in run.epoch(epoch):
            run.step(batch)
        seen.append(run.state()["weight"].numpy().copy())
        factor[0] = 0.0
    return seen


@pytest.mark.parametrize("strategy", SEVERAL)
def test_rows_are_those_that_samples_name_whatever_their_gradient(strategy: str) -> None:
    want = worlds.alone(moving, strategy="single")
    first, second = want
    assert (first[[0, 3]] == 1).all() and (second[[0, 3]] == 1).all()
    assert (first[[1, 2]] < 1).all() and (second[[1, 2]] < first[[1, 2]]).all()
    for got in worlds.run(2, moving, strategy=strategy):
        for mine, other in zip(got, want, strict=True):
            assert mine == pytest.approx(other, rel=1e-12)


class Tied(nn.Module):
    """A table whose weight another layer uses, so that its gradient is dense; on ranks with long samples alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.table = nn.Embedding(VOCABULARY, 3, sparse=True).double()

    def forward(self, words: Tensor) -> Tensor:
        read: Tensor = self.table(words).sum(1)
        return read + self.table.weight.sum(0) if bool((words[:, 0] == 7).any()) else read


def tied(strategy: str) -> Any:
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    options: dict[str, Any] = {"workers": 4, "batch_size": 8, "micro_batch": 1}
    return trained(model, optimizer, (WORDS, TARGETS), squared, strategy=strategy, **options)


@pytest.mark.parametrize("strategy", SEVERAL)
def test_a_weight_with_dense_gradients_too_has_a_dense_one(strategy: str) -> None:
    want = worlds.alone(tied, strategy="single")
    for devices in (2, 3):
        for got in worlds.run(devices, tied, strategy=strategy):
            close(got, want)


def resumed(optimizer: str, strategy: str, folder: str, stop: int | None) -> Any:
    """Six steps, with a save after the third; or from there."""
    model = Words(dense=optimizer != "sparse adam")
    given = OPTIMIZERS[optimizer](list(model.parameters()))
    run = tutti.prepare(
        *(model, given, (WORDS, TARGETS), squared),
        strategy=strategy,
        workers=3,
        batch_size=8,
        reproducible=True,
    )
    if stop is None:
        run.restore(folder)
    for epoch in run.epochs(2):
        for batch in run.epoch(epoch):
            run.step(batch)
            if run.global_step == stop:
                run.save(folder)
    return run.weights_sha256()


@pytest.mark.parametrize("optimizer", ["sgd, momentum", "sgd, nesterov", "sparse adam", "text"])
def test_a_run_goes_on_from_a_checkpoint_with_the_same_bits(tmp_path: Any, optimizer: str) -> None:
    folder = str(tmp_path / "saved")
    [want] = worlds.run(1, resumed, optimizer=optimizer, strategy="single", folder=folder, stop=2)
    for devices, strategy in [(1, "single"), (2, "mirrored"), (3, "central_storage")]:
        got = worlds.run(devices, resumed, optimizer=optimizer, strategy=strategy, folder=folder, stop=None)
        assert set(got) == {want}


def refused(called: Callable[..., Any], **arguments: Any) -> str:
    """What a rank is told; its world lives on."""
    with pytest.raises(UsageError) as caught:
        called(**arguments)
    return str(caught.value)


DENSE = ["sharded", "sharded:stage=2", "pipeline", "model_parallel", "tensor", "hybrid:tensor=2", "parameter_server"]


@pytest.mark.parametrize("strategy", ["sharded", "sharded:stage=2", "hybrid:shards=2,stages=1", "parameter_server"])
def test_other_strategies_refuse_by_name_on_every_rank(strategy: str) -> None:
    for said in worlds.run(2, refused, called=words, optimizer="sparse adam", workers=2, strategy=strategy):
        assert "cannot be combined with sparse gradients" in said and "mirrored" in said


@pytest.mark.parametrize(("strategy", "optimizer"), in_turn(DENSE, ["sgd, momentum", "adagrad", "text"]))
def test_other_strategies_make_gradients_dense_where_the_update_is_the_same(strategy: str, optimizer: str) -> None:
    devices = 4 if strategy.startswith("hybrid") else 2
    want = worlds.alone(words, optimizer=optimizer, workers=4, strategy="single", clip=0.5)
    for got in worlds.run(devices, words, optimizer=optimizer, workers=4, strategy=strategy, clip=0.5):
        close(got, want)


@pytest.mark.parametrize("strategy", ["sharded", "pipeline", "model_parallel", "tensor"])
def test_other_strategies_run_on_one_device(strategy: str) -> None:
    want = worlds.alone(words, optimizer="sgd", workers=2, strategy="single")
    [got] = worlds.run(1, words, optimizer="sgd", workers=2, strategy=strategy)
    close(got, want)


def with_optimizer(optimizer: str) -> None:
    model = Words(dense=True)
    given: Any = optimizer
    if optimizer.startswith("torch."):
        kind = getattr(torch.optim, optimizer.removeprefix("torch."))
        given = kind(model.parameters(), weight_decay=0.1) if "SGD" in optimizer else kind(model.parameters())
    tutti.prepare(model, given, (WORDS, TARGETS), squared, batch_size=8)


DENSE_ALONE = ["torch.Adam", "torch.SGD", "torch.RMSprop", "adam", "adamw", "lars", "larc", "lamb", "novograd", "muon"]


@pytest.mark.parametrize("optimizer", DENSE_ALONE)
def test_optimizers_that_take_no_sparse_gradients_are_refused_in_prepare(optimizer: str) -> None:
    for said in worlds.run(2, refused, called=with_optimizer, optimizer=optimizer):
        assert "cannot step with sparse gradients" in said and "sparse=False" in said


class Functional(nn.Module):
    """Asks for a sparse gradient in the call alone."""

    def __init__(self, said: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.weight = nn.Parameter(torch.randn(VOCABULARY, 3, dtype=torch.float64))
        self.sparse = said

    def forward(self, words: Tensor) -> Tensor:
        return nn.functional.embedding(words, self.weight, sparse=True).sum(1)


def functional(said: bool, strategy: str = "mirrored") -> Any:
    model = Functional(said)
    optimizer = torch.optim.SparseAdam(model.parameters(), 0.01)
    return trained(model, optimizer, (WORDS, TARGETS), squared, strategy=strategy, workers=2, batch_size=8)


def test_a_module_that_says_so_may_have_a_sparse_gradient() -> None:
    want = worlds.alone(functional, said=True, strategy="single")
    other = worlds.alone(functional, said=False, strategy="single")
    close(other, want)
    for got in worlds.run(2, functional, said=True):
        close(got, want)


@pytest.mark.parametrize("strategy", ["mirrored", NATIVE])
def test_a_sparse_gradient_that_no_module_announces_is_refused(strategy: str) -> None:
    for told in worlds.run(2, refused, called=functional, said=False, strategy=strategy):
        assert "attribute sparse = True" in told


def not_finite(strategy: str) -> Any:
    model = Words(dense=True)
    with torch.no_grad():
        model.each.weight[3] = float("nan")
    run = tutti.prepare(model, "sgd:lr=0.1", (WORDS, TARGETS), squared, strategy=strategy, batch_size=8, workers=2)
    for batch in run.epoch(0):
        run.step(batch)
    assert run.updated is not None
    return run.updates, run.updated.nonfinite[:1]


def test_a_sparse_gradient_that_is_not_finite_is_skipped_by_name() -> None:
    for devices, strategy in [(1, "single"), (2, "mirrored"), (2, NATIVE)]:
        for updates, names in worlds.run(devices, not_finite, strategy=strategy):
            assert (updates, names) == (0, ("each.weight",))


def custom_loop(strategy: str) -> Any:
    model = Words(dense=False)
    optimizer = torch.optim.SparseAdam(model.parameters(), 0.01)
    run = tutti.prepare(model, optimizer, (WORDS, TARGETS), strategy=strategy, workers=3, batch_size=8, micro_batch=2)
    for batch in run.microbatches(0):
        optimizer.zero_grad()
        run.backward(squared(run.model, batch))
        optimizer.step()
    return {n: t.numpy().copy() for n, t in run.state().items()}


def test_custom_loops_have_sparse_gradients_too() -> None:
    want = worlds.alone(custom_loop, strategy="single")
    for devices, strategy in [(2, "mirrored"), (3, NATIVE)]:
        for got in worlds.run(devices, custom_loop, strategy=strategy):
            for name in want:
                assert got[name] == pytest.approx(want[name], rel=1e-10, abs=1e-10)
