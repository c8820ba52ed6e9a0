"""The engine for tensors that other ranks update: here they are counted, and nothing else."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from arrayopt.engines.base import Asked, Engine, Report, Run, Stops
from arrayopt.engines.bucket import Bucket

__all__ = ["Elsewhere"]


class Elsewhere(Engine):
    """Counts updates, so that all ranks know how often each tensor was updated."""

    name = "none"

    def check(self, bucket: Bucket) -> None:
        """Any bucket is for this engine."""

    def prepare(self, bucket: Bucket, asked: Asked, meetings: Sequence[Any] = ()) -> Run:
        """See `Engine.prepare`: other ranks tell the numbers."""
        took = np.flatnonzero([g is not None for g in asked.grads])

        def run(reports: dict[str, Report]) -> Stops:
            bucket.count(took, asked.left)
            yield from ()

        return run

    def explain(self, bucket: Bucket) -> str:
        return "their parameters come from there after each step"
