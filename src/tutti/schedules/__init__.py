"""Orders as data: who does what, when, with whom. No torch."""
