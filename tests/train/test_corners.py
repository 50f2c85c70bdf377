"""Models and losses at the edge of what PyTorch takes: as plain PyTorch, on any devices, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import tutti
from tests import worlds
from tests.covering import table
from tests.worlds import RankError

INPUTS = torch.randn(12, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
TARGETS = torch.randn(12, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


class Weighted(nn.Module):
    """A layer, and a second weight of which only the memory differs."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 2).double()
        flat = torch.randn(12, dtype=torch.float64)
        self.a = nn.Parameter(
            {
                "gaps": flat.view(2, 6)[:, ::2],
                "expanded": flat[:3].expand(2, 3),
                "transposed": flat[:6].view(3, 2).t(),
            }.get(kind, flat[:6].view(2, 3))
        )
        if kind in ("overlapping", "behind another", "apart", "interleaved"):
            other = {"overlapping": flat[3:9], "apart": flat[6:]}.get(kind, flat[1::2])
            if kind == "interleaved":
                self.a = nn.Parameter(flat[::2].view(2, 3))
            if kind == "behind another":
                # Between the first elements of the two, in their order, lies a parameter that shares none.
                self.a, self.c = nn.Parameter(flat[::2].view(2, 3)), nn.Parameter(flat[1:2])
                other = torch.as_strided(flat, (6,), (1,), 2)
            self.b = nn.Parameter(other.view(2, 3))

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.layer(inputs) + inputs @ self.a.t()
        return out + 2 * inputs @ self.b.t() if hasattr(self, "b") else out


def squared(called: Any, batch: Any) -> Tensor:
    loss: Tensor = ((called(batch[0]) - batch[1]) ** 2).mean()
    return loss


def trained(kind: str, strategy: str, optimizer: str) -> Any:
    data = (INPUTS, TARGETS)
    run = tutti.prepare(Weighted(kind), optimizer, data, squared, strategy=strategy, workers=3, batch_size=12)
    for epoch in range(3):
        for batch in run.epoch(epoch):
            run.step(batch)
    return {name: tensor.numpy().copy() for name, tensor in run.state().items()}


def plain(kind: str, optimizer: str) -> Any:
    model = Weighted(kind)
    made: Any = (
        torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, foreach=False)
        if "sgd" in optimizer
        else torch.optim.Adam(model.parameters(), 0.01, foreach=False)
    )
    for _ in range(3):
        made.zero_grad()
        squared(model, (INPUTS, TARGETS)).backward()
        made.step()
    return {name: p.detach().numpy() for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("kind", "optimizer", "place"),
    table(
        ["gaps", "transposed", "apart", "interleaved"],
        ["sgd:lr=0.05,momentum=0.9", "adam:lr=0.01"],
        [(1, "single"), (2, "mirrored"), (3, "mirrored:algorithm=native"), (2, "central_storage")],
    ),
    ids=str,
)
def test_parameters_laid_out_in_any_way_are_trained_as_in_plain_pytorch(
    kind: str, optimizer: str, place: tuple[int, str]
) -> None:
    want, (devices, strategy) = plain(kind, optimizer), place
    for got in worlds.run(devices, trained, kind=kind, strategy=strategy, optimizer=optimizer):
        for name in want:
            assert got[name] == pytest.approx(want[name], rel=1e-10, abs=1e-10), name


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("overlapping", "a and b share memory"),
        ("behind another", "a and b share memory"),
        ("expanded", "a has elements that are one place"),
    ],
)
def test_parameters_in_the_same_memory_are_refused(kind: str, said: str) -> None:
    for devices in (1, 2):
        with pytest.raises(RankError) as caught:
            worlds.run(devices, trained, kind=kind, strategy="mirrored", optimizer="sgd")
        assert all(f is not None and f.kind == "UsageError" and said in f.text for f in caught.value.failures)


LOSSES: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "detached": (lambda m, b: squared(m, b).detach(), "does not depend on any trained parameter"),
    "counted": (lambda m, b: (m(b[0]) > 0).sum(), "does not depend on any trained parameter"),
    "complex": (lambda m, b: squared(m, b) * (1 + 1j), "complex"),
}


def deep(loss: str, strategy: str) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    run = tutti.prepare(model, "sgd", (INPUTS, TARGETS), LOSSES[loss][0], strategy=strategy, batch_size=12)
    for batch in run.epoch(0):
        run.step(batch)


@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_that_cannot_be_trained_on_is_refused(loss: str) -> None:
    for devices, strategy in [(1, "single"), (2, "mirrored")]:
        with pytest.raises(RankError) as caught:
            worlds.run(devices, deep, loss=loss, strategy=strategy)
        for failure in caught.value.failures:
            assert failure is not None
            assert failure.kind == "UsageError"
            assert LOSSES[loss][1] in failure.text


def test_former_names_of_a_run_work_with_a_warning() -> None:
    model = nn.Linear(4, 1)
    data = TensorDataset(torch.ones(4, 4), torch.ones(4, 1))
    run = tutti.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data, strategy="single", batch_size=4)
    with pytest.warns(DeprecationWarning, match=r"run\.microbatches"):
        batches = run.cells(0)
    for inputs, targets in batches:
        run.backward(nn.functional.mse_loss(model(inputs), targets))
        assert run.optimizer is not None
        run.optimizer.step()
    with pytest.warns(DeprecationWarning, match=r"run\.stats"):
        assert run.agreed is run.stats
    with pytest.warns(DeprecationWarning, match=r"run\.data_position"):
        assert run.at == run.data_position == (1, 0)
