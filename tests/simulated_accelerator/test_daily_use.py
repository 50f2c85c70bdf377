"""What scripts do on an accelerator beside training: each gives the CPU's numbers on one and on two devices."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import tutti
from tests import worlds
from tests.simulated_accelerator.build import DEVICE
from tutti.config.train_config import TrainConfig
from tutti.device import usable_cores
from tutti.errors import UsageError
from tutti.launcher import context
from tutti.train.task_run import prepare_process

pytestmark = pytest.mark.timeout(600)


def here() -> torch.device:
    return context.current().device


def made(bias: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8, bias=bias), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 3))


def data(samples: int = 48) -> TensorDataset:
    draw = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(samples, 5, generator=draw), torch.randint(0, 3, (samples,), generator=draw))


def loss(net: Any, batch: Any) -> Tensor:
    inputs, targets = batch
    return nn.functional.cross_entropy(net(inputs), targets)


def measured(net: Any, batch: Any) -> Any:
    """Sums with metrics as tensors of the device, and one as a number that waited for it."""
    inputs, targets = batch
    outputs = net(inputs)
    summed = nn.functional.cross_entropy(outputs, targets, reduction="sum")
    right = (outputs.argmax(dim=1) == targets).sum()
    return (
        summed,
        len(targets),
        {"right": right, "waited": float(right.item()), "largest": outputs.detach().abs().sum()},
    )


def metrics_and_average(strategy: str) -> Any:
    run = tutti.prepare(made(), "adam:lr=0.01", data(), measured, strategy=strategy, workers=2, batch_size=8, ema=0.9)
    means = [run.step(batch) for batch in run.epoch(0)]
    found = [run.evaluate(data(21), batch=4), run.evaluate(data(21), averaged=False)]
    return [
        means,
        run.stats.metrics,
        *[(each.loss, each.metrics) for each in found],
        run.weights_sha256(),
    ]


def predicted(strategy: str) -> Any:
    run = tutti.prepare(made(), "sgd:lr=0.1", data(), loss, strategy=strategy, workers=2, batch_size=8)
    for batch in run.epoch(0):
        run.step(batch)

    def outputs(net: Any, batch: Any) -> Any:
        values = net(batch[0])
        return {"classes": values.argmax(dim=1), "both": (values, values.softmax(dim=1).half())}

    got = run.predict(data(21), outputs, batch=4)
    loaded = run.predict(DataLoader(data(21), batch_size=6), outputs)
    return [got["classes"], *got["both"], got["both"][0].device.type, loaded["classes"], *loaded["both"]]


class Watching:
    ranks = "all"

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.total = torch.zeros((), device=here())

    def on_step_end(self, run: tutti.Run) -> None:
        self.total += run.stats.loss
        whole = (getattr(p, "full_tensor", lambda p=p: p)() for p in run.model.parameters())
        self.seen.append(sum(float(each.detach().sum()) for each in whole))

    def on_evaluation(self, run: tutti.Run, means: Any) -> None:
        self.seen.append(means.loss)

    def on_epoch_end(self, run: tutti.Run, epoch: int) -> None:
        if epoch == 1:
            run.stop("two epochs")

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen, "total": float(self.total)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = list(state["seen"])


def called_back(strategy: str) -> Any:
    watching = Watching()
    run = tutti.prepare(
        made(), "sgd:lr=0.1", data(), loss, strategy=strategy, workers=2, batch_size=8, callbacks=[watching]
    )
    for epoch in run.epochs(3):
        for batch in run.epoch(epoch):
            run.step(batch)
        run.evaluate(data(21))
    return watching.seen, watching.total.cpu(), run.weights_sha256()


def by_hand(place: str, moved: str, weigh: str = "") -> Any:
    """A custom loop: the model moved before or after, the batch moved again, losses that wait for the device."""
    model = made()
    if place == "before":
        model.to(here())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    run = tutti.prepare(model, optimizer, data(), workers=2, batch_size=8)
    if place == "after":
        model.to(here())
    scale, losses = torch.ones((), device=here()), []
    for epoch in range(2):
        for inputs, targets in run.microbatches(epoch):
            if moved == "twice":
                inputs, targets = inputs.to(here(), non_blocking=True), targets.to(here())
            if moved == "to the host and back":
                inputs = inputs.cpu().to(here(), non_blocking=True)
                targets = pinned(targets.cpu()).to(here(), non_blocking=True)
            optimizer.zero_grad()
            value = nn.functional.cross_entropy(model(inputs), targets)
            if weigh == "item":
                value = value * (1.1 if value.item() > 0 else 1.0)
            if weigh == "tensor":
                value = value * scale
            run.backward(value)
            losses.append(value.detach())
            optimizer.step()
            if run.stepped:
                scale = scale * 0.9
    return torch.stack(losses).cpu(), run.stats.loss, run.weights_sha256()


def to_the_host_and_back(strategy: str, ours: bool) -> str:
    """A model that the script takes to the host to save it, with its gradients, and then back to the device."""
    model = made()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    run = tutti.prepare(model, optimizer, data(), loss if ours else None, strategy=strategy, workers=2, batch_size=8)
    for batch in run.epoch(0) if ours else run.microbatches(0):
        if ours:
            run.step(batch)
        else:
            optimizer.zero_grad()
            run.backward(loss(model, batch))
            optimizer.step()
        if run.global_step == 3 and (ours or run.stepped):
            model.cpu().double().float().to(here())
    return run.weights_sha256()


def scaled(clip: bool) -> Any:
    """A loop of mixed precision by hand, with a loss scale; on one device the scaler of several bodies is refused."""
    model = made()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    run, scaler = tutti.prepare(model, optimizer, data(), workers=2, batch_size=8), torch.amp.GradScaler(here().type)
    try:
        for inputs, targets in run.microbatches(0):
            optimizer.zero_grad()
            with torch.autocast(here().type, dtype=torch.bfloat16):
                value = nn.functional.cross_entropy(model(inputs).float(), targets)
            run.backward(scaler.scale(value))
            if clip:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
    except UsageError as error:
        return error.what
    return scaler.get_scale(), run.weights_sha256()


def refused_on_one_rank(body_loss: Callable[[Any, Tensor, Tensor], Tensor]) -> str:
    """Train by the loss of a loop's body: of several workers on this rank it is refused, and alone it is right."""
    model = made()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    run = tutti.prepare(model, optimizer, data(), workers=2, batch_size=8)
    try:
        for inputs, targets in run.microbatches(0):
            optimizer.zero_grad()
            run.backward(body_loss(model, inputs, targets))
            optimizer.step()
    except UsageError as error:
        if tutti.size() > 1:
            raise
        return error.what
    assert tutti.size() > 1
    return run.weights_sha256()


