"""Counters that a custom loop's body moves, where a rank runs it several times a global batch: refused, or harmless."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import tutti
from tests import worlds
from tests.contract.table import largest_difference
from tests.covering import in_turn
from tests.train.test_custom_loop import BATCH, DATA, made
from tutti.errors import UsageError
from tutti.train.script_checks.body_counters import counted_loss

WEIGHTS = torch.linspace(1, 2, 40, dtype=torch.float64)
Body = Callable[[Any, Any, nn.Module, Tensor, Tensor, dict[str, Any]], Tensor]
REFUSED: dict[str, Body] = {}
RIGHT: dict[str, Body] = {}


def refused(body: Body) -> Body:
    REFUSED[body.__name__] = body
    return body


def right(body: Body) -> Body:
    RIGHT[body.__name__] = body
    return body


@refused
def annealed(run: Any, model: Any, average: nn.Module, inputs: Tensor, targets: Tensor, own: dict[str, Any]) -> Tensor:
    own["step"] += 1
    outputs = model(inputs)
    return (outputs - targets).square().mean() + min(1.0, own["step"] / 50) * outputs.square().mean()


@refused
def scheduled(run: Any, model: Any, average: nn.Module, inputs: Tensor, targets: Tensor, own: dict[str, Any]) -> Tensor:
    own["step"] += 1
    return ((model(inputs) - targets) * WEIGHTS[own["step"]]).square().mean()


@refused
def alternating(
    run: Any, model: Any, average: nn.Module, inputs: Tensor, targets: Tensor, own: dict[str, Any]
) -> Tensor:
    own["step"] += 1
    error = model(inputs) - targets
    return error.square().mean() if own["step"] % 2 else error.abs().mean()


@refused
def averaged(run: Any, model: Any, average: nn.Module, inputs: Tensor, targets: Tensor, own: dict[str, Any]) -> Tensor:
    for mine, other in zip(average.parameters(), model.parameters(), strict=True):
        mine.data = 0.9 * mine.data + 0.1 * other.data
    return (model(inputs) - targets).square().mean()


@refused
def averaged_by_lists(
    run: Any, model: Any, average: nn.Module, inputs: Tensor, targets: Tensor, own: dict[str, Any]
) -> Tensor:
    with torch.no_grad():
        torch._foreach_lerp_([*average.parameters()], [*model.parameters()], 0.1)
    return (model(inputs) - targets).square().mean()


@right
def by_the_clock(
    run: Any, model: Any, average: nn.Module, inputs: Tensor, targets: Tensor, own: dict[str, Any]
) -> Tensor:
    error = (model(inputs) - targets) * WEIGHTS[run.global_step]
    return error.square().mean() if run.global_step % 2 else error.abs().mean()


@refused
def noisy(run: Any, model: Any, average: nn.Module, inputs: Tensor, targets: Tensor, own: dict[str, Any]) -> Tensor:
    """Noise of a generator that the script seeds once."""
    noise = own.setdefault("noise", np.random.default_rng(0)).normal(size=tuple(inputs.shape))
    return (model(inputs + torch.from_numpy(noise)) - targets).square().mean()


@refused
def chosen(run: Any, model: Any, average: nn.Module, inputs: Tensor, targets: Tensor, own: dict[str, Any]) -> Tensor:
    """The order of the features, as in permutation tests."""
    order = own.setdefault("draws", random.Random(0)).sample(range(4), 4)
    return (model(inputs[:, order]) - targets).square().mean()


@refused
def indexed(run: Any, model: Any, average: nn.Module, inputs: Tensor, targets: Tensor, own: dict[str, Any]) -> Tensor:
    """A column, and columns, by numbers of NumPy."""
    column = own.setdefault("noise", np.random.default_rng(0)).integers(0, 4)
    outputs = model(inputs)
    return (outputs - targets).square().mean() + (inputs[:, column] * outputs[:, 0]).mean()


@refused
def sliced(run: Any, model: Any, average: nn.Module, inputs: Tensor, targets: Tensor, own: dict[str, Any]) -> Tensor:
    own["step"] += 1
    first = own["step"] % 3
    return (model(inputs) - targets).square().mean() * inputs[:, first : first + 2].square().mean()


@refused
def seeded(run: Any, model: Any, average: nn.Module, inputs: Tensor, targets: Tensor, own: dict[str, Any]) -> Tensor:
    """Noise of PyTorch's generator, which each body seeds by its count."""
    own["step"] += 1
    torch.manual_seed(own["step"])
    return (model(inputs + torch.randn_like(inputs)) - targets).square().mean()


