"""From a plan to the columns of the table of tensors, and the hyper-parameters that a step sends.
`emit.py` prints them as names of CUDA, and `table.py` fills them in."""

from arrayopt.engines.table_batch import first_columns
from arrayopt.fusion.graph import CLIP, COUNT, KEY, UPDATES, reachable
from arrayopt.fusion.layout import GEOMETRY, Layout
from arrayopt.fusion.phases import GIVEN
from arrayopt.fusion.plan import Plan
from arrayopt.rules.names import VALUE

COLUMNS = (*GEOMETRY, "ALIGNED", "GROUP", "COUNT")
"""The first columns of each table; addresses and offsets follow."""

WINDOW_COLUMNS = (
    "A_FROM",
    "R_FROM",
    "C_FROM",
    "A_END",
    "R_END",
    "C_END",
    "STRIDE",
    "MATRIX",
    "BEFORE",
)
"""The last columns, only if the user divided matrices; see ``Tile`` in ``matrix.cuh``."""


def table_columns(plan: Plan, layout: Layout, *, windows: bool) -> list[str]:
    """All columns: `first_columns`, of random numbers, `given_names`, and `WINDOW_COLUMNS`."""
    found = first_columns(plan, layout, COLUMNS)
    if plan.draws:
        found += ["START", *(f"KEY{i}" for i in range(len(key_names(plan))))]
    found += [f"GIVEN{i}" for i in range(len(given_names(plan)))]
    return [*found, *WINDOW_COLUMNS] if windows else found


def _leaves(plan: Plan) -> list[str]:
    """The names of the inputs from which the scalars of a step are computed."""
    return [n.data for n in reachable(plan.scalars) if n.op == "host"]


def hyper_names(plan: Plan) -> list[str]:
    """The hyper-parameters on which the scalars depend, in the order of their columns."""
    others, own = (COUNT, KEY, *GIVEN), (UPDATES, CLIP, VALUE)
    return [x for x in _leaves(plan) if x not in own and not x.startswith(others)]


def key_names(plan: Plan) -> list[str]:
    """The halves of the keys of random numbers, in the order of their columns."""
    return [name for name in _leaves(plan) if name.startswith(KEY)]


def given_names(plan: Plan) -> list[str]:
    """The inputs that kernels read by address, in the order of the columns with the addresses."""
    return [name for name in _leaves(plan) if name == VALUE or name.startswith(GIVEN)]
