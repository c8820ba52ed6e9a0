"""Reading and writing the state of other libraries' optimizers."""
