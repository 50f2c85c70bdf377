"""A script's DataLoader in ``tutti.prepare``: what plain PyTorch computes with it, on any number of devices."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_sequence
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, WeightedRandomSampler, get_worker_info

import tutti
from tests import worlds
from tests.covering import in_turn
from tutti.errors import TuttiError

COUNT, BATCH = 22, 6


class Texts(Dataset[Any]):
    """Sequences of unequal length with a name, and sometimes a note."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Any:
        ids = torch.arange(1, 2 + index * 7 % 5)
        return {"ids": ids, "target": float(index % 3), "name": f"text {index}", "note": None if index % 2 else "odd"}


class Streamed(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        texts = Texts()
        yield from (texts[i] for i in range(COUNT))


class Divided(IterableDataset[Any]):
    """Samples of which each of k loader processes takes every k-th."""

    def __iter__(self) -> Iterator[Any]:
        process = get_worker_info()
        first, by = (0, 1) if process is None else (process.id, process.num_workers)
        texts = Texts()
        # The second of three processes ends early.
        yield from (texts[i] for i in range(first, 5 if by == 3 and first == 1 else COUNT, by))


class Repeated(IterableDataset[Any]):
    """Every loader process reads all of it."""

    def __iter__(self) -> Iterator[Any]:
        yield from Streamed()


class ByLength(Sampler[list[int]]):
    """Batches of a like length; the sampler's own draws order them."""

    def __iter__(self) -> Iterator[list[int]]:
        order = sorted(range(COUNT), key=lambda i: i * 7 % 5)
        batches = [order[start : start + BATCH - 1] for start in range(0, COUNT, BATCH - 1)]
        yield from (batches[i] for i in np.random.permutation(len(batches)))


def padded(items: list[Any]) -> Any:
    """What the model computes depends on the padding, so that it shows which samples share a batch."""
    assert all(item["name"].startswith("text") for item in items)
    ids = pad_sequence([item["ids"] for item in items], batch_first=True, padding_value=9)
    return {
        "ids": ids,
        "targets": torch.tensor([item["target"] for item in items]),
        "notes": [i["note"] for i in items],
    }


def sequences(items: list[Any]) -> Any:
    """Of a list of tensors, each of which is a sample."""
    ids = pad_sequence(items, batch_first=True, padding_value=9)
    return {"ids": ids, "targets": torch.tensor([float(len(item)) for item in items])}


def packed(items: list[Any]) -> Any:
    sequence = pack_sequence([item["ids"].float()[:, None] for item in items], enforce_sorted=False)
    return sequence, torch.tensor([item["target"] for item in items])


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embed, self.out = nn.Embedding(10, 4), nn.Linear(4, 1)
        self.cell = nn.RNN(1, 4, batch_first=True)

    def forward(self, ids: Tensor | PackedSequence) -> Tensor:
        if isinstance(ids, PackedSequence):
            hidden: Tensor = self.out(self.cell(ids)[1][0])
            return hidden[:, 0]
        return self.out(torch.tanh(self.embed(ids)).sum(dim=1))[:, 0]  # type: ignore[no-any-return]


def loss(model: Any, batch: Any) -> Tensor:
    ids, targets = (batch["ids"], batch["targets"]) if isinstance(batch, dict) else batch
    return nn.functional.mse_loss(model(ids), targets.to(torch.float64))


def loader(kind: str) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(4)
    weights = WeightedRandomSampler(torch.arange(1.0, COUNT + 1), 2 * COUNT, generator=generator)
    return {
        "shuffled": lambda: DataLoader(Texts(), BATCH, shuffle=True, collate_fn=padded, generator=generator),
        "weighted": lambda: DataLoader(Texts(), BATCH, sampler=weights, collate_fn=padded),
        "in order": lambda: DataLoader(Texts(), BATCH, collate_fn=padded, drop_last=True),
        "packed": lambda: DataLoader(Texts(), BATCH, collate_fn=packed),
        "buckets": lambda: DataLoader(Texts(), batch_sampler=ByLength(), collate_fn=padded),  # type: ignore[arg-type]
        "stream": lambda: DataLoader(Streamed(), BATCH, collate_fn=padded),
        "stream, drop last": lambda: DataLoader(Streamed(), BATCH, collate_fn=padded, drop_last=True),
        "processes": lambda: DataLoader(Texts(), BATCH, collate_fn=padded, num_workers=2),
        "list": lambda: DataLoader([Texts()[i]["ids"] for i in range(COUNT)], BATCH, collate_fn=sequences),  # type: ignore[arg-type]
        "divided": lambda: DataLoader(Divided(), 3, collate_fn=padded, num_workers=3),
        "divided, drop last": lambda: DataLoader(Divided(), 4, collate_fn=padded, num_workers=2, drop_last=True),
        "one process": lambda: DataLoader(Streamed(), BATCH, collate_fn=padded, num_workers=1),
        "repeated": lambda: DataLoader(Repeated(), BATCH, collate_fn=padded, num_workers=2),
    }[kind]()


def trained(
    kind: str,
    epochs: int = 2,
    custom: bool = False,
    folder: str = "",
    stop: int = 0,
    optimizer: Any = None,
    **options: Any,
) -> Any:
    """Losses and weights of a run; it may be saved after ``stop`` steps, or go on from there."""
    model = Model().double()
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.02)
    run = tutti.prepare(model, optimizer, loader(kind), loss, **{"precision": "fp64"} | options)
    losses = []
    if folder and not stop:
        assert run.restore(folder) is not None
    for epoch in run.epochs(epochs):
        for batch in run.microbatches(epoch) if custom else run.epoch(epoch):
            if custom:
                optimizer.zero_grad()
                run.backward(loss(model, batch))
                optimizer.step()
            else:
                run.step(batch)
            if not custom or run.stepped:
                assert run.stats is not None
                losses.append(run.stats.loss)
            if stop and run.global_step == stop:
                run.save(folder)
                return losses
    return losses, {name: tensor.numpy().copy() for name, tensor in run.state().items()}, run.samples


