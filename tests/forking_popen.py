"""``subprocess.Popen`` that forks where it is to start this Python, for commands under test that start others.

A command that was forked with torch imported, and has no threads, has in its memory what a new Python would import
for three seconds. The child has a session, streams, signals, folder and environment of its own, and ends as a process
does. ``TESTS_EXEC=1`` in a command's environment lets it start new Pythons, as some test of each such command does.
"""

from __future__ import annotations

import atexit
import fcntl
import inspect
import os
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing import process
from typing import Any, NoReturn

EXEC = "TESTS_EXEC"
# Options of Popen that a fork does not follow.
_OTHER = ("executable", "preexec_fn", "shell", "gid", "gids", "uid")


def install(run: Callable[[list[str]], None]) -> None:
    """Let this process fork for ``python words…``, which the child gives to ``run``."""
    path = sys.path[:]
    names = inspect.getfullargspec(subprocess.Popen._execute_child).args[1:]  # type: ignore[attr-defined]

    class ForkingPopen(subprocess.Popen):  # type: ignore[type-arg]
        def _execute_child(self, *values: Any) -> None:
            told = dict(zip(names, values, strict=True))
            found = python_words(told["args"], os.environ if told["env"] is None else told["env"])
            alone = len(os.listdir("/proc/self/task")) == 1
            if found is None or not alone or any(told[name] not in (None, False) for name in _OTHER):
                super()._execute_child(*values)  # type: ignore[misc]
                return
            with suppress(OSError, ValueError):
                sys.stdout.flush()
                sys.stderr.flush()
            self.pid = os.fork()
            if self.pid == 0:
                _be_child(told, *found, path, run)
            self._child_created = True
            streams = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
            self._close_pipe_fds(*(told[name] for name in streams))  # type: ignore[attr-defined]

    subprocess.Popen = ForkingPopen  # type: ignore[misc]


def python_words(args: Any, environ: Mapping[str, str]) -> tuple[list[str], dict[str, str]] | None:
    """Arguments and environment of a command line that starts this Python, perhaps by ``env``; None of another one."""
    words, environ = [os.fspath(word) for word in args] if isinstance(args, list | tuple) else [], dict(environ)
    if words[:1] == ["env"]:
        words = words[1:]
        while words and "=" in words[0]:
            name, _, value = words.pop(0).partition("=")
            environ[name] = value
    if words[:1] != [sys.executable]:
        return None
    words = words[2:] if words[1:2] == ["-P"] else words[1:]
    if not words or EXEC in environ or (words[0].startswith("-") and words[0] != "-m"):
        return None
    return words, environ


def _be_child(
    told: dict[str, Any], words: list[str], environ: dict[str, str], path: list[str], run: Callable[[list[str]], None]
) -> NoReturn:
    code = 1
    interrupted = False
    try:
        _become_new(told, environ)
        sys.path[:] = path
        run(words)
        code = 0
    except SystemExit as end:
        code = 0 if end.code is None else end.code if isinstance(end.code, int) else 1
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException as error:
        interrupted = isinstance(error, KeyboardInterrupt)
        traceback.print_exc()
    finally:
        with suppress(BaseException):
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
        with suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        if interrupted:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        os._exit(code)


def _become_new(told: dict[str, Any], environ: dict[str, str]) -> None:
    """Take over session, streams, folder, signals and environment, and drop what belongs to the parent."""
    if told["start_new_session"]:
        os.setsid()
    elif told["process_group"] >= 0:
        os.setpgid(0, told["process_group"])
    streams = [told["p2cread"], told["c2pwrite"], told["errwrite"]]
    # Copies with other numbers, so that no stream takes the place of another one.
    high = [n if stream == -1 else fcntl.fcntl(stream, fcntl.F_DUPFD, 3) for n, stream in enumerate(streams)]
    for number, stream in enumerate(high):
        if stream != number:
            os.dup2(stream, number)
    kept = sorted(told["pass_fds"])
    for first, end in zip([3, *(one + 1 for one in kept)], [*kept, os.sysconf("SC_OPEN_MAX")], strict=True):
        os.closerange(first, end)
    if told["cwd"] is not None:
        os.chdir(told["cwd"])
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(environ)
    for name, number in (("stdout", 1), ("stderr", 2)):
        stream = os.fdopen(number, "w", buffering=1 if number == 2 else -1, errors="backslashreplace", closefd=False)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    sys.stdin = os.fdopen(0, closefd=False)
    tempfile.tempdir = None
    atexit._clear()
    process._children.clear()  # type: ignore[attr-defined]
