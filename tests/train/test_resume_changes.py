"""Resuming with another rate, batch or data: what is named is done as in plain PyTorch, all else is refused."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tutti
from tests import worlds
from tests.covering import table
from tests.forkserver import run as start
from tutti.errors import TuttiError

OLD, NEW, EPOCHS = (0.1, 8), (0.03, 6), 4


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()


def data(count: int = 20) -> Tensor:
    return torch.randn(count, 3, generator=torch.Generator().manual_seed(count), dtype=torch.float64)


def loss(net: Any, batch: Tensor) -> Any:
    return net(batch).square().mean()


def by_hand(count: int) -> dict[str, list[float]]:
    """Plain PyTorch: half of the epochs, then state loaded, another rate and batch size, and on."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=OLD[0], momentum=0.9)
    for epoch in range(EPOCHS):
        if epoch == EPOCHS // 2:
            net_state, state = net.state_dict(), optimizer.state_dict()
            net = model()
            net.load_state_dict(net_state)
            optimizer = torch.optim.SGD(net.parameters(), lr=NEW[0], momentum=0.9)
            optimizer.load_state_dict(state)
            optimizer.param_groups[0]["lr"] = NEW[0]
        half = epoch < EPOCHS // 2
        for batch in data(20 if half else count).split((OLD if half else NEW)[1]):
            optimizer.zero_grad()
            loss(net, batch).backward()
            optimizer.step()
    return {name: tensor.flatten().tolist() for name, tensor in net.state_dict().items()}


