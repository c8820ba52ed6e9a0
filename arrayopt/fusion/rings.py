"""Passes over rings, as loops over the members that `ring_members.py` has found.

A ring is k arrays, its members. A rule does the same with each, so its trace has the same
operations k times. They become loops, so neither the code of a pass nor the registers that it needs
grow with k. A pass becomes parts, each a loop over the elements: for all members at once, for some
members at a time, or for each pair of members.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain, count, product

from arrayopt.fusion.graph import Node, operands
from arrayopt.fusion.passes import Pass
from arrayopt.fusion.ring_members import Members, RingLoop, UnlikeError, families, in_order

MEMBERS_AT_ONCE = 4
"""The members in one loop: reading several arrays is faster. Half if they need more registers."""


def rolled(one: Pass, slots: Sequence[str], least: int, *, wide: bool = False) -> "Rolled | None":
    """Return a pass as loops over members; None if it has no rings, or treats members differently.

    `slots` are all slots, in the order of their columns in the table. Rings have at `least` so many
    members. Members are `wide` if they are complex, or stored as codes.
    """
    rings = families(one.arrays, least)
    if not rings or one.draws or one.multiplies:
        return None
    if any(n.op == "complex" and n.axes != one.axes for n in one.sources):
        return None
    for members in rings.values():
        first = slots.index(members[0]) if members[0] in slots else 0
        if list(slots[first : first + len(members)]) != members:
            return None
    try:
        return Rolled(one, rings, MEMBERS_AT_ONCE // 2 if wide else MEMBERS_AT_ONCE)
    except UnlikeError:
        return None


class Rolled(Members):
    """A pass over rings, in `parts`: for each stage, one in `once`, and those `by_members`."""

    def __init__(self, one: Pass, rings: dict[str, list[str]], at_once: int) -> None:
        super().__init__(one, rings)
        self.at_once = at_once
        self.numbers = count(1 << 29)
        self.once, self.by_members = dict[int, RingLoop](), dict[int, list[RingLoop]]()
        self.parts = self._made()

    def _made(self) -> list[RingLoop]:
        """Return the parts, in order."""
        at_once = self.at_once
        for stage in range(max(self.stage.values()) + 2):
            self.once[stage] = RingLoop("once")
            self.by_members[stage] = []
            for members in dict.fromkeys(map(len, self.rings.values())):
                if members >= at_once:
                    self.by_members[stage].append(RingLoop("several", members, at_once))
                if members % at_once:
                    self.by_members[stage].append(RingLoop("rest", members, members % at_once))
        self._sums()
        self._chains()
        for part in chain.from_iterable(self.by_members.values()):
            self._complete(part, ())
        self._member_stores()
        self._place()
        made = list[RingLoop]()
        for stage, part in self.once.items():
            made += filter(None, [part, *self.by_members[stage]])
        for at, part in enumerate(made):
            written = self._rings_of(part.stores)
            for later in made[at + 1 :]:
                others = part.over == "several" and later.over == "rest"  # other members
                if not others and written & self._rings_of(later.loads):
                    raise UnlikeError
        return made

    def _rings_of(self, names: Iterable[str]) -> set[str]:
        """Return the first members of the rings that some names stand for."""
        return {self.first_of[name] for name in names if name in self.first_of}

    def _sums(self) -> None:
        """Assign each reduction to a part."""
        left = in_order(self.one)
        while left:
            value = left[0].args[0]
            if not self.members_of[value]:
                self.once[self.stage[value]].sums[left.pop(0)] = value
                continue
            members, _ = next(iter(self.members_of[value]))
            values = tuple(operands(left[:members]))
            if self.is_of_each(values):
                for part in self._of_members(self.stage[value], members):
                    for j in range(part.at_once):
                        part.sums[left[j]] = self.same(values, j)
                del left[:members]
            else:
                del left[: self._pairs(left, members)]

    def _pairs(self, sums: list[Node], members: int) -> int:
        """Assign reductions over all pairs of members to a part. Return their number."""
        square = list(product(range(members), range(members)))
        triangle = [(i, j) for i, j in square if j <= i]
        for over, pairs in (("square", square), ("triangle", triangle)):
            values = operands(sums[: len(pairs)])
            value = self._of_pairs(pairs, values) if len(values) == len(pairs) else None
            if value is not None:
                part = RingLoop(over, members, sums={sums[0]: value})
                self.by_members[max(self.stage[x] for x in values)].insert(0, part)
                return len(pairs)
        raise UnlikeError

    def _of_pairs(self, pairs: list[tuple[int, int]], values: Sequence[Node]) -> Node | None:
        """The node that stands for a value of each pair; None if values are not computed alike."""
        first, args = values[0], list[Node]()
        if not first.args or len({(x.op, len(x.args), x.data) for x in values}) > 1:
            return None
        for operand in zip(*(x.args for x in values), strict=True):  # that of each pair
            of_first, of_second = dict[int, Node](), dict[int, Node]()  # by member of the pair
            for (i, j), node in zip(pairs, operand, strict=True):
                of_first.setdefault(i, node)
                of_second.setdefault(j, node)
            if operand == tuple(of_first[i] for i, _ in pairs):
                made: Node | None = self.same(tuple(of_first.values()))
            elif operand == tuple(of_second[j] for _, j in pairs):
                made = self.same(tuple(of_second.values()), 1)
            else:
                made = self._of_pairs(pairs, operand)
            if made is None:
                return None
            args.append(made)
        return replace(first, args=tuple(args))

    def _member_stores(self) -> None:
        """Assign stores to members to parts, after all parts that read the members."""
        for names in self.rings.values():
            there = self.one.stores.keys() & names
            guarded = self.one.guards.keys() & names
            if not there:
                continue
            if len(there) < len(names) or 0 < len(guarded) < len(names):
                raise UnlikeError
            values = [self.one.new[name] for name in names]
            stage = max(self.stage.get(self.one.stores[name], 0) for name in names)
            for at, parts in self.by_members.items():
                if any(self.first_of.get(name) == names[0] for name in _loaded(parts)):
                    stage = max(stage, at)
            for part in self._of_members(stage, len(names)):
                for j, name in enumerate(names[: part.at_once]):
                    part.stores[name] = self.same(tuple(values), j)
                    self.first_of[name], self.nth_of[name] = names[0], j
                    if guarded:
                        guards = tuple(self.one.guards[name] for name in names)
                        part.guards[name] = self.same(guards, j)

    def _chains(self) -> None:
        """Assign sums over members to parts."""
        for at, (root, terms) in enumerate(self.terms.items()):
            form = root.axes, root.level, root.kind
            for part in self._of_members(self.stage[root] - 1, len(terms)):
                so_far = new = Node("input", (), *form, f"_sum{at}", -1)
                for j in range(part.at_once):
                    term = self.same(tuple(terms), j)
                    new = Node("add", (new, term), *form, None, next(self.numbers))
                part.added[root] = so_far, new

    def _of_members(self, stage: int, members: int) -> list[RingLoop]:
        """The parts of a stage that together go through all members of rings with so many."""
        return [x for x in self.by_members[stage] if x.at_once and x.members == members]

    def _place(self) -> None:
        """Complete all parts. Arrays of no ring are written when no part reads old values."""
        ready = {*self.terms}
        for stage, part in self.once.items():
            for other in self.by_members[stage]:
                self._complete(other, ready)
                new = [node for node in other.taken if node not in ready]
                part.kept += new
                ready |= {*new}
        when = dict[str, int]()  # the stage in which each array of no ring is written
        for name, node in self.one.stores.items():
            if name not in self.member_of:
                if self.members_of.get(node):
                    raise UnlikeError
                when[name] = self.stage.get(node, 0)  # a constant has no stage
        late: dict[str, int] | None = None
        while late is None or late:
            for stage, part in self.once.items():
                self._store(part, [name for name in when if when[name] == stage])
                self._complete(part, {node for node in ready if self._from(node) < stage})
            late = {x: at for x, at in self._last_read().items() if when.get(x, at) < at}
            when |= late

    def _last_read(self) -> dict[str, int]:
        """Return the first stage in which each array may be written, as no part reads it later."""
        found = dict[str, int]()
        for stage, part in self.once.items():
            found |= dict.fromkeys(part.loads, stage)
        for stage, parts in self.by_members.items():
            for name in _loaded(parts):
                found[name] = max(found.get(name, 0), stage + 1)
        return found

    def _store(self, part: RingLoop, names: Iterable[str]) -> None:
        """Let a part write these arrays of no ring, and no other."""
        part.stores, part.guards = {}, {}
        for name in names:
            part.stores[name] = self.one.new[name]
            if name in self.one.guards:
                part.guards[name] = self.one.guards[name]

    def _from(self, node: Node) -> int:
        """Return the stage whose part leaves a value in a buffer."""
        if node in self.terms:
            return self.stage[node] - 1
        return next(stage for stage, part in self.once.items() if node in part.kept)

    def _complete(self, part: RingLoop, ready: Iterable[Node]) -> None:
        """Set what a part reads and computes. Values in `ready`, or of no member, are buffered."""
        ends = [*part.stores.values(), *part.sums.values(), *part.kept]
        ends += [new for _, new in part.added.values()]
        so_far = {node for node, _ in part.added.values()}
        common, there = part.over != "once", {*ready}
        nodes, done = list[Node](), set[int]()
        part.loads, part.taken = {}, []

        def visit(node: Node) -> None:
            if id(node) in done or node in so_far or node.axes != self.one.axes:
                return
            done.add(id(node))
            if node in self.name_of:
                part.loads[self.name_of[node]] = node
            elif node in there or (common and self.members_of.get(node) == frozenset()):
                part.taken.append(node)
            else:
                for operand in node.args:
                    visit(operand)
                nodes.append(node)

        for node in ends:
            visit(node)
        part.nodes = tuple(nodes)


def _loaded(parts: Iterable[RingLoop]) -> list[str]:
    """Return the arrays that several parts read, with repetitions."""
    return list(chain.from_iterable(part.loads for part in parts))