def own_generator() -> str:
    """Noise from the script's own generator on the device."""
    draw = torch.Generator(here())
    draw.manual_seed(5)

    def loss(model: Any, inputs: Tensor, targets: Tensor) -> Tensor:
        noise = torch.randn(inputs.shape, generator=draw, device=inputs.device)
        return nn.functional.cross_entropy(model(inputs + noise), targets)

    return refused_on_one_rank(loss)


def pinned(tensor: Tensor) -> Tensor:
    return tensor if here().type == "cpu" else tensor.pin_memory()


def pinned_counter() -> str:
    """A weight by a counter of NumPy in pinned memory."""
    count = np.zeros(1, dtype=np.float32)

    def loss(model: Any, inputs: Tensor, targets: Tensor) -> Tensor:
        count[:] += 1
        weight = pinned(torch.from_numpy(count)).to(here(), non_blocking=True)
        return (nn.functional.cross_entropy(model(inputs), targets) * weight).sum()

    return refused_on_one_rank(loss)


def own_loader(strategy: str) -> Any:
    """A loop over the script's own loader, whose batches it moves, with an evaluation by hand."""
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(data(), batch_size=8, pin_memory=here().type != "cpu")
    run = tutti.prepare(model, optimizer, loader, strategy=strategy, workers=2)
    for epoch in range(2):
        for inputs, targets in run.microbatches(epoch):
            run.backward(nn.functional.cross_entropy(model(inputs), targets))
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        right = sum((model(x.to(here())).argmax(dim=1) == y.to(here())).sum().item() for x, y in loader)
    return right, run.weights_sha256()


