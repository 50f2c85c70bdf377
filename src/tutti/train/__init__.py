"""Training: prepare, the run and its steps, custom training loops, the training loop, and a rank's entry point."""
