"""Optimizers that mix the numbers of one tensor, or of several, where ranks hold slices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tutti
from tests import worlds
from tests.covering import Continuations, in_turn, shared_out, thinned
from tests.parallel.mixers import loss, prepared, state, trained
from tutti.comm.communicator import Communicator
from tutti.comm.mesh_communicators import Communicators
from tutti.comm.rank_mesh import RankMesh
from tutti.errors import UsageError
from tutti.launcher import context
from tutti.parallel.whole_tensors import GatheredTensor, WholeTensors, gather_axis
from tutti.train.run_checkpoints import Checkpoints

PLACES = [
    (2, "sharded:units=Linear"),
    (3, "sharded:stage=2,units=Linear"),
    (3, "sharded:stage=1"),
    (4, "sharded:stage=1"),
    (4, "sharded:shards=2,units=Linear"),
    (3, "tensor:least=1"),
    (4, "tensor:tensor=2,least=1"),
    (4, "hybrid:shards=2,tensor=2,least=1"),
    (4, "hybrid:shards=2,stage=3,units=Linear,tensor=2,least=1"),
]
OTHERS = [
    (3, "mirrored"),
    (3, "central_storage"),
    (2, "parameter_server:servers=2"),
    (2, "pipeline"),
    (4, "hybrid:stages=2,tensor=2,least=1"),
    (4, "hybrid:shards=2,stages=2"),
]
MIXED = ["muon", "grouped", "normalized", "columns"]


def check(optimizer: str, devices: int, strategy: str) -> None:
    want = worlds.alone(trained, strategy="single", optimizer=optimizer)
    for got in worlds.run(devices, trained, strategy=strategy, optimizer=optimizer):
        assert got.keys() == want.keys()
        assert max(np.abs(got[name] - want[name]).max() for name in want) <= 1e-10


@pytest.mark.parametrize(("place", "optimizer"), in_turn(PLACES, MIXED), ids=str)
def test_whole_tensors_are_mixed(place: tuple[int, str], optimizer: str) -> None:
    check(optimizer, *place)


@pytest.mark.parametrize(("devices", "strategy"), thinned(PLACES, 3))
def test_rows_are_mixed_by_themselves(devices: int, strategy: str) -> None:
    """Which needs no more where whole rows are here, and whole tensors where columns are split."""
    check("centralized", devices, strategy)


@pytest.mark.parametrize(("devices", "strategy"), thinned(PLACES, 3, 1))
def test_all_tensors_are_mixed(devices: int, strategy: str) -> None:
    check("together", devices, strategy)


@pytest.mark.parametrize(
    ("devices", "strategy"), [pytest.param(3, "sharded:units=Linear", marks=pytest.mark.full), (2, "pipeline")]
)
def test_an_option_that_a_new_one_would_not_have_is_copied(devices: int, strategy: str) -> None:
    check("mode", devices, strategy)


@pytest.mark.parametrize(("devices", "strategy"), thinned(PLACES, 3, 2))
def test_state_that_a_constructor_makes_is_cut(devices: int, strategy: str) -> None:
    check("adagrad", devices, strategy)


@pytest.mark.parametrize(("place", "optimizer"), in_turn(OTHERS, ["muon", "grouped", "decayed", "adagrad"]), ids=str)
def test_where_tensors_are_shared_out(place: tuple[int, str], optimizer: str) -> None:
    """Flattened ones, too, in which an optimizer may see no matrix."""
    check(optimizer, *place)


def held(strategy: str, optimizer: str) -> tuple[int, int]:
    """How often tensors were gathered in one step, and numbers in this rank's part of the optimizer's state."""
    run, gathered = prepared(strategy, optimizer), []
    with pytest.MonkeyPatch.context() as patch:
        real = Communicator.exchange_parts
        patch.setattr(Communicator, "exchange_parts", lambda *given: (gathered.append(given[-1]), real(*given))[1])
        run.step(next(run.epoch(0)))
    [made] = run.gradient_sync.optimizers
    states = [value for s in made.state.values() for value in s.values()]
    return len(gathered), sum(value.numel() for value in states if value.dim())


@pytest.mark.parametrize("strategy", ["sharded:units=Linear", "sharded:stage=1", "tensor:least=1"])
def test_each_number_by_itself_needs_no_message(strategy: str) -> None:
    for optimizer in ("adamw", "decayed"):
        assert [count for count, _ in worlds.run(3, held, strategy=strategy, optimizer=optimizer)] == [0] * 3
    assert [count for count, _ in worlds.run(3, held, strategy=strategy, optimizer="normalized")] == [2] * 3


def test_each_tensors_state_is_on_one_rank() -> None:
    whole = sum(numbers for _, numbers in worlds.run(1, held, strategy="single", optimizer="normalized"))
    mine = [numbers for _, numbers in worlds.run(3, held, strategy="sharded:units=Linear", optimizer="normalized")]
    assert sum(mine) == whole and max(mine) < whole
    made = [numbers for _, numbers in worlds.run(3, held, strategy="sharded:stage=1", optimizer="ready")]
    frozen = 10 * 10 + 10
    assert [numbers - frozen for numbers in made] == mine


class Failing(torch.optim.SGD):
    """Fails after it has changed the parameters."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        raise ValueError("unreadable")


