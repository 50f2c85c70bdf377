"""Edits of complete gradients on a rank that runs the body of a loop for several micro-batches of a global batch."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import tutti
from tests import worlds
from tests.scripts.oracle import global_batches
from tutti.errors import UsageError

BATCH = 8
Kept = dict[str, Tensor]


def dataset() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    inputs, targets = (torch.randn(29, width, generator=draw, dtype=torch.float64) for width in (4, 1))
    return inputs, targets


def built() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def momentum(model: nn.Module, loss: Tensor, total: float, kept: Kept) -> Kept:
    """Add an average of gradients (Grokfast, arXiv 2405.20233), which is returned."""
    new = {n: 0.9 * kept.get(n, torch.zeros_like(p)) + 0.1 * _gradient(p) for n, p in model.named_parameters()}
    for name, parameter in model.named_parameters():
        parameter.grad = _gradient(parameter) + 2 * new[name]
    return new


def momentum_in_place(model: nn.Module, loss: Tensor, total: float, kept: Kept) -> Kept:
    for name, parameter in model.named_parameters():
        kept.setdefault(name, torch.zeros_like(parameter)).mul_(0.9).add_(_gradient(parameter))
        _gradient(parameter).copy_(kept[name])
    return kept


def by_loss(model: nn.Module, loss: Tensor, total: float, kept: Kept) -> Kept:
    for parameter in model.parameters():
        _gradient(parameter).mul_(loss.item())
    return kept


def by_mean_loss(model: nn.Module, loss: Tensor, total: float, kept: Kept) -> Kept:
    for parameter in model.parameters():
        _gradient(parameter).mul_(total)
    return kept


def with_own_gradient(model: nn.Module, loss: Tensor, total: float, kept: Kept) -> Kept:
    parameters = list(model.parameters())
    for parameter, more in zip(parameters, torch.autograd.grad(loss.square(), parameters), strict=True):
        _gradient(parameter).add_(more)
    return kept


def clipped_to_its_sign(model: nn.Module, loss: Tensor, total: float, kept: Kept) -> Kept:
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    for parameter in model.parameters():
        parameter.grad = _gradient(parameter).sign() * _gradient(parameter).norm()
    return kept


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


EDITS: dict[str, Callable[[nn.Module, Tensor, float, Kept], Kept]] = {
    each.__name__: each
    for each in (momentum, momentum_in_place, by_loss, by_mean_loss, with_own_gradient, clipped_to_its_sign)
}


def plain(edit: str) -> dict[str, Any]:
    model, optimizer = built()
    kept: Kept = {}
    for epoch in range(2):
        for inputs, targets in global_batches(dataset(), BATCH, epoch):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward(retain_graph=True)
            kept = EDITS[edit](model, loss, loss.item(), kept)
            optimizer.step()
    return {name: tensor.numpy().copy() for name, tensor in model.state_dict().items()}


def train(edit: str, workers: int, guarded: bool = False) -> Any:
    """Return the state, or the refusal and the number of updates before it; ``guarded``: keep values of updates."""
    model, optimizer = built()
    run = tutti.prepare(model, optimizer, dataset(), workers=workers, batch_size=BATCH, seed=0)
    kept: Kept = {}
    try:
        for epoch in range(2):
            for inputs, targets in run.microbatches(epoch):
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(model(inputs), targets)
                run.backward(loss, retain_graph=True)
                total = run.stats.loss if run.stats is not None else 0.0
                new = EDITS[edit](model, loss, total, kept)
                optimizer.step()
                if run.stepped or not guarded:
                    kept = new
    except UsageError as error:
        return str(error), run.updates
    return {name: tensor.numpy().copy() for name, tensor in run.state().items()}


@pytest.mark.parametrize("edit", ["momentum", "momentum_in_place", "by_loss", "with_own_gradient"])
def test_an_edit_by_one_micro_batch_is_refused(edit: str) -> None:
    [(said, updates)] = worlds.run(1, train, edit=edit, workers=3)
    assert "depends on one of several micro-batches" in said and "test_edits_by_bodies.py" in said
    assert updates == 0


@pytest.mark.parametrize(
    ("edit", "ranks", "workers", "guarded"),
    [
        ("momentum", 1, 3, True),
        ("momentum", 2, 4, True),
        ("by_mean_loss", 1, 3, False),
        ("clipped_to_its_sign", 1, 3, False),
        ("clipped_to_its_sign", 2, 4, False),
        ("by_loss", 1, 1, False),
        ("momentum_in_place", 2, 2, False),
    ],
)
def test_an_edit_by_what_is_the_same_for_all_is_that_of_plain_pytorch(
    edit: str, ranks: int, workers: int, guarded: bool
) -> None:
    want = worlds.alone(plain, edit=edit)
    for got in worlds.run(ranks, train, edit=edit, workers=workers, guarded=guarded):
        assert isinstance(got, dict), got
        assert all(np.abs(got[name] - value).max() <= 1e-12 for name, value in want.items())


def clipped(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def body(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any, backward: Callable[[Tensor], None]) -> None:
    optimizer.zero_grad()
    backward(nn.functional.mse_loss(model(batch[0]), batch[1]))


def every_second_body(model: nn.Module, optimizer: torch.optim.Optimizer, run: Any) -> None:
    for number, batch in enumerate(run.microbatches(0)):
        body(model, optimizer, batch, run.backward)
        if number % 2 == 1:
            clipped(model)
        optimizer.step()


def every_third_by_a_counter(model: nn.Module, optimizer: torch.optim.Optimizer, run: Any) -> None:
    count = SimpleNamespace(bodies=0)
    for batch in run.microbatches(0):
        body(model, optimizer, batch, run.backward)
        count.bodies += 1
        if count.bodies % 3 == 0:
            for parameter in model.parameters():
                _gradient(parameter).mul_(0.5)
        optimizer.step()


def every_second_batch(model: nn.Module, optimizer: torch.optim.Optimizer, run: Any) -> None:
    for batch in run.microbatches(0):
        body(model, optimizer, batch, run.backward)
        if run.global_step % 2 == 1:
            clipped(model)
        optimizer.step()


def by_norm_with_a_log(model: nn.Module, optimizer: torch.optim.Optimizer, run: Any) -> None:
    shown = []
    for number, batch in enumerate(run.microbatches(0)):
        body(model, optimizer, batch, run.backward)
        norm = torch.stack([_gradient(p).norm() for p in model.parameters()]).norm()
        if number % 2 == 0:
            shown.append(norm.item())
        if norm > 0.7:
            for parameter in model.parameters():
                _gradient(parameter).mul_(0.7 / norm)
        optimizer.step()


def left_within_a_batch(model: nn.Module, optimizer: torch.optim.Optimizer, run: Any) -> None:
    for batch in run.microbatches(0):
        body(model, optimizer, batch, run.backward)
        optimizer.step()
        if not run.stepped:
            break


def left_after_bodies(model: nn.Module, optimizer: torch.optim.Optimizer, run: Any) -> None:
    for number, batch in enumerate(run.microbatches(0)):
        body(model, optimizer, batch, run.backward)
        optimizer.step()
        if number + 1 == 2:
            break


def left_after_batches(model: nn.Module, optimizer: torch.optim.Optimizer, run: Any) -> None:
    for batch in run.microbatches(0):
        body(model, optimizer, batch, run.backward)
        optimizer.step()
        if run.stepped and run.global_step == 2:
            break


def taken_in_a_range(model: nn.Module, optimizer: torch.optim.Optimizer, run: Any) -> None:
    batches = iter(run.microbatches(0))
    for _ in range(4):
        body(model, optimizer, next(batches), run.backward)
        optimizer.step()


def taken_of_a_cycle(model: nn.Module, optimizer: torch.optim.Optimizer, run: Any) -> None:
    def cycle() -> Any:
        for epoch in range(3):
            yield from run.microbatches(epoch)

    batches, taken = cycle(), 0
    while taken < 4:
        body(model, optimizer, next(batches), run.backward)
        optimizer.step()
        taken += 1


def taken_of_batches(model: nn.Module, optimizer: torch.optim.Optimizer, run: Any) -> None:
    """Three updates of an endless iterator, in two ways, after a look at the first micro-batch."""

    def cycle() -> Any:
        for epoch in range(3):
            yield from run.microbatches(epoch)

    batches = cycle()
    while run.global_step < 2:
        body(model, optimizer, next(batches), run.backward)
        optimizer.step()
    for _ in range(1):
        for batch in batches:
            body(model, optimizer, batch, run.backward)
            optimizer.step()
            if run.stepped:
                break


def halves_momentum(model: nn.Module, optimizer: torch.optim.Optimizer, run: Any) -> None:
    """Writes the optimizer's state in each body."""
    for group in optimizer.param_groups:
        group["momentum"] = 0.9
    for batch in run.microbatches(0):
        body(model, optimizer, batch, run.backward)
        optimizer.step()
        for state in optimizer.state.values():
            state["momentum_buffer"].mul_(0.5)


