"""Placement: the pass that each store, each sum and each spilled value is in, and what the passes do then."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from arrayopt.fusion.cut import cheapest
from arrayopt.fusion.graph import POSITION, PRODUCT, SCRATCH, Node, reachable

__all__ = ["Pass", "Placement"]

MOST_SHARING = 4
"""With products, which make many passes, a spilled value is tried as if fewer passes than this shared it."""

LATE = 1 << 30
"""The price of a stored value that has been overwritten: the store is put off, but only if there is no other way."""


@dataclass(frozen=True, eq=False, slots=True)
class Pass:
    """One pass over the elements; or a product of matrices, which a library makes.

    Attributes
    ----------
    loads : dict of str to Node
        What is read: parameter, gradient, slots and spilled values by name, and the node that the value read is.
    nodes : tuple of Node
        What is computed per element, in order; loads, scalars and smaller values left out.
    stores : dict of str to Node
        What is written, spilled values too.
    reductions : tuple of Node
        What is reduced.
    axes : str
        The axes of its elements: the tensor's, or those of the product of a matrix with its own transpose.

    Of a product, `nodes` is the one that it makes, and `loads` has its operands.
    """

    loads: dict[str, Node]
    nodes: tuple[Node, ...]
    stores: dict[str, Node]
    reductions: tuple[Node, ...]
    axes: str

    @property
    def multiplies(self) -> bool:
        """Whether it is a product."""
        return any(n.op == PRODUCT for n in self.nodes)

    def fed(self, complex_: bool) -> "Pass":
        """The pass; if it is over random numbers alone, with the gradient as what it is over."""
        if self.loads or self.stores:
            return self
        return replace(self, loads={"g": Node("input", (), self.axes, 0, "complex" if complex_ else "real", "g", -1)})


class Placement:
    """What is done in which pass.

    Parameters
    ----------
    element : str
        The axes of an element.
    outputs : dict of str to Node
        What the parameter and the slots of an element's axes are to hold.
    narrow : frozenset of str
        What is stored in fewer bits than arithmetic is done in: what was stored is not the value then.
    count : int
        How many passes there are.
    summed : dict of Node to int
        The pass of each sum.
    spilled : dict of Node to int
        Values that are kept in scratch memory, and the pass that stores each.
    hasty : bool
        Whether to store as soon as a value is there, whatever reads the old one later: what spilling could make good.
    products : dict of Node to str
        Products of matrices, and the scratch arrays that these are in.

    Attributes
    ----------
    scratch : dict of str to Node
        The spilled values by the names of their scratch arrays.
    stored : dict of str to int
        The pass of each store: the first that can make it and after which nothing reads the old value.
    passes : list of Pass
        What follows.
    """

    def __init__(
        self,
        element: str,
        outputs: dict[str, Node],
        narrow: frozenset[str],
        count: int,
        summed: dict[Node, int],
        spilled: dict[Node, int],
        *,
        hasty: bool = False,
        products: dict[Node, str] | None = None,
    ) -> None:
        self.products = products or {}
        self.element, self.outputs, self.narrow, self.count = element, outputs, narrow, count
        self.summed, self.spilled = summed, spilled
        self.scratch = {f"{SCRATCH}{i}{element if products else ''}": n for i, n in enumerate(spilled)}
        needed = reachable([*outputs.values(), *summed])
        self.inputs = [n for n in needed if n.op == "input" and n.axes == element]
        self.made = [n for n in needed if n.op == PRODUCT and n.axes == element]
        self.stored = {name: x.level for name, x in outputs.items()}
        self.passes = [self._pass(k) for k in range(count)]
        while late := {} if hasty else self._late():
            self.stored |= late
            self.passes = [self._pass(k) for k in range(count)]

    def _late(self) -> dict[str, int]:
        """Stores that are before a pass which reads the old value, and the last such pass."""
        return {
            name: k
            for k, p in enumerate(self.passes)
            for name, n in p.loads.items()
            if n.op == "input" and n.data == name and n is not self.outputs.get(name) and self.stored.get(name, k) < k
        }

    def but(self, **changes: Any) -> "Placement":
        """The same with another `summed`, `spilled` or `hasty`."""
        given: dict[str, Any] = {"summed": self.summed, "spilled": self.spilled, "products": self.products} | changes
        return Placement(self.element, self.outputs, self.narrow, self.count, **given)

    @property
    def size(self) -> int:
        """What all passes read and write, in halves of a real value."""
        return sum(self._size(name, n) for p in self.passes for x in (p.loads, p.stores) for name, n in x.items())

    def with_sums(self, alike: list[Node], last: int) -> "Placement":
        """The same with sums of the same values in that pass, up to `last`, in which they make least be read."""
        passes = range(alike[0].args[0].level, last + 1)
        return min((self.but(summed={**self.summed, **dict.fromkeys(alike, k)}) for k in passes), key=lambda x: x.size)

    def with_spills(self) -> "Placement":
        """The same with values spilled until no other that was tried makes all passes read and write less.

        For one pass the cheapest values are found. As several passes may share a spilled value, each choice is also
        made as if it were shared by so many, and kept if it moves less in all.
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
        """Values that a pass could do with if they were spilled, and the first pass that computes each, or could."""
        needed = {n for p in self.passes for n in p.nodes if n.dtype != "bool" and n.axes == self.element}
        for k in range(1, self.count):
            there, roots = self._sources(k), self._roots(k)
            made = {n: n.level for n in needed if n.level < k}
            made |= {n: j for j in reversed(range(k)) for n in self.passes[j].nodes if n in needed}
            for sharing in range(1, min(self.count, MOST_SHARING) if self.products else self.count):
                dear = {n: 2 * (sharing + 1) * self._size("", n) + 1 for n in made}  # dearer than what costs as much
                prices = dear | {n: 2 * sharing * price for n, (_, price) in there.items()}
                offer = {n: made[n] for n in cheapest(roots, self._args, prices.get) if n not in there}
                if offer:
                    yield offer

    def _size(self, name: str, n: Node) -> int:
        """The size of a value under a name in memory, in halves of a real value."""
        half = self._rounds(name) or (n.narrow and name not in self.outputs)
        return (1 if half else 2) * (2 if n.dtype == "complex" else 1)

    def _rounds(self, name: str) -> bool:
        """Whether a value is not what it was once it has been stored under a name."""
        return name in self.narrow

    def _stores(self, k: int) -> dict[str, Node]:
        """What pass k stores."""
        own = {name: n for name, n in self.outputs.items() if self.stored[name] == k}
        return own | {name: n for name, n in self.scratch.items() if self.spilled[n] == k}

    def _roots(self, k: int) -> list[Node]:
        """What pass k computes all else for."""
        roots = [*self._stores(k).values(), *(s.args[0] for s, where in self.summed.items() if where == k)]
        return [n for n in roots if self._is_element(n)]

    def _is_element(self, n: Node) -> bool:
        """Whether a value is a pass's to read or to compute: an element, or a complex number, of parts that are not."""
        given = n.on_host or n.reduces or n.op == POSITION
        return (n.axes == self.element or n.op == "complex") and not given

    def _args(self, n: Node) -> list[Node]:
        """What a pass computes a value from; values over fewer axes are computed between passes."""
        return [] if n.op == PRODUCT else [a for a in n.args if self._is_element(a)]

    def _sources(self, k: int) -> dict[Node, tuple[str, int]]:
        """What pass k can read: under which name, and what that costs."""
        there = {n: name for name, n in self.outputs.items() if self.stored[name] < k and not self._rounds(name)}
        there |= {n: name for name, n in self.scratch.items() if self.spilled[n] < k}
        there |= {n: self.products[n] for n in self.made}
        old = [n for n in self.inputs if n not in there or self.stored.get(n.data, k) >= k]
        there |= {n: n.data for n in old}
        late = {n for n in old if self.stored.get(n.data, k) < k}
        return {n: (name, LATE if n in late else self._size(name, n)) for n, name in there.items()}

    def _pass(self, k: int) -> Pass:
        """What pass k reads, computes, writes and sums."""
        roots, stores = self._roots(k), self._stores(k)
        there = self._sources(k)
        read = {n: there[n][0] for n in cheapest(roots, self._args, {n: x[1] for n, x in there.items()}.get)}
        found, stack = dict.fromkeys(roots), list(roots)
        while stack:
            fresh = [a for a in ([] if stack[-1] in read else self._args(stack[-1])) if a not in found]
            stack[-1:] = fresh
            found |= dict.fromkeys(fresh)
        order = {name: i for i, name in enumerate(dict.fromkeys(("p", "g", *self.outputs)))}
        loads = {read[n]: n for n in sorted(read, key=lambda n: order.get(read[n], len(order)))}
        nodes = [n for n in reachable(roots, stop=[*read, *self.summed]) if n in found and n not in read]
        sums = tuple(s for s, where in self.summed.items() if where == k)
        return Pass(loads, tuple(nodes), stores, sums, self.element)
