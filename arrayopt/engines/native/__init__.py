"""The runtime of `numba/` and `cpp/`: the table of tensors, threads, ranks, and the cache."""
