"""Check that copies of a tensor on several ranks are still bit-identical."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tutti.checkpoint.fingerprint import tensor_digests
from tutti.comm.communicator import Communicator
from tutti.errors import MismatchError, counted
from tutti.types.shard_spec import ShardSpec

if TYPE_CHECKING:
    from tutti.train.run import Run

SELDOM = 100
"""Least number of steps between two comparisons at ends of epochs, as an epoch may be one step (a guess)."""


def check_replicas(run: Run, what: str) -> None:
    """Check that all ranks with a copy of the same tensor of the model have the same bits, by 64-bit digests.

    Ranks hold copies under data parallelism, HSDP and hybrids, of tensors that tensor parallelism leaves whole, and of
    weights that are tied over stages. Reads each tensor once. Collective over all ranks: two small all-gathers, a third
    one where copies differ, none if ranks keep no copies. ``GradientSync.replicated`` is called first, which with ZeRO
    stage 1 all-gathers rows that the script has written.

    Args:
        run: the run.
        what: noun phrase of the next action, such as ``its checkpoint``, which the MismatchError names.

    Raises:
        MismatchError: on every rank, with the parameter's name and the ranks that differ from the others.
    """
    found = differing_copies(run, run.context.comms.world, what)
    if found is None:
        return
    names, sides = found
    raise MismatchError(
        f"ranks hold different copies of {names}: {sides}",
        where=f"rank {run.context.comms.world.global_rank}, after step {run.global_step}, before {what}",
        why="the script wrote it on some ranks only, or a device computes wrongly",
        remedy="make every rank write the same into the model, and resume from the last checkpoint",
    )


def differing_copies(run: Run, comm: Communicator, what: str) -> tuple[str, str] | None:
    """Find tensors of which ranks hold copies that are not bit-identical, by 64-bit digests.

    Ranks hold copies under data parallelism, HSDP and hybrids, of tensors that tensor parallelism leaves whole, and of
    weights that are tied over stages. Collective over the ranks of ``comm``: two small all-gathers, a third one where
    copies differ, none if ranks keep no copies; before them ZeRO stage 1 all-gathers rows that the script has written,
    over the shard ranks. Sets ``run.compared``, the step of the last comparison.

    Args:
        run: the training run.
        comm: the ranks to compare: all ranks, or the data ranks of one pipeline stage.
        what: the next action, such as ``its checkpoint``, for the PeerError or MismatchError of the collectives.

    Returns:
        A pair of texts, the same on every rank: the name of one differing tensor with the number of further ones, and
        the ranks whose copies of this tensor differ. None if all copies are equal, or there are none.
    """
    held = run.gradient_sync.replicated() if comm.size > 1 else None
    if held is None:
        return None
    run.compared = run.local_step
    names = list(held)
    keys = [_key(name, held[name], run.replica.specs) for name in names]
    digests = tensor_digests(held.values())
    most = max(int(count) for count in comm.all_gather(torch.tensor([len(names)]), f"copies before {what}"))
    table = torch.zeros(most, 2, dtype=torch.int64)
    table[: len(names)] = torch.tensor([*zip(keys, digests, strict=True)], dtype=torch.int64).view(-1, 2)
    found: dict[int, dict[int, int]] = {}
    tables = comm.all_gather(table, f"digests of the copies before {what}")
    for place, rows in zip(comm.alive_ranks, tables, strict=True):
        for key, digest in rows.tolist():
            if key:
                found.setdefault(key, {})[comm.ranks[place]] = digest
    wrong = next((key for key, holders in found.items() if len(set(holders.values())) > 1), None)
    if wrong is None:
        return None
    gathered = comm.all_gather_strings(
        names[keys.index(wrong)] if wrong in keys else "", "name of the parameter that differs"
    )
    other = sum(len(set(holders.values())) > 1 for holders in found.values()) - 1
    more = f", and of {counted(other, 'other tensor')}" * (other > 0)
    return f"'{next(filter(None, gathered))}'{more}", _sides(found[wrong])


def seldom(run: Run) -> bool:
    """Return whether at least 100 steps (``SELDOM``) have passed since copies of tensors were last compared over ranks.

    Copies are the same parameters on several data-parallel ranks. ``Run`` compares them at the end of an epoch only if
    this is True, because the comparison reads every tensor.

    Args:
        run: the training run.
    """
    return run.local_step - run.compared >= SELDOM


def _key(name: str, tensor: Tensor, specs: Mapping[str, ShardSpec]) -> int:
    """Return a key of the tensor slice, equal on all ranks with a copy, under any name of a tied tensor; never 0."""
    spec = specs.get(name, ShardSpec(tuple(tensor.shape), (0,) * tensor.dim()))
    first = min(name, *spec.tied) if spec.tied else name
    place = (first, str(tensor.dtype), tuple(tensor.shape), spec.shape, spec.offset, spec.dim, spec.ranges)
    raw = hashlib.blake2b(repr(place).encode(), digest_size=8).digest()
    return int.from_bytes(raw, signed=True) or 1


def _sides(holders: Mapping[int, int]) -> str:
    """Return text with the ranks that differ from the copy of most ranks, or with all ranks if no copy has most."""
    (usual, most), *rest = Counter(holders.values()).most_common(2)
    alike = [rank for rank, digest in holders.items() if digest == usual]
    differ = [rank for rank, digest in holders.items() if digest != usual]
    if rest and rest[0][1] == most:
        return f"{_ranks(sorted(holders))} differ"
    return f"{_ranks(differ)} differ{'s' * (len(differ) == 1)} from {_ranks(alike)}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
