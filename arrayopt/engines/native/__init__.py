"""Common to compiled CPU engines: the table of tensors, shared by threads and ranks."""
