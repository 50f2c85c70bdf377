"""Launch the processes of a job, watch them, report failures; ``tutti.init`` joins a job.

Start with ``context`` (``tutti.init`` in a rank) and ``launch`` (the ranks of one node).

- Ranks of this node: ``launch`` forks them by ``agent`` (``forking``, ``child``, ``held_signals``, ``orphans``), for
  a function by ``function_ranks``; ``elastic_driver`` with ``membership`` and ``host_discovery`` for elastic jobs.
- Ranks elsewhere: ``supervisor`` runs a job on an ``engine`` that ``engines`` makes (``hosts``, ``slurm_engine``,
  ``ray_engine`` with ``ray_supervisor``, ``ray_errors`` and ``special_files``, ``node_engine``); each rank runs
  ``script_rank`` under ``stdin_control``. Files for clusters: ``slurm_job``, ``cluster_files``.
- Failures: ``failure`` (records, root cause), ``dumps``, ``heartbeat`` and ``watchdog`` (no progress),
  ``lost_rank_notes``, ``budget`` (restarts).
- The process: ``encoding``, ``interface``, ``isolated``, ``malloc_tuning``, ``devices`` and ``torch_facts``.
"""
