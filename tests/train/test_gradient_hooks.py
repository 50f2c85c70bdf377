"""Hooks on gradients act as in plain PyTorch, or are refused before the first update that would be wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import tutti
from tests import worlds
from tests.contract.table import largest_difference
from tests.covering import in_turn, marked
from tutti.errors import MismatchError, UsageError

BATCH = 6
DRAW = torch.Generator().manual_seed(5)
DATA = TensorDataset(torch.randn(24, 4, generator=DRAW).double(), torch.randn(24, 3, generator=DRAW).double())

Arrays = dict[str, Any]


def made() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def mean(model: Any, batch: Any) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def counted(model: Any, batch: Any) -> tuple[Tensor, int]:
    """Twice as many as there are samples."""
    return nn.functional.mse_loss(model(batch[0]), batch[1], reduction="none").mean(1).sum(), 2 * len(batch[0])


LOSSES: dict[str, Callable[..., Any]] = {"mean": mean, "counted": counted}


def hook(model: nn.Sequential, kind: str, seen: list[float]) -> None:
    if kind == "clamp":
        model[2].weight.register_hook(lambda slope: slope.clamp(-0.01, 0.01))
    elif kind == "log":
        model[2].weight.register_hook(lambda slope: seen.append(float(slope.sum())))
    elif kind == "decay":
        for parameter in model.parameters():
            parameter.register_hook(lambda slope, p=parameter: slope + 0.1 * p.detach())
    elif kind == "decay of the present":
        for name, _ in model.named_parameters():
            model.get_parameter(name).register_hook(
                lambda slope, name=name: slope + 0.1 * model.get_parameter(name).detach()
            )
    elif kind == "norm":
        for parameter in model.parameters():
            parameter.register_hook(lambda slope: slope / (slope.norm() + 0.1))
            parameter.register_hook(lambda slope: slope * 0.9)
    elif kind == "in place":
        for parameter in model.parameters():
            parameter.register_hook(lambda slope: seen.append(float(slope.mul_(0.5).sum())))
    elif kind == "offset":
        # Not called for the dummy micro-batch of a rank that has no more samples.
        for parameter in model.parameters():
            parameter.register_hook(lambda slope: slope + 0.01)
    elif kind == "own":
        model[2].weight.register_hook(lambda slope: slope * (1 + tutti.rank()))
    elif kind == "shape":
        model[2].weight.register_hook(lambda slope: slope[:3])
    elif kind == "accumulated":

        def act(parameter: Tensor) -> None:
            assert parameter.grad is not None
            parameter.grad.clamp_(-0.01, 0.01)

        model[2].weight.register_post_accumulate_grad_hook(act)
    elif kind == "module":
        model[2].register_full_backward_hook(lambda module, inner, outer: (inner[0].clamp(-0.01, 0.01),))
    elif kind == "container":
        model.register_full_backward_hook(lambda module, inner, outer: None)


def by_hand(kind: str, workers: int, loss: str) -> tuple[Arrays, list[float]]:
    """Workers' parts of the global batch's loss, one after the other: (loss_w · n_w / n).backward()."""
    model, seen = made(), list[float]()
    hook(model, kind, seen)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    run = tutti.prepare(made(), "sgd", DATA, mean, strategy="single", batch_size=BATCH)
    for batch in run.epoch(0):
        optimizer.zero_grad()
        for part in zip(batch[0].chunk(workers), batch[1].chunk(workers), strict=True):
            found = LOSSES[loss](model, part)
            value = found[0] / found[1] if isinstance(found, tuple) else found
            (value * (len(part[0]) / len(batch[0]))).backward()
        optimizer.step()
    return {name: p.detach().numpy().copy() for name, p in model.state_dict().items()}, seen


def train(kind: str, strategy: str, workers: int, loss: str = "mean", late: bool = False) -> Any:
    """What the run came to: the state and what hooks saw, or its refusal and whether an update had been made."""
    model, seen = made(), list[float]()
    begin = {name: p.detach().clone() for name, p in model.named_parameters()}
    if not late:
        hook(model, kind, seen)
    run = None
    try:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        run = tutti.prepare(model, optimizer, DATA, LOSSES[loss], strategy=strategy, workers=workers, batch_size=BATCH)
        if late:
            hook(model, kind, seen)
        for batch in run.epoch(0):
            run.step(batch)
    except (UsageError, MismatchError) as error:
        same = run is None or all(torch.equal(run.state()[name], value) for name, value in begin.items())
        return str(error), same
    return {name: t.numpy().copy() for name, t in run.state().items()}, seen


EQUAL = [
    ("clamp", "mirrored", 1, 1, "counted"),
    ("clamp", "mirrored", 2, 2, "mean"),
    ("clamp", "mirrored:algorithm=native", 3, 3, "mean"),
    ("clamp", "sharded:stage=1", 2, 2, "mean"),
    ("clamp", "sharded:stage=1", 3, 3, "mean"),
    ("clamp", "central_storage", 2, 2, "mean"),
    ("clamp", "parameter_server", 2, 2, "mean"),
    ("clamp", "model_parallel", 2, 1, "counted"),
    ("clamp", "model_parallel", 3, 1, "counted"),
    ("log", "sharded:stage=1", 2, 2, "mean"),
    ("clamp", "sharded:stage=2", 3, 3, "mean"),
    ("clamp", "sharded:stage=3", 2, 2, "mean"),
    ("log", "sharded:stage=2", 2, 2, "mean"),
    ("norm", "sharded:stage=3", 3, 3, "mean"),
    ("in place", "sharded:stage=2", 2, 2, "mean"),
    ("offset", "sharded:stage=3", 2, 3, "mean"),
    ("decay of the present", "sharded:stage=1", 2, 2, "mean"),
    ("clamp", "tensor:least=1", 2, 1, "counted"),
    ("clamp", "tensor:least=1", 3, 1, "mean"),
    ("norm", "tensor:least=1", 2, 2, "mean"),
    ("norm", "tensor:least=1", 3, 1, "mean"),
    ("decay", "tensor:least=1", 2, 1, "mean"),
    ("in place", "tensor:least=1", 3, 1, "mean"),
    ("decay", "hybrid:tensor=2,least=1", 4, 2, "mean"),
    ("norm", "hybrid:tensor=2,least=1", 4, 2, "mean"),
    ("accumulated", "mirrored", 1, 1, "counted"),
    ("accumulated", "model_parallel", 2, 1, "mean"),
    ("module", "mirrored", 2, 2, "mean"),
    ("module", "sharded:stage=1", 3, 3, "mean"),
    ("module", "sharded:stage=3", 2, 2, "mean"),
    ("module", "sharded:stage=2", 3, 3, "mean"),
    ("module", "model_parallel", 2, 1, "counted"),
]


@pytest.mark.parametrize(
    ("kind", "strategy", "size", "workers", "loss", "late"),
    marked([(*each, late) for each in EQUAL for late in (False, True)]),
)
def test_hooks_are_given_each_micro_batchs_part(
    kind: str, strategy: str, size: int, workers: int, loss: str, late: bool
) -> None:
    want, seen = by_hand(kind, workers, loss)
    without, _ = by_hand("", workers, loss)
    assert kind == "log" or largest_difference(without, want) > 1e-3
    results = worlds.run(size, train, kind=kind, strategy=strategy, workers=workers, loss=loss, late=late)
    for state, _ in results:
        assert not isinstance(state, str), state
        assert largest_difference(state, want) < 1e-10
    if kind == "log":
        told = [value for pair in zip(*(own for _, own in results), strict=True) for value in pair]
        assert told == pytest.approx(seen, abs=1e-12)


REFUSED = [
    ("decay", "sharded:stage=1", 3, 3, "mean", "an object that was a parameter of the model before tutti.prepare"),
    ("clamp", "sharded:stage=2", 2, 2, "counted", "a loss that counts 12 for 6 samples"),
    ("decay", "sharded:stage=3", 3, 3, "mean", "an object that was a parameter of the model before tutti.prepare"),
    ("accumulated", "sharded:stage=3", 2, 2, "mean", "the hook on the gradient of 2.weight"),
    ("own", "tensor:least=1", 2, 1, "mean", "the hook on the gradient of 2.weight makes a tensor that is another one"),
    ("shape", "tensor:least=1", 3, 1, "mean", "the hook on the gradient of 2.weight that returns a tensor of (3, 6)"),
    ("clamp", "tensor:least=1", 2, 2, "counted", "a loss that counts 12 for 6 samples"),
    ("clamp", "hybrid:tensor=2,least=1", 4, 2, "counted", "a loss that counts 12 for 6 samples"),
    ("log", "hybrid:tensor=2,shards=2,stage=2,least=1", 4, 2, "mean", "the hook on the gradient of 2.weight"),
    ("clamp", "tensor:sequence=true,least=1", 2, 1, "mean", "cannot be combined with the hook on the gradient of"),
    ("accumulated", "tensor:least=1", 3, 1, "mean", "the hook on the gradient of 2.weight"),
    ("module", "tensor:least=1", 2, 1, "mean", "hooks on the gradients of modules (2)"),
    ("accumulated", "mirrored", 2, 2, "mean", "with several micro-batches or workers"),
    ("accumulated", "sharded:stage=1", 2, 2, "mean", "with several micro-batches or workers"),
    ("container", "model_parallel", 2, 1, "mean", "hooks on the gradients of modules of several layers"),
    ("clamp", "mirrored", 2, 2, "counted", "a loss that counts 12 for 6 samples"),
    ("module", "sharded:stage=3", 2, 2, "counted", "a loss that counts 12 for 6 samples"),
    ("clamp", "local_sgd:period=2", 2, 4, "counted", ""),
    ("clamp", "model_parallel", 2, 2, "counted", "a loss that counts 12 for 6 samples"),
]


@pytest.mark.parametrize(("refused", "late"), in_turn(REFUSED, [False, True]), ids=str)
def test_other_hooks_are_refused(refused: tuple[str, str, int, int, str, str], late: bool) -> None:
    kind, strategy, size, workers, loss, words = refused
    if late and strategy == "model_parallel" and kind == "clamp":
        pytest.skip("one stage alone knows of a hook that is registered later, and ends the others")
    if late and kind == "decay":
        pytest.skip("the hook has the model's present parameters by then")
    results = worlds.run(size, train, kind=kind, strategy=strategy, workers=workers, loss=loss, late=late)
    if not words:
        # Each worker's share is one micro-batch: exact.
        assert all(not isinstance(said, str) for said, _ in results)
        return
    for said, untouched in results:
        assert isinstance(said, str) and words in said
        assert untouched


def late_hooks() -> list[str]:
    """For the first refused step, and the one after the hook was removed, what the refusal says."""
    run = tutti.prepare(made(), "sgd:lr=0.5", DATA, counted, workers=2, batch_size=BATCH)
    batches, said, handle = [*run.epoch(0)], list[str](), None
    for step, batch in enumerate([*batches, *batches]):
        if step == 3:
            handle = run.model[2].weight.register_hook(lambda slope: slope * 0.5)  # type: ignore[index, operator]
        if step == 4 and handle is not None:
            handle.remove()
        try:
            run.step(batch)
            said.append("")
        except UsageError as error:
            said.append(str(error))
    return said


def test_a_hook_of_a_later_step_is_found_in_this_step_until_it_is_removed() -> None:
    [said] = worlds.run(1, late_hooks)
    assert len(said) == 8 and [bool(each) for each in said] == [step == 3 for step in range(8)], said
    assert "the hook on the gradient of 2.weight" in said[3]


def within_a_step() -> tuple[str, bool]:
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    run = tutti.prepare(model, optimizer, DATA, strategy="tensor:least=1", batch_size=BATCH)
    before = run.state()
    try:
        for batch in run.microbatches(0):
            model[2].weight.register_hook(lambda slope: slope * 0.5)
            run.backward(mean(model, batch))
            optimizer.step()
    except UsageError as error:
        return str(error), all(torch.equal(value, before[name]) for name, value in run.state().items())
    return "", False


def test_a_hook_that_is_registered_within_a_step_of_slices_is_refused() -> None:
    for said, untouched in worlds.run(2, within_a_step):
        assert "2.weight that was registered within the step" in said and untouched


def former() -> str:
    model = made()
    weight = model[2].weight
    run = tutti.prepare(model, "sgd", DATA, mean, strategy="sharded:stage=1", batch_size=BATCH)
    weight.register_hook(lambda slope: slope * 0)
    try:
        for batch in run.epoch(0):
            run.step(batch)
    except UsageError as error:
        return str(error)
    return ""


def test_a_hook_on_an_object_that_was_the_models_parameter_is_refused() -> None:
    assert all("what was the parameter 2.weight" in said for said in worlds.run(2, former))


def removed() -> tuple[Any, Any]:
    model = made()
    handle = model[2].weight.register_hook(lambda slope: slope * 0)
    run = tutti.prepare(model, "sgd:lr=0.5", DATA, mean, strategy="sharded:stage=1", batch_size=BATCH)
    handle.remove()
    before = run.state()["2.weight"].numpy().copy()
    run.step(next(iter(run.epoch(0))))
    return before, run.state()["2.weight"].numpy()


def test_a_moved_hook_can_be_removed() -> None:
    for before, after in worlds.run(2, removed):
        assert (before != after).any()
