"""Before the first step: compare the model's structure over the ranks and broadcast its values.

Before a checkpoint: compare the state of the script's optimizers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

from tutti.checkpoint.fingerprint import tensor_digests
from tutti.comm.broadcast import broadcast_tensors
from tutti.comm.communicator import Communicator
from tutti.nn.init_on_disk import mapped
from tutti.nn.swap import buffers, describe_tensors, parameters
from tutti.optim.factory import is_known
from tutti.optim.several import members_of


def agree_on_state(comm: Communicator, parts: Sequence[nn.Module]) -> None:
    """Compare names, shapes, dtypes, order and trainability of parameters and buffers over the ranks.

    Of buffers only the persistent ones count; values are not compared. Collective over the ranks of ``comm``: an
    all-gather of digests; blocks.

    Args:
        comm: the ranks to compare.
        parts: this rank's modules, in order.

    Raises:
        MismatchError: some rank's entries differ; raised on every rank, with the first entry that differs.
        PeerError: a rank has ended, or did not make the call in time.
    """
    comm.agree(
        describe_tensors(parts), "the model", "build the same model, in the same order and precision, on every rank"
    )


def agree_on_optimizer_state(comm: Communicator, optimizer: Optimizer, state: Mapping[str, Tensor]) -> None:
    """Compare the state of a script's optimizer, of which a checkpoint keeps one copy, over the data ranks.

    An optimizer that divides its updates over ranks itself, as distributed versions of Muon, has on each rank the state
    of some parameters alone, or slices. PyTorch's and tutti's optimizers do not: nothing is sent for them. Collective
    over the ranks of ``comm``: an all-gather of digests; blocks.

    Args:
        comm: the data ranks.
        optimizer: the optimizer.
        state: its state, as ``optimizer_tensors`` names it.

    Raises:
        MismatchError: some rank's state differs; raised on every rank, with the first tensor that differs.
        PeerError: a rank has ended, or did not make the call in time.
    """
    others = [type(each) for each in members_of(optimizer) if not is_known(type(each))]
    if comm.size == 1 or not others:
        return
    names = sorted(state)
    values = zip(names, tensor_digests(state[name] for name in names), strict=True)
    lines = [f"{name} {tuple(state[name].shape)} {state[name].dtype} {digest:x}" for name, digest in values]
    comm.agree(
        lines,
        f"the state of the optimizer {others[0].__name__}, of which a checkpoint keeps one copy",
        "take the optimizer's version for one device, which updates every parameter on every rank, and"
        " strategy='sharded' to divide its state",
    )


def broadcast_state(comm: Communicator, parts: Sequence[nn.Module]) -> None:
    """Broadcast all parameters and persistent buffers of the modules from the first rank of ``comm``, in place.

    Parameters that are views of a file of weights (``mapped``) are left out: each rank reads the same file. All ranks
    must hold the same names, shapes and dtypes; ``agree_on_state`` checks this. Collective over the ranks of ``comm``:
    a broadcast for each 64 MiB or so of tensors of one dtype; blocks.

    Args:
        comm: the ranks; the first one sends.
        parts: this rank's modules, in order.

    Raises:
        MismatchError: the ranks' tensors differ in number, shape or dtype.
        PeerError: a rank has ended, or did not make the call in time.
    """
    # A buffer may require a gradient, such as a weight that a spectral norm of the script has computed.
    sent = [p.data for _, p in parameters(parts) if not mapped(p)] + [slot.get().detach() for slot in buffers(parts)]
    broadcast_tensors(comm, sent, "initial state")
