"""Refuse losses that take samples by their places in the micro-batch, or that are no mean over a single sample."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from tutti.data.global_generators import own_generators
from tutti.errors import UsageError, counted, script_line
from tutti.parallel.ddp.output_graph import nodes_below
from tutti.torch_compat import divisor_of_node
from tutti.train.script_checks.loss_calls import MOST_ELEMENTS, LossCalls, Places, RecordedCall, alike
from tutti.train.script_checks.loss_watch import leaves_of_call

_NODES = 4096
"""Most autograd nodes of a loss in which the model's outputs are looked for (a guess)."""
_ROUNDING = {torch.float64: 1e-6, torch.float32: 1e-3}
"""Relative difference of two losses that counts as rounding, by the dtype of the model's outputs."""
_JOINING = "StackBackward", "CatBackward"
"""Beginnings of the names of autograd nodes that put parts together, over which a mean may follow."""
_FEW_BITS = 0.02
"""The same for other dtypes, such as bfloat16."""


def check_places(record: LossCalls, loss: Any) -> None:
    """Check that a scalar loss takes no samples by their places in the micro-batch, such as ``losses[:8].mean()``.

    Another micro-batch has samples of its own at these places. The loss is computed again from equal outputs for a
    batch of equal samples: unless it is a mean over samples, or over groups of neighbours (pairs, triplets), they get
    unequal gradients. Where the places come from constants, such as a mask by ``arange``, the loss must also change
    where the samples change places, which in-batch pairs do not show. Where the model is given a part of the samples,
    the parts of all its calls must make up the whole. A slice that has all samples of the micro-batch and not all of
    the global batch is refused as such. Losses that depend on values of samples that the script has read are not
    judged. The loss of a single sample must be the same for this sample twice.

    Args:
        record: the calls that have computed the loss, after ``finish``.
        loss: what the loss function returned, or what the script passed to ``run.backward``; tuples pass, by which
            scripts declare what a loss counts.

    Raises:
        UsageError: the loss takes samples by their places, or is no mean over a single sample.
    """
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not record.computes(loss):
        return
    used = record.leading_to([loss])
    if line := next((call.line for call in used if call.places is Places.BEYOND), ""):
        _refuse_places(line)
    if line := _line_of_sum(record, loss, used):
        _refuse_sum(line, record.samples)
    if line := next((call.line for call in used if call.line and any(map(partial(_is_part, record), call.args))), ""):
        _refuse_places(line)
    if record.samples == 1:
        _check_single(record, loss)
    elif not record.reads_rows:
        _check_rows(record, loss, used)


def _is_part(record: LossCalls, leaf: Any) -> bool:
    """Return whether an argument is a constant with equal rows here, and unequal ones for the global batch."""
    with suppress(Exception):
        return record.is_constant(leaf) and record.has_rows(leaf) and record.is_part_of_constant(leaf)
    return False


def _line_of_sum(record: LossCalls, loss: Tensor, used: list[RecordedCall]) -> str:
    """Return the line of a ``split`` into parts of a constant size whose losses are added, and not divided by a count.

    How many parts there are follows from the number of samples: ``sum(part.mean() for part in losses.split(4)) / 6`` is
    the mean over 24 samples, and of no other number. Empty if there is none, or where a computed number may divide.
    """
    for call in used:
        name = getattr(call.func, "__name__", "")
        size = next((each for each in (*call.args[1:2], *call.kwargs.values()) if type(each) is int), None)
        if call.places is not Places.ROWS or name not in ("split", "unsafe_split") or not size or len(call.result) < 2:
            continue
        ends = {part.grad_fn for part in (*call.result, *record.parts.values()) if part.grad_fn is not None}
        above = list(nodes_below(loss.grad_fn, _is_none_of(ends), _NODES))
        divided = any(str(node.name()).startswith(_JOINING) or _tensor_divides(node) for node in above)
        if ends and not divided and not any(each.scales_by_computed for each in used):
            return call.line
    return ""


def _is_none_of(ends: set[Any]) -> Callable[[Any], bool]:
    return lambda node: node not in ends


