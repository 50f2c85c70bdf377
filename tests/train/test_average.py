"""An average of the weights: what goes into it, when, and that it is what evaluation and the summary speak of."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import TensorDataset

import tutti
from tests import worlds
from tutti.config.averaging import Averaging
from tutti.errors import TuttiError, UsageError

DECAY = 0.75
Named = dict[str, Any]


def model() -> nn.Sequential:
    torch.manual_seed(0)
    frozen = nn.Linear(4, 4).requires_grad_(False)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), frozen, nn.Linear(4, 1))


def data(count: int = 24) -> Tensor:
    return torch.randn(count, 3, generator=torch.Generator().manual_seed(1))


def loss(net: Any, batch: Tensor) -> Any:
    result = net(batch)
    return result.square().sum(), len(batch), {"mean": result.sum()}


def prepare(strategy: str = "mirrored", **options: Any) -> tutti.Run:
    arguments: Named = {"workers": 4, "batch_size": 8, "reproducible": True, "ema": str(DECAY), **options}
    return tutti.prepare(model(), "adam:lr=0.05", data(), loss, strategy=strategy, **arguments)


def same(a: Named, b: Named) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def beside_pytorch() -> None:
    """PyTorch's own, fed with the model after every step. Its first call copies what the average begins with."""
    run = prepare(workers=1)
    plain = model()
    theirs = AveragedModel(plain, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    theirs.update_parameters(plain)
    for batch in run.epoch(0):
        run.step(batch)
        plain.load_state_dict(run.state())
        theirs.update_parameters(plain)
    ours = run.state(averaged=True)
    assert all(torch.equal(ours[name], parameter) for name, parameter in theirs.module.named_parameters())
    assert not torch.equal(ours["0.weight"], run.state()["0.weight"])
    # Buffers, and what is not trained, are the model's own.
    assert all(torch.equal(ours[name], run.state()[name]) for name in ours if name.startswith(("1.running", "3.")))


def test_it_is_what_pytorch_makes_of_the_same_weights() -> None:
    worlds.run(1, beside_pytorch)


def by_hand(strategy: str, ema: str, due: int) -> None:
    """After every ``due``-th step the average moves towards the model, by the formula, and at no other."""
    run, averaging = prepare(strategy, ema=ema), Averaging.parse(ema)
    trained = {name for name, parameter in model().named_parameters() if parameter.requires_grad}
    expected = {name: value.clone() for name, value in run.state().items()}
    updates = 0
    for epoch in range(2):
        for batch in run.epoch(epoch):
            run.step(batch)
            now = run.state()
            if run.global_step % due == 0:
                share = averaging.share(updates)
                updates += 1
                for name in trained:
                    expected[name].lerp_(now[name], share)
            expected |= {name: value for name, value in now.items() if name not in trained}
            assert same(run.state(averaged=True), expected), run.global_step
    assert updates == 6 // due


@pytest.mark.parametrize(
    ("devices", "strategy", "ema", "due"),
    [
        (1, "single", "0.75", 1),
        (3, "mirrored", "0.9:warmup", 1),
        (4, "mirrored:algorithm=native", "0.75", 1),
        (3, "model_parallel", "0.75", 1),
        (3, "local_sgd:period=3", "0.75:warmup", 3),
        (4, "local_sgd:period=2", "0.75", 2),
    ],
)
def test_it_follows_the_formula_in_every_strategy(devices: int, strategy: str, ema: str, due: int) -> None:
    """``local_sgd`` averages the workers' common model, which there is after every averaging alone."""
    worlds.run(devices, by_hand, strategy=strategy, ema=ema, due=due)


def with_a_bad_step() -> None:
    run = prepare()
    first, second, third = run.epoch(0)
    run.step(first)
    before = {name: value.clone() for name, value in run.state(averaged=True).items()}
    run.step(second * torch.nan)
    assert run.updated is not None and run.updated.skipped
    trained = [name for name, parameter in model().named_parameters()]
    after = run.state(averaged=True)
    assert all(torch.equal(after[name], before[name]) for name in trained)
    run.step(third)
    assert not torch.equal(run.state(averaged=True)["0.weight"], before["0.weight"])
    assert run.average is not None and run.average.updates == 2


@pytest.mark.parametrize("devices", [1, 3])
def test_a_skipped_step_does_not_count(devices: int) -> None:
    worlds.run(devices, with_a_bad_step)


def in_a_custom_loop() -> list[str]:
    told = []
    for own in (False, True):
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        options: Named = {"workers": 4, "batch_size": 16, "micro_batch": 2, "reproducible": True, "ema": DECAY}
        run = tutti.prepare(net, optimizer, data(), loss, **options)
        for batch in run.microbatches(0) if own else run.epoch(0):
            if own:
                run.model.zero_grad()
                run.backward(loss(run.model, batch))
                optimizer.step()
            else:
                run.step(batch)
        told.append(run.weights_sha256(averaged=True))
    return told


@pytest.mark.parametrize("devices", [1, 3])
def test_a_custom_loop_has_it_too(devices: int) -> None:
    [[want, own], *others] = worlds.run(devices, in_a_custom_loop)
    assert want == own and all(other == [want, want] for other in others)


def evaluated(strategy: str) -> None:
    """Evaluation takes the average, says so, and leaves the weights in training as they were."""
    run, held_out = prepare(strategy), data(30)[7:]
    for batch in run.epoch(0):
        run.step(batch)
    before = run.weights_sha256()
    found = {averaged: run.evaluate(held_out, averaged=averaged) for averaged in (True, False, None)}
    assert [found[a].averaged for a in (True, False, None)] == [True, False, True] and found[None] == found[True]
    assert run.weights_sha256() == before
    for averaged in (True, False):
        plain = deepcopy(model()).eval()
        plain.load_state_dict(run.state(averaged))
        with torch.no_grad():
            value, count, sums = loss(plain, held_out)
        assert found[averaged].loss == pytest.approx(float(value) / count, rel=1e-5)
        assert found[averaged].metrics["mean"] == pytest.approx(float(sums["mean"]) / count, rel=1e-4)
    assert found[True].loss != found[False].loss


@pytest.mark.parametrize(("devices", "strategy"), [(1, "single"), (4, "mirrored"), (3, "model_parallel")])
def test_evaluation_takes_it(devices: int, strategy: str) -> None:
    worlds.run(devices, evaluated, strategy=strategy)


def narrow() -> None:
    """A bfloat16 model's average is in float32: 0.1 % of a step would round to nothing."""
    net = nn.Linear(3, 1).bfloat16()
    run = tutti.prepare(net, "sgd:lr=0.01", data().bfloat16(), loss, workers=2, batch_size=8, ema=0.999)
    start = run.state()["weight"].float().clone()
    for batch in run.epoch(0):
        run.step(batch)
    average = run.state(averaged=True)["weight"]
    assert average.dtype == torch.float32 and not torch.equal(average, start)
    assert run.evaluate(data().bfloat16()).averaged


def test_narrow_weights_have_a_wide_average() -> None:
    worlds.run(1, narrow)


def no_parameters_here() -> str:
    """The first stage has nothing to average."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(3, 1))
    run = tutti.prepare(net, "sgd:lr=0.1", data(), loss, strategy="model_parallel", batch_size=8, ema=DECAY)
    run.step(next(run.epoch(0)))
    return run.weights_sha256(averaged=True)


def test_a_stage_without_parameters() -> None:
    assert len(set(worlds.run(2, no_parameters_here))) == 1


def refused() -> list[str]:
    said = []
    for attempt in (lambda: prepare(ema=1.0), lambda: prepare(ema=None).evaluate(data(), averaged=True)):
        try:
            attempt()
        except TuttiError as error:
            said.append(f"{type(error).__name__} {error}")
    return said


def test_what_cannot_be_averaged_is_refused() -> None:
    for first, second in worlds.run(3, refused):
        assert first.startswith("UsageError") and "between 0 and 1" in first
        assert second.startswith("UsageError") and "no average of the weights is kept" in second


@pytest.mark.parametrize("text", ["1", "0", "-0.5", "nan", "inf", "x", "", "0.9:", "0.9:warm", "0.9,warmup"])
def test_what_is_no_decay_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"0\.999"):
        Averaging.parse(text)


def thawing(strategy: str, workers: int) -> dict[str, Any] | str:
    """Thaw the first layer in the second epoch of a custom loop; the average at the end, or what refuses it."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).double()
    plain[0].requires_grad_(False)
    draw = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(24, 4, generator=draw).double(), torch.randn(24, 1, generator=draw).double())
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    options: dict[str, Any] = {"strategy": strategy, "workers": workers, "batch_size": 6, "ema": 0.8}
    run = tutti.prepare(plain, optimizer, data, **options)
    try:
        for epoch in range(2):
            if epoch == 1:
                plain[0].requires_grad_(True)
            for inputs, targets in run.microbatches(epoch):
                optimizer.zero_grad()
                run.backward(nn.functional.mse_loss(plain(inputs), targets))
                optimizer.step()
    except UsageError as error:
        return str(error)
    return {name: tensor.numpy().copy() for name, tensor in run.state(averaged=True).items()}


