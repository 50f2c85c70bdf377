"""Check a machine: hardware, software, limits and collectives. Loads no torch."""
