"""`ao.source`: the generated code of a rule, as text."""

from arrayopt.arrays import WORKING
from arrayopt.codecs import PAIR
from arrayopt.engines.registry import ENGINES
from arrayopt.fusion.plans import plan_for, widened
from arrayopt.hyper import whole
from arrayopt.rules.base import Rule
from arrayopt.rules.named import check_rule

MOST_DIMENSIONS = 64
"""The largest number of dimensions of a NumPy array."""


def source(rule: Rule, *, engine: str = "numba", dtype: str = "float32", rank: int = 2) -> str:
    """Return the code that a fused engine runs for a rule.

    It needs neither parameters nor the engine's library.

    Parameters
    ----------
    rule : Rule
        The update rule.
    engine : str, default "numba"
        The engine: ``"numba"``, ``"cpp"`` or ``"cupy"``.
    dtype : str, default "float32"
        The dtype of parameters and gradients.
    rank : int, default 2
        The tensors' number of dimensions, in [0, 64]. It matters for rules with rows and columns,
        such as `CAME`.

    Returns
    -------
    str
        A self-contained Python module, or a C++ or CUDA C++ source. It begins with the plan: the
        passes, what each loads, stores and reduces, and the bytes per parameter. For a rule with
        totals, it has one part for each phase.

    Raises
    ------
    TypeError
        If `rule` is not a rule, or cannot be traced, or `rank` is not an integer.
    ValueError
        If there is no such engine, dtype or rank.

    Examples
    --------
    >>> import arrayopt as ao
    >>> print(ao.source(ao.SGD(lr=0.1)).splitlines()[0])
    \"""Fused loops: SGD(lr=0.1, momentum=0.0, dampening=0.0, weight_decay=0.0), float32, rank 2.
    """
    check_rule("source", rule, Rule)
    for name, value, known in (
        ("engine", engine, [name for name, row in ENGINES.items() if row.emits]),
        ("dtype", dtype, WORKING),
    ):
        if not isinstance(value, str) or value not in known:
            raise ValueError(
                f"source: `{name}` must be one of {', '.join(map(repr, known))}; got {value!r}"
            )
    rank = whole("source: `rank`", rank, last=MOST_DIMENSIONS)
    plan = plan_for(rule, rank, dtype, lean=ENGINES[engine].lean)
    if PAIR in plan.storage.values():  # engines decode such slots before the step
        plan = widened(plan)
    emit, texts = ENGINES[engine].emitter(), list[str]()
    for phase in plan.phases or (plan,):
        texts.append(emit(phase, dtype, about=f": {rule!r}, {dtype}, rank {rank}.\n\n{phase}"))
    return "\n".join(texts)
