"""Files by which Kubeflow and SkyPilot start the same command on every node. No torch, no package of theirs."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from tutti.config.cluster_config import KubeflowConfig, SkyPilotConfig
from tutti.device import DEVICE_RESOURCE
from tutti.distribution import pip_install
from tutti.errors import UsageError, counted

_PORT = 29500


def devices_per_node(devices: int, nodes: int) -> int:
    """Return the number of devices on each node, ``devices / nodes``.

    Args:
        devices: number of devices of all nodes together.
        nodes: number of nodes.

    Raises:
        UsageError: ``nodes`` does not divide ``devices``.

    >>> devices_per_node(8, 2)
    4
    """
    if devices % nodes:
        raise UsageError(
            f"{counted(devices, 'device')} cannot be shared out equally over {counted(nodes, 'node')}",
            remedy=f"give a multiple of {nodes} as --devices, or another number of nodes",
        )
    return devices // nodes


def train_job(config: KubeflowConfig, name: str, devices: int, words: Sequence[str]) -> str:
    """Return the manifest of a TrainJob of Kubeflow Trainer, which starts a command of tutti on each node.

    The job's runtime sets the variables ``PET_*``, from which the command reads its node's number.

    Args:
        config: options of the cluster, such as image, number of nodes and resources for each device.
        name: name of the job, of which at most 40 characters are kept, in lower case; other characters than letters and
            digits become dashes.
        devices: number of devices of all nodes together, one rank each.
        words: the command line, without the leading ``tutti``.

    Returns:
        The manifest as YAML text.

    Raises:
        UsageError: the number of nodes in ``config`` does not divide ``devices``.
    """
    each = devices_per_node(devices, config.nodes)
    limits = {
        "cpu": str(config.cpus * each) if config.cpus else None,
        "memory": config.memory,
        config.resource or DEVICE_RESOURCE: str(config.gpus * each) if config.gpus else None,
    }
    trainer: dict[str, Any] = {
        "image": config.image,
        "numNodes": config.nodes,
        "numProcPerNode": each,
        "command": ["python", "-m", "tutti", *words],
    }
    if stated := {resource: amount for resource, amount in limits.items() if amount is not None}:
        trainer["resourcesPerNode"] = {"requests": stated, "limits": stated}
    return _yaml(
        {
            "apiVersion": "trainer.kubeflow.org/v1alpha1",
            "kind": "TrainJob",
            "metadata": {"name": _label(name)},
            "spec": {"runtimeRef": {"name": config.runtime}, "trainer": trainer},
        }
    )


def sky_task(config: SkyPilotConfig, name: str, devices: int, words: Sequence[str]) -> str:
    """Return a task of SkyPilot, which uploads the working directory and starts a command of tutti on each node.

    Args:
        config: options of the cluster, such as cloud, number of nodes and accelerator.
        name: name of the task, of which at most 40 characters are kept, in lower case; other characters than letters
            and digits become dashes.
        devices: number of devices of all nodes together, one rank each.
        words: the command line, at least one word, without the leading ``tutti``. With several nodes, torchrun's flags
            for the number of this node and the address of node 0 are inserted after the first word.

    Returns:
        The task as YAML text.

    Raises:
        UsageError: the number of nodes in ``config`` does not divide ``devices``.
    """
    each = devices_per_node(devices, config.nodes)
    resources = {
        "infra": config.infra,
        "accelerators": f"{config.accelerator}:{each}" if config.accelerator else None,
        "cpus": f"{config.cpus}+" if config.cpus else None,
        "memory": f"{config.memory}+" if config.memory else None,
        "use_spot": config.spot or None,
        "image_id": f"docker:{config.image}" if config.image else None,
    }
    first, *rest = words
    part = ""
    if config.nodes > 1:
        address = '"$(echo "$SKYPILOT_NODE_IPS" | head -n 1)":' + str(_PORT)
        part = f' --nnodes "$SKYPILOT_NUM_NODES" --node-rank "$SKYPILOT_NODE_RANK" --rdzv-endpoint {address}'
    task: dict[str, Any] = {"name": _label(name), "num_nodes": config.nodes, "workdir": "."}
    if stated := {key: value for key, value in resources.items() if value is not None}:
        task["resources"] = stated
    if config.image is None:
        task["setup"] = pip_install("data")
    task["run"] = f"python -m tutti {first}{part} {shlex.join(rest)}"
    return _yaml(task)


def _label(name: str) -> str:
    """Return a name of lower-case letters, digits and dashes.

    >>> _label("My_model.v2")
    'my-model-v2'
    """
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40].rstrip("-") or "tutti"


def _yaml(value: Mapping[str, Any], indent: str = "") -> str:
    """Return nested mappings, lists of texts and scalars as YAML; a scalar is written as JSON, which is YAML too."""
    lines = []
    for key, each in value.items():
        if isinstance(each, Mapping):
            lines.append(f"{indent}{key}:\n{_yaml(each, indent + '  ')}")
        elif isinstance(each, list):
            items = "".join(f"{indent}  - {json.dumps(item, ensure_ascii=False)}\n" for item in each)
            lines.append(f"{indent}{key}:\n{items}")
        else:
            lines.append(f"{indent}{key}: {json.dumps(each, ensure_ascii=False)}\n")
    return "".join(lines)
