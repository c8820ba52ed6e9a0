"""Which line of a rule raised an error, and whether it would anywhere: for errors in words of who wrote the rule."""

import re
import traceback
from dataclasses import FrozenInstanceError
from inspect import unwrap
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

from arrayopt.rules.names import ReturnedError
from arrayopt.rules.ones import update_of_ones
from arrayopt.rules.totals import Heard

INSTEAD = {
    "zeros": "xp.zeros_like(p)",
    "ones": "xp.ones_like(p)",
    "full": "xp.full_like(p, value)",
    "empty": "xp.zeros_like(p)",
    "asarray": "the number itself, or a slot for an array",
    "prod": "xp.exp(xp.sum(xp.log(x))) for positive x",
    "var": "xp.mean(xp.square(x - xp.mean(x)))",
    "std": "xp.sqrt(xp.mean(xp.square(x - xp.mean(x))))",
    "count_nonzero": "xp.sum(xp.where(x != 0, 1.0, 0.0 * x))",
    "floor_divide": "xp.floor(x / y)",
    "logical_xor": "x != y",
    "norm": "xp.linalg.vector_norm(x)",
    "power": "x ** y",
    "einsum": "xp.sum(x * y), over an axis or all, and xp.matmul",
    "dot": "xp.sum(x * y), or xp.matmul of matrices",
}
"""What to write in place of functions that are not traced."""

_OPERATORS = {"//": "xp.floor(x / y)", "^": "x != y"}
"""What to write in place of operators that are not traced."""

_FROZEN = "<frozen "
_GENERATED = "<string>"
"""Where code lies that dataclasses have made."""

_LIBRARIES = (_FROZEN, *(str(Path(file).parents[1]) for file in (__file__, np.__file__, re.__file__)), "numpy/")
"""How the names of files begin whose functions nobody writes for a rule; those of Cython are relative."""


def own_fault(rule: Any, rank: int, error: Exception) -> Exception | None:
    """What to raise of an error that a rule raised when it was traced, if it raises the same untraced; else None."""
    try:
        update_of_ones(rule, rank, Heard({}, np.asarray))
    except Exception as same:
        if type(same) is not type(error) or str(same) != str(error):
            return None
        where = line_of(rule, error) or f"{type(rule).__name__}: "
        if isinstance(error, ValueError):  # which would be taken for one of an engine
            made = ReturnedError(f"{where}{error}")
            made.__cause__ = error
            return made
        if len(error.args) == 1:
            also = "; keep what changes from step to step in a slot" if isinstance(error, FrozenInstanceError) else ""
            error.args = (f"{where}{error.args[0]}{also}",)
        return error
    return None


def is_of_user(frame: FrameType | None) -> bool:
    """Whether who called something wrote a rule, and is no library; `isinstance` of an abstract class is a call too."""
    while frame is not None and frame.f_code.co_filename.startswith(_FROZEN):
        frame = frame.f_back
    return frame is not None and not frame.f_code.co_filename.startswith(_LIBRARIES)


def line_of(rule: Any, error: Exception) -> str:
    """Which line of the rule, or of a function that it calls, raised an error; it ends with a colon, or is empty."""
    codes = [getattr(unwrap(f), "__code__", None) for f in (rule.update, rule.slots, rule.project) if f is not None]
    own = {code.co_filename for code in codes if code is not None}
    found = None
    for frame in traceback.extract_tb(error.__traceback__):
        if frame.filename in own or (found and not frame.filename.startswith((_GENERATED, *_LIBRARIES))):
            found = frame
        elif found:
            break
    if found is None:
        return ""
    where = f"{type(rule).__name__}." if found.filename in own else ""
    code = f", `{found.line}`" if found.line else ""
    return f"{where}{found.name}, line {found.lineno}{code}: "


def in_words(said: str) -> str:
    """What Python says of symbols, as who wrote the rule knows them."""
    said = re.sub(r"'(Symbol|Extent)'", "a traced array", said)
    for sign, instead in _OPERATORS.items():
        said += f"; use {instead}" if f"operand type(s) for {sign}: " in said else ""
    named = r"\b[\w.<>]+\(\) (got an unexpected keyword)"
    return re.sub(named, r"a function of `xp` that is traced \1", said)
