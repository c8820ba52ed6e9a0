"""Emitting Numba: between the passes, where reductions are put together and what follows from them is computed."""

from arrayopt.engines.numba.text import Text
from arrayopt.engines.written import INDEX
from arrayopt.fusion.graph import Node
from arrayopt.fusion.stages import Between, Loop

__all__ = ["between"]


def between(m: Text, k: int, b: Between) -> None:
    """What comes before pass k: partial results are combined, then values computed and slots written."""
    m.put(0, "", "", "@inner", f"def between_{k}(row, table, scalars, values, work, part):")
    m.put(1, "A, B, R, C = table[row, IN_A], table[row, IN_B], table[row, IN_R], table[row, IN_C]")
    m.put(1, "NR, NC = table[row, IN_NR], table[row, IN_NC]")
    reads = dict.fromkeys([*(a for n in b.nodes for a in n.args), *b.stores.values()])
    names = {n.data: n.axes for n in reads if n.op == "input"} | {name: m.plan.slots[name] for name in b.stores}
    for name, axes in names.items():
        m.array(1, name, " * ".join(axes) or "1")
    for n in reads:
        if n.on_host and n.op != "const":
            m.put(1, f"h{m.scalar[n]} = scalars[row, {m.scalar[n]}]")
    begin, m.seen = len(m.lines), {}
    for s in b.combine:
        _combine(m, s)
    for loop in b.after:
        (_reduce if loop.reduces else _small_loop)(m, loop)
    for name, n in b.stores.items():
        axes = m.plan.slots[name]
        at, depth = m.index(axes), _loops(m, axes)
        m.put(depth, f"at_{name}[{at}] = {m.value(n)}")
    m.put(1, "return")
    starts = {n: f"table[row, VEC{m.vector[n]}]" for n in m.seen}
    views = [f"    w{m.vector[n]} = work[{x} : {x} + {' * '.join(n.axes)}]" for n, x in starts.items()]
    m.lines[begin:begin], m.seen = views, None


def _loops(m: Text, axes: str, depth: int = 1) -> int:
    """Open a loop for each axis; the depth inside."""
    for x in axes:
        m.put(depth, f"for {INDEX[x]} in range({x}):")
        depth += 1
    return depth


def _combine(m: Text, s: Node) -> None:
    """Put a reduction over elements together from its partial results, in their order."""
    base, kind = f"table[row, PART{m.partial[s]}]", m.where.partials[s]
    if kind == "tensor":
        m.put(1, f"acc = {m.start(s)}", "for unit in range(table[row, IN_UNITS]):")
        m.put(2, m.take(s, "acc", f"part[{base} + unit]"))
        m.put(1, f"values[row, {m.tensor[s]}] = acc")
        return
    out, start = m.at(s, m.index(s.axes)), 1
    if kind in ("row", "column") and all(x in s.axes for x in m.plan.element if x in "AB"):
        size = " * ".join(s.axes)
        m.put(1, f"if {'NC' if kind == 'row' else 'NR'} == 1:", f"    one = work[{base} : {base} + {size}]")
        m.put(2, f"for i in range({size}):", f"    {m.at(s, 'i')} = one[i]")
        m.put(1, "else:")
        start = 2
    depth = _loops(m, s.axes, start)
    m.put(depth, f"acc = {m.start(s)}")
    inner = depth
    ab = "(a * B + b)" if m.plan.element != "RC" else "0"
    for x in "AB":
        if x not in s.axes and x in m.plan.element:
            m.put(inner, f"for {INDEX[x]} in range({x}):")
            inner += 1
    if m.plan.element == "ARC":
        ab = "a"
    if kind == "row":
        m.put(inner, "for ct in range(NC):")
        each = f"work[{base} + ({ab} * R + r) * NC + ct]"
    elif kind == "column":
        m.put(inner, "for rt in range(NR):")
        each = f"work[{base} + ({ab} * NR + rt) * C + c]"
    else:
        m.put(inner, "for unit in range(NR * NC):")
        each = f"part[{base} + {ab} * NR * NC + unit]"
    m.put(inner + 1, m.take(s, "acc", each))
    m.put(depth, f"{out} = acc")


def _small_loop(m: Text, loop: Loop) -> None:
    """Operations over the same axes."""
    made, cast = set(loop.nodes), "W" if loop.axes else ""
    read = dict.fromkeys(
        a for x in loop.nodes for a in x.args if a not in made and m.where.place(a) not in ("const", "scalar")
    )
    m.put(1, *(f"{m.name(n)} = {m.typed(n, m.value(n), cast)}" for n in read if not n.axes))
    depth = _loops(m, loop.axes)
    m.put(depth, *(f"{m.name(n)} = {m.typed(n, m.value(n), cast)}" for n in read if n.axes))
    for n in loop.nodes:
        m.put(depth, f"{m.name(n)} = {m.expression(n)}")
        if n in m.tensor or n in m.vector:
            m.put(depth, f"{m.value(n)} = {m.name(n)}")


def _reduce(m: Text, loop: Loop) -> None:
    """A reduction over some of the axes of a value that goes over few."""
    (n,) = loop.nodes
    depth = _loops(m, n.axes)
    m.put(depth, f"acc = {m.start(n)}")
    inner = _loops(m, "".join(x for x in n.args[0].axes if x not in n.axes), depth)
    m.put(inner, m.take(n, "acc", m.value(n.args[0])))
    m.put(depth, f"{m.value(n)} = acc")
