"""Placement: from the `Work` of a space to its passes. A placement chooses the pass of each store,
sum and spill. `planning.py` starts from one without spills, and improves it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import chain
from operator import attrgetter

from arrayopt.fusion.graph import SCRATCH, Node
from arrayopt.fusion.passes import Pass
from arrayopt.fusion.work import Source, Work, cheapest

MOST_SHARING = 4
"""In plans with products, spills are tried as if shared by fewer passes than this."""

LATE = 1 << 30
"""The price of an overwritten old value. If a pass needs it all the same, the store is delayed."""

PLACE = {"g": "p"}
"""Another array whose store may overwrite an input: a gradient may be its own parameter."""

CALL = 4
"""The traffic of a call, in halves of a value: about two values, as some are in cache."""


@dataclass(eq=False)
class Placement:
    """A choice of the pass for each store, sum and spill.

    Attributes
    ----------
    scratch : dict of str to Node
        The spilled values by the names of their scratch arrays.
    stored : dict of str to int
        The pass of each store: the first possible one, if no later pass reads the old value.
    passes : list of Pass
        The resulting passes.
    """

    work: Work
    """What all passes must store and reduce."""
    summed: dict[Node, int]
    """The pass of each sum."""
    spilled: dict[Node, int] = field(default_factory=dict)
    """Values that are spilled, and the pass that stores each."""
    put_off: dict[str, int] = field(default_factory=dict)
    """Stores that are later than necessary, and the pass of each."""
    eager: bool = False
    """Whether to store each value in the first pass that can compute it, even if a later pass reads
    the old value. Spills can then make the old value unnecessary.
    """

    def __post_init__(self) -> None:
        work = self.work
        suffix = work.element if work.products else ""
        self.scratch = {f"{SCRATCH}{i}{suffix}": node for i, node in enumerate(self.spilled)}
        self.stored = {name: node.level for name, node in work.outputs.items()} | self.put_off
        self.passes = self._passes()
        while not self.eager and (late := self._late()):
            self.stored |= late
            self.passes = self._passes()

    def _passes(self) -> list[Pass]:
        """Return the passes of this placement."""
        made = list[Pass]()
        for k in range(self.work.count):
            made.append(self.work.pass_for(self._stores(k), self._sums(k), self._sources(k)))
        return made

    def _late(self) -> dict[str, int]:
        """The stores before a pass that reads the old value, with the last such pass."""
        late = dict[str, int]()
        for number, pass_ in enumerate(self.passes):
            for name, node in pass_.loads.items():
                place = PLACE.get(name, name)
                is_input = node.op == "input" and node.data == name
                is_old = is_input and node is not self.work.outputs.get(place)
                if is_old and self.stored.get(place, number) < number:
                    late[place] = number
        return late

    @property
    def size(self) -> int:
        """How much all passes read and write, in halves of a real value."""
        moved = 0
        for pass_ in self.passes:
            for name, node in (*pass_.loads.items(), *pass_.stores.items()):
                moved += self.work.size(name, node)
            moved += CALL * len(pass_.nodes) if self.work.calls else 0
        return moved

    def with_sums(self, alike: list[Node], last: int) -> "Placement":
        """The placement with these sums in the pass, `last` or before, that then reads least."""
        placements = list[Placement]()
        for k in range(alike[0].args[0].level, last + 1):
            placements.append(replace(self, summed=self.summed | dict.fromkeys(alike, k)))
        return min(placements, key=attrgetter("size"))

    def with_stores(self) -> "Placement":
        """The placement with stores delayed to a pass that reads the values, if this moves less."""
        best = self
        for k in range(1, self.work.count):
            read = self.passes[k].loads
            again = {name: k for name, node in self.work.outputs.items() if read.get(name) is node}
            if again:
                best = min(best, replace(self, put_off=again), key=attrgetter("size"))
        return best

    def with_spills(self) -> "Placement":
        """Return the placement with values spilled, until no further spill that is tried moves
        less.

        For one pass, `cheapest` finds the best values to spill. As several passes may share a
        spilled value, it is also called as if so many shared each. A choice is kept if it moves
        less in all.
        """
        tried: set[frozenset[tuple[Node, int]]] = set()
        for spills in chain(self._candidates(), replace(self, eager=True)._candidates()):
            if frozenset(spills.items()) in tried:
                continue
            tried.add(frozenset(spills.items()))
            more = replace(self, spilled=self.spilled | spills)
            read = set[Node]()
            for pass_ in more.passes:
                read.update(pass_.loads.values())
            more = replace(self, spilled={n: k for n, k in more.spilled.items() if n in read})
            if more.size < self.size:
                return more.with_spills()
        return self

    def _candidates(self) -> Iterator[dict[Node, int]]:
        """Yield sets of values to spill that may help a pass, with the pass that computes each."""
        work = self.work
        most_sharing = min(work.count, MOST_SHARING) if work.products else work.count
        for k in range(1, work.count):
            readable, roots = self._sources(k), work.roots(self._stores(k), self._sums(k))
            computed = self._computed_before(k)
            for sharing in range(1, most_sharing):
                prices = self._prices(computed, readable, sharing)
                best = cheapest(roots, work.args, prices)
                spills = {node: computed[node] for node in best if node not in readable}
                if spills:
                    yield spills

    def _computed_before(self, number: int) -> dict[Node, int]:
        """Return the values that can be spilled for a pass, and the first pass that has each."""
        found = dict[Node, int]()
        for j, pass_ in enumerate(self.passes):
            for node in pass_.nodes:
                is_number = node.kind != "bool" and node.axes == self.work.element
                if is_number and node.level < number:
                    found.setdefault(node, j if j < number else node.level)
        return found

    def _prices(
        self, computed: dict[Node, int], readable: dict[Node, Source], sharing: int
    ) -> dict[Node, int]:
        """Return the prices of values for a pass, if so many passes share each spilled value."""
        work, prices = self.work, dict[Node, int]()
        for node in computed:
            # + 1: of equal prices, prefer to read an array that exists anyway
            price = 2 * (sharing + 1) * work.size("", node) + 1
            prices[node] = 1 if work.calls else price  # 1: those nearest to the roots
        for node, source in readable.items():
            prices[node] = 2 * sharing * source.price
        return prices

    def _stores(self, k: int) -> dict[str, Node]:
        """Return what pass k stores, spills included."""
        own = {name: node for name, node in self.work.outputs.items() if self.stored[name] == k}
        return own | {name: node for name, node in self.scratch.items() if self.spilled[node] == k}

    def _sums(self, k: int) -> tuple[Node, ...]:
        """Return the sums of pass k."""
        return tuple(node for node, where in self.summed.items() if where == k)

    def _sources(self, number: int) -> dict[Node, Source]:
        """Return the values that a pass can read."""
        work, arrays = self.work, dict[Node, str]()
        for name, node in work.outputs.items():
            if self.stored[name] < number and name not in work.narrow:
                arrays[node] = name
        for name, node in self.scratch.items():
            if self.spilled[node] < number:
                arrays[node] = name
        for node in work.made:
            arrays[node] = work.products[node]
        found = {node: Source(name, work.size(name, node)) for node, name in arrays.items()}
        for node in work.inputs:
            if node not in arrays or self.stored.get(node.data, number) >= number:
                overwritten = self.stored.get(PLACE.get(node.data, node.data), number) < number
                price = LATE if overwritten else work.size(node.data, node)
                found[node] = Source(node.data, price)
        return found
