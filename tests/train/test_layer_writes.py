"""Layers that write buffers and parameters in their forward: as on one device with the same workers, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import tutti
from tests import worlds
from tests.covering import table
from tutti.errors import TuttiError

DATA = TensorDataset(
    torch.randn(24, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64), torch.arange(24) % 3
)
WIDTH = 8


class Late(nn.Module):
    """A moving mean in a buffer that the first forward makes."""

    mean: Tensor

    def forward(self, inputs: Tensor) -> Tensor:
        if not hasattr(self, "mean"):
            self.register_buffer("mean", inputs.new_zeros(WIDTH))
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * inputs.detach().mean(0)
        return inputs - self.mean


class Recurrent(nn.Module):
    """A cell whose state is a buffer that is None at first."""

    state: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(WIDTH, WIDTH)
        self.register_buffer("state", None)

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = self.cell(inputs, self.state)
        self.state = found.detach()
        return found


class Frozen(nn.Module):
    """A moving mean in a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.zeros(WIDTH), requires_grad=False)

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.mean.data.mul_(0.9).add_(inputs.detach().mean(0), alpha=0.1)
        return inputs - self.mean


def standardised(layer: nn.Linear, inputs: Any) -> None:
    """Assign the weight with rows of norm one, as weight standardisation by a hook does."""
    with torch.no_grad():
        layer.weight.data = layer.weight.data / layer.weight.data.norm(dim=1, keepdim=True)


def hooked() -> nn.Module:
    layer = nn.Linear(WIDTH, WIDTH)
    layer.register_forward_pre_hook(standardised)
    return layer


class Kept(nn.Module):
    """A moving mean in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.zeros(WIDTH, dtype=torch.float64)

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.mean = 0.9 * self.mean + 0.1 * inputs.mean(0)
        return inputs - self.mean


class Volatile(Kept):
    """The same in a buffer that a state dict leaves out."""

    def __init__(self) -> None:
        super().__init__()
        mean = self.mean
        del self.mean
        self.register_buffer("mean", mean, persistent=False)


class Centred(nn.Module):
    """A layer that its first batch initialises (ActNorm, arXiv 1807.03039), with a flag in a buffer."""

    done: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.centre = nn.Parameter(torch.zeros(WIDTH))
        self.register_buffer("done", torch.zeros((), dtype=torch.bool))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training and not self.done:
            self.centre.data.copy_(inputs.detach().mean(0))
            self.done.fill_(True)
        return inputs - self.centre


def clamped() -> nn.Module:
    def clamp(layer: nn.Linear, inputs: Any) -> None:
        with torch.no_grad():
            layer.weight.clamp_(-0.3, 0.3)

    layer = nn.Linear(WIDTH, WIDTH)
    layer.register_forward_pre_hook(clamp)
    return layer


class Counted(nn.Module):
    """A scale that grows with the number of forwards."""

    calls = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += self.training
        return inputs * (1 - 0.5**self.calls)


class Routed(nn.Module):
    """A layer of two experts, which keeps a loss of its own in an attribute, or in a list."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, 2), nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.way, self.balance = way, None
        self.balances: list[Tensor] = []

    def forward(self, inputs: Tensor) -> Tensor:
        shares = self.gate(inputs).softmax(1)
        balance = shares.square().sum(1).mean()
        if self.way == "list":
            self.balances.append(balance)
        else:
            self.balance = balance
        outputs = torch.stack([expert(inputs) for expert in self.experts], dim=2)
        found: Tensor = (outputs * shares[:, None]).sum(2)
        return found


def balance_of(model: Any) -> Any:
    """The layers' own losses, as scripts collect them."""
    total: Any = 0.0
    for module in model.modules():
        if getattr(module, "balance", None) is not None:
            total = total + module.balance
        if hasattr(module, "balances"):
            total = total + sum(module.balances)
            module.balances.clear()
    return total


KINDS: dict[str, Callable[[], nn.Module]] = {
    "late": Late,
    "none": Recurrent,
    "frozen": Frozen,
    "standardised": hooked,
    "counted": Counted,
    "kept": Kept,
    "volatile": Volatile,
    "centred": Centred,
    "clamped": clamped,
    "routed": lambda: Routed("attribute"),
    "listed": lambda: Routed("list"),
    "spectral": lambda: nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH)),
}


def build(kind: str) -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, WIDTH), nn.Tanh(), KINDS[kind](), nn.Tanh(), nn.Linear(WIDTH, 3)).double()


