"""Copies of a tensor on several ranks: one that differs is found before a checkpoint is written, and named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tutti
from tests import worlds
from tests.faults.commands import complaint, write_task
from tests.faults.commands import tutti as command
from tutti.checkpoint.fingerprint import tensor_digest, tensor_digests
from tutti.errors import MismatchError


class Tied(nn.Module):
    """An embedding that is also the last layer, with a norm and a buffer of its own between them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 6)
        self.inner = nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 6))
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 8, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.norm(self.inner(self.embed(numbers))))
        return result


def loss(model: Any, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def prepared(strategy: str, workers: int, **options: Any) -> Any:
    torch.manual_seed(0)
    numbers = torch.arange(48)
    data = (numbers % 8, numbers * 3 % 8)
    made = tutti.prepare(
        Tied(), "adam:lr=0.01", data, loss, strategy=strategy, workers=workers, batch_size=12, **options
    )
    for batch in made.epoch(0):
        made.step(batch)
    return made


def flip(tensor: torch.Tensor) -> None:
    """Change the sign of the last number, or make a zero another one."""
    last = tensor.view(-1)[-1:]
    last.copy_(torch.where(last == 0, torch.ones_like(last), -last))


def planted(strategy: str, workers: int, name: str, where: int | None) -> str | None:
    """What a run says in which rank ``where`` holds another ``name``."""
    run = prepared(strategy, workers)
    run.weights_sha256()
    held = run.gradient_sync.replicated()
    if tutti.rank() == where:
        flip(held[name])
    try:
        run.state()
    except MismatchError as error:
        return f"{error.exit_code:d} {error}"
    return None


CASES = [
    ("mirrored", 3, 3, "inner.0.weight", 1, "rank 1 differs from ranks 0, 2"),
    ("mirrored:algorithm=shared_memory", 3, 3, "norm.bias", 0, "rank 0 differs from ranks 1, 2"),
    ("sharded:stage=1", 3, 3, "inner.0.weight", 2, "rank 2 differs from ranks 0, 1"),
    ("sharded:shards=2", 4, 4, "inner.0.weight", 1, "ranks 1, 3 differ"),
    ("tensor", 3, 1, "norm.weight", 1, "rank 1 differs from ranks 0, 2"),
    ("hybrid:tensor=2", 4, 2, "inner.0.weight", 1, "ranks 1, 3 differ"),
    ("hybrid:tensor=2", 4, 2, "norm.weight", 1, "rank 1 differs from ranks 0, 2, 3"),
    ("hybrid:stages=2", 4, 2, "inner.0.weight", 0, "ranks 0, 2 differ"),
    ("local_sgd:period=2", 3, 3, "inner.0.weight", 1, "rank 1 differs from ranks 0, 2"),
    ("diloco:period=3", 3, 3, "outer/momentum/norm.bias", 2, "rank 2 differs from ranks 0, 1"),
    ("parameter_server", 3, 3, "inner.0.weight", 1, "rank 1 differs from ranks 0, 2"),
]


@pytest.mark.parametrize(("strategy", "ranks", "workers", "name", "where", "said"), CASES)
def test_a_copy_that_differs_is_named_on_every_rank(
    strategy: str, ranks: int, workers: int, name: str, where: int, said: str
) -> None:
    answers = worlds.run(ranks, planted, strategy=strategy, workers=workers, name=name, where=where)
    assert all(
        answer and answer.startswith(f"5 ranks hold different copies of '{name}': {said} (") for answer in answers
    )


def test_weights_that_are_tied_over_stages_are_copies() -> None:
    name = worlds.run(2, last_name)[1]
    answers = worlds.run(2, planted_last)
    assert name in ("embed.weight", "head.weight")
    assert all(answer and "copies of 'embed.weight'" in answer and "ranks 0, 1 differ" in answer for answer in answers)


def last_name() -> str:
    return next(
        name for name in prepared("pipeline", 1).gradient_sync.replicated() if "embed" in name or "head" in name
    )


def planted_last() -> str | None:
    return planted("pipeline", 1, last_name(), 1)


FREE = [("sharded", 3, 3), ("central_storage", 3, 3), ("local_sgd:period=3", 3, 3), ("single", 1, 3)]
FREE += [("parameter_server:mode=async", 2, 2), ("parameter_server:backup=1", 3, 3), ("pipeline", 3, 1)]


@pytest.mark.parametrize(("strategy", "ranks", "workers"), FREE)
def test_what_is_no_copy_may_differ(strategy: str, ranks: int, workers: int) -> None:
    """Rows, workers that train alone, memory of which there is one."""
    assert worlds.run(ranks, planted, strategy=strategy, workers=workers, name="", where=None) == [None] * ranks


def synchronized(where: int) -> str | None:
    torch.manual_seed(0)
    images = torch.randn(24, 2, 4)
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Flatten(), nn.Linear(8, 3))
    run = tutti.prepare(model, "sgd:lr=0.1", (images, torch.arange(24) % 3), loss, batch_size=12, batch_norm="sync")
    for batch in run.epoch(0):
        run.step(batch)
    run.weights_sha256()
    if tutti.rank() == where:
        flip(run.model[0].running_var)
    try:
        run.weights_sha256()
    except MismatchError as error:
        return str(error)
    return None


