"""What the source says of itself: every module's imports, read with ``ast`` and without importing anything."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "tutti"

_LAZY = re.compile(r"(tutti(?:\.\w+)+)(?::\w+)?")


@dataclass(frozen=True)
class Import:
    """One imported module, by its full name; ``typing_only`` where it stands under ``if TYPE_CHECKING``."""

    target: str
    line: int
    typing_only: bool


def modules() -> dict[str, Path]:
    """Every module of the package by its full name, packages without ``.__init__``."""
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def trees(paths: Iterable[Path], *words: str) -> Iterator[tuple[Path, ast.Module]]:
    """Each file whose text has one of ``words``, whatever their case, and its syntax tree.

    To parse and walk all files takes seconds, to look for a word a hundredth of that.
    """
    for path in paths:
        text = path.read_text(encoding="utf-8")
        lower = text.lower()
        if any(word.lower() in lower for word in words):
            yield path, ast.parse(text)


def room(module: str) -> str:
    """The room of a full name: ``tutti.comm.ring`` → ``comm``; the package itself is ``tutti``.

    >>> room("tutti.comm.ring"), room("tutti.errors"), room("tutti")
    ('comm', 'errors', 'tutti')
    """
    return module.split(".")[1] if "." in module else module


@cache
def imports(path: Path, known: frozenset[str]) -> tuple[Import, ...]:
    """Every import at any depth, and every text such as ``"tutti.parallel.ddp.whole_layout:Whole"`` in a lazy table."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    typing_only = {
        id(inner)
        for node in nodes
        if isinstance(node, ast.If) and "TYPE_CHECKING" in _names(node.test)
        for statement in node.body
        for inner in ast.walk(statement)
    }
    return tuple(
        Import(target, node.lineno, id(node) in typing_only)  # type: ignore[attr-defined]
        for node in nodes
        for target in _targets(node, known)
    )


def dotted(node: ast.AST) -> str:
    """``a.b.c`` of a name or of an attribute of one, without ``ast.unparse``; "" for anything else.

    >>> [dotted(ast.parse(code).body[0].value) for code in ("os.environ.pop", "f().x", "x")]
    ['os.environ.pop', '', 'x']
    """
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def _names(condition: ast.expr) -> set[str]:
    """Names that a condition reads, as ``TYPE_CHECKING`` and ``typing.TYPE_CHECKING``."""
    nodes = list(ast.walk(condition))
    return {node.id for node in nodes if isinstance(node, ast.Name)} | {
        node.attr for node in nodes if isinstance(node, ast.Attribute)
    }


def _targets(node: ast.AST, known: frozenset[str]) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = "." * node.level + (node.module or "")
        for alias in node.names:
            whole = f"{base}.{alias.name}"
            ours = base.split(".")[0] == "tutti"
            # Whether a name from elsewhere is a module cannot be read here, so both are meant.
            yield from ([whole if whole in known else base] if ours else [base, whole])
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        lazy = _LAZY.fullmatch(node.value)
        if lazy and lazy[1] in known:
            yield lazy[1]
