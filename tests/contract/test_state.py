"""One state (docs/architecture.md, contract 3): saved by any strategy on any devices, continued by any other."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

import tutti
from tests import worlds
from tests.contract.table import OPTIMIZERS, STEPS, largest_difference, loss, model, samples
from tutti.errors import CheckpointError
from tutti.training.checkpoint import Checkpoints
from tutti.world import context

SAVED_AT = 2
# (strategy, devices): the matrix is every pair of them
PLACES = [("single", 1), ("mirrored", 2), ("mirrored", 3), ("mirrored", 4), ("model_parallel", 3)]


def prepare(strategy: str, optimizer: str, workers: int, **changes: Any) -> tutti.Run:
    arguments = {"batch_size": 25, "reproducible": True, "precision": "fp64", "seed": 0, **changes}
    return tutti.prepare(model(), optimizer, samples(), loss, strategy=strategy, workers=workers, **arguments)


def saver(run: tutti.Run, folder: str, warnings: list[str]) -> Checkpoints:
    facts = {"workers": run.setting.workers, "seed": 0, "config_sha256": "0" * 64}
    return Checkpoints(run, Path(folder), context.current(), facts, keep=2, warn=warnings.append)


def train(run: tutti.Run, until: int) -> None:
    while run.clock < until:
        number, start = divmod(run.clock, run.steps_per_epoch)
        for batch in run.epoch(number, start):
            run.step(batch)
            if run.clock == until:
                return


def save(strategy: str, optimizer: str, workers: int, folder: str) -> None:
    run = prepare(strategy, optimizer, workers)
    train(run, SAVED_AT)
    warnings: list[str] = []
    checkpoints = saver(run, folder, warnings)
    checkpoints.save({})
    train(run, SAVED_AT + 1)  # what happens after the snapshot must not be in it
    checkpoints.wait()
    assert warnings == []


def resume(strategy: str, optimizer: str, workers: int, folder: str, **changes: Any) -> Any:
    run = prepare(strategy, optimizer, workers, **changes)
    try:
        facts = saver(run, folder, []).restore()
    except CheckpointError as error:
        return str(error)
    assert facts is not None and run.clock == SAVED_AT
    train(run, STEPS)
    return {name: tensor.numpy().copy() for name, tensor in run.state().items()}, run.weights_sha256()


def whole(strategy: str, optimizer: str, workers: int) -> Any:
    run = prepare(strategy, optimizer, workers)
    train(run, STEPS)
    return {name: tensor.numpy().copy() for name, tensor in run.state().items()}, run.weights_sha256()


@pytest.mark.parametrize("optimizer", ["sgd momentum", "adamw"])
def test_matrix_of_all_pairs_continues_bit_for_bit(optimizer: str, tmp_path: Path) -> None:
    arguments = {"optimizer": OPTIMIZERS[optimizer], "workers": 4}
    [(want, digest)] = worlds.run(1, whole, strategy="single", **arguments)
    for number, (strategy, devices) in enumerate(PLACES):
        folder = tmp_path / str(number)
        worlds.run(devices, save, strategy=strategy, folder=str(folder), **arguments)
        for other, ranks in PLACES:
            for got, own in worlds.run(ranks, resume, strategy=other, folder=str(folder), **arguments):
                assert (largest_difference(got, want), own) == (0, digest), (strategy, devices, other, ranks)


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 4), (4, 2)])
def test_workers_that_train_alone_continue_bit_for_bit(before: int, after: int, tmp_path: Path) -> None:
    arguments = {"strategy": "local_sgd:period=4", "optimizer": OPTIMIZERS["adam"], "workers": 4}
    [(want, digest)] = worlds.run(1, whole, **arguments)
    worlds.run(before, save, folder=str(tmp_path), **arguments)
    for got, own in worlds.run(after, resume, folder=str(tmp_path), **arguments):
        assert (largest_difference(got, want), own) == (0, digest)


def test_a_checkpoint_of_another_run_is_refused_on_every_rank(tmp_path: Path) -> None:
    worlds.run(1, save, strategy="single", optimizer="sgd:lr=0.1", workers=4, folder=str(tmp_path))
    for said in worlds.run(3, resume, strategy="mirrored", optimizer="sgd:lr=0.1", workers=3, folder=str(tmp_path)):
        assert "made with workers 4, not 3" in said


def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path) -> None:
    worlds.run(2, save, strategy="mirrored", optimizer="sgd:lr=0.1", workers=4, folder=str(tmp_path))
    good = tmp_path / "step-00000002"
    shutil.copytree(good, tmp_path / "step-00000003")
    [victim] = (tmp_path / "step-00000003" / "model").glob("rank0*")
    data = bytearray(victim.read_bytes())
    data[-1] ^= 1
    victim.write_bytes(data)
    [(want, digest)] = worlds.run(1, whole, strategy="single", optimizer="sgd:lr=0.1", workers=4)
    for got, own in worlds.run(3, resume, strategy="mirrored", optimizer="sgd:lr=0.1", workers=4, folder=str(tmp_path)):
        assert (largest_difference(got, want), own) == (0, digest)
