"""Dataclasses of all options, and the parsers of their texts, TOML files and ``TUTTI_*`` variables. No torch."""
