"""A prepared run: one step for every strategy, custom loops, and what would train wrongly without a word."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import tutti
from tests import worlds
from tests.covering import in_turn
from tutti.errors import MismatchError, TuttiError, UsageError

BATCH = 6


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.2), nn.Tanh(), nn.Linear(4, 1)).double()


def data(count: int = 20) -> Tensor:
    return torch.randn(count, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def loss(net: Any, batch: Tensor) -> Any:
    return net(batch).square().mean()


def own_and_step(count: int, clip: float | None, micro: int | None) -> list[Any]:
    """The same training by ``run.step`` and by a custom loop with a scheduler: hashes, counts, gated steps."""
    told = []
    for own in (False, True):
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        options: dict[str, Any] = {"workers": 4, "batch_size": BATCH, "micro_batch": micro, "clip": clip}
        run = tutti.prepare(net, optimizer, data(count), None if own else loss, reproducible=True, **options)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        for epoch in range(2):
            if not own:
                for batch in run.epoch(epoch):
                    run.step(batch)
                    scheduler.step()
                continue
            for batch in run.microbatches(epoch):
                before = run.global_step
                run.backward(loss(run.model, batch))
                optimizer.step()
                optimizer.zero_grad()
                if run.global_step > before:
                    scheduler.step()
        told.append((run.weights_sha256(), run.global_step, run.updates, optimizer.param_groups[0]["lr"]))
    return told


@pytest.mark.parametrize(("clip", "micro"), [(None, None), (0.01, 1)])
def test_a_custom_loop_is_the_step_on_any_devices(clip: float | None, micro: int | None) -> None:
    [[want, own]] = worlds.run(1, own_and_step, count=22, clip=clip, micro=micro)
    assert want == own
    assert want[1:] == (8, 8, 0.1 / 2**4)
    devices = 3 if clip else 4
    assert worlds.run(devices, own_and_step, count=22, clip=clip, micro=micro) == [[want, want]] * devices


def test_a_custom_loop_misses_no_turn_where_a_last_batch_leaves_a_rank_without_samples() -> None:
    """20 samples in batches of 6: the last two go to the first two of four workers, with and without a scheduler."""
    [[want, own]] = worlds.run(1, own_and_step, count=20, clip=None, micro=None)
    assert want == own and want[1:] == (8, 8, 0.1 / 2**4)
    for devices in (2, 3, 4):
        assert worlds.run(devices, own_and_step, count=20, clip=None, micro=None) == [[want, want]] * devices


def no_loss(run: Any, optimizer: Any) -> None:
    run.step(next(run.epoch(0)))


def backward_without_cells(run: Any, optimizer: Any) -> None:
    run.model.zero_grad()
    run.backward(loss(run.model, data(2)))


def closure(run: Any, optimizer: Any) -> None:
    optimizer.step(lambda: 0.0)


WRONG = {
    no_loss: "give tutti.prepare a loss_fn",
    backward_without_cells: "loop over run.microbatches(epoch)",
    closure: "loop over run.microbatches(epoch)",
}


def wrong(what: Any) -> str:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    run = tutti.prepare(net, optimizer, data(22), workers=4, batch_size=BATCH)
    try:
        what(run, optimizer)
    except TuttiError as error:
        return f"{type(error).__name__} {error}"
    return "nothing was raised"


@pytest.mark.parametrize("what", WRONG, ids=lambda f: f.__name__)
def test_what_would_train_wrongly_is_refused(what: Any) -> None:
    for text in worlds.run(3, wrong, what=what):
        assert text.startswith("UsageError") and WRONG[what].lower() in text.lower(), text


def steps_in_bodies(workers: int) -> str:
    run = tutti.prepare(model(), "sgd:lr=0.1", data(22), loss, workers=workers, batch_size=BATCH)
    try:
        for batch in run.microbatches(0):
            run.step(batch)
    except TuttiError as error:
        return str(error)
    return f"{run.global_step} steps"


@pytest.mark.parametrize("workers", [2, 3])
def test_a_step_in_the_body_of_micro_batches_is_refused(workers: int) -> None:
    for text in worlds.run(2, steps_in_bodies, workers=workers):
        assert text.startswith("run.step is called in a loop over run.microbatches") and "run.epoch(epoch)" in text


def prepared_wrongly() -> list[str]:
    said = []
    for options in (
        {"precision": "fp12"},
        {"strategy": "miror"},
        {"optimizer": "adm"},
        {"workers": 2},
        {"batch_size": 3, "workers": 4},
        {"model": model().requires_grad_(False)},
    ):
        arguments: dict[str, Any] = {
            "model": model(),
            "optimizer": "sgd",
            "dataset": data(),
            "loss_fn": loss,
            **options,
        }
        try:
            tutti.prepare(**arguments)
            said.append("nothing was raised")
        except TuttiError as error:
            said.append(f"{type(error).__name__} {error}")
    return said


def test_what_cannot_be_prepared_is_refused_on_every_rank() -> None:
    words = ["fp32, bf16, fp16, fp8, fp64", "'mirrored'", "'adam'", "workers=3", "batch_size=4", "requires_grad"]
    for said in worlds.run(3, prepared_wrongly):
        for text, word in zip(said, words, strict=True):
            assert text.startswith("UsageError") and word in text


def own_batches(each: list[int], strategy: str) -> list[Any]:
    """A batch of the caller's making: every rank brings as many as ``each`` says, whatever the data set's batches."""
    torch.manual_seed(0)
    options = {"workers": tutti.size() + 1, "batch_size": BATCH, "strategy": strategy}
    run = tutti.prepare(nn.Linear(3, 1).double(), "sgd:lr=1", data(), loss, **options)
    start = sum(each[: tutti.rank()])
    value = run.step(data(12)[start : start + each[tutti.rank()]])
    return [value, run.stats and run.stats.count, {n: t.flatten().tolist() for n, t in run.state().items()}]


@pytest.mark.parametrize("strategy", ["mirrored", "mirrored:algorithm=native"])
@pytest.mark.parametrize("each", [[1, 1, 1], [2, 2, 2], [4, 4, 4], [5, 0, 1], [0, 3, 8], [2, 1, 2]], ids=str)
def test_a_batch_of_the_callers_own_is_a_share_of_a_global_one(each: list[int], strategy: str) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(3, 1).double()
    mean = loss(plain, data(12)[: sum(each)])
    mean.backward()
    for value, count, state in worlds.run(3, own_batches, each=each, strategy=strategy):
        assert (value, count) == (pytest.approx(float(mean.detach())), sum(each))
        for name, parameter in plain.named_parameters():
            assert parameter.grad is not None
            assert state[name] == pytest.approx((parameter - parameter.grad).detach().flatten().tolist())


def asked_to_stop(asking: int) -> list[bool]:
    run = tutti.prepare(model(), "sgd", data(), loss, workers=4, batch_size=BATCH)
    said = []
    for number, batch in enumerate(run.epoch(0)):
        if number == 2 and tutti.rank() == asking:
            run.ask_to_stop()
        run.step(batch)
        said.append(bool(run.stats and run.stats.stop))
    return said


def test_one_rank_asks_and_all_know() -> None:
    assert worlds.run(3, asked_to_stop, asking=2) == [[False, False, True, True]] * 3


def failing() -> list[Any]:
    def broken(net: Any, batch: Tensor) -> Any:
        if run.global_step == 2:
            raise ZeroDivisionError("mine")
        return loss(net, batch)

    run = tutti.prepare(model(), "sgd", data(), broken, workers=4, batch_size=BATCH)
    try:
        for batch in run.epoch(0):
            run.step(batch)
    except ZeroDivisionError as error:
        return [error.args, error.step, run.global_step]  # type: ignore[attr-defined]
    return []


def test_an_error_in_a_step_is_the_users_own_and_knows_its_step() -> None:
    assert worlds.run(3, failing) == [[("mine",), 3, 2]] * 3


def replaced(change: str, strategy: str, loop: bool) -> int:
    """Change the model or the optimizer after an epoch, and train on. Returns the updates that were made."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)).double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    rows = TensorDataset(torch.randn(8, 3, dtype=torch.float64))
    run = tutti.prepare(
        net, optimizer, rows, lambda net, batch: net(batch[0]).square().mean(), strategy=strategy, batch_size=4
    )

    def train(epoch: int) -> None:
        for batch in run.microbatches(epoch) if loop else run.epoch(epoch):
            if loop:
                optimizer.zero_grad()
                run.backward(net(batch[0]).square().mean())
                optimizer.step()
            else:
                run.step(batch)

    train(0)
    if change == "tied":
        net[2].weight = net[0].weight
    elif change == "added":
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    else:
        net[2] = nn.Linear(3, 3).double()
    with pytest.raises(UsageError, match=r"after tutti\.prepare"):
        run.state() if change == "replaced, then read" else train(1)
    return run.updates


