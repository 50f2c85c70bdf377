"""Write TensorBoard events: one a step and one an evaluation, with names like ``train/loss``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tutti.metrics.listener import EvalRecord, Pace, RunHeader
from tutti.metrics.metric_names import eval_names, train_names
from tutti.torch_compat import write_event
from tutti.types.step_records import StepRecord


class TensorBoard:
    """Listener of a run's events that writes TensorBoard event files into a folder, on rank 0 alone.

    Args:
        folder: folder of the event files.
        done: step from which the run resumes; earlier events of later steps are hidden, because these steps are
            repeated.

    Raises:
        ImportError: the package ``tensorboard`` is not installed.
    """

    def __init__(self, folder: str | Path, done: int = 0) -> None:
        # Imported here: the extra ``tensorboard`` is optional and slow to import.
        from tensorboard.compat.proto.summary_pb2 import Summary
        from torch.utils.tensorboard import SummaryWriter

        self._summary: Any = Summary
        self._writer = SummaryWriter(str(folder), purge_step=done + 1)

    def started(self, header: RunHeader) -> None:
        """Write the run's title and settings to TensorBoard, before the first step, as a text named ``run``.

        Args:
            header: title, and settings that follow from the options, of which each becomes a line ``name: value``.
        """
        self._writer.add_text("run", "\n".join([header.title, *(f"- {k}: {v}" for k, v in header.derived.items())]))

    def stepped(self, record: StepRecord, pace: Pace) -> None:
        """Write a step's loss, metrics, gradient norm and learning rate as TensorBoard scalars.

        Figures of AdaScale and of the gradient noise, times, the run's samples a second, and throughput figures of one
        device are written too, all at the horizontal position ``record.step``. Names are those of ``metric_names``;
        numbers that are None are left out.

        Args:
            record: numbers of one optimizer step, and the number of steps so far.
            pace: speed of the run.
        """
        values = {"loss": record.loss, **record.metrics, "grad_norm": record.grad_norm, "lr": record.lr}
        values |= {**record.adascale, **record.noise, "loss_scale": record.loss_scale, "bubble": record.bubble}
        values |= {"seconds": pace.elapsed, "data_seconds": pace.data, "samples_per_second": pace.samples_per_second}
        self.write(train_names({**values, **pace.device}), record.step)

    def evaluated(self, record: EvalRecord) -> None:
        """Write the means of one evaluation on held-out samples as TensorBoard scalars ``eval/NAME``.

        NAME is ``loss`` or a metric, such as ``accuracy``. If the run keeps an average (EMA) of the weights, these are
        of the average, and ``raw_loss`` and ``raw_{metric}`` of the weights in training.

        Args:
            record: loss and metrics, and the step after which they were evaluated, which is the horizontal position.
        """
        self.write(eval_names(record.values), record.step)

    def warned(self, text: str) -> None:
        """Do nothing with the text of a warning: warnings are in ``metrics.jsonl``, and not in TensorBoard."""

    def finished(self, summary: Mapping[str, Any]) -> None:
        """Do nothing with the results of the run: they are in ``summary.json``, and not in TensorBoard."""

    def close(self) -> None:
        """Write the scalars that are still buffered to the run's TensorBoard event file, and close the file."""
        self._writer.close()

    def write(self, values: Mapping[str, float], step: int) -> None:
        """Write scalars to TensorBoard in one event: an event for each would cost a step four times as much.

        Args:
            values: values by name, such as ``train/loss``.
            step: horizontal position.
        """
        scalars = [self._summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        write_event(self._writer, self._summary(value=scalars), step)
