"""Schedulers in ``tutti.prepare`` count updates as plain PyTorch does, and go on after a resume."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    LambdaLR,
    LinearLR,
    MultiStepLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

import tutti
from tests import worlds
from tests.covering import in_turn
from tutti.errors import TuttiError, UsageError
from tutti.train.schedulers import Schedulers

INPUTS = torch.arange(44.0, dtype=torch.float64).view(22, 2) / 44
TARGETS = INPUTS.sum(dim=1, keepdim=True)
BATCH = 6
MAKE: dict[str, Any] = {
    "one cycle": lambda o: OneCycleLR(o, max_lr=0.3, total_steps=9),
    "steps": lambda o: MultiStepLR(o, [2, 5], gamma=0.3),
    "transformers": lambda o: LambdaLR(o, lambda step: min(step / 3, 1.0)),
    "sequence": lambda o: SequentialLR(o, [LinearLR(o, 0.1, 1.0, 3), CosineAnnealingLR(o, 6)], [3]),
    "epochs": lambda o: StepLR(o, 1, gamma=0.5),
}
IN_BODIES: dict[str, Any] = {
    "milestones": lambda o: MultiStepLR(o, [8, 16], gamma=0.3),
    "restarts": lambda o: CosineAnnealingWarmRestarts(o, 2),
}


def loss(model: Any, batch: Any) -> Any:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def built() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(2, 1).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def plain(kind: str, accumulate: int = 1) -> list[float]:
    """Rates of the updates of two epochs of four batches, in plain PyTorch."""
    _, optimizer = built()
    scheduler, rates = MAKE[kind](optimizer), []
    for _ in range(2):
        for number in range(4):
            if (number + 1) % accumulate == 0:
                rates.append(optimizer.param_groups[0]["lr"])
                optimizer.step()
                if kind != "epochs":
                    scheduler.step()
        if kind == "epochs":
            scheduler.step()
    return rates


def rates(
    kind: str, custom: bool = False, accumulate: int = 1, folder: str = "", stop: int = 0, **options: Any
) -> list[float]:
    model, optimizer = built()
    every = "epoch" if kind == "epochs" else "update"
    scheduler = MAKE[kind](optimizer)
    data = (INPUTS, TARGETS)
    options = {"batch_size": BATCH, "precision": "fp64", "scheduler": scheduler, "scheduler_every": every} | options
    run = tutti.prepare(model, optimizer, data, loss, **options)
    if folder and not stop:
        run.restore(folder)
    found = []
    for epoch in run.epochs(2):
        for batch in run.microbatches(epoch) if custom else run.epoch(epoch):
            if not custom:
                found.append(optimizer.param_groups[0]["lr"])
                run.step(batch)
            else:
                run.backward(loss(run.model, batch) / accumulate)
                if run.global_step % accumulate == accumulate - 1:
                    rate = optimizer.param_groups[0]["lr"]
                    optimizer.step()
                    if run.stepped:
                        found.append(rate)
                        optimizer.zero_grad()
            if stop and run.global_step == stop:
                run.save(folder)
                return found
    return found


@pytest.mark.parametrize(("kind", "place"), in_turn(list(MAKE), [(2, True), (3, False), (1, False)]))
def test_rates_are_those_of_plain_pytorch(kind: str, place: tuple[int, bool]) -> None:
    devices, custom = place
    assert worlds.run(devices, rates, kind=kind, custom=custom, workers=3) == [plain(kind)] * devices


@pytest.mark.parametrize("strategy", ["sharded", "local_sgd:period=2", "parameter_server"])
def test_strategies_step_it_once_an_update(strategy: str) -> None:
    assert worlds.run(2, rates, kind="steps", strategy=strategy, workers=2) == [plain("steps")] * 2


def warned(strategy: str) -> list[str]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options: dict[str, Any] = {"scheduler": MAKE["steps"](optimizer), "workers": 2, "batch_size": BATCH}
    run = tutti.prepare(model, optimizer, (INPUTS, TARGETS), loss, strategy=strategy, **options)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for batch in run.epoch(0):
            run.step(batch)
    return [str(each.message) for each in seen]


@pytest.mark.parametrize("strategy", ["pipeline", "sharded", "local_sgd:period=2", "parameter_server"])
def test_pytorch_does_not_warn_of_the_order_of_steps(strategy: str) -> None:
    assert worlds.run(2, warned, strategy=strategy) == [[], []]


def test_accumulated_batches_are_one_update() -> None:
    want = plain("one cycle", accumulate=2)
    for devices in (1, 2):
        assert worlds.run(devices, rates, kind="one cycle", custom=True, accumulate=2, workers=2) == [want] * devices


@pytest.mark.parametrize("kind", MAKE)
def test_it_goes_on_after_a_resume(kind: str, tmp_path: Path) -> None:
    """After the fourth step, the last of its epoch, whose scheduler has yet to step."""
    folder = str(tmp_path / "saved")
    [before] = worlds.run(1, rates, kind=kind, folder=folder, stop=4, workers=2)
    for after in worlds.run(2, rates, kind=kind, folder=folder, workers=2):
        assert before + after == plain(kind)


def overflowing() -> tuple[list[float], int]:
    """A batch whose gradient is not finite is no update, as with a ``GradScaler``."""
    model, optimizer = built()
    scheduler = StepLR(optimizer, 1, gamma=0.5)
    inputs = INPUTS.clone()
    inputs[6:12] = torch.inf
    run = tutti.prepare(model, optimizer, (inputs, TARGETS), loss, batch_size=6, shuffle=False, scheduler=scheduler)
    found = []
    for batch in run.epoch(0):
        found.append(optimizer.param_groups[0]["lr"])
        run.step(batch)
    return found, run.updates


def test_a_skipped_update_is_not_counted() -> None:
    assert worlds.run(2, overflowing) == [([0.1, 0.05, 0.05, 0.025], 3)] * 2


def two() -> list[list[float]]:
    models = [nn.Linear(2, 1).double(), nn.Linear(2, 1).double()]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    schedulers = [StepLR(optimizer, 1, gamma=0.5) for optimizer in optimizers]
    run = tutti.prepare(models, optimizers, (INPUTS, TARGETS), batch_size=BATCH, scheduler=schedulers)
    found = []
    for number, batch in enumerate(run.microbatches(0)):
        for index, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            if index == 0 or number % 2:
                optimizer.zero_grad()
                run.backward(loss(model, batch))
                optimizer.step()
        found.append([optimizer.param_groups[0]["lr"] for optimizer in optimizers])
    return found


def test_each_scheduler_follows_its_own_optimizer() -> None:
    want = [[0.05, 0.1], [0.025, 0.05], [0.0125, 0.05], [0.00625, 0.025]]
    assert worlds.run(2, two) == [want] * 2


def halves(by: str, workers: int) -> Any:
    """Weights of a model whose layers have an optimizer each, with a rate that falls after every update of it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)).double()
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in model]
    schedulers = [StepLR(optimizer, 1, gamma=0.5) for optimizer in optimizers]
    if by != "plain":
        own = schedulers if by == "prepare" else None
        run = tutti.prepare(model, optimizers, (INPUTS, TARGETS), workers=workers, batch_size=22, scheduler=own)
    try:
        for epoch in range(4):
            for batch in [(INPUTS, TARGETS)] if by == "plain" else run.microbatches(epoch):
                if by == "every body":
                    optimizers[1].param_groups[0]["lr"] *= 0.9
                value = loss(model, batch)
                value.backward() if by == "plain" else run.backward(value)
                for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
                    optimizer.step()
                    if by == "plain" or (by == "loop" and run.stepped):
                        scheduler.step()
                model.zero_grad()
    except UsageError as error:
        return str(error), run.updates
    return [parameter.detach().flatten().tolist() for parameter in model.parameters()]


