"""Communicators, process groups and collectives between ranks. The only room that calls collectives.

Start with ``communicator``: every collective of training, compared over the ranks before any arithmetic, and
``stall``, its timeout, which names missing ranks.

- Which ranks: ``rank_mesh`` (arithmetic), ``mesh_communicators``, ``process_groups``, ``partition``.
- Reproducible sums, the same bits on any number of ranks: ``summation_tree``, performed by ``tree_sum``.
- Sums by a chosen algorithm: ``collective_schedules``, performed by ``scheduled_all_reduce``.
- Within one node: ``shared_memory``; ``file_all_gather`` for jobs that outlive killed ranks.
- For training: ``broadcast``, ``uneven_gather``, ``object_codec``, ``random_keys``; with gradients, for tensor
  parallelism: ``differentiable``. Around compiled and traced code: ``graph_breaks``, ``single_call``.
- Public collectives, whose calls ranks match by name as in Horovod: ``collectives`` and ``async_collectives`` make a
  ``collective_call`` in a ``collective_session`` (``current_session``, ``process_set``); ``negotiation`` over
  ``message_hub`` decides on the order; ``collective_engine`` performs it by ``collective_execution``,
  ``posted_reduction`` and ``adasum``.
"""
