"""Explain PyTorch's error of a batch norm in training that gets the single sample of a logical worker."""

from __future__ import annotations

from tutti.data.contract import BatchContract
from tutti.errors import counted

_SINGLE = "Expected more than 1 value per channel when training"


def note_single_sample(error: BaseException, contract: BatchContract) -> None:
    """Explain, by a note on the exception, PyTorch's error that batch norm in training got a single value a channel.

    The note computes how few samples a micro-batch has, and names remedies. Other errors, and an error that has a note
    already, are left as they are.

    Args:
        error: an exception that ended a step.
        contract: the division of global batches over logical workers (fixed shares) and micro-batches.
    """
    if not (isinstance(error, ValueError) and str(error).startswith(_SINGLE)) or hasattr(error, "__notes__"):
        return
    micro = len(contract.micro_batches(-(-contract.batch // contract.workers)))
    error.add_note(
        "A batch norm takes the statistics of one micro-batch of one worker:"
        f" {counted(contract.batch, 'sample')} ÷ {counted(contract.workers, 'worker')} ÷"
        f" {counted(micro, 'micro-batch')} = {contract.batch / contract.workers / micro:.3g}, and fewer in the last"
        " batch of an epoch. Take a larger batch_size, fewer workers, larger micro-batches, or batch_norm='sync', whose"
        " statistics are of all workers."
    )
