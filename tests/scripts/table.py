"""Which cases there are: every script under every strategy on one, two and three devices.

``python -m tests.scripts.table`` writes ``pairwise.txt``, the part of them that ``make test`` plays.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Literal

from tests.scripts.oracle import SYNCHRONOUS, Algorithm

HERE = Path(__file__).parent
PAIRWISE = HERE / "pairwise.txt"
Grid = Mapping[int, tuple[int, ...]]
"""Numbers of devices, and with how many logical workers on each; the first number is that of the data ranks."""

_DATA: Grid = {1: (1, 3), 2: (2, 3), 3: (3,)}
_MODEL: Grid = {1: (1,), 2: (1, 3), 3: (1,)}


@dataclass(frozen=True)
class Row:
    """A strategy of the table.

    Attributes:
        text: as ``tutti.prepare`` takes it.
        group: what devices share: ``data``, each layer of one ``model``, its ``stages``, or nothing (``local``).
        grid: devices and logical workers.
        algorithm: what the oracle plays.
        micro: into how many micro-batches a worker's share is cut, where the script does not say so itself (MICRO).
    """

    text: str
    group: str
    grid: Grid
    algorithm: Algorithm = SYNCHRONOUS
    micro: int = 0


STRATEGIES = {
    "single": Row("single", "data", {1: (1, 3)}),
    "mirrored": Row("mirrored", "data", _DATA),
    "mirrored, native": Row("mirrored:algorithm=native", "data", {2: (2, 3), 3: (3,)}),
    "sharded, stage 1": Row("sharded:stage=1", "data", _DATA),
    "sharded, stage 2": Row("sharded:stage=2", "data", _DATA),
    "sharded": Row("sharded", "data", _DATA),
    "central_storage": Row("central_storage", "data", _DATA),
    "tensor": Row("tensor:least=1", "model", _MODEL),
    "pipeline": Row("pipeline", "stages", _MODEL, micro=2),
    "model_parallel": Row("model_parallel", "stages", _MODEL),
    "local_sgd": Row("local_sgd:period=2", "local", _DATA, Algorithm(period=2)),
    "diloco": Row("diloco:period=2", "local", _DATA, Algorithm(period=2, outer=(0.7, 0.9))),
    "parameter_server": Row("parameter_server", "data", _DATA),
    "hybrid": Row("hybrid:tensor=2,least=1", "model", {2: (1,), 4: (2,)}),
    "hybrid, stages": Row("hybrid:stages=2", "stages", {2: (1,), 4: (2,)}),
}


@dataclass(frozen=True)
class Case:
    """A script under a strategy, on so many devices with so many logical workers."""

    script: str
    strategy: str
    devices: int
    workers: int

    def __str__(self) -> str:
        return f"{self.script} | {self.strategy} | {self.devices} | {self.workers}"

    @property
    def data_ranks(self) -> int:
        return STRATEGIES[self.strategy].grid[self.devices][0]

    @property
    def spare(self) -> bool:
        """Whether there are more logical workers than data ranks, so that a rank has several micro-batches a step."""
        return self.workers > self.data_ranks

    @property
    def micro(self) -> int:
        """Into how many micro-batches the strategy cuts a worker's share; 0 where it leaves that to the script.

        A loop of the script's own has nothing that micro-batches could overlap.
        """
        own = hasattr(import_module(f"tests.scripts.{self.script}"), "MICRO") or form(self.script) == "loop"
        return 0 if own else STRATEGIES[self.strategy].micro

    @property
    def specification(self) -> str:
        """The strategy as ``tutti.prepare`` takes it."""
        return STRATEGIES[self.strategy].text + f":micro_batches={self.micro}" * bool(self.micro)

    @classmethod
    def parse(cls, line: str) -> Case:
        script, strategy, devices, workers = (part.strip() for part in line.split("|"))
        return cls(script, strategy, int(devices), int(workers))


@cache
def scripts() -> list[str]:
    """All scripts, by name."""
    return sorted(path.stem for path in HERE.glob("script_*.py"))


@cache
def form(script: str) -> Literal["step", "loop"]:
    """Whether a script hands its batches to ``run.step``, or has a loop of its own."""
    text = (HERE / f"{script}.py").read_text(encoding="utf-8")
    return "loop" if "run.microbatches(" in text else "step"


@cache
def whole() -> list[Case]:
    """All cases; worlds of one size one after the other."""
    found = []
    for script in scripts():
        one_each = getattr(import_module(f"tests.scripts.{script}"), "ONE_EACH", False)
        for strategy, row in STRATEGIES.items():
            for devices, numbers in row.grid.items():
                cases = [Case(script, strategy, devices, workers) for workers in numbers]
                found += [case for case in cases if not (one_each and case.spare)]
    return sorted(found, key=lambda case: case.devices)


def able(script: str) -> list[Case]:
    """The cases that a script may stand for in ``make test``: a loop of its own needs one model for all workers."""
    groups = {"step": ("data", "model", "stages", "local"), "loop": ("data", "model", "stages")}[form(script)]
    return [case for case in whole() if case.script == script and STRATEGIES[case.strategy].group in groups]


def covering() -> list[Case]:
    """Each script once, spread evenly over strategies, devices and workers: every such triple has one if any can."""
    draw = random.Random(0)
    chosen: list[Case] = []
    used: Counter[tuple[str, int, int]] = Counter()
    strategies: Counter[str] = Counter()
    for script in sorted(scripts()):
        cases = able(script)
        draw.shuffle(cases)
        best = min(cases, key=lambda c: (used[c.strategy, c.devices, c.workers], strategies[c.strategy]))
        used[best.strategy, best.devices, best.workers] += 1
        strategies[best.strategy] += 1
        chosen.append(best)
    return sorted(chosen, key=lambda case: (case.devices, str(case)))


def pairwise() -> list[Case]:
    """The committed covering table."""
    return [Case.parse(line) for line in PAIRWISE.read_text(encoding="utf-8").splitlines() if "|" in line]


def matches(pattern: str, text: str) -> bool:
    """Whether one of the patterns between ``;`` is ``text``'s."""
    return any(fnmatchcase(text, each.strip()) for each in pattern.split(";"))


if __name__ == "__main__":
    PAIRWISE.write_text("".join(f"{case}\n" for case in covering()), encoding="utf-8")