@pytest.mark.parametrize("change", ["tied", "added", "replaced", "replaced, then read"])
@pytest.mark.parametrize(("size", "strategy"), [(1, "single"), (2, "mirrored"), (2, "central_storage")])
@pytest.mark.parametrize("loop", [False, True])
def test_parameters_that_the_model_did_not_have_are_refused(change: str, size: int, strategy: str, loop: bool) -> None:
    assert worlds.run(size, replaced, change=change, strategy=strategy, loop=loop) == [2] * size


@pytest.mark.parametrize("strategy", ["sharded:stage=1", "sharded"])
@pytest.mark.parametrize("change", ["tied", "added"])
def test_parameters_that_shards_do_not_have_are_refused(change: str, strategy: str) -> None:
    assert worlds.run(2, replaced, change=change, strategy=strategy, loop=False) == [2, 2]


def by_rank(strategy: str, loop: bool) -> int:
    """Train with a learning rate that follows each rank's own numbers from the second epoch on: updates made."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.5)
    rows = TensorDataset(torch.randn(8, 3, dtype=torch.float64))
    run = tutti.prepare(
        net, optimizer, rows, lambda net, batch: net(batch[0]).square().mean(), strategy=strategy, batch_size=4
    )
    for epoch in range(2):
        if epoch == 1:
            optimizer.param_groups[0]["lr"] = 0.1 / (1 + tutti.rank())
        try:
            for batch in run.microbatches(epoch) if loop else run.epoch(epoch):
                if loop:
                    optimizer.zero_grad()
                    run.backward(net(batch[0]).square().mean())
                    optimizer.step()
                else:
                    run.step(batch)
        except MismatchError as error:
            assert "the optimizer's settings in step 3" in str(error) and "lr 0.1" in str(error)
    return run.updates


@pytest.mark.parametrize(
    ("strategy", "loop"),
    in_turn(
        ["mirrored", "mirrored:algorithm=native", "sharded:stage=1", "sharded", "central_storage", "parameter_server"],
        [False, True],
    ),
)
def test_settings_that_differ_between_ranks_are_refused(strategy: str, loop: bool) -> None:
    assert worlds.run(2, by_rank, strategy=strategy, loop=loop) == [2, 2]


def by_own_loss(strategy: str) -> Any:
    """Set the learning rate from this rank's own loss between backward and the update: updates made, and the error."""
    net = model()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    run = tutti.prepare(net, optimizer, data(), strategy=strategy, batch_size=BATCH)
    for batch in run.microbatches(0):
        optimizer.zero_grad()
        own = loss(net, batch)
        run.backward(own)
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + own.item())
        try:
            optimizer.step()
        except UsageError as error:
            return run.updates, str(error)
    return run.updates, ""


