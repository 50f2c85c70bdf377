"""Each private name of CPython does here what tutti uses it for."""

from __future__ import annotations

import gc
import random
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any
from weakref import ref

import pytest

from tutti import python_compat
from tutti.python_compat import LiveObjects, calling_frame, import_uncollected, local_variables

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


def test_the_words_of_the_global_generator_are_its_state() -> None:
    memory = python_compat.generator_memory
    assert type(memory) is not python_compat.PublicGeneratorState
    for each in (memory, python_compat.PublicGeneratorState()):
        _, state, _ = random.getstate()
        position, *words = struct.unpack("625I", each.raw)
        assert (*words, position) == state
        before, drawn = each.raw, random.random()
        assert each.raw != before
        each.raw = before
        assert random.random() == drawn


@pytest.mark.parametrize("others", [0, 300])
def test_holders_are_found_through_tuples(others: int) -> None:
    class Item:
        pass

    items = [Item() for _ in range(1 + others)]
    one, two, three = [items[0]], {"a": (items[0],)}, [[((items[0],),)]]
    found = python_compat.holders_of(items, 2)
    assert {id(one), id(two)} <= {*map(id, found)} and id(three[0]) not in map(id, found)
    assert id(three[0]) in map(id, python_compat.holders_of(items, 3))
    assert not any(isinstance(each, tuple) for each in found)


def test_live_objects_are_those_of_the_class_and_its_subclasses() -> None:
    class Base:
        def __init__(self, name: str) -> None:
            self.name = name

    class Derived(Base):
        pass

    bases, deriveds = LiveObjects(Base), LiveObjects(Derived)

    def names(found: LiveObjects[Base]) -> list[str]:
        return sorted(each.name for each in found.all())

    assert names(bases) == []
    _, derived = Base("first"), Derived("second")
    assert (names(bases), names(deriveds)) == (["first", "second"], ["second"])
    for generation in (0, 1, 2):
        made = [Base("third"), Derived("fourth")]
        gc.collect(generation)
        assert names(bases) == ["first", "fourth", "second", "third"] and names(deriveds) == ["fourth", "second"]
        del made
        assert (names(bases), names(deriveds)) == (["first", "second"], ["second"])
    assert derived.name == "second"


def test_live_objects_without_weak_references_are_found_too(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slotted:
        __slots__ = ("held",)

        def __init__(self) -> None:
            self.held = [1]

    found = LiveObjects(Slotted)
    made = [Slotted() for _ in range(3)]
    searched = list[int]()
    objects = gc.get_objects

    def search(generation: int) -> list[object]:
        searched.append(generation)
        return objects(generation)

    monkeypatch.setattr(gc, "get_objects", search)
    assert len(found.all()) == 3 and 2 in searched
    gc.disable()
    searched.clear()
    try:
        made.append(Slotted())
        assert len(found.all()) == 4
        made[1:3] = []
        assert sorted(map(id, found.all())) == sorted(map(id, made))
    finally:
        gc.enable()
    assert 2 not in searched, "all objects are searched again"


SEARCHING = """
import sys, threading
from tutti.python_compat import LiveObjects

class Held: pass

held, found, failed, searching = Held(), LiveObjects(Held), [], True

def build():
    while searching and not failed:
        try:
            tuple(number for number in range(300))
        except SystemError as error:
            failed.append(error)

sys.setswitchinterval(1e-5)
threads = [threading.Thread(target=build) for _ in range(3)]
for thread in threads:
    thread.start()
for _ in range(200):
    found._moves = ()  # a search of all generations
    assert held in found.all()
searching = False
for thread in threads:
    thread.join()
assert not failed, failed
"""


def test_other_threads_build_tuples_while_all_objects_are_searched() -> None:
    done = subprocess.run([sys.executable, "-c", SEARCHING], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


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


class Held:
    """An object that a function deletes."""


def test_what_a_function_deletes_after_its_variables_were_read_is_freed() -> None:
    held = Held()
    known = ref(held)
    assert any(value is held for value in local_variables(sys._getframe()).values())
    del held
    assert known() is None


def test_variables_that_a_script_has_asked_for_stay() -> None:
    held = Held()
    asked: dict[str, Any] = locals()
    assert any(value is held for value in local_variables(sys._getframe()).values())
    assert asked["held"] is held


def test_every_name_is_touched() -> None:
    assert set(python_compat.__all__) == {
        "LiveObjects",
        "PublicGeneratorState",
        "calling_frame",
        "forget_exit_handlers",
        "generator_memory",
        "holders_of",
        "import_uncollected",
        "join_threads",
        "local_variables",
        "run_exit_handlers",
    }