@right
def seeded_by_steps(
    run: Any, model: Any, average: nn.Module, inputs: Tensor, targets: Tensor, own: dict[str, Any]
) -> Tensor:
    """All generators are seeded for each step, after draws that are keyed; and for a draw that no loss needs."""
    noise = torch.randn_like(inputs) * np.random.rand() * random.random()
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(run.global_step)  # type: ignore[operator]
    noise = noise + torch.randn_like(inputs) * np.random.rand() + random.random()
    error = model(inputs + noise) - targets
    own["step"] += 1
    torch.manual_seed(own["step"])
    own["drawn"] = torch.randn(3).mul(2)
    return error.square().mean()


@right
def keyed(run: Any, model: Any, average: nn.Module, inputs: Tensor, targets: Tensor, own: dict[str, Any]) -> Tensor:
    """Noise of NumPy's global generator, of one that is seeded for each step, and a constant column of a table."""
    noise = np.random.default_rng(run.global_step).normal(size=tuple(inputs.shape))
    constant = torch.from_numpy(own.setdefault("constant", np.arange(8.0).reshape(4, 2)))[:, 0]
    return (model(inputs + torch.from_numpy(noise * np.random.rand()) + constant) - targets).square().mean()


@right
def by_the_samples(
    run: Any, model: Any, average: nn.Module, inputs: Tensor, targets: Tensor, own: dict[str, Any]
) -> Tensor:
    """Branches that a micro-batch's own samples decide, and numbers of single samples."""
    error = model(inputs) - targets
    return error.square().mean() if inputs.sum().item() > 0 else (error * float(inputs[0, 0])).abs().mean()


@right
def by_the_found(
    run: Any, model: Any, average: nn.Module, inputs: Tensor, targets: Tensor, own: dict[str, Any]
) -> Tensor:
    """As a router sends samples to an expert, which may have none."""
    error = (model(inputs) - targets).square()
    chosen = torch.nonzero(inputs[:, 0] > 0).squeeze(1)
    return error.mean() + error[chosen].sum() / len(inputs) if len(chosen) else error.mean()


@right
def logged(run: Any, model: Any, average: nn.Module, inputs: Tensor, targets: Tensor, own: dict[str, Any]) -> Tensor:
    """Counts bodies for what it prints, before the backward."""
    own["step"] += 1
    error = model(inputs) - targets
    own["sum"] = own.get("sum", 0.0) + error.detach().square().mean()
    own["mean"] = own["sum"] / own["step"]
    if own["step"] % 2:
        own["largest"] = error.detach().abs().max()
    return error.square().mean()


@right
def kept_once(run: Any, model: Any, average: nn.Module, inputs: Tensor, targets: Tensor, own: dict[str, Any]) -> Tensor:
    """The first body makes what the later ones use."""
    if "mask" not in own:
        own["mask"] = torch.ones(4, dtype=torch.float64).mul(0.5).add(0.5)
    return (model(inputs * own["mask"]) - targets).square().mean()


def trained(strategy: str, how: str, workers: int) -> Any:
    model, own, before = made(), {"step": 0}, random.getstate()
    average = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    run = tutti.prepare(model, optimizer, DATA, strategy=strategy, workers=workers, batch_size=BATCH)
    try:
        for epoch in range(2):
            for inputs, targets in run.microbatches(epoch):
                optimizer.zero_grad()
                run.backward((REFUSED | RIGHT)[how](run, model, average, inputs, targets, own))
                optimizer.step()
    except Exception as error:
        return f"{type(error).__name__}: {error}", run.updates
    assert random.getstate() == before
    return {name: tensor.numpy() for name, tensor in run.state().items()}


@pytest.mark.parametrize(("how", "strategy"), in_turn(list(REFUSED), ["single", "mirrored", "sharded:stage=1"], each=2))
def test_what_each_body_moves_is_refused_before_the_first_one_that_is_wrong(how: str, strategy: str) -> None:
    for said, updates in worlds.run(1 if strategy == "single" else 2, trained, strategy=strategy, how=how, workers=4):
        # Before the first update the average of the weights is the weights.
        assert updates == how.startswith("averaged") and "has moved" in said and "run.global_step" in said, said
        assert "test_body_counters.py:" in said or "PeerError" in said, said
    worlds.forget(2)


