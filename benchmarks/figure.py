"""Figures of studies: SVG, the same bytes for the same numbers, with what was run below. Needs the extra ``plot``."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def begin() -> Any:
    """matplotlib's ``pyplot``, drawing SVG. Raises ImportError where it is not installed."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot

    mpl.rcParams["svg.hashsalt"] = "tutti"
    return pyplot


def keep(figure: Any, caption: str, path: Path) -> None:
    """Write ``figure`` to ``path`` with ``caption`` below it, and free it."""
    figure.text(0.01, 0.01, caption, fontsize=6, color="#555555")
    figure.tight_layout(rect=(0, 0.03, 1, 1))
    figure.savefig(path, metadata={"Date": None})
    figure.clear()
