"""Printing a program as C++."""

import math
from collections.abc import Sequence

from arrayopt.codecs import BLOCK, STORED
from arrayopt.engines.native.columns import columns
from arrayopt.engines.written import Written
from arrayopt.fusion.graph import POSITION, Node
from arrayopt.fusion.layout import GEOMETRY, Layout
from arrayopt.fusion.plan import Plan
from arrayopt.fusion.program import (
    Array,
    Buffer,
    Codes,
    Compute,
    Elements,
    Fill,
    Function,
    Index,
    Let,
    Loop,
    Multiply,
    Place,
    Read,
    Spread,
    Start,
    Statement,
    Take,
    View,
    When,
    Write,
    elements_of,
)

__all__ = ["Text", "index", "print_function"]

FUNCTIONS = {"min": "least", "max": "greatest"}
STRENGTH = {"+": 1, "-": 1, "*": 2, "//": 2, "%": 2}
START = {"sum": "0", "max": "-INFINITY", "min": "INFINITY"}
COMBINE = {"sum": "+", "max": "largest", "min": "smallest"}
"""How `omp simd` combines what lanes have reduced; the names are of the header."""

ROOMS = {"values": "double", "scalars": "double", "part": "double", "work": "W"}
REST = "int64_t* t, const double* scalars, double* values, W* work, double* part"
ARGUMENTS = {
    "": REST,
    "units": f"int64_t lo, int64_t hi, int64_t thread, {REST}",
    "threads": f"int64_t thread, int64_t threads, {REST}",
}
"""What a function takes, by how threads share it."""


def index(x: Index, within: int = 0) -> str:
    """The text of a number; in parentheses where what it is within binds as strongly, or more."""
    if x.op == "column":
        return f"t[{x.args[0]}]"
    if x.op in ("name", "number"):
        return str(x.args[0])
    if x.op in FUNCTIONS:
        return f"{FUNCTIONS[x.op]}({', '.join(map(index, x.args))})"
    left, right = x.args
    strength = STRENGTH[x.op]
    text = f"{index(left, strength - 1)} {x.op[0]} {index(right, strength)}"
    return f"({text})" if strength <= within else text


class Text(Written):
    """The text of a source, being written."""

    language = "cuda"  # its texts are C++, with the functions of the headers

    def __init__(self, plan: Plan, dtype: str, grad_dtype: str, where: Layout) -> None:
        super().__init__(plan, dtype, grad_dtype, where, GEOMETRY)
        self.columns = columns(plan, where)

    def name(self, n: Node) -> str:
        """What a value is called in the text."""
        if n.op == "const":
            if n.dtype == "bool":
                return str(n.data).lower()
            special = "NAN" if math.isnan(n.data) else "INFINITY" if n.data > 0 else "-INFINITY"
            return f"(W){n.data!r}" if math.isfinite(n.data) else f"(W){special}"
        if n.op == POSITION:
            return "position"
        if n.on_host:
            return f"h{self.scalar[n]}" if n.dtype != "bool" else f"(h{self.scalar[n]} != 0)"
        return f"{n.data}_" if n.op == "input" else f"x{n.id}".replace("-", "_")

    def kind(self, n: Node, real: str = "W") -> str:
        """The C++ type of a value."""
        return {"bool": "bool", "complex": "Complex", "real": real}[n.dtype]

    def stored(self, array: str) -> str:
        """The C++ type of what an array holds."""
        return STORED[self.storage[array]].cuda


def print_function(m: Text, function: Function) -> None:
    """Print a function, after the loops over elements that it calls."""
    most = 0
    for elements in elements_of(function.body):
        _elements(m, elements)
        most = max(most, len(elements.totals))
    given = ", ".join([ARGUMENTS[function.shared], *(f"int64_t AT_{x}" for x in function.scratch)])
    m.put(0, "", f"static void {function.name}({given}) {{")
    m.put(1, *([f"W got[{most}];"] if most else []))
    _statements(m, 1, function.body)
    m.put(0, "}")


