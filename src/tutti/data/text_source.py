"""Read text as characters, from a file or from Python's standard library. No torch until a fetch."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tutti.data.source import AugmentKey
from tutti.errors import DataError

if TYPE_CHECKING:
    from torch import Tensor

MOST_CHARACTERS = 65536
"""Most different characters of a text, each a token of the vocabulary; a guess."""
_CODE_POINTS = 0x110000
_EMBEDDED_BYTES = 1_000_000
_GIVE_A_FILE = "give a text file with --data"


@dataclass(frozen=True)
class Text:
    """A text whose characters are encoded as numbers.

    Attributes:
        codes: (characters,) uint16, the index of each character in ``vocabulary``.
        vocabulary: the distinct characters of the text, sorted.
        name: name of the text, for messages.
    """

    codes: NDArray[np.uint16]
    vocabulary: str
    name: str


class WindowSource:
    """Map-style data set of the adjacent windows of a text, with next-character targets; a ``tutti.data.Source``.

    A tail that does not fill a window is left out. ``codes`` is kept, not copied; each fetch copies its windows.

    Args:
        codes: (characters,) uint16, the text's characters as numbers.
        block: characters in a window.
        name: name of the text, for messages.

    Raises:
        DataError: not a single window fits.
    """

    def __init__(self, codes: NDArray[np.uint16], block: int, name: str) -> None:
        windows = (len(codes) - 1) // block
        if windows < 1:
            raise DataError(
                f"a part of {len(codes):,} characters is too short for a window of {block} characters and the next one",
                where=name,
                remedy=f"give a longer text, or take fewer than block={block}",
            )
        self._inputs = codes[: windows * block].reshape(windows, block)
        self._targets = codes[1 : windows * block + 1].reshape(windows, block)

    def __len__(self) -> int:
        """Return the number of windows of the text, each of which is a sample."""
        return len(self._inputs)

    def fetch(self, indices: NDArray[np.int64], augment: AugmentKey | None) -> tuple[Tensor, Tensor]:
        """Return windows of the text and, as targets, the next character of each of their characters.

        Args:
            indices: int64 (samples,), numbers of the windows.
            augment: has no effect, as nothing is random.

        Returns:
            (characters, next characters), both int64 (samples, block) on the CPU, where ``block`` is the length of a
            window.
        """
        import torch

        picked = (part[indices].astype(np.int64) for part in (self._inputs, self._targets))
        inputs, targets = map(torch.from_numpy, picked)
        return inputs, targets


def check_text(data: str) -> None:
    """Check that a text file exists and is not empty; its content is not read.

    Args:
        data: path of the file.

    Raises:
        DataError: ``data`` is no file, or the file is empty or not accessible.
    """
    path = Path(data).expanduser()
    try:
        # Reading a named pipe would block.
        size = path.stat().st_size if path.is_file() else None
    except OSError as error:
        raise DataError("this file cannot be read", where=data, why=str(error), remedy="check --data") from error
    if size is None:
        raise DataError("there is no such text file", where=data, remedy="check --data")
    if not size:
        raise DataError("this file is empty", where=data, remedy=_GIVE_A_FILE)


def read_text(data: str | None) -> Text:
    """Read a UTF-8 text with its line ends, and encode its characters as numbers.

    Args:
        data: path of the file; None for the text that is always there, source code of Python's standard library.

    Returns:
        A ``Text``: ``codes`` ((characters,) uint16, the index of each character in ``vocabulary``), ``vocabulary`` (the
        distinct characters, sorted) and ``name`` (the path, or ``standard library``).

    Raises:
        DataError: no such file, an empty file, invalid UTF-8, or more than 65,536 distinct characters.
    """
    if data is None:
        return encode_characters(embedded(), "standard library")
    check_text(data)
    try:
        return encode_characters(Path(data).expanduser().read_bytes().decode(), data)
    except OSError as error:
        raise DataError("this file cannot be read", where=data, why=str(error), remedy="check --data") from error
    except UnicodeDecodeError as error:
        raise DataError(
            "this file is not UTF-8 text",
            where=f"{data}, byte {error.start:,}",
            why=error.reason,
            remedy="convert it to UTF-8",
        ) from error


def encode_characters(text: str, name: str) -> Text:
    """Encode each character of a text as its index in the text's sorted vocabulary.

    Args:
        text: the text.
        name: its name, which the result has and a DataError states.

    Returns:
        A ``Text``: ``codes`` ((characters,) uint16), ``vocabulary`` (the distinct characters, sorted) and ``name``.

    Raises:
        DataError: more than 65,536 distinct characters.

    >>> encode_characters("banana", "fruit")
    Text(codes=array([1, 0, 2, 0, 2, 0], dtype=uint16), vocabulary='abn', name='fruit')
    """
    points: NDArray[Any] = np.frombuffer(text.encode("utf-32-le"), dtype="<u4")
    present = np.zeros(_CODE_POINTS, dtype=bool)
    present[points] = True
    vocabulary = np.flatnonzero(present)
    if len(vocabulary) > MOST_CHARACTERS:
        raise DataError(
            f"the text has {len(vocabulary):,} different characters",
            where=name,
            remedy=f"give one with at most {MOST_CHARACTERS:,}",
        )
    places = np.zeros(_CODE_POINTS, dtype=np.uint16)
    places[vocabulary] = np.arange(len(vocabulary), dtype=np.uint16)
    return Text(places[points], "".join(map(chr, vocabulary)), name)


def embedded() -> str:
    """Return the source code of modules of Python's standard library as one text, to train on without a file.

    The modules are whole and in alphabetical order, and fill at most a megabyte. Modules with a leading underscore
    are left out: some of them differ between machines with the same Python.

    Raises:
        DataError: Python was installed without its source.
    """
    parts, size = [], 0
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("[!_]*.py")):
        source = path.read_bytes()
        size += len(source)
        if size > _EMBEDDED_BYTES:
            break
        parts.append(source.decode())
    if not parts:
        raise DataError("Python was installed without the source of its standard library", remedy=_GIVE_A_FILE)
    return "".join(parts)
