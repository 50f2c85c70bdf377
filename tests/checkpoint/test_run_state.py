"""``run.save`` and ``run.restore``: a script that stops anywhere continues as if it had not, on other devices too."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, MultiStepLR, OneCycleLR

import tutti
from tests import worlds
from tests.covering import in_turn
from tutti.errors import TuttiError

EPOCHS, BATCH, COUNT = 4, 6, 20
"""Batches of 6, 6, 6 and 2 samples for four workers: the last leaves ranks of four, and one of three, without any."""


def model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Unflatten(1, (2, 2)), nn.BatchNorm1d(2), nn.Flatten(), nn.Linear(4, 5), nn.Dropout(0.3), nn.Tanh()
    return nn.Sequential(*layers, nn.Linear(5, 1)).double()


def data() -> Tensor:
    return torch.randn(COUNT, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


class Rows:
    """The same samples as a stream of unknown length."""

    def __iter__(self) -> Iterator[Tensor]:
        return iter(data())


def loss(net: Any, batch: Tensor) -> Any:
    return net(batch).square().mean()


def scheduler_of(kind: str, optimizer: Any) -> LRScheduler:
    if kind == "multistep":
        return MultiStepLR(optimizer, [3, 7, 11], gamma=0.5)
    return OneCycleLR(optimizer, 0.2, total_steps=EPOCHS * 4 + 1)


def script(
    folder: str, own: bool, kind: str, stop: tuple[int, str], strategy: str = "mirrored", stream: bool = False
) -> Any:
    """A script of two halves: it begins or continues, and ends at (step, where) or after all epochs.

    Where: ``in`` the loop over the batches, or ``after`` it. Gives the steps after which each epoch was looked at.
    """
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    options: dict[str, Any] = {"workers": 4, "batch_size": BATCH, "reproducible": True, "strategy": strategy}
    run = tutti.prepare(net, optimizer, Rows() if stream else data(), None if own else loss, **options)
    scheduler = scheduler_of(kind, optimizer)
    saved = run.restore(folder)
    seen: list[int] = []
    if saved is not None:
        scheduler.load_state_dict(saved["scheduler"])
        seen = saved["seen"]

    def left(where: str) -> bool:
        if (run.global_step, where) == stop:
            run.save(folder, {"scheduler": scheduler.state_dict(), "seen": seen})
        return (run.global_step, where) == stop

    for epoch in run.epochs(EPOCHS):
        for batch in run.microbatches(epoch) if own else run.epoch(epoch):
            if own:
                run.model.zero_grad()
                run.backward(loss(net, batch))
                optimizer.step()
                if not run.stepped:
                    continue
            else:
                run.step(batch)
            scheduler.step()
            if left("in"):
                return None
        seen.append(run.global_step)
        if left("after"):
            return None
    return run.weights_sha256(), seen, run.global_step, run.updates, optimizer.param_groups[0]["lr"]


STOPS = [
    ("multistep", (5, "in"), 1, 3),
    ("multistep", (8, "in"), 3, 4),
    ("onecycle", (3, "in"), 2, 1),
    ("onecycle", (14, "in"), 3, 3),
    ("multistep", (8, "after"), 4, 2),
]
"""Kind of schedule, where the first run stops, and the devices before and after: each is a custom loop or ``run.step``
in turn."""


@pytest.mark.parametrize(("stopped", "own"), in_turn(STOPS, [True, False]), ids=str)
def test_continues_to_the_same_bits(stopped: tuple[str, tuple[int, str], int, int], own: bool, tmp_path: Path) -> None:
    kind, stop, before, after = stopped
    never = {"own": own, "kind": kind, "stop": (-1, "")}
    [want] = worlds.run(1, script, folder=str(tmp_path / "none"), **never)
    assert want[1:4] == ([4, 8, 12, 16], 16, 16)
    folder = str(tmp_path / "checkpoints")
    assert worlds.run(before, script, folder=folder, own=own, kind=kind, stop=stop) == [None] * before
    assert worlds.run(after, script, folder=folder, **never) == [want] * after


@pytest.mark.parametrize(("stop", "own"), in_turn([(6, "in"), (8, "in"), (8, "after")], [True, False]), ids=str)
def test_a_stream_continues_to_the_same_bits(own: bool, stop: tuple[int, str], tmp_path: Path) -> None:
    never = {"own": own, "kind": "multistep", "stream": True, "stop": (-1, "")}
    [want] = worlds.run(1, script, folder=str(tmp_path / "none"), **never)
    assert want[1:4] == ([4, 8, 12, 16], 16, 16)
    folder = str(tmp_path / "checkpoints")
    worlds.run(3, script, folder=folder, **never | {"stop": stop})
    assert worlds.run(2, script, folder=folder, **never) == [want] * 2


def test_what_one_strategy_saved_another_continues(tmp_path: Path) -> None:
    never = {"own": False, "kind": "onecycle", "stop": (-1, "")}
    [want] = worlds.run(1, script, folder=str(tmp_path / "none"), **never)
    folder = str(tmp_path / "checkpoints")
    arguments = {"folder": folder, "own": False, "kind": "onecycle"}
    worlds.run(3, script, stop=(6, "in"), strategy="model_parallel", **arguments)
    worlds.run(2, script, stop=(11, "in"), strategy="mirrored", **arguments)
    assert worlds.run(3, script, stop=(-1, ""), strategy="model_parallel", **arguments) == [want] * 3


def kept(folder: str) -> list[str]:
    net = model()
    optimizer = torch.optim.Adam(net.parameters())
    run = tutti.prepare(net, optimizer, data(), loss, workers=4, batch_size=BATCH)
    for batch in run.epoch(0):
        run.step(batch)
        path = run.save(folder, keep=3)
        assert json.loads((path / "manifest.json").read_text())["step"] == run.global_step
    return sorted(path.name for path in Path(folder).iterdir())


def test_the_newest_are_kept_and_nothing_else_stays(tmp_path: Path) -> None:
    assert worlds.run(3, kept, folder=str(tmp_path / "a"))[0] == [f"step-0000000{step}" for step in (2, 3, 4)]


def refused(folder: str, what: str) -> tuple[int, str]:
    """Caught on the rank: a rank that fails costs a new pool."""
    net = model()
    optimizer: Any = torch.optim.SGD(net.parameters(), lr=0.1)
    options: dict[str, Any] = {"workers": 4, "batch_size": BATCH}
    if what == "workers":
        options["workers"] = None
    if what == "optimizer":
        optimizer = torch.optim.Adam(net.parameters())
    if what == "groups":
        groups = [{"params": [p]} for p in net.parameters()]
        optimizer = torch.optim.SGD(groups, lr=0.1)
    try:
        run = tutti.prepare(net, optimizer, data(), loss, **options)
        if what == "middle":
            for _ in run.microbatches(0):
                run.save(folder)
        elif what == "tensor":
            run.save(folder, {"mean": {"of": [torch.zeros(2)]}})
        elif what == "done":
            assert run.restore(folder) == {}
            next(run.microbatches(0))
        elif what == "save":
            for epoch in range(2):
                for batch in run.epoch(epoch):
                    run.step(batch)
            run.save(folder)
        else:
            run.restore(folder)
    except TuttiError as error:
        return int(error.exit_code), str(error)
    return 0, ""


REFUSED = {
    "middle": (2, "in the middle of a global batch"),
    "tensor": (2, "extra['mean']['of'][0] is a Tensor"),
    "done": (2, "loop over run.epochs(number)"),
    "workers": (4, "made with workers 4, not 3"),
    "optimizer": (4, "made with optimizer_class SGD, not Adam"),
    "groups": (4, "the checkpoint's optimizer has 1 parameter group, not 6"),
}


def test_what_would_continue_wrongly_is_refused_on_every_rank(tmp_path: Path) -> None:
    assert worlds.run(3, refused, folder=str(tmp_path / "a"), what="save") == [(0, "")] * 3
    for what, (code, text) in REFUSED.items():
        for got, said in worlds.run(3, refused, folder=str(tmp_path / "a"), what=what):
            assert got == code and text.lower() in said.lower(), said


def statistics(run: Any) -> list[dict[str, np.ndarray]]:
    """Each local worker's own buffers, by name."""
    return [
        {slot.name: t.numpy().copy() for slot, t in zip(run.gradient_sync._buffers._slots, row, strict=True)}
        for row in run.gradient_sync._buffers._own.values()
    ]


