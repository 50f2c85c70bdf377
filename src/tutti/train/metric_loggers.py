"""Callbacks that write a run's metrics to TensorBoard, Weights & Biases, MLflow, trackio, or a file of JSON lines."""

from __future__ import annotations

import atexit
import importlib
import importlib.util
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tutti.config import logger_config as options
from tutti.distribution import pip_install
from tutti.errors import DiskError, UsageError
from tutti.launcher.encoding import strict_json
from tutti.metrics.events import TensorBoard
from tutti.metrics.metric_names import eval_names, train_names
from tutti.train.evaluation import Evaluation

if TYPE_CHECKING:
    from tutti.train.run import Run


class MetricLogger(ABC):
    """Base of callbacks that write the metrics of a run to a service or file, on rank 0 alone.

    Subclasses implement ``open``, ``write`` and ``close``. The logger writes ``train/…`` after each step and ``eval/…``
    after each evaluation. A logger whose run at the service was saved in a checkpoint continues that run. A run that
    ends without ``on_train_end``, such as by a ``break``, is closed when the process exits: as failed if an exception
    ends the process. ``run.evaluate`` before and after training is written, too; after training each call continues the
    run and closes it again.

    Attributes:
        identity: name or id of the run at the service; None where the service has none, or before ``open``.
        failed: whether an exception has ended training in ``tutti train``, which sets this attribute; it decides the
            argument of ``close`` at the exit of the process.
    """

    ranks = "first"

    def __init__(self) -> None:
        self.identity: str | None = None
        self.failed = False
        self._open = self._ended = False

    @abstractmethod
    def open(self) -> str | None:
        """Start a run at the logger's service or open its file, or continue a saved run.

        This object is a callback that writes metrics on rank 0; subclasses implement the method. ``self.identity`` is
        the name of the run to continue, from a checkpoint; None for a new run.

        Called on rank 0 before the first step or evaluation, and again for those after ``close``.

        Returns:
            The name under which a resumed run continues, which becomes ``self.identity``; None for none.
        """

    @abstractmethod
    def write(self, values: Mapping[str, float], step: int) -> None:
        """Write the values of one training step or evaluation to the metric logger's service or file.

        Subclasses implement the method; it is called on rank 0 alone.

        Args:
            values: values by name, such as ``train/loss`` or ``eval/accuracy``.
            step: steps of the run so far.
        """

    @abstractmethod
    def close(self, failed: bool) -> None:
        """Write values that are still in memory, and end the metric logger's run at its service, or close its file.

        Subclasses implement the method; it is called on rank 0 alone.

        Args:
            failed: whether an exception has ended training.
        """

    def on_train_begin(self, run: Run) -> None:
        """Call ``open`` when training begins, and store the run name that it returns in ``self.identity``.

        Does nothing where an evaluation has opened the logger before.

        Args:
            run: the training run that begins.
        """
        self._begin()

    def _begin(self) -> None:
        if not self._open:
            self.identity = self.open()
            self._open = True
            atexit.register(self._exit)

    def _exit(self) -> None:
        # Python sets it where an exception ends the process; a break out of the loop is no failure.
        self._close(self.failed or getattr(sys, "last_value", None) is not None)

    def on_step_end(self, run: Run) -> None:
        """Write ``train/loss``, ``train/{metric}``, ``train/grad_norm`` and ``train/lr`` of the last training step.

        Loss and metrics are means over the global batch, ``train/lr`` is the learning rate of the first parameter
        group. Values that are None are left out; nothing is written before the first step. Opens the logger first if it
        is closed.

        Args:
            run: the training run, whose last step is written.
        """
        if run.stats is None:
            return
        groups = [group for optimizer in run.gradient_sync.optimizers for group in optimizer.param_groups]
        values = {"loss": run.stats.loss, **run.stats.metrics, "grad_norm": run.stats.grad_norm}
        values |= {"lr": float(groups[0]["lr"])} if groups else {}
        self._begin()
        self._ended = False
        self.write(train_names(values), run.global_step)

    def on_evaluation(self, run: Run, evaluation: Evaluation) -> None:
        """Write the means of an evaluation as ``eval/loss`` and ``eval/{metric}``, at the run's present step.

        Opens the logger first if it is closed. After the end of training the logger is closed again.

        Args:
            run: the training run, whose step is logged.
            evaluation: loss and metrics of the evaluation on held-out samples.
        """
        self._begin()
        self.write(eval_names(evaluation.values), run.global_step)
        if self._ended:
            self._close(False)

    def on_train_end(self, run: Run) -> None:
        """Call ``close(failed=False)`` when training ends, so that the metric logger closes its file or ends its run.

        Args:
            run: the training run that has ended.
        """
        self._ended = True
        self._close(False)

    def state_dict(self) -> dict[str, Any]:
        """Return ``{"identity": …}`` for a checkpoint: the name under which a resumed run of the logger continues."""
        return {"identity": self.identity}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the attribute ``identity`` from a checkpoint, so that ``open`` continues the run that was saved there.

        A metric logger is a callback that writes the losses and metrics of a training run to a service, such as MLflow,
        or to a file. ``identity`` is the name or id of the run at that service; None for a logger that has no such
        name, whose ``open`` starts a new run. If the logger is open with another ``identity``, it is closed.

        Args:
            state: the result of ``state_dict``: a dict with one key, ``{"identity": the name as a str, or None}``.
        """
        identity = None if state["identity"] is None else str(state["identity"])
        if identity != self.identity:
            # An evaluation before the load has opened another run.
            self._close(False)
        self.identity = identity

    def _close(self, failed: bool) -> None:
        if self._open:
            self._open = False
            atexit.unregister(self._exit)
            self.close(failed)


class JsonLinesLogger(MetricLogger):
    """Callback that appends a JSON line ``{"step": …, "train/loss": …}`` to a file for each step and evaluation.

    Args:
        path: the file; its folder is made.
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__()
        self.path = Path(path)
        self._file: Any = None

    def open(self) -> None:
        """Open the metric logger's JSON Lines file (``self.path``) for appending, and make its folder; return None.

        Raises:
            DiskError: the folder or the file cannot be written.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("a", encoding="utf-8")
        except OSError as error:
            raise DiskError("the log cannot be written", where=str(self.path), why=str(error)) from error

    def write(self, values: Mapping[str, float], step: int) -> None:
        """Append one JSON line ``{"step": …, name: value, …}`` to the metric logger's file, and flush it.

        NaN and infinities become null.

        Args:
            values: values of a training step or evaluation by name, such as ``train/loss``.
            step: steps of the run so far.
        """
        self._file.write(strict_json({"step": step, **values}) + "\n")
        self._file.flush()

    def close(self, failed: bool) -> None:
        """Close the metric logger's JSON Lines file, at the end of training or when the process exits.

        Args:
            failed: no effect, because every line has been flushed.
        """
        self._file.close()


class TensorBoardLogger(MetricLogger):
    """Callback that writes losses and metrics of steps and evaluations to event files of TensorBoard.

    Where a resumed run repeats steps, TensorBoard shows the new events and hides those of the earlier files.

    Args:
        folder: folder of the event files.

    Raises:
        UsageError: ``tensorboard`` is not installed.
    """

    def __init__(self, folder: str | Path) -> None:
        super().__init__()
        _require("tensorboard", "TensorBoardLogger")
        self.folder = Path(folder)
        self._board: TensorBoard | None = None
        self._done: int | None = None

    def open(self) -> None:
        """Open no file yet, and return None: ``write`` opens the event file with the first values.

        A resumed run repeats steps, whose earlier events TensorBoard then hides; the first values tell which steps.
        """

    def write(self, values: Mapping[str, float], step: int) -> None:
        """Write values to TensorBoard in one event; the first call opens the event file.

        In a resumed run, TensorBoard hides events of earlier files from the step of the first call on.

        Args:
            values: values of a training step or evaluation by name, such as ``train/loss``.
            step: steps of the run so far.
        """
        if self._board is None:
            # After ``close`` nothing is repeated; an evaluation stands beside its step.
            before = step if self._done is not None or "train/loss" not in values else step - 1
            self._board = TensorBoard(self.folder, before)
        self._board.write(values, step)
        self._done = step

    def close(self, failed: bool) -> None:
        """Write values that are still buffered to the event file of TensorBoard, and close it.

        Args:
            failed: no effect: event files do not tell how a run ended.
        """
        if self._board is not None:
            self._board.close()
            self._board = None


class WandbLogger(MetricLogger):
    """Callback that writes losses and metrics of steps and evaluations to Weights & Biases.

    Args:
        project: the project.
        name: the run's name; None for one that Weights & Biases makes.
        mode: ``online``, ``offline`` (files for ``wandb sync``, no network) or ``disabled``; None: as ``WANDB_MODE``.
        folder: directory for its files; None for the current one.

    Raises:
        UsageError: ``wandb`` is not installed.
    """

    def __init__(
        self,
        project: str,
        name: str | None = None,
        mode: Literal["online", "offline", "disabled"] | None = None,
        folder: str | Path | None = None,
    ) -> None:
        super().__init__()
        _require("wandb", "WandbLogger")
        self.project, self.name, self.mode, self.folder = project, name, mode, folder
        self._run: Any = None

    def open(self) -> str:
        """Start a run of Weights & Biases, or continue the run with the id ``self.identity`` of a checkpoint.

        Returns:
            The run's id at Weights & Biases, which the next checkpoint saves.
        """
        self._run = importlib.import_module("wandb").init(
            project=self.project,
            name=self.name,
            mode=self.mode,
            dir=None if self.folder is None else str(self.folder),
            id=self.identity,
            resume=None if self.identity is None else "allow",
        )
        # Weights & Biases drops steps that do not rise, such as those that a resumed run repeats.
        self._run.define_metric("*", step_metric="step")
        return str(self._run.id)

    def write(self, values: Mapping[str, float], step: int) -> None:
        """Log values to Weights & Biases, with ``step`` as their horizontal axis.

        Args:
            values: values of a training step or evaluation by name, such as ``train/loss``.
            step: steps of the run so far.
        """
        self._run.log({"step": step, **values})

    def close(self, failed: bool) -> None:
        """Finish the run of Weights & Biases, at the end of training or when the process exits.

        Args:
            failed: whether an exception has ended training; sets the run's exit code to 1, else 0.
        """
        self._run.finish(exit_code=int(failed))


class MLflowLogger(MetricLogger):
    """Callback that writes losses and metrics of steps and evaluations to MLflow.

    Args:
        experiment: the experiment, which is created if it is missing.
        name: the run's name; None for one that MLflow makes.
        uri: the tracking server, or a store without network, such as ``sqlite:///runs.db``; None: as
            ``MLFLOW_TRACKING_URI``.

    Raises:
        UsageError: ``mlflow`` is not installed.
    """

    def __init__(self, experiment: str, name: str | None = None, uri: str | None = None) -> None:
        super().__init__()
        _require("mlflow", "MLflowLogger")
        self.experiment, self.name, self.uri = experiment, name, uri
        self._client: Any = None
        self._metric: Any = None

    def open(self) -> str:
        """Create a run of MLflow (and its experiment), or continue the run ``self.identity`` of a checkpoint.

        Returns:
            The run's id at MLflow, which the next checkpoint saves.
        """
        self._client = importlib.import_module("mlflow").MlflowClient(tracking_uri=self.uri)
        self._metric = importlib.import_module("mlflow.entities").Metric
        if self.identity is not None:
            self._client.update_run(self.identity, status="RUNNING")
            return self.identity
        found = self._client.get_experiment_by_name(self.experiment)
        number = self._client.create_experiment(self.experiment) if found is None else found.experiment_id
        return str(self._client.create_run(number, run_name=self.name).info.run_id)

    def write(self, values: Mapping[str, float], step: int) -> None:
        """Log values to MLflow in one request, each with the step and the present time.

        Args:
            values: values of a training step or evaluation by name, such as ``train/loss``.
            step: steps of the run so far.
        """
        now = int(time.time() * 1000)
        metrics = [self._metric(name, value, now, step) for name, value in values.items()]
        self._client.log_batch(self.identity, metrics=metrics)

    def close(self, failed: bool) -> None:
        """End the run of MLflow, at the end of training or when the process exits.

        Args:
            failed: whether an exception has ended training; sets the run's status to FAILED, else FINISHED.
        """
        self._client.set_terminated(self.identity, status="FAILED" if failed else "FINISHED")


class TrackioLogger(MetricLogger):
    """Callback that writes losses and metrics of steps and evaluations to trackio, on this machine or in a Space.

    Files of this machine are in ``TRACKIO_DIR``, by default in the cache of Hugging Face; ``trackio show`` shows them.

    Args:
        project: the project.
        name: the run's name; None for one that trackio makes.
        space: a Space of Hugging Face, ``user/name``, that gets the metrics; None for none, without a network.

    Raises:
        UsageError: ``trackio`` is not installed.
    """

    def __init__(self, project: str, name: str | None = None, space: str | None = None) -> None:
        super().__init__()
        _require("trackio", "TrackioLogger")
        self.project, self.name, self.space = project, name, space
        self._run: Any = None

    def open(self) -> str:
        """Start a run of trackio, or continue the run with the name ``self.identity`` of a checkpoint.

        Returns:
            The run's name at trackio, which the next checkpoint saves.
        """
        # Standard output may be the JSON of a command.
        with redirect_stdout(sys.stderr):
            self._run = importlib.import_module("trackio").init(
                project=self.project,
                name=self.identity or self.name,
                space_id=self.space,
                resume="never" if self.identity is None else "allow",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
        return str(self._run.name)

    def write(self, values: Mapping[str, float], step: int) -> None:
        """Log values to trackio, with their step.

        Args:
            values: values of a training step or evaluation by name, such as ``train/loss``.
            step: steps of the run so far.
        """
        self._run.log(dict(values), step=step)

    def close(self, failed: bool) -> None:
        """Finish the run of trackio, at the end of training or when the process exits.

        Args:
            failed: no effect: trackio does not keep how a run ended.
        """
        with redirect_stdout(sys.stderr):
            # Not the run's own method, after which trackio would finish it once more at exit.
            importlib.import_module("trackio").finish()


def make_loggers(chosen: Sequence[options.LoggerOptions]) -> list[MetricLogger]:
    """Construct the metric loggers that the option ``--logger`` of ``tutti train`` asks for, in the order given.

    Args:
        chosen: the parsed options of each logger, such as the path of a JSON Lines file.

    Raises:
        UsageError: the package of a logger is not installed.
    """
    kinds: Mapping[type, type[MetricLogger]] = {
        options.JsonLinesOptions: JsonLinesLogger,
        options.TensorBoardOptions: TensorBoardLogger,
        options.WandbOptions: WandbLogger,
        options.MLflowOptions: MLflowLogger,
        options.TrackioOptions: TrackioLogger,
    }
    return [kinds[type(each)](**vars(each)) for each in chosen]


def _require(package: str, logger: str) -> None:
    """Raise UsageError if the package is not installed."""
    if importlib.util.find_spec(package) is None:
        raise UsageError(
            f"{logger} needs the package {package}",
            why="it is not installed",
            remedy=pip_install(package),
        )
