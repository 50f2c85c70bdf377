"""Options of the clusters of ``tutti submit`` that take a file and start one command on each node. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from tutti.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class KubeflowConfig:
    """Options of ``tutti submit kubeflow``, which makes a TrainJob of Kubeflow Trainer.

    Attributes:
        image: container image with Python and tutti.
        nodes: number of pods of the job, one a node.
        cpus: CPUs for each device; default: no request.
        gpus: GPUs for each device; default: no request.
        resource: Kubernetes' resource name of the GPUs; default: ``nvidia.com/gpu``.
        memory: memory of a pod, such as ``64Gi``; default: no request.
        runtime: name of the cluster's training runtime.
    """

    image: str | None = None
    nodes: int = 1
    cpus: int | None = None
    gpus: int | None = None
    resource: str | None = None
    memory: str | None = None
    runtime: str = "torch-distributed"

    def __post_init__(self) -> None:
        _at_least_one("kubeflow", {"nodes": self.nodes, "cpus": self.cpus, "gpus": self.gpus})
        if self.image is None:
            raise UsageError(
                "tutti submit kubeflow names no image", remedy="write kubeflow:image=REGISTRY/NAME:TAG,nodes=2"
            )


@dataclass(frozen=True, kw_only=True)
class SkyPilotConfig:
    """Options of ``tutti submit skypilot``, which makes a task of SkyPilot.

    Attributes:
        nodes: number of nodes of the task.
        accelerator: SkyPilot's name of an accelerator, of which each node gets one for each of its devices.
        cpus: least number of CPUs of a node.
        memory: least memory of a node, in GB.
        infra: where to run, as SkyPilot writes it; default: the cheapest.
        spot: whether to take instances that the cloud may take back.
        image: container image with Python and tutti; default: tutti is installed on SkyPilot's own image.
    """

    nodes: int = 1
    accelerator: str | None = None
    cpus: int | None = None
    memory: int | None = None
    infra: str | None = None
    spot: bool = False
    image: str | None = None

    def __post_init__(self) -> None:
        _at_least_one("skypilot", {"nodes": self.nodes, "cpus": self.cpus, "memory": self.memory})


def _at_least_one(cluster: str, numbers: dict[str, int | None]) -> None:
    for name, value in numbers.items():
        if value is not None and value < 1:
            raise UsageError(f"tutti submit {cluster} has {name}={value}", remedy="give at least 1")
