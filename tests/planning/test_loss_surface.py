"""Value, gradient and Hessian-vector products over blocks of samples and ranks, against dense autograd."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from tests import worlds
from tests.covering import in_turn
from tutti.comm.mesh_communicators import Communicators
from tutti.comm.rank_mesh import RankMesh
from tutti.data.adapt import TensorSource
from tutti.errors import UsageError
from tutti.launcher import context
from tutti.planning.landscape_figure import write_landscape_figure
from tutti.planning.loss_surface import LossSurface, for_landscape, sample_blocks


def data(classes: int = 3) -> TensorSource:
    generator = torch.Generator().manual_seed(4)
    inputs = torch.randn(23, 6, generator=generator, dtype=torch.float64)
    return TensorSource((inputs, torch.arange(23) % classes))


def small_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Dropout(), nn.Linear(5, 3)).double()
    for norm in (m for m in model if isinstance(m, nn.BatchNorm1d)):
        nn.init.uniform_(norm.running_mean)  # type: ignore[arg-type]
    return model


def cross_entropy(model: nn.Module, batch: Any) -> tuple[torch.Tensor, int, dict[str, torch.Tensor]]:
    scores = model(batch[0])
    right = (scores.argmax(1) == batch[1]).sum()
    return functional.cross_entropy(scores, batch[1], reduction="sum"), len(batch[1]), {"accuracy": right}


def surface_of(model: nn.Module, loss: Any = cross_entropy, block: int = 4, batch_statistics: bool = False) -> Any:
    world = context.init("cpu")
    comm = Communicators(world, RankMesh(replica=world.identity.size, rank=world.identity.rank)).replica
    blocks = sample_blocks(data(), None, block, comm, lambda batch: batch, 0)
    return LossSurface(for_landscape(model, batch_statistics), loss, {"training": blocks}, comm)


def dense_hessian(model: nn.Module) -> torch.Tensor:
    """The Hessian of the mean loss over all samples, by torch.func, in the order of named_parameters."""
    names, shapes = zip(*((n, p.shape) for n, p in model.named_parameters()), strict=True)
    sizes = [shape.numel() for shape in shapes]
    inputs, targets = data().fetch(np.arange(23), None)

    def mean(vector: torch.Tensor) -> torch.Tensor:
        pieces = [piece.view(shape) for piece, shape in zip(vector.split(sizes), shapes, strict=True)]
        scores = torch.func.functional_call(model, dict(zip(names, pieces, strict=True)), (inputs,))
        return functional.cross_entropy(scores, targets)

    return torch.func.hessian(mean)(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))  # type: ignore[no-any-return]


def products_on_a_rank(batch_statistics: bool = False) -> dict[str, Any]:
    surface = surface_of(small_model(), batch_statistics=batch_statistics)
    if context.current().identity.rank:
        surface.serve()
        return {}
    point = surface.point()
    value, gradient = surface.gradient(point)
    rows = [surface.hessian_product(row) for row in torch.eye(surface.size, dtype=torch.float64)]
    moved = surface.value(point + 0.1)
    back = surface.value(point)
    surface.close()
    return {
        "loss": value.loss,
        "accuracy": value.metrics["accuracy"],
        "gradient": gradient.tolist(),
        "hessian": torch.stack(rows).tolist(),
        "moved": moved.loss,
        "back": back.loss,
    }


def test_gradient_and_hessian_are_those_of_the_mean_over_all_samples() -> None:
    found = worlds.run(1, products_on_a_rank)[0]
    model = small_model().eval()
    inputs, targets = data().fetch(np.arange(23), None)
    loss = functional.cross_entropy(model(inputs), targets)
    gradient = torch.autograd.grad(loss, list(model.parameters()))
    assert found["loss"] == pytest.approx(loss.item(), rel=1e-12)
    assert found["accuracy"] == pytest.approx((model(inputs).argmax(1) == targets).double().mean().item())
    torch.testing.assert_close(torch.tensor(found["gradient"]).double(), torch.cat([g.reshape(-1) for g in gradient]))
    torch.testing.assert_close(torch.tensor(found["hessian"], dtype=torch.float64), dense_hessian(model))
    assert found["back"] == found["loss"] != found["moved"]


@pytest.mark.parametrize(("batch_statistics", "ranks"), in_turn([False, True], [2, 3]))
def test_results_are_bit_identical_on_any_number_of_ranks(batch_statistics: bool, ranks: int) -> None:
    alone, several = (worlds.run(size, products_on_a_rank, batch_statistics=batch_statistics)[0] for size in (1, ranks))
    assert alone == several


def batch_statistics_on_a_rank() -> dict[str, Any]:
    model = small_model()
    surface = surface_of(model, block=12, batch_statistics=True)
    value = surface.value(surface.point())
    return {"loss": value.loss, "buffers": [b.tolist() for b in model.buffers()]}


def test_batch_statistics_are_those_of_a_block_and_leave_the_running_ones_alone() -> None:
    found = worlds.run(1, batch_statistics_on_a_rank)[0]
    model = small_model()
    assert found["buffers"] == [b.tolist() for b in model.buffers()]
    model.train()
    for dropout in (m for m in model if isinstance(m, nn.Dropout)):
        dropout.eval()
    inputs, targets = data().fetch(np.arange(23), None)
    parts = [(inputs[:12], targets[:12]), (inputs[12:], targets[12:])]
    total = sum(functional.cross_entropy(model(x), y, reduction="sum").item() for x, y in parts)
    assert found["loss"] == pytest.approx(total / 23, rel=1e-12)


class Once(torch.autograd.Function):
    """x² with a backward that cannot be differentiated."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return 2 * ctx.saved_tensors[0] * gradient  # type: ignore[no-any-return]


