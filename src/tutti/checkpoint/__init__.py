"""Checkpoints: one state on disk for all strategies, independent of how the model is partitioned."""
