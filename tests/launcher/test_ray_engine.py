"""Runs on Ray clusters: one smoke case in ordinary runs, nodes that are killed and added in ``make engines``."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from tests.launching import SOURCE, until
from tutti.checkpoint.folder import last_step

ray = pytest.importorskip("ray", reason="the package ray is not installed")

STEPS = 400
OPTIONS = (
    *("--workers", "4", "--batch-size", "16", "--checkpoint-every", "20st", "--eval-every", "none"),
    *("--reproducible", "--optimizer", "adam:lr=0.01", "--overwrite", "--log-every", "10"),
)
# Without the first variable Ray takes the machine's public address for 127.0.0.1; without the second one its processes
# give way to all others of this machine.
OF_RAY = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_worker_niceness": "0"}
HERE = "127.0.0.1"
SLOW = ("--slow", "rank=0,ms=50")
SCRIPT = """
import tutti

world = tutti.init()
print("rank", tutti.rank(), "of", tutti.size(), flush=True)
"""


# Takes one CPU of each of two nodes until its standard input ends.
TAKE = """
import sys

import ray
from ray.util import placement_group

ray.init(sys.argv[1], log_to_driver=False)
ray.get(placement_group([{"CPU": 1}] * 2, strategy="STRICT_SPREAD").ready())
print("taken", flush=True)
sys.stdin.read()
"""


def environment(**more: str) -> dict[str, str]:
    paths = [str(SOURCE), *(path for path in os.environ.get("PYTHONPATH", "").split(":") if path)]
    return {**os.environ, "PYTHONPATH": ":".join(paths), **OF_RAY, **more}


def started(folder: Path, *words: str, **more: str) -> subprocess.Popen[str]:
    """Start a command; a training run takes 400 steps unless its words say otherwise."""
    if words[0] == "train" and "--steps" not in words:
        words = (*words, "--steps", str(STEPS))
    return subprocess.Popen(
        [sys.executable, "-m", "tutti", *words],
        cwd=folder,
        env=marked(folder, **more),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def marked(folder: Path, **more: str) -> dict[str, str]:
    """The environment of a command whose ranks on every node can be told from those of other runs by its folder."""
    told = environment(**more)
    return {**told, "PYTHONPATH": f"{told['PYTHONPATH']}:{folder}"}


def ranks(folder: Path) -> list[psutil.Process]:
    """The ranks of the runs of a folder, with their watchdogs, on every node."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            told = process.environ()
            if "WORLD_SIZE" in told and str(folder) in told.get("PYTHONPATH", "").split(":"):
                found.append(process)
    return found


def digest(folder: Path) -> str:
    return str(json.loads((folder / "summary.json").read_text())["weights_sha256"])


def devices_over_time(folder: Path) -> list[int]:
    return [attempt["devices"] for attempt in json.loads((folder / "summary.json").read_text())["attempts"]]


def alone(folder: Path, *options: str) -> str:
    process = started(folder, "train", "linear", "--devices", "1", *OPTIONS, *options, "--out", "alone")
    _, err = process.communicate(timeout=250)
    assert process.returncode == 0, err
    return digest(folder / "alone")


def test_a_script_on_a_cluster_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    # As in a job of ray job submit, whose runtime environment has what this one has.
    job = json.dumps({"runtime_env": {"env_vars": {"PYTHONPATH": "/nowhere"}}, "metadata": {}})
    words = ("run", "-np", "2", "--on", "ray:address=local", "script.py")
    process = started(tmp_path, *words, RAY_JOB_CONFIG_JSON_ENV_VAR=job)
    out, err = process.communicate(timeout=250)
    assert (process.returncode, out) == (0, "rank 0 of 2\n"), err
    assert (tmp_path / "runs" / "logs" / "rank1.log").read_text() == "rank 1 of 2\n"


