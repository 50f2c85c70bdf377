"""Optimizers and what changes their rates over time."""
