"""Watch a script's code while it trains: follow what it reads and writes, and refuse what several devices would change.

A script has its own loss function, loop, optimizers and hooks. The modules here find values that pass from one logical
worker's micro-batch to the next, writes to parameters that ranks do not make alike, losses that mix the samples of a
batch, and other mistakes, in the first steps and at intervals. They raise ``UsageError`` or ``MismatchError`` with the
script's line before the first update that would be wrong; ``mistake_checks`` warns.

Map. ``watch_windows`` chooses the steps that are checked. In these, ``tutti.train.step_lifecycle`` enters a
torch-function mode (``entered_mode``), derived from ``loss_watch``, around the code that computes a loss:
``cross_worker_watch`` for values that pass between micro-batches of a rank, ``cross_step_watch`` for values from
earlier steps, or ``both_watches``. The mode asks ``watched_calls`` who calls PyTorch, and follows tensors by their
storages (``storage_records``), writes to tensors in place (``in_place_updates``), sums and means over samples
(``batch_statistics``) and Python numbers (``followed_numbers``, ``plain_numbers``, ``sample_reads``) from samples to
the loss.

``script_source`` reads the running script: its frames, variables, constants and syntax trees. In these
``sample_branches`` finds conditions on numbers of the samples and follows by ``loss_flow`` what they decide,
``written_numbers`` tells constants from numbers that follow from the samples, ``body_counters`` finds counts of a
loop's bodies, and ``skipped_bodies`` finds a body that skips small batches.

No mode sees values that pass through plain Python: ``worker_trials`` computes losses, and ``module_trials`` outputs of
modules, again with former Python objects (``python_state``). The lifecycle also calls ``step_inputs`` (samples that an
optimizer's step reads), ``written_parameters``, ``iterator_watch`` and ``loader_watch``. A custom loop
(``tutti.train.custom_loop``) adds ``gradient_origin``, ``skipped_bodies`` and, where a rank runs the loop's body for
several micro-batches, ``recurrent_state``, ``body_comparison`` (also of ``shared_settings``), ``second_updates``,
``body_counters`` and ``body_loss_comparison``.

``tutti.prepare`` and the run use ``hook_watch``, ``other_optimizers``, ``trainability``, ``single_sample`` (a note on
an error of batch norms) and ``mistake_checks``. That asks for a record of the loss's calls (``loss_calls``), from which
the loss can be computed again: ``sample_mixing`` tells whether it is a mean over samples, ``sample_places`` whether it
takes samples by their places, ``inner_gradients`` whether it depends on gradients of the micro-batch's own, and
``cancelling_numbers`` which Python numbers it does not depend on. ``metric_objects`` finds losses that update a metric,
which are not computed again.
"""
