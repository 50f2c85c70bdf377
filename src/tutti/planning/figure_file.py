"""SVG files of figures: matplotlib where it is installed, and errors of the disk."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from tutti.distribution import pip_install
from tutti.errors import DiskError, UsageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def new_figure(asked_by: str, width: float, height: float) -> Figure:
    """Return an empty figure of matplotlib.

    Args:
        asked_by: the option that asks for the figure, such as ``--svg``, for the error.
        width, height: size in inches.

    Raises:
        UsageError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError(
            f"{asked_by} needs the package matplotlib", remedy=f"run {pip_install('plot')}, or leave it out"
        )
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: Figure, path: Path) -> None:
    """Write a matplotlib figure as an SVG.

    Args:
        figure: the figure.
        path: the file to write; an existing one is replaced.

    Raises:
        DiskError: the file cannot be written.
    """
    try:
        figure.savefig(path, format="svg")
    except OSError as error:
        raise DiskError("cannot write the figure", where=str(path), why=error.strerror) from error
