"""Jobs of Slurm: their batch files in ordinary runs, signals, requeues and lost nodes in ``make engines``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launching import SOURCE, until
from tests.slurm_cluster import CREDENTIAL_SECONDS, MISSING, REASON, SlurmCluster, slurm_cluster
from tutti.cli.app import main
from tutti.config.engine_config import SlurmEngineConfig
from tutti.errors import PeerError, TuttiError, UsageError
from tutti.launcher import slurm_engine
from tutti.launcher.slurm_engine import SlurmEngine
from tutti.launcher.slurm_job import batch_file, submit_file

OPTIONS = (
    *("--workers", "4", "--batch-size", "16", "--steps", "160", "--checkpoint-every", "20st", "--eval-every", "none"),
    *("--reproducible", "--optimizer", "adam:lr=0.01", "--log-every", "50"),
)
SLOW = ("--slow", "rank=0,ms=40")
SCRIPT = """
import os
import sys

print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], "at", os.environ["MASTER_ADDR"], flush=True)
sys.exit(3 if os.environ["RANK"] == "1" else 0)
"""
needs_slurm = pytest.mark.skipif(bool(MISSING), reason=REASON)


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    with slurm_cluster() as made:
        yield made


def started(cluster: SlurmCluster, folder: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        words,
        cwd=folder,
        env={**cluster.environment, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def tutti(cluster: SlurmCluster, folder: Path, *words: str) -> subprocess.Popen[str]:
    return started(cluster, folder, sys.executable, "-m", "tutti", *words)


def training(cluster: SlurmCluster, folder: Path, *options: str) -> subprocess.Popen[str]:
    return tutti(cluster, folder, "train", "linear", *OPTIONS, *SLOW, "--out", "run", *options)


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    _, err = process.communicate(timeout=250)
    return process.returncode, err


def summary(folder: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((folder / "summary.json").read_text())
    return found


def alone(cluster: SlurmCluster, folder: Path) -> object:
    """The weights of a run that was left alone."""
    process = tutti(cluster, folder, "train", "linear", *OPTIONS, "--devices", "1", "--out", "alone")
    code, err = ended(process)
    assert code == 0, err
    return summary(folder / "alone")["weights_sha256"]


def at_step(folder: Path, step: int) -> None:
    until(lambda: any(int(path.name[5:]) >= step for path in (folder / "checkpoints").glob("step-????????")))


def job(folder: Path) -> str:
    """The number of the one job that was submitted in a folder."""
    until(lambda: list(folder.glob("slurm-*.out")))
    return next(folder.glob("slurm-*.out")).stem.removeprefix("slurm-")


def begin_again(cluster: SlurmCluster, number: str) -> None:
    """Wait until a job is back in the queue, and let it start sooner than Slurm, which waits a while, would.

    A node refuses a job ("credential revoked") until the credential of its last start has expired.
    """
    until(lambda: cluster.ask("squeue", "--noheader", "--format=%T") == "PENDING")
    time.sleep(CREDENTIAL_SECONDS + 2)
    cluster.ask("scontrol", "update", f"jobid={number}", "starttime=now")


# --- the batch file ------------------------------------------------------------------------------------------------


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    assert main(["submit", *words]) == 0
    return capsys.readouterr().out.splitlines()


def test_the_batch_file_of_a_run_that_may_shrink(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(
        capsys,
        *("slurm:partition=gpu,nodes=2,time=4h,gpus=1,cpus=8,account=a1", "--", "train", "linear"),
        *("--workers", "8", "--devices", "2:8", "--on", "local"),
    )
    command = f"exec {sys.executable} -m tutti train linear --workers 8 --devices 2:8 --on slurm"
    assert lines == [
        "#!/bin/bash",
        "#SBATCH --job-name=linear",
        "#SBATCH --partition=gpu",
        "#SBATCH --account=a1",
        "#SBATCH --nodes=2",
        "#SBATCH --ntasks-per-node=4",
        "#SBATCH --cpus-per-task=8",
        "#SBATCH --gpus-per-node=4",
        "#SBATCH --time=04:00:00",
        "#SBATCH --signal=B:USR1@120",
        "#SBATCH --open-mode=append",
        "#SBATCH --requeue",
        "#SBATCH --no-kill",
        "",
        f'{command} --out runs/linear-"$SLURM_JOB_ID"',
    ]


def test_the_batch_file_of_a_script(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a b.py").touch()
    lines = printed(capsys, "slurm:requeue=false,notice=0", "run", "-np", "2", "a b.py", "--on", "x y")
    assert lines[-1] == f"exec {sys.executable} -m tutti run --on slurm -np 2 -- 'a b.py' --on 'x y'"
    assert "#SBATCH --no-requeue" in lines
    assert not any("signal" in line or "no-kill" in line for line in lines)


def test_the_page_shows_the_file_of_its_command(capsys: pytest.CaptureFixture[str]) -> None:
    page = (SOURCE.parent / "docs" / "slurm.md").read_text(encoding="utf-8")
    words = page.partition("login$ tutti ")[2].partition("```")[0].replace("\\\n", " ").split()
    at = words.index("--on")
    shown = page.partition("```bash\n")[2].partition("```")[0].replace("/shared/venv/bin/python", sys.executable)
    assert printed(capsys, words[at + 1], "--", *words[:at]) == shown.splitlines()


@pytest.mark.parametrize("named", [("--out", "here"), ("--resume", "here")])
def test_a_command_that_names_its_run_directory_gets_no_other(
    named: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    lines = printed(capsys, "slurm", "train", "linear", "--workers", "2", "--devices", "2", *named)
    assert lines[-1].endswith(f"{' '.join(named)} --on slurm")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["slurm:nodes=0", "train", "linear", "--devices", "2"], "nodes=0"),
        (["slurm:time=soon", "train", "linear", "--devices", "2"], "time=soon"),
        (["slurm:time=2m", "train", "linear", "--devices", "2"], "time=2m, and asks the run to save 120 s before"),
        (["slurm:time=0-01:00,notice=3600", "train", "linear", "--devices", "2"], "save 3600 s before"),
        (["slurm:partition=a b", "train", "linear", "--devices", "2"], "partition=a b"),
        (["slurm:memory=lots", "train", "linear", "--devices", "2"], "memory=lots"),
        (["slurm:memory=-4G", "train", "linear", "--devices", "2"], "memory=-4G"),
        (["slurm:nodes=2", "train", "linear", "--devices", "3"], "shared out equally over 2 nodes"),
        (["slurm", "train", "linear"], "needs --devices"),
        (["slurm", "train", "linear", "--devices", "2", "--optimizer", "adamm"], "adamm"),
        (["slurm", "run", "-np", "auto", "a.py"], "needs -np"),
        (["slurm", "run", "-np", "2", "nothere.py"], "there is no script 'nothere.py'"),
        (["slurm", "run", "-np", "2", "-m", "tutti.nothere"], "there is no module 'tutti.nothere'"),
        (["slurm", "compare", "linear"], "needs a command"),
        (["slurmm", "train", "linear", "--devices", "2"], "slurm"),
    ],
)
def test_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["submit", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("time", ["3m", "02:01", "00:02:01", "0-00:03", "0-00:02:01", "1-00:00"])
def test_a_limit_above_the_notice_is_fine(time: str) -> None:
    assert SlurmEngineConfig(time=time).limit is not None


def test_options_within_an_allocation_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    out = str(tmp_path / "run")
    assert main(["train", "linear", "--devices", "2", "--on", "slurm:nodes=2", "--out", out]) == 2
    assert "is an allocation already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("said", "code", "told"),
    [
        ("error: Batch job submission failed: Unable to contact slurm controller", 5, "does not answer: Batch job"),
        ("fatal: Could not establish a configuration source", 5, "Submit it where squeue works: sbatch"),
        ("error: invalid partition specified: x", 2, "Slurm refuses the job"),
    ],
)
def test_a_job_that_cannot_be_submitted(
    said: str, code: int, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sbatch").write_text(f"#!/bin/sh\necho 'sbatch: {said}' >&2\nexit 1\n")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(TuttiError) as refused:
        submit_file(tmp_path / "a job.sbatch")
    assert refused.value.exit_code == code and told in str(refused.value)


@pytest.mark.parametrize("program", ["sbatch", "scontrol"])
def test_a_machine_without_a_program_of_slurm_submits_nothing(
    program: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / ("scontrol" if program == "sbatch" else "sbatch")
    other.write_text(f"#!/bin/sh\n: > {tmp_path}/called\n")
    other.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert main(["submit", "--start", "slurm", "train", "linear", "--workers", "2", "--devices", "2"]) == 2
    assert f"there is no {program} on this machine" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [other]


def test_a_run_outlives_commands_of_slurm_that_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "2(x2)"}
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    answers = {"scontrol": "n1\nn2", "squeue": "n[1-2]", "sinfo": "n1 idle\nn2 idle"}
    monkeypatch.setattr(slurm_engine, "_answer", lambda command, *_: answers.get(command))
    engine = SlurmEngine(tmp_path)
    del answers["scontrol"]
    assert engine.slots() == {"n1": 2, "n2": 2} and engine.poll() == []
    with pytest.raises(PeerError, match="does not say which nodes"):
        SlurmEngine(tmp_path)
    answers["scontrol"] = "n1"
    with pytest.raises(UsageError, match="has 1 nodes, and SLURM_TASKS_PER_NODE is that of 2"):
        SlurmEngine(tmp_path)


# --- on a cluster --------------------------------------------------------------------------------------------------

ACCEPTED = (
    (SlurmEngineConfig(), (2, 2)),
    (SlurmEngineConfig(nodes=2, time="90m", partition="main", cpus=1, memory="64M", constraint="fast"), (2, 2)),
    (SlurmEngineConfig(nodes=2, time="1-12:00:00", notice=0, requeue=False), (1, 2)),
)


@needs_slurm
@pytest.mark.parametrize(("config", "sizes"), ACCEPTED[1:])
def test_slurm_accepts_the_file(
    config: SlurmEngineConfig, sizes: tuple[int, int], cluster: SlurmCluster, tmp_path: Path
) -> None:
    path = tmp_path / "job.sbatch"
    path.write_text(batch_file(config, "job", sizes, ["run", "a.py"], "runs/job"))
    tried = started(cluster, tmp_path, "sbatch", "--test-only", str(path))
    code, err = ended(tried)
    assert code == 0 and "to start at" in err, err


@needs_slurm
def test_slurm_refuses_a_job(cluster: SlurmCluster, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    process = tutti(cluster, tmp_path, "run", "-np", "2", "--on", "slurm:partition=nowhere", "script.py")
    code, err = ended(process)
    assert code == 2 and "Slurm refuses the job" in err and "invalid partition" in err.lower()


@needs_slurm
def test_a_script_on_two_nodes(cluster: SlurmCluster, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    process = tutti(cluster, tmp_path, "run", "-np", "2", "--on", "slurm:nodes=2", "script.py")
    out, err = process.communicate(timeout=250)
    assert process.returncode == 3, err
    assert "rank 0 of 2 at 127.0.0.1\n" in out and "rank 1 on n2" in out
    assert "rank 1 of 2" in (tmp_path / "runs" / "logs" / "rank1.log").read_text()
    assert "#SBATCH --nodes=2" in err and "is running on n[1-2]" in err and "is failed" in err


@needs_slurm
@pytest.mark.engines
@pytest.mark.parametrize(
    "how", ["--batch --signal=USR1", "--batch --signal=USR2", "--batch --signal=TERM", "--signal=USR1"]
)
def test_a_signal_saves_and_requeues(how: str, cluster: SlurmCluster, tmp_path: Path) -> None:
    process = training(cluster, tmp_path, "--devices", "2", "--on", "slurm:nodes=2")
    at_step(tmp_path / "run", 40)
    cluster.ask("scancel", *how.split(), job(tmp_path))
    begin_again(cluster, job(tmp_path))
    code, err = ended(process)
    assert code == 0, err
    assert "is pending" in err.partition("is running")[2], err
    found = summary(tmp_path / "run")
    attempts = found["attempts"]
    assert isinstance(attempts, list) and [attempt["devices"] for attempt in attempts] == [2, 2]
    assert attempts[1]["first_step"] >= 40
    assert found["weights_sha256"] == alone(cluster, tmp_path)


@needs_slurm
@pytest.mark.engines
def test_a_cancelled_job_is_not_requeued(cluster: SlurmCluster, tmp_path: Path) -> None:
    process = training(cluster, tmp_path, "--devices", "2", "--on", "slurm:nodes=2")
    at_step(tmp_path / "run", 20)
    cluster.ask("scancel", job(tmp_path))
    code, err = ended(process)
    assert code == 75 and "is cancelled" in err, err
    assert cluster.ask("squeue", "--noheader") == ""
    assert summary(tmp_path / "run")["exit_code"] == 75


@needs_slurm
@pytest.mark.engines
def test_a_run_joins_a_step_whose_nodes_have_no_address_of_their_name(cluster: SlurmCluster, tmp_path: Path) -> None:
    step = ["srun", "--quiet", "--nodes=2", "--ntasks=2", sys.executable, "-m", "tutti"]
    process = started(cluster, tmp_path, *step, "train", "linear", *OPTIONS, "--out", "run")
    code, err = ended(process)
    assert code == 0, err
    assert summary(tmp_path / "run")["weights_sha256"] == alone(cluster, tmp_path)


@needs_slurm
@pytest.mark.engines
def test_a_lost_node_shrinks_the_run_and_keeps_its_weights(tmp_path: Path) -> None:
    with slurm_cluster() as cluster:
        process = training(cluster, tmp_path, "--devices", "1:2", "--wait", "0s", "--on", "slurm:nodes=2")
        at_step(tmp_path / "run", 40)
        cluster.lose("n2")
        code, err = ended(process)
        assert code == 0, err + (tmp_path / f"slurm-{job(tmp_path)}.out").read_text()
        found = summary(tmp_path / "run")
        attempts = found["attempts"]
        assert isinstance(attempts, list) and [attempt["devices"] for attempt in attempts] == [2, 1]
        assert "was lost with its node n2" in attempts[0]["ending"]
        assert found["weights_sha256"] == alone(cluster, tmp_path)


@needs_slurm
@pytest.mark.engines
def test_a_run_that_shrank_has_all_devices_again_at_its_next_start(tmp_path: Path) -> None:
    with slurm_cluster() as cluster:
        slow = ("--slow", "rank=0,ms=100", "--out", "run", "--devices", "1:2", "--wait", "0s", "--on", "slurm:nodes=2")
        process = tutti(cluster, tmp_path, "train", "linear", *OPTIONS, *slow)
        at_step(tmp_path / "run", 20)
        cluster.lose("n2")
        output = tmp_path / f"slurm-{job(tmp_path)}.out"
        until(lambda: "going on with 1 device " in output.read_text())
        cluster.run("slurmd", "-D", "-N", "n2", as_name="n2")
        until(lambda: cluster.ask("sinfo", "--noheader", "--nodes=n2", "--format=%T") == "idle")
        cluster.ask("scancel", "--batch", "--signal=USR1", job(tmp_path))
        begin_again(cluster, job(tmp_path))
        code, err = ended(process)
        assert code == 0, err + output.read_text()
        found = summary(tmp_path / "run")
        attempts = found["attempts"]
        assert isinstance(attempts, list) and [attempt["devices"] for attempt in attempts] == [2, 1, 2], (
            output.read_text()
        )
        assert found["weights_sha256"] == alone(cluster, tmp_path)


@needs_slurm
@pytest.mark.engines
def test_a_lost_node_requeues_a_run_that_may_not_shrink(tmp_path: Path) -> None:
    with slurm_cluster() as cluster:
        process = training(cluster, tmp_path, "--devices", "2", "--on", "slurm:nodes=2")
        at_step(tmp_path / "run", 40)
        cluster.lose("n2")
        cluster.run("slurmd", "-D", "-N", "n2", as_name="n2")
        begin_again(cluster, job(tmp_path))
        code, err = ended(process)
        assert code == 0, err
        assert summary(tmp_path / "run")["weights_sha256"] == alone(cluster, tmp_path)
