"""Emitting Numba: a plan as the text of a Python module of fused loops.

For each pass k there is `pass_k`, the loop over a stretch of elements, and `units_k`, which runs it over units of one tensor;
for each prologue `between_k`. `tensors` runs all of them over each of a list of tensors; `shared` runs one of them (stage 2k:
prologue k, stage 2k + 1: one thread's share of pass k) over a tensor that several threads share.
"""

from arrayopt.fusion.graph import Node
from arrayopt.fusion.layout import GEOMETRY, layout
from arrayopt.fusion.plan import Pass, Plan

__all__ = ["emit"]

HEADER = '''"""Fused loops{about}.

Arguments: `table`, a row of integers per tensor (the columns are named below: sizes, addresses, offsets); `scalars`, a row
of float64 per tensor; `values`, what prologues leave for passes, per tensor; `work` and `part`, values over rows and
columns, and partial sums.
"""
import math

import numba as nb
import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

W = np.{real}
FAST = {{"contract", "reassoc", "nsz"}}
jit = nb.njit(error_model="numpy", nogil=True, cache={cache}, fastmath=FAST)
inner = nb.njit(error_model="numpy", nogil=True, fastmath=FAST, no_cpython_wrapper=True, no_cfunc_wrapper=True)


@intrinsic
def pointer(typingctx, address):
    """An address as a pointer."""
    def codegen(context, builder, signature, args):
        return builder.inttoptr(args[0], context.get_value_type(types.voidptr))
    return types.voidptr(types.int64), codegen


@inner
def maximum(a, b):
    return a if (a > b) | (a != a) else b


@inner
def minimum(a, b):
    return a if (a < b) | (a != a) else b


@inner
def select(c, a, b):
    return a if c else b


@inner
def sign(a):
    return W(a > 0) - W(a < 0) if a == a else a

'''

HALF = '''
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

'''