def averaged_by_hand() -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).double()
    model[0].requires_grad_(False)
    draw = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(24, 4, generator=draw).double(), torch.randn(24, 1, generator=draw).double())
    average = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = tutti.prepare(nn.Linear(1, 1).double(), "sgd", data, lambda m, b: m(b[1]).mean(), workers=1, batch_size=6)
    for epoch in range(2):
        if epoch == 1:
            model[0].requires_grad_(True)
        for inputs, targets in run.epoch(epoch):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            for name, p in model.named_parameters():
                average[name].lerp_(p.detach(), 0.2)
    return {name: value.numpy() for name, value in average.items()}


@pytest.mark.parametrize(
    ("strategy", "devices"), [("single", 1), ("mirrored", 2), ("mirrored", 3), ("sharded:stage=1", 2), ("sharded", 2)]
)
def test_a_thawed_layer_is_averaged_too(strategy: str, devices: int) -> None:
    [want] = worlds.run(1, averaged_by_hand)
    for got in worlds.run(devices, thawing, strategy=strategy, workers=devices):
        assert isinstance(got, dict), got
        assert got.keys() == want.keys()
        assert all(abs(got[name] - want[name]).max() <= 1e-10 for name in want)


def test_a_thawed_layer_has_no_average_in_shared_memory() -> None:
    for said in worlds.run(2, thawing, strategy="central_storage", workers=2):
        assert "cannot be combined with ema= under central_storage" in said
