"""Placement: in which pass each store, sum and spill is, and what the passes do then."""

from collections.abc import Iterator
from itertools import chain
from typing import Any

from arrayopt.fusion.graph import SCRATCH, Node
from arrayopt.fusion.passes import Pass
from arrayopt.fusion.work import Work, cheapest

MOST_SHARING = 4
"""With products, which make many passes, a spill is tried as if fewer than this shared it."""

LATE = 1 << 30
"""The price of a stored value that was overwritten: such a store is delayed if at all possible."""

PLACE = {"g": "p"}
"""Whose store may overwrite an input, if not its own: a gradient may be its own parameter."""

CALL = 4
"""What an operation moves as a call, in halves of a value: about two, as some are in cache."""


class Placement:
    """What is done in which pass.

    Parameters
    ----------
    work : Work
        What is to be done.
    summed : dict of Node to int
        The pass of each sum.
    spilled : dict of Node to int
        Values that are kept in scratch memory, and the pass that stores each.
    put_off : dict of str to int
        Stores that come later than they could, and the pass of each.
    hasty : bool
        Whether to store as soon as a value is there, whatever reads the old one later: what
        spilling could make good.

    Attributes
    ----------
    scratch : dict of str to Node
        The spilled values by the names of their scratch arrays.
    stored : dict of str to int
        The pass of each store: the first that can make it and after which nothing reads the old
        value.
    passes : list of Pass
        What follows.
    """

    def __init__(
        self,
        work: Work,
        summed: dict[Node, int],
        spilled: dict[Node, int],
        *,
        hasty: bool = False,
        put_off: dict[str, int] | None = None,
    ) -> None:
        self.work, self.summed, self.spilled = work, summed, spilled
        self.put_off = put_off or {}
        suffix = work.element if work.products else ""
        self.scratch = {f"{SCRATCH}{i}{suffix}": n for i, n in enumerate(spilled)}
        self.stored = {name: x.level for name, x in work.outputs.items()} | self.put_off
        self.passes = [self._pass(k) for k in range(work.count)]
        while late := {} if hasty else self._late():
            self.stored |= late
            self.passes = [self._pass(k) for k in range(work.count)]

    def _late(self) -> dict[str, int]:
        """Stores that are before a pass which reads the old value, and the last such pass."""
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

    def but(self, **changes: Any) -> "Placement":
        """The same with another `summed`, `spilled`, `hasty` or `put_off`."""
        now: dict[str, Any] = {
            "summed": self.summed,
            "spilled": self.spilled,
            "put_off": self.put_off,
        }
        return Placement(self.work, **now | changes)

    @property
    def size(self) -> int:
        """What all passes read and write, in halves of a real value."""
        moved = 0
        for p in self.passes:
            for name, n in (*p.loads.items(), *p.stores.items()):
                moved += self.work.size(name, n)
            moved += CALL * len(p.nodes) if self.work.calls else 0
        return moved

    def with_sums(self, alike: list[Node], last: int) -> "Placement":
        """The same with these sums in the pass, up to `last`, where least is read."""
        offers = []
        for k in range(alike[0].args[0].level, last + 1):
            offers.append(self.but(summed={**self.summed, **dict.fromkeys(alike, k)}))
        return min(offers, key=lambda x: x.size)

    def with_stores(self) -> "Placement":
        """The same with stores delayed to a pass that reads them again, if that moves less."""
        best = self
        for k in range(1, self.work.count):
            read = self.passes[k].loads
            again = {name: k for name, n in self.work.outputs.items() if read.get(name) is n}
            if again:
                best = min(best, self.but(put_off=again), key=lambda x: x.size)
        return best

    def with_spills(self) -> "Placement":
        """The same with values spilled until no other that was tried makes all passes read and
        write less.

        For one pass the cheapest values are found. As several passes may share a spilled value,
        each choice is also made as if it were shared by so many, and kept if it moves less in all.
        """
        tried: set[frozenset[tuple[Node, int]]] = set()
        for offer in chain(self._offers(), self.but(hasty=True)._offers()):
            if frozenset(offer.items()) in tried:
                continue
            tried.add(frozenset(offer.items()))
            more = self.but(spilled=self.spilled | offer)
            read = set[Node]()
            for pass_ in more.passes:
                read.update(pass_.loads.values())
            more = self.but(spilled={n: k for n, k in more.spilled.items() if n in read})
            if more.size < self.size:
                return more.with_spills()
        return self

    def _offers(self) -> Iterator[dict[Node, int]]:
        """Values that would help a pass if spilled, each with the first pass that computes it."""
        work = self.work
        needed = set[Node]()
        for p in self.passes:
            needed.update(n for n in p.nodes if n.dtype != "bool" and n.axes == work.element)
        for k in range(1, work.count):
            there, roots = self._sources(k), work.roots(self._stores(k), self._sums(k))
            made = {n: n.level for n in needed if n.level < k}
            for j in reversed(range(k)):
                made |= {n: j for n in self.passes[j].nodes if n in needed}
            for sharing in range(1, min(work.count, MOST_SHARING) if work.products else work.count):
                # dearer than what costs as much
                dear = {n: 2 * (sharing + 1) * work.size("", n) + 1 for n in made}
                dear = dict.fromkeys(made, 1) if work.calls else dear  # nearest to what is computed
                prices = dear | {n: 2 * sharing * price for n, (_, price) in there.items()}
                best = cheapest(roots, work.args.__getitem__, prices.get)
                offer = {n: made[n] for n in best if n not in there}
                if offer:
                    yield offer

    def _stores(self, k: int) -> dict[str, Node]:
        """What pass k stores."""
        own = {name: n for name, n in self.work.outputs.items() if self.stored[name] == k}
        return own | {name: n for name, n in self.scratch.items() if self.spilled[n] == k}

    def _sums(self, k: int) -> tuple[Node, ...]:
        """What pass k sums."""
        return tuple(s for s, where in self.summed.items() if where == k)

    def _sources(self, k: int) -> dict[Node, tuple[str, int]]:
        """What pass k can read: under which name, and what that costs."""
        work = self.work
        there = dict[Node, str]()
        for name, n in work.outputs.items():
            if self.stored[name] < k and not work.rounds(name):
                there[n] = name
        there |= {n: name for name, n in self.scratch.items() if self.spilled[n] < k}
        there |= {n: work.products[n] for n in work.made}
        old = [n for n in work.inputs if n not in there or self.stored.get(n.data, k) >= k]
        there |= {n: n.data for n in old}
        late = {n for n in old if self.stored.get(PLACE.get(n.data, n.data), k) < k}
        return {n: (name, LATE if n in late else work.size(name, n)) for n, name in there.items()}

    def _pass(self, k: int) -> Pass:
        """What pass k reads, computes, writes and sums."""
        return self.work.done(self._stores(k), self._sums(k), self._sources(k))
