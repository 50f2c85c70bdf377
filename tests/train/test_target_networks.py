"""``state_dict`` of a model of which each rank has a part: whole tensors, as in plain PyTorch, or a refusal."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import tutti
from tests import worlds
from tests.contract.table import largest_difference
from tests.covering import in_turn
from tests.train.test_custom_loop import BATCH, DATA, batches

PARTS = {"sharded:stage=2": 2, "sharded:stage=3": 3, "tensor:least=1": 1, "model_parallel": 1}
"""Strategies that give each of two ranks a part of the parameters, and a number of logical workers."""
SAMPLES = TensorDataset(*DATA[12:])
LOADS: dict[str, Callable[[Any, Any], None]] = {}


def load(call: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    LOADS[call.__name__] = call
    return call


@load
def hard(target: Any, model: Any) -> None:
    target.load_state_dict(model.state_dict())


@load
def soft(target: Any, model: Any) -> None:
    """As in PyTorch's tutorial of DQN."""
    mine, other = target.state_dict(), model.state_dict()
    for key in other:
        mine[key] = other[key] * 0.1 + mine[key] * 0.9
    target.load_state_dict(mine)


@load
def by_layers(target: Any, model: Any) -> None:
    target[0].load_state_dict(model[0].state_dict())
    target[2].load_state_dict({name: tensor.detach().cpu() for name, tensor in model[2].state_dict().items()})


@load
def copies(target: Any, model: Any) -> None:
    file = io.BytesIO()
    torch.save(copy.deepcopy(model.state_dict()), file)
    file.seek(0)
    target.load_state_dict(torch.load(file))


@load
def views(target: Any, model: Any) -> None:
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            target.state_dict()[name].view(-1).copy_(tensor.view(-1))


