"""The table of tolerances by dtype, each with its reason: how far results may be from exact ones.

Exact results are those of a float64 computation from the same (already rounded) inputs.
"""

from dataclasses import dataclass

__all__ = ["TOLERANCES", "Tolerance"]


@dataclass(frozen=True)
class Tolerance:
    """What is allowed in one dtype.

    Attributes
    ----------
    relative : float or None
        Of parameters, first moments and buffers, whose terms cancel: relative to the largest magnitude that the tensor
        has had. None where `ulps` is asked instead.
    each : float or None
        Of second moments, which are sums of squares and so of any size beside each other: relative to each element.
    ulps : float or None
        Of parameters after one step from the same state, in units of the last place of each element.
    """

    relative: float | None = None
    each: float | None = None
    ulps: float | None = None


TOLERANCES = {
    # 6 steps of about 30 roundings of 2^-53, and sums over at most 60 elements in an order of the library's own: 200
    # roundings that all go one way are 2e-14. The rest is for g - mean(g) near 0, squared: 1e-13 is 50 times that loss.
    "float64": Tolerance(relative=1e-13, each=1e-13),
    # Roundings of 2^-24, and beta2 = 0.999 is itself rounded: the worst measured is 4e-7, and 7e-6 for an element
    # that g - mean(g) left near 0.
    "float32": Tolerance(relative=4e-6, each=2e-5),
    # As the real dtype of their parts: a complex product is four real ones.
    "complex128": Tolerance(relative=1e-13, each=1e-13),
    "complex64": Tolerance(relative=4e-6, each=2e-5),
    # Computed in float32 and rounded once: half a unit for that rounding, and float32's 4e-6 of the tensor, of which a
    # unit is at least 2^-11; an element a few times smaller than the largest has smaller units.
    "float16": Tolerance(ulps=0.55),
    # The same; a unit is at least 2^-8, so float32's error shows an eighth as much.
    "bfloat16": Tolerance(ulps=0.51),
}
