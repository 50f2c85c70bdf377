"""How often each fault is played, and what came out of it.

With ``FAULT_RUNS`` so many times under every strategy, with other ranks and steps. Without, as in ``make test``, once,
and under a fifth of the strategies where a fault has many: other ones for other faults. Of these again few: each test
with every parameter of its own, each strategy, mode and number of ranks in some test.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

from tests.covering import fewest
from tests.faults.figures import Figures

RUNS = int(os.environ.get("FAULT_RUNS", "0"))
MANY = 6
Told = tuple[Any, ...]
# Parameters that tests of one row share; the others mean something in their own test alone.
COMMON = {"strategy": "strategy", "member": "strategy", "mode": "mode"}
COMMON |= dict.fromkeys(("devices", "ranks", "size"), "ranks")
PERIOD = r":(period|post)=\d+"
"""Tests of local SGD and DiLoCo choose a period that fits their steps."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--figures", metavar="FILE", help="write what the fault tests measured, by row, as JSON")


def pytest_configure(config: pytest.Config) -> None:
    file = config.getoption("--figures", default=None)
    if file and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Figures(Path(file), max(RUNS, 1)))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Every fault once, then every fault again: a suite that is cut short has played all of them equally often."""
    items.sort(key=lambda item: item.callspec.params.get("seed", 0) if hasattr(item, "callspec") else 0)
    left = [] if RUNS else left_out([item for item in items if item.get_closest_marker("faults")])
    items[:] = [item for item in items if item not in left]
    config.hook.pytest_deselected(items=left)


def left_out(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Four fifths of the strategies of each fault that has many; of the rest all but few that show the same."""
    faults: dict[str, list[pytest.Item]] = {}
    for item in items:
        faults.setdefault(item.nodeid.partition("[")[0], []).append(item)
    thin = [
        item
        for name, each in faults.items()
        for number, item in enumerate(each)
        if not (len(each) >= MANY and by_strategy(item) and (number + crc32(name.encode())) % 5)
    ]
    kept = {thin[number] for number in fewest([told(item) for item in thin])}
    return [item for item in items if item not in kept]


def by_strategy(item: pytest.Item) -> bool:
    return bool({"strategy", "member"} & item.callspec.params.keys())  # type: ignore[attr-defined]


def told(item: pytest.Item) -> set[Told]:
    """What a run of a fault shows: the fault, its own parameters, and those that it shares with other faults."""
    function = item.nodeid.partition("[")[0]
    shown: set[Told] = {(function,)}
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    return shown | {
        (COMMON[name], re.sub(PERIOD, "", str(getattr(value, "strategy", value))))
        if name in COMMON
        else (function, name, str(value))
        for name, value in parameters.items()
        if name != "seed"
    }


@pytest.fixture(scope="session")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all processes of this run of pytest share."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(autouse=True, params=range(max(RUNS, 1)), ids="seed{}".format)
def seed(request: pytest.FixtureRequest) -> int:
    """What a test draws its rank and step from."""
    mark = request.node.get_closest_marker("row")
    request.node.user_properties.append(("rows", list(mark.args) if mark else []))
    number: int = request.param
    return number