def close(got: Any, want: Any) -> None:
    assert np.allclose(got[0], want[0], rtol=0, atol=1e-10) and got[2] == want[2]
    assert all(np.abs(got[1][name] - value).max() <= 1e-10 for name, value in want[1].items())


def plain(kind: str, epochs: int = 2) -> Any:
    """The same script in plain PyTorch."""
    model = Model().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    losses, seen, batches = [], 0, loader(kind)
    for _ in range(epochs):
        for batch in batches:
            if isinstance(batch, tuple):
                batch = batch[0].to(torch.float64), batch[1]
            optimizer.zero_grad()
            value = loss(model, batch)
            value.backward()
            optimizer.step()
            losses.append(value.item())
            seen += len(batch["targets"] if isinstance(batch, dict) else batch[1])
    return losses, {name: tensor.numpy() for name, tensor in model.state_dict().items()}, seen


@pytest.mark.parametrize(
    "kind",
    [
        *("shuffled", "weighted", "in order", "packed", "stream", "stream, drop last", "processes"),
        *("list", "divided", "divided, drop last", "one process"),
    ],
)
def test_one_worker_computes_what_plain_pytorch_computes(kind: str) -> None:
    want = plain(kind)
    for custom in (False, True):
        [got] = worlds.run(1, trained, kind=kind, custom=custom)
        close(got, want)


@pytest.mark.parametrize(
    ("kind", "place"),
    in_turn(["shuffled", "weighted", "packed", "buckets", "stream", "processes", "divided"], [(2, True), (3, False)]),
)
def test_any_number_of_devices_computes_the_same(kind: str, place: tuple[int, bool]) -> None:
    """With three logical workers and micro-batches of one sample, collated one by one."""
    options = {"workers": 3, "micro_batch": 1} if kind == "buckets" else {"workers": 3}
    [want], (devices, custom) = worlds.run(1, trained, kind=kind, **options), place
    for got in worlds.run(devices, trained, kind=kind, custom=custom, **options):
        close(got, want)