def failed_step() -> tuple[list[Any], bool]:
    """This rank's rows of a tensor for each rank, after a failed step of every owner; whether gradients are as set."""
    comm = Communicators(context.current(), RankMesh(replica=tutti.size(), rank=tutti.rank())).world
    regions = [[(slice(rank, rank + 1), slice(0, 2))] for rank in range(comm.size)]
    parameters = [torch.nn.Parameter(torch.full((1, 2), float(comm.rank))) for _ in range(comm.size)]
    gradients = [torch.full((1, 2), float(number)) for number in range(comm.size)]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    optimizer = Failing(parameters, lr=0.1)
    parts = [GatheredTensor(parameter, (1, 2), (comm.size, 2), regions) for parameter in parameters]
    with pytest.raises(ValueError, match="unreadable"):
        WholeTensors([gather_axis(comm, parts, False)], optimizer).step(optimizer)
    same = all(p.grad is gradient for p, gradient in zip(parameters, gradients, strict=True))
    return [p.tolist() for p in parameters], same and optimizer.param_groups[0]["params"] == parameters


@pytest.mark.parametrize("size", [2, 3])
def test_a_step_that_fails_leaves_the_slices(size: int) -> None:
    assert worlds.run(size, failed_step) == [([[[rank, rank]]] * size, True) for rank in range(size)]


def custom_loop(strategy: str, optimizer: str) -> dict[str, Any]:
    """A loop of the user's own, with the optimizer that the user made."""
    run = prepared(strategy, optimizer)
    made = run.optimizer
    assert made is not None
    for batch in run.microbatches(0):
        run.backward(loss(run.model, batch))
        made.step()
        made.zero_grad()
    return state(run)


@pytest.mark.parametrize("strategy", ["sharded:units=Linear", "sharded:stage=1"])
def test_a_loop_of_the_users_own(strategy: str) -> None:
    want = worlds.alone(custom_loop, strategy="single", optimizer="grouped")
    for got in worlds.run(3, custom_loop, strategy=strategy, optimizer="grouped"):
        assert max(np.abs(got[name] - want[name]).max() for name in want) <= 1e-10


NESTED = ["positional", "lookahead", "sharpness"]
NESTED_PLACES = [
    (2, "central_storage"),
    (3, "central_storage"),
    (2, "pipeline"),
    (3, "pipeline"),
    (2, "sharded:stage=1"),
    (3, "sharded:stage=1"),
    (3, "sharded:units=Linear"),
    (2, "parameter_server:servers=2"),
    (4, "hybrid:shards=2,stages=2"),
]


