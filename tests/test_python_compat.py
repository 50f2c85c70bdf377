"""Each private name of CPython does here what tutti uses it for."""

from __future__ import annotations

import subprocess
import sys

from tutti import python_compat
from tutti.python_compat import calling_frame, live_objects

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


def test_every_name_is_touched() -> None:
    assert set(python_compat.__all__) == {
        "calling_frame",
        "forget_exit_handlers",
        "join_threads",
        "live_objects",
        "run_exit_handlers",
    }