@pytest.mark.parametrize("by", ["prepare", "loop"])
def test_a_rate_may_fall_before_the_next_optimizer_of_the_body_steps(by: str) -> None:
    want = halves("plain", 1)
    for ranks, workers in ((1, 4), (2, 4), (3, 3)):
        for found in worlds.run(ranks, halves, by=by, workers=workers):
            assert found == [pytest.approx(each, abs=1e-12) for each in want], found
    [(said, updates)] = worlds.run(1, halves, by="every body", workers=4)
    assert "changes the optimizer's settings" in said and updates == 0


def called() -> str:
    model, optimizer = built()
    scheduler = StepLR(optimizer, 1)
    tutti.prepare(model, optimizer, (INPUTS, TARGETS), loss, scheduler=scheduler)
    try:
        scheduler.step()
    except TuttiError as error:
        return str(error)
    return ""


def test_a_call_by_the_script_is_refused() -> None:
    [text] = worlds.run(1, called)
    assert text.startswith("the script calls StepLR.step() of a scheduler") and "Leave the call out" in text


def test_what_is_no_scheduler_of_the_optimizer_is_refused() -> None:
    (_, own), (_, other) = built(), built()
    for given, every, optimizers, words in (
        (StepLR(own, 1), "step", [own], "scheduler_every is 'step'"),
        (StepLR(own, 1), "epoch", [other], "another optimizer"),
        (StepLR(own, 1), "evaluation:", [own], "Choices: update, epoch, evaluation, evaluation:METRIC"),
        (StepLR(own, 1), "epoch:loss", [own], "scheduler_every is 'epoch:loss'"),
        ([object()], "epoch", [own], "the scheduler is a object"),
    ):
        with pytest.raises(UsageError, match=words):
            Schedulers(given, every, optimizers)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="cannot be combined with steps=all"):
        Schedulers(StepLR(own, 1), "epoch", [own], "steps=all")


