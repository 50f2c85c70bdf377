"""Fault 21: ranks that do not do the same. Refused before arithmetic, on every rank, with both sides shown; exit 5."""

from __future__ import annotations

import random
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tutti
from tests import worlds
from tests.contract.models import loss, model, samples
from tests.faults.commands import complaint
from tests.faults.commands import tutti as command
from tutti.errors import TuttiError
from tutti.launcher import context

pytestmark = [pytest.mark.faults, pytest.mark.row(21)]

STRATEGIES = [
    "mirrored",
    "mirrored:algorithm=native",
    "model_parallel",
    "local_sgd",
    "central_storage",
    "pipeline",
    "sharded",
    "sharded:stage=1",
]


def refusal(case: str, culprit: int, strategy: str = "mirrored") -> tuple[str, int, str]:
    """What this rank is told when ``culprit`` prepares something else; the world stays usable."""
    plain: nn.Module = model()
    settings: dict[str, Any] = {"strategy": strategy, "workers": 4, "batch_size": 25}
    optimizer = "sgd:lr=0.1"
    if context.rank() == culprit:
        plain, optimizer, settings = OTHERS[case](plain, optimizer, settings)
    try:
        tutti.prepare(plain, optimizer, samples(), loss, **settings)
    except TuttiError as error:
        return type(error).__name__, int(error.exit_code), str(error)
    return "nothing", 0, ""


def changed_model(change: Callable[[Any], None]) -> Callable[..., Any]:
    def other(plain: Any, optimizer: str, settings: dict[str, Any]) -> Any:
        change(plain)
        return plain, optimizer, settings

    return other


def changed(**values: Any) -> Callable[..., Any]:
    return lambda plain, optimizer, settings: (plain, optimizer, settings | values)


def swap_last_two(plain: nn.Sequential) -> None:
    plain[4], plain[6] = plain[6], plain[4]


OTHERS: dict[str, Callable[..., Any]] = {
    "shape": changed_model(lambda plain: plain.__setitem__(9, nn.Linear(12, 5).double())),
    "dtype": changed_model(lambda plain: plain.float()),
    "order": changed_model(swap_last_two),
    "frozen": changed_model(lambda plain: plain[4].requires_grad_(False)),
    "count": changed_model(lambda plain: plain.append(nn.Linear(4, 4).double())),
    "batch size": changed(batch_size=24),
    "micro-batch": changed(micro_batch=2),
    "workers": changed(workers=5),
    "seed": changed(seed=1),
    "clip": changed(clip=1.0),
    "max_nonfinite": changed(max_nonfinite=3),
    "learning rate": lambda plain, optimizer, settings: (plain, "sgd:lr=0.2", settings),
    "optimizer": lambda plain, optimizer, settings: (plain, "adam:lr=0.1", settings),
}
SHOWN = {
    "shape": ("float64[4, 12]", "float64[5, 12]"),
    "dtype": ("float64", "float32"),
    "frozen": ("frozen",),
    "batch size": ("25", "24"),
    "workers": ("4 workers", "5 workers"),
    "learning rate": ("0.1", "0.2"),
    "optimizer": ("SGD", "Adam"),
}


@pytest.mark.parametrize("ranks", [3, 4])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_different_models_or_settings_at_prepare(
    strategy: str, ranks: int, seed: int, record_property: Callable[[str, object], None]
) -> None:
    draw = random.Random(f"{strategy} {ranks} {seed}")
    for case in OTHERS:
        culprit = draw.randrange(ranks)
        told = worlds.run(ranks, refusal, case=case, culprit=culprit, strategy=strategy)
        assert [(kind, code) for kind, code, _ in told] == [("MismatchError", 5)] * ranks, (case, told)
        for _, _, text in told:
            assert f"rank {culprit} has" in text or culprit == 0, (case, text)
            assert "rank 0 has" in text
            assert all(side.lower() in text.lower() for side in SHOWN.get(case, ())), (case, text)
    record_property("differences refused before arithmetic", len(OTHERS))


def other_strategy(culprit: int, first: str, second: str) -> tuple[str, int, str]:
    return refusal_of(
        lambda: tutti.prepare(
            model(), "sgd:lr=0.1", samples(), loss, strategy=second if context.rank() == culprit else first, workers=4
        )
    )


def refusal_of(action: Callable[[], Any]) -> tuple[str, int, str]:
    try:
        action()
    except TuttiError as error:
        return type(error).__name__, int(error.exit_code), str(error)
    return "nothing", 0, ""


@pytest.mark.parametrize(("first", "second"), [("mirrored", "model_parallel"), ("local_sgd", "mirrored:wire=bf16")])
def test_different_strategies_at_prepare(first: str, second: str) -> None:
    # A world of its own: in one that other tests have used, all groups are made and nobody waits for one.
    pool = worlds.Pool(3)
    told = pool.run(other_strategy, culprit=2, first=first, second=second)
    pool.close()
    for kind, code, text in told:
        assert (kind, code) == ("MismatchError", 5)
        assert first in text and second.partition(":")[0] in text


# --- own collectives -------------------------------------------------------------------------------------------------


