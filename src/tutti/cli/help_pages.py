"""Format help pages compactly: no frames, one line an option; options with equal descriptions share a line."""

from __future__ import annotations

import textwrap
from collections.abc import Set
from itertools import groupby
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cyclopts.help import HelpEntry, HelpPanel
    from rich.console import Console, ConsoleOptions

COLUMN = 19
"""Column, in characters, in which the description of an option begins."""


class OneScreen:
    """Formatter of a help page; ``cyclopts`` calls it for the usage line, the description and each group of options.

    Args:
        usual: names of the options to show, such as ``--devices``; None: all.
    """

    def __init__(self, usual: Set[str] | None = None) -> None:
        self._usual = usual

    def __call__(self, console: Console, options: ConsoleOptions, panel: HelpPanel) -> None:
        """Print a group of options of a help page, its title first; options with the same description share a line.

        ``cyclopts`` calls it for each group. Nothing is printed for a group without options to show.

        Args:
            console: console to print to.
            options: not used.
            panel: title of the group, and its options with names, description and default.
        """
        shown = [entry for entry in panel.entries if self._usual is None or self._usual & {*entry.positive_names}]
        if not shown:
            return
        _print(console, f"{panel.title}:", style="bold")
        for _, group in groupby(shown, key=lambda entry: _text(entry.description) or id(entry)):
            _print(console, _lines(list(group), console.width))

    def render_usage(self, console: Console, options: ConsoleOptions, usage: Any) -> None:
        """Print the usage line of a command's help page; called by ``cyclopts``.

        Args:
            console: console to print to.
            options: not used.
            usage: the line, as text or as an object of ``cyclopts`` or ``rich`` that holds text.
        """
        _print(console, _text(usage))

    def render_description(self, console: Console, options: ConsoleOptions, description: Any) -> None:
        """Print a command's description, wrapped to the console's width, and an empty line; called by ``cyclopts``.

        Args:
            console: console to print to.
            options: not used.
            description: the description, as text or as an object of ``cyclopts`` or ``rich`` that holds text.
        """
        wrapped = [
            textwrap.fill(line, console.width, break_on_hyphens=False) for line in _text(description).split("\n")
        ]
        _print(console, "\n".join(wrapped) + "\n")


def _lines(entries: list[HelpEntry], width: int) -> str:
    """Return the names of entries with a common description, and the description beside them."""
    names = " ".join(" ".join((*entry.positive_names, *entry.positive_shorts)) for entry in entries)
    words = _text(entries[0].description)
    if entries[0].default:
        words = f"{words} [{_text(entries[0].default)}]".strip()
    indent = " " * COLUMN
    first = f"  {names:<{COLUMN - 4}}  "
    return textwrap.fill(words, width, initial_indent=first, subsequent_indent=indent, break_on_hyphens=False)


def _text(value: Any) -> str:
    """Return the plain text of a value from cyclopts: text, rich text, or its wrapper of rich text."""
    if value is None:
        return ""
    return str(getattr(value, "plain", None) or getattr(value, "primary_renderable", value)).strip()


def _print(console: Console, text: str, style: str | None = None) -> None:
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)
