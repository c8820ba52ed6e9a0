"""The CUDA engine: generated kernels, run through CuPy."""
