"""Modes of ``--compile`` that record CUDA graphs: no step reads results of another, and addresses stay."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tutti
from tests import worlds
from tests.train import emulated_graphs
from tests.train.test_run import data
from tutti.errors import UsageError

GRAPHS = f"reduce-overhead:backend={emulated_graphs.NAME}"


class Net(nn.Module):
    """Compiled around a layer that draws, with statistics if asked for, and more than one result."""

    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.first, self.norm, self.draws = nn.Linear(3, 5), nn.BatchNorm1d(5) if norm else nn.Tanh(), nn.Dropout(0.2)
        self.middle, self.last = nn.Sequential(nn.Linear(5, 4), nn.Tanh()), nn.Linear(4, 1)

    def forward(self, inputs: Tensor) -> dict[str, Any]:
        found = self.middle(self.draws(self.norm(self.first(inputs))))
        return {"value": self.last(found), "inner": (found, None)}


def made(norm: bool = False) -> Net:
    torch.manual_seed(0)
    return Net(norm).double()


class Loss:
    """A loss function that keeps what forwards return, as a script may."""

    def __init__(self) -> None:
        self.kept: list[Tensor] = []

    def __call__(self, net: Any, batch: Tensor) -> Tensor:
        found = net(batch)
        self.kept += [found["value"].detach(), found["inner"][0].detach()]
        value: Tensor = (found["value"] - batch.sum(dim=1, keepdim=True)).square().mean()
        return value


def trained(compile: str, norm: bool = False, **options: Any) -> dict[str, Any]:
    emulated_graphs.register()
    pool, loss = emulated_graphs.POOL, Loss()
    pool.addresses.clear()
    before = pool.overwritten
    optimizer = "sgd:lr=0.1,momentum=0.9" if "lr_scale" in options else "adam:lr=0.01"
    run = tutti.prepare(made(norm), optimizer, data(22), loss, batch_size=6, compile=compile, **options)
    losses = []
    for epoch in range(2):
        losses += [run.step(batch) for batch in run.epoch(epoch)]
        losses.append(run.evaluate(data(7), batch=3, averaged=False).loss)
        if options.get("ema"):
            losses.append(run.evaluate(data(7), batch=3).loss)
    predicted = run.predict(data(7), lambda net, batch: net(batch)["value"], batch=3)
    return {
        "losses": torch.tensor([*losses, *predicted.flatten().tolist()], dtype=torch.float64),
        "kept": torch.cat([each.flatten() for each in loss.kept]),
        "weights": torch.cat([p.detach().flatten() for p in run.model.state_dict().values()]),
        "overwritten": pool.overwritten - before,
        "addresses": [len(found) for found in pool.addresses.values()],
    }


CASES: list[tuple[int, dict[str, Any]]] = [
    (1, {"workers": 3, "micro_batch": 1}),
    (1, {"norm": True, "ema": 0.9, "micro_batch": 2}),
    (2, {"workers": 4, "lr_scale": "adascale"}),
    (2, {"norm": True, "workers": 2, "clip": 0.1, "noise_every": 2, "activation_checkpointing": ["middle"]}),
]


@pytest.mark.parametrize(("ranks", "options"), CASES, ids=[f"{ranks} {options}" for ranks, options in CASES])
def test_a_step_reads_no_memory_of_a_graph_that_another_step_has_overwritten(
    ranks: int, options: dict[str, Any]
) -> None:
    want = worlds.run_on("cpu", ranks, trained, compile="none", **options)
    for each, plain in zip(worlds.run_on("cpu", ranks, trained, compile=GRAPHS, **options), want, strict=True):
        assert each["overwritten"] > 20 and each["addresses"]
        assert all(count == 1 for count in each["addresses"]), "a graph would be recorded again"
        for name in ("losses", "kept", "weights"):
            assert torch.allclose(each[name], plain[name], rtol=1e-10, atol=1e-12), name


def opaque(net: Any, batch: Tensor) -> Tensor:
    found: Tensor = net(batch).value
    return found.square().mean()


class Found:
    def __init__(self, value: Tensor) -> None:
        self.value = value


class Opaque(nn.Linear):
    def forward(self, inputs: Tensor) -> Any:
        return Found(super().forward(inputs))


def refused(**options: Any) -> list[str]:
    """The errors of runs that would record graphs wrongly, and again and again."""
    emulated_graphs.register()
    asked: list[tuple[nn.Module, Any, dict[str, Any]]] = [
        (made(norm=True), Loss(), {"workers": 4}),
        (made(norm=True), Loss(), {"batch_norm": "sync"}),
        (made(), Loss(), {"strategy": "sharded"}),
        (made(), Loss(), {"strategy": "local_sgd"}),
        (made(), None, {}),
        (Opaque(3, 1).double(), opaque, {}),
    ]
    told = []
    for model, loss, given in asked:
        try:
            run = tutti.prepare(model, "sgd:lr=0.1", data(12), loss, batch_size=6, compile=GRAPHS, **given)
            for batch in run.microbatches(0) if loss is None else run.epoch(0):
                run.step(batch)
            told.append("")
        except UsageError as error:
            told.append(str(error))
    return told


def test_what_would_move_or_keep_memory_of_graphs_is_refused_on_every_rank() -> None:
    words = [
        "cannot be combined with 4 logical workers on 2 data ranks for this model",
        "cannot be combined with batch_norm=",
        "strategy 'sharded' cannot be combined",
        "strategy 'local_sgd' cannot be combined",
        "cannot be combined with a custom training loop",
        "a forward returns a Found",
    ]
    for told in worlds.run_on("cpu", 2, refused):
        assert [word in text for word, text in zip(words, told, strict=True)] == [True] * len(words), told
