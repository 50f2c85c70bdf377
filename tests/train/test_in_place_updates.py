"""What a script moves in the code for every micro-batch moves once a step, or the run is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import tutti
from tests import worlds
from tests.covering import in_turn, table
from tutti.errors import TuttiError

DRAW = torch.Generator().manual_seed(1)
DATA = TensorDataset(torch.randn(24, 4, generator=DRAW, dtype=torch.float64), torch.arange(24) % 3)


class Shifted(nn.Module):
    """Adds a view of a view of its parameter, as vision transformers do with positions beside that of the class."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.linspace(0, 1, 5)[None])

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + self.shift[:, 1:].reshape(4)


def network() -> nn.Sequential:
    return nn.Sequential(Shifted(), nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()


class Script:
    """A loss towards a teacher, or with a factor, that its code moves."""

    def __init__(self, kind: str) -> None:
        torch.manual_seed(1)
        self.kind, self.teacher = kind, network().requires_grad_(False)
        self.factor = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.optimizer = torch.optim.SGD([self.factor], lr=0.1)
        self.noise = torch.zeros(3, dtype=torch.float64)

    def move(self, model: Any) -> None:
        pairs = list(zip(self.teacher.parameters(), model.parameters(), strict=True))
        with torch.no_grad():
            for own, new in pairs if self.kind not in ("factor", "trained", "clamp", "noise", "noise set") else ():
                if self.kind == "in place":
                    own.mul_(0.9).add_(new.detach(), alpha=0.1)
                elif self.kind == "lerp":
                    own.lerp_(new.detach(), 0.1)
                elif self.kind == "assigned":
                    own.data = 0.9 * own.data + 0.1 * new.detach()
                elif self.kind == "copied":
                    own.copy_(0.9 * own + 0.1 * new.detach())
                elif self.kind == "set":
                    own[:] = 0.9 * own + 0.1 * new.detach()
                elif self.kind == "target":
                    own.data.copy_(new.detach())
            if self.kind == "several":
                owns = [own for own, _ in pairs]
                torch._foreach_lerp_(owns, [new.detach() for _, new in pairs], 0.1)
            if self.kind == "factor":
                self.factor.data.mul_(0.9)
            if self.kind == "clamp":
                self.factor.data.clamp_(max=0.5)
            if self.kind == "noise":
                self.noise.fill_(0.5)
            if self.kind == "noise set":
                self.noise[:] = 0.5

    def loss(self, model: Any, batch: Any) -> Tensor:
        outputs, device = model(batch[0]), batch[0].device
        towards = functional.mse_loss(outputs, self.teacher.to(device)(batch[0]) + self.noise.to(device))
        return functional.cross_entropy(outputs, batch[1]) + self.factor.detach() * towards


MOVING = ("in place", "lerp", "assigned", "copied", "set", "several", "factor")
STAYING = ("target", "clamp", "noise", "noise set")


def train(strategy: str, kind: str, form: str, workers: int, micro_batch: int | None = None) -> Any:
    torch.manual_seed(0)
    model, script = network(), Script(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(model: Any, batch: Any) -> Tensor:
        script.move(model)
        return script.loss(model, batch)

    run = tutti.prepare(
        *(model, optimizer, DATA, loss if form == "step" else None),
        strategy=strategy, workers=workers, batch_size=12, seed=0, micro_batch=micro_batch,
    )  # fmt: skip
    try:
        for epoch in range(2):
            if form == "step":
                for batch in run.epoch(epoch):
                    run.step(batch)
                continue
            for batch in run.microbatches(epoch):
                if form == "before":
                    script.move(model)
                optimizer.zero_grad()
                run.backward(script.loss(model, batch))
                optimizer.step()
                if form == "after" or (form == "stepped" and run.stepped):
                    script.move(model)
    except TuttiError as error:
        return str(error)
    return {name: tensor.cpu().numpy().copy() for name, tensor in run.state().items()}


@pytest.mark.parametrize(
    ("kind", "form", "place"),
    table(MOVING, ["before", "after"], [(1, "single"), (2, "mirrored"), (2, "tensor:least=1")]),
    ids=str,
)
def test_what_each_body_moves_is_refused_on_a_rank_with_several(kind: str, form: str, place: tuple[int, str]) -> None:
    size, strategy = place
    for said in worlds.run(size, train, strategy=strategy, kind=kind, form=form, workers=4):
        # Split parameters are of another shape where the script computes with their data or sets elements.
        slices = ["of which each tensor rank has a slice"] if kind in ("assigned", "set") else []
        refused = "moved (step 1", *slices
        assert any(words in said for words in refused) and "test_in_place_updates.py:" in said, said
    worlds.forget(size)


@pytest.mark.parametrize(("kind", "form"), in_turn(MOVING, ["before", "after", "step"]))
def test_what_each_micro_batch_of_a_worker_moves_is_refused(kind: str, form: str) -> None:
    [said] = worlds.run(1, train, strategy="single", kind=kind, form=form, workers=1, micro_batch=4)
    assert "moved (step 1" in said and "test_in_place_updates.py:" in said, said


@pytest.mark.parametrize("kind", [*MOVING, *STAYING])
def test_what_is_moved_once_a_step_is_right_with_several_micro_batches(kind: str) -> None:
    alone, form = ("before", "before") if kind in STAYING else ("after", "stepped")
    want = worlds.alone(train, strategy="single", kind=kind, form=alone, workers=1)
    [got] = worlds.run(1, train, strategy="single", kind=kind, form=form, workers=1, micro_batch=4)
    assert not isinstance(got, str), got
    assert all(abs(got[name] - value).max() <= 1e-10 for name, value in want.items())


@pytest.mark.parametrize("kind", MOVING)
def test_what_a_loss_function_moves_is_refused(kind: str) -> None:
    for said in worlds.run(2, train, strategy="mirrored", kind=kind, form="step", workers=4):
        assert "test_in_place_updates.py:" in said and "micro-batch" in said


@pytest.mark.parametrize("kind", STAYING)
def test_what_a_body_replaces_after_its_loss_is_refused_where_the_next_one_reads_it(kind: str) -> None:
    for said in worlds.run(2, train, strategy="mirrored", kind=kind, form="after", workers=4):
        assert "depends on values that the code for another one has moved (step 1" in said, said


@pytest.mark.parametrize(
    ("kind", "place"),
    in_turn(MOVING, [(2, "mirrored", 4), (3, "mirrored", 3), (2, "sharded:stage=1", 4)], each=2)
    + in_turn(STAYING, [(2, "mirrored", 4), (3, "mirrored", 3), (2, "tensor:least=1", 4)], each=2),
    ids=str,
)
def test_what_moves_once_a_step_or_is_replaced_is_right(kind: str, place: tuple[int, str, int]) -> None:
    size, strategy, workers = place
    alone, form = ("before", "before") if kind in STAYING else ("after", "stepped")
    want = worlds.alone(train, strategy="single", kind=kind, form=alone, workers=1)
    for got in worlds.run(size, train, strategy=strategy, kind=kind, form=form, workers=workers):
        assert not isinstance(got, str), got
        assert all(abs(got[name] - value).max() <= 1e-10 for name, value in want.items())


def test_a_teacher_that_the_loss_moves_to_the_device_is_right() -> None:
    want = worlds.alone(train, strategy="single", kind="lerp", form="after", workers=1)
    options = {"strategy": "mirrored", "kind": "lerp", "form": "stepped", "workers": 4}
    for got in worlds.run_on(worlds.ACCELERATOR, 1, train, **options):
        assert not isinstance(got, str), got
        assert all(abs(got[name] - value).max() <= 1e-10 for name, value in want.items())
