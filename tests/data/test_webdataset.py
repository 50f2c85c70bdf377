"""The recipe of docs/data.md for WebDataset: every sample once an epoch, over ranks and loader processes."""

from __future__ import annotations

import io
import re
import tarfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tutti
from tests import worlds
from tutti.errors import TuttiError

pytestmark = pytest.mark.skipif(find_spec("webdataset") is None, reason="webdataset is not installed")
PAGE = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")
SHARDS, EACH = 4, 7


def write_shards(folder: Path) -> str:
    for shard in range(SHARDS):
        with tarfile.open(folder / f"train-{shard:04}.tar", "w") as tar:
            for index in range(EACH):
                number = shard * EACH + index
                file = io.BytesIO()
                torch.save(torch.full((2,), number / 10), file)
                for name, content in (("pth", file.getvalue()), ("cls", str(number).encode())):
                    entry = tarfile.TarInfo(f"{number:04}.{name}")
                    entry.size = len(content)
                    tar.addfile(entry, io.BytesIO(content))
    return f"{folder}/train-{{0000..{SHARDS - 1:04}}}.tar"


def dataset(urls: str, edit: tuple[str, str] = ("", "")) -> Any:
    [code] = [code for code in re.findall(r"```py\n(.*?)```", PAGE, re.DOTALL) if "webdataset" in code]
    names: dict[str, Any] = {}
    exec(code.replace(*edit), names)
    return names["Shards"](urls)


def loss(model: Any, batch: Any) -> Any:
    values, _ = batch
    return model(values).square().mean()


def trained(urls: str, data_workers: int, resume: str = "", save: str = "") -> tuple[list[list[int]], list[float]]:
    """Numbers of this rank's samples in each epoch, and the losses."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"workers": 6, "batch_size": 6, "data_workers": data_workers}
    run = tutti.prepare(nn.Linear(2, 1), "sgd:lr=0.01", dataset(urls), loss, **options)
    if resume:
        run.restore(resume)
    seen: list[list[int]] = []
    losses = []
    for epoch in run.epochs(2):
        seen.append([])
        for batch in run.epoch(epoch):
            seen[-1] += batch[1].tolist()
            losses.append(run.step(batch))
            if save and run.global_step == 2:
                run.save(save)
                return seen, losses
    return seen, losses


@pytest.mark.parametrize("data_workers", [0, 2])
def test_every_sample_once_an_epoch_on_any_number_of_devices(data_workers: int, tmp_path: Path) -> None:
    urls = write_shards(tmp_path)
    [(alone, want)] = worlds.run(1, trained, urls=urls, data_workers=data_workers)
    assert sorted(alone[0]) == sorted(alone[1]) == [*range(SHARDS * EACH)] and alone[0] != alone[1]
    for devices in (2, 3) if data_workers == 0 else (2,):
        found = worlds.run(devices, trained, urls=urls, data_workers=data_workers)
        for epoch in range(2):
            assert sorted(number for seen, _ in found for number in seen[epoch]) == sorted(alone[epoch])
        assert all(losses == pytest.approx(want, rel=1e-5) for _, losses in found)


def test_a_resumed_run_goes_on_within_the_epoch(tmp_path: Path) -> None:
    urls, folder = write_shards(tmp_path), str(tmp_path / "saved")
    [(_, want)] = worlds.run(1, trained, urls=urls, data_workers=0)
    [(_, before)] = worlds.run(1, trained, urls=urls, data_workers=0, save=folder)
    for _, after in worlds.run(2, trained, urls=urls, data_workers=0, resume=folder):
        assert [*before, *after] == pytest.approx(want, rel=1e-5)


def without_seed(urls: str) -> str:
    torch.manual_seed(0)
    data = dataset(urls, (".shuffle(1000, seed=self.epoch)", ".shuffle(1000)"))
    run = tutti.prepare(nn.Linear(2, 1), "sgd:lr=0.01", data, loss, workers=2, batch_size=6)
    try:
        for batch in run.epoch(0):
            run.step(batch)
    except TuttiError as error:
        return str(error)
    return ""


def test_shuffles_that_are_seeded_by_the_clock_are_refused(tmp_path: Path) -> None:
    for text in worlds.run(2, without_seed, urls=write_shards(tmp_path)):
        assert text.startswith("ranks disagree about the samples of the stream")
