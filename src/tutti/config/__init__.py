"""Dataclasses of all options, and the parsers of their texts, TOML files and ``TUTTI_*`` variables. No torch.

Start with ``train_config`` (every option of ``tutti train``) and ``spec`` (the form ``name:key=value`` and
durations).

- From texts to a configuration: ``settings``, ``dotted``, ``origins``, ``variables``, ``verbosity``, ``bounds``,
  ``named_changes``.
- Strategies: ``strategy_table`` with ``layout_config`` and ``sync_config``; ``strategy_choice`` parses one.
- Learning: ``optimizer_config``, ``lr_rule``, ``loss_scale_config``, ``gradient_noise``, ``growth``, ``averaging``.
- Model, task and weights: ``module_config``, ``task_config``, ``init_map``.
- The run: ``training_target``, ``best``, ``metric_direction``, ``logger_config``, ``watchdog_limits``, ``slowness``;
  where it runs: ``engine_config``, ``cluster_config``.
"""