@pytest.mark.parametrize("strategy", ["mirrored", "sharded:stage=1", "sharded", "central_storage", "parameter_server"])
def test_settings_from_a_rank_s_own_loss_are_refused_before_the_update(strategy: str) -> None:
    for updates, said in worlds.run(2, by_own_loss, strategy=strategy):
        assert updates == 0 and "the optimizer's settings in step 1" in said and "not from a rank's own loss" in said
        assert "test_run.py:" in said


def changing(guarded: bool, name: str) -> int:
    """Change a setting of the optimizer in each body of the loop, or once a global batch: updates made."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.5)
    run = tutti.prepare(net, optimizer, data(), workers=3, batch_size=BATCH)
    for batch in run.microbatches(0):
        optimizer.zero_grad()
        optimizer.param_groups[0]["momentum"] = 0.5 + run.global_step / 100
        run.backward(loss(net, batch))
        try:
            optimizer.step()
        except UsageError as error:
            assert "changes the optimizer's settings" in str(error) and "test_run.py" in str(error)
            return run.updates
        if run.stepped or not guarded:
            optimizer.param_groups[0][name] *= 0.9
    return run.updates


def test_settings_that_every_body_changes_are_refused() -> None:
    assert [worlds.run(1, changing, guarded=guarded, name="lr") for guarded in (False, True)] == [[0], [4]]


def state_by_hand(strategy: str, how: str) -> str:
    """Reset momentum after an epoch: what the refusal says, or nothing."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    run = tutti.prepare(net, optimizer, data(), loss, strategy=strategy, workers=2, batch_size=BATCH)
    for batch in run.epoch(0):
        run.step(batch)
    try:
        if how == "clear":
            optimizer.state.clear()
        for state in optimizer.state.values():
            state["momentum_buffer"].zero_()
    except UsageError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("how", ["clear", "zero"])
def test_state_that_the_scripts_optimizer_does_not_have_is_refused(how: str) -> None:
    for strategy in ("central_storage", "parameter_server"):
        assert all(
            "reading or writing the state" in text for text in worlds.run(2, state_by_hand, strategy=strategy, how=how)
        )
    for strategy in ("mirrored", "sharded:stage=1", "sharded"):
        assert worlds.run(2, state_by_hand, strategy=strategy, how=how) == ["", ""]
    assert worlds.run(1, state_by_hand, strategy="central_storage", how=how) == [""]


def apart(strategy: str) -> str:
    """Train the biases by an optimizer that tutti.prepare was not given: what the refusal says, or nothing."""
    net = model()
    weights, biases = ([p for p in net.parameters() if (p.dim() == 1) == low] for low in (False, True))
    optimizer, other = torch.optim.SGD(weights, lr=0.1), torch.optim.SGD(biases, lr=0.1)
    run = tutti.prepare(net, optimizer, data(), strategy=strategy, workers=2, batch_size=BATCH)
    for batch in run.microbatches(0):
        run.backward(loss(net, batch))
        try:
            other.step()
        except UsageError as error:
            assert run.updates == 0
            return str(error)
        optimizer.step()
        optimizer.zero_grad()
        other.zero_grad()
    return ""


def test_an_optimizer_that_was_not_given_cannot_train_shards() -> None:
    for strategy in ("sharded", "sharded:stage=1", "sharded:stage=2"):
        for text in worlds.run(2, apart, strategy=strategy):
            assert "an optimizer (SGD) that tutti.prepare was not given" in text and "test_run.py" in text
    assert worlds.run(2, apart, strategy="mirrored") == ["", ""]
