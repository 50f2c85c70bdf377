"""What a script reads and writes of split parameters outside of steps, and of the outputs of split layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import tutti
from tests import worlds
from tests.contract.table import largest_difference
from tests.covering import in_turn, table

TOLERANCE = 1e-10


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.0), nn.Linear(8, 4), nn.LayerNorm(4)).double()


def row(weight: Tensor) -> None:
    weight[3] = 1.0


def row_of_data(weight: Tensor) -> None:
    weight.data[3] = 1.0


def divided(weight: Tensor) -> None:
    weight /= weight.norm()


def noisy(weight: Tensor) -> None:
    draw = torch.Generator().manual_seed(5)
    weight.add_(torch.randn(weight.shape, dtype=weight.dtype, generator=draw), alpha=0.1)


def averaged(weight: Tensor) -> None:
    """A whole tensor follows the weights, and moves them: slow weights as in look-ahead."""
    slow = torch.ones(weight.shape, dtype=weight.dtype)
    slow.lerp_(weight, 0.5)
    weight.mul_(0.9).add_(slow, alpha=0.1)


def scaled(weight: Tensor) -> None:
    weight.mul_(torch.arange(8.0).unsqueeze(1))


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "made anew": lambda weight: MADE[-1].reset_parameters(),
    "a row": row,
    "a row of .data": row_of_data,
    "a column": lambda weight: weight[:, 2].zero_(),
    "index_fill_": lambda weight: weight.index_fill_(0, torch.tensor([3]), 1.0),
    "xavier": nn.init.xavier_uniform_,
    "normal": nn.init.normal_,
    "a whole tensor of other rows": lambda weight: weight.add_(torch.ones(4, 1).expand(4, 4)[:2]),
    "out=": lambda weight: torch.mul(weight, 2.0, out=torch.ones(8, 4, dtype=weight.dtype)),
    "memory of a whole tensor": lambda weight: setattr(weight, "data", torch.ones(8, 4, dtype=weight.dtype)),
    "memory of a slice": lambda weight: setattr(torch.ones(8, 4, dtype=weight.dtype), "data", weight.data),
}
ALIKE: dict[str, Callable[[Tensor], Any]] = {
    "clamped": lambda weight: weight.clamp_(-0.1, 0.1),
    "smaller": lambda weight: weight.mul_(0.5),
    "of .data": lambda weight: weight.data.mul_(0.5),
    "of a copy": lambda weight: weight.copy_(weight.detach().clone() * 0.5),
    "of columns": lambda weight: weight.mul_(torch.arange(4.0)),
    "noise of its shape": noisy,
    "a factor for each row": scaled,
    "another whole tensor": lambda weight: weight.copy_(torch.arange(32.0).view(8, 4) / 100),
    "with a whole tensor": lambda weight: weight.copy_(weight * 0.5 + torch.arange(32.0).view(8, 4) / 100),
    "lists": lambda weight: torch._foreach_add_([weight, torch.ones(3)], [torch.arange(8.0).view(8, 1), torch.ones(3)]),
    "of an average": averaged,
    "by its number of elements": lambda weight: weight.mul_(1 - 1 / weight.numel()),
    "by its rows": lambda weight: weight.data.mul_(1 - 0.1 / len(weight)),
    "by its norm": divided,
    "by its fans": lambda weight: weight.mul_(1 - 0.1 / sum(nn.init._calculate_fan_in_and_fan_out(weight))),
}


MADE: list[Any] = []


def written(strategy: str, write: str, place: str) -> Any:
    model, inputs = small(), torch.randn(12, 4, dtype=torch.float64)
    MADE.append(model[0])
    run = tutti.prepare(
        model, "sgd:lr=0.1", inputs, lambda called, batch: called(batch).square().mean() + called(batch).sum() * 0.1,
        strategy=strategy, batch_size=4, precision="fp64",
    )  # fmt: skip

    def change() -> None:
        with torch.no_grad():
            (WRITES | ALIKE)[write](model[0].weight)

    try:
        if place == "before":
            change()
        for epoch in range(2):
            for batch in run.epoch(epoch):
                run.step(batch)
                if place == "steps":
                    change()
            if place == "epochs":
                change()
        return {name: value.numpy().copy() for name, value in run.state().items()}
    except tutti.errors.UsageError as error:
        return str(error)


@pytest.mark.parametrize(("write", "place"), in_turn(list(WRITES), ["before", "steps", "epochs"]))
def test_a_write_that_needs_the_whole_parameter_is_refused_outside_of_steps(write: str, place: str) -> None:
    for said in worlds.run(2, written, strategy="tensor:least=1", write=write, place=place):
        way_out = "parameter.data.clone()" if write == "memory of a slice" else "model.load_state_dict"
        assert " 0.weight" in said and "test_split_reads.py:" in said and way_out in said


def sizes(strategy: str) -> list[Any]:
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    run = tutti.prepare(model, optimizer, torch.randn(12, 4), strategy=strategy, batch_size=6)
    weight, last = model[0].weight, model[3].weight
    grads = []
    for batch in run.microbatches(0):
        optimizer.zero_grad()
        run.backward(model(batch).square().mean())
        grads += [weight.grad.numel(), weight.grad.shape == weight.shape]
        optimizer.step()
    return [
        *(sum(p.numel() for p in model.parameters()), tuple(weight.shape), weight.size(0), last.size(-1), len(weight)),
        *(
            torch.numel(input=last),
            weight.nelement(),
            weight.nbytes,
            tuple(weight.detach().shape),
            weight.dim(),
            *grads,
        ),
    ]


def test_sizes_that_the_script_reads_are_those_of_the_whole_parameter() -> None:
    [alone] = worlds.run(1, sizes, strategy="single")
    assert worlds.run(3, sizes, strategy="tensor:least=1") == [alone] * 3


@pytest.mark.parametrize(("write", "devices"), in_turn(list(ALIKE), [2, 3]))
def test_a_write_element_by_element_equals_one_device(write: str, devices: int) -> None:
    want = worlds.alone(written, strategy="single", write=write, place="steps")
    for got in worlds.run(devices, written, strategy="tensor:least=1", write=write, place="steps"):
        assert largest_difference(got, want) <= TOLERANCE


def own_noise() -> str:
    model = small()
    tutti.prepare(model, "sgd:lr=0.1", torch.randn(12, 4, dtype=torch.float64), strategy="tensor:least=1")
    try:
        with torch.no_grad():
            model[0].weight.add_(torch.full((8, 4), float(tutti.rank())))
    except tutti.errors.MismatchError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("devices", [2, 3])
def test_a_whole_tensor_that_differs_over_ranks_is_refused(devices: int) -> None:
    for said in worlds.run(devices, own_noise):
        assert "0.weight and a tensor that is another one on each rank" in said


class Ascending(torch.optim.SGD):
    """SAM's first step, as a method of the optimizer."""

    @torch.no_grad()
    def ascend(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.add_(parameter.grad, alpha=0.1)


def ascended() -> str:
    model = small()
    optimizer = Ascending(model.parameters(), 0.1)
    run = tutti.prepare(model, optimizer, torch.randn(12, 4, dtype=torch.float64), strategy="tensor:least=1")
    try:
        for batch in run.microbatches(0):
            optimizer.zero_grad(set_to_none=False)
            run.backward(model(batch).square().mean())
            optimizer.ascend()
    except tutti.errors.UsageError as error:
        return str(error)
    return ""


def test_a_method_of_an_optimizer_that_reads_gradients_of_slices_is_refused() -> None:
    for said in worlds.run(2, ascended):
        assert "Ascending.ascend reads the gradient of 0.weight, of which each tensor rank has a slice" in said
    worlds.forget(2)


def rewritten(strategy: str) -> Any:
    """Do what the refusal says."""
    model, inputs = small(), torch.randn(12, 4, dtype=torch.float64)
    run = tutti.prepare(
        model, "sgd:lr=0.1", inputs, lambda called, batch: called(batch).square().mean(),
        strategy=strategy, batch_size=4, precision="fp64",
    )  # fmt: skip
    for epoch in range(2):
        for batch in run.epoch(epoch):
            run.step(batch)
        state = {name: value.clone() for name, value in run.state().items()}
        state["0.weight"][3] = 1.0
        model.load_state_dict(state)
    return {name: value.numpy().copy() for name, value in run.state().items()}


def test_the_way_out_of_the_refusal() -> None:
    want = worlds.alone(rewritten, strategy="single")
    for got in worlds.run(2, rewritten, strategy="tensor:least=1"):
        assert largest_difference(got, want) <= TOLERANCE


class Normed(torch.autograd.Function):
    """Divides the gradient by its norm."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient / gradient.norm()


def by_hand(model: nn.Sequential, x: Tensor, kind: str) -> Tensor:
    """Call the layers one after the other, and compute something from the features between them."""
    if kind == "first layers":
        return model[3](model[:3](x))
    hidden = model[2](model[1](model[0](x)))
    if kind == "norm":
        hidden = hidden / hidden.norm(dim=1, keepdim=True)
    elif kind == "some features":
        hidden = hidden * (torch.arange(8) < 3)
    elif kind == "penalty":
        return model[3](hidden) + hidden.square().mean()
    elif kind == "autograd function":
        hidden = Normed.apply(hidden)
    elif kind == "features":
        hidden = functional.layer_norm(hidden, (8,))
    return model[3](hidden)


def called(strategy: str, kind: str, own: bool) -> Any:
    model = small()
    inputs = torch.randn(12, 4, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def loss(called: Any, batch: Any) -> Tensor:
        return by_hand(called, batch, kind).square().mean()

    try:
        run = tutti.prepare(
            model, optimizer, inputs, None if own else loss, strategy=strategy, batch_size=4, precision="fp64"
        )
        for epoch in range(2):
            for batch in () if own else run.epoch(epoch):
                run.step(batch)
            for batch in run.microbatches(epoch) if own else ():
                optimizer.zero_grad()
                run.backward(loss(model, batch))
                optimizer.step()
        return {name: value.numpy().copy() for name, value in run.state().items()}
    except tutti.errors.UsageError as error:
        return str(error)


@pytest.mark.parametrize(
    ("kind", "own", "devices"),
    table(["plain", "norm", "some features", "penalty", "features", "first layers"], [False, True], [2, 3]),
)
def test_features_between_layers_that_the_script_calls(kind: str, own: bool, devices: int) -> None:
    want = worlds.alone(called, strategy="single", kind=kind, own=own)
    for got in worlds.run(devices, called, strategy="tensor:least=1", kind=kind, own=own):
        assert largest_difference(got, want) <= TOLERANCE


@pytest.mark.parametrize("own", [False, True])
def test_an_autograd_function_between_split_layers_is_refused(own: bool) -> None:
    for said in worlds.run(2, called, strategy="tensor:least=1", kind="autograd function", own=own):
        assert "an autograd function of the script was given the output of 0 (Normed.apply)" in said


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(8, 8) for _ in range(4))

    def heads(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], x.shape[1], 4, 2).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (self.heads(layer(x)) for layer in (self.query, self.key, self.value))
        mixed = functional.scaled_dot_product_attention(query, key, value)
        return self.out(mixed.transpose(1, 2).reshape(x.shape))


def part_of_block(strategy: str) -> str:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Attention()).double()
    inputs = torch.randn(12, 5, 8, dtype=torch.float64)
    try:
        run = tutti.prepare(
            model, "sgd:lr=0.1", inputs,
            lambda called, batch: called(batch).square().mean() + called[1].query(batch).norm(),
            strategy=strategy, batch_size=4, precision="fp64",
        )  # fmt: skip
        run.step(next(iter(run.epoch(0))))
    except tutti.errors.UsageError as error:
        return str(error)
    return ""


def test_a_layer_of_heads_that_the_script_calls_is_refused() -> None:
    for said in worlds.run(2, part_of_block, strategy="tensor:least=1"):
        assert "the script calls 1.query by itself" in said


def hooked(strategy: str, place: int, before: bool) -> dict[str, Any]:
    """Divide features by their norm in a hook of a layer."""
    model = small()
    if before:
        model[place].register_forward_pre_hook(lambda module, args: (args[0] / args[0].norm(dim=1, keepdim=True),))
    else:
        model[place].register_forward_hook(lambda module, args, output: output / output.norm(dim=1, keepdim=True))
    run = tutti.prepare(
        model, "sgd:lr=0.1", torch.randn(12, 4, dtype=torch.float64),
        lambda called, batch: called(batch).square().mean() + called(batch).sum() * 0.1,
        strategy=strategy, batch_size=4, precision="fp64",
    )  # fmt: skip
    for epoch in range(2):
        for batch in run.epoch(epoch):
            run.step(batch)
    return {name: value.numpy().copy() for name, value in run.state().items()}


@pytest.mark.parametrize(
    ("place", "before", "devices"),
    [(0, False, 2), (0, False, 3), (1, False, 2), pytest.param(1, False, 3, marks=pytest.mark.full), (3, True, 3)],
)
def test_hooks_between_layers_get_whole_features(place: int, before: bool, devices: int) -> None:
    want = worlds.alone(hooked, strategy="single", place=place, before=before)
    for got in worlds.run(devices, hooked, strategy="tensor:least=1", place=place, before=before):
        assert largest_difference(got, want) <= TOLERANCE


class Averaging(nn.Module):
    """A forward that averages a second encoder before it reads the first one's weights."""

    def __init__(self) -> None:
        super().__init__()
        self.fast, self.slow = (nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)) for _ in range(2))
        self.slow.requires_grad_(False)

    def forward(self, inputs: Tensor) -> Tensor:
        for slow, fast in zip(self.slow.parameters(), self.fast.parameters(), strict=True):
            slow.data.mul_(0.9).add_(fast.data, alpha=0.1)
        return self.fast(inputs) - self.slow(inputs)


