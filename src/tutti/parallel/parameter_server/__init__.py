"""Parameter servers: separate processes hold parameters and optimizer state, and sum or apply pushed gradients.

Start with ``synchronous``, ``asynchronous`` and ``readable_sums`` (the strategies' three gradient synchronisations)
and ``server`` (the process of one server).

- A rank: ``server_session`` (start, exchange keys, send), ``client`` (requests), ``hyperparameters``; custom training
  loops: ``remote_gradients``.
- A server: ``request_handlers`` use ``server_barrier`` (synchronous) or ``staleness`` (asynchronous), and a
  ``parameter_shard`` with its optimizer.
- Partition of the parameters: ``server_partition``, ``flat_views``.
- On the network: ``server_wire``, ``curve_keys``; messages and bytes, as data: ``server_flows``.
- Processes: ``server_supervisor``, ``server_snapshot``. Tests of asynchrony: ``simulate``.
"""
