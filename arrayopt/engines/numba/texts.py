"""Parts of Numba's modules: lanes, blocks of 8-bit codes, and copies of matrices into planes."""

from arrayopt.codecs import BLOCK
from arrayopt.state.quantized import LEAST, TINY

TOTALS = '''
@intrinsic
def lanes(typingctx, first):
    """The partial results of a reduction: element i of a loop goes to number i % LANES."""
    made = types.CPointer(first)
    def codegen(context, builder, signature, args):
        with builder.goto_entry_block():
            room = builder.alloca(args[0].type, LANES)
            room.align = 64
        for i in range(LANES):
            builder.store(args[0], builder.gep(room, [ir.IntType(64)(i)]))
        return room
    return made(first), codegen


@intrinsic
def in_lanes(typingctx):
    """Keep LLVM from unrolling the loops before this, until it has made vectors of their lanes."""
    def codegen(context, builder, signature, args):
        module, blocks = builder.module, builder.function.blocks
        said = [["llvm.loop.unroll.disable"], ["llvm.loop.vectorize.followup_all"]]
        for i, block in enumerate(blocks):
            end = block.terminator
            if end is not None and end.opname == "br" and end.operands[0] in blocks[:i]:
                loop = module.add_metadata([str(id(end)), *map(module.add_metadata, said)])
                loop.operands = (loop, *loop.operands[1:])
                end.set_metadata("llvm.loop", loop)
        return context.get_dummy_value()
    return types.void(), codegen


@intrinsic
def sum_of(typingctx, lanes):
    """The sum of lanes, in vectors: loops take three times as long."""
    def codegen(context, builder, signature, args):
        kind = ir.VectorType(args[0].type.pointee, LANES)
        x, half = builder.load(builder.bitcast(args[0], kind.as_pointer())), LANES
        while half > 1:
            half //= 2
            whole = ir.VectorType(ir.IntType(32), half)
            parts = (ir.Constant(whole, [*range(i, i + half)]) for i in (0, half))
            x = builder.fadd(*(builder.shuffle_vector(x, x, part) for part in parts))
        return builder.extract_element(x, ir.IntType(32)(0))
    return lanes.dtype(lanes), codegen

'''
"""See `Printer.lanes`. LLVM would unroll a short loop over lanes, and then make no vectors."""

CODES = f"""
SINGLES, WHOLE = ir.VectorType(ir.FloatType(), {BLOCK}), ir.VectorType(ir.IntType(32), {BLOCK})


def place_of(context, builder, kind, array, block):
    # Where a block of an array lies, as a vector.
    data = context.make_array(kind)(context, builder, array).data
    first = builder.gep(data, [builder.mul(block, block.type({BLOCK}))])
    vector = ir.VectorType(context.get_data_type(kind.dtype), {BLOCK})
    return builder.bitcast(first, vector.as_pointer())


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
        x = singles(context, builder, values, args[0], args[2])
        x = builder.fmul(x, each(builder, args[3]))
        if not codes.dtype.signed:  # a root that is not zero has at least the code 1
            least, one = (ir.Constant(SINGLES, [x] * {BLOCK}) for x in ({LEAST!r}, 1.0))
            small = builder.fcmp_ordered("<", x, one)
            small = builder.and_(builder.fcmp_ordered(">", x, least), small)
            x = builder.select(small, one, x)
        x, most = made(builder, "llvm.rint.v{BLOCK}f32", x, SINGLES), each(builder, args[4])
        x = builder.fptosi(builder.select(builder.fcmp_ordered("<", x, most), x, most), WHOLE)
        to = place_of(context, builder, codes, args[1], args[2])
        builder.store(builder.trunc(x, to.type.pointee), to, align=1)
    return types.void(values, codes, types.int64, types.float32, types.float32), codegen


@inner
def step_of(scale, top):
    step = load_bfloat16(scale) * (np.float32(1.0) / top)
    return step if math.isfinite(step) else np.float32(np.nan)


@inner
def scale_of(largest):
    stored = store_bfloat16(bits_to_float(np.uint32(largest)))
    return np.uint16(0) if load_bfloat16(stored) < np.float32({TINY!r}) else stored


@inner
def factor_of(scale, top):
    x = load_bfloat16(scale)
    return top / x if (x > 0) & math.isfinite(x) else np.float32(0.0)


@inner
def dequantize(codes, scales, values, top):
    blocks = values.size // {BLOCK}
    for block in range(blocks):
        widen_block(codes, values, block, step_of(scales[block], top))
    for i in range(blocks * {BLOCK}, values.size):
        values[i] = W(np.float32(codes[i]) * step_of(scales[blocks], top))


@inner
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
            size = float_to_bits(np.float32(values[i])) & np.uint32(0x7FFFFFFF)
            largest = max(largest, np.int32(size))
        scales[blocks] = scale_of(largest)
        factor = factor_of(scales[blocks], top)
        for i in range(blocks * {BLOCK}, values.size):
            x = np.float32(values[i]) * factor
            if (top > 127) & (x > np.float32({LEAST!r})) & (x < 1):
                x = np.float32(1.0)
            x = np.rint(x)
            codes[i] = np.int32(x if x < top else top) if factor > 0 else np.int32(0)

"""

COPIES = """

@inner
def take_{kind}(source, planes, count):
    lanes = planes.size // count
    block = max(16, 4096 // count)
    for first in range(0, lanes, block):
        n = min(block, lanes - first)
        for j in range(count):
            x, y = source[first * count + j :], planes[j * lanes + first : j * lanes + first + n]
            for i in range(n):
                y[i] = {load}


@inner
def give_{kind}(target, planes, count):
    lanes = planes.size // count
    block = max(16, 4096 // count)
    for first in range(0, lanes, block):
        n = min(block, lanes - first)
        for j in range(count):
            x, y = target[first * count + j :], planes[j * lanes + first : j * lanes + first + n]
            for i in range(n):
                x[i * count] = {store}
"""
"""What is copied at a time stays in the first cache while planes take theirs."""
