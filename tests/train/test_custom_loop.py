"""Custom training loops do what the same loop does in plain PyTorch, or are refused before an update that is wrong."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import tutti
from tests import worlds
from tests.contract.table import largest_difference
from tests.covering import in_turn, marked
from tests.parity.loops import numbers
from tutti.data.order import permutation

INPUTS = torch.randn(25, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
TARGETS = INPUTS.sin().sum(dim=1, keepdim=True)
DATA = TensorDataset(INPUTS, TARGETS)
BATCH = 6
# Of the first ones L-BFGS amplifies errors of rounding.
FEW = TensorDataset(INPUTS[18:], TARGETS[18:])
"""Two steps an epoch: a whole batch, and one of a single sample, of which all ranks but one get none."""


def batches(epoch: int, data: TensorDataset = DATA) -> Iterator[tuple[Tensor, Tensor]]:
    """Global batches as tutti orders them."""
    order = permutation(0, epoch, len(data))
    for start in range(0, len(data), BATCH):
        yield data[torch.as_tensor(order[start : start + BATCH].copy())]


def made() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 1)).double()


def error_of(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


# --- the loops: ``backward`` is Tensor.backward in plain PyTorch ------------------------------------------------------

Body = Callable[[nn.Module, torch.optim.Optimizer, Any, Callable[..., None], int], None]


def ordinary(model: Any, optimizer: Any, batch: Any, backward: Any, step: int) -> None:
    optimizer.zero_grad()
    backward(error_of(model, batch))
    optimizer.step()


def adversarial(model: Any, optimizer: Any, batch: Any, backward: Any, step: int) -> None:
    """FGSM: Goodfellow et al. 2015, arXiv 1412.6572. The first backward is for the inputs alone."""
    inputs = batch[0].clone().requires_grad_(True)
    nn.functional.mse_loss(model(inputs), batch[1]).backward()
    optimizer.zero_grad()
    backward(nn.functional.mse_loss(model(inputs.detach() + 0.1 * inputs.grad.sign()), batch[1]))
    optimizer.step()


def cleared_by_the_model(model: Any, optimizer: Any, batch: Any, backward: Any, step: int) -> None:
    error_of(model, batch).backward()
    model.zero_grad()
    backward(error_of(model, batch))
    optimizer.step()
    model.zero_grad()


def zeroed_in_place(model: Any, optimizer: Any, batch: Any, backward: Any, step: int) -> None:
    optimizer.zero_grad(set_to_none=False)
    backward(error_of(model, batch))
    optimizer.step()


def two_losses(model: Any, optimizer: Any, batch: Any, backward: Any, step: int) -> None:
    optimizer.zero_grad()
    backward(error_of(model, batch))
    backward(0.1 * model(batch[0]).abs().mean())
    optimizer.step()


def two_losses_of_one_forward(model: Any, optimizer: Any, batch: Any, backward: Any, step: int) -> None:
    optimizer.zero_grad()
    outputs = model(batch[0])
    backward(nn.functional.mse_loss(outputs, batch[1]), retain_graph=True)
    backward(0.1 * outputs.abs().mean())
    optimizer.step()


def accumulated(model: Any, optimizer: Any, batch: Any, backward: Any, step: int) -> None:
    backward(error_of(model, batch) / 2)
    if step % 2:
        optimizer.step()
        optimizer.zero_grad()


def gradient_penalty(model: Any, optimizer: Any, batch: Any, backward: Any, step: int) -> None:
    inputs = batch[0].clone().requires_grad_(True)
    optimizer.zero_grad()
    [slope] = torch.autograd.grad(model(inputs).sum(), inputs, create_graph=True)
    backward(error_of(model, batch) + (slope.norm(dim=1) - 1).square().mean())
    optimizer.step()


def clipped_by_hand(model: Any, optimizer: Any, batch: Any, backward: Any, step: int) -> None:
    optimizer.zero_grad()
    backward(error_of(model, batch))
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()


def clipped_in_the_group(model: Any, optimizer: Any, batch: Any, backward: Any, step: int) -> None:
    optimizer.zero_grad()
    backward(error_of(model, batch))
    for parameters in optimizer.param_groups[0]["params"][:2], optimizer.param_groups[0]["params"][2:]:
        nn.utils.clip_grad_norm_(parameters, 0.05)
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(0.5).clamp_(-0.01, 0.01)
    optimizer.step()


def left_out(model: Any, optimizer: Any, batch: Any, backward: Any, step: int) -> None:
    optimizer.zero_grad()
    backward(error_of(model, batch))
    optimizer.param_groups[0]["params"][step % 4].grad = None
    optimizer.step()


def decayed_by_hand(model: Any, optimizer: Any, batch: Any, backward: Any, step: int) -> None:
    optimizer.zero_grad()
    backward(error_of(model, batch))
    for parameter in model.parameters():
        parameter.grad.add_(parameter.detach(), alpha=0.1)
    optimizer.step()


def decayed_out_of_place(model: Any, optimizer: Any, batch: Any, backward: Any, step: int) -> None:
    optimizer.zero_grad()
    backward(error_of(model, batch))
    for parameter in model.parameters():
        parameter.grad = parameter.grad.sign() * 0.1 + 0.1 * parameter.detach()
    optimizer.step()


def assign(model: Any, batch: Any, limit: float | None = None) -> list[Any]:
    """Assign gradients of ``torch.autograd.grad`` to ``.grad``, clipped if there is a ``limit``."""
    parameters = list(model.parameters())
    for parameter, gradient in zip(parameters, torch.autograd.grad(error_of(model, batch), parameters), strict=True):
        parameter.grad = gradient if limit is None else gradient.clamp(-limit, limit)
    return parameters


def reduce_gradients(backward: Any) -> None:
    """Call ``run.reduce_gradients`` of the run whose ``backward`` is given; plain PyTorch has nothing to reduce."""
    run = getattr(backward, "__self__", None)
    if run is not None:
        run.reduce_gradients()


def computed_by_hand(model: Any, optimizer: Any, batch: Any, backward: Any, step: int) -> None:
    optimizer.zero_grad()
    assign(model, batch)
    reduce_gradients(backward)
    optimizer.step()


def assigned_undeclared(model: Any, optimizer: Any, batch: Any, backward: Any, step: int) -> None:
    assign(model, batch)
    optimizer.step()


def clipped_and_assigned(model: Any, optimizer: Any, batch: Any, backward: Any, step: int) -> None:
    assign(model, batch, limit=0.02)
    optimizer.step()


def plain_backward(model: Any, optimizer: Any, batch: Any, backward: Any, step: int) -> None:
    optimizer.zero_grad()
    error_of(model, batch).backward()
    optimizer.step()


def one_loss_forgotten(model: Any, optimizer: Any, batch: Any, backward: Any, step: int) -> None:
    optimizer.zero_grad()
    (0.1 * model(batch[0]).abs().mean()).backward()
    backward(error_of(model, batch))
    optimizer.step()


def skipped(model: Any, optimizer: Any, batch: Any, backward: Any, step: int) -> None:
    if step % 3 != 1:
        ordinary(model, optimizer, batch, backward, step)


def written_by_hand(model: Any, optimizer: Any, batch: Any, backward: Any, step: int) -> None:
    ordinary(model, optimizer, batch, backward, step)
    for parameter in model.parameters():
        parameter.data.mul_(0.9)


def closure_step(model: Any, optimizer: Any, batch: Any, backward: Any, step: int) -> None:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = error_of(model, batch)
        backward(loss)
        return loss

    optimizer.step(closure)


def mixed(model: Any, optimizer: Any, batch: Any, backward: Any, step: int) -> None:
    optimizer.zero_grad()
    backward(error_of(model, batch))
    (0.1 * model(batch[0]).abs().mean()).backward()
    optimizer.step()


def clipped_before_the_exchange(model: Any, optimizer: Any, batch: Any, backward: Any, step: int) -> None:
    optimizer.zero_grad()
    error_of(model, batch).backward()
    nn.utils.clip_grad_value_(model.parameters(), 0.02)
    optimizer.step()


def assigned_and_clipped(model: Any, optimizer: Any, batch: Any, backward: Any, step: int) -> None:
    optimizer.zero_grad()
    parameters = assign(model, batch)
    reduce_gradients(backward)
    nn.utils.clip_grad_value_(parameters, 0.02)
    optimizer.step()


def counted_otherwise(model: Any, optimizer: Any, batch: Any, backward: Any, step: int) -> None:
    """A mean over samples, and a loss that counts something else."""
    optimizer.zero_grad()
    (0.1 * model(batch[0]).abs().mean()).backward()
    weights = 1 + (batch[1] > 0).double()
    total, count = (weights * (model(batch[0]) - batch[1]).square()).sum(), weights.sum()
    backward(total / count if backward.__name__ == "<lambda>" else (total, count))
    optimizer.step()


def frozen_in_the_body(model: Any, optimizer: Any, batch: Any, backward: Any, step: int) -> None:
    optimizer.zero_grad()
    backward(error_of(model, batch))
    if step == 0:
        model[0].requires_grad_(False)
    optimizer.step()


def thawed(model: Any, optimizer: Any, batch: Any, backward: Any, step: int) -> None:
    if step == 2:
        model[0].requires_grad_(True)
    ordinary(model, optimizer, batch, backward, step)


def thawed_by_the_optimizer(model: Any, optimizer: Any, batch: Any, backward: Any, step: int) -> None:
    if step == 2:
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.requires_grad_(True)
    ordinary(model, optimizer, batch, backward, step)


def thawed_after_a_look(model: Any, optimizer: Any, batch: Any, backward: Any, step: int) -> None:
    with torch.no_grad():
        model(batch[0])
    thawed(model, optimizer, batch, backward, step)


def thawed_after_the_forward(model: Any, optimizer: Any, batch: Any, backward: Any, step: int) -> None:
    optimizer.zero_grad()
    error = error_of(model, batch)
    if step == 2:
        model[0].requires_grad_(True)
    backward(error)
    optimizer.step()


def frozen_for_a_while(model: Any, optimizer: Any, batch: Any, backward: Any, step: int) -> None:
    ordinary(model, optimizer, batch, backward, step)
    if step in (1, 2):
        model[0].requires_grad_(step == 2)


LOOPS: dict[str, Body] = {
    body.__name__: body
    for body in (
        ordinary,
        adversarial,
        cleared_by_the_model,
        zeroed_in_place,
        two_losses,
        two_losses_of_one_forward,
        accumulated,
        gradient_penalty,
        clipped_by_hand,
        clipped_in_the_group,
        left_out,
        decayed_by_hand,
        decayed_out_of_place,
        computed_by_hand,
        plain_backward,
        one_loss_forgotten,
        skipped,
        written_by_hand,
        closure_step,
        mixed,
        clipped_before_the_exchange,
        assigned_and_clipped,
        assigned_undeclared,
        clipped_and_assigned,
        counted_otherwise,
        frozen_in_the_body,
        thawed,
        thawed_by_the_optimizer,
        thawed_after_a_look,
        thawed_after_the_forward,
        frozen_for_a_while,
    )
}
BODIES = dict(LOOPS)


def optimizer_of(name: str, model: nn.Module) -> torch.optim.Optimizer:
    if name == "closure_step":
        return torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    return torch.optim.AdamW(model.parameters(), lr=0.01)


@cache
def plain(name: str) -> dict[str, Any]:
    model = made()
    if name in THAWED:
        model[0].requires_grad_(False)
    optimizer, step = optimizer_of(name, model), 0
    for epoch in range(2):
        for batch in batches(epoch, FEW):
            BODIES[name](model, optimizer, batch, lambda loss, **options: loss.backward(**options), step)
            step += 1
    return numbers(model)


def through(name: str, strategy: str, workers: int, **options: Any) -> Any:
    """The same loop through tutti, or what refuses it and whether a parameter had changed by then."""
    model = made()
    if name in THAWED:
        model[0].requires_grad_(False)
    optimizer, before = optimizer_of(name, model), numbers(model)
    try:
        run = tutti.prepare(model, optimizer, FEW, strategy=strategy, workers=workers, batch_size=BATCH, **options)
        for epoch in range(2):
            for batch in run.microbatches(epoch):
                BODIES[name](model, optimizer, batch, run.backward, run.global_step)
        return {name: tensor.numpy().copy() for name, tensor in run.state().items()}
    except Exception as error:
        return type(error).__name__, getattr(error, "exit_code", 1), str(error), before


WHOLE = ("single", "mirrored", "mirrored:algorithm=native")
THAWED = ("thawed", "thawed_by_the_optimizer", "thawed_after_a_look", "thawed_after_the_forward")
EDITS = ("clipped_by_hand", "clipped_in_the_group", "decayed_by_hand", "decayed_out_of_place")
ASSIGNED = ("computed_by_hand", "assigned_and_clipped", "assigned_undeclared", "clipped_and_assigned")

# What is refused, and a part of the reason; everything else is equal to plain PyTorch.
SEVERAL = {
    "written_by_hand": "must see the same parameters",
    "closure_step": "sees the samples of one micro-batch",
    # The second body's forward trains what the first one's did not.
    **dict.fromkeys(
        ("frozen_in_the_body", "frozen_for_a_while", "thawed_after_the_forward"),
        "did not do the same for each micro-batch",
    ),
}
LOCAL_EDITS = {
    "clipped_before_the_exchange": "edited a gradient that is not complete",
    **dict.fromkeys(("assigned_undeclared", "clipped_and_assigned"), "assigned .grad, and did not say"),
    "counted_otherwise": "counts something else than samples",
}
PARTS = {"closure_step": "LBFGS needs"}
MIXED = {"mixed": "can no longer be told apart", **LOCAL_EDITS}
REFUSED: dict[str, dict[str, str]] = {
    "central_storage": {**PARTS, **MIXED, "written_by_hand": "one copy of the parameters"},
    "sharded:stage=1": {
        **PARTS,
        **MIXED,
    },
    "sharded:stage=3": {
        **PARTS,
        **dict.fromkeys(("mixed", "plain_backward", "one_loss_forgotten"), "can no longer be told apart"),
        **dict.fromkeys(("clipped_before_the_exchange", "counted_otherwise"), "can no longer be told apart"),
        "gradient_penalty": "has a gradient in it (create_graph=True)",
        # PyTorch's own words: the graph has the gathered parameters, and the model shows its shards.
        **dict.fromkeys(ASSIGNED, "appears to not have been used in the graph"),
    },
    "tensor:least=1": {
        **PARTS,
        **MIXED,
        **dict.fromkeys(("plain_backward", "one_loss_forgotten", "counted_otherwise"), "did not make"),
        **dict.fromkeys(("computed_by_hand", "assigned_and_clipped"), "did not make"),
    },
    "parameter_server": {
        **PARTS,
        **MIXED,
        "written_by_hand": "servers' parameters replace",
        **dict.fromkeys(THAWED, "started with the parameters"),
    },
}
CASES = [
    ("mirrored", 2, 2),
    ("mirrored", 3, 3),
    ("mirrored", 2, 4),
    ("central_storage", 2, 2),
    ("central_storage", 3, 3),
    ("sharded:stage=1", 2, 2),
    ("sharded:stage=1", 2, 4),
    ("sharded:stage=3", 3, 3),
    ("tensor:least=1", 2, 1),
    ("parameter_server", 2, 2),
    ("parameter_server", 2, 4),
]
# The same strategies, whose gradients go another way.
WAYS = [
    ("mirrored:algorithm=native", 2, 2),
    ("parameter_server:servers=2,transport=tcp", 3, 3),
    ("mirrored:algorithm=native", 3, 3),
]


def expected(name: str, strategy: str, devices: int, workers: int) -> str | None:
    """What a loop comes to: None for equal to plain PyTorch, else a part of what refuses it."""
    several = strategy not in ("tensor:least=1",) and workers > devices
    if several and name in SEVERAL and (strategy in WHOLE or name not in PARTS):
        return SEVERAL[name]
    if strategy in WHOLE:
        return MIXED.get(name) if devices > 1 or several else None
    return REFUSED.get(strategy, REFUSED["parameter_server"]).get(name)


def judge(got: Any, name: str, strategy: str, devices: int, workers: int) -> None:
    said = expected(name, strategy, devices, workers)
    if said is None:
        assert isinstance(got, dict), got[2]
        assert largest_difference(got, plain(name)) <= 1e-10
        return
    assert isinstance(got, tuple), "not refused"
    assert re.search(re.escape(said), got[2]), got[2]
    assert got[1] == 2 or got[0] == "RuntimeError"


@pytest.mark.parametrize(("name", "workers"), in_turn(list(LOOPS), [3, 1]))
def test_one_device(name: str, workers: int) -> None:
    [got] = worlds.run(1, through, name=name, strategy="single", workers=workers)
    judge(got, name, "single", 1, workers)


TABLE = [(name, strategy, devices, workers) for name in LOOPS for strategy, devices, workers in CASES]


@pytest.mark.parametrize(("name", "strategy", "devices", "workers"), marked(TABLE))
def test_several_devices(name: str, strategy: str, devices: int, workers: int) -> None:
    for got in worlds.run(devices, through, name=name, strategy=strategy, workers=workers):
        judge(got, name, strategy, devices, workers)


@pytest.mark.parametrize(
    ("name", "case"),
    [
        *in_turn(list(LOOPS)[::2], WAYS),
        *(pytest.param(*row, marks=pytest.mark.full) for row in product(list(LOOPS)[1::2], WAYS)),
    ],
    ids=str,
)
def test_several_devices_whose_gradients_go_another_way(name: str, case: tuple[str, int, int]) -> None:
    strategy, devices, workers = case
    for got in worlds.run(devices, through, name=name, strategy=strategy, workers=workers):
        judge(got, name, *case)


@pytest.mark.parametrize("strategy", ["mirrored", "sharded:stage=1", "sharded:stage=3"])
def test_thawing_between_a_forward_and_its_backward(strategy: str) -> None:
    name = "thawed_after_the_forward"
    for got in worlds.run(2, through, name=name, strategy=strategy, workers=2):
        judge(got, name, strategy, 2, 2)


@pytest.mark.parametrize(("name", "devices"), in_turn(["ordinary", "two_losses", "accumulated", "adversarial"], [2, 3]))
def test_reproducible_bits_do_not_depend_on_the_devices(name: str, devices: int) -> None:
    [want] = worlds.run(1, through, name=name, strategy="single", workers=4, reproducible=True)
    for got in worlds.run(devices, through, name=name, strategy="mirrored", workers=4, reproducible=True):
        assert largest_difference(got, want) == 0


# --- what one rank alone does ----------------------------------------------------------------------------------------


def own_noise(model: Any, optimizer: Any, batch: Any, backward: Any, step: int) -> None:
    optimizer.zero_grad()
    backward(error_of(model, batch))
    for parameter in model.parameters():
        parameter.grad.add_(torch.randn_like(parameter), alpha=0.01 * (1 + tutti.rank()))
    optimizer.step()


BODIES["own_noise"] = own_noise


@pytest.mark.parametrize("strategy", ["mirrored", "parameter_server"])
def test_an_edit_that_differs_over_the_ranks_is_refused(strategy: str) -> None:
    for got in worlds.run(2, through, name="own_noise", strategy=strategy, workers=2):
        assert got[0] == "UsageError" and "changed the gradient of 0.weight" in got[2], got


# --- two models, two optimizers --------------------------------------------------------------------------------------


def pair() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(1)
    generator = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)).double()
    return generator, nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).double()


def adversaries(generator: Any, critic: Any, optimizers: Any, batch: Any, backward: Any) -> None:
    """A generator's backward goes through the discriminator: Goodfellow et al. 2014, arXiv 1406.2661, algorithm 1."""
    real, noise = batch[0], batch[0].flip(1)
    bce = nn.functional.binary_cross_entropy_with_logits
    of_critic, of_generator = optimizers
    of_critic.zero_grad()
    fake = generator(noise)
    backward(
        bce(critic(real), torch.ones(len(real), 1).double())
        + bce(critic(fake.detach()), torch.zeros(len(real), 1).double())
    )
    of_critic.step()
    of_generator.zero_grad()
    backward(bce(critic(fake), torch.ones(len(real), 1).double()))
    of_generator.step()


