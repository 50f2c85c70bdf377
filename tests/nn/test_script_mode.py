"""The object whose method a frame runs, as function modes find it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import FrameType
from typing import Any

from tutti.nn.script_mode import self_of


def present_frame() -> FrameType:
    frame = inspect.currentframe()
    assert frame is not None and frame.f_back is not None
    return frame.f_back


def found(call: Callable[..., Any]) -> Any:
    """Return a function ``step`` in whose frame ``self_of`` is called, and which says that it wraps ``call``."""

    @functools.wraps(call)
    def step(optimizer: Any) -> Any:
        return self_of(present_frame())

    return step


class Ended:
    """A callable object, which has no code of its own."""

    def __call__(self, optimizer: Any) -> None:
        """Do nothing."""


class Optimizer:
    step = found(Ended())


def test_a_step_that_wraps_a_callable_object_is_a_method() -> None:
    optimizer = Optimizer()
    assert optimizer.step() is optimizer


def test_a_function_named_step_is_no_method() -> None:
    def step(batch: Any) -> Any:
        return self_of(present_frame())

    assert step(Optimizer()) is None
