"""Several hosts over SSH, played by a stand-in for ssh that runs the command here in an empty environment."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.forkserver import Process, run
from tests.launching import SAFETY_NET, SOURCE, until
from tutti.errors import UsageError
from tutti.launcher.engine import SlotsGone
from tutti.launcher.hosts import (
    Host,
    HostsEngine,
    command,
    parse_host_file,
    parse_hosts,
    plan_processes,
    store_endpoint,
)

SSH = """#!/bin/sh
while [ "$#" -gt 2 ]; do shift; done
echo "$1" >> {calls}
[ "$1" = gone ] && exit 255
exec env -i PATH="$PATH" HOME="$HOME" sh -c "$2"
"""

SCRIPT = """
import sys, time
import torch
import tutti

tutti.init()
net = torch.nn.Linear(2, 1)
run = tutti.prepare(net, "sgd:lr=0.1", torch.ones(12, 2), lambda m, b: m(b).square().mean(), batch_size=6)
for batch in run.epoch(0):
    run.step(batch)
print("rank", tutti.rank(), tutti.size(), tutti.local_rank(), tutti.cross_rank(), sys.argv[1:], flush=True)
if "fail" in sys.argv and tutti.rank() == 2:
    raise SystemExit(7)
if "wait" in sys.argv:
    with run.stopping() as reason:
        open(f"waits-{tutti.rank()}", "w").close()
        while not run.lifecycle.stop_asked:
            time.sleep(0.05)
        raise SystemExit(reason.exit_code)
"""
# Scripts that know nothing of tutti, whose import takes a fresh Python seconds; the second ends by itself too late.
STOPS = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
names = "RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK"
print("rank", *map(os.environ.get, names), sys.argv[1:], flush=True)
open(f"waits-{os.environ['RANK']}", "w").close()
time.sleep(600)
"""
SLEEPS = """
import os, time
print("rank", os.environ["RANK"], flush=True)
time.sleep(600)
"""


def test_hosts_are_read_and_filled_in_order() -> None:
    processes = plan_processes(parse_hosts("a:2,me@b:3,c"), 4, "a", 29500)
    assert [p.host.name for p in processes] == ["a", "a", "me@b", "me@b"]
    assert [p.environment["GROUP_RANK"] for p in processes] == ["0", "0", "1", "1"]
    assert processes[3].environment | {"RANK": "3", "LOCAL_RANK": "1"} == processes[3].environment
    assert {p.environment["WORLD_SIZE"] + p.environment["GROUP_WORLD_SIZE"] for p in processes} == {"42"}
    assert len(plan_processes(parse_hosts("a:2,b:3"), None, "a", 1)) == 5


@pytest.mark.parametrize(
    "text", ["", "a:0", "a:x", "-oProxyCommand=x:2", "a b:1", "a:1,a:2", "a;rm:1", "a:1,me@a:1", "a:1:2"]
)
def test_what_is_no_list_of_hosts_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_hosts(text)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a slots=2 # two\n\n b\n", "a:2,b:1"),
        ("a:3\nb max_slots=4 slots=1\n", "a:3,b:1"),
        ("a max-slots=4", "a:1"),
        ("fe80::1 slots=2", "fe80::1:2"),
    ],
)
def test_a_host_file_as_of_open_mpi_or_mpich(text: str, hosts: str, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text(text)
    assert parse_host_file(tmp_path / "hosts") == hosts


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"a slots=2\nb c d\n", r"the host file has 'b c d' .*hosts:2"),
        (b"a slots= 2\n", "the host file has 'a slots= 2'"),
        (b"a cores=2\n", "the host file has 'a cores=2'"),
        (b"a:2 slots=3\n", "the host file has 'a:2 slots=3'"),
        (b"a slots=2\nb slots=two\n", r"the host file has 'b slots=two' .*hosts:2"),
        (b"a slots=0\n", "the host file has 'a slots=0'"),
        (b"a:1:2\n", "the host file has 'a:1:2'"),
        (b"# none\n", "has no host"),
        (b"\xff\xfea", "it is no text in UTF-8"),
    ],
)
def test_what_is_no_host_file_is_refused(text: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_bytes(text)
    with pytest.raises(UsageError, match=said):
        parse_host_file(tmp_path / "hosts")


def test_more_processes_than_room() -> None:
    with pytest.raises(UsageError, match="5 processes do not fit on hosts with room for 4"):
        plan_processes(parse_hosts("a:2,b:2"), 5, "a", 29500)


def test_words_reach_another_host_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUTTI_X", "it's $HOME; `x`")
    monkeypatch.setenv("TORCH_NCCL_TRACE_BUFFER_SIZE", "7")
    [process] = plan_processes([Host("far", 1)], None, "far", 29500)
    ssh = command(process, ["python", "a b.py", "$(rm)"], Path("/some dir"))
    assert ssh[:-1] == ["ssh", "-T", "-o", "BatchMode=yes", "far"]
    shown = subprocess.run(
        ["sh", "-c", ssh[-1].replace("cd '/some dir' && exec env", "printf '%s\\n'")], capture_output=True, text=True
    ).stdout.splitlines()
    assert {"TUTTI_X=it's $HOME; `x`", "TORCH_NCCL_TRACE_BUFFER_SIZE=7"} <= set(shown)
    assert shown[-3:] == ["python", "a b.py", "$(rm)"]


def test_where_they_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.delenv("MASTER_PORT", raising=False)
    address, port = store_endpoint(parse_hosts("me@far:2,b:2"))
    assert address == "far" and 10_000 <= port < 30_000
    monkeypatch.setenv("MASTER_PORT", "29511")
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    assert store_endpoint(parse_hosts("far:2")) == ("10.0.0.1", 29511)


class Launched:
    """``tutti run -H`` of the script, with the stand-in first on the path."""

    def __init__(self, folder: Path, hosts: str, *arguments: str, script: str = SCRIPT) -> None:
        calls = folder / "calls"
        (folder / "ssh").write_text(SSH.format(calls=calls))
        (folder / "ssh").chmod(0o755)
        (folder / "script.py").write_text(script)
        self.folder = folder
        words = ["-m", "tutti", "run", "-H", hosts, "--logs", "logs", str(folder / "script.py"), *arguments]
        environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "MASTER_ADDR": "127.0.0.1"}
        # What a host needs of the environment is passed on by name.
        environment["PYTHONPATH"] = str(SOURCE)
        self.process = Process(words, folder, environment, torch=False)

    def log(self, rank: int) -> str:
        path = self.folder / "logs" / f"rank{rank}.log"
        return path.read_text() if path.is_file() else ""

    def running(self) -> list[str]:
        """Processes of this script that are still there."""
        shown = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
        return [line for line in shown.splitlines() if str(self.folder) in line]