@pytest.mark.parametrize("strategy", ["sharded", "central_storage", "tensor:least=1"])
def test_strategies_compute_the_same(strategy: str) -> None:
    workers = 1 if strategy.startswith("tensor") else 2
    [want] = worlds.run(1, trained, kind="weighted", workers=workers)
    for got in worlds.run(2, trained, kind="weighted", workers=workers, strategy=strategy):
        close(got, want)


@pytest.mark.parametrize("kind", ["shuffled", "buckets", "stream, drop last", "divided"])
def test_a_run_goes_on_in_the_middle_of_an_epoch_on_other_devices(kind: str, tmp_path: Path) -> None:
    """The sampler's generator is at its third epoch, which a resumed run reaches by its draws."""
    folder, options = str(tmp_path / "saved"), {"kind": kind, "epochs": 3, "workers": 2}
    [want] = worlds.run(1, trained, **options)
    steps = len(want[0]) // 3 * 2 + 1
    first = worlds.run(2, trained, **options, folder=folder, stop=steps)
    for got in worlds.run(1, trained, **options, folder=folder):
        close((first[0] + got[0], *got[1:]), want)


def said(kind: str, folder: str = "") -> str:
    """What a run on this loader says: it ends with an error of tutti."""
    made = {
        "by rank": lambda: DataLoader(Texts(), BATCH, sampler=list(range(tutti.rank(), COUNT)) + [0] * tutti.rank()),
        "other seed": lambda: DataLoader(Texts(), BATCH, shuffle=True, generator=torch.Generator().manual_seed(7)),
        "several": lambda: loader("in order"),
        "repeated": lambda: loader("repeated"),
        "other number": lambda: DataLoader(Divided(), 3, collate_fn=padded, num_workers=2),
    }[kind]()
    try:
        run = tutti.prepare(Model().double(), "sgd", made, loss, workers=2)
        if folder:
            run.restore(folder)
        for batch in run.epoch(0):
            batch["ids"]
    except TuttiError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_samplers_that_differ_between_ranks_are_refused() -> None:
    for text in worlds.run(2, said, kind="by rank"):
        assert text.startswith("MismatchError: ranks disagree about the order of the sampler"), text


def test_a_resumed_run_refuses_another_order(tmp_path: Path) -> None:
    options = {"folder": str(tmp_path / "saved")}
    worlds.run(1, trained, kind="shuffled", workers=2, stop=5, optimizer="sgd", **options)
    [text] = worlds.run(1, said, kind="other seed", **options)
    assert text.startswith("CheckpointError: the sampler draws another order in epoch 1"), text


class Renewed(Dataset[Any]):
    """Samples that the script changes before each epoch, as one that draws new negatives."""

    epoch = 0

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([index + 100.0 * self.epoch])


def renewed(processes: int, persistent: bool, prepared: bool) -> list[float]:
    """Sums of the samples of three epochs, of which the second one is left early."""
    data, sums = Renewed(), []
    batches: Any = DataLoader(data, BATCH, num_workers=processes, persistent_workers=persistent)
    if prepared:
        run = tutti.prepare(nn.Linear(1, 1), "sgd", batches, lambda model, batch: model(batch).mean())
    for data.epoch in range(3):
        found = [float(batch.sum()) for batch in (run.epoch(data.epoch) if prepared else batches)]
        sums.append(sum(found))
    return sums


@pytest.mark.parametrize(("processes", "persistent"), [(0, False), (1, False), (2, False), (1, True)])
def test_processes_of_an_epoch_see_what_the_script_has_changed_before(processes: int, persistent: bool) -> None:
    options = {"processes": processes, "persistent": persistent}
    want = renewed(**options, prepared=False)
    assert len(set(want)) == (1 if persistent else 3)
    for ranks in (1, 3):
        parts = worlds.run(ranks, renewed, **options, prepared=True)
        assert [sum(epoch) for epoch in zip(*parts, strict=True)] == want


