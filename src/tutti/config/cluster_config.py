"""Options of the clusters of ``tutti submit`` that take a file and start one command on each node. No torch."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tutti.errors import UsageError

_PART = r"[a-z0-9]+(?:(?:\.|_{1,2}|-+)[a-z0-9]+)*"
_HOST = r"(?:[A-Za-z0-9][A-Za-z0-9.-]*|\[[0-9a-fA-F:]+\])(?::\d+)?"
_IMAGE = re.compile(rf"(?:{_HOST}/)?{_PART}(?:/{_PART})*(?::\w[\w.-]{{0,127}})?(?:@[a-z0-9]+:[0-9a-f]{{32,}})?")
_QUANTITY = re.compile(r"\d+(?:\.\d+)?(?:[mkMGTPE]|[KMGTPE]i)?")
_NAME = re.compile(r"[a-z0-9](?:[a-z0-9.-]{0,251}[a-z0-9])?")
_RESOURCE = re.compile(rf"{_NAME.pattern}/[A-Za-z0-9](?:[\w.-]{{0,61}}[A-Za-z0-9])?")
_ACCELERATOR = re.compile(r"[\w.-]+")


@dataclass(frozen=True, kw_only=True)
class KubeflowConfig:
    """Options of ``tutti submit kubeflow``, which makes a TrainJob of Kubeflow Trainer.

    Attributes:
        image: container image with Python and tutti; must be given.
        nodes: number of pods of the job, one a node.
        cpus: CPUs for each device; default: no request.
        gpus: GPUs for each device; default: no request.
        resource: Kubernetes' resource name of the GPUs, only together with ``gpus``; default: ``nvidia.com/gpu``.
        memory: memory of a pod, such as ``64Gi``; default: no request.
        runtime: name of the cluster's training runtime.

    Raises:
        UsageError: there is no ``image``, ``resource`` is given without ``gpus``, a number is below 1, or a text has
            not the form that Kubernetes takes.
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
        _refuse_image("kubeflow", self.image)
        for name, form, example in (
            ("memory", _QUANTITY, "a quantity of Kubernetes, such as 64Gi"),
            ("runtime", _NAME, "a name of lower-case letters, digits, dashes and dots"),
            ("resource", _RESOURCE, "a name such as nvidia.com/gpu"),
        ):
            if (value := getattr(self, name)) is not None and not form.fullmatch(value):
                raise UsageError(
                    f"tutti submit kubeflow has {name}={value}, which Kubernetes refuses", remedy=f"give {example}"
                )
        if self.resource is not None and self.gpus is None:
            raise UsageError(
                f"tutti submit kubeflow has resource={self.resource} and no gpus", remedy="add gpus=1, for each device"
            )


@dataclass(frozen=True, kw_only=True)
class SkyPilotConfig:
    """Options of ``tutti submit skypilot``, which makes a task of SkyPilot.

    Attributes:
        nodes: number of nodes of the task.
        accelerator: SkyPilot's name of an accelerator, of which each node gets one for each of its devices; default:
            none.
        cpus: least number of CPUs of a node; default: any.
        memory: least memory of a node, in GB; default: any.
        infra: cloud, region or cluster to run on, as SkyPilot writes it; default: the cheapest.
        spot: whether to take instances that the cloud may take back.
        image: container image with Python and tutti; default: tutti is installed on SkyPilot's own image.

    Raises:
        UsageError: a number is below 1, or ``image`` or ``accelerator`` is no name.
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
        if self.image is not None:
            _refuse_image("skypilot", self.image)
        if self.accelerator is not None and not _ACCELERATOR.fullmatch(self.accelerator):
            raise UsageError(
                f"tutti submit skypilot has accelerator={self.accelerator}, which is no name of an accelerator",
                remedy="give a name alone, such as H100: each node gets one for each of its devices",
            )


def _at_least_one(cluster: str, numbers: dict[str, int | None]) -> None:
    for name, value in numbers.items():
        if value is not None and value < 1:
            raise UsageError(f"tutti submit {cluster} has {name}={value}", remedy="give at least 1")


def _refuse_image(cluster: str, image: str) -> None:
    if not _IMAGE.fullmatch(image):
        raise UsageError(
            f"tutti submit {cluster} has image={image}, which names no image of a registry",
            remedy="give REGISTRY/NAME:TAG, without https:// and docker:, and with a NAME in lower case",
        )
