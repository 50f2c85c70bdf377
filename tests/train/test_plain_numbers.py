"""Python numbers that each data rank computes from its own samples of earlier steps: refused once a loss has them."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import tutti
from tests import worlds
from tests.covering import in_turn
from tests.scripts.oracle import global_batches
from tests.train.test_cross_step_watch import Arrays, Loss, dataset
from tutti.errors import TuttiError


def entropies(model: nn.Module, batch: Any) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


class Floats(Loss):
    """Weights of two losses from the ratio of the last ones, as in dynamic weight averaging (arXiv 1803.10704)."""

    weights = 1.0, 1.0

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        scores = model(batch[0])
        one, other = functional.cross_entropy(scores, batch[1]), scores.square().mean()
        loss = self.weights[0] * one + self.weights[1] * other
        first, second = float(one.detach()), float(other.detach())
        self.weights = 2 * first / (first + second), 2 * second / (first + second)
        return loss


class Averages(Loss):
    """A loss divided by NumPy's mean of the last ones."""

    def __init__(self) -> None:
        self.last = deque([1.0], maxlen=10)

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        loss = entropies(model, batch).mean() / np.mean(self.last)
        self.last.append(loss.item())
        return loss


class Roots(Loss):
    """A temperature from the last loss by ``math``, given to PyTorch as a tensor."""

    temperature = 1.0

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        loss = functional.cross_entropy(model(batch[0]) / torch.tensor([self.temperature]), batch[1])
        self.temperature = math.sqrt(loss.item())
        return loss


class Threshold(Loss):
    """Samples easier than the mean of the step before, as in self-paced learning."""

    threshold = 9.0

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        losses = entropies(model, batch)
        loss = (losses * (losses.detach() <= self.threshold)).mean()
        self.threshold = losses.mean().tolist()
        return loss


class Initial(Loss):
    """A loss divided by its first value."""

    first = 0.0

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        loss = entropies(model, batch).mean()
        self.first = self.first or float(loss.detach())
        return loss / self.first


class Counts(Loss):
    """Class weights from counts in an array, that the script updates after the step."""

    def __init__(self) -> None:
        self.counts, self.targets = np.ones(3), torch.zeros(0)

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        self.targets = batch[1]
        weights = torch.tensor(1 / self.counts)
        return functional.cross_entropy(model(batch[0]), batch[1], weight=weights, reduction="none").mean()

    def after(self) -> None:
        self.counts += np.bincount(self.targets.numpy() * (1 + tutti.rank()) % 3, minlength=3)


class Decided(Loss):
    """A weight that halves after a step whose loss is larger than a bound of the script."""

    weight = 1.0

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        loss = entropies(model, batch).mean()
        self.last = loss.detach()
        return loss * self.weight

    def after(self) -> None:
        if self.last.item() > 1.1:
            self.weight = 0.5


class Usual(Loss):
    """A loss divided by a running mean that includes its own value."""

    mean = 1.0

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        loss = entropies(model, batch).mean()
        self.mean = 0.9 * self.mean + 0.1 * float(loss.detach())
        return loss / self.mean


class Meters(Loss):
    """A loss divided by NumPy's mean of the losses so far, in a dict of lists."""

    def __init__(self) -> None:
        self.meters: dict[str, list[float]] = {"loss": []}

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        loss = entropies(model, batch).mean()
        self.meters["loss"].append(loss.item())
        return loss / float(np.mean(self.meters["loss"]))


class Best(Loss):
    """A loss whose weight halves where it is larger than the smallest one so far."""

    best, weight = math.inf, 1.0

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        loss = entropies(model, batch).mean()
        # Without a condition, which the source would show.
        self.weight *= 0.5 ** float(np.greater(loss.item(), self.best))
        self.best = min(self.best, loss.item())
        return loss * self.weight


class Present(Loss):
    """Numbers of the present samples: counts, a mean of a mask, and a size that depends on values."""

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        losses = entropies(model, batch)
        many = len(losses[batch[0][:, 0] > 0]) / len(losses)
        return (losses * (1 + many) * (1 + math.sqrt(int((batch[1] == 1).sum()) + float(batch[0].mean()) ** 2))).mean()


class Drawn(Loss):
    """A factor that each rank draws by itself."""

    def __init__(self) -> None:
        self.draw = random.Random(tutti.rank())
        self.numpy = np.random.default_rng(tutti.rank())
        self.factor = self.draw.random()

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        return entropies(model, batch).mean() * self.factor

    def after(self) -> None:
        self.factor = self.draw.random()


class DrawnByNumpy(Drawn):
    """The same by NumPy."""

    def after(self) -> None:
        self.factor = self.numpy.random()


class DrawnByTorch(Drawn):
    """The same by PyTorch, in the step before."""

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        loss = super().__call__(model, batch)
        self.factor = torch.rand(()).item() + tutti.rank()
        return loss

    def after(self) -> None:
        pass


class Own(Loss):
    """A constant of each rank, and a size."""

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        return entropies(model, batch).sum() / len(batch[0]) * (1 + 0.1 * tutti.rank())


class Sized(Loss):
    """A sum by its number of samples, which ranks have other ones of."""

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        return entropies(model, batch).sum() * (1 / len(batch[0]))


class Scheduled(Loss):
    """Numbers that are the same on every rank: a count of steps, and the mean loss of the step before."""

    steps, mean = 0, 1.0

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        self.steps += 1
        return entropies(model, batch).mean() * (1 + 0.1 * self.steps) / self.mean

    def after(self) -> None:
        self.mean = float(tutti.allreduce(torch.tensor(float(self.steps))))


