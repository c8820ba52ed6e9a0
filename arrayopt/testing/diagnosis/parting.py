"""Where an optimizer and the nearest rule part."""

from dataclasses import replace

import numpy as np

from arrayopt.testing.diagnosis.model import one_set
from arrayopt.testing.diagnosis.search import Judged
from arrayopt.testing.equivalence import Difference

__all__ = ["first_difference", "with_lost"]


def with_lost(found: Judged) -> Judged:
    """The same where values that become no numbers are too far off."""
    seen = found.fit.model.seen
    gone = ~np.isfinite(seen.got)
    gone[1:] &= np.isfinite(seen.start[1:])
    return replace(found, distances=np.where(gone, np.inf, found.distances), beyond=found.beyond | gone)


def first_difference(found: Judged) -> Difference | None:
    """The first step beyond the limit, and the tensor and element there that are furthest apart."""
    if not found.beyond.any():
        return None
    seen = found.fit.model.seen
    step = int(np.argmax(found.beyond.any(axis=1)))
    far = np.where(found.beyond[step], found.distances[step], 0.0)
    i = int(np.argmax(far))
    name = seen.trajectory.names[seen.tensor[i]]
    at = np.unravel_index(i - seen.parts[name].start, seen.trajectory.params[0][name].shape)
    expected = found.fit.model.predict(one_set(found.fit.values))[0, step, i]
    index = tuple(int(a) for a in at)
    return Difference(float(far[i]), name, index, step, float(expected), float(seen.got[step, i]))
