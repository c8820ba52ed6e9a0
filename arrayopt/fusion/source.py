"""The generated code of a rule, as text."""

from arrayopt.rules.base import Rule

__all__ = ["source"]


def source(rule: Rule, *, engine: str = "numba", dtype: str = "float32", rank: int = 2) -> str:
    """The code that a fused engine runs for a rule; it needs neither parameters nor the engine's library.

    Parameters
    ----------
    rule : Rule
        The update rule.
    engine : str, default "numba"
        Which engine's code: ``"numba"``.
    dtype : str, default "float32"
        What parameters and gradients are stored in.
    rank : int, default 2
        The tensors' number of dimensions. It matters for rules that look at rows and columns, such as `CAME`.

    Returns
    -------
    str
        A self-contained Python module. Its docstring holds the plan: the passes, what each loads, stores and reduces,
        and the bytes per parameter.

    Raises
    ------
    TypeError
        If the rule does something that cannot be traced.
    ValueError
        If there is no such engine or dtype.

    Examples
    --------
    >>> import arrayopt as ao
    >>> print(ao.source(ao.SGD(lr=0.1)).splitlines()[0])
    \"""Fused loops: SGD(lr=0.1, momentum=0.0, dampening=0.0, weight_decay=0.0), float32, rank 2.
    """
    from arrayopt.arrays import WORKING
    from arrayopt.fusion.emit_numba import emit
    from arrayopt.fusion.plan import plan_for

    if engine != "numba":
        raise ValueError(f"source: `engine` must be 'numba'; got {engine!r}")
    if dtype not in WORKING:
        raise ValueError(f"source: `dtype` must be one of {', '.join(WORKING)}; got {dtype!r}")
    plan = plan_for(rule, rank, dtype)
    return emit(plan, dtype, about=f": {rule!r}, {dtype}, rank {rank}.\n\n{plan}")
