"""Who am I: rank, size, device; ranks as a named grid; launching processes."""
