"""Emitting Numba: products of matrices, for which machine code calls the BLAS that SciPy brings.

A unit of a product is a band of rows of one matrix, and one call, with one thread; so results do not depend on the
number of threads. Of a symmetric product the band ends at the diagonal, and what is right of it is mirrored.
"""

import re
from functools import cache
from importlib.util import find_spec

from arrayopt.engines.blas import BANDS, controlled, look_again
from arrayopt.engines.numba.text import REST, Text
from arrayopt.fusion.layout import CHUNK
from arrayopt.fusion.stages import Sweep

__all__ = ["BLAS", "PRODUCT", "blas_address", "emit_product", "emit_square", "header", "lacking", "shared"]

BLAS = "BLAS"
"""The column of the table that has the address of BLAS's `gemm`."""

TILE = 32
"""A band is mirrored in squares of so many rows and columns, which stay in cache."""

PRODUCT = '''
SIZE = np.dtype(W).itemsize


@intrinsic
def gemm(typingctx, address, ta, tb, m, n, k, a, lda, b, ldb, c, ldc):
    """C = op(A) op(B) by BLAS, column by column; arrays are addresses, what is not 0 is transposed."""
    def codegen(context, builder, signature, args):
        kind = context.get_value_type(types.{real})
        byte, whole = ir.IntType(8), ir.IntType(32)

        def there(x):
            with builder.goto_entry_block():
                room = builder.alloca(x.type)
            builder.store(x, room)
            return room

        def letter(x):
            turned = builder.icmp_signed("!=", x, x.type(0))
            return there(builder.select(turned, byte(ord("T")), byte(ord("N"))))

        def number(x):
            return there(builder.trunc(x, whole))

        def array(x):
            return builder.inttoptr(x, kind.as_pointer())

        address, ta, tb, m, n, k, a, lda, b, ldb, c, ldc = args
        given = [letter(ta), letter(tb), number(m), number(n), number(k), there(kind(1.0)), array(a), number(lda)]
        given += [array(b), number(ldb), there(kind(0.0)), array(c), number(ldc)]
        function = ir.FunctionType(ir.VoidType(), [x.type for x in given])
        builder.call(builder.inttoptr(address, function.as_pointer()), given)
        return context.get_dummy_value()
    return types.void(*[types.int64] * 12), codegen


@inner
def multiply(blas, a, b, c, i0, i1, i, j, k, ta, tb, symmetric):
    """Rows i0 to i1 of the product of i x k and k x j values, which lie row by row; see BLAS, which has columns."""
    end = i1 if symmetric else j
    gemm(blas, tb, ta, end, i1 - i0, k, b, k if tb else j, a + (i0 if ta else i0 * k) * SIZE, i if ta else k,
         c + i0 * j * SIZE, j)
    if symmetric and i0 > 0:
        x = nb.carray(pointer(c), (i * j,), np.{real})
        for c0 in range(0, i0, {tile}):
            for r0 in range(i0, i1, {tile}):
                for col in range(c0, min(c0 + {tile}, i0)):
                    for r in range(r0, min(r0 + {tile}, i1)):
                        x[col * j + r] = x[r * j + col]

'''


def header(m: Text) -> str:
    """What texts with products begin with, beside all others."""
    return PRODUCT.format(real=m.real, tile=TILE)


def shared(m: Text, k: int, p: Sweep, begin: int, seen: dict[str, int]) -> str:
    """The call of pass k, written from line `begin` on; of an earlier one where only names differ, which is compiled.

    So that it may be called for others, it is told in which columns the addresses of scratch arrays are.
    """
    columns = "".join(f", AT_{x}" for x in p.arrays if x in m.plan.spilled)
    last = max(i for i, line in enumerate(m.lines) if line.startswith(f"def units_{k}("))
    m.lines[last] = m.lines[last].replace("):", f"{columns}):")
    units = m.lines[last].partition("(")[2].partition(f", {REST}")[0]
    names: dict[str, str] = {}

    def named(found: "re.Match[str]") -> str:
        return (found[1] or "") + names.setdefault(found[2], f"name{len(names)}")

    text = re.sub(r"\b(at_|AT_)?(spill\d+|[xsvy]\d+|(?:pass|units)_\d+)\b", named, "\n".join(m.lines[begin:]))
    if seen.setdefault(text, k) != k:
        del m.lines[begin:]
    return f"units_{seen[text]}({units}, {REST}{columns})"


