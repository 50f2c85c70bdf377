"""Settings of all tests, made before torch is loaded."""

from __future__ import annotations

import gc
import importlib
import os
import sys
from collections.abc import Generator
from contextlib import suppress
from pathlib import Path

import pytest
from _pytest.doctest import DoctestModule
from hypothesis import HealthCheck, settings

from tests.covering import every_value

# Threads of OpenMP that wait for work spin, and with several pytest workers they take the cores from all that compute.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# Beside other tests an example may take any time.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

# Until all is collected, a garbage collection frees nothing, and a second of them would be made.
gc.disable()
_OTHER_TABLES = ("full", "contract", "scripts", "fuzz", "gpu", "engines", "models")

# Of processes that fork for tests, and to be imported there alone.
collect_ignore = ["forkserver_main.py", "rank_server.py"]


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """Let garbage collections look at what tests make alone, not at all that was collected."""
    # What is garbage by now is small, and to look for it among all that was collected takes half a second.
    gc.freeze()
    # As in the ranks of worlds.py: with little else alive Python would look for garbage all the time.
    gc.set_threshold(20_000, 50, 100)
    gc.enable()


class _Doctests:
    """Collects doctests from files that have some: to search all docstrings of the others takes a second and a half."""

    @pytest.hookimpl(wrapper=True)
    def pytest_collect_file(self, file_path: Path) -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
        collectors = yield
        if file_path.suffix != ".py" or ">>>" in file_path.read_text(encoding="utf-8"):
            return collectors
        return [each for each in collectors if not isinstance(each, DoctestModule)]


def pytest_configure(config: pytest.Config) -> None:
    # A conftest's own hooks see the files of its folder alone, and most doctests are in src.
    config.pluginmanager.register(_Doctests())


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark cases of a test as ``full`` without which each of its parameters still has every value."""
    tests: dict[str, list[tuple[pytest.Item, tuple[str, ...]]]] = {}
    for item in items:
        if hasattr(item, "callspec") and not any(item.get_closest_marker(name) for name in _OTHER_TABLES):
            case = tuple(map(repr, item.callspec.params.values()))
            tests.setdefault(item.nodeid.partition("[")[0], []).append((item, case))
    for cases in tests.values():
        chosen = every_value([case for _, case in cases])
        for number, (item, _) in enumerate(cases):
            if number not in chosen:
                item.add_marker(pytest.mark.full)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Let each worker of pytest-xdist begin with another part of the test modules, which all of them will import.

    pytest rewrites the assertions of a module when it imports it, which takes half of the time of a collection, and
    keeps the result in a file. All workers in one order would each rewrite all modules.
    """
    worker = getattr(session.config, "workerinput", None)
    if worker is None or not all(isinstance(arg, str) and Path(arg).is_dir() for arg in session.config.args):
        return
    sys.dont_write_bytecode = False
    root = session.config.rootpath
    modules = sorted(path.relative_to(root) for path in (root / "tests").rglob("test_*.py"))
    for path in modules[int(worker["workerid"].removeprefix("gw")) :: int(worker["workercount"])]:
        # What is wrong with it, or missing, collecting says.
        with suppress(Exception, pytest.skip.Exception):
            importlib.import_module(".".join(path.with_suffix("").parts))
