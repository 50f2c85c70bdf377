"""Options of ``--logger``: services and files besides the run directory that get a run's metrics. No torch."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from tutti.config.spec import Spec
from tutti.distribution import pip_install
from tutti.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class LoggerOptions:
    """Base class of the options of ``--logger``.

    Attributes:
        package: the package that the logger needs, and the extra that installs it; None for none.
    """

    package: ClassVar[str | None] = None


@dataclass(frozen=True, kw_only=True)
class JsonLinesOptions(LoggerOptions):
    """Options of ``tutti.JsonLinesLogger``: ``path``, the file to which records are appended."""

    path: str


@dataclass(frozen=True, kw_only=True)
class TensorBoardOptions(LoggerOptions):
    """Options of ``tutti.TensorBoardLogger``: ``folder`` of the event files, which need the package ``tensorboard``."""

    package: ClassVar[str | None] = "tensorboard"
    folder: str


@dataclass(frozen=True, kw_only=True)
class WandbOptions(LoggerOptions):
    """Options of ``--logger wandb``, the arguments with which ``tutti.WandbLogger`` is made.

    Attributes:
        package: the package that the logger needs, and the extra that installs it: ``wandb``.
        project: the project at Weights & Biases.
        name: the run's name; None for one that Weights & Biases makes.
        mode: ``online``, ``offline`` (files for ``wandb sync``, no network) or ``disabled``; None: as ``WANDB_MODE``.
        folder: directory for its files; None for the current one.
    """

    package: ClassVar[str | None] = "wandb"
    project: str = "tutti"
    name: str | None = None
    mode: Literal["online", "offline", "disabled"] | None = None
    folder: str | None = None


@dataclass(frozen=True, kw_only=True)
class MLflowOptions(LoggerOptions):
    """Options of ``--logger mlflow``, the arguments with which ``tutti.MLflowLogger`` is made.

    Attributes:
        package: the package that the logger needs, and the extra that installs it: ``mlflow``.
        experiment: the experiment, which is created if it is missing.
        name: the run's name; None for one that MLflow makes.
        uri: the tracking server or a local store, such as ``sqlite:///runs.db``; None: as ``MLFLOW_TRACKING_URI``.
    """

    package: ClassVar[str | None] = "mlflow"
    experiment: str = "tutti"
    name: str | None = None
    uri: str | None = None


@dataclass(frozen=True, kw_only=True)
class TrackioOptions(LoggerOptions):
    """Options of ``--logger trackio``, the arguments with which ``tutti.TrackioLogger`` is made.

    Attributes:
        package: the package that the logger needs, and the extra that installs it: ``trackio``.
        project: the project.
        name: the run's name; None for one that trackio makes.
        space: a Space of Hugging Face, ``user/name``, that gets the metrics; None for none, without a network.
    """

    package: ClassVar[str | None] = "trackio"
    project: str = "tutti"
    name: str | None = None
    space: str | None = None


LOGGERS: Mapping[str, type[LoggerOptions]] = {
    "jsonl": JsonLinesOptions,
    "tensorboard": TensorBoardOptions,
    "wandb": WandbOptions,
    "mlflow": MLflowOptions,
    "trackio": TrackioOptions,
}


def parse_loggers(text: str) -> tuple[LoggerOptions, ...]:
    """Parse ``--logger``, one or several ``name:key=value,…`` that are joined by ``+``.

    Args:
        text: the option, such as ``wandb:project=mine,mode=offline`` or ``wandb+mlflow:uri=sqlite:///runs.db``.

    Returns:
        The options of each logger, in order, such as ``WandbOptions``.

    Raises:
        UsageError: the text is malformed, or a name or key is unknown (naming the nearest).

    >>> [type(each).__name__ for each in parse_loggers("wandb:mode=offline+jsonl:path=a+b.jsonl")]
    ['WandbOptions', 'JsonLinesOptions']
    """
    specs = [Spec.parse(each, "--logger") for each in re.split(rf"\+(?=(?:{'|'.join(LOGGERS)})(?:[:+]|$))", text)]
    return tuple(spec.build(spec.choose(LOGGERS, "logger"), "--logger") for spec in specs)


def check_packages(loggers: tuple[LoggerOptions, ...]) -> None:
    """Raise UsageError if the package of a logger is not installed; no package is imported.

    Args:
        loggers: options of the loggers.
    """
    for each in loggers:
        if each.package is not None and importlib.util.find_spec(each.package) is None:
            raise UsageError(
                f"--logger needs the package {each.package}",
                remedy=f"run {pip_install(each.package)}, or leave it out",
            )
