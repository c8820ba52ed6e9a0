"""Which values of a pass belong to which members of rings; `rings.py` makes loops of that."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from arrayopt.fusion.graph import Node
from arrayopt.fusion.passes import Pass

LEAST_ON_DEVICE, LEAST_ON_CPU = 2, 8
"""Rings of fewer members are unrolled: on devices, with few registers; on CPUs, to read less."""

_MEMBER = re.compile(r"(.+)_(\d+)")


class UnlikeError(Exception):
    """What is done with members differs."""


def families(names: Iterable[str], least: int = LEAST_ON_DEVICE) -> dict[str, int]:
    """Names that may be rings of at least so many members, without numbers, and their counts."""
    found: dict[str, set[int]] = {}
    for match in filter(None, map(_MEMBER.fullmatch, names)):
        if match[2] == str(int(match[2])):
            found.setdefault(match[1], set()).add(int(match[2]))
    whole = {ring: len(numbers) for ring, numbers in found.items()}
    return {x: n for x, n in whole.items() if n >= least and max(found[x]) == n - 1}


def in_order(one: Pass) -> list[Node]:
    """What a pass reduces; where it may be of rings, in the order of members."""
    return sorted(one.sums, key=lambda s: s.id) if families(one.arrays) else [*one.sums]


@dataclass(slots=True)
class RingLoop:
    """What one loop over elements does, for each member if `over` says so."""

    over: str
    """``once``; ``several`` for so many members at a time, ``rest`` for all that are left;
    ``square`` for all pairs of members, or ``triangle`` for those of which the second is not after
    the first.
    """
    members: int = 0
    at_once: int = 0
    """How many members there are, and how many single ones are taken at a time."""
    loads: dict[str, Node] = field(default_factory=dict)
    stores: dict[str, Node] = field(default_factory=dict)
    """What is read and written; a ring's first members stand for those that are taken."""
    nodes: tuple[Node, ...] = ()
    """What is computed."""
    sums: dict[Node, Node] = field(default_factory=dict)
    """What is reduced, by the reduction, or by the first ones of a family; and of which value."""
    guards: dict[str, Node] = field(default_factory=dict)
    """The conditions under which arrays are written."""
    taken: list[Node] = field(default_factory=list)
    kept: list[Node] = field(default_factory=list)
    """What lies in buffers: values that are read, and those that are written."""
    added: dict[Node, tuple[Node, Node]] = field(default_factory=dict)
    """Sums over members, each with what stands for the sum so far, and with that and a term."""

    def __bool__(self) -> bool:
        return bool(self.stores or self.sums or self.kept or self.added)


class Members:
    """The members of rings in a pass.

    Attributes
    ----------
    members_of : dict of Node to set of (int, int)
        The members that each value is made of: how many its ring has, and which it is.
    stage : dict of Node to int
        How many sums over members come before a value.
    terms : dict of Node to list of Node
        Sums over all members, and what is added of each.
    first_of : dict of str to str
        The first member of its ring, for each name that stands for members.
    own_values : dict of Node to tuple of Node
        What stands for a value of each member's own, and these values.
    nth_of : dict of str to int
        For each name that stands for members, which of those that are taken at a time it is.
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
        """What a sum over all members is of, in their order; None of anything else."""
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
        """What stands for a value of each member, in names of one of them."""
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