def at_a_milestone(model: nn.Module, optimizer: torch.optim.Optimizer, run: Any) -> None:
    for number, batch in enumerate(run.microbatches(0)):
        if number in (4, 6):
            for group in optimizer.param_groups:
                group["lr"] *= 0.1
        body(model, optimizer, batch, run.backward)
        optimizer.step()


def adjusted(optimizer: torch.optim.Optimizer, number: int) -> None:
    for group in optimizer.param_groups:
        group["lr"] = 0.1 * 0.5 ** (number // 4)


def in_a_function(model: nn.Module, optimizer: torch.optim.Optimizer, run: Any) -> None:
    for number, batch in enumerate(run.microbatches(0)):
        adjusted(optimizer, number)
        body(model, optimizer, batch, run.backward)
        optimizer.step()


def scheduled(model: nn.Module, optimizer: torch.optim.Optimizer, run: Any) -> None:
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for number, batch in enumerate(run.microbatches(0)):
        body(model, optimizer, batch, run.backward)
        optimizer.step()
        if (number + 1) % 4 == 0:
            scheduler.step()


def frozen(model: nn.Module, optimizer: torch.optim.Optimizer, run: Any) -> None:
    for number, batch in enumerate(run.microbatches(0)):
        if number == 4:
            next(model.parameters()).requires_grad_(False)
        body(model, optimizer, batch, run.backward)
        optimizer.step()


def rates_of_batches(model: nn.Module, optimizer: torch.optim.Optimizer, run: Any) -> None:
    """Change rates and frozen layers by global batches, beside logs by bodies that only read the rate."""
    scheduler, shown = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5), []
    for epoch in range(2):
        for number, batch in enumerate(run.microbatches(epoch)):
            if number == 0 and epoch == 1:
                for group in optimizer.param_groups:
                    group["lr"] *= 0.7
                next(model.parameters()).requires_grad_(False)
            adjusted(optimizer, run.global_step) if epoch == 3 else None
            body(model, optimizer, batch, run.backward)
            optimizer.step()
            if number % 4 == 3:
                shown.append(scheduler.get_last_lr())
            if run.stepped:
                scheduler.step()


