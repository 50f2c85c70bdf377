"""The step of an optimizer with a run's learning rate, and the names of gradients that forbid it."""

from __future__ import annotations

from torch.optim import Optimizer

from tutti.comm.communicator import Communicator
from tutti.nn.sparse_layers import check_sparse_step
from tutti.optim.layerwise import LayerWise
from tutti.optim.learning_rate import set_learning_rates
from tutti.optim.several import members_of, stepping
from tutti.parallel.normalisation import nonfinite_names
from tutti.parallel.whole_tensors import WholeTensorsOf
from tutti.types.optimizer_protocols import NamedParameters


def gather_nonfinite_names(comm: Communicator, named: NamedParameters) -> tuple[str, ...]:
    """Find the parameters that have a NaN or infinity in ``.grad`` on any rank of ``comm``.

    Collective over the ranks of ``comm``: an all-gather of the names; blocks.

    Args:
        comm: the ranks to search.
        named: (name, parameter) of this rank's parameters.

    Returns:
        Names of the parameters found, each once, in rank order and equal on all ranks; at most three from each rank.

    Raises:
        PeerError: a rank has ended, or did not make the call in time.
        MismatchError: the ranks are in different calls.
    """
    found = nonfinite_names((name, p.grad) for name, p in named)
    gathered = comm.all_gather_strings("\n".join(found[:3]), "names of gradients that are not finite")
    return tuple(dict.fromkeys(name for text in gathered for name in text.splitlines()))


def optimizer_step(
    optimizer: Optimizer,
    lr_factor: float | None,
    grad_norm: float | None = None,
    whole: WholeTensorsOf | None = None,
) -> None:
    """Set the learning rate of each parameter group of an optimizer, then step the optimizer.

    Args:
        optimizer: an optimizer, or an object that combines several and steps each.
        lr_factor: factor by which each group's initial learning rate is multiplied; None leaves ``group["lr"]`` as it
            is.
        grad_norm: L2 norm of the gradient of the complete model, for layer-wise optimizers that clip by it
            (``tutti.optim.LAMB``), whose own parameters may belong to one pipeline stage only.
        whole: all-gathers tensors that are split over ranks, for optimizers whose step needs whole tensors; the step is
            collective then, over the ranks that share these tensors. None where no optimizer needs this.

    Raises:
        UsageError: the optimizer does not take the sparse gradients that it was given.
    """
    for member in members_of(optimizer):
        if isinstance(member, LayerWise):
            member.grad_norm = grad_norm
    set_learning_rates(optimizer.param_groups, lr_factor)
    for member in stepping(optimizer):
        gathered = None if whole is None else whole.of(member)
        try:
            if gathered is None:
                member.step()
            else:
                gathered.step(member)
        except RuntimeError as error:
            check_sparse_step(member, error)
            raise
