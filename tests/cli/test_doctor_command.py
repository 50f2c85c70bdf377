"""``tutti doctor`` on this machine, on machines that are broken on purpose, and with measurements that go wrong."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from tests import forkserver
from tests.launching import SAFETY_NET
from tutti import cgroup
from tutti.cli import doctor_command
from tutti.doctor import collective_probe, limits, machine
from tutti.doctor.finding import Finding, checked, conclude
from tutti.doctor.software import EXTRAS
from tutti.errors import ExitCode, PeerError

ROOT = Path(__file__).parents[2]
LINES, COLUMNS = 40, 100

KEYS = {
    "versions": ("tutti", "python", "torch", "torch_import_seconds"),
    "cuda": ("cuda", "nccl", "driver"),
    "gpus": ("gpus", "usable_by_torch"),
    "backends": ("gloo", "nccl", "mpi"),
    "module": ("path", "distribution", "foreign", "copies"),
    "extras": tuple(EXTRAS),
    "kernels": ("compiled",),
    "system": ("system", "cpu", "architecture"),
    "cores": ("usable_cores", "present_cores", "cgroup_limit_cores"),
    "memory": ("total_bytes", "free_bytes", "cgroup_limit_bytes"),
    "threads": ("variables", "usable_cores"),
    "shared_memory": ("total_bytes", "free_bytes"),
    "open_files": ("soft_limit_count", "hard_limit_count"),
    "processes": ("soft_limit_count", "cgroup_limit_count"),
    "network": ("GLOO_SOCKET_IFNAME", "interfaces"),
    "launcher": ("source", "rank", "size_processes"),
    "variables": ("names",),
    "directory": ("writable", "free_bytes"),
    "memory_bandwidth": ("one_core_bytes_per_second",),
    "start_2": ("ranks", "seconds"),
    "start_4": ("ranks", "seconds"),
    **{
        f"all_reduce_{ranks}_{way}": ("ranks", "latency_seconds", "bandwidth_bytes_per_second", "sum_is_right")
        for ranks in (2, 4)
        for way in ("gloo", "shared")
    },
}


FEW_FILES = """
import resource, sys
from tutti.cli.app import main
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
sys.exit(main(["doctor"]))
"""


def own_variables() -> dict[str, str]:
    """The environment without variables of the test's own surroundings."""
    foreign = ("OMP_", "GLOO_", "RANK", "WORLD_SIZE", "SLURM_", "OMPI_", "HOROVOD_")
    return {name: value for name, value in os.environ.items() if not name.startswith(foreign)}


