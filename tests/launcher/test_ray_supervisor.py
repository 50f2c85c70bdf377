"""The actor's class, called here as Ray calls it there: it needs no cluster."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launching import SAFETY_NET
from tutti.errors import UsageError
from tutti.launcher.ray_supervisor import RankSupervisor

TETHERED = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
from tutti.launcher.stdin_control import control_by_stdin
control_by_stdin(os.environ)
print("out", os.environ["MARK"], flush=True)
time.sleep(600)
"""


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[RankSupervisor]:
    made = RankSupervisor(lease=SAFETY_NET)
    yield made
    made.signal(signal.SIGKILL)


def start(supervisor: RankSupervisor, folder: Path, script: str = TETHERED) -> None:
    path = {"PYTHONPATH": ":".join(sys.path), "MARK": "a mark"}
    supervisor.start(["-c", script], path, str(folder))


def until(supervisor: RankSupervisor, text: bytes = b"", ended: bool = False) -> tuple[int | None, bytes]:
    """Poll until the process has written ``text`` or has ended; its exit code, and all that it wrote."""
    written, limit = b"", time.monotonic() + SAFETY_NET
    while time.monotonic() < limit:
        code, out, err = supervisor.poll()
        written += out + err
        if code is not None or (not ended and text in written):
            return code, written
        time.sleep(0.01)
    raise AssertionError(f"only {written!r}")


def test_signals_go_over_standard_input_and_output_comes_back(supervisor: RankSupervisor, tmp_path: Path) -> None:
    start(supervisor, tmp_path)
    assert until(supervisor, b"out a mark\n")[0] is None
    supervisor.signal(signal.SIGTERM)
    assert until(supervisor, ended=True)[0] == 75


def test_a_poll_waits_for_output_and_for_the_end(supervisor: RankSupervisor, tmp_path: Path) -> None:
    start(supervisor, tmp_path, "import os, sys; os.write(1, b'out'); sys.stdin.read()")
    assert supervisor.poll(1e6) == (None, b"out", b"")
    assert supervisor.poll(0.01) == (None, b"", b"")
    ending = threading.Timer(0.1, supervisor.signal, [signal.SIGKILL])
    ending.start()
    assert supervisor.poll(1e6) == (-signal.SIGKILL, b"", b"")
    ending.join()


def test_the_end_of_the_actor_is_that_of_the_process(supervisor: RankSupervisor, tmp_path: Path) -> None:
    start(supervisor, tmp_path)
    until(supervisor, b"out")
    process = supervisor._process
    assert process is not None and process.stdin is not None
    process.stdin.close()
    assert until(supervisor, ended=True)[0] == -signal.SIGKILL


def test_a_silent_launcher_is_gone_only_where_the_head_is_silent_too(tmp_path: Path) -> None:
    asked: list[bool] = []

    def covered() -> bool:
        asked.append(len(asked) < 2)
        return asked[-1]

    supervisor = RankSupervisor(lease=0.1, covered=covered)
    start(supervisor, tmp_path)
    assert supervisor._process is not None
    assert supervisor._process.wait(SAFETY_NET) == -signal.SIGKILL
    assert supervisor.poll()[0] == -signal.SIGKILL
    assert asked[:3] == [True, True, False]


def test_a_folder_that_a_node_does_not_have_is_refused(supervisor: RankSupervisor, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no such working directory .*absent on .*code=shared"):
        supervisor.start(["-c", ""], {}, str(tmp_path / "absent"))


def test_much_output_arrives_whole(supervisor: RankSupervisor, tmp_path: Path) -> None:
    start(supervisor, tmp_path, "import sys; sys.stdout.write('x' * 3_000_000); sys.exit(7)")
    code, written = until(supervisor, ended=True)
    assert (code, len(written)) == (7, 3_000_000)


def test_ranks_share_the_session_of_their_actors(supervisor: RankSupervisor, tmp_path: Path) -> None:
    start(supervisor, tmp_path)
    assert supervisor._process is not None
    pid = supervisor._process.pid
    assert (os.getsid(pid), os.getpgid(pid)) == (os.getsid(0), pid)
