"""What the package reads at once in the heads of CuPy's arrays, of arrays that have no such heads."""

import operator

import numpy as np

from arrayopt.params import grads, headers
from tests.cudacpu.standin.array import ndarray

__all__ = ["known", "unknown"]

_PLACE = operator.attrgetter("data.ptr", "flags.c_contiguous")


def _form_checker(kind, forms):
    """As `headers.form_checker`: the same object for arrays that come for the third time in a row, as they were."""
    if kind is not ndarray:
        return headers.form_checker(kind, forms)
    form_of, last = grads.look(kind), [None, None]  # which arrays came last, and what was found then, if twice

    def fits(given):
        some = [(x, form) for x, form in zip(given, forms, strict=True) if x is not None]
        if any(type(x) is not kind or form_of(x) != form for x, form in some):
            return None
        places = [_PLACE(x) for x, _ in some]
        came, complete = [*zip(map(id, given), places, strict=False)], len(some) == len(given)
        if complete and last[0] == came and last[1] is not None:
            return last[1]
        found = headers.Locations(*np.array(places, np.int64).reshape(-1, 2).T, complete)
        if complete:
            last[:] = came, found if last[0] == came else None
        return found

    return fits


def known():
    """Have the package know the heads of the stand-in's arrays, too."""
    grads.form_checker = _form_checker


def unknown():
    """As it was before."""
    grads.form_checker = headers.form_checker