def two_players(strategy: str | None, workers: int, as_dict: bool = False) -> Any:
    generator, critic = pair()
    optimizers = [torch.optim.Adam(critic.parameters(), lr=0.02), torch.optim.SGD(generator.parameters(), lr=0.05)]
    if strategy is None:
        for batch in batches(0):
            adversaries(generator, critic, optimizers, batch, lambda loss: loss.backward())
        return {
            f"{name}.{key}": value
            for name, model in (("g", generator), ("d", critic))
            for key, value in numbers(model).items()
        }
    models: Any = {"g": generator, "d": critic} if as_dict else [generator, critic]
    try:
        run = tutti.prepare(models, optimizers, DATA, strategy=strategy, workers=workers, batch_size=BATCH)
        for batch in run.microbatches(0):
            adversaries(generator, critic, optimizers, batch, run.backward)
        names = {"0": "g", "1": "d"}
        state = {key: tensor.numpy().copy() for key, tensor in run.state().items()}
        return {names.get(key[0], key[0]) + key[1:]: value for key, value in state.items()}
    except Exception as error:
        return type(error).__name__, str(error)


PLACES = [
    *(("single", 1), ("mirrored", 2), ("mirrored", 3), ("central_storage", 2), ("sharded:stage=1", 2)),
    *(("parameter_server", 1), ("parameter_server:servers=2", 2), ("parameter_server:transport=tcp", 3)),
]


