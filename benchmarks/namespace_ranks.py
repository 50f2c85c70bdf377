"""Ranks in network namespaces, forked from a process that has imported tutti, so that sixteen start in seconds.

A namespace is a node, with a link of limited rate to a common switch (``limited_links.cluster``). Forking is safe only
as long as this process has computed nothing with torch.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

_CLONE_NEWNET, _CLONE_NEWNS = 0x40000000, 0x00020000
_MS_BIND, _MS_REC, _MS_PRIVATE = 4096, 16384, 1 << 18
_SHM = "/dev/shm"
_PORT = 29577
_FOREIGN = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "MASTER_", "SLURM_", "OMPI_", "PMI", "GLOO_", "TUTTI_", "OMP_")


def rank_environment(rank: int, nodes: int, each: int) -> dict[str, str]:
    """Return what torchrun would tell a rank of ``nodes`` nodes with ``each`` ranks.

    >>> rank_environment(3, 2, 2)["GROUP_RANK"], rank_environment(3, 2, 2)["LOCAL_RANK"]
    ('1', '1')
    """
    node, local = divmod(rank, each)
    place = {
        "RANK": rank,
        "WORLD_SIZE": nodes * each,
        "LOCAL_RANK": local,
        "LOCAL_WORLD_SIZE": each,
        "GROUP_RANK": node,
        "GROUP_WORLD_SIZE": nodes,
        "MASTER_ADDR": "10.78.0.1",
        "MASTER_PORT": _PORT,
        "OMP_NUM_THREADS": 1,
    }
    return {name: str(value) for name, value in place.items()}


def run_ranks(hosts: Sequence[str], each: int, call: Callable[[], None], folder: Path, timeout: float) -> None:
    """Run ``call`` in ``each`` ranks on every node, and wait for all.

    Args:
        hosts: names of the namespaces.
        each: ranks of a node.
        call: what a rank does, in a process of its own.
        folder: receives what each rank writes, ``rank-N.log``.
        timeout: seconds, after which all are ended.

    Raises:
        RuntimeError: a rank failed or the time is over; with the end of what it wrote.
    """
    folder.mkdir(parents=True, exist_ok=True)
    logs = [folder / f"rank-{rank}.log" for rank in range(len(hosts) * each)]
    pids: dict[int, int] = {}
    memories = [Path(tempfile.mkdtemp(prefix=f"tutti-{os.getpid()}-", dir=_SHM)) for _ in hosts]
    for rank, log in enumerate(logs):
        environ = rank_environment(rank, len(hosts), each)
        node = rank // each
        pids[_fork(partial(_become, hosts[node], memories[node], environ, log), call)] = rank
    running, end, failed = dict(pids), time.monotonic() + timeout, dict[int, str]()
    try:
        while running and time.monotonic() < end and not failed:
            for pid in list(running):
                done, status = os.waitpid(pid, os.WNOHANG)
                code = os.waitstatus_to_exitcode(status) if done else 0
                if done:
                    rank = running.pop(pid)
                if code:
                    failed[rank] = f"exit code {code}"
            time.sleep(0.05)
        # The others of a failed job end by themselves, and say why.
        grace = time.monotonic() + 5
        while failed and running and time.monotonic() < grace:
            running = {pid: rank for pid, rank in running.items() if not os.waitpid(pid, os.WNOHANG)[0]}
            time.sleep(0.05)
        failed |= {} if failed else dict.fromkeys(running.values(), f"still running after {timeout:g} s")
    finally:
        for pid in pids:
            # A rank leads a session, in which its servers and watchdogs are.
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        for pid in running:
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)
        for memory in memories:
            shutil.rmtree(memory, ignore_errors=True)
    if failed:
        rank, why = min(failed.items())
        raise RuntimeError(f"rank {rank}: {why}: {logs[rank].read_text(errors='replace')[-1500:]}")


def tutti_command(words: Sequence[str]) -> None:
    """Run ``tutti words…`` in this process, as ``python -m tutti`` does."""
    sys.argv = ["tutti", *words]
    runpy.run_module("tutti", run_name="__main__", alter_sys=True)


def _fork(become: Callable[[], None], call: Callable[[], None]) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        become()
        call()
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _check(failed: int, what: str) -> None:
    if failed:
        raise OSError(ctypes.get_errno(), what)


def _become(host: str, memory: Path, environ: Mapping[str, str], log: Path) -> None:
    """Take over session, network, shared memory, streams and environment of a rank."""
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    system = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{host}") as network:
        _check(system.setns(network.fileno(), _CLONE_NEWNET), "cannot enter the network namespace")
    # Nodes have no memory in common, in which tutti's ranks would exchange what should take the links.
    _check(system.unshare(_CLONE_NEWNS), "cannot leave the mount namespace")
    _check(system.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None), "cannot make mounts private")
    _check(system.mount(bytes(memory), _SHM.encode(), None, _MS_BIND, None), "cannot mount a node's memory")
    nothing = os.open(os.devnull, os.O_RDONLY)
    said = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for number, stream in enumerate((nothing, said, said)):
        os.dup2(stream, number)
    for name in [name for name in os.environ if name.startswith(_FOREIGN)]:
        del os.environ[name]
    os.environ.update(environ)
