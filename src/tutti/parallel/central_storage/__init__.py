"""One copy of parameters and optimizer state in the memory of a node."""