def run_doctor(*words: str, cwd: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """One real run, piped."""
    return subprocess.run(
        # As the command itself does, and not as python -m, which looks into the current directory first.
        [sys.executable, "-P", "-m", "tutti", "doctor", *words],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=cwd,
        env={**own_variables(), "PYTHONPATH": str(ROOT / "src"), **environ},
    )


def fake_nvidia_smi(folder: Path, script: str) -> str:
    """A PATH on which ``nvidia-smi`` is ``script``."""
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    program.chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The JSON report of this machine, given a driver with two GPUs, in a folder with a file of the user's own."""
    folder = tmp_path_factory.mktemp("healthy")
    (folder / "tutti.py").touch()
    path = fake_nvidia_smi(folder, "yes 'NVIDIA H200, 143771, 143000, 570.1' | head -n 2")
    done = run_doctor("--json", cwd=folder, PATH=path)
    report: dict[str, Any] = json.loads(done.stdout)
    assert done.returncode == report["exit_code"], done.stderr
    return report


def test_json_has_every_check_with_its_keys(healthy: dict[str, Any]) -> None:
    checks = healthy["checks"]
    assert set(checks) == set(KEYS)
    for name, keys in KEYS.items():
        assert {"mark", "text", "remedy", *keys} <= set(checks[name]), name
    assert healthy["problems_count"] == sum(entry["mark"] == "problem" for entry in checks.values())


def test_collectives_sum_right_here(healthy: dict[str, Any]) -> None:
    for name, entry in healthy["checks"].items():
        if name.startswith("all_reduce"):
            assert entry["sum_is_right"] is True
            assert entry["mark"] == "ok"
            assert entry["latency_seconds"] > 0 and entry["bandwidth_bytes_per_second"] > 0
    assert healthy["exit_code"] != ExitCode.PEER


def test_a_file_of_the_users_own_is_a_problem_with_an_exit_code(healthy: dict[str, Any]) -> None:
    assert healthy["checks"]["module"]["mark"] == "problem" and healthy["exit_code"] == ExitCode.USAGE


def test_text_of_a_healthy_machine_fits(healthy: dict[str, Any]) -> None:
    printed: set[str] = set()
    shown = [
        line
        for name, entry in healthy["checks"].items()
        for line in doctor_command.lines(
            Finding(name, entry["mark"], entry["text"], remedy=entry["remedy"] or ""), printed
        )
    ]
    assert len(shown) < LINES and max(map(len, shown)) <= COLUMNS


def test_gpus_that_torch_cannot_use_are_a_note(healthy: dict[str, Any]) -> None:
    entry = healthy["checks"]["gpus"]
    assert healthy["checks"]["cuda"]["driver"] == "570.1"
    if healthy["checks"]["cuda"]["cuda"] is None:
        assert entry["mark"] == "note" and "install a PyTorch with CUDA" in entry["remedy"]
        assert entry["text"].startswith("2 × NVIDIA H200, 140 GiB")


def test_what_is_broken_is_a_problem_with_a_remedy_and_the_exit_code(tmp_path: Path) -> None:
    path = fake_nvidia_smi(tmp_path, "echo 'NVIDIA-SMI has failed: no driver'; exit 9")
    (tmp_path / "few.py").write_text(FEW_FILES)
    changes = {"PYTHONPATH": str(ROOT / "src"), "GLOO_SOCKET_IFNAME": "nonexistent", "PATH": path}
    done = forkserver.run(["few.py"], tmp_path, own_variables() | changes, SAFETY_NET)
    assert done.returncode == ExitCode.PEER, done.stderr
    shown = done.stdout.splitlines()
    assert len(shown) <= LINES and max(map(len, shown)) <= COLUMNS
    problems = [line.removeprefix("problem").split("  ")[1].strip() for line in shown if line.startswith("problem")]
    assert [name for name in problems if name != "gpus"] == ["open files", "network", "start 2", "start 4"]
    for words in ("at least 4,096", "Unset GLOO_SOCKET_IFNAME, or name one of: ", "Unset GLOO_SOCKET_IFNAME, and"):
        assert words in done.stdout
    if "gpus" in problems:
        assert "nvidia-smi fails: NVIDIA-SMI has failed: no driver" in done.stdout
    assert "\x1b" not in done.stdout


def test_few_open_files_alone_end_in_another_code() -> None:
    found = Finding("open_files", "problem", "64 a process", remedy="Raise it.")
    assert conclude([found]) == ExitCode.USAGE
    assert conclude([found, Finding("start_2", "problem", "hung", remedy="Try.", code=ExitCode.PEER)]) == ExitCode.PEER


def test_a_measurement_that_hangs_is_named_and_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collective_probe, "TIMEOUT", 0.2)
    (found,) = collective_probe.collectives(2)
    assert (found.name, found.mark, found.code) == ("start_2", "problem", ExitCode.PEER)
    assert "hung" in found.text and found.remedy
    children = psutil.Process().children(recursive=True)
    assert not [child for child in children if "tutti.doctor.collective_probe" in child.cmdline()]


@pytest.mark.parametrize(
    "error",
    [PeerError("rank 1 is gone"), OSError("no"), ValueError("no"), subprocess.TimeoutExpired("nvidia-smi", 20)],
    ids=lambda error: type(error).__name__,
)
def test_a_check_that_fails_is_a_problem_that_names_it(error: Exception) -> None:
    def check() -> list[Finding]:
        raise error

    (found,) = checked("gpus", check)
    assert (found.name, found.mark) == ("gpus", "problem") and found.remedy
    assert conclude([found]) == ExitCode.UNEXPECTED


def one_wrong_number(vector: Any) -> Any:
    """What two ranks would have summed to on rank 0, but for the last element."""
    total = vector * 3
    total[-1] += 1
    return total


@pytest.mark.parametrize(("sum_", "right"), [(one_wrong_number, False), (lambda vector: vector * 3, True)])
def test_one_wrong_number_in_a_sum_is_seen(sum_: collective_probe.Sum, right: bool) -> None:
    comm = SimpleNamespace(rank=0, size=2, all_gather=lambda tensor, name: [tensor])
    values = collective_probe._sums(SimpleNamespace(world=comm), lambda elements: sum_)  # type: ignore[arg-type]
    found = collective_probe._finding("all_reduce_2_gloo", 2, "gloo", values)
    assert found.mark == ("ok" if right else "problem")
    assert conclude([found]) == (ExitCode.DONE if right else ExitCode.PEER)


def test_ranks_that_cannot_share_memory_are_a_note() -> None:
    values = collective_probe._sums(SimpleNamespace(), lambda elements: None)  # type: ignore[arg-type]
    found = collective_probe._finding("all_reduce_2_shared", 2, "shared", values)
    assert found.mark == "note" and found.remedy


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text, encoding="utf-8")


