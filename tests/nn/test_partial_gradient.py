"""A script that computes with ``.grad``, of which each rank has a part, does what it does on one device."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import tutti
from tests import worlds
from tests.contract.table import largest_difference
from tests.covering import marked, thinned

BATCH = 6
DRAW = torch.Generator().manual_seed(5)
DATA = TensorDataset(torch.randn(18, 4, generator=DRAW).double(), torch.randn(18, 3, generator=DRAW).double())
State = dict[str, Any]
Edit = Callable[[nn.Module, int, State], None]


def made() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def noise(model: nn.Module, step: int, state: State) -> None:
    draw = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        parameter.grad += 0.1 * torch.randn(parameter.shape, generator=draw, dtype=parameter.dtype)


def decay(model: nn.Module, step: int, state: State) -> None:
    for parameter in model.parameters():
        parameter.grad.add_(parameter.detach(), alpha=0.1)


def sign(model: nn.Module, step: int, state: State) -> None:
    for parameter in model.parameters():
        parameter.grad = parameter.grad.sign() * 0.1 + 0.1 * parameter.detach()


def centred(model: nn.Module, step: int, state: State) -> None:
    """Yong et al. 2020, arXiv 2004.01461."""
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.grad.sub_(parameter.grad.mean(dim=1, keepdim=True))


def normalised(model: nn.Module, step: int, state: State) -> None:
    for parameter in model.parameters():
        parameter.grad.div_(parameter.grad.norm() + 1e-3)
        parameter.grad = parameter.grad / (parameter.grad.abs().max() + 1)


def masked(model: nn.Module, step: int, state: State) -> None:
    for parameter in model.parameters():
        mask = torch.arange(parameter.numel()).view(parameter.shape) % 3 == 0
        parameter.grad.masked_fill_(mask, 0.01)
        parameter.grad *= ~mask + 0.5
        parameter.grad[mask] = -0.02
        parameter.grad[parameter.grad > 0.05] = 0.0


def by_its_figures(model: nn.Module, step: int, state: State) -> None:
    total = sum(float((p.grad * p.grad).sum()) for p in model.parameters())
    largest = max(p.grad.abs().max().item() for p in model.parameters())
    for parameter in model.parameters():
        parameter.grad.mul_(1 / (1 + total + largest))


def momentum(model: nn.Module, step: int, state: State) -> None:
    for name, parameter in model.named_parameters():
        whole = state.setdefault(name, torch.zeros(parameter.shape, dtype=parameter.dtype))
        alike = state.setdefault(f"{name} alike", torch.zeros_like(parameter))
        whole.mul_(0.9).add_(parameter.grad)
        alike.mul_(0.9).addcmul_(parameter.grad, parameter.detach())
        parameter.grad.copy_(whole).add_(alike)


def plain_sgd(model: nn.Module, step: int, state: State) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad
            parameter.data.add_(parameter.grad, alpha=-0.1)
            parameter.sub_(parameter.grad.clone())


def of_others(model: nn.Module, step: int, state: State) -> None:
    first, second = model[0].weight, model[2].weight
    second.grad.add_((first.grad @ first.grad.clone().T).sum())
    first.grad.copy_(first.grad @ torch.eye(4, dtype=first.dtype).mul(2))
    model[2].bias.grad.add_(model[4].weight.grad.sum(dim=0))


def drawn(model: nn.Module, step: int, state: State) -> None:
    torch.manual_seed(step)
    model[0].weight.grad.normal_()


def lists(model: nn.Module, step: int, state: State) -> None:
    gradients = [p.grad for p in model.parameters()]
    torch._foreach_mul_(gradients, 0.5)
    halves = torch._foreach_mul(gradients, 0.5)
    for gradient, half in zip(gradients, halves, strict=True):
        gradient.add_(half.square())


def data(model: nn.Module, step: int, state: State) -> None:
    for parameter in model.parameters():
        parameter.grad.data.clamp_(-0.05, 0.05)


def kept(model: nn.Module, step: int, state: State) -> None:
    """The sum with the gradients of the step before, as in optimistic descent."""
    now = [p.grad.clone() for p in model.parameters()]
    for parameter, before in zip(model.parameters(), state.get("before", now), strict=True):
        parameter.grad.mul_(2).sub_(before)
    state["before"] = now


def old(model: nn.Module, step: int, state: State) -> None:
    for parameter, before in zip(model.parameters(), state.get("old", ()), strict=False):
        parameter.grad.add_(before).add_(before.abs())
    state["old"] = [p.grad for p in model.parameters()]


def flattened(model: nn.Module, step: int, state: State) -> None:
    flat = torch.cat([p.grad.flatten() for p in model.parameters()] + [p.grad.view(-1) for p in model.parameters()])
    ravelled = nn.utils.parameters_to_vector(p.grad for p in model.parameters())
    for parameter in model.parameters():
        parameter.grad.mul_(1 / (1 + flat.norm() + ravelled.abs().sum()))


def composite(model: nn.Module, step: int, state: State) -> None:
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.grad = nn.functional.normalize(parameter.grad) * 0.1
        numbers = torch.tensor(parameter.grad.tolist(), dtype=parameter.dtype)
        ones = torch.ones(1, dtype=parameter.dtype).expand_as(parameter.grad).sum()
        parameter.grad.add_(numbers.sum() / ones).add_(torch.einsum("...,...->", parameter.grad, numbers))


def through_views(model: nn.Module, step: int, state: State) -> None:
    for parameter in model.parameters():
        view = parameter.grad.view(-1)
        view.mul_(2)
        parameter.grad.mul_(0.5)
        view[1:] *= 0.3
        parameter.grad[1] = 0.01
        parameter.grad.unbind()[0].zero_()
        view.unsqueeze(0).clamp_(-0.1, 0.1)
        torch.neg(view, out=view)
        parameter.grad.add_(view[0].item())
        for each in parameter.grad:
            each.sub_(each.mean())


def surgery(model: nn.Module, step: int, state: State) -> None:
    """Yu et al. 2020, arXiv 2001.06782: the gradient is projected where it contradicts that of the step before."""
    for name, parameter in model.named_parameters():
        now = parameter.grad.view(-1)
        if name in state and (product := torch.dot(now, state[name])) < 0:
            now -= product / state[name].norm() ** 2 * state[name]
        state[name] = parameter.grad.flatten()


def rows(model: nn.Module, step: int, state: State) -> None:
    """As scripts freeze rows of an embedding."""
    kept = torch.ones(6, 1, dtype=torch.float64)
    kept[2:4] = 0
    model[0].weight.grad.mul_(kept)
    model[0].weight.grad[0] = 0
    model[2].weight.grad[-2:] = 0.01
    model[2].weight.grad[torch.tensor([1, 4])] = model[2].weight.grad[0].clone()
    model[4].bias.grad.data[1] = 0


def finite(model: nn.Module, step: int, state: State) -> None:
    for parameter in model.parameters():
        parameter.grad[step] = float("nan")
        torch.nan_to_num(parameter.grad, nan=0.01, posinf=1e5, neginf=-1e5, out=parameter.grad)
        torch.neg(parameter.grad.data, out=parameter.grad.data)
        parameter.grad.div_(parameter.grad != 0).nan_to_num_(posinf=0.02)


def normed_together(model: nn.Module, step: int, state: State) -> None:
    """Through one vector of all gradients."""
    flat = torch.cat([p.grad.flatten() for p in model.parameters()])
    parts = (flat / flat.norm()).split([p.numel() for p in model.parameters()])
    for parameter, part in zip(model.parameters(), parts, strict=True):
        parameter.grad.copy_(part.view_as(parameter))
        parameter.grad = torch.where(parameter.grad.abs() < 0.01, 0.0, parameter.grad)


def list_of_terms(model: nn.Module, step: int, state: State) -> None:
    gradients = [p.grad for p in model.parameters()]
    torch._foreach_add_(gradients, [torch.ones(p.shape, dtype=p.dtype) for p in model.parameters()])
    torch._foreach_mul_(gradients, [0.1 * k for k in range(len(gradients))])


EDITS: dict[str, Edit] = {
    edit.__name__: edit
    for edit in (
        noise, decay, sign, centred, normalised, masked, by_its_figures, momentum, plain_sgd, of_others, drawn,
        lists, data, kept, old, flattened, composite, through_views, surgery, rows, finite,
        list_of_terms, normed_together,
    )
}  # fmt: skip


def written_later(model: nn.Module, step: int, state: State) -> None:
    value = model[0].weight.grad * 2
    model[0].weight.grad = value
    value.zero_()


def own_term(model: nn.Module, step: int, state: State) -> None:
    model[0].weight.grad.add_(torch.full((6, 4), float(tutti.rank()), dtype=torch.float64))


def own_rows(model: nn.Module, step: int, state: State) -> None:
    mask = torch.zeros(6, 4, dtype=torch.bool)
    mask[tutti.rank()] = True
    model[0].weight.grad[mask] = 0.0


REFUSED: dict[str, Edit] = {edit.__name__: edit for edit in (written_later, own_term, own_rows)}


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def plain(name: str) -> State:
    model, state = made(), State()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step, batch in enumerate(zip(DATA.tensors[0].split(BATCH), DATA.tensors[1].split(BATCH), strict=True)):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        {**EDITS, **REFUSED}[name](model, step, state)
        optimizer.step()
    return {name: p.detach().numpy().copy() for name, p in model.state_dict().items()}


def train(name: str, strategy: str, workers: int) -> Any:
    model, state = made(), State()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    begin = {name: p.detach().clone() for name, p in model.named_parameters()}
    run = tutti.prepare(
        model, optimizer, DATA, strategy=strategy, workers=workers, batch_size=BATCH, shuffle=False, precision="fp64"
    )
    try:
        for batch in run.microbatches(0):
            optimizer.zero_grad()
            run.backward(loss_of(model, batch))
            {**EDITS, **REFUSED}[name](model, run.global_step, state)
            optimizer.step()
    except (tutti.errors.UsageError, tutti.errors.MismatchError) as error:
        return str(error), all(torch.equal(run.state()[name], value) for name, value in begin.items())
    return {name: tensor.numpy().copy() for name, tensor in run.state().items()}


CASES = {
    # strategy, devices: workers
    ("sharded:stage=1", 2): 2,
    ("sharded:stage=1", 3): 3,
    ("tensor:least=1", 2): 1,
    ("tensor:least=1", 3): 1,
    ("pipeline", 2): 1,
    ("pipeline", 3): 1,
    ("hybrid:tensor=2,least=1", 4): 2,
}


HYBRID = ("hybrid:tensor=2,least=1", 4)
"""Its gradients are cut as those of the second strategy are: with every third edit."""


@pytest.mark.parametrize(
    ("name", "strategy", "devices"),
    [
        *marked([(name, *case) for name in EDITS for case in CASES if case != HYBRID]),
        *thinned([(name, *HYBRID) for name in EDITS], 3),
    ],
)
def test_edits_equal_one_device(name: str, strategy: str, devices: int) -> None:
    for got in worlds.run(devices, train, name=name, strategy=strategy, workers=CASES[strategy, devices]):
        assert isinstance(got, dict), got[0]
        assert largest_difference(got, plain(name)) <= 1e-10


SHARDED = [
    ("sharded", 2, "rows"),
    ("sharded:stage=2", 3, "rows"),
    ("sharded", 3, "finite"),
    ("sharded", 2, "normed_together"),
]
"""Gradients in DTensors, of which PyTorch gathers rows."""


@pytest.mark.parametrize(("strategy", "devices", "name"), SHARDED)
def test_rows_of_sharded_gradients_are_written(strategy: str, devices: int, name: str) -> None:
    for got in worlds.run(devices, train, name=name, strategy=strategy, workers=devices):
        assert isinstance(got, dict), got[0]
        assert largest_difference(got, plain(name)) <= 1e-10


def test_rows_of_sharded_gradients_that_differ_by_rank_are_refused() -> None:
    for got in worlds.run(2, train, name="own_rows", strategy="sharded", workers=2):
        assert isinstance(got, tuple) and got[1] and "other" in got[0], got
    worlds.forget(2)


@pytest.mark.parametrize("strategy", ["mirrored", "mirrored:algorithm=native"])
def test_a_gradient_that_the_script_keeps_is_not_overwritten(strategy: str) -> None:
    for got in worlds.run(2, train, name="old", strategy=strategy, workers=2):
        assert largest_difference(got, plain("old")) <= 1e-10


@pytest.mark.parametrize(("name", "strategy", "devices"), marked([(name, *case) for name in REFUSED for case in CASES]))
def test_other_edits_are_exact_or_refused_before_the_update(name: str, strategy: str, devices: int) -> None:
    if name == "written_later" and strategy in ("sharded:stage=1", "pipeline"):
        # The assigned tensor itself is the gradient.
        for got in worlds.run(devices, train, name=name, strategy=strategy, workers=CASES[strategy, devices]):
            assert isinstance(got, dict) and largest_difference(got, plain(name)) <= 1e-10, got
        return
    if name == "own_term" and strategy == "pipeline":
        pytest.skip("one rank has the gradient, and adds its own term to it without a message")
    for got in worlds.run(devices, train, name=name, strategy=strategy, workers=CASES[strategy, devices]):
        assert isinstance(got, tuple), "not refused"
        said, before = got
        assert before, said
        assert "over the ranks" in said or "in another way on each rank" in said, said


def freed(strategy: str) -> list[bool]:
    """Whether run, model and a parameter are freed after a script that clips and leaves gradients in ``.grad``."""
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    run = tutti.prepare(model, optimizer, DATA, strategy=strategy, batch_size=BATCH)
    for inputs, targets in run.microbatches(0):
        optimizer.zero_grad()
        run.backward(nn.functional.mse_loss(model(inputs), targets))
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    kept = [weakref.ref(each) for each in (run, model, next(model.parameters()))]
    del run, model, optimizer
    gc.collect()
    return [each() is None for each in kept]


@pytest.mark.parametrize("strategy", ["tensor:least=1", "sharded:stage=1", "sharded", "pipeline", "central_storage"])
def test_placeholders_keep_no_model_in_memory(strategy: str) -> None:
    assert worlds.run(2, freed, strategy=strategy) == [[True] * 3] * 2


def test_a_list_with_a_gradient_without_dimension_is_scaled() -> None:
    for said in worlds.run(2, scaled_together):
        assert said == [0.5, 0.5]


def scaled_together() -> list[float]:
    """What scaling of a whole gradient without dimension leaves of it, and of the norm of a split one beside it."""
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    model.register_parameter("scale", nn.Parameter(torch.ones((), dtype=torch.float64)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    run = tutti.prepare(model, optimizer, DATA, strategy="tensor:least=1", batch_size=BATCH)
    ratios = []
    for inputs, targets in run.microbatches(0):
        optimizer.zero_grad()
        run.backward(nn.functional.mse_loss(model.scale * model(inputs), targets))
        gradients = [model.scale.grad, model[0].weight.grad]
        before = [float(each.norm()) for each in gradients]
        torch._foreach_mul_(gradients, 0.5)
        ratios = [round(float(each.norm()) / size, 9) for each, size in zip(gradients, before, strict=True)]
        optimizer.step()
    return ratios