def test_statistics_of_the_whole_batch_are_copies() -> None:
    answers = worlds.run(3, synchronized, where=2)
    assert all(answer and "'0.running_var': rank 2 differs from ranks 0, 1" in answer for answer in answers)


def long_epochs(where: int) -> tuple[int, str]:
    run = prepared("mirrored", 3)
    try:
        for epoch in range(1, 100):
            for batch in run.epoch(epoch):
                run.step(batch)
                # After the last beginning of an epoch at which copies are compared.
                if run.local_step == 97 and tutti.rank() == where:
                    flip(run.model.norm.weight.data)
    except MismatchError as error:
        return run.local_step, str(error)
    return run.local_step, ""


def test_the_end_of_an_epoch_after_a_hundred_steps_finds_it() -> None:
    for taken, said in worlds.run(3, long_epochs, where=1):
        assert taken == 100 and "'norm.weight'" in said and "before epoch 26" in said


def saved(folder: str, where: int) -> str:
    run = prepared("mirrored", 3)
    run.save(folder)
    for batch in run.epoch(1):
        run.step(batch)
    if tutti.rank() == where:
        flip(run.model.norm.weight.data)
    try:
        run.save(folder)
    except MismatchError as error:
        return str(error)
    return ""


def test_a_script_writes_no_checkpoint_of_it(tmp_path: Path) -> None:
    answers = worlds.run(3, saved, folder=str(tmp_path / "checkpoints"), where=1)
    assert all("'norm.weight': rank 1 differs from ranks 0, 2" in answer for answer in answers)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000004"]


class Divided(torch.optim.Optimizer):
    """SGD with momentum; each rank updates its own parameters, or all ranks all of them, as ``Whole``."""

    divided = True

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for number, p in enumerate(group["params"]):
                owner = number % tutti.size()
                if not self.divided or tutti.rank() == owner:
                    momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                    p.sub_(momentum.mul_(0.9).add_(p.grad), alpha=group["lr"])
                if self.divided:
                    p.copy_(tutti.broadcast(p, owner, name=f"parameter {number}"))


class Whole(Divided):
    divided = False


def divided(kind: type[Divided], folder: str) -> tuple[str, float]:
    torch.manual_seed(0)
    model = Tied()
    data = (torch.arange(48) % 8, torch.arange(48) * 3 % 8)
    run = tutti.prepare(model, kind(model.parameters(), 0.1), data, loss, workers=3, batch_size=12)
    for batch in run.epoch(0):
        run.step(batch)
    total = float(run.state()["norm.weight"].double().sum())
    try:
        run.save(folder)
    except MismatchError as error:
        return str(error), total
    return "", total


def test_state_that_an_optimizer_divides_over_ranks_is_not_saved(tmp_path: Path) -> None:
    """A checkpoint would hold a part of it, and a resumed run would go on from other moments, without an error."""
    [(said, want)] = worlds.run(1, divided, kind=Whole, folder=str(tmp_path / "one"))
    assert not said
    for ranks in (2, 3):
        answers = worlds.run(ranks, divided, kind=Whole, folder=str(tmp_path / f"whole{ranks}"))
        assert answers == [("", pytest.approx(want))] * ranks
        for said, total in worlds.run(ranks, divided, kind=Divided, folder=str(tmp_path / f"parts{ranks}")):
            assert "the state of the optimizer Divided" in said and "momentum" in said
            assert total == pytest.approx(want)
        assert not list((tmp_path / f"parts{ranks}").glob("step-*"))