@pytest.mark.full
def test_three_processes_on_two_hosts(tmp_path: Path) -> None:
    launched = Launched(tmp_path, "localhost:1,127.0.0.2:2", "a b")
    out, err = launched.process.communicate(timeout=180)
    assert (launched.process.returncode, out) == (0, "rank 0 3 0 0 ['a b']\n"), err
    assert "rank 1 3 0 1 ['a b']" in launched.log(1) and "rank 2 3 1 1 ['a b']" in launched.log(2)
    assert (tmp_path / "calls").read_text().split() == ["127.0.0.2"] * 2


@pytest.mark.full
def test_the_first_failure_ends_all_and_is_named(tmp_path: Path) -> None:
    launched = Launched(tmp_path, "localhost:1,127.0.0.2:2", "fail", "wait")
    _, err = launched.process.communicate(timeout=180)
    assert launched.process.returncode == 7
    assert "rank 2 on 127.0.0.2 exited with code 7" in err and "rank 2 3 1 1" in err
    assert launched.running() == []


def test_a_host_that_cannot_be_reached(tmp_path: Path) -> None:
    launched = Launched(tmp_path, "localhost:1,gone:1")
    _, err = launched.process.communicate(timeout=180)
    assert launched.process.returncode == 5
    assert "no connection to gone by ssh" in err
    assert launched.running() == []


def test_a_lost_host_counts_again_when_ssh_reaches_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in for ssh refuses the host as long as the file is there."""
    down = tmp_path / "down"
    down.touch()
    (tmp_path / "ssh").write_text(f"#!/bin/sh\n[ -e {down} ] && exit 255\nexit 0\n")
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    engine = HostsEngine(parse_hosts("far:2"), tmp_path)
    engine.start(1, ["-c", ""], {})
    until(lambda: None not in engine.poll())
    assert [ended.lost != "" for ended in engine.poll() if ended is not None] == [True]
    assert sum(engine.slots().values()) == 0
    with pytest.raises(SlotsGone):
        engine.start(1, ["-c", ""], {})
    down.unlink()
    until(lambda: sum(engine.slots().values()) == 2)
    engine.stop(signal.SIGKILL)


@pytest.mark.parametrize("script", [STOPS, pytest.param(SCRIPT, marks=pytest.mark.full)], ids=["plain", "tutti"])
def test_a_signal_reaches_every_host_once(script: str, tmp_path: Path) -> None:
    launched = Launched(tmp_path, "localhost:1,127.0.0.2:2", "wait", "a b", script=script)
    until(lambda: len(list(tmp_path.glob("waits-*"))) == 3 or launched.process.poll() is not None)
    launched.process.send_signal(signal.SIGTERM)
    out, err = launched.process.communicate(timeout=120)
    assert (launched.process.returncode, out) == (75, "rank 0 3 0 0 ['wait', 'a b']\n"), err
    assert (tmp_path / "calls").read_text().split() == ["127.0.0.2"] * 2
    assert launched.running() == []


def test_nothing_outlives_a_launcher_that_is_killed(tmp_path: Path) -> None:
    launched = Launched(tmp_path, "127.0.0.2:1,127.0.0.3:1", script=SLEEPS)
    until(lambda: "rank 1" in launched.log(1) or launched.process.poll() is not None)
    launched.process.kill()
    launched.process.wait()
    until(lambda: launched.running() == [])


@pytest.mark.parametrize("option", ["--on=local", "--show-all"])
def test_what_does_not_go_with_hosts(option: str, tmp_path: Path) -> None:
    (tmp_path / "s.py").write_text("")
    words = ["-m", "tutti", "run", "-H", "localhost:2", option, "s.py"]
    done = run(words, tmp_path, os.environ, SAFETY_NET, torch=False)
    assert done.returncode == 2 and "cannot be combined with" in done.stderr and "-H" in done.stderr


def test_a_machine_without_ssh_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    engine = HostsEngine(parse_hosts("far:1"), tmp_path)
    with pytest.raises(UsageError, match="there is no ssh on this machine, which starts ranks on far"):
        engine.start(1, ["-c", ""], {})


def test_ranks_of_a_node_share_the_launchers_session(tmp_path: Path) -> None:
    """Linux yields a processor within a session alone; a terminal's signals go to process groups."""
    engine = HostsEngine([Host("localhost", 2)], tmp_path)
    engine.start(2, ["-c", "import sys; sys.stdin.read()"], {})
    try:
        pids = [process.pid for _, process in engine._ranks.started]
        assert {os.getsid(pid) for pid in pids} == {os.getsid(0)}
        assert [os.getpgid(pid) for pid in pids] == pids
    finally:
        engine.stop(signal.SIGKILL)
