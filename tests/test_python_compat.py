"""Each private name of CPython does here what tutti uses it for."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path

import pytest

from tutti import python_compat
from tutti.python_compat import calling_frame, import_uncollected, live_objects

ENDING = """
import atexit, os, sys, time
from concurrent.futures import ThreadPoolExecutor
from tutti.python_compat import forget_exit_handlers, join_threads, run_exit_handlers

atexit.register(print, "the parent's")
forget_exit_handlers()
atexit.register(print, "handler")
ThreadPoolExecutor().submit(lambda: (time.sleep(0.1), print("thread")))
join_threads()
run_exit_handlers()
run_exit_handlers()
print("torch" in sys.modules, flush=True)
os._exit(0)
"""


def test_a_program_ends_in_pythons_order_and_without_torch() -> None:
    done = subprocess.run([sys.executable, "-c", ENDING], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["thread", "handler", "False"]


def test_the_calling_frame_is_its_callers() -> None:
    def inner() -> str:
        return calling_frame(1).f_code.co_name

    assert inner() == "test_the_calling_frame_is_its_callers"


def test_live_objects_are_those_of_the_class_and_its_subclasses() -> None:
    class Base:
        pass

    class Derived(Base):
        pass

    assert live_objects(Base) == []
    base, derived = Base(), Derived()
    assert sorted(map(id, live_objects(Base))) == sorted(map(id, (base, derived)))
    assert live_objects(Derived) == [derived]


@pytest.mark.parametrize("before", [True, False])
def test_no_garbage_is_collected_while_a_module_is_imported(
    before: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "told_uncollected.py").write_text("raise OSError")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(gc, "isenabled", lambda: before)
    collecting = []
    monkeypatch.setattr(gc, "disable", lambda: collecting.append(False))
    monkeypatch.setattr(gc, "enable", lambda: collecting.append(True))
    with pytest.raises(OSError):
        import_uncollected(["told_uncollected"])
    assert collecting == [False, True][: 1 + before]


def test_every_name_is_touched() -> None:
    assert set(python_compat.__all__) == {
        "calling_frame",
        "forget_exit_handlers",
        "import_uncollected",
        "join_threads",
        "live_objects",
        "run_exit_handlers",
    }