def _tensor_divides(node: Any) -> bool:
    """Return whether a node divides by a tensor, which may hold a number of samples."""
    divisor = divisor_of_node(node)
    return divisor is not None and (divisor.dim() > 0 or divisor.requires_grad)


def _check_rows(record: LossCalls, loss: Tensor, used: list[RecordedCall]) -> None:
    if line := _line_of_part(record, loss):
        _refuse_places(line)
    parts = list(record.parts.values())
    in_parts = sum(map(len, parts)) == record.samples and len({each.shape[1:] for each in parts}) == 1
    outputs = record.outputs or (record.parts if in_parts else {})
    if not outputs or sum(output.numel() for output in outputs.values()) > MOST_ELEMENTS:
        return
    given = [leaf for call in used for leaf in leaves_of_call(call.args, call.kwargs)]
    if any(record.has_rows(leaf) and not (record.is_known(leaf) or record.is_constant(leaf)) for leaf in given):
        # Tensors of another origin may have a row for each sample.
        return
    line = next((call.line for call in used if call.places is Places.ROWS), "")
    by_constant = next((call.line for call in used if call.line), "")
    # Places of a list do not go on with the batch, as those of each group of neighbours do.
    listed = all(call.places is Places.LISTED for call in used if call.line)
    groups = [1] if listed else _groups(record.samples)
    if not (line or by_constant) or not _prefers_places(record, loss, outputs, groups):
        return
    if line or (outputs is record.outputs and not _is_symmetric(record, loss, groups)):
        _refuse_places(line or by_constant)


def _line_of_part(record: LossCalls, loss: Tensor) -> str:
    """Return the line that takes a part of the samples by places for the model's input; empty for none."""
    nodes = set(nodes_below(loss.grad_fn, lambda _: True, _NODES))
    inputs = [each.given for each in record.forwards if each.output.grad_fn in nodes]
    taking = [call for call in record.leading_to(inputs) if call.line and call.places is not Places.CONSTANT]
    if not taking:
        return ""
    if beyond := next((call.line for call in taking if call.places is Places.BEYOND), ""):
        return beyond
    with suppress(Exception), own_generators():
        values = record.batch_of(0)
        record.replay(values, record.leading_to(inputs)[::-1])
        rows = sum(len(values.get(id(each), each)) for each in inputs)
        return taking[0].line if rows % record.samples else ""
    return ""