def emit_product(m: Text, k: int, p: Sweep) -> None:
    """Product k: this thread's share of the bands, from outside in: of a symmetric product the last take longest."""
    (n,), names = p.nodes, list(p.loads)
    ta, tb, symmetric, _ = n.data
    a, b = names[0], names[-1]
    rows, columns = (x.upper() for x in p.axes[-2:])
    left = n.args[0].axes[-2:].upper()
    between = left[0] if ta else left[1]
    sizes = [" * ".join(x.axes[-2:].upper()) for x in (n.args[0], n.args[1], n)]
    m.put(0, "", "", "@inner", f"def units_{k}(row, thread, threads, {REST}):")
    m.put(1, "A, B, R, C = table[row, IN_A], table[row, IN_B], table[row, IN_R], table[row, IN_C]")
    m.put(1, f"high = min(max({rows} // 4, {BANDS[0]}), {BANDS[1]})")
    m.put(1, f"bands = ({rows} + high - 1) // high", "total = A * B * bands")
    m.put(1, "for unit in range(total * thread // threads, total * (thread + 1) // threads):")
    m.put(2, "ab, band = unit // bands, unit % bands")
    m.put(2, "band = band // 2 if band % 2 == 0 else bands - 1 - band // 2")
    at = [f"table[row, AT_{x}] + ab * {size} * SIZE" for x, size in zip((a, b, *p.stores), sizes, strict=True)]
    m.put(2, "i0 = band * high", f"i1 = min({rows}, i0 + high)")
    flags = ", ".join(str(int(x)) for x in (ta, tb, symmetric))
    m.put(2, f"multiply(table[row, {BLAS}], {', '.join(at)}, i0, i1, {rows}, {columns}, {between}, {flags})")


def emit_square(m: Text, k: int, p: Sweep) -> None:
    """Pass k over the elements of products of matrices with their own transposes: this thread's share of them."""
    side = p.axes[-1].upper()
    m.put(0, "", "", "@inner", f"def units_{k}(row, thread, threads, {REST}):")
    m.put(1, "A, B, R, C = table[row, IN_A], table[row, IN_B], table[row, IN_R], table[row, IN_C]")
    m.put(1, f"size = {side} * {side}", f"units = (size + {CHUNK - 1}) // {CHUNK}", "total = A * B * units")
    for name in p.arrays:
        m.array(1, name, "A * B * size")
    for name, n in {n.data: n for n in p.using("batch", "tensor") if n.op == "input"}.items():
        m.array(1, name, " * ".join(n.axes) or "1")
    for n in p.using("host"):
        m.put(1, f"h{m.scalar[n]} = W(scalars[row, {m.scalar[n]}])")
    m.put(1, *(f"{m.name(n)} = {m.typed(n, m.value(n))}" for n in p.using("tensor")))
    m.put(1, "for unit in range(total * thread // threads, total * (thread + 1) // threads):")
    m.put(2, "ab = unit // units", "a, b = ab // B, ab % B")
    m.put(2, *(f"{m.name(n)} = {m.typed(n, m.value(n))}" for n in p.using("batch")))
    m.put(2, f"o = ab * size + unit % units * {CHUNK}", f"e = min((ab + 1) * size, o + {CHUNK})")
    scalars = [m.bare(n) for n in p.using("host", "tensor", "batch")]
    m.put(2, f"pass_{k}({', '.join([*(f'at_{x}[o:e]' for x in p.arrays), *scalars])})")


def lacking() -> str:
    """What is not installed that products need, in words; empty where all is."""
    missing = [name for name, there in (("SciPy", find_spec("scipy")), ("threadpoolctl", controlled())) if not there]
    return " and ".join(missing)


@cache
def blas_address(real: str) -> int:
    """Where `gemm` of a dtype lies in this process.

    Raises
    ------
    ValueError
        If SciPy's function is of another form than is known.
    """
    from numba.extending import get_cython_function_address
    from scipy.linalg import cython_blas

    look_again()
    name = {"float32": "sgemm", "float64": "dgemm"}[real]
    if str(cython_blas.__pyx_capi__[name]).count(", int *") != 6:
        raise ValueError("SciPy's BLAS has integers of another size than 32 bits")
    return int(get_cython_function_address("scipy.linalg.cython_blas", name))
