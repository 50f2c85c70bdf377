"""One case: a model with a form of loss under a strategy on some devices, compared with plain PyTorch."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

import tutti
from tests import worlds
from tests.models import zoo
from tests.scripts import harness, oracle
from tests.scripts.harness import Outcome, Reference, Verdict, arrays
from tests.scripts.oracle import SYNCHRONOUS, Algorithm
from tests.scripts.table import matches
from tutti.errors import ExitCode, TuttiError

BATCH, EPOCHS, SECONDS = 6, 1, 60.0


@dataclass(frozen=True)
class Row:
    """A strategy: as ``tutti.prepare`` takes it, its numbers of devices and logical workers, its algorithm.

    ``by_worker``: the reference of its algorithm is a loop over logical workers for every model.
    """

    text: str
    devices: tuple[int, ...] = (2,)
    workers: int = 2
    algorithm: Algorithm = SYNCHRONOUS
    stages: bool = False


STRATEGIES = {
    "mirrored": Row("mirrored"),
    "sharded, stage 1": Row("sharded:stage=1"),
    "sharded, stage 2": Row("sharded:stage=2"),
    "sharded": Row("sharded"),
    "central_storage": Row("central_storage"),
    "local_sgd": Row("local_sgd:period=2", algorithm=Algorithm(period=2)),
    "parameter_server": Row("parameter_server"),
    "tensor": Row("tensor:least=1", devices=(2, 3), workers=1),
    "pipeline, gpipe": Row("pipeline:schedule=gpipe,micro_batches=2", workers=1, stages=True),
    "pipeline, 1f1b": Row("pipeline:micro_batches=2", devices=(2, 3), workers=1, stages=True),
    "model_parallel": Row("model_parallel", workers=1, stages=True),
    "hybrid, tensor": Row("hybrid:tensor=2,least=1", devices=(4,)),
    "hybrid, stages": Row("hybrid:stages=2", devices=(4,), stages=True),
}


@dataclass(frozen=True)
class Case:
    """A model and a form of its loss, under a strategy on so many devices."""

    model: str
    form: str
    strategy: str
    devices: int

    def __str__(self) -> str:
        return f"{self.model} | {self.form} | {self.strategy} | {self.devices}"

    @property
    def micro(self) -> int:
        """Into how many micro-batches the strategy cuts a worker's share."""
        return 2 if "micro_batches=2" in STRATEGIES[self.strategy].text else 0

    @property
    def data_ranks(self) -> int:
        return {"tensor": 1, "hybrid, tensor": 2, "hybrid, stages": 2}.get(
            self.strategy, 1 if STRATEGIES[self.strategy].stages else self.devices
        )


def whole() -> list[Case]:
    """All cases; those of one number of devices one after the other."""
    found = [
        Case(model, form, strategy, devices)
        for model, entry in zoo.MODELS.items()
        for form in entry.forms
        for strategy, row in STRATEGIES.items()
        if not entry.strategies or strategy in entry.strategies
        for devices in row.devices
    ]
    return sorted(found, key=lambda case: case.devices)


def part(text: str) -> list[Case]:
    """``2/30``: the second of thirty parts of all cases, each with something of everything."""
    number, _, of = text.partition("/")
    chosen = random.Random(0).sample(whole(), len(whole()))[int(number) - 1 :: int(of)]
    return sorted(chosen, key=lambda case: case.devices)


def script(name: str, form: str, micro_batch: int | None) -> Callable[..., dict[str, Any]]:
    """A training script of the model, which takes ``tutti.prepare`` or the oracle's."""

    def run_it(prepare: Callable[..., Any]) -> dict[str, Any]:
        model = zoo.build(name)
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=0.05, momentum=0.9, weight_decay=0.01)
        options = {"micro_batch": micro_batch} if micro_batch else {}
        run = prepare(
            model, optimizer, zoo.dataset(name, form), zoo.loss_fn(name, form), batch_size=BATCH, clip=1.0, **options
        )
        for epoch in range(EPOCHS):
            for batch in run.epoch(epoch):
                run.step(batch)
        return run.state()  # type: ignore[no-any-return]

    return run_it


def micro_batch(case: Case) -> int | None:
    """Samples of a micro-batch: shares of three samples in two and one, where the reference allows it."""
    by_itself = case.micro or STRATEGIES[case.strategy].stages or STRATEGIES[case.strategy].algorithm.period
    return None if by_itself or zoo.MODELS[case.model].by_batch else 2