@pytest.mark.parametrize(("place", "as_dict"), in_turn(PLACES, [False, True]), ids=str)
def test_two_models_with_two_optimizers(place: tuple[str, int], as_dict: bool) -> None:
    want, (strategy, devices) = two_players(None, 1), place
    for got in worlds.run(devices, two_players, strategy=strategy, workers=devices, as_dict=as_dict):
        assert isinstance(got, dict), got
        assert largest_difference(got, want) <= 1e-10


def test_two_updates_in_a_body_need_one_micro_batch_a_rank() -> None:
    for devices in (1, 2):
        for kind, said in worlds.run(devices, two_players, strategy="mirrored", workers=4):
            assert kind == "UsageError" and "two updates in one body" in said and "test_custom_loop.py" in said
            assert (
                "all outputs and losses of the body before the first optimizer.step(), where none needs its update"
                in said
            )


def learn_mutually(
    networks: Any, optimizers: Any, batch: Any, backward: Callable[[Tensor], None], run: Any, late: str = ""
) -> None:
    """Deep mutual learning (arXiv 1706.00384): each network learns from the other's outputs, and is updated in turn."""
    outputs = [each(batch[0]) for each in networks]
    for k, (optimizer, network) in enumerate(zip(optimizers, networks, strict=True)):
        other = outputs[1 - k].detach()
        if k and late == "forward":
            other = networks[0](batch[0]).detach()
        error = nn.functional.mse_loss(outputs[k], batch[1]) + nn.functional.mse_loss(outputs[k], other)
        if k and late == "penalty":
            error = error + networks[0][0].weight.detach().square().sum() * network[0].bias.square().sum()
        if k and late == "second epoch" and run.global_step > 3:
            error = error + networks[0](batch[0]).detach().mean() * outputs[k].mean()
        optimizer.zero_grad()
        backward(error)
        optimizer.step()


