"""Take model, loss and data of a training script that calls ``tutti.prepare``, without training.

The script runs up to ``tutti.prepare``. If it gives its loss there, this is all. If it has a custom training loop, each
forward and backward that is traced runs the script again, with the traced model in place of its own, up to its first
``run.backward(loss)``.
"""

from __future__ import annotations

import copy
import runpy
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tutti.config.optimizer_config import OPTIMIZERS
from tutti.data.adapt import adapt_training
from tutti.data.stream import Stream
from tutti.errors import TuttiError, UsageError
from tutti.launcher.launch import check_script
from tutti.tasks.task import Task
from tutti.torch_compat import without_dispatch_modes
from tutti.train.prepare_interception import PrepareHandler, intercept_prepare
from tutti.train.run_options import RunOptions
from tutti.train.strategy_spec import strategy_text
from tutti.train.training_data import choose_sampling

_LOOP_AFTER = "a custom training loop is followed up to its first run.backward(loss) alone"
_STATED_LENGTH = "state the length of training: --length 10ep, 500st or 20000sa"
_REMEDIES = {
    "tutti.prepare": "call tutti.prepare(model, optimizer, data, loss) in it, or give a task file.py:function",
    "run.backward(loss)": f"{_LOOP_AFTER}: call it in the loop over run.microbatches(epoch)",
    "run.epochs(number)": _STATED_LENGTH,
}
"""Remedy for a script that ends before a call, by the call."""


@dataclass(frozen=True)
class ScriptTask:
    """A script's model, loss and data as a task, and the options that the script gives to ``tutti.prepare``.

    Attributes:
        task: model, loss and training data.
        options: values by field of ``TrainConfig``; options that the script does not state are absent.
        custom_loop: whether the script computes the loss in its own training loop, and gives no loss function to
            ``tutti.prepare``; such a script cannot be simulated in pipeline stages.
        has_loader: whether the script gives a ``DataLoader``, which decides the batch size.
    """

    task: Task
    options: Mapping[str, Any] = field(default_factory=dict)
    custom_loop: bool = False
    has_loader: bool = False

    def samples(self) -> int:
        """Return the number of samples in the script's training data; UsageError for a stream, which has no length."""
        data = adapt_training(self.task.train, self.task.collate)
        if isinstance(data, Stream):
            raise UsageError("the script trains on a stream, whose length is not known", where=self.task.name)
        return len(data)


def load_script(script: str, arguments: Sequence[str] = ()) -> ScriptTask:
    """Run a training script up to its call of ``tutti.prepare``, and return the arguments of this call as a task.

    The script runs in this process as ``__main__``, with a ``sys.argv`` of its own: its model is built, and all code
    before the call has its effects. Its output goes to stderr. Nothing is trained.

    Args:
        script: path of the script.
        arguments: its command-line arguments.

    Returns:
        A ``ScriptTask``: ``task``, a ``Task`` with the attributes ``model`` (a function that returns a copy of the
        script's model), ``loss`` (the loss function) and ``train`` (the training data); ``options``: the options that
        the script passes, by field of ``TrainConfig``; and ``custom_loop``: whether the script computes the loss in its
        own loop and gives no loss function.

    Raises:
        UsageError: the script does not exist, raises, or ends before ``tutti.prepare``; or the model, data or options
            that it passes cannot be simulated. The message names the script's line.
        DataError: the training data cannot be read.
    """
    check_script(script)

    def capture(model: Any, optimizer: Any, dataset: Any, loss: Any, options: RunOptions) -> Any:
        raise _Reached((model, optimizer, dataset, loss, options))

    model, optimizer, dataset, loss, options = _run_until(script, arguments, capture, "tutti.prepare")
    if not isinstance(model, nn.Module):
        raise UsageError(
            "the script prepares several models",
            where=script,
            remedy="simulate one that trains alone: a task file.py:function with its model and loss",
        )
    sampling = choose_sampling(dataset, options)
    task = Task(
        name=Path(script).name,
        model=lambda: copy_model(model),
        loss=loss if loss is not None else ScriptLoopLoss(script, tuple(arguments)),
        train=adapt_training(sampling.dataset, sampling.collate, sampling.drop_last),
    )
    stated = {
        "strategy": strategy_text(options.strategy, model),
        "workers": options.workers,
        "batch_size": sampling.batch_size,
        "micro_batch": options.micro_batch,
        "precision": options.precision or _dtype_precision(model),
        "activation_checkpointing": _checkpointing_text(options, script),
        "optimizer": optimizer_text(optimizer),
    }
    known = {name: value for name, value in stated.items() if value is not None}
    return ScriptTask(task, known, loss is None, isinstance(dataset, DataLoader))


def script_epochs(script: str, arguments: Sequence[str] = ()) -> float:
    """Run a training script up to its call of ``run.epochs(number)``, and return the number. Nothing is trained.

    Args:
        script: path of the script.
        arguments: its command-line arguments.

    Raises:
        UsageError: the script raises, ends or uses its run in another way before ``run.epochs``, or gives no number.
    """

    def prepare(*_: Any) -> _LengthRun:
        return _LengthRun(script)

    number = _run_until(script, arguments, prepare, "run.epochs(number)")
    if not isinstance(number, int | float) or number <= 0:
        raise UsageError(f"run.epochs got {number!r}", where=script, remedy=_STATED_LENGTH)
    return float(number)


