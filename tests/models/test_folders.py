"""Folders of `save_pretrained`: begun with, trained over ranks, written again and loaded by `from_pretrained`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tutti
from tests import worlds
from tests.models import zoo
from tutti.checkpoint.export_folder import export_hf_folder
from tutti.checkpoint.weights_source import open_weights

CONVERTED = ("Granite-MoE", "LLaVA", "Mixtral")
"""Models that transformers writes under other names than their own, and converts when it loads them."""


def begin(name: str, strategy: str, source: str, out: str) -> Any:
    torch.manual_seed(7)
    model: Any = zoo.MODELS[name].build().double()
    form = zoo.MODELS[name].forms[0]
    with zoo.exact():
        run = tutti.prepare(
            model, "sgd:lr=0.1", zoo.dataset(name, form), zoo.loss_fn(name, form), strategy=strategy, workers=1,
            batch_size=6, micro_batch=3, precision="fp64", init_from=source,
        )  # fmt: skip
        before = {key: tensor.cpu().numpy().copy() for key, tensor in run.state().items()}
        run.step(next(run.epoch(0)))
    state = run.state()
    if tutti.rank() == 0:
        model.save_pretrained(out, state_dict=dict(state))
    return before, {key: tensor.cpu().numpy().copy() for key, tensor in state.items()}


@pytest.mark.models
@pytest.mark.parametrize(
    ("name", "strategy"), [("Qwen3", "sharded"), ("EXAONE 4", "pipeline"), *((name, "sharded") for name in CONVERTED)]
)
def test_folders_are_begun_with_and_written(name: str, strategy: str, tmp_path: Path) -> None:
    transformers: Any = pytest.importorskip("transformers")
    saved: Any = zoo.build(name)
    # As they are on disk, and as docs/checkpoints.md converts them.
    saved.save_pretrained(tmp_path / "source", max_shard_size="40KB", save_original_format=name not in CONVERTED)
    assert (tmp_path / "source" / "model.safetensors.index.json").exists()
    places = {"source": str(tmp_path / "source"), "name": name}
    [(_, want)] = worlds.run(1, begin, strategy="single", out=str(tmp_path / "single"), **places)
    before, state = worlds.run(2, begin, strategy=strategy, out=str(tmp_path / "out"), **places)[0]
    assert all((before[key] == tensor.numpy()).all() for key, tensor in saved.state_dict().items() if key in before)
    assert max(abs(state[key] - want[key]).max() for key in want) <= 1e-10
    loaded = getattr(transformers, type(saved).__name__).from_pretrained(tmp_path / "out", dtype=torch.float64)
    assert all((state[key] == tensor.numpy()).all() for key, tensor in loaded.state_dict().items() if key in state)


@pytest.mark.models
@pytest.mark.parametrize("name", CONVERTED)
def test_a_folder_under_other_names_is_refused_with_the_way(name: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    saved: Any = zoo.build(name)
    saved.save_pretrained(tmp_path / "source")
    places = {"source": str(tmp_path / "source"), "name": name, "out": str(tmp_path / "out")}
    with pytest.raises(worlds.RankError, match="save_original_format=False"):
        worlds.run(1, begin, strategy="single", **places)


def trained(name: str, strategy: str, folder: str) -> Any:
    model: Any = zoo.build(name)
    form = zoo.MODELS[name].forms[0]
    with zoo.exact():
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        run = tutti.prepare(
            model, optimizer, zoo.dataset(name, form), zoo.loss_fn(name, form), strategy=strategy, workers=1,
            batch_size=6, micro_batch=3, precision="fp64",
        )  # fmt: skip
        run.step(next(run.epoch(0)))
    run.save(folder)
    return {key: tensor.cpu().numpy().copy() for key, tensor in run.state().items()}


FAMILIES = {
    "Llama": "sharded", "Qwen3": "tensor", "Qwen3-MoE": "sharded", "Mixtral": "sharded", "Gemma 3": "pipeline",
    "Granite-MoE": "sharded", "DeepSeek V3": "sharded", "GPT-OSS": "sharded", "LLaVA": "pipeline", "BERT": "tensor",
    "T5": "sharded", "ViT": "sharded", "Whisper": "pipeline",
}  # fmt: skip


@pytest.mark.models
@pytest.mark.parametrize(("name", "strategy"), FAMILIES.items())
def test_an_export_is_loaded_by_from_pretrained(name: str, strategy: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    trained_state = worlds.run(2, trained, name=name, strategy=strategy, folder=str(tmp_path / "run"))[0]
    [step] = (tmp_path / "run").glob("step-*")
    export_hf_folder(open_weights(step), tmp_path / "out", {})
    plain: Any = zoo.build(name)
    plain.config.save_pretrained(tmp_path / "out")
    plain.load_state_dict({key: torch.from_numpy(array) for key, array in trained_state.items()})
    loaded = type(plain).from_pretrained(tmp_path / "out", config=plain.config, dtype=torch.float64)
    state = loaded.state_dict()
    # transformers keeps some tensors, such as DeepSeek's gates, in single precision.
    assert all(torch.equal(tensor.to(state[key].dtype), state[key]) for key, tensor in plain.state_dict().items())
    form = zoo.MODELS[name].forms[0]
    batch = torch.utils.data.default_collate([zoo.dataset(name, form)[index] for index in range(3)])
    with torch.no_grad():
        want, got = (model.eval()(**batch) for model in (plain, loaded))
    # Tables that are no part of the state, such as rates of rotary embeddings, have been rounded before or after.
    assert torch.allclose(got.logits, want.logits, rtol=0, atol=1e-6)