class Agent(nn.Module):
    """A module of the script's own that has the trained network as a child, and a parameter and a buffer of its own."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.temperature = nn.Parameter(torch.ones(()))
        self.register_buffer("seen", torch.zeros(2))


@load
def of_a_parent(target: Any, model: Any) -> None:
    state = Agent(model).state_dict()
    assert type(state["temperature"]) is Tensor and type(state["seen"]) is Tensor
    own = {name: tensor for name, tensor in state.items() if name.startswith("network.")}
    target.load_state_dict({name.removeprefix("network."): tensor for name, tensor in own.items()})


@load
def averaged_data(target: Any, model: Any) -> None:
    for mine, other in zip(target.parameters(), model.parameters(), strict=True):
        mine.data = mine.data * 0.9 + (1 - 0.9) * other.data


@load
def copied_data(target: Any, model: Any) -> None:
    for mine, other in zip(target.parameters(), model.parameters(), strict=True):
        mine.data = other.data.clone()


@load
def into_parameters(target: Any, model: Any) -> None:
    """A model is moved half of the way to its target."""
    halfway = target.state_dict()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(0.5).add_(halfway[name], alpha=0.5)
            parameter.copy_(model.state_dict()[name] * 1)


def made() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 1)).double()


def error_of(model: Any, target: Any, batch: Any) -> Tensor:
    with torch.no_grad():
        wanted = batch[1] + 0.5 * target(batch[0])
    return nn.functional.mse_loss(model(batch[0]), wanted)


def trained(how: str, strategy: str, inside: bool = False) -> Any:
    """Weights of the network and of its target after two epochs; the target follows in every third step."""
    model, target = made(), made().requires_grad_(False)
    both = nn.ModuleDict({"model": model, "target": target})
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    run, step = None, 0
    try:
        if strategy != "plain":
            options: Any = {"strategy": strategy, "workers": PARTS[strategy], "batch_size": BATCH}
            run = tutti.prepare(both if inside else model, optimizer, SAMPLES, **options)
        for epoch in range(2):
            for batch in batches(epoch, SAMPLES) if run is None else run.microbatches(epoch):
                optimizer.zero_grad()
                (Tensor.backward if run is None else run.backward)(error_of(model, target, batch))
                optimizer.step()
                if run is None or run.stepped:
                    step += 1
                    if step % 3 == 0:
                        (LOADS | MISUSE | LOADS_OF_DATA)[how](target, model)
        return {name: tensor.numpy() for name, tensor in copy.deepcopy(both.state_dict()).items()}
    except Exception as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize(("how", "strategy"), in_turn(list(LOADS), [*PARTS][::2] + [*PARTS][1::2], each=2))
def test_a_target_network_follows(how: str, strategy: str, inside: bool = False) -> None:
    want = trained(how, "plain")
    for got in worlds.run(2, trained, how=how, strategy=strategy, inside=inside):
        assert isinstance(got, dict), got
        assert largest_difference(got, want) <= 1e-10


@pytest.mark.parametrize(("strategy", "how"), in_turn(list(PARTS), ["hard", "soft", "by_layers"]))
def test_a_target_network_inside_of_the_prepared_model_follows(strategy: str, how: str) -> None:
    test_a_target_network_follows(how, strategy, inside=True)


# --- misuse -----------------------------------------------------------------------------------------------------------

MISUSE: dict[str, Callable[[Any, Any], None]] = {}


def misuse(call: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    MISUSE[call.__name__] = call
    return call


@misuse
def written(target: Any, model: Any) -> None:
    model.state_dict()["0.weight"].mul_(0.5)


@misuse
def written_through_a_view(target: Any, model: Any) -> None:
    model.state_dict()["0.weight"].view(-1)[0] = 1


@misuse
def written_by_parameters(target: Any, model: Any) -> None:
    state = model.state_dict()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            state[name].add_(parameter, alpha=-0.5)


@misuse
def written_by_lists(target: Any, model: Any) -> None:
    with torch.no_grad():
        torch._foreach_add_([*model.state_dict().values()], [*model.parameters()], alpha=-0.5)


@misuse
def written_meanwhile(target: Any, model: Any) -> None:
    """In plain PyTorch the state dict has the written values."""
    state = model.state_dict()
    for parameter in model.parameters():
        parameter.data.mul_(0.5)
    target.load_state_dict({name: tensor * 1 for name, tensor in state.items()})


@misuse
def kept_over_an_update(target: Any, model: Any) -> None:
    """In plain PyTorch the best weights so far are then those of the last update."""
    for tensor in vars(target).setdefault("best", {}).values():
        tensor.clone()
    vars(target)["best"] = model.state_dict()


@misuse
def on_one_rank(target: Any, model: Any) -> None:
    if tutti.rank() == 0:
        target.load_state_dict(model.state_dict())


@misuse
def variables(target: Any, model: Any) -> None:
    target.load_state_dict(model.state_dict(keep_vars=True))


def shared_data(target: Any, model: Any) -> None:
    """In plain PyTorch the target then follows every update."""
    for mine, other in zip(target.parameters(), model.parameters(), strict=True):
        mine.data = other.data


def swapped_data(target: Any, model: Any) -> None:
    """An average of the weights takes the parameters' place for a forward, as for an evaluation, and they come back."""
    kept = {name: parameter.data for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.5
    with torch.no_grad():
        target[4].bias.fill_(model(DATA[:5][0]).mean().item())
    for name, parameter in model.named_parameters():
        parameter.data = kept[name]


LOADS_OF_DATA = {"shared_data": shared_data, "swapped_data": swapped_data}


@pytest.mark.parametrize("strategy", PARTS)
@pytest.mark.parametrize("how", LOADS_OF_DATA)
def test_assigned_data_of_which_a_rank_has_a_part(how: str, strategy: str) -> None:
    refused = how == "shared_data" or strategy.startswith("sharded")
    why = "to the .data of another tensor" if how == "shared_data" else "has assigned the .data of 0.weight"
    want = trained(how, "plain")
    for got in worlds.run(2, trained, how=how, strategy=strategy):
        if refused:
            assert isinstance(got, str) and why in got and "test_target_networks.py:" in got, got
        else:
            assert isinstance(got, dict), got
            assert largest_difference(got, want) <= 1e-10


@pytest.mark.parametrize(("how", "strategy"), in_turn(list(MISUSE), list(PARTS)))
def test_misuse_is_refused(how: str, strategy: str) -> None:
    said = worlds.run_within(5.0, 2, trained, how=how, strategy=strategy)
    assert all(isinstance(text, str) for text in said), said
    own = [text for text in said if "UsageError" in text or "MismatchError" in text]
    assert own and ("state" in own[0] or how == "on_one_rank"), said
    if how == "on_one_rank" or len(own) < len(said):
        # A message of one rank is still under way, or a rank waits for one that was refused.
        worlds.forget(2)


def with_statistics(strategy: str, workers: int) -> Any:
    """The state dict of a model with batch norm after an epoch, and whether it is ``run.state()``."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = tutti.prepare(model, optimizer, DATA[:24], strategy=strategy, workers=workers, batch_size=8)
    for batch in run.microbatches(0):
        optimizer.zero_grad()
        run.backward(nn.functional.mse_loss(model(batch[0]), batch[1]))
        optimizer.step()
    try:
        return {name: tensor.numpy() for name, tensor in copy.deepcopy(model.state_dict()).items()}
    except Exception as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("strategy", ["tensor:least=1", "model_parallel"])
def test_statistics_of_one_worker_are_whole(strategy: str) -> None:
    want = worlds.alone(with_statistics, strategy="single", workers=1)
    for got in worlds.run(2, with_statistics, strategy=strategy, workers=1):
        assert largest_difference(got, want) <= 1e-10


@pytest.mark.parametrize("workers", [2, 4])
def test_statistics_are_those_of_the_worker_in_the_model(workers: int) -> None:
    want = worlds.run(2, with_statistics, strategy="mirrored", workers=workers)
    for got, plain in zip(
        worlds.run(2, with_statistics, strategy="sharded:stage=3", workers=workers), want, strict=True
    ):
        assert largest_difference(got, plain) <= 1e-10
