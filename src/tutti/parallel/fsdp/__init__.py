"""Optimizer state, gradients and parameters sharded over devices: ZeRO stages 1 and 2, and FSDP2.

Start with ``sharded``, ``ShardedSync``, and the ``sharding_engine`` protocol of its two engines: ``zero_sharding``
(stage 1) and ``fully_sharded`` (stages 2 and 3, FSDP2).

- Partition: ``model_cut``, ``fsdp_wrap_policy``, ``sharded_parameter``; modules that the data choose:
  ``routed_modules``.
- Collectives: ``fsdp_collectives``, ``row_collectives``; checkpoints: ``row_optimizer_state``.
- Scripts: ``whole_reads`` (parameters in the loss), ``sharded_reads`` and ``fsdp_refusals``.
"""
