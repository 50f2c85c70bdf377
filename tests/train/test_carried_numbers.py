"""Python numbers that a script keeps between micro-batches stay with their logical worker, or are refused."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from threading import Event, Thread
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import tutti
from tests import worlds
from tests.train.test_carried_values import dataset, network, trained_with
from tutti.errors import UsageError
from tutti.train.script_checks.followed_numbers import FollowedNumbers

WORKERS = 4


class Usual:
    """A loss divided by a running mean of the losses so far."""

    def __init__(self) -> None:
        self.usual = 1.0

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        loss = functional.cross_entropy(outputs, targets)
        self.usual = 0.9 * self.usual + 0.1 * loss.item()
        return loss / self.usual


class Window:
    """A loss less the mean reward of the last batches, as in policy gradients."""

    def __init__(self) -> None:
        self.rewards: deque[float] = deque(maxlen=5)

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        chosen = outputs.log_softmax(1).gather(1, targets[:, None]).squeeze(1)
        self.rewards.append(targets.double().mean().item())
        return -(chosen * (targets - sum(self.rewards) / len(self.rewards))).mean()


class Initial:
    """Two losses, each divided by its first value, as in GradNorm (arXiv 1711.02257)."""

    def __init__(self) -> None:
        self.first: list[float] = []

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        losses = functional.cross_entropy(outputs, targets), outputs.square().mean()
        self.first = self.first or torch.stack(losses).tolist()
        return torch.stack([loss / first for loss, first in zip(losses, self.first, strict=True)]).sum()


class Counted:
    """A loss weighted by the labels so far, counted with ints."""

    def __init__(self) -> None:
        self.seen = 0
        self.ones: float = 0

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.seen += len(targets)
        self.ones += (targets == 1).sum().item()
        return functional.cross_entropy(outputs, targets) * (1 + self.ones / self.seen)


class Averaged:
    """A loss scaled by NumPy's mean of the losses so far."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        loss = functional.cross_entropy(outputs, targets)
        self.losses.append(float(loss.detach()))
        return loss * np.mean(self.losses).item()


class Classes:
    """A loss weighted by counts of the classes, kept in an array."""

    def __init__(self) -> None:
        self.counts = np.ones(3)

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        for target in targets.tolist():
            self.counts[target] += 1
        return functional.cross_entropy(outputs, targets, weight=torch.from_numpy(1 / self.counts))


class Skipped:
    """A loss that ignores samples harder than usual."""

    def __init__(self) -> None:
        self.usual = float("inf")

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        losses = functional.cross_entropy(outputs, targets, reduction="none")
        kept = losses * torch.tensor([loss.item() <= self.usual for loss in losses])
        self.usual = 0.8 * losses.mean().item()
        return kept.mean()


class Annealed:
    """A loss with a term whose weight grows with each call."""

    calls = 0

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.calls += 1
        return functional.cross_entropy(outputs, targets) + self.calls / 10 * outputs.square().mean()


class Metered:
    """A plain loss, whose mean, best value and counts are for a log, and whose largest length is a size."""

    def __init__(self) -> None:
        self.total, self.calls, self.best, self.longest = 0.0, 0, float("inf"), 0
        self.history: list[float] = []

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        loss = functional.cross_entropy(outputs, targets)
        self.total, self.calls = self.total + loss.item(), self.calls + 1
        self.history.append(round(self.total / self.calls, 4))
        self.best = min(self.best, loss.item())
        self.longest = max(self.longest, int(targets.max().item()) + 3)
        return loss + 0 * functional.pad(outputs, (0, self.longest)).sum()


FOLLOWED: dict[str, Callable[[], Any]] = {
    "a running mean": Usual,
    "a deque": Window,
    "first losses": Initial,
    "counted labels": Counted,
}
UNFOLLOWED: dict[str, Callable[[], Any]] = {
    "a mean by NumPy": Averaged,
    "class counts": Classes,
    "a threshold": Skipped,
    "a schedule": Annealed,
}
HARMLESS: dict[str, Callable[[], Any]] = {"a meter": Metered}
KINDS = FOLLOWED | UNFOLLOWED | HARMLESS
Arrays = dict[str, Any]


def train(strategy: str, kind: str, form: str, workers: int = WORKERS) -> Any:
    return trained_with(KINDS[kind](), strategy, form, workers)


def equal(got: Arrays, want: Arrays) -> bool:
    return all(abs(got[name] - value).max() <= 1e-12 for name, value in want.items())


@pytest.mark.parametrize("form", ["step", "loop"])
@pytest.mark.parametrize("kind", FOLLOWED)
def test_numbers_that_pass_between_workers_are_refused_before_the_first_update(kind: str, form: str) -> None:
    for said in worlds.run(2, train, strategy="mirrored", kind=kind, form=form):
        assert "depends on samples of another one" in said and "test_carried_numbers.py:" in said
        assert "as many workers as data ranks (2)" in said