def _statements(m: Text, depth: int, body: Sequence[Statement]) -> None:
    """Print statements."""
    known: set[str] = set()
    for x in body:
        match x:
            case Let(name, value):
                m.put(depth, f"{'' if name in known else 'int64_t '}{name} = {index(value)};")
                known.add(name)
            case Array(name, _):
                kind = m.stored(name)
                m.put(depth, f"{kind}* const at_{name} = ({kind}*)t[AT_{name}];")
            case View(name, room, first, _):
                m.put(depth, f"auto* const {name} = {room} + {index(first)};")
            case Read(node, place, wide):
                if _bare(m, node) not in known:
                    _read(m, depth, node, place, wide=wide)
                known.add(_bare(m, node))
            case Compute(node):
                kind = "auto" if node.dtype == "real" else m.kind(node)
                m.put(depth, f"const {kind} {m.name(node)} = {m.expression(node)};")
                known.add(m.name(node))
            case Start(name, reduction):
                m.put(depth, f"{'' if name in known else 'double '}{name} = {START[reduction.op]};")
                known.add(name)
            case Fill(view, size, reduction):
                m.put(
                    depth,
                    f"for (int64_t i = 0; i < {index(size)}; ++i) {view}[i] ="
                    f" {START[reduction.op]};",
                )
            case Take(reduction, into, value):
                m.put(depth, f"{m.take(reduction, into, _place(value))};")
            case Write(place, value):
                _write(m, depth, place, value)
            case Loop(name, first, end, inside, turned):
                a, b = index(first), index(end)
                head = f"int64_t {name} = {a}; {name} < {b}; ++{name}"
                if turned:
                    head = f"int64_t {name} = {index(end - 1)}; {name} >= {a}; --{name}"
                m.put(depth, f"for ({head}) {{")
                _statements(m, depth + 1, inside)
                m.put(depth, "}")
            case When(left, right, then, otherwise):
                m.put(depth, f"if ({index(left)} == {index(right)}) {{")
                _statements(m, depth + 1, then)
                m.put(depth, "} else {")
                _statements(m, depth + 1, otherwise)
                m.put(depth, "}")
            case Multiply(a, b, out, first, end, sides, turned, symmetric):
                arrays = [f"(W*)t[AT_{array}] + {index(start)}" for array, start in (a, b, out)]
                numbers = [
                    *map(index, (first, end, *sides)),
                    *(str(int(flag)) for flag in (*turned, symmetric)),
                ]
                m.put(depth, f"multiply((void*)t[BLAS], {', '.join([*arrays, *numbers])});")
            case Spread(back, array, first, end, planes, each):
                way, source = "give" if back else "take", f"at_{array} + {index(first)}"
                m.put(
                    depth,
                    f"{way}({source}, {planes}, {index((end - first) // each)}, {index(each)});",
                )
            case Buffer(name, size):
                m.put(depth, f"W {name}[{size}];")
            case Codes(store, array, scale, first, count, buffer):
                codes, scales = (
                    f"at_{array} + {index(first)}",
                    f"at_{scale} + {index(first // BLOCK)}",
                )
                way = "quantize" if store else "dequantize"
                m.put(depth, f"{way}({codes}, {scales}, {buffer}, {index(count)});")
            case Elements():
                given = [
                    index(x.count),
                    *(f"{array} + {index(first)}" for array, first, _ in x.slices.values()),
                ]
                given += [_bare(m, n) for n in x.scalars]
                if x.position is not None and x.stride is not None:
                    given += [index(x.position), index(x.stride)]
                given += ["got"] if x.totals else []
                m.put(depth, f"{x.function}({', '.join(given)});")


def _place(place: Place) -> str:
    """What lies in a place."""
    return f"{place.room}[{index(place.index)}]"


def _write(m: Text, depth: int, place: Place, value: "Node | str | Place") -> None:
    text = (
        _place(value)
        if isinstance(value, Place)
        else value
        if isinstance(value, str)
        else m.name(value)
    )
    m.put(depth, f"{_place(place)} = {text};")


def _read(m: Text, depth: int, node: Node, place: Place, *, wide: bool) -> None:
    """A scalar keeps its number, also where it is a truth value."""
    if place.room == "scalars":
        name, kind = f"h{m.scalar[node]}", "double" if wide else "W"
        m.put(depth, f"const {kind} {name} = ({kind}){_place(place)};")
    elif node.dtype == "bool":
        m.put(depth, f"const bool {m.name(node)} = {_place(place)} != 0;")
    else:
        kind = "auto" if wide else "W"
        m.put(depth, f"const {kind} {m.name(node)} = {_place(place)};")


def _elements(m: Text, x: Elements) -> None:
    """Print a loop over elements as a function."""
    totals = x.totals
    given = ["int64_t count"]
    for name in x.slices:
        kind = m.stored(x.storage[name]) if name in x.storage else "W"
        constant = "" if name in x.stores or name in x.into.values() else "const "
        given.append(f"{constant}{kind}* __restrict {name}")
    given += [f"const {'W' if n.on_host else m.kind(n)} {_bare(m, n)}" for n in x.scalars]
    given += ["int64_t start", "int64_t each"] if x.position is not None else []
    given += ["W* __restrict got"] if totals else []
    m.put(0, "", f"static __attribute__((noinline)) void {x.function}({', '.join(given)}) {{")
    m.put(1, *(f"W s{s.id} = {START[s.op]};" for s in totals))
    m.put(0, f"#pragma omp simd{''.join(f' reduction({COMBINE[s.op]}:s{s.id})' for s in totals)}")
    m.put(1, "for (int64_t i = 0; i < count; ++i) {")
    if x.position is not None:
        m.put(2, "const int64_t position = start + i * each;")
    for name, node in x.loads.items():
        here = f"{name}[i]"
        text = (
            f"widen({here})"
            if name in x.storage
            else f"{here} != 0"
            if node.dtype == "bool"
            else here
        )
        m.put(2, f"const {m.kind(node)} {m.name(node)} = {text};")
    for node in x.nodes:
        m.put(2, f"const {m.kind(node)} {m.name(node)} = {m.expression(node)};")
    for name, node in x.stores.items():
        here = f"{name}[i]"
        only = f"if ({m.name(x.guards[name])}) " if name in x.guards else ""
        if name in x.storage:
            m.put(2, f"{only}narrow({m.name(node)}, {here});")
        else:  # g++ makes no vectors of a conversion
            value = f"{m.name(node)}{' ? (W)1 : (W)0' if node.dtype == 'bool' else ''}"
            m.put(2, f"{only}{here} = {value};")
    for s, node in x.sums.items():
        m.put(2, f"{m.take(s, f'{x.into[s]}[i]' if s in x.into else f's{s.id}', m.name(node))};")
    m.put(1, "}", *(f"got[{i}] = s{s.id};" for i, s in enumerate(totals)))
    m.put(0, "}")


def _bare(m: Text, n: Node) -> str:
    """The name of a value as a loop takes it."""
    return f"h{m.scalar[n]}" if n.on_host else m.name(n)
