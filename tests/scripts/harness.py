"""One case: a script under a strategy on some devices, and what came of it."""

from __future__ import annotations

import functools
import os
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import tutti
from tests import worlds
from tests.scripts import oracle
from tests.scripts.table import STRATEGIES, Case
from tutti.comm.partition import even_share
from tutti.errors import ExitCode, TuttiError
from tutti.nn.swap import parameters

TOLERANCE = 1e-10
SECONDS = float(os.environ.get("SCRIPTS_SECONDS", "8"))
"""How long ranks wait for each other, a rank that was refused included; more (``SCRIPTS_SECONDS=60``) on a machine that
other work keeps busy, where ranks need longer than the default to start or to compile.
"""
Arrays = dict[str, NDArray[Any]]


@dataclass
class Outcome:
    """How a script ended on one rank.

    ``state``: its result, or the parameters at the refusal where an update had been made.
    """

    kind: str
    state: Arrays | None = None
    text: str = ""
    what: str = ""
    remedy: str | None = None
    code: int = 0
    updates: int = 0


@dataclass
class Verdict:
    """``equal``, ``refused`` or ``wrong``, and why."""

    kind: str
    text: str = ""
    difference: float = 0.0


@dataclass
class Reference:
    """What a case's result must be, as each logical worker has it, and the parameters that a refusal may leave."""

    results: list[Arrays]
    history: list[Arrays] = field(default_factory=list)


def load(name: str) -> ModuleType:
    """The module of a script."""
    return import_module(f"tests.scripts.{name}")


def arrays(state: dict[str, Any]) -> Arrays:
    return {name: torch.as_tensor(value).detach().cpu().numpy().copy() for name, value in state.items()}


def play(name: str, strategy: str, workers: int) -> Outcome:
    """A script on this rank."""
    runs: list[Any] = []

    def prepare(*arguments: Any, **options: Any) -> Any:
        runs.append(tutti.prepare(*arguments, strategy=strategy, workers=workers, seed=0, **options))
        return runs[-1]

    torch.manual_seed(0)
    try:
        return Outcome("ended", arrays(load(name).script(prepare)))
    except TuttiError as error:
        updates = max((run.updates for run in runs), default=0)
        state = None
        if updates and error.exit_code in (ExitCode.USAGE, ExitCode.DATA):
            try:
                state = arrays(runs[-1].state())
            except TuttiError:
                # The other ranks have not come here: this rank's own part of the model.
                state = arrays(dict(parameters(runs[-1].replica.parts)))
        kind, text = "refused", f"{type(error).__name__}: {error}"
        return Outcome(kind, state, text, error.what, error.remedy, int(error.exit_code), updates)
    except Exception:
        return Outcome("raw", text=traceback.format_exc(limit=-6))


def play_plain(name: str) -> Arrays:
    """A script in plain PyTorch."""
    module = load(name)
    torch.manual_seed(0)

    def batches(epoch: int, data: Any = None) -> Iterator[Any]:
        return oracle.global_batches(module.dataset() if data is None else data, module.BATCH, epoch)

    return arrays(module.plain(batches))


def play_oracle(name: str, workers: int, algorithm: oracle.Algorithm, micro: int) -> Reference:
    """A script with N logical workers in plain PyTorch."""
    played = oracle.play(load(name).script, workers, algorithm, micro)
    return Reference([arrays(result) for result in played.results], [arrays(state) for state in played.history])


@functools.cache
def reference(name: str, workers: int, algorithm: oracle.Algorithm, micro: int) -> Reference:
    """The oracle's result; where one worker draws nothing, plain PyTorch's."""
    [found] = worlds.run(1, play_oracle, name=name, workers=workers, algorithm=algorithm, micro=micro)
    if plain_is_the_oracle(name, workers, algorithm, micro):
        found.results = worlds.run(1, play_plain, name=name)
    return found


def plain_is_the_oracle(name: str, workers: int, algorithm: oracle.Algorithm, micro: int) -> bool:
    return workers == 1 and algorithm.outer is None and not micro and not getattr(load(name), "RANDOM", False)


def difference(got: Arrays, want: Arrays) -> float:
    """max|Δ| relative to max(1, max|p|); infinite where names or shapes differ."""
    if got.keys() != want.keys() or any(got[n].shape != want[n].shape for n in want):
        return float("inf")
    floats = [v for v in want.values() if v.dtype.kind in "fiub" and v.size]
    scale = max(1.0, *(float(np.abs(v.astype(float)).max()) for v in floats)) if floats else 1.0
    each = [float(np.abs(got[n].astype(float) - want[n].astype(float)).max()) for n in want if want[n].size]
    found = max(each, default=0.0) / scale
    return found if found == found else float("inf")


