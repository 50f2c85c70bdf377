"""Launching where nothing goes wrong: environment, output, store, scripts and modules."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest

from tests.launching import launched, launching
from tutti.errors import UsageError
from tutti.launcher.launch import check_script, launch

PLAIN_DDP = """
import os, sys
import torch
import torch.distributed as dist
from helper import offset

dist.init_process_group("gloo")
total = torch.tensor([float(dist.get_rank() + offset)])
dist.all_reduce(total)
with open(f"result-{dist.get_rank()}", "w") as file:
    file.write(f"{__name__} {sys.argv[1:]} {total.item()}")
dist.destroy_process_group()
"""


def test_workers_find_torchrun_s_variables_and_all_succeed(tmp_path: Path) -> None:
    result = launched(
        tmp_path,
        """
        import json
        def entry():
            print(f"out of {RANK()}")
            (HERE / f"env-{RANK()}").write_text(json.dumps(dict(os.environ)))
        """,
        timeout=12.5,
    )
    assert (result.code, result.out, result.err) == (0, "out of 0\n", "")
    environs = [json.loads((tmp_path / f"env-{rank}").read_text()) for rank in range(3)]
    for rank, environ in enumerate(environs):
        assert [environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")] == [
            str(rank),
            str(rank),
            "3",
            "3",
        ]
        assert (environ["GROUP_RANK"], environ["GROUP_WORLD_SIZE"]) == ("0", "1")
        assert environ["TUTTI_TIMEOUT"] == "12.5"
        assert environ["GLOO_SOCKET_IFNAME"] in psutil.net_if_addrs()
        assert environ["OMP_NUM_THREADS"] == str(max(1, len(psutil.Process().cpu_affinity()) // 3))
    assert len({environ["TUTTI_STORE"] for environ in environs}) == 1
    assert [(tmp_path / "logs" / f"rank{rank}.log").read_text() for rank in range(3)] == [
        "",
        "out of 1\n",
        "out of 2\n",
    ]
    assert not list((tmp_path / "temporary").glob("tutti-*"))


def test_the_users_own_settings_stay(tmp_path: Path) -> None:
    result = launched(
        tmp_path,
        """
        def entry():
            import torch
            if RANK() == 0:
                print(os.environ["OMP_NUM_THREADS"], os.environ["GLOO_SOCKET_IFNAME"], torch.get_num_threads())
                print("wave" in sys.modules, torch.version.cuda is None)
        """,
        environ={"OMP_NUM_THREADS": "2", "GLOO_SOCKET_IFNAME": "eth7"},
        preload=("wave",),
    )
    settings, loaded = result.out.splitlines()
    assert (result.code, settings) == (0, "2 eth7 2")
    assert loaded in ("True True", "False False"), "what is to be preloaded is not, or before CUDA is forked"


@pytest.mark.parametrize("how", ["option", "environment"])
def test_all_ranks_shown(tmp_path: Path, how: str) -> None:
    body = """
        def entry():
            import time
            print("line of ", end="")
            time.sleep(0.5 if RANK() else 1.5)
            print(RANK())
        """
    unbuffered = {"PYTHONUNBUFFERED": "1"}
    if how == "option":
        result = launched(tmp_path, body, show_all=True, environ=unbuffered)
    else:
        result = launched(tmp_path, body, environ={"TUTTI_LOG_RANKS": "all", **unbuffered})
    assert sorted(result.out.splitlines()) == ["[rank 1] line of 1", "[rank 2] line of 2", "line of 0"]


def test_all_reduce_over_the_store_and_nothing_listens_beyond_this_host(tmp_path: Path) -> None:
    with launching(
        tmp_path,
        """
        def entry():
            import torch, torch.distributed as dist
            store = dist.FileStore(os.environ["TUTTI_STORE"], 3)
            dist.init_process_group("gloo", store=store, rank=RANK(), world_size=3)
            total = torch.tensor([float(RANK() + 1)])
            dist.all_reduce(total)
            (HERE / f"sum-{RANK()}").write_text(str(total.item()))
            ready()
            while not (HERE / "go").exists():
                time.sleep(0.02)
            dist.destroy_process_group()
        """,
    ) as running:
        running.wait_ready(3)
        everyone = [psutil.Process(running.launcher.pid), *running.workers()]
        stores = list((tmp_path / "temporary").glob("tutti-*"))
        modes = [store.stat().st_mode & 0o777 for store in stores]
        ports = [c.laddr.ip for p in everyone for c in p.net_connections("inet") if c.status == psutil.CONN_LISTEN]
        launcher_ports = everyone[0].net_connections("inet")
        (tmp_path / "go").touch()
        result = running.finish()
    assert result.code == 0
    assert modes == [0o700]
    assert len(everyone) == 7
    assert ports and set(ports) == {"127.0.0.1"}
    assert not launcher_ports
    assert [(tmp_path / f"sum-{rank}").read_text() for rank in range(3)] == ["6.0"] * 3
    assert not list((tmp_path / "temporary").glob("tutti-*"))


@pytest.mark.parametrize("module", [False, True])
def test_a_plain_ddp_script_runs_as_python_would_run_it(tmp_path: Path, module: bool) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "train.py").write_text(PLAIN_DDP)
    # A script finds its neighbours, a module what is in the current directory.
    ((tmp_path if module else package) / "helper.py").write_text("offset = 1\n")
    script = "package.train" if module else "package/train.py"
    arguments = (script, ["--epochs", "3"], module)
    result = launched(tmp_path, "", entry="run_script", args=arguments)
    assert (result.code, result.out, result.err) == (0, "", "")
    for rank in range(3):
        assert (tmp_path / f"result-{rank}").read_text() == "__main__ ['--epochs', '3'] 6.0"


def test_a_script_ends_as_a_program_does(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import atexit, threading, time\n"
        "from concurrent.futures import ThreadPoolExecutor\n"
        "atexit.register(lambda: print('exit handler'))\n"
        "threading.kept = ThreadPoolExecutor()\n"
        "threading.kept.submit(int)\n"
        "threading.Thread(target=lambda: (time.sleep(0.2), print('thread'))).start()\n"
        "raise SystemExit\n"
    )
    result = launched(tmp_path, "", entry="run_script", args=("script.py", []), processes=1)
    assert (result.code, result.out, result.err) == (0, "thread\nexit handler\n", "")


@pytest.mark.parametrize("leave", ["", "sys.exit()\n"])
@pytest.mark.parametrize("module", [False, True])
def test_what_a_script_has_made_ends_with_it(tmp_path: Path, module: bool, leave: str) -> None:
    """Files that it left open are written; functions know its names to the last."""
    (tmp_path / "script.py").write_text(
        "import atexit, sys\n"
        "file = open('left', 'w')\n"
        "file.write('open')\n"
        "def last():\n"
        "    file.write(', to the last')\n"
        "atexit.register(last)\n" + leave
    )
    arguments = ("script" if module else "script.py", [], module)
    result = launched(tmp_path, "", entry="run_script", args=arguments, processes=1)
    assert (result.code, result.out, result.err) == (0, "", "")
    assert (tmp_path / "left").read_text() == "open, to the last"


def test_threads_that_nobody_waits_for_say_nothing_at_the_end(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import threading, time\n"
        "class Slow:\n"
        "    def __del__(self, sleep=time.sleep):\n"
        "        sleep(0.2)\n"
        "slow = Slow()\n"
        "def look():\n"
        "    while True:\n"
        "        time.sleep(0.001)\n"
        "threading.Thread(target=look, daemon=True).start()\n"
    )
    result = launched(tmp_path, "", entry="run_script", args=("script.py", []), processes=1)
    assert (result.code, result.out, result.err) == (0, "", "")


def test_threads_come_before_the_end_of_what_a_script_has_made(tmp_path: Path) -> None:
    """As those of Gloo, which a DDP model that is freed would wait for with Python's lock."""
    (tmp_path / "script.py").write_text(
        "import sys, threading\n"
        "from helper import Model\n"
        "model = Model(threading.Event())\n"
        "sys.setswitchinterval(100)\n"
        "threading.Thread(target=model.wait).start()\n"
    )
    (tmp_path / "helper.py").write_text(
        "import time\n"
        "class Model:\n"
        "    def __init__(self, done):\n"
        "        self.done = done\n"
        "        self.wait = Waiting(done).wait\n"
        "    def __del__(self):\n"
        "        print(self.done.is_set())\n"
        "class Waiting:\n"
        "    def __init__(self, done):\n"
        "        self.done = done\n"
        "    def wait(self):\n"
        "        time.sleep(0.001)\n"
        "        self.done.set()\n"
    )
    result = launched(tmp_path, "", entry="run_script", args=("script.py", []), processes=1)
    assert (result.code, result.out, result.err) == (0, "True\n", "")


