"""Printing a program as the text of a Python module, whose functions Numba compiles."""

from collections.abc import Sequence

from arrayopt.codecs import BLOCK as BLOCK_SIZE
from arrayopt.codecs import STORED
from arrayopt.engines.numba.text import REST, UNITS, Text
from arrayopt.fusion.graph import Node
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
    number,
)

__all__ = ["ARGUMENTS", "print_copies", "print_function"]

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
"""So many elements are copied at a time: they stay in the first cache while each plane in turn
takes its own.
"""

STRENGTH = {"+": 1, "-": 1, "*": 2, "//": 2, "%": 2}


ARGUMENTS = {
    "": f"row, {REST}",
    "units": f"{UNITS}, {REST}",
    "threads": f"row, thread, threads, {REST}",
}
"""What a function takes, by how threads share it."""


def index(x: Index, within: int = 0) -> str:
    """The text of a number; in parentheses where what it is within binds as strongly, or more."""
    if x.op == "column":
        return f"table[row, {x.args[0]}]"
    if x.op in ("name", "number"):
        return str(x.args[0])
    if x.op in ("min", "max"):
        return f"{x.op}({', '.join(map(index, x.args))})"
    left, right = x.args
    strength = STRENGTH[x.op]
    text = f"{index(left, strength - 1)} {x.op} {index(right, strength)}"
    return f"({text})" if strength <= within else text


def print_copies(m: Text) -> None:
    """Print what copies matrices into planes, and back, for each dtype that there is."""
    for kind in dict.fromkeys(m.storage.values()):
        load, store = m.load(kind, "x[i * count]"), m.store(kind, "y[i]")
        m.put(0, *COPIES.format(kind=kind, load=load, store=store, block=BLOCK).splitlines())


def print_function(m: Text, function: Function) -> None:
    """Print a function, after the loops over elements that it calls."""
    for elements in elements_of(function.body):
        _elements(m, elements)
    given = ", ".join([ARGUMENTS[function.shared], *(f"AT_{x}" for x in function.scratch)])
    m.put(0, "", "", "@inner", f"def {function.name}({given}):")
    _statements(m, 1, function.body)
    m.put(1, "return")


def _statements(m: Text, depth: int, body: Sequence[Statement]) -> None:
    """Print statements."""
    for x in body:
        match x:
            case Let(name, value):
                m.put(depth, f"{name} = {index(value)}")
            case Array(name, size):
                m.array(depth, name, index(size))
            case View(name, room, first, size):
                m.put(depth, f"{name} = {room}[{index(first)} : {index(first + size)}]")
            case Read(node, place, wide):
                _read(m, depth, node, place, "" if wide else "W")
            case Compute(node):
                m.put(depth, f"{m.name(node)} = {m.expression(node)}")
            case Start(name, reduction):
                m.put(depth, f"{name} = {m.start(reduction)}")
            case Fill(view, _, reduction):
                m.put(depth, f"{view}[:] = W({m.start(reduction)})")
            case Take(reduction, into, value):
                m.put(depth, m.take(reduction, into, _place(value)))
            case Write(place, value):
                m.put(depth, f"{_place(place)} = {_value(m, value)}")
            case Loop(name, first, end, inside, turned):
                a, b = index(first), index(end)
                stretch = (
                    f"{index(end - 1)}, {index(first - 1)}, -1"
                    if turned
                    else b
                    if a == "0"
                    else f"{a}, {b}"
                )
                m.put(depth, f"for {name} in range({stretch}):")
                _statements(m, depth + 1, inside)
            case When(left, right, then, otherwise):
                m.put(depth, f"if {index(left)} == {index(right)}:")
                _statements(m, depth + 1, then)
                m.put(depth, "else:")
                _statements(m, depth + 1, otherwise)
            case Buffer(name, size):
                m.put(depth, f"{name} = np.empty({size}, W)")
            case Codes():
                m.put(depth, _codes(m, x))
            case Elements():
                _call(m, depth, x)
            case Multiply(a, b, out, first, end, sides, turned, symmetric):
                at = [
                    f"table[row, AT_{array}] + {index(start, 1)} * SIZE"
                    for array, start in (a, b, out)
                ]
                numbers = [
                    *map(index, (first, end, *sides)),
                    *(str(int(flag)) for flag in (*turned, symmetric)),
                ]
                m.put(depth, f"multiply(table[row, BLAS], {', '.join([*at, *numbers])})")
            case Spread(back, array, first, end, planes, each):
                stretch = f"at_{array}[{index(first)} : {index(end)}]"
                way = "give" if back else "take"
                m.put(depth, f"{way}_{m.storage[array]}({stretch}, {planes}, {index(each)})")


