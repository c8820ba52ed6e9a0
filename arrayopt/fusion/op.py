"""The types of rows in the tables of operations and reductions (`arrayopt.fusion.ops`)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from string import Formatter
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class Op:
    """An element-wise operation.

    Texts are format strings: ``{0}``, ``{1}`` and ``{2}`` stand for the operands, ``{W}`` for the
    type of real numbers.
    """

    numpy: Callable[..., Any]
    """The function for NumPy's arrays and for numbers."""
    numba: str
    cuda: str
    """Its text in Numba, and in CUDA C++."""
    api: tuple[str, ...] = ()
    """The names of functions of the array API that record this operation."""
    methods: tuple[str, ...] = ()
    """The methods of Python's operators that record it. Those with ``__r`` swap the operands."""
    result: str = "same"
    """The kind of the result: ``bool``, ``real`` or ``complex``. ``same`` is complex if an operand
    is, else real; ``branch`` is that of the operands after the first.
    """
    real_only: bool = False
    """Whether complex operands are refused."""
    python: str = ""
    """Its text in Python, for floats and arrays of floats; if empty, NumPy's function is called."""
    into: Callable[..., Any] | None = None
    """`numpy` with the output array as one more argument; None if `numpy` itself takes it."""
    numba_complex: str = ""
    cuda_complex: str = ""
    """Its text if an operand or the result is complex, if that text is different."""

    @property
    def arity(self) -> int:
        """The number of operands."""
        return len(
            {field for _, field, _, _ in Formatter().parse(self.cuda) if field and field != "W"}
        )

    def kind(self, operands: Sequence[str]) -> str:
        """The kind of the result for kinds of operands: ``bool``, ``real`` or ``complex``."""
        if self.result not in ("same", "branch"):
            return self.result
        if self.result == "branch" and set(operands[1:]) == {"bool"}:
            return "bool"
        return "complex" if "complex" in operands else "real"

    @property
    def in_place(self) -> bool:
        """Whether a result may overwrite an operand: each element is read before it is written."""
        return isinstance(self.numpy, np.ufunc)

    def text(self, language: str, args: Sequence[str], real: str, *, mixed: bool) -> str:
        """The text in ``numba`` or ``cuda``. `mixed`: an operand or the result is complex."""
        form: str = (mixed and getattr(self, f"{language}_complex")) or getattr(self, language)
        return form.format(*args, W=real)


@dataclass(frozen=True, slots=True)
class Reduction:
    """A reduction: how many values become one."""

    ufunc: np.ufunc
    """The function of two values."""
    initial: float
    """The result before the first value."""
    take: str
    """The statement that combines the result so far, ``{0}``, with a value, ``{1}``."""
    cuda: str
    """The struct for this reduction in ``kernels/sums.cuh``."""
    repeated: str = ""
    """The operation that reduces n equal values, given one and n; empty if it returns the value."""