def copy_model(model: nn.Module) -> nn.Module:
    """Return a deep copy of a model; under ``FakeTensorMode`` its parameters and buffers are fake tensors.

    Fake tensors have shapes and no values, and take no memory; without the mode, values are copied. Tied parameters
    stay tied.

    Args:
        model: a model with real tensors, which stays as it is.
    """
    made: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        fresh = tensor.detach().clone()
        made[id(tensor)] = nn.Parameter(fresh, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fresh
    # Attributes that are tensors and no buffers keep their values, which a loss may read.
    with without_dispatch_modes():
        return copy.deepcopy(model, made)


def optimizer_text(optimizer: Any) -> str | None:
    """Describe an optimizer as text of ``--optimizer``, with its learning rate, and for SGD also with its momentum.

    Args:
        optimizer: text, which is returned as it is, or an instance of an optimizer.

    Returns:
        ``NAME:lr=RATE``; for SGD with momentum ``sgd:lr=RATE,momentum=VALUE``; for an optimizer without a short name in
        ``--optimizer``, ``MODULE:CLASS:lr=RATE``. The values are the optimizer's defaults, not those of its parameter
        groups. None where ``optimizer`` is neither text nor one PyTorch optimizer, such as a list of several.

    >>> optimizer_text(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.5, momentum=0.9))
    'sgd:lr=0.5,momentum=0.9'
    """
    if isinstance(optimizer, str):
        return optimizer
    if not isinstance(optimizer, torch.optim.Optimizer):
        return None
    kind, rate = type(optimizer), float(optimizer.defaults.get("lr", 0.001))
    name = kind.__name__.lower()
    if name not in OPTIMIZERS or kind.__module__.partition(".")[0] not in ("torch", "tutti"):
        return f"{kind.__module__}:{kind.__name__}:lr={rate:g}"
    momentum = optimizer.defaults.get("momentum", 0.0) if name == "sgd" else 0.0
    return f"{name}:lr={rate:g}" + (f",momentum={momentum:g}" if momentum else "")


class _Reached(BaseException):
    """The place up to which a script runs; a script's ``except Exception`` does not catch it."""

    def __init__(self, found: Any) -> None:
        super().__init__()
        self.found = found


class ScriptLoopLoss:
    """The loss that a training script computes in its own loop, as a function ``loss(model, batch)``.

    Each call runs the script from its begin to its first ``run.backward(loss)``, with ``batch`` as the only micro-batch
    of its loop, and returns the loss there. No step is trained.

    Args:
        script: path of the script.
        arguments: its command-line arguments.
    """

    def __init__(self, script: str, arguments: Sequence[str]) -> None:
        self._script, self._arguments = script, arguments

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        """Run the script with ``model`` and ``batch`` up to its first ``run.backward``, and return the loss there.

        The script builds a model of its own, whose modules then take the tensors and hooks of those of ``model``.

        Args:
            model: a model of the script's architecture, also with fake tensors or split layers.
            batch: the only micro-batch that the script's loop gets.

        Returns:
            The argument of the script's ``run.backward``: a tensor or a tuple.

        Raises:
            UsageError: the script raises or ends before, or gives something else.
        """
        with ExitStack() as outside:
            # Building the script's model and data is no part of the step that is traced.
            outside.enter_context(without_dispatch_modes())

            def begin(own: Any, optimizer: Any, dataset: Any, loss: Any, options: RunOptions) -> Any:
                del optimizer, dataset, loss, options
                outside.close()
                _act_as(own, model)
                return _LoopRun(batch, self._script)

            return _run_until(self._script, self._arguments, begin, "run.backward(loss)")


class _LengthRun:
    """What ``tutti.prepare`` returns to a script of which only the number of epochs is wanted.

    Args:
        script: path of the script, for messages.
    """

    def __init__(self, script: str) -> None:
        self._script = script

    def __getattr__(self, name: str) -> Any:
        raise UsageError(
            f"the script uses run.{name} before run.epochs(number)",
            where=self._script,
            why="how long it trains is not known",
            remedy=_STATED_LENGTH,
        )

    def stopping(self, *_: Any, **__: Any) -> AbstractContextManager[Any]:
        """Return a context manager that does nothing, in place of a run's handling of stop signals."""
        return nullcontext()

    def restore(self, *_: Any, **__: Any) -> None:
        """Do nothing: the length of the whole run is wanted; arguments are ignored."""

    def epochs(self, number: Any) -> Any:
        """End the script by an exception that carries ``number``.

        Args:
            number: number of epochs of the whole run.
        """
        raise _Reached(number)


class _LoopRun:
    """What ``tutti.prepare`` returns to a script with its own loop: one epoch of one micro-batch, and no training.

    Args:
        batch: the micro-batch.
        script: path of the script, for messages.
    """

    stepped = False

    def __init__(self, batch: Any, script: str) -> None:
        self._batch, self._script = batch, script

    def __getattr__(self, name: str) -> Any:
        raise UsageError(
            f"the script uses run.{name} before its first backward",
            where=self._script,
            why=_LOOP_AFTER,
            remedy="give the loss to tutti.prepare(model, optimizer, data, loss), or move this behind the loop",
        )

    def epochs(self, *_: Any, **__: Any) -> Iterator[int]:
        """Yield 0, the index of the only epoch of a script's loop that is traced and not trained; ignore arguments."""
        yield 0

    def microbatches(self, *_: Any, **__: Any) -> Iterator[Any]:
        """Yield the one micro-batch on which the script's own loss is traced; arguments are ignored."""
        yield self._batch

    def stopping(self, *_: Any, **__: Any) -> AbstractContextManager[Any]:
        """Return a context manager that does nothing, in place of a run's handling of stop signals."""
        return nullcontext()

    def restore(self, *_: Any, **__: Any) -> None:
        """Do nothing: a script's loop that is traced has no checkpoint to load; arguments are ignored."""

    def backward(self, loss: Any, *_: Any, **__: Any) -> None:
        """End the script, whose loss is all that is wanted, by an exception that carries ``loss``.

        Args:
            loss: the loss that the script's loop has computed: a tensor or a tuple.

        Raises:
            UsageError: ``loss`` is neither.
        """
        if not isinstance(loss, Tensor | tuple):
            raise UsageError(f"run.backward got a {type(loss).__name__}", where=self._script, remedy="give the loss")
        raise _Reached(loss)


def _act_as(own: nn.Module, model: nn.Module) -> None:
    """Give the modules of a script's model the tensors, submodules and hooks of the same modules of another one.

    The script's model has just been built and is thrown away with the script's run.
    """
    theirs = dict(model.named_modules())
    for name, module in list(own.named_modules()):
        # The script has defined its classes anew, so that equal ones have equal names alone.
        if name in theirs and type(theirs[name]).__qualname__ == type(module).__qualname__:
            module.__dict__ = theirs[name].__dict__


def run_intercepted(script: str, arguments: Sequence[str], handler: PrepareHandler) -> None:
    """Run a script in this process as ``__main__``, with ``tutti.prepare`` replaced by a function of the caller.

    The script's output goes to stderr.

    Args:
        script: path of the script.
        arguments: command-line arguments of the script.
        handler: called in place of ``tutti.prepare``, with model, optimizer, data set, loss and options; its result is
            what the script's call returns.

    Raises:
        BaseException: any exception that the script raises, SystemExit included.
    """
    with _as_main(script, arguments), redirect_stdout(sys.stderr), intercept_prepare(handler):
        runpy.run_path(script, run_name="__main__")


def _run_until(script: str, arguments: Sequence[str], handler: PrepareHandler, place: str) -> Any:
    """Run a script as ``__main__`` and return what it has reached; raise UsageError where it ends or raises before."""
    try:
        run_intercepted(script, arguments, handler)
    except _Reached as reached:
        return reached.found
    except TuttiError:
        raise
    except SystemExit as end:
        raise UsageError(
            f"the script exits with {end.code!r} before {place}",
            where=innermost_line(script, end),
            remedy="give its own arguments after --, as in: tutti simulate train.py --machine a100x8 -- --epochs 3",
        ) from end
    except Exception as error:
        if place == "run.backward(loss)":
            # The tracer names the line, and whether fake tensors are the reason.
            raise
        raise UsageError(
            f"the script raises before {place}",
            where=innermost_line(script, error),
            why=f"{type(error).__name__}: {error}",
            remedy="make it run with python first; its own arguments follow --",
        ) from error
    raise UsageError(f"the script ends without {place}", where=script, remedy=_REMEDIES[place])


@contextmanager
def _as_main(script: str, arguments: Sequence[str]) -> Iterator[None]:
    """Set ``sys.argv`` and ``sys.path`` within the block as ``python script …`` does."""
    argv, path = sys.argv, sys.path[:]
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, path


def innermost_line(script: str, error: BaseException) -> str:
    """Return the script's innermost line in an exception's traceback, as ``train.py, line 7: text``.

    Args:
        script: path of the script; returned where no line of it is in the traceback.
        error: the exception.
    """
    frames = [each for each in traceback.extract_tb(error.__traceback__) if each.filename == script]
    return f"{script}, line {frames[-1].lineno}: {frames[-1].line}" if frames else script


def _dtype_precision(model: nn.Module) -> str | None:
    """Return the precision of a model without autocast; None for one of float32, or without parameters."""
    dtype = next((p.dtype for p in model.parameters()), torch.float32)
    return {torch.float64: "fp64", torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype)


def _checkpointing_text(options: RunOptions, script: str) -> str | None:
    """Return the script's activation checkpointing as text; None for none."""
    given = options.activation_checkpointing
    if isinstance(given, str):
        return None if given == "none" else given
    raise UsageError(
        "activation checkpointing of named modules cannot be simulated",
        where=script,
        remedy="give activation_checkpointing='blocks' to tutti.prepare",
    )
