"""The configuration of a run: durations that exclude each other, and values that mean nothing."""

from __future__ import annotations

import dataclasses
from itertools import combinations
from typing import Any

import pytest

from tutti.config.engine_config import LocalEngineConfig, RayEngineConfig
from tutti.config.spec import Duration
from tutti.config.train_config import TrainConfig
from tutti.errors import UsageError

LENGTHS = {
    "epochs": (2.5, Duration(2.5, "ep")),
    "steps": (7, Duration(7, "st")),
    "samples": (900, Duration(900, "sa")),
    "duration": ("3st", Duration(3, "st")),
}


def test_three_epochs_unless_said_otherwise() -> None:
    assert TrainConfig().length == Duration(3, "ep")
    for name, (value, length) in LENGTHS.items():
        assert TrainConfig(**{name: value}).length == length


@pytest.mark.parametrize("names", [pair for n in (2, 3, 4) for pair in combinations(LENGTHS, n)])
def test_lengths_exclude_each_other(names: tuple[str, ...]) -> None:
    with pytest.raises(UsageError) as caught:
        TrainConfig(**{name: LENGTHS[name][0] for name in names})
    assert all(f"--{name}" in str(caught.value) for name in names)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("workers", [0, -1]),
        ("batch_size", [0, -64, True]),
        ("micro_batch", [0]),
        ("steps", [0, -1]),
        ("samples", [0]),
        ("threads", [0]),
        ("max_nonfinite", [0]),
        ("log_every", [0]),
        ("epochs", [0.0, -1.0, float("nan"), float("inf")]),
        ("clip", [0.0, -1.0, float("nan"), float("inf")]),
        ("timeout", [0.0, -5.0, float("nan"), float("inf")]),
        ("max_restarts", [-1]),
        ("data_workers", [-1]),
        ("profile", ["", "3", "0:3", "3:0", "-1:3", "3:", "a:b", "1:2:3"]),
        ("start_timeout", [0.5, -1.0, float("nan"), float("inf")]),
        ("step_timeout", [0.5, -1.0, float("nan"), float("inf")]),
        ("save_timeout", [0.5, -1.0, float("nan"), float("inf")]),
        ("devices", ["0", "-1", "two", "1.5", "", "0:2", "3:2", ":2", "2:", "1:2:3"]),
        ("seed", [-1]),
        ("duration", ["3", "3 epochs", "", "0ep", "0st"]),
        ("eval_every", ["0st", "0ep", "1", "never"]),
        ("checkpoint_every", ["0st", "0ep", "1", "never"]),
    ],
)
def test_values_that_mean_nothing_are_refused_by_their_flag(name: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(UsageError) as caught:
            TrainConfig(**{name: value})
        assert f"--{name.replace('_', '-')}" in str(caught.value), value


def test_the_edges_are_let_through() -> None:
    TrainConfig(start_timeout=0, step_timeout=0, save_timeout=1)
    TrainConfig(workers=1, batch_size=1, micro_batch=1, steps=1, threads=1, devices="1", seed=0, clip=1e-9)
    assert TrainConfig(eval_every="none").eval_interval is None
    assert TrainConfig().eval_interval == Duration(1, "ep")
    assert TrainConfig(checkpoint_every="none").checkpoint_interval is None
    assert TrainConfig(eval_every="0.5ep").eval_interval == Duration(0.5, "ep")
    assert TrainConfig(profile="1:1").windows == {"profile": (1, 1)} and TrainConfig().windows == {}


def test_a_range_of_devices_needs_workers_and_has_an_engine() -> None:
    config = TrainConfig(devices="2:8", workers=8)
    assert config.device_range == (2, 8) and isinstance(config.engine(), LocalEngineConfig)
    assert isinstance(TrainConfig(devices="2:8", workers=8, on="ray").engine(), RayEngineConfig)
    assert TrainConfig(devices="4").engine() is None
    with pytest.raises(UsageError, match=r"--devices 2:8 needs --workers.*Add --workers, such as --workers 8"):
        TrainConfig(devices="2:8")


@pytest.mark.parametrize("options", ["cpus=0", "cpus=-1", "gpus=1.5"])
def test_amounts_that_ray_cannot_reserve_are_refused(options: str) -> None:
    with pytest.raises(UsageError, match="--on ray"):
        TrainConfig(devices="2", on=f"ray:{options}").engine()
    assert TrainConfig(devices="2", on="ray:gpus=0.5,cpus=1.5").engine() == RayEngineConfig(gpus=0.5, cpus=1.5)


def test_an_address_of_ray_without_a_port_is_refused() -> None:
    for address in ("10.0.0.1", "10.0.0.1:99999", ":6379", "head:port", "ray://head", "ray//head:10001"):
        with pytest.raises(UsageError, match=rf"address={address}. Write ray:address=HOST:6379"):
            TrainConfig(devices="2", on=f"ray:address={address}").engine()
    for address in ("local", "auto", "10.0.0.1:6379", "[::1]:6379", "ray://head:10001/space", "http://head:8265"):
        assert TrainConfig(devices="2", on=f"ray:address={address}").engine() == RayEngineConfig(address=address)


def test_the_learning_rate_rule_is_parsed_once_and_says_whether_it_adapts() -> None:
    rules = {text: TrainConfig(lr_scale=text) for text in ("none", "linear:base_batch=64", "adascale")}
    assert [config.lr_rule.adaptive for config in rules.values()] == [False, False, True]
    assert all(config.lr_rule is config.lr_rule for config in rules.values())
    assert rules["linear:base_batch=64"] == TrainConfig(lr_scale="linear:base_batch=64")


def test_options_are_parsed_once() -> None:
    config = TrainConfig(
        schedule="step:milestones=30ep+400st", ema="0.9", batch_growth="milestones=1ep,factor=2", slow="rank=0,factor=2"
    )
    for name in ("optimizer_choice", "lr_schedule", "batch_norm_options", "averaging", "growth", "slowness", "length"):
        assert getattr(config, name) is getattr(config, name) is not None, name
    assert config.optimizer_choice.text == config.optimizer
    assert config.lr_schedule.drops == (Duration(30, "ep"), Duration(400, "st"))
    assert dataclasses.replace(config, ema=None).averaging is None
