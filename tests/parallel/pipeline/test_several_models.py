"""Several models in one ``tutti.prepare``, each cut into stages over the same ranks: equal to plain PyTorch."""

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
from tests.contract.table import largest_difference
from tests.covering import marked
from tests.scripts import oracle

BATCH, EPOCHS = 6, 2
STRATEGIES = [
    (2, "pipeline"),
    (3, "pipeline"),
    (3, "model_parallel"),
    (2, "pipeline:schedule=interleaved"),
    (2, "pipeline:schedule=zero_bubble"),
    (2, "hybrid:stages=2"),
    (4, "hybrid:stages=2,tensor=2,least=1"),
]
Models = dict[str, nn.Module]
Backward = Callable[..., None]


class Deciding(nn.Module):
    """Decides by its input's size, which ``torch.fx`` cannot follow, and holds a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.factor = nn.Linear(2, 1), nn.Parameter(torch.ones(1))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, points: Tensor, sign: float = 1.0) -> Tensor:
        self.calls.add_(1)
        return self.inner(points) * self.factor * sign if len(points) < 1000 else points[:, :1]


class Branching(nn.Module):
    """Returns two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh())
        self.head = nn.Linear(6, 2)

    def forward(self, noise: Tensor) -> tuple[Tensor, Tensor]:
        features = self.body(noise)
        return self.head(features), features


def generator() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))


def critic() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 4), nn.Softplus(), nn.Linear(4, 1))


def tied() -> Models:
    """One matrix is in the last layer of the generator and in the first of the critic, and so on two ranks."""
    last, first = nn.Linear(2, 2), nn.Linear(2, 2)
    last.weight = first.weight
    return {
        "generator": nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2), nn.Tanh(), last),
        "critic": nn.Sequential(first, nn.Tanh(), nn.Linear(2, 8), nn.Softplus(), nn.Linear(8, 1)),
    }


def tied_to_whole() -> Models:
    """One matrix is in a model that is whole on the last rank, and in the first layers of the other one."""
    critic, narrow = Deciding(), nn.Linear(2, 1)
    narrow.weight = critic.inner.weight
    blocks = nn.Sequential(nn.Linear(3, 2), narrow, nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 2))
    return {"critic": critic, "generator": blocks}


MODELS: dict[str, Callable[[], Models]] = {
    "plain": lambda: {"generator": generator(), "critic": critic()},
    "tied": tied,
    "tied to whole": tied_to_whole,
    "whole": lambda: {"generator": generator(), "critic": Deciding()},
    "small": lambda: {"generator": generator(), "critic": nn.Linear(2, 1)},
    "branching": lambda: {"critic": critic(), "generator": Branching()},
    "frozen": lambda: {"generator": generator(), "critic": critic().requires_grad_(False)},
}


def data() -> TensorDataset:
    draw = torch.Generator().manual_seed(3)
    return TensorDataset(*(torch.randn(16, width, generator=draw, dtype=torch.float64) for width in (2, 3)))


def first(output: Any) -> Tensor:
    found: Tensor = output[0] if isinstance(output, tuple) else output
    return found


def adversarial(models: Models, optimizers: Any, batch: Any, backward: Backward, seen: list[Tensor]) -> None:
    """The critic learns from real and fake points, then the generator through the critic."""
    real, noise = batch
    fake = first(models["generator"](noise))
    optimizers["critic"].zero_grad()
    loss = functional.softplus(-models["critic"](real)) + functional.softplus(models["critic"](fake.detach()))
    if loss.requires_grad:
        backward(loss.mean())
        optimizers["critic"].step()
    optimizers["generator"].zero_grad()
    backward(functional.softplus(-models["critic"](fake)).mean())
    seen.append(nn.utils.clip_grad_norm_(models["generator"].parameters(), 0.5))
    optimizers["generator"].step()


def together(models: Models, optimizers: Any, batch: Any, backward: Backward, seen: list[Tensor]) -> None:
    """One loss of both models."""
    loss = joint(models, batch)
    for each in optimizers.values():
        each.zero_grad()
    backward(loss)
    for each in optimizers.values():
        each.step()
    models["critic"].eval()
    with torch.no_grad():
        seen.append(models["critic"](first(models["generator"](batch[1]))))
    models["critic"].train()


def penalty(models: Models, optimizers: Any, batch: Any, backward: Backward, seen: list[Tensor]) -> None:
    """The critic's loss has its slope between real and fake points, as in WGAN-GP."""
    real, noise = batch
    between = (0.3 * real + 0.7 * first(models["generator"](noise)).detach()).requires_grad_()
    [slope] = torch.autograd.grad(models["critic"](between).sum(), between, create_graph=True)
    for each in optimizers.values():
        each.zero_grad()
    backward((slope.norm(dim=1) - 1).square().mean() - models["critic"](first(models["generator"](noise))).mean())
    for each in optimizers.values():
        each.step()
    seen.append(slope)


def joint(models: Any, batch: Any) -> Tensor:
    fake = first(models["generator"](batch[1]))
    return models["critic"](fake).square().mean() + (fake - batch[0]).square().mean()


BODIES = {each.__name__: each for each in (adversarial, together, penalty)}


