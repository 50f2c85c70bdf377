"""Parse every option once: dataclasses, durations and specifications, ``TUTTI_*`` variables. No torch."""