def test_the_address_of_a_dashboard_is_refused(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    process = started(tmp_path, "run", "-np", "1", "--on", "ray", "script.py", RAY_ADDRESS="http://127.0.0.1:8265")
    _, err = process.communicate(timeout=250)
    assert process.returncode == 2 and "dashboard, at which no ranks can be started (http://127.0.0.1:8265)" in err


@pytest.mark.engines
def test_an_interrupt_ends_the_wait_for_a_server_that_is_no_cluster(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    with socket.create_server((HERE, 0)) as server:
        address = f"{HERE}:{server.getsockname()[1]}"
        process = started(tmp_path, "run", "-np", "1", "--on", f"ray:address={address}", "script.py")
        server.settimeout(250)
        # The launcher looks whether a server listens, then Ray connects.
        with server.accept()[0], server.accept()[0]:
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=20)
    assert process.returncode == 130 and "tutti: interrupted" in err, err


class Nodes:
    """A cluster of nodes on this machine, each with one CPU or as many; the head takes part in it."""

    def __init__(self, count: int, cpus: int = 1) -> None:
        from ray.cluster_utils import Cluster

        self.cpus = cpus
        head = {"num_cpus": cpus, "include_dashboard": False, "node_ip_address": HERE}
        self.cluster = Cluster(initialize_head=True, head_node_args=head)
        self.others: list[Any] = []
        for _ in range(count - 1):
            self.add()
        self.cluster.wait_for_nodes()
        self.address = str(self.cluster.address)

    def add(self) -> None:
        self.others.append(self.cluster.add_node(num_cpus=self.cpus, node_ip_address=HERE))

    def kill(self) -> None:
        self.cluster.remove_node(self.others.pop(), allow_graceful=False)

    def kill_head(self) -> None:
        self.cluster.head_node.kill_all_processes(check_alive=False, allow_graceful=False)


@pytest.fixture
def nodes(request: pytest.FixtureRequest) -> Iterator[Nodes]:
    for name in ("PYTHONPATH", *OF_RAY):
        os.environ[name] = environment()[name]
    made = Nodes(*(request.param if isinstance(request.param, tuple) else (request.param,)))
    yield made
    with suppress(Exception):
        made.cluster.shutdown()


def at_step(process: subprocess.Popen[str], folder: Path, step: int) -> None:
    """Wait until a run has saved a checkpoint of ``step`` or later."""
    until(lambda: last_step(folder / "checkpoints") >= step or process.poll() is not None)
    assert process.poll() is None, process.communicate()[1]


@pytest.mark.engines
@pytest.mark.timeout(600)
@pytest.mark.parametrize("nodes", [1, 2, 3], indirect=True)
def test_as_many_nodes_as_there_are(nodes: Nodes, tmp_path: Path) -> None:
    count = len(nodes.others) + 1
    on = ("--on", f"ray:address={nodes.address}", "--out", "run")
    process = started(tmp_path, "train", "linear", *OPTIONS, *on, "--devices", str(count))
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert digest(tmp_path / "run") == alone(tmp_path)
    more = started(tmp_path, "train", "linear", *OPTIONS, *on, "--devices", str(count + 1))
    _, err = more.communicate(timeout=300)
    assert more.returncode == 2 and f"there are {count}: 1 on " in err


@pytest.mark.engines
@pytest.mark.timeout(600)
@pytest.mark.parametrize("nodes", [(2, 2)], indirect=True)
def test_a_slot_is_room_on_one_node(nodes: Nodes, tmp_path: Path) -> None:
    """One CPU is free on each of two nodes: no rank of two CPUs fits, and two of one."""
    (tmp_path / "script.py").write_text(SCRIPT)
    taker = subprocess.Popen(
        [sys.executable, "-c", TAKE, nodes.address],
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert taker.stdout is not None and taker.stdout.readline() == "taken\n"
        for count, options, said in (
            ("1", "cpus=2", "the run needs 1 slot, and there are none free on "),
            ("3", "cpus=1", "there are 2: 1 on "),
            ("1", "cpus=0.00001", "Ray refuses what --on ray asks for: The precision of the fractional quantity"),
        ):
            on = ("--on", f"ray:address={nodes.address},{options}")
            process = started(tmp_path, "run", "-np", count, *on, "script.py")
            _, err = process.communicate(timeout=250)
            assert process.returncode == 2 and said in err, (options, err)
    finally:
        taker.communicate("")


@pytest.mark.engines
@pytest.mark.timeout(900)
@pytest.mark.parametrize("nodes", [3], indirect=True)
@pytest.mark.parametrize("strategy", ["mirrored", "parameter_server", "sharded", "tensor:least=1", "pipeline"])
def test_a_killed_node_shrinks_the_run_and_keeps_its_weights(nodes: Nodes, strategy: str, tmp_path: Path) -> None:
    exact = strategy in ("mirrored", "parameter_server")
    options = [word for word in OPTIONS if exact or word != "--reproducible"]
    words = ("train", "digits", "--model", "mlp", "--precision", "fp64", *options)
    on = (
        "--on",
        f"ray:address={nodes.address}",
        "--devices",
        "2:3",
        "--wait",
        "0s",
        "--strategy",
        strategy,
        "--out",
        "run",
    )
    process = started(tmp_path, *words, *SLOW, *on)
    at_step(process, tmp_path / "run", 40)
    nodes.kill()
    _, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    assert devices_over_time(tmp_path / "run") == [3, 2], err
    process = started(tmp_path, *words, "--devices", "1", "--strategy", "mirrored", "--out", "alone")
    _, err = process.communicate(timeout=250)
    assert process.returncode == 0, err
    if exact:
        assert digest(tmp_path / "run") == digest(tmp_path / "alone")
    got, want = (weights(tmp_path, run) for run in ("run", "alone"))
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        torch.testing.assert_close(got[name], tensor, rtol=1e-8, atol=1e-8)


def weights(folder: Path, run: str) -> dict[str, torch.Tensor]:
    """The weights at the end of a run, as one plain model's."""
    done = subprocess.run(
        [sys.executable, "-m", "tutti", "export", run, "--output", f"{run}.safetensors", "--format", "safetensors"],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return load_file(folder / f"{run}.safetensors")


@pytest.mark.engines
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("nodes", [3], indirect=True)
def test_twenty_random_kills_and_joins(nodes: Nodes, tmp_path: Path) -> None:
    """Nodes come and go at random steps; the weights are those of a run left alone, and no process stays."""
    draw = random.Random(20)
    words = ("train", "linear", *OPTIONS, "--steps", "3000", "--max-restarts", "30")
    on = ("--on", f"ray:address={nodes.address}", "--devices", "1:3", "--wait", "0s", "--out", "run")
    process = started(tmp_path, *words, *SLOW, *on)
    changes, step = 0, 0
    while changes < 20:
        step = max(step, last_step(tmp_path / "run" / "checkpoints")) + draw.randrange(20, 80)
        at_step(process, tmp_path / "run", step)
        if nodes.others and (len(nodes.others) == 2 or draw.random() < 0.5):
            nodes.kill()
        else:
            nodes.add()
        changes += 1
    _, err = process.communicate(timeout=900)
    assert process.returncode == 0, err
    assert len(devices_over_time(tmp_path / "run")) > 5, err
    assert digest(tmp_path / "run") == alone(tmp_path, "--steps", "3000")
    until(lambda: not ranks(tmp_path))


@pytest.mark.engines
@pytest.mark.timeout(900)
@pytest.mark.parametrize("nodes", [2], indirect=True)
def test_an_added_node_grows_the_run_and_keeps_its_weights(nodes: Nodes, tmp_path: Path) -> None:
    on = ("--on", f"ray:address={nodes.address}", "--devices", "2:3", "--wait", "0s", "--out", "run")
    process = started(tmp_path, "train", "linear", *OPTIONS, *SLOW, *on)
    at_step(process, tmp_path / "run", 40)
    nodes.add()
    _, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    assert devices_over_time(tmp_path / "run") == [2, 3], err
    assert digest(tmp_path / "run") == alone(tmp_path)


@pytest.mark.engines
@pytest.mark.timeout(900)
@pytest.mark.parametrize("nodes", [2], indirect=True)
@pytest.mark.parametrize(("end", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75), (signal.SIGKILL, -9)])
def test_a_signal_ends_every_rank(nodes: Nodes, end: int, code: int, tmp_path: Path) -> None:
    on = ("--on", f"ray:address={nodes.address}", "--devices", "2", "--out", "run")
    process = started(tmp_path, "train", "linear", *OPTIONS, *SLOW, *on)
    at_step(process, tmp_path / "run", 20)
    process.send_signal(end)
    _, err = process.communicate(timeout=300)
    assert process.returncode in (code, 75), err
    until(lambda: not ranks(tmp_path))


@pytest.mark.engines
@pytest.mark.timeout(900)
@pytest.mark.parametrize("nodes", [2], indirect=True)
def test_a_killed_head_ends_the_run_with_a_reason(nodes: Nodes, tmp_path: Path) -> None:
    on = ("--on", f"ray:address={nodes.address}", "--devices", "1:2", "--wait", "0s", "--out", "run")
    process = started(tmp_path, "train", "linear", *OPTIONS, *SLOW, "--steps", "4000", *on)
    at_step(process, tmp_path / "run", 40)
    assert len(ranks(tmp_path)) >= 2
    nodes.kill_head()
    _, err = process.communicate(timeout=300)
    assert process.returncode == 5, err
    assert "the head of the Ray cluster does not answer any more" in err and "--resume" in err, err
    found = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert found["exit_code"] == 5 and found["attempts"]
    until(lambda: not ranks(tmp_path))
