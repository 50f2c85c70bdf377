"""Views of parameters of all stages in a loss, a figure or a write are those of one device, or are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tutti
from tests import worlds
from tests.contract.table import largest_difference
from tests.covering import in_turn
from tests.parity.loops import numbers
from tests.train.test_custom_loop import BATCH, DATA, batches, error_of, made

READS: dict[str, Callable[[nn.Module], Tensor]] = {
    "flat": lambda model: torch.cat([p.view(-1) for p in model.parameters()]).square().sum(),
    "flatten": lambda model: torch.cat([p.flatten() for p in model.parameters()]).abs().mean(),
    "vector": lambda model: nn.utils.parameters_to_vector(model.parameters()).norm(),
    "rows": lambda model: sum((p[0].square().sum() for p in model.parameters()), torch.zeros(())),
    "spectral": lambda model: torch.stack(
        [torch.linalg.matrix_norm(p, ord=2) for p in model.parameters() if p.dim() == 2]
    ).sum(),
    "chunks": lambda model: sum((p.chunk(2)[-1].t().norm() for p in model.parameters()), torch.zeros(())),
    "reshaped twice": lambda model: torch.stack(
        [p.reshape(-1).unsqueeze(0).pow(2).sum() for p in model.parameters()]
    ).sum(),
}


def trained(strategy: str, how: str) -> Any:
    """Two epochs with a penalty of views; and its figure after each update."""
    model, run, figures = made(), None, []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if strategy != "plain":
        run = tutti.prepare(model, optimizer, DATA, strategy=strategy, workers=1, batch_size=BATCH)
    for epoch in range(2):
        for batch in batches(epoch) if run is None else run.microbatches(epoch):
            optimizer.zero_grad()
            (Tensor.backward if run is None else run.backward)(error_of(model, batch) + 0.05 * READS[how](model))
            optimizer.step()
            figures.append(READS[how](model).item())
    state = numbers(model) if run is None else {n: t.numpy().copy() for n, t in run.state().items()}
    return {**state, "figures": torch.tensor(figures).numpy()}


@pytest.mark.parametrize(("how", "ranks"), in_turn(list(READS), [2, 3]))
def test_views_in_a_penalty_equal_plain_pytorch(how: str, ranks: int) -> None:
    want = trained("plain", how)
    for got in worlds.run(ranks, trained, strategy="model_parallel", how=how):
        assert largest_difference(got, want) <= 1e-10


def kept(model: nn.Module, run: Any, step: Callable[[], None]) -> None:
    views = [p.view(-1) for p in model.parameters()]
    step()
    torch.cat(views)


def kept_over_a_write(model: nn.Module, run: Any, step: Callable[[], None]) -> None:
    views = [p.data.view(-1) for p in model.parameters()]
    for parameter in model.parameters():
        parameter.data.mul_(0.5)
    torch.cat(views)


def written(model: nn.Module, run: Any, step: Callable[[], None]) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.view(-1)[:1].zero_()


def written_by_list(model: nn.Module, run: Any, step: Callable[[], None]) -> None:
    with torch.no_grad():
        torch._foreach_mul_([p.flatten() for p in model.parameters()], 0.5)


MISUSE = {call.__name__: call for call in (kept, kept_over_a_write, written, written_by_list)}


def misused(how: str) -> tuple[str, Any]:
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = tutti.prepare(model, optimizer, DATA, error_of, strategy="model_parallel", workers=1, batch_size=BATCH)
    epoch = run.epoch(0)
    said = "nothing"
    try:
        MISUSE[how](model, run, lambda: run.step(next(epoch)) and None)
    except tutti.errors.UsageError as error:
        said = str(error)
    return said, {name: tensor.numpy().copy() for name, tensor in run.state().items()}


@pytest.mark.parametrize("how", MISUSE)
def test_misuse_of_views_is_refused_on_every_rank(how: str) -> None:
    want = numbers(made())
    for said, state in worlds.run(2, misused, how=how):
        assert "state dict or view of the model" in said or "cannot be followed" in said, said
        if how != "kept":
            assert largest_difference(state, want) == 0


def filled(strategy: str) -> Any:
    """An epoch in which a vector, half as long as that of the parameters, takes their place after each update."""
    model, run = made(), None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if strategy != "plain":
        run = tutti.prepare(model, optimizer, DATA, strategy=strategy, workers=1, batch_size=BATCH)
    for batch in batches(0) if run is None else run.microbatches(0):
        optimizer.zero_grad()
        (Tensor.backward if run is None else run.backward)(error_of(model, batch))
        optimizer.step()
        vector = nn.utils.parameters_to_vector(model.parameters()).detach()
        nn.utils.vector_to_parameters(0.5 * vector, model.parameters())
    return numbers(model) if run is None else {n: t.numpy().copy() for n, t in run.state().items()}


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_vector_that_is_written_into_parameters_equals_plain_pytorch(ranks: int) -> None:
    want = filled("plain")
    for got in worlds.run(ranks, filled, strategy="model_parallel"):
        assert largest_difference(got, want) <= 1e-10
