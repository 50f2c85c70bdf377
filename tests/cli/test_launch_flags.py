"""Other launchers' flags on ``tutti train`` and ``tutti run``: ``-H``, ``--hostfile``, and torchrun's for nodes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.forkserver import Process
from tests.launching import SAFETY_NET, SOURCE, free_port
from tutti.cli.launch_flags import hosts_as_engine, node_of_job
from tutti.cli.run_command import end_options
from tutti.cli.submit_command import submitted
from tutti.errors import UsageError
from tutti.launcher.node_engine import NodePart, read_node_part

TRAIN = ("train", "linear", "--workers", "2", "--batch-size", "16", "--steps", "8", "--reproducible")


def test_a_host_file(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("a slots=2 # first\n\nb\n")
    file = str(tmp_path / "hosts")
    made = hosts_as_engine(["train", "linear", f"--hostfile={file}"])
    assert made == ["train", "linear", "--on", "ssh:hosts=a:2+b:1", "--devices", "3"]
    assert hosts_as_engine(["train", "linear", "--devices", "1:2", "-H", "a:2"])[-2:] == ["--on", "ssh:hosts=a:2"]
    words = end_options(["run", "--hostfile", file, "script.py", "--hostfile", "own"])
    assert hosts_as_engine(words) == ["run", "-H", "a:2,b:1", "--", "script.py", "--hostfile", "own"]


@pytest.mark.parametrize(
    "words", [["-H", "a:2", "--on", "ray"], ["-H", "a:2", "--hostfile", "f"], ["-H"], ["--hostfile", "missing"]]
)
def test_refused_hosts(words: list[str]) -> None:
    with pytest.raises(UsageError):
        hosts_as_engine(["train", "linear", *words])


def test_hosts_and_a_host_file_of_run() -> None:
    with pytest.raises(UsageError, match="-H, --hostfile and --on contradict"):
        hosts_as_engine(["run", "-H", "a:2", "--hostfile", os.devnull, "--", "script.py"])


@pytest.mark.parametrize("end", [["--"], []])
@pytest.mark.parametrize("asked", ["--dry-run", "--help", "-h"])
def test_a_script_has_flags_of_the_same_names(end: list[str], asked: str) -> None:
    """Only words before the script make a command ask and not run: ranks start, and Slurm gets the job."""
    script = [*end, "train.py", asked]
    nodes = ["--nnodes", "2", "--node-rank", "0", "--rdzv-endpoint", "h:1234", "--nproc-per-node", "2"]
    started = node_of_job(end_options(["run", *nodes, *script]), {})
    assert started == (NodePart(2, 0, 2, "h", 1234), ["run", "--", "train.py", asked])
    sent = submitted(end_options(["run", "-np", "4", "--on", "slurm:nodes=2", *script]), {})
    assert sent == ["submit", "--start", "slurm:nodes=2", "--", "run", "-np", "4", "--", "train.py", asked]
    asks = end_options(["run", "--help", "-np", "4", "--on", "slurm:nodes=2", *script])
    assert submitted(asks, {}) == asks


def test_the_variables_of_torchrun_are_read() -> None:
    pet = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_NPROC_PER_NODE": "4", "PET_MASTER_ADDR": "a"}
    assert read_node_part({}, pet, 1) == NodePart(2, 1, 4, "a", 29500)
    assert read_node_part({"--node-rank": "0"}, pet | {"PET_RDZV_ENDPOINT": "b:7"}, 1) == NodePart(2, 0, 4, "b", 7)
    assert read_node_part({}, {"PET_NNODES": "1"}, 1) is None
    launched = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "x"}
    assert node_of_job(["train", "linear"], pet | launched) is None
    found = node_of_job(["run", "-np", "6", "--", "script.py", "--nnodes", "9"], pet)
    assert found == (NodePart(2, 1, 3, "a", 29500), ["run", "--", "script.py", "--nnodes", "9"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--nnodes", "2", "--node-rank", "0"], "--rdzv-endpoint is missing"),
        (["--nnodes", "2", "--node-rank", "0", "--rdzv-endpoint", "a:"], "--rdzv-endpoint is 'a:'"),
        (["--nnodes", "2", "--node-rank", "0", "--rdzv-endpoint", "a:99999"], "--rdzv-endpoint is 'a:99999'"),
        (["--nnodes", "2", "--node-rank", "0", "--master-addr", "a", "--master-port", "0"], "is 'a:0'"),
        (["--nnodes", "2", "--node-rank", "0", "--rdzv-endpoint", "a:1", "--on", "ray"], "with -H, --hostfile or --on"),
        (["--nnodes", "2", "--node-rank", "0", "--rdzv-endpoint", "a:1", "-H", "a:2"], "each node starts ranks of its"),
        (["--nnodes", "2", "--rdzv-endpoint", "a:1"], "--node-rank is missing"),
        (["--nnodes", "1:2", "--node-rank", "0", "--rdzv-endpoint", "a:1"], "--nnodes is '1:2'"),
        (["--nnodes", "2", "--node-rank", "2", "--rdzv-endpoint", "a:1"], "node 2 of 2"),
        (["--nnodes", "2", "--node-rank", "0", "--rdzv-endpoint", "a:1", "--devices", "3"], "over 2 nodes"),
        (["--nnodes", "2", "--dry-run"], "--nnodes cannot be combined with --dry-run"),
    ],
)
def test_refused_nodes(words: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        node_of_job(["train", "linear", *words], {})
    assert node_of_job(["train", "linear", "--help", *words], {}) is None


def test_two_nodes_train_the_weights_of_one(tmp_path: Path) -> None:
    endpoint = f"127.0.0.1:{free_port()}"

    def started(*words: str, **more: str) -> Process:
        own = {"PYTHONPATH": str(SOURCE), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        return Process(["-m", "tutti", *TRAIN, *words], tmp_path, {**os.environ, **own, **more})

    node = ("--out", "two", "--devices", "2")
    address, _, port = endpoint.partition(":")
    second = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": address, "PET_MASTER_PORT": port}
    runs = [
        started(*node, "--nnodes", "2", "--node-rank", "0", "--rdzv-endpoint", endpoint),
        started(*node, **second),
        started("--out", "one", "--devices", "1"),
    ]
    try:
        for run in runs:
            _, err = run.communicate(timeout=SAFETY_NET)
            assert run.returncode == 0, err
    finally:
        for run in runs:
            run.kill()
    two, one = (json.loads((tmp_path / name / "summary.json").read_text()) for name in ("two", "one"))
    assert (two["devices"], one["devices"]) == (2, 1)
    assert two["weights_sha256"] == one["weights_sha256"]


def test_a_rank_of_a_node_has_its_number_within_the_job(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import os\nif os.environ['RANK'] == '3':\n    raise ValueError('of this rank')\n"
    )
    node = ("--nnodes", "2", "--node-rank", "1", "--nproc-per-node", "2", "--rdzv-endpoint", "127.0.0.1:1")
    words = ["-m", "tutti", "run", "--logs", "kept", *node, "script.py"]
    process = Process(words, tmp_path, {**os.environ, "PYTHONPATH": str(SOURCE)}, torch=False)
    _, err = process.communicate(SAFETY_NET)
    assert process.wait() == 1 and "tutti: rank 3 on node1 failed: ValueError: of this rank\n" in err, err
    assert sorted(path.name for path in (tmp_path / "kept" / "node1").iterdir()) == ["failure-rank3.json", "rank3.log"]
