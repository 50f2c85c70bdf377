"""Check that all ranks are in the same step of the same model, by digests summed with gradients; name the difference.

Ranks sum a few small hashes together with the gradients, at no further message. Where the sums do not agree,
``refuse_mismatch`` asks what differs, and names it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch

from tutti.comm.communicator import Communicator
from tutti.comm.random_keys import mix, name_key
from tutti.errors import MismatchError, UsageError, script_line
from tutti.types.optimizer_protocols import NamedParameters
from tutti.types.step_records import StepContext

DIGESTS = 4
"""Number of the numbers that ``digests`` returns."""


def digests(step_context: StepContext, key: int = 0) -> list[int]:
    """Return two small hashes of a step and their squares, which ranks sum to see whether all are in the same step.

    ``digests_agree`` compares the sums over the ranks with this rank's own numbers.

    Args:
        step_context: facts of the step. Hashed are its number, the index of the reduction within the step (``call``)
            and the batch size; unless ``key`` is 0 also the optimizers' settings, the position in the data
            (``data_position``) and a digest of the parameters that the script has written (``written``). Its ``edits``,
            the script's edits of parameters that are split over ranks, are hashed in any case.
        key: hash of the model's parameters, from ``layout_key``, for data ranks, which hold equal parameters; 0 for the
            pipeline stages and tensor ranks of one replica, which do not.

    Returns:
        [a, a², b, b²], integers with a and b below 251. a is a hash of step number, ``call`` and ``written``; b is a
        hash of ``key``, batch size and all other facts.
    """
    a, b = (step_context.local_step + 83 * step_context.call) % 251, mix(key, step_context.samples) % 251
    if key:
        # With the step, so that equal remainders of unequal settings are found in the next step.
        now = step_context
        # In both, because writes are compared in one step only.
        a = (a + now.written()) % 251
        b = mix(b, name_key(now.settings), now.local_step, *now.data_position, now.written()) % 251
    if edits := edits_key(step_context):
        a, b = (a + edits) % 251, mix(b, edits) % 251
    return [a, a * a, b, b * b]


def edits_key(step_context: StepContext) -> int:
    """Return a hash of the script's writes to parameters that are split over ranks; 0 without such writes.

    Every comparison of a step over ranks includes it.

    Args:
        step_context: facts of the step; its ``edits`` are a line of text for each edited tensor.
    """
    return name_key("\n".join(step_context.edits)) if step_context.edits else 0


def digests_agree(sums: Sequence[float], expected: Sequence[int], contributions: int) -> bool:
    """Return whether all ranks were in the same step as this rank, judged by the sums of their ``digests``.

    A digest is a small hash of the step; ``digests`` returns four numbers of it. The sums must be ``contributions``
    times this rank's numbers, up to a relative error of 1e-6.

    Args:
        sums: sums over the ranks of the four numbers that ``digests`` returns; further numbers are ignored.
        expected: the four numbers of this rank.
        contributions: number of ranks, or of logical workers (fixed shares of the global batch), in the sums.
    """
    pairs = zip(sums, expected, strict=False)
    return all(abs(got - contributions * want) <= 1e-6 * contributions * max(want, 1) for got, want in pairs)


def contributions_agree(sums: Sequence[float], contributions: int) -> bool:
    """Return whether all ranks that have added to the sums of ``digests`` were in the same step as each other.

    Used by a rank that has added nothing to the sums because it has computed no loss; its own digests are not compared.
    Numbers are equal if and only if n times the sum of their squares is the square of their sum.

    Args:
        sums: sums over the ranks of the four numbers that ``digests`` returns; further numbers are ignored.
        contributions: number n of ranks, or of logical workers (fixed shares of the global batch), in the sums.

    >>> contributions_agree([6, 18, 10, 50], 2), contributions_agree([7, 25, 10, 50], 2)
    (True, False)
    """
    pairs = zip(sums[:DIGESTS:2], sums[1:DIGESTS:2], strict=True)
    return all(abs(contributions * squares - total**2) <= 1e-6 * max(total**2, 1) for total, squares in pairs)


def refuse_mismatch(comm: Communicator, step_context: StepContext) -> None:
    """Raise an error that names the steps, batches, optimizer settings or parameters that differ between ranks.

    Called on every rank, before any update, when the digests of the step that ranks sum with their gradients do not
    agree. Collective over the ranks of ``comm``: they all-gather digests of step numbers, batch sizes, data positions,
    optimizer settings and edits to find the difference. Returns only if nothing differs but the record of which
    parameters the script has written, and a comparison shows that all ranks hold equal values.

    Args:
        comm: the ranks whose gradients were summed.
        step_context: the step under way on this rank.

    Raises:
        MismatchError: steps, batches or optimizer settings differ, or no difference is found.
        PeerError: a rank has ended, or did not make the call in time.
        UsageError: the script has written parameters, and their values now differ between ranks; or its edits of
            parameters that are split over ranks differ between these ranks.
    """
    lines = [f"step {step_context.local_step + 1}", f"a global batch of {step_context.samples} samples"]
    if step_context.data_position != (0, 0):
        epoch, batch = step_context.data_position
        lines.append(f"data of epoch {epoch + 1} up to batch {batch}" if batch else f"the last data of epoch {epoch}")
    comm.agree(
        lines,
        "the step under way",
        "run the same number of steps with the same batches on every rank: leave a loop or skip a batch by what is the"
        " same everywhere, such as run.stats.loss, and not by a rank's own loss",
    )
    agree_on_settings(comm, step_context)
    edited_in = step_context.edited_in or script_line()
    agree_on_edits(comm, step_context.edits, f"before step {step_context.local_step + 1}, {edited_in}")
    writes = comm.all_gather(torch.tensor([step_context.written()]), "the script's writes of parameters")
    if len({int(digest) for digest in writes}) > 1 and step_context.compare is not None:
        step_context.compare()
        return
    raise MismatchError(
        "the gradients' digest is wrong although all ranks are in the same step",
        where=f"step {step_context.local_step + 1}",
        why="a model changed after tutti.prepare, or memory or the network is faulty",
        remedy="do not change parameters' shapes or trainability after tutti.prepare",
    )


def agree_on_edits(comm: Communicator, lines: Sequence[str], where: str) -> None:
    """Raise UsageError unless the script has edited shared parameters and gradients in the same way on all ranks.

    A shared tensor is split over the ranks, or lies in memory that the ranks share. Collective over the ranks of
    ``comm``: an all-gather of digests; blocks.

    Args:
        comm: the ranks to compare.
        lines: a line for each tensor that the script has edited on this rank, in an order that is equal on all ranks;
            the same line for the same edits, as ``EditRecords.take`` returns.
        where: place in the run and the script for the error message.

    Raises:
        UsageError: the edits differ on some rank; raised on every rank.
        MismatchError: another rank is in another call.
        PeerError: a rank has ended, or did not make the call in time.
    """
    try:
        comm.agree(lines, "edits", "")
    except MismatchError as error:
        _, disagreed, sides = error.what.partition("ranks disagree about edits: ")
        if not disagreed:
            raise
        shown = re.sub(" #[^,]+", "", sides)
        raise UsageError(
            f"the script has edited parameters or gradients in another way on each rank: {shown}",
            where=where,
            why="each rank has a part of these tensors, or shares one copy with the others, so that only the same edit"
            " on every rank is an edit of the whole",
            remedy="make the edit on every rank, with numbers that are the same everywhere (run.stats, or all-reduced"
            " ones) and not those of a rank's own samples, or take strategy='mirrored'",
        ) from error


def agree_on_settings(comm: Communicator, step_context: StepContext) -> None:
    """Compare the settings of the script's optimizers (learning rates, momenta, …) over ranks.

    Collective over the ranks of ``comm``: an all-gather of digests; blocks. Called to find the setting that differs,
    and in custom training loops before updates.

    Args:
        comm: the ranks to compare.
        step_context: the step under way on this rank; ``settings`` in it is a text of these settings.

    Raises:
        MismatchError: the settings differ on some rank; raised on every rank.
        PeerError: a rank has ended, or did not make the call in time.
    """
    remedy = (
        "set learning rates, momenta and weight decays alike on every rank: from run.stats.loss, run.evaluate or"
        " run.global_step, which are the same everywhere, and not from a rank's own loss or random numbers"
    )
    comm.agree([step_context.settings], f"the optimizer's settings in step {step_context.local_step + 1}", remedy)


def layout_key(trainable: NamedParameters) -> int:
    """Return a hash of the parameters' names, shapes, dtypes and order, by which ranks find models that differ.

    Args:
        trainable: (name, parameter) pairs of the parameters to be trained, in order.

    Returns:
        An integer, the same in every process.
    """
    return layout_key_of([(name, p.shape, p.dtype) for name, p in trainable])


def layout_key_of(tensors: Sequence[tuple[str, Sequence[int], torch.dtype]]) -> int:
    """Return a hash of parameters' names, global shapes, dtypes and order, the same number below 2⁶⁴ in every process.

    Ranks compare the integer to find models that differ. For parameters of which a rank holds a shard, whose own shapes
    differ between ranks, the caller gives the shapes of the full parameters.

    Args:
        tensors: (name, global shape, dtype) of each parameter, in order.
    """
    return mix(len(tensors), *(name_key(f"{name}{list(shape)}{dtype}") for name, shape, dtype in tensors))
