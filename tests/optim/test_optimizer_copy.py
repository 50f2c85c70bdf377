"""Optimizers copied for other parameters: what is copied, and what no copy could have."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.parallel.mixers import Ahead, Lookahead, Normalized, Proxy, Sharpness
from tutti.errors import UsageError
from tutti.optim.factory import from_instance
from tutti.optim.mixing import mixing_of
from tutti.optim.optimizer_copy import NestedState, inner_optimizers


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


class Listed(torch.optim.Optimizer):
    """Keeps its parameters in a list of its own."""

    def __init__(self, rate: float, *members: Any) -> None:
        self.members, self.rate = list(members), rate
        super().__init__(members, {"lr": rate})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.members:
            p.sub_(p.grad.sign(), alpha=self.rate)


def three_steps(net: nn.Module, optimizer: Any) -> None:
    inputs = torch.randn(5, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for _ in range(3):
        net.zero_grad()
        net(inputs).square().mean().backward()
        optimizer.step()


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    [weight, *rest] = net.parameters()
    return torch.optim.SGD([{"params": [weight], "lr": 0.2}, {"params": rest}], lr=0.1, momentum=0.9)


KINDS: dict[str, Any] = {
    "lookahead": lambda net: Lookahead(sgd(net)),
    "proxy": lambda net: Proxy(sgd(net)),
    "ahead": lambda net: Ahead(torch.optim.Adam(net.parameters(), lr=0.1)),
    "sharpness": lambda net: Sharpness(net.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9),
    "listed": lambda net: Listed(0.1, *net.parameters()),
    "twice": lambda net: Ahead(Lookahead(sgd(net), k=2)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_two_parts_step_as_the_whole(kind: str) -> None:
    """With the rates of the original, also those that are set later."""
    one, two = model(), model()
    whole, split = KINDS[kind](one), KINDS[kind](two)
    make, named = from_instance(split), list(two.named_parameters())
    parts = [make(named[:3]), make(named[3:])]
    assert split not in parts and all(type(part) is type(split) for part in parts)
    for factor in (1.0, 0.5):
        for optimizer in (whole, split):
            for group in optimizer.param_groups:
                group["lr"] *= factor
        three_steps(one, whole)
        inputs = torch.randn(5, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        for _ in range(3):
            two.zero_grad()
            two(inputs).square().mean().backward()
            for part in parts:
                part.step()
    for got, want in zip(two.parameters(), one.parameters(), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    assert not NestedState(split).of(named[0][1]).get("optimizer.momentum_buffer")


@pytest.mark.parametrize("kind", KINDS)
def test_wrappers_of_elementwise_optimizers_are_elementwise(kind: str) -> None:
    found = mixing_of(KINDS[kind](model()))
    assert found.untried is None and found.rows and found.columns and found.flat and found.tensors


def test_a_wrapper_mixes_as_what_it_wraps() -> None:
    found = mixing_of(Lookahead(Normalized(model().parameters())))
    assert found.untried is None and found.tensors and not found.rows


def test_the_state_of_what_is_inside_is_named_by_its_path() -> None:
    net = model()
    optimizer = KINDS["twice"](net)
    three_steps(net, optimizer)
    assert list(inner_optimizers(optimizer)) == ["optimizer", "optimizer.optimizer"]
    weight, state = net[0].weight, NestedState(optimizer)
    found = state.of(weight)
    names = ["count", "optimizer.count", "optimizer.optimizer.momentum_buffer", "optimizer.slow", "slow"]
    assert sorted(found) == names
    state.drop(weight)
    assert not state.of(weight)
    state.put(weight, found)
    assert state.of(weight).keys() == found.keys()
    inner = optimizer.optimizer.optimizer
    assert inner.state[weight]["momentum_buffer"] is found["optimizer.optimizer.momentum_buffer"]


def set_tensors(optimizer: Any, net: nn.Module) -> None:
    optimizer.slow_weights = [p.detach().clone() for p in net.parameters()]


def set_entries(optimizer: Any, net: nn.Module) -> None:
    optimizer.rates = [0.1, 0.1, 0.1, 0.2]


def set_closure(optimizer: Any, net: nn.Module) -> None:
    optimizer.gradients = lambda: [p.grad for p in net.parameters()]


def set_default(optimizer: Any, net: nn.Module) -> None:
    every = tuple(net.parameters())

    def gradients(*, members: tuple[nn.Parameter, ...] = every) -> Any:
        return [p.grad for p in members]

    optimizer.gradients = gradients


def set_method(optimizer: Any, net: nn.Module) -> None:
    optimizer.scale = net[0].weight.detach().mul_  # type: ignore[index]


def set_groups(optimizer: Any, net: nn.Module) -> None:
    optimizer.optimizer = torch.optim.SGD(net.parameters(), lr=0.1)


def set_hook(optimizer: Any, net: nn.Module) -> None:
    optimizer.optimizer.register_step_pre_hook(lambda *_: None)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (set_tensors, "its attribute slow_weights has tensors, which are not in its state"),
        (set_entries, "its attribute rates may have an entry for each parameter"),
        (set_closure, "its attribute gradients is a function, which may refer to its parameters"),
        (set_default, "its attribute gradients is a function, which may refer to its parameters"),
        (set_method, "its attribute scale is a builtin_function_or_method, which may refer to its parameters"),
        (set_groups, "the optimizer in its attribute optimizer has parameter groups of its own"),
        (set_hook, "the optimizer in its attribute optimizer has hooks"),
    ],
)
def test_what_a_copy_would_share_with_the_original_is_refused(change: Any, words: str) -> None:
    net = model()
    optimizer = Lookahead(sgd(net))
    change(optimizer, net)
    with pytest.raises(UsageError, match="Lookahead cannot be constructed again for other parameters") as caught:
        from_instance(optimizer)(list(net.named_parameters())[2:])
    assert words in str(caught.value)


def test_functions_of_plain_values_are_kept() -> None:
    def halved(times: int, *, by: float = 0.5) -> float:
        return by * halved(times - 1) if times else 1.0

    net = model()
    optimizer: Any = Lookahead(sgd(net))
    optimizer.rate, optimizer.norm = halved, torch.linalg.vector_norm
    built: Any = from_instance(optimizer)(list(net.named_parameters())[2:])
    assert built.rate is halved and built.norm is torch.linalg.vector_norm


def test_a_loaded_state_replaces_that_of_the_outer_optimizer() -> None:
    """As of a checkpoint from before the first slow weights."""
    net = model()
    optimizer: Any = Lookahead(sgd(net))
    three_steps(net, optimizer)
    weight, state = net[0].weight, NestedState(optimizer)
    inner = {key: value for key, value in state.of(weight).items() if key.startswith("optimizer.")}
    assert inner.keys() != state.of(weight).keys()
    state.put(weight, inner)
    assert state.of(weight).keys() == inner.keys()


def test_a_state_that_both_share_occurs_once() -> None:
    net = model()
    optimizer: Any = Lookahead(sgd(net))
    optimizer.optimizer.state = optimizer.state
    three_steps(net, optimizer)
    assert sorted(NestedState(optimizer).of(net[0].weight)) == ["count", "momentum_buffer", "slow"]
