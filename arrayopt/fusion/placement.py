"""Placement: from the `Work` of a space to its passes. A placement chooses the pass of each store,
sum and spill. `planning.py` starts from one without spills, and improves it.
"""

from collections.abc import Iterator
from itertools import chain
from typing import Any

from arrayopt.fusion.graph import SCRATCH, Node
from arrayopt.fusion.passes import Pass
from arrayopt.fusion.work import Work, cheapest

MOST_SHARING = 4
"""In plans with products, spills are tried as if shared by fewer passes than this."""

LATE = 1 << 30
"""The price of an overwritten old value. If a pass needs it all the same, the store is delayed."""

PLACE = {"g": "p"}
"""Another array whose store may overwrite an input: a gradient may be its own parameter."""

CALL = 4
"""The traffic of a call, in halves of a value: about two values, as some are in cache."""


class Placement:
    """A choice of the pass for each store, sum and spill.

    Parameters
    ----------
    work : Work
        What all passes must store and reduce.
    summed : dict of Node to int
        The pass of each sum.
    spilled : dict of Node to int
        Values that are spilled, and the pass that stores each.
    put_off : dict of str to int
        Stores that are later than necessary, and the pass of each.
    eager : bool
        Whether to store each value in the first pass that can compute it, even if a later pass
        reads the old value. Spills can then make the old value unnecessary.

    Attributes
    ----------
    scratch : dict of str to Node
        The spilled values by the names of their scratch arrays.
    stored : dict of str to int
        The pass of each store: the first possible one, if no later pass reads the old value.
    passes : list of Pass
        The resulting passes.
    """

    def __init__(
        self,
        work: Work,
        summed: dict[Node, int],
        spilled: dict[Node, int],
        *,
        eager: bool = False,
        put_off: dict[str, int] | None = None,
    ) -> None:
        self.work, self.summed, self.spilled = work, summed, spilled
        self.put_off = put_off or {}
        suffix = work.element if work.products else ""
        self.scratch = {f"{SCRATCH}{i}{suffix}": n for i, n in enumerate(spilled)}
        self.stored = {name: x.level for name, x in work.outputs.items()} | self.put_off
        self.passes = [self._pass(k) for k in range(work.count)]
        while late := {} if eager else self._late():
            self.stored |= late
            self.passes = [self._pass(k) for k in range(work.count)]

    def _late(self) -> dict[str, int]:
        """The stores before a pass that reads the old value, with the last such pass."""
        late = dict[str, int]()
        for index, p in enumerate(self.passes):
            for name, n in p.loads.items():
                place = PLACE.get(name, name)
                is_old = (
                    n.op == "input" and n.data == name and n is not self.work.outputs.get(place)
                )
                if is_old and self.stored.get(place, index) < index:
                    late[place] = index
        return late

    def changed(self, **changes: Any) -> "Placement":
        """Return the placement with another `summed`, `spilled`, `eager` or `put_off`."""
        now: dict[str, Any] = {
            "summed": self.summed,
            "spilled": self.spilled,
            "put_off": self.put_off,
        }
        return Placement(self.work, **now | changes)

    @property
    def size(self) -> int:
        """How much all passes read and write, in halves of a real value."""
        moved = 0
        for p in self.passes:
            for name, n in (*p.loads.items(), *p.stores.items()):
                moved += self.work.size(name, n)
            moved += CALL * len(p.nodes) if self.work.calls else 0
        return moved

    def with_sums(self, alike: list[Node], last: int) -> "Placement":
        """The placement with these sums in the pass, `last` or before, that then reads least."""
        placements = []
        for k in range(alike[0].args[0].level, last + 1):
            placements.append(self.changed(summed={**self.summed, **dict.fromkeys(alike, k)}))
        return min(placements, key=lambda x: x.size)

    def with_stores(self) -> "Placement":
        """The placement with stores delayed to a pass that reads the values, if this moves less."""
        best = self
        for k in range(1, self.work.count):
            read = self.passes[k].loads
            again = {name: k for name, n in self.work.outputs.items() if read.get(name) is n}
            if again:
                best = min(best, self.changed(put_off=again), key=lambda x: x.size)
        return best

    def with_spills(self) -> "Placement":
        """Return the placement with values spilled, until no further spill that is tried moves
        less.

        For one pass, `cheapest` finds the best values to spill. As several passes may share a
        spilled value, it is also called as if so many shared each. A choice is kept if it moves
        less in all.
        """
        tried: set[frozenset[tuple[Node, int]]] = set()
        for spills in chain(self._candidates(), self.changed(eager=True)._candidates()):
            if frozenset(spills.items()) in tried:
                continue
            tried.add(frozenset(spills.items()))
            more = self.changed(spilled=self.spilled | spills)
            read = set[Node]()
            for pass_ in more.passes:
                read.update(pass_.loads.values())
            more = self.changed(spilled={n: k for n, k in more.spilled.items() if n in read})
            if more.size < self.size:
                return more.with_spills()
        return self

    def _candidates(self) -> Iterator[dict[Node, int]]:
        """Yield sets of values to spill that may help a pass, with the pass that computes each."""
        work = self.work
        needed = set[Node]()
        for p in self.passes:
            needed.update(n for n in p.nodes if n.dtype != "bool" and n.axes == work.element)
        for k in range(1, work.count):
            readable, roots = self._sources(k), work.roots(self._stores(k), self._sums(k))
            made = {n: n.level for n in needed if n.level < k}
            for j in reversed(range(k)):
                made |= {n: j for n in self.passes[j].nodes if n in needed}
            for sharing in range(1, min(work.count, MOST_SHARING) if work.products else work.count):
                # + 1: of equal prices, prefer to read an array that exists anyway
                dear = {n: 2 * (sharing + 1) * work.size("", n) + 1 for n in made}
                dear = dict.fromkeys(made, 1) if work.calls else dear  # nearest to the roots
                prices = dear | {n: 2 * sharing * price for n, (_, price) in readable.items()}
                best = cheapest(roots, work.args.__getitem__, prices.get)
                spills = {n: made[n] for n in best if n not in readable}
                if spills:
                    yield spills

    def _stores(self, k: int) -> dict[str, Node]:
        """Return what pass k stores, spills included."""
        own = {name: n for name, n in self.work.outputs.items() if self.stored[name] == k}
        return own | {name: n for name, n in self.scratch.items() if self.spilled[n] == k}

    def _sums(self, k: int) -> tuple[Node, ...]:
        """Return the sums of pass k."""
        return tuple(s for s, where in self.summed.items() if where == k)

    def _sources(self, k: int) -> dict[Node, tuple[str, int]]:
        """Return the values that pass k can read, with the name of the array and the price."""
        work = self.work
        names = dict[Node, str]()
        for name, n in work.outputs.items():
            if self.stored[name] < k and not work.rounds(name):
                names[n] = name
        names |= {n: name for name, n in self.scratch.items() if self.spilled[n] < k}
        names |= {n: work.products[n] for n in work.made}
        old = [n for n in work.inputs if n not in names or self.stored.get(n.data, k) >= k]
        names |= {n: n.data for n in old}
        late = {n for n in old if self.stored.get(PLACE.get(n.data, n.data), k) < k}
        return {n: (name, LATE if n in late else work.size(name, n)) for n, name in names.items()}

    def _pass(self, k: int) -> Pass:
        """Return pass k."""
        return self.work.pass_for(self._stores(k), self._sums(k), self._sources(k))
