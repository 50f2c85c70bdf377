"""Faults by rank: exceptions, exit codes, real signals to workers and launcher, ranks that never arrive."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.launching import alive, launched, launching, to_terminal_group, until
from tutti.launcher.elastic_driver import ElasticOptions
from tutti.launcher.failure import Failure, from_death, root_cause

pytestmark = [pytest.mark.faults, pytest.mark.row(28)]

SLEEP = """
def entry():
    ready()
    time.sleep(600)
"""


def test_an_error_of_one_rank_is_told_with_its_exit_code(tmp_path: Path) -> None:
    result = launched(
        tmp_path,
        """
        from tutti.errors import DataError
        def entry():
            if RANK() == 2:
                print("reading the folder")
                raise DataError("no images", where="folder x", remedy="give --data")
            time.sleep(600)
        """,
        processes=4,
    )
    assert result.code == 3
    first, *rest = result.err.splitlines()
    assert first == "tutti: rank 2 failed: DataError: no images (folder x). Give --data."
    assert rest == [f"  last lines of {tmp_path / 'logs' / 'rank2.log'}:", "    reading the folder"]
    record = json.loads((tmp_path / "logs" / "failure-rank2.json").read_text())
    assert (record["rank"], record["kind"], record["exit_code"]) == (2, "DataError", 3)
    assert "raise DataError" in record["traceback"]
    assert not list((tmp_path / "temporary").glob("tutti-*"))


@pytest.mark.parametrize("rank", [0, 1])
def test_an_unexpected_error_shows_the_users_frames_only(tmp_path: Path, rank: int) -> None:
    (tmp_path / "script.py").write_text(f"import os\nif os.environ['RANK'] == '{rank}':\n    1 / 0\n")
    result = launched(tmp_path, "", entry="run_script", args=("script.py", []))
    assert result.code == 1
    assert result.err.startswith(f"tutti: rank {rank} failed: ZeroDivisionError: division by zero\n")
    assert "1 / 0" in result.err
    assert "runpy" not in result.err and "child.py" not in result.err and "torch" not in result.err


def test_the_first_cause_comes_before_what_follows_from_it(tmp_path: Path) -> None:
    result = launched(
        tmp_path,
        """
        def entry():
            import torch, torch.distributed as dist
            store = dist.FileStore(os.environ["TUTTI_STORE"], 3)
            dist.init_process_group("gloo", store=store, rank=RANK(), world_size=3)
            dist.all_reduce(torch.ones(1))
            try:
                if RANK() == 1:
                    raise ValueError("the first cause")
                dist.all_reduce(torch.ones(1))
            finally:
                # A peer notices before this rank has said why.
                dist.destroy_process_group()
                while RANK() == 1 and not list((HERE / "logs").glob("failure-rank*.json")):
                    time.sleep(0.01)
        """,
    )
    assert result.code == 1
    assert result.err.startswith("tutti: rank 1 failed: ValueError: the first cause\n")
    peers = [json.loads((tmp_path / "logs" / f"failure-rank{rank}.json").read_text()) for rank in (0, 2)]
    assert [peer["exit_code"] for peer in peers] == [5, 5]


@pytest.mark.parametrize(("number", "ranks"), [(signal.SIGKILL, 3), (signal.SIGSEGV, 4)])
def test_a_killed_rank_is_named(tmp_path: Path, number: signal.Signals, ranks: int) -> None:
    result = launched(
        tmp_path,
        f"""
        def entry():
            import torch, torch.distributed as dist
            store = dist.FileStore(os.environ["TUTTI_STORE"], {ranks})
            dist.init_process_group("gloo", store=store, rank=RANK(), world_size={ranks})
            dist.all_reduce(torch.ones(1))
            if RANK() == 2:
                os.kill(os.getpid(), {number.value})
            dist.all_reduce(torch.ones(1))
        """,
        processes=ranks,
    )
    assert result.code == 5
    assert result.err.startswith(f"tutti: rank 2 was killed by {number.name} (")
    assert str(tmp_path / "logs" / "rank2.log") in result.err
    if number == signal.SIGSEGV:
        assert " in entry" in result.err and "child.py" not in result.err


@pytest.mark.parametrize(
    ("leave", "code", "said"),
    [
        ("sys.exit(9)", 9, "tutti: rank 1 exited with code 9\n"),
        ("sys.exit('no more')", 1, "tutti: rank 1 exited with code 1: no more\n"),
        ("os._exit(7)", 7, "tutti: rank 1 ended with exit code 7 and no exception\n"),
        ("sys.exit(75)", 75, ""),
        ("raise OSError(28, 'No space left on device')", 8, "tutti: rank 1 failed: OSError: [Errno 28] No space"),
    ],
)
def test_exit_codes(tmp_path: Path, leave: str, code: int, said: str) -> None:
    result = launched(tmp_path, f"def entry():\n    if RANK() == 1:\n        {leave}\n")
    assert result.code == code
    assert result.err.startswith(said)
    if not said:
        assert not result.err


def test_a_rank_that_ignores_sigterm_is_ended_after_a_failure(tmp_path: Path) -> None:
    with launching(
        tmp_path,
        """
        def entry():
            if RANK() == 0:
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                ready()
                time.sleep(600)
            while not (HERE / "ready-0").exists():
                time.sleep(0.02)
            if RANK() == 1:
                ready()
                while not (HERE / "go").exists():
                    time.sleep(0.02)
                raise ValueError("failed")
        """,
    ) as running:
        running.wait_ready(2)
        workers = running.workers()
        (tmp_path / "go").touch()
        result = running.finish()
    assert result.code == 1
    assert result.err.startswith("tutti: rank 1 failed: ValueError: failed")
    assert not alive(workers)


@pytest.mark.row(3)
def test_kill_9_of_the_launcher_leaves_no_process(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    body = """
        import subprocess
        from multiprocessing import Process
        from tutti.launcher.child import die_with_parent
        def loader():
            die_with_parent(0)
            (HERE / f"ready-loader-{RANK()}").touch()
            time.sleep(600)
        def entry():
            Process(target=loader).start()
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            ready()
            time.sleep(600)
        """
    with launching(tmp_path, body) as running:
        running.wait_ready(6)
        workers = running.workers()
        running.launcher.kill()
        killed = time.monotonic()
        until(lambda: not alive(workers))
        record_property("until the last worker is gone, s", time.monotonic() - killed)
    assert len(workers) == 9


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129), (signal.SIGUSR1, 138), (signal.SIGUSR2, 140)],
)
def test_a_signal_to_the_launcher_ends_everything(tmp_path: Path, number: signal.Signals, code: int) -> None:
    body = """
        import subprocess
        def entry():
            helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            ready()
            time.sleep(600)
        """
    with launching(tmp_path, body) as running:
        running.wait_ready(3)
        workers = running.workers()
        running.launcher.send_signal(number)
        result = running.finish()
        assert not alive(workers)
    assert len(workers) == 9
    assert (result.code, result.out, result.err) == (code, "", "")
    assert not list((tmp_path / "temporary").glob("tutti-*"))


@pytest.mark.parametrize("elastic", [None, ElasticOptions(np=3, min_np=3, max_np=3)], ids=["fixed", "elastic"])
def test_the_end_of_a_terminal_ends_no_run_under_nohup(tmp_path: Path, elastic: ElasticOptions | None) -> None:
    body = """
        from tutti.launcher.elastic_driver import ElasticOptions
        # As nohup does before it becomes the command.
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        def entry():
            ready()
            while not (HERE / "go").exists():
                time.sleep(0.02)
            sys.exit(0 if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else 1)
        """
    with launching(tmp_path, body, elastic=elastic) as running:
        running.wait_ready(3)
        running.launcher.send_signal(signal.SIGHUP)
        (tmp_path / "go").touch()
        result = running.finish()
    assert (result.code, result.out, result.err) == (0, "", "")


def test_ctrl_c_in_a_terminal_reaches_each_worker_once_and_shows_no_traceback(tmp_path: Path) -> None:
    body = """
        def entry():
            def count(number, frame):
                with (HERE / f"signals-{RANK()}").open("a") as file:
                    file.write("x")
            signal.signal(signal.SIGINT, count)
            ready()
            while not (HERE / f"signals-{RANK()}").exists():
                time.sleep(0.02)
            time.sleep(0.3)
            raise KeyboardInterrupt
        """
    with launching(tmp_path, body) as running:
        running.wait_ready(3)
        to_terminal_group(running, signal.SIGINT)
        result = running.finish()
    assert (result.code, result.out, result.err) == (130, "", "")
    assert [(tmp_path / f"signals-{rank}").read_text() for rank in range(3)] == ["x"] * 3
    assert all("Traceback" not in log.read_text() for log in (tmp_path / "logs").glob("*.log"))


def test_workers_that_save_on_sigterm_are_waited_for_and_75_comes_out(tmp_path: Path) -> None:
    body = """
        def entry():
            def save(number, frame):
                time.sleep(0.2 * RANK() * 8)
                (HERE / f"saved-{RANK()}").touch()
                sys.exit(75)
            signal.signal(signal.SIGTERM, save)
            ready()
            time.sleep(600)
        """
    with launching(tmp_path, body) as running:
        running.wait_ready(3)
        running.launcher.send_signal(signal.SIGTERM)
        result = running.finish()
    assert (result.code, result.err) == (75, "")
    assert len(list(tmp_path.glob("saved-*"))) == 3


@pytest.mark.parametrize("elastic", [None, ElasticOptions(np=3, min_np=3, max_np=3)], ids=["fixed", "elastic"])
def test_a_second_signal_ends_at_once(tmp_path: Path, elastic: ElasticOptions | None) -> None:
    body = """
        import subprocess
        from tutti.launcher.elastic_driver import ElasticOptions
        def entry():
            asked = []
            def ask(number, frame):
                (HERE / f"asked-{RANK()}").touch()
                asked.append(number)
            signal.signal(signal.SIGINT, ask)
            helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            ready()
            # Rank 0 ends and leaves its helper behind; the others go on.
            while RANK() or not asked:
                time.sleep(0.02)
        """
    with launching(tmp_path, body, grace=10_000.0, elastic=elastic) as running:
        running.wait_ready(3)
        workers = running.workers()
        running.launcher.send_signal(signal.SIGINT)
        until(lambda: len(list(tmp_path.glob("asked-*"))) == 3)
        running.launcher.send_signal(signal.SIGINT)
        result = running.finish()
    assert (result.code, result.err) == (130, "")
    assert not alive(workers)


def test_workers_that_do_not_end_are_killed_after_the_grace(tmp_path: Path) -> None:
    body = """
        def entry():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            ready()
            time.sleep(600)
        """
    with launching(tmp_path, body, grace=0.5) as running:
        running.wait_ready(3)
        workers = running.workers()
        running.launcher.send_signal(signal.SIGTERM)
        result = running.finish()
    assert result.code == 143
    assert not alive(workers)


def test_a_rank_that_never_arrives(tmp_path: Path) -> None:
    result = launched(
        tmp_path,
        """
        from datetime import timedelta
        def entry():
            import torch.distributed as dist
            if RANK() == 2:
                time.sleep(600)
            store, limit = dist.FileStore(os.environ["TUTTI_STORE"], 3), timedelta(seconds=1.5)
            dist.init_process_group("gloo", store=store, rank=RANK(), world_size=3, timeout=limit)
        """,
    )
    assert result.code == 5
    assert "tutti: rank 2" not in result.err and "failed: " in result.err


def test_a_wrong_address_is_named(tmp_path: Path) -> None:
    result = launched(
        tmp_path,
        """
        from datetime import timedelta
        def entry():
            import torch.distributed as dist
            if RANK() == 1:
                dist.TCPStore("127.0.0.1", 9, 3, False, timedelta(seconds=1))
        """,
    )
    assert result.code == 5
    assert result.err.startswith("tutti: rank 1 failed: Dist")
    assert "127.0.0.1" in result.err and "9" in result.err


def test_order_of_causes() -> None:
    peer = Failure(0, 1.0, "PeerError", "", 5)
    data = Failure(1, 2.0, "DataError", "", 3)
    later = Failure(3, 2.5, "ValueError", "", 1)
    killed = from_death(2, -signal.SIGKILL, 3.0)
    aborted = from_death(2, -signal.SIGABRT, 3.0)
    assert root_cause([peer, later, data]) == data
    assert root_cause([peer, data, killed]) == killed
    assert root_cause([peer, data, aborted]) == data
    assert root_cause([peer, aborted]) == aborted
    assert root_cause([peer]) == peer


def test_workers_are_in_no_process_group_of_the_terminal(tmp_path: Path) -> None:
    with launching(tmp_path, SLEEP) as running:
        running.wait_ready(3)
        groups = {os.getpgid(worker.pid) for worker in running.workers()}
        assert psutil.Process(running.launcher.pid).is_running()
        assert len(groups) == 3 and running.launcher.pid not in groups
