"""Parameter servers: separate processes hold parameters and optimizer state, and sum or apply pushed gradients."""