PLANT = """
STEPS = 0

def loss(model, batch):
    global STEPS
    STEPS += model.training
    if RANK == 1 and STEPS == {step}:
        # Memory that fails changes no version counter.
        model[2].weight.detach().numpy().reshape(-1)[3] += 1e-3
    inputs, labels = batch
    return nn.functional.cross_entropy(model(inputs), labels)
"""


@pytest.mark.parametrize(("every", "step", "kept"), [("10st", 19, ["step-00000010"]), ("none", 19, [])])
def test_the_command_line_ends_with_5(every: str, step: int, kept: list[str], tmp_path: Path) -> None:
    write_task(tmp_path, PLANT.format(step=step))
    options = ("--devices", "3", "--batch-size", "12", "--steps", "20", "--eval-every", "none", "--timeout", "60")
    result = command(tmp_path, "train", "own.py:task", *options, "--checkpoint-every", every, "--out", "out")
    assert result.code == 5, result.err
    text = " ".join(complaint(result))
    assert "ranks hold different copies of '2.weight'" in text and "rank 1 differs from ranks 0, 2" in text
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["exit_code"] == 5
    folder = tmp_path / "out" / "checkpoints"
    assert (sorted(path.name for path in folder.iterdir()) if folder.exists() else []) == kept


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.uint8, torch.bool, torch.complex64]
)
def test_a_digest_is_of_the_bytes(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for count in (0, 1, 3, 8, 1000, 200_001):
        tensor = (torch.randn(count) * 100).abs().to(dtype)
        digest = int(tensor_digest(tensor))
        assert digest == int(tensor_digest(tensor.clone()))
        # Elsewhere in memory, and in other strides.
        padded = torch.cat([torch.zeros(1, dtype=dtype), tensor])[1:]
        assert digest == int(tensor_digest(padded))
        assert digest == int(tensor_digest(torch.stack([tensor, tensor], 1)[:, 0]))
        seen = {digest}
        for place in {0, count // 2, count - 1} if count else ():
            for bit in (0, dtype.itemsize * 8 - 1) if dtype != torch.bool else (0,):
                other = tensor.clone()
                other.view(torch.uint8)[place * dtype.itemsize + bit // 8] ^= 1 << bit % 8
                seen.add(int(tensor_digest(other)))
        assert len(seen) == 1 + len({0, count // 2, count - 1} if count else ()) * (1 if dtype == torch.bool else 2)


def test_digests_of_several_tensors_are_those_of_each() -> None:
    torch.manual_seed(0)
    sizes = [(0,), (1,), (7,), (5, 3), (64, 16), (65, 16), (300, 300)]
    tensors = [torch.randn(size).to(dtype) for size in sizes for dtype in (torch.float64, torch.bfloat16, torch.bool)]
    tensors += [
        torch.tensor(3.0),
        torch.randn(9)[::2],
        torch.randn(3)[1::2],
        torch.randn(5, 7).t(),
        torch.arange(24, dtype=torch.uint8).view(2, 3, 4)[:, 1:],
    ]
    for count in (0, 1, len(tensors)):
        assert tensor_digests(tensors[:count]) == [int(tensor_digest(tensor)) for tensor in tensors[:count]]
    # More than are digested together.
    assert tensor_digests(tensors * 4) == tensor_digests(tensors) * 4


def test_changes_do_not_cancel() -> None:
    """Two signs in the same bits of two words; two words that change places; zeros that are one more."""
    tensor = torch.arange(1.0, 9)
    others = [tensor.clone() for _ in range(2)]
    others[0][[1, 3]] *= -1
    others[1][:4] = tensor[[2, 3, 0, 1]]
    found = {int(tensor_digest(t)) for t in (tensor, *others, torch.zeros(4), torch.zeros(6))}
    assert len(found) == 5