def two_learners(strategy: str | None, workers: int, late: str = "") -> Any:
    networks = [made(), made()]
    with torch.no_grad():
        networks[1][0].weight.mul_(0.5)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.05, momentum=0.9) for each in networks]
    if strategy is None:
        for batch in [*batches(0), *batches(1)]:
            learn_mutually(networks, optimizers, batch, lambda loss: loss.backward(), None)
        return {f"{k}.{key}": value for k, each in enumerate(networks) for key, value in numbers(each).items()}
    try:
        run = tutti.prepare(networks, optimizers, DATA, strategy=strategy, workers=workers, batch_size=BATCH)
        for epoch in range(2):
            for batch in run.microbatches(epoch):
                learn_mutually(networks, optimizers, batch, run.backward, run, late)
        return {key: tensor.numpy().copy() for key, tensor in run.state().items()}
    except tutti.errors.UsageError as error:
        return run.updates, str(error)


LEARNERS = [
    *(("single", 1, 3), ("mirrored", 2, 4), ("sharded", 3, 6), ("central_storage", 2, 4), ("mirrored", 2, 2)),
    *(
        pytest.param(*place, marks=pytest.mark.full)
        for place in (("mirrored", 3, 6), ("sharded:stage=1", 2, 4), ("sharded", 2, 3))
    ),
]


