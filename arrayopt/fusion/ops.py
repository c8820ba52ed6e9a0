"""The tables of operations and of reductions, with the form of each in every language.

Tracing, constant folding, evaluation on the host and the engines all read these tables. To add an
operation, add a row.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from string import Formatter
from typing import Any

import numpy as np

from arrayopt import randomness
from arrayopt.randomness import current_bfloat16, current_float16, position_uniform


@dataclass(frozen=True, slots=True)
class Op:
    """An element-wise operation.

    Texts are format strings: ``{0}``, ``{1}`` and ``{2}`` stand for the operands, ``{W}`` for the
    type of real numbers.
    """

    numpy: Callable[..., Any]
    """The function for NumPy's arrays and for numbers."""
    numba: str
    cplusplus: str
    """Its text in Numba, and in C++ for CPUs and CUDA, which has the functions of ``kernels/``."""
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
    cplusplus_complex: str = ""
    """Its text if an operand or the result is complex, if that text is different."""

    @property
    def arity(self) -> int:
        """The number of operands."""
        fields = {field for _, field, _, _ in Formatter().parse(self.cplusplus)}
        return len(fields.difference([None, "", "W"]))

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
        """The text in ``numba`` or ``cplusplus``. `mixed`: an operand or the result is complex."""
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
    struct: str
    """The struct for this reduction in ``kernels/sums.cuh``."""
    repeated: str = ""
    """The operation that reduces n equal values, given one and n; empty if it returns the value."""


def _abs2(x: Any, out: Any) -> None:
    np.multiply(x.real, x.real, out=out)
    out += x.imag * x.imag


def _where(cond: Any, yes: Any, no: Any, out: Any) -> None:
    """Choose by bits: `numpy.where` takes eight times as long if conditions are irregular."""
    whole = {"f4": np.int32, "f8": np.int64}.get(out.dtype.str[1:])
    if isinstance(cond, bool):
        np.copyto(out, yes if cond else no)
    elif whole is None or np.ndim(cond) == 0:
        np.copyto(out, np.where(cond, yes, no))
    else:
        first, second = (np.asarray(x, out.dtype).view(whole) for x in (yes, no))
        bits = np.bitwise_xor(first, second, out=out.view(whole))
        bits *= cond.view(np.int8)
        bits ^= second


def _over(a: Any, scale: Any, reciprocal: Any, out: Any) -> None:
    """Divide, by a scale and a reciprocal. The scale is almost always 1, and then left out."""
    unit = scale == 1.0
    if not (unit if isinstance(unit, bool | np.bool_) else unit.all()):
        a = np.multiply(a, scale, out=out)
    np.multiply(a, reciprocal, out=out)


def _complex(re: Any, im: Any, out: Any) -> None:
    out.real, out.imag = re, im


def _copy(x: Any, out: Any) -> None:
    np.copyto(out, x)


def _to_bfloat16(values: Any, out: Any = None) -> Any:
    """Round float32 numbers to bfloat16, ties to even, by their bits."""
    values = np.asarray(values, np.float32)
    bits = values.view(np.uint32)
    made = ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)
    made = np.where(np.isnan(values), values, made)
    return made if out is None else np.copyto(out, made)


def _on_float32(function: Callable[..., Any], cplusplus: str = "") -> Op:
    """A function of two float32 arrays, with the same name in all languages but perhaps CUDA."""

    def made(x: Any, y: Any) -> Any:
        return function(np, np.asarray(x, np.float32), np.asarray(y, np.float32))

    name, into = function.__name__, lambda x, y, out: np.copyto(out, made(x, y))
    call = f"{name}({{0}}, {{1}})"
    return Op(made, call, cplusplus or call, (name,), result="real", real_only=True, into=into)


def _binary(ufunc: np.ufunc, sign: str, api: str, method: str) -> Op:
    """An arithmetic operator with the same sign in all languages."""
    text = f"{{0}} {sign} {{1}}"
    return Op(ufunc, text, text, (api,), (f"__{method}__", f"__r{method}__"), python=text)


def _compared(ufunc: np.ufunc, sign: str, method: str) -> Op:
    """A comparison with the same sign in all languages."""
    text = f"{{0}} {sign} {{1}}"
    return Op(ufunc, text, text, (ufunc.__name__,), (f"__{method}__",), "bool", python=text)


def _function(ufunc: np.ufunc, *, real_only: bool = False) -> Op:
    """A function with the same name in the array API, in Python's `math` and in CUDA."""
    call = f"{ufunc.__name__}({', '.join(f'{{{i}}}' for i in range(ufunc.nin))})"
    return Op(ufunc, f"math.{call}", call, (ufunc.__name__,), real_only=real_only)


def _part(name: str, numba: str, cplusplus: str) -> Op:
    """The real or the imaginary part."""
    function, view = getattr(np, name), attrgetter(name)
    made = Op(function, numba, cplusplus, (name,), result="real", numba_complex=f"{{0}}.{name}")
    return replace(made, into=lambda x, out: view(x))


def _extreme(ufunc: np.ufunc) -> Op:
    """The smaller or larger of two values. NumPy takes the output array only by name here."""
    call = f"{ufunc.__name__}({{0}}, {{1}})"
    return Op(ufunc, call, call, (ufunc.__name__,), into=lambda a, b, out: ufunc(a, b, out=out))


def _whole(ufunc: np.ufunc) -> Op:
    """Rounding to a whole number. It is NumPy's, as Python's `math` returns an int."""
    call = f"{ufunc.__name__}({{0}})"
    return Op(ufunc, f"np.{call}", call, (ufunc.__name__,), real_only=True)


UNIFORM = "uniform({0}, {1}, {2}, {3}, {4}, {5}, {6})"