def on_three() -> list[Any]:
    """The places with a wrapper in turn; those on two devices that are there on three, too, marked ``full``."""
    largest = {strategy: max(n for n, other in NESTED_PLACES if other == strategy) for _, strategy in NESTED_PLACES}
    rows = in_turn([place for place in NESTED_PLACES if place[0] == largest[place[1]]], NESTED)
    fewer = [place for place in NESTED_PLACES if place[0] < largest[place[1]]]
    return rows + [pytest.param(place, each, marks=pytest.mark.full) for place in fewer for each in NESTED]


@pytest.mark.parametrize(("place", "optimizer"), on_three(), ids=str)
def test_optimizers_that_no_constructor_can_make_again(place: tuple[int, str], optimizer: str) -> None:
    """Wrappers of other optimizers, and classes with arguments of their own, are copied."""
    check(optimizer, *place)


@pytest.mark.parametrize(("devices", "strategy"), thinned(NESTED_PLACES[:7], 2))
def test_state_that_is_a_copy_of_the_parameters(devices: int, strategy: str) -> None:
    """Slow weights that a wrapper copies as it is made, before ranks have slices of them."""
    check("ahead", devices, strategy)


@pytest.mark.parametrize(("devices", "strategy"), [(3, "sharded:units=Linear"), (2, "central_storage")])
def test_a_wrapped_optimizer_that_mixes_a_tensor(devices: int, strategy: str) -> None:
    check("normalized ahead", devices, strategy)


def saver(run: tutti.Run, folder: str) -> Checkpoints:
    facts = {"workers": run.context.workers, "seed": 0, "config_sha256": "0" * 64}
    return Checkpoints(run, Path(folder), context.current(), facts, keep=2, warn=print)


def save(strategy: str, optimizer: str, folder: str) -> None:
    """After the first epoch."""
    run = prepared(strategy, optimizer)
    for batch in run.epoch(0):
        run.step(batch)
    checkpoints = saver(run, folder)
    checkpoints.save({})
    checkpoints.wait()


def resume(strategy: str, optimizer: str, folder: str) -> dict[str, Any]:
    """The second epoch."""
    run = prepared(strategy, optimizer)
    assert saver(run, folder).restore() is not None and run.global_step == 2
    for batch in run.epoch(1):
        run.step(batch)
    return state(run)


STATES = [
    ("sharded:units=Linear", 3),
    ("single", 1),
    ("tensor:least=1", 2),
    ("sharded:stage=1", 2),
    ("hybrid:shards=2,stage=3,units=Linear,tensor=2,least=1", 4),
    ("mirrored", 2),
    ("hybrid:shards=2,tensor=2,least=1", 4),
    ("parameter_server:servers=2", 2),
    ("sharded:shards=2,units=Linear", 4),
    ("central_storage", 3),
]


@pytest.mark.parametrize(
    ("optimizer", "continuations"), shared_out("muon", "grouped", "adagrad", "lookahead", "ahead", "sharpness")
)
def test_state_is_continued_by_any(optimizer: str, continuations: Continuations, tmp_path: Path) -> None:
    """Row and column factors, which have another shape than their parameter; each strategy by another or two."""
    want = worlds.alone(trained, strategy="single", optimizer=optimizer)
    for (strategy, devices), after in continuations(STATES, -1, -4):
        folder = str(tmp_path / strategy)
        worlds.run(devices, save, strategy=strategy, optimizer=optimizer, folder=folder)
        for other, ranks in after:
            for got in worlds.run(ranks, resume, strategy=other, optimizer=optimizer, folder=folder):
                assert max(np.abs(got[name] - want[name]).max() for name in want) <= 1e-10, (strategy, other)


def refused(strategy: str, optimizer: str) -> str:
    try:
        prepared(strategy, optimizer)
    except UsageError as error:
        return str(error)
    return ""


