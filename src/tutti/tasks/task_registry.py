"""Registry of the built-in tasks; check and load a task by name or the user's own. No torch until a task is loaded."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from tutti.config.spec import Spec
from tutti.config.task_config import (
    CnnConfig,
    CourseConfig,
    GptConfig,
    LineConfig,
    MlpConfig,
    Resnet18Config,
    UnetConfig,
)
from tutti.data import images, masks
from tutti.data import text_source as texts
from tutti.distribution import pip_install
from tutti.errors import DataError, UsageError, did_you_mean
from tutti.tasks import user

if TYPE_CHECKING:
    from tutti.tasks.task import Task

_HUB = "uoft-cs/cifar10"


@dataclass(frozen=True, kw_only=True)
class TaskEntry:
    """Description of a built-in task, readable without torch.

    Attributes:
        made_by: ``module:function`` that builds the task: ``function(config)``, with ``data`` if ``check`` is set and
            ``augment`` if ``augment`` is.
        models: dataclass of options by model name; the first model is the default.
        summary: one line of help.
        check: function that is called with the value of ``--data`` and raises if it cannot be read, within a
            millisecond; None if the task takes no ``--data``.
        ask: form of ``--data`` for the error message; None if ``--data`` is optional or unused.
        augment: whether training samples can be augmented.
        metric: the held-out metric that ``tutti compare`` uses by default.
        reports: names of all held-out values.
        needs: extra of tutti that installs a required package, by the package's module name.
    """

    made_by: str
    models: Mapping[str, type]
    summary: str
    check: Callable[[str], None] | None = None
    ask: str | None = None
    augment: bool = False
    metric: str = "accuracy"
    reports: tuple[str, ...] = ("loss", "accuracy")
    needs: Mapping[str, str] = field(default_factory=dict)


TASKS: Mapping[str, TaskEntry] = {
    "linear": TaskEntry(
        made_by="tutti.tasks.linear:linear_task",
        models={"line": LineConfig},
        summary="two parameters, y = w·x + b with noise; embedded",
        metric="loss",
        reports=("loss",),
    ),
    "digits": TaskEntry(
        made_by="tutti.tasks.digits:digits_task",
        models={"cnn": CnnConfig, "mlp": MlpConfig},
        summary="handwritten digits 8×8 of scikit-learn; embedded",
        needs={"sklearn": "demo"},
    ),
    "cifar10": TaskEntry(
        made_by="tutti.tasks.cifar10:cifar10_task",
        models={"course": CourseConfig, "resnet18": Resnet18Config},
        summary="ten classes of 32×32 colour images; --data FOLDER",
        check=partial(images.check_images, hub=_HUB),
        ask=f"--data FOLDER (hub layout or train/CLASS/*.png) or --data {_HUB}",
        augment=True,
        needs={"PIL": "data"},
    ),
    "text": TaskEntry(
        made_by="tutti.tasks.text:text_task",
        models={"gpt": GptConfig},
        summary="the next character of a text; --data FILE, or embedded",
        check=texts.check_text,
        metric="loss",
    ),
    "membranes": TaskEntry(
        made_by="tutti.tasks.membranes:membranes_task",
        models={"unet": UnetConfig},
        summary="binary masks of grey images; --data FOLDER",
        check=masks.check_masks,
        ask="--data FOLDER (train/image/NN.png and train/label/NN.png)",
        augment=True,
        reports=("loss", "accuracy", "dice"),
        needs={"PIL": "data"},
    ),
}


def check_task(
    text: str, *, data: str | None = None, model: str | None = None, augment: bool = False, batch_norm: bool = False
) -> None:
    """Check a task and its options without importing torch or user code.

    Of a user's own task only the existence is checked (``user.check_user_task``), not whether it takes the options.

    Args:
        text: name of a built-in task, ``path/to/file.py:function`` or ``module:function``.
        data: ``--data``: file, folder or name of a data set on a hub; None if not given.
        model: ``name:key=value,…``; None for the task's first model.
        augment: whether training samples are to be augmented.
        batch_norm: whether the model's batch norms are to be replaced by ``--batch-norm``.

    Raises:
        UsageError: unknown task, missing file or function, unknown model or model option, or an option that the task
            does not have.
        DataError: ``data`` is required and not given, does not exist, or a package that reads it is missing.
    """
    if user.is_own(text):
        user.check_user_task(text)
        return
    entry = _entry(text)
    config = _model_config(entry, model)
    # For a model without this option, building it shows whether it has batch norms.
    if batch_norm and not getattr(config, "batch_norm", True):
        raise UsageError(
            "the model has no batch norm",
            remedy=f"give --model {(model or next(iter(entry.models))).partition(':')[0]}:batch_norm=true, "
            "or leave out --batch-norm",
        )
    for flag, unused in (
        ("--data", data is not None and not entry.check),
        ("--augment", augment and not entry.augment),
    ):
        if unused:
            raise UsageError(f"the task '{text}' does not use {flag}", remedy=f"leave {flag} out")
    if data is None and entry.ask is not None:
        raise DataError(f"the task '{text}' needs data", remedy=f"give {entry.ask}")
    for package, extra in entry.needs.items():
        if importlib.util.find_spec(package) is None:
            raise DataError(f"the task '{text}' needs the package {package}", remedy=f"run {pip_install(extra)}")
    if data is not None and entry.check is not None:
        entry.check(data)


def load_task(text: str, *, data: str | None = None, model: str | None = None, augment: bool = False) -> Task:
    """Load a built-in task by name, or the user's task from its function, with its data.

    Args:
        text: name of a built-in task, ``path/to/file.py:function`` or ``module:function``.
        data: ``--data``: file, folder or name of a data set on a hub; None if not given.
        model: ``name:key=value,…``; None for the task's first model.
        augment: whether to augment the training samples.

    Returns:
        A ``Task``, the definition of what is trained. Its attributes are: ``model``, a function without arguments that
        returns a new model; ``loss``, the loss function; ``train``, the training samples; ``eval``, the held-out
        samples or None; further ``name``, ``images`` (whether samples are images, which selects the channels-last
        layout), ``directions`` (whether higher or lower is better, by metric), ``callbacks``, and ``describe`` (a line
        on the data for the run's header).

    Raises:
        UsageError: an unknown task, model or option, or the user's function cannot be imported, fails, or returns no
            ``Task``.
        DataError: the data are missing or malformed, or a package that reads them is missing.
    """
    check_task(text, data=data, model=model, augment=augment)
    if user.is_own(text):
        return user.load_user_task(text, data=data, model=model, augment=augment)
    entry = _entry(text)
    options: dict[str, Any] = {"data": data} if entry.check else {}
    if entry.augment:
        options["augment"] = augment
    module, _, function = entry.made_by.partition(":")
    task: Task = getattr(import_module(module), function)(_model_config(entry, model), **options)
    return task


def judged_by(text: str) -> str:
    """Return the name of the held-out metric by which ``tutti compare`` ranks runs of a task by default.

    Args:
        text: name of a built-in task, ``path/to/file.py:function`` or ``module:function``; for a user's task the result
            is ``accuracy``.

    Raises:
        UsageError: there is no such built-in task.
    """
    return "accuracy" if user.is_own(text) else _entry(text).metric


def held_out_values(text: str) -> tuple[str, ...]:
    """Return the names of the values that an evaluation of a built-in task reports: ``loss`` and its metrics.

    Args:
        text: name of a built-in task.

    Raises:
        UsageError: there is no such built-in task.

    >>> held_out_values("membranes")
    ('loss', 'accuracy', 'dice')
    """
    return _entry(text).reports


def _entry(text: str) -> TaskEntry:
    if text not in TASKS:
        raise UsageError(
            f"unknown task '{text}'", remedy=f"{did_you_mean(text, TASKS)}, or your own: path/to/file.py:function"
        )
    return TASKS[text]


def _model_config(entry: TaskEntry, text: str | None) -> object:
    spec = Spec.parse(text if text is not None else next(iter(entry.models)), "--model")
    return spec.build(spec.choose(entry.models, "model"), "model")
