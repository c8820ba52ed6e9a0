"""What generated modules begin with: the functions that Numba lacks."""

from arrayopt.randomness import PARITY, ROTATIONS, ROUNDS

HEADER = '''"""Fused loops{about}

Of a tensor, `t` is a row of integers (the columns are named below: sizes, addresses, offsets),
`scalars` one of float64, and `values` what is computed between passes; `work` and `part` are values
over rows and columns, and partial sums, of all tensors. Columns IN_A_0 to IN_C_T
are the batches, rows and columns that are here, with their first units; OWN is where in `work` the
threads' own parts begin; FIRST and LAST are the units to run: all, but where several processes
share a tensor.

All functions become part of `run`. Otherwise code that has just been compiled would call them as
they were compiled by themselves, and code that is read from disk as they were compiled within
`run`, which may round otherwise.
"""
import math

import numba as nb
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

W = np.{real}
LANES = {lanes}
jit = nb.njit(error_model="numpy", nogil=True)
no_wrappers = {{"no_cpython_wrapper": True, "no_cfunc_wrapper": True}}
inner = nb.njit(error_model="numpy", nogil=True, forceinline=True, **no_wrappers)


@intrinsic
def pointer(typingctx, address):
    """An address as a pointer."""
    def codegen(context, builder, signature, args):
        return builder.inttoptr(args[0], context.get_value_type(types.voidptr))
    return types.voidptr(types.int64), codegen


@intrinsic
def cell(typingctx, address, kind):
    """An address as that of one number of a dtype."""
    made = types.CPointer(kind.dtype)
    def codegen(context, builder, signature, args):
        return builder.inttoptr(args[0], context.get_value_type(made))
    return made(types.int64, kind), codegen


@inner
def maximum(a, b):
    return a if (a > b) | (a != a) else b


@inner
def minimum(a, b):
    return a if (a < b) | (a != a) else b


@intrinsic
def select(typingctx, c, a, b):
    """One of two values."""
    wide = typingctx.unify_types(a, b)
    def codegen(context, builder, signature, args):
        values = [context.cast(builder, *x, wide) for x in zip(args[1:], signature.args[1:])]
        return builder.select(args[0], *values)
    return wide(types.boolean, a, b), codegen


@intrinsic
def fused(typingctx, a, b, c):
    """a * b + c, rounded once if the processor can."""
    def codegen(context, builder, signature, args):
        kind = args[0].type
        kinds = ir.FunctionType(kind, [kind] * 3)
        return builder.call(builder.module.declare_intrinsic("llvm.fmuladd", [kind], kinds), args)
    return c(c, c, c), codegen


@inner
def sign(a):
    return W(a > 0) - W(a < 0) if a == a else a

'''

HALF = """
@intrinsic
def bits_to_float(typingctx, bits):
    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], ir.FloatType())
    return types.float32(types.uint32), codegen


@intrinsic
def float_to_bits(typingctx, x):
    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], ir.IntType(32))
    return types.uint32(types.float32), codegen


@intrinsic
def load_float16(typingctx, bits):
    def codegen(context, builder, signature, args):
        return builder.fpext(builder.bitcast(args[0], ir.HalfType()), ir.FloatType())
    return types.float32(types.uint16), codegen


@intrinsic
def store_float16(typingctx, x):
    def codegen(context, builder, signature, args):
        return builder.bitcast(builder.fptrunc(args[0], ir.HalfType()), ir.IntType(16))
    return types.uint16(types.float32), codegen


@inner
def load_bfloat16(b):
    return bits_to_float(np.uint32(b) << np.uint32(16))


@inner
def store_bfloat16(x):
    b = float_to_bits(x)
    rounded = (b + np.uint32(0x7FFF) + ((b >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.uint16(rounded) if x == x else np.uint16((b >> np.uint32(16)) | np.uint32(0x40))


@inner
def current_bfloat16(m, p):
    b = float_to_bits(p)  # as in arrayopt/randomness.py
    apart = abs(np.int32(float_to_bits(m) - b)) + np.int32((b >> np.uint32(16)) & np.uint32(1))
    return m if (np.uint32(apart) <= np.uint32(0x8000)) & (m == m) else p


@inner
def current_float16(m, p):
    return m if load_float16(store_float16(m)) == p else p

"""