def plain_plateau() -> tuple[list[float], list[float]]:
    """Rates of three epochs, and the weights, of plain PyTorch."""
    model, optimizer = built()
    scheduler = ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.9)
    found = []
    for _ in range(4):
        found.append(optimizer.param_groups[0]["lr"])
        for start in range(0, len(INPUTS), BATCH):
            optimizer.zero_grad()
            loss(model, (INPUTS[start : start + BATCH], TARGETS[start : start + BATCH])).backward()
            optimizer.step()
        with torch.no_grad():
            scheduler.step(loss(model, (INPUTS, TARGETS)))
    return found, [value for p in model.parameters() for value in p.flatten().tolist()]


def plateaued(by: str, folder: str = "", stop: int = 4, **options: Any) -> tuple[list[float], list[float]]:
    model, optimizer = built()
    scheduler = ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.9)
    options = {"batch_size": BATCH, "precision": "fp64", "shuffle": False, "scheduler": scheduler} | options
    every = "update" if by == "script" else by
    run = tutti.prepare(model, optimizer, (INPUTS, TARGETS), mean_and_error, scheduler_every=every, **options)
    if folder and stop == 4:
        run.restore(folder)
    found = []
    for epoch in run.epochs(stop):
        found.append(optimizer.param_groups[0]["lr"])
        for batch in run.epoch(epoch):
            run.step(batch)
        seen = run.evaluate((INPUTS, TARGETS))
        if by == "script":
            scheduler.step(seen.loss)
    if stop < 4:
        run.save(folder)
    return found, [value for tensor in run.state().values() for value in tensor.flatten().tolist()]


def mean_and_error(model: Any, batch: Any) -> Any:
    value = loss(model, batch)
    return value * len(batch[0]), len(batch[0]), {"error": value.detach() * len(batch[0])}


PLATEAUS = [
    *((devices, by, "mirrored") for devices, by in ((1, "evaluation"), (2, "script"), (3, "evaluation:error"))),
    *((2, "script", "sharded"), (2, "evaluation", "parameter_server"), (2, "evaluation", "central_storage")),
]


@pytest.mark.parametrize(("devices", "by", "strategy"), PLATEAUS)
def test_a_plateau_is_that_of_plain_pytorch(devices: int, by: str, strategy: str) -> None:
    rates, weights = plain_plateau()
    assert len(set(rates)) > 2
    for found, trained in worlds.run(devices, plateaued, by=by, strategy=strategy, workers=devices):
        assert found == rates
        assert trained == pytest.approx(weights, abs=1e-12)


def test_a_plateau_counts_evaluations_where_replicas_differ() -> None:
    found = worlds.run(2, plateaued, by="evaluation", strategy="local_sgd:period=2", workers=2)
    assert found[0] == found[1] and len(set(found[0][0])) > 2


