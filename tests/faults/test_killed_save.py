"""Fault 2 with real ranks: all are killed at a write, fsync or rename of one of them. The last checkpoint loads."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tutti
from tests import worlds
from tests.contract.models import loss, model, samples
from tests.faults.saving import arm
from tutti.checkpoint.fingerprint import weights_sha256
from tutti.checkpoint.folder import newest_checkpoint
from tutti.checkpoint.read import TensorReader
from tutti.launcher import context
from tutti.train.run_checkpoints import Checkpoints

pytestmark = [pytest.mark.faults, pytest.mark.row(2)]
STRATEGIES = ["mirrored", "model_parallel", "mirrored:algorithm=native", "local_sgd:period=2", "central_storage"]
POINTS = 3


def prepared(strategy: str, folder: str) -> tuple[tutti.Run, Checkpoints]:
    run = tutti.prepare(model(), "adam:lr=0.01", samples(), loss, strategy=strategy, workers=5, batch_size=23)
    facts = {"workers": 5, "seed": 0, "config_sha256": "0" * 64}
    return run, Checkpoints(run, Path(folder), context.current(), facts, keep=1, warn=lambda text: None)


def save_twice(strategy: str, folder: str, rank: int = -1, point: int = 0, afterwards: bool = False) -> Any:
    """Save steps 1 and 2; ``rank`` ends everybody at its ``point``-th call of the second save. Hashes; its calls."""
    run, checkpoints = prepared(strategy, folder)
    comm, mine = run.context.comms.world, os.getpid()
    others = [int(pid) for pid in comm.all_gather(torch.tensor([mine]), "processes") if int(pid) != mine]
    batches, hashes = run.epoch(0), []
    for deadly in (None, point if rank == comm.rank else 0):
        run.step(next(batches))
        hashes.append(run.weights_sha256())
        count = arm(deadly, afterwards, others) if deadly is not None else lambda: 0
        checkpoints.save({})
        checkpoints.wait()
    return hashes, count()


def save_again(strategy: str, folder: str) -> list[str]:
    """What a run that goes on from there and saves one step more leaves in the folder."""
    run, checkpoints = prepared(strategy, folder)
    checkpoints.restore()
    run.step(next(run.epoch(*run.data_position)))
    checkpoints.save({})
    checkpoints.wait()
    return sorted(path.name for path in Path(folder).iterdir())


def test_killed_within_the_save_of_real_ranks(
    tmp_path: Path, seed: int, record_property: Callable[[str, object], None]
) -> None:
    strategy, ranks, draw = STRATEGIES[seed % len(STRATEGIES)], 3 + seed // 4 % 2, random.Random(seed)
    pool = worlds.Pool(ranks)
    answers = pool.run(save_twice, strategy=strategy, folder=str(tmp_path / "whole"))
    pool.close()
    hashes = answers[0][0]
    # Rank 0 makes most of the calls: it opens and closes the checkpoint.
    places = [(rank, point) for rank, (_, calls) in enumerate(answers) for point in range(1, calls + 1)]
    found = []
    for number, (rank, point) in enumerate(draw.sample(places, POINTS)):
        folder = tmp_path / str(number)
        pool, fault = worlds.Pool(ranks), {"rank": rank, "point": point, "afterwards": bool(draw.randrange(2))}
        with pytest.raises(worlds.RankError) as raised:
            pool.run(save_twice, strategy=strategy, folder=str(folder), **fault)
        assert all(failure and failure.kind == "Died" for failure in raised.value.failures), raised.value
        manifest, broken = newest_checkpoint(folder)
        assert manifest is not None and broken == [], fault
        assert weights_sha256(dict(TensorReader(manifest).read("model"))) == hashes[manifest.step - 1]
        found.append(manifest.step)
        [left] = worlds.run(1, save_again, strategy=strategy.replace("model_parallel", "single"), folder=str(folder))
        assert left == [f"step-{manifest.step + 1:08d}"]
    record_property("kills within a save of real ranks", len(found))
    record_property("unusable checkpoints", 0)