class Plain:
    """One device without tutti, with the methods that the loops call."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.global_step, self.stepped, self.backward = 0, True, Tensor.backward
        optimizer.register_step_post_hook(self.count)

    def count(self, *_: Any) -> None:
        self.global_step += 1

    def microbatches(self, epoch: int) -> Any:
        return global_batches(dataset(), BATCH, epoch)


def looped(loop: Callable[..., None], workers: int, read: bool = False) -> Any:
    """Return the state, or the refusal and the number of updates before it; ``workers`` of 0: without tutti."""
    model, optimizer = built()
    run: Any = Plain(optimizer)
    if workers:
        run = tutti.prepare(model, optimizer, dataset(), workers=workers, batch_size=BATCH, seed=0)
    try:
        loop(model, optimizer, run)
        state = model.state_dict() if read or not workers else run.state()
    except UsageError as error:
        return str(error), run.updates
    return {name: tensor.numpy().copy() for name, tensor in state.items()}


@pytest.mark.parametrize("loop", [every_second_body, every_third_by_a_counter])
def test_an_edit_in_every_nth_body_is_refused(loop: Callable[..., None]) -> None:
    [(said, updates)] = worlds.run(1, looped, loop=loop, workers=2)
    assert "edits gradients in every n-th of its bodies" in said and "test_edits_by_bodies.py" in said
    assert updates == (loop is every_third_by_a_counter)


def test_a_write_of_optimizer_state_in_each_of_several_bodies_is_refused() -> None:
    [(said, updates)] = worlds.run(1, looped, loop=halves_momentum, workers=2)
    assert "writes the state of an optimizer" in said and updates == 1
    want = worlds.alone(looped, loop=halves_momentum, workers=0)
    [got] = worlds.run(1, looped, loop=halves_momentum, workers=1)
    assert all(np.abs(got[name] - value).max() <= 1e-12 for name, value in want.items())


@pytest.mark.parametrize(("loop", "read"), [(left_within_a_batch, False), (left_after_bodies, True)])
def test_a_loop_that_is_left_before_its_updates_is_refused(loop: Callable[..., None], read: bool) -> None:
    [(said, _)] = worlds.run(1, looped, loop=loop, workers=2, read=read)
    assert "was left" in said and "test_edits_by_bodies.py" in said


@pytest.mark.parametrize("loop", [at_a_milestone, in_a_function, scheduled, frozen])
def test_a_rate_that_changes_by_a_count_of_bodies_is_refused(loop: Callable[..., None]) -> None:
    [(said, updates)] = worlds.run(1, looped, loop=loop, workers=2)
    assert "by a count of its bodies" in said and "test_edits_by_bodies.py" in said
    assert updates == 2
    want = worlds.alone(looped, loop=loop, workers=0)
    [got] = worlds.run(1, looped, loop=loop, workers=1)
    assert all(np.abs(got[name] - value).max() <= 1e-12 for name, value in want.items())


@pytest.mark.parametrize(
    "loop", [every_second_batch, by_norm_with_a_log, left_after_batches, rates_of_batches, taken_of_batches]
)
def test_loops_that_count_global_batches_are_right(loop: Callable[..., None]) -> None:
    want = worlds.alone(looped, loop=loop, workers=0)
    [got] = worlds.run(1, looped, loop=loop, workers=2)
    assert isinstance(got, dict), got
    assert all(np.abs(got[name] - value).max() <= 1e-12 for name, value in want.items())


@pytest.mark.parametrize("loop", [taken_in_a_range, taken_of_a_cycle])
def test_a_loop_that_takes_a_number_of_micro_batches_is_refused(loop: Callable[..., None]) -> None:
    [(said, updates)] = worlds.run(1, looped, loop=loop, workers=2)
    assert "takes a number of micro-batches" in said and "test_edits_by_bodies.py" in said and not updates
    want = worlds.alone(looped, loop=loop, workers=0)
    [got] = worlds.run(1, looped, loop=loop, workers=1)
    assert all(np.abs(got[name] - value).max() <= 1e-12 for name, value in want.items())


def scaled_by_hooks(workers: int) -> tuple[str, int]:
    """Scale the gradient by a norm that a hook has kept in the backward."""
    model, optimizer = built()
    kept: Kept = {}
    first = next(model.children())
    first.register_full_backward_hook(lambda _, __, given: kept.update(norm=given[0].detach().norm()))
    run = tutti.prepare(model, optimizer, dataset(), workers=workers, batch_size=BATCH, seed=0)
    try:
        for batch in run.microbatches(0):
            body(model, optimizer, batch, run.backward)
            _gradient(next(model.parameters())).mul_(kept["norm"])
            optimizer.step()
    except UsageError as error:
        return str(error), run.updates
    return "", run.updates


@pytest.mark.filterwarnings("ignore:Full backward hook")
def test_an_edit_by_what_a_hook_has_kept_is_refused() -> None:
    [(said, updates)] = worlds.run(1, scaled_by_hooks, workers=2)
    assert "depends on one of several micro-batches" in said
    assert updates == 0
    assert worlds.run(1, scaled_by_hooks, workers=1) == [("", 4)]


class Product(torch.autograd.Function):
    """A product with a backward in Python, which reads a transposed weight."""

    @staticmethod
    def forward(context: Any, inputs: Tensor, weight: Tensor) -> Tensor:
        context.save_for_backward(inputs, weight)
        return inputs @ weight

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        inputs, weight = context.saved_tensors
        return gradient @ weight.T, inputs.T @ gradient


class OfProducts(nn.Module):
    """A model whose layer is a function of the script."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3, dtype=torch.float64))
        self.head = nn.Linear(3, 1).double()

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.head(Product.apply(inputs, self.weight).tanh())
        return result


def clipped_beside_a_function(strategy: str) -> list[float]:
    torch.manual_seed(0)
    model, data = OfProducts(), torch.randn(24, 4, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = None
    if strategy != "plain":
        run = tutti.prepare(model, optimizer, data, batch_size=12, workers=4, shuffle=False, strategy=strategy)
    for batch in data.split(12) if run is None else run.microbatches(0):
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward() if run is None else run.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    state = model.state_dict() if run is None else run.state()
    return [float(value.sum()) for value in state.values()]


@pytest.mark.parametrize(("strategy", "ranks"), [("single", 1), ("sharded", 2)])
def test_a_function_with_a_backward_of_its_own_leaves_gradients_free_to_be_edited(strategy: str, ranks: int) -> None:
    want = clipped_beside_a_function("plain")
    for got in worlds.run(ranks, clipped_beside_a_function, strategy=strategy):
        assert got == pytest.approx(want, abs=1e-12)
