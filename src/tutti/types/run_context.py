"""Facts of a run that a strategy needs to build its layout and its gradient synchronisation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tutti.config.averaging import Averaging
from tutti.config.module_config import Checkpointing, CompileChoice

if TYPE_CHECKING:
    from tutti.comm.mesh_communicators import Communicators
    from tutti.comm.rank_mesh import RankMesh


@dataclass(frozen=True)
class RunContext:
    """Facts of a run that its strategy (``ModelLayout`` and ``GradientSync``) needs.

    Attributes:
        mesh: the device mesh and this rank's coordinates in it.
        comms: communicators along the axes of the mesh.
        workers: number N of logical workers, the fixed shares of the global batch.
        mine: indices of the contiguous logical workers whose micro-batches this data rank computes.
        sharers: where there are more data ranks than workers, indices of the contiguous data ranks that share this
            rank's worker, this rank included; None where each worker is computed by a single rank.
        reproducible: whether weights are bit-identical on any number of data ranks.
        clip: largest gradient norm, None for no clipping.
        averaging: options of the average of the weights over the updates (EMA), None for none.
        activation_checkpointing: options such as ``Blocks``, or names and classes of the modules to recompute; None for
            none.
        compile: mode and options of ``torch.compile``; None for none.
        gradient_variance: whether to measure each worker's gradient before the sum: ``StepStats.gradient_variance``.
        draws: whether the model may draw random numbers in training, as for dropout.
        synchronous: whether every rank makes all steps of the run; False with asynchronous parameter servers that count
            the steps of all workers together.
        trial: ``trial(model, most=None)`` calls the run's loss function on ``model`` with the first micro-batch of the
            training data, cut to ``most`` samples if that is given. Not collective. None without a loss function.
        forward_trial: the function ``trial`` where the run has a loss function; otherwise a function with the same
            arguments that calls ``model`` on the inputs of the first micro-batch.
        shards_parameters: whether the ``GradientSync`` shards parameters (FSDP2); it then moves them to the device
            itself.
    """

    mesh: RankMesh
    comms: Communicators
    workers: int
    mine: range
    sharers: range | None = None
    reproducible: bool = False
    clip: float | None = None
    averaging: Averaging | None = None
    activation_checkpointing: Checkpointing = None
    compile: CompileChoice | None = None
    gradient_variance: bool = False
    draws: bool = True
    synchronous: bool = True
    trial: Callable[..., Any] | None = None
    forward_trial: Callable[..., Any] | None = None
    shards_parameters: bool = False

    @property
    def begins_worker(self) -> bool:
        """Whether this rank runs the first micro-batches of its logical workers in each step.

        A logical worker is one of N fixed shares of the global batch. False only where more than N data ranks share the
        workers' micro-batches, on every rank of a worker except its first.
        """
        return self.sharers is None or self.sharers.start == self.comms.replica.rank
