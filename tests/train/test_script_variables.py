"""Variables of running functions are read without being kept."""

from __future__ import annotations

import sys
from typing import Any
from weakref import ref

from tutti.python_compat import local_variables


class Held:
    """An object that a script deletes."""


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