@pytest.mark.parametrize(("strategy", "devices", "workers"), LEARNERS)
def test_updates_of_networks_that_have_read_no_update_are_right(strategy: str, devices: int, workers: int) -> None:
    want = two_learners(None, 1)
    for got in worlds.run(devices, two_learners, strategy=strategy, workers=workers):
        assert isinstance(got, dict), got
        assert largest_difference(got, want) <= 1e-10


@pytest.mark.parametrize(
    ("strategy", "late"),
    [*(("mirrored", late) for late in ("forward", "penalty", "second epoch")), ("sharded", "forward")],
)
def test_a_loss_that_reads_an_update_of_the_same_body_is_refused(strategy: str, late: str) -> None:
    for updates, said in worlds.run(2, two_learners, strategy=strategy, workers=4, late=late):
        assert "two updates in one body" in said and "test_custom_loop.py" in said
        assert "reads 0.0.weight" in said, said
        assert bool(updates) == (late == "second epoch")


def counted(strategy: str | None, every: int, until: int) -> Any:
    """An update after every so many bodies, and after the last one as its script counts them."""
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    run = strategy and tutti.prepare(model, optimizer, DATA, strategy=strategy, workers=3, batch_size=BATCH)
    try:
        for i, batch in enumerate(run.microbatches(0) if run else batches(0)):
            (run.backward if run else torch.Tensor.backward)(error_of(model, batch))
            if (i + 1) % every == 0 or i + 1 == until:
                optimizer.step()
                optimizer.zero_grad()
        return {key: tensor.numpy().copy() for key, tensor in run.state().items()} if run else numbers(model)
    except tutti.errors.TuttiError as error:
        return run.updates, str(error)


