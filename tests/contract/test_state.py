"""One state (docs/architecture.md, contract 3): saved by any strategy on any devices, continued by any other."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import IterableDataset

import tutti
from tests import worlds
from tests.contract.models import loss, model, samples
from tests.contract.table import OPTIMIZERS, largest_difference, optimizer_of
from tests.covering import covering, in_turn
from tutti.data import Sharded
from tutti.errors import CheckpointError
from tutti.launcher import context
from tutti.train.run_checkpoints import Checkpoints

SAVED_AT, STEPS = 2, 5
# (strategy, devices): the matrix is every pair of them
PLACES = [
    ("single", 1),
    ("mirrored", 2),
    ("mirrored", 3),
    ("mirrored", 4),
    ("model_parallel", 3),
    ("pipeline:schedule=interleaved", 3),
    ("parameter_server:servers=2", 3),
    ("central_storage", 3),
]


class Streamed(IterableDataset[Any]):
    """The samples in an order that the epoch turns; counts what it gives."""

    given = start = turn = 0

    def set_epoch(self, epoch: int) -> None:
        self.start, self.turn = 0, 10 * epoch

    def __iter__(self) -> Iterator[Any]:
        images, labels = samples()
        while self.start < len(images):
            number = (self.start + self.turn) % len(images)
            self.start += 1
            self.given += 1
            yield images[number], labels[number]


class Stateful(Streamed):
    """Says where it is, so that nothing has to be read again."""

    def state_dict(self) -> dict[str, int]:
        return {"start": self.start}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["start"]


DATA: dict[str, Any] = {
    "numbered": samples,
    "streamed": Streamed,
    "stateful": Stateful,
    "sharded": lambda: Sharded(Streamed()),
}


def prepare(strategy: str, optimizer: str, workers: int | None, data: Any = "numbered", **changes: Any) -> tutti.Run:
    arguments = {"batch_size": 25, "reproducible": data != "sharded", "precision": "fp64", "seed": 0}
    arguments |= {"ema": "0.8:warmup", **changes}
    built = model()
    made = optimizer_of(optimizer, "odd", built)
    return tutti.prepare(built, made, DATA[data](), loss, strategy=strategy, workers=workers, **arguments)


def saver(run: tutti.Run, folder: str, warnings: list[str]) -> Checkpoints:
    facts = {"workers": run.context.workers, "seed": 0, "config_sha256": "0" * 64}
    return Checkpoints(run, Path(folder), context.current(), facts, keep=2, warn=warnings.append)


def train(run: tutti.Run, until: int) -> None:
    while run.global_step < until:
        for batch in run.epoch(*run.data_position):
            run.step(batch)
            if run.global_step == until:
                return


def save(strategy: str, optimizer: str, workers: int, folder: str, **changes: Any) -> None:
    run = prepare(strategy, optimizer, workers, **changes)
    train(run, SAVED_AT)
    warnings: list[str] = []
    checkpoints = saver(run, folder, warnings)
    checkpoints.save({})
    train(run, SAVED_AT + 1)  # what happens after the snapshot must not be in it
    checkpoints.wait()
    assert warnings == []


def resume(strategy: str, optimizer: str, workers: int | None, folder: str, **changes: Any) -> Any:
    run = prepare(strategy, optimizer, workers, **changes)
    try:
        facts = saver(run, folder, []).restore()
    except CheckpointError as error:
        return str(error)
    assert facts is not None and run.global_step == SAVED_AT
    train(run, STEPS)
    return outcome(run)


def outcome(run: tutti.Run) -> Any:
    """The model and the average of its weights, and the hashes of both."""
    state = {name: tensor.cpu().numpy().copy() for name, tensor in run.state().items()}
    state |= {f"average of {name}": tensor.cpu().numpy().copy() for name, tensor in run.state(averaged=True).items()}
    return state, run.weights_sha256() + run.weights_sha256(averaged=True)


def whole(strategy: str, optimizer: str, workers: int, **changes: Any) -> Any:
    run = prepare(strategy, optimizer, workers, **changes)
    train(run, STEPS)
    return outcome(run)


Place = tuple[str, int]
MATRIX = ["sgd momentum", "adamw", "lars", "larc", "lamb", "novograd", "muon", "torch adafactor"]


@pytest.mark.parametrize(
    "optimizer",
    [name if name == "lamb" else pytest.param(name, marks=pytest.mark.full) for name in MATRIX],
)
def test_matrix_continues_bit_for_bit(optimizer: str, tmp_path: Path) -> None:
    """Every pair of places with one optimizer, every place before and after with each: a Latin square.

    ``make test`` has one row of the square: every place before and after.
    """
    shift = MATRIX.index(optimizer)
    check_matrix(optimizer, tmp_path, {place: [PLACES[i - shift]] for i, place in enumerate(PLACES)})


@pytest.mark.full
@pytest.mark.parametrize("optimizer", MATRIX)
def test_matrix_of_all_pairs_continues_bit_for_bit(optimizer: str, tmp_path: Path) -> None:
    check_matrix(optimizer, tmp_path, {place: PLACES for place in PLACES})


def check_matrix(optimizer: str, folders: Path, pairs: Mapping[Place, Sequence[Place]]) -> None:
    arguments = {"optimizer": OPTIMIZERS[optimizer], "workers": 4}
    want, digest = worlds.alone(whole, strategy="single", **arguments)
    for number, ((strategy, devices), others) in enumerate(pairs.items()):
        folder = folders / str(number)
        worlds.run(devices, save, strategy=strategy, folder=str(folder), **arguments)
        for other, ranks in others:
            for got, own in worlds.run(ranks, resume, strategy=other, folder=str(folder), **arguments):
                assert (largest_difference(got, want), own) == (0, digest), (strategy, devices, other, ranks)


SHARDED = [("sharded:units=Linear", 3), ("sharded:stage=1", 2), ("sharded:stage=2,shards=2", 4)]
SHARDED += [("hybrid:shards=2,stage=3,tensor=2,least=1", 4)]
SHARDED += [("hybrid:shards=2,tensor=2,least=1", 4), ("hybrid:shards=2,stages=2", 4)]
ALONE = ["local_sgd:period=4", "local_sgd:period=2,post=3", "diloco:period=2", "diloco:period=2,post=1"]


ROWS = ["adamw", "novograd", "muon", "torch muon", "torch adafactor"]


def pairs_of_rows() -> dict[Place, list[Place]]:
    """Every other way to cut them, devices that have all of it, and the other way round."""
    others = [("mirrored", 2), ("single", 1)]
    return {place: [*others, SHARDED[i - 1]] for i, place in enumerate(SHARDED)} | {place: SHARDED for place in others}


@pytest.mark.parametrize("optimizer", ROWS)
def test_rows_are_saved_and_continued(optimizer: str, tmp_path: Path) -> None:
    """Every place before and every place after, with any of the optimizers."""
    check_rows(optimizer, tmp_path, covered_rows(optimizer, strength=1))


@pytest.mark.full
@pytest.mark.parametrize("optimizer", ROWS)
def test_pairs_of_rows_are_saved_and_continued(optimizer: str, tmp_path: Path) -> None:
    """Every pair with one optimizer at least, and every place before and after with each."""
    check_rows(optimizer, tmp_path, covered_rows(optimizer, strength=2))


def covered_rows(optimizer: str, strength: int) -> dict[Place, list[Place]]:
    """An optimizer's share of a covering table of places before, places after and optimizers."""
    every = [(before, after, each) for before, others in pairs_of_rows().items() for after in others for each in ROWS]
    pairs: dict[Place, list[Place]] = {}
    for before, after, each in covering(every, strength):
        if each == optimizer:
            pairs.setdefault(before, []).append(after)
    return pairs


