"""What generated modules begin with: the functions that Numba lacks."""

from arrayopt.codecs import BLOCK
from arrayopt.randomness import PARITY, ROTATIONS, ROUNDS
from arrayopt.state.quantized import TINY

__all__ = ["CODES", "DRAW", "HALF", "HEADER", "ROUND", "SPLIT"]

HEADER = '''"""Fused loops{about}

Arguments: `table`, a row of integers per tensor (the columns are named below: sizes, addresses,
offsets); `scalars`, a row of float64 per tensor; `values`, what is computed between passes, per
tensor; `work` and `part`, values over rows and columns, and partial sums. Columns IN_A_0 to IN_C_T
are the batches, rows and columns that are here, with their first units; OWN is where in `work` the
threads' own parts begin; FIRST and LAST are the units to run:
all, but where several processes share a tensor. Stage -1 puts the address of a gradient's
elements in the place of that of the NumPy array.

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
FAST = {{"contract", "reassoc", "nsz"}}
jit = nb.njit(error_model="numpy", nogil=True, fastmath=FAST)
OWN = {{"nogil": True, "no_cpython_wrapper": True, "no_cfunc_wrapper": True, "forceinline": True}}
inner = nb.njit(error_model="numpy", fastmath=FAST, **OWN)


@intrinsic
def pointer(typingctx, address):
    """An address as a pointer."""
    def codegen(context, builder, signature, args):
        return builder.inttoptr(args[0], context.get_value_type(types.voidptr))
    return types.voidptr(types.int64), codegen


@inner
def look(array):
    """Where the elements of a NumPy array lie; 0 if not in order, or not aligned."""
    # count, type, data, ndim, shape, strides, base, dtype, flags
    head = nb.carray(pointer(array), (9,), np.int64)
    return head[2] if head[8] & 0x101 == 0x101 else 0


@inner
def maximum(a, b):
    return a if (a > b) | (a != a) else b


@inner
def minimum(a, b):
    return a if (a < b) | (a != a) else b


@inner
def select(c, a, b):
    return a if c else b


@nb.njit(error_model="numpy", fastmath={{"contract"}}, **OWN)
def over(a, scale, reciprocal):
    """A division; in this order, for the product of the latter two may be infinite."""
    return a * scale * reciprocal


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
    return joined if math.isfinite(p) else p


@inner
def joined_float16(low, p):
    large = bits_to_float(np.uint32(np.int32(float_to_bits(p)) + np.int32(low) * np.int32(32)))
    joined = p + low * np.float32(2.0**-32) if abs(p) <= np.float32(2.0**-14) else large
    return joined if math.isfinite(p) else p


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


CODES = f"""
exact = nb.njit(error_model="numpy", fastmath=False, **OWN)  # else it is as of who calls
SINGLES, WHOLE = ir.VectorType(ir.FloatType(), {BLOCK}), ir.VectorType(ir.IntType(32), {BLOCK})


def place_of(context, builder, kind, array, block):
    # Where a block of an array lies, as a vector.
    data = context.make_array(kind)(context, builder, array).data
    first = builder.gep(data, [builder.mul(block, block.type({BLOCK}))])
    return builder.bitcast(first, ir.VectorType(context.get_data_type(kind.dtype), {BLOCK}).as_pointer())


def singles(context, builder, kind, array, block):
    # A block of numbers, in single precision.
    x = builder.load(place_of(context, builder, kind, array, block), align=kind.dtype.bitwidth // 8)
    return x if x.type == SINGLES else builder.fptrunc(x, SINGLES)


def each(builder, x):
    # A vector of the same number.
    none = ir.Constant(SINGLES, ir.Undefined)
    one = builder.insert_element(none, x, ir.IntType(32)(0))
    return builder.shuffle_vector(one, none, ir.Constant(WHOLE, [0] * {BLOCK}))


def made(builder, name, x, kind):
    # What a function of LLVM makes of a vector.
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(kind, [x.type]), name)
    return builder.call(function, [x])


@intrinsic
def widen_block(typingctx, codes, values, block, step):
    def codegen(context, builder, signature, args):
        x = builder.load(place_of(context, builder, codes, args[0], args[2]), align=1)
        x = builder.sext(x, WHOLE) if codes.dtype.signed else builder.zext(x, WHOLE)
        x = builder.fmul(builder.sitofp(x, SINGLES), each(builder, args[3]))
        to = place_of(context, builder, values, args[1], args[2])
        x = x if to.type.pointee == SINGLES else builder.fpext(x, to.type.pointee)
        builder.store(x, to, align=values.dtype.bitwidth // 8)
    return types.void(codes, values, types.int64, types.float32), codegen


@intrinsic
def largest_of(typingctx, values, block):
    def codegen(context, builder, signature, args):
        bits = builder.bitcast(singles(context, builder, values, *args), WHOLE)
        bits = builder.and_(bits, ir.Constant(WHOLE, [0x7FFFFFFF] * {BLOCK}))
        return made(builder, "llvm.vector.reduce.smax.v{BLOCK}i32", bits, WHOLE.element)
    return types.int32(values, types.int64), codegen


@intrinsic
def narrow_block(typingctx, values, codes, block, factor, top):
    def codegen(context, builder, signature, args):
        x = builder.fmul(singles(context, builder, values, args[0], args[2]), each(builder, args[3]))
        x, most = made(builder, "llvm.rint.v{BLOCK}f32", x, SINGLES), each(builder, args[4])
        x = builder.fptosi(builder.select(builder.fcmp_ordered("<", x, most), x, most), WHOLE)
        to = place_of(context, builder, codes, args[1], args[2])
        builder.store(builder.trunc(x, to.type.pointee), to, align=1)
    return types.void(values, codes, types.int64, types.float32, types.float32), codegen


@exact
def step_of(scale, top):
    step = load_bfloat16(scale) * (np.float32(1.0) / top)
    return step if math.isfinite(step) else np.float32(np.nan)


@exact
def scale_of(largest):
    stored = store_bfloat16(bits_to_float(np.uint32(largest)))
    return np.uint16(0) if load_bfloat16(stored) < np.float32({TINY!r}) else stored


@exact
def factor_of(scale, top):
    x = load_bfloat16(scale)
    return top / x if (x > 0) & math.isfinite(x) else np.float32(0.0)


@exact
def dequantize(codes, scales, values, top):
    blocks = values.size // {BLOCK}
    for block in range(blocks):
        widen_block(codes, values, block, step_of(scales[block], top))
    for i in range(blocks * {BLOCK}, values.size):
        values[i] = W(np.float32(codes[i]) * step_of(scales[blocks], top))


@exact
def quantize(codes, scales, values, top):
    blocks = values.size // {BLOCK}
    for block in range(blocks):
        scales[block] = scale_of(largest_of(values, block))
        factor = factor_of(scales[block], top)
        if factor > 0:
            narrow_block(values, codes, block, factor, top)
        else:
            codes[block * {BLOCK} : block * {BLOCK} + {BLOCK}] = 0
    if blocks < scales.size:
        largest = np.int32(0)
        for i in range(blocks * {BLOCK}, values.size):
            largest = max(largest, np.int32(float_to_bits(np.float32(values[i])) & np.uint32(0x7FFFFFFF)))
        scales[blocks] = scale_of(largest)
        factor = factor_of(scales[blocks], top)
        for i in range(blocks * {BLOCK}, values.size):
            x = np.rint(np.float32(values[i]) * factor)
            codes[i] = np.int32(x if x < top else top) if factor > 0 else np.int32(0)

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


@nb.njit(error_model="numpy", **OWN)
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
