"""``load_state_dict`` and ``state_dict`` after ``tutti.prepare`` do what they do in plain PyTorch, or are refused."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
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

# --- weights given to the model ---------------------------------------------------------------------------------------

WEIGHTS = {name: 0.1 * tensor.cos() for name, tensor in made().state_dict().items()}
EVERY = [
    *("mirrored", "central_storage", "parameter_server", "sharded:stage=1", "sharded:stage=2", "sharded:stage=3"),
    *("tensor:least=1", "pipeline"),
]
IN_PARTS = ("sharded:stage=2", "sharded:stage=3", "tensor:least=1", "pipeline")
FEW = [
    *("mirrored", *IN_PARTS),
    # Of these, too, each rank has the whole model.
    *(pytest.param(name, marks=pytest.mark.full) for name in EVERY if name not in ("mirrored", *IN_PARTS)),
]
LOOPS = [name for name in EVERY if name != "pipeline"]
WORKERS = {"tensor:least=1": 1, "pipeline": 1}
Given = Callable[[Any, Any], Any]


def trained(strategy: str, workers: int, when: int, give: Given | None, loop: bool) -> dict[str, Any] | str:
    """Weights after two epochs, where ``give`` was called once after ``when`` steps."""
    model = made()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    try:
        run = tutti.prepare(model, optimizer, DATA, error_of, strategy=strategy, workers=workers, batch_size=BATCH)
        for epoch in range(2):
            for batch in run.microbatches(epoch) if loop else run.epoch(epoch):
                if give is not None and run.global_step == when:
                    give, _ = None, give(model, run)
                if loop:
                    optimizer.zero_grad()
                    run.backward(error_of(model, batch))
                    optimizer.step()
                else:
                    run.step(batch)
        if give is not None:
            give(model, run)
        return {name: tensor.numpy().copy() for name, tensor in run.state().items()}
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def plain(when: int, give: Given | None) -> dict[str, Any]:
    model = made()
    optimizer, step = torch.optim.Adam(model.parameters(), lr=0.01), 0
    for epoch in range(2):
        for batch in batches(epoch):
            if give is not None and step == when:
                give(model, None)
            optimizer.zero_grad()
            error_of(model, batch).backward()
            optimizer.step()
            step += 1
    if give is not None and step == when:
        give(model, None)
    return numbers(model)


def all_of_it(model: nn.Module, run: Any) -> None:
    model.load_state_dict(WEIGHTS)


def a_layer(model: Any, run: Any) -> None:
    model[2].load_state_dict({"weight": WEIGHTS["2.weight"], "bias": WEIGHTS["2.bias"]})


def some_of_it(model: Any, run: Any) -> None:
    told = model.load_state_dict({"0.weight": WEIGHTS["0.weight"], "head": torch.zeros(2)}, strict=False)
    assert told.unexpected_keys == ["head"] and "2.weight" in told.missing_keys


@pytest.mark.parametrize(("strategy", "when"), in_turn(EVERY, [0, 4, 10], each=2))
def test_weights_reach_every_part(strategy: str, when: int) -> None:
    options = {"strategy": strategy, "workers": WORKERS.get(strategy, 2), "when": when}
    for got in worlds.run(2, trained, give=all_of_it, loop=strategy in LOOPS, **options):
        assert isinstance(got, dict), got
        assert largest_difference(got, plain(when, all_of_it)) <= 1e-10


@pytest.mark.parametrize(("strategy", "give"), in_turn(EVERY, [a_layer, some_of_it]))
def test_a_part_of_the_weights(strategy: str, give: Given) -> None:
    options = {"strategy": strategy, "workers": WORKERS.get(strategy, 2), "when": 4}
    for got in worlds.run(2, trained, give=give, loop=strategy in LOOPS, **options):
        assert isinstance(got, dict), got
        assert largest_difference(got, plain(4, give)) <= 1e-10


def a_row(model: Any, run: Any) -> None:
    state = copy.deepcopy(model.state_dict() if run is None else run.state())
    state["0.weight"][1] = 0.5
    model.load_state_dict(state)


def a_row_of_the_model(model: Any, run: Any) -> None:
    model[0].weight.data[1] = 0.5


def a_row_of_its_state(model: Any, run: Any) -> None:
    model.state_dict()["0.weight"][1] = 0.5


@pytest.mark.parametrize("strategy", FEW)
def test_a_row_is_written_into_a_copy(strategy: str) -> None:
    """As refusals of writes into the model advise, where a rank has a part of it."""
    options = {"strategy": strategy, "workers": WORKERS.get(strategy, 2), "when": 4, "loop": strategy in LOOPS}
    want = plain(4, a_row_of_the_model)
    for got in worlds.run(2, trained, give=a_row, **options):
        assert isinstance(got, dict), got
        assert largest_difference(got, want) <= 1e-10
    for give in (a_row_of_the_model, a_row_of_its_state) if strategy in IN_PARTS else ():
        for got in worlds.run(2, trained, give=give, **options):
            said = "copy.deepcopy(run.state()) and give it to model.load_state_dict, both on every rank"
            if isinstance(got, dict):
                assert strategy.startswith("sharded") and largest_difference(got, want) <= 1e-10
            else:
                assert said in got


def another_model(model: nn.Module, run: Any) -> None:
    model.load_state_dict({**WEIGHTS, "0.weight": torch.zeros(3, 4)})


def a_name_too_many(model: nn.Module, run: Any) -> None:
    model.load_state_dict({**WEIGHTS, "7.weight": torch.zeros(3, 4)})


def of_its_own(model: nn.Module, run: Any) -> None:
    model.load_state_dict({name: tensor + tutti.rank() for name, tensor in WEIGHTS.items()})


def in_its_place(model: nn.Module, run: Any) -> None:
    model.load_state_dict(WEIGHTS, assign=True)


@pytest.mark.parametrize(
    ("give", "strategies", "said"),
    [
        (another_model, ["sharded:stage=3", "tensor:least=1", "pipeline"], "of another shape: 0.weight"),
        (another_model, ["mirrored", "sharded:stage=1"], "size mismatch for 0.weight"),
        (a_name_too_many, EVERY[::2], 'Unexpected key(s) in state_dict: "7.weight"'),
        (of_its_own, EVERY[2::2], "ranks disagree about the weights"),
        (in_its_place, EVERY[1::2], "leave out assign=True"),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in (
                (a_name_too_many, EVERY[1::2], 'Unexpected key(s) in state_dict: "7.weight"'),
                (of_its_own, EVERY[1::2], "ranks disagree about the weights"),
                (in_its_place, EVERY[::2], "leave out assign=True"),
            )
        ),
    ],
)
def test_what_cannot_be_loaded_is_refused(give: Given, strategies: list[str], said: str) -> None:
    for strategy in strategies:
        options = {"strategy": strategy, "workers": WORKERS.get(strategy, 2), "when": 4}
        for got in worlds.run(2, trained, give=give, loop=strategy in LOOPS, **options):
            assert isinstance(got, str) and said.lower() in got.lower(), (strategy, got)


def twice(strategy: str, workers: int, late: bool) -> dict[str, Any] | str:
    """A model with batch norm under workers that may train alone, given weights before or after ``tutti.prepare``."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 1)).double()
    weights = {n: t + 1 if t.is_floating_point() else t + 5 for n, t in model.state_dict().items()}
    if not late:
        model.load_state_dict(weights)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    options = {"strategy": strategy, "workers": workers, "batch_size": 8}
    run = tutti.prepare(model, optimizer, DATA[:24], error_of, **options)  # type: ignore[arg-type]
    if late:
        try:
            model.load_state_dict({n: t for n, t in weights.items() if late != "part" or "running" not in n}, False)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    for batch in run.epoch(0):
        run.step(batch)
    return {name: tensor.numpy().copy() for name, tensor in run.state().items()}