@pytest.mark.full
@pytest.mark.parametrize("optimizer", ROWS)
def test_rows_are_saved_and_continued_by_any(optimizer: str, tmp_path: Path) -> None:
    check_rows(optimizer, tmp_path, pairs_of_rows())


def check_rows(optimizer: str, folders: Path, pairs: Mapping[Place, Sequence[Place]]) -> None:
    arguments = {"optimizer": OPTIMIZERS[optimizer], "workers": 4, "reproducible": False}
    want, _ = worlds.alone(whole, strategy="single", **arguments)
    for number, ((strategy, devices), after) in enumerate(pairs.items()):
        folder = folders / str(number)
        worlds.run(devices, save, strategy=strategy, folder=str(folder), **arguments)
        for other, ranks in after:
            for got, _ in worlds.run(ranks, resume, strategy=other, folder=str(folder), **arguments):
                assert largest_difference(got, want) <= 1e-10, (strategy, devices, other, ranks)


@pytest.mark.parametrize(("strategy", "devices"), in_turn(ALONE, [(1, 3), (3, 4), (4, 2)]), ids=str)
def test_workers_that_train_alone_continue_bit_for_bit(strategy: str, devices: tuple[int, int], tmp_path: Path) -> None:
    before, after = devices
    arguments = {"strategy": strategy, "optimizer": OPTIMIZERS["adam"], "workers": 4}
    want, digest = worlds.alone(whole, **arguments)
    worlds.run(before, save, folder=str(tmp_path), **arguments)
    for got, own in worlds.run(after, resume, folder=str(tmp_path), **arguments):
        assert (largest_difference(got, want), own) == (0, digest)


