"""Tell tasks of ``tutti train`` from training scripts: commands take both by name. Loads torch for a script alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tutti.errors import UsageError
from tutti.launcher.launch import check_script
from tutti.tasks import task_registry

if TYPE_CHECKING:
    from tutti.planning.script_task import ScriptTask


SCRIPT_TRACED = "a trace of the script up to its first loss, on tensors without values: no step of it was run or timed"
"""What predictions of a script's step rest on besides the machine, to be printed."""


def is_script(text: str) -> bool:
    """Return whether a text names a training script and not a task of ``tutti train``: whether it ends in ``.py``.

    >>> is_script("train.py"), is_script("train.py:task"), is_script("digits")
    (True, False, False)
    """
    return text.endswith(".py")


@dataclass(frozen=True)
class TaskOrScript:
    """A task of ``tutti train``, or an existing training script with its command-line arguments.

    Attributes:
        text: name of a built-in task, ``file.py:function``, ``module:function``, or path of a script.
        arguments: command-line arguments of the script; none for a task.
    """

    text: str
    arguments: tuple[str, ...] = ()

    @classmethod
    def of(cls, text: str, arguments: tuple[str, ...] = ()) -> TaskOrScript:
        """Return an object for the task or training script that a command line names; a script is checked to exist.

        No code of the task or script is run. A task's name is not looked up here; the method ``check_options`` of the
        result does so.

        Args:
            text: name of a built-in task, ``file.py:function``, ``module:function``, or path of a script (ends in
                ``.py``).
            arguments: words behind ``--`` on the command line, which a script alone may get.

        Returns:
            A ``TaskOrScript``, which has ``text`` and ``arguments`` as attributes. Its property ``script`` is True for
            a training script and False for a task.

        Raises:
            UsageError: there is no such script, or a task gets arguments.
        """
        if is_script(text):
            check_script(text)
        elif arguments:
            raise UsageError(f"a task takes no argument '{arguments[0]}'", remedy="give options as --NAME VALUE")
        return cls(text, arguments)

    def check_options(self, *, data: str | None = None, model: str | None = None, augment: bool = False) -> None:
        """Check that the task exists and takes the given options of ``tutti train``; a script must get none of them.

        Args:
            data: value of ``--data``, where the task's data are; None where not given.
            model: value of ``--model``, the name of a model of the task; None where not given.
            augment: whether ``--augment``, random changes of training samples, is given.

        Raises:
            UsageError: there is no such task, it does not take an option, or a script gets one.
            DataError: data of the task are missing.
        """
        if not self.script:
            task_registry.check_task(self.text, data=data, model=model, augment=augment)
        elif data is not None or model is not None or augment:
            raise UsageError("a script makes its own model and data", remedy="leave out --data, --model and --augment")

    @property
    def script(self) -> bool:
        """Whether this is a training script, and not a task of ``tutti train``: whether ``text`` ends in ``.py``."""
        return is_script(self.text)

    def load_script(self) -> ScriptTask | None:
        """Run a training script up to its call of ``tutti.prepare``, and return the arguments of this call as a task.

        The script runs in this process, where its model is built; nothing is trained.

        Returns:
            A ``ScriptTask``: ``task`` (model, loss function and training data of the script), ``options`` (a dict of
            the options that the script states, by field of ``TrainConfig``) and ``custom_loop`` (whether the script
            computes the loss in its own loop). None if the command line names a task and not a script.

        Raises:
            UsageError: the script raises or ends before ``tutti.prepare``, or its model cannot be simulated.
        """
        if not self.script:
            return None
        from tutti.planning.script_task import load_script

        return load_script(self.text, self.arguments)

    def script_epochs(self) -> float:
        """Run the training script up to its call of ``run.epochs(number)``, and return the number.

        Raises:
            UsageError: this is no script, or it ends or raises before it calls ``run.epochs`` with a number.
        """
        from tutti.planning.script_task import script_epochs

        return script_epochs(self.text, self.arguments)
