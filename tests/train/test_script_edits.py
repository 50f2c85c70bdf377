"""Edits of gradients and parameters of which each rank has a part must be the same on every rank, or the run stops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import tutti
from tests import worlds
from tests.covering import thinned
from tutti.errors import TuttiError
from tutti.nn.script_edits import EditWatch
from tutti.torch_compat import traced_function_modes

DRAW = torch.Generator().manual_seed(0)
DATA = TensorDataset(torch.randn(24, 3, generator=DRAW, dtype=torch.float64))


def mean(net: Any, batch: Any) -> Any:
    return net(batch[0]).square().mean()


def multiplied(net: nn.Module, optimizer: Any, number: float) -> None:
    for parameter in net.parameters():
        parameter.grad.mul_(number)  # type: ignore[union-attr]


def multiplied_by_a_tensor(net: nn.Module, optimizer: Any, number: float) -> None:
    for parameter in net.parameters():
        parameter.grad *= torch.tensor(number)  # type: ignore[operator]


def multiplied_together(net: nn.Module, optimizer: Any, number: float) -> None:
    torch._foreach_mul_([p.grad for p in net.parameters() if p.grad is not None], number)


def multiplied_through_data(net: nn.Module, optimizer: Any, number: float) -> None:
    for parameter in net.parameters():
        parameter.grad.data.mul_(number)  # type: ignore[union-attr]


def multiplied_anew(net: nn.Module, optimizer: Any, number: float) -> None:
    for parameter in net.parameters():
        parameter.grad = parameter.grad.mul(number)  # type: ignore[union-attr]


class Pair(NamedTuple):
    """Two tensors, as a script may give them to ``torch.stack``."""

    first: torch.Tensor
    second: torch.Tensor


def multiplied_in_pairs(net: nn.Module, optimizer: Any, number: float) -> None:
    for parameter in net.parameters():
        gradient: Any = parameter.grad
        parameter.grad = torch.stack(Pair(gradient * number, gradient * number)).mean(0)


def multiplied_in_groups(net: nn.Module, optimizer: Any, number: float) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad.mul_(number)


def decayed(net: nn.Module, optimizer: Any, number: float) -> None:
    for parameter in net.parameters():
        parameter.grad.add_(parameter.detach(), alpha=number)  # type: ignore[union-attr]


def clipped(net: nn.Module, optimizer: Any, number: float) -> None:
    nn.utils.clip_grad_norm_(net.parameters(), 0.1 * number)


def clipped_after_a_forward(net: nn.Module, optimizer: Any, number: float) -> None:
    with torch.no_grad():
        net(DATA.tensors[0][:2])
    clipped(net, optimizer, number)


def clamped(net: nn.Module, optimizer: Any, number: float) -> None:
    nn.utils.clip_grad_value_(net.parameters(), 0.01 * number)


def written(net: Any, optimizer: Any, number: float) -> None:
    with torch.no_grad():
        net[0].weight.mul_(number)


def written_through_data(net: Any, optimizer: Any, number: float) -> None:
    net[0].weight.data.mul_(number)


def written_in_groups(net: Any, optimizer: Any, number: float) -> None:
    optimizer.param_groups[0]["params"][0].data.mul_(number)


Edit = Callable[[Any, Any, float], None]


def trained(
    strategy: str,
    gradients: Edit | None = None,
    parameters: Edit | None = None,
    unlike: bool = False,
    loop: bool = True,
    compiled: bool = False,
) -> Any:
    """Train with an edit of gradients in each step, or of parameters after the second; ``unlike``: by rank."""
    torch.manual_seed(0)
    net: Any = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 6)).double()
    if compiled:
        net.compile(backend="eager")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    run = None
    if strategy != "plain":
        run = tutti.prepare(net, optimizer, DATA, mean, strategy=strategy, batch_size=6, shuffle=False)
    batches = [(rows,) for rows in DATA.tensors[0].split(6)]
    done, number = 0, 1.0 / (2 + (tutti.rank() if unlike else 0))
    try:
        for batch in batches if run is None else run.microbatches(0) if loop else run.epoch(0):
            if loop:
                optimizer.zero_grad()
                (torch.Tensor.backward if run is None else run.backward)(mean(net, batch))
                if gradients is not None:
                    gradients(net, optimizer, number)
                optimizer.step()
            elif run is not None:
                run.step(batch)
            done += 1
            if parameters is not None and done == 2:
                parameters(net, optimizer, number)
    except TuttiError as error:
        return type(error).__name__, done, str(error)
    return dict(net.state_dict() if run is None else run.state())


GRADIENTS = [
    ("sharded:stage=2", multiplied),
    *(("sharded", edit) for edit in (multiplied, multiplied_by_a_tensor, multiplied_together, multiplied_in_groups)),
    *(
        ("sharded", edit)
        for edit in (multiplied_through_data, multiplied_anew, multiplied_in_pairs, decayed, clipped, clamped)
    ),
    *((f"sharded:stage={stage}", clipped_after_a_forward) for stage in (2, 3)),
]


@pytest.mark.parametrize(("strategy", "edit"), thinned(GRADIENTS, 2))
def test_other_numbers_on_each_rank_are_refused_before_the_first_update(strategy: str, edit: Edit) -> None:
    for kind, done, said in worlds.run(2, trained, strategy=strategy, gradients=edit, unlike=True):
        assert (kind, done) == ("UsageError", 0)
        assert "in another way on each rank: rank 0 has the gradient of 0.weight: " in said
        assert "test_script_edits.py:" in said and "the same everywhere" in said and "#" not in said


@pytest.mark.parametrize(("strategy", "edit"), thinned(GRADIENTS, 2, turn=1))
def test_the_same_numbers_on_each_rank_give_what_one_device_gives(strategy: str, edit: Edit) -> None:
    want = trained("plain", gradients=edit)
    for state in worlds.run(2, trained, strategy=strategy, gradients=edit):
        torch.testing.assert_close(state, want, rtol=0, atol=1e-10)


PARAMETERS = [
    *(("sharded", edit) for edit in (written, written_through_data, written_in_groups)),
    *(("tensor", edit) for edit in (written, written_through_data)),
    ("sharded:stage=1", written_in_groups),
    ("sharded:stage=2", written_through_data),
]


@pytest.mark.parametrize(
    ("strategy", "edit", "loop"),
    [*((*each, True) for each in PARAMETERS), ("sharded", written_through_data, False), ("tensor", written, False)],
)
def test_other_writes_on_each_rank_are_refused_before_the_next_update(strategy: str, edit: Edit, loop: bool) -> None:
    for kind, done, said in worlds.run(2, trained, strategy=strategy, parameters=edit, unlike=True, loop=loop):
        assert (kind, done) == ("UsageError", 2)
        assert "in another way on each rank: rank 0 has 0.weight: mul(0.5), rank 1 has 0.weight: mul(0.3333" in said
        assert "before step 3, " in said and "test_script_edits.py:" in said


@pytest.mark.parametrize(("strategy", "edit"), PARAMETERS)
def test_the_same_writes_on_each_rank_give_what_one_device_gives(strategy: str, edit: Edit) -> None:
    want = trained("plain", parameters=edit)
    for state in worlds.run(2, trained, strategy=strategy, parameters=edit):
        torch.testing.assert_close(state, want, rtol=0, atol=1e-10)


@pytest.mark.parametrize("loop", [False, True])
def test_compiled_models_are_watched(loop: bool) -> None:
    for kind, done, said in worlds.run(
        2, trained, strategy="sharded", parameters=written_through_data, unlike=True, loop=loop, compiled=True
    ):
        assert (kind, done) == (
            "UsageError",
            2,
        ) and "rank 0 has 0.weight: mul(0.5), rank 1 has 0.weight: mul(0." in said
    if loop:
        want = trained("plain", gradients=clipped)
        # The function modes of a refused loop would disturb those of the next run in the process.
        for kind, done, _ in worlds.run(2, trained, strategy="sharded", gradients=clipped, unlike=True):
            assert (kind, done) == ("UsageError", 0)
        for state in worlds.run(2, trained, strategy="sharded", gradients=clipped, compiled=True):
            torch.testing.assert_close(state, want, rtol=0, atol=1e-10)


def trained_beside_an_open_loop() -> Any:
    """Train a compiled model while the function modes of another run's loop are active."""
    net: Any = nn.Linear(3, 6).double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    run = tutti.prepare(net, optimizer, DATA, mean, strategy="mirrored", batch_size=6, shuffle=False)
    bodies = run.microbatches(0)
    next(bodies)
    assert traced_function_modes()
    return trained("sharded", gradients=clipped, compiled=True)