def averaging(strategy: str, folder: str, ema: str | None, until: int) -> Any:
    """Resume, if there is something, and train on; what was warned of, and both hashes at the end."""
    run, warnings = prepare(strategy, "sgd:lr=0.1", 4, ema=ema), []
    checkpoints = saver(run, folder, warnings)
    checkpoints.restore()
    begun = run.weights_sha256()
    assert ema is None or warnings == [] or run.weights_sha256(averaged=True) == begun
    train(run, until)
    checkpoints.save({})
    checkpoints.wait()
    return warnings, run.weights_sha256(), None if ema is None else run.weights_sha256(averaged=True)


def test_an_average_may_begin_and_end_in_the_middle(tmp_path: Path) -> None:
    """Saved with none, it begins at the weights that were saved; and the weights never depend on it."""
    told = {}
    for number, (devices, ema, until) in enumerate([(3, None, 2), (1, "0.8", 3), (4, "0.8", 4), (2, None, 5)]):
        answers = worlds.run(devices, averaging, strategy="mirrored", folder=str(tmp_path), ema=ema, until=until)
        warnings, *hashes = answers[0]
        assert all(answer[1:] == hashes for answer in map(list, answers))
        told[number] = warnings, *hashes
    assert [told[n][0] for n in (0, 2)] == [[], []]
    assert told[1][0] == ["the checkpoint has no average of the weights: it starts at step 2"]
    assert told[3][0] == ["the average of the weights is dropped at step 4: the run continues without --ema"]
    [(_, without, _)] = worlds.run(
        1, averaging, strategy="single", folder=str(tmp_path / "whole"), ema=None, until=STEPS
    )
    assert told[3][1] == without


def test_a_loss_scale_continues_on_any_devices(tmp_path: Path) -> None:
    """Saved after a step that overflowed and one that did not; the scale rises two steps later."""
    scale = "dynamic:init=1073741824,max=1073741824,backoff_factor=9.5367431640625e-07,growth_interval=3"
    arguments = {"optimizer": OPTIMIZERS["sgd momentum"], "workers": 4, "precision": "fp16", "loss_scale": scale}
    want, digest = worlds.alone(whole, strategy="single", **arguments)
    worlds.run(3, save, strategy="mirrored", folder=str(tmp_path), **arguments)
    for strategy, ranks in PLACES:
        for got, own in worlds.run(ranks, resume, strategy=strategy, folder=str(tmp_path), **arguments):
            assert (largest_difference(got, want), own) == (0, digest), (strategy, ranks)


