"""Buffers that a script writes between global batches reach every logical worker of a device, as in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import tutti
from tests import worlds
from tests.covering import table
from tutti.errors import UsageError

DATA = TensorDataset(torch.randn(8, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64))


class Tempered(nn.Module):
    """A layer with a temperature, and a count of its forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.register_buffer("temperature", torch.ones(()))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        self.seen += len(inputs)
        return self.layer(inputs) * self.temperature


def fill(model: Tempered, value: float) -> None:
    model.temperature.fill_(value)


def fill_silently(model: Tempered, value: float) -> None:
    """Write without a new version of the tensor."""
    model.temperature.data.fill_(value)


def assign(model: Tempered, value: float) -> None:
    model.temperature = torch.full_like(model.temperature, value)


def multiply(model: Tempered, value: float) -> None:
    model.temperature *= 0.5


def mean(model: nn.Module, batch: tuple[Tensor]) -> Tensor:
    return (model(batch[0]) - 1).square().mean()


WRITES = [fill, fill_silently, assign, multiply]


def plain(write: Callable[[Tempered, float], None], when: str) -> dict[str, Tensor]:
    model, optimizer = built()
    for epoch in range(3):
        if when == "epoch":
            write(model, 0.5**epoch)
        for inputs in DATA.tensors[0].split(4):
            optimizer.zero_grad()
            mean(model, (inputs,)).backward()
            optimizer.step()
            if when == "update":
                write(model, 0.9**epoch)
    return model.state_dict()


def built() -> tuple[Tempered, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Tempered().double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def trained(
    write: Callable[[Tempered, float], None], when: str, strategy: str = "mirrored", workers: int = 2, loop: bool = True
) -> dict[str, Tensor]:
    model, optimizer = built()
    options = {"workers": workers, "batch_size": 4, "shuffle": False, "strategy": strategy}
    run = tutti.prepare(model, optimizer, DATA, mean, **options)  # type: ignore[arg-type]
    for epoch in range(3):
        if when == "epoch":
            write(model, 0.5**epoch)
        for batch in run.microbatches(epoch) if loop else run.epoch(epoch):
            if loop:
                optimizer.zero_grad()
                run.backward(mean(model, batch))
                optimizer.step()
            else:
                run.step(batch)
            if when == "update" and (run.stepped or not loop):
                write(model, 0.9**epoch)
    return {name: value.clone() for name, value in run.state().items()}


def check(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    for name in ("layer.weight", "layer.bias", "temperature"):
        torch.testing.assert_close(found[name], wanted[name], rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("write", "when", "workers", "loop"), table(WRITES, ["epoch", "update"], [1, 2, 4], [True, False])
)
def test_every_worker_has_the_written_value(
    write: Callable[[Tempered, float], None], when: str, workers: int, loop: bool
) -> None:
    found = trained(write, when, workers=workers, loop=loop)
    check(found, plain(write, when))
    # Each worker counts its own samples.
    assert float(found["seen"]) == 24 / workers


def of_strategies() -> list[dict[str, Tensor]]:
    return [trained(fill, "epoch", strategy, workers=4) for strategy in ("mirrored", "sharded", "central_storage")]


def test_under_local_sgd() -> None:
    """With plain SGD and a period of one step, the mean of the workers' parameters is that of their gradients."""
    check(trained(fill, "epoch", "local_sgd:period=1", workers=4, loop=False), plain(fill, "epoch"))


def test_on_two_devices() -> None:
    wanted = plain(fill, "epoch")
    for rank in worlds.run(2, of_strategies):
        for found in rank:
            check(found, wanted)


def restart(model: Tempered, value: float) -> None:
    model.seen.zero_()


def restart_silently(model: Tempered, value: float) -> None:
    model.seen.data.zero_()


def set_count(model: Tempered, value: float) -> None:
    model.seen.fill_(100)


@pytest.mark.parametrize("loop", [True, False])
@pytest.mark.parametrize("write", [restart, restart_silently])
def test_a_reset_between_epochs_is_every_workers(write: Callable[[Tempered, float], None], loop: bool) -> None:
    for workers in (1, 2, 4):
        assert float(trained(write, "epoch", workers=workers, loop=loop)["seen"]) == 8 / workers


@pytest.mark.parametrize("loop", [True, False])
def test_other_values_of_a_buffer_that_forwards_write_are_refused(loop: bool) -> None:
    assert float(trained(set_count, "epoch", workers=1, loop=loop)["seen"]) == 108
    for strategy in ("mirrored", "sharded", "central_storage"):
        with pytest.raises(UsageError, match="the script has written the buffer seen between global batches"):
            trained(set_count, "epoch", strategy, workers=2, loop=loop)


def test_a_body_writes_its_own_workers_buffer_after_the_update() -> None:
    """As a centre of outputs that moves with each micro-batch: the last body's write is no other worker's."""
    model, optimizer = built()
    run = tutti.prepare(model, optimizer, DATA, workers=2, batch_size=4, shuffle=False, strategy="mirrored")
    for epoch in range(2):
        for batch in run.microbatches(epoch):
            optimizer.zero_grad()
            run.backward(mean(model, batch))
            optimizer.step()
            model.seen += float(batch[0].sum())
    own = [DATA.tensors[0].view(2, 2, 2, 3)[:, worker].sum() * 2 + 8 for worker in range(2)]
    torch.testing.assert_close(run.state()["seen"], sum(own) / 2, rtol=0, atol=1e-12)


def test_statistics_are_reset_between_epochs() -> None:
    def trained(reset: bool, epochs: int) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1)).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        run = tutti.prepare(model, optimizer, DATA, mean, workers=2, batch_size=4, shuffle=False, strategy="mirrored")
        for epoch in range(epochs):
            if reset:
                model[0].reset_running_stats()
            for batch in run.epoch(epoch):
                run.step(batch)
        return {name: value.clone() for name, value in run.state().items()}

    once, again, more = trained(True, 1), trained(True, 3), trained(False, 3)
    for name in ("0.running_mean", "0.running_var", "0.num_batches_tracked"):
        torch.testing.assert_close(again[name], once[name])
        assert not torch.equal(more[name], once[name])


