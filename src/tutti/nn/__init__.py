"""Batch norms, activation checkpointing, compile, RNG streams and other transformations of a model's modules.

Start with ``rng_streams`` (draws that depend on no rank) and ``swap`` (parameters and buffers by name).

- Batch norm: ``norms`` replaces it by ``ghost`` or ``sync``.
- Compile and recomputation: ``ac_and_compile``, ``ac_policy``, ``recompute``, ``selective_checkpoint``,
  ``eager_layer``.
- Other layers and sizes: ``float8``, ``sparse_layers``, ``init_on_disk``, ``overlapping``.
- Placeholders and copies of tensors of which a rank has a part or nothing: ``absent_tensor``, ``partial_gradient``,
  ``incomplete_gradient``, ``summed_gradient``, ``state_copy``; ``script_edits`` compares the script's writes over
  ranks.
- Watching a script: ``script_mode``, ``written_tensors``, ``global_draws``; its hooks: ``forward_hooks``,
  ``gradient_hooks``; tutti's own: ``owned_hooks``.
- Trial forwards: ``untouched``, ``untraced``.
"""
