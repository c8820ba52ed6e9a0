"""The library's benchmark: `make bench`, or ``python benchmarks/run.py``."""
