"""Sample order, the partition of global batches over logical workers and ranks, and data loading."""

from tutti.data.source import AugmentKey, Sharded, Source

__all__ = ["AugmentKey", "Sharded", "Source"]