def test_a_compiled_model_trains_beside_an_open_loop() -> None:
    want = trained("plain", gradients=clipped)
    for state in worlds.run(2, trained_beside_an_open_loop):
        torch.testing.assert_close(state, want, rtol=0, atol=1e-10)


def zeroed_by_one(net: Any, optimizer: Any, number: float) -> None:
    if tutti.rank() == 2:
        net[0].weight.data.zero_()


@pytest.mark.parametrize("strategy", ["sharded", "tensor"])
def test_a_write_of_one_rank_is_refused_before_the_next_update(strategy: str) -> None:
    for kind, done, said in worlds.run(3, trained, strategy=strategy, parameters=zeroed_by_one):
        assert (kind, done) == ("UsageError", 2)
        assert "rank 0 has (nothing), rank 2 has 0.weight: zero()" in said
    worlds.forget(3)


def dropped_by_one(net: Any, optimizer: Any, number: float) -> None:
    if tutti.rank() == 1:
        net[0].weight.grad = None


@pytest.mark.parametrize("strategy", ["mirrored", "central_storage", "sharded:stage=1", "sharded", "tensor"])
def test_a_gradient_that_one_rank_edits_is_refused_there_by_its_line(strategy: str) -> None:
    found = worlds.run(2, trained, strategy=strategy, gradients=dropped_by_one)
    kind, done, said = found[1]
    assert (kind, done) == ("UsageError", 0) and found[0][1] <= 1
    assert "has edited gradients on this rank, and not on others" in said and "test_script_edits.py:" in said
    worlds.forget(2)