OPS = {
    "add": _binary(np.add, "+", "add", "add"),
    "sub": _binary(np.subtract, "-", "subtract", "sub"),
    "mul": _binary(np.multiply, "*", "multiply", "mul"),
    "div": _binary(np.divide, "/", "divide", "truediv"),
    "mod": Op(
        np.remainder, "{0} % {1}", "modulo({0}, {1})", ("remainder",), ("__mod__", "__rmod__")
    ),
    "pow": Op(np.power, "{0} ** {1}", "pow({0}, {1})", ("pow",), ("__pow__", "__rpow__")),
    "neg": Op(np.negative, "-{0}", "-{0}", ("negative",), ("__neg__",), python="-{0}"),
    "lt": _compared(np.less, "<", "lt"),
    "le": _compared(np.less_equal, "<=", "le"),
    "gt": _compared(np.greater, ">", "gt"),
    "ge": _compared(np.greater_equal, ">=", "ge"),
    "eq": _compared(np.equal, "==", "eq"),
    "ne": _compared(np.not_equal, "!=", "ne"),
    "and": Op(
        np.logical_and, "{0} & {1}", "{0} & {1}", ("logical_and",), ("__and__", "__rand__"), "bool"
    ),
    "or": Op(
        np.logical_or, "{0} | {1}", "{0} | {1}", ("logical_or",), ("__or__", "__ror__"), "bool"
    ),
    "not": Op(np.logical_not, "not {0}", "!{0}", ("logical_not",), ("__invert__",), "bool"),
    "where": Op(
        np.where,
        "select({0}, {1}, {2})",
        "{0} ? {1} : {2}",
        ("where",),
        result="branch",
        python="where({0}, {1}, {2})",
        into=_where,
        cplusplus_complex="{0} ? complex_of({1}) : complex_of({2})",
    ),
    "minimum": _extreme(np.minimum),
    "maximum": _extreme(np.maximum),
    "sqrt": _function(np.sqrt),
    "exp": _function(np.exp),
    "expm1": _function(np.expm1),
    "log": _function(np.log),
    "log1p": _function(np.log1p),
    "log2": _function(np.log2, real_only=True),
    "sin": _function(np.sin, real_only=True),
    "cos": _function(np.cos, real_only=True),
    "tanh": _function(np.tanh, real_only=True),
    "hypot": _function(np.hypot, real_only=True),
    "floor": _whole(np.floor),
    "ceil": _whole(np.ceil),
    "isnan": Op(
        np.isnan, "math.isnan({0})", "{0} != {0}", ("isnan",), result="bool", real_only=True
    ),
    "abs": Op(
        np.abs, "abs({0})", "magnitude({0})", ("abs",), ("__abs__",), "real", python="abs({0})"
    ),
    "sign": Op(np.sign, "sign({0})", "sign({0})", ("sign",)),
    "isfinite": Op(
        np.isfinite,
        "math.isfinite({0})",
        "finite({0})",
        ("isfinite",),
        result="bool",
        numba_complex="math.isfinite({0}.real) & math.isfinite({0}.imag)",
    ),
    "real": _part("real", "{0}", "real_part({0})"),
    "imag": _part("imag", "W(0.0)", "imaginary_part({0})"),
    "conj": Op(np.conjugate, "{0}", "conjugate({0})", ("conj",), numba_complex="{0}.conjugate()"),
    "abs2": Op(
        lambda x: x.real * x.real + x.imag * x.imag,
        "{0} * {0}",
        "square_magnitude({0})",
        result="real",
        into=_abs2,
        numba_complex="{0}.real * {0}.real + {0}.imag * {0}.imag",
    ),
    "complex": Op(
        lambda re, im: re + 1j * im,
        "complex({0}, {1})",
        "Complex{{{0}, {1}}}",
        result="complex",
        into=_complex,
    ),
    "float": Op(np.float64, "W({0})", "({W}){0}", python="{0} * 1.0", into=_copy),
    "copy": Op(np.array, "({0})", "({0})", python="{0}", into=_copy),
    "over": Op(
        lambda a, scale, reciprocal: a * scale * reciprocal,
        "{0} * {1} * {2}",
        "({0} * {1}) * {2}",
        python="{0} * {1} * {2}",
        into=_over,
    ),
    "bfloat16": Op(
        _to_bfloat16,
        "W(load_bfloat16(store_bfloat16(np.float32({0}))))",
        "to_bfloat16({0})",
        result="real",
        real_only=True,
        into=_to_bfloat16,
    ),
    "uniform": Op(position_uniform, UNIFORM, UNIFORM, result="real", into=position_uniform),
    "round_bfloat16": _on_float32(randomness.round_bfloat16),
    "round_float16": _on_float32(randomness.round_float16),
    "joined_bfloat16": _on_float32(randomness.joined_bfloat16),
    "joined_float16": _on_float32(randomness.joined_float16),
    "low_bfloat16": _on_float32(randomness.low_bfloat16),
    "low_float16": _on_float32(randomness.low_float16),
    "current_bfloat16": _on_float32(current_bfloat16, "(to_bfloat16({0}) == {1} ? {0} : {1})"),
    "current_float16": _on_float32(current_float16, "(to_float16({0}) == {1} ? {0} : {1})"),
}
"""Every operation, by its name in `Node.op`."""

REDUCTIONS = {
    "sum": Reduction(np.add, 0.0, "{0} += {1}", "Sum", repeated="mul"),
    "max": Reduction(np.maximum, -np.inf, "{0} = maximum({0}, {1})", "Max"),
    "min": Reduction(np.minimum, np.inf, "{0} = minimum({0}, {1})", "Min"),
}
"""Every reduction, by its name in `Node.op`."""