def _codes(m: Text, x: Codes) -> str:
    """The call that reads codes, or stores them."""
    block = x.first // BLOCK_SIZE
    blocks = (x.count + (BLOCK_SIZE - 1)) // BLOCK_SIZE
    codes = f"at_{x.array}[{index(x.first)} : {index(x.first + x.count)}]"
    scales = f"at_{x.scale}[{index(block)} : {index(block + blocks)}]"
    top = f"np.float32({STORED[m.storage[x.array]].top})"
    way = "quantize" if x.store else "dequantize"
    return f"{way}({codes}, {scales}, {x.buffer}[: {index(x.count)}], {top})"


def _place(place: Place) -> str:
    """What lies in a place."""
    where = index(place.index)
    return f"{place.room}[{f'row, {where}' if place.room in ('values', 'scalars') else where}]"


def _value(m: Text, value: Node | str | Place) -> str:
    """What is written."""
    if isinstance(value, Place):
        return _place(value)
    return value if isinstance(value, str) else m.name(value)


def _read(m: Text, depth: int, node: Node, place: Place, cast: str) -> None:
    """A scalar keeps its number, also where it is a truth value."""
    if place.room == "scalars":
        m.put(depth, f"{m.bare(node)} = {f'{cast}({_place(place)})' if cast else _place(place)}")
    else:
        m.put(depth, f"{m.name(node)} = {m.typed(node, _place(place), cast)}")


def _elements(m: Text, x: Elements) -> None:
    """Print a loop over elements as a function."""
    totals = x.totals
    each = x.position is not None and x.stride != number(1)
    given = [
        *x.slices,
        *map(m.bare, x.scalars),
        *(["start"] if x.position else []),
        *(["each"] if each else []),
    ]
    m.position = "(start + i * each)" if each else "(start + i)"
    m.put(0, "", "", "@inner", f"def {x.function}({', '.join(given)}):")
    m.put(1, *(f"s{s.id} = W({m.start(s)})" for s in totals))
    m.put(1, f"for i in range({next(iter(x.slices))}.size):")
    for slice_name, node in x.loads.items():
        stored = x.storage.get(slice_name)
        here = f"{slice_name}[i]"
        text = m.typed(node, here) if stored is None else m.load(m.storage[stored], here)
        m.put(2, f"{m.name(node)} = {text}")
    for node in x.nodes:
        m.put(2, f"{m.name(node)} = {m.expression(node)}")
    for slice_name, node in x.stores.items():
        stored = x.storage.get(slice_name)
        text = m.name(node) if stored is None else m.store(m.storage[stored], m.name(node))
        only = f"if {m.name(x.guards[slice_name])}: " if slice_name in x.guards else ""
        m.put(2, f"{only}{slice_name}[i] = {text}")
    for s, node in x.sums.items():
        m.put(2, m.take(s, f"{x.into[s]}[i]" if s in x.into else f"s{s.id}", m.name(node)))
    m.put(1, f"return ({''.join(f's{s.id}, ' for s in totals)})" if totals else "return")


def _call(m: Text, depth: int, x: Elements) -> None:
    """Print the call of a loop over elements."""
    given = [f"{array}[{index(first)} : {index(end)}]" for array, first, end in x.slices.values()]
    given += map(m.bare, x.scalars)
    if x.position is not None and x.stride is not None:
        given += [index(x.position), *([index(x.stride)] if x.stride != number(1) else [])]
    kept = "got = " if x.totals else ""
    m.put(depth, f"{kept}{x.function}({', '.join(given)})")