def test_a_stream_that_every_process_reads_whole_is_refused() -> None:
    for text in worlds.run(2, said, kind="repeated"):
        assert text.startswith("DataError: two loader processes read the same samples (Repeated)"), text


def test_a_resumed_run_refuses_another_number_of_processes(tmp_path: Path) -> None:
    options = {"folder": str(tmp_path / "saved")}
    worlds.run(1, trained, kind="divided", workers=2, stop=2, optimizer="sgd", **options)
    [text] = worlds.run(1, said, kind="other number", **options)
    assert "CheckpointError: the run had 3 loader processes a device and now has 2" in text, text


def test_a_batch_of_several_collated_ones_cannot_be_read() -> None:
    [text] = worlds.run(1, said, kind="several")
    assert text.startswith("UsageError: this device's batch is 2 batches of collate_fn") and "run.microbatches" in text


def begun(folder: str) -> Any:
    class Asked(Texts):
        def __getitem__(self, index: int) -> Any:
            info = get_worker_info()
            assert info is not None and info.num_workers == 2 and type(info.dataset) is Asked
            return super().__getitem__(index)

    def begin(number: int) -> None:
        (Path(folder) / f"{tutti.rank()}-{number}").touch()

    batches = DataLoader(Asked(), BATCH, collate_fn=padded, num_workers=2, worker_init_fn=begin)
    run = tutti.prepare(Model().double(), "sgd:lr=0.01", batches, loss, precision="fp64")
    for batch in run.epoch(0):
        run.step(batch)
    held_out = run.evaluate(DataLoader(Texts(), 4, collate_fn=padded, drop_last=True))
    return held_out.samples


def test_worker_init_fn_is_called_in_every_loader_process(tmp_path: Path) -> None:
    assert worlds.run(2, begun, folder=str(tmp_path)) == [20, 20]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0-0", "0-1", "1-0", "1-1"]


def evaluated(kind: str, strategy: str = "mirrored") -> Any:
    run = tutti.prepare(Model().double(), "sgd", loader("in order"), loss, precision="fp64", strategy=strategy)
    means = run.evaluate(loader(kind))
    scores = run.predict(loader(kind), lambda model, batch: model(batch["ids"]))
    return means.loss, means.samples, scores.detach().numpy().copy()


@pytest.mark.parametrize("kind", ["in order", "stream", "stream, drop last", "divided"])
def test_evaluation_takes_the_loaders_batches(kind: str) -> None:
    """Each sample counts once, and predictions are in the loader's order."""
    model = Model().double()
    with torch.no_grad():
        batches = list(loader(kind))
        sizes = [len(batch["targets"]) for batch in batches]
        want = float(np.average([loss(model, batch).item() for batch in batches], weights=sizes))
        scores = torch.cat([model(batch["ids"]) for batch in batches]).numpy()
    for devices, strategy in ((1, "mirrored"), (2, "sharded:stage=3"), (3, "mirrored")):
        for mean, samples, found in worlds.run(devices, evaluated, kind=kind, strategy=strategy):
            assert abs(mean - want) < 1e-12 and samples == sum(sizes)
            assert np.abs(found - scores).max() < 1e-12


class ByRank(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        texts = Texts()
        yield from (texts[i] for i in range(tutti.rank(), COUNT, tutti.size()))


def evaluated_by_rank(sharded: bool) -> str:
    run = tutti.prepare(Model().double(), "sgd", loader("in order"), loss, precision="fp64")
    try:
        run.evaluate(tutti.data.Sharded(ByRank()) if sharded else ByRank(), batch=4, collate=padded)
    except TuttiError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_held_out_streams_that_differ_between_ranks_are_refused() -> None:
    for text in worlds.run(2, evaluated_by_rank, sharded=False):
        assert text.startswith("MismatchError: ranks disagree about the samples of the stream"), text
    for text in worlds.run(2, evaluated_by_rank, sharded=True):
        assert text.startswith("UsageError: held-out samples cannot be a stream that shards itself"), text
