"""``workload.json``: what training a model asks of a device, as functions of the samples of a micro-batch. No torch.

One entry a module group (the modules that FSDP wraps, the rest of the model, and the loss). Hardware-free: no seconds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tutti.errors import DiskError, UsageError

FORMAT = "tutti workload"
VERSION = 1
REST, LOSS = "(rest)", "(loss)"
"""Names of the groups of what no wrapped module holds, and of what is computed outside of the model."""


@dataclass(frozen=True)
class Affine:
    """A quantity, such as FLOP or bytes, of a micro-batch of n samples: ``fixed`` + ``per_sample`` · n.

    Attributes:
        fixed: part that does not depend on the number of samples.
        per_sample: part that each sample adds.

    >>> Affine(10.0, 2.0).at(4)
    18.0
    """

    fixed: float = 0.0
    per_sample: float = 0.0

    def at(self, samples: float) -> float:
        """Return this quantity, such as FLOP or bytes, for a micro-batch: ``fixed`` + ``per_sample`` · ``samples``.

        Args:
            samples: number of samples in the micro-batch.
        """
        return self.fixed + self.per_sample * samples

    def __add__(self, other: Affine) -> Affine:
        return Affine(self.fixed + other.fixed, self.per_sample + other.per_sample)


@dataclass(frozen=True)
class OperatorWork:
    """Work of all operators of one class (such as matrix products) in one forward or backward.

    Each quantity is a linear function of the samples of a micro-batch.

    Attributes:
        flop: floating-point operations; a multiply-add is two.
        bytes: bytes that the operators read and write, each operator by itself; views are free.
        calls: number of operator calls.
        masked_flop: operations that causal masking saves, not in ``flop``.
    """

    flop: Affine
    bytes: Affine
    calls: Affine
    masked_flop: Affine = field(default_factory=Affine)


PassWork = Mapping[str, OperatorWork]
"""Work of a pass by class of operator: matmul, convolution, attention, recurrent; without FLOP normalisation,
transcendental, other."""


@dataclass(frozen=True)
class GroupWork:
    """Work and sizes of one module that FSDP wraps or a pipeline stage calls, the rest of the model, or the loss.

    Attributes:
        name: name of the module in the model; ``REST`` or ``LOSS`` for the rest of the model and the loss.
        kind: name of the module's class; of the whole model's for ``REST``, and empty for ``LOSS``.
        parameters, trained_parameters: number of parameters, all and trainable, each counted in the innermost group
            that holds it.
        parameter_bytes, buffer_bytes: bytes of parameters and of buffers.
        forward, backward: work of the passes by class of operator, without recomputation.
        recompute: work that backward does again, by value of ``--activation-checkpointing``, such as ``blocks``; that
            of ``none`` is what fused kernels repeat.
        activation_bytes: bytes that the forward keeps for backward, by value of ``--activation-checkpointing``.
        output_bytes: bytes of the tensors that the module returns: the message of a pipeline that is cut after it.
        ready: position, from 0, in the order of gradients at which the last gradient of the group is complete; None
            without parameters.
    """

    name: str
    kind: str
    parameters: int
    trained_parameters: int
    parameter_bytes: int
    buffer_bytes: int
    forward: PassWork
    backward: PassWork
    recompute: Mapping[str, PassWork]
    activation_bytes: Mapping[str, Affine]
    output_bytes: Affine
    ready: int | None


@dataclass(frozen=True)
class Workload:
    """FLOP, bytes and operator calls of a training step of one model and loss, by module group.

    A module group is a module that FSDP wraps or a pipeline stage calls, the rest of the model, or the loss.

    Attributes:
        task: name of the task.
        precision: precision of the run: fp32, bf16, fp16 or fp64.
        groups: module groups in the order of the model, then ``REST`` and ``LOSS``.
        gradient_order: names of the parameters in the order in which backward completes their gradients.
        tokens_per_sample: positions of a sample, if a sample is a sequence of whole numbers; else None.
        samples: numbers of samples that were traced; the last one checks a line through the others.
        basis: ``traced on fake tensors`` or ``traced on real tensors``.
        not_affine: descriptions of quantities that are no linear function of the number of samples, and so must not be
            extrapolated.
        without_formula: operators whose FLOP are unknown and counted as 0, with their calls at the first trace.
        versions: versions of tutti and torch.
        metrics: number of metric sums that the loss function returns beside the loss.
    """

    task: str
    precision: str
    groups: tuple[GroupWork, ...]
    gradient_order: tuple[str, ...]
    tokens_per_sample: int | None
    samples: tuple[int, ...]
    basis: str
    not_affine: tuple[str, ...] = ()
    without_formula: Mapping[str, int] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    metrics: int = 0

    @property
    def parameters(self) -> int:
        """Number of parameters (elements of parameter tensors) of the model that was traced, trained or not."""
        return sum(group.parameters for group in self.groups)

    def checkpointing(self) -> tuple[str, ...]:
        """Return the values of ``--activation-checkpointing`` with which the model was traced.

        Returns:
            ``none`` first, then ``blocks`` and ``selective``, as far as they find anything to recompute in the model.
        """
        return tuple(self.groups[0].recompute)

    def model_flop(self, samples: float, *, masked: float = 0.0) -> float:
        """Return the FLOP of a forward and backward of the traced model over a micro-batch, without recomputation.

        Args:
            samples: number of samples in the micro-batch.
            masked: fraction, 0 to 1, of the FLOP saved by causal masking that the result includes nevertheless; 1 for
                the convention of PaLM.
        """
        return sum(
            work.flop.at(samples) + masked * work.masked_flop.at(samples)
            for group in self.groups
            for work in (*group.forward.values(), *group.backward.values())
        )

    def hardware_flop(self, samples: float, choice: str = "none") -> float:
        """Return the FLOP of a forward and backward of the traced model over a micro-batch, with recomputation.

        Args:
            samples: number of samples in the micro-batch.
            choice: value of ``--activation-checkpointing``, one of ``checkpointing()``.

        Raises:
            UsageError: the model was not traced with this choice.
        """
        if choice not in self.checkpointing():
            raise UsageError(
                f"the workload was not traced with activation checkpointing '{choice}'",
                remedy=f"choices: {', '.join(self.checkpointing())}",
            )
        again = (work for group in self.groups for work in group.recompute[choice].values())
        return self.model_flop(samples) + sum(work.flop.at(samples) for work in again)


def write_workload(workload: Workload, path: Path) -> None:
    """Write the FLOP, bytes and calls of a model's training step, by module group, as ``workload.json``.

    A module group is a module that FSDP wraps or a pipeline stage calls, the rest of the model, or the loss.

    Args:
        workload: the work of the model.
        path: the file.

    Raises:
        DiskError: the file cannot be written.
    """
    try:
        path.write_text(json.dumps(workload_json(workload), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise DiskError("cannot write the workload", where=str(path), why=error.strerror) from error


def workload_json(workload: Workload) -> dict[str, Any]:
    """Return the FLOP, bytes and calls of a model's training step as the JSON object that ``workload.json`` holds.

    A module group is a module that FSDP wraps or a pipeline stage calls, the rest of the model, or the loss.

    Args:
        workload: the work of the model.

    Returns:
        ``format`` (``tutti workload``), ``version`` (1), ``units`` (by name of a quantity), ``groups`` (list of the
        work of each module group, whose quantities have ``fixed`` and ``per_sample``), and the other attributes of
        ``Workload``.
    """
    units = {"flop": "FLOP", "bytes": "byte", "calls": "operator calls", "fixed": "", "per_sample": "1/sample"}
    return {"format": FORMAT, "version": VERSION, "units": units, **asdict(workload)}


def read_workload(path: Path) -> Workload:
    """Read FLOP, bytes and operator calls of a training step from the file that ``tutti workload TASK -o FILE`` writes.

    A module group is a module that FSDP wraps or a pipeline stage calls, the rest of the model, or the loss.

    Args:
        path: the ``workload.json``.

    Returns:
        A ``Workload`` with the attributes ``groups``: for each module group FLOP, bytes and calls of forward and
        backward by class of operator, as linear functions of the samples of a micro-batch (``fixed`` and
        ``per_sample``); and ``gradient_order``, names of the parameters in the order in which their gradients become
        complete.

    Raises:
        UsageError: the file is missing or damaged, of another format or of another version.
    """
    content = versioned_json(path, FORMAT, VERSION, "tutti workload TASK -o FILE")
    try:
        names = set(Workload.__dataclass_fields__)
        values = {name: value for name, value in content.items() if name in names}
        values["groups"] = tuple(_group(entry) for entry in values["groups"])
        for name in ("gradient_order", "samples", "not_affine"):
            values[name] = tuple(values[name])
        return Workload(**values)
    except (KeyError, TypeError, AttributeError) as error:
        raise UsageError("this workload file is damaged", where=str(path), why=repr(error)) from error


def versioned_json(path: Path, form: str, version: int, made_by: str) -> dict[str, Any]:
    """Read the JSON object in a file, and check its entries ``format`` and ``version``.

    Args:
        path: the file.
        form: the ``format`` that the object must have.
        version: the ``version`` that the object must have.
        made_by: the command that writes such a file, for the error's remedy.

    Returns:
        The whole object, ``format`` and ``version`` included.

    Raises:
        UsageError: the file is missing, no JSON object, of another format or of another version.
    """
    remedy = f"make it with {made_by}"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError("this file cannot be read", where=str(path), why=error.strerror, remedy=remedy) from error
    except ValueError as error:
        raise UsageError("this file is no JSON", where=str(path), why=str(error), remedy=remedy) from error
    if not isinstance(content, dict) or content.get("format") != form:
        raise UsageError(f"this file is no '{form}'", where=str(path), remedy=remedy)
    if content.get("version") != version:
        raise UsageError(
            f"this '{form}' has version {content.get('version')}, and this tutti reads version {version}",
            where=str(path),
            remedy=f"{remedy} anew",
        )
    return content


def _group(entry: Mapping[str, Any]) -> GroupWork:
    values = dict(entry)
    for name in ("forward", "backward"):
        values[name] = _pass(values[name])
    values["recompute"] = {choice: _pass(work) for choice, work in values["recompute"].items()}
    values["activation_bytes"] = {choice: Affine(**line) for choice, line in values["activation_bytes"].items()}
    values["output_bytes"] = Affine(**values["output_bytes"])
    return GroupWork(**values)


def _pass(entry: Mapping[str, Any]) -> PassWork:
    return {kind: OperatorWork(**{n: Affine(**line) for n, line in work.items()}) for kind, work in entry.items()}
