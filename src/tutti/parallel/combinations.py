"""Refuse combinations of options that do not run, before any process starts, with the nearest one that does."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Literal, TypeAlias

from tutti.config.layout_config import HybridConfig
from tutti.config.strategy_choice import StrategyChoice
from tutti.config.strategy_table import TABLE
from tutti.config.sync_config import AllReduceConfig, LocalSGDConfig, ParameterServerConfig, SplitConfig
from tutti.data.contract import BatchContract
from tutti.distribution import pip_install
from tutti.errors import UsageError, counted

NoiseBasis: TypeAlias = Literal["batch", "worker", "average"]
"""Which gradients the gradient noise scale compares: see ``noise_basis``."""


def check_strategy(
    choice: StrategyChoice,
    devices: int,
    *,
    workers: int | None = None,
    reproducible: bool = False,
    custom_loop: bool = False,
    adaptive: bool = False,
    averaging: bool = False,
    compiled: bool = False,
    graphs: bool = False,
    accelerated: bool = False,
    sparse: bool = False,
) -> None:
    """Check that a strategy runs with this number of devices and these options.

    Reads only the arguments and which packages are installed: no model, no devices, not collective.

    Args:
        choice: the strategy.
        devices: number of devices.
        workers: number of logical workers, shares of the global batch; None for one for each data rank.
        reproducible: whether the run has ``--reproducible``.
        custom_loop: whether the script has a custom training loop.
        adaptive: whether the run has ``--lr-scale adascale``.
        averaging: whether the run has ``--ema``.
        compiled: whether the run has ``--compile``.
        graphs: whether the mode given to ``--compile`` records CUDA graphs.
        accelerated: whether the devices are accelerators.
        sparse: whether the model has sparse gradients that the optimizer needs.

    Raises:
        UsageError: a package that the strategy needs is not installed, or the strategy lacks a capability that
            ``devices`` or an option asks for, by its row of the table (``tutti.config.strategy_table``) and the checks
            of its options. The message names a way out.
    """
    row = choice.row
    _check_package(choice)
    if row.most_devices is not None and devices > row.most_devices:
        raise UsageError(
            f"strategy '{choice.name}' runs on {row.most_devices} device, not {devices}",
            remedy="take --strategy mirrored, or --devices 1",
        )
    for config in (choice.layout, choice.sync):
        config.check(choice.shape(devices), accelerated, compiled)
    if graphs and not row.fixed_addresses:
        raise UsageError(
            f"strategy '{choice.name}' cannot be combined with a mode of --compile that records CUDA graphs",
            why="a graph is replayed on the addresses that it recorded, and this strategy moves parameters, or sends"
            " results of a forward to other devices while the graph may be replayed",
            remedy="take --compile default, or --strategy mirrored",
        )
    ranks = choice.data_ranks(devices)
    if workers is not None and workers < ranks:
        _check_shared_workers(choice, workers, devices, adaptive)
    if reproducible and not row.reproducible:
        raise UsageError(
            f"strategy '{choice.name}' is not reproducible on any number of devices",
            remedy="leave out --reproducible, or take --strategy mirrored",
        )
    if averaging and not row.averages:
        raise UsageError(
            f"--ema cannot be combined with these options of strategy '{choice.name}'",
            why="no two devices see the same parameters after an update",
            remedy="leave out --ema, or take mode=sync without backup",
        )
    if sparse:
        _check_sparse(choice, devices, accelerated)
    if adaptive:
        _check_adaptive(choice, workers or ranks)
    if reproducible or adaptive:
        _check_tree(choice, "--reproducible" if reproducible else "--lr-scale adascale")
    if custom_loop:
        check_custom_loop(choice, workers or ranks, ranks)


def _check_shared_workers(choice: StrategyChoice, workers: int, devices: int, adaptive: bool) -> None:
    """Raise UsageError where data ranks cannot share the micro-batches of a worker."""
    if choice.row.shares_workers and not adaptive:
        return
    ranks = choice.data_ranks(devices)
    raise UsageError(
        f"{counted(workers, 'worker')} cannot be distributed over {counted(ranks, 'data rank')}"
        + (" with --lr-scale adascale" if adaptive else f" of strategy '{choice.name}'"),
        why="the gain compares workers' gradients, which are never whole on one device"
        if adaptive
        else "each worker's gradient or update is made on one device",
        remedy=f"take --workers {ranks} or more, or --devices {workers * (devices // ranks)} or fewer",
    )


def check_custom_loop(choice: StrategyChoice, workers: int, ranks: int) -> None:
    """Check that the strategy supports a training loop of the script's own, which calls ``run.backward``.

    Args:
        choice: the strategy.
        workers: number of logical workers, shares of the global batch.
        ranks: number of data ranks.

    Raises:
        UsageError: the strategy supports only ``run.step(batch)``; its options combine pipeline stages with shards or
            tensor parallelism; or each worker has weights of its own, and there are more workers than data ranks. The
            message names a way out.
    """
    if not choice.row.custom_loop:
        able = ", ".join(name for name, other in TABLE.items() if other.custom_loop)
        raise UsageError(
            f"strategy '{choice.name}' needs run.step(batch)",
            why="each worker has its own weights and makes its own updates",
            remedy=f"give tutti.prepare a loss_fn; or take one of {able}",
        )
    layout, sync = choice.layout, choice.sync
    if isinstance(layout, HybridConfig) and layout.stage_ranks != 1:
        sharded = isinstance(sync, SplitConfig) and sync.shards > 1
        if layout.tensor > 1 or sharded:
            raise UsageError(
                f"stages={layout.stage_ranks} with {'shards' if sharded else 'tensor'} of strategy 'hybrid' needs"
                " run.step(batch)",
                why="the script's .grad would be a rank's rows or slice of the gradient of a stage",
                remedy="give tutti.prepare a loss_fn; or take stages alone, or tensor and shards",
            )
    if choice.row.local_steps and workers > ranks:
        raise UsageError(
            f"a custom training loop of {counted(workers, 'worker')} on {counted(ranks, 'data rank')} cannot be"
            f" combined with strategy '{choice.name}'",
            why="each worker has weights and an optimizer of its own, and the loop on a rank has one of each",
            remedy=f"take as many workers as data ranks ({ranks}); or call run.step(batch) with a loss_fn",
        )


def _check_package(choice: StrategyChoice) -> None:
    """Raise UsageError where the strategy needs a package that is not installed."""
    if choice.row.needs is None:
        return
    module, package, extra = choice.row.needs
    if importlib.util.find_spec(module) is None:
        raise UsageError(
            f"strategy '{choice.name}' needs the package {package}",
            remedy=f"run {pip_install(extra)}, or take --strategy mirrored",
        )


def _check_adaptive(choice: StrategyChoice, workers: int) -> None:
    """Raise UsageError where AdaScale cannot compute its gain from the gradients of all workers."""
    alone = "its workers make updates of their own, and the gain belongs to one of all workers"
    summed = "the gain compares workers' gradients, which are never whole on one device"
    if not (choice.row.single_update and choice.row.worker_gradients):
        raise UsageError(
            f"--lr-scale adascale cannot be combined with strategy '{choice.name}'",
            why=summed if choice.row.single_update else alone,
            remedy="take --strategy mirrored, or another --lr-scale",
        )
    if workers < 2:
        raise UsageError(
            "--lr-scale adascale needs at least 2 workers",
            why="the gain compares workers' gradients, and one alone says nothing about their variance",
            remedy="take --workers 2 or more",
        )


def exchanges_sparse(choice: StrategyChoice, devices: int, accelerated: bool, needed: bool = False) -> bool:
    """Return whether the data ranks sum sparse gradients as sparse tensors under this strategy, and not as dense ones.

    Args:
        choice: the strategy.
        devices: number of devices.
        accelerated: whether the devices are accelerators.
        needed: whether the optimizer accepts sparse gradients only (``SparseAdam``). ``mirrored`` then sums them as
            sparse tensors on any number of devices; otherwise it sums dense ones on several devices, with the same
            updates.
    """
    row = choice.row
    if needed and isinstance(choice.sync, AllReduceConfig) and choice.sync.variant is None:
        return True
    on_host = row.one_copy and row.optimizer_here and accelerated and devices > 1
    return (row.sparse_devices is None or devices <= row.sparse_devices) and not on_host


def _check_sparse(choice: StrategyChoice, devices: int, accelerated: bool) -> None:
    """Raise UsageError where the strategy supports only dense gradients on these devices."""
    if not exchanges_sparse(choice, devices, accelerated, needed=True):
        able = ", ".join(name for name, row in TABLE.items() if row.sparse_devices is None and row.most_devices is None)
        raise UsageError(
            f"strategy '{choice.name}' cannot be combined with sparse gradients and this optimizer"
            + " on several devices" * (choice.row.sparse_devices != 0),
            why="the optimizer updates the rows that a gradient names, and this strategy exchanges parts of dense"
            " gradients, which name none",
            remedy=f"take one of {able}; SGD or Adagrad, whose updates from dense gradients are the same; or"
            " sparse=False in nn.Embedding, and Adam",
        )


def _check_tree(choice: StrategyChoice, option: str) -> None:
    """Raise UsageError where the options of all-reduce exclude the fixed summation tree that ``option`` needs."""
    if not isinstance(choice.sync, AllReduceConfig):
        return
    if choice.sync.wire != "fp32":
        raise UsageError(
            f"{option} cannot be combined with a compressed wire",
            why="compression is applied once per device, so that the result would depend on their number",
            remedy="leave out one of the two",
        )
    if choice.sync.algorithm == "shared_memory":
        raise UsageError(
            f"{option} cannot be combined with algorithm=shared_memory",
            why="its sums go through one fixed tree over messages",
            remedy="leave out the algorithm",
        )
    if choice.sync.schedule is not None:
        raise UsageError(
            f"{option} cannot be combined with algorithm={choice.sync.algorithm}",
            why="floating-point addition is not associative: each device first adds its own workers and the schedule"
            " then adds devices, so that the brackets of the sum, and its last bits, depend on their number",
            remedy="leave out the algorithm: the sum then goes through one fixed tree over workers",
        )


def check_noise_scale(choice: StrategyChoice, devices: int, contract: BatchContract, noisy: bool) -> None:
    """Check that ``--noise-every`` can measure the gradient noise scale with these options.

    The noise scale is estimated from the squared norms of the gradients of parts of a batch and of the gradient of the
    whole batch, or of a worker's share of it (``noise_basis``). Each must exist by itself on some rank, and all must be
    computed with the same parameters. Parts are micro-batches or whole logical workers (``compares_micro_batches``).

    Args:
        choice: the strategy.
        devices: number of devices.
        contract: division of a global batch into logical workers (fixed shares) and micro-batches.
        noisy: whether the run has ``--gradient-noise``.

    Raises:
        UsageError: the strategy compresses its messages (``wire``) or has backup workers; ``noisy`` is True; several
            ranks share a worker of a strategy whose parts are workers; a batch has a single part; or workers have
            parameters of their own that are never equal, and one micro-batch each. The message names a way out.
    """
    sync, shape = choice.sync, choice.shape(devices)
    if isinstance(sync, AllReduceConfig) and sync.wire != "fp32":
        raise UsageError(
            "--noise-every cannot be combined with a compressed wire",
            why="the noise is the difference between the mean square of the parts' gradients and the square of their"
            " mean; rounding on the wire adds its own variance to the second alone",
            remedy="leave out one of the two",
        )
    if isinstance(sync, ParameterServerConfig) and sync.backup:
        raise UsageError(
            "--noise-every cannot be combined with backup workers",
            why="the noise is the difference between the mean square of the parts' gradients and the square of their"
            " mean, and an update is the mean of the fastest parts alone",
            remedy="leave out backup, or --noise-every",
        )
    if noisy:
        raise UsageError(
            "--noise-every cannot be combined with --gradient-noise",
            why="it would measure the added noise, too",
            remedy="leave out one of the two",
        )
    by_micro_batch = compares_micro_batches(choice, shape)
    if contract.shared and not by_micro_batch:
        raise UsageError(
            "--noise-every cannot be combined with replicas that share a worker's micro-batches",
            why="a pipeline measures the gradients of whole workers, of which a replica has a part",
            remedy=f"take --workers {contract.ranks} or more, or leave out --noise-every",
        )
    _check_parts(choice, contract, by_micro_batch)


def compares_micro_batches(choice: StrategyChoice, shape: Mapping[str, int]) -> bool:
    """Return whether the gradient noise scale is estimated from gradients of micro-batches; if not, of whole workers.

    A worker is a logical worker, a fixed share of the global batch. False for ``model_parallel``, ``pipeline`` and
    ``hybrid``, which run the micro-batches of a worker together, unless FSDP2 shards the parameters (ZeRO stages 2 and
    3): each micro-batch then has a backward of its own.

    Args:
        choice: the strategy.
        shape: size of each dimension of the device mesh, by name.
    """
    return choice.row.own_backward or choice.sync.shards_parameters(shape)


def _check_parts(choice: StrategyChoice, contract: BatchContract, by_micro_batch: bool) -> None:
    """Raise UsageError unless gradients of several parts of a batch are computed at the same parameters."""
    parts = _parts_of_worker(contract) if by_micro_batch else 1
    if noise_basis(choice, contract) == "average" and not isinstance(choice.sync, LocalSGDConfig):
        share = len(contract.worker(contract.batch, 0))
        raise UsageError(
            f"--noise-every needs several micro-batches of a worker with these options of strategy '{choice.name}'",
            why="its workers never have the same parameters, and one gradient at a point has no variance",
            remedy=f"take --micro-batch {share // 2}, or leave out --noise-every"
            if share > 1
            else f"take --batch-size {2 * contract.workers} and --micro-batch 1, or leave out --noise-every",
        )
    if contract.workers == 1 and parts < 2:
        micro = f" or --micro-batch {max(contract.batch // 4, 1)}" if by_micro_batch else ""
        raise UsageError(
            "--noise-every needs gradients of several parts of a batch",
            why="with one worker" + " and one micro-batch" * by_micro_batch + " there is a single gradient",
            remedy=f"take --workers 4{micro}",
        )


def noise_basis(choice: StrategyChoice, contract: BatchContract) -> NoiseBasis:
    """Return which gradients, all computed at the same parameters, the gradient noise scale is estimated from.

    Args:
        choice: the strategy.
        contract: division of a global batch into logical workers (fixed shares) and micro-batches.

    Returns:
        ``batch`` where all workers make one update together: the gradients of all parts of a batch are compared with
        the gradient of the batch. ``worker`` where each worker updates parameters of its own and has several
        micro-batches: their gradients are compared with the worker's gradient. ``average`` where a worker has one
        micro-batch: the gradients of all workers are compared in the first step after parameters were averaged, when
        all workers have the same parameters.
    """
    if choice.row.single_update:
        return "batch"
    return "worker" if _parts_of_worker(contract) > 1 else "average"


def _parts_of_worker(contract: BatchContract) -> int:
    """Return the number of micro-batches of the first worker, which has the largest share of a batch."""
    return len(contract.micro_batches(len(contract.worker(contract.batch, 0))))


def check_sync(choice: StrategyChoice, devices: int, reproducible: bool, per_worker_option: str | None = None) -> None:
    """Check that ``--batch-norm sync`` (statistics of the global batch) can be combined with the strategy.

    Args:
        choice: the strategy.
        devices: number of devices.
        reproducible: whether the run has ``--reproducible``.
        per_worker_option: name of an option in use that needs each logical worker (fixed share of the global batch)
            computed separately; None for none.

    Raises:
        UsageError: ``per_worker_option`` is given, the strategy's workers have different weights, or the run is to be
            reproducible on several data ranks.
    """
    if per_worker_option is not None:
        raise UsageError(
            f"--batch-norm sync cannot be combined with {per_worker_option}",
            why="a device computes its workers as one batch, and this needs each worker separately",
            remedy="leave out one of the two, or take --batch-norm ghost:size=32",
        )
    if not choice.row.shared_weights:
        raise UsageError(
            f"--batch-norm sync cannot be combined with strategy '{choice.name}'",
            why="its workers hold different weights, so that their activations have no statistics in common",
            remedy="take --strategy mirrored, or --batch-norm ghost:size=32",
        )
    if reproducible and choice.data_ranks(devices) > 1:
        raise UsageError(
            "--batch-norm sync is not reproducible on several devices",
            why="each device first sums over its own samples, so that the last bits depend on their number",
            remedy="leave out --reproducible, or take --devices 1 or --batch-norm ghost:size=32",
        )
