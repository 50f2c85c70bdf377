"""Load a user's task: a function in a file or module that returns a ``Task``. Imports no torch itself."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from tutti.errors import DataError, TuttiError, UsageError, did_you_mean

if TYPE_CHECKING:
    from tutti.tasks.task import Task

_FORM = "write path/to/file.py:function or module:function"
_SCRIPT = "; a script that calls tutti.prepare is started by: tutti run {0}, and predicted by: tutti simulate {0}"


def is_own(text: str) -> bool:
    """Return whether a task's name is a user's and not that of a built-in task: it has a colon or ends in ``.py``.

    Args:
        text: the name, such as ``path/to/file.py:function``.
    """
    return ":" in text or text.endswith(".py")


def check_user_task(text: str) -> None:
    """Check that a user's task exists, without running user code: the file and a name in it, or the top-level package.

    A file is parsed and must bind the function's name. Of ``module`` only the part before the first dot is looked for,
    in the working directory and on ``sys.path``; its function is not.

    Args:
        text: ``path/to/file.py:function`` or ``module:function``.

    Raises:
        UsageError: the text has another form; the file, its function or the top-level package does not exist; or the
            file cannot be read or has a syntax error.
    """
    place, name = _split(text)
    if place.endswith(".py"):
        _check_file(Path(place), name)
    elif PathFinder.find_spec(place.partition(".")[0], [str(Path.cwd()), *sys.path]) is None:
        raise UsageError(f"there is no module '{place}'", where=text, remedy=_FORM)


def load_user_task(text: str, *, data: str | None, model: str | None, augment: bool) -> Task:
    """Import a user's task function, call it with the given options, and return the ``Task`` that it returns.

    The folder of the file, or for a module the working directory, is put first on ``sys.path`` if it is not on it. A
    file is executed anew by every call.

    A ``Task`` has the attributes ``model`` (a function without arguments that returns a new model), ``loss`` (the loss
    function), ``train`` (training samples), ``eval`` (held-out samples or None) and further ones, such as ``name``.

    Args:
        text: ``path/to/file.py:function`` or ``module:function``.
        data, model, augment: options of ``tutti train``; passed to the function if they are given, or if its signature
            requires them (then as None, None and False).

    Raises:
        UsageError: the import raises, the function does not exist, does not take an option or needs further ones,
            raises, or does not return a ``Task``.
        DataError: the function raises an OSError, such as for a missing file. A TuttiError passes through.
    """
    place, name = _split(text)
    module = _import(place, text)
    function = getattr(module, name, None)
    if not callable(function):
        known = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        raise UsageError(f"there is no function '{name}'", where=place, remedy=did_you_mean(name, known))
    options = _options(function, {"data": data, "model": model, "augment": augment or None}, text)
    try:
        task = function(**options)
    except TuttiError:
        raise
    except OSError as error:
        raise DataError(f"'{text}' cannot read its data", where=_line(error), why=_cause(error)) from error
    except Exception as error:
        raise UsageError(f"'{text}' failed", where=_line(error), why=_cause(error)) from error

    from tutti.tasks.task import Task

    if not isinstance(task, Task):
        raise UsageError(
            f"'{text}' returned {type(task).__name__}", remedy="return a tutti.tasks.task.Task from the function"
        )
    return task


def _split(text: str) -> tuple[str, str]:
    place, colon, name = text.rpartition(":")
    if not colon or not place or not name.isidentifier():
        script = "" if colon or not text.endswith(".py") else _SCRIPT.format(text)
        raise UsageError(f"'{text}' names no function", remedy=_FORM + script)
    return place, name


def _check_file(path: Path, name: str) -> None:
    if not path.is_file():
        raise UsageError("there is no such file", where=str(path), remedy=_FORM)
    try:
        tree = ast.parse(path.read_bytes(), filename=str(path))
    except (SyntaxError, ValueError) as error:
        raise UsageError("this is not a readable Python file", where=str(path), why=str(error)) from error
    except OSError as error:
        raise UsageError("this file cannot be read", where=str(path), why=str(error)) from error
    names = set(_bound(tree))
    if name not in names and "*" not in names:
        functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
        raise UsageError(f"there is no function '{name}'", where=str(path), remedy=did_you_mean(name, functions))


def _bound(tree: ast.Module) -> Iterator[str]:
    """Yield every name that the file may bind; ``*`` for a star import."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.alias):
            yield (node.asname or node.name).partition(".")[0]


def _import(place: str, text: str) -> ModuleType:
    """Import a file, or a module with the current directory on the path, as Python does for a script or ``-m``.

    Raises UsageError if the import raises.
    """
    folder = str(Path(place).resolve().parent) if place.endswith(".py") else str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        if not place.endswith(".py"):
            return importlib.import_module(place)
        name = f"tutti_task_{Path(place).stem}"
        spec = importlib.util.spec_from_file_location(name, place)
        if spec is None or spec.loader is None:
            raise ImportError(f"cannot import {place}")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        return module
    except TuttiError:
        raise
    except (Exception, SystemExit) as error:
        raise UsageError(f"importing '{text}' failed", where=_line(error), why=_cause(error)) from error


def _options(function: Callable[..., Any], given: Mapping[str, Any], text: str) -> dict[str, Any]:
    """Return the arguments for ``function``: given options, and None or False for required ones that are not given.

    Raises UsageError for an option that it does not take, or a further argument that it needs.
    """
    signature = inspect.signature(function)
    options = {name: value for name, value in given.items() if value is not None}
    for name, parameter in signature.parameters.items():
        if name in given and parameter.default is inspect.Parameter.empty:
            options.setdefault(name, None if name != "augment" else False)
    any_name = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in signature.parameters.values())
    for name in options:
        if name not in signature.parameters and not any_name:
            raise UsageError(
                f"'{text}' takes no option '{name}'", remedy=f"leave --{name} out, or give the function that argument"
            )
    try:
        signature.bind(**options)
    except TypeError as error:
        raise UsageError(
            f"'{text}' cannot be called", why=str(error), remedy="its only arguments may be data, model and augment"
        ) from error
    return options


def _cause(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _line(error: BaseException) -> str | None:
    """Return ``file.py:12``, the innermost line that raised; None without a traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else None
