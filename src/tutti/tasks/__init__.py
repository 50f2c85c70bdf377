"""Built-in and user tasks: model, loss, data and metrics. A task never mentions ranks."""