def _prefers_places(record: LossCalls, loss: Tensor, outputs: dict[int, Tensor], groups: list[int]) -> bool:
    """Return whether equal samples get gradients that differ, and do not repeat over groups of neighbours either.

    Args:
        record: the calls of the loss function or body.
        loss: the loss.
        outputs: the model's outputs by their ids, each for all samples, or for parts that make up all samples.
        groups: sizes of groups of neighbours, each of which may have the same unequal gradients.
    """
    with suppress(Exception), own_generators():
        value, found = record.gradients(loss, record.batch_of(None), outputs)
        if not torch.allclose(value, loss.detach().reshape(()), rtol=1e-6, equal_nan=False):
            return False
        # A sample whose loss has no gradient, as where a margin is kept, would show nothing.
        row = int(torch.cat(found, 1).abs().sum(1).argmax()) if outputs is record.outputs else 0
        first = {
            key: output if record.has_rows(output) else next(iter(outputs.values())) for key, output in outputs.items()
        }
        equal = {key: first[key].detach()[row : row + 1].expand_as(output) for key, output in outputs.items()}
        _, found = record.gradients(loss, record.batch_of(row), equal)
        rows = torch.cat(found, 0 if outputs is record.parts else 1)
        return bool(rows.isfinite().all()) and not any(
            alike(rows, rows[:each].repeat(record.samples // each, 1)) for each in groups
        )
    return False


def _is_symmetric(record: LossCalls, loss: Tensor, groups: list[int]) -> bool:
    """Return whether samples, or groups of neighbours, that change places keep their gradients; False for errors."""
    with suppress(Exception), own_generators():
        _, found = record.gradients(loss, record.batch_of(None), record.outputs)
        rows = torch.cat(found, 1)
        for each in groups:
            batch = {key: leaf.roll(each, 0) for key, leaf in record.batch_of(None).items()}
            outputs = {key: leaf.detach().roll(each, 0) for key, leaf in record.outputs.items()}
            _, found = record.gradients(loss, batch, outputs)
            if alike(rows.roll(each, 0), torch.cat(found, 1)):
                return True
    return False


def _groups(samples: int) -> list[int]:
    """Return the sizes of equal groups into which samples can be divided."""
    return [each for each in range(1, samples // 2 + 1) if not samples % each]


def _check_single(record: LossCalls, loss: Tensor) -> None:
    """Raise UsageError if a loss of a single sample is another for the same sample twice, and so no mean.

    Functions that reduce a single sample, such as ``einsum``, leave no sum over samples in the graph.
    """
    if record.reads_values or record.reads_sizes or record.parts or not record.outputs:
        return
    # A single number beside other outputs may be a loss of the model's, and not a sample's.
    numbers = {key for key, output in record.outputs.items() if output.shape == (1,)}
    found = []
    with suppress(Exception), own_generators(), torch.no_grad():
        found = [_again(record, loss, set(record.outputs)), _again(record, loss, set()), _again(record, loss, numbers)]
    if not all(map(math.isfinite, found)) or len(found) < 3:
        return
    dtypes = {output.dtype for output in record.outputs.values()}
    rounding = max(_ROUNDING.get(dtype, _FEW_BITS) for dtype in dtypes)
    once, *twice = found
    if not math.isclose(once, float(loss), rel_tol=1e-6) or any(_is_close(once, each, rounding) for each in twice):
        return
    raise UsageError(
        f"the loss is no mean over samples: it is {once:.4g} for one sample, and {twice[0]:.4g} for this one twice",
        where=script_line(),
        why="a micro-batch is a part of the global batch, and tutti takes a scalar for the mean over the micro-batch",
        remedy="return the mean over samples, or (sum, n) of n samples; or take one worker without micro_batch",
    )


def _again(record: LossCalls, loss: Tensor, once: set[int]) -> float:
    """Return the loss of a batch that has its single sample twice, computed by the recorded calls.

    Args:
        record: the recorded calls.
        loss: the loss.
        once: ids of outputs that are not doubled; if these are all outputs, the sample is not doubled at all.
    """
    values = {key: output.detach().clone() for key, output in record.outputs.items()} | record.batch_of(None)
    if once != set(record.outputs):
        values = {k: v if k in once else v.repeat(2, *[1] * (v.dim() - 1)) for k, v in values.items()}
    record.replay(values)
    found = values[id(loss)]
    # To read a number of sharded weights is collective, and other ranks may have several samples.
    return float(found) if type(found) is Tensor else math.nan


def _is_close(one: float, other: float, rounding: float) -> bool:
    return math.isclose(one, other, rel_tol=rounding, abs_tol=1e-6 * rounding)


def _refuse_sum(line: str, samples: int) -> NoReturn:
    raise UsageError(
        "the loss is a sum over parts of a constant size of the micro-batch, and no mean",
        where=line,
        why=f"this micro-batch has {counted(samples, 'sample')}, and the global batch, which has more, would have more"
        " parts: tutti takes a scalar for the mean over the micro-batch",
        remedy="divide by the number of parts (len(parts)), or each part's sum by the number of samples (len(losses));"
        " or return (sum, n) of n samples",
    )


def _refuse_places(line: str) -> NoReturn:
    raise UsageError(
        "the loss takes samples by their places in the micro-batch",
        where=line,
        why="a micro-batch is a part of the global batch, with samples of its own at these places: equal samples would"
        " count unequally, by how the batch is divided over workers and micro-batches",
        remedy="choose samples by their data, such as losses[mask].mean() with a mask from the data set; or take one"
        " worker without micro_batch; in place of a backward for each part (for part in x.split(8)) give tutti.prepare"
        " micro_batch=8; to take the samples at these places of each micro-batch, as gradient accumulation by hand"
        " does, return (loss * n, n) of n samples",
    )
