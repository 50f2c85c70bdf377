"""Call a function in the ranks of a job, as ``horovod.run`` does."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from tutti.config.watchdog_limits import ELASTIC_TIMEOUT, TIMEOUT
from tutti.errors import UsageError
from tutti.horovod.installing import export_rank
from tutti.launcher.elastic_driver import ElasticOptions
from tutti.launcher.hosts import parse_host_file, parse_hosts

_ELASTIC = {
    "min_np": "min_np",
    "max_np": "max_np",
    "min_num_proc": "min_np",
    "max_num_proc": "max_np",
    "host_discovery_script": "script",
    "reset_limit": "reset_limit",
    "slots": "slots_per_host",
    "cooldown_range": "cooldown",
    "elastic_timeout": "timeout",
}
"""Parameters of an elastic job → fields of ``ElasticOptions``."""
_IDLE = frozenset(
    (
        *("disable_cache", "executable", "mpi_args", "network_interface", "network_interfaces", "output_filename"),
        *("ssh_identity_file", "ssh_port", "use_gloo", "use_mpi", "verbose"),
    )
)


def run(
    func: Callable[..., Any],
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    *,
    np: int | None = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    start_timeout: float | None = None,
    **settings: Any,
) -> list[Any]:
    """Call ``func(*args, **kwargs)`` in new processes on this machine, the ranks of one job, as ``horovod.run`` does.

    Blocks until all ranks have ended. The ranks are forked, so that ``func`` may be defined anywhere; only its result
    reaches this process, and not its changes to variables. Each rank must call ``hvd.init()`` itself. ``HOROVOD_RANK``
    and the other variables of ``export_rank`` are set before, in an elastic job by ``hvd.init``.

    Args:
        func: function that trains.
        args: positional arguments of ``func``.
        kwargs: keyword arguments of ``func``.
        num_proc: number of ranks; ``np`` if not given, and one if neither is.
        np: another name of ``num_proc``.
        hosts: hosts and slots such as ``localhost:2``, a slot being room for one rank; only this machine may be named.
        hostfile: file with the hosts, in place of ``hosts``.
        start_timeout: seconds that ranks may wait for each other in a collective; None: 300, in an elastic job 20.
        settings: Horovod's other parameters. ``min_np`` or ``min_num_proc``, ``max_np`` or ``max_num_proc``,
            ``host_discovery_script``, ``slots`` (of hosts that the script prints without a number), ``reset_limit``,
            ``cooldown_range`` and ``elastic_timeout`` make an elastic job, whose ranks leave and join while it runs.
            The others, such as ``use_gloo``, are without effect; the names of those with a true value are printed on
            standard error. Without ``max_np`` an elastic job has ``num_proc`` ranks at most, and with a discovery
            script as many as there are slots.

    Returns:
        List of what ``func`` returned in each rank, in rank order; of an elastic job in the ranks that ended without
        an error. The values must be possible to pickle.

    Raises:
        TypeError: ``horovod.run`` has no parameter of a name in ``settings``.
        UsageError: ``hosts`` is malformed, names another machine or has fewer slots than ranks; the limits of an
            elastic job contradict each other, or its host discovery script fails; the number of ranks is below 1; this
            process is a rank itself, already trains, or has used the accelerator or autograd; or the call is made
            outside the main thread.
        PeerError: a rank was killed, or ended without a result; in an elastic job, all ranks did, or a limit of the job
            was reached.
        Preempted: a rank ended with exit code 75.
        KeyboardInterrupt: a signal stopped the job, and no rank raised an error.
        SystemExit: a signal came before the ranks were started; the code is 128 + its number.
        DiskError: there is no space to start the ranks or to write their logs.
        Exception: the first error of a rank, with the rank and its traceback as a note; a RuntimeError with its type
            and text if it cannot be pickled.
    """
    if unknown := sorted(settings.keys() - _ELASTIC.keys() - _IDLE):
        raise TypeError(f"horovod.run() got an unexpected keyword argument '{unknown[0]}'")
    limits = {_ELASTIC[name]: settings.pop(name) for name in _ELASTIC if settings.get(name) is not None}
    hosts = parse_host_file(Path(hostfile)) if hostfile and not hosts else hosts
    named = parse_hosts(hosts) if hosts else []
    others = [host.address for host in named if not host.local]
    if others:
        raise UsageError(
            f"horovod.run(…, hosts={hosts!r}) names {others[0]}, which is not this machine",
            why="the ranks of a function call are forked from this process",
            remedy=f"start the script with tutti run --horovod -H {hosts} SCRIPT",
        )
    ranks, slots = num_proc or np or 1, sum(host.slots for host in named)
    if named and ranks > slots:
        raise UsageError(
            f"horovod.run(…, np={ranks}, hosts={hosts!r}): {ranks} ranks need {ranks} slots, and hosts has {slots}",
            remedy=f"write hosts='localhost:{ranks}', or np={slots}",
        )
    elastic = None
    if limits:
        if "script" in limits:
            limits["script"] = Path(limits["script"]).absolute()
        most = sys.maxsize if "script" in limits else ranks
        elastic = ElasticOptions(**{"np": ranks, "min_np": ranks, "max_np": most} | limits)
        if elastic.max_np > ranks and elastic.script is None:
            raise UsageError(
                f"horovod.run(…, np={ranks}, max_np={elastic.max_np}) has no slots into which ranks could come",
                remedy="give host_discovery_script, a program that prints localhost:SLOTS, or leave out max_np",
            )
    idle = sorted(name for name, value in settings.items() if value)
    if idle:
        print(f"tutti: without effect: {', '.join(idle)}", file=sys.stderr)
    # Commands read horovodrun's flags from this package, and do not import torch.
    from tutti.launcher.function_ranks import launch_elastic_function, launch_function

    call = partial(_call_as_rank, partial(func, *args, **dict(kwargs or {})), elastic is not None)
    if elastic is None:
        return launch_function(call, devices=ranks, timeout=TIMEOUT if start_timeout is None else start_timeout)
    return launch_elastic_function(call, elastic, ELASTIC_TIMEOUT if start_timeout is None else start_timeout)


def _call_as_rank(function: Callable[[], Any], elastic: bool) -> Any:
    if elastic:
        os.environ["HOROVOD_ELASTIC"] = "1"
    export_rank(os.environ)
    return function()
