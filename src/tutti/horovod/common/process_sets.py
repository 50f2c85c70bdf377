"""Process sets with Horovod's names."""

from __future__ import annotations

from tutti.comm.process_set import ProcessSet, all_ranks
from tutti.horovod.torch.mpi_ops import add_process_set, remove_process_set

global_process_set = all_ranks
"""The process set of all ranks."""

__all__ = ["ProcessSet", "add_process_set", "global_process_set", "remove_process_set"]