def script(
    folder: str,
    second: bool,
    change: str = "",
    text: bool = False,
    count: int = 20,
    stop: int = 0,
    foreach: bool | None = None,
    **options: Any,
) -> Any:
    """Half of the epochs and a save, or the rest of them after ``restore``."""
    lr, batch = NEW if second else OLD
    lr, batch = options.pop("lr", lr), options.pop("batch", batch)
    net = model()
    optimizer: Any = f"sgd:lr={lr},momentum=0.9"
    if not text:
        optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9, foreach=foreach)
    try:
        run = tutti.prepare(*(net, optimizer, data(count), loss), workers=3, batch_size=batch, shuffle=False, **options)
        if second:
            assert run.restore(folder, change=change) is not None
    except TuttiError as error:
        return int(error.exit_code), str(error)
    for epoch in run.epochs(EPOCHS if second else EPOCHS // 2):
        for part in run.epoch(epoch):
            run.step(part)
            if run.global_step == stop:
                run.save(folder)
                return None
    run.save(folder)
    assert text or optimizer.param_groups[0]["foreach"] is foreach
    state = {name: tensor.flatten().tolist() for name, tensor in run.state().items()}
    return state, run.global_step, run.samples, run.changes


@pytest.mark.parametrize(("ranks", "text", "count"), table([1, 2, 3], [False, True], [20, 26]))
def test_named_changes_are_those_of_plain_pytorch(ranks: int, text: bool, count: int, tmp_path: Path) -> None:
    folder, change = str(tmp_path / "a"), "lr,batch_size" + ",data" * (count != 20)
    worlds.run(4 - ranks, script, folder=folder, second=False, text=text)
    expected, steps = by_hand(count), 6 + 2 * -(-count // NEW[1])
    for state, clock, samples, changes in worlds.run(
        ranks, script, folder=folder, second=True, change=change, text=text, count=count
    ):
        for name, values in expected.items():
            assert torch.allclose(torch.tensor(state[name]), torch.tensor(values), rtol=0, atol=1e-10)
        assert (clock, samples) == (steps, 40 + 2 * count)
        [entry] = changes
        data_changes = {"data": [20, 26]} if count != 20 else {}
        assert entry == {"step": 6, "changed": {"batch_size": [8, 6], "lr": ["0.1", "0.03"], **data_changes}}
    manifest = json.loads((tmp_path / "a" / f"step-{steps:08}" / "manifest.json").read_text())
    assert manifest["facts"]["changes"][0]["step"] == 6
    assert manifest["facts"]["earlier_epochs"] == [[2, 8, 20]]


def test_a_changed_run_is_resumed_without_naming_again(tmp_path: Path) -> None:
    folder = str(tmp_path / "a")
    worlds.run(1, script, folder=folder, second=False)
    assert worlds.run(2, script, folder=folder, second=True, change="lr,batch_size", stop=8) == [None] * 2
    for state, clock, samples, changes in worlds.run(3, script, folder=folder, second=True):
        assert (clock, samples, len(changes)) == (14, 80, 1)
        for name, values in by_hand(20).items():
            assert torch.allclose(torch.tensor(state[name]), torch.tensor(values), rtol=0, atol=1e-10)


REFUSED: list[tuple[dict[str, Any], int, str]] = [
    ({}, 4, "made with batch_size 8, not 6; lr 0.1, not 0.03"),
    ({}, 4, "--change batch_size,lr (in a script run.restore(folder, change='batch_size,lr'))"),
    ({"change": "lr"}, 4, "made with batch_size 8, not 6 ("),
    ({"change": "batch_size", "lr": 0.2}, 4, "made with lr 0.1, not 0.2 ("),
    ({"change": "lr,batch_size", "count": 21}, 4, "made with data 20, not 21 ("),
    ({"change": "lr,batch_size", "seed": 3}, 4, "made with seed 0, not 3 ("),
    ({"change": "lr,batch_size", "clip": 1.0}, 4, "made with clip None, not 1.0 ("),
    ({"change": "lr,bach_size"}, 2, "'bach_size' cannot be changed in a resume (change). Did you mean 'batch_size'?"),
]


def test_what_is_not_named_is_refused_with_both_values(tmp_path: Path) -> None:
    folder = str(tmp_path / "a")
    worlds.run(2, script, folder=folder, second=False)
    for more, code, said in REFUSED:
        for got, text in worlds.run(2, script, folder=folder, second=True, **more):
            assert got == code and said in text, text


def test_the_choice_of_a_kernel_is_no_change(tmp_path: Path) -> None:
    """A checkpoint of ``foreach``, ``fused`` or ``capturable`` optimizers is resumed where another kernel is used."""
    folder = str(tmp_path / "a")
    worlds.run(2, script, folder=folder, second=False, foreach=True)
    for _, clock, _, changes in worlds.run(2, script, folder=folder, second=True, foreach=False, lr=0.1, batch=8):
        assert (clock, changes) == (12, [])


def test_a_batch_does_not_change_within_an_epoch(tmp_path: Path) -> None:
    folder = str(tmp_path / "a")
    worlds.run(2, script, folder=folder, second=False, stop=4)
    for code, text in worlds.run(2, script, folder=folder, second=True, change="lr,batch_size"):
        assert code == 4 and "batch_size can change only between two epochs" in text
        assert "within epoch 2, after 1 of its batches" in text and "--checkpoint-every 1ep" in text
        assert "in a script run.save after the loop over an epoch" in text and "--epochs" not in text
    [first, _] = worlds.run(2, script, folder=folder, second=True, change="lr", batch=8)
    assert first[1:3] == (12, 80)


def command(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return start(["-m", "tutti", "train", *words, "--eval-every", "none"], folder, os.environ, 200)


def test_on_the_command_line(tmp_path: Path) -> None:
    words = ("digits", "--device", "cpu", "--workers", "2", "--batch-size", "359", "--optimizer", "sgd:lr=0.1")
    first = command(tmp_path, *words, "--devices", "2", "--epochs", "1", "--out", "runs/a")
    assert first.returncode == 0, first.stderr
    more = ("--resume", "runs/a", "--devices", "1", "--epochs", "2")
    refused = command(tmp_path, *more, "--batch-size", "719", "--optimizer.lr", "0.2")
    assert refused.returncode == 4
    assert "the checkpoint was made with batch_size 359, not 719; lr 0.1, not 0.2" in refused.stderr
    more_refused = command(tmp_path, *more, "--schedule", "cosine", "--lr-scale", "sqrt:base_batch=359")
    assert "lr_scale none, not sqrt:base_batch=359; schedule constant, not cosine" in more_refused.stderr
    unknown = command(tmp_path, *more, "--change", "momentun")
    assert unknown.returncode == 2 and "Did you mean 'momentum'?" in unknown.stderr
    assert "--change needs --resume" in command(tmp_path, "digits", "--change", "lr").stderr
    # Without its name the run is found by all settings that are not named.
    found = command(
        *(tmp_path, *words[:3], "--workers", "2", "--epochs", "1", "--resume", "--devices", "1"),
        *("--batch-size", "719", "--optimizer", "sgd:lr=0.2", "--change", "lr,batch_size"),
    )
    assert found.returncode == 0, found.stderr
    done = command(tmp_path, *more, "--batch-size", "719", "--optimizer.lr", "0.2", "--change", "lr,batch_size")
    assert done.returncode == 0, done.stderr
    assert "batch_size 359 → 719; lr 0.1 → 0.2 from step 5 on" in done.stderr
    summary = json.loads((tmp_path / "runs" / "a" / "summary.json").read_text())
    # Five steps of 359 samples, the last one shorter, and two of 719.
    assert (summary["steps"], summary["epochs"]) == (7, 2.0)
    assert summary["changes"] == [{"step": 5, "changed": {"batch_size": [359, 719], "lr": ["0.1", "0.2"]}}]
    lines = [json.loads(line) for line in (tmp_path / "runs" / "a" / "metrics.jsonl").open()]
    assert [line["lr"] for line in lines if line["group"] == "train"] == [0.1] * 5 + [0.2] * 2
    # The names are for one resume alone.
    assert "change =" not in (tmp_path / "runs" / "a" / "config.toml").read_text()


def thawing(strategy: str, folder: str, part: str) -> Any:
    """Train two layers and save in between; or resume with one of them frozen, and then save again or thaw it."""
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    net[0].requires_grad_(part == "first")
    run = tutti.prepare(net, optimizer, data(24), loss, strategy=strategy, workers=2, batch_size=4, ema=0.8)
    if part != "first":
        run.restore(folder)
    if part == "second":
        return run.save(folder) is not None
    for batch in run.epoch(run.data_position.epoch):
        net[0].requires_grad_(True)
        run.step(batch)
        if part == "first" and run.global_step == 2:
            run.save(folder)
    return [{name: tensor.tolist() for name, tensor in run.state(averaged).items()} for averaged in (False, True)]


@pytest.mark.parametrize("strategy", ["sharded:stage=1", "local_sgd:period=3", "diloco:period=3"])
def test_a_layer_that_is_frozen_at_restore_keeps_its_state(strategy: str, tmp_path: Path) -> None:
    """Its moments, its average, and in local SGD each worker's copy of it."""
    want = worlds.run(2, thawing, strategy=strategy, folder=str(tmp_path), part="first")
    worlds.run(2, thawing, strategy=strategy, folder=str(tmp_path), part="second")
    assert worlds.run(2, thawing, strategy=strategy, folder=str(tmp_path), part="third") == want


def test_an_average_of_a_frozen_layer_has_no_place_in_shared_memory(tmp_path: Path) -> None:
    worlds.run(2, thawing, strategy="central_storage", folder=str(tmp_path), part="first")
    with pytest.raises(worlds.RankError) as caught:
        worlds.run(2, thawing, strategy="central_storage", folder=str(tmp_path), part="second")
    said = [failure.text for failure in caught.value.failures if failure is not None]
    assert said and all("an average of 0.weight, which is frozen now" in text for text in said)
