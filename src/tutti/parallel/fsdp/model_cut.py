"""Cut a model's parameters into the rows of shard ranks, at the beginning of a run: ZeRO stage 1, or FSDP2."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from tutti.comm.broadcast import broadcast_result
from tutti.comm.communicator import Communicator
from tutti.config.sync_config import RowsConfig
from tutti.nn.gradient_hooks import ScriptHook, wrap_hooks
from tutti.nn.swap import parameters
from tutti.parallel.fsdp.sharding_engine import ShardingEngine
from tutti.parallel.fsdp.zero_sharding import ZeroSharding
from tutti.types.optimizer_protocols import NamedParameters
from tutti.types.replica_runner import ReplicaRunner
from tutti.types.run_context import RunContext

if TYPE_CHECKING:
    from tutti.parallel.fsdp.sharded_reads import ShardedReads


def cut_model(
    replica: ReplicaRunner, named: NamedParameters, config: RowsConfig, run_context: RunContext
) -> tuple[list[ShardingEngine], ShardedReads | None]:
    """Cut a replica's parameters into rows of the shard ranks, by ZeRO stage 1 or by FSDP2.

    ZeRO stage 1 is used for the option ``stage=1`` and for one shard rank, otherwise FSDP2, and ZeRO stage 1 for
    parameters that FSDP2 cannot take. May be collective over all ranks with FSDP2: a broadcast of the names of the
    modules to wrap.

    Args:
        replica: this rank's part of the model, whose parameters are replaced or sharded in its modules.
        named: (name, parameter) pairs of all parameters, frozen ones included.
        config: options of the strategy.
        run_context: communicators and settings of the run.

    Returns:
        The engines that hold the rows, and the object that lets the script read whole parameters, or None: with one
        shard rank, and where a replica lives on several ranks.

    Raises:
        UsageError: FSDP2 cannot shard the model.
    """
    mesh, shards = run_context.mesh, run_context.comms.axis("shard")
    reads: ShardedReads | None = None
    if mesh.tensor == 1 and mesh.stage == 1 and shards.size > 1:
        # A replica of tensor slices has a context of its own.
        from tutti.parallel.fsdp.sharded_reads import ShardedReads

        reads = ShardedReads(config.stage > 1)
        reads.leave_compiled(replica.parts, run_context.compile is not None)
        replica.script_code, replica.model_code = reads.script_code, reads.model_code
        replica.edits = reads.edits
    if config.stage == 1 or shards.size == 1:
        return [_cut_by_zero(replica, named, shards, reads)], reads
    return _cut_by_fsdp(replica, named, config, run_context, reads), reads


def _cut_by_zero(
    replica: ReplicaRunner, named: NamedParameters, shards: Communicator, reads: ShardedReads | None
) -> ZeroSharding:
    """Cut the trainable parameters into rows; the model keeps whole parameters. Empty parameters are not cut."""
    trained = [(n, p) for n, p in named if p.requires_grad and p.numel()]
    sliced = ZeroSharding(trained, replica.parts, replica.specs, shards)
    replica.replaced(sliced.replaced)
    replica.also_seen({whole: rows for rows, whole in sliced.replaced.items()})
    if reads is not None:
        wrap = partial(ScriptHook, is_dummy=lambda: False, script_code=reads.script_code)
        replica.adapt_hooks = partial(_check_hooks, replica.parts, wrap)
    own = dict(zip((rows.name for rows in sliced.rows), sliced.script_parameters(), strict=True))
    replica.replaced_name = lambda: next(
        (name for name, p in parameters(replica.parts) if own.get(name, p) is not p), None
    )
    return sliced


def _cut_by_fsdp(
    replica: ReplicaRunner,
    named: NamedParameters,
    config: RowsConfig,
    run_context: RunContext,
    reads: ShardedReads | None,
) -> list[ShardingEngine]:
    """Shard the model by FSDP2, and by ZeRO stage 1 the trainable parameters that FSDP2 cannot take."""
    from tutti.parallel.fsdp.fully_sharded import FullySharded

    [model], shards = replica.parts, run_context.comms.axis("shard")
    whole = _whole_under_fsdp(model, named, config)
    for parameter in whole:
        # FSDP2 moves only the other parameters to the device. The copy also moves memory-mapped ones into memory.
        parameter.data = parameter.data.to(shards.device, copy=True)
    config = replace(config, units=_wrap_policy(model, config, run_context))
    engine = FullySharded(model, replica.specs, whole, config, shards, replica)
    replica.sharded = {rows.name: rows.parameter.data for rows in engine.rows}
    replica.specs = {**replica.specs, **{rows.name: rows.spec for rows in engine.rows}}
    replica.swap_values, replica.unify_flags = engine.holding, engine.unify_flags
    replica.replaced_name = engine.replaced_name
    if reads is not None:
        reads.guard(engine)
    replica.adapt_hooks = engine.adapt_hooks
    rest = [(n, p) for n, p in named if p in whole and p.requires_grad and p.numel()]
    return [engine, ZeroSharding(rest, replica.parts, replica.specs, shards)] if rest else [engine]


def _whole_under_fsdp(model: nn.Module, named: NamedParameters, config: RowsConfig) -> set[nn.Parameter]:
    """Return the parameters that FSDP2 leaves whole.

    These are empty and 0-d parameters, parameters of another dtype than most, and with ``param_dtype`` the
    parameters of batch norms.
    """
    counts: Counter[torch.dtype] = Counter()
    for _, parameter in named:
        counts[parameter.dtype] += parameter.numel() * parameter.requires_grad
    usual = counts.most_common(1)[0][0]
    whole = {p for _, p in named if not p.numel() or not p.dim() or p.dtype != usual}
    if config.param_dtype is not None:
        # Batch norm takes narrow activations, but not with narrow weights.
        norms = [module for module in model.modules() if hasattr(module, "running_mean")]
        whole |= {p for module in norms for p in module.parameters()}
    return whole


def _wrap_policy(model: nn.Module, config: RowsConfig, run_context: RunContext) -> tuple[str, ...]:
    """Return the wrap policy, with blocks among which the data choose left to the module around them.

    Collective if the source of such a module is suspected to choose: the first rank tries the model.
    """
    from tutti.parallel.fsdp.fsdp_wrap_policy import wrapped_around, wrapped_modules
    from tutti.parallel.fsdp.routed_modules import routed_modules, suspected_routers

    units, trial = config.units, run_context.forward_trial
    # Split layers would wait for the other tensor ranks, and compiling takes long.
    if units != ("auto",) or trial is None or run_context.mesh.tensor > 1 or run_context.compile:
        return units
    suspects = suspected_routers(model, wrapped_modules(model))
    if not suspects:
        return units
    comm = run_context.comms.world
    find = partial(routed_modules, model, suspects, trial, comm.device)
    routed = broadcast_result(comm, 0, find, "modules that choose among their blocks")
    if not routed:
        return units
    return wrapped_around(model, [model.get_submodule(name) for name in routed])


def _check_hooks(
    parts: Sequence[nn.Module], wrap: Callable[[Callable[[Tensor], Tensor | None]], ScriptHook]
) -> Sequence[str]:
    """Check what the script's hooks on gradients read of parameters; return no names, as later hooks act, too."""
    wrap_hooks(parameters(parts), wrap)
    return ()