@pytest.mark.parametrize("strategy", ["mirrored", "mirrored:algorithm=native", "central_storage"])
def test_other_numbers_through_data_are_refused_before_the_first_update(strategy: str) -> None:
    found = worlds.run(2, trained, strategy=strategy, gradients=multiplied_through_data, unlike=True)
    for kind, done, said in found:
        assert (kind, done) == ("UsageError", 0) and "changed the gradient of 0.weight in another way" in said
        assert "test_script_edits.py:" in said


def accumulated(strategy: str, unlike: bool) -> Any:
    """Scale gradients between two backwards of one update."""
    torch.manual_seed(0)
    net: Any = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 6)).double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    run = None
    if strategy != "plain":
        run = tutti.prepare(net, optimizer, DATA, strategy=strategy, batch_size=6, shuffle=False)
    number = 1.0 / (2 + (tutti.rank() if unlike else 0))
    backward = torch.Tensor.backward if run is None else run.backward
    try:
        for batch in [(rows,) for rows in DATA.tensors[0].split(6)] if run is None else run.microbatches(0):
            optimizer.zero_grad()
            backward(mean(net, batch))
            multiplied(net, optimizer, number)
            backward(mean(net, batch))
            optimizer.step()
    except TuttiError as error:
        return run.updates if run is not None else 0, str(error)
    return dict(net.state_dict() if run is None else run.state())


@pytest.mark.parametrize("strategy", ["mirrored", "sharded:stage=1", "sharded"])
def test_edits_between_two_backwards_are_compared(strategy: str) -> None:
    for updates, said in worlds.run(2, accumulated, strategy=strategy, unlike=True):
        assert updates == 0 and "the gradient of 0.weight" in said and "in another way on each rank" in said
    worlds.forget(2)
    want = accumulated("plain", unlike=False)
    for state in worlds.run(2, accumulated, strategy=strategy, unlike=False):
        torch.testing.assert_close(state, want, rtol=0, atol=1e-10)


