"""A warm start is what loading the weights before ``tutti.prepare`` would be, wherever they come from."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import tutti
from tests import worlds
from tutti.checkpoint.export import export_weights
from tutti.checkpoint.export_folder import export_hf_folder
from tutti.checkpoint.read import load_manifest
from tutti.checkpoint.weights import SavedWeights
from tutti.checkpoint.weights_source import check_source
from tutti.errors import CheckpointError, TuttiError, UsageError
from tutti.launcher import context
from tutti.train.run_checkpoints import Checkpoints


class Tied(nn.Sequential):
    """First and last layer share their weight, and a batch norm has buffers."""

    def __init__(self, seed: int, width: int = 5) -> None:
        torch.manual_seed(seed)
        super().__init__(
            nn.Linear(4, width), nn.BatchNorm1d(width), nn.Tanh(), nn.Linear(width, 4), nn.Linear(4, width)
        )
        self[4].weight = self[0].weight


class Plain(nn.Sequential):
    """Can be cut between any two layers."""

    def __init__(self, seed: int, width: int = 5) -> None:
        torch.manual_seed(seed)
        activation = nn.Tanh()
        super().__init__(nn.Linear(4, width), nn.BatchNorm1d(width), activation, nn.Linear(width, 4), activation)


MODELS: dict[str, Callable[..., nn.Module]] = {"tied": Tied, "plain": Plain}


def loss(net: Any, batch: Tensor) -> Any:
    return net(batch).square().mean()


def prepare(net: nn.Module, strategy: str, **options: Any) -> tutti.Run:
    data = torch.randn(24, 4, generator=torch.Generator().manual_seed(1))
    arguments: dict[str, Any] = {"workers": 4, "batch_size": 12, "reproducible": True, **options}
    return tutti.prepare(net, "adam:lr=0.01", data, loss, strategy=strategy, **arguments)


def train(run: tutti.Run, epochs: int) -> tutti.Run:
    for epoch in range(epochs):
        for batch in run.epoch(epoch):
            run.step(batch)
    return run


def save(name: str, folder: str) -> None:
    """A run with one checkpoint, and the same weights as an export, a ``save_file`` and a ``save_model``."""
    run = train(prepare(MODELS[name](1), "mirrored", ema=0.5), 2)
    here = Path(folder)
    facts = {"workers": 4, "seed": 0, "config_sha256": "0" * 64}
    saver = Checkpoints(run, here / "checkpoints", context.current(), facts, keep=2, warn=print)
    saver.save({})
    saver.wait()
    plain = MODELS[name](2)
    state = {key: value.clone() for key, value in run.state().items()}
    plain.load_state_dict(state)
    if tutti.rank() == 0:
        export_weights(SavedWeights(load_manifest(step(here))), here / "exported.safetensors", {})
        export_hf_folder(SavedWeights(load_manifest(step(here))), here / "hf", {}, most=100)
        safetensors.torch.save_file(state, here / "file.safetensors")
        safetensors.torch.save_model(plain, str(here / "model.safetensors"))


def step(folder: Path) -> Path:
    return folder / "checkpoints" / "step-00000004"


def loaded(name: str, folder: str, strategy: str) -> list[Any]:
    """Hashes at the start and after training, with the average's: the model loaded first, and each source."""
    here, told = Path(folder), []
    sources = [here, step(here), here / "hf", *(here / f"{kind}.safetensors" for kind in ("exported", "file", "model"))]
    for source in (None, *sources):
        net = MODELS[name](3)
        if source is None:
            net.load_state_dict(safetensors.torch.load_file(here / "file.safetensors"))
        run = prepare(net, strategy, init_from=source, ema="0.5:warmup")
        start = run.weights_sha256()
        assert (run.global_step, run.updates) == (0, 0) and run.weights_sha256(averaged=True) == start
        train(run, 1)
        told.append([start, run.weights_sha256(), run.weights_sha256(averaged=True)])
    return told


PLACES = [("plain", 1, "single"), ("plain", 4, "mirrored"), ("plain", 3, "model_parallel"), ("tied", 3, "mirrored")]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    for name in MODELS:
        (folder / name).mkdir()
        worlds.run(2, save, name=name, folder=str(folder / name))
    return folder


@pytest.mark.parametrize(("name", "devices", "strategy"), [*PLACES, ("plain", 3, "local_sgd:period=2")])
def test_any_source_is_what_loading_first_is(saved: Path, name: str, devices: int, strategy: str) -> None:
    answers = worlds.run(devices, loaded, name=name, folder=str(saved / name), strategy=strategy)
    for told in answers:
        assert told == [answers[0][0]] * 7
        start, end, average = told[0]
        assert len({start, end, average}) == 3
    if strategy != "local_sgd:period=2":
        # One model, whatever the devices.
        assert answers[0][0] == worlds.alone(loaded, name=name, folder=str(saved / name), strategy="single")[0]


def told(name: str, path: str, strategy: str = "mirrored", **model: Any) -> str:
    try:
        prepare(MODELS[name](3, **model), strategy, init_from=path)
    except TuttiError as error:
        return f"{type(error).__name__} {error}"
    return "nothing was raised"


def test_another_model_is_refused_on_every_rank(saved: Path) -> None:
    for path in (saved / "tied", saved / "tied" / "model.safetensors"):
        for text in worlds.run(3, told, name="plain", path=str(path), width=6):
            assert text.startswith("CheckpointError the checkpoint is of another model")
            assert "unexpected: 4.bias" in text and "missing" not in text
            assert "of another shape: 0.bias [5], not [6], 0.weight [5, 4], not [6, 4]" in text
    for text in worlds.run(3, told, name="tied", path=str(saved / "plain"), strategy="mirrored"):
        assert "missing: 4.bias" in text and "unexpected" not in text


