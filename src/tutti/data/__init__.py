"""Sample order, the partition of global batches over logical workers and ranks, and data loading.

Start with ``contract`` (which worker, rank and micro-batch a sample belongs to) and ``feed`` (this rank's samples of
each step).

- Data sets of scripts: ``adapt``, ``sampling``, ``source`` (map-style) and ``stream`` (iterable).
- Order of samples: ``order``, ``epochs``, ``keyed_random``.
- Reading: ``reading`` makes a ``reader`` or ``stream_reader`` (``stream_batches``, ``held_out_stream``), which read
  in ``loader`` processes; ``digest`` compares ranks; ``transfer`` copies to the device.
- Samples and batches: ``item_source``, ``collation``, ``batches``; their random draws: ``global_generators``,
  ``kept_generators``.
- Built-in sources: ``arrays``, ``images``, ``masks``, ``text_source``, with ``decoding`` and ``cache``.
"""

from tutti.data.source import AugmentKey, Sharded, Source

__all__ = ["AugmentKey", "Sharded", "Source"]