def judge(outcomes: Sequence[Outcome], want: Reference, data_ranks: int | None = None) -> Verdict:
    """What the ranks' outcomes come to. There is no third way to end besides ``equal`` and ``refused``.

    What a script itself reads of its model may differ between workers that train alone: a rank's result is then that of
    one of the workers that it plays. ``data_ranks``: as many as ranks where every rank has samples of its own.
    """
    for rank, outcome in enumerate(outcomes):
        if outcome.kind == "raw":
            return Verdict("wrong", f"rank {rank} ended with an error that is not tutti's\n{outcome.text}")
    refused = [outcome for outcome in outcomes if outcome.kind == "refused"]
    first = [outcome for outcome in refused if outcome.code in (ExitCode.USAGE, ExitCode.DATA)]
    if first and len(refused) == len(outcomes):
        # The others waited in vain for a rank that was refused: under a launcher they end with it.
        return _judge_refusal([outcome for outcome in refused if outcome.code != ExitCode.PEER], want)
    if len(refused) not in (0, len(outcomes)):
        return Verdict("wrong", f"{len(refused)} of {len(outcomes)} ranks refused: {refused[0].text}")
    if refused:
        return _judge_refusal(refused, want)
    if not want.results:
        return Verdict("wrong", "it ended, and there is nothing that it could be equal to")
    replica = len(outcomes) // (data_ranks or len(outcomes))
    mine = [
        even_share(len(want.results), data_ranks or len(outcomes), rank // replica) for rank in range(len(outcomes))
    ]
    nearest = [
        min((want.results[w] for w in workers), key=lambda result: difference(outcome.state or {}, result))
        for outcome, workers in zip(outcomes, mine, strict=True)
    ]
    differences = [difference(o.state or {}, result) for o, result in zip(outcomes, nearest, strict=True)]
    if max(differences) <= TOLERANCE:
        return Verdict("equal", difference=max(differences))
    return Verdict("wrong", f"differs from the oracle: {_where(outcomes, nearest)}", max(differences))


def _judge_refusal(refused: Sequence[Outcome], want: Reference) -> Verdict:
    """A refusal names a way out, is a matter of usage or data, and comes before the first update that is wrong."""
    for rank, outcome in enumerate(refused):
        if outcome.code not in (ExitCode.USAGE, ExitCode.DATA):
            return Verdict("wrong", f"rank {rank} ended with exit code {outcome.code}: {outcome.text}")
        if not outcome.remedy:
            return Verdict("wrong", f"rank {rank} was refused without a remedy: {outcome.text}")
        if "outside of optimizer.step()" in outcome.text and outcome.updates <= 1:
            # Not an update that is wrong, but the script's own write, which ranks with one copy have all made to it.
            continue
        if outcome.state is not None:
            state, names = outcome.state, outcome.state.keys() & want.history[0].keys()
            own = {name: state[name] for name in names}
            if not names or all(difference(own, {n: past[n] for n in names}) > TOLERANCE for past in want.history):
                return Verdict("wrong", f"rank {rank} was refused after a wrong update: {outcome.text}")
    if len({outcome.updates for outcome in refused}) > 1:
        return Verdict("wrong", f"ranks were refused after different updates: {refused[0].text}")
    return Verdict("refused", refused[0].text)


def _where(outcomes: Sequence[Outcome], nearest: Sequence[Arrays]) -> str:
    """Which tensors of which ranks differ, and by how much."""
    lines = []
    for rank, (outcome, want) in enumerate(zip(outcomes, nearest, strict=True)):
        got = outcome.state or {}
        if got.keys() != want.keys():
            lines.append(f"rank {rank}: names {sorted(got.keys() ^ want.keys())}")
            continue
        far = {n: difference({n: got[n]}, {n: want[n]}) for n in want}
        worst = sorted((n for n in far if far[n] > TOLERANCE), key=lambda n: -far[n])
        lines += [f"rank {rank}: " + ", ".join(f"{n} {far[n]:.1e}" for n in worst[:4])] if worst else []
    return "; ".join(lines)


def check(case: Case) -> Verdict:
    """Play a case in the pool. What hangs or kills a rank is wrong."""
    want = reference(case.script, case.workers, STRATEGIES[case.strategy].algorithm, case.micro)
    try:
        outcomes = worlds.run_within(
            SECONDS, case.devices, play, name=case.script, strategy=case.specification, workers=case.workers
        )
    except (worlds.RankError, TimeoutError, EOFError, BrokenPipeError, OSError) as error:
        return Verdict("wrong", f"the world broke: {error}")
    verdict = judge(outcomes, want, case.data_ranks)
    if verdict.kind != "equal":
        # Ranks that left in the middle of a step may have messages under way.
        worlds.forget(case.devices)
    return verdict