@pytest.mark.parametrize("workers", [4, 5])
@pytest.mark.parametrize("kind", UNFOLLOWED)
def test_other_python_state_that_passes_between_workers_is_refused(kind: str, workers: int) -> None:
    for said in worlds.run(2, train, strategy="mirrored", kind=kind, form="step", workers=workers):
        assert "depends on what another one has left in" in said or "from all samples of one micro-batch" in said


@pytest.mark.parametrize("form", ["step", "loop"])
@pytest.mark.parametrize("kind", HARMLESS)
def test_numbers_of_which_no_gradient_depends_are_right(kind: str, form: str) -> None:
    [want] = worlds.run(1, train, strategy="single", kind=kind, form=form)
    for got in worlds.run(2, train, strategy="mirrored", kind=kind, form=form):
        assert equal(got, want)


class Bare:
    """An object of the script."""

    loss: float


def kept_in_a_file() -> Any:
    """Save and load what a script has kept of its first losses, as ``torch.save`` and ``torch.load`` do by default."""
    torch.manual_seed(0)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = tutti.prepare(model, optimizer, dataset(), workers=WORKERS, batch_size=12, seed=0)
    losses, steps, last, best, by_step = [], deque[Any](maxlen=40), Bare(), {}, defaultdict[int, float](float)
    for step, (inputs, targets) in enumerate(run.microbatches(0)):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(inputs), targets)
        run.backward(loss)
        optimizer.step()
        losses.append(loss.item())
        steps.append((step, loss.item() / 2))
        last.loss = loss.item()
        best[step] = min(losses)
        by_step[step] = loss.item()
    file = io.BytesIO()
    torch.save({"losses": losses, "steps": list(steps), "last": last.loss, "best": best}, file)
    file.seek(0)
    found = torch.load(file)
    return found, {
        type(each) for each in (*losses, *(half for _, half in steps), *best.values(), *by_step.values(), last.loss)
    }


def test_numbers_that_a_script_keeps_are_plain_once_they_are_not_followed() -> None:
    [(found, kinds)] = worlds.run(1, kept_in_a_file)
    assert kinds == {float} and len(found["losses"]) == 8


def kept_over_epochs() -> int:
    """Train with the losses of the samples' last epoch as a part of the loss that counts nothing."""
    torch.manual_seed(0)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.arange(len(dataset())), *dataset().tensors)
    run = tutti.prepare(model, optimizer, data, workers=3, batch_size=len(data) // 3, seed=0)
    kept = defaultdict[int, float](lambda: 1.0)
    for epoch in range(2):
        for numbers, inputs, targets in run.microbatches(epoch):
            optimizer.zero_grad()
            losses = functional.cross_entropy(model(inputs), targets, reduction="none")
            before = torch.tensor([kept[number] for number in numbers.tolist()], dtype=losses.dtype)
            run.backward((losses + (before > 9) * losses).mean())
            optimizer.step()
            kept.update(zip(numbers.tolist(), losses.tolist(), strict=True))
    return run.updates


def test_numbers_that_are_followed_from_earlier_steps_are_no_worker_s_at_the_turn_of_an_epoch() -> None:
    assert worlds.run(2, kept_over_epochs) == [6, 6]


def saved_while_followed() -> list[Any]:
    """Save losses in bodies and at the ends of epochs, and return what ``torch.load`` finds beside what was saved."""
    torch.manual_seed(0)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = tutti.prepare(model, optimizer, dataset(), workers=WORKERS, batch_size=12, seed=0)
    losses, found = list[float](), list[Any]()

    def save(**values: Any) -> None:
        file = io.BytesIO()
        torch.save({"model": model.state_dict(), **values}, file)
        file.seek(0)
        read = torch.load(file)
        found.append(({name: read[name] for name in values}, values))

    for epoch in range(2):
        for inputs, targets in run.microbatches(epoch):
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(inputs), targets)
            run.backward(loss)
            optimizer.step()
            losses.append(loss.item())
            if run.stepped:
                save(loss=loss.item(), best=(epoch, min(losses)), log=[{"mean": sum(losses) / len(losses)}])
        save(loss=loss.item(), log=list(losses))
    return [(read, {name: copy.deepcopy(each) for name, each in values.items()}) for read, values in found]


def test_a_file_saved_in_a_step_that_is_watched_has_plain_numbers() -> None:
    [found] = worlds.run(1, saved_while_followed)
    assert len(found) > 4 and all(read == values for read, values in found)
    assert {type(read["loss"]) for read, _ in found} == {float}


def saved_without_checks() -> tuple[bool, set[type]]:
    before = torch.save
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TUTTI_DIAGNOSTICS", "off")
        found = saved_while_followed()
    kinds = {type(each) for _, values in found if "best" not in values for each in values["log"]}
    return torch.save is before, kinds


def test_the_switch_of_the_checks_leaves_numbers_and_torch_save_alone() -> None:
    assert worlds.run(1, saved_without_checks) == [(True, {float})]


