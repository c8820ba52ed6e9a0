"""`CuPy`, the engine `cupy`: compiles each plan to CUDA, and runs it in one launch or a few.
`engines/registry.py` chooses it for CuPy and PyTorch. Its batches are
`Table` and `DevicePhasedBatch`."""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import cupy

from arrayopt.arrays import place
from arrayopt.engines.bucket import Bucket
from arrayopt.engines.cuda.cublas import library
from arrayopt.engines.cuda.device import access
from arrayopt.engines.cuda.emit import LEAN
from arrayopt.engines.cuda.judge import Judge
from arrayopt.engines.cuda.phased_batch import DevicePhasedBatch
from arrayopt.engines.cuda.pieces import tiles
from arrayopt.engines.cuda.table import Table
from arrayopt.engines.fused import Fused


class CuPy(Fused):
    """Runs generated kernels over all tensors at once; the number of blocks changes no result."""

    name = "cupy"
    batch = Table
    phased_batch = DevicePhasedBatch
    products = True
    side_by_side = False
    lean = LEAN
    codes, counts, halves, cuts, parts, narrows = True, True, False, True, True, True

    def geometry(self, shapes: list[tuple[int, ...]], element: str) -> Any:
        found = super().geometry(shapes, element)
        tiles(found, element)
        return found

    def describe(self) -> str:
        return "CUDA kernels over all tensors at once"

    def check_products(self, bucket: Bucket) -> None:
        super().check_products(bucket)
        library()

    def capturing(self, bucket: Bucket) -> bool:
        with access(bucket.tensors[0].array).section():
            return bool(cupy.cuda.get_current_stream().is_capturing())

    def judge(self, buckets: Sequence[Bucket]) -> Judge | None:
        homes = set()
        for bucket in buckets:
            xp, device = place(bucket.tensors[0].array)
            homes.add((xp, str(device)))
        return Judge(self, buckets) if len(homes) == 1 else None

    def advance(self, bucket: Bucket, hypers: Sequence[dict[str, Any]]) -> None:
        kept = chain.from_iterable(bucket.batches.values())
        tables = [x for x in bucket.run.captured if isinstance(x, Table)]
        recorded = [x for x in tables if x.counts is bucket.counts]
        for batch in {id(x): x for x in [*kept, *recorded]}.values():
            batch.advance(hypers)
