"""Emitting Numba: products of matrices, for which machine code calls the BLAS that SciPy brings.

A unit of a product is a band of rows of one matrix, and one call, with one thread; so results do
not depend on the number of threads. Of a symmetric product the band ends at the diagonal, and what
is right of it is mirrored.
"""

from arrayopt.engines.numba.printer import Text

__all__ = ["header"]

TILE = 32
"""A band is mirrored in squares of so many rows and columns, which stay in cache."""

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


def header(m: Text) -> str:
    """What texts with products begin with, beside all others."""
    return PRODUCT.format(real=m.real, tile=TILE)
