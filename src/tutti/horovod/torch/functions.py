"""Broadcasts of parameters, optimizer states and objects, with Horovod's names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tutti.comm import collectives
from tutti.comm.object_codec import decode_object, encode_or_error, tensors_described
from tutti.comm.process_set import ProcessSet
from tutti.comm.process_set import all_ranks as global_process_set
from tutti.comm.random_keys import name_key
from tutti.horovod.common.exceptions import translated
from tutti.horovod.torch import job, mpi_ops
from tutti.horovod.torch.handles import synchronize


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[tuple[str, Any]] | Iterable[Tensor],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Broadcast tensors in place from ``root_rank``, such as ``model.state_dict()`` or ``model.named_parameters()``.

    Collective over ``process_set``; blocks. All tensors travel as one collective for each device type. Names and shapes
    must be equal on all ranks; tensors with names may have any order.

    Args:
        params: dict of tensors, pairs of name and tensor, or tensors; values that are no tensors are left as they are.
        root_rank: global rank of the source, a member of the process set.
        process_set: ranks that take part; default: all ranks.

    Raises:
        ValueError: ``params`` is none of these, ``init`` was not called, the process set is not registered or does not
            have this rank as a member, ``root_rank`` is no member of it, or a tensor is sparse or expanded.
        HorovodInternalError: names, shapes or dtypes differ between ranks, or a rank is lost.
    """
    if not isinstance(params, Iterable):
        raise ValueError(f"invalid params of type: {type(params)}")
    given = params.items() if isinstance(params, Mapping) else params
    pairs = [(None, entry) if isinstance(entry, Tensor) else entry for entry in given]
    if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        raise ValueError(f"invalid params of type: {type(params)}")
    tensors = [(name, value) for name, value in pairs if isinstance(value, Tensor)]
    names = None
    if all(name is not None for name, _ in tensors):
        tensors.sort(key=lambda pair: str(pair[0]))
        names = [str(name) for name, _ in tensors]
    _broadcast_in_place([value for _, value in tensors], names, root_rank, process_set)


def group_name(kind: str, names: Sequence[str]) -> str:
    """Return the name of one collective over several named tensors: ``KIND.FIRST.COUNT.HASH``.

    COUNT is the number of tensors, HASH the CRC-32 of all names as 8 hexadecimal digits: ranks whose tensors have other
    names, or another order, get another name, and their calls are not matched.

    Args:
        kind: kind of the tensors, such as ``gradients``.
        names: names of the tensors, at least one; the first becomes FIRST.
    """
    return f"{kind}.{names[0]}.{len(names)}.{name_key(chr(0).join(names)):08x}"


def _broadcast_in_place(
    tensors: list[Tensor], names: list[str] | None, root_rank: int, process_set: ProcessSet
) -> None:
    by_device: dict[str, list[int]] = {}
    for index, tensor in enumerate(tensors):
        by_device.setdefault(tensor.device.type, []).append(index)
    handles = []
    for indices in (by_device[device] for device in sorted(by_device)):
        # Ranks with tensors of other names must not get these.
        name = None if names is None else group_name("parameters", [names[index] for index in indices])
        handles.append(mpi_ops.start_broadcasts([tensors[i] for i in indices], root_rank, name, process_set))
    for handle in handles:
        synchronize(handle)


@translated
def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: Any = None, process_set: ProcessSet = global_process_set
) -> None:
    """Replace the optimizer's state and options on all ranks by those of ``root_rank``, as Horovod does.

    Collective over ``process_set``: broadcasts the ``state_dict`` without tensors, then its tensors; blocks.

    If the optimizer has no state yet, gradients of its parameters that are None become zeros, as in Horovod.

    Args:
        optimizer: optimizer over the same parameters on all ranks; ranks other than the root may have no state yet.
        root_rank: global rank of the source.
        model: the module whose parameters are optimized; parameters of its sparse embeddings get sparse zeros as
            gradients. None: all zeros are dense, unless the optimizer is ``SparseAdam``.
        process_set: ranks that take part; default: all ranks.

    Raises:
        ValueError: the optimizer is L-BFGS, whose state depends on its line search; the state of ``root_rank`` holds
            objects other than tensors and plain values, which every rank raises; ``init`` was not called; or
            ``root_rank`` is no member of the process set.
        HorovodInternalError: ranks' calls differ, or a rank is lost.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("cannot broadcast torch.optim.LBFGS state")
    if not optimizer.state:
        _make_gradients(optimizer, model)
    root = job.rank() == root_rank
    tensors: list[Tensor] = []
    state = optimizer.state_dict()
    where = f"rank {root_rank}, state of {type(optimizer).__name__}"
    plain = encode_or_error(state, where, tensors) if root else b""
    plain = broadcast_object(plain, root_rank, process_set=process_set)
    # Raises on every rank if the root could not encode its state.
    described = tensors_described(plain)
    if not root:
        tensors = described
    carried = [tensor.detach().cpu().contiguous() for tensor in tensors]
    _broadcast_in_place(carried, None, root_rank, process_set)
    if not root:
        optimizer.load_state_dict(decode_object(plain, carried))


def _make_gradients(optimizer: torch.optim.Optimizer, model: Any) -> None:
    embeddings = [m for m in model.modules() if isinstance(m, torch.nn.Embedding) and m.sparse] if model else []
    sparse = {parameter for module in embeddings for parameter in module.parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad and parameter.grad is None:
                zeros = torch.zeros_like(parameter)
                lists = parameter in sparse or isinstance(optimizer, torch.optim.SparseAdam)
                parameter.grad = zeros.to_sparse() if lists else zeros


@translated
def broadcast_object(
    obj: Any = None, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Broadcast a Python object from ``root_rank`` to the other ranks, without pickle, and return it.

    Collective over ``process_set``; blocks. The object may consist of None, numbers, strings, bytes, lists, tuples,
    sets, dicts, tensors, arrays, and nestings of these.

    Args:
        obj: on ``root_rank``, the object to send; ignored on other ranks.
        root_rank: global rank of the source, a member of the process set.
        name: name of the collective, by which the ranks' calls are matched; None: calls without a name are matched by
            their order.
        process_set: ranks that take part; default: all ranks.

    Returns:
        A copy of the object, on ``root_rank`` too.

    Raises:
        ValueError: the object of ``root_rank`` has a part of another type, which the message names on every rank;
            ``init`` was not called; ``root_rank`` is no member of the process set; or a broadcast named ``name`` is
            still pending on this rank.
        HorovodInternalError: the ranks' calls differ, or a rank is lost.
    """
    job.check_initialized()
    return collectives.broadcast_object(obj, root_rank, name, process_set=process_set)


@translated
def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """All-gather a Python object from each rank, without pickle, and return the list of objects in rank order.

    Collective over ``process_set``; blocks. The object may consist of None, numbers, strings, bytes, lists, tuples,
    sets, dicts, tensors, arrays, and nestings of these; the ranks' objects may differ.

    Args:
        obj: object of this rank.
        name: name of the collective, by which the ranks' calls are matched; None: calls without a name are matched by
            their order.
        process_set: ranks that take part; default: all ranks.

    Raises:
        ValueError: a rank's object has a part of another type; the message names rank and type, on every rank. Or
            ``init`` was not called, or an all-gather named ``name`` is still pending on this rank.
        HorovodInternalError: the ranks' calls differ, or a rank is lost.
    """
    job.check_initialized()
    return collectives.allgather_object(obj, name, process_set=process_set)
