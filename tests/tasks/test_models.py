"""Models that can be cut between any two children, whose every parameter has a gradient, and the sums of the losses."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from tutti.config.task_config import CnnConfig, CourseConfig, LineConfig, MlpConfig, Resnet18Config
from tutti.tasks import losses, models

MODELS: dict[str, tuple[Callable[[], nn.Sequential], tuple[int, ...]]] = {
    "line": (lambda: models.line_model(LineConfig()), (1,)),
    "cnn": (lambda: models.cnn(CnnConfig(), 10), (1, 8, 8)),
    "cnn with norm and dropout": (lambda: models.cnn(CnnConfig(batch_norm=True, dropout=0.3), 10), (1, 8, 8)),
    "mlp": (lambda: models.mlp(MlpConfig(hidden=16, dropout=0.2), 10), (1, 8, 8)),
    "course": (lambda: models.course(CourseConfig(), 10), (3, 32, 32)),
    "course with norm": (lambda: models.course(CourseConfig(batch_norm=True), 10), (3, 32, 32)),
    "resnet18": (lambda: models.resnet18(Resnet18Config(), 10), (3, 32, 32)),
}


@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_has_a_gradient(name: str) -> None:
    torch.manual_seed(0)
    build, shape = MODELS[name]
    model = build().double()
    weights = torch.randn(8, 10 if len(shape) > 1 else 1, dtype=torch.float64)
    (model(torch.randn(8, *shape, dtype=torch.float64)) * weights).sum().backward()
    largest = {key: float(value.grad.abs().max()) for key, value in model.named_parameters() if value.grad is not None}
    assert len(largest) == len(list(model.parameters()))
    for key, value in largest.items():
        assert value > 1e-9 * max(largest.values()), f"{key} has a gradient of {value}"


@pytest.mark.parametrize("name", MODELS)
def test_can_be_cut_between_any_two_children(name: str) -> None:
    build, shape = MODELS[name]
    torch.manual_seed(0)
    model = build()
    for at in range(1, len(model)):
        received = model[:at](torch.randn(2, *shape)).detach().requires_grad_()
        model[at:](received).sum().backward()
        assert received.grad is not None and torch.isfinite(received.grad).all()


@pytest.mark.parametrize(("name", "parameters"), [("line", 2), ("course", 467_082), ("resnet18", 11_173_962)])
def test_number_of_parameters(name: str, parameters: int) -> None:
    assert sum(value.numel() for value in MODELS[name][0]().parameters()) == parameters


def test_work_of_the_course_network() -> None:
    model = models.course(CourseConfig(), 10)
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, 3, 32, 32)).sum().backward()
    assert 65e6 < counter.get_total_flops() < 85e6
    assert not [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]


def test_classification_sums() -> None:
    torch.manual_seed(0)
    model, inputs, targets = nn.Linear(4, 3).double(), torch.randn(20, 4).double(), torch.randint(3, (20,))
    total, count, metrics = losses.classification(model, (inputs, targets))
    scores = model(inputs)
    assert torch.allclose(total.sum() / count, functional.cross_entropy(scores, targets))
    assert torch.allclose(total, functional.cross_entropy(scores, targets, reduction="none")), "one a sample"
    assert total.dtype == torch.float64 and count == 20
    assert int(metrics["accuracy"]) == sum(int(row.argmax()) == int(t) for row, t in zip(scores, targets, strict=True))
    assert not metrics["accuracy"].requires_grad


def test_regression_sums() -> None:
    model, x, y = nn.Linear(2, 3), torch.randn(5, 2), torch.randn(5, 3)
    total, count = losses.regression(model, (x, y))
    assert count == 15 and torch.allclose(total.sum() / count, functional.mse_loss(model(x), y))
    assert total.shape == (5,)
