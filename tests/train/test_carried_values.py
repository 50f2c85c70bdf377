"""Values that a script keeps from one micro-batch to the next stay with their logical worker, or the run is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import tutti
from tests import worlds
from tests.covering import in_turn, table
from tutti.errors import TuttiError

WORKERS = 3
FORMS = ["step", "loop"]


def dataset() -> TensorDataset:
    draw = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(24, 4, generator=draw, dtype=torch.float64), torch.arange(24) % 3)


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)).double()


class Centred(nn.Module):
    """A loss around a centre that each call moves."""

    centre: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(3, dtype=torch.float64))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        loss = functional.cross_entropy(outputs - self.centre, targets)
        with torch.no_grad():
            self.centre = 0.9 * self.centre + 0.1 * outputs.mean(0)
        return loss


class Moved(Centred):
    """The same loss, whose centre is written in place."""

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        loss = functional.cross_entropy(outputs - self.centre, targets)
        self.centre.mul_(0.9).add_(outputs.detach().mean(0), alpha=0.1)
        return loss


class Bank:
    """A loss with a memory of embeddings of earlier batches, as in cross-batch memory (arXiv 1912.06798)."""

    def __init__(self) -> None:
        self.outputs, self.targets = torch.zeros(0, 3, dtype=torch.float64), torch.zeros(0, dtype=torch.long)

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.outputs = torch.cat([self.outputs, outputs.detach()])[-16:]
        self.targets = torch.cat([self.targets, targets])[-16:]
        alike = (targets[:, None] == self.targets).double()
        return functional.binary_cross_entropy_with_logits(outputs @ self.outputs.T, alike)


class Baseline:
    """A loss less a running mean of numbers of the data, as rewards in policy gradients."""

    def __init__(self) -> None:
        self.mean = torch.zeros((), dtype=torch.float64)

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.mean.mul_(0.9).add_(targets.double().mean(), alpha=0.1)
        chosen = outputs.log_softmax(1).gather(1, targets[:, None]).squeeze(1)
        return -(chosen * (targets - self.mean)).mean()


class Logged:
    """A plain loss, whose running mean is for a log."""

    def __init__(self) -> None:
        self.mean = torch.zeros((), dtype=torch.float64)

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        loss = functional.cross_entropy(outputs, targets)
        self.mean = 0.9 * self.mean + 0.1 * loss.detach()
        return loss


class Taught:
    """A loss towards a teacher in training mode, whose norm layers count on."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        averages = nn.InstanceNorm1d(4, track_running_stats=True)
        layers = nn.Linear(3, 8), nn.Unflatten(1, (4, 2)), averages, nn.Flatten(), nn.Linear(8, 3)
        self.teacher = nn.Sequential(network(), *layers).double().requires_grad_(False)

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return functional.mse_loss(outputs, self.teacher(outputs.new_ones(len(outputs), 4).mul(targets[:, None])))


class Cleared:
    """A loss whose workspace is cleared in each call, and a mask that is made once."""

    def __init__(self) -> None:
        self.sums = torch.zeros(3, dtype=torch.float64)
        self.mask: Tensor | None = None

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if self.mask is None:
            self.mask = torch.ones_like(outputs[0]) * torch.ones(3).to(outputs)
        self.sums.zero_()
        self.sums += outputs.detach().sum(0)
        return functional.cross_entropy(outputs * self.mask + 0 * self.sums, targets)


CARRYING: dict[str, Callable[[], Any]] = {
    "a loss module": Centred,
    "a loss module, in place": Moved,
    "a bank": Bank,
    "a baseline": Baseline,
}
HARMLESS: dict[str, Callable[[], Any]] = {"a log": Logged, "a teacher": Taught, "a workspace": Cleared}


def train(strategy: str, kind: str, form: str, workers: int = WORKERS, compiled: str = "") -> Any:
    return trained_with((CARRYING | HARMLESS)[kind](), strategy, form, workers, compiled)


