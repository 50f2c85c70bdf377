"""What is trained: a model, a loss, data and metrics. A task never mentions ranks."""
