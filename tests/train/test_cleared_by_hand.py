"""``p.grad = None`` in a script of several optimizers clears gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor, nn, optim

import tutti
from tests import worlds
from tests.contract.table import largest_difference
from tests.covering import table
from tests.parity.loops import numbers
from tests.train.test_custom_loop import BATCH, DATA, batches, made

Backward = Callable[[Any], None]


def clear(part: nn.Module) -> None:
    for parameter in part.parameters():
        parameter.grad = None


def generator_and_critic(
    models: Any, optimizers: Any, batch: Any, backward: Backward, before: Callable[[int], None], within: Any
) -> None:
    """Two updates, of which the second's backward goes through both models; cleared before or after a forward."""
    before(0)
    loss = nn.functional.mse_loss(models[0](batch[0]), batch[1])
    within(0)
    backward(loss)
    optimizers[0].step()
    before(1)
    loss = nn.functional.mse_loss(models[1](models[0](batch[0]).expand(-1, 4)), batch[1])
    within(1)
    backward(loss)
    optimizers[1].step()


def trained(strategy: str, by: str, when: str) -> dict[str, Any] | str:
    """Weights after an epoch; gradients are cleared ``by hand`` or by the optimizer, ``before`` or after a forward."""
    models = nn.ModuleList([made(), made()])
    optimizers = [optim.Adam(model.parameters(), lr=0.01) for model in models]
    run = None
    if strategy != "plain":
        run = tutti.prepare(models, optimizers, DATA, strategy=strategy, workers=2, batch_size=BATCH)

    def by_hand(index: int) -> None:
        clear(models[index])

    def by_optimizer(index: int) -> None:
        optimizers[index].zero_grad()

    def nothing(index: int) -> None:
        """Gradients stay."""

    clearing = by_hand if by == "hand" else by_optimizer
    before, within = (clearing, nothing) if when == "before" else (nothing, clearing)
    try:
        for batch in batches(0) if run is None else run.microbatches(0):
            backward = Tensor.backward if run is None else run.backward
            generator_and_critic(models, optimizers, batch, backward, before, within)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return numbers(models) if run is None else {n: t.numpy().copy() for n, t in run.state().items()}


@pytest.mark.parametrize(
    ("strategy", "by", "when"),
    table(
        ["mirrored", "sharded:stage=1", "sharded:stage=2", "sharded:stage=3"],
        ["hand", "optimizer"],
        ["before", "within"],
    ),
)
def test_gradients_of_several_optimizers(strategy: str, by: str, when: str) -> None:
    want = trained("plain", by, when)
    for got in worlds.run(2, trained, strategy=strategy, by=by, when=when):
        assert isinstance(got, dict) and isinstance(want, dict), got
        assert largest_difference(got, want) <= 1e-10


def zeroed(strategy: str, workers: int, plain: bool = False) -> dict[str, Any]:
    """Weights after two epochs of a loop that sets gradients to zero in place."""
    model = made()
    optimizer = optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    run = tutti.prepare(model, optimizer, DATA, strategy=strategy, workers=workers, batch_size=BATCH)
    for epoch in range(2):
        for batch in run.microbatches(epoch):
            optimizer.zero_grad(set_to_none=False)
            loss = nn.functional.mse_loss(model(batch[0]), batch[1])
            (Tensor.backward if plain else run.backward)(loss)
            optimizer.step()
    return {name: value.numpy().copy() for name, value in run.state().items()}


@pytest.mark.parametrize(
    ("strategy", "ranks", "plain"),
    [("mirrored", 2, False), ("parameter_server", 2, False), ("mirrored", 2, True), ("mirrored", 3, True)],
)
def test_zeros_in_place_where_a_rank_has_several_bodies(strategy: str, ranks: int, plain: bool) -> None:
    """Servers' placeholders that the script has zeroed count as zeros in a body that is not the rank's last.

    A plain backward adds to zeros the gradient of its micro-batch.
    """
    want = worlds.alone(zeroed, strategy="single", workers=3)
    for got in worlds.run(ranks, zeroed, strategy=strategy, workers=3, plain=plain):
        assert largest_difference(got, want) <= 1e-10
