"""The order of samples, who gets which, and how they are read."""

from tutti.data.source import AugmentKey, Sharded, Source

__all__ = ["AugmentKey", "Sharded", "Source"]
