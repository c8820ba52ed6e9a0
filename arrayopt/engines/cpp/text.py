"""Printing a program as C++."""

import math
from collections.abc import Sequence

from arrayopt.codecs import BLOCK, STORED
from arrayopt.engines.native.columns import columns
from arrayopt.engines.written import Written
from arrayopt.fusion.bulk import Buffer, Codes, Elements, Multiply, Spread
from arrayopt.fusion.graph import POSITION, Node, Spare
from arrayopt.fusion.index import Index
from arrayopt.fusion.layout import GEOMETRY, Layout
from arrayopt.fusion.ops import REDUCTIONS
from arrayopt.fusion.plan import Plan
from arrayopt.fusion.program import (
    Array,
    Compute,
    Fill,
    Function,
    Let,
    Loop,
    Place,
    Read,
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
ROOMS = {"values": "double", "scalars": "double", "part": "double", "work": "W"}
REST = "int64_t* t, const double* scalars, double* values, W* work, double* part"
ARGUMENTS = {
    "": REST,
    "units": f"int64_t lo, int64_t hi, int64_t thread, {REST}",
    "threads": f"int64_t thread, int64_t threads, {REST}",
}
"""What a function takes, by how threads share it."""


def index(number: Index, within: int = 0) -> str:
    """The text of a number; in parentheses where what it is within binds as strongly, or more."""
    if number.op == "column":
        return f"t[{' + '.join([number.args[0], *(index(x) for x in number.args[1:])])}]"
    if number.op in ("name", "number"):
        return str(number.args[0])
    if number.op in FUNCTIONS:
        return f"{FUNCTIONS[number.op]}({', '.join(map(index, number.args))})"
    left, right = number.args
    strength = STRENGTH[number.op]
    text = f"{index(left, strength - 1)} {number.op[0]} {index(right, strength)}"
    return f"({text})" if strength <= within else text


class Text(Written):
    """The text of a source, being written."""

    language = "cuda"  # its texts are C++, with the functions of the headers

    def __init__(self, plan: Plan, dtype: str, grad_dtype: str, where: Layout) -> None:
        super().__init__(plan, dtype, grad_dtype, where, GEOMETRY)
        self.columns = columns(plan, where)

    def name(self, node: Node) -> str:
        """What a value is called in the text."""
        if node.op == "const":
            if node.dtype == "bool":
                return str(node.data).lower()
            special = (
                "NAN" if math.isnan(node.data) else "INFINITY" if node.data > 0 else "-INFINITY"
            )
            return f"(W){node.data!r}" if math.isfinite(node.data) else f"(W){special}"
        if node.op == POSITION:
            return "position"
        if node.on_host:
            return (
                f"h{self.scalar[node]}" if node.dtype != "bool" else f"(h{self.scalar[node]} != 0)"
            )
        return f"{node.data}_" if node.op == "input" else f"x{node.id}".replace("-", "_")

    def kind(self, n: Node, real: str = "W") -> str:
        """The C++ type of a value."""
        return {"bool": "bool", "complex": "Complex", "real": real}[n.dtype]

    def stored(self, array: str) -> str:
        """The C++ type of what an array holds."""
        return STORED[self.storage[array]].cuda


def print_function(text: Text, function: Function) -> None:
    """Print a function, after the loops over elements that it calls."""
    most = 0
    for elements in elements_of(function.body):
        _elements(text, elements)
        most = max(most, len(elements.totals))
    given = ", ".join([ARGUMENTS[function.shared], *(f"int64_t AT_{x}" for x in function.scratch)])
    text.put(0, "", f"static void {function.name}({given}) {{")
    text.put(1, *([f"W got[{most}];"] if most else []))
    _statements(text, 1, function.body)
    text.put(0, "}")


def _statements(text: Text, depth: int, body: Sequence[Statement]) -> None:
    """Print statements."""
    known: set[str] = set()
    for statement in body:
        match statement:
            case Let(name, value):
                text.put(depth, f"{'' if name in known else 'int64_t '}{name} = {index(value)};")
                known.add(name)
            case Array(name, _, address):
                kind = text.stored(name)
                where = f"t[AT_{name}]" if address is None else index(address)
                text.put(depth, f"{kind}* const at_{name} = ({kind}*){where};")
            case View(name, room, first, _):
                text.put(depth, f"auto* const {name} = {room} + {index(first)};")
            case Read(node, place, wide):
                if _bare(text, node) not in known:
                    _read(text, depth, node, place, wide=wide)
                known.add(_bare(text, node))
            case Compute(node):
                kind = "auto" if node.dtype == "real" else text.kind(node)
                text.put(depth, f"const {kind} {text.name(node)} = {text.expression(node)};")
                known.add(text.name(node))
            case Start(Place() as place, reduction):
                text.put(depth, f"{_place(place)} = {text.start(reduction)};")
            case Start(str() as name, reduction):
                text.put(
                    depth, f"{'' if name in known else 'double '}{name} = {text.start(reduction)};"
                )
                known.add(name)
            case Fill(view, size, reduction):
                text.put(
                    depth,
                    f"for (int64_t i = 0; i < {index(size)}; ++i) {view}[i] ="
                    f" {text.start(reduction)};",
                )
            case Take(reduction, into, value):
                kept = _place(into) if isinstance(into, Place) else into
                text.put(depth, f"{text.take(reduction, kept, _place(value))};")
            case Write(place, value):
                _write(text, depth, place, value)
            case Loop(name, first, end, inside, turned):
                a, b = index(first), index(end)
                head = f"int64_t {name} = {a}; {name} < {b}; ++{name}"
                if turned:
                    head = f"int64_t {name} = {index(end - 1)}; {name} >= {a}; --{name}"
                text.put(depth, f"for ({head}) {{")
                _statements(text, depth + 1, inside)
                text.put(depth, "}")
            case When(left, right, then, otherwise):
                text.put(depth, f"if ({index(left)} == {index(right)}) {{")
                _statements(text, depth + 1, then)
                text.put(depth, "} else {")
                _statements(text, depth + 1, otherwise)
                text.put(depth, "}")
            case Multiply(a, b, out, first, end, sides, turned, symmetric):
                arrays = [f"(W*)t[AT_{array}] + {index(start)}" for array, start in (a, b, out)]
                numbers = [
                    *map(index, (first, end, *sides)),
                    *(str(int(flag)) for flag in (*turned, symmetric)),
                ]
                text.put(depth, f"multiply((void*)t[BLAS], {', '.join([*arrays, *numbers])});")
            case Spread(back, array, first, end, planes, each):
                way, source = "give" if back else "take", f"at_{array} + {index(first)}"
                text.put(
                    depth,
                    f"{way}({source}, {planes}, {index((end - first) // each)}, {index(each)});",
                )
            case Buffer(name, size):
                text.put(depth, f"W {name}[{size}];")
            case Codes(store, array, scale, first, count, buffer, at):
                codes, scales = (
                    f"at_{array} + {index(first)}",
                    f"at_{scale} + {index(first // BLOCK)}",
                )
                way = "quantize" if store else "dequantize"
                text.put(
                    depth, f"{way}({codes}, {scales}, {buffer} + {index(at)}, {index(count)});"
                )
            case Elements():
                given = [
                    index(statement.count),
                    *(f"{array} + {index(first)}" for array, first, _ in statement.slices.values()),
                ]
                given += [_bare(text, n) for n in statement.scalars]
                if statement.position is not None and statement.stride is not None:
                    given += [index(statement.position), index(statement.stride)]
                given += ["got"] if statement.totals else []
                text.put(depth, f"{statement.function}({', '.join(given)});")


def _place(place: Place) -> str:
    """What lies in a place."""
    return f"{place.room}[{index(place.index)}]"


def _write(printer: Text, depth: int, place: Place, value: "Node | str | Place") -> None:
    text = (
        _place(value)
        if isinstance(value, Place)
        else value
        if isinstance(value, str)
        else printer.name(value)
    )
    printer.put(depth, f"{_place(place)} = {text};")


def _read(text: Text, depth: int, node: Node, place: Place, *, wide: bool) -> None:
    """A scalar keeps its number, also where it is a truth value."""
    if place.room == "scalars":
        name, kind = f"h{text.scalar[node]}", "double" if wide else "W"
        text.put(depth, f"const {kind} {name} = ({kind}){_place(place)};")
    elif node.dtype == "bool":
        text.put(depth, f"const bool {text.name(node)} = {_place(place)} != 0;")
    else:
        kind = "auto" if wide else "W"
        text.put(depth, f"const {kind} {text.name(node)} = {_place(place)};")


def _elements(printer: Text, loop: Elements) -> None:
    """Print a loop over elements as a function."""
    totals = loop.totals
    given = {"count": "int64_t count"}
    for name in loop.slices:
        kind = printer.stored(loop.storage[name]) if name in loop.storage else "W"
        constant = "" if name in loop.stores or name in loop.into.values() else "const "
        given[name] = f"{constant}{kind}* __restrict {name}"
    for node in loop.scalars:
        kind = "W" if node.on_host else printer.kind(node)
        given[_bare(printer, node)] = f"const {kind} {_bare(printer, node)}"
    if loop.position is not None:
        given |= {"start": "int64_t start", "each": "int64_t each"}
    given |= {"got": "W* __restrict got"} if totals else {}
    declared = ", ".join(given.values())
    summed = {s.args[0].id for s in totals if not isinstance(s.data, Spare)}
    spare = [s for s in totals if isinstance(s.data, Spare) and s.data.plain in summed]
    spare = [] if loop.stores or loop.into else spare
    function = f"{loop.function}_of" if spare else loop.function
    printer.put(0, "", *(["template <bool all>"] if spare else []))
    printer.put(0, f"static __attribute__((noinline)) void {function}({declared}) {{")
    printer.put(1, *(f"W s{s.id} = {printer.start(s)};" for s in totals))
    clauses = [f" reduction({REDUCTIONS[s.op].simd}:s{s.id})" for s in totals]
    printer.put(0, f"#pragma omp simd{''.join(clauses)}")
    printer.put(1, "for (int64_t i = 0; i < count; ++i) {")
    if loop.position is not None:
        printer.put(2, "const int64_t position = start + i * each;")
    for name, node in loop.loads.items():
        text = f"{name}[i] != 0" if node.dtype == "bool" else f"{name}[i]"
        text = f"widen({name}[i])" if name in loop.storage else text
        printer.put(2, f"const {printer.kind(node)} {printer.name(node)} = {text};")
    for node in loop.nodes:
        text = printer.expression(node)
        if node.op == "where" and node.dtype == "real" and not node.args[0].axes:
            text = f"chosen({', '.join(map(printer.name, node.args))})"
        printer.put(2, f"const {printer.kind(node)} {printer.name(node)} = {text};")
    for name, node in loop.stores.items():
        here = f"{name}[i]"
        only = f"if ({printer.name(loop.guards[name])}) " if name in loop.guards else ""
        if name in loop.storage:
            printer.put(2, f"{only}narrow({printer.name(node)}, {here});")
        else:  # g++ makes no vectors of a conversion
            value = f"{printer.name(node)}{' ? (W)1 : (W)0' if node.dtype == 'bool' else ''}"
            printer.put(2, f"{only}{here} = {value};")
    for s, node in loop.sums.items():
        into = f"{loop.into[s]}[i]" if s in loop.into else f"s{s.id}"
        only = "if (all) " if s in spare else ""
        printer.put(2, f"{only}{printer.take(s, into, printer.name(node))};")
    printer.put(1, "}", *(f"got[{i}] = s{s.id};" for i, s in enumerate(totals)))
    printer.put(0, "}")
    if spare:
        _without(printer, loop, spare, declared, ", ".join(given))


def _without(printer: Text, loop: Elements, spare: list[Node], declared: str, given: str) -> None:
    """Print the function that makes a loop without its spare sums first, and with them where it
    must.
    """
    at = {s.args[0].id: i for i, s in enumerate(loop.totals) if s not in spare}
    enough = dict[str, None]()
    for s in spare:
        i, low, high = at[s.data.plain], s.data.low, s.data.high
        enough[f"got[{i}] >= (W){low!r}"] = None
        enough |= {f"got[{i}] <= (W){high!r}": None} if math.isfinite(high) else {}
    printer.put(0, "", f"static void {loop.function}({declared}) {{")
    printer.put(1, f"{loop.function}_of<false>({given});")
    printer.put(1, f"if (!({' && '.join(enough)})) {loop.function}_of<true>({given});")
    printer.put(0, "}")


def _bare(m: Text, n: Node) -> str:
    """The name of a value as a loop takes it."""
    return f"h{m.scalar[n]}" if n.on_host else m.name(n)