@pytest.mark.parametrize("by", ["script", "evaluation"])
def test_a_plateau_goes_on_after_a_resume(by: str, tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    [(before, _)] = worlds.run(1, plateaued, by=by, folder=folder, stop=2, workers=2)
    rates, weights = plain_plateau()
    for after, trained in worlds.run(2, plateaued, by=by, folder=folder, workers=2):
        assert before + after == rates and trained == pytest.approx(weights, abs=1e-12)


def own_metrics(value: float | None, every: str = "update") -> str:
    model, optimizer = built()
    scheduler = ReduceLROnPlateau(optimizer)
    run = tutti.prepare(model, optimizer, (INPUTS, TARGETS), loss, scheduler=scheduler, scheduler_every=every)
    try:
        if value is not None:
            scheduler.step(value * (1 + tutti.rank() * 1e-3))
        run.evaluate((INPUTS, TARGETS))
    except TuttiError as error:
        return str(error)
    return ""


def test_metrics_that_differ_between_ranks_are_refused() -> None:
    for text in worlds.run(2, own_metrics, value=2.0):
        assert "ReduceLROnPlateau.step() gets 2 on one rank and 2.002 on another" in text
        assert "test_schedulers.py:" in text and "run.evaluate(held_out).loss" in text
    assert worlds.run(2, own_metrics, value=0.0) == [""] * 2


def test_a_plateau_that_evaluations_step_is_left_to_them() -> None:
    [text] = worlds.run(1, own_metrics, value=1.0, every="evaluation")
    assert text.startswith("the script calls ReduceLROnPlateau.step()") and "once an evaluation" in text
    [text] = worlds.run(1, own_metrics, value=None, every="evaluation:los")
    assert text.startswith("the evaluation has no 'los'") and "Did you mean 'loss'" in text


def test_an_attribute_in_place_of_step_would_be_saved_with_the_scheduler() -> None:
    """Which is why its class is replaced (docs/decisions/023): ``state_dict`` is all that the object has."""
    _, optimizer = built()
    scheduler = StepLR(optimizer, 1)
    plain = scheduler.state_dict().keys()
    Schedulers(scheduler, "update", [optimizer])
    assert scheduler.state_dict().keys() == plain
    scheduler.step = lambda: None  # type: ignore[assignment, method-assign]
    assert scheduler.state_dict().keys() - plain == {"step"}


def stepped(kind: str, guarded: bool, micro: int | None = None, workers: int = 4) -> tuple[int, list[float], str]:
    """Updates, their rates, and the refusal of a loop that steps a scheduler in every body, or once an update."""
    model, optimizer = built()
    run = tutti.prepare(model, optimizer, (INPUTS, TARGETS), workers=workers, batch_size=8, micro_batch=micro)
    scheduler, found = (MAKE | IN_BODIES)[kind](optimizer), list[float]()
    try:
        for epoch in range(2):
            for batch in run.microbatches(epoch):
                if kind == "restarts":
                    scheduler.step(run.global_step / 2)
                run.backward(loss(model, batch))
                rate = optimizer.param_groups[0]["lr"]
                optimizer.step()
                optimizer.zero_grad()
                found += [rate] if run.stepped else []
                if kind != "restarts" and (run.stepped or not guarded):
                    scheduler.step()
    except UsageError as error:
        return run.updates, found, str(error)
    return run.updates, found, ""


@pytest.mark.parametrize("kind", ["transformers", "one cycle", "milestones", "sequence"])
def test_a_scheduler_that_every_body_steps_is_refused_before_an_update_has_its_rate(kind: str) -> None:
    """Also where two of its steps lie between updates with one rate (milestones)."""
    [(updates, want, said)] = worlds.run(1, stepped, kind=kind, guarded=True)
    assert updates == 6 and not said
    for devices, options in ((1, {}), (2, {"micro": 2, "workers": 2})):
        for updates, found, said in worlds.run(devices, stepped, kind=kind, guarded=False, **options):
            assert "run.stepped" in said and "test_schedulers.py" in said
            assert found == want[:updates] and updates <= 1


def test_ranks_of_which_one_steps_a_scheduler_in_two_bodies_are_refused() -> None:
    with pytest.raises(worlds.RankError, match="changes the optimizer's settings"):
        worlds.run_within(5.0, 3, stepped, kind="transformers", guarded=False)
    worlds.forget(3)


def test_bodies_step_a_scheduler_with_one_micro_batch_each_or_to_a_count_of_their_own() -> None:
    assert worlds.run(4, stepped, kind="transformers", guarded=False) == worlds.run(
        4, stepped, kind="transformers", guarded=True
    )
    [first, *_] = worlds.run(1, stepped, kind="restarts", guarded=False)
    assert first == (6, first[1], "") and len(set(first[1])) > 1


@pytest.mark.parametrize("every", ["evaluation", "evaluation:error", "epoch"])
def test_a_scheduler_that_no_evaluation_has_stepped_is_warned_of_once(every: str) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for evaluations in (0, 1):
            _, optimizer = built()
            schedulers = Schedulers(StepLR(optimizer, 1), every, [optimizer])
            optimizer.step()
            for _ in range(evaluations):
                schedulers.after_evaluation({"loss": 1.0, "error": 1.0})
            for _ in range(4):
                schedulers.after_epoch()
    found = [str(each.message) for each in caught if "no scheduler has stepped" in str(each.message)]
    assert len(found) == (every != "epoch"), found
    assert all("StepLR" in text and "run.evaluate" in text for text in found)
