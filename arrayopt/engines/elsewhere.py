"""The engine for tensors that other ranks update: here they are counted, and nothing else."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from arrayopt.engines.base import Asked, Engine, Partials, Report
from arrayopt.engines.bucket import Bucket
from arrayopt.engines.meeting import Meeting

__all__ = ["Elsewhere"]


class Elsewhere(Engine):
    """Counts updates, so that all ranks know how often each tensor was updated."""

    name = "none"

    def check(self, bucket: Bucket) -> None:
        """Any bucket is for this engine."""

    def prepare(self, bucket: Bucket, asked: Asked) -> Callable[[], dict[str, Report]]:
        """See `Engine.prepare`."""
        took = np.flatnonzero([g is not None for g in asked.grads])

        def launch() -> dict[str, Report]:
            bucket.count(took, asked.left)
            return {}

        return launch

    def prepare_joint(
        self,
        bucket: Bucket,
        asked: Asked,
        meetings: Sequence[Meeting],
        reports: dict[str, Report],
    ) -> Iterator[list[Partials]]:
        """See `Engine.prepare_joint`: other ranks tell the numbers."""
        launch = self.prepare(bucket, asked)

        def steps() -> Iterator[list[Partials]]:
            launch()
            yield from ()

        return steps()

    def explain(self, bucket: Bucket) -> str:
        """See `Engine.explain`."""
        return "their parameters come from there after each step"
