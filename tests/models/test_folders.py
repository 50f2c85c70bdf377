"""Folders of `save_pretrained`: begun with, trained over ranks, written again and loaded by `from_pretrained`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tutti
from tests import worlds
from tests.models import zoo


def begin(name: str, strategy: str, source: str, out: str) -> Any:
    torch.manual_seed(7)
    model: Any = zoo.MODELS[name].build().double()
    with zoo.exact():
        run = tutti.prepare(
            model, "sgd:lr=0.1", zoo.dataset(name, "own"), zoo.loss_fn(name, "own"), strategy=strategy, workers=1,
            batch_size=6, micro_batch=3, precision="fp64", init_from=source,
        )  # fmt: skip
        before = {key: tensor.cpu().numpy().copy() for key, tensor in run.state().items()}
        run.step(next(run.epoch(0)))
    state = run.state()
    if tutti.rank() == 0:
        model.save_pretrained(out, state_dict=dict(state))
    return before, {key: tensor.cpu().numpy().copy() for key, tensor in state.items()}


@pytest.mark.models
@pytest.mark.parametrize(("name", "strategy"), [("Qwen3", "sharded"), ("EXAONE 4", "pipeline")])
def test_folders_are_begun_with_and_written(name: str, strategy: str, tmp_path: Path) -> None:
    transformers: Any = pytest.importorskip("transformers")
    saved: Any = zoo.build(name)
    saved.save_pretrained(tmp_path / "source", max_shard_size="40KB")
    assert (tmp_path / "source" / "model.safetensors.index.json").exists()
    places = {"source": str(tmp_path / "source"), "name": name}
    [(_, want)] = worlds.run(1, begin, strategy="single", out=str(tmp_path / "single"), **places)
    before, state = worlds.run(2, begin, strategy=strategy, out=str(tmp_path / "out"), **places)[0]
    assert all((before[key] == tensor.numpy()).all() for key, tensor in saved.state_dict().items() if key in before)
    assert max(abs(state[key] - want[key]).max() for key in want) <= 1e-10
    loaded = getattr(transformers, type(saved).__name__).from_pretrained(tmp_path / "out", dtype=torch.float64)
    assert all((state[key] == tensor.numpy()).all() for key, tensor in loaded.state_dict().items() if key in state)