def test_a_checkpoint_of_another_run_is_refused_on_every_rank(tmp_path: Path) -> None:
    worlds.run(1, save, strategy="single", optimizer="sgd:lr=0.1", workers=4, folder=str(tmp_path))
    for said in worlds.run(3, resume, strategy="mirrored", optimizer="sgd:lr=0.1", workers=None, folder=str(tmp_path)):
        assert "made with workers 4, not 3" in said and "--workers 4 goes on as before" in said


def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path) -> None:
    worlds.run(2, save, strategy="mirrored", optimizer="sgd:lr=0.1", workers=4, folder=str(tmp_path))
    good = tmp_path / "step-00000002"
    shutil.copytree(good, tmp_path / "step-00000003")
    [victim] = (tmp_path / "step-00000003" / "model").glob("rank0*")
    data = bytearray(victim.read_bytes())
    data[-1] ^= 1
    victim.write_bytes(data)
    want, digest = worlds.alone(whole, strategy="single", optimizer="sgd:lr=0.1", workers=4)
    for got, own in worlds.run(3, resume, strategy="mirrored", optimizer="sgd:lr=0.1", workers=4, folder=str(tmp_path)):
        assert (largest_difference(got, want), own) == (0, digest)
    (good / "manifest.json").write_bytes(b"")
    # To begin again would give up all the work without a word.
    for said in worlds.run(3, resume, strategy="mirrored", optimizer="sgd:lr=0.1", workers=4, folder=str(tmp_path)):
        assert said.startswith("no checkpoint of the run is valid") and "step-00000003/model/rank0" in said


@pytest.mark.parametrize("data", ["streamed", "stateful"])
@pytest.mark.parametrize(("before", "strategy", "after"), [(3, "mirrored", 2), (1, "model_parallel", 3)])
def test_a_stream_goes_on_in_the_middle_of_its_epoch(
    data: str, before: int, strategy: str, after: int, tmp_path: Path
) -> None:
    arguments = {"optimizer": OPTIMIZERS["adamw"], "workers": 4, "data": data}
    want, digest = worlds.alone(whole, strategy="single", **arguments)
    worlds.run(before, save, strategy="mirrored", folder=str(tmp_path), **arguments)
    for got, own in worlds.run(after, resume, strategy=strategy, folder=str(tmp_path), **arguments):
        assert (largest_difference(got, want), own) == (0, digest)


def read_again(data: str, folder: str) -> int:
    """Samples that a resumed run takes from its data set for the batch that comes next, which is the last one."""
    run = prepare("mirrored", "sgd:lr=0.1", 4, data)
    saver(run, folder, []).restore()
    next(run.epoch(*run.data_position))
    given: int = run.feed.source.data.given
    return given


@pytest.mark.parametrize(("data", "given"), [("streamed", 70), ("stateful", 20)])
def test_a_state_of_its_own_spares_reading_again(data: str, given: int, tmp_path: Path) -> None:
    worlds.run(3, save, strategy="mirrored", optimizer="sgd:lr=0.1", workers=4, folder=str(tmp_path), data=data)
    assert worlds.run(2, read_again, data=data, folder=str(tmp_path)) == [given] * 2


def test_own_streams_go_on_with_as_many_ranks_only(tmp_path: Path) -> None:
    arguments = {"strategy": "mirrored", "optimizer": "sgd:lr=0.1", "workers": 4, "data": "sharded"}
    (want, digest), *_ = worlds.run(2, whole, **arguments)
    worlds.run(2, save, folder=str(tmp_path), **arguments)
    for got, own in worlds.run(2, resume, folder=str(tmp_path), **arguments):
        assert (largest_difference(got, want), own) == (0, digest)
    for said in worlds.run(3, resume, folder=str(tmp_path), **arguments):
        assert "had 2 data ranks and now has 3" in said
