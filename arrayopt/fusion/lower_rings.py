"""Lowering passes over rings to loops over members and elements, for CPUs and devices."""

from collections.abc import Callable, Iterable, Iterator, Sequence

from arrayopt.fusion import bulk, program
from arrayopt.fusion.graph import Node, operands
from arrayopt.fusion.index import ZERO, Index, Place, column, least, name, number
from arrayopt.fusion.passes import Pass
from arrayopt.fusion.ring_members import RingLoop
from arrayopt.fusion.rings import Rolled
from arrayopt.state.quantized import scale_of

STRETCH = 1024
"""The elements that all parts process before the next ones: they stay in the L1 cache."""

MEMBER, OTHER = name("member"), name("other")
"""The first and the second member of a pair."""

Into = Callable[[Node, Index | None], Place]
"""Returns the place of a reduction's result, or of that for the member or pair `after` it."""


def member_values(rolled: Rolled) -> Iterator[program.Statement]:
    """Yield statements that put the values of each member into buffers."""
    for one, values in rolled.own_values.items():
        yield bulk.Buffer(str(one.data), len(values))
        for j, value in enumerate(values):
            yield program.Write(Place(str(one.data), number(j)), value)


def buffers_of(rolled: Rolled) -> list[program.Statement]:
    """Return the buffers for values that parts leave for later parts, for a turn's elements."""
    kept = set[Node]()
    for part in rolled.parts:
        kept |= {*part.kept, *part.added}
    return [bulk.Buffer(_buffer(n), STRETCH, n.kind) for n in sorted(kept, key=lambda n: n.id)]


def initialized(rolled: Rolled, into: Into) -> Iterator[program.Statement]:
    """Yield statements that set the place of each result to the initial value of its reduction."""
    for part in rolled.parts:
        for reduction in part.sums:
            start = program.Start(_result(part, reduction, into), reduction)
            yield from _looped(part, [start])


def turns_over(
    index: int, pass_: Pass, rolled: Rolled, into: Into, codes: Sequence[str] = ()
) -> program.Loop:
    """Return a loop that runs all parts on one `STRETCH` of a unit after the other."""
    inside, begun = list[program.Statement](), set[Node]()
    for at, part in enumerate(rolled.parts):
        for root in part.added:
            if root in begun:
                continue
            zero = Node("sum", (root,), "", root.level, root.kind)
            inside.append(program.Fill(_buffer(root), name("end") - name("first"), zero))
        begun |= {*part.added}
        body = _elements(f"pass_{index}_{at}", pass_, part, rolled, codes)
        for order, reduction in enumerate(part.sums):
            got = Place("got", number(order))
            body.append(program.Take(reduction, _result(part, reduction, into), got))
        inside += _looped(part, body)
    return in_turns(inside)


def in_turns(body: Iterable[program.Statement]) -> program.Loop:
    """Return a loop that runs statements on one `STRETCH` of a unit (o to e) after the other."""
    first = program.Let("first", name("o") + name("turn") * STRETCH)
    end = program.Let("end", least(name("e"), name("first") + STRETCH))
    turns = (name("e") - name("o") + (STRETCH - 1)) // STRETCH
    return program.Loop("turn", ZERO, turns, (first, end, *body))


def _elements(
    function: str, pass_: Pass, part: RingLoop, rolled: Rolled, codes: Sequence[str]
) -> list[program.Statement]:
    """Return the loop over elements of a part, after the reads of a member's arrays and values."""
    before: list[program.Statement] = []
    arrays = dict.fromkeys([*part.loads, *part.stores])
    storage = {f"at_{array}": array for array in arrays}
    slices = bulk.sliced(storage, name("first"), name("end"))
    for array in arrays:
        if array in rolled.first_of:
            first, which = rolled.first_of[array], _member(part, rolled.nth_of[array])
            before.append(program.Array(array, name("size"), column(f"AT_{first}", which)))
            if array in codes:
                scales = column(f"AT_{scale_of(first)}", which)
                before.append(program.Array(scale_of(array), name("size"), scales))
    buffers = map(_buffer, [*part.taken, *part.kept, *part.added])
    slices |= bulk.sliced(buffers, ZERO, name("end") - name("first"))
    used = dict.fromkeys(operands(part.nodes))
    used |= dict.fromkeys([*part.guards.values(), *part.stores.values(), *part.sums.values()])
    scalars = [node for node in used if node.axes != pass_.axes and node.op != "const"]
    for node in scalars:
        if node in rolled.own_values:
            where = _member(part, rolled.nth_of[str(node.data)])
            before.append(program.Read(node, Place(str(node.data), where)))
    loads, stores = bulk.stored(part.loads), bulk.stored(part.stores)
    loads |= {_buffer(node): node for node in part.taken}
    stores |= {_buffer(node): node for node in part.kept}
    for root, (so_far, new) in part.added.items():
        loads[_buffer(root)], stores[_buffer(root)] = so_far, new
    given = slices, tuple(scalars), loads, part.nodes, stores, part.sums
    guards = bulk.stored(part.guards)
    return [*before, bulk.Elements(function, *given, storage=storage, guards=guards)]


def _buffer(node: Node) -> str:
    """Return the name of a value's buffer."""
    return f"_kept{node.id}"


def _result(part: RingLoop, reduction: Node, into: Into) -> Place:
    """Return the place of a reduction's result, for the current member or pair."""
    after = {
        "several": name("several") * part.at_once,
        "rest": number(part.members - part.at_once),
        "square": MEMBER * part.members + OTHER,
        "triangle": MEMBER * (MEMBER + 1) // 2 + OTHER,
    }
    return into(reduction, after.get(part.over))


def _member(part: RingLoop, which: int) -> Index:
    """Return the current member that a name stands for."""
    if part.over == "several":
        return name("several") * part.at_once + which
    if part.over == "rest":
        return number(part.members - part.at_once + which)
    return MEMBER if which == 0 else OTHER


def _looped(part: RingLoop, body: Sequence[program.Statement]) -> list[program.Statement]:
    """Return statements in the loops over members, or pairs, of a part."""
    if part.over == "once":
        return [*body]
    inside, every = tuple(body), number(part.members)
    if part.over in ("several", "rest"):
        times = part.members // part.at_once if part.over == "several" else 1
        return [program.Loop(part.over, ZERO, number(times), inside)]
    end = every if part.over == "square" else MEMBER + 1
    return [program.Loop("member", ZERO, every, (program.Loop("other", ZERO, end, inside),))]