@pytest.mark.parametrize(
    ("strategy", "workers"),
    in_turn(
        ["mirrored", "local_sgd:period=2", "diloco:period=2", "central_storage", "sharded:stage=3", "parameter_server"],
        [4, 2],
    ),
)
def test_every_logical_worker_begins_with_them(strategy: str, workers: int) -> None:
    want = worlds.run(2, twice, strategy=strategy, workers=workers, late=False)
    for got in worlds.run(2, twice, strategy=strategy, workers=workers, late=True):
        assert isinstance(got, dict), got
        assert largest_difference(got, want[0]) <= 1e-12


@pytest.mark.parametrize(
    ("strategy", "workers"), [("mirrored", 4), ("local_sgd", 2), ("sharded:stage=3", 2), ("central_storage", 4)]
)
def test_workers_with_statistics_of_their_own_need_all_of_it(strategy: str, workers: int) -> None:
    for got in worlds.run(2, twice, strategy=strategy, workers=workers, late="part"):
        assert isinstance(got, str) and "load_state_dict with a part of the model" in got and "1.running_mean" in got


# --- a copy of the model is a plain model -----------------------------------------------------------------------------


def copied() -> tuple[Any, Any, Any]:
    model = made()
    run = tutti.prepare(model, torch.optim.Adam(model.parameters()), DATA, error_of, batch_size=BATCH)
    before = numbers(model)
    other = copy.deepcopy(model)
    other.load_state_dict(WEIGHTS)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    third = torch.load(file, weights_only=False)
    third.load_state_dict(WEIGHTS)
    assert run.global_step == 0
    return before, numbers(model), [numbers(other), numbers(third)]


def test_copies_of_the_model_load_by_themselves() -> None:
    for before, after, others in worlds.run(2, copied):
        assert largest_difference(before, after) == 0
        for other in others:
            assert largest_difference(other, {name: tensor.numpy() for name, tensor in WEIGHTS.items()}) == 0


# --- the best weights, as scripts keep them ---------------------------------------------------------------------------


