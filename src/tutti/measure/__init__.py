"""Measuring: reads machines and runs, never writes back. Loads no torch."""
