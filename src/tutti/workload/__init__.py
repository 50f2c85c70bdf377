"""Work and memory that training a model asks of a device, and measured speeds and sizes of a machine."""