class Logged(Loss):
    """A loss that grows with the number of calls, and whose best values are for a log."""

    best, calls = math.inf, 0

    def __init__(self) -> None:
        self.meters: dict[str, float] = {}

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        self.calls += 1
        loss = entropies(model, batch).mean() * (1 + 0.1 * self.calls)
        self.meters["loss"] = 0.5 * self.meters.get("loss", 0.0) + loss.item()
        self.best = min(self.best, float(loss.detach()))
        (loss.detach() * self.best).exp()
        return loss


KEPT: dict[str, Callable[[], Loss]] = {
    each.__name__: each for each in (Floats, Averages, Roots, Threshold, Counts, Decided)
}
OF_SAMPLES: dict[str, Callable[[], Loss]] = {each.__name__: each for each in (Initial, Usual, Meters, Present)}
OF_EACH_RANK: dict[str, Callable[[], Loss]] = {each.__name__: each for each in (Drawn, DrawnByNumpy, DrawnByTorch, Own)}
ALIKE: dict[str, Callable[[], Loss]] = {each.__name__: each for each in (Sized, Scheduled, Logged)}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def train(kind: str, form: str, strategy: str, batch: int) -> Any:
    """Return the state after two epochs, or the error and the number of updates before it."""
    model, loss = network(), (KEPT | OF_SAMPLES | {"Best": Best} | OF_EACH_RANK | ALIKE)[kind]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given = (model, optimizer, dataset(), loss if form == "step" else None)
    run = tutti.prepare(*given, strategy=strategy, batch_size=batch, seed=0)
    try:
        for epoch in range(2):
            for each in run.epoch(epoch) if form == "step" else run.microbatches(epoch):
                if form == "step":
                    run.step(each)
                else:
                    optimizer.zero_grad()
                    run.backward(loss(model, each))
                    optimizer.step()
                loss.after()
    except TuttiError as error:
        return str(error), run.updates
    return {name: tensor.numpy().copy() for name, tensor in run.state().items()}


def plain(kind: str, batch: int) -> Arrays:
    model, loss = network(), ALIKE[kind]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        for each in global_batches(dataset(), batch, epoch):
            optimizer.zero_grad()
            loss(model, each).backward()
            optimizer.step()
            loss.after()
    return {name: tensor.numpy() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("form", ["step", "loop"])
@pytest.mark.parametrize("kind", KEPT)
def test_a_number_of_earlier_samples_is_refused_before_the_loss_has_it(kind: str, form: str) -> None:
    for ranks in (2, 3):
        for found in worlds.run(ranks, train, strategy="mirrored", kind=kind, form=form, batch=12):
            assert isinstance(found, tuple), found
            said, updates = found
            assert "each rank has kept from its own samples" in said, said
            assert "test_plain_numbers.py:" in said or (form == "step" and f", {kind}." in said), said
            # Of a condition the first step may decide alike on all ranks.
            assert updates == 1 or kind == "Decided"


@pytest.mark.parametrize(("kind", "form"), in_turn(list(OF_SAMPLES), ["step", "loop"]))
def test_a_number_of_the_present_samples_is_refused_in_the_first_step(kind: str, form: str) -> None:
    for ranks in (2, 3):
        for said, updates in worlds.run(ranks, train, strategy="mirrored", kind=kind, form=form, batch=12):
            assert "from all samples of one micro-batch" in said and "test_plain_numbers.py:" in said, said
            assert updates == 0


def test_a_factor_that_a_loss_function_keeps_beside_the_present_samples_is_refused() -> None:
    for ranks in (2, 3):
        for said, updates in worlds.run(ranks, train, strategy="mirrored", kind="Best", form="step", batch=12):
            assert "each rank has kept from its own samples" in said or "from all samples" in said, said
            assert updates == 1


@pytest.mark.parametrize("strategy", ["sharded:stage=1", "sharded", "parameter_server"])
def test_the_same_under_other_strategies(strategy: str) -> None:
    for found in worlds.run(2, train, strategy=strategy, kind="Floats", form="loop", batch=12):
        assert isinstance(found, tuple) and "each rank has kept from its own samples" in found[0], found


@pytest.mark.parametrize(("kind", "form"), in_turn(list(OF_EACH_RANK), ["loop", "step"]))
def test_draws_and_constants_of_a_rank_are_no_kept_numbers(kind: str, form: str) -> None:
    for ranks, batch in ((2, 12), (3, 13)):
        for found in worlds.run(ranks, train, strategy="mirrored", kind=kind, form=form, batch=batch):
            assert isinstance(found, dict), found


@pytest.mark.parametrize(("kind", "form"), in_turn(list(ALIKE), ["step", "loop"]))
def test_numbers_that_ranks_have_alike_or_no_loss_has_are_right(kind: str, form: str) -> None:
    want = worlds.alone(plain, kind=kind, batch=12)
    for ranks in (2, 3):
        for got in worlds.run(ranks, train, strategy="mirrored", kind=kind, form=form, batch=12):
            assert isinstance(got, dict), got
            assert all(abs(got[name] - value).max() <= 1e-12 for name, value in want.items())


@pytest.mark.parametrize("strategy", ["sharded:stage=1", "sharded", "central_storage", "parameter_server", "mirrored"])
def test_numbers_that_follow_from_the_shapes_of_a_rank_are_right(strategy: str) -> None:
    want = worlds.alone(plain, kind="Sized", batch=13)
    for got in worlds.run(2, train, strategy=strategy, kind="Sized", form="loop", batch=13):
        assert isinstance(got, dict), got
        assert all(abs(got[name] - value).max() <= 1e-12 for name, value in want.items())