def test_names_of_every_stage_are_compared(saved: Path) -> None:
    for text in worlds.run(3, told, name="plain", path=str(saved / "tied"), strategy="model_parallel"):
        assert text.startswith("CheckpointError") and "unexpected: 4.bias, 4.weight" in text


def test_tied_tensors_that_differ_are_refused(saved: Path, tmp_path: Path) -> None:
    tensors = safetensors.torch.load_file(saved / "tied" / "file.safetensors")
    tensors["4.weight"] = tensors["4.weight"] + 1
    safetensors.torch.save_file(tensors, tmp_path / "x.safetensors")
    for text in worlds.run(3, told, name="tied", path=str(tmp_path / "x.safetensors")):
        assert text.startswith("CheckpointError") and "0.weight and 4.weight differ, which this model ties" in text


def mapped(path: str, strategy: str, init_map: str) -> Any:
    """State at the beginning, with seed 3 where it is kept, and the error if there is one."""
    try:
        run = prepare(Plain(3, width=6), strategy, init_from=path, init_map=init_map, reproducible=False)
    except TuttiError as error:
        return str(error)
    return {name: tensor.numpy().copy() for name, tensor in run.state().items()}


@pytest.mark.parametrize(
    ("strategy", "devices"), [("mirrored", 2), ("sharded", 2), ("model_parallel", 3), ("tensor:least=1", 2)]
)
def test_named_differences_keep_their_initial_values(tmp_path: Path, strategy: str, devices: int) -> None:
    saved = Plain(1, width=6).state_dict()
    file = {f"net.{name}": tensor for name, tensor in saved.items() if not name.startswith("3.")}
    file |= {"net.3.bias": torch.zeros(9), "old": torch.zeros(2)}
    safetensors.torch.save_file(file, tmp_path / "x.safetensors")
    asked = {"path": str(tmp_path / "x.safetensors"), "strategy": strategy}
    own = Plain(3, width=6).state_dict()
    for state in worlds.run(devices, mapped, **asked, init_map="rename=net.:,new=3.*,unused=old,reshaped=3.bias"):
        assert state.keys() == own.keys()
        for name, tensor in state.items():
            want = own[name] if name.startswith("3.") else saved[name]
            assert (tensor == want.numpy()).all(), name
    for text in worlds.run(devices, mapped, **asked, init_map="rename=net.:,new=3.*"):
        assert "unexpected: old; of another shape: 3.bias [9], not [4]" in text
        assert "or allow the differences by init_map" in text


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 4
    path.write_bytes(data)


def test_damage_is_found_by_hash_and_an_older_checkpoint_taken(saved: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.safetensors"
    copy.write_bytes((saved / "plain" / "exported.safetensors").read_bytes())
    flip(copy)
    for text in worlds.run(3, told, name="plain", path=str(copy)):
        assert text.startswith("CheckpointError") and "do not have the weights_sha256 that it states" in text
    worlds.run(1, save, name="plain", folder=str(tmp_path))
    flip(next((step(tmp_path) / "model").glob("rank0*")))
    for path, word in ((step(tmp_path), "damaged"), (tmp_path, "no valid checkpoint")):
        for text in worlds.run(3, told, name="plain", path=str(path)):
            assert text.startswith("CheckpointError") and word in text and "SHA-256" in text
    shutil.copytree(step(saved / "plain"), tmp_path / "checkpoints" / "step-00000002")
    for text in worlds.run(3, told, name="plain", path=str(tmp_path)):
        assert text == "nothing was raised"


class Canary:
    """Unpickled, it leaves a file behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, str]]:
        return open, (str(self.path), "w")


def test_what_is_no_source_is_refused_before_anything_starts(saved: Path, tmp_path: Path) -> None:
    for path in (tmp_path / "gone", tmp_path):
        with pytest.raises(UsageError, match="there are no weights to start from"):
            check_source(path)
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(CheckpointError, match="it has none"):
        check_source(tmp_path)
    torch.save({"w": torch.zeros(2)}, tmp_path / "zip.pt")
    (tmp_path / "plain.pt").write_bytes(pickle.dumps(Canary(tmp_path / "executed")))
    for name in ("zip.pt", "plain.pt"):
        with pytest.raises(CheckpointError, match=r"a pickle, which is never loaded.*save_file"):
            check_source(tmp_path / name)
    assert not (tmp_path / "executed").exists()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match="no regular file"):
        check_source(tmp_path / "pipe")
    for good in (saved / "plain", step(saved / "plain"), saved / "plain" / "file.safetensors"):
        check_source(good)
    (step(tmp_path)).mkdir()
    (step(tmp_path) / "manifest.json").write_text("{}")
    with pytest.raises(CheckpointError, match="manifest is damaged"):
        check_source(step(tmp_path))


def begun() -> str:
    run = train(prepare(Plain(1), "mirrored"), 1)
    from tutti.train.warm_start import load_warm_start

    try:
        load_warm_start(run, "anything")
    except UsageError as error:
        return str(error)
    return "nothing was raised"


def test_a_run_that_has_stepped_is_not_begun_again() -> None:
    assert all("already made steps" in text for text in worlds.run(2, begun))
