"""What a trial finds that an optimizer mixes."""

from __future__ import annotations

import functools
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from tests.parallel import mixers
from tutti.optim import LAMB, Muon, mixing
from tutti.optim.factory import from_instance
from tutti.optim.mixing import Mixing, mixing_of

ALONE = Mixing()
MIXED = Mixing(rows=False, columns=False, flat=False)
TOGETHER = Mixing(rows=False, columns=False, flat=False, tensors=False)

KINDS: dict[str, tuple[Any, Mixing]] = {
    "sgd": (mixers.of(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1), ALONE),
    "adam": (mixers.of(torch.optim.Adam, amsgrad=True), ALONE),
    "adamw, fused": (mixers.of(torch.optim.AdamW, fused=True), ALONE),
    "adamw, foreach": (mixers.of(torch.optim.AdamW, foreach=True), ALONE),
    "adamw, tensor as rate": (mixers.of(torch.optim.AdamW, lr=torch.tensor(0.01), capturable=True), ALONE),
    "adagrad": (mixers.of(torch.optim.Adagrad), ALONE),
    "adadelta": (mixers.of(torch.optim.Adadelta), ALONE),
    "adamax": (mixers.of(torch.optim.Adamax), ALONE),
    "nadam": (mixers.of(torch.optim.NAdam), ALONE),
    "radam": (mixers.of(torch.optim.RAdam), ALONE),
    "rmsprop": (mixers.of(torch.optim.RMSprop, centered=True, momentum=0.9), ALONE),
    "rprop": (mixers.of(torch.optim.Rprop), ALONE),
    "asgd": (mixers.of(torch.optim.ASGD), ALONE),
    "muon": (mixers.muon, MIXED),
    "adafactor": (mixers.of(torch.optim.Adafactor), MIXED),
    "adafactor of two groups": (mixers.grouped, MIXED),
    "normalized": (mixers.of(mixers.Normalized), MIXED),
    "centralized": (mixers.of(mixers.Centralized), Mixing(columns=False, flat=False)),
    "columns": (mixers.of(mixers.Columns), MIXED),
    "decayed": (mixers.of(mixers.Decayed), Mixing(flat=False)),
    "together": (mixers.of(mixers.Together), TOGETHER),
    "drawing": (mixers.of(mixers.Drawing), Mixing(False, False, False, False, draws=True)),
    "drawing of NumPy and Python": (mixers.of(mixers.NumPyDrawing), Mixing(False, False, False, False, draws=True)),
    "lbfgs": (mixers.of(torch.optim.LBFGS), Mixing(False, False, False, False, closure=True)),
    "ours": (mixers.of(LAMB), Mixing(flat=False)),
    "ours, matrices": (mixers.of(Muon), Mixing(flat=False)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_mixed_is_found(kind: str) -> None:
    make, want = KINDS[kind]
    net = mixers.model()
    before = [p.detach().clone() for p in net.parameters()]
    torch.manual_seed(5)
    optimizer = make(net)
    others = random.getstate(), repr(np.random.get_state())
    drawn, state = torch.get_rng_state(), {p: dict(s) for p, s in optimizer.state.items()}
    assert mixing_of(optimizer) == want
    assert torch.equal(drawn, torch.get_rng_state()) and state == {p: dict(s) for p, s in optimizer.state.items()}
    assert others == (random.getstate(), repr(np.random.get_state()))
    assert all(torch.equal(p, old) and p.grad is None for p, old in zip(net.parameters(), before, strict=True))


@pytest.mark.parametrize("kind", [kind for kind, (_, want) in KINDS.items() if want == ALONE])
def test_a_trial_finds_what_the_list_of_element_wise_classes_says(kind: str) -> None:
    optimizer = KINDS[kind][0](mixers.model())
    listed = type(optimizer)
    optimizer.__class__ = type("Derived", (listed,), {"__module__": listed.__module__})
    assert mixing_of(optimizer) == ALONE and listed in mixing._ELEMENT_WISE


def test_all_listed_classes_are_tried() -> None:
    tried = {type(make(mixers.model())) for make, _ in KINDS.values()}
    assert tried >= mixing._ELEMENT_WISE


def test_a_step_that_a_script_has_put_into_a_listed_class_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = torch.optim.SGD.step

    @functools.wraps(plain)
    def centred(self: torch.optim.SGD, closure: Any = None) -> Any:
        for p in self.param_groups[0]["params"]:
            p.grad -= p.grad.mean()
        return plain(self, closure)

    monkeypatch.setattr(torch.optim.SGD, "step", centred)
    assert mixing_of(torch.optim.SGD(mixers.model().parameters(), lr=0.375)) == MIXED


class Large(mixers.Own):
    """Treats large tensors in another way than small ones."""

    def direction(self, p: torch.Tensor) -> torch.Tensor:
        return p.grad / p.grad.norm() if p.numel() > 1000 else p.grad


class Limited(mixers.Own):
    """Limits the update of a tensor, where it is much larger than the one before."""

    def direction(self, p: torch.Tensor) -> torch.Tensor:
        last = self.state[p].get("norm")
        self.state[p]["norm"] = norm = p.grad.norm()
        return p.grad if last is None or norm < 20 * last else p.grad * (last / norm)


class Counting(mixers.Own):
    """Steps alike on any slices, but keeps a number of each tensor that no slice has."""

    def direction(self, p: torch.Tensor) -> torch.Tensor:
        self.state[p]["largest"] = p.grad.abs().max() if p.numel() else p.new_zeros(())
        return p.grad


def test_large_tensors_large_updates_and_states_are_tried() -> None:
    small, large = [nn.Parameter(torch.ones(4, 5))], [nn.Parameter(torch.ones(300, 200))]
    assert mixing_of(Large(small)) == ALONE and mixing_of(Large(large)) == MIXED
    assert not mixing_of(Limited(small)).rows
    assert not mixing_of(Counting(small)).rows


class Later(mixers.Own):
    """Normalizes each tensor's gradient after some plain steps."""

    def __init__(self, params: Any, warm_up: int = 10) -> None:
        super().__init__(params)
        self.warm_up = warm_up

    def direction(self, p: torch.Tensor) -> torch.Tensor:
        taken = self.state[p]["step"] = self.state[p].get("step", 0) + 1
        return p.grad / p.grad.norm() if taken > self.warm_up else p.grad


@pytest.mark.parametrize("warm_up", [6, 10, 40, 150])
def test_mixing_after_a_warm_up_is_found(warm_up: int) -> None:
    for shape in ((4, 5), (300, 200), (3, 2, 5, 5), (9,)):
        assert mixing_of(Later([nn.Parameter(torch.ones(shape))], warm_up)) == MIXED
    assert mixing_of(Later([nn.Parameter(torch.ones(4, 5))], 10**6)) == ALONE


def test_groups_are_tried_with_their_own_settings_and_together() -> None:
    class Chosen(mixers.Own):
        def __init__(self, params: Any, how: str = "plain") -> None:
            super().__init__(params)
            for group in self.param_groups:
                group.setdefault("how", how)

        def direction(self, p: torch.Tensor) -> torch.Tensor:
            how = {id(m): group["how"] for group in self.param_groups for m in group["params"]}
            return p.grad / p.grad.norm() if how[id(p)] == "normalized" else p.grad

    one, two = nn.Parameter(torch.ones(4, 5)), nn.Parameter(torch.ones(3))
    assert mixing_of(Chosen([{"params": [one]}, {"params": [two]}])) == ALONE
    assert mixing_of(Chosen([{"params": [one]}, {"params": [two], "how": "normalized"}])) == MIXED


def test_settings_that_steps_change_are_found() -> None:
    assert mixing_of(mixers.Estimated([nn.Parameter(torch.ones(4, 5))])).writes == {"distance"}
    assert mixing_of(mixers.of(mixers.Normalized)(mixers.model())).writes == frozenset()


def test_what_cannot_be_tried_needs_all() -> None:
    model = mixers.model()
    optimizer: Any = mixers.OPTIMIZERS["mode"](model)
    optimizer.model = model
    found = mixing_of(optimizer)
    assert (found.rows, found.tensors) == (False, False) and "_mode is 'normalized'" in str(found.untried)


def test_an_attribute_of_the_script_s_optimizer_is_not_taken_for_tutti_s() -> None:
    """A normalised update whose class keeps the norms of its steps for a plot."""
    optimizer = mixers.of(mixers.Normalized)(mixers.model())
    optimizer.norms = []
    assert mixing_of(optimizer) == MIXED


def test_a_trial_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    tried = mixing._tried
    monkeypatch.setattr(mixing, "_found", {})
    monkeypatch.setattr(mixing, "_tried", lambda *given: (asked.append(given), tried(*given))[1])
    net = mixers.model()
    for rate in (0.1, 0.1, 0.2):
        mixing_of(torch.optim.Adafactor(net.parameters(), lr=rate))
    assert len(asked) == 2


def test_a_rebuilt_optimizer_is_tried_once_for_all_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(mixing, "_found", {})
    monkeypatch.setattr(mixing, "_tried", lambda *given: (asked.append(given), Mixing())[1])
    for _ in range(2):
        net = mixers.model()
        rebuilt = from_instance(torch.optim.Adafactor(net.parameters()))(list(net.named_parameters())[:1])
        assert rebuilt is not None
        mixing_of(rebuilt)
    assert len(asked) == 1


def test_a_class_of_the_same_name_is_tried_anew() -> None:
    """As where a notebook's cell is run again after a change."""

    def made(normalized: bool) -> torch.optim.Optimizer:
        class Descent(torch.optim.SGD):
            @torch.no_grad()
            def step(self, closure: Any = None) -> None:  # type: ignore[override]
                for p in self.param_groups[0]["params"]:
                    p.sub_(p.grad / p.grad.norm() if normalized else p.grad)

        return Descent(mixers.model().parameters(), lr=0.1)

    assert mixing_of(made(normalized=False)) == ALONE
    assert mixing_of(made(normalized=True)) == MIXED


def test_options_in_a_dict_are_told_apart() -> None:
    class Descent(torch.optim.Optimizer):
        def __init__(self, rate: float, *members: nn.Parameter, normalized: bool) -> None:
            super().__init__(members, {"lr": rate})
            self.options = {"normalized": normalized}

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for p in self.param_groups[0]["params"]:
                p.sub_(p.grad / p.grad.norm() if self.options["normalized"] else p.grad)

    for normalized, want in ((False, ALONE), (True, MIXED)):
        assert mixing_of(Descent(0.1, *mixers.model().parameters(), normalized=normalized)) == want


def test_a_rank_with_empty_slices_alone_mixes_nothing() -> None:
    empty = [nn.Parameter(torch.zeros(0, 6)), nn.Parameter(torch.zeros(0))]
    assert mixing.mixing_of(torch.optim.SGD(empty, lr=0.1)) == mixing.Mixing()


def test_no_hook_for_all_optimizers_is_called_in_a_trial() -> None:
    class Plain(torch.optim.SGD):
        """A class that no earlier trial has seen."""

    called: list[Any] = []

    def hook(optimizer: Any, args: Any, kwargs: Any) -> None:
        called.append(optimizer)

    handles = [register_optimizer_step_pre_hook(hook), register_optimizer_step_post_hook(hook)]
    try:
        optimizer = Plain(mixers.model().parameters(), lr=0.1)
        assert mixing_of(optimizer) == ALONE and called == []
        optimizer.step()
        assert called == [optimizer, optimizer]
    finally:
        for handle in handles:
            handle.remove()
