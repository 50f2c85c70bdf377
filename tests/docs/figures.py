"""Measured figures of a page, and the results that they are read from.

Below a paragraph or a table stands a comment that readers do not see:

    <!-- figures: benchmarks/results/2026-11-21-step-tax.json
    takes 0.36 × = workloads/mlp/contestants/tutti-step/ratio
    [0.33–0.37] = workloads/mlp/contestants/tutti-step/low; workloads/mlp/contestants/tutti-step/high
    -->

On the left is a piece of the text above, on the right where its numbers stand in the JSON file, in their order. Of a
table:

    <!-- table: benchmarks/results/2026-11-22-uneven.json
    `mirrored` => data parallel
    2 = rows/{row}/even/samples_per_second
    5 = -
    -->

``2`` is the second column, ``{row}`` a row's first cell, and ``=>`` says what a first cell is called in the file. ``-``
stands for a row or a column of something else than measurements. A place is ``key/key/…``: ``*`` is every element,
``{a,b}`` either, ``name=Muon`` the element of a list whose name it is, a number the element of a list at that index,
``@0`` the first of a table. ``A ÷ B`` and ``A − B`` are one by one where they are several; ``min``, ``max``, ``mean``,
``median`` or ``halfrange`` of several stands first, and ``in MiB`` (``GiB``, ``MB``, ``%``, ``-%``, ``thousands``)
last.
"""

from __future__ import annotations

import itertools
import json
import re
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]

_NUMBER = re.compile(r"(?<![\w.])[-−+]?\d[\d,]*(?:\.\d+)?")
_MEASURED = re.compile(
    r"\[\d[\d.]*–\d[\d.]*\]"
    r"|(?<![\w=.])\d+(?:,\d{3})*(?:\.\d+)? "
    r"(?:×(?! \d)|%(?! interval)|ms\b|MiB\b|GiB\b|MB\b|GB\b|points\b|samples a second)"
    r"|(?<![\w=.])\d+(?:\.\d+)?(?:%|×(?!\d))"
    r"|\b\d+\.\d+ s\b"
)
_COMMENT = re.compile(r"<!-- (figures|table): (\S+)\n(.*?)-->", re.S)
_REDUCE: dict[str, Callable[[list[float]], float]] = {
    "min": min,
    "max": max,
    "mean": statistics.fmean,
    "median": statistics.median,
    "halfrange": lambda values: (max(values) - min(values)) / 2,
}
_UNITS = {"MiB": 2.0**-20, "GiB": 2.0**-30, "MB": 1e-6, "%": 100.0, "-%": -100.0, "thousands": 1e-3}


@dataclass(frozen=True)
class Source:
    """One comment: a result file and its lines."""

    kind: str
    file: str
    lines: tuple[str, ...]


@dataclass
class Block:
    """A paragraph, list or table with the sources below it; ``line`` is its first, from 1."""

    line: int
    text: str
    sources: list[Source] = field(default_factory=list)
    covered: list[tuple[int, int]] = field(default_factory=list)

    @property
    def table(self) -> bool:
        return self.text.startswith("|")


def blocks(text: str) -> list[Block]:
    """A page's blocks without code. A comment belongs to the block above it."""
    found: list[Block] = []
    line = 1
    for piece in re.split(r"(\n(?=<!-- )|\n\s*\n)", _without_code(text)):
        stripped = piece.strip()
        comment = _COMMENT.match(stripped)
        if comment:
            if not found:
                raise ValueError(f"line {line}: a comment of figures stands above every text")
            lines = tuple(each.strip() for each in comment[3].splitlines() if each.strip())
            found[-1].sources.append(Source(comment[1], comment[2], lines))
        elif stripped and not stripped.startswith("<!--"):
            found.append(Block(line + piece[: len(piece) - len(piece.lstrip())].count("\n"), stripped))
        line += piece.count("\n")
    return found


def _without_code(text: str) -> str:
    return re.sub(r"^```.*?^```", lambda code: "\n" * code[0].count("\n"), text, flags=re.S | re.M)


def check(block: Block) -> Iterator[str]:
    """What in a block is not what its sources say; marks what they cover."""
    for source in block.sources:
        path = ROOT / source.file
        if not path.is_file():
            yield f"there is no {source.file}"
            continue
        yield from (_check_table if source.kind == "table" else _check_lines)(block, source)


def _check_lines(block: Block, source: Source) -> Iterator[str]:
    text = re.sub(r"\s", " ", block.text)
    for line in source.lines:
        written, _, places = line.partition(" = ")
        start = text.find(written)
        if start < 0:
            yield f"'{written}' does not stand above its source"
            continue
        block.covered.append((start, start + len(written)))
        yield from compare(written, places, source.file)