SPLIT = """
@inner
def joined_bfloat16(low, p):
    joined = bits_to_float(np.uint32(np.int32(float_to_bits(p)) + np.int32(low) * np.int32(256)))
    return joined if math.isfinite(p) and p != 0 else p


@inner
def joined_float16(low, p):
    large = bits_to_float(np.uint32(np.int32(float_to_bits(p)) + np.int32(low) * np.int32(32)))
    joined = p + low * np.float32(2.0**-32) if abs(p) <= np.float32(2.0**-14) else large
    return joined if math.isfinite(p) and low != 0 else p


@inner
def low_bfloat16(master, p):
    rounded = load_bfloat16(store_bfloat16(p))
    apart = np.int32(float_to_bits(master)) - np.int32(float_to_bits(rounded))
    apart = np.int32(apart + np.int32(128)) >> np.int32(8)
    return np.float32(min(max(apart, -127), 127)) if math.isfinite(rounded) else np.float32(0.0)


@inner
def low_float16(master, p):
    rounded = load_float16(store_float16(p))
    apart = np.int32(float_to_bits(master)) - np.int32(float_to_bits(rounded))
    apart = np.int32(apart + np.int32(16)) >> np.int32(5)
    near = np.rint((master - rounded) * np.float32(2.0**32))
    low = near if abs(rounded) <= np.float32(2.0**-14) else np.float32(apart)
    if not math.isfinite(rounded):
        return np.float32(0.0)
    return min(max(low, np.float32(-127.0)), np.float32(127.0))

"""


DRAW = f"""
@intrinsic
def threefry(typingctx, x, y, k0, k1):
    def codegen(context, builder, signature, args):
        x, y, *keys = args
        word = x.type
        keys.append(builder.xor(builder.xor(*keys), word({PARITY})))
        x, y = builder.add(x, keys[0]), builder.add(y, keys[1])
        for i in range({ROUNDS}):
            turn = {ROTATIONS}[i % {len(ROTATIONS)}]
            x = builder.add(x, y)
            y = builder.or_(builder.shl(y, word(turn)), builder.lshr(y, word(32 - turn)))
            y = builder.xor(y, x)
            if i % 4 == 3:
                n = i // 4 + 1
                x = builder.add(x, keys[n % 3])
                y = builder.add(y, builder.add(keys[(n + 1) % 3], word(n)))
        return x
    return types.uint32(*[types.uint32] * 4), codegen


@inner
def joined(high, low):
    return np.uint32(np.int32(high)) << np.uint32(16) | np.uint32(np.int32(low))


@inner
def uniform(position, a, b, c, d, t1, t0):
    key = np.uint32(joined(a, b) + np.uint32(position >> 32))
    bits = threefry(np.uint32(position), np.uint32(joined(t1, t0)), key, np.uint32(joined(c, d)))
    return W(np.int32(bits >> np.uint32(8))) * W(2.0**-24)

"""

ROUND = """
@inner
def round_bfloat16(x, u):
    b = float_to_bits(x)
    rounded = (b + np.uint32(np.int32(u * np.float32(65536.0)))) & np.uint32(0xFFFF0000)
    return bits_to_float(np.uint32(rounded)) if math.isfinite(x) else x


@inner
def round_float16(x, u):
    b, size = float_to_bits(x), abs(x)
    steps = size * np.float32(2.0**24)
    whole = np.floor(steps)
    whole += np.float32(u < steps - whole)
    small = float_to_bits(whole * np.float32(2.0**-24)) | (b & np.uint32(0x80000000))
    large = (b + np.uint32(np.int32(u * np.float32(8192.0)))) & np.uint32(0xFFFFE000)
    rounded = bits_to_float(np.uint32(small if size < np.float32(2.0**-14) else large))
    return rounded if math.isfinite(x) else x

"""

TILE = 32
"""The side of squares in which a band of a symmetric product is mirrored, within the cache."""

PRODUCT = '''
SIZE = np.dtype(W).itemsize


@intrinsic
def gemm(typingctx, address, ta, tb, m, n, k, a, lda, b, ldb, c, ldc):
    """C = op(A) op(B) by BLAS, column by column; arrays are addresses, flags say transposed."""
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
        given = [letter(ta), letter(tb), number(m), number(n), number(k), there(kind(1.0))]
        given += [array(a), number(lda), array(b), number(ldb), there(kind(0.0))]
        given += [array(c), number(ldc)]
        function = ir.FunctionType(ir.VoidType(), [x.type for x in given])
        builder.call(builder.inttoptr(address, function.as_pointer()), given)
        return context.get_dummy_value()
    return types.void(*[types.int64] * 12), codegen


@inner
def multiply(blas, a, b, c, i0, i1, i, j, k, ta, tb, symmetric):
    """Rows i0 to i1 of the product of i x k and k x j values, row by row; BLAS has columns."""
    end = i1 if symmetric else j
    a += (i0 if ta else i0 * k) * SIZE
    out = c + i0 * j * SIZE
    gemm(blas, tb, ta, end, i1 - i0, k, b, k if tb else j, a, i if ta else k, out, j)
    if symmetric and i0 > 0:
        x = nb.carray(pointer(c), (i * j,), np.{real})
        for c0 in range(0, i0, {tile}):
            for r0 in range(i0, i1, {tile}):
                for col in range(c0, min(c0 + {tile}, i0)):
                    for r in range(r0, min(r0 + {tile}, i1)):
                        x[col * j + r] = x[r * j + col]

'''
"""Products of matrices, for which machine code calls the BLAS that SciPy brings.

A unit of a product is a band of rows of one matrix, and one call, with one thread; so results do
not depend on the number of threads. Of a symmetric product the band ends at the diagonal, and what
is right of it is mirrored.
"""
