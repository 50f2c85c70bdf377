"""What scripts do around a pipeline: right as on one device, or refused on every rank by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

import tutti
from tests import worlds
from tests.covering import table
from tutti.errors import UsageError
from tutti.parallel.pipeline.graph_trace import openable, trace


class Late(nn.Module):
    """Detaches in its last block, or ties its first and last weights."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.blocks = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(5)])
        self.last = nn.Linear(4, 4)
        if kind == "tied":
            self.last.weight = self.blocks[0][0].weight
        if kind == "tied" or kind == "frozen":
            self.blocks[:4].requires_grad_(False)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.blocks(inputs)
        return self.last(hidden.detach() if self.kind == "detached" else hidden)


def loss(model: Any, batch: Any) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


def data() -> torch.utils.data.TensorDataset:
    draw = torch.Generator().manual_seed(0)
    return torch.utils.data.TensorDataset(
        torch.randn(24, 4, generator=draw).double(), torch.randint(0, 4, (24,), generator=draw)
    )


def trained(strategy: str, kind: str, reproducible: bool = False) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Late(kind).double()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad or kind == "frozen"], lr=0.01)
    options = {"strategy": strategy, "workers": 1, "batch_size": 8, "reproducible": reproducible}
    run = tutti.prepare(model, optimizer, data(), loss, **options)
    for epoch in range(3):
        if epoch == 1 and kind in ("tied", "frozen"):
            thawed = [p for p in model.parameters() if not p.requires_grad]
            model.requires_grad_(True)
            if kind == "tied":
                optimizer.add_param_group({"params": thawed, "lr": 0.02})
        for batch in run.epoch(epoch):
            run.step(batch)
    return {name: tensor.numpy() for name, tensor in run.state().items()}


@pytest.mark.parametrize(
    ("kind", "schedule", "ranks"),
    table(["frozen", "tied", "detached"], ["gpipe", "1f1b", "interleaved", "zero_bubble"], [2, 3], strength=1),
)
def test_equals_one_device(kind: str, schedule: str, ranks: int) -> None:
    want = worlds.alone(trained, strategy="single", kind=kind)
    chunks = ",virtual=2" if schedule == "interleaved" else ""
    micro = 4 if ranks == 2 else 3
    text = f"pipeline:schedule={schedule},micro_batches={micro}{chunks}"
    for got in worlds.run(ranks, trained, strategy=text, kind=kind):
        assert got.keys() == want.keys()
        assert max(abs(got[name] - want[name]).max() for name in want) < 1e-10


def test_a_stage_that_trains_more_later_keeps_its_place_in_the_norm() -> None:
    """Reproducible mode sums the squares of all parameters in one order, which the stages agree on at the start."""
    arguments = {"kind": "frozen", "reproducible": True}
    want = worlds.alone(trained, strategy="single", **arguments)
    for got in worlds.run(2, trained, strategy="pipeline:micro_batches=1", **arguments):
        assert max(abs(got[name] - want[name]).max() for name in want) < 1e-10


def read(how: str) -> str:
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)]).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tutti.prepare(model, optimizer, data(), loss, strategy="model_parallel", batch_size=8)
    torch.optim.Adam(model.parameters())
    assert [tuple(p.shape) for p in model.parameters()] == [(4, 4), (4,)] * 3
    model.requires_grad_(False)
    optimizer.zero_grad()
    reads = {
        "copy": lambda: copy.deepcopy(model),
        "written state": lambda: [value.zero_() for value in model.state_dict().values()],
        "written view": lambda: [p.view(-1).zero_() for p in model.parameters()],
        "written row of data": lambda: [p.data[0].zero_() for p in model.parameters()],
    }
    try:
        reads[how]()
    except UsageError as error:
        return str(error)
    return "was read"


@pytest.mark.parametrize("how", ["copy", "written state", "written view", "written row of data"])
def test_a_model_that_is_not_whole_here_cannot_be_read(how: str) -> None:
    for said in worlds.run(3, read, how=how):
        assert ("each rank has" in said or "write would be lost" in said) and "run.state()" in said


class Doubling(TorchFunctionMode):
    """Doubles what PyTorch's functions return."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return 2 * func(*args, **(kwargs or {}))


class Letting(TorchFunctionMode):
    """Lets each call pass."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Executed(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.last, self.kind, self.calls = nn.Linear(4, 4), nn.Linear(4, 4), kind, 0
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        if self.kind == "counter":
            self.calls += 1
        elif self.kind == "buffer":
            self.seen.add_(1)
        elif self.kind == "no_grad":
            with torch.no_grad():
                hidden = hidden * 2
        elif self.kind == "autocast":
            with torch.autocast("cpu", torch.bfloat16):
                hidden = self.last(hidden)
        elif self.kind == "function mode":
            with Doubling():
                hidden = torch.relu(hidden)
        elif self.kind == "device":
            with torch.device("cpu"):
                hidden = torch.cat([hidden, hidden])
        elif self.kind == "functional_call":
            hidden = torch.func.functional_call(self.first, {"weight": torch.ones(4, 4)}, (hidden,))
        elif self.kind == "kept":
            self.kept = hidden.mean()
        out: Tensor = self.last(hidden)
        return out


@pytest.mark.parametrize(
    "kind", ["counter", "buffer", "no_grad", "autocast", "function mode", "device", "functional_call", "kept"]
)
def test_what_a_graph_would_leave_out_is_refused_and_undone(kind: str) -> None:
    model = Executed(kind)
    with pytest.raises(UsageError, match=r"leave out|other weights"):
        trace(model, {""})
    assert not openable(model)
    assert model.calls == 0 and model.seen == 0 and not hasattr(model, "kept")


class Concatenating(nn.Module):
    """Calls a function of PyTorch between its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(8, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.last(torch.cat([inputs, self.first(inputs)], 1))
        return out


@pytest.mark.parametrize("mode", [Letting, lambda: torch.device("cpu")], ids=["function mode", "device"])
def test_a_mode_that_the_script_has_entered_changes_no_graph(mode: Callable[[], Any]) -> None:
    graph, model = str(trace(Concatenating(), {""})), Concatenating()
    with mode():
        assert openable(model) and str(trace(model, {""})) == graph


def hooked() -> str:
    """A loss that reads what a hook of the first layer keeps on the model."""
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))

    def kept(called: Any, batch: Any) -> Tensor:
        total: Tensor = loss(called, batch) + called.features.square().mean()
        return total

    data = torch.randn(8, 4), torch.randint(0, 3, (8,))
    run = tutti.prepare(model, "sgd:lr=0.1", data, kept, strategy="pipeline", workers=1, batch_size=4)
    model[0].register_forward_hook(lambda module, given, output: setattr(model, "features", output.detach()))
    try:
        run.step(next(iter(run.epoch(0))))
    except UsageError as error:
        return str(error)
    return "not refused"


def test_an_attribute_that_the_last_stage_does_not_have_is_refused_on_every_rank() -> None:
    for said in worlds.run(2, hooked):
        assert "the loss function reads 'features' of the model" in said, said
        assert "test_pipeline_scripts.py:" in said and "Let the model's forward return the value" in said
    worlds.forget(2)
