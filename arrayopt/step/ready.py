"""A step that is ready: what each bucket's engine has prepared, and how that is run."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from arrayopt.engines.base import Asked, CompilationError, Engine, Partials, Report, abreast
from arrayopt.engines.bucket import Bucket
from arrayopt.engines.fused import Fused, Launch
from arrayopt.engines.table import instead, select
from arrayopt.ranks.alone import Alone

__all__ = ["Ready"]


class Ready:
    """Launches of all buckets.

    Parameters
    ----------
    engine : str
        The engine that the user asked for.
    asked : iterable of (Bucket, Asked)
        What is asked for each bucket. Its engine prepares it, and raises what there is to raise.
    form : object, optional
        What other steps must have in common with this one to be made by the same launches.

    Attributes
    ----------
    form : object
        The same; None where the launches can make just one step.
    """

    def __init__(
        self, engine: str, asked: Iterable[tuple[Bucket, Asked]] = (), form: Any = None
    ) -> None:
        self._reports: dict[str, Report] = {}
        self._launches: list[Callable[[], dict[str, Report]]] = []
        self._cut: list[Iterator[list[Partials]]] = []
        work = [(select(engine, bucket)[0], bucket, wanted) for bucket, wanted in asked]
        begins = [
            (chosen, x, wanted)
            for chosen, x, wanted in work
            if not x.batches and isinstance(chosen, Fused)
        ]
        for kind, one in {type(chosen): chosen for chosen, _, _ in begins}.items():
            one.foresee((x, wanted) for chosen, x, wanted in begins if type(chosen) is kind)
        for chosen, bucket, wanted in work:
            while True:
                try:
                    self._add(chosen, bucket, wanted)
                    break
                except CompilationError as error:
                    chosen = instead(engine, bucket, error)
        self._repeated = [x for x in self._launches if isinstance(x, Launch) and x.repeats]
        self.form = form if len(self._repeated) == len(work) else None

    def again(self, asked: Sequence[Asked]) -> bool:
        """After it has run, make it ready for another step of its form; False where that takes
        another `Ready`.
        """
        return all(map(Launch.again, self._repeated, asked))

    def _add(self, chosen: Engine, bucket: Bucket, wanted: Asked) -> None:
        """Have an engine prepare a bucket."""
        if isinstance(chosen, Fused) and bucket.kind == "cut":
            self._cut.append(chosen.prepare_cut(bucket, wanted, self._reports))
        else:
            self._launches.append(chosen.prepare(bucket, wanted))

    def run(self, team: Alone) -> dict[str, Report]:
        """Run everything, once: what ranks share, and what is whole while they wait for each other;
        the reports.
        """
        rounds = abreast(self._cut)
        wanted = next(rounds, None) if self._cut else None
        ended = None if wanted is None else team.swap(wanted)
        for launch in self._launches:
            self._reports |= launch()
        while ended is not None:
            ended()
            wanted = next(rounds, None)
            ended = None if wanted is None else team.swap(wanted)
        return self._reports
