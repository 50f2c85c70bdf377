"""Optimizers from options equal PyTorch's and are fused; the user's own keeps its groups, whole or in part."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tutti.config.optimizer_config import check_optimizer
from tutti.errors import UsageError
from tutti.optim import LAMB, LARC, LARS, Muon, NovoGrad
from tutti.optim.factory import from_config, from_instance

OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd:lr=0.1": (torch.optim.SGD, {"lr": 0.1}),
    "sgd:lr=0.1,momentum=0.9,nesterov=true,weight_decay=0.01": (
        torch.optim.SGD,
        {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    ),
    "sgd:lr=0.1,momentum=0.9,dampening=0.5": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}),
    "adam:lr=0.02,beta1=0.8,beta2=0.95,eps=0.001,weight_decay=0.1": (
        torch.optim.Adam,
        {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.1},
    ),
    "adamw": (torch.optim.AdamW, {"lr": 1e-3, "weight_decay": 0.01}),
}


def model() -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    net[0].bias.requires_grad_(False)
    return net


def three_steps(net: nn.Module, optimizer: Any) -> None:
    inputs = torch.randn(5, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for _ in range(3):
        optimizer.zero_grad()
        net(inputs).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("text", OPTIMIZERS)
def test_from_options_is_pytorchs_and_fused(text: str) -> None:
    kind, options = OPTIMIZERS[text]
    mine, other = model(), model()
    made = from_config(check_optimizer(text))(list(mine.named_parameters()))
    assert type(made) is kind
    [group] = made.param_groups
    assert group["fused"] is True
    assert [id(p) for p in group["params"]] == [id(p) for p in mine.parameters() if p.requires_grad]
    three_steps(mine, made)
    three_steps(other, kind([p for p in other.parameters() if p.requires_grad], fused=False, **options))
    for got, want in zip(mine.parameters(), other.parameters(), strict=True):
        assert torch.allclose(got, want, rtol=1e-12, atol=1e-14)


OURS: dict[str, tuple[Any, dict[str, Any]]] = {
    "lars:lr=2,weight_decay=0.1,cap=true,lr_in_momentum=false": (
        LARS,
        {"lr": 2.0, "weight_decay": 0.1, "cap": True, "lr_in_momentum": False},
    ),
    "larc:adapt_1d=true": (LARC, {"adapt_1d": True}),
    "lamb:beta1=0.8,beta2=0.9,phi_max=3,fused=false": (LAMB, {"betas": (0.8, 0.9), "phi_max": 3.0, "fused": False}),
    "novograd:decay=step": (NovoGrad, {"decay": "step"}),
    "muon:adam_lr=0.5,adam_beta1=0.7,adam=none": (Muon, {"adam_lr": 0.5, "adam_betas": (0.7, 0.95), "adam_names": ()}),
}


@pytest.mark.parametrize("text", OURS)
def test_from_options_is_ours(text: str) -> None:
    """And a specification without options is the class without arguments."""
    kind, options = OURS[text]
    for given, arguments in ((text, options), (text.partition(":")[0], {})):
        net = model()
        made = from_config(check_optimizer(given))(list(net.named_parameters()))
        assert type(made) is kind
        want = kind([(name, p) for name, p in net.named_parameters() if p.requires_grad], **arguments)
        for got, other in zip(made.param_groups, want.param_groups, strict=True):
            names = {"param_names", "params"}
            assert {k: v for k, v in got.items() if k not in names} == {
                k: v for k, v in other.items() if k not in names
            }
            assert [id(p) for p in got["params"]] == [id(p) for p in other["params"]]


def test_names_in_options_exclude() -> None:
    net = model()
    made = from_config(check_optimizer("lamb:exclude=2.*"))(list(net.named_parameters()))
    assert [(g["adapt"], g["weight_decay"], len(g["params"])) for g in made.param_groups] == [
        (True, 0.01, 1),
        (False, 0.0, 2),
    ]


@pytest.mark.parametrize("kind", [LARS, LARC, LAMB, NovoGrad, Muon])
def test_ours_can_be_split_and_keep_what_the_user_sets(kind: Any) -> None:
    """Also where parameters came with names, which no part of them could keep."""
    net = model()
    whole = kind([(name, p) for name, p in net.named_parameters() if p.requires_grad], lr=0.125, weight_decay=0.25)
    part = from_instance(whole)(list(net.named_parameters())[2:])
    for group in whole.param_groups:
        group["lr"] *= 2
    three_steps(net, part)
    rates = {id(p): group["lr"] for group in whole.param_groups for p in group["params"]}
    assert [(id(p), g["lr"]) for g in part.param_groups for p in g["params"]] == [
        (id(p), rates[id(p)]) for g in part.param_groups for p in g["params"]
    ]
    assert {id(p) for g in part.param_groups for p in g["params"]} == {id(net[2].weight), id(net[2].bias)}
    assert part.state and not whole.state


def test_nothing_to_train_makes_no_optimizer() -> None:
    net = model().requires_grad_(False)
    assert from_config(check_optimizer("sgd"))(list(net.named_parameters())) is None
    assert from_config(check_optimizer("adam"))([]) is None


def groups(net: nn.Sequential) -> torch.optim.Optimizer:
    return torch.optim.SGD(
        [
            {"params": [net[0].weight, net[2].bias], "lr": 0.5, "momentum": 0.8, "label": "first"},
            {"params": [net[2].weight]},
        ],
        lr=0.01,
        weight_decay=0.1,
    )


def test_the_users_own_is_given_back_where_it_fits_and_once() -> None:
    net = model()
    optimizer = groups(net)
    make = from_instance(optimizer)
    assert make(list(net.named_parameters())) is optimizer
    second = make(list(net.named_parameters()))
    assert second is not optimizer and type(second) is torch.optim.SGD
    for got, want in zip(second.param_groups, optimizer.param_groups, strict=True):
        assert got == want


def test_a_part_keeps_its_groups_and_settings() -> None:
    net = model()
    make = from_instance(groups(net))
    first, last = list(net.named_parameters())[:2], list(net.named_parameters())[2:]
    [group] = make(first).param_groups
    assert group["params"] == [net[0].weight]
    assert (group["lr"], group["momentum"], group["label"], group["weight_decay"]) == (0.5, 0.8, "first", 0.1)
    one, two = make(last).param_groups
    assert one["params"][0] is net[2].bias and two["params"][0] is net[2].weight
    assert (one["lr"], two["lr"], two["momentum"], two["weight_decay"]) == (0.5, 0.01, 0, 0.1)
    assert make([("0.bias", net[0].bias)]) is None
    assert make([]) is None


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad])
def test_optimizers_of_other_kinds_can_be_split(kind: Any) -> None:
    net = model()
    whole = kind([p for p in net.parameters() if p.requires_grad], lr=0.125, weight_decay=0.25)
    [group] = from_instance(whole)(list(net.named_parameters())[2:]).param_groups
    assert {k: v for k, v in group.items() if k != "params"} == {
        k: v for k, v in whole.param_groups[0].items() if k != "params"
    }


def test_one_that_has_stepped_is_kept_but_not_split() -> None:
    net = model()
    optimizer = torch.optim.Adam([p for p in net.parameters() if p.requires_grad])
    three_steps(net, optimizer)
    assert from_instance(optimizer)(list(net.named_parameters())) is optimizer
    with pytest.raises(UsageError, match="already stepped"):
        from_instance(optimizer)(list(net.named_parameters())[2:])


class Needing(torch.optim.SGD):
    """Wants more than its groups say; ``kept`` says under which name it keeps that."""

    def __init__(self, params: Any, power: float, kept: str = "power", lr: float = 0.1) -> None:
        setattr(self, kept, power)
        super().__init__(params, lr)


def test_a_copy_is_the_same_algorithm_or_refused() -> None:
    """Options that are attributes are handed on; where a copy would have others, or none can be made, that is said."""
    net = model()
    trained = [p for p in net.parameters() if p.requires_grad]
    whole = Needing(trained, 0.5)
    part = from_instance(whole)(list(net.named_parameters())[2:])
    assert isinstance(part, Needing) and part.power == 0.5  # type: ignore[attr-defined]
    part = from_instance(Needing(trained, 0.5, kept="_exponent"))(list(net.named_parameters())[2:])
    assert part._exponent == 0.5  # type: ignore[union-attr]

    class Moded(torch.optim.SGD):
        def __init__(self, params: Any, how: str = "plain") -> None:
            self._mode = how
            super().__init__(params, 0.1)

    part = from_instance(Moded(trained, "other"))(list(net.named_parameters())[2:])
    assert part._mode == "other"  # type: ignore[union-attr]
    odd = Moded(trained, "other")
    odd.model = net  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match=r"(?s)_mode is 'other', and 'plain' in a new one.*attribute model is a Sequ"):
        from_instance(odd)(list(net.named_parameters())[2:])
