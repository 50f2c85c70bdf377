"""How often each fault is played, and what came out of it.

With ``FAULT_RUNS`` so many times under every strategy, with other ranks and steps. Without, as in ``make test``, once,
and under a third of the strategies where a fault has many: other ones for other faults.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from zlib import crc32

import pytest

from tests.faults.figures import Figures

RUNS = int(os.environ.get("FAULT_RUNS", "0"))
MANY = 6


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
    """Two thirds of the strategies of each fault that has many."""
    faults: dict[str, list[pytest.Item]] = {}
    for item in items:
        if {"strategy", "member"} & item.callspec.params.keys():  # type: ignore[attr-defined]
            faults.setdefault(item.nodeid.partition("[")[0], []).append(item)
    return [
        item
        for name, each in faults.items()
        for number, item in enumerate(each)
        if len(each) >= MANY and (number + crc32(name.encode())) % 3
    ]


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
