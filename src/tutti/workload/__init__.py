"""Memory that training a model takes on a device, and memory that is available."""
