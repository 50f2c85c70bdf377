"""Print tables to standard output: with rich in a terminal, as plain columns elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def print_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table to standard output: with rich in a terminal, as plain columns elsewhere.

    The first column is left-aligned, all further ones, mostly numbers, are right-aligned.

    Args:
        heads: the headings of the columns.
        rows: the texts of each row, as many as headings.
    """
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
    print("\n".join(plain_columns(heads, rows)))


def plain_columns(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Format a table as lines of text: the first column left-aligned, all others right-aligned.

    Two spaces separate columns; lines have no trailing spaces.

    Args:
        heads: the headings of the columns.
        rows: the texts of each row, as many as headings.

    Returns:
        The line of the headings, then one line for each row.

    >>> plain_columns(["fault", "lost"], [["kill", "12"], ["stop", "0"]])
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
