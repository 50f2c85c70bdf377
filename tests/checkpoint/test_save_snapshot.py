"""A save where there is no memory for a copy of the state: training waits, and the files are the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tutti
from tests import worlds
from tests.contract.models import loss, model, samples
from tutti.checkpoint import save_snapshot
from tutti.checkpoint.read import load_manifest
from tutti.launcher import context
from tutti.train.run_checkpoints import Checkpoints
from tutti.types.shard_spec import TensorSlice

STRATEGIES = ["mirrored", "sharded:units=Linear", "central_storage", "local_sgd:period=4", "tensor:least=1", "pipeline"]


def saved(strategy: str, folder: str, free: int) -> Any:
    """Whether the state was written when ``save`` returned, what was said, and the hashes of the files."""
    said: list[str] = []
    run = tutti.prepare(
        model(), "adam:lr=0.01", samples(), loss, strategy=strategy, workers=4, batch_size=25, ema=0.9, precision="fp64"
    )
    saver = Checkpoints(run, Path(folder), context.current(), {"config_sha256": "0" * 64}, keep=2, warn=said.append)
    written = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(save_snapshot, "free_memory", lambda processes: free)
        for batch in run.epoch(0):
            run.step(batch)
            saver.save({})
            written.append(saver._written.is_set())
    saver.wait()
    found = [load_manifest(place) for place in sorted(Path(folder).glob("step-*"))]
    files = [[(f.group, f.rank, f.sha256) for f in manifest.files] for manifest in found]
    return written, said, files


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_without_a_copy_the_same_is_saved(strategy: str, tmp_path: Path) -> None:
    ample = worlds.run(3, saved, strategy=strategy, folder=str(tmp_path / "ample"), free=1 << 40)
    none = worlds.run(3, saved, strategy=strategy, folder=str(tmp_path / "none"), free=0)
    for (_, quiet, want), (written, said, files) in zip(ample, none, strict=True):
        assert files == want and len(files) == 2
        assert written == [True] * 3
        assert not quiet and said == [
            "training waits until the checkpoint is written: there is no memory for a copy of a device's state"
        ]


def test_half_of_what_is_free_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"model": {"a": torch.zeros(10), "b": TensorSlice(torch.zeros(10), (20,), (0,))}}
    for free, enough in ((160, True), (159, False)):
        monkeypatch.setattr(save_snapshot, "free_memory", lambda processes, free=free: free)
        assert save_snapshot.has_room(state, 1) is enough
    [copied, _], [own, _] = (save_snapshot.slices(state, copy)["model"] for copy in (True, False))
    assert copied.tensor.data_ptr() != own.tensor.data_ptr() == state["model"]["a"].data_ptr()