@pytest.mark.parametrize(
    ("how", "strategy"),
    in_turn(list(RIGHT), ["mirrored", "sharded:stage=1", "tensor:least=1", "central_storage"], each=2),
)
def test_numbers_and_branches_with_a_reason_are_right(how: str, strategy: str) -> None:
    want = worlds.alone(trained, strategy="single", how=how, workers=4)
    assert isinstance(want, dict), want
    for got in worlds.run(2, trained, strategy=strategy, how=how, workers=4):
        assert isinstance(got, dict), got
        assert largest_difference(got, want) <= 1e-10


@pytest.mark.parametrize("how", REFUSED)
def test_one_body_a_rank_may_count(how: str) -> None:
    for got in worlds.run(3, trained, strategy="mirrored", how=how, workers=3):
        assert isinstance(got, dict), got


def counted(how: str, strategy: str, workers: int) -> Any:
    """Average, or copy, the weights in every second body, or after every second update."""
    model = made()
    average, bodies, updates = copy.deepcopy(model).requires_grad_(False), 0, 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    run = tutti.prepare(model, optimizer, DATA, strategy=strategy, workers=workers, batch_size=BATCH)

    @torch.no_grad()
    def follow() -> None:
        for mine, other in zip(average.parameters(), model.parameters(), strict=True):
            if how == "copied":
                mine.copy_(other)
            else:
                mine.lerp_(other, 0.1)

    try:
        for epoch in range(2):
            for number, (inputs, targets) in enumerate(run.microbatches(epoch)):
                optimizer.zero_grad()
                run.backward((model(inputs) - targets).square().mean())
                optimizer.step()
                if how == "enumerated" and number % 2 == 0:
                    follow()
                if how in ("counted", "copied") and bodies % 2 == 0:
                    follow()
                if how == "updates" and run.stepped and updates % 2 == 0:
                    follow()
                if run.stepped:
                    updates += 1
                bodies += 1
    except UsageError as error:
        return str(error), run.updates
    states = run.state(), average.state_dict()
    return {f"{number}.{name}": t.numpy() for number, state in enumerate(states) for name, t in state.items()}


@pytest.mark.parametrize("how", ["enumerated", "counted", "copied"])
def test_an_average_in_every_second_of_several_bodies_is_refused(how: str) -> None:
    for ranks, strategy in ((1, "single"), (2, "mirrored")):
        for said, updates in worlds.run(ranks, counted, how=how, strategy=strategy, workers=4):
            assert "in every n-th of its bodies" in said and "test_body_counters.py:" in said and updates == 0, said
    want = worlds.alone(counted, how=how, strategy="single", workers=1)
    assert isinstance(want, dict), want


def seeded_in_loop(how: str, workers: int) -> Any:
    """Seed a generator of Python or NumPy in each body, by a count of bodies or of steps."""
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    run = tutti.prepare(model, optimizer, DATA, workers=workers, batch_size=BATCH)
    try:
        for number, (inputs, targets) in enumerate(run.microbatches(0)):
            if how == "numpy":
                np.random.seed(100 + number)
            elif how == "python":
                random.seed(number)
            else:
                np.random.seed(run.global_step), random.seed(run.global_step)
            scale = float(np.random.rand()) * random.uniform(1, 2)
            optimizer.zero_grad()
            run.backward((model(inputs * scale) - targets).square().mean())
            optimizer.step()
    except UsageError as error:
        return str(error), run.updates
    return {name: tensor.numpy() for name, tensor in run.state().items()}


@pytest.mark.parametrize("how", ["numpy", "python", "steps"])
def test_seeds_of_python_and_numpy_by_a_count_of_bodies_are_refused(how: str) -> None:
    for ranks in (1, 2):
        for found in worlds.run(ranks, seeded_in_loop, how=how, workers=4):
            assert isinstance(found, dict) == (how == "steps"), found
            assert how == "steps" or ("has moved" in found[0] and found[1] == 0)
    [want] = worlds.run(1, seeded_in_loop, how="steps", workers=3)
    for got in worlds.run(3, seeded_in_loop, how=how, workers=3):
        assert isinstance(got, dict) and (how != "steps" or largest_difference(got, want) <= 1e-10)


def bodies(found: list[str]) -> Iterator[Tensor]:
    """Yields two batches, and records what ``counted_loss`` finds in the loop."""
    for inputs in DATA.tensors[0][:4].split(2):
        found.append(counted_loss(draws=True))
        yield inputs


