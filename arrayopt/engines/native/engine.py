"""The base class of the engines `numba` and `cpp`, which compile plans for CPUs."""

import math

from arrayopt.arrays import size
from arrayopt.engines.blas import missing_packages
from arrayopt.engines.bucket import Bucket
from arrayopt.engines.fused import Fused
from arrayopt.engines.threads import thread_count
from arrayopt.foreign import counted


class Native(Fused):
    """Fused loops in machine code; results do not depend on the number of threads."""

    codes = cuts = parts = products = True

    def check_products(self, bucket: Bucket) -> None:
        super().check_products(bucket)
        if missing := missing_packages():
            raise ValueError(f"matrix products need {missing}; pip install 'arrayopt[cpu]'")
        if max(size(x.array) for x in bucket.tensors) >= 1 << 31 and _longest(bucket) >= 1 << 31:
            raise ValueError("BLAS supports matrices of fewer than 2**31 rows and columns")

    def describe(self) -> str:
        return f"fused loops, {counted(thread_count(), 'thread')}"


def _longest(bucket: Bucket) -> int:
    """Return the largest number of rows or columns of a tensor, in any view of it."""
    shapes = [tuple(map(int, x.array.shape)) for x in bucket.tensors if size(x.array)]
    return max(max(shape[0], *shape[-2:], math.prod(shape[1:])) for shape in shapes)