def test_updates_in_every_third_body_are_refused_where_one_rank_has_two_for_a_batch() -> None:
    """The bodies 3 and 4 are those of the second batch on one rank, and of two batches on the other."""
    outcomes = worlds.run_within(8.0, 2, counted, strategy="mirrored", every=3, until=4)
    assert outcomes[0][0] == 0 and "updates in every n-th of its bodies" in outcomes[0][1], outcomes
    assert "test_custom_loop.py" in outcomes[0][1]
    worlds.forget(2)
    want = counted(None, 1, 0)
    for got in worlds.run(2, counted, strategy="mirrored", every=1, until=0):
        assert isinstance(got, dict), got
        assert largest_difference(got, want) <= 1e-10


def two_passes(strategy: str) -> str:
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = tutti.prepare(model, optimizer, DATA, strategy=strategy, batch_size=BATCH)
    try:
        for batch in run.microbatches(0):
            for _ in range(2):
                optimizer.zero_grad()
                run.backward(error_of(model, batch))
                optimizer.step()
    except tutti.errors.UsageError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("options", ["mode=async", "backup=1"])
def test_servers_that_do_not_wait_refuse_a_second_update_of_a_batch(options: str) -> None:
    for said in worlds.run(2, two_passes, strategy=f"parameter_server:{options}"):
        assert said.startswith("a second update of one global batch") and "test_custom_loop.py:" in said
    worlds.forget(2)
    for strategy in ("mirrored", "parameter_server"):
        assert worlds.run(2, two_passes, strategy=strategy) == ["", ""]


