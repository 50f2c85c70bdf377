"""Losses of a plain ``loss.backward()`` in a loop: means over samples, or refused before the first update."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

import tutti
from tests import worlds
from tutti.errors import UsageError

BATCH = 6
Batch = tuple[Tensor, Tensor]


def build() -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    return model, torch.optim.Adam(model.parameters(), lr=0.03)


def data() -> list[Batch]:
    draw = torch.Generator().manual_seed(3)
    inputs = torch.randn(18, 4, generator=draw, dtype=torch.float64)
    return [(row, row[:3].argmax()) for row in inputs]


def mean(model: Any, batch: Batch) -> Tensor:
    return (model(batch[0]) - batch[0][:, :3]).square().mean()


def of_targets(model: Any, batch: Batch) -> Tensor:
    weights = torch.tensor([0.3, 0.55, 1.7], dtype=torch.float64)
    return functional.cross_entropy(model(batch[0]), batch[1], weights)


def rooted(model: Any, batch: Batch) -> Tensor:
    return mean(model, batch).sqrt()


def summed(model: Any, batch: Batch) -> Tensor:
    return (model(batch[0]) - batch[0][:, :3]).square().sum()


def largest(model: Any, batch: Batch) -> Tensor:
    return (model(batch[0]) - batch[0][:, :3]).abs().max()


def by_sample(model: Any, batch: Batch) -> Tensor:
    """One loss a sample, whose backward begins with a one for each."""
    return (model(batch[0]) - batch[0][:, :3]).square().mean(1)


def of_chosen(model: Any, batch: Batch) -> Tensor:
    """A mean over as many numbers as samples, of which every second sample has two and the others have none."""
    chosen = torch.tensor([True, True, False]) & (torch.arange(len(batch[0])) % 2 == 0)[:, None]
    return (model(batch[0]) - batch[0][:, :3]).square()[chosen].mean()


LOSSES = {each.__name__: each for each in (of_chosen, mean, of_targets, rooted, summed, largest, by_sample)}
# Arguments of ``backward``, each for a loss of its name; the others have none. A scalar's argument multiplies it.
GRADIENTS: dict[str, Callable[[Tensor], Tensor]] = {
    "by_sample": torch.ones_like,
    "halved": lambda loss: torch.full_like(loss, 0.5),
    "times_itself": lambda loss: loss,
    "times_its_value": lambda loss: loss.detach(),
}
LOSSES |= dict.fromkeys(("halved", "times_itself", "times_its_value"), mean)
# Roots that are given to ``torch.autograd.backward``.
ROOTS: dict[str, Callable[[Tensor], list[Tensor]]] = {
    "two_means": lambda loss: [loss * 0.25, loss * 0.75],
    "two_sums": lambda loss: [loss, loss * 0.5],
}
LOSSES |= {"two_means": mean, "two_sums": summed}


def play(loss: str, attack: str, batches: Any, model: nn.Module, optimizer: Optimizer) -> None:
    for batch in batches:
        if attack:
            inputs = batch[0].clone().requires_grad_()
            LOSSES[attack](model, (inputs, batch[1])).backward()
            optimizer.zero_grad()
            batch = inputs.detach() + 0.1 * inputs.grad.sign(), batch[1]  # type: ignore[union-attr]
        optimizer.zero_grad()
        found = LOSSES[loss](model, batch)
        if loss in ROOTS:
            torch.autograd.backward(ROOTS[loss](found))
        else:
            found.backward(GRADIENTS[loss](found) if loss in GRADIENTS else None)
        optimizer.step()


def train(loss: str, strategy: str, attack: str = "", **options: Any) -> Any:
    model, optimizer = build()
    run = tutti.prepare(model, optimizer, data(), strategy=strategy, batch_size=BATCH, shuffle=False, **options)
    try:
        play(loss, attack, run.microbatches(0), run.model, optimizer)
    except UsageError as error:
        assert run.updates == 0
        return str(error), {}
    return "", {name: tensor.numpy() for name, tensor in run.state().items()}


def plain(loss: str, attack: str = "") -> dict[str, Any]:
    model, optimizer = build()
    rows = data()
    batches = [
        tuple(torch.stack(column) for column in zip(*rows[start : start + BATCH], strict=True))
        for start in range(0, len(rows), BATCH)
    ]
    play(loss, attack, batches, model, optimizer)
    return {name: tensor.numpy().copy() for name, tensor in model.state_dict().items()}


RANKS = [
    (2, "mirrored", {}),
    (3, "sharded:stage=1", {}),
    (2, "central_storage", {}),
    (1, "mirrored", {"micro_batch": 2}),
]
SAID = {
    "of_targets": "targets, of",
    "of_chosen": "targets, of",
    "rooted": "takes sqrt of a mean",
    "summed": "a sum over",
    "by_sample": "a sum over",
    "largest": "takes max over",
    "two_sums": "a sum over",
    "times_itself": "multiplies means",
}


@pytest.mark.parametrize(("size", "strategy", "options"), RANKS)
@pytest.mark.parametrize("loss", SAID)
def test_a_loss_that_is_no_mean_over_samples_is_refused(loss: str, size: int, strategy: str, options: Any) -> None:
    found = worlds.run(size, train, loss=loss, strategy=strategy, **options)
    refused = [text for text, _ in found]
    assert any(SAID[loss] in text and "test_plain_backward.py:" in text for text in refused), refused


@pytest.mark.parametrize(("size", "strategy", "options"), RANKS)
@pytest.mark.parametrize(("loss", "attack"), [("mean", ""), ("mean", "summed"), ("halved", ""), ("two_means", "")])
def test_a_mean_is_taken_after_gradients_of_the_inputs(
    loss: str, attack: str, size: int, strategy: str, options: Any
) -> None:
    want = worlds.alone(plain, loss=loss, attack=attack)
    for refused, state in worlds.run(size, train, loss=loss, strategy=strategy, attack=attack, **options):
        assert not refused
        assert all(abs(state[name] - value).max() < 1e-10 for name, value in want.items())


def test_a_factor_of_the_samples_is_refused_within_a_worker() -> None:
    """Workers may have factors of their own, as each has a loss of its own samples."""
    ((refused, _),) = worlds.run(1, train, loss="times_its_value", strategy="mirrored", micro_batch=2)
    assert "is scaled by a number" in refused and "test_plain_backward.py:" in refused


def accumulate(batches: Any, model: nn.Module, optimizer: Optimizer, clear: str) -> None:
    """Updates after every second batch, the last of which is smaller; and gradients that are cleared in between."""
    for number, batch in enumerate(batches):
        if number == 3 and clear:
            model.zero_grad(set_to_none=clear == "none")
        (mean(model, batch) / 2).backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()


def accumulated(strategy: str, clear: str, size: int = 4, **options: Any) -> Any:
    model, optimizer = build()
    rows = data()[: 3 * size + 1]
    if not strategy:
        batches = [torch.stack([x for x, _ in rows[k : k + size]]) for k in range(0, len(rows), size)]
        accumulate([(each,) for each in batches], model, optimizer, clear)
        return {name: tensor.numpy().copy() for name, tensor in model.state_dict().items()}
    run = tutti.prepare(model, optimizer, rows, strategy=strategy, batch_size=size, shuffle=False, **options)
    try:
        accumulate(run.microbatches(0), model, optimizer, clear)
    except UsageError as error:
        assert run.updates == 0, str(error)
        return str(error)
    return {name: tensor.numpy() for name, tensor in run.state().items()}


@pytest.mark.parametrize(
    ("size", "strategy", "clear"),
    [
        *((2, "mirrored", clear) for clear in ("", "none", "zeros")),
        *((3, "mirrored", ""), (3, "sharded:stage=1", "none"), (2, "central_storage", "")),
    ],
)
def test_gradients_that_add_up_over_batches_have_the_weights_of_their_own(size: int, strategy: str, clear: str) -> None:
    """Of the last batch, of one sample, one rank has all and the others none."""
    want = accumulated("", clear)
    for got in worlds.run(size, accumulated, strategy=strategy, clear=clear):
        assert isinstance(got, dict), got
        assert all(abs(got[name] - value).max() <= 1e-10 for name, value in want.items())


def test_gradients_that_add_up_over_bodies_of_a_batch_are_refused() -> None:
    for ranks in (1, 2):
        for said in worlds.run(ranks, accumulated, strategy="mirrored", clear="", workers=4):
            assert "leaves gradients of loss.backward(), and no update" in said and "Call run.backward(loss)" in said