def play(case: Case) -> Outcome:
    """A case on this rank."""
    runs: list[Any] = []

    def prepare(*arguments: Any, **options: Any) -> Any:
        row = STRATEGIES[case.strategy]
        runs.append(tutti.prepare(*arguments, strategy=row.text, workers=row.workers, seed=0, **options))
        return runs[-1]

    try:
        with zoo.exact():
            return Outcome("ended", arrays(script(case.model, case.form, micro_batch(case))(prepare)))
    except TuttiError as error:
        updates = max((run.updates for run in runs), default=0)
        text = f"{type(error).__name__}: {error}"
        state = None
        if updates and error.exit_code in (ExitCode.USAGE, ExitCode.DATA):
            state = arrays(dict(harness.parameters(runs[-1].replica.parts)))
        return Outcome("refused", state, text, error.what, error.remedy, int(error.exit_code), updates)
    except Exception:
        return Outcome("raw", text=harness.traceback.format_exc(limit=-8))


@zoo.exact()
def play_plain(name: str, form: str) -> Reference:
    """Plain PyTorch on the global batches."""
    model, loss_fn = zoo.build(name), zoo.loss_fn(name, form)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.05, momentum=0.9, weight_decay=0.01)

    def batches() -> Iterator[Any]:
        for epoch in range(EPOCHS):
            yield from oracle.global_batches(zoo.dataset(name, form), BATCH, epoch)

    history = [arrays(dict(model.named_parameters()))]
    for batch in batches():
        optimizer.zero_grad()
        found = loss_fn(model, batch)
        (found[0] / found[1] if isinstance(found, tuple) else found).backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        history.append(arrays(dict(model.named_parameters())))
    return Reference([arrays(model.state_dict())], history)


@zoo.exact()
def play_oracle(name: str, form: str, workers: int, algorithm: Algorithm, micro: int) -> Reference:
    """A loop over logical workers in plain PyTorch."""
    played = oracle.play(script(name, form, None), workers, algorithm, micro)
    return Reference([arrays(result) for result in played.results], [arrays(state) for state in played.history])


@functools.cache
def reference(name: str, form: str, workers: int, algorithm: Algorithm, micro: int) -> Reference:
    """What a case's result must be."""
    if algorithm is SYNCHRONOUS and not zoo.MODELS[name].by_batch:
        return worlds.run(1, play_plain, name=name, form=form)[0]  # type: ignore[no-any-return]
    [found] = worlds.run(1, play_oracle, name=name, form=form, workers=workers, algorithm=algorithm, micro=micro)
    return found  # type: ignore[no-any-return]


def check(case: Case) -> Verdict:
    """Play a case in the pool. What hangs or kills a rank is wrong."""
    row = STRATEGIES[case.strategy]
    want = reference(case.model, case.form, row.workers, row.algorithm, case.micro)
    want = Reference(want.results * (row.workers if len(want.results) == 1 else 1), want.history)
    try:
        outcomes = worlds.run_within(SECONDS, case.devices, play, case=case)
    except (worlds.RankError, TimeoutError, EOFError, BrokenPipeError, OSError) as error:
        return Verdict("wrong", f"the world broke: {error}")
    verdict = harness.judge(outcomes, want, case.data_ranks)
    if verdict.kind != "equal":
        worlds.forget(case.devices)
    return verdict


REFUSED: tuple[tuple[str, str, str, str], ...] = (
    (
        "Time Series Transformer",
        "*",
        "mirrored;sharded;tensor",
        "its loss divides a sum by the sum of weights, which in micro-batches of two samples cannot be told from a"
        " constant: give (sum, count), or larger micro-batches",
    ),
    (
        "ALBERT",
        "*",
        "pipeline, 1f1b on 3",
        "its repeated layers are one module with one set of weights, so that there are two blocks for three stages",
    ),
    (
        "RWKV",
        "*",
        "pipeline, 1f1b on 3",
        "in evaluation its layers write a state that they are given, so that they are one block of two for three"
        " stages; `use_cache=False` in the configuration lets each be a block",
    ),
    (
        "Gemma 4",
        "*",
        "tensor",
        "its last attention is called with other arguments than in the trial that proves its split: leave it whole with"
        " `tensor:whole=`",
    ),
    (
        "Llama with VeRA",
        "*",
        "pipeline, 1f1b",
        "its random projections are buffers of one module that all layers call, and could be written by any stage",
    ),
)
"""Models, forms and strategies, perhaps on a number of devices, that are refused, and why."""


def refusal(case: Case) -> str | None:
    """Why a case is refused; None where it must be equal."""
    for model, form, strategies, why in REFUSED:
        places = (case.strategy, f"{case.strategy} on {case.devices}")
        if matches(model, case.model) and matches(form, case.form) and any(matches(strategies, at) for at in places):
            return why
    return None
