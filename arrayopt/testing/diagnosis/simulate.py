"""What a rule makes of a trajectory's gradients, for many sets of hyper-parameters at once.

Each step starts from the parameters that the optimizer really had, so that one step's difference is not the next one's.
The rule's traced graph is evaluated in float64, with an axis for the sets and one for the tensors before those of the
elements; what cannot be traced runs as it is written.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from arrayopt.arrays import NARROW, array_namespace
from arrayopt.fusion.graph import PRODUCT, UPDATES, Node, reachable
from arrayopt.fusion.ops import OPS, REDUCTIONS
from arrayopt.fusion.trace import Trace
from arrayopt.rules.base import Rule
from arrayopt.rules.fields import hypers
from arrayopt.rules.names import Values as Hypers
from arrayopt.rules.namespace import rule_namespace
from arrayopt.testing.diagnosis.graphs import graph_of
from arrayopt.testing.diagnosis.trajectory import Trajectory, Values

__all__ = ["Simulation", "rounded"]

Round = Callable[[str, Values], Values]


def rounded(x: Values, dtype: str) -> Values:
    """Values rounded to float16, bfloat16 or float32, in float64."""
    if dtype == "bfloat16":
        bits = np.asarray(x, np.float32).view(np.uint32)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
        return bits.view(np.float32).astype(np.float64)
    with np.errstate(over="ignore"):
        return np.asarray(x).astype(dtype).astype(np.float64)


@dataclass(frozen=True, eq=False)
class _Block:
    """Tensors that one evaluation takes: of shape (tensors, *elements), shorter ones filled up with zeros.

    Attributes
    ----------
    index : list of int
        Which tensors of the trajectory.
    nodes : list of Node
        All that is computed of arrays, arguments first; empty where the rule runs as written.
    host : list of Node
        What follows from numbers alone.
    """

    index: list[int]
    made: Trace | None
    nodes: list[Node]
    host: list[Node]
    mask: Values | None
    p: list[Values]
    g: list[Values]
    slots: dict[str, Values]
    counts: dict[str, Values]

    @property
    def rank(self) -> int:
        return self.p[0].ndim - 1


class Simulation:
    """A rule on the gradients of a trajectory.

    Parameters
    ----------
    rule : Rule
        Of its numbers only matters which are None or zero.
    trajectory : Trajectory
        Where each step starts, and its gradients.
    store : callable, optional
        What becomes of a slot's values, by its name, when they are stored.
    """

    def __init__(self, rule: Rule, trajectory: Trajectory, store: Round | None = None) -> None:
        self.rule, self.trajectory, self.store = rule, trajectory, store
        narrow = {x for x in trajectory.dtypes.values() if x in NARROW}
        self.dtype = narrow.pop() if len(narrow) == 1 else "float64"
        self.blocks = list(self._blocks())

    def run(
        self,
        hypers: Mapping[str, Any],
        t: Values,
        *,
        factor: Values | float = 1.0,
        before: Callable[[Values, Callable[[str], Any]], Values] | None = None,
        after: Callable[[Values, Values, Callable[[str], Any]], Values] | None = None,
    ) -> list[Values]:
        """The parameters after each step: for each tensor an array of shape (sets, steps, elements).

        Parameters
        ----------
        hypers : dict of str to array
            Each broadcasts to (sets, steps, tensors); None where off.
        t : array of shape (steps, tensors)
            The number of updates.
        factor : array of shape (sets, steps, tensors)
            What gradients are multiplied by.
        before, after : callable
            What becomes of the parameter before, and after, the rule's update; the last argument gives numbers by name.
        """
        steps, names = self.trajectory.steps, self.trajectory.names
        sets = max((np.shape(x)[0] for x in [*hypers.values(), factor] if np.ndim(x) == 3), default=1)
        whole = (sets, steps, len(names))
        numbers = {k: np.broadcast_to(x, whole) for k, x in hypers.items() if x is not None}
        scale = np.broadcast_to(factor, whole)
        found: list[Values] = [np.empty(0)] * len(names)
        with np.errstate(all="ignore"):
            for block in self.blocks:
                at, ones = block.index, (1,) * block.rank
                own = {k: x[:, :, at].reshape(sets, steps, len(at), *ones) for k, x in numbers.items()}
                own[UPDATES] = t[:, at].reshape(1, steps, len(at), *ones)
                much = scale[:, :, at].reshape(sets, steps, len(at), *ones)
                took = self.trajectory.took[:, at].reshape(steps, len(at), *ones)
                made = self._block(block, own, much, took, before, after)
                for k, i in enumerate(at):
                    size = self.trajectory.params[0][names[i]].size
                    found[i] = made[:, :, k].reshape(sets, steps, -1)[:, :, :size]
        return found

    def _block(
        self, block: _Block, own: dict[str, Values], factor: Values, took: Values, before: Any, after: Any
    ) -> Values:
        sets, steps = factor.shape[:2]
        slots = {name: np.broadcast_to(x, (sets, *x.shape)) for name, x in block.slots.items()}
        out = np.empty((sets, steps, *block.p[0].shape))
        host = self._scalars(block, own)
        for s in range(steps):
            start, g = block.p[s][None], block.g[s][None] * factor[:, s]

            def number(name: str, s: int = s) -> Any:
                return own[name][:, s]

            p = start if before is None else before(start, number)
            if block.made is None:
                new, changed = self._written(block, p, g, slots, {k: x[:, s] for k, x in own.items()})
            else:
                new, changed = _evaluated(block, p, g, slots, {n: x[:, s] for n, x in host.items()})
            if after is not None:
                new = after(start, new, number)
            if self.store is not None:
                changed = {name: self.store(name, x) for name, x in changed.items()}
            slots = {k: np.where(took[s], x, slots[k]) for k, x in changed.items()} if not took[s].all() else changed
            out[:, s] = np.where(took[s], new, start)
        return out

    def _scalars(self, block: _Block, own: dict[str, Values]) -> dict[Node, Values]:
        """What follows from numbers of each step alone."""
        made: dict[Node, Values] = {}
        for n in block.host:
            if n.op == "host":
                made[n] = block.counts[n.data] if n.data.startswith("count:") else own[n.data]
            elif n.op == "const":
                made[n] = np.full((1,) * (block.rank + 3), n.data)
            else:
                made[n] = np.asarray(OPS[n.op].numpy(*(made[a] for a in n.args)))
        steps = self.trajectory.steps
        return {n: np.broadcast_to(x, (x.shape[0], steps, *x.shape[2:])) for n, x in made.items()}

    def _written(
        self, block: _Block, p: Values, g: Values, slots: dict[str, Values], own: dict[str, Values]
    ) -> tuple[Values, dict[str, Values]]:
        """One step of one tensor, by the rule as it is written, one set after the other."""
        sets = g.shape[0]
        xp, done = rule_namespace(array_namespace(g)), []
        off: dict[str, Any] = {name: None for name in hypers(type(self.rule)) if name not in own}
        for i in range(sets):
            h = {k: x[min(i, len(x) - 1)].item() for k, x in own.items()}
            h["t"] = int(h.pop(UPDATES))
            done.append(
                self.rule(
                    xp, p[min(i, len(p) - 1), 0], g[i, 0], {k: x[i, 0] for k, x in slots.items()}, Hypers(**off, **h)
                )
            )
        return np.stack([x for x, _ in done])[:, None], {
            name: np.stack([new[name] for _, new in done])[:, None] for name in slots
        }

    def _blocks(self) -> Iterable[_Block]:
        """The tensors, sorted by the graph that they need; where that sees no rows or columns, all in one block."""
        together: dict[Any, list[tuple[int, Trace, list[Node]]]] = {}
        for i, name in enumerate(self.trajectory.names):
            made = graph_of(self.rule, self.trajectory.params[0][name].shape, self.dtype)
            if made is None:
                yield self._make([i], None, [], flat=False)
                continue
            nodes = reachable(made.outputs.values())
            flat = made.element == "C"
            place = {n: k for k, n in enumerate(nodes)}
            key = tuple((n.op, tuple(place[a] for a in n.args), n.axes, repr(n.data)) for n in nodes)
            together.setdefault((key, None if flat else i), []).append((i, made, nodes))
        for (_, alone), found in together.items():
            yield self._make([i for i, _, _ in found], found[0][1], found[0][2], flat=alone is None)

    def _make(self, index: list[int], made: Trace | None, nodes: list[Node], *, flat: bool) -> _Block:
        names = [self.trajectory.names[i] for i in index]
        first = self.trajectory.params[0]
        longest = max(first[name].size for name in names)

        def laid(x: Values) -> Values:
            """A tensor as the graph sees it."""
            if flat:
                return np.pad(x.ravel(), (0, longest - x.size))
            if made is not None and made.element == "RC":
                return x.reshape(x.shape[0], -1)
            if x.ndim > 4 and made is not None:
                x = x.reshape(x.shape[0], -1, *x.shape[-2:])
            return x.reshape(-1) if x.ndim == 0 else x

        def lay(values: Mapping[str, Values | None]) -> Values:
            given = [(first[name], values[name]) for name in names]
            return np.stack([laid(np.zeros(p.shape) if x is None else x) for p, x in given])

        mask = None
        if flat and len({first[name].size for name in names}) > 1:
            mask = np.stack([laid(np.ones(first[name].shape)) for name in names]).astype(bool)
        fresh = [self.rule.all_slots(array_namespace(first[n]), first[n], self.dtype) for n in names]
        slots: dict[str, Values] = {}
        for slot, axes in (dict.fromkeys(fresh[0]) if made is None else made.slots).items():
            whole_ones = made is None or axes in ("C", made.element)
            laid_out = [laid(x[slot]) if whole_ones else x[slot] for x in fresh]
            if flat:
                laid_out = [np.reshape(x, -1) for x in laid_out]
            if made is not None and not flat:  # with a one for each axis that the slot does not have
                whole = laid(first[names[0]]).shape
                sizes = dict(zip(made.element, whole, strict=True))
                laid_out = [np.reshape(x, [sizes[a] if a in str(axes) else 1 for a in made.element]) for x in laid_out]
            slots[slot] = np.stack(laid_out)
        counts = {}
        for n in nodes:
            if n.op == "host" and n.data.startswith("count:"):
                over = n.data.removeprefix("count:")
                if flat:
                    sizes_of = [first[name].size if over else 1 for name in names]
                else:
                    sizes = dict(zip(made.element, laid(first[names[0]]).shape, strict=True)) if made else {}
                    sizes_of = [int(np.prod([sizes[a] for a in over]))]
                rank = 1 if flat else len(made.element if made else "")
                counts[n.data] = np.reshape(np.array(sizes_of, float), (1, 1, len(names), *(1,) * rank))
        p = [lay(values) for values in self.trajectory.params]
        g = [lay(values) for values in self.trajectory.grads]
        host = [n for n in nodes if n.on_host]
        return _Block(index, made, [n for n in nodes if not n.on_host], host, mask, p, g, slots, counts)


def _evaluated(
    block: _Block, p: Values, g: Values, slots: dict[str, Values], known: dict[Node, Values]
) -> tuple[Values, dict[str, Values]]:
    """One step of a block by the rule's graph."""
    made = block.made
    if made is None:
        raise AssertionError
    given = {"p": p, "g": g, **slots}
    values = dict(known)
    for n in block.nodes:
        if n.op == "input":
            values[n] = given[n.data]
        elif n.op == PRODUCT:
            a, b = (np.swapaxes(values[x], -1, -2) if t else values[x] for x, t in zip(n.args, n.data, strict=False))
            values[n] = np.matmul(a, b)
        elif n.op in REDUCTIONS:
            values[n] = _reduced(block, n, values[n.args[0]])
        else:
            values[n] = OPS[n.op].numpy(*(values[a] for a in n.args))
    kept = {}
    for name, old in slots.items():
        x = values[made.outputs[name]]
        x = x if x.shape == old.shape else np.broadcast_to(x, old.shape)
        kept[name] = rounded(x, made.storage[name]) if made.storage[name] in NARROW else x
    return values[made.outputs["p"]], kept


def _reduced(block: _Block, n: Node, x: Values) -> Values:
    """A reduction over some of an element's axes."""
    element = block.made.element if block.made else ""
    axes = tuple(2 + element.index(a) for a in n.args[0].axes if a not in n.axes)
    where: Any = True if block.mask is None else block.mask[None]
    start = {"sum": 0.0, "max": -np.inf, "min": np.inf}[n.op]
    made: Values = REDUCTIONS[n.op].ufunc.reduce(x, axis=axes, keepdims=True, where=where, initial=start)
    return made