def test_the_tightest_limit_of_nested_groups_counts(tmp_path: Path) -> None:
    member = tmp_path / "membership"
    member.write_text("0::/job/step\n", encoding="utf-8")
    write(tmp_path / "job", cpu__max="150000 100000", memory__max="1000", memory__current="400", pids__max="max")
    write(tmp_path / "job" / "step", cpu__max="max 100000", memory__max="2000", memory__current="300")
    assert cgroup.read_limits(tmp_path, member) == cgroup.CgroupLimits(1.5, 1000, 400, None)


def test_limits_of_version_1_are_read(tmp_path: Path) -> None:
    member = tmp_path / "membership"
    member.write_text("4:memory:/job\n3:cpu,cpuacct:/job\n2:pids:/\n", encoding="utf-8")
    write(tmp_path / "cpu" / "job", cpu__cfs_quota_us="200000", cpu__cfs_period_us="100000")
    write(tmp_path / "memory" / "job", memory__limit_in_bytes="5000", memory__usage_in_bytes="7")
    write(tmp_path / "memory", memory__limit_in_bytes=str((1 << 63) - 4096))
    write(tmp_path / "pids", pids__max="100")
    found = cgroup.read_limits(tmp_path, member)
    assert found == cgroup.CgroupLimits(2.0, 5000, 7, 100)
    (processes,) = limits.processes(found)
    assert processes.mark == "problem" and "--pids-limit" in processes.remedy
    (memory,) = machine.memory(found)
    assert memory.mark == "problem" and memory.values["cgroup_limit_bytes"] == 5000


def test_settings_that_slow_are_notes_with_a_remedy() -> None:
    for environ, word in (
        ({"OMP_NUM_THREADS": "9999"}, "cores ÷ processes"),
        ({"OMP_PROC_BIND": "close"}, "same cores"),
    ):
        (found,) = machine.threads(environ)
        assert found.mark == "note" and word in found.remedy
    (found,) = machine.threads({"OMP_NUM_THREADS": "1", "OMP_PROC_BIND": "false"})
    assert found.mark == "ok"
    (found,) = machine.cores(cgroup.CgroupLimits(0.5, None, None, None))
    assert found.mark == "note" and "OMP_NUM_THREADS=1" in found.remedy


def test_a_directory_that_cannot_be_written_is_a_disk_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    (found,) = limits.directory()
    assert (found.mark, conclude([found])) == ("problem", ExitCode.DISK)


def test_no_shared_memory_is_a_problem(tmp_path: Path) -> None:
    (found,) = limits.shared_memory(tmp_path / "gone")
    assert found.mark == "problem" and "--shm-size" in found.remedy


@pytest.mark.parametrize(
    ("environ", "mark", "words"),
    [
        ({}, "ok", "none"),
        ({"RANK": "1"}, "problem", "WORLD_SIZE is missing"),
        (
            {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
            "ok",
            "torchrun: this is rank 1",
        ),
    ],
)
def test_the_launcher_is_named(monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], mark: str, words: str) -> None:
    monkeypatch.setattr(os, "environ", environ)
    (found,) = doctor_command.launcher()
    assert found.mark == mark and words in found.text


@pytest.mark.parametrize(
    ("environ", "mark", "words"),
    [
        ({"PATH": ""}, "ok", "none that begins with TUTTI_"),
        ({"TUTTI_SEED": "3"}, "ok", "TUTTI_SEED"),
        ({"TUTTI_SEDE": "3"}, "problem", "Did you mean TUTTI_SEED?"),
    ],
)
def test_variables_are_named(monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], mark: str, words: str) -> None:
    monkeypatch.setattr(os, "environ", environ)
    (found,) = doctor_command.variables()
    assert found.mark == mark and words in found.text


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("no_color", ["", "1"])
def test_a_terminal_gets_colours_and_the_word(monkeypatch: pytest.MonkeyPatch, no_color: str) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", no_color)
    doctor_command.print_finding(Finding("network", "problem", "no [interface]", remedy="Name one."), set())
    assert "problem" in terminal.getvalue() and "no [interface]" in terminal.getvalue()
    assert ("\x1b[1;31m" in terminal.getvalue()) == (not no_color)


def test_help_needs_no_torch() -> None:
    code = "import sys; from tutti.cli.app import main; main(['doctor', '--help']); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert "--json" in done.stdout and done.stdout.endswith("False\n")


def test_the_extras_are_those_that_are_declared() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert {extra: list(packages) for extra, packages in EXTRAS.items()} == {
        extra: packages for extra, packages in declared.items() if extra not in ("browser", "dev", "parity", "site")
    }