def rescaled(folder: str, workers: int, strategy: str = "mirrored", **options: Any) -> Any:
    """What a script says that goes on with so many workers; how its workers begin, and its weights after an epoch."""
    net = model()
    options = {"batch_size": BATCH, "reproducible": True, "strategy": strategy, **options}
    run = tutti.prepare(net, "sgd:lr=0.1,momentum=0.9", data(), loss, workers=workers, **options)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert run.restore(folder) is not None
    if strategy == "mirrored" and workers != 4:
        merged = {name: t.numpy() for name, t in run.gradient_sync.merged().items()}
        for own in statistics(run):
            assert all(np.allclose(own[name], merged[name], atol=1e-12) for name in own)
    begun = run.global_step, run.weights_sha256()
    for batch in run.epoch(1):
        run.step(batch)
    return [str(w.message) for w in said], begun, run.weights_sha256()


def begun(folder: str, strategy: str) -> str:
    run = tutti.prepare(
        *(model(), "sgd:lr=0.1,momentum=0.9", data(), loss),
        **{"workers": 4, "batch_size": BATCH, "reproducible": True, "strategy": strategy},
    )
    for batch in run.epoch(0):
        run.step(batch)
    run.save(folder)
    return run.weights_sha256()


@pytest.mark.parametrize("strategy", ["mirrored", "local_sgd:period=3"])
def test_a_script_goes_on_with_the_workers_that_it_names(strategy: str, tmp_path: Path) -> None:
    """More and fewer; on any number of devices to the same bits, and the effect is told."""
    folder = str(tmp_path / "a")
    worlds.run(2, begun, folder=folder, strategy=strategy)
    for workers in (6, 1):
        answers = worlds.run(1, rescaled, folder=folder, workers=workers, strategy=strategy)
        answers += worlds.run(3, rescaled, folder=folder, workers=workers, strategy=strategy) if workers > 3 else []
        for said, (clock, start), _ in answers:
            assert clock == 4 and any(f"workers 4 → {workers} from step 4 on: " in text for text in said)
            assert any("begins with the merged batch-norm statistics" in text for text in said)
            assert any("average of the saved workers' parameters" in text for text in said) == ("local" in strategy)
            assert start == answers[0][1][1]
        assert len({end for _, _, end in answers}) == 1
    same = worlds.run(3, rescaled, folder=folder, workers=4, strategy=strategy)
    assert all(said == [] for said, _, _ in same)


