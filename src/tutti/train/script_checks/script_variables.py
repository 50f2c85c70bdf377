"""Read the values that the variables of a running script hold, and the constants of its code."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from types import FrameType
from typing import Any

from tutti.errors import is_script_file
from tutti.python_compat import calling_frame, local_variables
from tutti.train.script_checks.python_state import is_of_script

_FEW = 64
"""Most elements of a container that is searched (a guess)."""
_CONTAINERS = (list, tuple, dict, deque)


def script_values() -> Iterator[Any]:
    """Yield the values of the variables of the script's functions that are running, and of what these hold.

    Yielded are local, enclosing and global variables, and one level deep the elements of small containers and the
    attributes of objects of the script's classes.
    """
    frame: FrameType | None = calling_frame(1)
    seen = set[int]()
    of_script = dict[type, bool]()
    while frame is not None:
        if is_script_file(frame.f_code.co_filename):
            values = list(local_variables(frame).values())
            if id(frame.f_globals) not in seen:
                seen.add(id(frame.f_globals))
                values += frame.f_globals.values()
            for value in values:
                yield value
                kind = type(value)
                if kind in _CONTAINERS:
                    if len(value) <= _FEW:
                        yield from list(value.values() if kind is dict else value)
                    continue
                if kind not in of_script:
                    of_script[kind] = is_of_script(kind)
                if of_script[kind]:
                    yield from list(getattr(value, "__dict__", {}).values())
        frame = frame.f_back


def script_constants() -> tuple[Any, ...]:
    """Return the constants in the code of the innermost function of the script that is running; none outside of one."""
    frame: FrameType | None = calling_frame(1)
    while frame is not None:
        if is_script_file(frame.f_code.co_filename):
            return frame.f_code.co_consts
        frame = frame.f_back
    return ()