def build(kind: str) -> tuple[Models, dict[str, Any]]:
    torch.manual_seed(0)
    models = {name: model.double() for name, model in MODELS[kind]().items()}
    known: set[nn.Parameter] = set()
    optimizers = {}
    for name, model in sorted(models.items(), reverse=True):  # a tied matrix is updated with the generator
        own = [p for p in model.parameters() if p not in known]
        known |= {*own}
        optimizers[name] = torch.optim.Adam(own, lr=0.01)
    return models, optimizers


def on_cpu(state: Any, seen: list[Tensor]) -> tuple[Any, list[Any]]:
    return {name: tensor.cpu().numpy() for name, tensor in state.items()}, [t.detach().cpu().numpy() for t in seen]


def plain(kind: str, body: str, epochs: int) -> tuple[Any, list[Any]]:
    models, optimizers = build(kind)
    seen: list[Tensor] = []
    for epoch in range(epochs):
        for batch in oracle.global_batches(data(), BATCH, epoch):
            BODIES[body](models, optimizers, batch, lambda loss: loss.backward(), seen)
    return on_cpu(nn.ModuleDict(models).state_dict(), seen)


def looped(strategy: str, kind: str, body: str, epochs: int) -> tuple[Any, list[Any]]:
    models, optimizers = build(kind)
    run = tutti.prepare(models, [*optimizers.values()], data(), batch_size=BATCH, strategy=strategy, workers=1, seed=0)
    seen: list[Tensor] = []
    for epoch in range(epochs):
        for batch in run.microbatches(epoch):
            BODIES[body](models, optimizers, batch, run.backward, seen)
    return on_cpu(run.state(), seen)


# A loop of the script's own is refused on a grid of stages and tensor ranks.
TABLE = [
    (strategy, ranks, body, kind)
    for ranks, strategy in STRATEGIES[:-1]
    for body in BODIES
    for kind in (MODELS if strategy in ("pipeline", "pipeline:schedule=interleaved") else ("plain", "tied"))
    if (body, kind) != ("penalty", "frozen")
]


@pytest.mark.parametrize(("strategy", "ranks", "body", "kind"), marked(TABLE))
def test_a_loop_over_several_models_equals_plain_pytorch(strategy: str, ranks: int, body: str, kind: str) -> None:
    """With the first models also in a sixth step, in which the script's calls are no longer followed."""
    epochs = EPOCHS if kind == "plain" else 1
    wanted = worlds.alone(plain, kind=kind, body=body, epochs=epochs)
    for state, seen in worlds.run(ranks, looped, strategy=strategy, kind=kind, body=body, epochs=epochs):
        assert largest_difference(state, wanted[0]) < 1e-10
        assert max(float(abs(a - b).max()) for a, b in zip(seen, wanted[1], strict=True)) < 1e-10


def stepped(strategy: str) -> Any:
    models, optimizers = build("plain")
    run = tutti.prepare(
        models, [*optimizers.values()], data(), joint, batch_size=BATCH, strategy=strategy, workers=1, micro_batch=3
    )
    losses = [run.step(batch) for epoch in range(EPOCHS) for batch in run.epoch(epoch)]
    held_out = run.evaluate(data()).loss
    return {name: tensor.cpu().numpy() for name, tensor in run.state().items()}, [*losses, held_out]


@pytest.mark.parametrize(("ranks", "strategy"), STRATEGIES)
def test_a_loss_function_of_several_models_equals_one_device(ranks: int, strategy: str) -> None:
    wanted = worlds.alone(stepped, strategy="single")
    for state, losses in worlds.run(ranks, stepped, strategy=strategy):
        assert largest_difference(state, wanted[0]) < 1e-10
        assert losses == pytest.approx(wanted[1], rel=1e-9)


def refused(options: str, kind: str) -> str:
    models, optimizers = build("plain")
    if kind == "uncuttable":
        models, optimizers = {"critic": Deciding().double()}, {}
        optimizers["critic"] = torch.optim.SGD(models["critic"].parameters(), 0.1)
    if kind == "hooked":
        models["critic"].get_parameter("0.weight").register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
    if kind == "called within":
        # An adapter that a hook adds to the output of the generator's first layer.
        models["adapter"] = nn.Linear(8, 8).double()
        models["generator"].get_submodule("0").register_forward_hook(
            lambda *given: given[2] + models["adapter"](given[2])
        )
    try:
        run = tutti.prepare(models, [*optimizers.values()], data(), batch_size=BATCH, strategy=options, workers=1)
        for real, noise in run.microbatches(0):
            fake = models["generator"](noise)
            run.backward(models["critic"](real).mean() - models["critic"](fake).mean())
    except tutti.errors.TuttiError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ("pipeline:cuts=critic.2", "plain", "Leave out cuts="),
        ("pipeline", "uncuttable", "cannot be cut into stages"),
        ("pipeline", "hooked", "several calls of the model in a loss"),
        ("pipeline", "called within", "a forward or a hook within a stage makes it"),
        ("model_parallel", "called within", "a forward or a hook within a stage makes it"),
    ],
)
def test_models_that_cannot_be_cut_together_are_refused(options: str, kind: str, words: str) -> None:
    for said in worlds.run(2, refused, options=options, kind=kind):
        assert words in said
