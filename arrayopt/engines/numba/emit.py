"""Emitting Numba: a plan as the text of a Python module of fused loops.

For each pass k there is `pass_k`, the loop over a stretch of elements, and `units_k`, which runs it over units of one
tensor; for what comes before it `between_k`. `run` does stages of a list of tensors, one tensor after the other: stage
2k is `between_k`, stage 2k + 1 one thread's share of pass k.
"""

from collections.abc import Iterable

from arrayopt.codecs import CODECS
from arrayopt.engines.numba.between import between
from arrayopt.engines.numba.lanes import emit_lanes
from arrayopt.engines.numba.products import emit_product, emit_square, header, shared
from arrayopt.engines.numba.text import DRAW, HALF, HEADER, REST, ROUND, UNITS, Text
from arrayopt.fusion.lanes import Lanes
from arrayopt.fusion.layout import layout
from arrayopt.fusion.plan import Plan
from arrayopt.fusion.stages import KINDS, Sweep
from arrayopt.fusion.windows import WINDOW

__all__ = ["emit"]


def emit(
    plan: Plan,
    dtype: str,
    grad_dtype: str | None = None,
    *,
    split: Lanes | None = None,
    about: str = ".",
) -> str:
    """The text of a module that runs a plan.

    Parameters
    ----------
    plan : Plan
        The plan.
    dtype, grad_dtype : str
        What parameters and gradients are stored in.
    split : Lanes, optional
        The plan in segments, for matrices that are laid side by side.
    about : str
        What to say in the first line.
    """
    plan.check_wide()
    m = Text(plan, dtype, grad_dtype or dtype, split.where if split else layout(plan))
    m.put(0, *HEADER.format(about=about, real=m.real).splitlines())
    if any(CODECS[kind].numba for kind in m.storage.values()):
        m.put(0, *HALF.splitlines())
    if plan.draws:
        m.put(0, *DRAW.splitlines(), *(ROUND.splitlines() if CODECS[dtype].rounds else ()))
    if plan.multiplies:
        m.put(0, *header(m).splitlines())
    m.put(0, f"{', '.join(m.columns)} = range({len(m.columns)})")
    if split:
        count = emit_lanes(m, split)
        calls = [f"units_{k}({UNITS}, {REST})" for k in range(count)]
    else:
        count, calls, seen = len(m.form.passes), list[str](), dict[str, int]()
        for k, p in enumerate(m.form.passes):
            begin = len(m.lines)
            if p.multiplies:
                emit_product(m, k, p)
            else:
                _loop(m, k, p)
                (_units if p.axes == plan.element else emit_square)(m, k, p)
            calls.append(shared(m, k, p, begin, seen) if plan.multiplies else f"units_{k}({UNITS}, {REST})")
        for k, b in enumerate(m.form.between):
            if b:
                between(m, k, b)
    _entry(m, calls, [k for k in range(count + 1) if split or m.form.between[k]])
    return m.text()


def _scalar_names(m: Text, p: Sweep) -> list[str]:
    """What a loop takes that does not vary in it."""
    names = [m.bare(n) for kind in ("host", "tensor", "row", "batch") for n in p.using(kind)]
    return [*names, *(["start"] if p.draws else [])]