def counted_between_steps(loop_first: bool) -> dict[str, Tensor]:
    """``run.step``, perhaps after an epoch of the script's own loop, and a write between two steps."""
    model, optimizer = built()
    run = tutti.prepare(model, optimizer, DATA, mean, workers=2, batch_size=4, shuffle=False, strategy="single")
    for batch in run.microbatches(0) if loop_first else ():
        optimizer.zero_grad()
        run.backward(mean(model, batch))
        optimizer.step()
    for batch in run.epoch(1):
        run.step(batch)
        set_count(model, 0)
    return run.state()


@pytest.mark.parametrize("loop_first", [False, True])
def test_a_write_between_steps_is_refused_after_a_custom_loop_too(loop_first: bool) -> None:
    with pytest.raises(UsageError, match="has written the buffer seen"):
        counted_between_steps(loop_first)


def normalise(layer: nn.Module, _: object) -> None:
    """Put the weight by its norm into a buffer, with its graph, as spectral norms of scripts do."""
    layer.weight = layer.weight_orig / layer.weight_orig.norm()  # type: ignore[operator]


def with_a_weight_in_a_buffer(workers: int = 6) -> dict[str, list[float]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    layer = model[0]
    layer.register_parameter("weight_orig", layer._parameters.pop("weight"))
    layer.register_buffer("weight", layer.weight_orig)
    layer.register_forward_pre_hook(normalise)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = tutti.prepare(model, optimizer, DATA, workers=workers, batch_size=8)
    for epoch in range(3):
        for batch in run.microbatches(epoch):
            optimizer.zero_grad()
            run.backward(mean(model, batch))
            optimizer.step()
    run.evaluate(DATA, loss=mean)
    return {name: tensor.flatten().tolist() for name, tensor in run.state().items()}


def test_a_buffer_may_hold_a_parameter_and_then_a_weight_with_its_graph() -> None:
    want = worlds.alone(with_a_weight_in_a_buffer)
    for ranks in (2, 3):
        for found in worlds.run(ranks, with_a_weight_in_a_buffer):
            assert found.keys() == want.keys()
            assert all(found[name] == pytest.approx(value, abs=1e-12) for name, value in want.items())
