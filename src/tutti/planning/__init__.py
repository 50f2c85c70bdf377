"""Predict a run's memory before it starts."""
