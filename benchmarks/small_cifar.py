"""CIFAR-10 with a network of 68,698 parameters, which learns 4,000 images or more a second on one core: for studies.

python benchmarks/cifar_subset.py data/cifar10 data/cifar10-10000 --images 10000
tutti train benchmarks/small_cifar.py:task --data data/cifar10-10000
"""

from __future__ import annotations

import dataclasses

from torch import nn

from tutti.config.task_config import CourseConfig
from tutti.tasks.cifar10 import cifar10_task
from tutti.tasks.task import Task

CLASSES = 10


def small_network() -> nn.Sequential:
    """Three convolutions of stride 2, each with batch norm and ReLU, and a linear layer."""
    widths = (3, 24, 48, 96)
    layers: list[nn.Module] = []
    for before, after, kernel in zip(widths, widths[1:], (4, 3, 3), strict=False):
        layers += [nn.Conv2d(before, after, kernel, stride=2, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(widths[-1] * 16, CLASSES))


def task(data: str | None = None, augment: bool = False) -> Task:
    """The built-in task with the small network."""
    if data is None:
        raise SystemExit("--data is missing: a folder of CIFAR-10, such as data/cifar10-10000")
    return dataclasses.replace(cifar10_task(CourseConfig(), data, augment), name="small-cifar", model=small_network)