BINARY = {"add": "+", "sub": "-", "mul": "*", "div": "/", "pow": "**", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
BINARY |= {"eq": "==", "ne": "!=", "and": "&", "or": "|"}
CALLS = {"minimum": "minimum", "maximum": "maximum", "where": "select", "sign": "sign", "abs": "abs", "float": "W"}
CALLS |= {name: f"math.{name}" for name in ("sqrt", "exp", "expm1", "log", "log1p", "isfinite")}
INDEX = {"A": "a", "B": "b", "R": "r", "C": "c"}


class _Module:
    """The text of a module, being written."""

    def __init__(self, plan: Plan, dtype: str, grad_dtype: str) -> None:
        self.plan, self.where = plan, layout(plan)
        self.real = {"complex64": "float32", "complex128": "float64"}.get(dtype, dtype)
        self.real = "float32" if self.real in ("float16", "bfloat16") else self.real
        self.storage = {"p": dtype, "g": grad_dtype}
        wide = {"float32": "complex64", "float64": "complex128"}[self.real]
        for name in plan.slots:
            self.storage[name] = wide if name in plan.complex_slots else self.real
        self.columns = [*(f"IN_{x}" for x in GEOMETRY), *(f"AT_{n}" for n in self.storage)]
        self.columns += [f"VEC{i}" for i in range(len(self.where.vectors))]
        self.columns += [f"PART{i}" for i in range(len(self.where.partials))]
        self.scalar = {n: i for i, n in enumerate(plan.scalars)}
        self.vector = {n: i for i, n in enumerate(self.where.vectors)}
        self.partial = {n: i for i, n in enumerate(self.where.partials)}
        self.lines: list[str] = []

    def put(self, indent: int, *lines: str) -> None:
        self.lines += ["    " * indent + line for line in lines]

    def name(self, n: Node) -> str:
        """What a value is called in the text."""
        if n.op == "const":
            return f"W({n.data!r})" if n.dtype != "bool" else repr(n.data)
        if n.on_host:
            return f"h{self.scalar[n]}" if n.dtype != "bool" else f"(h{self.scalar[n]} != 0)"
        return f"{n.data}_" if n.op == "input" else f"x{n.id}"

    def typed(self, n: Node, text: str, cast: str = "W") -> str:
        """What is read of a value that lies somewhere as a float, in the value's own type."""
        return f"{text} != 0" if n.dtype == "bool" else f"{cast}({text})" if cast else text

    def expression(self, n: Node) -> str:
        """The right-hand side of an operation."""
        args = [self.name(a) for a in n.args]
        if n.op in BINARY:
            return f"{args[0]} {BINARY[n.op]} {args[1]}"
        if n.op in ("real", "imag"):
            if n.args[0].dtype != "complex":
                return args[0] if n.op == "real" else "W(0.0)"
            return f"{args[0]}.{n.op}"
        if n.op == "conj":
            return f"{args[0]}.conjugate()" if n.args[0].dtype == "complex" else args[0]
        if n.op == "abs2":
            return f"{args[0]}.real * {args[0]}.real + {args[0]}.imag * {args[0]}.imag"
        if n.op == "isfinite" and n.args[0].dtype == "complex":
            return f"math.isfinite({args[0]}.real) & math.isfinite({args[0]}.imag)"
        if n.op == "neg":
            return f"-{args[0]}"
        if n.op == "not":
            return f"not {args[0]}"
        return f"{CALLS[n.op]}({', '.join(args)})"

    def index(self, axes: str) -> str:
        """The position of a value over some axes, as it lies in memory."""
        out = ""
        for x in axes:
            out = f"({out}) * {x} + {INDEX[x]}" if out else INDEX[x]
        return out or "0"

    def load(self, name: str, at: str) -> str:
        """An element of a stored array, in the dtype of arithmetic."""
        kind = self.storage[name]
        if kind in ("float16", "bfloat16"):
            return f"load_{kind}(at_{name}[{at}])"
        if kind.startswith("complex") or kind == self.real:
            return f"at_{name}[{at}]"
        return f"W(at_{name}[{at}])"

    def store(self, name: str, value: str) -> str:
        """A value as it is stored."""
        kind = self.storage[name]
        return f"store_{kind}(W({value}))" if kind in ("float16", "bfloat16") else value

    def array(self, indent: int, name: str, size: str) -> None:
        """Make a stored array from its address."""
        kind = {"float16": "uint16", "bfloat16": "uint16"}.get(self.storage[name], self.storage[name])
        self.put(indent, f"at_{name} = nb.carray(pointer(table[row, AT_{name}]), ({size},), np.{kind})")


def emit(plan: Plan, dtype: str, grad_dtype: str | None = None, *, about: str = "", cache: bool = True) -> str:
    """The text of a module that runs a plan.

    Parameters
    ----------
    plan : Plan
        The plan.
    dtype, grad_dtype : str
        What parameters and gradients are stored in.
    about : str
        What to say in the first line.
    cache : bool
        Whether Numba is to keep the compiled code on disk.
    """
    m = _Module(plan, dtype, grad_dtype or dtype)
    m.put(0, *HEADER.format(about=about, real=m.real, cache=cache).splitlines())
    if {"float16", "bfloat16"} & set(m.storage.values()):
        m.put(0, *HALF.splitlines())
    m.put(0, f"{', '.join(m.columns)} = range({len(m.columns)})")
    for k, p in enumerate(plan.passes):
        _loop(m, k, p)
        _units(m, k, p)
    for k in range(len(plan.prologues)):
        _between(m, k)
    _tensors(m)
    return "\n".join(m.lines) + "\n"


def _split(m: _Module, p: Pass) -> dict[str, list[Node]]:
    """Values of fewer axes that a pass's elements are computed from, by how they reach the loop."""
    used = [a for n in p.nodes for a in n.args] + [*p.stores.values(), *(s.args[0] for s in p.sums)]
    element, seen = m.plan.element, set()
    out: dict[str, list[Node]] = {"host": [], "tensor": [], "row": [], "column": [], "batch": []}
    for n in used:
        if n in seen or n.op == "const" or (n.axes == element and not n.on_host):
            continue
        seen.add(n)
        kind = "host" if n.on_host else "row" if n.axes == element[:-1] else "batch"
        if not n.on_host and n.axes == "":
            kind = "tensor"
        elif not n.on_host and "C" in n.axes:
            kind = "column"
        elif not n.on_host and "R" in n.axes:
            kind = "row"
        out[kind].append(n)
    return out


def _loop(m: _Module, k: int, p: Pass) -> None:
    """The loop over a stretch of elements: loads, operations, stores, sums."""
    small = _split(m, p)
    arrays = list(dict.fromkeys([*p.loads, *p.stores]))
    columns = [f"v{n.id}" for n in small["column"]]
    column_sums = [s for s in p.sums if m.where.partials[s] == "column"]
    scalar_sums = [s for s in p.sums if m.where.partials[s] != "column"]
    scalars = [m.name(n).strip("()").split(" ")[0] for kind in ("host", "tensor", "row", "batch") for n in small[kind]]
    args = [*(f"at_{x}" for x in arrays), *columns, *(f"s{s.id}" for s in column_sums), *scalars]
    m.put(0, "", "", "@inner", f"def pass_{k}({', '.join(args)}):")
    m.put(1, *(f"s{s.id} = W(0.0)" for s in scalar_sums), f"for i in range(at_{arrays[0]}.size):")
    for name, node in p.loads.items():
        m.put(2, f"{m.name(node)} = {m.load(name, 'i')}")
    m.put(2, *(f"{m.name(n)} = {m.typed(n, f'v{n.id}[i]')}" for n in small["column"]))
    m.put(2, *(f"{m.name(n)} = {m.expression(n)}" for n in p.nodes))
    m.put(2, *(f"at_{name}[i] = {m.store(name, m.name(n))}" for name, n in p.stores.items()))
    m.put(2, *(f"s{s.id} += {m.name(s.args[0])}" for s in scalar_sums))
    m.put(2, *(f"s{s.id}[i] += {m.name(s.args[0])}" for s in column_sums))
    m.put(1, f"return ({''.join(f's{s.id}, ' for s in scalar_sums)})" if scalar_sums else "return")


def _at(m: _Module, n: Node, index: str) -> str:
    """Where a value over fewer axes is read from."""
    return f"at_{n.data}[{index}]" if n.op == "input" else f"work[table[row, VEC{m.vector[n]}] + {index}]"


def _units(m: _Module, k: int, p: Pass) -> None:
    """Pass k over units lo to hi of one tensor."""
    small, element = _split(m, p), m.plan.element
    arrays = list(dict.fromkeys([*p.loads, *p.stores]))
    kinds = m.where.partials
    m.put(0, "", "", "@inner", f"def units_{k}(row, lo, hi, table, scalars, values, work, part):")
    m.put(1, "size = table[row, IN_SIZE]", "A, B, R, C = table[row, IN_A], table[row, IN_B], table[row, IN_R], table[row, IN_C]")
    for name in arrays:
        m.array(1, name, "size")
    inputs = {n.data: n for kind in ("row", "column", "batch") for n in small[kind] if n.op == "input"}
    for name, n in inputs.items():
        m.array(1, name, " * ".join(n.axes) or "1")
    for n in small["host"]:
        m.put(1, f"h{m.scalar[n]} = W(scalars[row, {m.scalar[n]}])")
    m.put(1, *(f"{m.name(n)} = {m.typed(n, _value(m, n))}" for n in small["tensor"]))
    m.put(1, "TR, TC, G, NR, NC = table[row, IN_TR], table[row, IN_TC], table[row, IN_G], table[row, IN_NR], table[row, IN_NC]")
    # every other pass runs backwards, so that it begins with what the one before has left in the cache
    m.put(1, "for unit in range(lo, hi):" if k % 2 == 0 else "for unit in range(hi - 1, lo - 1, -1):")
    m.put(2, "c0, rt = unit % NC * TC, unit // NC % NR", "c1, r0 = min(C, c0 + TC), rt * TR", "r1 = min(R, r0 + TR)")
    m.put(2, "ab0 = unit // NC // NR * G", "ab1 = min(A * B, ab0 + G)")
    by_kind = {kind: [s for s in p.sums if kinds[s] == kind] for kind in ("tensor", "row", "column", "batch")}
    m.put(2, *(f"t{s.id} = 0.0" for s in by_kind["tensor"]), "for ab in range(ab0, ab1):")
    if element != "C":
        m.put(3, "a, b = ab // B, ab % B")
    m.put(3, *(f"{m.name(n)} = {m.typed(n, _value(m, n))}" for n in small["batch"]))
    for n in small["column"]:
        start = m.index(n.axes.replace("C", ""))
        start = f"({start}) * C" if start != "0" else "0"
        source = f"at_{n.data}" if n.op == "input" else "work"
        offset = "" if n.op == "input" else f"table[row, VEC{m.vector[n]}] + "
        m.put(3, f"v{n.id} = {source}[{offset}{start} + c0 : {offset}{start} + c1]")
    for s in by_kind["column"]:
        offset = f"table[row, PART{m.partial[s]}] + (ab * NR + rt) * C"
        m.put(3, f"s{s.id} = work[{offset} + c0 : {offset} + c1]", f"s{s.id}[:] = W(0.0)")
    m.put(3, *(f"y{s.id} = 0.0" for s in by_kind["batch"]), "for r in range(r0, r1):")
    m.put(4, "o = (ab * R + r) * C + c0", "e = o + c1 - c0")
    m.put(4, *(f"{m.name(n)} = {m.typed(n, _value(m, n))}" for n in small["row"]))
    scalars = [m.name(n).strip("()").split(" ")[0] for kind in ("host", "tensor", "row", "batch") for n in small[kind]]
    args = [*(f"at_{x}[o:e]" for x in arrays), *(f"v{n.id}" for n in small["column"])]
    args += [*(f"s{s.id}" for s in by_kind["column"]), *scalars]
    scalar_sums = [s for s in p.sums if kinds[s] != "column"]
    m.put(4, f"{'got = ' if scalar_sums else ''}pass_{k}({', '.join(args)})")
    for i, s in enumerate(scalar_sums):
        if kinds[s] == "row":
            m.put(4, f"work[table[row, PART{m.partial[s]}] + (ab * R + r) * NC + unit % NC] = got[{i}]")
        else:
            m.put(4, f"{'t' if kinds[s] == 'tensor' else 'y'}{s.id} += got[{i}]")
    for s in by_kind["batch"]:
        m.put(3, f"part[table[row, PART{m.partial[s]}] + (ab * NR + rt) * NC + unit % NC] = y{s.id}")
    m.put(2, *(f"part[table[row, PART{m.partial[s]}] + unit] = t{s.id}" for s in by_kind["tensor"]))


def _between(m: _Module, k: int) -> None:
    """Prologue k: the sums of the pass before are combined, and what follows from them over fewer axes is computed."""
    plan = m.plan
    m.put(0, "", "", "@inner", f"def between_{k}(row, table, scalars, values, work, part):")
    m.put(1, "A, B, R, C = table[row, IN_A], table[row, IN_B], table[row, IN_R], table[row, IN_C]")
    m.put(1, "NR, NC = table[row, IN_NR], table[row, IN_NC]")
    last = k == len(plan.prologues) - 1
    part = plan.prologues[k]
    reads = [a for n in part for a in n.args] + (list(plan.small.values()) if last else [])
    names = {n.data: n.axes for n in reads if n.op == "input"}
    names |= {name: plan.slots[name] for name in plan.small} if last else {}
    for name, axes in names.items():
        m.array(1, name, " * ".join(axes) or "1")
    for n in dict.fromkeys(a for n in [*part, *(_Fake(x) for x in plan.small.values())] for a in n.args):
        if n.on_host and n.op != "const":
            m.put(1, f"h{m.scalar[n]} = scalars[row, {m.scalar[n]}]")
    if k:
        for s in plan.passes[k - 1].sums:
            _combine(m, s)
    todo = list(part)
    while todo:
        group = [todo[0]]
        if todo[0].op != "sum":  # one loop for all that goes over the same axes and waits for nothing else
            waiting = {n for n in todo if n.axes != todo[0].axes or n.op == "sum"}
            group = []
            for n in todo:
                if n in waiting or any(a in waiting for a in n.args):
                    waiting.add(n)
                else:
                    group.append(n)
        (_sum if group[0].op == "sum" else _small_loop)(m, group)
        todo = [n for n in todo if n not in group]
    if last:
        for name, n in plan.small.items():
            if not (n.op == "input" and n.data == name):
                axes = plan.slots[name]
                at, depth = m.index(axes), _loops(m, axes)
                value = m.name(n) if n.on_host or n.op == "const" else _at(m, n, m.index(n.axes))
                m.put(depth, f"at_{name}[{at}] = {value}")
    m.put(1, "return")


class _Fake:
    """Something whose argument is a value that is only to be stored."""

    def __init__(self, n: Node) -> None:
        self.args = (n,)


def _loops(m: _Module, axes: str, depth: int = 1) -> int:
    """Open a loop for each axis; the depth inside."""
    for x in axes:
        m.put(depth, f"for {INDEX[x]} in range({x}):")
        depth += 1
    return depth


def _combine(m: _Module, s: Node) -> None:
    """Add up the partial sums of a sum over elements, in their order."""
    base, kind = f"table[row, PART{m.partial[s]}]", m.where.partials[s]
    if kind == "tensor":
        m.put(1, "acc = 0.0", "for unit in range(table[row, IN_UNITS]):", f"    acc += part[{base} + unit]")
        m.put(1, f"values[row, {m.where.tensor[s]}] = acc")
        return
    out = f"work[table[row, VEC{m.vector[s]}] + {m.index(s.axes)}]"
    depth = _loops(m, s.axes)
    m.put(depth, "acc = 0.0")
    inner = depth
    ab = "(a * B + b)" if m.plan.element != "RC" else "0"
    for x in "AB":
        if x not in s.axes and x in m.plan.element:
            m.put(inner, f"for {INDEX[x]} in range({x}):")
            inner += 1
    if m.plan.element == "ARC":
        ab = "a"
    if kind == "row":
        m.put(inner, "for ct in range(NC):", f"    acc += work[{base} + ({ab} * R + r) * NC + ct]")
    elif kind == "column":
        m.put(inner, "for rt in range(NR):", f"    acc += work[{base} + ({ab} * NR + rt) * C + c]")
    else:
        m.put(inner, "for unit in range(NR * NC):", f"    acc += part[{base} + {ab} * NR * NC + unit]")
    m.put(depth, f"{out} = acc")


def _value(m: _Module, n: Node) -> str:
    """Read a value over fewer axes inside a prologue's loop."""
    if n.op == "const" or n.on_host:
        return m.name(n)
    return f"values[row, {m.where.tensor[n]}]" if n.axes == "" and n.op != "input" else _at(m, n, m.index(n.axes))


def _small_loop(m: _Module, group: list[Node]) -> None:
    """Operations that go over the same axes, in one loop."""
    depth, made = _loops(m, group[0].axes), set(group)
    cast = "W" if group[0].axes else ""
    for n in dict.fromkeys(a for n in group for a in n.args if a not in made):
        if not (n.on_host or n.op == "const"):
            m.put(depth, f"{m.name(n)} = {m.typed(n, _value(m, n), cast)}")
    for n in group:
        m.put(depth, f"{m.name(n)} = {m.expression(n)}")
        if n.axes == "":
            m.put(depth, f"values[row, {m.where.tensor[n]}] = {m.name(n)}")
        elif n in m.vector:
            m.put(depth, f"work[table[row, VEC{m.vector[n]}] + {m.index(n.axes)}] = {m.name(n)}")


def _sum(m: _Module, group: list[Node]) -> None:
    """A sum over some of the axes of a value that goes over few."""
    (n,) = group
    depth = _loops(m, n.axes)
    m.put(depth, "acc = 0.0")
    inner = _loops(m, "".join(x for x in n.args[0].axes if x not in n.axes), depth)
    m.put(inner, f"acc += {_value(m, n.args[0])}")
    target = f"values[row, {m.where.tensor[n]}]" if n.axes == "" else _at(m, n, m.index(n.axes))
    m.put(depth, f"{target} = acc")


def _tensors(m: _Module) -> None:
    """The entries: all passes over each of some tensors, or a pass over one thread's share of each."""
    rest = "table, scalars, values, work, part"
    m.put(0, "", "", "@jit", f"def tensors(rows, {rest}):", "    for row in rows:", "        n = table[row, IN_UNITS]")
    for k in range(len(m.plan.prologues)):
        m.put(2, f"between_{k}(row, {rest})")
        if k < len(m.plan.passes):
            m.put(2, f"units_{k}(row, 0, n, {rest})")
    m.put(0, "", "", "@jit", f"def shared(stage, row, thread, threads, {rest}):")
    m.put(1, "n = table[row, IN_UNITS]", "lo, hi = n * thread // threads, n * (thread + 1) // threads")
    for k in range(len(m.plan.prologues)):
        m.put(1, f"if stage == {2 * k}:", f"    between_{k}(row, {rest})")
        if k < len(m.plan.passes):
            m.put(1, f"if stage == {2 * k + 1}:", f"    units_{k}(row, lo, hi, {rest})")
