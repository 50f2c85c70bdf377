"""Learning-rate rules on optimizers' options."""

from __future__ import annotations

import pytest

from tutti.config.lr_rule import check_rule
from tutti.config.optimizer_config import check_optimizer
from tutti.errors import UsageError
from tutti.optim.scaling import scaled


def test_rules_multiply_the_rate_and_nothing_else() -> None:
    optimizer = check_optimizer("sgd:lr=0.1,momentum=0.9")
    rates = [scaled(optimizer, check_rule(f"{name}:base_batch=256"), 8192).lr for name in ("linear", "sqrt")]
    assert rates == pytest.approx([3.2, 0.565685425])
    assert scaled(optimizer, check_rule("none"), 8192) == optimizer
    assert scaled(optimizer, check_rule("linear:base_batch=512"), 8192).momentum == 0.9


def test_both_rates_of_muon_are_scaled() -> None:
    found = scaled(check_optimizer("muon:lr=0.02,adam_lr=0.001"), check_rule("linear:base_batch=64"), 256)
    assert (found.lr, found.adam_lr) == pytest.approx((0.08, 0.004))


def test_adam_follows_with_its_moments() -> None:
    found = scaled(check_optimizer("adamw:lr=0.001"), check_rule("adam_sqrt:base_batch=512"), 2048)
    assert (found.lr, found.beta1, found.beta2, found.eps) == pytest.approx((0.002, 0.6, 0.996, 5e-9))


@pytest.mark.parametrize(
    ("rule", "optimizer", "said"),
    [
        ("linear", "sgd", "base_batch=N"),
        ("linear:base=3", "sgd", "Did you mean 'base_batch'?"),
        ("liner:base_batch=3", "sgd", "Did you mean 'linear'?"),
        ("adam_sqrt:base_batch=512", "sgd", "is a rule of Adam"),
        ("adam_sqrt:base_batch=16", "adam", "cannot go from a batch of 16 to one of 4096"),
    ],
)
def test_what_does_not_fit_is_refused(rule: str, optimizer: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        scaled(check_optimizer(optimizer), check_rule(rule), 4096)
    assert said in str(caught.value) + str(caught.value.remedy)