def averaging(strategy: str) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = Averaging().double()
    data = torch.utils.data.TensorDataset(torch.linspace(-1, 1, 32, dtype=torch.float64).view(8, 4))
    optimizer = torch.optim.SGD(model.fast.parameters(), lr=0.1)
    run = tutti.prepare(
        model, optimizer, data, lambda model, batch: model(batch[0]).square().mean(), strategy=strategy, batch_size=4
    )
    for batch in run.epoch(0):
        run.step(batch)
    return run.state()


def test_layers_that_a_forward_averages_stay_whole() -> None:
    [want] = worlds.run(1, averaging, strategy="single")
    for got in worlds.run(2, averaging, strategy="tensor:least=1"):
        torch.testing.assert_close(got, want, rtol=0, atol=TOLERANCE)


def stepped_inside(strategy: str) -> dict[str, Any]:
    """Each step's loss is that of weights after a step of gradient descent, as in MAML."""
    model = small()
    run = tutti.prepare(model, "sgd:lr=0.1", torch.ones(12, 4).double(), inner, strategy=strategy, batch_size=6)
    for batch in run.epoch(0):
        run.step(batch)
    return {name: value.numpy() for name, value in run.state().items()}


def inner(model: nn.Module, batch: Tensor) -> Tensor:
    weights = dict(model.named_parameters())
    loss = torch.func.functional_call(model, weights, batch).square().mean()
    slopes = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
    fast = {name: w - 0.1 * g for (name, w), g in zip(weights.items(), slopes, strict=True)}
    return torch.func.functional_call(model, fast, batch).square().mean()


