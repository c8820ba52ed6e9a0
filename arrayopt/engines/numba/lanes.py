"""Emitting Numba for small matrices side by side: see `arrayopt.fusion.lanes`.

For each segment k there is `units_k`. It copies some matrices into planes, one for each element of a matrix, in which
the matrices lie side by side; runs the segment's passes, each a loop over the lanes of a plane, for all planes; and
copies back what has changed. Planes are in the part of `work` that is the thread's own.
"""

import functools

from arrayopt.engines.numba.between import between
from arrayopt.engines.numba.text import Text
from arrayopt.fusion.graph import POSITION, Node
from arrayopt.fusion.lanes import Lanes, Segment
from arrayopt.fusion.layout import outliving
from arrayopt.fusion.stages import Loop, Sweep

__all__ = ["emit_lanes"]

PLACE = {"(R * C)": "(r * C + c)", "(R)": "r", "(C)": "c", "(1)": "0"}
"""Which plane an element (r, c) is in, by how many there are."""

COPIES = """

@inner
def take_{kind}(source, planes, count):
    lanes = planes.size // count
    block = max(16, {block} // count)
    for first in range(0, lanes, block):
        n = min(block, lanes - first)
        for j in range(count):
            x, y = source[first * count + j :], planes[j * lanes + first : j * lanes + first + n]
            for i in range(n):
                y[i] = {load}


@inner
def give_{kind}(target, planes, count):
    lanes = planes.size // count
    block = max(16, {block} // count)
    for first in range(0, lanes, block):
        n = min(block, lanes - first)
        for j in range(count):
            x, y = target[first * count + j :], planes[j * lanes + first : j * lanes + first + n]
            for i in range(n):
                x[i * count] = {store}
"""

BLOCK = 4096
"""So many elements are copied at a time: they stay in the first cache while each plane in turn takes its own."""


def emit_lanes(m: Text, split: Lanes) -> int:
    """Emit all segments, and what is computed between them; how many segments there are."""
    for kind in dict.fromkeys(m.storage.values()):
        load, store = m.load(kind, "x[i * count]"), m.store(kind, "y[i]")
        m.put(0, *COPIES.format(kind=kind, load=load, store=store, block=BLOCK).splitlines())
    needs = []
    for k, s in enumerate(split.segments):
        between(m, k, s.before)
        needs.append(_Segment(m, s).emit(k))
    between(m, len(needs), split.after)
    m.put(0, "", "", "def planes(R, C):", '    """How many planes a thread needs."""', f"    return {_largest(needs)}")
    return len(needs)


def _largest(needs: list[str]) -> str:
    """The text of the largest of some numbers."""
    return functools.reduce(lambda a, b: f"np.maximum({a}, {b})", needs)


