"""Predict memory, step times and training times of runs before they start, and analyse finished runs."""
