"""Custom loops on a model that is cut into stages: equal to plain PyTorch, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import TensorDataset

import tutti
from tests import worlds
from tests.covering import in_turn
from tests.scripts import oracle

BATCH, EPOCHS = 6, 2
STRATEGIES = [
    (2, "model_parallel"),
    (3, "model_parallel"),
    (2, "pipeline"),
    (3, "pipeline"),
    (2, "pipeline:schedule=interleaved"),
    (2, "pipeline:schedule=zero_bubble"),
    (2, "hybrid:stages=2"),
]


class Skipping(nn.Module):
    """Reads its input on the first and on the last stage, and returns two outputs of which one has a detached part."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 6)
        self.third, self.last, self.beside = nn.Linear(6, 6), nn.Linear(10, 3), nn.Linear(6, 2)

    def forward(self, inputs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        hidden = torch.tanh(self.second(torch.tanh(self.first(inputs))))
        deep = torch.tanh(self.third(hidden))
        scores = self.last(torch.cat([deep, inputs], 1))
        return scores, {"beside": self.beside(deep), "largest": scores.argmax(1)}


class Tied(nn.Module):
    """Uses one weight on its first and on its last stage."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)])
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.last.weight = self.first.weight

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.inner(torch.tanh(self.first(inputs))))


class Untraceable(nn.Module):
    """Decides by its input's size, which ``torch.fx`` cannot follow, and computes something else in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(5))
        self.head = nn.Linear(4, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = inputs
        for block in self.blocks:
            hidden = block(hidden) if hidden.shape[0] < 1000 else hidden
        scores: Tensor = self.head(hidden)
        return scores * (1.0 if self.training else 0.5)


class Shared(nn.Module):
    """Calls one dropout module on several stages."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.drop = nn.ModuleList(nn.Linear(4, 4) for _ in range(4)), nn.Dropout(0.3)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = inputs
        for layer in self.layers:
            hidden = self.drop(torch.tanh(layer(hidden)))
        return hidden


def layers(*between: nn.Module) -> nn.Module:
    # A bias before a batch norm has a gradient of rounding errors, which Adam makes as large as any.
    blocks = [nn.Sequential(nn.Linear(4, 4, isinstance(each, nn.Identity)), each, nn.Tanh()) for each in between]
    return nn.Sequential(*blocks, nn.Linear(4, 3))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: layers(*[nn.Identity() for _ in range(5)]),
    "norm": lambda: layers(*[nn.BatchNorm1d(4) for _ in range(5)]),
    "skipping": Skipping,
    "tied": Tied,
    "untraceable": Untraceable,
}
DRAWING: dict[str, Callable[[], nn.Module]] = {
    "dropout first": lambda: layers(nn.Dropout(0.3), *[nn.Identity() for _ in range(4)]),
    "dropout": lambda: layers(*[nn.Dropout(0.3) for _ in range(5)]),
    "shared dropout": Shared,
}


def data() -> TensorDataset:
    draw = torch.Generator().manual_seed(3)
    inputs = torch.randn(16, 4, generator=draw, dtype=torch.float64)
    return TensorDataset(inputs, torch.randint(0, 3, (16,), generator=draw))


Backward = Callable[..., None]
Body = Callable[[nn.Module, Any, Any, Backward, Any], None]


def scores_of(found: Any) -> Tensor:
    scores: Tensor = found[0] if isinstance(found, tuple) else found
    return scores


def usual(model: nn.Module, optimizer: Any, batch: Any, backward: Backward, seen: list[Tensor]) -> None:
    optimizer.zero_grad()
    backward(functional.cross_entropy(scores_of(model(batch[0])), batch[1]))
    optimizer.step()


def clipped(model: nn.Module, optimizer: Any, batch: Any, backward: Backward, seen: list[Tensor]) -> None:
    optimizer.zero_grad(set_to_none=False)
    backward(functional.cross_entropy(scores_of(model(batch[0])), batch[1]))
    seen.append(clip_grad_norm_(model.parameters(), 0.1))
    seen.append(torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]))
    optimizer.step()


def added(model: nn.Module, optimizer: Any, batch: Any, backward: Backward, seen: list[Tensor]) -> None:
    optimizer.zero_grad()
    backward(functional.cross_entropy(scores_of(model(batch[0])), batch[1]))
    draw = torch.Generator().manual_seed(len(seen))
    for parameter in model.parameters():
        if parameter.grad is not None:
            noise = torch.randn(parameter.shape, generator=draw, dtype=torch.float64)
            parameter.grad += 0.1 * noise.to(parameter.device)
            parameter.grad.add_(parameter.detach(), alpha=0.1)
            with torch.no_grad():
                parameter.grad.sub_(parameter, alpha=0.05)
    seen.append(clip_grad_norm_(model.parameters(), 0.1))
    optimizer.step()


def assigned(model: nn.Module, optimizer: Any, batch: Any, backward: Backward, seen: list[Tensor]) -> None:
    optimizer.zero_grad()
    backward(functional.cross_entropy(scores_of(model(batch[0])), batch[1]))
    for number, parameter in enumerate(model.parameters()):
        if parameter.grad is not None:
            shape, device = parameter.shape, parameter.device
            parameter.grad = torch.full(shape, 0.01 * number, dtype=torch.float64, device=device)
    optimizer.step()


def twice(model: nn.Module, optimizer: Any, batch: Any, backward: Backward, seen: list[Tensor]) -> None:
    optimizer.zero_grad()
    first, second = scores_of(model(batch[0])), scores_of(model(batch[0] * 0.5))
    backward(functional.cross_entropy(first, batch[1]) + (first - second).square().mean())
    optimizer.step()


def attacked(model: nn.Module, optimizer: Any, batch: Any, backward: Backward, seen: list[Tensor]) -> None:
    inputs = batch[0].clone().requires_grad_()
    functional.cross_entropy(scores_of(model(inputs)), batch[1]).backward()
    optimizer.zero_grad()
    [slope] = torch.autograd.grad(functional.cross_entropy(scores_of(model(inputs)), batch[1]), inputs)
    seen.append(slope)
    if any(p.grad is not None for p in model.parameters()):
        seen.append(torch.ones(1))
    worse = (inputs + 0.1 * inputs.grad.sign() + 0.1 * slope.sign()).detach()
    backward(functional.cross_entropy(scores_of(model(worse)), batch[1]))
    optimizer.step()


def penalised(model: nn.Module, optimizer: Any, batch: Any, backward: Backward, seen: list[Tensor]) -> None:
    """The loss contains gradients of two calls, one of which gives a part of the loss, too."""
    optimizer.zero_grad()
    inputs = batch[0].clone().requires_grad_()
    scores = scores_of(model(inputs))
    loss = functional.cross_entropy(scores, batch[1])
    [slope] = torch.autograd.grad(loss, inputs, create_graph=True)
    more = (0.5 * batch[0]).requires_grad_()
    [steep] = torch.autograd.grad(scores_of(model(more)).square().sum(), more, create_graph=True)
    backward(loss + 0.1 * slope.square().sum() + 0.1 * (steep.norm(dim=1) - 1).square().mean())
    seen.append(steep.detach())
    optimizer.step()


def shrunk(model: nn.Module, optimizer: Any, batch: Any, backward: Backward, seen: list[Tensor]) -> None:
    """The script writes the parameters of all stages, by numbers and by tensors."""
    usual(model, optimizer, batch, backward, seen)
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            if parameter.dim() > 1:
                parameter.mul_(0.99)
            parameter.add_(torch.full(parameter.shape, 1e-3 * number, dtype=parameter.dtype, device=parameter.device))
            parameter.data.clamp_(-1, 1)


def followed(model: nn.Module, optimizer: Any, batch: Any, backward: Backward, seen: list[Tensor]) -> None:
    """The script reads the parameters of all stages, and writes them by what it has computed."""
    before = [parameter.detach().clone() for parameter in model.parameters()]
    usual(model, optimizer, batch, backward, seen)
    with torch.no_grad():
        for slow, parameter in zip(before, model.parameters(), strict=True):
            seen.append(parameter.sub(slow).norm() + torch.stack([parameter.sum(), 2 * parameter.abs().max()]).sum())
            slow.lerp_(parameter, 0.9)
            parameter.copy_(slow)
    torch._foreach_lerp_(before, [parameter.detach() for parameter in model.parameters()], 0.5)
    seen += before


def updated(model: nn.Module, optimizer: Any, batch: Any, backward: Backward, seen: list[Tensor]) -> None:
    """The script computes with gradients of all stages, and makes updates of its own."""
    optimizer.zero_grad()
    backward(functional.cross_entropy(scores_of(model(batch[0])), batch[1]))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                seen.append(parameter.grad.abs().max() + (parameter * parameter.grad).sum())
                parameter -= 0.1 * parameter.grad
                parameter.add_(parameter.grad, alpha=-0.05)
    optimizer.step()


def regularised(model: nn.Module, optimizer: Any, batch: Any, backward: Backward, seen: list[Tensor]) -> None:
    """The loss contains the parameters of all stages."""
    optimizer.zero_grad()
    penalty = sum(parameter.square().sum() for parameter in model.parameters())
    loss = functional.cross_entropy(scores_of(model(batch[0])), batch[1])
    backward(loss + 0.01 * penalty)
    seen.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
    optimizer.step()


def accumulated(model: nn.Module, optimizer: Any, batch: Any, backward: Backward, seen: list[Tensor]) -> None:
    scores = scores_of(model(batch[0]))
    backward(functional.cross_entropy(scores, batch[1]), retain_graph=True)
    backward(0.1 * scores.square().mean())
    backward(0.2 * scores_of(model(2 * batch[0])).square().mean())
    if len(seen) % 2:
        optimizer.step()
        optimizer.zero_grad()
    seen.append(torch.zeros(1))


def watched(model: nn.Module, optimizer: Any, batch: Any, backward: Backward, seen: list[Tensor]) -> None:
    usual(model, optimizer, batch, backward, seen)
    model.eval()
    with torch.no_grad():
        seen.append(scores_of(model(batch[0])))
    model.train()
    seen.append(scores_of(model(batch[0])).detach())


def drawn(model: nn.Module, optimizer: Any, batch: Any, backward: Backward, seen: list[Tensor]) -> None:
    optimizer.zero_grad()
    noise = 0.1 * torch.randn_like(batch[0])
    first, second = model(batch[0] + noise), model(batch[0])
    backward(functional.cross_entropy(first, batch[1]) + (second * torch.rand_like(second)).square().mean())
    seen.append(torch.rand_like(second))
    optimizer.step()


BODIES: dict[str, Body] = {
    each.__name__: each
    for each in (
        *(usual, clipped, added, assigned, drawn, twice, attacked, penalised, accumulated, watched),
        *(shrunk, followed, updated, regularised),
    )
}
OPTIMIZERS: dict[str, Callable[[nn.Module], Any]] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda model: torch.optim.Adam(model.parameters(), lr=0.01),
}


def build(kind: str, optimizer: str) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = (MODELS | DRAWING)[kind]().double()
    return model, OPTIMIZERS[optimizer](model)


def plain(kind: str, body: str, optimizer: str, epochs: int) -> tuple[dict[str, Tensor], list[Tensor]]:
    model, made = build(kind, optimizer)
    seen: list[Tensor] = []

    def backward(loss: Tensor, retain_graph: bool = False) -> None:
        loss.backward(retain_graph=retain_graph)

    for epoch in range(epochs):
        for batch in oracle.global_batches(data(), BATCH, epoch):
            BODIES[body](model, made, batch, backward, seen)
    return model.state_dict(), seen


def on_cpu(state: dict[str, Tensor], seen: list[Tensor]) -> tuple[dict[str, Tensor], list[Tensor]]:
    return {name: tensor.cpu() for name, tensor in state.items()}, [tensor.detach().cpu() for tensor in seen]


def looped(
    strategy: str, kind: str, body: str, optimizer: str, epochs: int = EPOCHS
) -> tuple[dict[str, Tensor], list[Tensor]]:
    model, made = build(kind, optimizer)
    run = tutti.prepare(model, made, data(), batch_size=BATCH, strategy=strategy, workers=1, seed=0)
    seen: list[Tensor] = []
    for epoch in range(epochs):
        for batch in run.microbatches(epoch):
            BODIES[body](model, made, batch, run.backward, seen)
    return on_cpu(run.state(), seen)


def apart(found: tuple[dict[str, Tensor], list[Tensor]], wanted: tuple[dict[str, Tensor], list[Tensor]]) -> float:
    assert found[0].keys() == wanted[0].keys() and len(found[1]) == len(wanted[1])
    pairs = [*((found[0][name], wanted[0][name]) for name in wanted[0]), *zip(found[1], wanted[1], strict=True)]
    return max(float((a.double() - b.double()).abs().max()) for a, b in pairs)


LOOPED = [name for name in BODIES if name != "drawn"]
PLACES = [(*STRATEGIES[n % 7], [*MODELS][n % 5], [*OPTIMIZERS][n % 2]) for n in range(7 * 5 * 2)]
"""Every strategy with every model and optimizer, of which ordinary runs give each body three that follow one another:
each strategy has each model and each optimizer, and each body three strategies and three models."""


@pytest.mark.parametrize(("body", "place"), in_turn(LOOPED, PLACES, each=3), ids=str)
def test_a_loop_equals_plain_pytorch(body: str, place: tuple[int, str, str, str]) -> None:
    """With one of the models also in a sixth step, in which the script's calls are no longer followed."""
    ranks, strategy, kind, optimizer = place
    epochs = EPOCHS if kind == "plain" else 1
    wanted = plain(kind, body, optimizer, epochs)
    arguments = {"kind": kind, "body": body, "optimizer": optimizer, "epochs": epochs}
    for found in worlds.run(ranks, looped, strategy=strategy, **arguments):
        assert apart(found, wanted) <= 1e-10


@pytest.mark.parametrize(("ranks", "strategy"), STRATEGIES[:-1])
def test_random_numbers_of_a_loop_are_those_of_one_device(ranks: int, strategy: str) -> None:
    for kind in ("dropout first", "dropout"):
        wanted = worlds.alone(looped, strategy="single", kind=kind, body="drawn", optimizer="adam")
        for found in worlds.run(ranks, looped, strategy=strategy, kind=kind, body="drawn", optimizer="adam"):
            assert apart(found, wanted) <= 1e-10, kind


def test_a_second_call_with_one_dropout_on_several_stages_is_refused() -> None:
    with pytest.raises(worlds.RankError) as caught:
        worlds.run(2, looped, strategy="model_parallel", kind="shared dropout", body="drawn", optimizer="sgd")
    assert all(
        each is not None and "cannot be combined with drop on several" in each.text for each in caught.value.failures
    )


def twice_in_one(model: Any, batch: Any) -> Any:
    # A forward that is recorded is called once.
    inputs = batch[0].clone().requires_grad_()
    first = scores_of(model(inputs))
    second = 0.5 * first if hasattr(model, "head") else scores_of(model(inputs * 0.5))
    errors = (first.argmax(1) != batch[1]).sum()
    each = functional.cross_entropy(first, batch[1], reduction="none") + (first - second).square().mean(1)
    return each.sum(), len(each), {"errors": errors}


def stepped(strategy: str, kind: str) -> tuple[dict[str, Tensor], list[Tensor]]:
    model, made = build(kind, "adam")
    run = tutti.prepare(
        model, made, data(), twice_in_one, batch_size=BATCH, strategy=strategy, workers=1, micro_batch=3, seed=0
    )
    seen = []
    for epoch in range(EPOCHS):
        for batch in run.epoch(epoch):
            seen.append(torch.tensor(run.step(batch)))
        found = run.evaluate(data(), batch=9)
        seen += [torch.tensor(found.loss), torch.tensor(found.metrics["errors"]), torch.tensor(float(model.training))]
    return on_cpu(run.state(), seen)


CALLED = [(2, "pipeline"), (3, "pipeline"), (3, "model_parallel")]


@pytest.mark.parametrize(("kind", "place"), in_turn(list(MODELS), CALLED), ids=str)
def test_a_loss_function_may_call_the_model_several_times(kind: str, place: tuple[int, str]) -> None:
    wanted, (ranks, strategy) = worlds.alone(stepped, strategy="single", kind=kind), place
    for found in worlds.run(ranks, stepped, strategy=strategy, kind=kind):
        assert apart(found, wanted) <= 1e-10


def disturbed() -> str:
    model, optimizer = build("plain", "sgd")
    run = tutti.prepare(model, optimizer, data(), batch_size=BATCH, strategy="hybrid:stages=2", workers=2, seed=0)
    try:
        for inputs, targets in run.microbatches(0):
            run.backward(functional.cross_entropy(model(inputs), targets))
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad.add_(torch.full_like(inputs[0, 0], float(tutti.rank())))
            optimizer.step()
    except tutti.errors.UsageError as error:
        return f"{run.updates} updates: {error}"
    return "nothing"


def test_noise_of_a_rank_of_its_own_is_refused() -> None:
    for said in worlds.run(4, disturbed):
        assert said.startswith("0 updates") and "in another way on each rank" in said


class Odd(nn.Module):
    """Ends in a module that returns or does something that stages cannot follow."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layers = layers(*[nn.Identity() for _ in range(3)])
        self.end = {"writes": Writing, "returns": Returning}.get(kind, nn.Identity)()

    def forward(self, inputs: Tensor) -> Any:
        return self.end(self.layers(inputs), inputs) if not isinstance(self.end, nn.Identity) else self.layers(inputs)


class Writing(nn.Module):
    def forward(self, scores: Tensor, inputs: Tensor) -> Tensor:
        inputs.add_(1)
        return scores


class Returning(nn.Module):
    def forward(self, scores: Tensor, inputs: Tensor) -> Any:
        return {1, 2}


def reading(model: nn.Module, inputs: Tensor) -> Any:
    return sum(p.double().cumsum(0).square().sum() for p in model.parameters())


def three_times_differentiated(model: nn.Module, inputs: Tensor) -> Any:
    inputs = inputs.clone().requires_grad_()
    [slope] = torch.autograd.grad(model(inputs).tanh().sum(), inputs, create_graph=True)
    [curve] = torch.autograd.grad(slope.square().sum(), inputs, create_graph=True)
    return curve.square().sum()


def hooked(model: nn.Module, inputs: Tensor) -> Any:
    model.get_parameter("layers.0.0.weight").register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
    return model(inputs).sum() + model(2 * inputs).sum()


def called(model: nn.Module, inputs: Tensor) -> Any:
    return model(inputs).sum()


def functional_called(model: nn.Module, inputs: Tensor) -> Any:
    weights = {"layers.0.0.bias": torch.zeros(4, dtype=torch.float64)}
    return torch.func.functional_call(model, weights, (inputs,)).sum()


def locally(model: nn.Module, inputs: Tensor) -> Any:
    model(inputs).sum().backward()
    return model(inputs).sum()


REFUSED: dict[str, tuple[Callable[[nn.Module, Tensor], Any], str]] = {
    "reads": (reading, "calls a function of the model's layers.0.0.weight"),
    "writes": (called, "writes an argument of its call in place"),
    "returns": (called, "returns a set"),
    "three times": (three_times_differentiated, "a third derivative"),
    "hooked": (hooked, "several calls of the model in a loss"),
    "functional": (functional_called, "its parameters are not its own"),
    "locally": (locally, "which run.backward did not make"),
}


def refused(kind: str) -> str:
    torch.manual_seed(0)
    model = Odd(kind).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = tutti.prepare(model, optimizer, data(), batch_size=BATCH, strategy="model_parallel", workers=1, seed=0)
    try:
        for inputs, _ in run.microbatches(0):
            run.backward(REFUSED[kind][0](model, inputs))
            optimizer.step()
            optimizer.zero_grad()
    except tutti.errors.TuttiError as error:
        return f"{run.updates} updates: {error}"
    return "nothing"


@pytest.mark.parametrize("kind", REFUSED)
def test_a_loop_that_stages_cannot_follow_is_refused(kind: str) -> None:
    pool = worlds.Pool(2, timeout=4.0)
    try:
        found = pool.run(refused, kind=kind)
    finally:
        pool.close()
    assert all(text.startswith("0 updates") for text in found)
    assert any(REFUSED[kind][1] in text for text in found)
    assert all(REFUSED[kind][1] in text or "rank" in text for text in found)


def written_apart() -> str:
    """What a script is told that writes a parameter by random numbers of each rank's own."""
    torch.manual_seed(0)
    model = layers(*[nn.Identity() for _ in range(3)]).double()
    run = tutti.prepare(model, torch.optim.SGD(model.parameters(), 0.1), data(), batch_size=BATCH, strategy="pipeline")
    draw = torch.Generator().manual_seed(tutti.rank())
    try:
        for inputs, targets in run.microbatches(0):
            run.backward(functional.cross_entropy(model(inputs), targets))
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(torch.randn(parameter.shape, generator=draw, dtype=torch.float64))
    except tutti.errors.MismatchError as error:
        return str(error)
    return "nothing"


def test_a_write_of_other_values_on_each_stage_is_refused() -> None:
    for said in worlds.run(2, written_apart):
        assert "the script writes a parameter by a tensor that is another one on each rank" in said


class Scaled(nn.Module):
    """Multiplies by a Python number among its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, inputs: Tensor, factor: float) -> Tensor:
        scores: Tensor = self.last(torch.tanh(self.first(inputs) * factor))
        return scores


def numbered() -> int:
    """How many kinds of messages a rank remembers after calls with ever new numbers."""
    torch.manual_seed(0)
    model = Scaled().double()
    run = tutti.prepare(model, torch.optim.SGD(model.parameters(), 0.1), data(), batch_size=BATCH, strategy="pipeline")
    for batch, (inputs, _) in enumerate(run.microbatches(0)):
        first = model(inputs, 0.5)
        for number in range(140):
            model(inputs, 1 + batch + number / 140)
        run.backward((first + model(inputs, 0.5)).square().mean())
    return max(len(passes.messages._forms) for passes in run.replica.passes)


def test_calls_with_ever_new_numbers_do_not_fill_the_memory() -> None:
    for remembered in worlds.run(2, numbered):
        assert remembered < 300


def arrays() -> list[str]:
    """What a script is told that writes the parameters of all stages by NumPy."""
    torch.manual_seed(0)
    model = layers(*[nn.Identity() for _ in range(3)]).double()
    tutti.prepare(model, torch.optim.SGD(model.parameters(), 0.1), data(), batch_size=BATCH, strategy="pipeline")
    said = []
    for parameter in model.parameters():
        for array in (parameter.detach().cpu().numpy(), parameter.data.cpu().numpy()):
            try:
                array += 1.0
            except ValueError as error:
                said.append(str(error))
    return said


def test_numpy_arrays_of_parameters_cannot_be_written() -> None:
    for said in worlds.run(2, arrays):
        assert len(said) >= 8 and all("read-only" in text for text in said)


def own_values(place: str) -> str:
    """What a script is told in which something is another one on each rank, or which goes back through a call twice."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    data = torch.arange(48.0, dtype=torch.float64).view(12, 4) / 48
    run = tutti.prepare(model, optimizer, data, strategy="pipeline", batch_size=6)
    factor = 1.0 + tutti.rank()
    try:
        for batch in run.microbatches(0):
            optimizer.zero_grad()
            inputs = batch.clone().requires_grad_(place == "twice")
            outputs = model(inputs * factor if place == "inputs" else inputs)
            loss = (outputs * factor if place == "loss" else outputs).square().mean()
            if place == "twice":
                torch.autograd.grad(outputs.sum(), inputs)
            run.backward(loss)
            optimizer.step()
    except (tutti.errors.UsageError, RuntimeError) as error:
        return f"{run.updates} {type(error).__name__} {error}"
    return "no error"


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("inputs", "UsageError the script calls the model with other arguments on each stage"),
        ("loss", "UsageError the script's loss gives the model's output other gradients on each stage"),
        ("twice", "RuntimeError Trying to backward through the graph a second time"),
    ],
)
def test_what_stages_would_compute_apart_is_refused(place: str, words: str) -> None:
    for said in worlds.run(3, own_values, place=place):
        assert said.startswith(f"0 {words}"), said