def own_collective(case: str, culprit: int) -> Any:
    """One collective in which ``culprit`` differs; what this rank is told, and what its tensor holds afterwards."""
    run = tutti.prepare(model(), "sgd:lr=0.1", samples(), loss, workers=4)
    comm, other = run.context.comms.world, context.rank() == culprit
    tensor = torch.full((3,), float(context.rank()))
    if other and case == "shape":
        tensor = torch.zeros(4)
    if other and case == "dtype":
        tensor = torch.zeros(3, dtype=torch.float64)
    before = tensor.clone()

    def call() -> None:
        if other and case == "op":
            comm.broadcast(tensor, 0, "numbers")
        elif other and case == "gather":
            comm.all_gather(tensor, "numbers")
        else:
            comm.all_reduce(tensor, "letters" if other and case == "name" else "numbers")
        if other and case == "count":
            return
        comm.broadcast(tensor, 0, "more numbers")

    told = refusal_of(call if case != "count" else lambda: (call(), comm.all_gather(tensor, "the end")))
    return told, case == "count" or torch.equal(tensor, before)


@pytest.mark.parametrize("ranks", [3, 4])
def test_own_collectives(ranks: int, seed: int, record_property: Callable[[str, object], None]) -> None:
    culprit = random.Random(seed).randrange(1, ranks)
    sides = {
        "shape": ("float32[3]", "float32[4]"),
        "dtype": ("float32[3]", "float64[3]"),
        "op": ("all_reduce 'numbers'", "broadcast 'numbers'"),
        "gather": ("all_reduce 'numbers'", "all_gather 'numbers'"),
        "name": ("'numbers'", "'letters'"),
        "count": ("'more numbers'", "'the end'"),
    }
    for case, shown in sides.items():
        for (kind, code, text), untouched in worlds.run(ranks, own_collective, case=case, culprit=culprit):
            assert (kind, code) == ("MismatchError", 5), (case, text)
            assert untouched, f"{case}: something was added before it was compared"
            assert all(side in text for side in shown) and f"rank {culprit} in" in text, (case, text)
    record_property("different collectives refused before arithmetic", len(sides))


# --- other numbers of steps ------------------------------------------------------------------------------------------


def out_of_step(case: str, culprit: int, strategy: str) -> None:
    """Train; ``culprit`` makes one step less or more, or does something else meanwhile. Every rank must raise."""
    run = tutti.prepare(model(), "sgd:lr=0.1", samples(), loss, strategy=strategy, workers=4, batch_size=10)
    other = context.rank() == culprit
    batches = (batch for epoch in range(3) for batch in run.epoch(epoch))
    for _ in range(4):
        run.step(next(batches))
    if case == "evaluates" and other:
        run.evaluate(run.feed.source, batch=7)
    if case == "reads the weights" and other:
        run.state()
    if case == "skips" and other:
        # The optimizer's clock runs ahead, as in a loop that goes on from another step.
        run.local_step += 1
        next(batches)
    for _ in range(4):
        run.step(next(batches))
    run.evaluate(run.feed.source, batch=7)
    run.evaluate(run.feed.source, batch=7)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("case", ["evaluates", "skips"])
def test_other_steps(strategy: str, case: str, seed: int) -> None:
    ranks = 3
    culprit = random.Random(f"{strategy} {case} {seed}").randrange(ranks)
    pool = worlds.Pool(ranks, timeout=10.0)
    try:
        with pytest.raises(worlds.RankError) as raised:
            pool.run(out_of_step, case=case, culprit=culprit, strategy=strategy, limit=40.0)
    finally:
        pool.close()
    failures = raised.value.failures
    assert [f and f.exit_code for f in failures] == [5] * ranks, raised.value
    assert any(f and f.kind == "MismatchError" and f"rank {culprit}" in f.text for f in failures), raised.value


# --- through the launcher -----------------------------------------------------------------------------------------

SCRIPT = """
import torch, tutti
from torch import nn
tutti.init("cpu", timeout=20)
torch.manual_seed(0)
wide = 5 if tutti.rank() == 2 and {case!r} == "model" else 4
net = nn.Sequential(nn.Linear(4, wide), nn.Linear(wide, 3))
data = torch.randn(36, 4), torch.randint(0, 3, (36,))
lr = 0.2 if tutti.rank() == 2 and {case!r} == "optimizer" else 0.1
run = tutti.prepare(
    net,
    torch.optim.SGD(net.parameters(), lr=lr),
    data,
    lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
    batch_size=6,
)
for number, batch in enumerate(run.epoch(0)):
    if tutti.rank() == 2 and number == 3 and {case!r} == "one step less":
        continue
    run.step(batch)
run.evaluate(run.feed.source)
"""


@pytest.mark.parametrize("case", ["model", "optimizer", "one step less"])
def test_exit_code_of_a_script(case: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPT).format(case=case))
    result = command(tmp_path, "run", "-np", "3", "script.py")
    assert result.code == 5, result.err
    said = complaint(result)
    assert "MismatchError" in said[0] and "rank 2" in said[0], result.err
    assert "Traceback" not in result.err