def full(folder: str) -> list[Any]:
    run = tutti.prepare(model(), "sgd", data(), loss, workers=4, batch_size=BATCH)
    said: list[Any] = [run.restore(folder)]
    for name in ("file", "folder"):
        try:
            run.save(Path(folder) / name)
        except TuttiError as error:
            said.append(int(error.exit_code))
    return said


def test_a_save_that_fails_fails_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "step-00000000.tmp-0").write_text("in the way")
    for said in worlds.run(3, full, folder=str(tmp_path)):
        assert said == [None, 8, 8]


def restored_from(folder: Path) -> list[str]:
    run = tutti.prepare(model(), "sgd:lr=0.1", data(), loss, workers=2, batch_size=BATCH)
    for batch in run.epoch(0):
        run.step(batch)
    run.save(folder / "run" / "checkpoints")
    (folder / "weights.pt").write_text("", encoding="utf-8")
    said = []
    for name in ("weights.pt", "run", "run/checkpoints/step-00000004", "new", "run/checkpoints"):
        try:
            said.append(str(run.restore(folder / name)))
        except TuttiError as error:
            said.append(f"{type(error).__name__} {error}")
    return said


def test_a_path_that_is_no_folder_of_checkpoints_is_refused(tmp_path: Path) -> None:
    """A run that found no checkpoint there would begin anew."""
    checkpoints = tmp_path / "run" / "checkpoints"
    for file, directory, one, *others in worlds.run(2, restored_from, folder=tmp_path):
        assert file.startswith("UsageError there is no folder of checkpoints") and "load_state_dict" in file
        assert directory.startswith("UsageError") and directory.endswith(f"Give {checkpoints}.")
        assert one.startswith("UsageError") and f"Give {checkpoints}, whose newest checkpoint" in one
        assert others == ["None", "{}"]
