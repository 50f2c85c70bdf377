"""Flags of horovodrun: translated, named where they have no effect, refused where they would matter."""

from __future__ import annotations

from collections.abc import MutableMapping
from pathlib import Path

import pytest

from tutti.cli.run_command import run_options
from tutti.errors import UsageError
from tutti.horovod.run_flags import translate_flags
from tutti.launcher.hosts import passed_variables


def translated(words: list[str], environ: MutableMapping[str, str]) -> list[str]:
    return translate_flags(words, environ, run_options())


def test_a_whole_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["run", "--horovod", "--num-proc=6", "--mpi-threads-disable", "-hostfile", "hosts", "--cycle-time-ms", "5"]
    words.append("--log-with-timestamp")
    found = translated([*words, "python3", "train.py", "--gloo", "-p", "1"], {})
    assert found == ["run", "--horovod", "-np", "6", "--hostfile", "hosts", "train.py", "--gloo", "-p", "1"]
    idle = "--mpi-threads-disable, --cycle-time-ms, --log-with-timestamp"
    assert capsys.readouterr().err == f"tutti: without effect: {idle}\n"


@pytest.mark.parametrize("python", [("python",), ("/usr/bin/python3", "-u"), ("python3.11", "-u")], ids=" ".join)
def test_the_word_python_is_dropped(python: tuple[str, ...]) -> None:
    for words in (["x.py", "-u", "a"], ["-m", "package.train", "-c"]):
        assert translated(["run", "--horovod", "-np", "2", *python, *words], {}) == [
            "run",
            "--horovod",
            "-np",
            "2",
            *words,
        ]


def test_flags_that_stand_for_variables() -> None:
    environ: dict[str, str] = {}
    words = [
        "run",
        "--horovod",
        "--fusion-threshold-mb",
        "2",
        "--no-stall-check",
        "--timeline-filename=t.json",
        "--tcp",
    ]
    words += ["--network-interface", "eth0", "--network-interface", "eth1"]
    assert translated([*words, "-H", "a:1,b:1", "x.py"], environ) == ["run", "--horovod", "-H", "a:1,b:1", "x.py"]
    assert passed_variables(environ) == environ
    assert environ == {
        "HOROVOD_FUSION_THRESHOLD": str(2 << 20),
        "HOROVOD_STALL_CHECK_DISABLE": "1",
        "HOROVOD_TIMELINE": "t.json",
        "NCCL_IB_DISABLE": "1",
        "NCCL_SOCKET_IFNAME": "eth0,eth1",
        "GLOO_SOCKET_IFNAME": "eth0,eth1",
    }


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--ssh-port", "22"], "ssh/config"),
        (["--fusion-threshold-mb", "x"], "--fusion-threshold-mb is .x.* whole number"),
        (["--stall-check-warning-time-seconds", "-1"], "-time-seconds is .-1.* whole number"),
        (["--autotune=no"], "--autotune takes no value"),
        (["--timeline-filename"], "needs a value"),
        (["python", "-c", "print()"], "Write code in a file"),
        (["-np", "2", "python3", "-u", "-W", "error", "x.py"], "Write python -W … -m tutti run"),
    ],
)
def test_what_would_matter_is_refused(words: list[str], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        translated(["run", "--horovod", *words], {})


CONFIG = """---
# as in Horovod's documentation
controller: gloo

params:
  fusion_threshold_mb: 32
  cycle_time_ms: 10        # of the background thread
  hierarchical_allreduce: true
autotune:
  enabled: Yes
  log_file: 'autotune #1.csv'
timeline:
  filename: "t.json"
  mark_cycles: off
stall_check:
  enabled: No
  shutdown_time_seconds:
  warning_time_seconds: 120
logging:
  hide_timestamp: true
  colour: red
"""


def test_a_configuration_file_gives_what_no_flag_gives(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "c.yaml").write_text(CONFIG)
    environ: dict[str, str] = {}
    words = ["--no-autotune", "--config-file", str(tmp_path / "c.yaml"), "--timeline-filename", "other.json"]
    assert translated(["run", "--horovod", "-np", "2", *words, "x.py"], environ)[-1] == "x.py"
    assert environ == {
        "HOROVOD_FUSION_THRESHOLD": str(32 << 20),
        "HOROVOD_AUTOTUNE": "0",
        "HOROVOD_AUTOTUNE_LOG": "autotune #1.csv",
        "HOROVOD_TIMELINE": "other.json",
        "HOROVOD_TIMELINE_MARK_CYCLES": "0",
        "HOROVOD_STALL_CHECK_DISABLE": "1",
        "HOROVOD_STALL_CHECK_TIME_SECONDS": "120",
    }
    idle = (
        f"--gloo, --cycle-time-ms, --hierarchical-allreduce, --log-hide-timestamp, logging.colour of {tmp_path}/c.yaml"
    )
    assert capsys.readouterr().err == f"tutti: without effect: {idle}\n"


@pytest.mark.parametrize(
    "text",
    [
        "params\n",
        "autotune:\n  enabled: maybe\n",
        "params:\n  - cache_capacity: 3\n",
        "params: {cache_capacity: 3}\n",
        None,
    ],
)
def test_a_configuration_file_that_cannot_be_read_is_refused(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(UsageError, match=r"c\.yaml"):
        translated(["run", "--horovod", f"--config-file={tmp_path}/c.yaml", "x.py"], {})


def test_other_commands_are_left_alone() -> None:
    for words in (["train", "digits", "--horovod"], ["run", "--start-timeout", "3", "x.py", "--horovod", "--mpi"]):
        assert translated(words, {}) == words


def test_flags_of_elastic_jobs() -> None:
    words = ["--min-np", "1", "--max-num-proc=4", "--host-discovery-script", "./d.sh", "--blacklist-cooldown-range"]
    found = translated(["run", "--horovod", *words, "1", "10", "x.py"], {})
    kept = ["--min-np", "1", "--max-np", "4", "--host-discovery-script", "./d.sh", "--blacklist-cooldown-range"]
    assert found == ["run", "--horovod", *kept, "1", "10", "x.py"]
    found = translated(["run", "--horovod", "--slots", "4", "x.py"], {"HOROVOD_ELASTIC_TIMEOUT": "7"})
    assert found == ["run", "--horovod", "--slots-per-host", "4", "--elastic-timeout", "7", "x.py"]
    plain = ["run", "--horovod", "-np", "2", "x.py"]
    assert translated(plain, {"HOROVOD_ELASTIC_TIMEOUT": "7"}) == plain


def test_every_option_of_tutti_run_may_stand_before_the_script() -> None:
    for option, count in run_options().items():
        if option.startswith("-") and option not in ("--horovod", "--num-proc", "--start-timeout"):
            words = ["run", "--horovod", option, *["1"] * count]
            assert translated([*words, "python", "x.py", "--mpi"], {}) == [*words, "x.py", "--mpi"]
