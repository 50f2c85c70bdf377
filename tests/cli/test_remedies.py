"""No remedy is itself refused: each that names an option is carried out, and the command then gets further."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.test_refusals import REFUSALS
from tutti.cli import train_command as command
from tutti.cli.app import main

MORE = [
    ("train digits --devices 3 --workers 2 --strategy sharded", 2, "2 workers"),
    ("train digits --devices 6 --strategy model_parallel:stages=2 --workers 2", 2, "2 workers"),
    ("train digits --devices 3 --strategy tensor:tensor=2", 2, "cannot hold"),
    ("train digits --devices 3 --strategy model_parallel:stages=2", 2, "cannot hold"),
    ("train digits --devices 2 --strategy sharded --reproducible", 2, "not reproducible"),
    ("train digits --devices 2 --strategy sharded --lr-scale adascale --optimizer sgd:lr=0.1", 2, "cannot be combined"),
    ("train digits --devices 4 --batch-size 3", 2, "less than one sample"),
    ("train digits --reproducible --threads 2", 2, "cannot be combined"),
    ("train digits --strategy parameter_server:mode=async --ema 0.9 --devices 2", 2, "--ema cannot be combined"),
]
CASES = [(line, message) for line, code, message in [*REFUSALS, *MORE] if line.startswith("train ") and code == 2]

# What a remedy advises, and what becomes of the words of a command line. A number may be given as "or more".
_FLAG = re.compile(r"(?<!\()(?P<flag>--[a-z][a-z-]+) (?P<value>[a-z0-9_:=+]+)(?=[ ,;.]|$)")
_WORDS = {"or", "and", "is", "requires", "away", "alone", "within"}
_MEANT = re.compile(r"[Dd]id you mean '(?P<near>[^']+)'")
_OPTION = re.compile(r"[Dd]id you mean (?P<near>--[a-z-]+)\?")
_DEVICES = re.compile(r"[Tt]ake (?:a multiple of )?(?P<number>\d+) devices")
_LEAVE = re.compile(r"[Ll]eave out (?P<flag>--[a-z-]+)")
_NAMED = re.compile(r"--[a-z][a-z-]+|\b[a-z_]+\b")


def put(words: list[str], flag: str, value: str) -> list[str]:
    if flag in words:
        at = words.index(flag)
        taken = at + 1 < len(words) and not words[at + 1].startswith("--")
        return [*words[: at + 1], value, *words[at + 1 + taken :]]
    return [*words, flag, value]


def without(words: list[str], name: str) -> list[str]:
    """Without a flag, or without an option of a strategy's such as ``micro_batches=4``."""
    if not name.startswith("--"):
        return [re.sub(rf":{name}=[^,]+$|(?<=:){name}=[^,]+,|,{name}=[^,]+", "", word) for word in words]
    if name not in words:
        return words
    at = words.index(name)
    taken = at + 1 < len(words) and not words[at + 1].startswith("--")
    return [*words[:at], *words[at + 1 + taken :]]


def advised(words: list[str], said: str) -> list[list[str]]:
    """The command lines that a message advises: all that can be read out of it."""
    what, _, remedy = said.rpartition(". ")
    if m := _OPTION.search(said):
        wrong = re.search(r"(--[a-z_-]+)", said)
        return [[m["near"] if word == wrong[1] else word for word in words]] if wrong else []
    if (m := _MEANT.search(said)) and (wrong := re.search(r"'([^']+)'", said)):
        return [[word.replace(wrong[1], m["near"]) for word in words]]
    given = [name for name in dict.fromkeys(_NAMED.findall(what))]
    named = [name for name in given if name in words or re.search(rf"[:,]{name}=", " ".join(words))]
    # "Leave it out and take …": it is what the message began with.
    base = without(words, named[0]) if named and "leave it out and" in remedy else words
    found = [put(base, m["flag"], m["value"]) for m in _FLAG.finditer(remedy) if m["value"] not in _WORDS]
    found += [without(words, m["flag"]) for m in _LEAVE.finditer(remedy)]
    if m := _DEVICES.search(remedy):
        found.append(put(words, "--devices", m["number"]))
    if "one of the two" in remedy:
        found += [without(words, name) for name in named]
    return [line for line in found if line != words]


class Reached(Exception):
    """The run would begin."""


@pytest.fixture
def said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[[list[str]], str]:
    """What a command line is refused with, in this process; nothing where it would begin."""

    def begin(*_: object) -> int:
        raise Reached

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "_start", begin)
    monkeypatch.setattr(command, "_start_on", begin)
    monkeypatch.setattr(command, "_dry_run", begin)

    def ask(words: list[str]) -> str:
        code = main(words)
        error = capsys.readouterr().err
        return "" if "Reached" in error else f"{error.strip().splitlines()[-1]}{' (exit code 0)' * (code == 0)}"

    return ask


PLAYED: dict[str, bool] = {}
"""Lines of the test below in this process, and whether their advice could be read."""
DEEPEST = 3
"""So many things may be wrong with one line, each with its own advice."""


@pytest.mark.parametrize(("line", "message"), CASES, ids=[line for line, _ in CASES])
def test_what_a_refusal_advises_leads_to_a_run(line: str, message: str, said: Callable[[list[str]], str]) -> None:
    """Each advice, carried out, leads to a run, or to another refusal whose advice does."""

    def leads(words: list[str], before: tuple[str, ...]) -> str:
        """Nothing, or where the advice ends."""
        told = said(words)
        if not told:
            return ""
        if told in before or len(before) > DEEPEST:
            return f"{' '.join(words)}: {told}"
        ends = [leads(other, (*before, told)) for other in advised(words, told)]
        return "" if "" in ends else f"{' '.join(words)}: {told}"

    words = line.split()
    first = said(words)
    assert message in first
    lines = advised(words, first)
    PLAYED[line] = bool(lines)
    assert [end for other in lines if (end := leads(other, (first,)))] == []


def test_most_advice_can_be_read() -> None:
    """Otherwise the test above would pass where remedies are worded anew."""
    if len(PLAYED) < len(CASES):
        pytest.skip("the test above has not run here, or not with all lines")
    assert sum(PLAYED.values()) > len(CASES) / 3