ACTIONS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    **{
        f"{action.__name__}, {strategy}": (action, {"strategy": strategy})
        for action in (metrics_and_average, predicted, called_back)
        for strategy in ("mirrored", "sharded")
    },
    **{
        f"to the host and back, {strategy}, {'steps' if ours else 'loop'}": (
            to_the_host_and_back,
            {"strategy": strategy, "ours": ours},
        )
        for strategy, ours in (("mirrored", True), ("mirrored", False), ("parameter_server", True))
    },
    "loss scale": (scaled, {"clip": False}),
    "loss scale and clipping": (scaled, {"clip": True}),
    "own generator": (own_generator, {}),
    "pinned counter": (pinned_counter, {}),
    "own loader": (own_loader, {"strategy": "mirrored"}),
    **{
        f"moved {place}, batch {moved or 'as it is'}, {weigh or 'plain'}": (
            by_hand,
            {"place": place, "moved": moved, "weigh": weigh},
        )
        for place, moved, weigh in (
            ("before", "twice", "item"),
            ("after", "to the host and back", "tensor"),
            ("never", "", "item"),
        )
    },
}


def same(one: Any, other: Any) -> bool:
    """Whether weights and outputs have the same bits, and loss and metrics are equal within float32's rounding.

    Their sums travel with the gradients, which shared memory adds in float64 and the device's group in their dtype.
    """
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=2**-23)
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


ON_ONE_RANK = {"pinned counter", "moved after, batch to the host and back, tensor"}
"""Actions that ordinary runs have on one rank, which compares the micro-batches of several workers."""


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        (name, ranks) if (ranks == 1) == (name in ON_ONE_RANK) else pytest.param(name, ranks, marks=pytest.mark.full)
        for name in ACTIONS
        for ranks in (1, 2)
    ],
)
def test_an_action_gives_what_it_gives_on_the_cpu(name: str, ranks: int) -> None:
    action, arguments = ACTIONS[name]
    want = worlds.run_on("cpu", ranks, action, **arguments)
    got = worlds.run_on(DEVICE, ranks, action, **arguments)
    assert same(got, want), (got, want)


def reproducibly() -> bool:
    tutti.prepare(made(), "sgd:lr=0.1", data(), loss, batch_size=8, reproducible=True)
    try:
        return torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(("device", "chosen"), [(DEVICE, True), ("cpu", False)])
def test_reproducible_runs_take_deterministic_kernels_of_an_accelerator(device: str, chosen: bool) -> None:
    assert worlds.run_on(device, 1, reproducibly) == [chosen]


def compiled(compile: str) -> str:
    try:
        run = tutti.prepare(made(), "sgd:lr=0.1", data(), loss, batch_size=8, compile=compile)
        return "" if run.step(next(run.epoch(0))) else "no loss"
    except UsageError as error:
        return str(error)


def test_compiling_for_a_device_that_inductor_does_not_know_is_refused_before_the_first_step() -> None:
    [said] = worlds.run_on(DEVICE, 1, compiled, compile="default")
    assert "cannot compile here: it generates no code for SIMGPU. Leave out compile, or name another" in said
    assert worlds.run_on(DEVICE, 1, compiled, compile="default:backend=eager") == [""]


def threads() -> int:
    before = torch.get_num_threads()
    try:
        return prepare_process(TrainConfig(), context.current())
    finally:
        torch.set_num_threads(before)


def test_half_of_the_cores_are_left_to_an_accelerator() -> None:
    cores = usable_cores()
    assert worlds.run_on(DEVICE, 1, threads) == [max(1, cores // 2)]
    assert worlds.run_on("cpu", 1, threads) == [cores]
