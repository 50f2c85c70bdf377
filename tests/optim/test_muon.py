"""Muon is PyTorch's own on matrices, AdamW on the rest; who is what follows from shape and name."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from tests.optim.problems import feed, gradients
from tutti.errors import UsageError
from tutti.optim import Muon

SHAPES = ((5, 3), (4,), (6, 3, 2, 2), (3, 8))
MUON = {"lr": 0.03, "weight_decay": 0.1, "momentum": 0.9}
ADAM = {"lr": 0.01, "betas": (0.8, 0.9), "weight_decay": 0.2, "eps": 1e-6}


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64)) for shape in SHAPES]


def composed(params: list[nn.Parameter], **changes: Any) -> Muon:
    adam = {f"adam_{key}": value for key, value in ADAM.items()}
    names = ("first", "bias", "kernel", "head.weight")
    return Muon(zip(names, params, strict=True), **MUON, **adam, **changes)


def test_equals_pytorchs_two_optimizers() -> None:
    ours, theirs = parameters(), parameters()
    matrices = [theirs[0], nn.Parameter(theirs[2].detach().flatten(1))]
    pair = torch.optim.Muon(matrices, **MUON), torch.optim.AdamW([theirs[1], theirs[3]], **ADAM)
    optimizer = composed(ours)
    for grads in gradients(ours, 4):
        feed(optimizer, ours, [grads])
        matrices[0].grad, matrices[1].grad = grads[0], grads[2].flatten(1)
        theirs[1].grad, theirs[3].grad = grads[1], grads[3]
        for other in pair:
            other.step()
    want = [matrices[0], theirs[1], matrices[1].view(SHAPES[2]), theirs[3]]
    for got, other in zip(ours, want, strict=True):
        assert torch.allclose(got, other, rtol=1e-12, atol=1e-14)
        assert got.grad is not None


def test_who_is_what() -> None:
    params = parameters()
    by_name = composed(params).param_groups
    assert [(g["adam"], g["lr"], [p.shape for p in g["params"]]) for g in by_name] == [
        (False, 0.03, [SHAPES[0], SHAPES[2]]),
        (True, 0.01, [SHAPES[1], SHAPES[3]]),
    ]
    by_shape = Muon(params).param_groups
    assert [[p.ndim for p in g["params"]] for g in by_shape] == [[2, 4, 2], [1]]
    none = composed(params, adam_names=()).param_groups
    assert [len(g["params"]) for g in none] == [3, 1]
    own = Muon([{"params": params[:1], "adam": True, "lr": 0.5}, {"params": params[1:], "momentum": 0.5}])
    assert [(g["adam"], g["lr"]) for g in own.param_groups] == [(True, 0.5), (False, 0.02), (True, 1e-3)]
    own = Muon([{"params": params[:1]}])
    own.add_param_group({"params": params[1], "adam": True})
    for wrong in ({"params": params[2]}, {"params": nn.Parameter(torch.zeros(3)), "adam": False}):
        with pytest.raises(UsageError):
            own.add_param_group(wrong)
    assert len(own.param_groups) == 2


@pytest.mark.parametrize("channels_last", [False, True])
def test_a_saved_state_continues_to_the_same_bits(channels_last: bool) -> None:
    def made() -> list[nn.Parameter]:
        params = parameters()
        if channels_last:
            params[2].data = params[2].data.to(memory_format=torch.channels_last)
        return params

    whole, first = made(), made()
    steps = list(gradients(whole, 4))
    feed(composed(whole), whole, steps)
    half = composed(first)
    feed(half, first, steps[:2])
    second = [nn.Parameter(p.detach().clone()) for p in first]
    resumed = composed(second)
    resumed.load_state_dict(copy.deepcopy(half.state_dict()))
    feed(resumed, second, steps[2:])
    for got, want in zip(second, whole, strict=True):
        assert torch.equal(got, want)
    plain = parameters()
    feed(composed(plain), plain, steps)
    for got, want in zip(whole, plain, strict=True):
        assert torch.equal(got, want), "a kernel's layout in memory does not matter"


def test_tensors_without_gradient_stay() -> None:
    params = parameters()
    optimizer = composed(params)
    before = [p.detach().clone() for p in params]
    optimizer.step()
    params[1].grad = torch.ones_like(params[1])
    optimizer.step()
    assert [torch.equal(p, b) for p, b in zip(params, before, strict=True)] == [True, False, True, True]
    assert set(optimizer.state) == {params[1]}