def _check_table(block: Block, source: Source) -> Iterator[str]:
    names = dict(line.split(" => ", 1) for line in source.lines if " => " in line)
    columns = dict(line.split(" = ", 1) for line in source.lines if " => " not in line)
    place = 0
    for number, row in enumerate(block.text.splitlines(keepends=True)):
        starts = [place + match.end() for match in re.finditer(r"\|", row)]
        cells = [block.text[start : end - 1].strip() for start, end in itertools.pairwise(starts)]
        name = names.get(cells[0], cells[0].strip("`*"))
        place += len(row)
        if number < 2 or name == "-":
            continue
        block.covered.append((starts[0], starts[1]))
        for column, places in columns.items():
            cell, start = cells[int(column) - 1], starts[int(column) - 1]
            block.covered.append((start, starts[int(column)]))
            if places != "-" and _NUMBER.search(cell):
                said = compare(cell, places.replace("{row}", name), source.file)
                yield from (f"{cells[0]}: {each}" for each in said)


def compare(written: str, places: str, file: str) -> Iterator[str]:
    """Whether the numbers of a text are those at the places, to the digits that are written."""
    numbers = _NUMBER.findall(written)
    wanted = [place.strip() for place in places.split(";")]
    if len(numbers) != len(wanted):
        yield f"'{written}' has {len(numbers)} numbers and {len(wanted)} places"
        return
    for number, place in zip(numbers, wanted, strict=True):
        try:
            value = evaluate(place, file)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            yield f"{file} has no {place} ({error!r})"
            continue
        plain = number.replace(",", "").replace("−", "-").lstrip("+")
        decimals = len(plain.partition(".")[2])
        if abs(float(plain) - value) > 0.5000001 * 10.0**-decimals:
            yield f"'{written}' says {number}, and {file} has {value:.{decimals + 2}f}"


def evaluate(expression: str, file: str) -> float:
    """The number that an expression over a result file stands for."""
    expression, _, unit = expression.partition(" in ")
    word, _, rest = expression.partition(" ")
    if word not in _REDUCE:
        word, rest = "", expression
    top, sign, other = re.fullmatch(r"(.*?)(?: ([÷−]) (.*))?", rest).groups()  # type: ignore[union-attr]
    values = _values(top, file)
    if sign:
        pairs = zip(values, _values(other, file), strict=True)
        values = [a / b if sign == "÷" else a - b for a, b in pairs]
    if len(values) != 1 and not word:
        raise ValueError(f"{len(values)} values")
    return (_REDUCE[word](values) if word else values[0]) * (_UNITS[unit] if unit else 1)


def _values(place: str, file: str) -> list[float]:
    """The numbers at a place; of a text that which it begins with."""
    found = list(_found(load(file), place.strip().split("/")))
    return [float(_NUMBER.findall(value)[0]) if isinstance(value, str) else float(value) for value in found]


@cache
def load(file: str) -> Any:
    """A result file."""
    return json.loads((ROOT / file).read_text(encoding="utf-8"))


def _found(value: Any, keys: list[str]) -> Iterator[Any]:
    if not keys:
        yield value
        return
    key, rest = keys[0], keys[1:]
    if key == "*":
        for each in value.values() if isinstance(value, dict) else value:
            yield from _found(each, rest)
    elif key.startswith("{"):
        for each in key.strip("{}").split(","):
            yield from _found(value[each], rest)
    elif key.startswith("@"):
        yield from _found(list(value.values())[int(key[1:])], rest)
    elif isinstance(value, list) and "=" in key:
        name, _, wanted = key.partition("=")
        yield from _found(next(each for each in value if str(each[name]) == wanted), rest)
    else:
        yield from _found(value[int(key)] if isinstance(value, list) else value[key], rest)


def cover(block: Block, listed: Mapping[str, str]) -> set[str]:
    """Mark the texts of a list that stand in a block as covered. Returns those that do."""
    text = re.sub(r"\s", " ", block.text)
    there = {each for each in listed if each in text}
    block.covered += [(text.index(each), text.index(each) + len(each)) for each in there]
    return there


def without_source(block: Block) -> list[str]:
    """Measured figures of a block that no source covers, each with its surroundings. Call after ``check``."""
    text = re.sub(r"\s", " ", block.text)
    found = []
    for match in _MEASURED.finditer(text):
        if not any(start <= match.start() and match.end() <= end for start, end in block.covered):
            found.append(text[max(0, match.start() - 60) : match.end() + 30])
    return found
