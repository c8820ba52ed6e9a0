"""Which values of a pass belong to which members of rings; `rings.py` makes loops of that."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

from arrayopt.fusion.graph import Node
from arrayopt.fusion.passes import Pass

LEAST_ON_DEVICE, LEAST_ON_CPU = 2, 8
"""The least number of members for a loop. On CPUs, an unrolled pass over fewer reads less."""

_MEMBER = re.compile(r"(.+)_(\d+)")


class UnlikeError(Exception):
    """A pass treats the members of a ring differently."""


def families(names: Iterable[str], least: int = LEAST_ON_DEVICE) -> dict[str, list[str]]:
    """What may be rings of at least so many members: the members in order, by the ring's name."""
    found: dict[str, set[int]] = {}
    for match in filter(None, map(_MEMBER.fullmatch, names)):
        if match[2] == str(int(match[2])):
            found.setdefault(match[1], set()).add(int(match[2]))
    rings = dict[str, list[str]]()
    for ring, numbers in found.items():
        if len(numbers) >= least and max(numbers) == len(numbers) - 1:
            rings[ring] = [f"{ring}_{j}" for j in range(len(numbers))]
    return rings


def in_order(one: Pass) -> list[Node]:
    """Return the reductions of a pass. If it may have rings, they are in the order of members."""
    return sorted(one.sums, key=attrgetter("id")) if families(one.arrays) else [*one.sums]


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

    def __init__(self, one: Pass, rings: dict[str, list[str]]) -> None:
        self.one, self.rings = one, rings
        self.first_of, self.nth_of = dict[str, str](), dict[str, int]()
        self.own_values: dict[Node, tuple[Node, ...]] = {}
        self.name_of = {node: name for name, node in one.loads.items()}
        self.member_of = dict[str, tuple[str, int]]()
        for ring, members in rings.items():
            self.member_of |= {name: (ring, j) for j, name in enumerate(members)}
        self.members_of: dict[Node, frozenset[tuple[int, int]]] = {}
        self.stage: dict[Node, int] = {}
        self.terms: dict[Node, list[Node]] = {}
        self.standing_for: dict[Any, Node] = {}
        for node, name in self.name_of.items():
            self.stage[node] = 0
            ring, j = self.member_of.get(name, ("", 0))
            self.members_of[node] = frozenset([(len(rings[ring]), j)] if ring else [])
        for node in one.nodes:
            self._classify(node)

    def _classify(self, node: Node) -> None:
        members = set[tuple[int, int]]()
        self.stage[node] = 0
        for operand in node.args:
            if operand in self.members_of:
                members |= self.members_of[operand]
                self.stage[node] = max(self.stage[node], self.stage[operand])
        self.members_of[node] = frozenset(members)
        if {count for count, _ in members} == {len(members)}:
            terms = self._terms(node)
            if terms is not None:
                self.terms[node], self.members_of[node] = terms, frozenset()
                self.stage[node] = max(self.stage[term] for term in terms) + 1

    def _terms(self, node: Node) -> list[Node] | None:
        """The terms of a sum over all members, in their order; None if it is no such sum."""
        terms = list[Node]()
        while len(self.members_of[node]) > 1:
            if node.op != "add" or not self.members_of.keys() >= {*node.args}:
                return None
            node, last = node.args
            terms.insert(0, last)
        terms.insert(0, node)
        return terms if self.is_of_each(terms) else None

    def is_of_each(self, values: Sequence[Node]) -> bool:
        """Whether value j is computed from member j, and no other, of rings with so many."""
        return all(self.members_of[value] == {(len(values), j)} for j, value in enumerate(values))

    def same(self, nodes: tuple[Node, ...], which: int = 0) -> Node:
        """The node that stands for a value of each member, with the names of member `which`."""
        first = nodes[which]
        if all(node is first for node in nodes):
            if self.members_of.get(first):
                raise UnlikeError
            return first
        key = nodes, which
        if key not in self.standing_for:
            self.standing_for[key] = self._same(nodes, which)
        return self.standing_for[key]

    def _same(self, nodes: tuple[Node, ...], which: int) -> Node:
        first = nodes[which]
        if self.name_of.keys() >= {*nodes}:
            names = [self.name_of[node] for node in nodes]
            ring, _ = self.member_of.get(names[0], ("", 0))
            if names != self.rings.get(ring):
                raise UnlikeError
            self.first_of[names[which]], self.nth_of[names[which]] = names[0], which
            return first
        if self.members_of.keys().isdisjoint(nodes):
            name = f"_each{len(self.own_values)}"
            made = Node("input", (), "", first.level, first.kind, name, -1)
            self.own_values[made], self.nth_of[name] = nodes, which
            return made
        form = first.op, first.kind, len(first.args), first.data, first in self.name_of
        for node in nodes:
            own = node.op, node.kind, len(node.args), node.data, node in self.name_of
            if own != form or node not in self.members_of or node in self.terms:
                raise UnlikeError
        args = list[Node]()
        for operands in zip(*(node.args for node in nodes), strict=True):
            args.append(self.same(operands, which))
        return replace(first, args=tuple(args))