EXCHANGED = ["sharded:stage=1", "sharded", "tensor:least=1", "pipeline", "central_storage", "local_sgd:period=2"]


@pytest.mark.parametrize(
    ("devices", "strategy", "optimizer", "words"),
    [
        (2, "pipeline", "together", "Together needs all tensors together, and 2 stages of the model have some each"),
        (2, "central_storage", "together", "2 ranks that own tensors have some each"),
        (1, "parameter_server:servers=2", "together", "2 parameter servers have some each"),
        (2, "sharded:units=Linear", "lbfgs", "Take strategy='mirrored', or an optimizer whose step needs no closure"),
        (2, "pipeline", "lbfgs", "Take strategy='mirrored', or an optimizer whose step needs no closure"),
        (2, "mirrored", "drawing", "Drawing draws random numbers in its step"),
        (2, "local_sgd:period=2", "drawing", "Drawing draws random numbers in its step"),
        (1, "parameter_server", "drawing", "Drawing draws random numbers in its step"),
        *((2, each, "distributed", "Distributed calls collectives") for each in EXCHANGED),
        (4, "hybrid:shards=2,stages=2", "ahead", "its state slow has not the shape"),
        (2, "central_storage", "sharpness by norm", "needs all tensors together, and 2 ranks that own tensors"),
    ],
)
def test_the_rest_is_refused(devices: int, strategy: str, optimizer: str, words: str) -> None:
    for said in worlds.run(devices, refused, strategy=strategy, optimizer=optimizer):
        assert words in said


@pytest.mark.parametrize(
    ("devices", "strategy", "optimizer"),
    [
        (2, "mirrored", "together"),
        (2, "sharded:units=Linear", "together"),
        (2, "tensor:least=1", "together"),
        (3, "mirrored", "distributed"),
    ],
)
def test_what_a_refusal_names_works(devices: int, strategy: str, optimizer: str) -> None:
    check(optimizer, devices, strategy)


def thawed(strategy: str, kind: str, frozen: bool) -> Any:
    """Give the model's first half to the optimizer before the second step, and with ``frozen`` thaw it then."""
    torch.manual_seed(0)
    net: Any = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 1))
    net.double()[:3].requires_grad_(not frozen)
    makers: dict[str, Any] = {"Adafactor": torch.optim.Adafactor, "LAMB": tutti.optim.LAMB}
    optimizer = makers[kind](net[3:].parameters(), lr=0.1)
    data = torch.rand(36, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    try:
        run = tutti.prepare(
            net, optimizer, data, lambda m, b: m(b).square().mean(), strategy=strategy, workers=2, batch_size=12
        )
        for step, batch in enumerate(run.epoch(0)):
            if step == 1:
                net[:3].requires_grad_(True)
                optimizer.add_param_group({"params": list(net[:3].parameters())})
            run.step(batch)
        return {name: tensor.numpy() for name, tensor in run.state().items()}
    except UsageError as error:
        return str(error)


@pytest.mark.parametrize("kind", ["Adafactor", "LAMB"])
def test_a_stage_without_an_optimizer_gets_one_that_steps_on_whole_tensors(kind: str) -> None:
    want = worlds.alone(thawed, strategy="single", kind=kind, frozen=True)
    for got in worlds.run(4, thawed, strategy="hybrid:stages=2,cuts=4,tensor=2,least=1", kind=kind, frozen=True):
        assert max(np.abs(got[name] - want[name]).max() for name in want) <= 1e-10


@pytest.mark.parametrize("strategy", ["tensor:least=1", "sharded:stage=1", "sharded:units=Linear"])
def test_an_optimizer_of_whole_tensors_takes_no_further_ones(strategy: str) -> None:
    for said in worlds.run(2, thawed, strategy=strategy, kind="Adafactor", frozen=False):
        assert "the script trains 0.weight from here on" in said and "Adafactor needs whole tensors" in said
