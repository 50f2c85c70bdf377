"""Where one replica of the model lives."""
