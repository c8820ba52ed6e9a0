"""Where an optimizer and the nearest rule part."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from arrayopt.testing.diagnosis.model import one_set
from arrayopt.testing.diagnosis.oddities import lost_elements
from arrayopt.testing.diagnosis.search import Judged
from arrayopt.testing.equivalence import Difference

__all__ = ["first_difference", "with_lost"]


def with_lost(found: Judged) -> Judged:
    """The same where values that become no numbers are too far off."""
    made, distances, beyond = found.fit.model.seen.trajectory, [], []
    for s, (row, far) in enumerate(zip(found.distances, found.beyond, strict=True)):
        gone = {name: lost_elements(made, s, name) for name in row}
        distances.append({name: np.where(gone[name], np.inf, x) for name, x in row.items()})
        beyond.append({name: x | gone[name] for name, x in far.items()})
    return replace(found, distances=distances, beyond=beyond)


def first_difference(found: Judged) -> Difference | None:
    """The first step beyond the limit, and the tensor and element there that are furthest apart."""
    made = found.fit.model.seen.trajectory
    predicted = _predicted(found)
    for s, row in enumerate(found.distances):
        beyond = {
            name: np.where(found.beyond[s][name], x, 0.0) for name, x in row.items() if found.beyond[s][name].any()
        }
        if beyond:
            name = max(beyond, key=lambda n: float(beyond[n].max()))
            index = np.unravel_index(int(np.argmax(beyond[name])), beyond[name].shape)
            at = tuple(int(i) for i in index)
            expected, got = predicted[s][name][at], made.params[s + 1][name][at]
            return Difference(float(beyond[name].max()), name, at, s, float(expected), float(got))
    return None


def _predicted(found: Judged) -> list[Mapping[str, Any]]:
    made = found.fit.model.seen.trajectory
    rows = found.fit.model.predict(one_set(found.fit.values))[0]
    ends = np.cumsum([x.size for x in made.params[0].values()])[:-1]
    return [
        {n: x.reshape(made.params[0][n].shape) for n, x in zip(made.names, np.split(row, ends), strict=True)}
        for row in rows
    ]
