"""Which values of a pass belong to which members of rings; `rings.py` makes loops of that."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from arrayopt.fusion.graph import Node
from arrayopt.fusion.passes import Pass

LEAST_ON_DEVICE, LEAST_ON_CPU = 2, 8
"""The least number of members for a loop. On CPUs, an unrolled pass over fewer reads less."""

_MEMBER = re.compile(r"(.+)_(\d+)")


class UnlikeError(Exception):
    """A pass treats the members of a ring differently."""


def families(names: Iterable[str], least: int = LEAST_ON_DEVICE) -> dict[str, int]:
    """The names, without numbers, of what may be rings of at least so many members, with counts."""
    found: dict[str, set[int]] = {}
    for match in filter(None, map(_MEMBER.fullmatch, names)):
        if match[2] == str(int(match[2])):
            found.setdefault(match[1], set()).add(int(match[2]))
    whole = {ring: len(numbers) for ring, numbers in found.items()}
    return {x: n for x, n in whole.items() if n >= least and max(found[x]) == n - 1}


def in_order(one: Pass) -> list[Node]:
    """Return the reductions of a pass. If it may have rings, they are in the order of members."""
    return sorted(one.sums, key=lambda s: s.id) if families(one.arrays) else [*one.sums]


@dataclass(slots=True)
class RingLoop:
    """One loop over elements, or such a loop inside loops over members."""

    over: str
    """``once``: no loop over members; ``several``: over groups of `at_once` members; ``rest``: for
    the members that are left; ``square``: over all pairs of members; ``triangle``: over the pairs
    whose second member is not after the first.
    """
    members: int = 0
    at_once: int = 0
    """The number of members of a ring, and the number in a group (0 for pairs)."""
    loads: dict[str, Node] = field(default_factory=dict)
    stores: dict[str, Node] = field(default_factory=dict)
    """What is read and written, by array. The first members of a ring stand for any group."""
    nodes: tuple[Node, ...] = ()
    """The values that are computed, in order."""
    sums: dict[Node, Node] = field(default_factory=dict)
    """The reductions, with their operands. Those of the first group, or pair, stand for all."""
    guards: dict[str, Node] = field(default_factory=dict)
    """The arrays that are written only if a condition is true, with the conditions."""
    taken: list[Node] = field(default_factory=list)
    kept: list[Node] = field(default_factory=list)
    """The values that the loop reads from buffers, and those that it writes into buffers."""
    added: dict[Node, tuple[Node, Node]] = field(default_factory=dict)
    """The sums over members, with the nodes of the sum before and after a group's terms."""

    def __bool__(self) -> bool:
        return bool(self.stores or self.sums or self.kept or self.added)


class Members:
    """The members of rings in a pass.

    Attributes
    ----------
    members_of : dict of Node to set of (int, int)
        The members that each value is computed from: how many their ring has, and the index.
    stage : dict of Node to int
        How many sums over members a value follows, one after the other.
    terms : dict of Node to list of Node
        The sums over all members, with the term of each member.
    first_of : dict of str to str
        The first member of the ring, for each name that stands for members.
    own_values : dict of Node to tuple of Node
        The nodes that stand for a scalar of each member, with the scalars of all members.
    nth_of : dict of str to int
        For each name that stands for members, its index in a group.
    """

    def __init__(self, one: Pass, rings: dict[str, int]) -> None:
        self.one, self.rings = one, rings
        self.first_of, self.nth_of = dict[str, str](), dict[str, int]()
        self.own_values: dict[Node, tuple[Node, ...]] = {}
        self.name_of = {node: name for name, node in one.loads.items()}
        self.member_of = dict[str, tuple[str, int]]()
        for ring, members in rings.items():
            self.member_of |= {f"{ring}_{j}": (ring, j) for j in range(members)}
        self.members_of: dict[Node, frozenset[tuple[int, int]]] = {}
        self.stage: dict[Node, int] = {}
        self.terms: dict[Node, list[Node]] = {}
        self.standing_for: dict[Any, Node] = {}
        for node, name in self.name_of.items():
            self.stage[node] = 0
            ring, j = self.member_of.get(name, ("", 0))
            self.members_of[node] = frozenset([(rings[ring], j)] if ring else [])
        for node in one.nodes:
            self._classify(node)

    def _classify(self, node: Node) -> None:
        whole = [a for a in node.args if a in self.members_of]
        self.stage[node] = max((self.stage[a] for a in whole), default=0)
        of_each = [self.members_of[a] for a in whole]
        self.members_of[node] = frozenset[tuple[int, int]]().union(*of_each)
        if {k for k, _ in self.members_of[node]} == {len(self.members_of[node])}:
            terms = self._terms(node)
            if terms is not None:
                self.terms[node], self.members_of[node] = terms, frozenset()
                self.stage[node] = max(self.stage[x] for x in terms) + 1

    def _terms(self, node: Node) -> list[Node] | None:
        """The terms of a sum over all members, in their order; None if it is no such sum."""
        terms = list[Node]()
        while len(self.members_of[node]) > 1:
            if node.op != "add" or any(a not in self.members_of for a in node.args):
                return None
            node, last = node.args
            terms.append(last)
        terms = [node, *reversed(terms)]
        each = [frozenset([(len(terms), j)]) for j in range(len(terms))]
        return terms if [self.members_of[x] for x in terms] == each else None

    def same(self, nodes: tuple[Node, ...], which: int = 0) -> Node:
        """The node that stands for a value of each member, with the names of member `which`."""
        first = nodes[which]
        if all(n is first for n in nodes):
            if len(self.members_of.get(first, ())) > 0:
                raise UnlikeError
            return first
        key = nodes, which
        if key not in self.standing_for:
            self.standing_for[key] = self._same(nodes, which)
        return self.standing_for[key]

    def _same(self, nodes: tuple[Node, ...], which: int) -> Node:
        first = nodes[which]
        if all(n in self.name_of for n in nodes):
            names = [self.name_of[n] for n in nodes]
            ring, _ = self.member_of.get(names[0], ("", 0))
            if [self.member_of.get(x) for x in names] != [(ring, j) for j in range(len(nodes))]:
                raise UnlikeError
            self.first_of[names[which]] = f"{ring}_0"
            self.nth_of[names[which]] = which
            return first
        if not any(n in self.members_of for n in nodes):
            name = f"_each{len(self.own_values)}"
            made = Node("input", (), "", first.level, first.dtype, name, -1)
            self.own_values[made] = nodes
            self.nth_of[name] = which
            return made
        kinds = {(n.op, n.dtype, len(n.args), n.data, n in self.name_of) for n in nodes}
        if len(kinds) > 1 or any(n not in self.members_of or n in self.terms for n in nodes):
            raise UnlikeError
        args = list[Node]()
        for i in range(len(first.args)):
            args.append(self.same(tuple(n.args[i] for n in nodes), which))
        return replace(first, args=tuple(args))
