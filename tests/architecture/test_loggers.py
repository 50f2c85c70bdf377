"""Loggers are those of ``tutti`` alone: the root logger and other libraries' levels are a script's own."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.architecture.sources import dotted, modules, trees

ROOT_LOGGER = {"debug", "info", "warning", "error", "exception", "critical", "log", "basicConfig", "disable"}
READS_ROOT = {"tutti.config.verbosity"}
"""Looks whether a script has configured the root logger, and changes nothing of it."""
SILENCED = {("tutti.launcher.agent", "torch.distributed.elastic")}
"""Loggers of PyTorch in processes of tutti alone."""


def misuse(module: str, tree: ast.AST) -> Iterator[str]:
    """Yield each use of the root logger or of another library's."""
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        if dotted(node.func.value) != "logging":
            continue
        if node.func.attr in ROOT_LOGGER | {"captureWarnings"}:
            yield ast.unparse(node)
        if node.func.attr == "getLogger":
            name = node.args[0].value if node.args and isinstance(node.args[0], ast.Constant) else None
            ours = isinstance(name, str) and (name == "tutti" or name.startswith("tutti."))
            if not (ours or (name is None and module in READS_ROOT) or (module, name) in SILENCED):
                yield ast.unparse(node)


def test_no_logger_of_others_is_used() -> None:
    names = {path: name for name, path in modules().items()}
    found = {names[path]: list(misuse(names[path], tree)) for path, tree in trees(names, "logging")}
    assert {name: uses for name, uses in found.items() if uses} == {}


@pytest.mark.parametrize("code", ["logging.info('a')", "logging.basicConfig()", "logging.getLogger('torch')"])
def test_misuse_is_noticed(code: str) -> None:
    assert list(misuse("tutti.errors", ast.parse(code)))
