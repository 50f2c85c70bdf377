"""Records, progress, loggers, profiler, timeline and diagnostics of a run.

Start with ``listener``: the protocol of objects that take the events of a run, on rank 0.

- Listeners: ``progress`` (terminal), ``records`` (the run directory, with ``metrics_file``), ``events``
  (TensorBoard); names in services: ``metric_names``.
- Where time goes: ``throughput``, ``goodput``, ``profile``, ``trace``, ``timeline``.
- Diagnoses: ``diagnoses`` reports the patterns that ``suspicion`` recognises.
- Parameter servers: ``server_figure``.
"""
