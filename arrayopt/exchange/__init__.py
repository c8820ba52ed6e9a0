"""State of other libraries' optimizers, read and written."""
