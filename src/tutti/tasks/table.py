"""The tasks that have a name, and the way to the user's own. No torch until a task is loaded."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from tutti.data import images, masks
from tutti.data import text as texts
from tutti.errors import DataError, UsageError, did_you_mean
from tutti.spec import Spec
from tutti.tasks import user
from tutti.tasks.config import Cnn, Course, Gpt, Line, Mlp, Resnet18, Unet

if TYPE_CHECKING:
    from tutti.tasks.task import Task

_HUB = "uoft-cs/cifar10"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """What is known of a built-in task without torch.

    Attributes:
        module: holds ``task(config)``, which takes ``data`` and ``augment`` too where the entry has them.
        models: options of each model by its name; the first is the default.
        summary: one line of help.
        check: whether ``--data`` can be read, in a millisecond; None where the task has no use for it.
        ask: what to give as ``--data``; None where the task does without.
        augment: training samples can be augmented.
        needs: packages that must be installed, and the extra that brings them.
    """

    module: str
    models: Mapping[str, type]
    summary: str
    check: Callable[[str], None] | None = None
    ask: str | None = None
    augment: bool = False
    needs: Mapping[str, str] = field(default_factory=dict)


TASKS: Mapping[str, Entry] = {
    "linear": Entry(
        module="tutti.tasks.linear",
        models={"line": Line},
        summary="two parameters, y = w·x + b with noise; embedded",
    ),
    "digits": Entry(
        module="tutti.tasks.digits",
        models={"cnn": Cnn, "mlp": Mlp},
        summary="handwritten digits 8×8 of scikit-learn; embedded",
        needs={"sklearn": "demo"},
    ),
    "cifar10": Entry(
        module="tutti.tasks.cifar10",
        models={"course": Course, "resnet18": Resnet18},
        summary="ten classes of 32×32 colour images; --data FOLDER",
        check=partial(images.check, hub=_HUB),
        ask=f"--data FOLDER (hub layout or train/CLASS/*.png) or --data {_HUB}",
        augment=True,
        needs={"PIL": "data"},
    ),
    "text": Entry(
        module="tutti.tasks.text",
        models={"gpt": Gpt},
        summary="the next character of a text; --data FILE, or embedded",
        check=texts.check,
    ),
    "membranes": Entry(
        module="tutti.tasks.membranes",
        models={"unet": Unet},
        summary="binary masks of grey images; --data FOLDER",
        check=masks.check,
        ask="--data FOLDER (train/image/NN.png and train/label/NN.png)",
        augment=True,
        needs={"PIL": "data"},
    ),
}


def check(
    text: str, *, data: str | None = None, model: str | None = None, augment: bool = False, batch_norm: bool = False
) -> None:
    """Refuse what cannot be trained, without importing torch or any code of the user's.

    ``batch_norm``: the model's batch norms are to be replaced by others.

    Raises:
        UsageError: unknown task, missing file or function, unknown model or model option, an option that the task
            has not.
        DataError: no ``data`` where it is needed, no such folder, a package that reads the data is missing.
    """
    if user.is_own(text):
        user.check(text)
        return
    entry = _entry(text)
    config = _model_config(entry, model)
    # A model without the option has batch norms or not, which building it will tell.
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
            raise UsageError(f"the task '{text}' has no use for {flag}", remedy=f"leave {flag} out")
    if data is None and entry.ask is not None:
        raise DataError(f"the task '{text}' needs data", remedy=f"give {entry.ask}")
    for package, extra in entry.needs.items():
        if importlib.util.find_spec(package) is None:
            raise DataError(
                f"the task '{text}' needs the package {package}", remedy=f"run pip install 'tutti[{extra}]'"
            )
    if data is not None and entry.check is not None:
        entry.check(data)


def load(text: str, *, data: str | None = None, model: str | None = None, augment: bool = False) -> Task:
    """The task of this name, or what the user's own function returns.

    Args:
        text: a name of ``TASKS``, ``path/to/file.py:function`` or ``module:function``.
        data: file, folder or hub name.
        model: ``name:key=value,…``; None for the task's first.
        augment: random changes of training images.

    Raises:
        UsageError, DataError: as ``check``, and whatever is wrong with the user's code or with the data itself.
    """
    check(text, data=data, model=model, augment=augment)
    if user.is_own(text):
        return user.load(text, data=data, model=model, augment=augment)
    entry = _entry(text)
    options: dict[str, Any] = {"data": data} if entry.check else {}
    if entry.augment:
        options["augment"] = augment
    task: Task = import_module(entry.module).task(_model_config(entry, model), **options)
    return task


def _entry(text: str) -> Entry:
    if text not in TASKS:
        raise UsageError(
            f"unknown task '{text}'", remedy=f"{did_you_mean(text, TASKS)}, or your own: path/to/file.py:function"
        )
    return TASKS[text]


def _model_config(entry: Entry, text: str | None) -> object:
    spec = Spec.parse(text if text is not None else next(iter(entry.models)), "--model")
    return spec.build(spec.choose(entry.models, "model"), "model")