class Slow:
    """An object that keeps a number, and whose attributes take long to find."""

    __slots__ = ("meanwhile", "number")

    def __init__(self, number: float, meanwhile: Callable[[], None]) -> None:
        self.number, self.meanwhile = number, meanwhile

    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        self.meanwhile()
        return {}


@pytest.mark.parametrize("count", [3, 300])
def test_numbers_become_plain_while_another_thread_builds_a_tuple_of_them(count: int) -> None:
    """CPython resizes no tuple to which anything else refers: see ``holders_of``."""
    numbers = FollowedNumbers(lambda: True)
    made = [numbers.follow(float(each), {}) for each in range(count)]
    kept: dict[str, Any] = {"list": list(made), "deep": [((made[0], "a"),)], "queue": deque(made)}
    begun, resumed, built = Event(), Event(), list[Any]()

    def values() -> Iterator[float]:
        yield from made[:3]
        begun.set()
        resumed.wait(20)
        yield from range(40)

    def build() -> None:
        try:
            built.append(tuple(values()))
        except SystemError as error:
            built.append(error)

    thread = Thread(target=build)
    thread.start()
    begun.wait(20)

    def meanwhile() -> None:
        resumed.set()
        thread.join(20)

    slow = Slow(made[0], meanwhile)
    numbers.make_plain()
    meanwhile()
    assert isinstance(built[0], tuple) and len(built[0]) == 43 and slow.number == 0
    assert {type(each) for each in (*kept["list"], *kept["queue"], kept["deep"][0][0][0])} == {float}


_SCHEDULE = {"calls": 0}


class Scheduled(nn.Module):
    """A model whose forward counts its calls in a global variable, as a warm-up by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()

    def forward(self, inputs: Tensor) -> Tensor:
        _SCHEDULE["calls"] += self.training
        found: Tensor = self.inner(inputs)
        return found


def counted_calls() -> int:
    """Return how many forwards in training a model has counted whose loss keeps a log, on a rank of several workers."""
    _SCHEDULE["calls"] = 0
    torch.manual_seed(0)
    model, log = Scheduled(), list[float]()

    def loss(model: Any, batch: Any) -> Tensor:
        found = functional.cross_entropy(model(batch[0]), batch[1])
        log.append(found.item())
        return found

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = tutti.prepare(model, optimizer, dataset(), loss, workers=WORKERS, batch_size=12, seed=0)
    before, steps = _SCHEDULE["calls"], [run.step(batch) for batch in run.epoch(0)]
    assert len(log) == WORKERS * len(steps)
    return _SCHEDULE["calls"] - before - WORKERS * len(steps)


def test_trials_of_a_loss_leave_no_trace_in_what_the_model_s_forward_counts() -> None:
    assert worlds.run(1, counted_calls) == [0]


def kept_longer_than_its_run() -> Any:
    """Make one update, and keep a number of its first micro-batch; return it with a reference to the model."""

    def train_once() -> tuple[float, weakref.ref[Any]]:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = tutti.prepare(model, optimizer, dataset(), workers=WORKERS, batch_size=12, seed=0)
        first: Any = None
        for inputs, targets in run.microbatches(0):
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(inputs), targets)
            first = loss.item() if first is None else first
            run.backward(loss)
            optimizer.step()
            if run.stepped:
                break
        return first, weakref.ref(model)

    number, model = train_once()
    gc.collect()
    return float(number), model() is None


def test_a_number_that_a_script_keeps_does_not_keep_the_run() -> None:
    [(number, freed)] = worlds.run(1, kept_longer_than_its_run)
    assert number > 0 and freed


def hooked(is_read: bool, workers: int) -> Any:
    """A forward hook that keeps a running mean of activations in a dict, and divides by it or does not."""
    torch.manual_seed(0)
    model, kept = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)).double(), {"mean": 1.0}

    def hook(module: nn.Module, inputs: Any, output: Tensor) -> Any:
        before = kept["mean"]
        kept["mean"] = 0.9 * before + 0.1 * float(output.detach().abs().mean())
        return output / before if is_read else None

    model[0].register_forward_hook(hook)
    samples = torch.randn(12, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    run = tutti.prepare(
        model, "sgd:lr=0.1", samples, lambda net, batch: net(batch).square().mean(), workers=workers, batch_size=6
    )
    try:
        for batch in run.epoch(0):
            run.step(batch)
    except UsageError as error:
        return str(error), run.updates
    return kept["mean"]


def test_a_number_that_a_hook_of_the_model_keeps_is_refused_where_workers_share_it() -> None:
    [(said, updates)] = worlds.run(1, hooked, is_read=True, workers=2)
    assert "from all samples of one micro-batch" in said and updates == 0
    for is_read, workers in ((True, 1), (False, 2)):
        assert all(isinstance(found, float) for found in worlds.run(1, hooked, is_read=is_read, workers=workers))
    # The trials of losses leave no trace in what hooks keep.
    [once] = worlds.run(1, hooked, is_read=False, workers=1)
    assert once != 1.0
