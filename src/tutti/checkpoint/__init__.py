"""Checkpoints: one state on disk for all strategies, independent of how the model is partitioned.

Start with ``manager`` (when a run saves, and which checkpoints it keeps) and ``manifest`` (the list of a checkpoint's
files and tensors).

- Writing: ``save_snapshot``, ``state_shards`` (a rank's part), ``write``, ``tensorfile`` (the format), ``disk``.
- Reading: ``folder`` finds, ``read`` verifies, ``checkpoint_reader`` restores; ``chosen_checkpoint`` for commands.
- Weights alone: ``weights``, ``weights_source``, ``plain``, ``plain_folder``, ``plain_model``, ``dcp_folder``;
  ``export``, ``export_folder``.
- Tools: ``gather`` (whole tensors), ``fingerprint`` (hashes), ``dtypes``, ``json_codec``.
"""
