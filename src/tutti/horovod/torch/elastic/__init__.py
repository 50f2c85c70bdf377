"""Elastic training inside a process, with the names of ``horovod.torch.elastic``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from tutti.horovod.common.elastic import ObjectState, State, run_fn
from tutti.horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from tutti.horovod.torch.elastic.sampler import ElasticSampler
from tutti.horovod.torch.elastic.state import TorchState
from tutti.horovod.torch.job import init, rejoin, shutdown
from tutti.launcher.membership import current_membership

T = TypeVar("T")

__all__ = ["ElasticSampler", "HorovodInternalError", "HostsUpdatedInterrupt", "ObjectState", "TorchState", "run"]


def run(func: Callable[..., T]) -> Callable[..., T]:
    """Decorate a training function so that training goes on after failed collectives and changes of hosts.

    The decorated function calls ``func`` again after each of these, as Horovod's ``hvd.elastic.run`` does. After a
    failed collective the state is first set back to its last ``commit``. Before each call all ranks get the state of
    rank 0. The call is collective over all ranks.

    Args:
        func: training function, whose first argument is a state, such as ``TorchState``.

    Returns:
        A function with the arguments and result of ``func``.

    Raises:
        HorovodInternalError: from the decorated function: a rank has ended and the job is not elastic; the ranks of an
            elastic job could not join each other in 21 attempts, or its launcher has ended; there were more resets
            (failed collectives and changes of hosts) than ``HOROVOD_RESET_LIMIT``; or the ranks' calls of a collective
            differ for the second time since the last commit. After a failed collective the state is that of the last
            commit.
        ValueError: from the decorated function: ``HOROVOD_RESET_LIMIT`` is not a whole number.
        SystemExit: from the decorated function: this rank's slot (place for a rank) in an elastic job was removed, or
            other ranks have finished training before this rank joined them; the code is 0.
    """
    return run_fn(func, _reset, _hear)


def _reset(failed: bool) -> bool:
    if current_membership() is not None:
        rejoin(failed)
        return True
    shutdown()
    try:
        init()
    except BaseException:
        shutdown()
        raise
    return False


def _hear(state: State) -> None:
    if (member := current_membership()) is not None:
        member.on_update = state.on_hosts_updated