def fewer(strategy: str) -> str:
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = tutti.prepare(model, optimizer, DATA, error_of, strategy=strategy, batch_size=BATCH)
    try:
        for epoch in range(2):
            for batch in run.epoch(epoch):
                run.step(batch)
            optimizer.param_groups[0]["params"] = optimizer.param_groups[0]["params"][2:]
    except tutti.errors.UsageError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("strategy", ["central_storage", "parameter_server"])
def test_a_parameter_that_leaves_the_optimizer_is_named_as_such(strategy: str) -> None:
    for said in worlds.run(2, fewer, strategy=strategy):
        assert said.startswith("the script has changed which parameters the optimizer has")
        assert "requires_grad_(False)" in said
    worlds.forget(2)


def frozen_after_prepare(strategy: str | None, workers: int) -> dict[str, Any]:
    """Freeze a layer after ``tutti.prepare``, and train it from the second epoch on."""
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = None
    if strategy is not None:
        run = tutti.prepare(model, optimizer, DATA, strategy=strategy, workers=workers, batch_size=BATCH)
    for epoch in range(2):
        model[0].requires_grad_(epoch > 0)
        for batch in batches(epoch) if run is None else run.microbatches(epoch):
            optimizer.zero_grad()
            loss = error_of(model, batch)
            loss.backward() if run is None else run.backward(loss)
            optimizer.step()
    found = model.state_dict() if run is None else run.state()
    return {name: tensor.detach().numpy().copy() for name, tensor in found.items()}