def _loop(m: Text, k: int, p: Sweep) -> None:
    """The loop over a stretch of elements: loads, operations, stores, sums."""
    arrays, columns = p.arrays, [f"v{n.id}" for n in p.using("column")]
    column_sums, scalar_sums = p.reducing("column"), p.reducing("tensor", "row", "batch")
    scalars = _scalar_names(m, p)
    args = [*(f"at_{x}" for x in arrays), *columns, *(f"s{s.id}" for s in column_sums), *scalars]
    m.put(0, "", "", "@inner", f"def pass_{k}({', '.join(args)}):")
    m.put(1, *(f"s{s.id} = W({m.start(s)})" for s in scalar_sums), f"for i in range(at_{arrays[0]}.size):")
    for name, node in p.loads.items():
        m.put(2, f"{m.name(node)} = {m.load(m.storage[name], f'at_{name}[i]')}")
    m.put(2, *(f"{m.name(n)} = {m.typed(n, f'v{n.id}[i]')}" for n in p.using("column")))
    m.put(2, *(f"{m.name(n)} = {m.expression(n)}" for n in p.nodes))
    m.put(2, *(f"at_{name}[i] = {m.store(m.storage[name], m.name(n))}" for name, n in p.stores.items()))
    m.put(2, *(m.take(s, f"s{s.id}", m.name(s.args[0])) for s in scalar_sums))
    m.put(2, *(m.take(s, f"s{s.id}[i]", m.name(s.args[0])) for s in column_sums))
    m.put(1, f"return ({''.join(f's{s.id}, ' for s in scalar_sums)})" if scalar_sums else "return")


def _units(m: Text, k: int, p: Sweep) -> None:
    """Pass k over units lo to hi of one tensor."""
    m.put(0, "", "", "@inner", f"def units_{k}(row, lo, hi, thread, table, scalars, values, work, part):")
    m.put(1, "size, TC = table[row, IN_SIZE], table[row, IN_TC]")
    if m.plan.element != "C":
        m.put(1, "A, B, R, C = table[row, IN_A], table[row, IN_B], table[row, IN_R], table[row, IN_C]")
    for name in p.arrays:
        m.array(1, name, "size")
    inputs = {n.data: n for kind in KINDS for n in p.using(kind) if n.op == "input"}
    for name, n in inputs.items():
        m.array(1, name, " * ".join(n.axes) or "1")
    for n in p.using("host"):
        m.put(1, f"h{m.scalar[n]} = W(scalars[row, {m.scalar[n]}])")
    m.put(1, *(f"{m.name(n)} = {m.typed(n, m.value(n))}" for n in p.using("tensor")))
    # every other pass runs backwards, so that it begins with what the one before has left in the cache
    forwards = k % 2 == 0 or m.plan.multiplies  # in turns it would be one loop more to compile
    if m.plan.element != "C":
        m.put(1, *(f"{x} = table[row, IN_{x}]" for x in WINDOW))
        m.put(1, "TR, G = table[row, IN_TR], table[row, IN_G]", "NR, NC = table[row, IN_NR], table[row, IN_NC]")
        m.put(1, "MR, MC = (R_1 - R_0 + TR - 1) // TR, (C_1 - C_0 + TC - 1) // TC")
    m.put(1, "for unit in range(lo, hi):" if forwards else "for unit in range(hi - 1, lo - 1, -1):")
    (_stretch if m.plan.element == "C" else _tile)(m, k, p)


def _start(p: Sweep, at: str = "o") -> list[str]:
    """The position in the whole tensor of the first element of a stretch, where random numbers are drawn."""
    return [f"start = table[row, START] + {at}"] if p.draws else []


def _stretch(m: Text, k: int, p: Sweep) -> None:
    """A unit of a tensor that is seen as one row of elements."""
    m.put(2, "o = unit * TC", "e = min(size, o + TC)", *_start(p))
    args = ", ".join([*(f"at_{x}[o:e]" for x in p.arrays), *_scalar_names(m, p)])
    m.put(2, f"{'got = ' if p.reductions else ''}pass_{k}({args})")
    m.put(2, *(f"part[table[row, PART{m.partial[s]}] + unit] = got[{i}]" for i, s in enumerate(p.reductions)))


