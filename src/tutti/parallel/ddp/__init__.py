"""Whole replicas whose gradients are summed over all workers; the parts that every other strategy is made of.

Start with ``allreduce``, ``AllReduceSync``: the gradient synchronisation that others follow, and ``replica_part``,
which runs the forward and backward of this rank's modules (``whole_layout`` for whole models).

- From loss to gradient: ``loss_output`` (values of a loss function), ``loss_shape`` and ``loss_count`` (its divisor),
  ``output_graph``.
- Sums: ``reducers`` over ``buckets``, ``shared_memory_reducer``, ``sparse_gradients`` with ``sparse_addends``;
  ``gradient_arithmetic``.
- Agreement of ranks: ``sync_module_states`` at first, ``step_agreement`` in each step.
- Update: ``optimizer_step``, ``update_first`` (before its results are read), ``host_parameters`` (in host memory).
- State of logical workers: ``worker_buffers``, ``buffer_handover`` where ranks share a worker.
- Custom training loops: ``unsharded_gradients``, ``concealed_gradients``, ``copied_gradients``, ``write_guard``.
"""
