"""Placement: the pass that each store, each sum and each spilled value is in, and what the passes
do then.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

from arrayopt.fusion.cut import cheapest
from arrayopt.fusion.graph import POSITION, PRODUCT, SCRATCH, Node, reachable
from arrayopt.fusion.passes import Pass

__all__ = ["Placement", "Work"]

MOST_SHARING = 4
"""With products, which make many passes, a spilled value is tried as if fewer passes than this
shared it.
"""

LATE = 1 << 30
"""The price of a stored value that has been overwritten: the store is put off, but only if there is
no other way.
"""

PLACE = {"g": "p"}
"""Whose store may overwrite an input, if not its own: a gradient may be its own parameter."""


class Work:
    """What the passes over elements of some axes are to do, whichever pass does what.

    Parameters
    ----------
    element : str
        The axes of an element.
    outputs : dict of str to Node
        What the parameter and the slots of an element's axes are to hold.
    sums : sequence of Node
        What is reduced.
    narrow : frozenset of str
        What is stored in fewer bits than arithmetic is done in: what was stored is not the value
        then.
    products : dict of Node to str
        Products of matrices, and the scratch arrays that these are in.
    calls : bool
        Whether each operation costs as much as it reads and writes, as one of NumPy does.

    Attributes
    ----------
    count : int
        How many passes there are.
    inputs, made : list of Node
        What the passes can read: what is stored when the first begins, and products.
    args : dict of Node to list of Node
        What a pass computes each value from; values over fewer axes are computed between passes.
    passes : dict
        Passes by what they have to do and what they can read: most placements that are tried differ
        in few.
    """

    def __init__(
        self,
        element: str,
        outputs: dict[str, Node],
        sums: Sequence[Node],
        narrow: frozenset[str],
        products: dict[Node, str],
        *,
        calls: bool = False,
    ) -> None:
        self.calls = calls
        self.element, self.outputs, self.sums, self.narrow = element, outputs, sums, narrow
        self.products = products
        self.count = 1 + max(
            [0, *(x.level for x in outputs.values()), *(s.args[0].level for s in sums)]
        )
        needed = reachable([*outputs.values(), *sums])
        self.inputs = [n for n in needed if n.op == "input" and n.axes == element]
        self.made = [n for n in needed if n.op == PRODUCT and n.axes == element]
        self.args = {
            n: [] if n.op == PRODUCT else [a for a in n.args if self.is_element(a)] for n in needed
        }
        self.passes: dict[Any, Pass] = {}

    def is_element(self, n: Node) -> bool:
        """Whether a value is a pass's to read or to compute: an element, or a complex number, of
        parts that are not.
        """
        given = n.on_host or n.reduces or n.op == POSITION
        return (n.axes == self.element or n.op == "complex") and not given

    def size(self, name: str, n: Node) -> int:
        """The size of a value under a name in memory, in halves of a real value."""
        half = self.rounds(name) or (n.narrow and name not in self.outputs)
        return (1 if half else 2) * (2 if n.dtype == "complex" else 1)

    def rounds(self, name: str) -> bool:
        """Whether a value is not what it was once it has been stored under a name."""
        return name in self.narrow

    def roots(self, stores: dict[str, Node], sums: Iterable[Node]) -> list[Node]:
        """What a pass computes all else for."""
        return [n for n in (*stores.values(), *(s.args[0] for s in sums)) if self.is_element(n)]

    def done(
        self, stores: dict[str, Node], sums: tuple[Node, ...], there: dict[Node, tuple[str, int]]
    ) -> Pass:
        """The pass that stores and sums this, and can read what is there under some name, at some
        price.
        """
        key = (*stores.items(), *sums, frozenset(there.items()))
        if key not in self.passes:
            self.passes[key] = self._done(stores, sums, there)
        return self.passes[key]

    def _done(
        self, stores: dict[str, Node], sums: tuple[Node, ...], there: dict[Node, tuple[str, int]]
    ) -> Pass:
        """See `done`."""
        roots = self.roots(stores, sums)
        price = {n: x[1] for n, x in there.items()}.get
        read = {n: there[n][0] for n in cheapest(roots, self.args.__getitem__, price)}
        found, stack = dict.fromkeys(roots), list(roots)
        while stack:
            fresh = [
                a for a in ([] if stack[-1] in read else self.args[stack[-1]]) if a not in found
            ]
            stack[-1:] = fresh
            found |= dict.fromkeys(fresh)
        order = {name: i for i, name in enumerate(dict.fromkeys(("p", "g", *self.outputs)))}

        def place(n: Node) -> tuple[int, bool]:
            """Of two values under one name the old one comes last, and stays: `Placement` then puts
            the store off.
            """
            return order.get(read[n], len(order)), n.op == "input" and n.data == read[n]

        loads = {read[n]: n for n in sorted(read, key=place)}
        nodes = [
            n for n in reachable(roots, stop=[*read, *self.sums]) if n in found and n not in read
        ]
        return Pass(loads, tuple(nodes), stores, sums, self.element)


CALL = 4
"""What an operation reads and writes as a call, in halves of a real value: about two values, for
some are in cache.
"""


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
        outputs = self.work.outputs
        return {
            place: k
            for k, p in enumerate(self.passes)
            for name, n in p.loads.items()
            for place in (PLACE.get(name, name),)
            if n.op == "input"
            and n.data == name
            and n is not outputs.get(place)
            and self.stored.get(place, k) < k
        }

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
        moved = sum(
            self.work.size(name, n)
            for p in self.passes
            for x in (p.loads, p.stores)
            for name, n in x.items()
        )
        return moved + (CALL * sum(len(p.nodes) for p in self.passes) if self.work.calls else 0)

    def with_sums(self, alike: list[Node], last: int) -> "Placement":
        """The same with sums of the same values in that pass, up to `last`, in which they make
        least be read.
        """
        passes = range(alike[0].args[0].level, last + 1)
        return min(
            (self.but(summed={**self.summed, **dict.fromkeys(alike, k)}) for k in passes),
            key=lambda x: x.size,
        )

    def with_stores(self) -> "Placement":
        """The same with stores put off to a pass that reads again what they have stored, where all
        passes read and write less then.
        """
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
            read = {n for p in more.passes for n in p.loads.values()}
            more = self.but(spilled={n: k for n, k in more.spilled.items() if n in read})
            if more.size < self.size:
                return more.with_spills()
        return self

    def _offers(self) -> Iterator[dict[Node, int]]:
        """Values that a pass could do with if they were spilled, and the first pass that computes
        each, or could.
        """
        work = self.work
        needed = {
            n for p in self.passes for n in p.nodes if n.dtype != "bool" and n.axes == work.element
        }
        for k in range(1, work.count):
            there, roots = self._sources(k), work.roots(self._stores(k), self._sums(k))
            made = {n: n.level for n in needed if n.level < k}
            made |= {n: j for j in reversed(range(k)) for n in self.passes[j].nodes if n in needed}
            for sharing in range(1, min(work.count, MOST_SHARING) if work.products else work.count):
                # dearer than what costs as much
                dear = {n: 2 * (sharing + 1) * work.size("", n) + 1 for n in made}
                dear = dict.fromkeys(made, 1) if work.calls else dear  # nearest to what is computed
                prices = dear | {n: 2 * sharing * price for n, (_, price) in there.items()}
                offer = {
                    n: made[n]
                    for n in cheapest(roots, work.args.__getitem__, prices.get)
                    if n not in there
                }
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
        there = {
            n: name
            for name, n in work.outputs.items()
            if self.stored[name] < k and not work.rounds(name)
        }
        there |= {n: name for name, n in self.scratch.items() if self.spilled[n] < k}
        there |= {n: work.products[n] for n in work.made}
        old = [n for n in work.inputs if n not in there or self.stored.get(n.data, k) >= k]
        there |= {n: n.data for n in old}
        late = {n for n in old if self.stored.get(PLACE.get(n.data, n.data), k) < k}
        return {n: (name, LATE if n in late else work.size(name, n)) for n, name in there.items()}

    def _pass(self, k: int) -> Pass:
        """What pass k reads, computes, writes and sums."""
        return self.work.done(self._stores(k), self._sums(k), self._sources(k))
