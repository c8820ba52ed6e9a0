"""What a row of the table of operations says, and one of the table of reductions."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from string import Formatter
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class Op:
    """An element-wise operation.

    Texts are formats: ``{0}``, ``{1}`` and ``{2}`` are the operands' names, ``{W}`` is the type of
    real numbers.
    """

    numpy: Callable[..., Any]
    """What it is on NumPy's arrays and on numbers."""
    numba: str
    cuda: str
    """What it is in Numba, and in CUDA C++."""
    api: tuple[str, ...] = ()
    """Functions of the array API that are this operation."""
    methods: tuple[str, ...] = ()
    """Methods of Python's operators that are it; those with ``__r`` have their operands swapped."""
    result: str = "same"
    """What comes out: ``bool``, ``real``, ``complex``, or ``same``, which is complex where an
    operand is. ``branch``: what the operands after the first are.
    """
    real_only: bool = False
    """Whether complex operands are refused."""
    python: str = ""
    """What it is in Python, for floats and arrays of them; NumPy's function where it is empty."""
    into: Callable[..., Any] | None = None
    """As `numpy`, with where to write as one more argument; None if `numpy` takes that itself."""
    numba_complex: str = ""
    cuda_complex: str = ""
    """What it is where an operand or the result is complex, if that is something else."""

    @property
    def arity(self) -> int:
        """How many operands it takes."""
        return len(
            {field for _, field, _, _ in Formatter().parse(self.cuda) if field and field != "W"}
        )

    def kind(self, operands: Sequence[str]) -> str:
        """What comes out of operands that are each ``bool``, ``real`` or ``complex``."""
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
        """Its text in ``numba`` or ``cuda``; `mixed`: complex numbers take part."""
        form: str = (mixed and getattr(self, f"{language}_complex")) or getattr(self, language)
        return form.format(*args, W=real)


@dataclass(frozen=True, slots=True)
class Reduction:
    """What makes one value of many."""

    ufunc: np.ufunc
    """What two values become."""
    initial: float
    """What is kept before the first value."""
    take: str
    """The statement that takes a value ``{1}`` into what is kept, ``{0}``, in Numba and in CUDA."""
    simd: str
    """How OpenMP combines what the lanes of a loop have kept: an operator, or a name that
    ``kernels/loops.h`` declares.
    """
    cuda: str
    """The type of ``kernels/sums.cuh`` that says all of it."""
    repeated: str = ""
    """The operation that makes the reduction of n equal values from the value and n; empty if it is
    the value itself.
    """
