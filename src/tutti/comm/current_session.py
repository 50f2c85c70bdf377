"""The session of this process's public collectives, and the places where no collective may be called."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from tutti.comm.collective_engine import default_session
from tutti.comm.collective_session import CollectiveSession
from tutti.errors import UsageError, script_line
from tutti.torch_compat import TorchDispatchMode

_current: list[CollectiveSession] = []
_refused = ContextVar("collectives_refused", default=False)


def use_session(session: CollectiveSession | None) -> None:
    """Make all later collectives of this process (``tutti.allreduce`` …) use the given session.

    A session is a namespace in which the ranks' calls are matched by name. Local; every rank must select its part of
    the same session.

    Args:
        session: the session; None: the default session.
    """
    _current[:] = [session] if session is not None else []


def current_session() -> CollectiveSession:
    """Return the session in which this process's public collectives match their calls by name.

    It is the session that ``use_session`` was given last, else the default session, which the first call of the process
    opens; that call blocks until rank 0 has made it, too.

    Raises:
        UsageError: within ``collectives_refused``, or before ``tutti.init``.
        PeerError: rank 0 did not start the thread of its collectives in time.
    """
    if _refused.get():
        raise _refusal()
    return _current[-1] if _current else default_session()


class _RefuseCollectives(TorchDispatchMode):
    """Dispatch mode that raises UsageError for PyTorch's own collectives."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            raise _refusal()
        return func(*args, **(kwargs or {}))


def _refusal() -> UsageError:
    return UsageError(
        "the script calls a collective within a call that not all ranks make",
        where=script_line(),
        remedy="call it outside of the model and the loss function",
    )


@contextmanager
def collectives_refused() -> Iterator[None]:
    """Return a context manager within which collectives raise UsageError, tutti's public ones and PyTorch's.

    Use it around a function of a user's script that one rank calls alone, where a collective would wait for the other
    ranks for ever. Affects only the thread that enters the block; other threads may call collectives.
    """
    before = _refused.set(True)
    try:
        with _RefuseCollectives():  # type: ignore[no-untyped-call]
            yield
    finally:
        _refused.reset(before)