@pytest.mark.parametrize("devices", [2, 3])
def test_gradients_of_several_slices_meet_their_parameters(devices: int) -> None:
    want = worlds.alone(stepped_inside, strategy="single")
    for got in worlds.run(devices, stepped_inside, strategy="tensor:least=1"):
        assert largest_difference(got, want) <= TOLERANCE


class TableAsInput(nn.Module):
    """Gives a layer the table of an embedding as its input, as graph networks do with the features of all nodes."""

    def __init__(self, scale: float | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.layer, self.head, self.scale = nn.Embedding(12, 6), nn.Linear(6, 8), nn.Linear(8, 3), scale
        self.double()

    def forward(self, nodes: Tensor) -> Tensor:
        table = self.table.weight if self.scale is None else self.table.weight * self.scale
        hidden = self.layer(table).tanh().mean(0) + self.layer(self.table(nodes)).tanh()
        found: Tensor = self.head(hidden)
        return found


def table_as_input(strategy: str, scale: float | None) -> Any:
    model = TableAsInput(scale)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = (torch.arange(12), torch.arange(12) % 3)
    run = tutti.prepare(model, optimizer, data, strategy=strategy, batch_size=6, workers=1)
    try:
        for nodes, targets in run.microbatches(0):
            optimizer.zero_grad()
            run.backward(functional.cross_entropy(model(nodes), targets))
            optimizer.step()
    except tutti.errors.UsageError as error:
        return str(error)
    return {name: tensor.numpy() for name, tensor in run.state().items()}


@pytest.mark.parametrize("scale", [None, 2.0])
def test_a_split_table_is_no_input_of_a_split_layer(scale: float | None) -> None:
    """It was taken for the whole table, and the weights were others without a word."""
    for said in worlds.run(2, table_as_input, strategy="tensor:least=1", scale=scale):
        assert isinstance(said, str) and "table.weight" in said and "test_split_reads.py" in said
    wanted = worlds.alone(table_as_input, strategy="single", scale=scale)
    for found in worlds.run(2, table_as_input, strategy="tensor:least=1,whole=table", scale=scale):
        assert largest_difference(found, wanted) <= TOLERANCE


class ScaledByRows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.first, self.second = nn.Embedding(8, 8), nn.Linear(8, 16), nn.Linear(16, 3)

    def forward(self, rows: Tensor) -> Tensor:
        found = self.table(rows) * self.table.weight.shape[0] ** 0.5
        return self.second(torch.tanh(self.first(found)))  # type: ignore[no-any-return]


def scaled_by_rows(strategy: str, loop: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    model = ScaledByRows().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.TensorDataset(torch.arange(24) % 8)
    loss = None if loop else lambda called, batch: called(batch[0]).square().mean()
    run = tutti.prepare(model, optimizer, data, loss, strategy=strategy, batch_size=8)
    losses = []
    for batch in run.microbatches(0) if loop else run.epoch(0):
        if loop:
            optimizer.zero_grad()
            run.backward(model(batch[0]).square().mean())
            optimizer.step()
        else:
            run.step(batch)
        losses.append(run.stats.loss)
    with torch.no_grad():
        outputs = model(torch.arange(8))
    found = {"outputs": outputs, "losses": torch.tensor(losses, dtype=torch.float64), **run.state()}
    return {name: tensor.numpy().copy() for name, tensor in found.items()}


@pytest.mark.parametrize("loop", [False, True])
def test_each_forward_gets_the_size_of_the_whole_parameter(loop: bool) -> None:
    wanted = worlds.alone(scaled_by_rows, strategy="single", loop=loop)
    for found in worlds.run(2, scaled_by_rows, strategy="tensor:least=1", loop=loop):
        assert largest_difference(found, wanted) <= TOLERANCE
