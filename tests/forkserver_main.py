"""The process that forks for tests; see ``forkserver.py``. A child leaves the loop and runs as any Python would."""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import json
import os
import random
import runpy
import select
import socket
import sys
import tempfile
from contextlib import suppress
from typing import Any

# From this file's folder: the tests are no package here.
from preloaded import preload

_CLONE_NEWNET = 0x40000000
_code: int | None = None


def leave() -> None:
    """End this process after all other exit handlers, without freeing what was imported before the fork.

    To free it takes a third of a second, most of it to copy the pages that it lies in, and shows nothing of what the
    process did. A process that has threads still ends as any other: they may use what is freed.
    """
    if _code is None or len(os.listdir("/proc/self/task")) > 1:
        return
    gc.collect()
    with suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_code)


def serve(control: socket.socket) -> list[str]:
    """Fork at each request, and tell how each child ended; in a child return what it is to run."""
    ends: dict[int, tuple[int, int]] = {}
    while True:
        for ready in select.select([control, *ends], [], [])[0]:
            if ready in ends:
                pid, status = ends.pop(ready)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                os.write(status, f"{code}\n".encode())
                os.close(ready)
                os.close(status)
                continue
            raw, streams, *_ = socket.recv_fds(control, 1 << 20, 4)
            if not raw:
                # Whoever asked has ended, and with it the wish to know.
                os._exit(0)
            pid = os.fork()
            if pid == 0:
                control.close()
                for one, (_, other) in ends.items():
                    os.close(one)
                    os.close(other)
                return become(json.loads(raw), streams)
            *streams, status = streams
            for stream in streams:
                os.close(stream)
            os.write(status, f"{pid}\n".encode())
            ends[os.pidfd_open(pid)] = pid, status


def become(request: dict[str, Any], streams: list[int]) -> list[str]:
    """Take over session, network, streams, folder and environment."""
    os.setsid()
    if request["network"] is not None:
        with open(f"/run/netns/{request['network']}") as network:
            assert ctypes.CDLL(None).setns(network.fileno(), _CLONE_NEWNET) == 0, "this needs root"
    for number, stream in enumerate(streams):
        if number < 3:
            os.dup2(stream, number)
        os.close(stream)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environ"])
    tempfile.tempdir = None
    random.seed()
    if "SIMGPU_DEVICES" in os.environ and "torch" in sys.modules:
        load_simulated_accelerator()
    words: list[str] = request["words"]
    return words


def load_simulated_accelerator() -> None:
    """As ``import torch`` does where its folder is on the path."""
    sys.path[1:1] = os.environ["PYTHONPATH"].split(os.pathsep)
    importlib.import_module("simgpu").install()


def run(words: list[str]) -> None:
    """As ``python words…``."""
    global _code
    try:
        if words[0] == "-m":
            sys.argv, sys.path[0] = words[1:], os.getcwd()
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv, sys.path[0] = words, os.path.dirname(os.path.abspath(words[0]))
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        _code = 0 if end.code is None else end.code if isinstance(end.code, int) else None
        raise
    _code = 0


if __name__ == "__main__":
    # Before all imports, whose handlers are to be called first.
    atexit.register(leave)
    preload(sys.argv[2:])
    if "tutti.comm.shared_memory" in sys.modules:
        # As in worlds.py: ranks that wait for others leave the cores to all tests that compute.
        sys.modules["tutti.comm.shared_memory"]._YIELDS = 20  # type: ignore[attr-defined]
    run(serve(socket.socket(fileno=int(sys.argv[1]))))
