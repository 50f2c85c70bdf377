"""An average of the weights: what goes into it, when, and that it is what evaluation and the summary speak of."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import tutti
from tests import worlds
from tutti.errors import TuttiError, UsageError
from tutti.laws.averaging import Averaging

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
            if run.clock % due == 0:
                share = averaging.share(updates)
                updates += 1
                for name in trained:
                    expected[name].lerp_(now[name], share)
            expected |= {name: value for name, value in now.items() if name not in trained}
            assert same(run.state(averaged=True), expected), run.clock
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


def in_an_own_loop() -> list[str]:
    told = []
    for own in (False, True):
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        options: Named = {"workers": 4, "batch_size": 16, "micro_batch": 2, "reproducible": True, "ema": DECAY}
        run = tutti.prepare(net, optimizer, data(), loss, **options)
        for batch in run.cells(0) if own else run.epoch(0):
            if own:
                run.backward(loss(run.model, batch))
                optimizer.step()
            else:
                run.step(batch)
        told.append(run.weights_sha256(averaged=True))
    return told


@pytest.mark.parametrize("devices", [1, 3])
def test_an_own_loop_has_it_too(devices: int) -> None:
    [[want, own], *others] = worlds.run(devices, in_an_own_loop)
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