def counting(how: str, found: list[str]) -> None:
    """Loops whose loss depends on a count of bodies, or does not."""
    model, number, history = made(), 0.0, list[int]()
    numbers = itertools.count()
    drawing = np.random.default_rng(0)
    again = random.Random(0)
    match how:
        case "remainder":
            for at, inputs in enumerate(bodies(found)):
                loss = model(inputs).mean()
                if at % 8 == 7:
                    loss = loss * 2
                loss.backward()
        case "next":
            for inputs in bodies(found):
                weight = 2.0 if next(numbers) % 8 else 1.0
                loss = model(inputs).mean() * weight
                loss.backward()
        case "threshold":
            for inputs in bodies(found):
                number = number + 1
                late = number > 100
                loss = model(inputs).mean()
                if late:
                    loss = loss.square()
                loss.backward()
        case "length":
            for inputs in bodies(found):
                history.append(1)
                if len(history) // 50 % 2:
                    continue
                model(inputs).mean().backward()
        case "first skipped" | "none skipped":
            settings = SimpleNamespace(first=3 if how == "first skipped" else 0)
            for at, inputs in enumerate(bodies(found)):
                if at < settings.first:
                    continue
                model(inputs).mean().backward()
        case "resumed" | "not resumed":
            first, resumes = (5, "step_5") if how == "resumed" else (None, None)
            for at, inputs in enumerate(bodies(found)):
                if resumes and first is not None and at < first:
                    continue
                model(inputs).mean().backward()
        case "drawn":
            for inputs in bodies(found):
                loss = model(inputs).mean()
                if drawing.random() < 0.5:
                    loss = loss * 2
                loss.backward()
        case "drawn before":
            for inputs in bodies(found):
                share = float(drawing.random())
                late = share > 0.5
                (model(inputs).mean() * (2 if late else 1)).backward()
        case "drawn once":
            for inputs in bodies(found):
                if inputs is None:
                    number = drawing.random()
                model(inputs).mean().mul(2 if number > 0.5 else 1).backward()
        case "drawn for a log":
            for inputs in bodies(found):
                model(inputs).mean().backward()
                if drawing.random() < 0.1:
                    history.append(1)
        case "seeded":
            for inputs in bodies(found):
                again.seed(3)
                model(inputs).mean().mul(2 if again.random() > 0.5 else 1).backward()
        case "keyed":
            for inputs in bodies(found):
                model(inputs).mean().mul(2 if random.random() > 0.5 else 1).backward()
        case "logged":
            for at, inputs in enumerate(bodies(found)):
                out = model(inputs)
                loss = out.mean()
                loss.backward()
                if at % 50 == 0:
                    out = out.argmax(1)
                    loss = out.sum()
                if at % 2:
                    continue
                number += 1
        case "updates":
            for at, inputs in enumerate(bodies(found)):
                loss = model(inputs).mean() * (2 if number % 2 else 1)
                loss.backward()
                if at:
                    number += 1
        case "denominator":
            for inputs in bodies(found):
                mask_len = (inputs > 0).sum()
                mask_len = mask_len + 1
                mask_len += 1
                if mask_len > 3:
                    model(inputs).mean().backward()
        case "parts":
            for inputs in bodies(found):
                losses = []
                losses.append(model(inputs).mean())
                if len(losses) > 0:
                    losses[0].backward()


COUNTED = ["remainder", "next", "threshold", "length", "drawn", "drawn before", "first skipped", "resumed"]
UNCOUNTED = [
    "none skipped",
    "not resumed",
    "logged",
    "updates",
    "denominator",
    "parts",
    "drawn once",
    "drawn for a log",
    "seeded",
    "keyed",
]


@pytest.mark.parametrize("how", [*COUNTED, *UNCOUNTED])
def test_a_loss_by_a_count_of_bodies_is_found_before_it_differs(how: str) -> None:
    found = list[str]()
    counting(how, found)
    assert len(found) == 2 and all(bool(each) == (how in COUNTED) for each in found), found
    assert all("test_body_counters.py:" in each for each in found if each)


def test_an_average_after_every_second_update_is_right() -> None:
    want = worlds.alone(counted, how="updates", strategy="single", workers=1)
    for ranks, workers in ((1, 4), (2, 4), (3, 3)):
        for got in worlds.run(ranks, counted, how="updates", strategy="mirrored", workers=workers):
            assert isinstance(got, dict), got
            assert largest_difference(got, want) <= 1e-10