def early_stopping(strategy: str, workers: int, best_of: str) -> Any:
    """The best of ten updates by a held-out loss, put back at the end; ``best_of``: where the script reads it."""
    model = made()
    run, best, kept = None, float("inf"), {}
    optimizer = torch.optim.Adam(model.parameters(), lr=0.3)
    if strategy != "plain":
        run = tutti.prepare(model, optimizer, DATA, error_of, strategy=strategy, workers=workers, batch_size=BATCH)
    try:
        for epoch in range(2):
            for batch in batches(epoch) if run is None else run.microbatches(epoch):
                optimizer.zero_grad()
                (Tensor.backward if run is None else run.backward)(error_of(model, batch))
                optimizer.step()
                if run is not None and not run.stepped:
                    continue
                loss = error_of(model, DATA[:]).item()
                if loss < best:
                    best = loss
                    kept = copy.deepcopy(model.state_dict() if run is None or best_of == "model" else run.state())
        model.load_state_dict(kept)
        return numbers(model) if run is None else {n: t.numpy().copy() for n, t in run.state().items()}
    except Exception as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize(
    ("place", "best_of"),
    [
        *in_turn([*((name, WORKERS.get(name, 2)) for name in LOOPS), ("mirrored", 4)], ["model", "run"]),
        *(pytest.param(("sharded", 4), best, marks=pytest.mark.full) for best in ("model", "run")),
    ],
    ids=str,
)
def test_early_stopping(place: tuple[str, int], best_of: str) -> None:
    want, (strategy, workers) = early_stopping("plain", 1, "model"), place
    for got in worlds.run(2, early_stopping, strategy=strategy, workers=workers, best_of=best_of):
        assert isinstance(got, dict), got
        assert largest_difference(got, want) <= 1e-10


# --- the optimizer's state --------------------------------------------------------------------------------------------


def optimizer_states(strategy: str, workers: int) -> list[str]:
    """What reading and giving back the optimizer's state comes to, and what the run is worth afterwards."""
    said = []
    model = made()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    run = tutti.prepare(model, optimizer, DATA, error_of, strategy=strategy, workers=workers, batch_size=BATCH)
    for batch in run.epoch(0):
        run.step(batch)
    for call in (
        optimizer.state_dict,
        lambda: optimizer.load_state_dict(torch.optim.Adam(made().parameters()).state_dict()),
        lambda: torch.save(optimizer, io.BytesIO()),
    ):
        try:
            call()
            said.append("done")
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


@pytest.mark.parametrize(
    ("strategy", "workers"),
    [*((name, WORKERS.get(name, 2)) for name in EVERY), ("local_sgd", 2), ("local_sgd", 4), ("mirrored", 4)],
)
def test_the_optimizers_state_is_whole_or_refused(strategy: str, workers: int) -> None:
    whole = strategy == "mirrored" or (strategy, workers) == ("local_sgd", 2)
    for said in worlds.run(2, optimizer_states, strategy=strategy, workers=workers):
        for call, text in zip(("state_dict()", "load_state_dict()", "a copy"), said, strict=True):
            assert text == "done" if whole else f"UsageError: {call} of the optimizer" in text and "run.save" in text, (
                text
            )


def by_hand(folder: Path, strategy: str, resumed: bool) -> Any:
    """A checkpoint by hand from plain PyTorch, with which a run begins: loaded before ``tutti.prepare``."""
    model = made()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    saved = torch.load(folder / "plain.pt")
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    try:
        run = tutti.prepare(model, optimizer, DATA, error_of, strategy=strategy, workers=2, batch_size=BATCH)
        for batch in run.epoch(1):
            run.step(batch)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return {name: tensor.numpy().copy() for name, tensor in run.state().items()}


@pytest.mark.parametrize("strategy", [name for name in EVERY if name not in WORKERS])
def test_a_checkpoint_by_hand_is_loaded_before(strategy: str, tmp_path: Path) -> None:
    model = made()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(2):
        if epoch:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "plain.pt")
        for batch in batches(epoch):
            optimizer.zero_grad()
            error_of(model, batch).backward()
            optimizer.step()
    for got in worlds.run(2, by_hand, folder=tmp_path, strategy=strategy, resumed=True):
        if strategy in ("central_storage", "parameter_server"):
            assert isinstance(got, str) and "already stepped" in got
        else:
            assert isinstance(got, dict), got
            assert largest_difference(got, numbers(model)) <= 1e-10


def averaged_by_hand(strategy: str) -> dict[str, Tensor]:
    """A moving average of ``parameter.data``, as scripts keep it, loaded after each epoch."""
    model = made()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    run = tutti.prepare(model, optimizer, DATA, error_of, strategy=strategy, workers=1, batch_size=BATCH)
    average = {name: p.data.clone() for name, p in model.named_parameters()}
    for epoch in range(2):
        for batch in run.epoch(epoch):
            run.step(batch)
            for name, p in model.named_parameters():
                average[name] = 0.1 * p.data + 0.9 * average[name]
        model.load_state_dict(average, strict=False)
    return run.state()


def test_an_average_of_slices_is_loaded_as_that_of_the_whole() -> None:
    [want] = worlds.run(1, averaged_by_hand, strategy="single")
    for got in worlds.run(2, averaged_by_hand, strategy="tensor:least=1"):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-10)
