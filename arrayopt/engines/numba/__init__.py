"""The Numba engine: fused loops in machine code."""
