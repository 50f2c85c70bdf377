"""An error of one rank in a function that all ranks call reaches the ranks that wait for it, with its cause."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import tutti
from tests import worlds
from tests.covering import in_turn
from tests.train.test_callbacks import INPUTS, TARGETS, prepared
from tutti.checkpoint import manager


class Broken(RuntimeError):
    """Raised by the script."""


def last() -> bool:
    return tutti.rank() == tutti.size() - 1


class Samples(Dataset[Any]):
    """Samples of which the last rank cannot read the last ones."""

    def __len__(self) -> int:
        return len(INPUTS)

    def __getitem__(self, index: int) -> Any:
        if index > len(INPUTS) // 2 and last():
            raise Broken("unreadable")
        return INPUTS[index], TARGETS[index]


def loss(model: Any, batch: Any) -> Any:
    if last():
        raise Broken("unreadable")
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def train(run: tutti.Run) -> None:
    for epoch in run.epochs(2):
        for batch in run.epoch(epoch):
            run.step(batch)


def from_data(data: Any) -> tutti.Run:
    return tutti.prepare(nn.Linear(2, 1).double(), "sgd:lr=0.1", data, loss, workers=6, batch_size=6)


def train_on_samples() -> None:
    run = from_data(Samples())
    for _ in run.microbatches(0):
        run.reduce_gradients()


def fails(run: Any, *_: Any, **__: Any) -> None:
    raise Broken("unreadable")


class Evaluated:
    ranks = "first"
    on_evaluation = fails


def predicted(model: Any, batch: Any) -> Any:
    if last():
        raise Broken("unreadable")
    return model(batch[0])


def stream() -> Any:
    for index in range(len(INPUTS)):
        if index > len(INPUTS) // 2 and last():
            raise Broken("unreadable")
        yield INPUTS[index], TARGETS[index]


CASES: dict[str, tuple[Callable[[], Any], int, str]] = {
    "loss in evaluate": (
        lambda: prepared([]).evaluate((INPUTS, TARGETS), batch=4, loss=loss),
        -1,
        "Broken: unreadable",
    ),
    "samples of evaluate": (lambda: prepared([]).evaluate(Samples(), batch=4), -1, "unreadable"),
    "predict": (lambda: prepared([]).predict((INPUTS, TARGETS), predicted, batch=4), -1, "Broken: unreadable"),
    "callback of a step": (lambda: train(prepared([fails])), 0, "Broken: unreadable"),
    "callback of an evaluation": (lambda: prepared([Evaluated()]).evaluate((INPUTS, TARGETS)), 0, "Broken: unreadable"),
    "logger on a full disk": (lambda: train(prepared([tutti.JsonLinesLogger("/dev/full")])), 0, "No space left"),
    "loss in a step": (lambda: train(from_data((INPUTS, TARGETS))), -1, "Broken: unreadable"),
    "samples of a custom loop": (train_on_samples, -1, "unreadable"),
    "samples of a stream": (lambda: train(from_data(stream)), -1, "unreadable"),
}


def outcome(case: str) -> str:
    try:
        CASES[case][0]()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize(("case", "size"), in_turn(list(CASES), [2, 3]))
def test_an_error_of_one_rank_is_told_to_the_others(case: str, size: int) -> None:
    said = worlds.run(size, outcome, case=case)
    worlds.forget(size)
    culprit = CASES[case][1] % size
    assert CASES[case][2].removeprefix("Broken: ") in said.pop(culprit)
    for text in said:
        assert text.startswith(f"PeerError: rank {culprit} failed, and ") and CASES[case][2] in text, text


def save(folder: str) -> str:
    run = prepared([])
    try:
        run.save(folder, {"note": object() if tutti.rank() == 0 else 1})
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_state_that_one_rank_cannot_save(tmp_path: Path) -> None:
    zero, one = worlds.run(2, save, folder=str(tmp_path))
    worlds.forget(2)
    assert zero.startswith("UsageError"), zero
    assert one.startswith("PeerError: rank 0 failed, and "), one


def save_with(broken: str, folder: str) -> str:
    """Save while one function of the saving thread raises, on rank 0 or for ``write_part`` on the last rank."""
    run, kept = prepared([]), getattr(manager, broken)
    if last() if broken == "write_part" else tutti.rank() == 0:
        setattr(manager, broken, fails)
    try:
        run.save(folder)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        setattr(manager, broken, kept)
    return ""


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("broken", ["begin", "write_part", "commit"])
def test_an_unexpected_error_of_one_saving_thread_fails_the_save_everywhere(
    broken: str, size: int, tmp_path: Path
) -> None:
    for text in worlds.run(size, save_with, broken=broken, folder=str(tmp_path)):
        assert text.startswith("DiskError: the save failed") and "Broken: unreadable" in text, text


def after_errors() -> list[float]:
    """Losses after errors that every rank has, and after one that the only rank that has it catches."""
    run = prepared([])
    for _ in range(2):
        with pytest.raises(Broken):
            run.predict((INPUTS, TARGETS), fails)
    return [run.step(batch) for batch in run.epoch(0)]


def test_a_run_goes_on_after_errors_that_all_ranks_catch() -> None:
    torch.manual_seed(0)
    assert worlds.run(2, after_errors) == [worlds.alone(after_errors)] * 2
