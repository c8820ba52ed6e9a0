"""Kernels run as the PTX of NVRTC in GPGPU-Sim: ``GPGPUSIM=<a checkout> make test-ptx``.

The checkout is of github.com/gpgpu-sim/gpgpu-sim_distribution, at 90ec3399 of October 2020. It is left as it is:
`build.py` changes a copy (`edits.py`) and builds it, which needs g++, make, bison, flex and zlib, and no CUDA.

`Simulator` loads a text and launches its kernels, for numbers or for cycles; `through` has the stand-in for CuPy launch
there, so that whole programs run.

Limits: every thread sees a store at once, so a missing fence is not found. ``.cs`` has no effect. PTX is timed, one
instruction after the other, and not what ptxas makes of it. Memory has 1 GB, in one process.
"""