def test_a_restart_has_a_store_of_its_own(tmp_path: Path) -> None:
    result = launched(
        tmp_path,
        """
        def entry():
            if RANK() == 0:
                print(Path(os.environ["TUTTI_STORE"]).name)
            if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and RANK() == 1:
                sys.exit(3)
        """,
        restarts=1,
    )
    assert (result.code, result.out) == (0, "attempt-0\nattempt-1\n")
    assert result.err == "tutti: rank 1 exited with code 3\ntutti: restarting, 0 restarts left\n"
    assert not list((tmp_path / "logs").glob("failure-*"))


def test_a_worker_that_leaves_early_without_error_does_not_hang_the_rest(tmp_path: Path) -> None:
    result = launched(
        tmp_path,
        """
        def entry():
            if RANK() == 1:
                os._exit(0)
        """,
    )
    assert result.code == 0


def test_less_than_one_process_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot start 0 processes"):
        launch(print, (), processes=0, logs=tmp_path / "logs")
    assert not (tmp_path / "logs").exists()


def test_scripts_and_modules_are_checked_without_running_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    package = tmp_path / "checked_package"
    package.mkdir()
    for name in ("__init__.py", "train.py"):
        (package / name).write_text("raise RuntimeError('was imported')\n")
    check_script("checked_package/train.py")
    check_script("checked_package.train", module=True)
    for script, module in [
        ("missing.py", False),
        ("checked_package", False),
        ("missing_module", True),
        ("checked_package.missing", True),
        ("checked_package.train.deeper", True),
        ("..train", True),
    ]:
        with pytest.raises(UsageError, match="there is no"):
            check_script(script, module)
