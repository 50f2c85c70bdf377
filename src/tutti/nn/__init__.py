"""Batch norms, activation checkpointing, compile, RNG streams and other transformations of a model's modules."""