class Narrowing(nn.Linear):
    """Leaves out a column of its output where it is ``narrow``."""

    narrow = False

    def forward(self, inputs: Tensor) -> Tensor:
        scores = super().forward(inputs)
        return scores[:, 1:] if self.narrow else scores


def changed_form(stage: int) -> str:
    """What a rank is told after one stage's result has changed its form, where the script lets no rank end."""
    torch.manual_seed(0)
    model = nn.Sequential(*[Narrowing(4, 4) for _ in range(3)]).double()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    run = tutti.prepare(model, optimizer, data(), batch_size=BATCH, strategy="pipeline:cuts=1+2")
    try:
        for inputs, _ in run.microbatches(0):
            for narrow in (False, False, False, True):
                model[stage].narrow = narrow
                with torch.no_grad():
                    model(inputs)
    except tutti.errors.TuttiError as error:
        return f"{type(error).__name__} {error}"
    return "no error"


@pytest.mark.parametrize(
    ("stage", "words"),
    [
        (0, "a stage's activations are float64 (6, 3) and were float64 (6, 4) for an equal batch"),
        (2, "the model's output has another form than for equal arguments before"),
    ],
)
def test_a_result_of_another_form_is_told_on_every_stage(stage: int, words: str) -> None:
    # Not a shared pool: receives that are never completed stay in its process groups.
    pool = worlds.Pool(3, timeout=120.0)
    try:
        said = pool.run(changed_form, stage=stage)
    finally:
        pool.close()
    assert said[stage].startswith(f"UsageError {words}"), said
    for rank in {0, 1, 2} - {stage}:
        assert said[rank].startswith(f"PeerError rank {stage} failed, and ") and words in said[rank], said