def trained_with(criterion: Any, strategy: str, form: str, workers: int, compiled: str = "") -> Any:
    """Return the state after an epoch, or the error that has ended it before the first update."""
    torch.manual_seed(0)
    model = network()
    if compiled == "script":
        model.compile(backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(model: Any, batch: Any) -> Tensor:
        found: Tensor = criterion(model(batch[0]), batch[1])
        return found

    before = model[0].weight.detach().clone()
    run = tutti.prepare(
        *(model, optimizer, dataset(), loss if form == "step" else None),
        strategy=strategy, workers=workers, batch_size=12, seed=0,
        compile="default:backend=eager" if compiled == "tutti" else None,
    )  # fmt: skip
    try:
        if form == "step":
            for batch in run.epoch(0):
                run.step(batch)
        else:
            for inputs, targets in run.microbatches(0):
                optimizer.zero_grad()
                run.backward(criterion(model(inputs), targets))
                optimizer.step()
    except TuttiError as error:
        assert strategy not in ("single", "mirrored") or torch.equal(model[0].weight, before)
        return str(error)
    return {name: tensor.numpy().copy() for name, tensor in run.state().items()}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", CARRYING)
def test_values_that_pass_between_workers_are_refused_before_the_first_update(kind: str, form: str) -> None:
    for strategy in ("single", "sharded:stage=1"):
        [said] = worlds.run(1, train, strategy=strategy, kind=kind, form=form)
        assert "depends on samples of another one" in said and "test_carried_values.py:" in said


@pytest.mark.parametrize(("kind", "form", "strategy"), table(list(CARRYING), FORMS, ["sharded", "sharded:stage=2"]))
def test_they_are_refused_with_sharded_weights(kind: str, form: str, strategy: str) -> None:
    for said in worlds.run(2, train, strategy=strategy, kind=kind, form=form, workers=4):
        assert "depends on samples of another one" in said and "test_carried_values.py:" in said


@pytest.mark.parametrize(
    ("kind", "workers", "form", "strategy"), table(list(HARMLESS), [4, 5], FORMS, ["sharded", "sharded:stage=2"])
)
def test_values_of_which_no_gradient_depends_are_right_with_sharded_weights(
    kind: str, workers: int, form: str, strategy: str
) -> None:
    want = worlds.alone(train, strategy="single", kind=kind, form=form, workers=workers)
    for got in worlds.run(2, train, strategy=strategy, kind=kind, form=form, workers=workers):
        assert all(abs(got[name] - value).max() <= 1e-12 for name, value in want.items())


@pytest.mark.parametrize(
    ("kind", "ranks", "form", "strategy"), table(list(CARRYING), [2, 3], FORMS, ["tensor:least=1", "pipeline"])
)
def test_they_are_refused_with_split_layers_and_stages(kind: str, ranks: int, form: str, strategy: str) -> None:
    found = worlds.run(ranks, train, strategy=strategy, kind=kind, form=form, workers=4)
    # In run.step a loss is computed on the last stage's rank.
    for said in found[-1:] if (strategy, form) == ("pipeline", "step") else found:
        assert "depends on samples of another one" in said and "test_carried_values.py:" in said
        assert "as many workers as data ranks (1)" in said
    assert all(isinstance(said, str) for said in found)
    worlds.forget(ranks)


@pytest.mark.parametrize(
    ("kind", "form", "strategy", "ranks"), table(list(HARMLESS), FORMS, ["tensor:least=1", "pipeline"], [2, 3])
)
def test_values_of_which_no_gradient_depends_are_right_with_split_layers_and_stages(
    kind: str, form: str, strategy: str, ranks: int
) -> None:
    want = worlds.alone(train, strategy="single", kind=kind, form=form, workers=4)
    for got in worlds.run(ranks, train, strategy=strategy, kind=kind, form=form, workers=4):
        assert all(abs(got[name] - value).max() <= 1e-12 for name, value in want.items())


@pytest.mark.parametrize(("compiled", "kind"), in_turn(["script", "tutti"], list(HARMLESS), each=2))
def test_a_loss_around_a_compiled_model_is_right(compiled: str, kind: str) -> None:
    want = worlds.alone(train, strategy="single", kind=kind, form="loop", workers=4)
    for got in worlds.run(2, train, strategy="mirrored", kind=kind, form="loop", workers=4, compiled=compiled):
        assert all(abs(got[name] - value).max() <= 1e-12 for name, value in want.items())


def test_they_are_refused_on_several_ranks() -> None:
    for said in worlds.run(2, train, strategy="mirrored", kind="a bank", form="step", workers=4):
        assert "as many workers as data ranks (2)" in said


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", HARMLESS)
def test_values_of_which_no_gradient_depends_are_right(kind: str, form: str) -> None:
    [want] = worlds.run(1, train, strategy="single", kind=kind, form=form)
    for got in worlds.run(3, train, strategy="mirrored", kind=kind, form=form):
        assert all(abs(got[name] - value).max() <= 1e-12 for name, value in want.items())


def together(strategy: str, kind: type[Centred]) -> Any:
    """The way out: the loss module is prepared with the model."""
    torch.manual_seed(0)
    model, criterion = network(), kind()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = tutti.prepare(
        *([model, criterion], optimizer, dataset(), lambda both, batch: both[1](both[0](batch[0]), batch[1])),
        strategy=strategy, workers=WORKERS, batch_size=12, seed=0,
    )  # fmt: skip
    for batch in run.epoch(0):
        run.step(batch)
    return {name: tensor.numpy().copy() for name, tensor in run.state().items()}


@pytest.mark.parametrize("kind", [Centred, Moved])
def test_a_loss_module_among_the_models_has_its_values_for_each_worker(kind: type[Centred]) -> None:
    [want] = worlds.run(1, together, strategy="single", kind=kind)
    for got in worlds.run(3, together, strategy="mirrored", kind=kind):
        assert all(abs(got[name] - value).max() <= 1e-12 for name, value in want.items())
