"""Penalties on the weights in a loss: equal to plain PyTorch under every strategy that takes them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import tutti
from tests import worlds
from tests.contract.table import largest_difference
from tests.covering import in_turn
from tutti.errors import MismatchError, UsageError

SIZE, BATCH = 16, 7
PLACES = (("sharded:stage=2", 2), ("sharded:units=Linear", 3), ("tensor:least=1", 2))
FORMS = ("before", "after", "loop", "loop, before")
Penalty = Callable[[nn.Module, list[Tensor]], Any]


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 7, bias=False), nn.Tanh(), nn.Linear(7, 3)
    ).double()  # fmt: skip


def dataset() -> TensorDataset:
    draw = torch.Generator().manual_seed(1)
    inputs = torch.randn(SIZE, 5, generator=draw, dtype=torch.float64)
    return TensorDataset(inputs, torch.randint(0, 3, (SIZE,), generator=draw))


def lasso(model: nn.Module, start: list[Tensor]) -> Any:
    return 1e-2 * sum(p.abs().sum() for p in model.parameters())


def ridge(model: nn.Module, start: list[Tensor]) -> Any:
    return 0.05 * sum((p**2).sum() for p in model.parameters())


def norms(model: nn.Module, start: list[Tensor]) -> Any:
    return 0.05 * sum(torch.norm(p) for p in model.parameters() if p.requires_grad)


def elastic(model: nn.Module, start: list[Tensor]) -> Any:
    """Proximal: towards the weights from the beginning, with an importance of each weight (EWC)."""
    terms = [((0.5 + p0.abs()) * (p - p0) ** 2).sum() for p, p0 in zip(model.parameters(), start, strict=True)]
    return 0.1 * torch.stack(terms).sum()


def orthogonal(model: Any, start: list[Tensor]) -> Any:
    weight = model[2].weight
    return 0.1 * (weight.T @ weight - torch.eye(8, dtype=weight.dtype)).square().sum()


def group_lasso(model: Any, start: list[Tensor]) -> Any:
    return 0.05 * model[0].weight.norm(dim=1).sum() + 0.05 * model[4].weight[:2].norm(dim=0).sum()


def of_one_vector(model: nn.Module, start: list[Tensor]) -> Any:
    return 0.05 * nn.utils.parameters_to_vector(model.parameters()).square().sum()


def of_one_twice(model: Any, start: list[Tensor]) -> Any:
    weight = model[0].weight
    return 0.05 * (weight * weight).sum() + 0.01 * weight.abs().sum() + 0.1 * model[0].bias.square().mean()


PENALTIES: tuple[Penalty, ...] = (
    lasso, ridge, norms, elastic, orthogonal, group_lasso, of_one_vector, of_one_twice,
)  # fmt: skip


def plain(penalty: Penalty, clip: float | None, frozen: bool, epochs: int) -> tuple[dict[str, Any], list[float]]:
    """Epochs by hand, of three batches, and the loss of the evaluation."""
    model, data = build(), dataset()
    model[0].weight.requires_grad_(not frozen)
    start = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    for _ in range(epochs):
        for first in range(0, SIZE, BATCH):
            inputs, classes = data[first : first + BATCH]
            optimizer.zero_grad()
            (functional.cross_entropy(model(inputs), classes) + penalty(model, start)).backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
    with torch.no_grad():
        inputs, classes = data[:]
        loss = functional.cross_entropy(model(inputs), classes) + penalty(model, start)
    return {name: value.numpy() for name, value in model.state_dict().items()}, [float(loss)]


def train(
    strategy: str,
    penalty: Penalty,
    form: str,
    clip: float | None = None,
    workers: int = 4,
    frozen: bool = False,
    late: bool = False,
    epochs: int = 1,
) -> Any:
    """The same epochs by tutti, or its refusal; ``form``: where the penalty is computed, ``late``: not in
    the first step."""
    model = build()
    model[0].weight.requires_grad_(not frozen)
    start = [p.detach().clone() for p in model.parameters()]

    def penalised() -> Any:
        return 0.0 if late and not run.updates else penalty(model, start)

    def loss(called: Any, batch: Any) -> Tensor:
        before = penalised() if form == "before" else None
        error = functional.cross_entropy(called(batch[0]), batch[1])
        return error + (penalised() if before is None else before)  # type: ignore[no-any-return]

    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    run = tutti.prepare(
        model, optimizer, dataset(), None if "loop" in form else loss,
        strategy=strategy, batch_size=BATCH, workers=workers, precision="fp64", shuffle=False, clip=clip,
    )  # fmt: skip
    try:
        for epoch in range(epochs):
            if "loop" not in form:
                for batch in run.epoch(epoch):
                    run.step(batch)
                continue
            for inputs, classes in run.microbatches(epoch):
                optimizer.zero_grad()
                before = penalised() if form == "loop, before" else None
                error = functional.cross_entropy(model(inputs), classes)
                run.backward(error + (penalised() if before is None else before))
                optimizer.step()
        losses = [] if "loop" in form else [run.evaluate(dataset()).loss]
    except (UsageError, MismatchError) as error:
        return run.updates, str(error)
    return {name: value.numpy().copy() for name, value in run.state().items()}, losses


def named(given: Any) -> str:
    """An id of a test: a form, a strategy, or a penalty with a strategy."""
    if isinstance(given, str):
        return given
    return "-".join(getattr(each, "__name__", None) or str(each) for each in given)


def check(
    penalty: Penalty,
    form: str,
    place: tuple[str, int],
    clip: float | None = None,
    frozen: bool = False,
    epochs: int = 1,
) -> None:
    strategy, devices = place
    want, loss = plain(penalty, clip, frozen, epochs)
    given = {"strategy": strategy, "penalty": penalty, "form": form, "clip": clip, "frozen": frozen, "epochs": epochs}
    for got, losses in worlds.run(devices, train, **given):
        assert not isinstance(losses, str), losses
        assert largest_difference(got, want) <= 1e-10
        assert losses == [] or losses == pytest.approx(loss, rel=1e-10)


def cases() -> list[Any]:
    """Each penalty at each place, with the forms in turn; at the first, which reads as the second, one of each form."""
    seldom = {(penalty, PLACES[0]) for penalty in PENALTIES[len(FORMS) :]}
    rows = in_turn(list(product(PENALTIES, PLACES)), FORMS)
    return [pytest.param(*r, marks=pytest.mark.full) if type(r) is tuple and r[0] in seldom else r for r in rows]


@pytest.mark.parametrize(("case", "form"), cases(), ids=named)
def test_penalties_on_weights_equal_plain_pytorch(case: tuple[Penalty, tuple[str, int]], form: str) -> None:
    penalty, place = case
    check(penalty, form, place, clip=0.5 if PENALTIES.index(penalty) % 2 else None)


def on_one_rank(model: nn.Module, start: list[Tensor]) -> Any:
    return ridge(model, start) if tutti.rank() == 0 else 0.0


def added_on_one_rank(model: nn.Module, start: list[Tensor]) -> Any:
    found = ridge(model, start)
    return found if tutti.rank() == 0 else found.detach()


def by_full_tensor(model: Any, start: list[Tensor]) -> Any:
    weight = model[0].weight
    whole = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
    return 0.05 * whole.square().sum()


def of_hooked(model: Any, start: list[Tensor]) -> Any:
    weight = model[0].weight
    if not hasattr(model, "hooked"):
        model.hooked = weight.register_hook(lambda gradient: 0.5 * gradient)
    return 0.05 * weight.square().sum()


SEEN: list[Any] = []


def of_an_old_view(model: Any, start: list[Tensor]) -> Any:
    if not SEEN or SEEN[-1][0] is not model:
        SEEN.append((model, model[0].weight.view(-1)))
    return 0.05 * SEEN[-1][1].square().sum()


@pytest.mark.parametrize("form", ["before", "loop, before"])
@pytest.mark.parametrize(
    ("penalty", "says", "updates"),
    [
        (on_one_rank, "", 0),
        (added_on_one_rank, "", 0),
        (by_full_tensor, "has a gradient by the rows of 0.weight", 0),
        (of_hooked, "which has a hook on its gradient", 0),
        (of_an_old_view, "view of the model from before the model changed", 1),
    ],
)
def test_penalties_that_cannot_be_right_are_refused(penalty: Penalty, says: str, updates: int, form: str) -> None:
    for before, said in worlds.run(2, train, strategy="sharded", penalty=penalty, form=form, workers=2):
        assert says in said and before == updates, said
    worlds.forget(2)


def no_gradient(model: nn.Module, start: list[Tensor]) -> Any:
    with torch.no_grad():
        return elastic(model, start) + lasso(model, start)


@pytest.mark.parametrize(("form", "place"), in_turn(FORMS, PLACES), ids=named)
def test_a_penalty_without_a_gradient_changes_the_loss_alone(form: str, place: tuple[str, int]) -> None:
    check(no_gradient, form, place)


@pytest.mark.parametrize(("form", "place"), in_turn(FORMS, PLACES[::-1]), ids=named)
def test_a_penalty_on_frozen_parameters_counts_in_the_loss(form: str, place: tuple[str, int]) -> None:
    """In the sixth step, too, in which the script's calls are no longer followed."""
    check(elastic, form, place, frozen=True, epochs=2)


@pytest.mark.parametrize("form", FORMS)
def test_a_penalty_that_begins_late_is_right_or_refused(form: str) -> None:
    [(want, _)] = worlds.run(1, train, strategy="single", penalty=ridge, form=form, late=True)
    for got, losses in worlds.run(2, train, strategy="sharded:units=Linear", penalty=ridge, form=form, late=True):
        if "loop" in form:
            assert largest_difference(got, want) <= 1e-10
        else:
            assert got == 1 and "from the first step on" in losses
    worlds.forget(2)
