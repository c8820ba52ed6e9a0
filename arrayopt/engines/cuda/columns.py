"""The columns of the table that kernels work through, and what is sent to them for each step."""

from arrayopt.engines.columns import first_columns
from arrayopt.fusion.graph import CLIP, COUNT, KEY, UPDATES, reachable
from arrayopt.fusion.layout import GEOMETRY, Layout
from arrayopt.fusion.phases import GIVEN
from arrayopt.fusion.plan import Plan
from arrayopt.rules.names import VALUE

COLUMNS = (*GEOMETRY, "ALIGNED", "GROUP", "COUNT")
"""What a tensor's row of the table begins with; addresses and offsets follow."""

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
"""What it ends with where matrices are cut: see ``Tile`` in ``matrix.cuh``."""


def table_columns(plan: Plan, layout: Layout, *, windows: bool) -> list[str]:
    """`first_columns`, position and keys of random numbers, `GIVEN`s, and `WINDOW_COLUMNS`."""
    found = first_columns(plan, layout, COLUMNS)
    if plan.draws:
        found += ["START", *(f"KEY{i}" for i in range(len(key_names(plan))))]
    found += [f"GIVEN{i}" for i in range(len(given_names(plan)))]
    return [*found, *WINDOW_COLUMNS] if windows else found


def _leaves(plan: Plan) -> list[str]:
    """What the scalars of a step are computed from."""
    return [n.data for n in reachable(plan.scalars) if n.op == "host"]


def hyper_names(plan: Plan) -> list[str]:
    """The hyper-parameters that the scalars depend on, in the order of their table."""
    others, own = (COUNT, KEY, *GIVEN), (UPDATES, CLIP, VALUE)
    return [x for x in _leaves(plan) if x not in own and not x.startswith(others)]


def key_names(plan: Plan) -> list[str]:
    """The halves of keys of random numbers, in the order of their columns."""
    return [name for name in _leaves(plan) if name.startswith(KEY)]


def given_names(plan: Plan) -> list[str]:
    """The scalars that each tensor has elsewhere, in the order of the columns that say where."""
    return [name for name in _leaves(plan) if name == VALUE or name.startswith(GIVEN)]
