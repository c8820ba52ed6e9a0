"""Printing a program as the text of a Python module, whose functions Numba compiles."""

from collections.abc import Sequence

from arrayopt.codecs import BLOCK as BLOCK_SIZE
from arrayopt.codecs import STORED
from arrayopt.engines.numba.text import REST, UNITS, Text
from arrayopt.fusion.bulk import Buffer, Codes, Elements, Multiply, Spread
from arrayopt.fusion.graph import Node
from arrayopt.fusion.index import Index, number
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


def index(number: Index, within: int = 0) -> str:
    """The text of a number; in parentheses where what it is within binds as strongly, or more."""
    if number.op == "column":
        return f"table[row, {' + '.join([number.args[0], *(index(x) for x in number.args[1:])])}]"
    if number.op in ("name", "number"):
        return str(number.args[0])
    if number.op in ("min", "max"):
        return f"{number.op}({', '.join(map(index, number.args))})"
    left, right = number.args
    strength = STRENGTH[number.op]
    text = f"{index(left, strength - 1)} {number.op} {index(right, strength)}"
    return f"({text})" if strength <= within else text


def print_copies(m: Text) -> None:
    """Print what copies matrices into planes, and back, for each dtype that there is."""
    for kind in dict.fromkeys(m.storage.values()):
        load, store = m.load(kind, "x[i * count]"), m.store(kind, "y[i]")
        m.put(0, *COPIES.format(kind=kind, load=load, store=store, block=BLOCK).splitlines())


def print_function(text: Text, function: Function) -> None:
    """Print a function, after the loops over elements that it calls."""
    for elements in elements_of(function.body):
        _elements(text, elements)
    given = ", ".join([ARGUMENTS[function.shared], *(f"AT_{x}" for x in function.scratch)])
    text.put(0, "", "", "@inner", f"def {function.name}({given}):")
    _statements(text, 1, function.body)
    text.put(1, "return")


def _statements(text: Text, depth: int, body: Sequence[Statement]) -> None:
    """Print statements."""
    for statement in body:
        match statement:
            case Let(name, value):
                text.put(depth, f"{name} = {index(value)}")
            case Array(name, size, address):
                text.array(depth, name, index(size), None if address is None else index(address))
            case View(name, room, first, size):
                text.put(depth, f"{name} = {room}[{index(first)} : {index(first + size)}]")
            case Read(node, place, wide):
                _read(text, depth, node, place, "" if wide else "W")
            case Compute(node):
                text.put(depth, f"{text.name(node)} = {text.expression(node)}")
            case Start(name, reduction):
                kept = _place(name) if isinstance(name, Place) else name
                text.put(depth, f"{kept} = {text.start(reduction)}")
            case Fill(view, size, reduction):
                text.put(depth, f"{view}[: {index(size)}] = W({text.start(reduction)})")
            case Take(reduction, into, value):
                kept = _place(into) if isinstance(into, Place) else into
                text.put(depth, text.take(reduction, kept, _place(value)))
            case Write(place, value):
                text.put(depth, f"{_place(place)} = {_value(text, value)}")
            case Loop(name, first, end, inside, turned):
                stretch = f"{index(first)}, {index(end)}".removeprefix("0, ")
                if turned:
                    stretch = f"{index(end - 1)}, {index(first - 1)}, -1"
                text.put(depth, f"for {name} in range({stretch}):")
                _statements(text, depth + 1, inside)
            case When(left, right, then, otherwise):
                text.put(depth, f"if {index(left)} == {index(right)}:")
                _statements(text, depth + 1, then)
                text.put(depth, "else:")
                _statements(text, depth + 1, otherwise)
            case Buffer(name, size):
                text.put(depth, f"{name} = np.empty({size}, W)")
            case Codes():
                text.put(depth, _codes(text, statement))
            case Elements():
                _call(text, depth, statement)
            case Multiply(a, b, out, first, end, sides, turned, symmetric):
                given = ["table[row, BLAS]"]
                for array, start in (a, b, out):
                    given.append(f"table[row, AT_{array}] + {index(start, 1)} * SIZE")
                given += map(index, (first, end, *sides))
                given += [str(int(flag)) for flag in (*turned, symmetric)]
                text.put(depth, f"multiply({', '.join(given)})")
            case Spread(back, array, first, end, planes, each):
                stretch = f"at_{array}[{index(first)} : {index(end)}]"
                way = "give" if back else "take"
                text.put(depth, f"{way}_{text.storage[array]}({stretch}, {planes}, {index(each)})")


def _codes(text: Text, slot: Codes) -> str:
    """The call that reads codes, or stores them."""
    block = slot.first // BLOCK_SIZE
    blocks = (slot.count + (BLOCK_SIZE - 1)) // BLOCK_SIZE
    stretch = f"at_{slot.array}[{index(slot.first)} : {index(slot.first + slot.count)}]"
    scales = f"at_{slot.scale}[{index(block)} : {index(block + blocks)}]"
    top = f"np.float32({STORED[text.storage[slot.array]].top})"
    way = "quantize" if slot.store else "dequantize"
    values = f"{slot.buffer}[{index(slot.at)} : {index(slot.at + slot.count)}]"
    return f"{way}({stretch}, {scales}, {values}, {top})"


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


def _elements(printer: Text, loop: Elements) -> None:
    """Print a loop over elements as a function."""
    totals = loop.totals
    each = loop.position is not None and loop.stride != number(1)
    given = [
        *loop.slices,
        *map(printer.bare, loop.scalars),
        *(["start"] if loop.position else []),
        *(["each"] if each else []),
    ]
    printer.position = "(start + i * each)" if each else "(start + i)"
    printer.put(0, "", "", "@inner", f"def {loop.function}({', '.join(given)}):")
    printer.put(1, *(f"s{s.id} = W({printer.start(s)})" for s in totals))
    printer.put(1, f"for i in range({next(iter(loop.slices))}.size):")
    for slice_name, node in loop.loads.items():
        stored = loop.storage.get(slice_name)
        here = f"{slice_name}[i]"
        text = (
            printer.typed(node, here)
            if stored is None
            else printer.load(printer.storage[stored], here)
        )
        printer.put(2, f"{printer.name(node)} = {text}")
    for node in loop.nodes:
        printer.put(2, f"{printer.name(node)} = {printer.expression(node)}")
    for slice_name, node in loop.stores.items():
        stored = loop.storage.get(slice_name)
        text = (
            printer.name(node)
            if stored is None
            else printer.store(printer.storage[stored], printer.name(node))
        )
        only = f"if {printer.name(loop.guards[slice_name])}: " if slice_name in loop.guards else ""
        printer.put(2, f"{only}{slice_name}[i] = {text}")
    for s, node in loop.sums.items():
        printer.put(
            2,
            printer.take(
                s, f"{loop.into[s]}[i]" if s in loop.into else f"s{s.id}", printer.name(node)
            ),
        )
    printer.put(1, f"return ({''.join(f's{s.id}, ' for s in totals)})" if totals else "return")


def _call(text: Text, depth: int, loop: Elements) -> None:
    """Print the call of a loop over elements."""
    given = []
    for array, first, end in loop.slices.values():
        given.append(f"{array}[{index(first)} : {index(end)}]")
    given += map(text.bare, loop.scalars)
    if loop.position is not None and loop.stride is not None:
        given += [index(loop.position), *([index(loop.stride)] if loop.stride != number(1) else [])]
    kept = "got = " if loop.totals else ""
    text.put(depth, f"{kept}{loop.function}({', '.join(given)})")