class _Segment:
    """The text of one segment, being written: first its loops, which `body` calls, then `units_k`."""

    def __init__(self, m: Text, s: Segment) -> None:
        self.m, self.s = m, s
        self.passes = [m.form.passes[i] for i in s.passes]
        self.counts: dict[str, str] = {}  # arrays of planes, and how many each has
        self.carried: dict[str, str] = {}  # the same of what is kept from segment to segment
        self.where: dict[Node, str] = {}  # in which of them a value lies
        self.scalars: dict[Node, None] = {}
        self.body: list[str] = []

    def emit(self, k: int) -> str:
        """Emit the segment; how many planes it takes, as text."""
        m, s, element = self.m, self.s, self.m.plan.element
        m.position = "(start + i * each)"
        sums = [x for p in self.passes for x in p.reductions if x.axes]
        carried = [n for n in m.where.vectors if n in s.carried or n in sums]
        self.carried = {f"c{n.id}": _count(n.axes) for n in carried}
        self.where |= {n: f"q_{name}" for name, n in s.reads.items()} | {n: f"c{n.id}" for n in carried}
        elements = list(dict.fromkeys(x for p in self.passes for x in p.arrays))
        self.counts |= {f"q_{name}": _count(n.axes) for name, n in s.reads.items()}
        self.counts |= {f"q_{name}": _count(element) for name in elements}
        for n in [*(x for x in self._kept() if x.op != "input"), *sums]:
            if n not in self.where:
                self.where[n] = f"v{n.id}"
                self.counts[f"v{n.id}"] = _count(n.axes)
        for j, b in enumerate(s.small):
            for i, loop in enumerate(b.after):
                self._small(f"small_{k}_{j}_{i}", loop)
            if j < len(self.passes):
                self._pass(f"pass_{s.passes[j]}", self.passes[j])
        self._units(k, elements, carried)
        return _total(list(self.counts.values()))

    def _kept(self) -> list[Node]:
        """Values between passes that something other than their own loop reads."""
        kept = outliving(self.passes, self.s.small) | set(self.s.writes.values())
        return [n for b in self.s.small for n in b.nodes if n in kept]

    def _small(self, name: str, loop: Loop) -> None:
        """Values per row, column or matrix: over lanes, for each place."""
        first = loop.nodes[0]
        if loop.reduces:
            (x,) = first.args
            self.body.append(f"{self.where[first]}[:] = W({self.m.start(first)})")
            self._loop(name, x.axes, {}, [], {}, {first: x})
        else:
            stores = {self.where[n]: n for n in loop.nodes if n in self.where}
            self._loop(name, loop.axes, {}, list(loop.nodes), stores, {})

    def _pass(self, name: str, p: Sweep) -> None:
        """A pass over the elements: over lanes, for each place."""
        self.body += [f"{self.where[x]}[:] = W({self.m.start(x)})" for x in p.reductions if x.axes]
        loads, stores = ({f"q_{x}": n for x, n in given.items()} for given in (p.loads, p.stores))
        sums = {x: x.args[0] for x in p.reductions}
        self._loop(name, self.m.plan.element, loads, list(p.nodes), stores, sums)

    def _loop(
        self,
        name: str,
        axes: str,
        loads: dict[str, Node],
        nodes: list[Node],
        stores: dict[str, Node],
        sums: dict[Node, Node],
    ) -> None:
        """Emit a loop over the lanes of a plane, and in the body the call of it for all planes."""
        m = self.m
        used = [*(a for n in nodes for a in n.args), *stores.values(), *sums.values()]
        known = {*nodes, *loads.values()}
        outer = [n for n in dict.fromkeys(used) if n not in known and n.op not in ("const", POSITION)]
        reads = loads | {self.where[n]: n for n in outer if n in self.where}
        scalars = [n for n in outer if n not in self.where]
        self.scalars |= dict.fromkeys(scalars)
        adds = [self.where[s] for s in sums if s.axes]
        totals = {s: x for s, x in sums.items() if not s.axes}
        planes, given = list(dict.fromkeys([*reads, *stores, *adds])), [m.bare(n) for n in scalars]
        draws = ["start + r * C + c", "R * C"] if any(n.op == POSITION for n in used) else []
        m.put(
            0, "", "", "@inner", f"def {name}({', '.join([*planes, *given, *(['start', 'each'] if draws else [])])}):"
        )
        m.put(1, *(f"t{s.id} = W({m.start(s)})" for s in totals), f"for i in range({planes[0]}.size):")
        m.put(2, *(f"{m.name(n)} = {m.typed(n, f'{x}[i]')}" for x, n in reads.items()))
        m.put(2, *(f"{m.name(n)} = {m.expression(n)}" for n in nodes))
        m.put(2, *(f"{x}[i] = {m.name(n)}" for x, n in stores.items()))
        m.put(2, *(m.take(s, f"{self.where[s]}[i]", m.name(x)) for s, x in sums.items() if s.axes))
        m.put(2, *(m.take(s, f"t{s.id}", m.name(x)) for s, x in totals.items()))
        m.put(1, f"return ({''.join(f't{s.id}, ' for s in totals)})" if totals else "return")
        inside = [x for x in axes if x in "RC"]
        for depth, x in enumerate(inside):
            self.body.append(f"{'    ' * depth}for {x.lower()} in range({x}):")
        places = [PLACE[(self.counts | self.carried)[x]] for x in planes]
        cut = [f"{x}[{place} * n : {place} * n + n]" for x, place in zip(planes, places, strict=True)]
        call = f"{name}({', '.join([*cut, *given, *draws])})"
        self.body.append(f"{'    ' * len(inside)}{'got = ' if totals else ''}{call}")
        self.body += ["    " * len(inside) + m.take(s, f"t{s.id}", f"got[{i}]") for i, s in enumerate(totals)]

    def _units(self, k: int, elements: list[str], carried: list[Node]) -> None:
        """Emit the segment over units lo to hi of one tensor."""
        m, s = self.m, self.s
        m.put(0, "", "", "@inner", f"def units_{k}(row, lo, hi, thread, table, scalars, values, work, part):")
        m.put(1, "A, B, R, C = table[row, IN_A], table[row, IN_B], table[row, IN_R], table[row, IN_C]")
        m.put(1, "G, count = table[row, IN_G], A * B")
        slots = list(dict.fromkeys([*s.reads, *s.writes]))
        for name in [*elements, *slots]:
            m.array(1, name, f"count * {_counted(m, name)}")
        for n in self.scalars:
            if n.op == "input":
                m.array(1, n.data, "1")
            m.put(1, f"{m.bare(n)} = {_scalar(m, n)}")
        m.put(1, f"own = table[row, OWN] + thread * G * ({_total(list(self.counts.values()))})")
        # every other segment runs backwards, so that it begins with what the one before has left in the cache
        m.put(1, "for unit in range(lo, hi):" if k % 2 == 0 else "for unit in range(hi - 1, lo - 1, -1):")
        m.put(2, "ab = unit * G", "n = min(count, ab + G) - ab")
        m.put(2, *(["start = table[row, START] + ab * R * C"] if m.plan.draws else []))
        for i, (x, planes) in enumerate(self.counts.items()):
            start = f"own + G * ({_total(list(self.counts.values())[:i])})"
            m.put(2, f"{x} = work[{start} : {start} + n * {planes}]")
        for n in carried:
            start = f"table[row, VEC{m.vector[n]}] + ab * {_count(n.axes)}"
            m.put(2, f"c{n.id} = work[{start} : {start} + n * {_count(n.axes)}]")
        written: set[str] = set()
        for p in self.passes:
            m.put(2, *(self._copy("take", x, f"q_{x}") for x in p.loads if x not in written))
            written |= {*p.loads, *p.stores}
        m.put(2, *(self._copy("take", name, f"q_{name}") for name in s.reads))
        totals = [x for p in self.passes for x in p.reducing("tensor")]
        m.put(2, *(f"t{x.id} = {m.start(x)}" for x in totals), *self.body)
        m.put(2, *(f"part[table[row, PART{m.partial[x]}] + unit] = t{x.id}" for x in totals))
        m.put(2, *(self._copy("give", x, f"q_{x}") for x in dict.fromkeys(x for p in self.passes for x in p.stores)))
        m.put(2, *(self._copy("give", name, self.where[n]) for name, n in s.writes.items()))

    def _copy(self, way: str, name: str, planes: str) -> str:
        """The call that copies some matrices' part of a stored array to planes, or back."""
        each = _counted(self.m, name)
        part = f"at_{name}[ab * {each} : (ab + n) * {each}]"
        return f"{way}_{self.m.storage[name]}({part}, {planes}, {each})"


def _count(axes: str) -> str:
    """How many planes values over some axes take, as text."""
    return f"({' * '.join(x for x in axes if x in 'RC') or '1'})"


def _counted(m: Text, name: str) -> str:
    """How many planes a stored array takes."""
    return _count(m.plan.slots.get(name, m.plan.element))


def _total(counts: list[str]) -> str:
    """The text of the sum of some numbers of planes."""
    return " + ".join(f"{counts.count(x)} * {x}" for x in dict.fromkeys(counts)) or "0"


def _scalar(m: Text, n: Node) -> str:
    """A value that is the same for all elements of a tensor, as it lies."""
    return f"W(scalars[row, {m.scalar[n]}])" if n.on_host else m.typed(n, m.value(n))
