"""Averages that a script makes by hand of one worker's weights: as each worker by itself makes them, or refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tutti
from tests import worlds
from tests.contract.table import largest_difference
from tests.covering import table
from tests.scripts import oracle
from tests.scripts.oracle import Algorithm
from tutti.errors import UsageError
from tutti.parallel.ddp.write_guard import WriteGuard

ALGORITHMS = {"local_sgd:period=2": Algorithm(2), "diloco:period=2": Algorithm(2, (0.7, 0.9))}


def dataset() -> torch.utils.data.TensorDataset:
    draw = torch.Generator().manual_seed(1)
    shape = {"generator": draw, "dtype": torch.float64}
    return torch.utils.data.TensorDataset(torch.randn(36, 4, **shape), torch.randn(36, 3, **shape))


def loss(model: nn.Module, batch: Any) -> Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


class Taught(nn.Module):
    """A student and its teacher, which is frozen and follows the student, and a buffer that the forward writes."""

    def __init__(self, by: str, name: str = "teacher") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.by, self.name, self.student = by, name, nn.Linear(4, 3).double()
        self.add_module(name, copy.deepcopy(self.student).requires_grad_(False))
        self.still = nn.Linear(4, 3).double().requires_grad_(False)
        self.register_buffer("mean", torch.zeros(3, dtype=torch.float64))

    @torch.no_grad()
    def follow(self) -> None:
        for slow, fast in zip(self.get_submodule(self.name).parameters(), self.student.parameters(), strict=True):
            slow.data.lerp_(fast.data, 0.3)

    def forward(self, inputs: Tensor) -> Tensor:
        scores: Tensor = self.student(inputs)
        if torch.is_grad_enabled():
            with torch.no_grad():
                self.get_buffer("mean").lerp_(scores.mean(0), 0.2)
            if self.by == "forward":
                self.follow()
        return scores - 0.5 * self.get_submodule(self.name)(inputs) + self.still(inputs) + 0.1 * self.get_buffer("mean")


def taught(prepare: Callable[..., Any], by: str, name: str = "teacher") -> dict[str, Tensor]:
    net = Taught(by, name)
    optimizer = torch.optim.SGD(net.student.parameters(), lr=0.1, momentum=0.5)
    run = prepare(net, optimizer, dataset(), loss, batch_size=6)
    for epoch in range(2):
        for batch in run.epoch(epoch):
            run.step(batch)
            if by == "script":
                net.follow()
            if by == "load_state_dict":
                net.get_submodule(name).load_state_dict(net.student.state_dict())
    state: dict[str, Tensor] = run.state()
    return state


def trained(strategy: str, workers: int, by: str, name: str = "teacher") -> Any:
    def prepare(*arguments: Any, **options: Any) -> Any:
        return tutti.prepare(*arguments, strategy=strategy, workers=workers, seed=0, **options)

    try:
        return {name: tensor.clone().numpy() for name, tensor in taught(prepare, by, name).items()}
    except UsageError as error:
        return str(error)


@pytest.mark.parametrize(
    ("strategy", "by", "ranks"), table(list(ALGORITHMS), ["script", "forward", "load_state_dict", "nobody"], [2, 3])
)
def test_a_teacher_in_the_model_is_averaged_with_the_rest(strategy: str, by: str, ranks: int) -> None:
    [want, *_] = oracle.play(lambda prepare: taught(prepare, by), ranks, ALGORITHMS[strategy]).results
    for got in worlds.run(ranks, trained, strategy=strategy, workers=ranks, by=by):
        assert largest_difference(got, {name: tensor.numpy() for name, tensor in want.items()}) <= 1e-12


def test_a_teacher_whose_names_are_long_is_averaged_whole() -> None:
    """Ranks send each other the names of written parameters, here 2 of more than a kilobyte each."""
    name, strategy = "teacher" * 200, "local_sgd:period=2"
    [want, *_] = oracle.play(lambda prepare: taught(prepare, "script", name), 2, ALGORITHMS[strategy]).results
    for got in worlds.run(2, trained, strategy=strategy, workers=2, by="script", name=name):
        assert largest_difference(got, {name: tensor.numpy() for name, tensor in want.items()}) <= 1e-12


@pytest.mark.parametrize("strategy", ALGORITHMS)
def test_a_teacher_that_several_workers_would_share_is_refused(strategy: str) -> None:
    for by, says in (("script", "has written the frozen parameter teacher."), ("forward", "in every micro-batch")):
        said = worlds.alone(trained, strategy=strategy, workers=2, by=by)
        assert says in said and "(step 2)" in said, said
    [want] = oracle.play(lambda prepare: taught(prepare, "script"), 2, Algorithm(1)).results[:1]
    got = worlds.alone(trained, strategy="local_sgd:period=1", workers=2, by="script")
    assert largest_difference(got, {name: tensor.numpy() for name, tensor in want.items()}) <= 1e-12


class ScheduleFree(torch.optim.Optimizer):
    """SGD at ``y``, between the steps' ``z`` and their mean ``x``, which ``eval()`` puts into the model.

    Defazio et al. 2024, arXiv 2405.15682, with a constant weight of the mean, which the groups need not count.
    """

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"beta": 0.9})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    z = self.state[parameter].setdefault("z", parameter.clone())
                    parameter.lerp_(z, 0.2).sub_(parameter.grad, alpha=0.01)
                    z.sub_(parameter.grad, alpha=0.1)

    def move(self, weight: float) -> None:
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    if "z" in self.state[parameter]:
                        parameter.lerp_(self.state[parameter]["z"], weight)

    def eval(self) -> None:
        self.move(1 - 1 / 0.9)

    def train(self) -> None:
        self.move(1 - 0.9)


def schedule_free(prepare: Callable[..., Any], epochs: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    net = nn.Linear(4, 3).double()
    optimizer = ScheduleFree(net.parameters())
    run, found = prepare(net, optimizer, dataset(), loss, batch_size=6), {}
    for epoch in range(epochs):
        for batch in run.epoch(epoch):
            run.step(batch)
        optimizer.eval()
        found |= {f"{epoch}.{name}": tensor.clone() for name, tensor in run.state().items()}
        optimizer.train()
    return found | run.state()


def trained_schedule_free(strategy: str, workers: int) -> Any:
    def prepare(*arguments: Any, **options: Any) -> Any:
        return tutti.prepare(*arguments, strategy=strategy, workers=workers, seed=0, **options)

    try:
        return {name: tensor.clone().numpy() for name, tensor in schedule_free(prepare, 2).items()}
    except UsageError as error:
        return str(error)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("strategy", ALGORITHMS)
def test_a_schedule_free_optimizer_shows_the_mean_of_all_workers(strategy: str, ranks: int) -> None:
    """Each epoch ends with an average of the workers' parameters, and ``eval()`` moves each worker's by its own z."""
    [want, *_] = oracle.play(lambda prepare: schedule_free(prepare, 2), ranks, ALGORITHMS[strategy]).results
    for got in worlds.run(ranks, trained_schedule_free, strategy=strategy, workers=ranks):
        assert not isinstance(got, str), got
        assert largest_difference(got, {name: tensor.numpy() for name, tensor in want.items()}) <= 1e-10


def test_a_schedule_free_optimizer_of_several_workers_on_a_rank_is_refused() -> None:
    said = worlds.alone(trained_schedule_free, strategy="local_sgd:period=2", workers=2)
    assert "has written the parameter" in said or "the state of the optimizer" in said, said


def loaded(strategy: str, workers: int, how: str) -> Any:
    """An average over steps of the model's weights, or of the run's, given to the model after each epoch."""
    net = Taught("nobody")
    optimizer = torch.optim.SGD(net.student.parameters(), lr=0.1)
    run = tutti.prepare(net, optimizer, dataset(), loss, strategy=strategy, workers=workers, ema=0.7)
    average = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    try:
        for epoch in range(2):
            for batch in run.epoch(epoch):
                run.step(batch)
                for name, tensor in net.state_dict().items():
                    average[name].lerp_(tensor, 0.3)
            net.load_state_dict({"own": lambda: average, "run's": run.state, "ema": lambda: run.state(True)}[how]())
    except UsageError as error:
        return run.global_step, str(error)
    return run.global_step, ""


@pytest.mark.parametrize("kind", ["local_sgd", "diloco"])
def test_one_worker_s_weights_are_not_loaded_into_all(kind: str) -> None:
    """On several ranks their models differ, and the comparison of what they load says so."""
    clock, said = worlds.alone(loaded, strategy=f"{kind}:period=4", workers=2, how="own")
    assert clock == 1 and "load_state_dict of weights that run.state() has not returned" in said
    for how in ("run's", "ema"):
        assert worlds.alone(loaded, strategy=f"{kind}:period=4", workers=2, how=how) == (2, "")
    assert worlds.alone(loaded, strategy=f"{kind}:period=1", workers=2, how="own") == (2, "")


def test_values_without_a_new_version_are_compared_in_some_looks() -> None:
    guard, parameter = WriteGuard("why"), nn.Parameter(torch.ones(3))
    guard.note([("teacher", parameter)])
    assert [guard.written_cheaply([("teacher", parameter)]) for _ in range(4)] == [[]] * 4
    parameter.data.mul_(2)
    assert [guard.written_cheaply([("teacher", parameter)]) for _ in range(4)] == [[], [], [], ["teacher"]]
    guard.note([("teacher", parameter)])
    with torch.no_grad():
        parameter.mul_(2)
    assert guard.written_cheaply([("teacher", parameter)]) == ["teacher"]
