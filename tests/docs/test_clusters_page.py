"""The programs of docs/clusters.md that start ranks from other engines give the weights of the own launcher."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.launching import SOURCE, until
from tests.slurm_cluster import MISSING, REASON, slurm_cluster

PAGE = Path(__file__).parents[2] / "docs" / "clusters.md"
TRAIN = ("train", "linear", "--workers", "2", "--steps", "4", "--batch-size", "32", "--reproducible", "--device", "cpu")
LIMIT = 400
SCRIPT = f"""
import sys

from tutti.cli.app import main

sys.exit(main({[*TRAIN]!r} + sys.argv[1:]))
"""


def program(name: str, folder: Path) -> list[str]:
    """Write a program of the page into a folder, and return the command that runs it."""
    found = re.search(rf"^```python {name}\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert found is not None, name
    path = folder / f"{name}_ranks.py"
    path.write_text(found[1])
    return [sys.executable, str(path)]


def environment(**more: str) -> dict[str, str]:
    paths = [str(SOURCE), *(path for path in os.environ.get("PYTHONPATH", "").split(":") if path)]
    told = {"PYTHONPATH": ":".join(paths), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return {**os.environ, **told, **more}


def run(folder: Path, command: list[str], **more: str) -> None:
    done = subprocess.run(
        command, cwd=folder, env=environment(**more), capture_output=True, text=True, timeout=LIMIT, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def check(folder: Path) -> None:
    """Compare the run of two ranks in ``run`` with one that the own launcher starts."""
    run(folder, [sys.executable, "-m", "tutti", *TRAIN, "--devices", "2", "--out", "own"])
    own, joined = (json.loads((folder / name / "summary.json").read_text()) for name in ("own", "run"))
    assert (joined["devices"], joined["exit_code"]) == (2, 0)
    assert joined["weights_sha256"] == own["weights_sha256"]


def needs(package: str) -> pytest.MarkDecorator:
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"the package {package} is not installed")


@contextmanager
def dask_cluster(folder: Path) -> Iterator[str]:
    """A scheduler and two processes of one task slot each."""
    told, processes = folder / "scheduler.json", list[subprocess.Popen[bytes]]()

    def begin(*words: str) -> None:
        command = [sys.executable, "-m", *words, "--no-dashboard"]
        with (folder / "dask.log").open("ab") as log:
            processes.append(subprocess.Popen(command, cwd=folder, env=environment(), stdout=log, stderr=log))

    try:
        begin("distributed.cli.dask_scheduler", "--host", "127.0.0.1", "--port", "0", "--scheduler-file", str(told))
        until(told.exists)
        address = json.loads(told.read_text())["address"]
        for _ in range(2):
            begin("distributed.cli.dask_worker", address, "--nthreads", "1", "--no-nanny")
        from distributed import Client

        with Client(address) as client:
            client.wait_for_workers(2, timeout=LIMIT)
        yield address
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.mark.engines
@pytest.mark.timeout(900)
@needs("distributed")
def test_dask(tmp_path: Path) -> None:
    with dask_cluster(tmp_path) as address:
        run(tmp_path, [*program("dask", tmp_path), address, *TRAIN, "--out", str(tmp_path / "run")])
    check(tmp_path)


@pytest.mark.engines
@pytest.mark.timeout(900)
@needs("pyspark")
@pytest.mark.skipif(shutil.which("java") is None, reason="Spark needs java")
def test_spark(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    conf = "--conf spark.ui.enabled=false --master local[2] pyspark-shell"
    command = [*program("spark", tmp_path), str(tmp_path / "script.py"), "--out", str(tmp_path / "run")]
    run(tmp_path, command, PYSPARK_SUBMIT_ARGS=conf, SPARK_LOCAL_IP="127.0.0.1")
    check(tmp_path)


@pytest.mark.engines
@pytest.mark.timeout(900)
@needs("monarch")
def test_monarch(tmp_path: Path) -> None:
    run(tmp_path, [*program("monarch", tmp_path), *TRAIN, "--out", str(tmp_path / "run")])
    check(tmp_path)


@pytest.mark.engines
@pytest.mark.timeout(900)
@needs("submitit")
@pytest.mark.skipif(bool(MISSING), reason=REASON)
def test_submitit(tmp_path: Path) -> None:
    command = [*program("submitit", tmp_path), *TRAIN, "--out", str(tmp_path / "run")]
    with slurm_cluster() as cluster:
        run(tmp_path, command, SLURM_CONF=cluster.environment["SLURM_CONF"])
    check(tmp_path)
