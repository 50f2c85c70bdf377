"""How often each fault is played: once, or ``FAULT_RUNS`` times with other ranks and steps; and what came out of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.faults.figures import Figures

RUNS = int(os.environ.get("FAULT_RUNS", "1"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--figures", metavar="FILE", help="write what the fault tests measured, by row, as JSON")


def pytest_configure(config: pytest.Config) -> None:
    file = config.getoption("--figures", default=None)
    if file and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Figures(Path(file), RUNS))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every fault once, then every fault again: a suite that is cut short has played all of them equally often."""
    items.sort(key=lambda item: item.callspec.params.get("seed", 0) if hasattr(item, "callspec") else 0)


@pytest.fixture(scope="session")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all processes of this run of pytest share."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(autouse=True, params=range(RUNS), ids="seed{}".format)
def seed(request: pytest.FixtureRequest) -> int:
    """What a test draws its rank and step from."""
    mark = request.node.get_closest_marker("row")
    request.node.user_properties.append(("rows", list(mark.args) if mark else []))
    number: int = request.param
    return number
