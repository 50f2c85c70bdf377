"""Methods before which graphs of ``torch.compile`` end, so that a compiled body of a loop may call them."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

import torch

_F = TypeVar("_F", bound=Callable[..., Any])


class _Method:
    """A method, and its form that ``torch.compile`` does not enter.

    Args:
        plain: the method.
    """

    def __init__(self, plain: Callable[..., Any]) -> None:
        self.plain, self.untraced = plain, plain


_METHODS: list[_Method] = []


def ends_graph(method: _F) -> _F:
    """Wrap a method so that ``torch.compile`` breaks the graph at its calls, once ``end_graphs`` has been called.

    For methods that communicate with other ranks. No graph can hold such a call, so that compiled code runs the method
    eagerly, between two graphs. Before ``end_graphs`` the compiler traces the method like any other. Outside of a trace
    a call costs hardly more than without the wrapper.

    Args:
        method: the method of a class, or a function that is set as a method.

    Returns:
        The wrapper, with the name and the docstring of ``method``.
    """
    kept = _Method(method)
    _METHODS.append(kept)

    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        return kept.untraced(*args, **kwargs) if torch.compiler.is_compiling() else method(*args, **kwargs)

    return cast(_F, call)


def left_out_of_graphs(function: _F) -> _F:
    """Wrap a function so that ``torch.compile`` breaks the graph at its calls and runs it eagerly, between two graphs.

    For functions that communicate with other ranks and are made anew for each run; ``ends_graph`` is for methods of
    classes. Takes effect at once and loads the compiler's front end, but compiles nothing. Outside of a trace a call
    costs hardly more than without the wrapper.

    Args:
        function: the function, or a bound method.

    Returns:
        The wrapper, with the name and the docstring of ``function``.
    """
    # ``untraced`` costs more than a microsecond a call, and is of use in a trace alone.
    untraced = torch.compiler.disable(function)

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return untraced(*args, **kwargs) if torch.compiler.is_compiling() else function(*args, **kwargs)

    return cast(_F, call)


def end_graphs() -> None:
    """Make ``torch.compile`` break the graph at calls of all methods that ``ends_graph`` has wrapped so far.

    Loads the compiler's front end, but compiles nothing. Does nothing for methods that an earlier call has treated.
    """
    for method in _METHODS:
        if method.untraced is method.plain:
            method.untraced = torch.compiler.disable(method.plain)