class Squared(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Once.apply(x)  # type: ignore[no-any-return,no-untyped-call]


def refusal_on_a_rank() -> list[str]:
    told = []
    for loss, model in ((cross_entropy, nn.Sequential(nn.Linear(6, 3), Squared())), (no_gradient, nn.Linear(6, 3))):
        surface = surface_of(model.double(), loss)
        surface.value(surface.point())
        with pytest.raises(UsageError) as refused:
            surface.hessian_product(torch.ones(surface.size, dtype=torch.float64))
        told.append(str(refused.value))
    return told


def no_gradient(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch[0]).detach().mean()  # type: ignore[no-any-return]


def test_an_operator_without_second_derivative_is_named() -> None:
    told = worlds.run(1, refusal_on_a_rank)[0]
    assert "Once" in told[0] and "no second derivative" in told[0] and "--parts" in told[0]
    assert "does not depend on any trained parameter" in told[1]


def linear_on_a_rank() -> list[float]:
    surface = surface_of(nn.Linear(6, 1).double(), lambda model, batch: model(batch[0]).mean())
    surface.gradient(surface.point())
    product: list[float] = surface.hessian_product(torch.ones(7, dtype=torch.float64)).tolist()
    return product


def test_hessian_of_a_linear_loss_is_zero() -> None:
    assert worlds.run(1, linear_on_a_rank)[0] == [0.0] * 7


def attention_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    states = model(batch[0]).view(-1, 1, 2, 8)
    return functional.scaled_dot_product_attention(states, states, states).square().mean()


def attention_on_a_rank() -> float:
    surface = surface_of(nn.Linear(6, 16).double(), attention_loss)
    surface.gradient(surface.point())
    product = surface.hessian_product(torch.ones(surface.size, dtype=torch.float64))
    return float(product.norm())


def test_attention_has_second_derivatives() -> None:
    assert worlds.run(1, attention_on_a_rank)[0] > 0


def too_few_blocks_on_a_rank() -> str:
    with pytest.raises(UsageError) as refused:
        surface_of(small_model(), block=20)
    return str(refused.value)


def test_fewer_blocks_than_ranks_are_refused() -> None:
    assert "2 blocks for 3 devices" in worlds.run(3, too_few_blocks_on_a_rank)[0]


@pytest.mark.skipif(importlib.util.find_spec("curvlinops") is None, reason="curvlinops is not installed")
def test_products_are_those_of_curvlinops() -> None:
    from curvlinops import HessianLinearOperator

    model = small_model().eval()
    batch = data().fetch(np.arange(23), None)
    operator = HessianLinearOperator(model, nn.CrossEntropyLoss(), list(model.parameters()), [batch])
    found = worlds.run(1, products_on_a_rank)[0]
    vector = torch.linspace(-1, 1, len(found["hessian"]), dtype=torch.float64)
    expected = torch.as_tensor(operator @ vector)
    torch.testing.assert_close(torch.tensor(found["hessian"], dtype=torch.float64) @ vector, expected)


def test_the_figure_without_matplotlib_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match="matplotlib") as refused:
        write_landscape_figure({"run": "r", "step": 1, "samples": {"training": 8}}, tmp_path / "landscape.svg")
    assert "pip install" in str(refused.value) and "plot" in str(refused.value)
