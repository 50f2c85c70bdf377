"""Files for Kubeflow and SkyPilot: their own packages read them, and their commands train."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.launching import SAFETY_NET, SOURCE, free_port
from tutti.cli.app import main
from tutti.config.cluster_config import KubeflowConfig

TRAIN = ("train", "linear", "--workers", "2", "--batch-size", "16", "--steps", "8", "--reproducible", "--devices", "2")


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["submit", *words]) == 0
    return capsys.readouterr().out


def test_a_train_job(capsys: pytest.CaptureFixture[str]) -> None:
    yaml = pytest.importorskip("yaml", reason="the package pyyaml is not installed")
    text = printed(capsys, "kubeflow:image=r/t:1,nodes=2,gpus=1,memory=64Gi", "--", *TRAIN, "--out", "/a b/\u00fc")
    job = yaml.safe_load(text)
    trainer = job["spec"]["trainer"]
    assert job["metadata"]["name"] == "linear" and trainer["image"] == "r/t:1"
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (2, 1)
    assert trainer["command"] == ["python", "-m", "tutti", *TRAIN, "--out", "/a b/\u00fc"]
    assert trainer["resourcesPerNode"]["limits"]["memory"] == "64Gi"


def train_job(text: str) -> Any:
    """The file as Kubeflow's own package reads it."""
    reason = "the package kubeflow-trainer-api is not installed"
    models = pytest.importorskip("kubeflow_trainer_api.models", reason=reason)
    yaml = pytest.importorskip("yaml", reason="the package pyyaml is not installed")
    return models.TrainerV1alpha1TrainJob.from_dict(yaml.safe_load(text))


def test_the_script_of_a_pod_may_be_in_its_image_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert "nothere.py" in printed(capsys, "kubeflow:image=r/t:1", "--", "run", "-np", "2", "/image/nothere.py")


def test_kubeflow_reads_the_train_job(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "kubeflow:image=r/t:1,nodes=2,cpus=2,resource=example.com/gpu,gpus=4", "--", *TRAIN)
    job = train_job(text)
    assert job.spec.trainer.num_proc_per_node == 1 and job.spec.trainer.command[3] == "train"
    assert set(job.spec.trainer.resources_per_node.limits) == {"cpu", "example.com/gpu"}
    with pytest.raises(ValueError):
        train_job(text.replace("numNodes: 2", 'numNodes: "two"'))


def test_skypilot_reads_the_task(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    sky = pytest.importorskip("sky", reason="the package skypilot is not installed")
    text = printed(capsys, "skypilot:nodes=2,accelerator=H100,spot=true,cpus=8,memory=64", "--", *TRAIN)
    (tmp_path / "task.yaml").write_text(text)
    task = sky.Task.from_yaml(str(tmp_path / "task.yaml"))
    assert task.num_nodes == 2 and task.name == "linear"
    assert next(iter(task.resources)).accelerators == {"H100": 1}
    (tmp_path / "task.yaml").write_text(text.replace("num_nodes", "num_nods"))
    with pytest.raises(ValueError):
        sky.Task.from_yaml(str(tmp_path / "task.yaml"))


def test_the_command_of_a_task_trains_on_two_nodes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text = printed(capsys, "skypilot:nodes=2", "--", *TRAIN, "--out", "two words")
    line = next(line for line in text.splitlines() if line.startswith("run: "))
    command = json.loads(line.removeprefix("run: ")).replace("29500", str(free_port()))
    own = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(SOURCE),
        "GLOO_SOCKET_IFNAME": "lo",
        "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.2",
    }
    nodes = [
        subprocess.Popen(
            ["bash", "-c", command],
            cwd=tmp_path,
            env={**os.environ, **own, "SKYPILOT_NODE_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for node in nodes:
            _, err = node.communicate(timeout=SAFETY_NET)
            assert node.returncode == 0, err
    finally:
        for node in nodes:
            node.kill()
    assert json.loads((tmp_path / "two words" / "summary.json").read_text())["devices"] == 2


@pytest.mark.parametrize(
    "image", ["a", "r/t:1", "localhost:5000/a/b_c--d:v1.2", "[::1]:5000/a", f"Host.example/a@sha256:{'0f' * 32}"]
)
def test_names_of_images(image: str) -> None:
    assert KubeflowConfig(image=image).image == image


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["kubeflow", *TRAIN], "names no image"),
        (["kubeflow:image=a,nodes=3", *TRAIN], "over 3 nodes"),
        (["kubeflow:image=a,node=2", *TRAIN], "unknown option 'node'"),
        (["skypilot:nodes=0", *TRAIN], "nodes=0"),
        (["skypilot", *TRAIN[:-1], "1:2"], "cannot change its number of devices"),
        (["--start", "skypilot", "--", *TRAIN], "--start is for Slurm"),
        (
            ["kubeflow:image=R/NAME:1", *TRAIN],
            "image=R/NAME:1, which names no image of a registry. Give REGISTRY/NAME:TAG",
        ),
        (["kubeflow:image=https://r/t", *TRAIN], "image=https://r/t"),
        (["skypilot:image=docker:r/t:1", *TRAIN], "image=docker:r/t:1"),
        (["skypilot:accelerator=H100:8", *TRAIN], "accelerator=H100:8"),
        (
            ["kubeflow:image=a,memory=64GB", *TRAIN],
            "memory=64GB, which Kubernetes refuses. Give a quantity of Kubernetes",
        ),
        (["kubeflow:image=a,runtime=My_runtime", *TRAIN], "runtime=My_runtime"),
        (["kubeflow:image=a,resource=gpu,gpus=1", *TRAIN], "resource=gpu"),
        (["kubeflow:image=a,resource=amd.com/gpu", *TRAIN], "and no gpus"),
        (["kubeflow:image=a", *TRAIN, "--on", "ray"], "tutti submit kubeflow and --on ray contradict each other"),
        (["slurm", *TRAIN, "--on", "slurm:nodes=2"], "--on slurm:nodes=2 contradict"),
        (["kubeflow:image=a", "--", "compare", "linear"], "needs a command of train or run, and has 'compare'"),
        (["kubeflow:image=a"], "needs a command of train or run. Write"),
        (["kubeflow:image=a", "--", "train", "linear"], "tutti submit needs --devices"),
        (["slurm", "--", "run", "-np", "2"], "no script is given"),
        (["skypilot", "--", "run", "-np", "2", "nothere.py"], "there is no script 'nothere.py'"),
        (["slurm", "--", "run", "-np", "four", "script.py"], "-np is 'four'"),
        (["slurm", "--", "run", "-np", "0", "script.py"], "-np is '0'"),
    ],
)
def test_refused_files(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["submit", *words]) == 2
    assert message in capsys.readouterr().err