@pytest.mark.parametrize(
    ("strategy", "devices"),
    in_turn(
        ["mirrored", "sharded:stage=1", "sharded", "central_storage", "parameter_server", "tensor:least=1"], [2, 3]
    ),
)
def test_a_layer_that_is_frozen_after_prepare_and_trained_later(strategy: str, devices: int) -> None:
    want = frozen_after_prepare(None, 1)
    workers = 1 if strategy.startswith("tensor") else devices
    for got in worlds.run(devices, frozen_after_prepare, strategy=strategy, workers=workers):
        assert largest_difference(got, want) <= 1e-10


def scaled_gradients(strategy: str) -> str:
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = tutti.prepare(model, optimizer, DATA, strategy=strategy, batch_size=BATCH)
    try:
        for batch in run.microbatches(0):
            optimizer.zero_grad()
            run.backward(error_of(model, batch))
            for parameter in model.parameters():
                parameter.grad.mul_(0.5)  # type: ignore[union-attr]
            optimizer.step()
    except tutti.errors.UsageError as error:
        return str(error)
    return f"nothing was raised in {run.global_step} steps"


def test_edits_of_gradients_of_split_layers_that_are_sharded_are_refused() -> None:
    for said in worlds.run(4, scaled_gradients, strategy="hybrid:shards=2,stage=3,tensor=2,least=1"):
        assert said.startswith("a script cannot edit gradients of split layers that are sharded, too (step 1")
    worlds.forget(4)


def wrongly_given(what: str) -> str:
    generator, critic = pair()
    own = torch.optim.SGD(generator.parameters(), lr=0.1)
    given: dict[str, tuple[Any, Any]] = {
        "twice": ([generator, critic], [own, torch.optim.SGD(generator.parameters(), lr=0.1)]),
        "nothing": ([generator, critic], []),
        "no model": ([generator, "critic"], own),
        "a class": (generator, torch.optim.SGD),
        "the other way round": (own, generator),
    }
    try:
        tutti.prepare(*given[what], DATA, batch_size=BATCH)
    except Exception as error:
        return f"{type(error).__name__} {error}"
    return "nothing was raised"


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("twice", "two optimizers have a parameter in common"),
        ("nothing", "the optimizer is a list"),
        ("no model", "the model is a list"),
        ("a class", "the optimizer is the class SGD"),
        ("the other way round", "the order is tutti.prepare(model, optimizer, dataset, loss_fn)"),
    ],
)
def test_what_is_no_model_or_optimizer_is_refused(what: str, said: str) -> None:
    [got] = worlds.run(1, wrongly_given, what=what)
    assert got.startswith("UsageError") and said in got