def _tile(m: Text, k: int, p: Sweep) -> None:
    """A unit of a tensor that is seen as matrices: some rows and columns of one, or several whole ones."""
    m.put(2, "ct, rt, at = unit % MC, unit // MC % MR, unit // MC // MR")
    m.put(2, "ab0, r0, c0 = A_0 + at * G, R_0 + rt * TR, C_0 + ct * TC")
    m.put(2, "ab1, r1, c1 = min(A_1, ab0 + G), min(R_1, r0 + TR), min(C_1, c0 + TC)")
    m.put(2, "ct, rt, at = ct + C_T, rt + R_T, at + A_T")
    by_kind = {kind: p.reducing(kind) for kind in KINDS}
    m.put(2, *(f"t{s.id} = {m.start(s)}" for s in by_kind["tensor"]), "for ab in range(ab0, ab1):")
    m.put(3, "a, b = ab // B, ab % B")
    m.put(3, *(f"{m.name(n)} = {m.typed(n, m.value(n))}" for n in p.using("batch")))
    for n in p.using("column"):
        start = m.index(n.axes.replace("C", ""))
        start = f"({start}) * C" if start != "0" else "0"
        source = f"at_{n.data}" if n.op == "input" else "work"
        offset = "" if n.op == "input" else f"table[row, VEC{m.vector[n]}] + "
        m.put(3, f"v{n.id} = {source}[{offset}{start} + c0 : {offset}{start} + c1]")
    for s in by_kind["column"]:
        offset = f"table[row, PART{m.partial[s]}] + (ab * NR + rt) * C"
        m.put(3, f"s{s.id} = work[{offset} + c0 : {offset} + c1]", f"s{s.id}[:] = W({m.start(s)})")
    m.put(3, *(f"y{s.id} = {m.start(s)}" for s in by_kind["batch"]), "for r in range(r0, r1):")
    m.put(4, "o = ((ab - A_0) * (R_1 - R_0) + r - R_0) * (C_1 - C_0) + c0 - C_0", "e = o + c1 - c0")
    m.put(4, *_start(p, "(ab * R + r) * C + c0"))
    m.put(4, *(f"{m.name(n)} = {m.typed(n, m.value(n))}" for n in p.using("row")))
    scalars = _scalar_names(m, p)
    args = [*(f"at_{x}[o:e]" for x in p.arrays), *(f"v{n.id}" for n in p.using("column"))]
    args += [*(f"s{s.id}" for s in by_kind["column"]), *scalars]
    scalar_sums = p.reducing("tensor", "row", "batch")
    m.put(4, f"{'got = ' if scalar_sums else ''}pass_{k}({', '.join(args)})")
    for i, s in enumerate(scalar_sums):
        if p.reductions[s] == "row":
            m.put(4, f"work[table[row, PART{m.partial[s]}] + (ab * R + r) * NC + ct] = got[{i}]")
        else:
            m.put(4, m.take(s, f"{'t' if p.reductions[s] == 'tensor' else 'y'}{s.id}", f"got[{i}]"))
    for s in by_kind["batch"]:
        m.put(3, f"part[table[row, PART{m.partial[s]}] + (ab * NR + rt) * NC + ct] = y{s.id}")
    for s in by_kind["tensor"]:
        m.put(2, f"part[table[row, PART{m.partial[s]}] + (at * NR + rt) * NC + ct] = t{s.id}")


def _entry(m: Text, calls: list[str], before: Iterable[int]) -> None:
    """The one entry, with the call of each pass.

    There is one only, so that each loop is compiled once and sums in the same order for everyone.
    """
    count = len(calls)
    m.put(0, "", "", "@jit", f"def run(rows, first, last, thread, threads, {REST}):", "    for row in rows:")
    m.put(2, "f, n = table[row, FIRST], table[row, LAST] - table[row, FIRST]")
    m.put(2, "lo, hi = f + n * thread // threads, f + n * (thread + 1) // threads")
    m.put(2, "if first < 0:", "    table[row, AT_g] = look(table[row, AT_g])")
    m.put(2, "for stage in range(max(0, first), last):")
    for k in range(count + 1):
        if k in before:
            m.put(3, f"if stage == {2 * k}:", f"    between_{k}(row, {REST})")
        if k < count:
            m.put(3, f"if stage == {2 * k + 1}:", f"    {calls[k]}")
