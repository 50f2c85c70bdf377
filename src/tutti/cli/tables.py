"""Tables on standard output: drawn where that is a terminal, plain columns everywhere else."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def show(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table; the first column is flush left, the others, which are mostly numbers, flush right."""
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Table

        table = Table(box=None, header_style="bold")
        for place, head in enumerate(heads):
            table.add_column(head, justify="right" if place else "left")
        for row in rows:
            table.add_row(*row)
        Console().print(table)
        return
    print("\n".join(plain(heads, rows)))


def plain(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table in fixed columns.

    >>> plain(["fault", "lost"], [["kill", "12"], ["stop", "0"]])
    ['fault  lost', 'kill     12', 'stop      0']
    """
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    lines = []
    for row in [heads, *rows]:
        cells = [
            f"{row[0]:<{widths[0]}}",
            *(f"{cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True)),
        ]
        lines.append("  ".join(cells).rstrip())
    return lines