def test_records_of_gradients_outlive_those_of_parameters_until_the_next_reduction() -> None:
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = gradient = torch.ones(2)
    with EditWatch() as watch:
        watch.edits.cover({"weight": parameter})
        parameter.grad.mul_(2.0)
    assert watch.edits.take() == [] and len(watch.edits.lines([("weight", gradient)])) == 1
    watch.edits.forget([gradient])
    assert watch.edits.lines([("weight", gradient)]) == []


def undone(net: Any, optimizer: Any, number: float) -> None:
    net[0].weight.data.mul_(2.0 if tutti.rank() else 0.5)


def undone_through_a_view(net: Any, optimizer: Any, number: float) -> None:
    net[0].weight.data.movedim(0, 1).mul_(2.0 if tutti.rank() else 0.5)


@pytest.mark.parametrize(("edit", "loop"), [(undone, False), (undone, True), (undone_through_a_view, True)])
def test_writes_to_one_copy_that_undo_each_other_are_refused(edit: Edit, loop: bool) -> None:
    for kind, done, said in worlds.run(2, trained, strategy="central_storage", parameters=edit, loop=loop):
        assert (kind, done) == ("UsageError", 2)
        assert "rank 0 has 0.weight: mul(0.5), rank 1 has 0.weight: mul(2.0)" in said
        assert "before step 3, " in said and "test_script_edits.py:" in said


def replaced(net: nn.Module, optimizer: Any, number: float) -> None:
    for parameter in net.parameters():
        parameter.grad = None
        parameter.grad = torch.zeros_like(parameter)


def given_data(net: nn.Module, optimizer: Any, number: float) -> None:
    for parameter in net.parameters():
        parameter.grad.data = parameter.grad * 0.5  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("strategy", "edit"), [("tensor", replaced), ("tensor", given_data), ("sharded:stage=1", given_data)]
)
def test_gradients_that_are_assigned_in_place_of_others_count(strategy: str, edit: Edit) -> None:
    want = trained("plain", gradients=edit)
    for state in worlds.run(2, trained, strategy=strategy, gradients=edit):
        torch.testing.assert_close(state, want, rtol=0, atol=1e-10)


def clipped_after_data(strategy: str, broken: bool) -> Any:
    """Scale gradients through ``.data`` before they are clipped, or replace their NaNs, in each step."""
    torch.manual_seed(0)
    net: Any = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 6)).double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    run: Any = None
    if strategy != "plain":
        run = tutti.prepare(net, optimizer, DATA, strategy=strategy, batch_size=4, shuffle=False, clip=0.05)
    backward = torch.Tensor.backward if run is None else run.backward
    batches = [(rows,) for rows in DATA.tensors[0].split(4)] if run is None else run.microbatches(0)
    for step, batch in enumerate(batches):
        optimizer.zero_grad()
        # Step 4, whose gradients are looked at in no other way.
        backward(mean(net, batch) * (float("nan") if broken and step == 3 else 1.0))
        for parameter in net.parameters():
            parameter.grad.data.nan_to_num_(0.01).mul_(3.0)
        if run is None:
            nn.utils.clip_grad_norm_(net.parameters(), 0.05)
        optimizer.step()
    return dict(net.state_dict() if run is None else run.state())


@pytest.mark.parametrize("broken", [False, True])
@pytest.mark.parametrize("strategy", ["mirrored", "central_storage", "sharded"])
def test_the_norm_to_clip_by_is_that_of_gradients_edited_through_data(strategy: str, broken: bool) -> None:
    want = clipped_after_data("plain", broken)
    for state in worlds.run(2, clipped_after_data, strategy=strategy, broken=broken):
        torch.testing.assert_close(state, want, rtol=0, atol=1e-10)
