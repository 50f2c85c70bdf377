"""Precision fp8: refused where it cannot run; its layers, emulated on CPUs, train alike on any number of ranks."""

from __future__ import annotations

import importlib.util
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import tutti
from tests import worlds
from tests.simulated_accelerator.build import DEVICE
from tutti.cli.config_checks import refuse_config
from tutti.config.train_config import TrainConfig
from tutti.device import reason_against_float8
from tutti.errors import UsageError
from tutti.launcher import context
from tutti.nn.float8 import convert_to_float8
from tutti.train.header import derived, run_identity

pytestmark = pytest.mark.timeout(600)

INSTALLED = importlib.util.find_spec("torchao") is not None
needs_torchao = pytest.mark.skipif(not INSTALLED, reason="needs torchao: pip install torchao")


def made(hidden: int = 32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, hidden), nn.Tanh(), nn.Linear(hidden, 16), nn.Tanh(), nn.Linear(16, 3))


def loss(net: Any, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(net(batch[0]), batch[1])


def train(emulated: bool, precision: str = "fp8", strategy: str = "mirrored", hidden: int = 32) -> Any:
    """Losses and weights of an epoch, or the refusal. ``emulated``: this CPU imitates products of 8-bit floats."""
    draw = torch.Generator().manual_seed(1)
    data = torch.randn(44, 16, generator=draw), torch.randint(0, 3, (44,), generator=draw)
    emulate = partial(convert_to_float8, emulate=True)
    able = patch.multiple("tutti.train.model_conversion", convert_to_float8=emulate, check_float8=lambda *_: None)
    try:
        with able if emulated else nullcontext():
            run = tutti.prepare(
                made(hidden), "sgd:lr=0.1", data, loss, workers=2, batch_size=8, precision=precision, strategy=strategy
            )
        found = [run.step(batch) for batch in run.epoch(0)]
        kinds = [type(module).__name__ for module in run.model.modules()]
        return found, {name: tensor.cpu() for name, tensor in run.state().items()}, kinds
    except UsageError as error:
        return str(error)


@pytest.mark.parametrize(("device", "words"), [("cpu", "CPUs have no"), (DEVICE, "SIMGPU has no")])
def test_a_device_without_such_products_is_refused(device: str, words: str) -> None:
    [said] = worlds.run_on(device, 1, train, emulated=False)
    if device == DEVICE and not INSTALLED:
        words = "needs the package torchao"
    else:
        assert "precision=fp8 cannot run here" in said and "ake precision=bf16" in said
    assert words in said


def test_a_gpu_without_such_products_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for the driver."""
    for capability, words in (((8, 0), "its compute capability is 8.0"), ((8, 9), None), ((9, 0), None)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=capability: found)
        why = reason_against_float8(torch.device("cuda", 0))
        assert why is None if words is None else words in str(why)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"device": "cpu"}, "precision=fp8 cannot run here"),
        ({"device": "cuda", "strategy": "tensor", "devices": "2"}, "cannot be combined with tensor parallelism"),
        ({"device": "cuda"}, "needs the package torchao"),
    ],
)
def test_the_command_refuses_before_a_process_starts(options: dict[str, str], words: str) -> None:
    config = TrainConfig(**{"devices": "1", "precision": "fp8", **options})  # type: ignore[arg-type]
    with patch("importlib.util.find_spec", lambda name: None), pytest.raises(UsageError, match=words):
        refuse_config("digits", config)


def header_line(precision: str) -> str | None:
    """What the run's header says of the layers that stay in bfloat16; torchao is not asked to convert the others."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Unflatten(1, (1, 16)), nn.Conv1d(1, 2, 1), nn.Flatten(), nn.Linear(32, 48), nn.Linear(48, 32)
    )
    model.extend([nn.LayerNorm(32), nn.Linear(32, 3)])
    model[4].register_forward_hook(lambda *_: None)
    data = torch.ones(8, 16), torch.zeros(8, dtype=torch.long)
    same = patch.multiple(
        "tutti.train.model_conversion", convert_to_float8=lambda model, _: model, check_float8=lambda *_: None
    )
    config, world = TrainConfig(precision=precision), context.current()  # type: ignore[arg-type]
    with same:
        run = tutti.prepare(model, "sgd:lr=0.1", data, loss, batch_size=8, precision=precision)
    facts = run_identity("lines", config, run, world, 1, 1)
    task: Any = SimpleNamespace(describe="lines", directions={})
    return derived(task, config, run, world, None, facts).get("in bfloat16")


def test_the_header_names_the_layers_that_stay_in_bf16() -> None:
    [said] = worlds.run(1, header_line, precision="fp8")
    assert said == "1 (a Conv1d); 4 (it has hooks); 6 (32 → 3, not multiples of 16)"
    assert worlds.run(1, header_line, precision="bf16") == [None]


@needs_torchao
@pytest.mark.parametrize(("strategy", "ranks"), [("mirrored", 1), ("mirrored", 2), ("sharded", 2), ("pipeline", 2)])
def test_layers_of_8_bit_floats_train_alike_on_any_number_of_ranks(strategy: str, ranks: int) -> None:
    [(want, exact, _)] = worlds.run_on("cpu", 1, train, emulated=True)
    [(plain, _, _)] = worlds.run_on("cpu", 1, train, emulated=False, precision="bf16")
    for losses, weights, kinds in worlds.run_on("cpu", ranks, train, emulated=True, strategy=strategy):
        assert losses == pytest.approx(want, rel=1e-5)
        assert all(torch.allclose(weights[name], value, atol=1e-5) for name, value in exact.items())
        assert kinds.count("Float8Linear") == 2 or strategy != "mirrored"
    assert want != plain and want == pytest.approx(plain, rel=0.05)


@needs_torchao
def test_a_model_without_a_layer_to_convert_is_refused() -> None:
    [said] = worlds.run_on("cpu", 1, train, emulated=True, hidden=20)
    assert "converts no layer" in said and "0 (20, 16)" in said and "multiples of 16" in said
