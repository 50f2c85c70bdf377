"""A forked process gives its result, its exception or how it ended to the process that asked."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

import pytest

from tutti.errors import TuttiError, UsageError
from tutti.launcher.isolated import call_forked


def test_the_result_is_that_of_another_process() -> None:
    where, value = call_forked(lambda value: (os.getpid(), value + 1), 1)
    assert where != os.getpid() and value == 2


def fails() -> None:
    raise UsageError("it does not fit", where="--devices", remedy="take two")


def test_an_exception_comes_as_it_was_raised() -> None:
    with pytest.raises(UsageError, match=r"it does not fit \(--devices\)\. Take two\.") as caught:
        call_forked(fails)
    assert (caught.value.where, caught.value.remedy) == ("--devices", "take two")
    assert "in fails" in caught.value.__notes__[0]


def raises_an_exception_of_its_own() -> None:
    class Own(Exception):
        pass

    raise Own("of the model")


def raises_what_cannot_be_made_again() -> None:
    raise OfTwo(1, 2)


class OfTwo(Exception):
    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (raises_an_exception_of_its_own, r"failed \(.*test_isolated.py:\d+\): Own: of the model\.$"),
        (raises_what_cannot_be_made_again, r"failed \(.*test_isolated.py:\d+\): OfTwo: 1 and 2\.$"),
        (threading.Lock, "failed: its result cannot be sent: cannot pickle '_thread.lock' object"),
    ],
)
def test_an_answer_that_cannot_be_pickled_is_told_in_words(function: Callable[[], object], told: str) -> None:
    with pytest.raises(TuttiError, match=told):
        call_forked(function)


def test_a_killed_process_is_named() -> None:
    with pytest.raises(TuttiError, match="ended by signal 9"):
        call_forked(lambda: os.kill(os.getpid(), signal.SIGKILL))
