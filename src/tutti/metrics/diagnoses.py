"""Name the classic mistakes of distributed training, and report each once as a warning. No torch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import NamedTuple

from tutti.errors import TuttiError
from tutti.python_compat import calling_frame


class DiagnosisWarning(UserWarning):
    """Warning of a classic mistake of distributed training in a run; its text begins with the mistake's name.

    ``warnings.filterwarnings("ignore", "same-data")`` silences the mistake ``same-data``, and so for other names.
    """


class Classic(NamedTuple):
    """Texts on a classic mistake in distributed training: its effect and its remedy.

    Attributes:
        why: sentence on the reason why the mistake costs accuracy.
        remedy: sentence on the change that corrects it.
    """

    why: str
    remedy: str


CLASSICS: Mapping[str, Classic] = {
    "same-data": Classic(
        "their gradients are equal, so that the batch is in truth smaller than it is called and parts of the data are "
        "never seen",
        "give the data set to tutti.prepare and loop over run.epoch, or shard by rank what each rank brings "
        "(DistributedSampler; an iterable in tutti.data.Sharded)",
    ),
    "repeated-epoch": Classic(
        "its samples come in the same order and with the same augmentation as before",
        "count epochs, as by 'for epoch in run.epochs(10)', and give run.epoch or run.microbatches the number",
    ),
    "counted-forwards": Classic(
        "a device calls the model once for each micro-batch, so that it counts faster on few devices",
        "keep the number in a buffer, of which each logical worker has its own, or set it where run.stepped is true",
    ),
    "unkeyed-draws": Classic(
        "these first draws are the same for all workers, and others in a resumed run; later ones are keyed by step and "
        "worker, as PyTorch's are",
        "begin to draw in the first steps or with an epoch, or draw with PyTorch, such as torch.rand(()) or "
        "torch.distributions.Beta(a, a).sample()",
    ),
    "loss-denominator": Classic(
        "a gradient then depends on how many samples are computed together, and with it on workers and micro-batches",
        "return the mean over the batch's samples, or (sum, count)",
    ),
    "mixed-samples": Classic(
        "each logical worker takes variances, ranks or in-batch negatives from the samples of its own micro-batch, as "
        "batch norm its statistics, so that the result depends on the numbers of workers and micro-batches",
        "compute the loss from the outputs of all ranks (tutti.allgather), with as many workers as devices; or take "
        "workers=1 without micro_batch, on one device or by the strategy tensor; or keep it, if the loss is meant "
        "for a worker's samples, as with gradient accumulation",
    ),
    "one-rank-statistics": Classic(
        "each worker has batch-norm statistics of its own share of the data, and the model holds one worker's",
        "evaluate with run.evaluate, and save run.state(), which merge those of all workers",
    ),
    "padded-evaluation": Classic(
        "every rank takes its own part of one whole held-out set, and a sample that is there twice counts twice",
        "give run.evaluate the whole data set on every rank, without a DistributedSampler",
    ),
    "far-rate": Classic(
        "a rule of thumb that may be wrong for this model: too high diverges or stalls, too low learns too little in "
        "the few updates of a large batch",
        "try the usual rate with warm-up, or --lr-scale with the batch that your rate was tuned for",
    ),
    "few-updates": Classic(
        "accuracy mostly follows the number of updates, and a large batch makes few",
        "take --regime-batch with one worker's batch, more epochs, a smaller batch, or LAMB or LARS",
    ),
}
"""The mistakes that a run looks for, by name."""


class Diagnoses:
    """Reports the classic mistakes of distributed training that are found in one run, each once, on rank 0.

    The checks of ``train.script_checks.mistake_checks`` find them and call ``report``.

    Args:
        rank: global rank of this process.
        warn: receives a report's text; None for Python's ``warnings``, whose filters apply in either case.

    Attributes:
        found: names of the mistakes, in the order in which they were found.
    """

    def __init__(self, rank: int, warn: Callable[[str], None] | None = None) -> None:
        self.found: list[str] = []
        self._rank, self._warn = rank, warn

    def report(self, name: str, seen: str, step: int | None = None, remedy: str | None = None) -> None:
        """Report a classic training mistake on rank 0, with its cause and remedy, the first time that it is found.

        The report is a ``DiagnosisWarning``, or its text passed to the function ``warn`` of the constructor. On every
        rank that makes the call, ``name`` is appended to the list ``found``; a name in this list is not reported again.
        Not collective: a rank other than 0 records the mistake in its own list, and shows nothing.

        Args:
            name: a key of ``CLASSICS``, such as ``same-data``.
            seen: the observation, which the text states after ``name``.
            step: the step in which it was observed; None to leave it out.
            remedy: replaces the remedy in ``CLASSICS``.
        """
        if name in self.found:
            return
        self.found.append(name)
        if self._rank != 0:
            return
        classic, where = CLASSICS[name], None if step is None else f"rank 0, step {step}"
        text = str(TuttiError(f"{name}: {seen}", where=where, why=classic.why, remedy=remedy or classic.remedy))
        if self._warn is None:
            warnings.warn(text, DiagnosisWarning, stacklevel=_outside())
            return
        with warnings.catch_warnings(record=True) as passed:
            warnings.warn(text, DiagnosisWarning, stacklevel=1)
        for warning in passed:
            self._warn(str(warning.message))


_WITHIN = ("tutti.", "torch.", "contextlib.")
"""Prefixes, ending in dots, of the modules whose frames lie between the user's own line and a report."""


def _outside() -> int:
    """Return the ``stacklevel`` of the user's own line that called into tutti."""
    frame, level = calling_frame(1), 1
    while frame.f_back is not None and f"{frame.f_globals.get('__name__')}.".startswith(_WITHIN):
        frame, level = frame.f_back, level + 1
    return level