def train(strategy: str, kind: str, form: str, workers: int, micro_batch: int | None = None, samples: int = 24) -> Any:
    model = build(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    # The script's variable, and not the loss function's argument.
    def loss(given: Any, batch: Any) -> Tensor:
        found = functional.cross_entropy(given(batch[0]), batch[1])
        return found + 0.1 * balance_of(model) if torch.is_grad_enabled() else found

    options: dict[str, Any] = {
        "micro_batch": micro_batch,
        "strategy": strategy,
        "workers": workers,
        "batch_size": 12,
        "shuffle": False,
    }
    data = TensorDataset(*(torch.cat([each] * 3)[:samples] for each in DATA.tensors))
    run = tutti.prepare(model, optimizer, data, loss, **options)
    updates = 0
    try:
        for epoch in range(2):
            for batch in run.epoch(epoch) if form == "step" else run.microbatches(epoch):
                updates = run.updates
                if form == "step":
                    run.step(batch)
                    continue
                optimizer.zero_grad()
                run.backward(loss(model, batch))
                optimizer.step()
        return {name: tensor.numpy().copy() for name, tensor in run.state().items()}
    except TuttiError as error:
        return updates, str(error)


def equal(got: Any, want: Any) -> bool:
    return got.keys() == want.keys() and all(abs(got[name] - value).max() <= 1e-12 for name, value in want.items())


@pytest.mark.parametrize("form", ["step", "loop"])
@pytest.mark.parametrize("kind", ["late", "none"])
def test_buffers_that_a_forward_makes_are_refused_where_workers_share_them(kind: str, form: str) -> None:
    for updates, said in worlds.run(2, train, strategy="mirrored", kind=kind, form=form, workers=4):
        assert updates == 0 and "buffer" in said and "test_layer_writes.py:" in said


@pytest.mark.parametrize("kind", ["late", "none"])
def test_buffers_that_a_forward_makes_are_no_part_of_the_state(kind: str) -> None:
    """They would be lost in checkpoints."""
    for _, said in worlds.run(2, train, strategy="mirrored", kind=kind, form="step", workers=2):
        assert "got the buffer" in said and "persistent=False" in said


@pytest.mark.parametrize("form", ["step", "loop"])
def test_frozen_parameters_that_differ_by_rank_are_refused_with_parameter_servers(form: str) -> None:
    for ranks in (2, 3):
        for updates, said in worlds.run(
            ranks, train, strategy="parameter_server", kind="frozen", form=form, workers=ranks
        ):
            assert updates == 0 and "2.mean" in said and "buffers" in said


def averaged_by_hand(kind: str, workers: int) -> Any:
    """Local SGD in plain PyTorch: each worker trains on its share of every batch, and the weights are averaged."""
    models = [build(kind) for _ in range(workers)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    inputs, targets = DATA.tensors
    for step, rows in enumerate([*torch.arange(24).split(12)] * 2):
        for model, optimizer, share in zip(models, optimizers, rows.split(12 // workers), strict=True):
            optimizer.zero_grad()
            functional.cross_entropy(model(inputs[share]), targets[share]).backward()
            optimizer.step()
        if step % 2:
            with torch.no_grad():
                for values in zip(*(model.parameters() for model in models), strict=True):
                    mean = torch.stack(values).mean(0)
                    for value in values:
                        value.copy_(mean)
    return {name: parameter.detach().numpy() for name, parameter in models[0].named_parameters()}


@pytest.mark.parametrize("workers", [2, 4])
@pytest.mark.parametrize("kind", ["standardised", "spectral"])
def test_weights_that_a_forward_assigns_or_views_are_averaged(kind: str, workers: int) -> None:
    """``spectral_norm`` begins with an attribute that shares the weight's memory."""
    want = averaged_by_hand(kind, workers)
    for ranks in (1, 2):
        for got in worlds.run(ranks, train, strategy="local_sgd:period=2", kind=kind, form="step", workers=workers):
            assert equal({name: got[name] for name in want}, want)


@pytest.mark.parametrize("form", ["step", "loop"])
@pytest.mark.parametrize("strategy", ["sharded:stage=2", "sharded", "mirrored"])
def test_power_iterations_of_each_worker_are_right(strategy: str, form: str) -> None:
    """Gathered weights pass through memory that the forwards of all workers use."""
    want = worlds.alone(train, strategy="mirrored", kind="spectral", form=form, workers=4)
    for got in worlds.run(2, train, strategy=strategy, kind="spectral", form=form, workers=4):
        assert equal(got, want)


@pytest.mark.parametrize(
    ("kind", "form", "strategy"), table(["routed", "listed"], ["step", "loop"], ["pipeline", "model_parallel"])
)
def test_a_loss_that_a_layer_of_another_stage_keeps_is_refused(kind: str, form: str, strategy: str) -> None:
    # In a loop the other rank waits for the one that is refused.
    arguments = {"strategy": f"{strategy}:cuts=4", "kind": kind, "form": form, "workers": 1}
    outcomes = worlds.run_within(5.0, 2, train, **arguments)
    assert all(updates == 0 for updates, _ in outcomes)
    assert any(f"the model's 2.balance{'s' * (kind == 'listed')}, which this rank does" in said for _, said in outcomes)
    assert any("forward return the value" in said for _, said in outcomes)
    worlds.forget(2)


@pytest.mark.parametrize("kind", ["routed", "listed"])
def test_a_loss_that_a_layer_keeps_counts_where_the_rank_has_the_layer(kind: str) -> None:
    for strategy, workers in (("mirrored", 2), ("tensor:least=1", 1)):
        want = worlds.alone(train, strategy="mirrored", kind=kind, form="step", workers=workers)
        for got in worlds.run(2, train, strategy=strategy, kind=kind, form="step", workers=workers):
            assert equal(got, want)


@pytest.mark.parametrize(
    ("kind", "form", "cut"), table(["kept", "volatile", "frozen", "centred"], ["step", "loop"], [1, 4])
)
def test_layers_of_stages_that_workers_share_are_refused_as_those_of_a_whole_model(
    kind: str, form: str, cut: int
) -> None:
    said = "depends on samples of another one" if kind in ("kept", "volatile") else "writes"
    outcomes = worlds.run(2, train, strategy=f"model_parallel:cuts={cut}", kind=kind, form=form, workers=2)
    assert all(updates == 0 for updates, _ in outcomes)
    assert any(said in text and "as many workers as data ranks (1)" in text for _, text in outcomes)
    worlds.forget(2)


@pytest.mark.parametrize("strategy", ["mirrored", "sharded:stage=1"])
def test_a_clamp_that_a_rank_without_samples_has_not_made_is_refused_at_once(strategy: str) -> None:
    """Also in a sixth step, where other writes of a forward are not compared."""
    for updates, said in worlds.run(3, train, strategy=strategy, kind="clamped", form="step", workers=3, samples=61):
        assert updates == 5 and "has 1 sample, and a rank" in said and "drop_last=True" in said
    [want] = worlds.run(1, train, strategy="mirrored", kind="clamped", form="step", workers=1, samples=60)
    for got in worlds.run(3, train, strategy=strategy, kind="clamped", form="step", workers=3, samples=60):
        assert equal(got, want)


@pytest.mark.parametrize("kind", ["spectral", "clamped"])
def test_layers_of_stages_that_write_the_same_again_are_right(kind: str) -> None:
    want = worlds.alone(train, strategy="mirrored", kind=kind, form="step", workers=2)
    for cut in (1, 4):
        for got in worlds.run(2, train, strategy=f"model_parallel:cuts={cut}", kind=kind, form="step", workers=2):
            assert equal(got, want)


def test_a_write_while_backwards_of_other_micro_batches_are_to_come_is_refused() -> None:
    worlds.forget(2)
    outcomes = worlds.run(2, train, strategy="pipeline:cuts=4,micro_batches=2", kind="clamped", form="step", workers=1)
    assert any(
        "the forward writes the parameter 2.weight" in said and "micro_batches=1" in said for _, said in outcomes
    )
    assert all(updates == 0 for updates, _ in outcomes)
    worlds.forget(2)


@pytest.mark.parametrize("kind", ["counted", "kept", "volatile", "late", "none"])
def test_what_ranks_that_share_a_worker_do_not_hand_on_is_refused(kind: str) -> None:
    for ranks, micro_batch in ((2, 6), (3, 4)):
        arguments = {"kind": kind, "form": "step", "workers": 1, "micro_batch": micro_batch}
        for updates, said in worlds.run(ranks, train, strategy="mirrored", **arguments):
            assert updates == 0 and "buffer" in said and "before tutti.prepare" in said


def test_buffers_that_ranks_hand_on_are_right() -> None:
    arguments = {"kind": "spectral", "form": "step", "workers": 1, "micro_batch": 6}
    want = worlds.alone(train, strategy="mirrored", **arguments)
    for got in worlds.run(2, train, strategy="mirrored", **arguments):
        assert equal(got, want)
