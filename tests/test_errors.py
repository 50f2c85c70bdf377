"""Errors: the sentence that people read, and the exit code that scripts read."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tutti import errors
from tutti.errors import ExitCode, MismatchError, TuttiError, did_you_mean, script_line

CODES = {
    "DONE": 0,
    "UNEXPECTED": 1,
    "USAGE": 2,
    "DATA": 3,
    "CHECKPOINT": 4,
    "PEER": 5,
    "NON_FINITE": 6,
    "AUTHENTICATION": 7,
    "DISK": 8,
    "THRESHOLD": 9,
    "PREEMPTED": 75,
    "INTERRUPTED": 130,
    "TERMINATED": 143,
}
RAISED = {
    "UsageError": 2,
    "DataError": 3,
    "LoaderError": 3,
    "PeerError": 5,
    "MismatchError": 5,
    "NonFiniteError": 6,
    "DiskError": 8,
    "Preempted": 75,
    "Interrupted": 130,
}


def test_exit_codes_are_those_that_are_documented() -> None:
    assert {code.name: int(code) for code in ExitCode} == CODES
    for name, code in RAISED.items():
        assert getattr(errors, name)("what").exit_code == code


def test_every_error_has_an_exit_code_of_its_own() -> None:
    kinds = [k for k in vars(errors).values() if isinstance(k, type) and issubclass(k, TuttiError)]
    assert len(kinds) >= 9
    for kind in kinds:
        assert (kind is TuttiError) == (kind.exit_code == ExitCode.UNEXPECTED), kind
    assert issubclass(MismatchError, errors.PeerError)


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        ({}, "it broke."),
        ({"where": "rank 1"}, "it broke (rank 1)."),
        ({"why": "no space."}, "it broke: no space."),
        ({"remedy": "free some."}, "it broke. Free some."),
        ({"where": "rank 1", "why": "no space", "remedy": "free some"}, "it broke (rank 1): no space. Free some."),
    ],
)
def test_what_where_why_and_remedy_make_sentences(parts: dict[str, str], text: str) -> None:
    for what in ("it broke", "it broke."):
        error = TuttiError(what, **parts)
        assert str(error) == text
        assert (error.where, error.why, error.remedy) == tuple(parts.get(k) for k in ("where", "why", "remedy"))


def test_the_nearest_name_is_named_only_if_one_is_near() -> None:
    choices = ["single", "mirrored", "local_sgd"]
    assert did_you_mean("mirored", choices).startswith("did you mean 'mirrored'?")
    assert did_you_mean("localsgd", choices).startswith("did you mean 'local_sgd'?")
    assert did_you_mean("qqqq", choices) == "choices: local_sgd, mirrored, single"


def test_fragmented_memory_of_a_device_is_advised_about() -> None:
    class OutOfMemoryError(RuntimeError):
        """Stands for PyTorch's, which only a device raises."""

    said = "out of memory. Tried to allocate 2 GiB. 3 GiB is allocated by PyTorch, and 4 GiB is reserved by PyTorch but"
    found, plain = errors.no_memory(OutOfMemoryError(said)), errors.no_memory(MemoryError())
    assert found is not None and "expandable_segments" in str(found.remedy)
    assert plain is not None and "expandable_segments" not in str(plain.remedy)


@pytest.mark.parametrize("folder", ["tutti", "torch"])
def test_a_script_in_a_folder_named_like_a_package_has_its_line(folder: str) -> None:
    file = f"/srv/me/{folder}/train.py"
    names: dict[str, Any] = {"line": errors.script_line}
    exec(compile("found = line()\ndef fails():\n    raise ValueError", file, "exec"), names)
    assert names["found"] == f"{file}:1"
    with pytest.raises(ValueError) as caught:
        names["fails"]()
    assert errors.script_line_of(caught.value) == f"{file}:3"


def test_the_line_of_the_users_own_code_is_not_that_of_a_library() -> None:
    file = "/srv/me/data.py"
    names: dict[str, Any] = {"loads": json.loads}
    exec(compile("def read():\n    return loads('{')", file, "exec"), names)
    with pytest.raises(ValueError) as caught:
        names["read"]()
    assert errors.own_line_of(caught.value) == f"{file}:2"
    with pytest.raises(ValueError) as caught:
        json.loads("{")
    caught.value.__traceback__ = caught.value.__traceback__.tb_next  # type: ignore[union-attr]
    assert errors.own_line_of(caught.value) is None


def test_the_line_of_a_loop_around_tqdm_is_the_script_s() -> None:
    bar, places = pytest.importorskip("tqdm").tqdm, list[str]()
    names = {"places": places, "script_line": script_line}
    source = "def items():\n    places.append(script_line())\n    yield 1\n"
    exec(compile(source, errors.__file__, "exec"), names)
    for _ in bar(names["items"](), disable=True):
        pass
    assert [place.rpartition(":")[0] for place in places] == [__file__]
