"""Predictions of a run for held-out samples, divided over the data ranks and gathered in the order of the samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tutti.data.adapt import Collate
from tutti.data.batches import map_tensors
from tutti.errors import DataError, UsageError, counted
from tutti.launcher import heartbeat
from tutti.train.evaluation import Blocks, call_whole, described, in_blocks, micro_batches, on_ranks_alive

if TYPE_CHECKING:
    from tutti.train.run import Run


def predict_samples(
    run: Run, source: Any, function: Callable[[Any, Any], Any], batch: int, averaged: bool, collate: Collate | None
) -> Any:
    """Return the results of ``function`` for the run's model and held-out samples, gathered on every rank.

    Where replicas of the model differ between synchronisations, their merged weights are used. Collective over all
    ranks, which first compare the call and later the shapes (all-gathers of digests). Each data rank computes a part of
    the samples; where stages or tensor slices of the model are on several ranks, all of these call ``function`` and get
    the whole model's outputs. An all-gather of each tensor over the data ranks joins the results. If a rank is killed
    meanwhile and the run goes on without it, the ranks alive compute all samples again.

    Args:
        run: the training run, whose model is used in eval mode without autograd.
        source: the samples or a stream, the same on every rank; or a ``DataLoader``, whose batches are then taken.
        function: ``function(model, batch)`` returns a tensor, or tuples, lists and dicts of them, with a row for each
            sample.
        batch: largest number of samples in one forward, where ``source`` is no ``DataLoader``.
        averaged: whether to use the average of the weights over steps, in place of the weights.
        collate: makes a batch of a list of samples; None: as PyTorch's ``DataLoader``.

    Returns:
        New tensors with the results for all samples in their order, on the CPU, in the structure that ``function``
        returns.

    Raises:
        UsageError: ``averaged`` without an average; a result holds something else than tensors, or a tensor without one
            row for each sample of its batch; or ``function`` calls a model in pipeline stages otherwise than the stages
            can compute it.
        DataError: results of two batches of a rank have rows of different shapes.
        MismatchError: ranks make different calls, have taken different numbers of steps, or have results of different
            shapes.
    """
    held_out = in_blocks(source, batch, collate, run.feed.seed, run.context.mesh.rank)
    run.check_same_call(f"predictions for {described(held_out)}" + " on the average" * averaged)

    def predict(ranks: int, rank: int) -> Any:
        parts = []
        for _, micro_batch in micro_batches(run, held_out, ranks, rank, even=True):
            heartbeat.training.beat()
            found = call_whole(run, function, micro_batch)
            parts.append(map_tensors(found, _rows(micro_batch.samples), other=_refuse))
        return _gathered(parts, held_out, run, ranks)

    return on_ranks_alive(run, averaged, predict)


def _rows(samples: int) -> Callable[[Tensor], Tensor]:
    """Return a function that checks that a tensor has a row for each sample; a dummy micro-batch keeps none."""

    def check(tensor: Tensor) -> Tensor:
        rows = tensor.detach().cpu()
        if samples and (rows.dim() == 0 or len(rows) != samples):
            raise UsageError(
                f"the prediction for {counted(samples, 'sample')} has shape {tuple(rows.shape)}",
                remedy="return tensors whose first dimension is the sample",
            )
        return rows[:samples] if rows.dim() else rows.new_empty(0)

    return check


def _refuse(value: Any) -> Any:
    raise UsageError(
        f"a prediction holds a {type(value).__name__}", remedy="return tensors, or tuples, lists and dicts of them"
    )


def _gathered(parts: list[Any], held_out: Blocks, run: Run, ranks: int) -> Any:
    """Concatenate the predictions of this rank's blocks, and all-gather those of all ranks, in the order of blocks.

    Collective. The blocks of a rank that is killed meanwhile are missing. Raises MismatchError if the shapes differ
    between ranks.

    Args:
        parts: predictions of each block.
        held_out: the samples.
        run: the training run.
        ranks: number of data ranks over which the blocks are divided.
    """
    columns: list[list[Tensor]] = []
    for part in parts:
        column: list[Tensor] = []
        map_tensors(part, column.append)
        columns.append(column)
    own = [_joined(rows) for rows in zip(*columns, strict=True)]
    run.context.comms.world.agree(
        [f"{rows.dtype} with rows of shape {tuple(rows.shape[1:])}" for rows in own],
        "the shapes of predictions",
        "pad them in the function to one shape",
    )
    wholes = iter([_all_rows(rows, held_out, run, ranks) for rows in own])
    return map_tensors(parts[0], lambda _: next(wholes))


def _all_rows(mine: Tensor, held_out: Blocks, run: Run, ranks: int) -> Tensor:
    """All-gather rows as bytes, padded to the most rows of a rank."""
    comm = run.context.comms.replica
    shares = held_out.shares(ranks)
    counts = [sum(held_out.sizes[number] for number in share) for share in shares]
    padded = mine.new_zeros(max(counts), *mine.shape[1:])
    padded[: len(mine)] = mine
    flat = padded.flatten().view(torch.uint8).to(comm.device)
    brought = comm.all_gather(flat, "predictions")
    blocks = dict[int, Tensor]()
    # Fewer than shares where a rank has been killed; the caller then begins again.
    for share, of_rank, count in zip(shares, brought, counts, strict=False):
        rows = of_rank.cpu().view(mine.dtype).view(padded.shape)[:count]
        blocks |= zip(share, rows.split([held_out.sizes[number] for number in share]), strict=True)
    return torch.cat([blocks[number] for number in sorted(blocks)])


def _joined(rows: tuple[Tensor, ...]) -> Tensor:
    shapes = sorted({tuple(each.shape[1:]) for each in rows if each.dim()})
    if len(shapes) > 1:
        raise DataError(
            f"predictions of samples with shapes {shapes[0]} and {shapes[-1]} cannot be put together",
            remedy="pad them in the function to one shape",
        )
    return torch.cat(rows)
